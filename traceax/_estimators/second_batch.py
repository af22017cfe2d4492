"""Sketches or samples: the first batch of products decides what the second batch is.

Where singular values decay, the second batch A Q of XTrace and XDiag removes most of the
variance; where they do not, as many fresh probes F are better. In the notation of
`leave_one_out`, there are two unbiased estimates for each probe i of Y = A Omega:

    traces:     e_i = tr(P_i A) + c_i mu_i* A mu_i                              from A Q
                f_i = (w_i* A w_i + mean_j F_j* A F_j) / 2                      from A F
    diagonals:  e_i = diag A_i + conj(w_i) o B_i w_i                            from A* Q
                f_i = (conj(w_i) o A w_i + mean_j F_j o conj(A* F_j)) / 2       from A* F

A decision for all probes, made of Y, would depend on the forms w_i* A w_i that it decides
about, and be biased. So each probe has its own weight a_i in [0, 1], made of the others,
and g_i = a_i e_i + (1 - a_i) f_i is unbiased. One batch cannot serve both terms: it is
selected at random, before it is applied. With u uniform on [0, 1), for the mean of the g_i,

    u < mean a:    value = sum a_i e_i / sum a_i
    otherwise:     value = sum (1 - a_i) f_i / sum (1 - a_i).

a_i falls from 1 to 0 as the share of the variance that a sketch leaves grows to about .5,

    t_i = sum_j |r_ij|^2 / sum_j |A w_j|^2,    r_ij = (I - P_ij) A w_j,    j != i,

with P_ij the projector without probes i and j. Multiples of I do not count in a trace: of
both vectors only the part orthogonal to the probe (mu_ij, w_j) is taken. In a diagonal they
count in XDiag's error: of r_ij only its part along w_j is left out. With L = S* S, the u_ij
of `jackknife`, and t_ij = (s_j - s_i L_ij)/a, a^2 = 1 - |L_ij|^2, all of this is k x k:

    r_ij = (d_j/a) Q t_ij,    |mu_ij|^2 = |mu_j|^2 + |u_ij* Q* w_j|^2.

Measured (`tests.benchmarks.second_batch`): 1.4 (2.4) times less error than XTrace (XDiag)
on flat spectra, the same on decaying ones, in between at worst a tenth (a fifth) above.

**Semidefinite operators.** The batch Y = A Omega gives both estimates of a diagonal,
XNysDiag's e_i and f_i = conj(w_i) o A w_i, so the mean of the g_i is the value. (Sums over
leaves have second products in their e_i, `krylov_nystrom`.) With r_ij = B_ij w_j, what the
Nyström approximation without i and j misses, the two are equally good where t is .9 to 1.
In the notation of `nystrom`, with K = G* G,

    u_ij = g_j - g_i K_ij/K_ii,   B_ij w_j = F u_ij/|u_ij|^2,   w_j* B_ij w_j = 1/|u_ij|^2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact

from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap
from traceax._core.rule import Algorithm, Outcome
from traceax._estimators.call import Call
from traceax._estimators.krylov_nystrom import (
    Products,
    draw_for_products,
    leaf_by_leaf,
    products,
)
from traceax._estimators.readouts import (
    TOTAL,
    LeaveOneOut,
    Pairs,
    Reduce,
    Rows,
    Samples,
    TwoSided,
    each,
    independent,
    leave_one_out,
    total,
    trace_pairs,
    two_sided,
)
from traceax._estimators.xdiag import (
    estimate_by_xnysdiag,
    xdiag_samples,
    xnysdiag_samples,
)
from traceax._estimators.xtrace import xtrace_of
from traceax._linalg import jackknife
from traceax._linalg.columns import (
    column_dots,
    column_norms_squared,
    diagonal_of,
    dot,
    mean,
    over,
    squared_modulus,
    times,
)
from traceax._linalg.nystrom import Fit
from traceax._probes.draw import draw, for_sketch
from traceax._probes.samplers import rademacher

Tree = TypeVar("Tree")
ValueAndError = tuple[Array, Array]


class BothBatches(eqx.Module):
    """Probes of the first batch, fresh ones for the second, and u, which selects."""

    first: Inexact[Array, "n k"]
    fresh: Inexact[Array, "n k"]
    uniform: Float[Array, ""]


def xtrace_or_hutchinson(call: Call) -> Estimate:
    """Estimate the trace."""
    call = call.using(for_sketch(call.operator)).measured()
    algorithm = partial(sketched_or_sampled_trace, resphere=call.resphere)
    return _finish(call, algorithm, "xtrace or hutchinson_trace", TOTAL)


def xdiag_or_hutchinson(call: Call, reduce: Reduce) -> Estimate:
    """Estimate the diagonal, or sums over parts of it."""
    call = call.using(rademacher).measured()
    algorithm = partial(sketched_or_sampled_diagonal, reduce=reduce.fn)
    return _finish(call, algorithm, "xdiag or hutchinson_diagonal", reduce)


def _finish(call: Call, algorithm: Algorithm, method: str, reduce: Reduce) -> Estimate:
    k = call.num_matvecs // 2
    sketch_key, fresh_key, uniform_key = jax.random.split(call.key, 3)
    first = draw(call.name, call.source, sketch_key, call.operator, k)
    fresh = draw(call.name, rademacher, fresh_key, call.operator, k)
    uniform = jax.random.uniform(uniform_key, (), first.real.dtype)
    return call.finish(
        algorithm,
        BothBatches(first, fresh, uniform),
        method=method,
        spent=2 * k,
        degrees=k - 1,
        structure=reduce.structure,
    )


class Choice(NamedTuple):
    """Whether the second batch is A Q, and the weights of the probes, of sum 1."""

    sketches: Bool[Array, ""]
    weights: Float[Array, " k"]

    def select(self, sketched: Tree, sampled: Tree) -> Tree:
        return jax.tree.map(partial(jnp.where, self.sketches), sketched, sampled)


def sketched_or_sampled_trace(
    linear_map: LinearMap, probes: BothBatches, *, resphere: bool
) -> Outcome:
    first, fresh = probes.first, probes.fresh
    sketch, eps = linear_map(first), linear_map.eps
    loo = leave_one_out(sketch, first, resphere=resphere)
    choice = choose(trace_weights(loo, sketch), probes.uniform)
    weights = choice.weights
    image = linear_map(jnp.where(choice.sketches, loo.basis.columns, fresh))
    value, error = xtrace_of(loo, sketch, image, eps, resphere=resphere, weights=weights)
    sketched = value, jackknife.root_design_effect(weights) * error

    def samples_of(forms: Inexact[Array, "n k"]) -> Samples:
        scale = loo.basis.scale
        return independent(over(forms, scale), scale, eps, False).reduced(total)

    sampled = half_of_each(
        samples_of(first.conj() * sketch).value_and_error(weights),
        samples_of(fresh.conj() * image).value_and_error(),
    )
    value, error = choice.select(sketched, sampled)
    halves = fresh / (2 * fresh.shape[1]), times(first, weights[None, :] / 2)
    plain = Pairs(jnp.hstack(halves), jnp.hstack([fresh, first]))
    return Outcome(value, error, choice.select(trace_pairs(loo, weights), plain))


def sketched_or_sampled_diagonal(
    linear_map: LinearMap, probes: BothBatches, *, reduce: Callable[[Rows], Any]
) -> Outcome:
    first, fresh = probes.first, probes.fresh
    sketch, eps = linear_map(first), linear_map.eps
    hermitian = linear_map.is_hermitian
    loo = leave_one_out(sketch, first, resphere=False)
    choice = choose(diagonal_weights(loo, sketch), probes.uniform)
    weights = choice.weights
    image = linear_map.adjoint(jnp.where(choice.sketches, loo.basis.columns, fresh))
    samples = xdiag_samples(loo, sketch, image, eps, hermitian=hermitian)
    sketched = samples.reduced(reduce).value_and_error(weights)

    def samples_of(forms: Inexact[Array, "n k"]) -> Samples:
        scale = loo.basis.scale
        return independent(over(forms, scale), scale, eps, hermitian).reduced(reduce)

    sampled = half_of_each(
        samples_of(first.conj() * sketch).value_and_error(weights),
        samples_of(fresh * image.conj()).value_and_error(),
    )
    value, error = choice.select(sketched, sampled)
    return Outcome(value, error, _selected_readout(reduce, choice, loo, fresh))


def half_of_each(one: ValueAndError, other: ValueAndError) -> ValueAndError:
    """Return the mean of two independent estimates."""
    return (one[0] + other[0]) / 2, jnp.hypot(one[1], other[1]) / 2


def choose(weights: Float[Array, " k"], uniform: Float[Array, ""]) -> Choice:
    """Randomised selection by the weights of the sketch."""
    # Compared with a sum, not a mean: if all weights are 1, rounding changes nothing.
    sketches = uniform * weights.shape[0] < jnp.sum(weights)
    return Choice(sketches, of_sum_one(jnp.where(sketches, weights, 1 - weights)))


def of_sum_one(weights: Float[Array, " k"]) -> Float[Array, " k"]:
    """The weights over their sum; zeros stay zeros."""
    return weights / jnp.maximum(jnp.sum(weights), jnp.finfo(weights.dtype).tiny)


def trace_weights(loo: LeaveOneOut, sketch: Inexact[Array, "n k"]) -> Float[Array, " k"]:
    """The a_i of a trace."""
    least = 0.2 + 0.9 / sketch.shape[1] ** 0.5
    return jnp.clip(1 - (missed_shares(loo, sketch) - least) / 0.3, 0, 1)


def diagonal_weights(loo: LeaveOneOut, sketch: Inexact[Array, "n k"]) -> Float[Array, " k"]:
    """The a_i of a diagonal."""
    least = 0.4 + 1.2 / sketch.shape[1]
    shares = missed_shares(loo, sketch, of_diagonal=True)
    return jnp.clip(1 - (shares - least) / 0.2, 0, 1)


def missed_shares(
    loo: LeaveOneOut, sketch: Inexact[Array, "n k"], *, of_diagonal: bool = False
) -> Float[Array, " k"]:
    """t_i: the share of the variance that a sketch leaves, from all probes but the i-th.

    For a diagonal the part along w_j, not along mu_ij, is left out; both are known from
    r_ij* w_j = r_ij* mu_ij."""
    s, w = loo.directions, loo.probes
    overlap = dot(s.conj().T, s)
    inverse = 1 / jackknife.one_minus_squared_modulus(overlap)
    sw = dot(s.conj().T, dot(loo.basis.columns.conj().T, w))
    own = diagonal_of(sw)[None, :]
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
    whole = dot(others, column_norms_squared(sketch) - along)
    missed = jnp.sum(others * missed, axis=1)
    return missed / jnp.maximum(whole, jnp.finfo(whole.dtype).tiny)


def _selected_readout(
    reduce: Callable[[Rows], Any],
    choice: Choice,
    loo: LeaveOneOut,
    fresh: Inexact[Array, "n k"],
) -> TwoSided:
    """The readout of the diagonal: the blocks of one estimate are selected."""
    sketches, weights = choice
    forward, k = sketches.astype(weights.dtype), weights.shape[0]
    return TwoSided(
        reduce,
        jnp.where(sketches, loo.basis.columns, fresh),
        loo.directions,
        loo.probes,
        tested=jnp.where(sketches, loo.mu, loo.probes),
        shares=forward * weights,
        forward=forward,
        adjoint=forward + (1 - forward) / (2 * k),
        plain=(1 - forward) * weights / 2,
    )


def xnysdiag_or_hutchinson(call: Call) -> Estimate:
    """Estimate the diagonal of a semidefinite operator."""
    return estimate_by_xnysdiag(call, mixed_diagonal, "xnysdiag or hutchinson_diagonal")


def mixed_diagonal(linear_map: LinearMap, probes: tuple[Inexact[Array, "n k"]]) -> Outcome:
    known = products(linear_map, *probes)
    fitted = known.fitted
    weights = shared_weights(known, fitted)
    value, error = _shared_samples(known, fitted, weights).value_and_error()
    return Outcome(known.sign * value, error, _shared_readout(known, each, weights))


def nystrom_or_hutchinson(call: Call, reduce: Reduce) -> Estimate:
    """Estimate the sums over leaves of a semidefinite operator, with second products."""
    call = call.using(rademacher)
    drawn = draw_for_products(call)
    return call.finish(
        partial(mixed_leaves, leaves=reduce.fn),
        drawn.blocks,
        method="xnystrace or hutchinson_trace",
        spent=drawn.spent,
        degrees=drawn.degrees,
        structure=reduce.structure,
    )


def mixed_leaves(
    linear_map: LinearMap, probes: tuple[Inexact[Array, "n _"], ...], *, leaves: Any
) -> Outcome:
    known, structure = products(linear_map, *probes), linear_map.operator.in_structure()
    first = known.without_second
    weights = shared_weights(first, first.fitted)
    value, error = leaf_by_leaf(known, weights, structure, leaves)
    return Outcome(known.sign * value, error, _shared_readout(known, leaves, weights))


def shared_weights(known: Products, fitted: Fit) -> Float[Array, " k"]:
    return jnp.clip(1 - (nystrom_shares(known, fitted) - 0.8) / 0.2, 0, 1)


def nystrom_shares(known: Products, fitted: Fit) -> Float[Array, " k"]:
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


def _shared_samples(known: Products, fitted: Fit, weights: Float[Array, " k"]) -> Samples:
    """The g_i. Of their terms only the e_i share probes."""
    share, a = mean(weights), weights[None, :]
    sketched = xnysdiag_samples(known, fitted)
    sampled = independent(known.block.conj() * known.sketch, known.scale, known.eps, True)
    values = a * sketched.values + (1 - a) * sampled.values
    rounding = share * sketched.rounding + (1 - share) * sampled.rounding
    return Samples(values, rounding, known.scale, 1 + share)


def _shared_readout(
    known: Products, reduce: Callable[[Rows], Any], weights: Float[Array, " k"]
) -> TwoSided:
    loo = leave_one_out(known.sketch, known.block, resphere=False)
    share, sketched = mean(weights), two_sided(loo, reduce, of_sum_one(weights))
    fields = lambda w: (w.shares, w.forward, w.adjoint, w.plain, w.x)  # noqa: E731
    rest = (1 - weights) / weights.shape[0]
    new = share * sketched.shares, share, share, rest, loo.x
    return eqx.tree_at(fields, sketched, new, is_leaf=lambda x: x is None)
