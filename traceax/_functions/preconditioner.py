"""A preconditioner from a block Krylov space, and the space on which it is perfect.

Of A, Hermitian positive definite, is known A Z for orthonormal columns Z: T = Z* A Z, and
A Z = Z' T' for a few more orthonormal columns Z' = [Z, Z_next]. For 0 < nu <= the least
eigenvalue of T, take the Nyström approximation of A - nu I from Z,

    P = nu I + Z' N Z'*,    N = (T' - nu J) (T - nu I)^{-1} (T' - nu J)*,    J = [I; 0].

All of it is small and dense but for Z'. P agrees with A on Z: P Z = A Z. So with
M = P^{-1/2} A P^{-1/2}, which has the determinant of A over that of P,

    M W = W,    W = P^{1/2} Z (T)^{-1/2},    W* W = I :

log M is 0 on W, and on the rest, which is invariant, near to it. So the deflation that
Hutch++ buys with more applications comes with the preconditioner: the trace of log M is
that on the complement of W. With the orthogonal projector I - W W*,

    A^{-1} = Z T^{-1} Z* + P^{-1/2} M^{-1/2} (I - W W*) M^{-1/2} P^{-1/2}

splits what the derivative needs in the same way, Galerkin's inverse on Z and the rest: the
rest is less than A^{-1}, in the order of Hermitian matrices, so its probes have less
variance than without it, whatever dA is.

If A - nu I is positive semidefinite, P <= A, and no eigenvalue of M is below 1.
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact

from traceax._linalg import lapack
from traceax._linalg.columns import magnitude
from traceax._linalg.krylov import BlockKrylov


class Preconditioner(eqx.Module):
    basis: Inexact[Array, "n s"]
    vectors: Inexact[Array, "s s"]
    values: Float[Array, " s"]
    nu: Float[Array, ""]
    solved: Inexact[Array, "s r"]
    rank: Float[Array, ""]
    is_below: Bool[Array, ""]

    def power(self, exponent: float, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        """P^exponent block."""
        inside = self.vectors.conj().T @ (self.basis.conj().T @ block)
        factors = (1 + self.values / self.nu) ** exponent - 1
        moved = self.basis @ (self.vectors @ (factors[:, None] * inside))
        return self.nu**exponent * (block + moved)

    def log_determinant(self) -> Float[Array, ""]:
        n = self.basis.shape[0]
        return n * jnp.log(self.nu) + jnp.sum(jnp.log1p(self.values / self.nu))

    def complement(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        """(I - W W*) block."""
        w = self._small_w()
        for _ in range(2):
            block = block - self.basis @ (w @ (w.conj().T @ (self.basis.conj().T @ block)))
        return block

    def galerkin(self) -> Inexact[Array, "n r"]:
        """Z T^{-1/2}."""
        return self.basis[:, : self.solved.shape[1]] @ self.solved[: self.solved.shape[1]]

    def _small_w(self) -> Inexact[Array, "s r"]:
        roots = jnp.sqrt(self.nu + self.values)[:, None]
        return self.vectors @ (roots * (self.vectors.conj().T @ self.solved))


@jax.jit
def preconditioner(space: BlockKrylov, shift: Float[Array, ""]) -> Preconditioner:
    """`space` is that of A - shift I; the `shift` is taken for nu if what is left is
    positive semidefinite as far as the space can see, else half the least eigenvalue of T:
    what is best is the level of the bulk, which Krylov spaces find."""
    total, inner = space.projection.shape
    filled = space.filled[:inner]
    scale = jnp.maximum(magnitude(space.projection), jnp.abs(shift))
    tall = jnp.where(filled[None, :], space.projection / scale, 0)
    shift = shift / scale
    square = (tall[:inner] + tall[:inner].conj().T) / 2
    largest = jnp.linalg.norm(tall)
    padded = jnp.where(jnp.diag(~filled), square[0, 0].real, square)
    theta, vectors = lapack.eigh(padded)
    rounding = jnp.finfo(theta.dtype)
    noise = rounding.eps * largest + rounding.tiny
    known = (shift > noise) & (theta[0] >= -10 * noise)
    nu = jnp.where(known, shift, (theta[0] + shift) / 2)
    nu = jnp.where(nu > 0, nu, jnp.nan)  # not positive definite

    level = shift - nu
    core = jnp.maximum(theta + level, noise)
    half = (tall @ vectors + level * _embedded(vectors, total)) / jnp.sqrt(core)[None, :]
    half = jnp.where(space.filled[:, None], half, 0)
    outer = half @ half.conj().T
    values, outer_vectors = lapack.eigh((outer + outer.conj().T) / 2)
    roots = jnp.sqrt(jnp.maximum(theta + shift, noise))[None, :]
    solved = _embedded(vectors / roots, total)
    return Preconditioner(
        space.basis,
        outer_vectors,
        jnp.maximum(values, 0) * scale,
        nu * scale,
        jnp.where(space.filled[:, None], solved / jnp.sqrt(scale), 0),
        jnp.sum(filled).astype(theta.dtype),
        known,
    )


def _embedded(small: Inexact[Array, "r r"], total: int) -> Inexact[Array, "s r"]:
    return jnp.pad(small, ((0, total - small.shape[0]), (0, 0)))


class Preconditioned(eqx.Module):
    """M = P^{-1/2} A P^{-1/2}, as a map of blocks."""

    linear_map: Callable[[Array], Array]
    frame: Preconditioner

    def __call__(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        inner = self.frame.power(-0.5, block)
        return self.frame.power(-0.5, self.linear_map(inner))
