"""The leave-one-out estimators against loops that really leave one out, and means over all
sign vectors, which prove unbiasedness."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, given, nightly, slow
from tests.matrices import across, all_signs, general, hermitian, projector, spectrum
from tests.tables import ESTIMATORS, REST
from tests.wrappers import PSD, function, two_leaves
from traceax._core.keys import BLOCKS, keys_of
from traceax._estimators import krylov_nystrom
from traceax._estimators.call import begin
from traceax._estimators.krylov_nystrom import estimate_by_nystrom, products_of_sketch

KEY = jax.random.key(11)

Two = tuple[np.ndarray, np.ndarray]
Batch = Two  # probes with second matvecs, and probes without


def drawn(sampler: Any, n: int, dtype: Any, k: int, key: Any = KEY) -> np.ndarray:
    return np.asarray(sampler(key, jax.ShapeDtypeStruct((n,), dtype), k)).T


def left_out(probes: np.ndarray) -> list[Two]:
    """For each probe the block of the others, and itself."""
    return [(np.delete(probes, i, axis=1), probes[:, i]) for i in range(probes.shape[1])]


def without_each(batch: Batch) -> list[tuple[Batch, np.ndarray]]:
    first, rest = batch
    of_first = [((others, rest), w) for others, w in left_out(first)]
    return of_first + [((first, others), w) for others, w in left_out(rest)]


def sketches(matrix: np.ndarray, batch: Batch) -> list[Two]:
    """Probes of `first` and what the operator makes of them are left out together."""
    every = without_each(batch)
    return [(np.hstack([first, rest, matrix @ first]), w) for (first, rest), w in every]


def jackknife(of: Callable[[Batch], Any], batch: Batch) -> Any:
    """Recomputed from scratch without each probe in turn."""
    replicates = [of(fewer) for fewer, _ in without_each(batch)]
    return (len(replicates) - 1) ** 0.5 * np.std(replicates, axis=0)


def nystrom(matrix: np.ndarray, others: np.ndarray) -> np.ndarray:
    sketch = matrix @ others
    core = np.linalg.pinv(others.conj().T @ sketch, hermitian=True)
    return sketch @ core @ sketch.conj().T


def factor(mu: np.ndarray, others: np.ndarray, resphere: bool) -> float:
    """That gives a remainder the length that it should have."""
    return (len(mu) - others.shape[1]) / np.vdot(mu, mu).real if resphere else 1.0


def xtrace_by_loop(matrix: np.ndarray, batch: Batch, resphere: bool) -> Two:
    """Samples, and the variances that theory gives them but for a factor."""
    samples, variances = [], []
    for others, w in sketches(matrix, batch):
        p = projector(matrix @ others)
        mu = w - p @ w
        c = factor(mu, others, resphere)
        samples.append([np.trace(p @ matrix @ p) + c * np.vdot(mu, matrix @ mu)])
        variances.append(c**2 * across(matrix @ mu - p @ matrix @ mu, mu))
    return np.array(samples), np.array(variances)


def nystrom_by_loop(matrix: np.ndarray, batch: Batch, resphere: bool = False) -> Two:
    """Of the diagonal, whose sum is the trace."""
    samples, variances = [], []
    for others, w in sketches(matrix, batch):
        low, mu = nystrom(matrix, others), w - projector(others) @ w
        c, residual = factor(mu, others, resphere), (matrix - low) @ w
        samples.append((np.diag(low) + c * w.conj() * residual).real)
        variances.append(c**2 * across(residual, mu))
    return np.array(samples), np.array(variances)


def with_second_matvecs(operator: Any, key: Any, budget: int, sampler: Any) -> tx.Estimate:
    call = begin("trace", operator, key, budget, sampler=sampler)
    return estimate_by_nystrom(call, "xnystrace with second matvecs")


LOOPS: dict[str, tuple[Any, Callable[..., Two]]] = {
    "xtrace": (tx.xtrace, xtrace_by_loop),
    "xnystrace": (tx.xnystrace, nystrom_by_loop),
    "krylov": (with_second_matvecs, nystrom_by_loop),
}
SIGNS, POINTS = (float, tx.rademacher), (complex, tx.sphere)


TWO = ("xtrace", "xnystrace")
LEFT_OUT: list[Any] = [(name, *how, 7) for name in TWO for how in (SIGNS, POINTS)]
LEFT_OUT += [slow(name, *POINTS, 2) for name in TWO]
LEFT_OUT += [nightly(name, *SIGNS, k) for name in TWO for k in (1, 2)]
LEFT_OUT += [slow("krylov", float, tx.sphere, 10), ("krylov", *POINTS, 10)]


@pytest.mark.parametrize(("name", "dtype", "sampler", "k"), LEFT_OUT)
def test_leave_one_out(name: str, dtype: Any, sampler: Any, k: int) -> None:
    """Estimates equal those of the loop; the error is the jackknife's, but no less than
    what theory makes of residuals. Of two probes of XTrace it is the spread."""
    (estimate, loop), n, again = LOOPS[name], 30, 3 if name == "krylov" else 0
    matrix = hermitian(spectrum("poly", n), dtype)
    if name == "xtrace":
        matrix = matrix + 0.3 * jnp.triu(matrix)
    operator = lx.MatrixLinearOperator(matrix, () if name == "xtrace" else PSD)
    budget = 2 * k if name == "xtrace" else k + again
    got = estimate(operator, KEY, budget, sampler=sampler)
    resphere = sampler is not tx.rademacher
    batch: Any = np.split(drawn(sampler, n, matrix.dtype, k), [again], axis=1)

    def of(batch: Any) -> Any:
        return loop(np.asarray(matrix), batch, resphere)[0].sum(1).mean()

    samples, variances = loop(np.asarray(matrix), batch, resphere)
    close(got.value, samples.sum(1).mean(), 1e-11)
    if k == 1:
        assert got.standard_error == jnp.inf
        return
    spread = np.std(samples.sum(1)) if (name, k) == ("xtrace", 2) else jackknife(of, batch)
    theory = np.sqrt((2 if dtype is float else 1) * variances.mean() / k) * resphere
    close(got.standard_error, max(spread, theory), 1e-9)


def both_leaves(tree: Any) -> Any:
    return jnp.stack([tree["a"], tree["b"]])


@pytest.mark.parametrize(("dtype", "m"), [(complex, 13), slow(float, 5)])
def test_leave_one_out_leaf_traces_in_a_krylov_space(dtype: Any, m: int) -> None:
    n, again = 70, m // 4 * (m >= 8)
    matrix = hermitian(spectrum("poly", n), dtype)
    got = tx.leaf_traces(two_leaves(matrix, PSD), KEY, m)
    probes = drawn(tx.rademacher, n, matrix.dtype, m - again)
    batch: Any = np.split(probes, [again], axis=1)

    def of_leaves(batch: Batch) -> Any:
        samples = nystrom_by_loop(np.asarray(matrix), batch)[0]
        return np.add.reduceat(samples, [0, n // 3], axis=1).mean(0)

    close(both_leaves(got.value), of_leaves(batch), 1e-11)
    close(both_leaves(got.standard_error), jackknife(of_leaves, batch), 1e-8)


@pytest.mark.slow
def test_a_krylov_space_is_unbiased_by_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all signs of three probes in five dimensions, many of which depend on each
    other; also for operators whose Krylov space is exhausted at once. There is a second
    matvec, and no form of a nearly diagonal operator."""
    monkeypatch.setattr(krylov_nystrom, "FEWEST_PROBES", 4)
    monkeypatch.setattr(krylov_nystrom, "FEWEST", 4)
    signs = jnp.asarray(all_signs(15).reshape(-1, 3, 5))
    tangent = jnp.asarray(general(5))

    @jax.jit
    @partial(jax.vmap, in_axes=(0, None))
    def both(z: Any, matrix: Any) -> Any:
        def value(matrix: Any) -> Any:
            operator = lx.MatrixLinearOperator(matrix, PSD)
            return with_second_matvecs(operator, KEY, 4, given(z)).value

        return jax.jvp(value, (matrix,), (tangent,))

    for eigenvalues in (np.arange(1.0, 6), [2.0] * 5, [3.0, 1, 1, 1, 1], [4.0, 0, 0, 0, 0]):
        means = map(jnp.mean, both(signs, hermitian(np.array(eigenvalues))))
        close(list(means), [sum(eigenvalues), jnp.trace(tangent)], 1e-10, 10)


