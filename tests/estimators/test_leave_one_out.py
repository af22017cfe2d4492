"""The leave-one-out estimators against loops that really leave one out, and means over all
sign vectors, which prove unbiasedness."""

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
    ESTIMATORS,
    PSD,
    REST,
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

# The leave-one-out estimators against loops that really leave one out.


def projector(block: np.ndarray) -> np.ndarray:
    basis, _ = np.linalg.qr(block)
    return basis @ basis.conj().T


def across(residual: np.ndarray, mu: np.ndarray) -> float:
    """The square of what a residual has orthogonal to its probe."""
    along = np.vdot(mu, residual) / np.vdot(mu, mu)
    return float(np.linalg.norm(residual - along * mu) ** 2)


def xtrace_by_loop(
    matrix: np.ndarray, probes: np.ndarray, resphere: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Samples, and the variances that theory gives them but for a factor."""
    n, k = probes.shape
    samples, variances = [], []
    for i in range(k):
        others = np.delete(probes, i, axis=1)
        p = projector(matrix @ others) if k > 1 else np.zeros((n, n))
        mu = probes[:, i] - p @ probes[:, i]
        scale = (n - k + 1) / np.vdot(mu, mu).real if resphere else 1.0
        samples.append(np.trace(p @ matrix @ p) + scale * np.vdot(mu, matrix @ mu))
        variances.append(scale**2 * across((np.eye(n) - p) @ matrix @ mu, mu))
    return np.array(samples), np.array(variances)


def xnystrace_by_loop(
    matrix: np.ndarray, probes: np.ndarray, resphere: bool
) -> tuple[np.ndarray, np.ndarray]:
    n, k = probes.shape
    samples, variances = [], []
    for i in range(k):
        others = np.delete(probes, i, axis=1)
        sketch = matrix @ others
        core = np.linalg.pinv(others.conj().T @ sketch, hermitian=True)
        low = sketch @ core @ sketch.conj().T
        w = probes[:, i]
        mu = w - projector(others) @ w if k > 1 else w
        scale = (n - k + 1) / np.vdot(mu, mu).real if resphere else 1.0
        residual = (matrix - low) @ w
        samples.append((np.trace(low) + scale * np.vdot(w, residual)).real)
        variances.append(scale**2 * across(residual, mu))
    return np.array(samples), np.array(variances)


Loop = Callable[[np.ndarray, np.ndarray, bool], tuple[np.ndarray, np.ndarray]]
LOOPS: dict[str, tuple[Callable[..., tx.Estimate], Loop, int]] = {
    "xtrace": (tx.xtrace, xtrace_by_loop, 2),
    "xnystrace": (tx.xnystrace, xnystrace_by_loop, 1),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(
    ("dtype", "sampler"), [(float, tx.rademacher), (complex, tx.sphere)]
)
@pytest.mark.parametrize("k", [1, 2, 7])
def test_leave_one_out(name: str, dtype: Any, sampler: Any, k: int) -> None:
    """Estimates equal those of the loop; the error is the jackknife's, recomputed from
    scratch without each probe in turn, but no less than what theory makes of residuals."""
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
    samples, variances = loop(dense, probes, resphere)
    close(got.value, samples.mean(), 1e-11)
    if k == 1:
        assert got.standard_error == jnp.inf
        return
    factor = (2 if dtype is float else 1) if resphere else 0
    theory = np.sqrt(factor * variances.mean() / k)
    if k == 2:
        spread = np.abs(samples - samples.mean())
        error = np.sqrt((spread**2).sum() / 2)
        close(got.standard_error, max(error, theory), 1e-11)
        return
    replicates = [
        loop(dense, np.delete(probes, i, axis=1), resphere)[0].mean() for i in range(k)
    ]
    spread = np.abs(np.array(replicates) - np.mean(replicates))
    error = np.sqrt((k - 1) / k * (spread**2).sum())
    close(got.standard_error, max(error, theory), 1e-9)


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


# Diagonals: entry by entry; the error is the spread of the samples, times sqrt(2) for what
# they share. Row norms: the jackknife.


def xdiag_by_loop(matrix: np.ndarray, probes: np.ndarray, two_sided: bool) -> np.ndarray:
    n, k = probes.shape
    samples = []
    for i in range(k):
        others = np.delete(probes, i, axis=1)
        p = projector(matrix @ others) if k > 1 else np.zeros((n, n))
        known = p @ matrix + (np.eye(n) - p) @ matrix @ p * two_sided
        w = probes[:, i]
        samples.append(np.diag(known) + w.conj() * ((matrix - known) @ w))
    samples = np.array(samples)
    return np.real(samples) if two_sided else samples


def xnysdiag_by_loop(matrix: np.ndarray, probes: np.ndarray, _: bool) -> np.ndarray:
    samples = []
    for i in range(probes.shape[1]):
        others = np.delete(probes, i, axis=1)
        sketch = matrix @ others
        core = np.linalg.pinv(others.conj().T @ sketch, hermitian=True)
        low = sketch @ core @ sketch.conj().T
        w = probes[:, i]
        samples.append((np.diag(low) + w.conj() * ((matrix - low) @ w)).real)
    return np.array(samples)


def row_norms_by_loop(
    matrix: np.ndarray, probes: np.ndarray, resphere: bool, hermitian: bool
) -> np.ndarray:
    n, k = probes.shape
    samples = []
    for i in range(k):
        others = np.delete(probes, i, axis=1)
        sketch = matrix @ others if hermitian else matrix.conj().T @ (matrix @ others)
        p = projector(sketch) if k > 1 else np.zeros((n, n))
        mu = probes[:, i] - p @ probes[:, i]
        scale = (n - k + 1) / np.vdot(mu, mu).real if resphere else 1.0
        known = np.sum(np.abs(matrix @ p) ** 2, axis=1)
        samples.append(known + scale * np.abs(matrix @ mu) ** 2)
    return np.array(samples)


@pytest.mark.parametrize("form", ["two-sided", "one-sided", "xnysdiag"])
@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("k", [1, 7])
def test_leave_one_out_diagonals(form: str, dtype: Any, k: int) -> None:
    matrix = hermitian(spectrum("poly", 30), dtype)
    if form == "one-sided":
        matrix = matrix + 0.3 * jnp.triu(matrix)
    operator = lx.MatrixLinearOperator(matrix, () if form == "one-sided" else PSD)
    probes = np.asarray(tx.rademacher(KEY, operator.in_structure(), k)).T
    if form == "xnysdiag":
        got = tx.xnysdiag(operator, KEY, k)
        samples = xnysdiag_by_loop(np.asarray(matrix), probes, False)
    else:
        got = tx.xdiag(operator, KEY, 2 * k)
        samples = xdiag_by_loop(np.asarray(matrix), probes, form == "two-sided")
    close(got.value, samples.mean(0), 1e-11)
    if k == 1:
        assert jnp.all(got.standard_error == jnp.inf)
        return
    spread = np.sum(np.abs(samples - samples.mean(0)) ** 2, axis=0)
    close(got.standard_error, np.sqrt(2 * spread / (k * (k - 1))), 1e-10)


@pytest.mark.parametrize("hermitian_tag", [True, False])
@pytest.mark.parametrize(
    ("dtype", "sampler"), [(float, tx.sphere), (complex, tx.rademacher)]
)
@pytest.mark.parametrize("k", [2, 7])
def test_leave_one_out_row_norms(
    hermitian_tag: bool, dtype: Any, sampler: Any, k: int
) -> None:
    matrix = hermitian(spectrum("poly", 30), dtype)
    if not hermitian_tag:
        matrix = (matrix + 0.3 * jnp.triu(matrix))[:25]
    operator = lx.MatrixLinearOperator(matrix, PSD if hermitian_tag else ())
    cost = 2 if hermitian_tag else 3
    got = tx.row_norms_squared(operator, KEY, cost * k, sampler=sampler)
    probes = np.asarray(sampler(KEY, operator.in_structure(), k)).T
    resphere = sampler is tx.sphere

    def loop(probes: np.ndarray) -> np.ndarray:
        return row_norms_by_loop(np.asarray(matrix), probes, resphere, hermitian_tag)

    close(got.value, loop(probes).mean(0), 1e-11)
    if k == 1:
        assert jnp.all(got.standard_error == jnp.inf)
    if k == 7:
        replicates = np.array(
            [loop(np.delete(probes, i, axis=1)).mean(0) for i in range(k)]
        )
        spread = np.sum((replicates - replicates.mean(0)) ** 2, axis=0)
        close(got.standard_error, np.sqrt((k - 1) / k * spread), 1e-9)


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
        ("xnystrace", 5, 2, 2),
    ],
)
def test_unbiased_by_enumeration(name: str, n: int, budget: int, loose: int) -> None:
    """Value, first and second derivative."""
    (entry,) = (entry for entry in ESTIMATORS if entry.name == name)
    means, truth, _ = enumerated(entry, n, budget, loose)
    close(jnp.stack(means), jnp.stack(truth), 1e-12)


def enumerated_rest(
    entry: Entry, n: int, budget: int, count: int, symmetric: bool
) -> tuple[Any, Any]:
    """The mean over all signs of `count` probes, and the truth, of value, first and second
    derivative by theta of A0 + theta A1 + theta^2 A2."""
    parts = [general(n, seed=seed) for seed in range(3)]
    if symmetric:
        parts = [hermitian(1.0 + np.arange(n), seed=seed) for seed in range(3)]
    tags = [lx.symmetric_tag] if symmetric else []
    tags += [PSD] if entry.semidefinite else []

    def matrix(theta: Any) -> Any:
        return parts[0] + theta * parts[1] + theta**2 * parts[2]

    def outcome(signs: Any) -> Any:
        def value(theta: Any) -> Any:
            rows = iter(signs.reshape(count, n))

            def sampler(key: Any, structure: Any, num_probes: int) -> Any:
                return jnp.stack([next(rows) for _ in range(num_probes)])

            operator = lx.MatrixLinearOperator(matrix(theta), tags)
            return entry.estimate(operator, KEY, budget, sampler=sampler).value

        return three(value)

    def three(function: Any) -> Any:
        slope = jax.jacfwd(function)
        return jnp.stack([function(0.7), slope(0.7), jax.jacfwd(slope)(0.7)])

    outcomes = jax.jit(lambda s: jax.lax.map(outcome, s))(all_signs(count * n))
    return jnp.mean(outcomes, axis=0), three(lambda theta: entry.truth(matrix(theta)))


@pytest.mark.parametrize(
    ("name", "n", "budget", "count", "symmetric"),
    [
        ("hutchinson_diagonal", 5, 2, 2, False),
        ("xdiag", 5, 4, 2, False),
        ("xdiag", 5, 4, 2, True),
        ("xnysdiag", 5, 2, 2, True),
        ("diagpp", 5, 3, 2, False),
        ("diagpp", 5, 3, 2, True),
        ("row_norms_squared", 5, 3, 1, False),
        ("row_norms_squared", 5, 4, 2, True),
        ("frobenius_norm_squared", 5, 4, 2, False),
    ],
)
def test_diagonals_and_norms_are_unbiased_by_enumeration(
    name: str, n: int, budget: int, count: int, symmetric: bool
) -> None:
    (entry,) = (entry for entry in REST if entry.name == name)
    mean, truth = enumerated_rest(entry, n, budget, count, symmetric)
    for got, want in zip(mean, truth, strict=True):
        close(got, want, 1e-11)
