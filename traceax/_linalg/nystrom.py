"""Nyström approximations from the sketch of an operator, each without one of its probes.

Let S = [Omega, n^(1/2) Q] be a test matrix with columns of about one length: k probes w_j,
and Q, whose directions s_j belong to some of them. If A = c I + (low rank), S and A S have
dependent columns, and rounding should not decide how many. So a shift is added to the core,
H = S* A S + shift I = G^{-1} G^{-*}. This is the approximation of diag(A, shift I) from the
rows [S; I], which are independent. Without probe j it is computed from the others only,
whatever the shift is, so that nothing is biased. F = A S G*, and

    A<S> = F F*,   A<S_-j> = F (I - N_j N_j*) F*,   N_j = [v_j, u_j/|u_j|],             (1)
    v_j = G [0; s_j], normalised (0 if w_j has no direction),   u_j = g_j - v_j v_j* g_j,
    w_j* (A - A<S_-j>) w_j = 1/|u_j|^2 - shift,     (A - A<S_-j>) w_j = F u_j/|u_j|^2.  (2)

Without probes i and j span(N_i, N_j) is removed. With C = N_i* N_j, K = (I - C* C)^{-1},
both 2 x 2, and M = F* F,

    tr A<S_-ij> = |F|^2 - tr N_i* M N_i - tr K (N_j - N_i C)* M (N_j - N_i C),          (3)

and probe j's remainder is K_uu/|u_j|^2 - shift.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._linalg import lapack
from traceax._linalg.columns import (
    Number,
    OfProbes,
    column_dots,
    column_norms_squared,
    diagonal_of,
    dot,
    einsum,
    eps_of,
    frobenius_norm,
    over,
    positive,
    promoted,
    squared_modulus,
    times,
    trace_of,
)

# Eigenvalues below minus this part of the largest one are not noise. The entries of a
# matrix that is rounded to bfloat16 may be off by 4e-3, and its eigenvalues by less.
NOISE = 1e-2

Tall = Inexact[Array, "n m"]
Core = Inexact[Array, "m m"]
OfCore = Float[Array, " m"]
Directions = Inexact[Array, "a a"]


class Fit(NamedTuple):
    """A Nyström approximation, and what (1) to (3) need to leave probes out of it.

    `left` is F, and `gram` is M = F* F. `vectors` are the N_j, `residuals` the u_j/|u_j|^2,
    and `squares` the 1/|u_j|^2. `noise` is the standard deviation of the mean of the
    samples by the noise of matvecs.
    """

    left: Tall
    gram: Core
    vectors: Inexact[Array, "k m 2"]
    residuals: Inexact[Array, "m k"]
    squares: OfProbes
    shift: Number
    noise: Number

    @property
    def columns(self) -> Inexact[Array, "m twice"]:
        """The N_j of all probes side by side."""
        return jnp.moveaxis(self.vectors, 0, 1).reshape(len(self.gram), -1)

    @property
    def traces(self) -> OfProbes:
        """The traces tr A<S_-j>, by (1)."""
        removed = column_dots(self.columns, dot(self.gram, self.columns)).real
        return trace_of(self.gram).real - jnp.sum(removed.reshape(-1, 2), axis=1)


def fit_to_cores(
    test: Tall, images: Inexact[Array, "_ n m"], directions: Directions, noise: Number
) -> Fit:
    """Make the approximation of A, and of I if that is a second operator, in one batch.

    `images` are A S, and S if I is to be fitted, too. The shift of A is at least `noise`.
    S* A S would be Hermitian if A were applied exactly, so its asymmetry shows the noise of
    a matvec. The shift covers the noise of the whole core. A matrix that was rounded once
    (a kernel in float32) is Hermitian, but may have negative eigenvalues: then the shift is
    twice the depth of the lowest one, and no eigenvalue is changed but by the shift. This
    widens no error bar, because the estimate is unbiased whatever the shift is.

    The shift of I has the same ratio to I as that of A has to A, so that estimates are
    exact for multiples of I. Noise may make the trace of the core negative, and without a
    shift of I the estimate would be biased.

    The result is NaN if the lowest eigenvalue is too deep for noise: then the tag is wrong.
    The noise of a matvec may lie in one direction u (of the largest logit, in a softmax
    head), and Q contains u. Then |Q* E| is as large as E, while Omega* E is smaller by the
    root of n and columns of Q are n^(1/2) long in S. So the asymmetry may be smaller than
    the depth by the root of n/m. It is smaller again if the noise is nearly the same
    multiple of u in every matvec: of 2,048 runs of such heads the depth was 11 times as
    large at most, and with tags that are wrong 70 times and more, once probes see it.
    """
    core = dot(test.conj().T, images)
    adjoint = core.conj().swapaxes(1, 2)
    skew, traces = core - adjoint, jnp.trace(core, axis1=1, axis2=2).real
    values, vectors = jax.vmap(lapack.eigh)((core + adjoint) / 2)
    depth, largest = 2 * jnp.maximum(-values[:, 0], 0), jnp.max(jnp.abs(values[0]))
    noise = noise + frobenius_norm(skew[0]) / 2
    deepest = 32 * (test.shape[0] / test.shape[1]) ** 0.5 * noise
    is_wrong = depth[0] - deepest > 2 * NOISE * largest
    shift = jnp.where(is_wrong, jnp.nan, jnp.maximum(noise, depth[0]))
    ridge = shift * (traces / jnp.maximum(traces[0], shift))
    shifts = jnp.maximum(ridge, depth).at[0].set(shift)
    each = jax.vmap(fit, in_axes=(0, 0, 0, None, 0))
    fits = each(values, vectors, images, directions, shifts)
    return jax.vmap(_with_noise)(fits, values, vectors, skew)


def fit(
    values: OfCore, vectors: Core, images: Tall, directions: Directions, shift: Number
) -> Fit:
    """Make the approximation, without noise, from the eigenvalues and eigenvectors of the
    core."""
    again = directions.shape[0]
    k = values.size - again
    half = over(vectors, jnp.sqrt(jnp.maximum(values + shift, shift / 2))[None, :])
    right, left = half.conj().T, dot(images, half)
    gram = dot(left.conj().T, left)
    v = dot(right[:, k:], directions)
    v = over(v, positive(jnp.sqrt(column_norms_squared(v)))[None, :])
    v = jnp.pad(v, ((0, 0), (0, k - again)))
    g = right[:, :k]
    for _ in range(2):
        g = g - times(column_dots(v, g)[None, :], v)
    squares = 1 / column_norms_squared(g)
    residuals = times(squares[None, :], g)
    removed = jnp.stack([v.T, times(jnp.sqrt(squares)[:, None], g.T)], axis=-1)
    return Fit(left, gram, removed, residuals, squares, shift, jnp.zeros_like(shift))


def _with_noise(fit: Fit, values: OfCore, vectors: Core, skew: Core) -> Fit:
    """Add the noise of matvecs, which the asymmetry `skew` of the core shows.

    The core has the noise (S* E + E* S)/2, and its asymmetry S* E - E* S is as large, entry
    by entry, in its eigenvectors, too. There a trace of A<S> changes by |F_a|^2/theta_a for
    a change of theta_a, and remainder j by x_j x_j*, x_j = H^{-1} e_j/(H^{-1})_jj.
    """
    skew = dot(vectors.conj().T, skew, vectors)
    theta = jnp.maximum(values, 0) + fit.shift
    rates = jnp.sqrt(diagonal_of(fit.gram).real / theta)
    x = over(fit.residuals, jnp.sqrt(theta)[:, None])
    tested = jnp.abs(dot(x, x.conj().T)) / fit.squares.size
    weights = rates[:, None] * rates[None, :] + tested
    return fit._replace(noise=frobenius_norm(weights * jnp.abs(skew)) / 2)


class WithoutPairs(NamedTuple):
    """The matrices C = N_i* N_j and K = (I - C* C)^{-1} of every pair, as in (3)."""

    overlaps: Inexact[Array, "k k 2 2"]
    inverse: Inexact[Array, "k k 2 2"]

    def removed(self, forms: Inexact[Array, "twice twice"]) -> Float[Array, "k k"]:
        """Return the trace of M on span(N_i, N_j), given N* M N."""
        blocks = _blocks(forms)
        c, adjoint = self.overlaps, jnp.swapaxes(self.overlaps, 2, 3).conj()
        own, cross = einsum("iiab->iab", blocks), dot(adjoint, blocks)
        mixed = own[None] - cross - jnp.swapaxes(cross, 2, 3).conj()
        mixed = mixed + dot(adjoint, own[:, None], c)
        removed = einsum("ijab,ijba->ij", self.inverse, mixed).real
        return removed + einsum("iaa->i", own).real[:, None]

    def tested(self, along: Inexact[Array, "k twice"]) -> Float[Array, "k k"]:
        """Return |u_j| w_j* F u/|u|^2, with u the part of u_j orthogonal to N_i.

        `along` is W* F N.
        """
        blocks = jnp.swapaxes(along.reshape(len(along), -1, 2), 0, 1)
        own = einsum("iia->ia", blocks)
        mixed = own[None] - einsum("ija,ijab->ijb", blocks, self.overlaps)
        return einsum("ijb,ijb->ij", mixed, self.inverse[..., 1]).real


def left_out_in_pairs(fit: Fit) -> WithoutPairs:
    """Prepare (3) for every pair of probes.

    K is found by elimination of the first row of I - C* C. That is skipped if v_i and v_j
    coincide, as they do if A has fewer dimensions than Q.
    """
    c = _blocks(dot(fit.columns.conj().T, fit.columns))
    unit = jnp.eye(2, dtype=c.dtype)[None, None]
    matrices = unit - dot(jnp.swapaxes(c, 2, 3).conj(), c)
    first, last = matrices[..., 0, 0].real, matrices[..., 1, 1].real
    corner = matrices[..., 1, 0]
    above = 1 / jnp.where(first > 1e3 * eps_of(first), first, jnp.inf)
    ratio = times(above, corner)
    below = 1 / jnp.maximum(last - above * squared_modulus(corner), eps_of(first))
    off = -times(below, ratio)
    outer = above + squared_modulus(ratio) * below
    entries = jnp.stack(promoted(outer, off.conj(), off, below), axis=-1)
    return WithoutPairs(c, entries.reshape(c.shape))


def _blocks(square: Inexact[Array, "twice twice"]) -> Inexact[Array, "k k 2 2"]:
    """Cut a matrix into a 2 x 2 block for each pair of probes."""
    k = square.shape[0] // 2
    return jnp.moveaxis(square.reshape(k, 2, k, 2), 1, 2)
