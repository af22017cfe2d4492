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

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact, Int

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
    filled = filled.reshape(r // k, k)
    square = jnp.where(filled.reshape(r), projection / magnitude(projection), 0)
    inside = jnp.pad(starts, ((0, r - k), (0, 0)))
    others = inside[None] * (1 - jnp.eye(k, dtype=inside.dtype)[kept:, None, :])
    missing, count = jax.lax.map(partial(_missing, square, filled), others)
    own = jnp.einsum("krp,rk->kp", missing.conj(), inside[:, kept:])
    remainder = jnp.einsum("krp,kp->kr", missing, own)
    rank = jnp.sum(filled) - count
    return LeftOut(missing, remainder, rank.astype(square.real.dtype))


def _missing(
    square: Inexact[Array, "r r"],
    filled: Bool[Array, "q k"],
    others: Inexact[Array, "r k"],
) -> tuple[Inexact[Array, "r p"], Int[Array, ""]]:
    """N of one start, and how many columns it has; the others are zero. `others` are all
    starts, but zero instead of that one."""
    (depth, k), r = filled.shape, square.shape[0]
    room = depth + k  # q are enough but where ranks are exhausted
    eps = float(jnp.finfo(square.dtype).eps)
    noise = 100 * eps * r**0.5
    mixed = mixing(k, square.real.dtype)
    index = jnp.arange(room + k)

    def moving(places: Int[Array, " a"]) -> Inexact[Array, "a m"]:
        """What moves each of a columns to its place; -1 is none."""
        return (places[:, None] == index[None, :]).astype(square.dtype)

    def step(carry: tuple[Array, ...], next_block: tuple[Array, ...]) -> tuple:
        # The first `count` columns of the frame exist: reflections leave the others alone.
        frame, count, new = carry
        here, filled, upto = next_block
        frame = frame + here @ moving(jnp.where(filled, count + upto - 1, -1))
        count = count + upto[-1]
        turn, triangle = lapack.complete_qr(frame.conj().T @ (new @ mixed))
        sizes = jnp.sqrt(row_norms_squared(triangle))
        longest = jnp.sqrt(jnp.max(column_norms_squared(new)))
        # S_i never is all of K: the last one is its part of w_i.
        known = (sizes > eps**0.5 * longest + noise) & (index < count - 1)
        taken = jnp.min(jnp.where(known, index.size, index))
        latest = frame @ jnp.where(index < taken, turn, 0)[:, :k]
        count = jnp.minimum(count - taken, room)
        left = jnp.where(index < count, index + taken, -1)
        frame = frame @ (turn @ moving(left).T)
        return (frame, count, square @ latest), None

    unit = jnp.eye(r, dtype=square.dtype).reshape(depth, k, r)
    # How many of a block there are up to each: by `cumsum` it takes longer to compile.
    upto = jnp.sum(np.tri(k, dtype=bool)[None] & filled[:, None], axis=-1)
    start = jnp.zeros((r, room + k), square.dtype), jnp.array(0), others / magnitude(others)
    blocks = jnp.swapaxes(unit, 1, 2), filled, upto
    (frame, count, _), _ = jax.lax.scan(step, start, blocks)
    return frame[:, :room], count
