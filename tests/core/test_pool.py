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
from tests.helpers import cases, close, contains, nightly, over_keys, refused, slow
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


def test_pools_of_exact_estimates_are_exact() -> None:
    """The trace of a stored matrix takes no matvec."""
    estimate = tx.trace(lx.MatrixLinearOperator(MATRIX), KEY)
    for pooled in (tx.pool([estimate]), tx.pool([estimate] * 3)):
        assert pooled.num_matvecs == pooled.standard_error == 0
        assert pooled.value == estimate.value


INF, NAN, APART, HALF = np.inf, np.nan, [10.0, 20.0, 15.0], 0.1 / 2**0.5
KNOWN = (((0.3 * 0.1) ** 2 + (0.2 * 0.2) ** 2) / 0.5) ** 0.5
ERRORS: dict[str, tuple[list[Any], list[Any], list[int], Any]] = {
    "the spread is larger": (APART, [0.1] * 3, [50] * 3, np.std(APART, ddof=1) / 3**0.5),
    "the errors are larger": ([10.0] * 3, [0.1] * 3, [50] * 3, 0.1 / 3**0.5),
    "one probe alone": ([3.0], [INF], [1], INF),
    # As if the variance of a matvec were the same in all parts.
    "one is unknown": ([1.0, 1.0], [INF, 0.1], [1, 1], HALF),
    "one of three": ([1.0, 1.0, 1.1], [INF, 0.1, 0.2], [50, 30, 20], KNOWN),
    # No less than the distance from the known parts.
    "far": ([5.0, 1.0], [INF, 0.1], [30, 10], np.hypot(0.75 * 4, 0.25 * 0.1)),
    "by entry": ([[1.0] * 2] * 2, [[INF, 0.1], [0.1] * 2], [10, 10], [HALF] * 2),
    # An exact part knows the error of the mean. One that cost nothing has no weight.
    "exact and unknown": ([1.0, 2.0], [INF, 0.0], [90, 10], 0.9),
    "exact and known": ([2.0, 2.0], [0.1, 0.0], [20, 20], 0.05),
    "free and unknown": ([1.0, 1.0], [INF, 0.0], [1, 0], INF),
    "free and known": ([1.0, 3.0, 9.0], [0.1, 0.1, 0.0], [20, 20, 0], 1.0),
    "no number and known": ([1.0, 1.0], [NAN, 0.1], [10, 10], NAN),
    "no number and unknown": ([1.0, 1.0], [NAN, INF], [10, 10], NAN),
    "a value that is none": ([1.0, NAN], [0.1, 0.1], [10, 10], NAN),
    "such a value and unknown": ([1.0, NAN], [0.1, INF], [10, 10], NAN),
}


