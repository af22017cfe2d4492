"""Orthonormal bases of tall blocks, and their downdates.

A block that is small, or has fewer than 8 k rows, gets a QR decomposition, or a singular
value decomposition if its rank is asked for. LAPACK's factorisations of tall blocks start
threads that wait by spinning, and gather a block that is spread over devices. So every
other block, and a block in a loop, gets *randomised Cholesky QR*, which consists of
products and of factorisations of small matrices (Balabanov 2022, arXiv:2210.09953; Higgins,
Szyld, Boman and Yamazaki 2024, arXiv:2309.05868):

    S Y = U D W*       S: 3k/2 + 10 rows of random signs,            (1)
    V = Y W D^{-1},                                                  (2)
    L L* = V* V,       Q = V L^{-*},       Y = Q (L* D W*).          (3)

S keeps the length of every vector of the range to within a factor, so V has a condition of
about 10, and V* V loses no digits. The singular values D fall, so V D W* equals Y to
rounding, and directions below rounding come last. For these V has columns of random signs
instead, so that Q is orthonormal whatever the rank is. The signs are hashed from indices,
not drawn, so a basis is a function of its block. Dense signs take as long as a sparse S
with two entries in each column, and also work for blocks with few nonzero rows; Gaussian
rows take 6 to 8 times as long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from traceax._linalg import lapack
from traceax._linalg.columns import (
    Block,
    Matrix,
    Number,
    OfProbes,
    Square,
    column_norms_squared,
    diagonal_of,
    dot,
    largest_modulus,
    over,
    positive,
    squared_modulus,
    times,
)

# Random signs are nearly orthogonal if rows outnumber columns by this factor.
TALL = 8
# LAPACK is as fast as products up to this many rows and entries.
FEW_ROWS, FEW_ENTRIES = 1024, 2**16


class Basis(NamedTuple):
    """An orthonormal basis of a block = scale * columns @ factor.

    `inverse` is factor^{-*}.
    """

    columns: Block
    factor: Square
    inverse: Square
    scale: Number


def orthonormalise(block: Block) -> Basis:
    """Return a basis that is orthonormal whatever the rank is, and never divide by zero.

    Singular values below rounding are raised to it. This perturbs the block at the level of
    rounding, so that identities hold to rounding, and the inverse exists.
    """
    scale = largest_modulus(block)
    block = over(block, scale)
    return Basis(*_decompose(block, _floor(block)), scale)


def _floor(block: Block) -> Number:
    """Return the level of rounding of a block's singular values."""
    return jnp.finfo(block.dtype).eps * jnp.maximum(jnp.linalg.norm(block), 1)


Decomposition = tuple[Block, Square, Square]


def _decompose(block: Block, floor: Number) -> Decomposition:
    """Return `columns`, `factor` and `inverse` of a basis."""
    n, k = block.shape
    is_small = n <= FEW_ROWS and n * k <= FEW_ENTRIES
    return (_by_qr if is_small or n < TALL * k else _by_random_signs)(block, floor)


def _by_qr(block: Block, floor: Number) -> Decomposition:
    """Decompose by LAPACK's QR decomposition.

    A diagonal entry below the floor is replaced by the floor itself, which is real, because
    the phase of a subnormal number is noise.
    """
    columns, triangle = lapack.qr(block)
    short = jnp.abs(diagonal_of(triangle)) < floor
    triangle = jnp.where(jnp.diag(short), floor.astype(block.dtype), triangle)
    return columns, triangle, _inverse(triangle.conj().T)


