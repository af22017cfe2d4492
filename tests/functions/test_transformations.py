"""What the tables of estimators do not hold, inside loops, batches and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.calls import CALLS, MATRIX
from tests.helpers import ALL, DRAWN, REST_ALL, cases, close, leaks_checked, names

OTHERS = [name for name in CALLS if name not in names(ALL + REST_ALL)]


@pytest.mark.parametrize("name", cases(OTHERS, "slq_trace", "laplacian"))
def test_a_loop_in_a_batch_with_a_gradient(name: str) -> None:
    """A while loop around the estimate, and the gradient of a scan, in a batch of scales
    and keys, without leaks. A batch is the loop over what is in it."""

    def step(x: Any, key: Any) -> Any:
        values = jax.tree.leaves(CALLS[name](x * MATRIX, key).value)
        return x + sum(jnp.sum(value).real for value in values) / 1e4

    def looped(x: Any, key: Any) -> Any:
        def body(carry: Any) -> Any:
            return carry[0] + 1, step(carry[1], key)

        return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, x))[1]

    def scanned(x: Any, key: Any) -> Any:
        return jax.lax.scan(lambda x, _: (step(x, key), None), x, None, length=2)[0]

    def all_of_them(x: Any, key: Any) -> Any:
        return looped(x, key), *jax.value_and_grad(scanned)(x, key)

    scales, keys = jnp.array([1.0, 0.5]), jax.random.split(jax.random.key(5), 2)
    batch = jax.jit(jax.vmap(all_of_them))
    with leaks_checked():
        jax.eval_shape(batch, scales, keys)  # leaks are a matter of tracing
    in_loop, in_scan, slopes = batch(scales, keys)
    value, slope = jax.jit(jax.value_and_grad(scanned))(scales[1], keys[1])
    for got in (in_loop, in_scan):
        close(got[1], value, max(1e-10, DRAWN))
    close(slopes[1], slope, max(1e-9, 10 * DRAWN))
