"""A preconditioner from a block Krylov space, and Galerkin's solutions on that space.

Of B = A + shift I, Hermitian positive definite, is known A Z for orthonormal columns Z:
T = Z* A Z, and A Z = Z' T' for a few more orthonormal columns Z' = [Z, Z_next]. For
0 < nu <= the least eigenvalue of B, take the Nyström approximation of B - nu I from Z,

    P = nu I + Z' N Z'*,    N = H (T + (shift - nu) I)^{-1} H*,    H = T' + (shift - nu) J,

J = [I; 0]. All of it is small and dense but for Z'. P agrees with B on Z: P Z = B Z. If
B - nu I is positive semidefinite, P <= B, and no eigenvalue of P^{-1} B is below 1.

Galerkin's solution of B u = y, u = Z (T + shift I)^{-1} Z* y, leaves a residual that is
orthogonal to Z; if y is in the first block of the space, it is that of conjugate gradients
after as many steps as there are blocks, or better.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact

from traceax._linalg import lapack
from traceax._linalg.columns import magnitude
from traceax._linalg.krylov import BlockKrylov, following


class Preconditioner(eqx.Module):
    """`is_below`: the shift is nu, and A positive semidefinite as far as Z can see; else nu
    is half the least eigenvalue of T + shift I. `largest` is the largest one."""

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
        moved = self.basis @ (self.vectors @ (factors[:, None] * inside))
        return (block - moved) / self.nu


class Known(eqx.Module):
    """What a Krylov space knows of A + shift I, divided by `scale`."""

    basis: Inexact[Array, "n s"]
    tall: Inexact[Array, "s r"]
    theta: Float[Array, " r"]
    vectors: Inexact[Array, "r r"]
    shift: Float[Array, ""]
    scale: Float[Array, ""]

    @property
    def noise(self) -> Float[Array, ""]:
        info = jnp.finfo(self.theta.dtype)
        return info.eps * jnp.linalg.norm(self.tall) + info.tiny


def known_of(space: BlockKrylov, shift: Float[Array, ""]) -> Known:
    new, factor = following(space.basis, space.residual)
    below = jnp.pad(factor, ((0, 0), (space.filled.size - factor.shape[0], 0)))
    tall = jnp.concatenate([space.projection, below])
    scale = jnp.maximum(magnitude(tall), jnp.abs(shift))
    tall = jnp.where(space.filled[None, :], tall / scale, 0)
    square = tall[: space.filled.size]
    square = (square + square.conj().T) / 2
    # Columns that breakdown left empty: any Rayleigh quotient will do.
    empty = jnp.diag(~space.filled)
    theta, vectors = lapack.eigh(jnp.where(empty, square[0, 0].real, square))
    basis = jnp.concatenate([space.basis, new], axis=1)
    return Known(basis, tall, theta, vectors, shift / scale, scale)


def preconditioner_of(space: BlockKrylov, known: Known) -> Preconditioner:
    theta, shift = known.theta, known.shift
    is_below = (shift > known.noise) & (theta[0] >= -10 * known.noise)
    nu = jnp.where(is_below, shift, (theta[0] + shift) / 2)
    nu = jnp.where(nu > 0, nu, jnp.nan)  # not positive definite
    level = shift - nu
    half = known.tall @ known.vectors + level * _padded(known.vectors, known.tall)
    half = half / jnp.sqrt(jnp.maximum(theta + level, known.noise))[None, :]
    half = jnp.where(jnp.any(known.basis != 0, axis=0)[:, None], half, 0)
    outer = half @ half.conj().T
    values, vectors = lapack.eigh((outer + outer.conj().T) / 2)
    values, largest = jnp.maximum(values, 0), theta[-1] + shift
    scaled = (known.scale * part for part in (values, nu, largest))
    values, nu, largest = scaled
    return Preconditioner(known.basis, vectors, values, nu, is_below, largest)


def galerkin(
    space: BlockKrylov, known: Known, y: Inexact[Array, "n t"]
) -> tuple[Inexact[Array, "n t"], Inexact[Array, "n t"]]:
    """The solution on the space, and its residual: no application. NaN where the space
    shows an eigenvalue that is not positive."""
    inside = jnp.where(space.filled[:, None], space.basis.conj().T @ y, 0)
    values = known.theta + known.shift
    values = jnp.where(values > 0, values, jnp.nan)[:, None]
    inside = known.vectors @ ((known.vectors.conj().T @ inside) / values)
    image = known.basis @ (known.tall @ inside + known.shift * _padded(inside, known.tall))
    return space.basis @ inside / known.scale, y - image


def _padded(small: Inexact[Array, "r t"], like: Inexact[Array, "s r"]) -> Array:
    return jnp.pad(small, ((0, like.shape[0] - small.shape[0]), (0, 0)))
