"""Preconditioners from a Krylov space, Galerkin's solution, and conjugate gradients.

**Preconditioners.** A block Krylov space of A gives T = Z* A Z and A Z = Z' T', with
orthonormal columns Z, and a few more in Z' = [Z, Z_next]. Let B = A + shift I be Hermitian
positive definite, and 0 < nu <= its least eigenvalue. The Nyström approximation of
B - nu I from Z gives

    P = nu I + Z' N Z'*,    N = H (T + (shift - nu) I)^{-1} H*,    H = T' + (shift - nu) J,

J = [I; 0]. Only Z' is large. P agrees with B on Z: P Z = B Z. If B - nu I is positive
semidefinite, P <= B, and no eigenvalue of P^{-1} B is below 1. So P is a preconditioner.

**Galerkin's solution** of B u = y is u = Z (T + shift I)^{-1} Z* y. Its residual is
orthogonal to Z. If y is in the first block of the space, u is at least as good as the
result of as many steps of conjugate gradients as there are blocks.

**Conjugate gradients**, preconditioned, for a few right-hand sides in one block. B and P
are Hermitian positive definite. With r = y - B x, the error in the energy norm is

    |x* - x|_B^2 = y* B^{-1} y - y* x - x* r = r* B^{-1} r.

The iteration computes r* P^{-1} r anyway, which is a bound of this error if P <= B. If not,
|P^{1/2} B^{-1} P^{1/2}| times this is a bound. The iteration is Lanczos' process for
P^{-1/2} B P^{-1/2}, with step lengths alpha_j and ratios beta_j as the entries of

    T = L L*,    L_jj = alpha_j^{-1/2},    L_{j+1, j} = (beta_j/alpha_j)^{1/2},

and |T^{-1}|, at most that norm, is soon close to it. `InverseNorm` follows the largest
value of |L^{-1} v|, |v| = 1, over v = (cos(t) v_j, sin(t)) from row to row (incremental
norms: Meurant and Tichy 2019, arXiv:1810.02127). The iteration stops when max(1, |T^{-1}|)
r* P^{-1} r is a small part of y* B^{-1} y, of which each step learns more: a step of length
alpha lowers the squared error by alpha r* P^{-1} r.

(lineax's method is for real numbers, and stops by the largest entry of the residual.)
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact, Int

from traceax._linalg import lapack
from traceax._linalg.columns import (
    Number,
    adjoint_dot_columns,
    column_dots,
    column_norms_squared,
    column_scales,
    dot,
    dot_columns,
    largest_modulus,
    over,
    positive,
    squared_modulus,
    times,
)
from traceax._linalg.krylov import BlockKrylov, Matvecs, OnSpace

Sides = Inexact[Array, "n t"]
BySide = Float[Array, " t"]


class Preconditioner(eqx.Module):
    """The preconditioner P = nu I + Z' vectors diag(values) (Z' vectors)*.

    If A is positive semidefinite on Z, to rounding, nu is the shift, and P <= A + shift I.
    If not, nu is half of the least eigenvalue of T + shift I. `largest` is the largest of
    these eigenvalues.
    """

    basis: Inexact[Array, "n s"]
    vectors: Inexact[Array, "s s"]
    values: Float[Array, " s"]
    nu: Number
    largest: Number

    def __call__(self, block: Sides) -> Sides:
        """Return P^{-1} block."""
        inside = adjoint_dot_columns(self.vectors, adjoint_dot_columns(self.basis, block))
        factors = self.values / (self.nu + self.values)
        moved = dot_columns(self.vectors, times(factors[:, None], inside))
        moved = dot_columns(self.basis, moved)
        return over(block - moved, self.nu)


class Projection(eqx.Module):
    """The operator A + shift I on a Krylov space, divided by `scale`.

    `basis` is Z', `tall` is T', and `theta` and `vectors` are the eigenvalues and
    eigenvectors of the Hermitian part of T. T - T* shows the noise of matvecs.
    """

    basis: Inexact[Array, "n s"]
    tall: Inexact[Array, "s r"]
    theta: Float[Array, " r"]
    vectors: Inexact[Array, "r r"]
    shift: Number
    scale: Number

    def inside(self, block: Sides) -> Inexact[Array, "r t"]:
        """Return the coordinates of a block in the eigenvectors of T."""
        z = self.basis[:, : self.theta.size]
        return adjoint_dot_columns(self.vectors, adjoint_dot_columns(z, block))

    def shifted(self, block: Inexact[Array, "r t"], shift: Array) -> Inexact[Array, "s t"]:
        """Return (T' + shift J) block."""
        padded = jnp.pad(block, ((0, self.tall.shape[0] - block.shape[0]), (0, 0)))
        return dot_columns(self.tall, block) + times(shift, padded)

    @property
    def rounding(self) -> Number:
        """The distance by which rounding may have moved an eigenvalue of T + shift I."""
        theta = self.theta
        largest = jnp.maximum(-theta[0], theta[-1]) + jnp.abs(self.shift)
        return 4 * jnp.finfo(theta.dtype).eps * theta.size**0.5 * largest

    def form_noise(self, u: Sides) -> BySide:
        """Return the standard deviation of u* A u by the noise of matvecs, for each column.

        The part of u outside the space is taken for a part of its last direction.
        """
        sizes = column_scales(u)
        u = over(u, sizes[None, :])
        parts = squared_modulus(self.inside(u))
        rest = jnp.maximum(column_norms_squared(u) - jnp.sum(parts, axis=0), 0)
        parts = parts.at[0].add(rest)
        square = self.tall[: self.theta.size]
        skew = square - square.conj().T
        turned = squared_modulus(dot(self.vectors.conj().T, skew, self.vectors)) / 2
        noise = jnp.sqrt(column_dots(parts, dot_columns(turned, parts)))
        return sizes * (sizes * (self.scale * noise))


def projected(
    space: BlockKrylov, shift: Number, theta: Float[Array, " r"], vectors: OnSpace
) -> Projection:
    """Project A + shift I on a Krylov space that has its next block, given the eigenvalues
    and eigenvectors of T."""
    unit = jnp.maximum(largest_modulus(space.tall), jnp.abs(shift))
    tall = jnp.where(space.filled[None, :], over(space.tall, unit), 0)
    return Projection(space.extended, tall, over(theta, unit), vectors, shift / unit, unit)


def preconditioner_of(known: Projection) -> Preconditioner:
    """Make P. It is NaN if A + shift I is not positive definite on the space."""
    theta, shift, info = known.theta, known.shift, jnp.finfo(known.theta.dtype)
    noise = info.eps * jnp.linalg.norm(known.tall) + info.tiny
    is_semidefinite = (shift > noise) & (theta[0] >= -10 * noise)
    least = jnp.where(is_semidefinite, 2 * shift, theta[0] + shift)
    nu = jnp.maximum(least, known.rounding) / 2
    nu = jnp.where(least < -known.rounding, jnp.nan, nu)
    half = known.shifted(known.vectors, shift - nu)
    half = over(half, jnp.sqrt(jnp.maximum(theta + (shift - nu), noise))[None, :])
    half = jnp.where(jnp.any(known.basis != 0, axis=0)[:, None], half, 0)
    outer = dot(half, half.conj().T)
    values, vectors = lapack.eigh((outer + outer.conj().T) / 2)
    numbers = jnp.maximum(values, 0), nu, theta[-1] + shift
    return Preconditioner(known.basis, vectors, *(known.scale * x for x in numbers))


def galerkin(known: Projection, y: Sides) -> tuple[Sides, Sides]:
    """Return the solution on the space, and its residual, without a matvec.

    Eigenvalues that are zero to rounding are left out; a negative one gives NaN.
    """
    values = known.theta + known.shift
    zero = jnp.where(values < -known.rounding, jnp.nan, jnp.inf)
    values = jnp.where(values > known.rounding, values, zero)[:, None]
    inside = dot_columns(known.vectors, over(known.inside(y), values))
    residual = y - dot_columns(known.basis, known.shifted(inside, known.shift))
    solution = dot_columns(known.basis[:, : known.theta.size], inside)
    return over(solution, known.scale), residual


class InverseNorm(NamedTuple):
    """The squared norm |L^{-1} v|^2, which estimates |T^{-1}|, and how to continue it.

    `last` is the last entry of L^{-1} v, and `coupling` the next beta_j/alpha_j.
    """

    value: BySide
    last: BySide
    coupling: BySide

    def extended(self, alpha: BySide, ratio: BySide, singular: Array) -> InverseNorm:
        """Append the row of a step to L, unless alpha is zero; T may be found singular."""
        root = jnp.sqrt(self.coupling)
        before = self.value + alpha * (root * self.last) ** 2
        mixed, half = -alpha * root * self.last, (before - alpha) / 2
        turn = jnp.arctan2(mixed, half) / 2
        value = (before + alpha) / 2 + jnp.hypot(half, mixed)
        last = jnp.sqrt(alpha) * (jnp.sin(turn) - jnp.cos(turn) * root * self.last)
        longer = InverseNorm(value, last, ratio / positive(alpha))
        longer = jax.tree.map(partial(jnp.where, alpha == 0), self, longer)
        return longer._replace(value=jnp.where(singular, jnp.inf, longer.value))


class Iterate(NamedTuple):
    """The state of conjugate gradients.

    `error` is r* P^{-1} r, and `energy` is y* B^{-1} y, as far as it is known.
    """

    solution: Sides
    residual: Sides
    direction: Sides
    error: BySide
    energy: BySide
    norm: InverseNorm
    num_steps: Int[Array, ""]

    @property
    def inverse_norm(self) -> BySide:
        """Return max(1, |T^{-1}|): times r* P^{-1} r it bounds the squared error.

        It is infinite if B is found to be singular.
        """
        return jnp.maximum(self.norm.value, 1)


def conjugate_gradients(
    apply: Matvecs,
    precondition: Preconditioner,
    residual: Sides,
    energy: BySide | float = 0.0,
    *,
    rtol: Number | float,
    max_steps: int,
) -> Iterate:
    """Solve B x = residual, from x = 0.

    The iteration stops when the error is `rtol` times the solution, both in the energy
    norm. If `residual` is what a first solution leaves, `energy` is the squared energy norm
    of this solution. The iteration also stops if B has an eigenvalue of zero, to rounding.
    The solution is NaN if B is found not to be positive semidefinite.
    """
    rounding = jnp.sqrt(jnp.finfo(residual.dtype).eps * precondition.largest)

    def unsolved(state: Iterate) -> Bool[Array, " t"]:
        norm = state.inverse_norm
        return (norm * state.error > rtol**2 * state.energy) & jnp.isfinite(norm)

    def goes_on(state: Iterate) -> Bool[Array, ""]:
        return jnp.any(unsolved(state)) & (state.num_steps < max_steps)

    def step(state: Iterate) -> Iterate:
        active = unsolved(state)
        image = apply(state.direction)
        curvature = column_dots(state.direction, image).real
        zero = column_norms_squared(times(rounding, state.direction))
        singular = active & (curvature <= zero)
        alpha = state.error / jnp.where(curvature > zero, curvature, 1)
        alpha = jnp.where(active & ~singular, alpha, 0)
        alpha = jnp.where(curvature < -100 * zero, jnp.nan, alpha)
        solution = state.solution + times(alpha[None, :], state.direction)
        residual = state.residual - times(alpha[None, :], image)
        direction = precondition(residual)
        error = column_dots(residual, direction).real
        energy = state.energy + alpha * state.error
        ratio = error / positive(state.error)
        direction = direction + times(ratio[None, :], state.direction)
        norm = state.norm.extended(alpha, ratio, singular)
        steps = state.num_steps + 1
        return Iterate(solution, residual, direction, error, energy, norm, steps)

    scales = column_scales(residual)  # without them squares may overflow
    energy = jnp.asarray(energy, scales.dtype) / scales / scales
    residual = over(residual, scales[None, :])
    direction = precondition(residual)
    error = column_dots(residual, direction).real
    zero, none = jnp.zeros_like(residual), jnp.zeros_like(error)
    norm = InverseNorm(none, none, none)
    state = Iterate(zero, residual, direction, error, energy, norm, jnp.asarray(0))
    state = jax.lax.while_loop(goes_on, step, state)
    return state._replace(solution=times(scales[None, :], state.solution))


Parts = tuple[Float[Array, "n t"], ...]


class Solve(eqx.Module):
    """The `solution` of (A + S) x = y, which is known already, as a function of a subject:
    its `equation` applies A + S and W, its `vectors` are y, and `white` applies B.

    It is differentiable to any order, because the derivative of a solution is a solution.
    Complex blocks are pairs of real ones, on which A + S is symmetric. So JAX never asks
    for the transpose of A + S, which an operator need not have.
    """

    solution: Sides
    precondition: Preconditioner
    rtol: Number
    max_steps: int = eqx.field(static=True)

    def __call__(self, subject: Any) -> Sides:
        how = {"rtol": self.rtol, "max_steps": self.max_steps}
        equation = subject.equation

        def on_parts(parts: Parts) -> Parts:
            return _as_parts(equation(_complex(parts)))

        def solve(_: Any, parts: Parts) -> Parts:
            side = equation.whiten(_complex(parts))
            found = conjugate_gradients(subject.white, self.precondition, side, **how)
            return _as_parts(equation.back(found.solution))

        rest = _as_parts(subject.vectors - equation(self.solution))
        more = jax.lax.custom_linear_solve(on_parts, rest, solve, symmetric=True)
        return self.solution + _complex(more)


def _as_parts(block: Sides) -> Parts:
    """Split a complex block into its real and imaginary parts; a real one has one part."""
    return (block.real, block.imag) if jnp.iscomplexobj(block) else (block,)


def _complex(parts: Parts) -> Sides:
    """Make a block of its parts."""
    return jax.lax.complex(*parts) if len(parts) == 2 else parts[0]
