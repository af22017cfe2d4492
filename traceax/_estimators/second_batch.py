"""XTrace or Hutchinson, XDiag or Hutchinson: the first batch of products decides what the
second batch is.

Where singular values decay, XTrace's second batch A Q removes nearly all of the variance.
Where they do not, as many fresh probes are better, since XTrace has half of Hutchinson's
samples. The first batch Y = A Omega shows which case it is. In the notation of
`leave_one_out`, with F fresh probes, there are two unbiased estimates for each probe i:

    e_i = tr(P_i A) + c_i mu_i* A mu_i                     from A Q
    f_i = (w_i* A w_i + mean_j F_j* A F_j) / 2             from A F

A single decision for all probes, made of Y, would depend on the forms w_i* A w_i that it
decides about, and would be biased: near the threshold by a third of the standard deviation
(6 products, 0.7^i). So each probe i has its own weight a_i in [0, 1], the weight of the
sketch, which is computed from the other probes. Then g_i = a_i e_i + (1 - a_i) f_i is
unbiased for every i. One batch cannot serve both terms, so the second batch is selected at
random: with u uniform on [0, 1),

    u < mean a:    value = sum a_i e_i / sum a_i
    otherwise:     value = sum (1 - a_i) f_i / sum (1 - a_i),

whose mean over u is exactly that of the g_i. If all weights are 1 or all are 0, nothing is
random: the value is XTrace's, or the mean of 2k forms. The blocks of the derivative have
the same weights, and the same holds for them. The second batch is one block, selected
before it is applied, not one of two branches: under `jax.vmap`, too, every product is
applied once.

The weight depends on the share of the variance that a sketch leaves. It is estimated from
the other probes, each left out of the sketch in turn: with r_ij = (I - P_ij) A w_j, where
P_ij is the projector without probes i and j,

    t_i = sum_j |r_ij|^2 / sum_j |A w_j|^2,    j != i,

and of both vectors only the part orthogonal to the probe (mu_ij, w_j) is counted, so that
multiples of I do not matter, as they do not in the estimates. The two estimates are equally
good where t is about a half (less, since the e_i share probes). But t is uncertain if k is
small, and sampling where a sketch is better costs more than the reverse. So a_i falls from
1 to 0 over a range of `WIDTH` that begins at 0.2 + 0.9/sqrt(k).

All of this is k x k: with L = S* S, the u_ij of `jackknife`, and the part of s_j that is
orthogonal to s_i, normalised, t_ij = (s_j - s_i L_ij)/a, a^2 = 1 - |L_ij|^2,

    r_ij = (d_j/a) Q t_ij,    |mu_ij|^2 = |mu_j|^2 + |u_ij* Q* w_j|^2.

Measured (`tests.benchmarks.second_batch`): on flat spectra the error is 1.4 times less than
XTrace's, on decaying ones as small, in between at worst a tenth above both. With fewer than
12 products that is up to a fifth, and the automatic choice does not use this method.

*Diagonals.* The two estimates of each probe are, from A* Q or from A* F,

    e_i = diag A_i + conj(w_i) o B_i w_i,
    f_i = (conj(w_i) o A w_i + mean_j F_j o conj(A* F_j)) / 2.

The share t_i is more certain than for a trace, as it is a sum over n entries: within one
key the weights hardly differ. The variance of the entries of

    conj(w_j) o r_ij,      r_ij = (I - P_ij) A w_j,

is that of r_ij without its part along w_j, and likewise for A w_j. So multiples of I do not
count in Hutchinson's error, but they do in XDiag's, since the sketch mixes them: on flat
spectra t is above 1. Over nine spectra (n = 500, 12 to 100 products) the two estimates are
equally good where t is 0.55 to 0.6 (symmetric) or 0.5 to 0.55 (general): the e_i are half
as many and share probes, and for symmetric operators they miss less,
(I - P_ij) A (I - P_ij) w_j. The weights fall from 1 to 0 over a range of
`WIDTH_ON_DIAGONAL` that begins at 0.4 + 1.2/k. The second term is there because P_ij lacks
two of k probes: if a probe alone catches a direction, its own weight is too small.

Measured (`tests.benchmarks.second_batch --diagonals`): on flat spectra Hutchinson's error,
1.3 to 2.4 times less than XDiag's, on decaying ones XDiag's, in between at worst a fifth
above the better one.

*Semidefinite operators*: XNysDiag and Hutchinson from one batch of products.

For a semidefinite operator the batch Y = A Omega gives two estimates for each probe i, both
unbiased given the other probes,

    e_i = diag A_i + conj(w_i) o B_i w_i,        f_i = conj(w_i) o A w_i,

where A_i is the Nyström approximation from the others. So for any weight a_i in [0, 1] that
is computed from the others,

    g_i = a_i e_i + (1 - a_i) f_i

is unbiased. One batch serves both terms, so nothing is selected at random. The mean of the
g_i is the value, and the blocks of its derivative have the same weights. As above,
a_i falls as t_i grows, the share of the variance that a sketch leaves, here
with r_ij = B_ij w_j. In the notation of `nystrom`, with K = G* G and u_ij the part of g_j
that is orthogonal to g_i,

    u_ij = g_j - g_i K_ij/K_ii,   B_ij w_j = F u_ij/|u_ij|^2,   w_j* B_ij w_j = 1/|u_ij|^2.

Over nine spectra (n = 500, 12 to 100 products) the two are equally good where t is 0.9 to
1, since they have equally many samples. On flat spectra the mean of the g_i has
Hutchinson's error, 1.2 to 2.1 times less than XNysDiag's, on all others XNysDiag's, to 2 %
(6 products and more; with 3 up to 30 % more).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact

from traceax._core.operator import LinearMap, unit_roundoff
from traceax._core.rule import Outcome
from traceax._estimators.driver import Drawn, Method, Probes, Request, one_block
from traceax._estimators.krylov_nystrom import Products, products
from traceax._estimators.readouts import (
    DIAGONAL,
    TRACE,
    LeaveOneOut,
    Pairs,
    Samples,
    Target,
    TwoSided,
    independent,
    leave_one_out,
    trace_pairs,
    two_sided,
)
from traceax._estimators.xdiag import xdiag_samples, xnysdiag_samples
from traceax._estimators.xtrace import xtrace_of
from traceax._linalg import jackknife
from traceax._linalg.columns import (
    column_dots,
    column_norms_squared,
    diagonal,
    mean,
    over,
    squared_modulus,
    times,
)
from traceax._linalg.nystrom import Fit
from traceax._probes.draw import draw, is_rotation_invariant
from traceax._probes.samplers import rademacher

WIDTH, WIDTH_ON_DIAGONAL = 0.3, 0.2


class BothBatches(eqx.Module):
    """Probes of the first batch, fresh ones for the second, and u, which selects."""

    first: Inexact[Array, "n k"]
    fresh: Inexact[Array, "n k"]
    uniform: Float[Array, ""]
    resphere: bool = eqx.field(static=True)


def _drawn(request: Request) -> Drawn:
    k, name, operator = request.num_matvecs // 2, request.name, request.operator
    sketch_key, fresh_key, uniform_key = jax.random.split(request.key, 3)
    first = draw(name, request.sampler, sketch_key, operator, k)
    fresh = draw(name, rademacher, fresh_key, operator, k)
    uniform = jax.random.uniform(uniform_key, (), first.real.dtype)
    resphere = is_rotation_invariant(request.sampler)
    return Drawn(BothBatches(first, fresh, uniform, resphere), 2 * k, k - 1)


class Choice(NamedTuple):
    """Whether the second batch is A Q, and the weights of the probes then, of sum 1."""

    sketches: Bool[Array, ""]
    weights: Float[Array, " k"]


def sketched_or_sampled(
    linear_map: LinearMap, probes: BothBatches, target: Target
) -> Outcome:
    """The trace."""
    del target
    block, resphere = probes.first, probes.resphere
    sketch = linear_map(block)
    loo = leave_one_out(sketch, block, resphere=resphere)
    choice = choose(sketch_weights(loo, sketch), probes.uniform)
    images = linear_map(jnp.where(choice.sketches, loo.basis.columns, probes.fresh))
    eps, weights = unit_roundoff(linear_map.operator), choice.weights
    sketched, sketched_error = xtrace_of(
        loo, sketch, images, eps, resphere=resphere, weights=weights
    )
    first, first_error = _forms(block, sketch, eps)
    forms, error = _forms(probes.fresh, images, eps)
    uneven = jackknife.root_design_effect(weights)
    sampled = (jnp.sum(times(weights, first)) + mean(forms)) / 2
    sampled_error = jnp.hypot(uneven * first_error, error) / 2
    of_both = (sketched, uneven * sketched_error), (sampled, sampled_error)
    value, error = jax.tree.map(partial(jnp.where, choice.sketches), *of_both)
    return Outcome(value, error, _pairs(choice, loo, probes.fresh))


def sketched_or_sampled_diagonal(
    linear_map: LinearMap, probes: BothBatches, target: Target
) -> Outcome:
    block, fresh = probes.first, probes.fresh
    sketch = linear_map(block)
    loo = leave_one_out(sketch, block, resphere=False)
    choice = choose(sketch_weights_of_diagonal(loo, sketch), probes.uniform)
    image = linear_map.adjoint(jnp.where(choice.sketches, loo.basis.columns, fresh))
    eps, hermitian = unit_roundoff(linear_map.operator), linear_map.is_hermitian
    every = xdiag_samples(loo, sketch, image, eps, hermitian=hermitian)
    scale, weights = every.scale, choice.weights
    first = independent(block.conj() * over(sketch, scale), scale, eps, hermitian)
    forms = independent(fresh * over(image, scale).conj(), scale, eps, hermitian)
    sketched, first, forms = (x.of(target, linear_map) for x in (every, first, forms))
    one, one_error = first.value_and_error(weights)
    other, other_error = forms.value_and_error()
    sampled = (one + other) / 2, jnp.hypot(one_error, other_error) / 2
    of_both = sketched.value_and_error(weights), sampled
    value, error = jax.tree.map(partial(jnp.where, choice.sketches), *of_both)
    return Outcome(value, error, _either(target, choice, loo, fresh))


EITHER_TRACE = Method(
    "xtrace or hutchinson_trace", TRACE, sketched_or_sampled, _drawn, minimum=2
)
EITHER_DIAGONAL = Method(
    "xdiag or hutchinson_diagonal",
    DIAGONAL,
    sketched_or_sampled_diagonal,
    _drawn,
    minimum=2,
    sampler=rademacher,
)


def choose(weights: Float[Array, " k"], uniform: Float[Array, ""]) -> Choice:
    """Randomised selection by the weights of the sketch."""
    # Compared with a sum, not a mean: if all weights are 1, rounding changes nothing.
    sketches = uniform * weights.shape[0] < jnp.sum(weights)
    return Choice(sketches, of_sum_one(jnp.where(sketches, weights, 1 - weights)))


def of_sum_one(weights: Float[Array, " k"]) -> Float[Array, " k"]:
    """The weights over their sum; zeros stay zeros."""
    return weights / jnp.maximum(jnp.sum(weights), jnp.finfo(weights.dtype).tiny)


def sketch_weights(loo: LeaveOneOut, sketch: Inexact[Array, "n k"]) -> Float[Array, " k"]:
    """The a_i of traces."""
    least = 0.2 + 0.9 / sketch.shape[1] ** 0.5
    return ramp(missed_shares(loo, sketch), least, WIDTH)


def sketch_weights_of_diagonal(
    loo: LeaveOneOut, sketch: Inexact[Array, "n k"]
) -> Float[Array, " k"]:
    """The a_i of diagonals."""
    least = 0.4 + 1.2 / sketch.shape[1]
    shares = missed_shares(loo, sketch, of_diagonal=True)
    return ramp(shares, least, WIDTH_ON_DIAGONAL)


def ramp(shares: Float[Array, " k"], least: float, width: float) -> Float[Array, " k"]:
    """1 up to the share `least`, 0 from `least + width` on, linear in between."""
    return jnp.clip(1 - (shares - least) / width, 0, 1)


def missed_shares(
    loo: LeaveOneOut, sketch: Inexact[Array, "n k"], *, of_diagonal: bool = False
) -> Float[Array, " k"]:
    """t_i: the share of the variance that a sketch leaves, from all probes but the i-th.

    For a diagonal the part along w_j, not along mu_ij, is left out; both are known from
    r_ij* w_j = r_ij* mu_ij."""
    s, w = loo.directions, loo.probes
    overlap = s.conj().T @ s
    inverse = 1 / jackknife.one_minus_squared_modulus(overlap)
    sw = s.conj().T @ (loo.basis.columns.conj().T @ w)
    own = diagonal(sw)[None, :]
    # u_ij* Q* w_j and t_ij* Q* w_j, but for a.
    uw, tw = sw - overlap * own, own - overlap.conj() * sw
    lengths = column_norms_squared(loo.mu)[None, :] + squared_modulus(uw) * inverse
    if of_diagonal:
        lengths = column_norms_squared(w)[None, :]
    across = 1 - squared_modulus(tw) * inverse / lengths
    missed = loo.distances[None, :] ** 2 * inverse * across
    return shares_of(missed, w, over(sketch, loo.basis.scale))


def shares_of(
    missed: Float[Array, "k k"],
    probes: Inexact[Array, "n k"],
    sketch: Inexact[Array, "n k"],
) -> Float[Array, " k"]:
    """t_i from the |r_ij|^2, for all i and j, in `missed`."""
    others = 1 - jnp.eye(missed.shape[0], dtype=missed.dtype)
    along = squared_modulus(column_dots(probes, sketch)) / column_norms_squared(probes)
    whole = others @ (column_norms_squared(sketch) - along)
    missed = jnp.sum(others * missed, axis=1)
    return missed / jnp.maximum(whole, jnp.finfo(whole.dtype).tiny)


def _forms(
    z: Inexact[Array, "n k"], products: Inexact[Array, "n k"], eps: float
) -> tuple[Inexact[Array, " k"], Float[Array, ""]]:
    """Quadratic forms, and the standard error of their mean."""
    forms = column_dots(z, products)
    rounding = 4 * eps * mean(column_dots(jnp.abs(z), jnp.abs(products)))
    return forms, jackknife.standard_error(forms, rounding)


def _pairs(choice: Choice, loo: LeaveOneOut, fresh: Inexact[Array, "n k"]) -> Pairs:
    """The readout of the trace, 2k columns in both cases."""
    k = loo.x.shape[0]
    sampled = Pairs(
        jnp.hstack([fresh / (2 * k), times(loo.probes, (choice.weights / 2)[None, :])]),
        jnp.hstack([fresh, loo.probes]),
    )
    sketched = trace_pairs(loo, choice.weights)
    return jax.tree.map(partial(jnp.where, choice.sketches), sketched, sampled)


def _either(
    target: Target, choice: Choice, loo: LeaveOneOut, fresh: Inexact[Array, "n k"]
) -> TwoSided:
    """The readout of the diagonal: the blocks of one estimate are selected."""
    sketched = two_sided(target, loo, choice.weights)
    no = jnp.zeros_like(choice.weights)
    sampled = TwoSided(
        target,
        fresh,
        loo.directions,
        loo.probes,
        tested=loo.probes,
        shares=no,
        forward=no[0],
        adjoint=jnp.full_like(no[0], 1 / (2 * fresh.shape[1])),
    )
    chosen = jax.tree.map(partial(jnp.where, choice.sketches), sketched, sampled)
    plain = jnp.where(choice.sketches, 0, choice.weights / 2)
    return eqx.tree_at(lambda w: w.plain, chosen, plain, is_leaf=lambda x: x is None)


LEAST_SHARED, WIDTH_SHARED = 0.8, 0.2


def mixed(linear_map: LinearMap, probes: Probes, target: Target) -> Outcome:
    known = products(linear_map, *probes.blocks)
    fitted = known.fitted
    weights = shared_weights(known, fitted)
    value, error = _shared_samples(known, fitted, weights).value_and_error()
    loo = leave_one_out(known.sketch, known.block, resphere=False)
    return Outcome(known.sign * value, error, _shared_readout(target, loo, weights))


MIXED_DIAGONAL = Method(
    "xnysdiag or hutchinson_diagonal",
    DIAGONAL,
    mixed,
    one_block(1),
    sampler=rademacher,
    instead="xdiag",
)


def shared_weights(known: Products, fitted: Fit) -> Float[Array, " k"]:
    """The a_i."""
    return ramp(nystrom_shares(known, fitted), LEAST_SHARED, WIDTH_SHARED)


def nystrom_shares(known: Products, fitted: Fit) -> Float[Array, " k"]:
    (n, k), right = known.block.shape, over(fitted.residuals, fitted.squares[None, :])
    images = fitted.left @ right
    gram = right.conj().T @ right
    forms = images.conj().T @ images
    lengths, own = diagonal(gram).real[:, None], diagonal(forms).real
    along = over(gram, lengths)
    left = lengths.T - squared_modulus(gram) / lengths
    inverse = 1 / jnp.where(jnp.eye(k, dtype=bool), 1, left)
    products = own[None, :] - 2 * (along.conj() * forms).real
    products = products + squared_modulus(along) * own[:, None]
    return shares_of((products - 1 / n) * inverse**2, known.block, known.sketch)


def _shared_samples(known: Products, fitted: Fit, weights: Float[Array, " k"]) -> Samples:
    """The g_i. Of their terms only the e_i share probes."""
    share, sketched = mean(weights), xnysdiag_samples(known, fitted)
    forms = known.block.conj() * known.sketch
    sampled = independent(forms, known.scale, known.eps, hermitian=True)
    values = weights[None, :] * sketched.values
    values = values + (1 - weights)[None, :] * sampled.values
    rounding = share * sketched.rounding + (1 - share) * sampled.rounding
    return Samples(values, rounding, known.scale, 1 + share)


def _shared_readout(
    target: Target, loo: LeaveOneOut, weights: Float[Array, " k"]
) -> TwoSided:
    share = mean(weights)
    sketched = two_sided(target, loo, of_sum_one(weights))
    fields = lambda w: (w.shares, w.forward, w.adjoint, w.plain, w.x)  # noqa: E731
    rest = (1 - weights) / weights.shape[0]
    new = share * sketched.shares, share, share, rest, loo.x
    return eqx.tree_at(fields, sketched, new, is_leaf=lambda x: x is None)
