"""XTrace or Hutchinson: the first batch of products chooses what the second is spent on.

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
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Float, Inexact, PRNGKeyArray

from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, resolution
from traceax._core.rule import Outcome, estimate
from traceax._linalg.columns import column_dots, column_norms_squared, diagonal, mean
from traceax._linalg.columns import squared_modulus as squared
from traceax._linalg.jackknife import (
    both_errors,
    one_minus_squared_modulus,
    standard_error,
    unevenness,
)
from traceax._probes.choice import for_sketch
from traceax._probes.draw import draw
from traceax._probes.samplers import Sampler, rademacher
from traceax._probes.traits import is_rotation_invariant
from traceax._traces.leave_one_out import LeaveOneOut, leave_one_out
from traceax._traces.weights import TraceWeight
from traceax._traces.xtrace import xtrace_of

FEWEST = 12

WIDTH = 0.3


def sketched_or_sampled_trace(
    name: str, operator: lx.AbstractLinearOperator, key: PRNGKeyArray, num_matvecs: int
) -> Estimate:
    """The trace on behalf of the public function `name`, which has checked the rest, and
    has left at least `FEWEST` matvecs and fewer than n."""
    k = num_matvecs // 2
    sampler = for_sketch(None, operator)
    probes = Probes.drawn(name, sampler, operator, key, k)
    algorithm = partial(sketched_or_sampled, resphere=is_rotation_invariant(sampler))
    return estimate(algorithm, operator, probes, 2 * k, degrees_of_freedom=k - 1)


class Probes(NamedTuple):
    first: Inexact[Array, "n k"]
    fresh: Inexact[Array, "n k"]
    lot: Float[Array, ""]

    @staticmethod
    def drawn(
        name: str,
        sampler: Sampler,
        operator: lx.AbstractLinearOperator,
        key: PRNGKeyArray,
        k: int,
    ) -> Probes:
        """On behalf of the public function `name`; those of a sketch by `sampler`."""
        sketch_key, fresh_key, lot_key = jax.random.split(key, 3)
        first = draw(name, sampler, sketch_key, operator, k)
        fresh = draw(name, rademacher, fresh_key, operator, k)
        lot = jax.random.uniform(lot_key, (), first.real.dtype)
        return Probes(first, fresh, lot)


class Choice(NamedTuple):
    """Whether A Q is worth more, and how much probe i has to say then; the sum is 1."""

    sketches: Bool[Array, ""]
    weights: Float[Array, " k"]


def sketched_or_sampled(
    linear_map: LinearMap, probes: Probes, *, resphere: bool
) -> Outcome:
    sketch = linear_map(probes.first)
    loo = leave_one_out(sketch, probes.first, resphere=resphere)
    choice = choose(votes(loo, sketch), probes.lot)
    images = linear_map(jnp.where(choice.sketches, loo.basis.columns, probes.fresh))
    eps = resolution(linear_map.operator)
    value, error = _judge(choice, loo, sketch, images, probes.fresh, eps, resphere)
    return Outcome(value, error, _weight(choice, loo, probes.fresh))


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
    lengths = column_norms_squared(loo.mu)[None, :] + squared(uw) * inverse
    if of_diagonal:
        lengths = column_norms_squared(w)[None, :]
    across = 1 - squared(tw) * inverse / lengths
    missed = loo.distances[None, :] ** 2 * inverse * across
    return shares_of(missed, w, sketch / loo.basis.scale)


def shares_of(
    missed: Float[Array, "k k"],
    probes: Inexact[Array, "n k"],
    sketch: Inexact[Array, "n k"],
) -> Float[Array, " k"]:
    """t_i from what is missed of probe j where i is left out, for all i and j."""
    others = 1 - jnp.eye(missed.shape[0], dtype=missed.dtype)
    along = squared(column_dots(probes, sketch)) / column_norms_squared(probes)
    whole = others @ (column_norms_squared(sketch) - along)
    missed = jnp.sum(others * missed, axis=1)
    return missed / jnp.maximum(whole, jnp.finfo(whole.dtype).tiny)


def _judge(
    choice: Choice,
    loo: LeaveOneOut,
    sketch: Inexact[Array, "n k"],
    images: Inexact[Array, "n k"],
    fresh: Inexact[Array, "n k"],
    eps: float,
    resphere: bool,
) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
    """Value and standard error from Y = A Omega, and A Q or A F."""
    sketched, sketched_error = xtrace_of(
        loo, sketch, images, eps, resphere=resphere, weights=choice.weights
    )
    first, first_error = _forms(loo.probes, sketch, eps)
    uneven = unevenness(choice.weights)
    forms, error = _forms(fresh, images, eps)
    sampled = (jnp.sum(choice.weights * first) + mean(forms)) / 2
    sampled_error = both_errors(uneven * first_error, error) / 2
    return (
        jnp.where(choice.sketches, sketched, sampled),
        jnp.where(choice.sketches, uneven * sketched_error, sampled_error),
    )


def _forms(
    z: Inexact[Array, "n k"], products: Inexact[Array, "n k"], eps: float
) -> tuple[Inexact[Array, " k"], Float[Array, ""]]:
    """Quadratic forms, and the standard error of their mean."""
    forms = column_dots(z, products)
    rounding = 4 * eps * mean(column_dots(jnp.abs(z), jnp.abs(products)))
    return forms, standard_error(forms, rounding)


def _weight(choice: Choice, loo: LeaveOneOut, fresh: Inexact[Array, "n k"]) -> TraceWeight:
    """What the value is read through, in 2k columns either way."""
    k = loo.x.shape[0]
    sampled = TraceWeight(
        jnp.hstack([fresh / (2 * k), loo.probes * (choice.weights / 2)[None, :]]),
        jnp.hstack([fresh, loo.probes]),
    )
    sketched = loo.trace_weight(choice.weights)
    return jax.tree.map(partial(jnp.where, choice.sketches), sketched, sampled)
