"""Standard errors: of independent samples, and the jackknife's of shared probes.

The jackknife deletes probe i, and evaluates the whole estimator T_i from the others: T_i is
the mean over j != i of the estimates e_ij, each of which now lacks *two* probes in its
sketch. The spread of the k values T_i gives the standard error of an estimator whose
samples are correlated. It is conservative, by the inequality of Efron and Stein (1981);
Epperly and Tropp (arXiv:2207.06342) use it for low-rank approximations. It takes no
application. In a matrix indexed [i, j], probe i is removed and probe j is evaluated.

**XTrace** (notation of `xtrace`). P_ij has the range Q less span{s_i, s_j}. So e_ij is e_j
downdated by u = (s_i - s_j L_ji)/a, the normalised part of s_i that is orthogonal to s_j,
with L = S* S and a^2 = 1 - |L_ij|^2:

    tr(P_ij A) = tr(P_j A) - u* H u
    mu_ij = mu_j + Q u (u* w_j)
    mu_ij* A mu_ij = t_j + conj(c) (Q u)* A mu_j + c mu_j* A Q u + |c|^2 u* H u,  c = u* w_j

**Row norms** are like XTrace, with b Q u = (v_i - v_j L_ji)/a for each row b of B, where
v = b Q S. With beta = u* w_j / a and c_ij the factor that restores the length of mu_ij,

    e_ij = |b P_j|^2 - |b Q u|^2 + c_ij |b mu_j + beta (v_i - v_j L_ji)|^2.

The sums over j != i are products with k x k matrices.

**Krylov spaces** (notation of `krylov`). With F the matrix that is read (f(T)), and J the
identity on the coordinates that exist,

    e_j = tr(J F) - tr(N_j* F N_j) + c r* F r,    r = N_j N_j* w_j.

The space S_ij without the starts i and j lies in S_i and in S_j, and lacks the dimensions
of both. So its complement is span(N_i, N_j), and no new space has to be made. With
B = [N_i, N_j], G = B* B, and t = B* w_j, which is zero but for N_j* w_j, as w_j is in S_i,

    tr(P_ij F) = tr(J F) - tr(G^{-1} B* F B),
    r = B b,  b = G^{-1} t,  |r|^2 = t* b,  r* F r = b* (B* F B) b.

So e_ij needs only the q x q blocks of N* F N and N* N, with all N_i side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._linalg.columns import (
    diagonal,
    dot,
    einsum,
    mean,
    promoted,
    squared_modulus,
    times,
)
from traceax._linalg.krylov import Complements


def standard_error(
    samples: Inexact[Array, "*values k"], rounding: Float[Array, "*values"]
) -> Float[Array, "*values"]:
    """Of the mean of independent samples; infinite for a single sample. As a sum of one
    part, diagonals would take a third longer."""
    k = samples.shape[-1]
    if k == 1:
        return jnp.full_like(rounding, jnp.inf)
    deviations = samples - mean(samples)[..., None]
    return length(deviations / (k * (k - 1)) ** 0.5, rounding)


def standard_error_of_parts(
    samples: Inexact[Array, "*values k parts"], rounding: Float[Array, "*values"]
) -> Float[Array, "*values"]:
    """Of the mean of k samples, each the sum of independent parts; infinite for k = 1. Each
    part has its own mean, so its own spread, of k - 1 degrees of freedom."""
    k = samples.shape[-2]
    if k == 1:
        return jnp.full_like(rounding, jnp.inf)
    means = mean(jnp.moveaxis(samples, -2, -1))
    deviations = (samples - means[..., None, :]) / (k * (k - 1)) ** 0.5
    return length(deviations.reshape(*deviations.shape[:-2], -1), rounding)


def error_of_sum(length: Float[Array, "*values"], k: int) -> Float[Array, "*values"]:
    """Of the sum of k independent samples, whose deviations have this `length`."""
    return length * (k / (k - 1)) ** 0.5 if k > 1 else jnp.full_like(length, jnp.inf)


def shared_error(
    samples: Inexact[Array, "*values k"], rounding: Float[Array, "*values"]
) -> Float[Array, "*values"]:
    """Of the mean of leave-one-out samples of a diagonal, which share their probes.

    Decompose the error of sample i into parts that depend on sets of probes (Hoeffding
    1948). A part has mean zero given the probes other than i, so its set contains i, and a
    part of r probes occurs in at most r samples. So parts of r probes raise the error of
    the mean at most sqrt(r) times above that of independent samples. For diagonals no part
    of more than two probes mattered in any spectrum measured. The jackknife is up to ten
    times too wide.
    """
    return standard_error(2**0.5 * samples, rounding)


def independent_degrees_of_freedom(k: int) -> float:
    """For the interval of a mean of k independent quadratic forms: a third of k - 1.

    Such samples are skewed, and the errors of their mean and of their spread correlated:
    with k - 1 degrees intervals for 95 % hold in 82 % of runs (k = 4), with a third in 90.
    """
    return (k - 1) / 3


def shared_degrees_of_freedom(k: int) -> float:
    """For the interval of a mean of k leave-one-out samples of a function's trace, which
    are less skewed than independent quadratic forms: two thirds of k - 1."""
    return max(2 * (k - 1) / 3, 1)


def root_design_effect(weights: Float[Array, " k"]) -> Float[Array, ""]:
    """The error of a weighted mean over that of the mean (Kish 1965), weights of sum 1."""
    return jnp.sqrt(weights.shape[0] * jnp.sum(weights**2))


def quadrature_error(
    changes: Float[Array, "levels ..."], unresolved: bool
) -> Float[Array, "*values"]:
    """The error of a quadrature, from how much its last refinements changed it, the last
    one first. If there was no refinement it is infinite where `unresolved`, else zero.

    Errors that fall by a factor r at each refinement leave a change of last r/(1 - r). Many
    fall as a power (of square roots, say), where the ratio of the last two changes is too
    small: r is its square root. If the last change is the larger one, rules of even and odd
    order differ, and the ratio is inverted. As rules can stagnate it is at least the last.
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
    """The larger one of an error from the spread of k quadratic forms, and of theory.

    If few probes have a large part in the one direction that matters, most runs have too
    small a spread. But for a rotation-invariant w, what B w has across w shows it:

        Var w* B w = |a| E |B w - w (w* B w)/|w|^2|^2,      a = 2 (real B = B*), 1 (complex)

    `variances` has these squared lengths, whose mean is far less skewed than the spread.
    """
    k = variances.shape[-1]
    return jnp.maximum(error, jnp.sqrt((2 if real else 1) * mean(variances) / k))


