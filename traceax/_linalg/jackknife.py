"""Standard errors of independent samples, and the jackknife's of shared probes.

The jackknife deletes probe i, and evaluates the whole estimator T_i from the others:

    T_i = mean over j != i of e_ij,                                              (1)

where the estimate e_ij has probe j to evaluate it, and lacks *two* probes in its sketch, i
and j. The spread of the k values T_i gives the standard error of an estimator whose samples
are correlated. It is conservative, by the inequality of Efron and Stein (1981); Epperly and
Tropp (arXiv:2207.06342) use it for low-rank approximations. It takes no matvec. In a matrix
indexed [i, j], probe i is removed and probe j is evaluated.

**XTrace** (notation of `xtrace`). P_ij has the range Q less span{s_i, s_j}. So e_ij is e_j
downdated by u, the normalised part of s_i that is orthogonal to s_j. With L = S* S:

    u = (s_i - s_j L_ji)/a,    a^2 = 1 - |L_ij|^2,                               (2)
    mu_ij = mu_j + Q u (u* w_j),                                                 (3)
    tr(P_ij A) = tr(P_j A) - u* H u,                                             (4)
    mu_ij* A mu_ij = t_j + conj(c) (Q u)* A mu_j + c mu_j* A Q u + |c|^2 u* H u, (5)

with H = Q* A Q, t_j = mu_j* A mu_j and c = u* w_j. If probes are resphered, (5) has the
factor

    c_ij = (n - k + 2)/|mu_ij|^2 = (n - k + 2)/(|mu_j|^2 + |u* w_j|^2).          (6)

**Row norms** are like XTrace. For each row b of B, with v = b Q S, (2) gives
b Q u = (v_i - v_j L_ji)/a. With beta = u* w_j / a and c_ij of (6),

    e_ij = |b P_j|^2 - |b Q u|^2 + c_ij |b mu_j + beta (v_i - v_j L_ji)|^2.      (7)

The sums of (1) over j are products with k x k matrices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact

from traceax._linalg.columns import (
    Block,
    Square,
    column_norms_squared,
    diagonal_of,
    dot,
    eps_of,
    largest_modulus,
    largest_of_rows,
    mean,
    over,
    positive,
    promoted,
    squared_modulus,
    summed,
    times,
    trace_of,
)

ByProbe = Inexact[Array, "*values k"]
Parts = Inexact[Array, "*values k parts"]
OfProbes = Inexact[Array, " k"]
OfRows = Inexact[Array, "p k"]
Errors = Float[Array, "*values"]
Totals = Inexact[Array, "levels ..."]  # of a quadrature of all steps, and of fewer
Sizes = Float[Array, "..."]


def standard_error(samples: ByProbe, rounding: Errors) -> Errors:
    """Return the standard error of the mean of independent samples.

    It is infinite for a single sample.
    """
    return standard_error_of_parts(samples[..., None], rounding)


def standard_error_of_parts(samples: Parts, rounding: Errors) -> Errors:
    """Return the standard error of the mean of k samples, each a sum of independent parts.

    Each part has its own mean, so its own spread, of k - 1 degrees of freedom. The error is
    infinite for k = 1. (As samples of one part, diagonals would take a third longer.)
    """
    count = samples.shape[-2]
    if count == 1:
        return jnp.full_like(rounding, jnp.inf)
    deviations = samples - mean(jnp.moveaxis(samples, -2, -1))[..., None, :]
    deviations = deviations.reshape(*rounding.shape, -1)
    return length(deviations / (count * (count - 1)) ** 0.5, rounding)


def error_of_sum(length: Errors, k: int) -> Errors:
    """Return the error of the sum of k independent samples: deviations have this length."""
    return length * (k / (k - 1)) ** 0.5 if k > 1 else jnp.full_like(length, jnp.inf)


def shared_error(samples: ByProbe, rounding: Errors) -> Errors:
    """Return the error of the mean of leave-one-out samples of a diagonal.

    These samples share their probes. Decompose the error of sample i into parts that depend
    on sets of probes (Hoeffding 1948). A part has mean zero given the probes other than i,
    so its set contains i, and a part of r probes occurs in at most r samples. So parts of r
    probes raise the error of the mean at most sqrt(r) times above that of independent
    samples. For diagonals no part of more than two probes mattered in any spectrum
    measured. The jackknife is up to ten times too wide.
    """
    return standard_error(2**0.5 * samples, rounding)


def independent_degrees_of_freedom(k: int) -> float:
    """Return the degrees of freedom of a mean of k independent quadratic forms.

    They are a third of k - 1. Such samples are skewed, and the errors of their mean and of
    their spread are correlated: with k - 1 degrees, intervals for 95 % hold in 82 % of runs
    (k = 4), with a third in 90 %.
    """
    return (k - 1) / 3


def fourth_order_degrees_of_freedom(k: int) -> float:
    """Return the degrees of freedom of a mean of k independent forms of fourth order.

    If one direction dominates, a form is a product of two squares, (u* v)^2 (u* w)^2. Its
    skewness is about 10, so that the spread of even 100 samples is often too small. With
    (k - 1)/3 degrees, intervals for 95 % then hold in 78 to 87 % of runs (k = 10 to 100),
    with half of the root of k in 88 to 92 %. If no direction dominates, they hold in 96 to
    99 %.
    """
    return min((k - 1) / 3, k**0.5 / 2)


def shared_degrees_of_freedom(k: int) -> float:
    """Return the degrees of freedom of a mean of k leave-one-out samples of a function's
    trace.

    They are two thirds of k - 1: these samples are less skewed than independent ones.
    """
    return max(2 * (k - 1) / 3, 1)


def root_design_effect(weights: Float[Array, " k"]) -> Float[Array, ""]:
    """Return the error of a mean with weights of sum 1, over the mean's (Kish 1965)."""
    return jnp.sqrt(weights.shape[0] * summed(weights**2))


