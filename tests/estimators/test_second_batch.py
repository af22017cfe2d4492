"""What the automatic choices do with their second batch of products, sketch or sample: the
choice against loops that leave probes out, and the mean over all probes and choices."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, nightly, over_keys, slow
from tests.matrices import across, general, hermitian, projector, spectrum
from tests.wrappers import PSD, function, matrix_free
from traceax._core.operator import LinearMap
from traceax._estimators import krylov_nystrom, second_batch
from traceax._estimators.krylov_nystrom import products_of_sketch
from traceax._estimators.near_diagonal import near_diagonal
from traceax._estimators.readouts import by_leaf, each, leave_one_out
from traceax._linalg.columns import over, promoted, times

KEY = jax.random.key(5)
TAGS = {"general": (), "symmetric": lx.symmetric_tag, "semidefinite": PSD}


def operator(matrix: Any, kind: str) -> lx.AbstractLinearOperator:
    return function(matrix, TAGS[kind])


def estimators(what: str, kind: str) -> tuple[Any, Any, Any]:
    """The automatic choice, and what it chooses from: a sketch, and plain probes."""
    if what == "trace":
        return tx.trace, tx.xtrace, tx.hutchinson_trace
    sketch = tx.xnysdiag if kind == "semidefinite" else tx.xdiag
    return tx.diagonal, sketch, tx.hutchinson_diagonal


def missed(what: str, matrix: Any, others: Any, w: Any) -> tuple[float, float]:
    """What a sketch by the other probes misses of the variance, and all of it."""
    sketch = matrix @ others
    if what == "semidefinite":
        core = np.linalg.solve(others.conj().T @ sketch, sketch.conj().T)
        return across((matrix - sketch @ core) @ w, w), across(matrix @ w, w)
    outside = np.eye(len(matrix)) - projector(sketch)
    tested = outside @ w if what == "trace" else w
    return across(outside @ matrix @ w, tested), across(matrix @ w, w)


@pytest.mark.parametrize("dtype", [slow(float), complex])
@pytest.mark.parametrize("what", ["trace", "diagonal", "semidefinite"])
def test_the_shares_against_a_loop(what: str, dtype: Any) -> None:
    """The share of probe i does not depend on probe i."""
    n, k = 12, 5
    matrix = general(n, dtype) + 2 * jnp.eye(n, dtype=dtype)
    if what == "semidefinite":
        matrix = hermitian(np.arange(12.0) + 1, dtype)
    probes = tx.sphere(KEY, jax.ShapeDtypeStruct((n,), dtype), k + 1).T

    @jax.jit
    def shares(block: Any) -> Any:
        sketch = matrix @ block
        if what == "semidefinite":
            known = products_of_sketch(sketch, block)
            return second_batch.nystrom_shares(known, known.fitted)
        loo = leave_one_out(sketch, block, resphere=what == "trace")
        return second_batch.missed_shares(loo, of_diagonal=what == "diagonal")

    def share(i: int) -> Any:
        block, others = np.asarray(probes[:, :k]), [j for j in range(k) if j != i]
        pairs = ((np.delete(block, (i, j), axis=1), block[:, j]) for j in others)
        sums = np.sum([missed(what, np.asarray(matrix), *pair) for pair in pairs], axis=0)
        return sums[0] / sums[1]

    got = shares(probes[:, :k])
    close(got, np.array([share(i) for i in range(k)]), 1e-9)
    other = shares(probes[:, 1:])
    # Without its first probe and with a new last one: only the new one's share is the same.
    close(other[-1], got[0], 1e-9)
    assert abs(other[0] - got[1]) > 1e-3


def test_the_mixture_of_a_semidefinite_diagonal() -> None:
    """With weights a_i between 0 and 1: samples a_i g_i + (1 - a_i) f_i, whose variance is
    1 + mean(a) times that of a mean of independent ones."""
    n, k = 40, 5
    matrix = hermitian((1.0 + np.arange(n)) ** -0.5, complex)
    block = tx.rademacher(KEY, jax.ShapeDtypeStruct((n,), complex), k).T
    run = partial(second_batch.mixed_diagonal, LinearMap(function(matrix, PSD)))
    got, dense, probes = jax.jit(run)((block,)), np.asarray(matrix), np.asarray(block)
    known = products_of_sketch(matrix @ block, block)
    a = np.asarray(second_batch.shared_weights(known, known.fitted))
    assert 0.1 < a.mean() < 0.9
    samples = []
    for i in range(k):
        others, w = np.delete(probes, i, axis=1), probes[:, i]
        sketch = dense @ others
        low = sketch @ np.linalg.solve(others.conj().T @ sketch, sketch.conj().T)
        sketched = np.diag(low) + w.conj() * ((dense - low) @ w)
        samples.append((a[i] * sketched + (1 - a[i]) * w.conj() * (dense @ w)).real)
    close(got.value, np.mean(samples, axis=0), 1e-10)
    variance = np.var(samples, axis=0, ddof=1) / k
    close(got.standard_error, np.sqrt((1 + a.mean()) * variance), 1e-9)


def all_batches(dtype: Any) -> tuple[Any, Any]:
    """Probe i is any row of a unitary matrix of its own, in all n^k batches; a fresh one
    any row of another."""
    n, k = 5, 4
    rows = jnp.linalg.qr(jax.random.normal(KEY, (k + 1, n, n), dtype))[0] * n**0.5
    indices = jnp.asarray(list(np.ndindex(*(n,) * k)))
    return rows[jnp.arange(k)[None], indices].swapaxes(1, 2), rows[k]


def in_leaves(matrix: Any, tag: Any = ()) -> lx.AbstractLinearOperator:
    """Of two and three entries."""
    shapes = [jax.ShapeDtypeStruct((size,), matrix.dtype) for size in (2, 3)]
    apply = lambda v: jnp.split(matrix @ jnp.concatenate(v), (2,))  # noqa: E731
    return lx.FunctionLinearOperator(apply, shapes, tag)


def read(outcome: Any, maps: Any) -> Any:
    return jnp.stack(promoted(outcome.value, *(outcome.readout(m) for m in maps)))


DRAWN = [slow("trace", "general", complex), slow("diagonal", "general", complex)]
DRAWN += [slow("diagonal", "semidefinite", float), nightly("trace", "general", float)]
DRAWN += [nightly("diagonal", "general", float)]


@pytest.mark.parametrize(("what", "kind", "dtype"), DRAWN)
def test_the_mean_over_all_probes_and_choices(
    what: str, kind: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight is the probability of sketching. The mean is the truth, and that of whatever
    else is read through the frozen blocks. Sabotage: a choice that all probes make together
    is biased."""
    monkeypatch.setattr(second_batch, "DECISIVE", 3)
    other, of_trace = general(5, dtype, seed=3), what == "trace"
    matrix, of = hermitian(np.array([4.0, 3.0, 2.0, 1.0, 0.3]), dtype), jnp.diagonal
    if of_trace:
        matrix, of = jnp.diag(2 + jnp.arange(5.0) ** 2 / 8).astype(dtype), jnp.trace
    if kind == "general":
        matrix = matrix + 0.3 * general(5, dtype)
    maps = [LinearMap(operator(matrix, kind)), LinearMap(function(other))]
    blocks, fresh = all_batches(dtype)

    def outcome(block: Any, row: Any, number: float) -> Any:
        """By a random number of [0, 1): the least sketches, the largest samples."""
        fresh = jnp.repeat(row[:, None], 4, axis=1)
        probes = block, fresh, jnp.asarray(number)
        if of_trace:
            run = partial(second_batch.either_trace, resphere=False)
        else:
            run = partial(second_batch.either_diagonal, reduce=each)
        return read(run(maps[0], probes), maps)

    @jax.jit
    @jax.vmap
    def both(block: Any) -> Any:
        sketch = matrix @ block
        loo = leave_one_out(sketch, block, resphere=False)
        near = near_diagonal(block, over(sketch, loo.basis.scale))
        weights = second_batch.weights_of(loo, near, of_diagonal=not of_trace)
        sampled = jax.vmap(lambda row: outcome(block, row, 1 - 1e-9))(fresh)
        return weights, outcome(block, fresh[0], 0.0), jnp.mean(sampled, axis=0)

    weights, sketched, sampled = both(blocks)
    p = jnp.mean(weights, axis=1).reshape(-1, *(1,) * (sketched.ndim - 1))
    split = (p > 0) & (p < 1)
    assert 0.2 < jnp.mean(split) < 0.95
    # Where all weights are 0 or 1 every number makes the same choice.
    means = jnp.where(split, times(p, sketched) + times(1 - p, sampled), sampled)
    means = jnp.where(p == 1, sketched, means)
    want = jnp.stack([of(matrix), of(matrix), of(other)])
    close(jnp.mean(means, axis=0), want, 1e-12, 100)
    naive = jnp.where(p[:, 0] > 0.5, sketched[:, 0], sampled[:, 0])
    assert jnp.max(abs(jnp.mean(naive, axis=0) - of(matrix))) > 1e-3


