"""Identities that hold to rounding, without statistics."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, slow
from tests.matrices import general, hermitian, spectrum
from tests.tables import ALL, DIAGONALS, ESTIMATORS, REST_ALL, Entry, each
from tests.wrappers import PSD, function

KEY = jax.random.key(11)
BUDGET = 50  # one for all: each is a compilation of everything
QUICK = ("xtrace", "xdiag")


def eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


def value_and_gradient(entry: Entry, matrix: Any, budget: int) -> tuple[tx.Estimate, Any]:
    return compiled(entry, budget)(matrix)[::-1]


@functools.cache
def compiled(entry: Entry, budget: int) -> Any:
    """One program for all tests of an estimator at a dtype."""

    def value(matrix: Any) -> tuple[Any, tx.Estimate]:
        estimate = entry.of(function(matrix), KEY, budget)
        return entry.contracted(estimate.value).real, estimate

    return jax.jit(jax.grad(value, has_aux=True))


def dense(entry: Entry, matrix: Any) -> Any:
    return entry.contracted(entry.truth(matrix)).real


def holds(estimate: tx.Estimate, truth: Any, slack: float = 0.0) -> bool:
    """Every entry is within six standard errors."""
    error = np.abs(np.asarray(estimate.value) - np.asarray(truth))
    return bool(np.all(error <= 6 * np.asarray(estimate.standard_error) + slack))


@each(ALL + REST_ALL, "xtrace", "diagonal")
def test_a_budget_of_n_is_exact(entry: Entry) -> None:
    dtype, budget = ("float32", 70) if entry in ALL else ("complex128", 10**6)
    matrix = entry.matrix(70, dtype)
    estimate, gradient = value_and_gradient(entry, matrix, budget)
    truth = entry.truth(matrix)
    close(estimate.value, truth, 100 * eps(dtype), max(70, float(abs(truth).max())))
    close(gradient, jax.grad(lambda m: dense(entry, m))(matrix), 100 * eps(dtype))
    assert jnp.all(estimate.standard_error == 0)
    assert estimate.num_matvecs == 70


@each(ALL + REST_ALL, "hutchinson_trace", *QUICK)
@pytest.mark.parametrize("dtype", ["float32", slow("complex128")])
@pytest.mark.parametrize("name", ["rank5", slow("zero")])
def test_a_rank_below_the_sketch(entry: Entry, dtype: Any, name: str) -> None:
    """The value is exact, the gradient finite, and exact for tangents in the range."""
    matrix = hermitian(spectrum(name, 70), dtype)
    estimate, gradient = value_and_gradient(entry, matrix, BUDGET)
    truth = entry.truth(matrix)
    assert holds(estimate, truth, 1e-30)
    assert jnp.all(jnp.isfinite(gradient))
    assert estimate.standard_error.dtype == jnp.finfo(dtype).dtype
    assert estimate.value.dtype in (dtype, jnp.finfo(dtype).dtype)
    assert gradient.dtype == dtype
    if entry.name.startswith("hutchinson") and name == "rank5":
        return
    close(estimate.value, truth, 200 * eps(dtype), 5)
    assert jnp.all(estimate.standard_error <= 400 * eps(dtype) * 5)
    # The rule is exact for tangents dA = X A + A X*, which rotate and scale the range.
    turn = general(70, dtype)
    tangent = turn @ matrix + matrix @ turn.conj().T
    slope = jnp.sum(gradient * tangent).real
    _, exact = jax.jvp(lambda m: dense(entry, m), (matrix,), (tangent,))
    close(slope, exact, 2000 * eps(dtype), 500)


@each(ALL + REST_ALL, "hutchinson_diagonal", *QUICK)
@pytest.mark.parametrize("dtype", ["float32", slow("complex128")])
def test_a_diagonal_with_exact_zeros(entry: Entry, dtype: Any) -> None:
    matrix = jnp.diag(jnp.asarray((np.arange(70) % 3 == 0) & (np.arange(70) < 30), dtype))
    estimate, gradient = value_and_gradient(entry, matrix, BUDGET)
    if entry.name != "na_hutchpp_trace":
        close(estimate.value, entry.truth(matrix), 300 * eps(dtype), 10)
    assert holds(estimate, entry.truth(matrix), 1e-30)
    assert jnp.all(jnp.isfinite(gradient))


SCALES = [
    slow("float32", "poly", 1e-30),
    ("float32", "rank5", 1e30),
    ("float32", "flat", 2.0**118),  # whose trace is near the largest number
    slow("complex128", "rank5", 1e200),
    slow("complex128", "poly", 1e-200),
]


@each(ALL + REST_ALL, *QUICK)
@pytest.mark.parametrize(("dtype", "name", "factor"), SCALES)
def test_scale(entry: Entry, dtype: Any, name: str, factor: float) -> None:
    """The relative answer, error bar and gradient do not depend on units. (Squares of such
    units are out of range: norms get their square root.)"""
    matrix = hermitian(spectrum(name, 70), dtype)
    unit = factor ** (1 / entry.degree)
    plain, gradient = value_and_gradient(entry, matrix, BUDGET)
    scaled, scaled_gradient = value_and_gradient(entry, matrix * unit, BUDGET)
    close(scaled.value / factor, plain.value, 1e4 * eps(dtype), 5)
    # Of a degenerate sketch only the range is determined, so only the range is compared.
    close(scaled.standard_error / factor, plain.standard_error, 1e4 * eps(dtype), 5)
    if name == "poly":
        # Of Frobenius' a regularised space is used, which rounding changes a little more.
        more = 20 if entry.name == "frobenius_norm_squared" else 1
        slopes = scaled_gradient / unit ** (entry.degree - 1)
        close(slopes, gradient, more * 2e5 * eps(dtype))
    assert jnp.all(jnp.isfinite(scaled_gradient))


BAND = abs(np.subtract.outer(np.arange(70), np.arange(70))) < 2


def of(fn: Any, *how: Any, **more: Any) -> Any:
    return lambda operator, key, budget: fn(operator, *how, key, budget, **more)


def mean_eigenvalue(run: Any) -> Any:
    """The geometric mean, from the sum of the logarithms."""

    def estimate(*call: Any) -> tx.Estimate:
        found = run(*call)
        mean = jnp.exp(found.value / 70)
        return tx.Estimate(mean, mean * found.standard_error / 70, found.num_matvecs)

    return estimate


def likelihood(operator: Any, key: Any, budget: int) -> tx.Estimate:
    y = jnp.ones(70, operator.in_structure().dtype)
    return tx.inv_quad_logdet(operator, y, key, budget).logdet


def lanczos(fn: Any) -> Any:
    return lambda operator, key, _: tx.slq_trace(
        operator, fn, key, num_probes=5, num_steps=9
    )


trace = tx.function_trace
POWERS = [
    Entry("function_trace", of(trace, jnp.square), 6, degree=2),
    Entry("semidefinite", of(trace, jnp.sqrt), 6, True, degree=0.5),
    Entry("colours", of(trace, jnp.square, pattern=BAND), 6, degree=2),
    Entry("slq_trace", lanczos(jnp.sqrt), 6, degree=0.5),
    Entry("slq_trace, semidefinite", mean_eigenvalue(lanczos(jnp.log)), 6, True),
    Entry("logdet", mean_eigenvalue(of(tx.logdet)), 6),
    Entry("logdet, colours", mean_eigenvalue(of(tx.logdet, pattern=BAND)), 6),
    Entry("inv_quad_logdet", mean_eigenvalue(likelihood), 6),
    Entry("arnoldi_trace", of(tx.arnoldi_trace, jnp.square), 6, degree=2),
    Entry("arnoldi_trace, root", of(tx.arnoldi_trace, jnp.sqrt), 6, degree=0.5),
    Entry(
        "arnoldi_trace, colours",
        of(tx.arnoldi_trace, jnp.sqrt, pattern=BAND),
        6,
        degree=0.5,
    ),
    Entry("function_diagonal", of(tx.function_diagonal, jnp.sqrt), 6, degree=0.5),
    Entry("schatten_norm", of(tx.schatten_norm, 1), 13),
]
ASYMMETRIC = ("arnoldi_trace", "schatten_norm")


@each(ALL + REST_ALL + POWERS, "xtrace", "slq_trace")
@pytest.mark.parametrize("exponent", [slow(-60), slow(-40), 40, slow(60)])
def test_units_are_powers_of_two(entry: Entry, exponent: int) -> None:
    """They change no digit, but where a number is rounded to an absolute level."""
    is_general = not entry.semidefinite and (
        entry not in POWERS or entry.name.startswith(ASYMMETRIC)
    )
    matrix = hermitian(np.linspace(1, 3, 70), "float32")
    if is_general:
        matrix = matrix + general(70, "float32") / 8
    unit = 2.0 ** (exponent / max(entry.degree, 1))
    plain, gradient = value_and_gradient(entry, matrix, BUDGET)
    scaled, scaled_gradient = value_and_gradient(entry, matrix * unit, BUDGET)
    # The logarithm of a unit is up to 42, and sums of logarithms are rounded at that level.
    tolerance = (100 + 4 * abs(exponent)) * eps("float32")
    factor = unit**entry.degree
    close(scaled.value / factor, plain.value, tolerance)
    close(scaled.standard_error / factor, plain.standard_error, 1e-3)
    close(scaled_gradient * (unit / factor), gradient, 2 * tolerance)


@each(ALL + DIAGONALS, "hutchpp_trace")
def test_the_gradient_near_the_largest_number(entry: Entry) -> None:
    """The inverse of a number above 2^126 is flushed to zero. (Traces overflow there.)"""
    matrix = hermitian(spectrum("flat", 70), "float32")
    _, gradient = value_and_gradient(entry, matrix, BUDGET)
    _, scaled = value_and_gradient(entry, matrix * 2.0**124, BUDGET)
    close(scaled, gradient, 100 * eps("float32"))


@each(ALL + REST_ALL, *QUICK)
@pytest.mark.parametrize("dtype", ["float16", slow("bfloat16")])
def test_low_precision_is_sketched_in_float32(entry: Entry, dtype: Any) -> None:
    matrix = (hermitian(spectrum("rank5", 70)) * 10).astype(dtype)
    estimate, gradient = value_and_gradient(entry, matrix, BUDGET)
    truth = entry.truth(matrix.astype(float))
    assert estimate.value.dtype == estimate.standard_error.dtype == jnp.float32
    assert gradient.dtype == matrix.dtype
    assert holds(estimate, truth)
    if not entry.name.startswith("hutchinson"):
        assert jnp.all(estimate.standard_error <= 100 * eps(dtype) * float(truth.max()))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [tx.rademacher, tx.sphere])
def test_a_kernel_that_is_semidefinite_up_to_rounding(sampler: Any) -> None:
    """A float32 kernel in float64: its rounding errors are symmetric."""
    points = np.random.default_rng(0).standard_normal((200, 2)).astype(np.float32)
    squared = ((points[:, None] - points) ** 2).sum(-1)
    kernel = jnp.asarray(np.exp(-squared / 2), float)
    operator = function((kernel + kernel.T) / 2, PSD)
    for budget in (50, 150):
        estimate = tx.xnystrace(operator, KEY, budget, sampler=sampler)
        assert abs(estimate.value - 200) <= 4 * estimate.standard_error
        assert estimate.standard_error <= (0.2 if budget == 50 else 1e-3)


SIGNS = 2 * (np.arange(70) % 2) - 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "eigenvalues",
    [np.full(70, -1.0), SIGNS, np.maximum(SIGNS, -0.5)],
    ids=["negative", "traceless", "half as deep"],
)
def test_a_tag_that_is_clearly_wrong_gives_nan(eigenvalues: Any) -> None:
    operator = function(hermitian(eigenvalues), PSD)
    for estimator in (tx.xnystrace, tx.xnysdiag, tx.trace):
        estimate = estimator(operator, KEY, 30)
        assert jnp.all(jnp.isnan(estimate.value) & jnp.isnan(estimate.standard_error))
    adaptive = tx.adaptive_trace(operator, KEY, max_matvecs=69)
    assert jnp.isnan(adaptive.value)
    assert not adaptive.converged


def test_an_operator_that_is_semidefinite_up_to_noise_shows_it_in_the_error() -> None:
    matrix = hermitian(np.maximum(SIGNS, -0.005))
    estimate = tx.xnystrace(function(matrix, PSD), KEY, 30)
    assert abs(estimate.value - jnp.trace(matrix)) <= 2 * estimate.standard_error
    assert estimate.standard_error > 70 * 0.004
    estimate = tx.xnysdiag(function(matrix, PSD), KEY, 30)
    held = abs(estimate.value - jnp.diagonal(matrix)) <= 4 * estimate.standard_error
    assert jnp.mean(held) >= 0.95


@each(ESTIMATORS + DIAGONALS[2:], "xtrace", "xdiag")
def test_integer_operators(entry: Entry) -> None:
    operator = lx.MatrixLinearOperator(2 * jnp.eye(70, dtype=int) + 1, PSD)
    estimate = entry.estimate(operator, KEY, BUDGET)
    assert holds(estimate, entry.truth(operator.matrix), 1e-10)


@each([e for e in ESTIMATORS if e.name != "na_hutchpp_trace"], "xtrace")
@pytest.mark.parametrize("dtype", ["float32", slow("complex128")])
def test_multiples_of_the_identity_are_exact(entry: Entry, dtype: Any) -> None:
    """By resphering, which does not exist for the oblique projections of NA-Hutch++."""
    estimate, _ = value_and_gradient(entry, 3 * jnp.eye(70, dtype=dtype), BUDGET)
    close(estimate.value, 210, 100 * eps(dtype))
