"""Identities that hold to rounding, without statistics."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, nightly, slow
from tests.matrices import general, hermitian, spectrum
from tests.tables import ALL, DIAGONALS, ESTIMATORS, REST_ALL, Entry, each
from tests.wrappers import PSD, function

KEY = jax.random.key(11)
BUDGET = 50  # one for all: each is a compilation of everything
EVERY = ALL + REST_ALL


def of_types(entries: list[Entry], *quick: str) -> pytest.MarkDecorator:
    """float32 is quick for the named entries and nightly for others; complex128 is slow."""
    runs = [(pytest.param if e.name in quick else nightly)(e, "float32") for e in entries]
    runs += [slow(entry, "complex128") for entry in entries]
    name = lambda value: getattr(value, "name", None)  # noqa: E731
    return pytest.mark.parametrize(("entry", "dtype"), runs, ids=name)


def eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


def value_and_gradient(entry: Entry, matrix: Any, budget: int = BUDGET) -> Any:
    return compiled(entry, budget)(matrix)[::-1]


@functools.cache
def compiled(entry: Entry, budget: int) -> Any:
    """One program for all tests of an estimator at a dtype."""

    def value(matrix: Any) -> tuple[Any, tx.Estimate]:
        estimate = entry.of(function(matrix), KEY, budget)
        return entry.contracted(estimate.value).real, estimate

    return jax.jit(jax.grad(value, has_aux=True))


def dense(entry: Entry) -> Any:
    return lambda matrix: entry.contracted(entry.truth(matrix)).real


def is_within(estimate: tx.Estimate, truth: Any, slack: float = 0.0) -> bool:
    """Every entry is within six standard errors."""
    error = np.abs(np.asarray(estimate.value) - np.asarray(truth))
    return bool(np.all(error <= 6 * np.asarray(estimate.standard_error) + slack))


@each(EVERY, "xtrace")
def test_a_budget_of_n_is_exact(entry: Entry) -> None:
    dtype, budget = ("float32", 70) if entry in ALL else ("complex128", 10**6)
    matrix = entry.matrix(70, dtype)
    estimate, gradient = value_and_gradient(entry, matrix, budget)
    truth = entry.truth(matrix)
    close(estimate.value, truth, 100 * eps(dtype), max(70, float(abs(truth).max())))
    close(gradient, jax.grad(dense(entry))(matrix), 100 * eps(dtype))
    assert jnp.all(estimate.standard_error == 0)
    assert estimate.num_matvecs == 70


@of_types(EVERY, "hutchinson_trace", "xtrace", "xdiag")
def test_a_rank_below_the_sketch(entry: Entry, dtype: Any) -> None:
    """The value is exact, the gradient finite, and exact for tangents in the range."""
    for name in ("rank5", "zero"):
        matrix = hermitian(spectrum(name, 70), dtype)
        estimate, gradient = value_and_gradient(entry, matrix)
        truth = entry.truth(matrix)
        assert is_within(estimate, truth, 1e-30)
        assert jnp.all(jnp.isfinite(gradient))
        assert estimate.standard_error.dtype == jnp.finfo(dtype).dtype
        assert estimate.value.dtype in (dtype, jnp.finfo(dtype).dtype)
        assert gradient.dtype == dtype
        if entry.name.startswith("hutchinson") and name == "rank5":
            continue
        close(estimate.value, truth, 200 * eps(dtype), 5)
        assert jnp.all(estimate.standard_error <= 400 * eps(dtype) * 5)
        # The rule is exact for tangents dA = X A + A X*, which rotate and scale the range.
        turn = general(70, dtype)
        tangent = turn @ matrix + matrix @ turn.conj().T
        derivative = jnp.sum(gradient * tangent).real
        _, exact = jax.jvp(dense(entry), (matrix,), (tangent,))
        close(derivative, exact, 2000 * eps(dtype), 500)


@of_types(EVERY, "hutchinson_diagonal", "xtrace", "xdiag")
def test_a_diagonal_with_exact_zeros(entry: Entry, dtype: Any) -> None:
    matrix = jnp.diag(jnp.asarray((np.arange(70) % 3 == 0) & (np.arange(70) < 30), dtype))
    estimate, gradient = value_and_gradient(entry, matrix)
    if entry.name != "na_hutchpp_trace":
        close(estimate.value, entry.truth(matrix), 300 * eps(dtype), 10)
    assert is_within(estimate, entry.truth(matrix), 1e-30)
    assert jnp.all(jnp.isfinite(gradient))


SCALES: dict[str, list[tuple[str, float]]] = {
    # 2^118: the trace is near the largest number.
    "float32": [("poly", 1e-30), ("rank5", 1e30), ("flat", 2.0**118)],
    "complex128": [("rank5", 1e200), ("poly", 1e-200)],
}


@of_types(EVERY, "xtrace", "xdiag")
def test_scale(entry: Entry, dtype: Any) -> None:
    """The relative answer, error bar and gradient do not depend on units. (Squares of such
    units are out of range: norms get their square root.)"""
    for name, factor in SCALES[dtype]:
        matrix = hermitian(spectrum(name, 70), dtype)
        unit = factor ** (1 / entry.degree)
        plain, gradient = value_and_gradient(entry, matrix)
        scaled, scaled_gradient = value_and_gradient(entry, matrix * unit)
        close(scaled.value / factor, plain.value, 1e4 * eps(dtype), 5)
        # Of a degenerate sketch only the range is determined, so only that is compared.
        close(scaled.standard_error / factor, plain.standard_error, 1e4 * eps(dtype), 5)
        if name == "poly":
            # Frobenius' regularised space changes a little more by rounding.
            more = 20 if entry.name == "frobenius_norm_squared" else 1
            rescaled = scaled_gradient / unit ** (entry.degree - 1)
            close(rescaled, gradient, more * 2e5 * eps(dtype))
        assert jnp.all(jnp.isfinite(scaled_gradient))


BAND = np.eye(70) + np.eye(70, k=1) + np.eye(70, k=-1) > 0


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
    how: Any = {"num_probes": 5, "num_steps": 9}
    return lambda operator, key, _: tx.slq_trace(operator, fn, key, **how)


trace, arnoldi, root = tx.function_trace, tx.arnoldi_trace, jnp.sqrt
POWERS = [
    Entry("function_trace", of(trace, jnp.square), 6, degree=2),
    Entry("semidefinite", of(trace, root), 6, True, degree=0.5),
    Entry("colours", of(trace, jnp.square, pattern=BAND), 6, degree=2),
    Entry("slq_trace", lanczos(root), 6, degree=0.5),
    Entry("slq_trace, semidefinite", mean_eigenvalue(lanczos(jnp.log)), 6, True),
    Entry("logdet", mean_eigenvalue(of(tx.logdet)), 6),
    Entry("logdet, colours", mean_eigenvalue(of(tx.logdet, pattern=BAND)), 6),
    Entry("inv_quad_logdet", mean_eigenvalue(likelihood), 6),
    Entry("arnoldi_trace", of(arnoldi, jnp.square), 6, degree=2),
    Entry("arnoldi_trace, root", of(arnoldi, root), 6, degree=0.5),
    Entry("arnoldi_trace, colours", of(arnoldi, root, pattern=BAND), 6, degree=0.5),
    Entry("function_diagonal", of(tx.function_diagonal, root), 6, degree=0.5),
    Entry("schatten_norm", of(tx.schatten_norm, 1), 13),
]
ASYMMETRIC = ("arnoldi_trace", "schatten_norm")
FURTHER = ("semidefinite", "slq_trace, semidefinite", "logdet, colours", "arnoldi_trace")


def rest(entry: Entry) -> Any:
    return (nightly if entry.name in FURTHER else slow)(entry)


@each(EVERY + POWERS, "xtrace", "slq_trace", rest=rest)
def test_units_are_powers_of_two(entry: Entry) -> None:
    """They change no digit, unless a number is rounded to an absolute level."""
    matrix = hermitian(np.linspace(1, 3, 70), "float32")
    may_be_general = entry not in POWERS or entry.name.startswith(ASYMMETRIC)
    if may_be_general and not entry.semidefinite:
        matrix = matrix + general(70, "float32") / 8
    plain, gradient = value_and_gradient(entry, matrix)
    for exponent in (-60, -40, 40, 60):
        unit = 2.0 ** (exponent / max(entry.degree, 1))
        scaled, scaled_gradient = value_and_gradient(entry, matrix * unit)
        # The logarithm of a unit is up to 42: sums of logarithms are rounded at that level.
        tolerance = (100 + 4 * abs(exponent)) * eps("float32")
        factor = unit**entry.degree
        close(scaled.value / factor, plain.value, tolerance)
        close(scaled.standard_error / factor, plain.standard_error, 1e-3)
        close(scaled_gradient * (unit / factor), gradient, 2 * tolerance)


@each(ALL + DIAGONALS, "hutchpp_trace")
def test_the_gradient_near_the_largest_number(entry: Entry) -> None:
    """The inverse of a number above 2^126 is flushed to zero. (Traces overflow there.)"""
    matrix = hermitian(spectrum("flat", 70), "float32")
    gradient, scaled = (value_and_gradient(entry, matrix * f)[1] for f in (1, 2.0**124))
    close(scaled, gradient, 100 * eps("float32"))


@each(EVERY, "xtrace", "xdiag")
def test_low_precision_is_sketched_in_float32(entry: Entry) -> None:
    dtype = "float16" if entry.name.startswith("x") else "bfloat16"
    matrix = (hermitian(spectrum("rank5", 70)) * 10).astype(dtype)
    estimate, gradient = value_and_gradient(entry, matrix)
    truth = entry.truth(matrix.astype(float))
    assert estimate.value.dtype == estimate.standard_error.dtype == jnp.float32
    assert gradient.dtype == matrix.dtype
    assert is_within(estimate, truth)
    if not entry.name.startswith("hutchinson"):
        assert jnp.all(estimate.standard_error <= 100 * eps(dtype) * float(truth.max()))


@pytest.mark.parametrize("sampler", [nightly(tx.rademacher), slow(tx.sphere)])
def test_a_kernel_that_is_semidefinite_up_to_rounding(sampler: Any) -> None:
    """A float32 kernel in float64: its rounding errors are symmetric."""
    points = np.random.default_rng(0).standard_normal((200, 2)).astype(np.float32)
    squared = ((points[:, None] - points) ** 2).sum(-1)
    kernel = jnp.asarray(np.exp(-squared / 2), float)
    operator = function((kernel + kernel.T) / 2, PSD)
    for budget, most in ((50, 0.2), (150, 1e-3)):
        estimate = tx.xnystrace(operator, KEY, budget, sampler=sampler)
        assert abs(estimate.value - 200) <= 4 * estimate.standard_error
        assert estimate.standard_error <= most


SIGNS = 2 * (np.arange(70) % 2) - 1.0


@pytest.mark.slow
def test_a_tag_that_is_clearly_wrong_gives_nan() -> None:
    """Negative, traceless, and half as deep."""
    for eigenvalues in (np.full(70, -1.0), SIGNS, np.maximum(SIGNS, -0.5)):
        operator = function(hermitian(eigenvalues), PSD)
        for estimator in (tx.xnystrace, tx.xnysdiag, tx.trace):
            found = estimator(operator, KEY, 30)
            assert jnp.all(jnp.isnan(found.value) & jnp.isnan(found.standard_error))
        adaptive = tx.adaptive_trace(operator, KEY, max_matvecs=69)
        assert jnp.isnan(adaptive.value)
        assert not adaptive.converged


def test_an_operator_that_is_semidefinite_up_to_noise_shows_it_in_the_error() -> None:
    matrix = hermitian(np.maximum(SIGNS, -0.005))
    estimate = tx.xnystrace(function(matrix, PSD), KEY, 30)
    assert abs(estimate.value - jnp.trace(matrix)) <= 2 * estimate.standard_error
    assert estimate.standard_error > 70 * 0.004
    estimate = tx.xnysdiag(function(matrix, PSD), KEY, 30)
    covered = abs(estimate.value - jnp.diagonal(matrix)) <= 4 * estimate.standard_error
    assert jnp.mean(covered) >= 0.95


@each(ESTIMATORS + DIAGONALS[2:], "xtrace", "xdiag", rest=nightly)
def test_integer_operators(entry: Entry) -> None:
    operator = lx.MatrixLinearOperator(2 * jnp.eye(70, dtype=int) + 1, PSD)
    estimate = entry.estimate(operator, KEY, BUDGET)
    assert is_within(estimate, entry.truth(operator.matrix), 1e-10)


@of_types([e for e in ESTIMATORS if e.name != "na_hutchpp_trace"], "xtrace")
def test_multiples_of_the_identity_are_exact(entry: Entry, dtype: Any) -> None:
    """By resphering, which does not exist for the oblique projections of NA-Hutch++."""
    estimate, _ = value_and_gradient(entry, 3 * jnp.eye(70, dtype=dtype))
    close(estimate.value, 210, 100 * eps(dtype))
