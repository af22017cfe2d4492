"""Block Krylov spaces without one of their starts, all of them at once.

Let Z be the orthonormal columns of a block Krylov space of A from w_1 .. w_k, T = Z* A Z
and K its first q blocks. What the others span,

    S_i = K_q(A, all w_j but w_i),

is a subspace of K with at most q dimensions less. (Starts that are in every S_i, whatever
is left out, come first, and are not counted.) So what is kept is those few, an
orthonormal N_i with K = S_i + range(N_i), in the coordinates of Z. Block for block,

    V = T s,    s the columns that S_i got last (at first those of the other starts),

lies in S_i, N_i and the next block E of coordinates; of that, what is new to S_i is in the
k + q coordinates [E, N_i]* V, and a QR decomposition with all of its columns turns [E, N_i]
into the new s and the new N_i. Rotations follow on rotations, so nothing is ever
orthogonalised again, and the N_i are orthonormal to rounding however small the
residuals are. What cannot be told from rounding stays in N_i: S_i is a little smaller then,
which does no harm, and knows nothing of w_i.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact

from traceax._linalg import lapack
from traceax._linalg.basis import mixing
from traceax._linalg.columns import column_norms_squared, magnitude, row_norms_squared


class LeftOut(NamedTuple):
    """For every start: N_i, columns that are not needed being zero; N_i N_i* w_i, the part
    of w_i outside of S_i; and the dimension of S_i."""

    missing: Inexact[Array, "k r p"]
    remainder: Inexact[Array, "k r"]
    rank: Float[Array, " k"]


def left_out(
    projection: Inexact[Array, "r r"],
    filled: Bool[Array, " r"],
    starts: Inexact[Array, "k k"],
    kept: int = 0,
) -> LeftOut:
    """`projection` is T, r = q k; `starts` the w_i in the coordinates of the first block,
    of which the first `kept` are never left out; coordinates that are not `filled` are
    none."""
    r, k = projection.shape[0], starts.shape[0]
    if k == 1:
        whole = jnp.diag(filled.astype(starts.dtype))
        first = jnp.pad(starts, ((0, r - k), (0, 0))).T
        return LeftOut(whole[None], first, jnp.zeros(1, starts.real.dtype))
    filled = filled.reshape(r // k, k)
    scale = magnitude(projection)
    square = jnp.where(filled.reshape(r), projection / scale, 0)
    inside = jnp.pad(starts, ((0, r - k), (0, 0)))

    def one(i: Array) -> LeftOut:
        others = jnp.delete(inside, i, axis=1, assume_unique_indices=True)
        missing, used = _missing(square, filled, others)
        remainder = missing @ (missing.conj().T @ inside[:, i])
        rank = jnp.sum(filled) - jnp.sum(used)
        return LeftOut(missing, remainder, rank.astype(square.real.dtype))

    return jax.vmap(one)(jnp.arange(kept, k))


def _missing(
    square: Inexact[Array, "r r"],
    filled: Bool[Array, "q k"],
    others: Inexact[Array, "r k-1"],
) -> tuple[Inexact[Array, "r p"], Bool[Array, " p"]]:
    """N of one start, and which of its columns there are."""
    depth, k = filled.shape
    room = depth + k  # q are enough but where ranks are exhausted
    eps = float(jnp.finfo(square.dtype).eps)
    noise = 100 * eps * square.shape[0] ** 0.5
    unit = jnp.eye(square.shape[0], dtype=square.dtype)
    mixed = mixing(k - 1, square.real.dtype)

    def step(carry: tuple[Array, ...], block: Array) -> tuple[tuple[Array, ...], None]:
        missing, used, new = carry
        here = jax.lax.dynamic_slice_in_dim(unit, block * k, k, axis=1)
        frame = jnp.concatenate([here, missing], axis=1)
        exists = jnp.concatenate([filled[block], used])
        # Those that exist come first: reflections leave the others alone.
        first = _gathering(exists, exists.size).astype(frame.dtype)
        frame = frame @ first
        index, count = jnp.arange(exists.size), jnp.sum(exists)
        turn, triangle = lapack.complete_qr(frame.conj().T @ (new @ mixed))
        sizes = jnp.sqrt(row_norms_squared(triangle))
        longest = jnp.sqrt(jnp.max(column_norms_squared(new)))
        # S_i never is all of K: the last one is its part of w_i.
        taken = (sizes > eps**0.5 * longest + noise) & (index < count - 1)
        exists = index < count
        frame = frame @ turn
        latest = jnp.where(taken[None, :], frame, 0)[:, : k - 1]
        used = jnp.arange(room) < jnp.sum(exists & ~taken)
        left = jnp.where(used[None, :], _gathering(exists & ~taken, room), 0)
        missing = frame @ left.astype(frame.dtype)
        return (missing, used, square @ latest), None

    empty = jnp.zeros((square.shape[0], room), square.dtype)
    start = (empty, jnp.zeros(room, bool), others / magnitude(others))
    (missing, used, _), _ = jax.lax.scan(step, start, jnp.arange(depth))
    return missing, used


def _gathering(chosen: Bool[Array, " n"], room: int) -> Float[Array, "n room"]:
    """What moves the chosen of n columns to the front, and the others behind them as far
    as there is `room`."""
    ahead, behind = jnp.cumsum(chosen), jnp.cumsum(~chosen)
    place = jnp.where(chosen, ahead, ahead[-1] + behind) - 1
    return (place[:, None] == jnp.arange(room)[None, :]).astype(float)
