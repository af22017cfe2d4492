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
from tests.helpers import close, given, slow
from tests.matrices import across, all_signs, general, hermitian, projector, spectrum
from tests.tables import ESTIMATORS, REST
from tests.wrappers import PSD, function, two_leaves
from traceax._core.keys import BLOCKS, keys_of
from traceax._estimators import krylov_nystrom
from traceax._estimators.call import begin
from traceax._estimators.krylov_nystrom import estimate_by_nystrom, products_of_sketch

KEY = jax.random.key(11)

Two = tuple[np.ndarray, np.ndarray]
Pairs = list[Two]
Loop = Callable[[np.ndarray, Pairs, bool], Two]


def left_out(probes: np.ndarray) -> Pairs:
    """For each probe the block of the others, and itself."""
    return [(np.delete(probes, i, axis=1), probes[:, i]) for i in range(probes.shape[1])]


def nystrom(matrix: np.ndarray, others: np.ndarray) -> np.ndarray:
    sketch = matrix @ others
    core = np.linalg.pinv(others.conj().T @ sketch, hermitian=True)
    return sketch @ core @ sketch.conj().T


def factor(mu: np.ndarray, others: np.ndarray, resphere: bool) -> float:
    """That gives a remainder the length that it should have."""
    return (len(mu) - others.shape[1]) / np.vdot(mu, mu).real if resphere else 1.0


def xtrace_by_loop(matrix: np.ndarray, pairs: Pairs, resphere: bool) -> Two:
    """Samples, and the variances that theory gives them but for a factor."""
    samples, variances = [], []
    for others, w in pairs:
        p = projector(matrix @ others)
        mu = w - p @ w
        c = factor(mu, others, resphere)
        samples.append(np.trace(p @ matrix @ p) + c * np.vdot(mu, matrix @ mu))
        variances.append(c**2 * across(matrix @ mu - p @ matrix @ mu, mu))
    return np.array(samples), np.array(variances)


def xnystrace_by_loop(matrix: np.ndarray, pairs: Pairs, resphere: bool) -> Two:
    samples, variances = [], []
    for others, w in pairs:
        low = nystrom(matrix, others)
        mu = w - projector(others) @ w
        c = factor(mu, others, resphere)
        residual = (matrix - low) @ w
        samples.append((np.trace(low) + c * np.vdot(w, residual)).real)
        variances.append(c**2 * across(residual, mu))
    return np.array(samples), np.array(variances)


