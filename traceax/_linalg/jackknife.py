"""Standard errors: of independent samples, and the jackknife's of shared probes.

Delete probe i and evaluate the whole estimator from the others: the average over j != i of
the estimates e_ij, each now lacking *two* probes in its sketch. The spread of these k
averages T_i gives the standard error of an estimator whose samples are correlated
(conservative, by the inequality of Efron and Stein 1981; the idea of doing so for low-rank
approximations is Epperly and Tropp's, arXiv:2207.06342). It costs no application: all of it
is k x k. A matrix indexed [i, j] has probe i removed and probe j evaluated.

XTrace (notation of `xtrace`): P_ij has range Q less span{s_i, s_j}, so e_ij is e_j
downdated by u = (s_i - s_j L_ji)/a, the part of s_i that is orthogonal to s_j, of length 1,
with L = S* S and a^2 = 1 - |L_ij|^2:

    tr(P_ij A) = tr(P_j A) - u* H u
    mu_ij = mu_j + Q u (u* w_j)
    mu_ij* A mu_ij = t_j + conj(c) (Q u)* A mu_j + c mu_j* A Q u + |c|^2 u* H u,  c = u* w_j

XNysTrace: with K = H^{-1} the inverse core and D = |F G|^2, removing the pair {i, j} takes
tr(D_pp K_pp^{-1}) from ||F||_F^2, p the 2 x 2 principal block, and the remainder of probe j
is the Schur complement of what is left, 1/(K_jj a^2), a^2 = 1 - |K_ij|^2/(K_ii K_jj).

Row norms: as XTrace, with b Q u = (v_i - v_j L_ji)/a for every row b, v = b Q S.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._linalg.columns import mean, squared_modulus


def standard_error(
    samples: Inexact[Array, "*values k"], rounding: Float[Array, "*values"]
) -> Float[Array, "*values"]:
    """Of the mean of independent samples; infinite for one, which cannot tell."""
    k = samples.shape[-1]
    if k == 1:
        return jnp.full_like(rounding, jnp.inf)
    deviations = samples - mean(samples)[..., None]
    return length(deviations / (k * (k - 1)) ** 0.5, rounding)


def standard_error_of_parts(
    samples: Inexact[Array, "*values k parts"], rounding: Float[Array, "*values"]
) -> Float[Array, "*values"]:
    """Of the mean of k samples, each the sum of independent parts; infinite for one. The
    parts differ in their means, so each has a spread of its own, of k - 1 degrees of
    freedom."""
    k = samples.shape[-2]
    if k == 1:
        return jnp.full_like(rounding, jnp.inf)
    means = mean(jnp.moveaxis(samples, -2, -1))
    deviations = (samples - means[..., None, :]) / (k * (k - 1)) ** 0.5
    return length(deviations.reshape(*deviations.shape[:-2], -1), rounding)


def error_of_sum(length: Float[Array, "*values"], k: int) -> Float[Array, "*values"]:
    """Of k independent samples, by the length of their deviations from the mean."""
    return length * (k / (k - 1)) ** 0.5 if k > 1 else jnp.full_like(length, jnp.inf)


def shared_error(
    samples: Inexact[Array, "*values k"], rounding: Float[Array, "*values"]
) -> Float[Array, "*values"]:
    """Of the mean of leave-one-out samples of a diagonal, which share their probes.

    Decompose the error of sample i into parts that involve sets of probes (Hoeffding
    1948). Each part has mean zero given the other probes, so its set holds i; one of r
    probes can occur in r samples. So r-fold parts make the mean at most sqrt(r) times less
    certain than independent samples would be. Of diagonals no part of more than two
    mattered in any spectrum measured (multiples of I attain sqrt(2)), and the jackknife,
    which knows no such bound, is up to ten times too wide.
    """
    return standard_error(2**0.5 * samples, rounding)


def independent_degrees_of_freedom(k: int) -> float:
    """For the interval of a mean of k independent quadratic forms: a third of k - 1.

    Such samples are skewed, up to a chi-squared variable of one degree for an operator
    of rank one, and their mean and spread err together. Of intervals meant to hold the
    truth in 95 % of runs, those with k - 1 degrees then hold it in 82 % (k = 4) to 89 %
    (k = 20), those with a third of that in at least 91 %, for every k from 3 on. At k = 60
    they are 4 % wider.
    """
    return (k - 1) / 3


def unevenness(weights: Float[Array, " k"]) -> Float[Array, ""]:
    """How much less certain a weighted mean is than the mean; the sum of weights is 1."""
    return jnp.sqrt(weights.shape[0] * jnp.sum(weights**2))


def both_errors(
    spread: Float[Array, "*values"], bias: Float[Array, "*values"]
) -> Float[Array, "*values"]:
    """Of an estimate that is uncertain in two ways that have nothing to do with each
    other."""
    return jnp.hypot(spread, bias)


def quadrature_error(
    changes: Float[Array, "levels ..."], unresolved: bool
) -> Float[Array, "*values"]:
    """What a rule is wrong by, from how much the latest refinements have changed it, the
    last one first; `unresolved` if there is none though there should be.

    Errors that fall by a factor r at each refinement go on to change by last r/(1 - r).
    Many fall as a power, as those of square roots do, for which the ratio of the last two
    changes says too little: its square root has room for that. Where the last change is the
    larger one, the rules of even and odd order differ. And no less than the last change
    itself, for rules stand still before they go on.
    """
    if changes.shape[0] == 0:
        return jnp.full(changes.shape[1:], jnp.inf if unresolved else 0.0)
    last = changes[0]
    if changes.shape[0] == 1:
        return last
    larger = jnp.maximum(jnp.max(changes[:2], axis=0), jnp.finfo(last.dtype).tiny)
    root = jnp.sqrt(jnp.minimum(jnp.min(changes[:2], axis=0) / larger, 0.8))
    return last * jnp.maximum(1, root / (1 - root))


def jackknife_error(
    replicates: Inexact[Array, "*values k"], rounding: Float[Array, "*values"]
) -> Float[Array, "*values"]:
    """Of an estimator whose value without probe i is `replicates[..., i]`."""
    k = replicates.shape[-1]
    deviations = replicates - mean(replicates)[..., None]
    return length(deviations * ((k - 1) / k) ** 0.5, rounding)


def no_less_than_theory(
    error: Float[Array, "*values"], variances: Float[Array, "*values k"], *, real: bool
) -> Float[Array, "*values"]:
    """An error made of the spread of k quadratic forms, or what theory makes of them.

    Where one direction u matters and few probes have much of it, the forms u* w w* u are as
    skewed as can be: most runs miss it, and with it the spread. But a rotation-invariant w
    also shows, by the part of B w that is orthogonal to w, what other probes would do:

        Var w* B w = |a| E |B w - w (w* B w)/|w|^2|^2,      a = 2 (real B = B*), 1 (complex)

    `variances` holds the squares, whose mean is far less skewed than the spread.
    """
    k = variances.shape[-1]
    return jnp.maximum(error, jnp.sqrt((2 if real else 1) * mean(variances) / k))


def xtrace_replicates(
    h: Inexact[Array, "k k"],
    s: Inexact[Array, "k k"],
    w: Inexact[Array, "k k"],
    image: Inexact[Array, "k k"],
    coimage: Inexact[Array, "k k"],
    remainders: Inexact[Array, " k"],
    lengths: Float[Array, " k"],
    residual_rank: int | None,
) -> Inexact[Array, " k"]:
    """`image` is Q* A mu_j, `coimage` is Q* A* mu_j, columns j; `remainders` mu_j* A mu_j;
    `lengths` |mu_j|^2; `residual_rank` n - k + 2 to resphere, None not to."""
    s_adjoint = s.conj().T
    overlap = s_adjoint @ s
    squared = one_minus_squared_modulus(overlap)

    def part(product: Inexact[Array, "k k"]) -> Inexact[Array, "k k"]:
        """u* v_j, times a, from s_i* v_j."""
        return product - overlap * jnp.diagonal(product)[None, :]

    shs = s_adjoint @ h @ s
    own = jnp.diagonal(shs)
    uhu = own[:, None] - shs * overlap.T - overlap * shs.T
    uhu = (uhu + jnp.abs(overlap) ** 2 * own[None, :]) / squared
    uw = part(s_adjoint @ w)
    c = uw / squared
    cross = c.conj() * part(s_adjoint @ image) + c * part(s_adjoint @ coimage).conj()
    products = remainders[None, :] + cross + jnp.abs(uw) ** 2 / squared * uhu
    if residual_rank is not None:
        products = (
            products * residual_rank / (lengths[None, :] + jnp.abs(uw) ** 2 / squared)
        )
    return _mean_of_others(jnp.trace(h) - own[None, :] - uhu + products)


def xnystrace_replicates(
    whole: Float[Array, ""],
    gram: Inexact[Array, "k k"],
    removed: Inexact[Array, "k k"],
    test: Inexact[Array, "k k"],
    residual_rank: int | None,
) -> Float[Array, " k"]:
    """`gram` is K, `removed` is D, `test` is (Omega* Omega)^{-1}; the shift, the same in
    all replicates, is left out. Everything is scaled by K's diagonal, or it overflows."""
    core = jnp.diagonal(gram).real
    root = jnp.sqrt(core)
    overlap = gram / root[None, :] / root[:, None]
    squared = one_minus_squared_modulus(overlap)
    normed = removed / root[None, :] / root[:, None]
    own = jnp.diagonal(normed).real
    pair = own[:, None] + own[None, :] - 2 * (normed * overlap.conj()).real
    remainders = 1 / (core[None, :] * squared)
    if residual_rank is not None:
        lone = jnp.diagonal(test).real
        remainders *= residual_rank * (lone[None, :] - jnp.abs(test) ** 2 / lone[:, None])
    return _mean_of_others(whole - pair / squared + remainders)


