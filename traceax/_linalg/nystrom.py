"""Nyström approximations, from the sketch of an operator and from its Krylov space.

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

B and P are Hermitian positive definite. With r = y - B x, the error of x in the energy norm
is

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

(lineax has the method for real numbers only. It stops by the largest entry of the residual,
and raises if a tangent does not converge. Here the error bar shows an unfinished solve.)
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
from traceax._linalg.basis import TALL
from traceax._linalg.columns import (
    column_dots,
    column_norms_squared,
    column_scales,
    largest_modulus,
    over,
    times,
)
from traceax._linalg.krylov import BlockKrylov, next_block

# Eigenvalues below minus this part of the largest one are not noise. The entries of a
# matrix that is rounded to bfloat16 may be off by 4e-3, and its eigenvalues by less.
NOISE = 1e-2


class Nystrom(NamedTuple):
    """A Nyström approximation F F* of A/scale + shift I from the sketch A Omega.

    `right` has columns g_i with (Omega* (A/scale + shift I) Omega)^{-1} = G* G. So probe i
    contributes z_i = F g_i / |g_i|: without it F F* becomes F F* - z_i z_i*. `test_inverse`
    is T = R^{-*} for Omega = U R, so that (Omega* Omega)^{-1} = T* T.
    """

    left: Inexact[Array, "n k"]
    right: Inexact[Array, "k k"]
    shift: Float[Array, ""]
    scale: Float[Array, ""]
    test_inverse: Inexact[Array, "k k"]
    indefinite: Float[Array, ""]


def nystrom(sketch: Inexact[Array, "n k"], probes: Inexact[Array, "n k"]) -> Nystrom:
    """Stable Nyström factors of a positive semidefinite operator; NaN if it clearly is not.

    The textbook core Omega* A Omega is as ill-conditioned as A, and rounding can make it
    indefinite. So this orthonormalises the *probes*, Omega = U R, which takes no
    application. It shifts by rounding plus the asymmetry of the core, which estimates the
    noise of applications for free, and raises the eigenvalues to the shift. An operator
    with symmetric noise (a kernel rounded to float32) has negative eigenvalues in the core.
    Then the shift is four times the depth of the lowest one, and `indefinite` is that
    depth. If it is deeper than noise can be, the tag is wrong, and everything is NaN.
    """
    scale = largest_modulus(sketch)
    probes, images, turn, inverse, size = _orthonormal(probes, over(sketch, scale))
    core = turn.conj().T @ (probes.conj().T @ images) @ turn
    skew = jnp.linalg.norm(core - core.conj().T) / 2
    noise = jnp.finfo(sketch.dtype).eps * jnp.maximum(size, 1e-3) + skew
    eigenvalues, vectors = lapack.eigh((core + core.conj().T) / 2)
    indefinite = jnp.maximum(-eigenvalues[0] - noise, 0)
    largest = jnp.max(jnp.abs(eigenvalues))
    indefinite = jnp.where(indefinite > NOISE * largest, jnp.nan, indefinite)
    shift = jnp.maximum(noise, 4 * indefinite)
    half = over(vectors, jnp.sqrt(jnp.maximum(eigenvalues + shift, shift))[None, :])
    left = (images + times(shift, probes)) @ (turn @ half)
    return Nystrom(left, half.conj().T @ inverse, shift, scale, inverse, indefinite)


def _orthonormal(
    probes: Inexact[Array, "n k"], images: Inexact[Array, "n k"]
) -> tuple[Array, Array, Array, Array, Array]:
    """Omega = U R with orthonormal U = V X: returns V, A V, X, R^{-*} and |A U|.

    With many more dimensions than probes, these are nearly orthogonal. Then the Gram matrix
    is well-conditioned, R is its root, V is Omega, and U is never formed. Else U is a
    basis, and X is I. Probes can depend on others (signs do in few dimensions). Such a
    probe adds a direction to U outside of the span of the probes, where A is not known; it
    is set to zero.
    """
    n, k = probes.shape
    eps = jnp.finfo(probes.dtype).eps
    if n >= TALL * k:
        squares, vectors = lapack.eigh(probes.conj().T @ probes)
        kept = squares > 10 * k * eps * squares[-1]
        roots = jnp.where(kept, 1 / jnp.sqrt(jnp.where(kept, squares, 1)), 0)
        turn = times(vectors, roots[None, :])
        size = jnp.linalg.norm(images) * jnp.max(roots)
        return probes, images, turn, turn.conj().T, size
    columns, sizes, right = lapack.svd(probes)
    kept = sizes >= 10 * n**0.5 * eps * jnp.max(jnp.abs(probes))
    inverse = over(right, jnp.maximum(sizes, eps * jnp.linalg.norm(probes))[:, None])
    columns = jnp.where(kept[None, :], columns, 0)
    turned = jnp.where(kept[None, :], images @ inverse.conj().T, 0)
    turn = jnp.eye(k, dtype=inverse.dtype)
    return columns, turned, turn, inverse, jnp.linalg.norm(turned)


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
        inside = self.vectors.conj().T @ (self.basis.conj().T @ block)
        factors = self.values / (self.nu + self.values)
        moved = self.basis @ (self.vectors @ times(factors[:, None], inside))
        return over(block - moved, self.nu)


class Projected(eqx.Module):
    """A + shift I on a Krylov space, divided by `scale`: `basis` is Z', `tall` is T', and
    `theta` and `vectors` are the eigenvalues and eigenvectors of T."""

    basis: Inexact[Array, "n s"]
    tall: Inexact[Array, "s r"]
    theta: Float[Array, " r"]
    vectors: Inexact[Array, "r r"]
    shift: Float[Array, ""]
    scale: Float[Array, ""]

    @property
    def rounding(self) -> Float[Array, ""]:
        """Of an eigenvalue of T + shift I."""
        theta = self.theta
        largest = jnp.maximum(-theta[0], theta[-1]) + jnp.abs(self.shift)
        return 4 * jnp.finfo(theta.dtype).eps * theta.size**0.5 * largest

    def shifted(self, block: Inexact[Array, "r t"], shift: Array) -> Inexact[Array, "s t"]:
        """(T' + shift J) block."""
        padded = jnp.pad(block, ((0, self.tall.shape[0] - block.shape[0]), (0, 0)))
        return self.tall @ block + times(shift, padded)


def projected(space: BlockKrylov, shift: Float[Array, ""]) -> Projected:
    new, factor = next_block(space.basis, space.residual)
    below = jnp.pad(factor, ((0, 0), (space.filled.size - space.width, 0)))
    tall = jnp.concatenate([space.projection, below])
    scale = jnp.maximum(largest_modulus(tall), jnp.abs(shift))
    tall = jnp.where(space.filled[None, :], over(tall, scale), 0)
    square = tall[: space.filled.size]
    square = (square + square.conj().T) / 2
    empty = jnp.diag(~space.filled)
    theta, vectors = lapack.eigh(jnp.where(empty, square[0, 0], square))
    basis = jnp.concatenate([space.basis, new], axis=1)
    return Projected(basis, tall, theta, vectors, shift / scale, scale)


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
    outer = half @ half.conj().T
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
    inside = known.vectors.conj().T @ (basis.conj().T @ y)
    inside = known.vectors @ over(inside, values)
    residual = y - known.basis @ known.shifted(inside, known.shift)
    return over(basis @ inside, known.scale), residual


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
