"""XTrace or Hutchinson, XDiag or Hutchinson: the first batch of products chooses what
the second is spent on.

Where singular values decay, XTrace's second batch A Q is worth everything; where they do
not, as many fresh probes are worth more, since XTrace has half of Hutchinson's samples. The
first batch, Y = A Omega, tells which. In the notation of `leave_one_out`, with F fresh
probes, both batches make of each probe i an estimate that is unbiased whatever the others
are:

    e_i = tr(P_i A) + c_i mu_i* A mu_i                     from A Q
    f_i = (w_i* A w_i + mean_j F_j* A F_j) / 2             from A F

Were one statistic of Y to choose for all, it would know the very w_i* A w_i that it chooses
among, and would be biased: near its threshold by a third of the standard deviation (6
products, 0.7^i). So probe i is left out of its own choice: a_i, between 0 and 1, is what
the other probes say of A Q, and g_i = a_i e_i + (1 - a_i) f_i is unbiased for every i. One
batch cannot serve both terms; so a lot u is drawn, uniform on [0, 1), and

    u < mean a:    value = sum a_i e_i / sum a_i
    otherwise:     value = sum (1 - a_i) f_i / sum (1 - a_i),

whose mean over u is that of the g_i, exactly. Where the probes agree, nothing is left to
chance: the value is XTrace's, or the mean of 2k forms. Given all probes but the lot the
same holds for the blocks of the derivative, in whose place the weights stand as they do
here. The second batch is one block, chosen, not one of two branches: under `jax.vmap`
too, every product is applied once.

What the others say is the share of the variance that a sketch leaves, their own probes left
out of it one by one: with r_ij = (I - P_ij) A w_j, P_ij lacking probes i and j,

    t_i = sum_j |r_ij|^2 / sum_j |A w_j|^2,    j != i,

of both only what is orthogonal to the probe (mu_ij, w_j): so multiples of I count for
nothing, as they do in the estimates. Where t is a half the two are as good as each other
(or where it is somewhat less, since the e_i share probes); but t is as uncertain as k
probes leave it, and to sample what should be sketched costs more than the other way round.
So a_i falls from 1 to 0 over a range of `WIDTH` that begins at 0.2 + 0.9/sqrt(k).

All of it is k x k: with L = S* S, the u_ij of `jackknife`, and the part of s_j that is
orthogonal to s_i, of length 1, t_ij = (s_j - s_i L_ij)/a, a^2 = 1 - |L_ij|^2,

    r_ij = (d_j/a) Q t_ij,    |mu_ij|^2 = |mu_j|^2 + |u_ij* Q* w_j|^2.

Measured (`tests.benchmarks.second_batch`): on flat spectra 1.4 times less error than
XTrace; where eigenvalues fall as i^-1 or faster as much, with 12 products up to a tenth
more. Between, where the two are within a third of each other, the result is most often
between them, at worst a tenth above both: where votes are split, fewer samples are
averaged. With fewer products than `FEWEST` that is up to a fifth, and nothing is put to the
vote.

*Diagonals.* Each probe i has two estimates, from A* Q or from A* F with F fresh probes,

    e_i = diag A_i + conj(w_i) o B_i w_i,
    f_i = (conj(w_i) o A w_i + mean_j F_j o conj(A* F_j)) / 2,

and a vote a_i that the other probes cast; the lot decides which of the two are averaged.

The share t_i of the variance that a sketch leaves is more certain than that of a trace, for
it is that of n entries, not of one: within a key votes hardly differ. Of the entries of

    conj(w_j) o r_ij,      r_ij = (I - P_ij) A w_j,

the variance is that of r_ij without what is along w_j, as it is of A w_j. So multiples of I
count for nothing in Hutchinson's error, which they do not enter, but for much in XDiag's:
a sketch tilts them. On flat spectra t is therefore above 1. Measured, over nine spectra
(n = 500, 12 to 100 products), XDiag and Hutchinson's diagonal are as good as each other
where t is 0.55 to 0.6 (symmetric), 0.5 to 0.55 (general): the e_i, half as many, share
probes, and of symmetric operators they miss less, (I - P_ij) A (I - P_ij) w_j. There the
votes turn from 1 to 0: over a range of `WIDTH` that begins at 0.4, and later by 1.2/k, for
P_ij lacks two of k probes, and with few of them a probe that catches what others miss has
them vote for fresh ones in its own case alone, where they are worst.

Measured (`tests.benchmarks.second_batch --diagonals`; 40 keys, of what is between 100): on
flat spectra Hutchinson's error to 1 %, 1.3 to 2.4 times less than XDiag's; where
eigenvalues fall as i^-1 or faster XDiag's error, with 12 products to 5 %; between, up to a
tenth above the better of the two, and at worst, with 12 products on i^-0.75, a fifth: rare
keys on which few probes are averaged make that of it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact

from traceax._core.operator import LinearMap, resolution
from traceax._core.rule import Outcome
from traceax._estimators.driver import (
    Drawn,
    Method,
    Request,
)
from traceax._estimators.leave_one_out import (
    LeaveOneOut,
    independent,
    leave_one_out,
)
from traceax._estimators.readouts import (
    DIAGONAL,
    TRACE,
    Pairs,
    Target,
    TwoSided,
    trace_pairs,
    two_sided,
)
from traceax._estimators.xdiag import samples_of
from traceax._estimators.xtrace import xtrace_of
from traceax._linalg.columns import (
    column_dots,
    column_norms_squared,
    diagonal,
    mean,
    squared_modulus,
)
from traceax._linalg.jackknife import (
    one_minus_squared_modulus,
    root_design_effect,
    standard_error,
)
from traceax._probes.draw import draw, is_rotation_invariant
from traceax._probes.samplers import rademacher

FEWEST = 12

WIDTH, WIDTH_ON_DIAGONAL = 0.3, 0.2


class BothBatches(eqx.Module):
    """Probes of the first batch, fresh ones for the second, and the lot."""

    first: Inexact[Array, "n k"]
    fresh: Inexact[Array, "n k"]
    lot: Float[Array, ""]
    resphere: bool = eqx.field(static=True)


def _drawn(request: Request) -> Drawn:
    k, name, operator = request.num_matvecs // 2, request.name, request.operator
    sketch_key, fresh_key, lot_key = jax.random.split(request.key, 3)
    first = draw(name, request.sampler, sketch_key, operator, k)
    fresh = draw(name, rademacher, fresh_key, operator, k)
    lot = jax.random.uniform(lot_key, (), first.real.dtype)
    resphere = is_rotation_invariant(request.sampler)
    return Drawn(BothBatches(first, fresh, lot, resphere), 2 * k, k - 1)


class Choice(NamedTuple):
    """Whether A Q is worth more, and how much probe i has to say then; the sum is 1."""

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
    choice = choose(votes(loo, sketch), probes.lot)
    images = linear_map(jnp.where(choice.sketches, loo.basis.columns, probes.fresh))
    eps, weights = resolution(linear_map.operator), choice.weights
    sketched, sketched_error = xtrace_of(
        loo, sketch, images, eps, resphere=resphere, weights=weights
    )
    first, first_error = _forms(block, sketch, eps)
    forms, error = _forms(probes.fresh, images, eps)
    uneven = root_design_effect(weights)
    sampled = (jnp.sum(weights * first) + mean(forms)) / 2
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
    choice = choose(votes_on_diagonal(loo, sketch), probes.lot)
    image = linear_map.adjoint(jnp.where(choice.sketches, loo.basis.columns, fresh))
    eps, hermitian = resolution(linear_map.operator), linear_map.is_hermitian
    sketched = samples_of(loo, sketch, image, eps, hermitian=hermitian)
    scale, weights = sketched.scale, choice.weights
    first = independent(block.conj() * (sketch / scale), scale, eps, hermitian)
    forms = independent(fresh * (image / scale).conj(), scale, eps, hermitian)
    (one, one_error), (other, other_error) = (
        first.value_and_error(weights),
        forms.value_and_error(),
    )
    sampled = (one + other) / 2, jnp.hypot(one_error, other_error) / 2
    of_both = sketched.value_and_error(weights), sampled
    value, error = jax.tree.map(partial(jnp.where, choice.sketches), *of_both)
    return Outcome(value, error, _either(target, choice, loo, fresh))


EITHER_TRACE = Method("trace", TRACE, sketched_or_sampled, _drawn, minimum=2)
EITHER_DIAGONAL = Method(
    "diagonal",
    DIAGONAL,
    sketched_or_sampled_diagonal,
    _drawn,
    minimum=2,
    sampler=rademacher,
)


def choose(ayes: Float[Array, " k"], lot: Float[Array, ""]) -> Choice:
    # Products of whole numbers: where all agree, no rounding may outvote them.
    sketches = lot * ayes.shape[0] < jnp.sum(ayes)
    return Choice(sketches, of_sum_one(jnp.where(sketches, ayes, 1 - ayes)))


def of_sum_one(weights: Float[Array, " k"]) -> Float[Array, " k"]:
    """Or zero, where all are."""
    return weights / jnp.maximum(jnp.sum(weights), jnp.finfo(weights.dtype).tiny)


def votes(loo: LeaveOneOut, sketch: Inexact[Array, "n k"]) -> Float[Array, " k"]:
    """a_i: what all probes but the i-th say of A Q."""
    least = 0.2 + 0.9 / sketch.shape[1] ** 0.5
    return ramp(missed_shares(loo, sketch), least, WIDTH)


def votes_on_diagonal(
    loo: LeaveOneOut, sketch: Inexact[Array, "n k"]
) -> Float[Array, " k"]:
    """a_i: what all probes but the i-th say of A* Q."""
    least = 0.4 + 1.2 / sketch.shape[1]
    shares = missed_shares(loo, sketch, of_diagonal=True)
    return ramp(shares, least, WIDTH_ON_DIAGONAL)


def ramp(shares: Float[Array, " k"], least: float, width: float) -> Float[Array, " k"]:
    """From 1, up to `least`, to 0."""
    return jnp.clip(1 - (shares - least) / width, 0, 1)


def missed_shares(
    loo: LeaveOneOut, sketch: Inexact[Array, "n k"], *, of_diagonal: bool = False
) -> Float[Array, " k"]:
    """t_i: what a sketch misses of the variance, by all probes but the i-th.

    A diagonal is compared with probes as they are, not with what a sketch leaves of them:
    there r_ij, too, is counted but for what is along w_j, and r_ij* w_j = r_ij* mu_ij."""
    s, w = loo.directions, loo.probes
    overlap = s.conj().T @ s
    inverse = 1 / one_minus_squared_modulus(overlap)
    sw = s.conj().T @ (loo.basis.columns.conj().T @ w)
    own = diagonal(sw)[None, :]
    # u_ij* Q* w_j and t_ij* Q* w_j, but for a.
    uw, tw = sw - overlap * own, own - overlap.conj() * sw
    lengths = column_norms_squared(loo.mu)[None, :] + squared_modulus(uw) * inverse
    if of_diagonal:
        lengths = column_norms_squared(w)[None, :]
    across = 1 - squared_modulus(tw) * inverse / lengths
    missed = loo.distances[None, :] ** 2 * inverse * across
    return shares_of(missed, w, sketch / loo.basis.scale)


def shares_of(
    missed: Float[Array, "k k"],
    probes: Inexact[Array, "n k"],
    sketch: Inexact[Array, "n k"],
) -> Float[Array, " k"]:
    """t_i from what is missed of probe j where i is left out, for all i and j."""
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
    return forms, standard_error(forms, rounding)


def _pairs(choice: Choice, loo: LeaveOneOut, fresh: Inexact[Array, "n k"]) -> Pairs:
    """What the trace is read through, in 2k columns either way."""
    k = loo.x.shape[0]
    sampled = Pairs(
        jnp.hstack([fresh / (2 * k), loo.probes * (choice.weights / 2)[None, :]]),
        jnp.hstack([fresh, loo.probes]),
    )
    sketched = trace_pairs(loo, choice.weights)
    return jax.tree.map(partial(jnp.where, choice.sketches), sketched, sampled)


def _either(
    target: Target, choice: Choice, loo: LeaveOneOut, fresh: Inexact[Array, "n k"]
) -> TwoSided:
    """What the diagonal is read through: of the two only the blocks of one are applied."""
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
