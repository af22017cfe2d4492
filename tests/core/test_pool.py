"""Pools of estimates, and estimates in files."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax import export

import traceax as tx
from tests.helpers import cases, close, contains, over_keys, refused
from tests.matrices import general
from tests.wrappers import PSD, function

KEY = jax.random.key(21)
N = 80
MATRIX = general(N)


def parts(values: Any, errors: Any, counts: Any, degrees: Any = 9.0) -> list[tx.Estimate]:
    return [
        tx.Estimate(jnp.asarray(v, float), jnp.asarray(e, float), c, degrees)
        for v, e, c in zip(values, errors, counts, strict=True)
    ]


def test_weights_are_the_shares_and_errors_add_in_squares() -> None:
    pooled = tx.pool(parts([10.0, 10.6, 10.2], [0.5, 0.4, 0.3], [20, 30, 50]))
    close(pooled.value, (20 * 10.0 + 30 * 10.6 + 50 * 10.2) / 100, 1e-14)
    squares = [(0.2 * 0.5) ** 2, (0.3 * 0.4) ** 2, (0.5 * 0.3) ** 2]
    close(pooled.standard_error, sum(squares) ** 0.5, 1e-14)
    assert pooled.num_matvecs == 100
    welch = sum(squares) ** 2 / (sum(v**2 for v in squares) / 9)
    close(jnp.asarray(pooled.degrees_of_freedom), welch, 1e-6)


@pytest.mark.parametrize("runs", [1, 3])
def test_pools_of_exact_estimates_are_exact(runs: int) -> None:
    """The trace of a stored matrix takes no application."""
    estimate = tx.trace(lx.MatrixLinearOperator(MATRIX), KEY)
    pooled = tx.pool([estimate] * runs)
    assert pooled.num_matvecs == pooled.standard_error == 0
    assert pooled.value == estimate.value


def test_the_larger_of_both_errors_counts() -> None:
    """The spread of the values, or what their standard errors give together."""
    apart = tx.pool(parts([10.0, 20.0, 15.0], [0.1] * 3, [50] * 3))
    spread = np.std([10.0, 20.0, 15.0], ddof=1) / 3**0.5
    close(apart.standard_error, spread, 1e-12)
    together = tx.pool(parts([10.0] * 3, [0.1] * 3, [50] * 3))
    close(together.standard_error, 0.1 / 3**0.5, 1e-14)


def test_the_error_of_runs_of_one_probe_is_their_spread() -> None:
    values = jax.random.normal(KEY, (40,))
    pooled = tx.pool(parts(values, [jnp.inf] * 40, [1] * 40))
    close(pooled.standard_error, jnp.std(values, ddof=1) / 40**0.5, 1e-12)
    alone = tx.pool(parts([3.0], [jnp.inf], [1]))
    assert jnp.isinf(alone.standard_error)


def test_an_unknown_error_is_that_of_the_known_parts() -> None:
    """As if the variance of an application were the same in all parts."""
    pooled = tx.pool(parts([1.0, 1.0], [jnp.inf, 0.1], [1, 1]))
    close(pooled.standard_error, 0.1 / 2**0.5, 1e-14)
    assert pooled.degrees_of_freedom == 9
    pooled = tx.pool(parts([1.0, 1.0, 1.1], [jnp.inf, 0.1, 0.2], [50, 30, 20]))
    known = (0.3 * 0.1) ** 2 + (0.2 * 0.2) ** 2
    close(pooled.standard_error, (known / 0.5) ** 0.5, 1e-14)
    # No less than the distance from the known parts.
    far = tx.pool(parts([5.0, 1.0], [jnp.inf, 0.1], [30, 10]))
    close(far.standard_error, ((0.75 * 4) ** 2 + (0.25 * 0.1) ** 2) ** 0.5, 1e-14)
    # Entry by entry.
    both = tx.pool(parts([[1.0, 1.0]] * 2, [[jnp.inf, 0.1], [0.1, 0.1]], [10, 10]))
    close(both.standard_error, jnp.full(2, 0.1 / 2**0.5), 1e-14)


def test_exact_and_unknown_parts() -> None:
    """An exact part knows the error of the mean; one that cost nothing has no weight."""
    pooled = tx.pool(parts([1.0, 2.0], [jnp.inf, 0.0], [90, 10]))
    close(pooled.standard_error, 0.9, 1e-14)
    assert tx.pool(parts([2.0, 2.0], [0.1, 0.0], [20, 20])).standard_error == 0.05
    assert tx.pool(parts([1.0, 1.0], [jnp.inf, 0.0], [1, 0])).standard_error == jnp.inf
    free = tx.pool(parts([1.0, 3.0, 9.0], [0.1, 0.1, 0.0], [20, 20, 0]))
    close(free.standard_error, 1.0, 1e-14)


def test_errors_that_are_not_numbers_are_seen() -> None:
    for values, errors in (
        ([1.0, 1.0], [jnp.nan, 0.1]),
        ([1.0, 1.0], [jnp.nan, jnp.inf]),
        ([1.0, jnp.nan], [0.1, 0.1]),
        ([1.0, jnp.nan], [0.1, jnp.inf]),
    ):
        pooled = tx.pool(parts(values, errors, [10, 10]))
        assert jnp.isnan(pooled.standard_error)
        assert jnp.isnan(pooled.value) == np.isnan(values).any()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_at_any_scale_in_float32(scale: float) -> None:
    def pooled(scale: Any) -> tx.Estimate:
        runs = [
            tx.Estimate(scale * jnp.float32(v), scale * jnp.float32(e), 10, 9.0)
            for v, e in ((10.0, 0.5), (10.5, 0.4))
        ]
        return tx.pool(runs)

    one, other = pooled(jnp.float32(1)), pooled(jnp.float32(scale))
    close(other.value / scale, one.value, 1e-6)
    close(other.standard_error / scale, one.standard_error, 1e-6)


def run(key: Any, scale: Any = 1.0) -> tx.Estimate:
    return tx.hutchinson_diagonal(function(scale * MATRIX), key, 20)


@pytest.mark.slow
def test_a_batch_is_its_list_also_under_jit_with_its_slope() -> None:
    keys = jax.random.split(KEY, 3)
    batch = jax.jit(lambda keys: tx.pool(jax.vmap(run)(keys)))(keys)
    listed = tx.pool([run(key) for key in keys])
    close(batch.value, listed.value, 1e-10)
    close(batch.standard_error, listed.standard_error, 1e-6)
    assert batch.num_matvecs == listed.num_matvecs == 60

    def loss(scale: Any) -> Any:
        return jnp.sum(tx.pool(jax.lax.map(lambda k: run(k, scale), keys)).value)

    def error(scale: Any) -> Any:
        return jnp.sum(tx.pool([run(k, scale) for k in keys]).standard_error)

    close(jax.jit(jax.grad(loss))(1.0), jnp.sum(batch.value), 1e-10)
    with pytest.raises(Exception, match="standard_error"):
        jax.block_until_ready(jax.grad(error)(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("runs", [2, 8])
def test_pools_are_as_honest_as_their_parts(runs: int) -> None:
    """Intervals of 400 pools of different budgets hold the truth."""

    def pooled(key: Any) -> Any:
        budgets = (4, 10, 20, 40) * (runs // 2) if runs > 2 else (6, 30)
        keys = jax.random.split(key, len(budgets))
        pairs, operator = zip(keys, budgets, strict=True), function(MATRIX)
        each = [tx.hutchinson_trace(operator, key, budget) for key, budget in pairs]
        whole = tx.pool(each[:runs])
        return whole.value, contains(whole, truth)

    truth = jnp.trace(MATRIX)
    value, held = over_keys(pooled, KEY, 400)
    assert jnp.mean(held) > 0.92
    assert abs(jnp.mean(value) - truth) < 5 * jnp.std(value) / 400**0.5


ONE = tx.Estimate(jnp.ones(()), jnp.ones(()), 3)
OTHER = tx.Estimate(jnp.ones(2), jnp.ones(2), 3)


def test_wrong_arguments() -> None:
    words, pool, axis = r"pool\(estimates=.*", tx.pool, r"leading axis.*jax\.vmap"
    refused(TypeError, f"{words}sequence.*got float.*list", pool, 3.0)
    refused(ValueError, f"{words}at least one", pool, [])
    refused(TypeError, f"{words}got float as number 1", pool, [ONE, 3.0])
    refused(ValueError, f"{words}one quantity.*number 1", pool, [ONE, OTHER])
    for alone in (ONE, OTHER):
        refused(ValueError, words + axis, pool, alone)


# Files.

ESTIMATES: dict[str, Callable[[], Any]] = {
    "diagonal": lambda: tx.xdiag(function(MATRIX), KEY, 20),
    "adaptive": lambda: tx.adaptive_trace(function(MATRIX), KEY, rtol=1.0, max_matvecs=20),
    "likelihood": lambda: tx.inv_quad_logdet(
        lx.MatrixLinearOperator(MATRIX @ MATRIX.T, PSD), jnp.ones(N), KEY, 40, shift=1.0
    ),
}


@pytest.mark.parametrize("name", cases(ESTIMATES, "diagonal"))
def test_estimates_are_pickled_serialised_and_exported(name: str) -> None:
    estimate = ESTIMATES[name]()
    assert eqx.tree_equal(pickle.loads(pickle.dumps(estimate)), estimate)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, estimate)
    file.seek(0)
    blank = jax.tree.map(
        lambda x: type(x)() if isinstance(x, int | float) else jnp.zeros_like(x), estimate
    )
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, blank), estimate)
    arrays = jax.tree.map(jnp.asarray, estimate)
    exported = export.export(jax.jit(lambda e: jax.tree.map(lambda x: x + x, e)))(arrays)
    doubled = export.deserialize(exported.serialize()).call(arrays)
    assert type(doubled) is type(estimate)
    assert eqx.tree_equal(doubled, jax.tree.map(lambda x: x + x, arrays))


def test_errors_of_quadrature_do_not_average_out() -> None:
    """They have one sign in all runs, so their mean stays. Errors of sampling shrink."""
    runs = [
        tx.Estimate(jnp.asarray(10.0), jnp.hypot(3.0, gap), 50, quadrature_error=gap)
        for gap in (4.0, 2.0, 0.0, 2.0)
    ]
    pooled = tx.pool(runs)
    close(pooled.quadrature_error, 2.0, 1e-14)
    close(pooled.standard_error, np.hypot(1.5, 2.0), 1e-14)
    stacked = jax.tree.map(lambda *x: jnp.stack(list(map(jnp.asarray, x))), *runs)
    close(tx.pool(stacked).standard_error, pooled.standard_error, 1e-14)


def test_a_quadrature_that_is_not_resolved_stays_visible() -> None:
    """A single step has an unknown error, and a pool of such runs, too."""
    run = lambda key: tx.slq_trace(  # noqa: E731
        function(MATRIX + MATRIX.T), jnp.exp, key, num_probes=8, num_steps=1
    )
    pooled = tx.pool([run(key) for key in jax.random.split(KEY, 3)])
    assert jnp.isinf(pooled.standard_error)
    assert jnp.isinf(pooled.quadrature_error)


FUNCTIONS = ["logdet", "function_trace", "slq_trace", "arnoldi_trace"]


@pytest.mark.parametrize("name", cases(FUNCTIONS, "slq_trace"))
def test_functions_say_which_part_of_their_error_is_quadrature(name: str) -> None:
    """Few steps on a wide spectrum leave most of it, many steps next to nothing."""
    matrix = jnp.diag(jnp.geomspace(1e-4, 1.0, 200))
    operator = function(matrix, PSD)

    def run(steps: int) -> tx.Estimate:
        counts: Any = {"num_probes": 10, "num_steps": steps}
        if name == "logdet":
            return tx.logdet(operator, KEY, **counts)
        return getattr(tx, name)(operator, jnp.log, KEY, **counts)

    few, many = run(3), run(18)
    assert 0 < many.quadrature_error < few.quadrature_error <= few.standard_error
    assert many.quadrature_error < many.standard_error


@pytest.mark.slow
def test_the_quadrature_error_of_a_trace_is_zero_and_none_has_a_slope() -> None:
    matrix = jnp.diag(jnp.geomspace(1e-4, 1.0, 200))
    assert tx.trace(function(matrix, PSD), KEY, 50).quadrature_error == 0
    gap = lambda s: tx.logdet(function(s * matrix, PSD), KEY, 60).quadrature_error  # noqa: E731
    with pytest.raises(Exception, match="standard_error"):
        jax.grad(gap)(1.0)