def error_of_rules(
    totals: Totals, share: Sizes, *, rounding: Sizes, unresolved: bool = True
) -> Errors:
    """Return the error of the mixture, or of Gauss's rule if that is the only one.

    Without a shorter run to compare with, the error of a quadrature that is `unresolved` is
    unknown."""
    if totals.shape[1] == 2:
        return bracket_error(totals, share, rounding=rounding)
    return quadrature_error(totals[:, 0], unresolved=unresolved, rounding=rounding)


def bracket_error(
    totals: Totals, share: Sizes, *, rounding: Sizes | float, whole: Totals | None = None
) -> Errors:
    """Return the error of the mixture of Gauss's rule and Radau's.

    `totals` and `share` are those of `nodes.mixture`. The truth lies between both rules,
    whose distance falls by a factor s from the shorter runs to the full ones. Over ten
    kinds of spectra and six functions the error of the mixture was, in 95 of 100 cases, at
    most 0.14 of the distance for s up to 0.6, 0.34 for s up to 0.95, and all of it for
    larger s. Half of these is one standard error. If both rules converge alike, the error
    is (1 - share) share of the distance, times a factor that is 0.8 at most for s below 0.1
    and 20 for s up to 0.6. (One rule may be 1e5 times as accurate, as Gauss's is for
    x/(x + c), if the node is far from the spectrum. Where this made the bar less than half
    as wide, over 27 spectra, 27 functions and five budgets, it was 2,200 times the error
    before and is ten times; twice the bar holds in 99 %, with 1 in place of 20 in 91 %.)

    If Gauss's rule is taken alone, its last change is c, and its error is c s/(1 - s), but
    at least c. If s is unknown, because Radau's rule is infinite, the error is 8 c. If c is
    at the level of `rounding`, s says nothing. Without shorter runs, it is half of the
    distance. Rules of a function with such derivatives move one way as the runs get longer.
    If there are rules of one step less, between the full and the shorter runs, the error is
    at least the distance by which they lie outside those: it is zero for smooth functions,
    but a step may meet nodes two steps apart at the same phase (see `quadrature_error`).
    `whole` is the sum of the totals if these are parts, such as the entries of a
    diagonal. It has less noise than they have, and gives s and the share.
    """
    width = jnp.abs(totals[0, 1] - totals[0, 0])
    if len(totals) == 1:
        return jnp.where(jnp.isfinite(width), width / 2, jnp.inf)
    of_all = totals if whole is None else whole
    now, before = (jnp.abs(rules[1] - rules[0]) for rules in of_all[:2])
    ratio = now / positive(before)
    change = jnp.abs(totals[0, 0] - totals[1, 0])
    most = jnp.where(change > 10 * rounding, 0.99, 0.5)
    ratio = jnp.where(jnp.isnan(ratio), 8 / 9, jnp.minimum(ratio, most))
    alike = jnp.where(ratio < 0.1, 0.8, 20) * share * (1 - share)
    slow, fast = jnp.maximum(0.07, ratio**4 / 2), jnp.minimum(0.07, alike)
    error = width * jnp.where(ratio < 0.6, fast, slow)
    alone = change * jnp.maximum(1, ratio / (1 - ratio))
    error = jnp.where(share < 1, error, alone)
    if len(totals) == 2:
        return error
    full, before, between = totals
    detour = jnp.abs(full - between) + jnp.abs(between - before) - jnp.abs(full - before)
    outside = jnp.max(detour, axis=0) / 2
    return jnp.where(outside > 10 * rounding, jnp.maximum(error, outside), error)


