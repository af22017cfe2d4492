"""Small dense factors of a tall block: orthonormal bases and their downdates.

A block that is small, or has fewer than 8 k rows, has the singular value decomposition,
which takes least to compile. LAPACK's factorisations of tall blocks call threads, which
wait by spinning, and gather a block that is spread over devices; so every other block, and
one in a loop, has *randomised Cholesky QR*, which is made of products and of factorisations
of small matrices (Balabanov 2022, arXiv:2210.09953; Higgins, Szyld, Boman
and Yamazaki 2024, arXiv:2309.05868):

    S Y = U D W*       S: 3k/2 + 10 rows of random signs,
    V = Y W D^{-1},
    L L* = V* V,       Q = V L^{-*},       Y = Q (L* D W*).

S keeps the length of every vector of the range to within a factor, so V, of condition
about 10, loses nothing in V* V. The singular values D fall, so V D W* gives Y back to
rounding, and what is below rounding stands last. There V has columns of random signs
instead: Q is orthonormal whatever the rank. Signs are hashed from indices, not drawn: a
basis is a function of its block. Measured (rows of S, n = 200,000, k = 50): dense signs
take as long as a sparse S of two entries a column, and need no luck with blocks of few
nonzero rows; of eight entries, 4 times; trigonometric, 5 times; Gaussian, 6 to 8 times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, UInt32

from traceax._linalg import lapack
from traceax._linalg.columns import column_norms_squared, magnitude

# Of so many times more rows than columns signs are nearly orthogonal.
TALL = 8
# Up to so many rows and entries LAPACK takes no longer than products do.
FEW_ROWS, FEW_ENTRIES = 1024, 2**16


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


def orthonormalise(block: Inexact[Array, "n k"], *, in_loop: bool = False) -> Basis:
    """A basis that is orthonormal whatever the rank, and never divides by zero.

    Sizes below rounding are raised to it: a backward perturbation of the block at rounding
    level, so that identities keep holding to rounding, and the inverse exists. `in_loop`:
    many are made, and LAPACK's threads would take a core from the products between them.
    """
    scale = magnitude(block)
    block = block / scale
    return Basis(*_decompose(block, _floor(block), in_loop), scale)


Factors = tuple[
    Inexact[Array, "n k"], Inexact[Array, "k k"], Inexact[Array, "k k"], Float[Array, " k"]
]


def _floor(block: Inexact[Array, "n k"]) -> Float[Array, ""]:
    return jnp.finfo(block.dtype).eps * jnp.maximum(jnp.linalg.norm(block), 1)


def _decompose(
    block: Inexact[Array, "n k"], floor: Float[Array, ""], in_loop: bool = False
) -> Factors:
    n, k = block.shape
    is_small = n <= FEW_ROWS and n * k <= FEW_ENTRIES and not in_loop
    return (_direct if is_small or n < TALL * k else _randomised)(block, floor)


def _direct(block: Inexact[Array, "n k"], floor: Float[Array, ""]) -> Factors:
    columns, sizes, right = lapack.svd(block)
    raised = jnp.maximum(sizes, floor)[:, None]
    return columns, raised * right, right / raised, sizes


def _randomised(block: Inexact[Array, "n k"], floor: Float[Array, ""]) -> Factors:
    n, k = block.shape
    count = 3 * k // 2 + 10
    signs = _signs(n, count, block.real.dtype).astype(block.dtype)
    _, sizes, right = lapack.svd(signs.T @ block / count**0.5)
    # Rounding of what is no column: up to 4.2 floors at k = 20.
    raised = jnp.maximum(sizes, 4 * k**0.5 * floor)
    tall = block @ (right.conj().T / raised[None, :])
    tall = jnp.where((raised > sizes)[None, :], signs[:, :k] / n**0.5, tall)
    lower = lapack.cholesky(tall.conj().T @ tall)
    turn = _inverse(lower)
    factor = lower.conj().T @ (raised[:, None] * right)
    return tall @ turn.conj().T, factor, turn @ (right / raised[:, None]), sizes


def _signs(n: int, k: int, dtype: jnp.dtype) -> Float[Array, "n k"]:
    """The highest bit of a product of hashes, one of the row and one of the column."""
    words = _hash(jnp.arange(n))[:, None] * _hash(-1 - np.arange(k))[None, :]
    return 1 - 2 * (words >> 31).astype(dtype)


def _hash(index: Any) -> UInt32[Any, ...]:
    """Odd words, of which each bit depends on every bit of the index."""
    word = index.astype(np.uint32)
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
    columns, corner, inverse, sizes = _decompose(block - q @ inside, floor)
    for _ in range(2):
        noise = noise - q @ (q.conj().T @ noise)
    grain = 10 * jnp.finfo(block.dtype).eps / jnp.sqrt(column_norms_squared(noise))
    for fresh in (noise * grain[None, :], 0):
        missed = q.conj().T @ columns
        inside = inside + missed @ corner
        columns, turn, turn_inverse, _ = _decompose(columns - q @ missed + fresh, floor)
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
    """L^{-1} by Newton's method, X <- 2X - X L X, from the diagonal. I - L X is strictly
    triangular, and squared in each round: log2(k) of them are exact, and one more takes off
    what rounding has left. No `solve_triangular`, of which a batch beside LAPACK calls is
    among what jax 0.10 waits for (`lapack`)."""
    unit = jnp.eye(lower.shape[0], dtype=lower.dtype)
    start = unit / jnp.sum(unit * lower, axis=0)[None, :]
    rounds = lower.shape[0].bit_length() + 1
    return jax.lax.fori_loop(0, rounds, lambda _, x: x + x @ (unit - lower @ x), start)


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