SHARED = [slow("diagonal", float, 1), slow("leaves", complex, -1)]
SHARED += [slow("trace", complex, 1), slow("trace with second matvecs", float, 1)]
SHARED += [nightly("diagonal", complex, -1), nightly("leaves", float, 1)]


@pytest.mark.parametrize(("what", "dtype", "sign"), SHARED)
def test_the_mean_over_all_probes_alone(what: str, dtype: Any, sign: int) -> None:
    """As above, but nothing is chosen at random; what is read need not be Hermitian. Sums
    over leaves have a second product."""
    of_trace, again = what.startswith("trace"), int(what not in ("diagonal", "trace"))
    matrix = sign * hermitian(np.array([4.0, 3.0, 2.0, 1.0, 0.3]), dtype)
    if of_trace:
        matrix = jnp.diag(jnp.asarray([6.0, 3, 2, 1, 0.5])).astype(dtype)
        matrix = matrix + 0.3 * hermitian(np.arange(5.0), dtype)
    other = general(5, dtype, seed=3)
    tag = PSD if sign == 1 else lx.negative_semidefinite_tag
    maps = [LinearMap(in_leaves(matrix, tag)), LinearMap(in_leaves(other))]
    blocks, _ = all_batches(dtype)
    mixed: Any = second_batch.mixed_diagonal
    if what == "leaves":
        leaves = by_leaf(maps[0].operator).fn
        mixed = partial(second_batch.mixed_leaves, leaves=leaves)
    if of_trace:
        mixed = partial(krylov_nystrom._trace, resphere=False, mixed=True)

    @jax.jit
    @jax.vmap
    def run(block: Any) -> Any:
        known = products_of_sketch(sign * (matrix @ block), block)
        weights = second_batch.shared_weights(known, known.fitted)
        if of_trace:
            how: Any = {"resphere": False, "near": near_diagonal(block, known.sketch)}
            *_, weights = krylov_nystrom.value_and_error(known, **how)
        blocks = (block[:, :again], block[:, again:]) if again else (block,)
        return weights, read(mixed(maps[0], blocks), maps)

    weights, got = run(blocks)
    assert 0.1 < jnp.mean((weights > 0) & (weights < 1)) < 0.95
    want = jnp.stack([jnp.diagonal(x) for x in (matrix, matrix, other)])
    if what == "leaves":
        want = jnp.stack([jnp.sum(want[:, :2], axis=1), jnp.sum(want[:, 2:], axis=1)], 1)
    want = jnp.sum(want, axis=1) if of_trace else want
    close(jnp.mean(got, axis=0), want, 1e-9 if of_trace else 1e-11, 10)