def _by_random_signs(block: Block, floor: Number) -> Decomposition:
    """Decompose by randomised Cholesky QR, (1) to (3) of the module docstring."""
    n, k = block.shape
    sizes, right = approximate_svd(block)
    # A zero singular value may come out as large as 4.2 floors at k = 20.
    raised = jnp.maximum(sizes, 4 * k**0.5 * floor)
    tall = dot(block, over(right.conj().T, raised[None, :]))
    fresh = hashed_signs(n, k, block.dtype) / n**0.5
    tall = jnp.where((raised > sizes)[None, :], fresh, tall)
    lower = lapack.cholesky(dot(tall.conj().T, tall))
    turn = _inverse(lower)
    factor = dot(lower.conj().T, times(raised[:, None], right))
    return dot(tall, turn.conj().T), factor, dot(turn, over(right, raised[:, None]))


def approximate_svd(block: Block) -> tuple[OfProbes, Square]:
    """Return D and W* for which the columns of Y W D^{-1} are nearly orthonormal.

    D falls. A tall block Y is replaced by its sketch S Y, as in (1); the singular value
    decomposition of any other block is exact.
    """
    n, k = block.shape
    if n >= TALL * k:
        count = 3 * k // 2 + 10
        block = dot(hashed_signs(n, count, block.dtype).T, block) / count**0.5
    return lapack.svd(block)[1:]


def square_roots(gram: Square) -> tuple[Square, Square]:
    """Return G^(1/2) and G^(-1/2) of a Hermitian G with eigenvalues from 1e-3 to 1e2.

    The coupled iteration of Newton and Schulz is Y <- Y T, Z <- T Z, T = (3 I - Z Y)/2
    (Higham 2008, Functions of Matrices, section 6.7). It takes 15 steps from there to
    rounding. Rows and columns of zeros stay zero in G^(1/2), and affect no others.
    """
    unit = jnp.asarray(np.eye(gram.shape[0]), gram.dtype)

    def step(_: Array | int, roots: tuple[Square, Square]) -> tuple[Square, Square]:
        y, z = roots
        turn = (3 * unit - dot(z, y)) / 2
        return dot(y, turn), dot(turn, z)

    y, z = jax.lax.fori_loop(0, 18, step, (gram / 256, unit))
    return 16 * y, z / 16


def hashed_signs(n: int, k: int, dtype: jnp.dtype) -> Block:
    """Return signs: the highest bit of a hash of the row times a hash of the column."""
    products = _hash(jnp.arange(n))[:, None] * _hash(-1 - np.arange(k))[None, :]
    return 1 - 2 * (products >> 31).astype(dtype)


def _hash(index: Any) -> UInt32[Any, "..."]:
    """Return an odd number, each bit of which depends on every bit of the index."""
    bits = index.astype(np.uint32)
    for multiplier in (0x7FEB352D, 0x846CA68B):
        bits = (bits ^ (bits >> 16)) * np.uint32(multiplier)
    return (bits ^ (bits >> 15)) | 1


def pivoted_qr(block: Block, most: Number) -> tuple[Matrix, Number]:
    """Return the unitary matrix of a QR decomposition with column pivoting, and how many of
    its columns, but no more than `most`, span the block up to columns of length 1.

    Each reflection maps the longest column that is left to the next coordinate. Without
    pivoting this column may be nothing but noise while a later one still has a direction of
    the range. (A random rotation of the columns makes this rare, but not impossible: of a
    range of 5 directions, all 3e4 times as long as the noise, one was lost in one of 1,500
    blocks.) Coordinates in which the block is zero do not change.
    """
    n, k = block.shape
    index = jnp.arange(n, dtype=most.dtype)

    def step(_: Array | int, state: tuple[Array, ...]) -> tuple[Array, ...]:
        rows, turn, taken = state
        column = rows[jnp.argmax(jnp.sum(squared_modulus(rows), axis=1))]
        length = jnp.sqrt(jnp.sum(squared_modulus(column)))
        is_next = index == taken
        head = jnp.sum(jnp.where(is_next, column, 0))
        size = jnp.abs(head)
        phase = jnp.where(size > 0, over(head, positive(size)), 1)
        goes_on = (length > 1) & (taken < most)
        # The reflection is I - scaled column*.
        column = jnp.where(is_next, head + times(length, phase), column)
        scale = jnp.where(goes_on, length * (length + size), 1)
        scaled = jnp.where(goes_on, over(column, scale), 0)
        rows = rows - dot(rows, scaled.conj())[:, None] * column[None, :]
        turn = turn - dot(turn, column)[:, None] * scaled.conj()[None, :]
        taken = jnp.where(goes_on, taken + 1, taken)
        return jnp.where(is_next[None, :], 0, rows), turn, taken

    start = block.T, jnp.eye(n, dtype=block.dtype), jnp.zeros_like(most)
    return jax.lax.fori_loop(0, k, step, start)[1:]


