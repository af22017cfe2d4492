"""What the first products of a diagonal choose for it: against loops that leave out what is
to be left out, and the mean over all probes and lots."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, function, general, hermitian, slow, spectrum
from traceax._core.operator import LinearMap
from traceax._estimators import shared_batch
from traceax._estimators.driver import Probes
from traceax._estimators.leave_one_out import leave_one_out
from traceax._estimators.readouts import DIAGONAL
from traceax._estimators.second_batch import (
    BothBatches,
    missed_shares,
    sketched_or_sampled_diagonal,
    votes_on_diagonal,
)
from traceax._linalg.nystrom import nystrom

KEY = jax.random.key(5)
LAST = 1 - 1e-9
PSD = lx.positive_semidefinite_tag
TAGS = {"general": (), "symmetric": lx.symmetric_tag, "semidefinite": PSD}
KINDS = pytest.mark.parametrize("kind", TAGS)
DTYPES = pytest.mark.parametrize("dtype", [float, complex])


def operator(matrix: Any, kind: str) -> lx.AbstractLinearOperator:
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, TAGS[kind])


def across(residual: np.ndarray, probe: np.ndarray) -> float:
    along = np.vdot(probe, residual) / np.vdot(probe, probe)
    return float(np.linalg.norm(residual - along * probe) ** 2)


def missed_by_sketch(matrix: np.ndarray, others: np.ndarray) -> np.ndarray:
    basis, _ = np.linalg.qr(matrix @ others)
    return matrix - basis @ (basis.conj().T @ matrix)


def missed_by_nystrom(matrix: np.ndarray, others: np.ndarray) -> np.ndarray:
    sketch = matrix @ others
    return matrix - sketch @ np.linalg.solve(others.conj().T @ sketch, sketch.conj().T)


def shares_by_loop(matrix: np.ndarray, probes: np.ndarray, missed: Any) -> np.ndarray:
    k = probes.shape[1]
    shares = []
    for i in range(k):
        left, whole = 0.0, 0.0
        for j in set(range(k)) - {i}:
            w = probes[:, j]
            left += across(missed(matrix, np.delete(probes, (i, j), axis=1)) @ w, w)
            whole += across(matrix @ w, w)
        shares.append(left / whole)
    return np.array(shares)


@DTYPES
@pytest.mark.parametrize("semidefinite", [False, True])
def test_the_shares_against_a_loop(dtype: Any, semidefinite: bool) -> None:
    """And probe i has no say in its own."""
    n, k = 12, 5
    if semidefinite:
        matrix, missed = hermitian(np.arange(12.0) + 1, dtype), missed_by_nystrom
    else:
        matrix, missed = general(n, dtype) + 2 * jnp.eye(n), missed_by_sketch
    probes = tx.rademacher(KEY, jax.ShapeDtypeStruct((n,), dtype), k + 1).T

    def shares(block: Any) -> Any:
        sketch = matrix @ block
        if semidefinite:
            return shared_batch.missed_shares(nystrom(sketch, block), sketch, block)
        loo = leave_one_out(sketch, block, resphere=False)
        return missed_shares(loo, sketch, of_diagonal=True)

    got = shares(probes[:, :k])
    want = shares_by_loop(np.asarray(matrix), np.asarray(probes[:, :k]), missed)
    close(got, want, 1e-9)
    other = shares(jnp.concatenate([probes[:, 1:k], probes[:, k:]], axis=1))
    close(other[-1], got[0], 1e-9)
    assert abs(other[0] - got[1]) > 1e-3


def all_batches(dtype: Any) -> tuple[Any, Any]:
    """Probe i is any row of a unitary matrix of its own, in all n^k batches; a fresh one
    any row of another."""
    n, k = 5, 4
    rows = jnp.linalg.qr(jax.random.normal(KEY, (k + 1, n, n), dtype))[0] * n**0.5
    indices = jnp.asarray(list(np.ndindex(*(n,) * k)))
    return rows[jnp.arange(k)[None], indices].swapaxes(1, 2), rows[k]


def read(outcome: Any, maps: Any) -> Any:
    return jnp.stack([outcome.value, *(outcome.readout(m) for m in maps)])


@DTYPES
@pytest.mark.parametrize("kind", ["general", "semidefinite"])
def test_the_mean_over_all_probes_and_lots(dtype: Any, kind: str) -> None:
    """Both sides of the lot have their probability. The mean is the diagonal, and that of
    whatever else is read through the frozen blocks. Sabotage: a choice that all probes make
    together is biased."""
    matrix = hermitian(np.array([4.0, 3.0, 2.0, 1.0, 0.3]), dtype)
    if kind == "general":
        matrix = matrix + 0.3 * general(5, dtype)
    other = general(5, dtype, seed=3)
    maps = [LinearMap(operator(matrix, kind)), LinearMap(function(other))]
    blocks, fresh = all_batches(dtype)

    def outcome(block: Any, row: Any, lot: float) -> Any:
        fresh = jnp.repeat(row[:, None], 4, axis=1)
        probes = BothBatches(block, fresh, jnp.asarray(lot), resphere=False)
        return read(sketched_or_sampled_diagonal(maps[0], probes, DIAGONAL), maps)

    @jax.jit
    @jax.vmap
    def both_sides(block: Any) -> Any:
        sketch = matrix @ block
        ayes = votes_on_diagonal(leave_one_out(sketch, block, resphere=False), sketch)
        sampled = jax.vmap(lambda row: outcome(block, row, LAST))(fresh)
        return ayes, outcome(block, fresh[0], 0.0), jnp.mean(sampled, axis=0)

    ayes, sketched, sampled = both_sides(blocks)
    p = jnp.mean(ayes, axis=1)[:, None, None]
    split = (p > 0) & (p < 1)
    assert 0.2 < jnp.mean(split) < 0.95
    # Where all agree both lots give the same side.
    means = jnp.where(split, p * sketched + (1 - p) * sampled, sampled)
    means = jnp.where(p == 1, sketched, means)
    truth = jnp.diagonal(matrix)
    want = jnp.stack([truth, truth, jnp.diagonal(other)])
    close(jnp.mean(means, axis=0), want, 1e-12, 100)
    naive = jnp.where(p[:, 0] > 0.5, sketched[:, 0], sampled[:, 0])
    assert jnp.max(abs(jnp.mean(naive, axis=0) - truth)) > 1e-3


@DTYPES
@pytest.mark.parametrize("sign", [1, -1])
def test_the_mean_over_all_probes_of_a_shared_batch(dtype: Any, sign: int) -> None:
    """As above, without a lot; what is read need not be Hermitian."""
    matrix = sign * hermitian(np.array([4.0, 3.0, 2.0, 1.0, 0.3]), dtype)
    other = general(5, dtype, seed=3)
    tag = PSD if sign == 1 else lx.negative_semidefinite_tag
    tagged = lx.TaggedLinearOperator(function(matrix), tag)
    maps = [LinearMap(tagged), LinearMap(function(other))]
    blocks, _ = all_batches(dtype)

    @jax.jit
    @jax.vmap
    def run(block: Any) -> Any:
        sketch = sign * (matrix @ block)
        probes = Probes((block,), resphere=False)
        ayes = shared_batch.votes(nystrom(sketch, block), sketch, block)
        return ayes, read(shared_batch.mixed(maps[0], probes, DIAGONAL), maps)

    ayes, got = run(blocks)
    assert 0.1 < jnp.mean((ayes > 0) & (ayes < 1)) < 0.95
    truth = jnp.diagonal(matrix)
    want = jnp.stack([truth, truth, jnp.diagonal(other)])
    close(jnp.mean(got, axis=0), want, 1e-12, 100)


@KINDS
def test_it_sketches_what_decays_and_samples_what_does_not(kind: str) -> None:
    """Over 10 keys the door errs no more than the better of the two rooms behind it. On
    flat spectra the mean square of 150 entries is uncertain by (2/150)^(1/2) for one key, a
    ratio of errors so by 2.6 %; on 0.7^i, measured over 40 keys, by 11 %: thrice that."""
    keys = jax.random.split(KEY, 10)
    room = tx.xnysdiag if kind == "semidefinite" else tx.xdiag
    for name, better, worse in (
        ("flat", tx.hutchinson_diagonal, room),
        ("exp", room, tx.hutchinson_diagonal),
    ):
        matrix = hermitian(spectrum(name, 150))

        def error(estimator: Any, matrix: Any = matrix) -> float:
            run = partial(estimator, operator(matrix, kind), num_matvecs=20)
            values = jax.lax.map(lambda key: run(key).value, keys)
            return float(jnp.sqrt(jnp.mean((values - jnp.diagonal(matrix)) ** 2)))

        door = error(tx.diagonal)
        assert door < (1.08 if name == "flat" else 1.35) * error(better)
        assert door < 0.87 * error(worse)


@KINDS
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("factor", [slow(1e-30), 1.0, slow(1e30)])
def test_it_is_exact_where_either_is(kind: str, dtype: str, factor: float) -> None:
    """Multiples of I, and a rank below k; value, bar and slope."""
    n = 70
    for name, sizes in (("identity", np.ones(n)), ("rank5", spectrum("rank5", n))):
        # A complex matrix that is tagged symmetric is not Hermitian.
        kept = jnp.finfo(dtype).dtype if kind == "symmetric" else dtype
        matrix = jnp.asarray(factor, kept) * hermitian(sizes, kept)
        matrix = matrix if name != "identity" else factor * jnp.eye(n, dtype=kept)

        def estimate(s: Any, matrix: Any = matrix) -> Any:
            return tx.diagonal(operator(s * matrix, kind), KEY, 20)

        got, slope = jax.jvp(lambda s: estimate(s).value, (1.0,), (1.0,))
        error = estimate(1.0).standard_error
        truth = jnp.diagonal(matrix)
        slack = 1e3 * float(jnp.finfo(dtype).eps) * factor
        assert jnp.all(abs(got - truth) <= slack)
        assert jnp.all(abs(slope - truth) <= slack)
        assert jnp.all((error > 0) & (error <= slack))


@pytest.mark.parametrize("kind", ["symmetric", "semidefinite"])
def test_a_batch_of_operators_is_applied_once(kind: str) -> None:
    """Under `vmap`, where both sides of a conditional would be: 3 keys, 20 products each.
    The operators decay not at all, somewhat and fast."""
    calls = []

    def value(decay: Any, key: Any) -> Any:
        sizes = jnp.exp(-decay * jnp.arange(70.0))

        def matvec(v: Any) -> Any:
            jax.debug.callback(lambda _: calls.append(1), v[0])
            return sizes * v + 0.1 * sizes[::-1] * jnp.sum(sizes[::-1] * v)

        structure = jax.eval_shape(lambda: sizes)
        rows = lx.FunctionLinearOperator(matvec, structure, TAGS[kind])
        return jnp.sum(jnp.arange(70.0) * tx.diagonal(rows, key, 20).value)

    decays, keys = jnp.asarray([0.0, 0.02, 1.0]), jax.random.split(KEY, 3)
    together = jax.jit(jax.vmap(value))(decays, keys)
    jax.effects_barrier()
    assert len(calls) == 60
    one_by_one = [value(d, k) for d, k in zip(decays, keys, strict=True)]
    close(together, jnp.stack(one_by_one), 1e-11)


@KINDS
@pytest.mark.parametrize("name", ["flat", "poly"])
def test_the_gradient_reads_what_the_value_read(kind: str, name: str) -> None:
    """Both modes agree. Where the value is a mean of forms, and XDiag's two-sided one, the
    gradient applied to the operator itself gives it again."""
    matrix, other = hermitian(spectrum(name, 70)), general(70)
    weights = jnp.arange(70.0)

    def value(m: Any) -> Any:
        return weights @ tx.diagonal(operator(m, kind), KEY, 20).value

    got, gradient = jax.jit(jax.value_and_grad(value))(matrix)
    if name == "flat" or kind == "symmetric":
        close(jnp.sum(gradient * matrix), got, 1e-12, 1e4)
    _, slope = jax.jvp(value, (matrix,), (other,))
    close(jnp.sum(gradient * other), slope, 1e-12, 1e4)
    assert abs(slope - weights @ jnp.diagonal(other)) > 1e-3