def xnysdiag_replicates(
    whole: Float[Array, " n"],
    z: Inexact[Array, "n k"],
    probes: Inexact[Array, "n k"],
    gram: Inexact[Array, "k k"],
) -> Float[Array, "n k"]:
    """Of every entry of a diagonal; `gram` is K, `z` is F G with columns over the roots of
    its diagonal, the shift is left out. As for XNysTrace, but row by row: with r the
    overlaps K_ij / sqrt(K_ii K_jj),

        e_ij = |f|^2 - (|z_i|^2 + |z_j|^2 - 2 Re conj(z_i) z_j r_ji) / a^2
               + conj(w_j) (z_j - z_i r_ij) / (sqrt(K_jj) a^2),

    of which sums over j != i are products with k x k matrices."""
    k = gram.shape[0]
    root = jnp.sqrt(jnp.diagonal(gram).real)
    overlap = gram / root[None, :] / root[:, None]
    others = (1 - jnp.eye(k, dtype=root.dtype)) / (k - 1)
    pairs = others / one_minus_squared_modulus(overlap)
    tested, squares = probes.conj() / root[None, :], squared_modulus(z)
    removed = squares * jnp.sum(pairs, axis=1)[None, :] + squares @ pairs.T
    removed = removed - 2 * (z.conj() * (z @ (overlap * pairs.T))).real
    left = (tested * z) @ pairs.T - z * (tested @ (overlap * pairs).T)
    return whole[:, None] - removed + left.real