LOOPS: dict[str, tuple[Callable[..., tx.Estimate], Loop, int]] = {
    "xtrace": (tx.xtrace, xtrace_by_loop, 2),
    "xnystrace": (tx.xnystrace, xnystrace_by_loop, 1),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(
    ("dtype", "sampler"), [(float, tx.rademacher), (complex, tx.sphere)]
)
@pytest.mark.parametrize("k", [slow(1), slow(2), 7])
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
    samples, variances = loop(dense, left_out(probes), resphere)
    close(got.value, samples.mean(), 1e-11)
    if k == 1:
        assert got.standard_error == jnp.inf
        return
    factor = (2 if dtype is float else 1) if resphere else 0
    theory = np.sqrt(factor * variances.mean() / k)
    if k == 2 and name == "xtrace":
        spread = np.abs(samples - samples.mean())
        error = np.sqrt((spread**2).sum() / 2)
        close(got.standard_error, max(error, theory), 1e-11)
        return
    fewer = [left_out(others) for others, _ in left_out(probes)]
    replicates = np.array([loop(dense, pairs, resphere)[0].mean() for pairs in fewer])
    spread = np.abs(replicates - np.mean(replicates))
    error = np.sqrt((k - 1) / k * (spread**2).sum())
    close(got.standard_error, max(error, theory), 1e-9)


def krylov_nystrom_by_loop(
    matrix: np.ndarray, first: np.ndarray, rest: np.ndarray, resphere: bool
) -> Two:
    """Probes of `first` and what the operator makes of them are left out together."""
    samples, variances = [], []
    of_first = [(others, rest, w) for others, w in left_out(first)]
    of_rest = [(first, others, w) for others, w in left_out(rest)]
    for one, other, w in of_first + of_rest:
        others = np.hstack([one, other, matrix @ one])
        low, mu = nystrom(matrix, others), w - projector(others) @ w
        c, residual = factor(mu, others, resphere), (matrix - low) @ w
        samples.append((np.diag(low) + c * w.conj() * residual).real)
        variances.append(c**2 * across(residual, mu))
    return np.array(samples), np.array(variances)


def left_out_of_both(first: np.ndarray, rest: np.ndarray) -> Pairs:
    of_first = [(others, rest) for others, _ in left_out(first)]
    return of_first + [(first, others) for others, _ in left_out(rest)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "sampler"),
    [(float, tx.rademacher), (float, tx.sphere), (complex, tx.sphere)],
)
def test_leave_one_out_of_a_krylov_space(dtype: Any, sampler: Any) -> None:
    n, m = 30, 13
    matrix = hermitian(spectrum("poly", n), dtype)
    operator = lx.MatrixLinearOperator(matrix, PSD)
    call = begin("trace", operator, KEY, m, sampler=sampler)
    got = estimate_by_nystrom(call, "xnystrace with second matvecs")
    again, k = m // 4, m - m // 4
    probes = np.asarray(sampler(KEY, jax.ShapeDtypeStruct((n,), matrix.dtype), k)).T
    first, rest = probes[:, :again], probes[:, again:]
    resphere, dense = sampler is tx.sphere, np.asarray(matrix)
    samples, variances = krylov_nystrom_by_loop(dense, first, rest, resphere)
    close(got.value, samples.sum(1).mean(), 1e-11)
    fewer = left_out_of_both(first, rest)
    loops = [krylov_nystrom_by_loop(dense, *both, resphere)[0] for both in fewer]
    error = (k - 1) ** 0.5 * np.std([samples.sum(1).mean() for samples in loops])
    theory = np.sqrt((2 if dtype is float else 1) * variances.mean() / k) * resphere
    close(got.standard_error, max(error, theory), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("m", [5, 13])
@pytest.mark.parametrize("dtype", [float, complex])
def test_leave_one_out_leaf_traces_in_a_krylov_space(dtype: Any, m: int) -> None:
    n, again = 70, m // 4 * (m >= 8)
    matrix = hermitian(spectrum("poly", n), dtype)
    got = tx.leaf_traces(two_leaves(matrix, PSD), KEY, m)
    space = jax.ShapeDtypeStruct((n,), matrix.dtype)
    probes = np.asarray(tx.rademacher(KEY, space, m - again)).T
    (first, rest), dense = np.split(probes, [again], axis=1), np.asarray(matrix)

    def of_leaves(first: np.ndarray, rest: np.ndarray) -> Any:
        samples = krylov_nystrom_by_loop(dense, first, rest, False)[0]
        return np.add.reduceat(samples, [0, n // 3], axis=1).mean(0)

    close(jnp.stack([got.value["a"], got.value["b"]]), of_leaves(first, rest), 1e-11)
    replicates = [of_leaves(*fewer) for fewer in left_out_of_both(first, rest)]
    error = (m - again - 1) ** 0.5 * np.std(replicates, axis=0)
    got_error = jnp.stack([got.standard_error["a"], got.standard_error["b"]])
    close(got_error, error, 1e-8)


@pytest.mark.slow
def test_a_krylov_space_is_unbiased_by_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all signs of three probes in five dimensions, many of which depend on each
    other; also for operators whose Krylov space is exhausted at once. There is a second
    matvec, and no form of a nearly diagonal operator."""
    monkeypatch.setattr(krylov_nystrom, "FEWEST_PROBES", 4)
    monkeypatch.setattr(krylov_nystrom, "FEWEST", 4)
    signs = jnp.asarray(all_signs(15).reshape(-1, 3, 5))
    tangent = jnp.asarray(general(5))

    def value(matrix: Any, z: Any) -> Any:
        operator = lx.MatrixLinearOperator(matrix, PSD)
        call = begin("trace", operator, KEY, 4, sampler=given(z))
        return estimate_by_nystrom(call, "xnystrace with second matvecs").value

    @jax.jit
    @partial(jax.vmap, in_axes=(0, None))
    def both(z: Any, matrix: Any) -> Any:
        return jax.jvp(lambda m: value(m, z), (matrix,), (tangent,))

    for eigenvalues in (np.arange(1.0, 6), [2.0] * 5, [3.0, 1, 1, 1, 1], [4.0, 0, 0, 0, 0]):
        means = map(jnp.mean, both(signs, hermitian(np.array(eigenvalues))))
        for mean, truth in zip(means, (sum(eigenvalues), jnp.trace(tangent)), strict=True):
            close(mean, truth, 1e-10, 10)


# Diagonals: entry by entry; the error is the spread of the samples, times sqrt(2) for what
# they share. Row norms: the jackknife.


def xdiag_by_loop(matrix: np.ndarray, probes: np.ndarray, two_sided: bool) -> np.ndarray:
    samples = []
    for others, w in left_out(probes):
        p = projector(matrix @ others)
        known = p @ matrix + (np.eye(len(p)) - p) @ matrix @ p * two_sided
        samples.append(np.diag(known) + w.conj() * ((matrix - known) @ w))
    samples = np.array(samples)
    return np.real(samples) if two_sided else samples


def xnysdiag_by_loop(matrix: np.ndarray, probes: np.ndarray) -> np.ndarray:
    samples = []
    for others, w in left_out(probes):
        low = nystrom(matrix, others)
        samples.append(np.diag(low) + w.conj() * ((matrix - low) @ w))
    return np.real(np.array(samples))


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
@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("k", [slow(1), 7])
def test_leave_one_out_diagonals(form: str, dtype: Any, k: int) -> None:
    matrix = hermitian(spectrum("poly", 30), dtype)
    if form == "one-sided":
        matrix = matrix + 0.3 * jnp.triu(matrix)
    operator = lx.MatrixLinearOperator(matrix, () if form == "one-sided" else PSD)
    probes = np.asarray(tx.rademacher(KEY, operator.in_structure(), k)).T
    if form == "xnysdiag":
        got = tx.xnysdiag(operator, KEY, k)
        samples = xnysdiag_by_loop(np.asarray(matrix), probes)
    else:
        got = tx.xdiag(operator, KEY, 2 * k)
        samples = xdiag_by_loop(np.asarray(matrix), probes, form == "two-sided")
    close(got.value, samples.mean(0), 1e-11)
    if k == 1:
        assert jnp.all(got.standard_error == jnp.inf)
        return
    spread = np.sum(np.abs(samples - samples.mean(0)) ** 2, axis=0)
    close(got.standard_error, np.sqrt(2 * spread / (k * (k - 1))), 1e-10)


SAMPLES: dict[str, Callable[..., Any]] = {
    "hutchinson_trace": lambda z, m: np.sum(z.conj() * (z @ m.T), axis=1),
    "hutchinson_diagonal": lambda z, m: z.conj() * (z @ m.T),
    "slq_trace": lambda z, m: np.sum(z.conj() * (z @ (m @ m).T), axis=1).real,
}


@pytest.mark.parametrize("name", SAMPLES)
def test_errors_of_independent_samples(name: str) -> None:
    """The standard deviation of the mean."""
    n, k = 12, 5
    matrix = hermitian(1.0 + np.arange(n), complex)
    probes = np.asarray(tx.rademacher(KEY, jax.ShapeDtypeStruct((n,), complex), k))
    how: dict[str, Any] = {"sampler": given(probes)}
    if name == "slq_trace":  # of so many steps there is no quadrature error
        how |= {"num_probes": k, "num_steps": n}
        got = tx.slq_trace(function(matrix), jnp.square, KEY, **how)
    else:
        got = getattr(tx, name)(function(matrix), KEY, k, **how)
    samples = SAMPLES[name](probes, np.asarray(matrix))
    close(got.value, samples.mean(0), 1e-11)
    deviations = np.abs(samples - samples.mean(0)) ** 2
    close(got.standard_error, (deviations.sum(0) / (k * (k - 1))) ** 0.5, 1e-9)


@pytest.mark.parametrize("name", ["xnystrace", "xnysdiag"])
def test_a_shift_of_what_is_semidefinite_up_to_noise(name: str) -> None:
    """The core is shifted by twice the depth of the lowest eigenvalue. The approximations
    are those of diag(A, shift I) from the rows [S; I], so nothing is biased."""
    n, k = 30, 7
    matrix = hermitian(np.append(np.arange(1.0, n), -0.1))
    probes = np.linalg.qr(np.asarray(general(n, seed=2)))[0][:, :k]
    probes[:, 0] = np.linalg.eigh(matrix)[1][:, 0]
    probes = np.sqrt(n) * np.linalg.qr(probes)[0]
    known = products_of_sketch(matrix @ probes, jnp.asarray(probes))
    shift = float(known.scale * known.fitted.shift)
    assert shift > n * 0.1
    operator = lx.MatrixLinearOperator(matrix, PSD)
    got = getattr(tx, name)(operator, KEY, k, sampler=given(probes.T))
    enlarged = np.kron(np.diag([0, 1.0]), shift * np.eye(n))
    enlarged[:n, :n] = matrix
    rows = np.vstack([probes, np.eye(n, k)])
    samples = []
    for others, w in left_out(rows):
        low, w = nystrom(enlarged, others)[:n, :n], w[:n]
        samples.append(np.diag(low) + w * ((matrix - low) @ w))
    values = np.mean(samples, axis=0)
    close(jnp.sum(got.value), values.sum(), 1e-9)
    assert jnp.all(got.standard_error > 0)


@pytest.mark.parametrize("form", ["two-sided", "one-sided", "few"])
def test_leave_one_out_leaf_traces(form: str) -> None:
    """The sums over leaves of a diagonal's samples, or of fewer products of single
    entries, which do not share probes. What shared probes add to the variance is computed
    for the trace, from its jackknife."""
    n, k = 70, 3 if form == "few" else 5
    matrix = hermitian(spectrum("poly", n))
    if form != "two-sided":
        matrix = matrix + 0.3 * jnp.triu(matrix)
    operator = two_leaves(matrix, lx.symmetric_tag if form == "two-sided" else ())
    space = jax.ShapeDtypeStruct((n,), float)
    probes = np.asarray(tx.rademacher(KEY, space, k))
    if form == "few":  # drawn one by one
        keys = keys_of(KEY, k)
        probes = np.concatenate([tx.rademacher(key, space, 1) for key in keys])
        got = tx.leaf_traces(operator, KEY, k)
        samples, sharing = probes * (probes @ matrix.T), 1
    else:
        probes = np.asarray(tx.rademacher(keys_of(KEY, 3, BLOCKS)[0], space, k))
        got = tx.leaf_traces(operator, KEY, 2 * k)
        by_loop = partial(xdiag_by_loop, np.asarray(matrix), two_sided=form == "two-sided")
        samples = by_loop(probes.T)
        whole = [by_loop(others).sum(1).mean() for others, _ in left_out(probes.T)]
        ratio = (k - 1) * np.var(whole) / (samples.sum(1).var(ddof=1) / k)
        half = ratio / (2 * k)
        sharing = max(2, half + (half**2 + ratio) ** 0.5, ratio / 9)
    sums = np.add.reduceat(samples, [0, n // 3], axis=1)
    close(jnp.stack([got.value["a"], got.value["b"]]), sums.mean(0), 1e-11)
    error = jnp.stack([got.standard_error["a"], got.standard_error["b"]])
    close(error, (sharing * sums.var(0, ddof=1) / k) ** 0.5, 1e-10)


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize(
    ("dtype", "sampler"), [(float, tx.sphere), (complex, tx.rademacher)]
)
@pytest.mark.parametrize("k", [slow(2), 7])
def test_leave_one_out_row_norms(tagged: bool, dtype: Any, sampler: Any, k: int) -> None:
    matrix = hermitian(spectrum("poly", 30), dtype)
    if not tagged:
        matrix = (matrix + 0.3 * jnp.triu(matrix))[:25]
    operator = lx.MatrixLinearOperator(matrix, PSD if tagged else ())
    got = tx.row_norms_squared(operator, KEY, (2 if tagged else 3) * k, sampler=sampler)
    probes = np.asarray(sampler(KEY, operator.in_structure(), k)).T
    resphere = sampler is tx.sphere

    def mean(probes: np.ndarray) -> np.ndarray:
        return row_norms_by_loop(np.asarray(matrix), probes, resphere, tagged).mean(0)

    close(got.value, mean(probes), 1e-11)
    if k == 7:
        replicates = np.array([mean(others) for others, _ in left_out(probes)])
        spread = np.sum((replicates - replicates.mean(0)) ** 2, axis=0)
        close(got.standard_error, np.sqrt((k - 1) / k * spread), 1e-9)


@pytest.mark.parametrize(
    ("name", "n", "budget", "count", "symmetric"),
    [
        ("hutchinson_trace", 5, 2, 2, False),
        slow("xtrace", 4, 2, 1, False),
        ("xtrace", 5, 4, 2, False),
        ("hutchpp_trace", 5, 3, 2, False),
        ("na_hutchpp_trace", 5, 4, 1, False),
        slow("xnystrace", 4, 1, 1, True),
        ("xnystrace", 5, 2, 2, True),
        ("hutchinson_diagonal", 5, 2, 2, False),
        ("xdiag", 5, 4, 2, False),
        slow("xdiag", 5, 4, 2, True),
        ("xnysdiag", 5, 2, 2, True),
        ("diagpp", 5, 3, 2, False),
        slow("diagpp", 5, 3, 2, True),
        ("row_norms_squared", 5, 3, 1, False),
        ("row_norms_squared", 5, 4, 2, True),
        ("frobenius_norm_squared", 5, 4, 2, False),
    ],
)
def test_unbiased_by_enumeration(
    name: str, n: int, budget: int, count: int, symmetric: bool
) -> None:
    """The mean over all signs of the last `count` probes is the truth: of value, first and
    second derivative by theta of A0 + theta A1 + theta^2 A2."""
    (entry,) = (entry for entry in ESTIMATORS + REST if entry.name == name)
    parts = [general(n, seed=seed) for seed in range(3)]
    if symmetric:
        parts = [hermitian(1.0 + np.arange(n), seed=seed) for seed in range(3)]
    tags = [lx.symmetric_tag] if symmetric else []
    tags += [PSD] if entry.semidefinite else []
    fixed = all_signs(n)[[3, 9, 20]] if name == "na_hutchpp_trace" else []

    def matrix(theta: Any) -> Any:
        return parts[0] + theta * parts[1] + theta**2 * parts[2]

    def derivatives(function: Any) -> Any:
        slope = jax.grad if entry in ESTIMATORS else jax.jacfwd
        orders = function, slope(function), slope(slope(function))
        return jnp.stack([order(0.7) for order in orders])

    def outcome(signs: Any) -> Any:
        def value(theta: Any) -> Any:
            rows = iter([*fixed, *signs])

            def sampler(key: Any, structure: Any, num_probes: int) -> Any:
                return jnp.stack([next(rows) for _ in range(num_probes)])

            operator = lx.MatrixLinearOperator(matrix(theta), tags)
            return entry.estimate(operator, KEY, budget, sampler=sampler).value

        return derivatives(value)

    signs = jnp.asarray(all_signs(count * n).reshape(-1, count, n))
    mean = jnp.mean(jax.jit(lambda s: jax.lax.map(outcome, s))(signs), axis=0)
    truth = derivatives(lambda theta: entry.truth(matrix(theta)))
    for got, want in zip(mean, truth, strict=True):
        close(got, want, 1e-12 if entry in ESTIMATORS else 1e-11)
