"""Orthonormal bases of tall blocks, and their downdates.

A block that is small, or has fewer than 8 k rows, gets a QR decomposition, or a singular
value decomposition if its rank is asked for. LAPACK's factorisations of tall blocks start
threads that wait by spinning, and gather a block that is spread over devices. So every
other block, and a block in a loop, gets *randomised Cholesky QR*, which consists of
products and of factorisations of small matrices (Balabanov 2022, arXiv:2210.09953; Higgins,
Szyld, Boman and Yamazaki 2024, arXiv:2309.05868):

    S Y = U D W*       S: 3k/2 + 10 rows of random signs,
    V = Y W D^{-1},
    L L* = V* V,       Q = V L^{-*},       Y = Q (L* D W*).

S keeps the length of every vector of the range to within a factor, so V has a condition of
about 10, and V* V loses no digits. The singular values D fall, so V D W* equals Y to
rounding, and directions below rounding come last. For these V has columns of random signs
instead, so that Q is orthonormal whatever the rank is. The signs are hashed from indices,
not drawn, so a basis is a function of its block. Measured (rows of S, n = 200,000,
k = 50): dense signs take as long as a sparse S with two entries in each column, and also
work for blocks with few nonzero rows; a sparse S with eight entries takes 4 times as long,
trigonometric rows 5 times, Gaussian rows 6 to 8 times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, UInt32

from traceax._linalg import lapack
from traceax._linalg.columns import (
    column_norms_squared,
    diagonal,
    largest_modulus,
    over,
    times,
)

# With so many times more rows than columns, random signs are nearly orthogonal.
TALL = 8
# Up to so many rows and entries LAPACK is as fast as products are.
FEW_ROWS, FEW_ENTRIES = 1024, 2**16


class Basis(NamedTuple):
    """block = scale * columns @ factor, with orthonormal columns and `inverse` =
    factor^{-*}.

    `sizes` are the diagonal of a triangular factor; of a basis that is ranked they are the
    singular values of the block (or close to them), which fall. Then those beyond the rank
    are at the level of rounding, and the columns before them span the block.
    """

    columns: Inexact[Array, "n k"]
    factor: Inexact[Array, "k k"]
    inverse: Inexact[Array, "k k"]
    sizes: Float[Array, " k"]
    scale: Float[Array, ""]


def orthonormalise(block: Inexact[Array, "n k"], *, ranked: bool = False) -> Basis:
    """A basis that is orthonormal whatever the rank is, and never divides by zero.

    Singular values below rounding are raised to it. This perturbs the block at the level of
    rounding, so that identities hold to rounding, and the inverse exists. With `ranked` the
    sizes fall, and no tall block goes to LAPACK, so it may be in a loop.
    """
    scale = largest_modulus(block)
    block = over(block, scale)
    return Basis(*_decompose(block, _floor(block), ranked), scale)


def _floor(block: Inexact[Array, "n k"]) -> Float[Array, ""]:
    return jnp.finfo(block.dtype).eps * jnp.maximum(jnp.linalg.norm(block), 1)


def _decompose(
    block: Inexact[Array, "n k"], floor: Float[Array, ""], ranked: bool = False
) -> tuple[Array, Array, Array, Array]:
    """`columns`, `factor`, `inverse` and `sizes` of a basis."""
    n, k = block.shape
    is_small = n <= FEW_ROWS and n * k <= FEW_ENTRIES
    if n < TALL * k:
        return (_singular if ranked else _triangular)(block, floor)
    return (_triangular if is_small and not ranked else _randomised)(block, floor)


def _triangular(
    block: Inexact[Array, "n k"], floor: Float[Array, ""]
) -> tuple[Array, Array, Array, Array]:
    """The floor is real, because the phase of a subnormal number is noise."""
    columns, triangle = lapack.qr(block)
    sizes = jnp.abs(diagonal(triangle))
    triangle = jnp.where(jnp.diag(sizes < floor), floor.astype(block.dtype), triangle)
    return columns, triangle, _inverse(triangle.conj().T), sizes


def _singular(
    block: Inexact[Array, "n k"], floor: Float[Array, ""]
) -> tuple[Array, Array, Array, Array]:
    columns, sizes, right = lapack.svd(block)
    raised = jnp.maximum(sizes, floor)[:, None]
    return columns, times(raised, right), over(right, raised), sizes


def _randomised(
    block: Inexact[Array, "n k"], floor: Float[Array, ""]
) -> tuple[Array, Array, Array, Array]:
    n, k = block.shape
    count = 3 * k // 2 + 10
    signs = _signs(n, count, block.real.dtype).astype(block.dtype)
    _, sizes, right = lapack.svd(signs.T @ block / count**0.5)
    # A zero singular value may come out as large as 4.2 floors at k = 20.
    raised = jnp.maximum(sizes, 4 * k**0.5 * floor)
    tall = block @ over(right.conj().T, raised[None, :])
    tall = jnp.where((raised > sizes)[None, :], signs[:, :k] / n**0.5, tall)
    lower = lapack.cholesky(tall.conj().T @ tall)
    turn = _inverse(lower)
    factor = lower.conj().T @ times(raised[:, None], right)
    return tall @ turn.conj().T, factor, turn @ over(right, raised[:, None]), sizes


def _signs(n: int, k: int, dtype: jnp.dtype) -> Float[Array, "n k"]:
    """Each sign is the highest bit of a hash of the row times a hash of the column."""
    products = _hash(jnp.arange(n))[:, None] * _hash(-1 - np.arange(k))[None, :]
    return 1 - 2 * (products >> 31).astype(dtype)


def _hash(index: Any) -> UInt32[Any, ...]:
    """An odd number, each bit of which depends on every bit of the index."""
    bits = index.astype(np.uint32)
    for multiplier in (0x7FEB352D, 0x846CA68B):
        bits = (bits ^ (bits >> 16)) * np.uint32(multiplier)
    return (bits ^ (bits >> 15)) | 1


def random_rotation(k: int, dtype: jnp.dtype) -> Float[Array, "k k"]:
    """Always the same rotation, a constant of the program, which is independent of every
    block. (Hartley's transform in its place fails on graded columns.)"""
    normal = np.random.default_rng(k).normal(size=(k, k))
    return jnp.asarray(np.linalg.qr(normal)[0], dtype)


def extend(
    basis: Basis, block: Inexact[Array, "n j"], noise: Inexact[Array, "n j"]
) -> Basis:
    """The basis of a block to which more columns are appended; its own columns stay.

    If a new column is already in the range, its projection off the range is rounding, which
    may lie in the range itself, however often it is projected. Such columns get a new
    direction from `noise`, random columns that are projected first and then scaled down to
    the level of rounding. The first decomposition finds these columns, the second one adds
    the noise, and the third one orthogonalises again after another projection.
    """
    q = basis.columns
    block = over(block, basis.scale)
    floor = jnp.maximum(_floor(basis.factor), _floor(block))
    inside = q.conj().T @ block
    columns, corner, inverse, sizes = _decompose(block - q @ inside, floor)
    for _ in range(2):
        noise = noise - q @ (q.conj().T @ noise)
    level = 10 * jnp.finfo(block.dtype).eps / jnp.sqrt(column_norms_squared(noise))
    for added in (times(noise, level[None, :]), 0):
        overlap = q.conj().T @ columns
        inside = inside + overlap @ corner
        columns, turn, turn_inverse, _ = _decompose(columns - q @ overlap + added, floor)
        corner, inverse = turn @ corner, turn_inverse @ inverse
    zeros = jnp.zeros((block.shape[1], q.shape[1]), block.dtype)
    below = -inverse @ inside.conj().T @ basis.inverse
    return Basis(
        jnp.hstack([q, columns]),
        jnp.block([[basis.factor, inside], [zeros, corner]]),
        jnp.block([[basis.inverse, zeros.T], [below, inverse]]),
        jnp.concatenate([basis.sizes, sizes]),
        basis.scale,
    )


def _inverse(lower: Inexact[Array, "k k"]) -> Inexact[Array, "k k"]:
    """L^{-1}, by inverses of diagonal blocks whose width doubles,

        [ A  0 ]^-1     [    A^-1          0   ]
        [ B  C ]     =  [ -C^-1 B A^-1    C^-1 ],

    in log2(k) rounds of products, each over all blocks at once. (A batch of
    `solve_triangular` beside LAPACK calls may hang, see `lapack`.)"""
    k = lower.shape[0]
    unit, index = jnp.eye(k, dtype=lower.dtype), jnp.arange(k)

    def double(log_width: Array, inverse: Array) -> Array:
        block = index >> log_width
        below = (block[:, None] == block[None, :] + 1) & (block[:, None] & 1 == 1)
        return inverse - inverse @ (jnp.where(below, lower, 0) @ inverse)

    start = unit / jnp.sum(unit * lower, axis=0)[None, :]
    return jax.lax.fori_loop(0, (k - 1).bit_length(), double, start)


class Downdate(NamedTuple):
    """How to remove one column from a block = Q R.

    Without column i the range is range(Q) less the direction Q s_i, so the projector is
    P_i = Q (I - s_i s_i*) Q*. `distances` has for each column r_i of R its distance from
    the span of the others, 1/|R^{-*} e_i| = s_i* r_i, without cancellation.
    """

    directions: Inexact[Array, "k k"]
    distances: Float[Array, " k"]


def downdate(basis: Basis) -> Downdate:
    """s_i = R^{-*} e_i / |R^{-*} e_i| (Epperly, Tropp and Webber 2024, section 3.1)."""
    norms = jnp.sqrt(column_norms_squared(basis.inverse))
    return Downdate(over(basis.inverse, norms[None, :]), 1 / norms)
