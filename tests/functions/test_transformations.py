"""What is not in the tables of estimators: inside loops, batches and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.calls import CALLS, MATRIX, WAYS
from tests.helpers import DRAWN, cases, close, leaks_checked, nightly
from tests.tables import ALL, REST_ALL, names

REACHED = CALLS | {name: call for name, call in WAYS.items() if "batched" in name}
OTHERS = [name for name in REACHED if name not in names(ALL + REST_ALL)]

# Most faults show in tracing. These functions are run, too.
SOME = ("function_trace", "inv_quad_logdet", "leaf_traces", "deltashift", "vecchia")
EXECUTED = ("slq_trace", "laplacian", "function_trace", "arnoldi_trace", "leaf_traces")


@pytest.mark.parametrize("name", cases(OTHERS, "laplacian", some=SOME, rest=nightly))
def test_a_loop_in_a_batch_with_a_gradient(name: str) -> None:
    """A while loop around the estimate, and the gradient of a scan, in a batch of scales
    and keys, without leaks. A batch is the loop over what is in it. The zero cotangents
    of standard errors that a scan returns are not symbolic."""

    def step(x: Any, key: Any) -> tuple[Any, Any]:
        estimate = REACHED[name](x * MATRIX, key)
        total = sum(jnp.sum(leaf).real for leaf in jax.tree.leaves(estimate.value))
        return x + total / 1e4, estimate.standard_error

    def looped(x: Any, key: Any) -> Any:
        def body(carry: Any) -> Any:
            return carry[0] + 1, step(carry[1], key)[0]

        return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, x))[1]

    def scanned(x: Any, key: Any) -> Any:
        return jax.lax.scan(lambda x, _: step(x, key), x, None, length=2)[0]

    def all_of_them(x: Any, key: Any) -> Any:
        return looped(x, key), *jax.value_and_grad(scanned)(x, key)

    scales, keys = jnp.array([1.0, 0.5]), jax.random.split(jax.random.key(5), 2)
    batch = jax.jit(jax.vmap(all_of_them))
    with leaks_checked():
        jax.eval_shape(batch, scales, keys)  # leaks are a matter of tracing
    if name not in EXECUTED:
        return
    in_loop, in_scan, gradients = batch(scales, keys)
    value, gradient = jax.jit(jax.value_and_grad(scanned))(scales[1], keys[1])
    for got in (in_loop, in_scan):
        close(got[1], value, max(1e-9, DRAWN))
    close(gradients[1], gradient, max(1e-9, 10 * DRAWN))