def quadrature_error(
    totals: Totals, *, unresolved: bool, rounding: Sizes | float = 0, together: bool = False
) -> Errors:
    """Return the error of a quadrature, from how much its last refinements changed it.

    `totals` are its results, of all steps and of fewer. Without any refinement the error
    is infinite if it is `unresolved`, else zero. Errors that fall by a factor r at each
    refinement leave a change of last r/(1 - r). Many fall as a power (for example for
    square roots). Then the ratio of the last two changes is too small, so r is its square
    root. If the last change is the larger one, rules of even and odd order differ, and the
    ratio is inverted. As rules can stagnate, the error is at least the last change.

    A ratio near 1 says that the series has hardly begun to converge, as where the least
    eigenvalues are not resolved, and makes the error up to a hundred times the last change.
    Changes that alternate, and those at the level of `rounding`, say nothing of the kind.
    The entries of a diagonal have one ratio `together`, since their own are noisy.

    For a step, m nodes are off by a saw-tooth of the step's place between its neighbours.
    They lie near cos(pi (j - 1/2)/m), so k steps less move the phase by k t/pi, t being the
    angle of the step. If that is about an integer (as for t = pi/2 and k = 4), the change
    says nothing, but the change for another k does. So the results after the third, of
    runs longer than the second, are compared with the first one too, and the error is at
    least the largest change. The changes of smooth functions are smaller than the second's.
    """
    changes = totals[:-1] - totals[1:]
    if changes.shape[0] == 0:
        return jnp.full(changes.shape[1:], jnp.inf if unresolved else 0.0)
    sizes = jnp.abs(changes)
    error = sizes[0]
    if changes.shape[0] == 1:
        return error
    forms = (changes[0].conj() * changes[1]).real
    if together:
        forms, sizes = jnp.sum(forms), jax.vmap(jnp.linalg.norm)(sizes)
    last, before = sizes[:2]
    is_steady = (forms > 0) & (last > 10 * rounding)
    larger = jnp.maximum(jnp.maximum(last, before), jnp.finfo(last.dtype).tiny)
    most = jnp.where(is_steady, 0.98, 0.8)
    root = jnp.sqrt(jnp.minimum(jnp.minimum(last, before) / larger, most))
    others = jnp.max(jnp.abs(totals[:1] - totals[3:]), axis=0, initial=0)
    return jnp.maximum(error * jnp.maximum(1, root / (1 - root)), others)


def jackknife_error(replicates: ByProbe, rounding: Errors) -> Errors:
    """Return the error of an estimator that is `replicates[..., i]` without probe i."""
    k = replicates.shape[-1]
    deviations = replicates - mean(replicates)[..., None]
    return length(deviations * ((k - 1) / k) ** 0.5, rounding)


def no_less_than_theory(error: Errors, variances: ByProbe, *, real: bool) -> Errors:
    """Return the larger of an error from the spread of k quadratic forms, and of theory.

    If few probes have a large part in the one direction that matters, most runs have too
    small a spread. But for a rotation-invariant w, the part of B w across w shows it:

        Var w* B w = |a| E |B w - w (w* B w)/|w|^2|^2,      a = 2 (real B = B*), 1 (complex)

    `variances` has these squared lengths, whose mean is far less skewed than the spread.
    """
    k = variances.shape[-1]
    return jnp.maximum(error, jnp.sqrt((2 if real else 1) * mean(variances) / k))


# What XTrace and row norms need of each pair [i, j], as in (2) to (6): S, L = `overlap`,
# 1/a^2 = `inverse`, a u* w_j = `tests` and c_ij = `resphering`.
EveryPair = tuple[Square, ...]


def pairs_of_probes(s: Square, w: Square, mu: Block, resphere: bool) -> EveryPair:
    """Return what the replicates need of all pairs of probes. `w` is Q* Omega."""
    overlap = dot(s.conj().T, s)
    floored = jnp.maximum(1 - jnp.abs(overlap) ** 2, jnp.finfo(overlap.dtype).eps)
    # The diagonal is not used.
    inverse = 1 / jnp.where(jnp.eye(len(overlap), dtype=bool), 1, floored)
    tests = _dots_with_u(overlap, dot(s.conj().T, w))
    resphering = jnp.ones_like(inverse)
    if resphere:
        (n, k), lengths = mu.shape, column_norms_squared(mu)[None, :]
        resphering = (n - k + 2) / (lengths + squared_modulus(tests) * inverse)
    return s, overlap, inverse, tests, resphering


def _dots_with_u(overlap: Square, products: Square) -> Square:
    """Return a u* v_j, by (2), given s_i* v_j."""
    return products - overlap * diagonal_of(products)[None, :]


