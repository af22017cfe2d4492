"""XDiag or Hutchinson: the first batch of products chooses what the second is spent on.

As for the trace (`_traces.second_batch`, where it is shown that nothing is biased), each
probe i has two estimates, from A* Q or from A* F with F fresh probes,

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

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, resolution
from traceax._core.rule import Outcome, estimate
from traceax._diagonals.samples import independent
from traceax._diagonals.weights import EitherWeight, TwoSidedWeight
from traceax._diagonals.xdiag import samples_of
from traceax._linalg.jackknife import both_errors
from traceax._probes.samplers import rademacher
from traceax._traces.leave_one_out import LeaveOneOut, leave_one_out
from traceax._traces.second_batch import Choice, Probes, choose, missed_shares, ramp

WIDTH = 0.2


def sketched_or_sampled_diagonal(
    name: str, operator: lx.AbstractLinearOperator, key: PRNGKeyArray, num_matvecs: int
) -> Estimate:
    """The diagonal on behalf of the public function `name`, which has checked the rest, and
    has left at least `_traces.second_batch.FEWEST` matvecs and fewer than n."""
    k = num_matvecs // 2
    probes = Probes.drawn(name, rademacher, operator, key, k)
    structure = operator.in_structure()
    return estimate(sketched_or_sampled, operator, probes, 2 * k, k - 1, structure)


def sketched_or_sampled(linear_map: LinearMap, probes: Probes) -> Outcome:
    sketch = linear_map(probes.first)
    loo = leave_one_out(sketch, probes.first, resphere=False)
    choice = choose(votes(loo, sketch), probes.lot)
    block = jnp.where(choice.sketches, loo.basis.columns, probes.fresh)
    image = linear_map.adjoint(block)
    eps, hermitian = resolution(linear_map.operator), linear_map.is_hermitian
    value, error = _judge(
        choice, loo, sketch, image, probes.fresh, eps=eps, hermitian=hermitian
    )
    two_sided = TwoSidedWeight.of(loo, choice.weights)
    return Outcome(value, error, EitherWeight(two_sided, probes.fresh, choice.sketches))


def votes(loo: LeaveOneOut, sketch: Inexact[Array, "n k"]) -> Float[Array, " k"]:
    """a_i: what all probes but the i-th say of A* Q."""
    least = 0.4 + 1.2 / sketch.shape[1]
    return ramp(missed_shares(loo, sketch, of_diagonal=True), least, WIDTH)


def _judge(
    choice: Choice,
    loo: LeaveOneOut,
    sketch: Inexact[Array, "n k"],
    image: Inexact[Array, "n k"],
    fresh: Inexact[Array, "n k"],
    *,
    eps: float,
    hermitian: bool,
) -> tuple[Inexact[Array, " n"], Float[Array, " n"]]:
    """Value and standard error from Y = A Omega, and A* Q or A* F."""
    sketched = samples_of(loo, sketch, image, eps, hermitian=hermitian)
    scale, weights = sketched.scale, choice.weights
    first = independent(loo.probes.conj() * (sketch / scale), scale, eps, hermitian)
    forms = independent(fresh * (image / scale).conj(), scale, eps, hermitian)
    (one, one_error), (other, other_error) = first.judge(weights), forms.judge()
    sampled = (one + other) / 2, both_errors(one_error, other_error) / 2
    return jax.tree.map(
        partial(jnp.where, choice.sketches), sketched.judge(weights), sampled
    )