def no_less_than_coupling(
    error: Float[Array, "*values"], norms: Float[Array, "*values k"]
) -> Float[Array, "*values"]:
    """The larger one of an error from the spread of 2 to 4 quadratic forms of signs w, and
    of a quarter of the mean of `norms`, |A w - w (w* A w)/n|_4 for each probe.

    The forms of A = c (e_1 e_2* + e_2 e_1*) are 2 c w_1 w_2. With probability 2^(1 - k) the
    product w_1 w_2 = s is the same in all k probes: then there is no spread, the error is
    2 |c|, and each A w is that of a diagonal operator, c s (e_1 e_1* + e_2 e_2*), for which
    an honest bar cannot be zero either. The norm is at least |c| (1 - 2/n), and an interval
    for 95 % has 12.7 bars to each side for k = 4, 44 for k = 3: a quarter is enough. The
    power 4 makes it about the largest entry: pairs that agree in all probes are few.
    """
    return jnp.maximum(error, mean(norms) / 4)


class Pairs(NamedTuple):
    """What XTrace and row norms need of each pair: S, L, 1/a^2, a u* w_j, and c_ij."""

    directions: Inexact[Array, "k k"]
    overlap: Inexact[Array, "k k"]
    inverse: Float[Array, "k k"]
    tests: Inexact[Array, "k k"]
    resphering: Float[Array, "k k"]

    def along(self, products: Inexact[Array, "k k"]) -> Inexact[Array, "k k"]:
        """a u* v_j, given s_i* v_j."""
        return products - self.overlap * diagonal(products)[None, :]


def pairs_of_probes(
    s: Inexact[Array, "k k"],
    w: Inexact[Array, "k k"],
    lengths: Float[Array, " k"],
    residual_rank: int | None,
) -> Pairs:
    """`w` is Q* Omega, `lengths` are |mu_j|^2, `residual_rank` is n - k + 2, or None if the
    probes are not resphered."""
    overlap = dot(s.conj().T, s)
    inverse = 1 / one_minus_squared_modulus(overlap)
    pairs = Pairs(s, overlap, inverse, overlap, jnp.ones_like(inverse))
    tests = pairs.along(dot(s.conj().T, w))
    if residual_rank is not None:
        restored = residual_rank / (lengths[None, :] + squared_modulus(tests) * inverse)
        pairs = pairs._replace(resphering=restored)
    return pairs._replace(tests=tests)


