"""Small dense factors of a tall block: orthonormal bases and their downdates.

A basis comes from Householder's QR decomposition where the block is small. That walks
through the block column by column, and gathers a block that is spread over devices; so a
large one has *randomised Cholesky QR*, which is made of products only (Balabanov 2022,
arXiv:2210.09953; Higgins, Szyld, Boman and Yamazaki 2024, arXiv:2309.05868):

    T = R of the QR decomposition of S Y H     S: 3k/2 + 10 rows of random signs,
    V = Y H T^{-1}                             H: a k x k rotation, fixed at random,
    L L* = V* V,    Q = V L^{-*},              Y = Q (L* T H*).

S keeps the length of every vector of the range to within a factor, so V, of condition
about 10, loses nothing in V* V. H makes T reveal the rank: its rows fall with the singular
values, so that V T gives Y back to rounding, and what is below rounding stands last. There
V has columns of random signs instead: Q is orthonormal whatever the rank. Signs are hashed
from indices, not drawn: a basis is a function of its block. Measured (rows of S, n =
200,000, k = 50): dense signs take as long as a sparse S of two entries a column, and need
no luck with blocks of few nonzero rows; of eight entries, 4 times; trigonometric, 5 times;
Gaussian, 6 to 8 times.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree, UInt32

from traceax._linalg import lapack
from traceax._linalg.columns import column_norms_squared, diagonal, magnitude

# Beyond so many rows or entries randomised Cholesky QR is faster than Householder's, if
# there are so many more rows than columns that signs are nearly orthogonal.
MANY_ROWS, MANY_ENTRIES, TALL = 2000, 150_000, 8


class Basis(NamedTuple):
    """block = scale * columns @ factor, columns orthonormal, `inverse` = factor^{-*}.

    Columns stand for less and less of the block: `sizes`, all but zero where the rank is
    exhausted. The first of them span the block.
    """

    columns: Inexact[Array, "n k"]
    factor: Inexact[Array, "k k"]
    inverse: Inexact[Array, "k k"]
    sizes: Float[Array, " k"]
    scale: Float[Array, ""]


def orthonormalise(block: Inexact[Array, "n k"], beside: PyTree = None) -> Basis:
    """A basis that is orthonormal whatever the rank, and never divides by zero.

    Sizes below rounding are raised to it: a backward perturbation of the block at rounding
    level, so that identities keep holding to rounding, and the inverse exists. `beside`:
    arrays by which to tell that the block will be spread over devices, if not by itself.
    """
    return _orthonormalise(block, _may_be_spread((block, beside)))


def _orthonormalise(block: Inexact[Array, "n k"], is_spread: bool) -> Basis:
    scale = magnitude(block)
    floor = _floor(block / scale)
    return Basis(*_decompose(block / scale, floor, is_spread), scale)


Factors = tuple[
    Inexact[Array, "n k"], Inexact[Array, "k k"], Inexact[Array, "k k"], Float[Array, " k"]
]


def _decompose(
    block: Inexact[Array, "n k"], floor: Float[Array, ""], is_spread: bool
) -> Factors:
    n, k = block.shape
    is_large = n > MANY_ROWS or n * k > MANY_ENTRIES
    if n >= TALL * k and (is_large or is_spread):
        return _randomised(block, floor)
    return _householder(block, floor)


def _may_be_spread(arrays: PyTree) -> bool:
    """Whether any is computed from arrays on a mesh of devices."""
    leaves = filter(eqx.is_array, jax.tree.leaves(arrays))
    return any(jax.typeof(leaf).sharding.mesh.size > 1 for leaf in leaves)


def _floor(block: Inexact[Array, "n k"]) -> Float[Array, ""]:
    return jnp.finfo(block.dtype).eps * jnp.maximum(jnp.linalg.norm(block), 1)


def _householder(block: Inexact[Array, "n k"], floor: Float[Array, ""]) -> Factors:
    """The floor is real, because the phase of a subnormal is noise."""
    columns, triangle = lapack.qr(block)
    sizes = jnp.abs(diagonal(triangle))
    short = jnp.diag(sizes < floor)
    triangle = jnp.where(short, floor, triangle)
    return columns, triangle, inverse_adjoint(triangle), sizes


def _randomised(block: Inexact[Array, "n k"], floor: Float[Array, ""]) -> Factors:
    n, k = block.shape
    mixed = mixing(k, block.real.dtype)
    triangle = lapack.triangle(_signed_sums(block, 3 * k // 2 + 10) @ mixed)
    sizes = jnp.abs(diagonal(triangle))
    margin = 4 * k**0.5 * floor  # rounding of what is no column: up to 4.2 floors at k = 20
    lost = sizes < margin
    short = margin * jnp.eye(k, dtype=mixed.dtype)
    triangle = jnp.where(lost[:, None], short, triangle)
    inverse = inverse_adjoint(triangle)

    tall = block @ (mixed @ inverse.conj().T)
    fresh = _signs(n, k, tall.real.dtype) / n**0.5
    tall = jnp.where(lost[None, :], fresh, tall)
    lower = lapack.cholesky(tall.conj().T @ tall)
    turn = inverse_adjoint(lower.conj().T)
    factor = lower.conj().T @ triangle @ mixed.T
    return tall @ turn.conj().T, factor, turn @ inverse @ mixed.T, sizes


def _signed_sums(block: Inexact[Array, "n k"], count: int) -> Inexact[Array, "s k"]:
    """S Y, every row of S random signs over the square root of their number."""
    if jnp.iscomplexobj(block):
        parts = _signed_sums(block.real, count), _signed_sums(block.imag, count)
        return jax.lax.complex(*parts)
    return _signs(block.shape[0], count, block.dtype).T @ block / count**0.5


def _signs(n: int, k: int, dtype: jnp.dtype) -> Float[Array, "n k"]:
    """The highest bit of a product of hashes, one of the row and one of the column."""
    words = _hash(jnp.arange(n))[:, None] * _hash(-1 - jnp.arange(k))[None, :]
    return 1 - 2 * (words >> 31).astype(dtype)


def _hash(index: Array) -> UInt32[Array, ...]:
    """Odd words, of which each bit depends on every bit of the index."""
    word = index.astype(jnp.uint32)
    for multiplier in (0x7FEB352D, 0x846CA68B):
        word = (word ^ (word >> 16)) * np.uint32(multiplier)
    return (word ^ (word >> 15)) | 1


def mixing(k: int, dtype: jnp.dtype) -> Float[Array, "k k"]:
    """A rotation that has nothing to do with any block: always the same, hence a constant
    of the program. One by Hartley's transform fails on graded columns."""
    normal = np.random.default_rng(k).normal(size=(k, k))
    return jnp.asarray(np.linalg.qr(normal)[0], dtype)


