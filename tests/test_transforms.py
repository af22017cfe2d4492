"""Estimates inside the transformations and loops that users put a loss into."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
import pytest

import traceax as tx
from tests.helpers import DRAWN, close, nightly, python, slow
from tests.tables import ESTIMATORS, REST, Entry, each, flatten
from tests.wrappers import PSD, function

KEY = jax.random.key(7)
N, BUDGET = 30, 12


def estimate(entry: Entry, matrix: Any, key: Any = KEY) -> tx.Estimate:
    return entry.of(function(matrix), key, BUDGET)


@each([ESTIMATORS[-1], REST[2]], some=("xdiag",), rest=nightly)
def test_vmap_is_a_loop(entry: Entry) -> None:
    """Also through the transformations of Equinox and `jax.checkpoint`."""
    matrices = jnp.stack([entry.matrix(N, seed=seed) for seed in range(2)])
    keys = jax.random.split(KEY, 2)

    def loss(matrix: Any, key: Any) -> Any:
        return entry.contracted(estimate(entry, matrix, key).value)

    gradient = eqx.filter_value_and_grad(jax.checkpoint(loss))
    batched = eqx.filter_jit(eqx.filter_vmap(gradient))(matrices, keys)
    for i in range(2):
        single = jax.value_and_grad(loss)(matrices[i], keys[i])
        close(batched[0][i], single[0], max(1e-12, DRAWN))
        close(batched[1][i], single[1], max(1e-11, 10 * DRAWN))
    estimates = jax.vmap(lambda key: estimate(entry, matrices[0], key))(keys)
    shape = (2, *jax.eval_shape(entry.truth, matrices[0]).shape)
    assert estimates.value.shape == estimates.standard_error.shape == shape
    one = estimate(entry, matrices[0], keys[1]).interval()
    close(estimates.interval()[0][1], one[0], max(1e-12, 10 * DRAWN))
    spent = estimate(entry, matrices[0]).num_matvecs
    np.testing.assert_array_equal(estimates.num_matvecs, [spent, spent])


@pytest.mark.slow
def test_pytrees_of_mixed_precision() -> None:
    """A space of a scalar, a matrix and a vector, in float32 and float64."""
    structure = {
        "bias": jax.ShapeDtypeStruct((), jnp.float32),
        "weight": jax.ShapeDtypeStruct((3, 4), jnp.float64),
        "scale": (jax.ShapeDtypeStruct((57,), jnp.float32),),
    }

    def sheared(v: Any) -> Any:
        total = sum(jnp.sum(leaf.astype(float)) for leaf in jax.tree.leaves(v))
        return jax.tree.map(lambda leaf: 3 * leaf + jnp.asarray(total, leaf.dtype), v)

    operator = lx.FunctionLinearOperator(sheared, structure, [lx.symmetric_tag, PSD])
    for entry in (ESTIMATORS[0], *ESTIMATORS[-2:]):
        got = entry.estimate(operator, KEY, 40)
        assert got.value.dtype == jnp.float64
        assert abs(got.value - 280) <= max(6 * float(got.standard_error), 1e-4)
    for entry in (REST[2], REST[3], REST[4]):
        got = entry.estimate(operator, KEY, 40)
        truth = entry.truth(3 * jnp.eye(70) + 1)
        for values in (got.value, got.standard_error):
            assert eqx.tree_equal(jax.eval_shape(lambda: values), structure) is True  # noqa: B023
        error = jnp.abs(flatten(got.value) - truth)
        assert jnp.mean(error <= 3 * flatten(got.standard_error)) > 0.95


def test_training_with_optax() -> None:
    """An estimator as the loss: drive the trace of a matrix square to zero, in scan."""
    base = ESTIMATORS[-1].matrix(N) / 10
    optimiser = optax.adam(0.1)

    def loss(theta: Any, key: Any) -> Any:
        rest = base - theta * jnp.eye(N)
        return estimate(ESTIMATORS[-1], rest.T @ rest, key).value

    def step(carry: Any, key: Any) -> Any:
        theta, state = carry
        value, gradient = jax.value_and_grad(loss)(theta, key)
        with jax.numpy_dtype_promotion("standard"):  # as optax needs
            updates, state = optimiser.update(gradient, state)
        return (optax.apply_updates(theta, updates), state), value

    start = jnp.array(2.0)
    start = start, optimiser.init(start)
    keys = jax.random.split(KEY, 150)
    (theta, _), values = jax.jit(lambda c: jax.lax.scan(step, c, keys))(start)
    # tr (B - t I)^T (B - t I) is least where t is the mean of B's diagonal.
    assert abs(theta - jnp.trace(base) / N) < 0.1
    assert values[-20:].mean() < values[:20].mean()


# Programs with which jax 0.10 hung within ten runs, because two batches of LAPACK calls ran
# at once. They need a process with the compiler's own settings.
HANGS = {
    "pairs": """
import gc, jax, lineax as lx, traceax as tx
first, second = jax.random.normal(jax.random.key(0), (2, 200, 200))
keys = jax.random.split(jax.random.key(1), 20)
for name in ("xtrace", "xdiag", "hutchpp_trace", "row_norms_squared"):
    def one(a, key):
        structure = jax.ShapeDtypeStruct((200,), a.dtype)
        operator = lx.FunctionLinearOperator(lambda v: a @ v, structure)
        return getattr(tx, name)(operator, key, 30).value.sum()
    def both(key):
        return one(first, jax.random.fold_in(key, 1)) - one(second, key)
    run = jax.jit(jax.vmap(both))
    for i in range(100):
        run(keys).block_until_ready()
        gc.collect() if i % 50 == 0 else None
mapped = jax.jit(lambda keys: jax.lax.map(both, keys))
mapped(keys).block_until_ready()
print("finished")
""",
    "threads": """
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, lineax as lx, traceax as tx
a = jax.random.normal(jax.random.key(0), (200, 200))
a = a @ a.T / 200 + jnp.eye(200)
keys = jax.random.split(jax.random.key(1), 20)
def value(a, key):
    operator = lx.MatrixLinearOperator(a, lx.positive_semidefinite_tag)
    return tx.xnystrace(operator, key, 30).value
run = jax.jit(jax.vmap(jax.value_and_grad(value), (None, 0)))
def work(seed):
    for _ in range(10):
        jax.block_until_ready(run(a, keys))
    return seed
with ThreadPoolExecutor(8) as pool:
    assert list(pool.map(work, range(8))) == list(range(8))
print("finished")
""",
}


@pytest.mark.parametrize("name", [slow("pairs"), nightly("threads")])
def test_batches_of_lapack_calls_do_not_hang(name: str) -> None:
    assert python("-c", HANGS[name], XLA_FLAGS="") == "finished\n"