def xtrace_replicates(
    pairs: Pairs,
    h: Inexact[Array, "k k"],
    image: Inexact[Array, "k k"],
    coimage: Inexact[Array, "k k"],
    remainders: Inexact[Array, " k"],
) -> Inexact[Array, " k"]:
    """`image` and `coimage` are Q* A mu_j and Q* A* mu_j; `remainders` mu_j* A mu_j."""
    s, overlap = pairs.directions, pairs.overlap
    s_adjoint = s.conj().T
    shs = dot(s_adjoint, h, s)
    own = diagonal(shs)
    uhu = own[:, None] - shs * overlap.T - overlap * shs.T
    uhu = times(uhu + times(squared_modulus(overlap), own[None, :]), pairs.inverse)
    c = times(pairs.tests, pairs.inverse)
    cross = c.conj() * pairs.along(dot(s_adjoint, image))
    cross = cross + c * pairs.along(dot(s_adjoint, coimage)).conj()
    second = times(squared_modulus(pairs.tests) * pairs.inverse, uhu)
    products = times(pairs.resphering, remainders[None, :] + cross + second)
    return mean_of_others(jnp.trace(h) - own[None, :] - uhu + products)


def row_norm_replicates(
    pairs: Pairs,
    known: Float[Array, "p k"],
    v: Inexact[Array, "p k"],
    remainders: Inexact[Array, "p k"],
) -> Float[Array, "p k"]:
    """`known` are |b P_j|^2 for all rows b; `v` is B Q S, `remainders` are B mu_j."""
    k = known.shape[1]
    others = (1 - jnp.eye(k, dtype=known.dtype)) / (k - 1)
    beta, inverse = times(pairs.inverse, pairs.tests), pairs.inverse * others
    c, cross = pairs.resphering * others, pairs.overlap.conj()  # cross is L_ji
    tested, squares = c * squared_modulus(beta), squared_modulus(v)

    def over_j(block: Inexact[Array, "p k"], weights: Inexact[Array, "k k"]) -> Array:
        return dot(block, weights.T)

    own = squares * jnp.sum(tested - inverse, axis=1)[None, :]
    of_i = over_j(squared_modulus(remainders), c)
    of_i = of_i + over_j(squares, (tested - inverse) * squared_modulus(cross))
    of_i = of_i - 2 * over_j(remainders.conj() * v, times(c, beta) * cross).real
    mixed = over_j(v, times(inverse - tested, cross))
    mixed = mixed + over_j(remainders, times(c, beta.conj()))
    return over_j(known, others) + own + of_i + 2 * (v.conj() * mixed).real