def extend(basis: Basis, block: Block, noise: Block) -> Basis:
    """Return the basis of a block to which more columns are appended; its own columns stay.

    If a new column is already in the range, its projection off the range is rounding, which
    may lie in the range itself, however often it is projected. Such columns get a new
    direction from `noise`, random columns that are projected first and then scaled down to
    the level of rounding. The first decomposition finds these columns, the second one adds
    the noise, and the third one orthogonalises again after another projection.
    """
    q = basis.columns
    block = over(block, basis.scale)
    floor = jnp.maximum(_floor(basis.factor), _floor(block))
    inside = dot(q.conj().T, block)
    columns, corner, inverse = _decompose(block - dot(q, inside), floor)
    for _ in range(2):
        noise = noise - dot(q, dot(q.conj().T, noise))
    level = 10 * jnp.finfo(block.dtype).eps / jnp.sqrt(column_norms_squared(noise))
    for added in (times(noise, level[None, :]), 0):
        overlap = dot(q.conj().T, columns)
        inside = inside + dot(overlap, corner)
        columns, turn, turn_inverse = _decompose(columns - dot(q, overlap) + added, floor)
        corner, inverse = dot(turn, corner), dot(turn_inverse, inverse)
    zeros = jnp.zeros((block.shape[1], q.shape[1]), block.dtype)
    below = dot(-inverse, inside.conj().T, basis.inverse)
    factor = jnp.block([[basis.factor, inside], [zeros, corner]])
    inverse = jnp.block([[basis.inverse, zeros.T], [below, inverse]])
    return Basis(jnp.hstack([q, columns]), factor, inverse, basis.scale)


def _inverse(lower: Square) -> Square:
    """Invert a triangular L, by inverses of diagonal blocks whose width doubles:

        [ A  0 ]^-1     [    A^-1          0   ]
        [ B  C ]     =  [ -C^-1 B A^-1    C^-1 ].

    This takes log2(k) rounds of products, each over all blocks at once. (A batch of
    `solve_triangular` next to LAPACK calls may hang, see `lapack`.)
    """
    k = lower.shape[0]
    unit, index = jnp.asarray(np.eye(k), lower.dtype), jnp.asarray(np.arange(k))

    def double(log_width: Array | int, inverse: Square) -> Square:
        block = index >> log_width
        below = (block[:, None] == block[None, :] + 1) & (block[:, None] & 1 == 1)
        return inverse - dot(inverse, dot(jnp.where(below, lower, 0), inverse))

    start = unit / diagonal_of(lower)[None, :]
    return jax.lax.fori_loop(0, (k - 1).bit_length(), double, start)


def downdate(basis: Basis) -> tuple[Square, OfProbes]:
    """Return what removes one column from a block = Q R: directions and distances.

    Without column i the range is range(Q) less the direction Q s_i, so the projector is
    P_i = Q (I - s_i s_i*) Q*, with s_i = R^{-*} e_i / |R^{-*} e_i|. The distance is that of
    the column r_i of R from the span of the others, 1/|R^{-*} e_i| = s_i* r_i, without
    cancellation. The formula is in Epperly, Tropp and Webber (2024), section 3.1.
    """
    norms = jnp.sqrt(column_norms_squared(basis.inverse))
    return over(basis.inverse, norms[None, :]), 1 / norms