def xtrace_replicates(
    pairs: EveryPair, h: Square, image: Square, coimage: Square | None, remainders: OfProbes
) -> OfProbes:
    """Return XTrace's T_i, by (1) to (6).

    `image` and `coimage` are Q* A mu_j and Q* A* mu_j, `remainders` are mu_j* A mu_j.
    Without `coimage` they are the T_i of the one-sided samples e_j = tr(P_j A) + mu_j* y_j
    with y_j = A w_j. Then `image` is Q* Y, and `remainders` are mu_j* y_j. By (3),
    mu_ij* y_j = mu_j* y_j + conj(c) (Q u)* y_j.
    """
    s, overlap, inverse, tests, resphering = pairs
    shs = dot(s.conj().T, h, s)
    own = diagonal_of(shs)
    uhu = own[:, None] - shs * overlap.T - overlap * shs.T
    uhu = times(uhu + times(squared_modulus(overlap), own[None, :]), inverse)
    # The terms of (5): `a` cancels from c times (Q u)*.
    c = times(tests, inverse)
    tested = remainders[None, :]
    tested = tested + c.conj() * _dots_with_u(overlap, dot(s.conj().T, image))
    if coimage is not None:
        tested = tested + c * _dots_with_u(overlap, dot(s.conj().T, coimage)).conj()
        tested = tested + times(squared_modulus(tests) * inverse, uhu)
    tested = times(resphering, tested)
    return mean_of_others(trace_of(h) - own[None, :] - uhu + tested)


def row_norm_replicates(pairs: EveryPair, known: OfRows, v: OfRows, bmu: OfRows) -> OfRows:
    """Return the T_i of all rows b, by (7), multiplied out.

    `known` are |b P_j|^2, `v` is B Q S, and `bmu` is B mu. The matrices of pairs are
    transposed, [j, i], so that products with them are sums over j.
    """
    _, overlap, inverse, tests, resphering = (matrix.T for matrix in pairs)
    k = len(overlap)
    others = (1 - jnp.eye(k, dtype=known.dtype)) / (k - 1)
    beta, c = times(inverse, tests), resphering * others
    cross = overlap.conj()  # L_ji
    # The factor of |v_i - v_j L_ji|^2 in (7).
    factor = c * squared_modulus(beta) - inverse * others
    squares = squared_modulus(v)
    own = squares * summed(factor, axis=0)[None, :]
    of_j = dot(squared_modulus(bmu), c)
    of_j = of_j + dot(squares, factor * squared_modulus(cross))
    of_j = of_j - 2 * dot(bmu.conj() * v, times(c, beta) * cross).real
    mixed = dot(bmu, times(c, beta.conj())) - dot(v, times(factor, cross))
    return dot(known, others) + own + of_j + 2 * (v.conj() * mixed).real


def mean_of_others(estimates: Square) -> OfProbes:
    """Return the mean over j != i of a matrix [i, j], as in (1)."""
    return sums_of_others(estimates) / (len(estimates) - 1)


def length(deviations: ByProbe, rounding: Errors) -> Errors:
    """Return sqrt(|deviations|^2 + rounding^2), without overflow of squares in float32."""
    sizes = jnp.abs(deviations)
    scale = jnp.maximum(largest_of_rows(sizes), rounding)
    squares = summed((sizes / scale[..., None]) ** 2)
    return scale * jnp.sqrt(squares + (rounding / scale) ** 2)


def sums_of_others(x: OfProbes | Square) -> OfProbes:
    """Return the sum over all but each in turn, without subtracting, which would cancel
    where one of them dominates. The sums over a matrix [i, j] are those over j != i."""
    return summed(jnp.where(np.eye(len(x), dtype=bool), 0, jnp.atleast_2d(x)))


# A slope from two points has no finite variance.
FEWEST_OTHERS = 3


def slopes_of_others(x: OfProbes, y: OfProbes, *, floor: Float[Array, ""]) -> OfProbes:
    """Return, for each i, the slope of the regression of y_j on x_j over all j but i, where
    the x_j have the mean zero. `floor` is the length of x that rounding gives it: below
    it the slope is rounding, and falls to zero. With fewer than four numbers it is zero."""
    x, y = promoted(x, y)
    scale, others = largest_modulus(x), max(x.size - 1, 1)
    x, y, floor = over(x, scale), y - mean(y), (floor / scale) ** 2
    squares, means = sums_of_others(squared_modulus(x)), sums_of_others(x) / others
    about_mean = squares - others * squared_modulus(means)
    # Where they are all alike but for rounding, in this sum or in x itself.
    grain = 1e3 * eps_of(floor) * squares + 16 * floor
    known = (about_mean > grain) & (others >= FEWEST_OTHERS)
    # y - mean(y) sums to zero over all, so to -y_i over the others.
    cross = sums_of_others(x.conj() * y) + means.conj() * y
    slopes = over(over(cross, jnp.where(known, about_mean, 1)), scale)
    return jnp.where(known, slopes, 0)