# Diagonals: entry by entry; the error is the spread of the samples, times sqrt(2) for what
# they share. Row norms: the jackknife.


def xdiag_by_loop(matrix: np.ndarray, probes: np.ndarray, two_sided: bool) -> np.ndarray:
    samples = []
    for others, w in left_out(probes):
        p = projector(matrix @ others)
        known = p @ matrix + (np.eye(len(p)) - p) @ matrix @ p * two_sided
        samples.append(np.diag(known) + w.conj() * ((matrix - known) @ w))
    return np.real(samples) if two_sided else np.array(samples)


def row_norms_by_loop(
    matrix: np.ndarray, probes: np.ndarray, resphere: bool, hermitian: bool
) -> np.ndarray:
    samples = []
    for others, w in left_out(probes):
        sketch = matrix @ others
        p = projector(sketch if hermitian else matrix.conj().T @ sketch)
        mu = w - p @ w
        known = np.sum(np.abs(matrix @ p) ** 2, axis=1)
        c = factor(mu, others, resphere)
        samples.append(known + c * np.abs(matrix @ mu) ** 2)
    return np.array(samples)


@pytest.mark.parametrize("form", ["two-sided", "one-sided", "xnysdiag"])
@pytest.mark.parametrize(("dtype", "k"), [(complex, 7), slow(float, 7), nightly(float, 1)])
def test_leave_one_out_diagonals(form: str, dtype: Any, k: int) -> None:
    matrix = hermitian(spectrum("poly", 30), dtype)
    if form == "one-sided":
        matrix = matrix + 0.3 * jnp.triu(matrix)
    operator = lx.MatrixLinearOperator(matrix, () if form == "one-sided" else PSD)
    dense = np.asarray(matrix)
    probes = drawn(tx.rademacher, 30, matrix.dtype, k)
    if form == "xnysdiag":
        got = tx.xnysdiag(operator, KEY, k)
        samples = nystrom_by_loop(dense, (probes[:, :0], probes))[0]
    else:
        got = tx.xdiag(operator, KEY, 2 * k)
        samples = xdiag_by_loop(dense, probes, form == "two-sided")
    close(got.value, samples.mean(0), 1e-11)
    if k == 1:
        assert jnp.all(got.standard_error == jnp.inf)
        return
    spread = np.sum(np.abs(samples - samples.mean(0)) ** 2, axis=0)
    close(got.standard_error, np.sqrt(2 * spread / (k * (k - 1))), 1e-10)


