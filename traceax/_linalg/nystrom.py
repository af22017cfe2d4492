"""Nyström approximations, from the sketch of an operator and from its Krylov space.

**Without a probe.** Let S = [Omega, n^(1/2) Q] be a test matrix with columns of about one
length: k probes w_j, and Q, whose directions s_j belong to some of them. In the case of
A = c I + (low rank), S and A S have dependent columns, and how many is not for rounding to
decide. So let a shift be added to the core, H = S* A S + shift I = G^{-1} G^{-*}. This is
the approximation of diag(A, shift I) from the rows [S; I], which are independent. Without
probe j it is computed from the others only, whatever the shift is, so that nothing is
biased. F = A S G*, and

    A<S> = F F*,   A<S_-j> = F (I - N_j N_j*) F*,   N_j = [v_j, u_j/|u_j|],
    v_j = G [0; s_j], normalised (0 if w_j has no direction),   u_j = g_j - v_j v_j* g_j,
    w_j* (A - A<S_-j>) w_j = 1/|u_j|^2 - shift,     (A - A<S_-j>) w_j = F u_j/|u_j|^2.

Without probes i and j span(N_i, N_j) is removed. With C = N_i* N_j, K = (I - C* C)^{-1},
both 2 x 2, and M = F* F,

    tr A<S_-ij> = |F|^2 - tr N_i* M N_i - tr K (N_j - N_i C)* M (N_j - N_i C),

and probe j's remainder is K_uu/|u_j|^2 - shift.

**From a Krylov space of A** one knows T = Z* A Z and A Z = Z' T', with orthonormal columns
Z, and a few more in Z' = [Z, Z_next]. Let B = A + shift I be Hermitian positive definite,
and 0 < nu <= its least eigenvalue. The Nyström approximation of B - nu I from Z gives

    P = nu I + Z' N Z'*,    N = H (T + (shift - nu) I)^{-1} H*,    H = T' + (shift - nu) J,

J = [I; 0]. Only Z' is large. P agrees with B on Z: P Z = B Z. If B - nu I is positive
semidefinite, P <= B, and no eigenvalue of P^{-1} B is below 1. So P is a preconditioner.

Galerkin's solution of B u = y, u = Z (T + shift I)^{-1} Z* y, has a residual orthogonal to
Z. If y is in the first block of the space, u is at least as good as the result of as many
steps of conjugate gradients as there are blocks.

**Conjugate gradients**, preconditioned, for a few right-hand sides in one block.

B and P are Hermitian positive definite. With r = y - B x, the error in the energy norm is

    |x* - x|_B^2 = y* B^{-1} y - y* x - x* r = r* B^{-1} r.

The iteration computes r* P^{-1} r anyway, which is a bound of this error where P <= B. Else
|P^{1/2} B^{-1} P^{1/2}| times this is a bound. The iteration is Lanczos' process for
P^{-1/2} B P^{-1/2}, with step lengths alpha_j and ratios beta_j as the entries of

    T = L L*,    L_jj = alpha_j^{-1/2},    L_{j+1, j} = (beta_j/alpha_j)^{1/2},

and |T^{-1}|, at most that norm, is soon close to it. Of |L^{-1} v|, |v| = 1, the largest
value over v = (cos(t) v_j, sin(t)) is followed from row to row (incremental norms: Meurant
and Tichy 2019, arXiv:1810.02127). The iteration stops when max(1, |T^{-1}|) r* P^{-1} r is
a small part of y* B^{-1} y, of which each step learns more: a step of length alpha lowers
the squared error by alpha r* P^{-1} r.

(lineax's method is for real numbers, and stops by the largest entry of the residual.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

from traceax._linalg import lapack
from traceax._linalg.columns import (
    column_dots,
    column_norms_squared,
    column_scales,
    diagonal,
    dot,
    einsum,
    largest_modulus,
    over,
    promoted,
    squared_modulus,
    times,
)
from traceax._linalg.krylov import BlockKrylov, next_block

# Eigenvalues below minus this part of the largest one are not noise. The entries of a
# matrix that is rounded to bfloat16 may be off by 4e-3, and its eigenvalues by less.
NOISE = 1e-2


class Fit(NamedTuple):
    """F, M = F* F; of each probe N_j, the root of H^{-1} times u_j/|u_j|^2, 1/|u_j|^2; and
    the noise of an entry of the core, which is that of a form w* A w."""

    left: Inexact[Array, "n m"]
    gram: Inexact[Array, "m m"]
    vectors: Inexact[Array, "k m 2"]
    residuals: Inexact[Array, "m k"]
    squares: Float[Array, " k"]
    shift: Float[Array, ""]
    noise: Float[Array, ""]

    @property
    def columns(self) -> Inexact[Array, "m twice"]:
        """All N_j side by side."""
        return jnp.moveaxis(self.vectors, 0, 1).reshape(len(self.gram), -1)

    @property
    def traces(self) -> Float[Array, " k"]:
        """tr A<S_-j>."""
        removed = column_dots(self.columns, dot(self.gram, self.columns)).real
        return jnp.trace(self.gram).real - jnp.sum(removed.reshape(-1, 2), axis=1)

    @property
    def remainders(self) -> Float[Array, " k"]:
        """w_j* (A - A<S_-j>) w_j."""
        return self.squares - self.shift


def fit_to_core(
    test: Inexact[Array, "n m"],
    images: Inexact[Array, "n m"],
    directions: Inexact[Array, "a a"],
    noise: Float[Array, ""],
) -> Fit:
    """From S and A S; the shift is at least `noise`. S* A S would be Hermitian if A were
    applied exactly, so its asymmetry shows the noise of a matvec. The shift covers that of
    the whole core. A matrix that was rounded once (a kernel in float32) is Hermitian, but
    may have negative eigenvalues: then the shift is twice the depth of the lowest one, and
    no eigenvalue is changed but by the shift. This widens no error bar, because the
    estimate is unbiased whatever the shift is. NaN if the lowest one is too deep for noise:
    the tag is wrong."""
    core = dot(test.conj().T, images)
    skew = core - core.conj().T
    noise = noise + jnp.linalg.norm(skew) / 2
    values, vectors = lapack.eigh((core + core.conj().T) / 2)
    depth, largest = jnp.maximum(-values[0], 0), jnp.max(jnp.abs(values))
    depth = jnp.where(depth - noise > NOISE * largest, jnp.nan, depth)
    shift = jnp.maximum(noise, 2 * depth)
    known = fit(values, vectors, images, directions, shift)
    noise = _noise(known, values, dot(vectors.conj().T, skew, vectors))
    return known._replace(noise=noise)


def _noise(
    known: Fit, values: Float[Array, " m"], skew: Inexact[Array, "m m"]
) -> Float[Array, ""]:
    """The standard deviation of the mean of the samples, by the noise of matvecs.

    The core has the noise (S* E + E* S)/2, and its asymmetry S* E - E* S is as large, entry
    by entry, in its eigenvectors, too. There a trace of A<S> changes by |F_a|^2/theta_a for
    a change of theta_a, and remainder j by x_j x_j*, x_j = H^{-1} e_j/(H^{-1})_jj."""
    theta = jnp.maximum(values, 0) + known.shift
    rates = jnp.sqrt(diagonal(known.gram).real / theta)
    x = over(known.residuals, jnp.sqrt(theta)[:, None])
    tested = jnp.abs(dot(x, x.conj().T)) / x.shape[1]
    weights = rates[:, None] * rates[None, :] + tested
    return jnp.linalg.norm(weights * jnp.abs(skew)) / 2


def fit(
    values: Float[Array, " m"],
    vectors: Inexact[Array, "m m"],
    images: Inexact[Array, "n m"],
    directions: Inexact[Array, "a a"],
    shift: Float[Array, ""],
) -> Fit:
    """From the eigenvalues and eigenvectors of the core."""
    again = directions.shape[0]
    k = values.size - again
    half = over(vectors, jnp.sqrt(jnp.maximum(values + shift, shift / 2))[None, :])
    right, left = half.conj().T, dot(images, half)
    v = dot(right[:, k:], directions)
    v = over(v, jnp.sqrt(column_norms_squared(v))[None, :])
    v = jnp.pad(v, ((0, 0), (0, k - again)))
    g = right[:, :k]
    for _ in range(2):
        g = g - times(column_dots(v, g)[None, :], v)
    squares = 1 / column_norms_squared(g)
    residuals = times(squares[None, :], g)
    removed = jnp.stack([v, times(jnp.sqrt(squares)[None, :], g)], axis=-1)
    gram = dot(left.conj().T, left)
    removed = jnp.moveaxis(removed, 1, 0)
    return Fit(left, gram, removed, residuals, squares, shift, jnp.zeros_like(shift))


class LeftOutInPairs(NamedTuple):
    """C = N_i* N_j and K = (I - C* C)^{-1}."""

    overlaps: Inexact[Array, "k k 2 2"]
    inverse: Inexact[Array, "k k 2 2"]

    def removed(self, forms: Inexact[Array, "twice twice"]) -> Float[Array, "k k"]:
        """tr M on span(N_i, N_j), from N* M N."""
        blocks = _blocks(forms)
        c, adjoint = self.overlaps, jnp.swapaxes(self.overlaps, 2, 3).conj()
        own, cross = einsum("iiab->iab", blocks), dot(adjoint, blocks)
        mixed = own[None] - cross - jnp.swapaxes(cross, 2, 3).conj()
        mixed = mixed + dot(adjoint, own[:, None], c)
        removed = einsum("ijab,ijba->ij", self.inverse, mixed).real
        return removed + einsum("iaa->i", own).real[:, None]

    def tested(self, along: Inexact[Array, "k twice"]) -> Float[Array, "k k"]:
        """|u_j| w_j* F u/|u|^2, u the part of u_j orthogonal to N_i, from W* F N."""
        blocks = jnp.swapaxes(along.reshape(len(along), -1, 2), 0, 1)
        own = einsum("iia->ia", blocks)
        mixed = own[None] - einsum("ija,ijab->ijb", blocks, self.overlaps)
        return einsum("ijb,ijb->ij", mixed, self.inverse[..., 1]).real


def left_out_in_pairs(fit: Fit) -> LeftOutInPairs:
    c = _blocks(dot(fit.columns.conj().T, fit.columns))
    unit = jnp.eye(2, dtype=c.dtype)[None, None]
    return LeftOutInPairs(c, _inverse(unit - dot(jnp.swapaxes(c, 2, 3).conj(), c)))


def _blocks(square: Inexact[Array, "twice twice"]) -> Inexact[Array, "k k 2 2"]:
    """Of each pair."""
    k = square.shape[0] // 2
    return jnp.moveaxis(square.reshape(k, 2, k, 2), 1, 2)


def _inverse(matrices: Inexact[Array, "k k 2 2"]) -> Inexact[Array, "k k 2 2"]:
    """Of I - C* C, by elimination of the first row. That is skipped where v_i and v_j
    coincide, as they do if A has fewer dimensions than Q."""
    first, last = matrices[..., 0, 0].real, matrices[..., 1, 1].real
    corner = matrices[..., 1, 0]
    eps = float(jnp.finfo(first.dtype).eps)
    above = jnp.where(first > 1e3 * eps, 1 / first, 0)
    ratio = times(above, corner)
    below = 1 / jnp.maximum(last - above * squared_modulus(corner), eps)
    beside = -times(below, ratio)
    outer = above + squared_modulus(ratio) * below
    entries = promoted(outer, beside.conj(), beside, below)
    return jnp.stack(entries, axis=-1).reshape(matrices.shape)


class Preconditioner(eqx.Module):
    """P = nu I + Z' vectors diag(values) (Z' vectors)*. `is_below`: nu is the shift, and
    A is positive semidefinite on Z, to rounding. Else nu is half of the least eigenvalue of
    T + shift I. `largest` is the largest of these."""

    basis: Inexact[Array, "n s"]
    vectors: Inexact[Array, "s s"]
    values: Float[Array, " s"]
    nu: Float[Array, ""]
    is_below: Bool[Array, ""]
    largest: Float[Array, ""]

    def __call__(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        """P^{-1} block."""
        inside = dot(self.vectors.conj().T, dot(self.basis.conj().T, block))
        factors = self.values / (self.nu + self.values)
        moved = dot(self.basis, dot(self.vectors, times(factors[:, None], inside)))
        return over(block - moved, self.nu)


class Projected(eqx.Module):
    """A + shift I on a Krylov space, divided by `scale`: `basis` is Z', `tall` is T', and
    `theta` and `vectors` are the eigenvalues and eigenvectors of T, and `skew` is T - T*,
    which shows the noise of matvecs."""

    basis: Inexact[Array, "n s"]
    tall: Inexact[Array, "s r"]
    theta: Float[Array, " r"]
    vectors: Inexact[Array, "r r"]
    skew: Inexact[Array, "r r"]
    shift: Float[Array, ""]
    scale: Float[Array, ""]

    def form_noise(self, u: Inexact[Array, "n t"]) -> Float[Array, " t"]:
        """The standard deviation of u* A u by the noise of matvecs, for each column. What u
        has outside of the space is taken for a part of its last direction."""
        sizes = column_scales(u)
        u = over(u, sizes[None, :])
        inside = dot(self.basis[:, : self.theta.size].conj().T, u)
        parts = squared_modulus(dot(self.vectors.conj().T, inside))
        rest = jnp.maximum(column_norms_squared(u) - jnp.sum(parts, axis=0), 0)
        parts = parts.at[0].add(rest)
        turned = squared_modulus(dot(self.vectors.conj().T, self.skew, self.vectors)) / 2
        noise = jnp.sqrt(column_dots(parts, dot(turned, parts)))
        return sizes * (sizes * (self.scale * noise))

    @property
    def rounding(self) -> Float[Array, ""]:
        """Of an eigenvalue of T + shift I."""
        theta = self.theta
        largest = jnp.maximum(-theta[0], theta[-1]) + jnp.abs(self.shift)
        return 4 * jnp.finfo(theta.dtype).eps * theta.size**0.5 * largest

    def shifted(self, block: Inexact[Array, "r t"], shift: Array) -> Inexact[Array, "s t"]:
        """(T' + shift J) block."""
        padded = jnp.pad(block, ((0, self.tall.shape[0] - block.shape[0]), (0, 0)))
        return dot(self.tall, block) + times(shift, padded)


def projected(space: BlockKrylov, shift: Float[Array, ""]) -> Projected:
    new, factor = next_block(space.basis, space.residual)
    below = jnp.pad(factor, ((0, 0), (space.filled.size - space.width, 0)))
    tall = jnp.concatenate([space.projection, below])
    scale = jnp.maximum(largest_modulus(tall), jnp.abs(shift))
    tall = jnp.where(space.filled[None, :], over(tall, scale), 0)
    square = tall[: space.filled.size]
    skew = square - square.conj().T
    square = (square + square.conj().T) / 2
    empty = jnp.diag(~space.filled)
    theta, vectors = lapack.eigh(jnp.where(empty, square[0, 0], square))
    basis = jnp.concatenate([space.basis, new], axis=1)
    return Projected(basis, tall, theta, vectors, skew, shift / scale, scale)


def preconditioner_of(known: Projected) -> Preconditioner:
    theta, shift, info = known.theta, known.shift, jnp.finfo(known.theta.dtype)
    noise = info.eps * jnp.linalg.norm(known.tall) + info.tiny
    is_below = (shift > noise) & (theta[0] >= -10 * noise)
    least = jnp.where(is_below, 2 * shift, theta[0] + shift)
    nu = jnp.maximum(least, known.rounding) / 2
    nu = jnp.where(least < -known.rounding, jnp.nan, nu)  # not positive definite
    half = known.shifted(known.vectors, shift - nu)
    half = over(half, jnp.sqrt(jnp.maximum(theta + (shift - nu), noise))[None, :])
    half = jnp.where(jnp.any(known.basis != 0, axis=0)[:, None], half, 0)
    outer = dot(half, half.conj().T)
    values, vectors = lapack.eigh((outer + outer.conj().T) / 2)
    values, nu, largest = (
        known.scale * x for x in (jnp.maximum(values, 0), nu, theta[-1] + shift)
    )
    return Preconditioner(known.basis, vectors, values, nu, is_below, largest)


def galerkin(
    known: Projected, y: Inexact[Array, "n t"]
) -> tuple[Inexact[Array, "n t"], Inexact[Array, "n t"]]:
    """The solution on the space, and its residual, without an application, outside of
    eigenvalues that are zero to rounding. NaN if one is negative."""
    basis = known.basis[:, : known.theta.size]
    values = known.theta + known.shift
    zero = jnp.where(values < -known.rounding, jnp.nan, jnp.inf)
    values = jnp.where(values > known.rounding, values, zero)[:, None]
    inside = dot(known.vectors.conj().T, dot(basis.conj().T, y))
    inside = dot(known.vectors, over(inside, values))
    residual = y - dot(known.basis, known.shifted(inside, known.shift))
    return over(dot(basis, inside), known.scale), residual


BlockMap = Callable[[Inexact[Array, "n t"]], Inexact[Array, "n t"]]
Parts = tuple[Float[Array, "n t"], ...]


class Solved(NamedTuple):
    """`inverse_norm` is max(1, |T^{-1}|): times r* P^{-1} r it bounds the error. It is
    infinite if B is found to be singular."""

    solution: Inexact[Array, "n t"]
    inverse_norm: Float[Array, " t"]
    num_steps: Int[Array, ""]


class InverseNorm(NamedTuple):
    """|L^{-1} v|^2, the last entry of L^{-1} v, and the next beta_j/alpha_j."""

    value: Float[Array, " t"]
    last: Float[Array, " t"]
    coupling: Float[Array, " t"]

    def extended(self, alpha: Float[Array, " t"]) -> InverseNorm:
        """By the row of a step."""
        root = jnp.sqrt(self.coupling)
        before = self.value + alpha * (root * self.last) ** 2
        mixed, half = -alpha * root * self.last, (before - alpha) / 2
        turn = jnp.arctan2(mixed, half) / 2
        value = (before + alpha) / 2 + jnp.hypot(half, mixed)
        last = jnp.sqrt(alpha) * (jnp.sin(turn) - jnp.cos(turn) * root * self.last)
        return self._replace(value=value, last=last)


class _State(NamedTuple):
    solution: Inexact[Array, "n t"]
    residual: Inexact[Array, "n t"]
    direction: Inexact[Array, "n t"]
    error: Float[Array, " t"]  # r* P^{-1} r
    energy: Float[Array, " t"]  # y* B^{-1} y, as far as it is known
    inverse: InverseNorm
    num_steps: Int[Array, ""]

    def inverse_norm(self) -> Float[Array, " t"]:
        return jnp.maximum(self.inverse.value, 1)


def conjugate_gradients(
    apply: BlockMap,
    precondition: Preconditioner,
    residual: Inexact[Array, "n t"],
    energy: Float[Array, " t"] | float = 0.0,
    *,
    rtol: Float[Array, ""] | float,
    max_steps: int,
) -> Solved:
    """The solution x of B x = residual, which starts at zero. It stops when the error is
    `rtol` times the solution, both in the energy norm. If the residual is that of a first
    solution, `energy` is the squared energy norm of this one. It also stops where B has an
    eigenvalue of zero, to rounding; NaN if B is found not to be positive semidefinite."""
    rounding = jnp.sqrt(jnp.finfo(residual.dtype).eps * precondition.largest)

    def unsolved(state: _State) -> Array:
        norm = state.inverse_norm()
        return (norm * state.error > rtol**2 * state.energy) & jnp.isfinite(norm)

    def goes_on(state: _State) -> Array:
        return jnp.any(unsolved(state)) & (state.num_steps < max_steps)

    def step(state: _State) -> _State:
        image = apply(state.direction)
        curvature = column_dots(state.direction, image).real
        zero = column_norms_squared(times(rounding, state.direction))
        singular = unsolved(state) & (curvature <= zero)
        alpha = state.error / jnp.where(curvature > zero, curvature, 1)
        alpha = jnp.where(unsolved(state) & ~singular, alpha, 0)
        alpha = jnp.where(curvature < -100 * zero, jnp.nan, alpha)
        solution = state.solution + times(alpha[None, :], state.direction)
        residual = state.residual - times(alpha[None, :], image)
        direction = precondition(residual)
        error = column_dots(residual, direction).real
        ratio = error / jnp.where(state.error > 0, state.error, 1)
        direction = direction + times(ratio[None, :], state.direction)
        energy = state.energy + alpha * state.error
        coupling = ratio / jnp.where(alpha > 0, alpha, 1)
        inverse = state.inverse.extended(alpha)._replace(coupling=coupling)
        inverse = jax.tree.map(partial(jnp.where, alpha == 0), state.inverse, inverse)
        norm = jnp.where(singular, jnp.inf, inverse.value)
        inverse = inverse._replace(value=norm)
        counted = state.num_steps + 1
        return _State(solution, residual, direction, error, energy, inverse, counted)

    scales = column_scales(residual)  # without them squares may overflow
    energy = jnp.asarray(energy, scales.dtype) / scales / scales
    residual = over(residual, scales[None, :])
    direction = precondition(residual)
    error = column_dots(residual, direction).real
    zero, none = jnp.zeros_like(residual), jnp.zeros_like(error)
    inverse = InverseNorm(none, none, none)
    state = _State(zero, residual, direction, error, energy, inverse, jnp.asarray(0))
    state = jax.lax.while_loop(goes_on, step, state)
    solution = times(scales[None, :], state.solution)
    return Solved(solution, state.inverse_norm(), state.num_steps)


class Solve(eqx.Module):
    """The solution of B x = y, which is known already, as a function of B and y: it is
    differentiable to any order, because the derivative of a solution is a solution.

    Complex blocks are pairs of real ones, on which B is symmetric. So JAX never asks for
    the transpose of B, which an operator need not have.
    """

    solution: Inexact[Array, "n t"]
    precondition: Preconditioner
    rtol: Float[Array, ""]
    max_steps: int = eqx.field(static=True)

    def __call__(self, apply: BlockMap, y: Inexact[Array, "n t"]) -> Inexact[Array, "n t"]:
        def on_parts(parts: Parts) -> Parts:
            return _parts(apply(_joined(parts)))

        def solve(on_parts: Callable[[Parts], Parts], parts: Parts) -> Parts:
            solved = conjugate_gradients(
                lambda block: _joined(on_parts(_parts(block))),
                self.precondition,
                _joined(parts),
                rtol=self.rtol,
                max_steps=self.max_steps,
            )
            return _parts(solved.solution)

        rest = _parts(y - apply(self.solution))
        more = jax.lax.custom_linear_solve(on_parts, rest, solve, symmetric=True)
        return self.solution + _joined(more)


def _parts(block: Inexact[Array, "n t"]) -> Parts:
    return (block.real, block.imag) if jnp.iscomplexobj(block) else (block,)


def _joined(parts: Parts) -> Inexact[Array, "n t"]:
    return jax.lax.complex(*parts) if len(parts) == 2 else parts[0]