def half_jackknife_error(
    spaces: Complements,
    right: Inexact[Array, "r m"],
    values: Inexact[Array, "p m"],
    left: Inexact[Array, "m r"],
    samples: Inexact[Array, "p k"],
) -> Float[Array, " p"]:
    """Half of the jackknife's error of leave-one-out samples, in `krylov_replicates`'
    notation. Zero if some N_i has more than q columns: then the e_ij mean nothing."""
    k, r, _ = spaces.vectors.shape
    needed, beyond = jnp.split(spaces.vectors, [r // k], axis=2)
    spaces = spaces._replace(vectors=needed)
    replicates = krylov_replicates(spaces, right, values, left, samples)
    half = jackknife_error(replicates, jnp.zeros_like(samples[:, 0].real)) / 2
    return jnp.where(jnp.any(beyond != 0), 0, half)


def krylov_replicates(
    spaces: Complements,
    right: Inexact[Array, "r m"],
    values: Inexact[Array, "p m"],
    left: Inexact[Array, "m r"],
    samples: Inexact[Array, "p k"],
) -> Inexact[Array, "p k"]:
    """For every i the mean over j of e_ij. F is `right` diag(values) `left`, Hermitian or
    not; the remainders of `spaces` are sqrt(c_i) r_i; `samples` are the e_i."""
    vectors, remainders, dimensions, _ = spaces
    k, r, q = vectors.shape
    columns = jnp.moveaxis(vectors, 0, 1).reshape(r, k * q)
    before, after, values = promoted(
        dot(columns.conj().T, right), dot(left, columns), values
    )
    forms = jax.vmap(lambda v: _pair_blocks(dot(before * v[None, :], after), k))(values)
    gram = _pair_blocks(dot(columns.conj().T, columns), k)
    inverse = _pseudoinverse(gram)
    tests = einsum("jra,jr->ja", vectors.conj(), remainders)

    # Sums of products compile faster here than matrix products.
    b = jnp.sum(inverse[..., q:] * tests[None, :, None, :], axis=-1)
    lengths = jnp.sum(tests.conj()[None] * b[..., q:], axis=-1).real
    outer = b.conj()[..., :, None] * b[..., None, :]
    tested = jnp.sum(times(outer[None], forms), axis=(-2, -1))
    removed = jnp.sum(times(jnp.swapaxes(inverse, -1, -2)[None], forms), axis=(-2, -1))
    rank = jnp.sum(jnp.swapaxes(inverse, -1, -2) * gram, axis=(-2, -1)).real
    dimensions = (dimensions - jnp.sum(squared_modulus(vectors), axis=(1, 2)))[:, None]
    factors = (dimensions + rank) / jnp.where(lengths > 0, lengths, 1)

    # tr(J F) from the first sample.
    own = forms[:, 0, 0, :q, :q]
    first = einsum("a,pab,b->p", *promoted(tests[0].conj(), own, tests[0]))
    total = samples[:, 0].astype(own.dtype) + einsum("paa->p", own) - first
    pairs = total[:, None, None] - removed + times(factors[None], tested)
    return jax.vmap(mean_of_others)(pairs)


def _pair_blocks(square: Inexact[Array, "kq kq"], k: int) -> Inexact[Array, "{k} {k} p p"]:
    """The principal block of each pair i, j, from a matrix of q x q blocks."""
    q = square.shape[0] // k
    blocks = jnp.transpose(square.reshape(k, q, k, q), (0, 2, 1, 3))
    own = einsum("iiab->iab", blocks)
    first, second = (jnp.broadcast_to(x, blocks.shape) for x in (own[:, None], own[None]))
    above = jnp.concatenate([first, blocks], axis=-1)
    below = jnp.concatenate([jnp.swapaxes(blocks, 0, 1), second], axis=-1)
    return jnp.concatenate([above, below], axis=-2)


def _pseudoinverse(matrices: Inexact[Array, "*batch q q"]) -> Inexact[Array, "*batch q q"]:
    """A generalised inverse of many small positive semidefinite matrices by Gauss-Jordan
    elimination. It skips small pivots: their rows and columns, which depend on the others
    (the directions that N_i and N_j share) or are zero, become zero. Pivots are squares of
    sines, and a space knows its last directions to the root of eps only."""
    q = matrices.shape[-1]
    least = float(jnp.finfo(matrices.dtype).eps) ** 0.5

    def eliminate(step: Array | int, m: Array) -> Array:
        here = jnp.arange(q) == step
        row = jax.lax.dynamic_index_in_dim(m, step, axis=-2)
        column = jax.lax.dynamic_index_in_dim(m, step, axis=-1)
        pivot = jax.lax.dynamic_index_in_dim(row, step, axis=-1)
        scaled = jnp.where(here, 1, row) / jnp.where(pivot.real > least, pivot, 1)
        scaled = jnp.where(pivot.real > least, scaled, 0)
        rest = jnp.where(here[None, :], 0, m) - column * scaled
        return jnp.where(here[:, None], scaled, rest)

    return jax.lax.fori_loop(0, q, eliminate, matrices)


def one_minus_squared_modulus(overlap: Inexact[Array, "k k"]) -> Float[Array, "k k"]:
    """1 - |L_ij|^2, at least eps off the diagonal; 1 on the diagonal, which is not used."""
    floored = jnp.maximum(1 - jnp.abs(overlap) ** 2, jnp.finfo(overlap.dtype).eps)
    return jnp.where(jnp.eye(overlap.shape[0], dtype=bool), 1, floored)


def mean_of_others(estimates: Inexact[Array, "k k"]) -> Inexact[Array, " k"]:
    k = estimates.shape[0]
    others = jnp.where(jnp.eye(k, dtype=bool), 0, estimates)
    return jnp.sum(others, axis=1) / (k - 1)


def length(
    deviations: Inexact[Array, "*values k"], rounding: Float[Array, "*values"]
) -> Float[Array, "*values"]:
    """sqrt(|deviations|^2 + rounding^2), without overflow of the squares in float32."""
    vector = jnp.append(jnp.abs(deviations), rounding[..., None], axis=-1)
    scale = jnp.maximum(jnp.max(vector, axis=-1), jnp.finfo(vector.dtype).tiny)
    return scale * jnp.sqrt(jnp.sum((vector / scale[..., None]) ** 2, axis=-1))