@pytest.mark.parametrize("name", ["hutchinson_trace", "hutchinson_diagonal", "slq_trace"])
def test_errors_of_independent_samples(name: str) -> None:
    """The standard deviation of the mean."""
    n, k = 12, 5
    matrix = hermitian(1.0 + np.arange(n), complex)
    probes = drawn(tx.rademacher, n, complex, k).T
    operator, sampler = function(matrix), given(probes)
    if name == "slq_trace":  # of so many steps there is no quadrature error
        how: Any = {"num_probes": k, "num_steps": n, "sampler": sampler}
        got = tx.slq_trace(operator, jnp.square, KEY, **how)
        matrix = matrix @ matrix
    else:
        got = getattr(tx, name)(operator, KEY, k, sampler=sampler)
    samples = probes.conj() * (probes @ np.asarray(matrix).T)
    samples = samples if name == "hutchinson_diagonal" else samples.sum(axis=1)
    close(got.value, samples.mean(0), 1e-11)
    close(got.standard_error, np.std(samples, axis=0, ddof=1) / k**0.5, 1e-9)


def test_a_shift_of_what_is_semidefinite_up_to_noise() -> None:
    """The core is shifted by twice the depth of the lowest eigenvalue. The approximations
    are those of diag(A, shift I) from the rows [S; I], so nothing is biased."""
    n, k = 30, 7
    matrix = hermitian(np.append(np.arange(1.0, n), -0.1))
    probes = np.linalg.qr(np.asarray(general(n, seed=2)))[0][:, :k]
    probes[:, 0] = np.linalg.eigh(matrix)[1][:, 0]
    probes = np.sqrt(n) * np.linalg.qr(probes)[0]

    @jax.jit
    def shift_of(sketch: Any) -> Any:
        known = products_of_sketch(sketch, jnp.asarray(probes))
        return known.scale * known.fitted.shift

    shift = float(shift_of(matrix @ probes))
    assert shift > n * 0.1
    enlarged = np.kron(np.diag([0, 1.0]), shift * np.eye(n))
    enlarged[:n, :n] = matrix
    samples = []
    for others, w in left_out(np.vstack([probes, np.eye(n, k)])):
        low, w = nystrom(enlarged, others)[:n, :n], w[:n]
        samples.append(np.diag(low) + w * ((matrix - low) @ w))
    want, operator = np.mean(samples, axis=0), lx.MatrixLinearOperator(matrix, PSD)
    for estimate, value in ((tx.xnystrace, want.sum()), (tx.xnysdiag, want)):
        got = estimate(operator, KEY, k, sampler=given(probes.T))
        close(got.value, value, 1e-9)
        assert jnp.all(got.standard_error > 0)