CHOICES = [slow("trace", "general"), slow("diagonal", "semidefinite")]
CHOICES += [nightly("diagonal", "general"), nightly("diagonal", "symmetric")]
every_choice = pytest.mark.parametrize(("what", "kind"), CHOICES)


@every_choice
def test_it_sketches_what_decays_and_samples_what_does_not(what: str, kind: str) -> None:
    """The error is no larger than that of the better of both by itself, up to three
    standard errors of the ratio: of traces 15 % over 300 keys; of diagonals 8 % on flat
    spectra and, measured over 40 keys, 35 % on 0.7^i, over 10 keys."""
    is_trace = what == "trace"
    n, keys = (200, 300) if is_trace else (150, 10)
    decaying, of = ("poly", jnp.trace) if is_trace else ("exp", jnp.diagonal)
    limits = {"flat": 1.15 if is_trace else 1.08, decaying: 1.15 if is_trace else 1.35}
    for name, limit in limits.items():
        matrix = hermitian(spectrum(name, n))

        def error(estimator: Any, matrix: Any = matrix) -> float:
            run = lambda key: estimator(operator(matrix, kind), key, 20).value  # noqa: E731
            values = over_keys(run, KEY, keys)
            return float(jnp.sqrt(jnp.mean((values - of(matrix)[None]) ** 2)))

        automatic, sketch, sample = map(error, estimators(what, kind))
        better, worse = (sample, sketch) if name == "flat" else (sketch, sample)
        assert automatic < limit * better
        assert automatic < 0.87 * worse


