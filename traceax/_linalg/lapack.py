"""LAPACK's decompositions, which `vmap` runs in a loop on the CPU.

The CPU runtime of jax 0.10 runs independent operations of a program side by side. On few
cores it sometimes never starts one of them, and the program hangs. Batches of LAPACK calls
next to each other cause this, within one estimator or in two independent ones, so no order
inside an estimator prevents it. A loop over the batch does, and takes no longer, since
LAPACK decomposes the members one by one anyway. On other devices a batch stays a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Inexact, PyTree

from traceax._linalg.columns import Number, Square, eps_of, largest_modulus, times

Decomposition = Callable[[Any], Any]


def one_by_one(decompose: Decomposition) -> Decomposition:
    """Make `vmap` of a decomposition a loop on the CPU.

    `decompose` takes one array, or a tuple of arrays that have the same batches.
    """
    single = custom_vmap(decompose)

    @single.def_vmap
    def batched(size: int, is_batched: Any, argument: Any) -> tuple[PyTree, PyTree]:
        def whole(leaf: Array, batched: bool) -> Array:
            return leaf if batched else jnp.broadcast_to(leaf, (size, *leaf.shape))

        argument = jax.tree.map(whole, argument, is_batched[0])
        result = jax.lax.platform_dependent(
            argument, cpu=lambda xs: jax.lax.map(single, xs), default=jax.vmap(decompose)
        )
        return result, jax.tree.map(lambda _: True, result)

    # JAX does not transpose a function with its own batching rule. So the derivative is
    # taken of `decompose` itself.
    differentiable = jax.custom_jvp(lambda argument: single(argument))
    differentiable.defjvp(lambda primals, tangents: jax.jvp(decompose, primals, tangents))
    return differentiable


# Each takes and returns the same as its namesake in `jnp.linalg`, but as a plain tuple.
qr = one_by_one(lambda block: tuple(jnp.linalg.qr(block)))
svd = one_by_one(lambda block: tuple(jnp.linalg.svd(block, full_matrices=False)))
eigh = one_by_one(lambda matrix: tuple(jnp.linalg.eigh(matrix)))
eig = one_by_one(lambda matrix: _scaled_back(jnp.linalg.eig, matrix))
eigvals = one_by_one(lambda matrix: _scaled_back(jnp.linalg.eigvals, matrix))
solve = one_by_one(lambda equations: jnp.linalg.solve(*equations))
# It reads the lower triangle, and returns NaN if the matrix is not positive definite.
cholesky = one_by_one(lambda matrix: jnp.linalg.cholesky(matrix, symmetrize_input=False))


def _scaled_back(decompose: Decomposition, matrix: Inexact[Array, "*batch n n"]) -> Any:
    """Decompose a matrix in units of about its largest entry.

    LAPACK scales matrices with entries beyond about 1e12 or 1e-12 itself in single
    precision, but the one in SciPy 1.17, which jaxlib calls, does not scale eigenvalues
    back. The unit is a power of two, so it changes no digit.
    """
    size = jax.lax.stop_gradient(largest_modulus(matrix))
    unit = size / jnp.frexp(size)[0]
    result = decompose(times(1 / unit, matrix))
    if isinstance(result, tuple):
        return times(unit, result[0]), *result[1:]
    return times(unit, result)


@one_by_one
def pinv(matrix: Inexact[Array, "p k"]) -> Inexact[Array, "k p"]:
    """Return the pseudoinverse. Singular values at the level of rounding count as zero."""
    return jnp.linalg.pinv(matrix, rtol=jnp.finfo(matrix.dtype).eps * matrix.shape[0])


@one_by_one
def cholesky_if_definite(matrix: Inexact[Array, "n n"]) -> tuple[Array, Bool[Array, ""]]:
    """Return a Cholesky factor, and whether nothing but rounding prevents it.

    The factor is of the Hermitian part, and NaN if that is not positive definite. The
    second result is true if a matrix without a factor has one once it is lifted by the
    rounding errors of eigenvalues. All eigenvalues of a semidefinite matrix are below n
    times its largest diagonal entry.
    """
    factor = jnp.linalg.cholesky(matrix)
    exists = jnp.all(jnp.isfinite(factor))

    def is_singular() -> Bool[Array, ""]:
        n, largest = len(matrix), jnp.max(jnp.abs(jnp.diagonal(matrix)))
        rounding = (4 * jnp.finfo(matrix.dtype).eps * n * largest).astype(matrix.dtype)
        lifted = matrix + rounding * jnp.eye(n, dtype=matrix.dtype)
        return jnp.all(jnp.isfinite(jnp.linalg.cholesky(lifted)))

    return factor, jax.lax.cond(exists, lambda: jnp.array(False), is_singular)


def eigh_above(matrix: Square, bound: Number) -> tuple[Array, Array, Array]:
    """Decompose a matrix whose eigenvalues should be at least `bound`.

    Return its eigenvalues, its eigenvectors, and how far rounding may have moved each
    eigenvalue. Those near the bound keep more digits than with `eigh`. A bound far below
    the spectrum would take digits instead, so it is raised to -k times the largest entry,
    which is a bound, too.
    """
    bound = jnp.maximum(bound, -len(matrix) * largest_modulus(matrix))
    identity = jnp.eye(len(matrix), dtype=matrix.dtype)
    values, *rest = _eigh_semidefinite(matrix - times(bound, identity))
    return values + bound, *rest


@one_by_one
def _eigh_semidefinite(shifted: Square) -> tuple[Array, Array, Array]:
    """Decompose a matrix that should be positive semidefinite.

    Return its eigenvalues, its eigenvectors, and how far rounding may have moved each
    eigenvalue. `eigh` moves each one by eps times the largest. The squares of the singular
    values of a Cholesky factor are moved by eps times the geometric mean of the largest and
    themselves, so small ones keep twice as many digits. A matrix that rounding made
    indefinite is lifted by a few rounding errors of its trace, which its eigenvalues then
    lose again. So even the smallest ones are moved by much less than by `eigh`, to which a
    matrix is left that has no Cholesky factor even so.
    """
    eps = eps_of(shifted)
    identity = jnp.eye(len(shifted), dtype=shifted.dtype)
    lift = 10 * eps * jnp.sum(jnp.abs(jnp.diagonal(shifted)))
    plain, lifted = (
        jnp.linalg.cholesky(matrix, symmetrize_input=False)
        for matrix in (shifted, shifted + lift.astype(identity.dtype) * identity)
    )
    is_definite = jnp.all(jnp.isfinite(plain))
    factor, lift = jnp.where(is_definite, plain, lifted), jnp.where(is_definite, 0, lift)
    exists = jnp.all(jnp.isfinite(factor))
    # A batch on a GPU computes both branches, so the factor must be finite.
    factor = jnp.where(exists, factor, identity)

    def from_factor() -> tuple[Array, Array, Array]:
        vectors, roots, _ = jnp.linalg.svd(factor, full_matrices=False)
        vectors, roots = vectors[:, ::-1], roots[::-1]
        return roots**2 - lift, vectors, 2 * eps * roots[-1] * roots

    def from_matrix() -> tuple[Array, Array, Array]:
        values, vectors = jnp.linalg.eigh(shifted)
        largest = jnp.maximum(-values[0], values[-1])
        return values, vectors, jnp.full_like(values, eps * largest)

    return jax.lax.cond(exists, from_factor, from_matrix)
