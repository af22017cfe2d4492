"""Identities that hold to rounding, with no statistics, and exact expectations."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import (
    ALL,
    ESTIMATORS,
    PSD,
    Entry,
    as_semidefinite,
    close,
    function,
    general,
    hermitian,
    spectrum,
    suitable,
)

KEY = jax.random.key(11)
every_estimator = pytest.mark.parametrize("entry", ALL, ids=lambda e: e.name)
every_dtype = pytest.mark.parametrize(
    "dtype", ["float32", "float64", "complex64", "complex128"]
)


def eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


def value_and_gradient(entry: Entry, matrix: Any, budget: int) -> tuple[tx.Estimate, Any]:
    def value(matrix: Any) -> tuple[Any, tx.Estimate]:
        estimate = entry.estimate(as_semidefinite(entry, function(matrix)), KEY, budget)
        return estimate.value.real, estimate

    gradient, estimate = jax.grad(value, has_aux=True)(matrix)
    return estimate, gradient


@every_estimator
@every_dtype
@pytest.mark.parametrize("budget", [70, 10**6])
def test_a_budget_of_n_is_exact(entry: Entry, dtype: Any, budget: int) -> None:
    matrix = suitable(entry, 70, dtype)
    estimate, gradient = value_and_gradient(entry, matrix, budget)
    close(estimate.value, jnp.trace(matrix), 100 * eps(dtype), 70)
    close(gradient, jnp.eye(70), 100 * eps(dtype))
    assert estimate.standard_error == 0
    assert estimate.num_matvecs == 70


@every_estimator
@every_dtype
@pytest.mark.parametrize("name", ["rank5", "zero"])
def test_a_rank_below_the_sketch(entry: Entry, dtype: Any, name: str) -> None:
    """Value right, gradient finite and right for tangents in the range, error honest."""
    matrix = hermitian(spectrum(name, 70), dtype)
    estimate, gradient = value_and_gradient(entry, matrix, 50)
    if entry.name == "hutchinson_trace" and name == "rank5":
        low, high = np.asarray(estimate.value.real) + 6 * np.array([-1, 1]) * float(
            estimate.standard_error
        )
        assert low < 5 < high
    else:
        close(estimate.value, jnp.trace(matrix), 200 * eps(dtype), 5)
        assert (
            abs(estimate.value - jnp.trace(matrix)) <= 6 * estimate.standard_error + 1e-30
        )
        assert estimate.standard_error <= 200 * eps(dtype) * 5
        # <dA, W> for dA = X A + A X*, which rotates and scales what A has, is exact.
        turn = general(70, dtype)
        tangent = turn @ matrix + matrix @ turn.conj().T
        slope = jnp.sum(gradient * tangent).real
        close(slope, jnp.trace(tangent).real, 2000 * eps(dtype), 500)
    assert jnp.all(jnp.isfinite(gradient))


@every_estimator
@every_dtype
def test_a_diagonal_with_exact_zeros(entry: Entry, dtype: Any) -> None:
    matrix = jnp.diag(jnp.asarray(np.arange(70) % 3 == 0, dtype) * (np.arange(70) < 30))
    estimate, gradient = value_and_gradient(entry, matrix, 45)
    exact = entry.name in (
        "hutchinson_trace",
        "trace",
        "xtrace",
        "xnystrace",
        "hutchpp_trace",
    )
    allowed = 300 * eps(dtype) * 10 if exact else 6 * float(estimate.standard_error)
    assert abs(estimate.value - 10) <= allowed
    assert jnp.all(jnp.isfinite(gradient))


@every_estimator
@pytest.mark.parametrize(
    ("dtype", "name", "factor"),
    [
        ("float32", "poly", 1e-30),
        ("float32", "rank5", 1e30),
        ("complex64", "rank5", 1e-30),
        ("complex64", "poly", 1e30),
        ("float64", "rank5", 1e-200),
        ("float64", "poly", 1e200),
        ("complex128", "poly", 1e-200),
        ("complex128", "rank5", 1e200),
    ],
)
def test_scale(entry: Entry, dtype: Any, name: str, factor: float) -> None:
    """The relative answer, error bar and gradient do not depend on units."""
    matrix = hermitian(spectrum(name, 70), dtype)
    plain, gradient = value_and_gradient(entry, matrix, 20)
    scaled, scaled_gradient = value_and_gradient(entry, matrix * factor, 20)
    close(scaled.value / factor, plain.value, 1e4 * eps(dtype), 5)
    # Of a degenerate sketch only the range is determined, so only the range is compared.
    close(scaled.standard_error / factor, plain.standard_error, 1e4 * eps(dtype), 5)
    if name == "poly":
        close(scaled_gradient, gradient, 2e5 * eps(dtype))
    assert jnp.all(jnp.isfinite(scaled_gradient))


@every_estimator
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_is_sketched_in_float32(entry: Entry, dtype: Any) -> None:
    matrix = (hermitian(spectrum("rank5", 70)) * 10).astype(dtype)
    estimate, gradient = value_and_gradient(entry, matrix, 50)
    truth = float(jnp.trace(matrix.astype(float)))
    assert estimate.value.dtype == estimate.standard_error.dtype == jnp.float32
    assert gradient.dtype == matrix.dtype
    assert abs(estimate.value - truth) <= 6 * estimate.standard_error
    if entry.name != "hutchinson_trace":
        assert estimate.standard_error <= 100 * eps(dtype) * truth


@every_estimator
def test_float32_stays_float32_while_x64_is_on(entry: Entry) -> None:
    estimate, gradient = value_and_gradient(entry, suitable(entry, 70, "float32"), 20)
    assert estimate.value.dtype == estimate.standard_error.dtype == jnp.float32
    assert gradient.dtype == jnp.float32


@pytest.mark.parametrize("sampler", [tx.rademacher, tx.sphere])
def test_a_kernel_that_is_semidefinite_up_to_rounding(sampler: Any) -> None:
    """A float32 kernel held in float64: its noise is symmetric, so no skew betrays it."""
    points = np.random.default_rng(0).standard_normal((200, 2)).astype(np.float32)
    squared = ((points[:, None] - points) ** 2).sum(-1)
    kernel = jnp.asarray(np.exp(-squared / 2), float)
    operator = lx.TaggedLinearOperator(function((kernel + kernel.T) / 2), PSD)
    for budget in (50, 100, 150):
        estimate = tx.xnystrace(operator, KEY, budget, sampler=sampler)
        assert abs(estimate.value - 200) <= 4 * estimate.standard_error
        assert estimate.standard_error <= (0.2 if budget == 50 else 1e-3)


def test_an_operator_that_is_not_semidefinite_shows_in_the_error() -> None:
    indefinite = hermitian(np.where(np.arange(70) % 2, 1.0, -0.5))
    estimate = tx.xnystrace(lx.TaggedLinearOperator(function(indefinite), PSD), KEY, 30)
    assert abs(estimate.value - 17.5) <= 2 * estimate.standard_error


@pytest.mark.parametrize("entry", ESTIMATORS, ids=lambda e: e.name)
def test_traces_near_the_largest_number_do_not_overflow(entry: Entry) -> None:
    matrix = 1e36 * (jnp.eye(70, dtype="float32") + 0.1 * general(70, "float32") * 0.1)
    matrix = (matrix + matrix.T) / 2
    estimate, _ = value_and_gradient(entry, matrix, 40)
    assert abs(estimate.value - jnp.trace(matrix)) <= 6 * estimate.standard_error


@every_estimator
def test_integer_operators(entry: Entry) -> None:
    operator = lx.MatrixLinearOperator(2 * jnp.eye(70, dtype=int) + 1, PSD)
    estimate = entry.estimate(operator, KEY, 20)
    assert abs(estimate.value - 210) <= 6 * estimate.standard_error + 1e-10


def test_rademacher_probes_read_a_diagonal_exactly() -> None:
    for dtype in (float, complex):
        matrix = jnp.diag(jnp.asarray(general(70, dtype)[0]))
        estimate, _ = value_and_gradient(ESTIMATORS[0], matrix, 1)
        close(estimate.value, jnp.trace(matrix), 1e-14)
        assert estimate.standard_error == jnp.inf


@pytest.mark.parametrize("entry", ESTIMATORS, ids=lambda e: e.name)
@every_dtype
def test_resphered_estimators_are_exact_on_multiples_of_the_identity(
    entry: Entry, dtype: Any
) -> None:
    if entry.name == "na_hutchpp_trace":
        return  # oblique projections cannot be resphered
    estimate, _ = value_and_gradient(entry, 3 * jnp.eye(70, dtype=dtype), 20)
    close(estimate.value, 210, 100 * eps(dtype))


@pytest.mark.parametrize("entry", ESTIMATORS, ids=lambda e: e.name)
@pytest.mark.parametrize("dtype", [float, complex])
def test_probes_that_are_a_basis_give_the_trace(entry: Entry, dtype: Any) -> None:
    """sqrt(n) times n orthonormal probes make the mean of quadratic forms the trace."""
    if entry.name != "hutchinson_trace":
        return
    n = 12
    matrix = general(n, dtype)
    padded = jnp.zeros((n + 1, n + 1), dtype).at[:n, :n].set(matrix)
    basis = np.sqrt(n) * jnp.eye(n, n + 1, dtype=dtype)
    estimate = entry.estimate(function(padded), KEY, n, sampler=lambda *_: basis)
    close(estimate.value, jnp.trace(matrix), 1e-13, n)


# The leave-one-out estimators against loops that really leave one out.


def projector(block: np.ndarray) -> np.ndarray:
    basis, _ = np.linalg.qr(block)
    return basis @ basis.conj().T


def xtrace_by_loop(matrix: np.ndarray, probes: np.ndarray, resphere: bool) -> np.ndarray:
    n, k = probes.shape
    samples = []
    for i in range(k):
        others = np.delete(probes, i, axis=1)
        p = projector(matrix @ others) if k > 1 else np.zeros((n, n))
        mu = probes[:, i] - p @ probes[:, i]
        scale = (n - k + 1) / np.vdot(mu, mu).real if resphere else 1.0
        samples.append(np.trace(p @ matrix @ p) + scale * np.vdot(mu, matrix @ mu))
    return np.array(samples)


def xnystrace_by_loop(matrix: np.ndarray, probes: np.ndarray, resphere: bool) -> np.ndarray:
    n, k = probes.shape
    samples = []
    for i in range(k):
        others = np.delete(probes, i, axis=1)
        sketch = matrix @ others
        core = np.linalg.pinv(others.conj().T @ sketch, hermitian=True)
        low = sketch @ core @ sketch.conj().T
        w = probes[:, i]
        mu = w - projector(others) @ w if k > 1 else w
        scale = (n - k + 1) / np.vdot(mu, mu).real if resphere else 1.0
        samples.append((np.trace(low) + scale * np.vdot(w, (matrix - low) @ w)).real)
    return np.array(samples)


Loop = Callable[[np.ndarray, np.ndarray, bool], np.ndarray]
LOOPS: dict[str, tuple[Callable[..., tx.Estimate], Loop, int]] = {
    "xtrace": (tx.xtrace, xtrace_by_loop, 2),
    "xnystrace": (tx.xnystrace, xnystrace_by_loop, 1),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("sampler", [tx.sphere, tx.normal, tx.rademacher])
@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_leave_one_out(name: str, dtype: Any, sampler: Any, k: int) -> None:
    """Estimates equal those of the loop; the error is the jackknife's, recomputed from
    scratch without each probe in turn."""
    estimate, loop, cost = LOOPS[name]
    n = 30
    matrix = hermitian(spectrum("poly", n), dtype)
    if name == "xtrace":
        matrix = matrix + 0.3 * jnp.triu(matrix)
    operator = lx.MatrixLinearOperator(matrix, PSD if name == "xnystrace" else ())
    got = estimate(operator, KEY, cost * k, sampler=sampler)
    dense = np.asarray(matrix)
    probes = np.asarray(sampler(KEY, jax.ShapeDtypeStruct((n,), matrix.dtype), k)).T
    resphere = sampler is not tx.rademacher
    samples = loop(dense, probes, resphere)
    close(got.value, samples.mean(), 1e-11)
    if k == 1:
        assert got.standard_error == jnp.inf
        return
    if k == 2:
        spread = np.abs(samples - samples.mean())
        close(got.standard_error, np.sqrt((spread**2).sum() / 2), 1e-11)
        return
    replicates = [
        loop(dense, np.delete(probes, i, axis=1), resphere).mean() for i in range(k)
    ]
    spread = np.abs(np.array(replicates) - np.mean(replicates))
    close(got.standard_error, np.sqrt((k - 1) / k * (spread**2).sum()), 1e-9)


@pytest.mark.parametrize("name", LOOPS)
def test_probes_are_exchangeable(name: str) -> None:
    """A permutation of the probes changes nothing."""
    estimate, _, cost = LOOPS[name]
    operator = lx.MatrixLinearOperator(hermitian(spectrum("poly", 30)), PSD)
    probes = tx.rademacher(KEY, operator.in_structure(), 7)
    one = estimate(operator, KEY, 7 * cost, sampler=lambda *_: probes)
    other = estimate(operator, KEY, 7 * cost, sampler=lambda *_: probes[::-1])
    close(one.value, other.value, 1e-13)
    close(one.standard_error, other.standard_error, 1e-9)


# Exact expectations: the mean over all sign vectors.


def all_signs(count: int) -> Any:
    return jnp.asarray(list(itertools.product([-1.0, 1.0], repeat=count)))


def enumerated(entry: Entry, n: int, budget: int, loose: int) -> tuple[Any, Any, Any]:
    """Mean value, gradient and Hessian by theta of A(theta) = A0 + theta A1 + theta^2 A2,
    over all signs of the last `loose` probes drawn; the others are fixed."""
    matrices = [suitable(entry, n, seed=seed) for seed in range(3)]
    fixed = jax.random.rademacher(KEY, (64, n), float)

    def outcome(signs: Any) -> Any:
        drawn = iter(jnp.split(signs.reshape(loose, n), loose))

        def sampler(key: Any, structure: Any, num_probes: int) -> Any:
            nonlocal left
            rows = []
            for _ in range(num_probes):
                rows.append(next(drawn)[0] if left <= loose else fixed[left])
                left -= 1
            return jnp.stack(rows)

        def value(theta: Any) -> Any:
            nonlocal left, drawn
            left = total
            drawn = iter(jnp.split(signs.reshape(loose, n), loose))
            matrix = matrices[0] + theta * matrices[1] + theta**2 * matrices[2]
            operator = as_semidefinite(entry, function(matrix))
            return entry.estimate(operator, KEY, budget, sampler=sampler).value

        return value(0.7), jax.grad(value)(0.7), jax.grad(jax.grad(value))(0.7)

    left = 0
    total = {"xtrace": budget // 2}.get(entry.name, budget)
    if entry.name == "hutchpp_trace":
        total = budget - budget // 3
    means = [
        jnp.mean(x)
        for x in jax.jit(lambda s: jax.lax.map(outcome, s))(all_signs(loose * n))
    ]
    traces = [jnp.trace(matrix) for matrix in matrices]
    truth = [
        traces[0] + 0.7 * traces[1] + 0.49 * traces[2],
        traces[1] + 1.4 * traces[2],
        2 * traces[2],
    ]
    return means, truth, traces


@pytest.mark.parametrize(
    ("name", "n", "budget", "loose"),
    [
        ("hutchinson_trace", 5, 2, 2),
        ("xtrace", 4, 2, 1),
        ("xtrace", 5, 4, 2),
        ("hutchpp_trace", 5, 3, 2),
        ("na_hutchpp_trace", 5, 4, 1),
        ("xnystrace", 4, 1, 1),
    ],
)
def test_unbiased_by_enumeration(name: str, n: int, budget: int, loose: int) -> None:
    """Value, first and second derivative."""
    (entry,) = (entry for entry in ESTIMATORS if entry.name == name)
    means, truth, _ = enumerated(entry, n, budget, loose)
    close(jnp.stack(means), jnp.stack(truth), 1e-12)