def row_norm_replicates(
    known: Float[Array, "p k"],
    v: Inexact[Array, "p k"],
    remainders: Inexact[Array, "p k"],
    s: Inexact[Array, "k k"],
    w: Inexact[Array, "k k"],
    lengths: Float[Array, " k"],
    residual_rank: int | None,
) -> Float[Array, "p k"]:
    """`known` is |b P_j|^2, columns j, for all rows b; `v` is B Q S; `remainders` B mu_j;
    the rest as for XTrace. With u as above and beta = u* w_j / a,

        e_ij = |b P_j|^2 - |b Q u|^2 + c |b mu_j + beta (v_i - v_j L_ji)|^2,

    of which sums over j != i are products with k x k matrices."""
    k = s.shape[0]
    overlap = s.conj().T @ s
    inverse = 1 / one_minus_squared_modulus(overlap)
    sw = s.conj().T @ w
    beta = inverse * (sw - overlap * jnp.diagonal(sw)[None, :])
    c = jnp.ones_like(inverse)
    if residual_rank is not None:
        c = residual_rank / (lengths[None, :] + squared_modulus(beta) / inverse)
    others = (1 - jnp.eye(k, dtype=c.dtype)) / (k - 1)
    inverse, c = inverse * others, c * others
    cross, tested = overlap.conj(), c * squared_modulus(beta)  # cross is L_ji

    def over_j(block: Inexact[Array, "p k"], weights: Inexact[Array, "k k"]) -> Array:
        return block @ weights.T

    squares = squared_modulus(v)
    shape = squared_modulus(overlap)
    own = squares * jnp.sum(tested - inverse, axis=1)[None, :]
    alone = over_j(squared_modulus(remainders), c) + over_j(
        squares, (tested - inverse) * shape
    )
    alone = alone - 2 * over_j(remainders.conj() * v, c * beta * cross).real
    mixed = over_j(v, (inverse - tested) * cross) + over_j(remainders, c * beta.conj())
    return over_j(known, others) + own + alone + 2 * (v.conj() * mixed).real


def one_minus_squared_modulus(overlap: Inexact[Array, "k k"]) -> Float[Array, "k k"]:
    """1 - |L_ij|^2, floored off the diagonal; 1 on it, where nothing is evaluated."""
    floored = jnp.maximum(1 - jnp.abs(overlap) ** 2, jnp.finfo(overlap.dtype).eps)
    return jnp.where(jnp.eye(overlap.shape[0], dtype=bool), 1, floored)


def _mean_of_others(estimates: Inexact[Array, "k k"]) -> Inexact[Array, " k"]:
    k = estimates.shape[0]
    others = jnp.where(jnp.eye(k, dtype=bool), 0, estimates)
    return jnp.sum(others, axis=1) / (k - 1)


def length(
    deviations: Inexact[Array, "*values k"], rounding: Float[Array, "*values"]
) -> Float[Array, "*values"]:
    """sqrt(|deviations|^2 + rounding^2); the squares would leave the range of float32."""
    vector = jnp.append(jnp.abs(deviations), rounding[..., None], axis=-1)
    scale = jnp.maximum(jnp.max(vector, axis=-1), jnp.finfo(vector.dtype).tiny)
    return scale * jnp.sqrt(jnp.sum((vector / scale[..., None]) ** 2, axis=-1))