@pytest.mark.parametrize("form", ["two-sided", slow("one-sided"), "few"])
def test_leave_one_out_leaf_traces(form: str) -> None:
    """The sums over leaves of a diagonal's samples, or of fewer products of single
    entries, which do not share probes. What shared probes add to the variance is computed
    for the trace, from its jackknife."""
    n, k = 70, 3 if form == "few" else 5
    matrix = hermitian(spectrum("exp", n))
    if form != "two-sided":
        matrix = matrix + 0.3 * jnp.triu(matrix)
    operator = two_leaves(matrix, lx.symmetric_tag if form == "two-sided" else ())
    if form == "few":  # drawn one by one
        got, keys = tx.leaf_traces(operator, KEY, k), keys_of(KEY, k)
        probes = np.hstack([drawn(tx.rademacher, n, float, 1, key) for key in keys])
        samples, sharing = probes.T * (probes.T @ matrix.T), 1
    else:
        probes = drawn(tx.rademacher, n, float, k, keys_of(KEY, 3, BLOCKS)[0])
        got = tx.leaf_traces(operator, KEY, 2 * k)
        by_loop = partial(xdiag_by_loop, np.asarray(matrix), two_sided=form == "two-sided")
        samples = by_loop(probes)
        whole = [by_loop(others).sum(1).mean() for others, _ in left_out(probes)]
        ratio = (k - 1) * np.var(whole) / (samples.sum(1).var(ddof=1) / k)
        half = ratio / (2 * k)
        sharing = max(2, half + (half**2 + ratio) ** 0.5, ratio / 9)
        assert sharing > 2.5
    sums = np.add.reduceat(samples, [0, n // 3], axis=1)
    close(both_leaves(got.value), sums.mean(0), 1e-11)
    error = (sharing * sums.var(0, ddof=1) / k) ** 0.5
    close(both_leaves(got.standard_error), error, 1e-10)


ROWS = [(True, float, tx.sphere, 7), (False, complex, tx.rademacher, 7)]
ROWS += [slow(False, float, tx.sphere, 7), slow(True, complex, tx.rademacher, 2)]


@pytest.mark.parametrize(("tagged", "dtype", "sampler", "k"), ROWS)
def test_leave_one_out_row_norms(tagged: bool, dtype: Any, sampler: Any, k: int) -> None:
    matrix = hermitian(spectrum("poly", 30), dtype)
    if not tagged:
        matrix = (matrix + 0.3 * jnp.triu(matrix))[:25]
    operator = lx.MatrixLinearOperator(matrix, PSD if tagged else ())
    got = tx.row_norms_squared(operator, KEY, (2 if tagged else 3) * k, sampler=sampler)
    probes = drawn(sampler, 30, matrix.dtype, k)

    def mean(batch: Batch) -> np.ndarray:
        how = sampler is tx.sphere, tagged
        return row_norms_by_loop(np.asarray(matrix), batch[1], *how).mean(0)

    close(got.value, mean((probes, probes)), 1e-11)
    if k == 7:
        close(got.standard_error, jackknife(mean, (probes[:, :0], probes)), 1e-9)


CASES = [("hutchinson_trace", 2, 2, False), ("xtrace", 4, 2, False)]
CASES += [("hutchpp_trace", 3, 2, False), ("na_hutchpp_trace", 4, 1, False)]
CASES += [("xnystrace", 2, 2, True), ("hutchinson_diagonal", 2, 2, False)]
CASES += [("xdiag", 4, 2, False), ("xnysdiag", 2, 2, True), ("diagpp", 3, 2, False)]
CASES += [("row_norms_squared", 3, 1, False), ("row_norms_squared", 4, 2, True)]
CASES += [("frobenius_norm_squared", 4, 2, False), slow("xdiag", 4, 2, True)]
CASES += [slow("diagpp", 3, 2, True), slow("xtrace", 2, 1, False)]
CASES += [slow("xnystrace", 1, 1, True)]


@pytest.mark.parametrize(("name", "budget", "count", "symmetric"), CASES)
def test_unbiased(name: str, budget: int, count: int, symmetric: bool) -> None:
    """The mean over all signs of the last `count` probes is the truth: of value, first and
    second derivative by theta of A0 + theta A1 + theta^2 A2."""
    (entry,) = (entry for entry in ESTIMATORS + REST if entry.name == name)
    n, parts = 5, [general(5, seed=seed) for seed in range(3)]
    if symmetric:
        parts = [hermitian(1.0 + np.arange(n), seed=seed) for seed in range(3)]
    tags = [lx.symmetric_tag] * symmetric + [PSD] * entry.semidefinite
    fixed = all_signs(n)[[3, 9, 20]] if name == "na_hutchpp_trace" else []

    def matrix(theta: Any) -> Any:
        return parts[0] + theta * parts[1] + theta**2 * parts[2]

    def derivatives(value: Any) -> Any:
        """Forwards over reverse mode, or forwards twice: value, first twice, and second."""
        forwards = lambda t: jax.jvp(value, (t,), (1.0,))  # noqa: E731
        first = jax.value_and_grad(value) if entry in ESTIMATORS else forwards
        return jax.jvp(first, (0.7,), (1.0,))

    def outcome(signs: Any) -> Any:
        def value(theta: Any) -> Any:
            rows = iter([*fixed, *signs])

            def sampler(key: Any, structure: Any, num_probes: int) -> Any:
                return jnp.stack([next(rows) for _ in range(num_probes)])

            operator = lx.MatrixLinearOperator(matrix(theta), tags)
            return entry.estimate(operator, KEY, budget, sampler=sampler).value

        return derivatives(value)

    signs = jnp.asarray(all_signs(count * n).reshape(-1, count, n))
    every = jax.jit(lambda s: jax.lax.map(outcome, s))(signs)
    truth = derivatives(lambda theta: entry.truth(matrix(theta)))
    means = jax.tree.map(lambda x: x.mean(axis=0), every)
    close(means, truth, 1e-12 if entry in ESTIMATORS else 1e-11)
