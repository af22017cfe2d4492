"""What the first batch of products chooses for the second: against loops that leave out
what is to be left out, and the mean over all probes and lots."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, function, general, hermitian, spectrum
from traceax._core.operator import LinearMap
from traceax._estimators.leave_one_out import leave_one_out
from traceax._estimators.readouts import TRACE
from traceax._estimators.second_batch import (
    BothBatches,
    missed_shares,
    sketched_or_sampled,
    votes,
)

KEY = jax.random.key(5)
LAST = 1 - 1e-9


def projector(block: np.ndarray) -> np.ndarray:
    basis, _ = np.linalg.qr(block)
    return basis @ basis.conj().T


def across(residual: np.ndarray, mu: np.ndarray) -> float:
    along = np.vdot(mu, residual) / np.vdot(mu, mu)
    return float(np.linalg.norm(residual - along * mu) ** 2)


def shares_by_loop(matrix: np.ndarray, probes: np.ndarray) -> np.ndarray:
    n, k = probes.shape
    shares = []
    for i in range(k):
        missed, whole = 0.0, 0.0
        for j in set(range(k)) - {i}:
            outside = np.eye(n) - projector(matrix @ np.delete(probes, (i, j), axis=1))
            w = probes[:, j]
            missed += across(outside @ matrix @ w, outside @ w)
            whole += across(matrix @ w, w)
        shares.append(missed / whole)
    return np.array(shares)


@pytest.mark.parametrize("dtype", [float, complex])
def test_the_shares_against_a_loop(dtype: Any) -> None:
    """And probe i has no say in its own."""
    n, k = 12, 5
    matrix = general(n, dtype) + 2 * jnp.eye(n)
    probes = tx.sphere(KEY, jax.ShapeDtypeStruct((n,), dtype), k + 1).T

    def shares(block: Any) -> Any:
        sketch = matrix @ block
        return missed_shares(leave_one_out(sketch, block, resphere=True), sketch)

    got = shares(probes[:, :k])
    close(got, shares_by_loop(np.asarray(matrix), np.asarray(probes[:, :k])), 1e-10)
    other = shares(jnp.concatenate([probes[:, 1:k], probes[:, k:]], axis=1))
    close(other[-1], got[0], 1e-10)
    assert abs(other[0] - got[1]) > 1e-3


@pytest.mark.parametrize("dtype", [float, complex])
def test_the_mean_over_all_probes_and_lots(dtype: Any) -> None:
    """Probe i is any row of a unitary matrix of its own, in all n^k batches; a fresh one
    any row of another; both sides of the lot have their probability. The mean is the trace,
    and that of whatever else is read through the frozen blocks. Sabotage: a choice that all
    probes make together is biased."""
    n, k = 5, 4
    matrix = 2 * jnp.eye(n) + jnp.diag(jnp.arange(5.0) ** 2) / 8 + 0.3 * general(n, dtype)
    other = general(n, dtype, seed=3)
    rows = jnp.linalg.qr(jax.random.normal(KEY, (k + 1, n, n), dtype))[0] * n**0.5
    read = [LinearMap(function(m)) for m in (matrix, other)]

    def outcome(block: Any, row: Any, lot: float) -> Any:
        fresh = jnp.repeat(row[:, None], k, axis=1)
        probes = BothBatches(block, fresh, jnp.asarray(lot), resphere=False)
        got = sketched_or_sampled(read[0], probes, TRACE)
        return jnp.stack([got.value, *(got.readout(linear_map) for linear_map in read)])

    @jax.jit
    @jax.vmap
    def both_sides(index: Any) -> Any:
        block = rows[jnp.arange(k), index].T
        sketch = matrix @ block
        ayes = votes(leave_one_out(sketch, block, resphere=False), sketch)
        sampled = jax.vmap(lambda row: outcome(block, row, LAST))(rows[k])
        return ayes, outcome(block, rows[k, 0], 0.0), jnp.mean(sampled, axis=0)

    ayes, sketched, sampled = both_sides(jnp.asarray(list(np.ndindex(*(n,) * k))))
    p = jnp.mean(ayes, axis=1)[:, None]
    split = (p > 0) & (p < 1)
    assert 0.2 < jnp.mean(split) < 0.95
    # Where all agree both lots give the same side.
    means = jnp.where(split, p * sketched + (1 - p) * sampled, sampled)
    means = jnp.where(p == 1, sketched, means)
    truth = jnp.trace(matrix)
    want = jnp.stack([truth, truth, jnp.trace(other)])
    close(jnp.mean(means, axis=0), want, 1e-12, 100)
    naive = jnp.where(p[:, 0] > 0.5, sketched[:, 0], sampled[:, 0])
    assert abs(jnp.mean(naive) - truth) > 1e-3


def test_it_sketches_what_decays_and_samples_what_does_not() -> None:
    """Over 300 keys the door is no worse than the better of the two rooms behind it, where
    one is better by a fifth or more: 1.15 is over 3 standard errors of a ratio. n = 200."""
    keys = jax.random.split(KEY, 300)
    for name, better, worse in (
        ("flat", tx.hutchinson_trace, tx.xtrace),
        ("poly", tx.xtrace, tx.hutchinson_trace),
    ):
        matrix = hermitian(spectrum(name, 200))

        def error(estimator: Any, matrix: Any = matrix) -> float:
            values = jax.lax.map(
                lambda key: estimator(function(matrix), key, 20).value, keys
            )
            return float(jnp.sqrt(jnp.mean((values / jnp.trace(matrix) - 1) ** 2)))

        door = error(tx.trace)
        assert door < 1.15 * error(better)
        assert door < 0.87 * error(worse)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_it_is_exact_where_either_is(dtype: str, factor: float) -> None:
    """Multiples of I, and a rank below k."""
    n = 70
    for name, sizes in (("identity", np.ones(n)), ("rank5", spectrum("rank5", n))):
        matrix = jnp.asarray(factor, dtype) * hermitian(sizes, dtype)
        matrix = matrix if name != "identity" else factor * jnp.eye(n, dtype=dtype)
        estimate = tx.trace(function(matrix), KEY, 20)
        truth = float(jnp.trace(matrix).real)
        slack = 200 * float(jnp.finfo(dtype).eps) * truth
        assert abs(estimate.value - truth) <= slack
        assert 0 < estimate.standard_error <= slack


def test_a_batch_of_operators_is_applied_once() -> None:
    """Under `vmap`, where both sides of a conditional would be: 3 keys, 20 products each.
    Of the three one sketches, two sample; the gradient reads what the value read."""
    calls = []

    def operator(decay: Any) -> Any:
        sizes = jnp.exp(-decay * jnp.arange(70.0))

        def matvec(v: Any) -> Any:
            jax.debug.callback(lambda _: calls.append(1), v[0])
            return sizes * v

        return jax.eval_shape(lambda: sizes), matvec

    def value(decay: Any, key: Any) -> Any:
        structure, matvec = operator(decay)
        return tx.trace(lx.FunctionLinearOperator(matvec, structure), key, 20).value

    decays, keys = jnp.asarray([0.0, 0.003, 1.0]), jax.random.split(KEY, 3)
    together = jax.jit(jax.vmap(value))(decays, keys)
    jax.effects_barrier()
    assert len(calls) == 60
    close(
        together, jnp.stack([value(d, k) for d, k in zip(decays, keys, strict=True)]), 1e-12
    )


@pytest.mark.parametrize("name", ["flat", "poly"])
def test_the_gradient_reads_what_the_value_read(name: str) -> None:
    """On either side: applied to the operator itself it gives its value, and both modes
    agree on any other."""
    matrix, other = hermitian(spectrum(name, 70)), general(70)

    def value(m: Any) -> Any:
        return tx.trace(function(m), KEY, 20).value

    got, gradient = jax.jit(jax.value_and_grad(value))(matrix)
    close(jnp.sum(gradient * matrix), got, 1e-12, 100)
    _, slope = jax.jvp(value, (matrix,), (other,))
    close(jnp.sum(gradient * other), slope, 1e-12, 100)
    assert abs(slope - jnp.trace(other)) > 1e-3