@every_choice
def test_a_batch_of_operators_is_applied_once(what: str, kind: str) -> None:
    """Under `vmap`, where both sides of a conditional would be: 3 keys, 20 products each.
    The operators decay not at all, somewhat and fast."""
    calls = []

    def value(decay: Any, key: Any) -> Any:
        sizes = jnp.exp(-decay * jnp.arange(70.0))

        def matvec(v: Any) -> Any:
            jax.debug.callback(lambda _: calls.append(1), v[0])
            return sizes * v + 0.1 * sizes[::-1] * jnp.sum(sizes[::-1] * v)

        estimate = estimators(what, kind)[0](matrix_free(matvec, 70, TAGS[kind]), key, 20)
        return jnp.sum(jnp.arange(70.0) * estimate.value)

    decays, keys = jnp.asarray([0.0, 0.02, 1.0]), jax.random.split(KEY, 3)
    together = jax.jit(jax.vmap(value))(decays, keys)
    jax.effects_barrier()
    assert len(calls) == 60
    one_by_one = [value(d, k) for d, k in zip(decays, keys, strict=True)]
    close(together, jnp.stack(one_by_one), 1e-11)


GRADIENTS = [("trace", "general", "poly"), ("diagonal", "general", "flat")]
GRADIENTS += [slow("diagonal", kind, "poly") for kind in TAGS]
GRADIENTS += [nightly("diagonal", kind, "flat") for kind in ("symmetric", "semidefinite")]


@pytest.mark.parametrize(("what", "kind", "name"), GRADIENTS)
def test_the_gradient_reads_what_the_value_read(what: str, kind: str, name: str) -> None:
    """Both modes agree. Applied to the operator itself the gradient gives the value, where
    that is a mean of quadratic forms, or XTrace's, or XDiag's two-sided one."""
    matrix, other = hermitian(spectrum(name, 70)), general(70)
    is_trace = what == "trace"
    weights = jnp.ones(()) if is_trace else jnp.arange(70.0)
    truth = jnp.trace(other) if is_trace else weights @ jnp.diagonal(other)
    size = 100 if is_trace else 1e4

    def value(m: Any) -> Any:
        estimate = estimators(what, kind)[0](operator(m, kind), KEY, 20)
        return jnp.sum(weights * estimate.value)

    @jax.jit
    def both(m: Any) -> Any:
        return *jax.value_and_grad(value)(m), jax.jvp(value, (m,), (other,))[1]

    got, gradient, forwards = both(matrix)
    if name == "flat" or kind == "symmetric" or is_trace:
        close(jnp.sum(gradient * matrix), got, 1e-12, size)
    close(jnp.sum(gradient * other), forwards, 1e-12, size)
    assert abs(forwards - truth) > 1e-3