def extend(
    basis: Basis, block: Inexact[Array, "n j"], noise: Inexact[Array, "n j"]
) -> Basis:
    """The basis of a block to which more columns are appended; those it has stay.

    What is left of a column that is already in the range is rounding, and may lie in the
    range itself, however often it is projected. So such columns get a direction of their
    own from `noise`, random columns: at the level of rounding, too, but projected before
    it is scaled down. One decomposition finds them, one takes in the noise, and one makes
    the projection of that orthonormal again.
    """
    q = basis.columns
    block = block / basis.scale
    floor = jnp.maximum(_floor(basis.factor), _floor(block))
    inside = q.conj().T @ block
    decompose = partial(_decompose, floor=floor, is_spread=_may_be_spread((q, block)))
    columns, corner, inverse, sizes = decompose(block - q @ inside)
    for _ in range(2):
        noise = noise - q @ (q.conj().T @ noise)
    grain = 10 * jnp.finfo(block.dtype).eps / jnp.sqrt(column_norms_squared(noise))
    for fresh in (noise * grain[None, :], 0):
        missed = q.conj().T @ columns
        inside = inside + missed @ corner
        columns, turn, turn_inverse, _ = decompose(columns - q @ missed + fresh)
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


def inverse_adjoint(triangle: Inexact[Array, "k k"]) -> Inexact[Array, "k k"]:
    """R^{-*} of an upper triangular R, by doubling the size of inverted diagonal blocks:

        [ A  0 ]^-1     [    A^-1          0   ]
        [ B  C ]     =  [ -C^-1 B A^-1    C^-1 ]

    in log2(k) rounds of products, each over all blocks at once: as accurate and as fast as
    substitution, and no `solve_triangular`, of which a batch beside LAPACK calls is among
    what jax 0.10 waits for (`lapack`).
    """
    lower = triangle.conj().T
    index = jnp.arange(lower.shape[0])
    is_diagonal = index[:, None] == index[None, :]

    def double(log_width: Array, inverses: Array) -> Array:
        block = index >> log_width
        is_pair = (block[:, None] ^ block[None, :]) == 1
        corners = jnp.where(is_pair & (block[:, None] > block[None, :]), lower, 0)
        return inverses - inverses @ (corners @ inverses)

    start = jnp.where(is_diagonal, 1 / diagonal(lower)[:, None], 0)
    rounds = max(index.size - 1, 0).bit_length()
    return jax.lax.fori_loop(0, rounds, double, start)


class Downdate(NamedTuple):
    """How to take one column out of a block = Q R.

    The range of the block without column i is range(Q) less the direction Q s_i:
    P_i = Q (I - s_i s_i*) Q*. `distances` are those of each column of R from the span of
    the others, 1/|R^{-*} e_i| = s_i* r_i, without cancellation.
    """

    directions: Inexact[Array, "k k"]
    distances: Float[Array, " k"]


def downdate(basis: Basis) -> Downdate:
    """s_i = R^{-*} e_i / |R^{-*} e_i| (Epperly, Tropp and Webber 2024, section 3.1)."""
    norms = jnp.sqrt(column_norms_squared(basis.inverse))
    return Downdate(basis.inverse / norms[None, :], 1 / norms)