def test_errors_that_differ_or_are_unknown() -> None:
    for name, (values, errors, counts, expected) in ERRORS.items():
        pooled = tx.pool(parts(values, errors, counts))
        got = np.asarray(pooled.standard_error)
        np.testing.assert_allclose(got, expected, rtol=1e-14, err_msg=name)
        assert np.isnan(pooled.value).any() == np.isnan(values).any(), name
        if name == "one is unknown":
            assert pooled.degrees_of_freedom == 9
    values = jax.random.normal(KEY, (40,))
    pooled = tx.pool(parts(values, [INF] * 40, [1] * 40))
    close(pooled.standard_error, jnp.std(values, ddof=1) / 40**0.5, 1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_at_any_scale_in_float32(scale: float) -> None:
    def pooled(scale: Any) -> tx.Estimate:
        pairs = scale * jnp.asarray([[10.0, 0.5], [10.5, 0.4]], jnp.float32)
        return tx.pool([tx.Estimate(value, error, 10, 9.0) for value, error in pairs])

    one, other = pooled(jnp.float32(1)), pooled(jnp.float32(scale))
    close(other.value / scale, one.value, 1e-6)
    close(other.standard_error / scale, one.standard_error, 1e-6)


def run(key: Any, scale: Any = 1.0) -> tx.Estimate:
    return tx.hutchinson_diagonal(function(scale * MATRIX), key, 20)


@pytest.mark.slow
def test_a_batch_is_its_list_also_under_jit_with_its_derivative() -> None:
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


@pytest.mark.parametrize("budgets", [nightly((6, 30)), slow((4, 10, 20, 40) * 2)])
def test_pools_are_as_honest_as_their_parts(budgets: tuple[int, ...]) -> None:
    """Intervals of 400 pools of different budgets contain the truth."""
    operator, truth = function(MATRIX), jnp.trace(MATRIX)

    def pooled(key: Any) -> Any:
        runs = zip(jax.random.split(key, len(budgets)), budgets, strict=True)
        whole = tx.pool([tx.hutchinson_trace(operator, *run) for run in runs])
        return whole.value, contains(whole, truth)

    value, inside = over_keys(pooled, KEY, 400)
    assert jnp.mean(inside) > 0.92
    assert abs(jnp.mean(value) - truth) < 5 * jnp.std(value) / 400**0.5


def test_wrong_arguments() -> None:
    one, other = (tx.Estimate(jnp.ones(shape), jnp.ones(shape), 3) for shape in ((), 2))
    words, pool, axis = r"pool\(estimates=.*", tx.pool, r"leading axis.*jax\.vmap"
    refused(TypeError, f"{words}sequence.*got float.*list", pool, 3.0)
    refused(ValueError, f"{words}at least one", pool, [])
    refused(TypeError, f"{words}got float as number 1", pool, [one, 3.0])
    refused(ValueError, f"{words}one quantity.*number 1", pool, [one, other])
    for alone in (one, other):
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

    def run(gap: float) -> tx.Estimate:
        return tx.Estimate(jnp.ones(()), jnp.hypot(3.0, gap), 50, quadrature_error=gap)

    runs = list(map(run, (4.0, 2.0, 0.0, 2.0)))
    pooled = tx.pool(runs)
    close(pooled.quadrature_error, 2.0, 1e-14)
    close(pooled.standard_error, np.hypot(1.5, 2.0), 1e-14)
    stacked = jax.tree.map(lambda *x: jnp.stack(list(map(jnp.asarray, x))), *runs)
    close(tx.pool(stacked).standard_error, pooled.standard_error, 1e-14)


def test_a_quadrature_that_is_not_resolved_stays_visible() -> None:
    """A single step has an unknown error, and a pool of such runs, too."""

    def run(key: Any) -> tx.Estimate:
        operator = function(MATRIX + MATRIX.T)
        return tx.slq_trace(operator, jnp.exp, key, num_probes=8, num_steps=1)

    pooled = tx.pool(over_keys(run, KEY, 3))
    assert jnp.isinf(pooled.standard_error)
    assert jnp.isinf(pooled.quadrature_error)


WIDE = jnp.diag(jnp.geomspace(1e-4, 1.0, 200))
FUNCTIONS = ["logdet", "function_trace", "slq_trace", "arnoldi_trace"]


@pytest.mark.parametrize("name", cases(FUNCTIONS, "slq_trace", rest=nightly))
def test_functions_say_which_part_of_their_error_is_quadrature(name: str) -> None:
    """Few steps on a wide spectrum leave most of it, many steps next to nothing."""

    def run(steps: int) -> tx.Estimate:
        counts: Any = {"num_probes": 10, "num_steps": steps}
        of = () if name == "logdet" else (jnp.log,)
        return getattr(tx, name)(function(WIDE, PSD), *of, KEY, **counts)

    few, many = run(3), run(18)
    assert 0 < many.quadrature_error < few.quadrature_error <= few.standard_error
    assert many.quadrature_error < many.standard_error


@pytest.mark.nightly
def test_the_quadrature_error_of_a_trace_is_zero_and_none_has_a_derivative() -> None:
    assert tx.trace(function(WIDE, PSD), KEY, 50).quadrature_error == 0
    gap = lambda s: tx.logdet(function(s * WIDE, PSD), KEY, 60).quadrature_error  # noqa: E731
    with pytest.raises(Exception, match="standard_error"):
        jax.grad(gap)(1.0)
