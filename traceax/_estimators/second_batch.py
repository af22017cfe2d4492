"""Sketches or samples: the first batch of matvecs decides what the second batch is.

If singular values decay, the second batch A Q of XTrace and XDiag removes most of the
variance. If they do not, it is better to apply A to as many fresh probes F. In the notation
of `leave_one_out`, there are two unbiased estimates for each probe i of Y = A Omega:

    traces:     e_i = tr(P_i A) + c_i mu_i* A mu_i                              from A Q
                f_i = (w_i* (A - D_i) w_i + tr D_i + mean_j F_j* A F_j) / 2     from A F
    diagonals:  e_i = diag A_i + conj(w_i) o B_i w_i                            from A* Q
                f_i = (conj(w_i) o A w_i + mean_j F_j o conj(A* F_j)) / 2       from A* F

D_i is a multiple of the diagonal that the other probes estimate, so that nearly diagonal
operators have small errors (`near_diagonal`). For random signs it changes nothing.

A single decision for all probes, computed from Y, would depend on the forms w_i* A w_i that
it decides about, so the estimate would be biased. Instead each probe i has its own weight
a_i in [0, 1], which is computed from the other probes. Then g_i = a_i e_i + (1 - a_i) f_i
is unbiased. One second batch cannot serve both terms, so one of the two is selected at
random before it is applied. With u uniform on [0, 1), the mean of the g_i is the
expectation over u of

    u < mean a:    value = sum a_i e_i / sum a_i
    otherwise:     value = sum (1 - a_i) f_i / sum (1 - a_i).

The weight a_i falls from 1 to 0 as t_i, the share of the variance that a sketch leaves,
grows to about .5. (With fewer than 6 probes only a share above 1.2 counts.) If the operator
is nearly diagonal, the variance of samples is smaller than that of forms on the sphere, or
of signs on a dense operator, and t_i is divided by the ratio. This share is

    t_i = sum_j |r_ij|^2 / sum_j |A w_j|^2,    r_ij = (I - P_ij) A w_j,    j != i,

with P_ij the projector without probes i and j. For a trace, multiples of I do not matter,
so only parts orthogonal to a probe count: the part of r_ij orthogonal to mu_ij, and the
part of A w_j orthogonal to w_j. For a diagonal, multiples of I matter in XDiag's error, so
the parts of r_ij and A w_j along w_j are left out instead. Let L = S* S, take u_ij from
`jackknife`, and let t_ij = (s_j - s_i L_ij)/a with a^2 = 1 - |L_ij|^2. Then everything
follows from k x k matrices:

    r_ij = (d_j/a) Q t_ij,    |mu_ij|^2 = |mu_j|^2 + |u_ij* Q* w_j|^2.

On flat spectra the measured error was 1.4 times smaller than the error of XTrace, and 2.4
times smaller than the error of XDiag. On decaying spectra it was the same. Between these
cases it was at worst a tenth larger for traces, and a fifth larger for diagonals
(`tests.benchmarks.second_batch`).

**Semidefinite operators.** The batch Y = A Omega gives both estimates of a diagonal, e_i by
XNysDiag and f_i = conj(w_i) o A w_i. So the value is the mean of the g_i itself. (For sums
over leaves, the e_i use second matvecs: see `krylov_nystrom`.) Here r_ij = B_ij w_j, with
B_ij the remainder of the Nyström approximation without i and j. The two estimates are
equally good if t_i lies between .9 and 1. In the notation of `nystrom`, with K = G* G,

    u_ij = g_j - g_i K_ij/K_ii,   B_ij w_j = F u_ij/|u_ij|^2,   w_j* B_ij w_j = 1/|u_ij|^2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from traceax._core.canonical import compiled
from traceax._core.estimate import Estimate
from traceax._core.keys import BLOCKS, keys_of
from traceax._core.operator import LinearMap
from traceax._core.rule import Algorithm, Outcome
from traceax._estimators.call import Blocks, Call
from traceax._estimators.krylov_nystrom import (
    Products,
    draw_for_products,
    leaf_by_leaf,
    products,
    products_of_sketch,
)
from traceax._estimators.near_diagonal import NearDiagonal, near_diagonal
from traceax._estimators.readouts import (
    LeaveOneOut,
    Pairs,
    Reduction,
    Samples,
    TwoSided,
    ValueAndError,
    each,
    independent,
    leave_one_out,
    sketched_by,
    total,
    trace_pairs,
    two_sided,
)
from traceax._estimators.xdiag import xdiag_samples, xnysdiag_samples
from traceax._estimators.xtrace import xtrace_of
from traceax._linalg.columns import (
    Block,
    Number,
    OfProbes,
    column_dots,
    column_norms_squared,
    diagonal_of,
    dot,
    mean,
    over,
    squared_modulus,
    summed,
)
from traceax._linalg.nystrom import Fit
from traceax._probes.draw import Draws, for_sketch
from traceax._probes.samplers import rademacher

# With fewer probes the shares t_i are too noisy to tell a flat spectrum from a decaying
# one. Then samples take the place of a sketch only if they are clearly better.
DECISIVE = 6


# The probes of the first batch, fresh probes F for the second batch, and the number u on
# [0, 1) that selects the second batch.
Drawn = tuple[Block, Block, Number]


def xtrace_or_hutchinson(call: Call) -> Estimate:
    """Estimate the trace by XTrace or Hutchinson, whichever the first batch selects."""
    call = call.using(for_sketch(call.operator)).measured()
    algorithm = partial(either_trace, resphere=call.resphere)
    return _finish(call, algorithm, "the better of xtrace and hutchinson_trace")


def xdiag_or_hutchinson(call: Call) -> Estimate:
    """Estimate the diagonal, or sums over parts of it, by XDiag or Hutchinson."""
    call = call.using(rademacher).measured()
    algorithm = partial(either_diagonal, reduce=call.reduce.fn)
    return _finish(call, algorithm, "the better of xdiag and hutchinson_diagonal")


def _finish(call: Call, algorithm: Algorithm, method: str) -> Estimate:
    """Draw the probes of both batches and u, and run the algorithm."""
    k, space = call.num_matvecs // 2, call.operator.in_structure()
    draws = (Draws(call.name, s, space, k) for s in (call.source, rademacher))
    probes = compiled(_both_batches, *draws, call.key)
    return call.finish(algorithm, probes, method=method, spent=2 * k, degrees=k - 1)


def _both_batches(first: Draws, fresh: Draws, key: PRNGKeyArray) -> Drawn:
    sketch_key, fresh_key, uniform_key = keys_of(key, 3, BLOCKS)
    blocks = first.one(sketch_key), fresh.one(fresh_key)
    return *blocks, jax.random.uniform(uniform_key, (), blocks[0].real.dtype)


def either_trace(linear_map: LinearMap, probes: Drawn, *, resphere: bool) -> Outcome:
    """Estimate the trace from Y = A Omega and one of A Q and A F."""
    first, fresh, uniform = probes
    loo, eps = sketched_by(linear_map, first, resphere=resphere)
    near = near_diagonal(first, over(loo.sketch, loo.basis.scale))
    select, weights = choose(weights_of(loo, near), uniform)
    image = linear_map(select(loo.basis.columns, fresh))
    sketched, scale = xtrace_of(loo, image, eps, weights), loo.basis.scale
    forms = independent(fresh.conj() * image, scale, eps, False, total)
    sampled = half_of_each(replace(near.samples(eps), scale=scale), forms, weights)
    halves = fresh / (2 * fresh.shape[1]), near.left(weights / 2)
    plain = Pairs(jnp.hstack(halves), jnp.hstack([fresh, first]))
    readout = select(trace_pairs(loo, weights), plain)
    return Outcome(*select(sketched, sampled), readout=readout)


def either_diagonal(linear_map: LinearMap, probes: Drawn, *, reduce: Reduction) -> Outcome:
    """Estimate the diagonal from Y = A Omega and one of A* Q and A* F."""
    (first, fresh, uniform), hermitian = probes, linear_map.is_hermitian
    loo, eps = sketched_by(linear_map, first, resphere=False)
    near = near_diagonal(first, over(loo.sketch, loo.basis.scale))
    select, weights = choose(weights_of(loo, near, of_diagonal=True), uniform)
    image = linear_map.adjoint(select(loo.basis.columns, fresh))
    sketched = xdiag_samples(loo, image, eps, reduce, hermitian).value_and_error(weights)

    how = loo.basis.scale, eps, hermitian, reduce
    forms = independent(fresh * image.conj(), *how)
    sampled = half_of_each(independent(first.conj() * loo.sketch, *how), forms, weights)
    # The readout of the samples, and that of XDiag, in the same blocks.
    none, half = jnp.zeros_like(weights), weights / 2
    each, blocks = jnp.full_like(eps, 0.5 / half.size), (loo.directions, first, first)
    plain = TwoSided(reduce, fresh, *blocks, shares=none, plain=half, adjoint=each)
    readout = replace(two_sided(loo, reduce, weights), plain=none, adjoint=0 * each)
    return Outcome(*select(sketched, sampled), readout=select(readout, plain))


def half_of_each(one: Samples, other: Samples, weights: OfProbes) -> ValueAndError:
    """Return the mean of two independent estimates, and its error bar.

    The first one is a mean with `weights`.
    """
    (x, error), (y, other_error) = one.value_and_error(weights), other.value_and_error()
    return (x + y) / 2, jnp.hypot(error, other_error) / 2


def choose(weights: OfProbes, uniform: Number) -> tuple[Callable[..., Any], OfProbes]:
    """Select the second batch at random. `weights` are the a_i, and `uniform` is u.

    Return a function that selects the first of two trees if the second batch is A Q, else
    the second, and weights of the probes, which sum to 1.
    """
    # The comparison is with a sum, not a mean. So if all weights are 1, the sketch is
    # selected whatever the rounding.
    sketches = uniform * weights.shape[0] < summed(weights)
    weights = jnp.where(sketches, weights, 1 - weights)
    # If all weights are zero, they stay zero.
    whole = jnp.maximum(summed(weights), jnp.finfo(weights.dtype).tiny)
    return partial(jax.tree.map, partial(jnp.where, sketches)), weights / whole


def weights_of(loo: LeaveOneOut, near: NearDiagonal, of_diagonal: bool = False) -> OfProbes:
    """Return the weights a_i of the estimates of a trace, or of a diagonal."""
    k, sampled = near.share.size, near.share
    least, width = 0.4 + 1.2 / k, 0.2
    if not of_diagonal:
        least, width, sampled = 0.2 + 0.9 / k**0.5, 0.3, sampled * (near.excess + 1) / 2
    shares = missed_shares(loo, of_diagonal) / sampled
    return jnp.clip(1 - (shares - (least if k >= DECISIVE else 1.2)) / width, 0, 1)


def missed_shares(loo: LeaveOneOut, of_diagonal: bool = False) -> OfProbes:
    """Return t_i, the share of the variance that a sketch leaves, from all probes but i.

    For a trace the part of r_ij along mu_ij is left out, and for a diagonal the part along
    w_j. Both are known from r_ij* w_j = r_ij* mu_ij.
    """
    # Q* Omega is made again: where it is kept, sums over the leaves of a network take 6 %
    # more memory on several devices.
    loo = loo._replace(inside=dot(loo.basis.columns.conj().T, loo.probes))
    s, overlap, inverse, tests, _ = loo.pairs
    w, own = loo.probes, column_dots(s, loo.inside)[None, :]
    # `tests` are a u_ij* Q* w_j, and these are a t_ij* Q* w_j.
    tw = own - overlap.conj() * (tests + overlap * own)
    lengths = column_norms_squared(w if of_diagonal else loo.mu)[None, :]
    lengths = lengths if of_diagonal else lengths + squared_modulus(tests) * inverse
    across = 1 - squared_modulus(tw) * inverse / lengths
    missed = loo.distances[None, :] ** 2 * inverse * across
    return shares_of(missed, w, over(loo.sketch, loo.basis.scale))


def shares_of(missed: Float[Array, "k k"], probes: Block, sketch: Block) -> OfProbes:
    """Return t_i, given the |r_ij|^2 for all i and j in `missed`.

    The part of r_ij that does not count is already left out. `sketch` holds the A w_j, over
    the same scale as r_ij.
    """
    others = 1 - jnp.eye(missed.shape[0], dtype=missed.dtype)
    along = squared_modulus(column_dots(probes, sketch)) / column_norms_squared(probes)
    whole = dot(others, column_norms_squared(sketch) - along)
    return summed(others * missed) / jnp.maximum(whole, jnp.finfo(whole.dtype).tiny)


def xnysdiag_or_hutchinson(call: Call) -> Estimate:
    """Estimate the diagonal of a semidefinite operator by XNysDiag and Hutchinson."""
    probes = call.using(rademacher).draw(call.num_matvecs)
    method = "xnysdiag mixed with hutchinson_diagonal"
    return call.finish(mixed_diagonal, probes, method=method)


def mixed_diagonal(linear_map: LinearMap, probes: tuple[Block]) -> Outcome:
    """Estimate the diagonal as the mean of the g_i, from one batch."""
    known = products(linear_map, *probes)
    fitted, forms = known.fitted, known.block.conj() * known.sketch
    weights = shared_weights(known, fitted)
    sketched = xnysdiag_samples(known, fitted)
    sampled = independent(forms, jnp.ones_like(known.scale), known.eps, True, each)
    share, a = mean(weights), weights[None, :]
    values = a * sketched.values + (1 - a) * sampled.values
    rounding = share * sketched.rounding + (1 - share) * sampled.rounding
    # The e_i share probes and the f_i do not, so the `sharing` lies between 1 and 2.
    value, error = Samples(values, rounding, known.scale, 1 + share).value_and_error()
    return Outcome(known.sign * value, error, _shared_readout(known, each, weights))


def nystrom_or_hutchinson(call: Call) -> Estimate:
    """Estimate the sums over leaves of a semidefinite operator, with second matvecs."""
    probes, spent = draw_for_products(call.using(rademacher))
    algorithm = partial(mixed_leaves, leaves=call.reduce.fn)
    method = "xnystrace mixed with hutchinson_trace"
    return call.finish(algorithm, probes, method=method, spent=spent)


def mixed_leaves(linear_map: LinearMap, probes: Blocks, *, leaves: Any) -> Outcome:
    """Estimate sums over leaves, with weights a_i that use only the first matvecs."""
    known = products(linear_map, *probes)
    first = products_of_sketch(known.sketch, known.block)
    weights = shared_weights(first, first.fitted)
    value, error = leaf_by_leaf(known, weights, leaves)
    return Outcome(known.sign * value, error, _shared_readout(known, leaves, weights))


def shared_weights(known: Products, fitted: Fit) -> OfProbes:
    """Return the weights a_i for a semidefinite operator, from the shares t_i."""
    near = near_diagonal(known.block, known.sketch)
    return jnp.clip(1 - (nystrom_shares(known, fitted) / near.share - 0.8) / 0.2, 0, 1)


def nystrom_shares(known: Products, fitted: Fit) -> OfProbes:
    """Return t_i for a semidefinite operator, with r_ij = B_ij w_j.

    The part of r_ij along w_j is left out. Its squared length is (w_j* B_ij w_j)^2/n,
    because |w_j|^2 = n. Both |r_ij|^2 and this length have the factor 1/|u_ij|^4.
    """
    (n, k), right = known.block.shape, over(fitted.residuals, fitted.squares[None, :])
    images, gram = dot(fitted.left, right), dot(right.conj().T, right)
    forms = dot(images.conj().T, images)
    lengths, own = diagonal_of(gram).real[:, None], diagonal_of(forms).real
    along = over(gram, lengths)
    left = lengths.T - squared_modulus(gram) / lengths
    inverse = 1 / jnp.where(jnp.eye(k, dtype=bool), 1, left)
    missed = own[None, :] - 2 * (along.conj() * forms).real - 1 / n
    missed = (missed + squared_modulus(along) * own[:, None]) * inverse**2
    return shares_of(missed, known.block, known.sketch)


def _shared_readout(known: Products, reduce: Reduction, weights: OfProbes) -> TwoSided:
    """Return the readout for the g_i. It weighs the e_i by a_i and the f_i by 1 - a_i."""
    loo = leave_one_out(known.sketch, known.block, resphere=False)
    k = weights.size
    return replace(two_sided(loo, reduce, weights / k), plain=(1 - weights) / k, x=loo.x)
