"""Krylov spaces: Lanczos from single vectors, Lanczos and Arnoldi from a block, and block
spaces without one of their starts.

If a space is exhausted ("breakdown"), the process divides by 1 instead of a zero residual,
and the new basis vectors are zero. The projection T then is block diagonal, and its first
block is exact. The rest of its diagonal is filled with a Rayleigh quotient, at which every
function is defined that is defined on the spectrum.

**Spaces without one start.** Let Z be the orthonormal columns of a block Krylov space of A
from w_1 .. w_k, T = Z* A Z and K the span of its first q blocks. The space of the others,

    S_i = K_q(A, all w_j but w_i),

is a subspace of K with at most q dimensions less. (Starts that stay in every S_i come
first, and do not count in this.) So its orthogonal complement in K is small: it has an
orthonormal basis N_i with K = S_i + range(N_i), in the coordinates of Z. The N_i are
computed block by block. With the columns s that S_i received last (in the beginning those
of the other starts),

    V = T s

lies in the span of S_i, N_i and the next block E of coordinates. The part of V that is new
to S_i has the k + q coordinates [E, N_i]* V, and a complete QR decomposition of them turns
[E, N_i] into the new s and the new N_i. Each step multiplies by another rotation, and
orthogonalises nothing again, so the N_i are orthonormal to rounding however small the
residuals are. Directions at the level of rounding stay in N_i, and S_i is smaller. That
level is the one of V, which becomes smaller by orders of magnitude as a space converges,
and not that of T (see `eigenframe`): what S_i lacks of the others' directions it lacks in
favour of those of w_i. Directions that stay may be too many for N_i. Then K ends with the
last block for which every N_i has room.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact, Int

from traceax._linalg import lapack
from traceax._linalg.basis import approximate_svd, random_rotation, square_roots
from traceax._linalg.columns import (
    column_norms_squared,
    dot,
    einsum,
    largest_modulus,
    over,
    row_norms_squared,
    squared_modulus,
    times,
)

# Of numbers that are finer than this, small differences keep enough digits.
DOUBLE = 1e-10

# A residual is noise up to so many rounding errors of the product that it is left of.
ROUNDINGS = 10

# An operator whose asymmetry exceeds this part of its size is not Hermitian. Noise explains
# a smaller one, and widens error bars: solves at a tolerance of 1e-2 have about 0.05.
ASYMMETRY = 0.1

# A linear map of blocks, one application for each column.
BlockMap = Callable[[Inexact[Array, "n k"]], Inexact[Array, "n k"]]


class Krylov(NamedTuple):
    """A q_j = sum_i q_i T_ij + rest, the rows q_j of `basis` orthonormal, q_1 = v/|v|.
    `noise` is the largest entry of Q* A Q where T has none, which only noise explains."""

    basis: Inexact[Array, "N m n"]
    projection: Float[Array, "N m m"]
    length: Float[Array, " N"]
    noise: Float[Array, " N"]


def lanczos(
    linear_map: BlockMap,
    starts: Inexact[Array, "N n"],
    num_steps: int,
    *,
    reorthogonalise: bool = True,
    differentiable: bool = False,
) -> Krylov:
    """Lanczos' process from each of N vectors, in one batch; NaN if A is found not
    Hermitian.

    `differentiable` is for derivatives of the recurrence itself. Where the space is
    exhausted, the residual is zero, but its derivative has a direction, which second
    derivatives need (for a multiple of I already after the first step). So the recurrence
    continues in a new direction, with a negligible coupling sqrt(eps).
    """
    reorthogonalise = reorthogonalise or differentiable
    advance = jax.vmap(partial(_advance, differentiable), in_axes=(None, 0, 0))

    def step(state: _State, j: Array) -> tuple[_State, tuple[Array, ...]]:
        # All vectors in one block, as columns: for a stored matrix half the time of rows.
        if state.basis is not None:
            basis = jax.lax.dynamic_update_index_in_dim(state.basis, state.q, j, axis=1)
            state = state._replace(basis=basis)
        return advance(j, state, linear_map(state.q.T).T)

    basis_shape = (starts.shape[0], num_steps, starts.shape[1])
    basis = jnp.zeros(basis_shape, starts.dtype) if reorthogonalise else None
    length = jax.vmap(norm)(starts)
    q = over(starts, jnp.where(length > 0, length, 1)[:, None])
    zero = jnp.zeros_like(length)
    state = _State(basis, q, jnp.zeros_like(q), zero, zero, zero)
    state, outputs = jax.lax.scan(step, state, jnp.arange(num_steps))
    alphas, betas, live, rows = (jnp.moveaxis(x, 0, 1) for x in outputs)
    alphas = jnp.where(live, alphas, alphas[:, :1])
    skewed = state.skew > ASYMMETRY * state.scale
    alphas = jnp.where(skewed[:, None], jnp.nan, alphas)
    basis = rows if state.basis is None else state.basis
    projection = jax.vmap(tridiagonal)(alphas, betas[:, :-1])
    return Krylov(basis, projection, length, state.skew)


class _State(NamedTuple):
    """`scale` is the largest |A q|; `skew` is the largest entry of Q* A Q outside of the
    three diagonals."""

    basis: Inexact[Array, "N m n"] | None
    q: Inexact[Array, "N n"]
    previous: Inexact[Array, "N n"]
    beta: Float[Array, " N"]
    scale: Float[Array, " N"]
    skew: Float[Array, " N"]


def _advance(
    differentiable: bool, j: Array, state: _State, product: Inexact[Array, " n"]
) -> tuple[_State, tuple[Array, ...]]:
    """One step from one vector, given A q."""
    basis, q, previous, beta, scale, skew = state
    eps = float(jnp.finfo(q.dtype).eps)
    scale = jnp.maximum(scale, jax.lax.stop_gradient(norm(product)))
    alpha = dot(q.conj(), product).real
    residual = product - times(alpha, q) - times(beta, previous)
    known = jnp.stack([previous, q]) if basis is None else basis
    overlaps = dot(known.conj(), residual)
    skew = jnp.maximum(skew, jnp.max(jnp.abs(jax.lax.stop_gradient(overlaps))))
    if basis is not None:
        residual = residual - dot(overlaps, basis)
    size = norm(residual)
    alive = jax.lax.stop_gradient(size) > 10 * eps * q.size**0.5 * scale
    if differentiable and basis is not None:
        added = times(eps**0.5 * jnp.where(scale > 0, scale, 1), _new_direction(basis, j))
        residual = jnp.where(alive, residual, residual + jax.lax.stop_gradient(added))
        size = norm(residual)
        alive = size > 0  # false only where the basis spans the whole space
    beta = jnp.where(alive, size, 0)
    new = jnp.where(alive, over(residual, jnp.where(alive, size, 1)), 0)
    # Where q itself is zero, the diagonal of T is filled later.
    output = alpha, beta, jnp.any(q != 0), q
    return _State(basis, new, q, beta, scale, skew), output


def norm(vector: Inexact[Array, " n"]) -> Float[Array, ""]:
    """Without overflow of the squares, and with derivative 0 at 0."""
    scale = jax.lax.stop_gradient(largest_modulus(vector))
    squares = jnp.sum(squared_modulus(over(vector, scale)))
    positive = squares > 0
    return jnp.where(positive, scale * jnp.sqrt(jnp.where(positive, squares, 1)), 0)


def _new_direction(basis: Inexact[Array, "m n"], j: Array) -> Inexact[Array, " n"]:
    """A unit vector orthogonal to the basis, from a quasi-random sequence of step j."""
    steps = jnp.arange(1, basis.shape[1] + 1, dtype=basis.real.dtype)
    turn = 0.6180339887 * (j + 1).astype(steps.dtype)
    vector = jnp.modf(steps * turn)[0] - 0.5
    vector = vector.astype(basis.dtype)
    for _ in range(2):
        vector = vector - dot(basis.conj(), vector, basis)
    length = norm(vector)
    return over(vector, jnp.where(length > 0, length, 1))


def tridiagonal(
    alphas: Float[Array, " m"], betas: Float[Array, " m-1"]
) -> Float[Array, "m m"]:
    """By products with unit matrices, which compile faster than `jnp.diag`."""
    m = alphas.size
    above = jnp.eye(m, k=1, dtype=alphas.dtype) * jnp.append(betas, 0)[:, None]
    return jnp.eye(m, dtype=alphas.dtype) * alphas[:, None] + above + above.T


def truncated(
    projection: Inexact[Array, "m m"], sizes: list[int]
) -> Inexact[Array, "levels m m"]:
    """T restricted to its first `size` rows and columns for each of the sizes, with the
    rest of the diagonal filled as after a breakdown."""

    def one(size: Int[Array, ""]) -> Inexact[Array, "m m"]:
        kept = jnp.arange(projection.shape[0]) < size
        inside = jnp.where(kept[:, None] & kept[None, :], projection, 0)
        return jnp.where(jnp.diag(~kept), projection[0, 0], inside)

    return jax.vmap(one)(jnp.array(sizes))


def by_levels(projections: Inexact[Array, "N m m"]) -> Inexact[Array, "levels N m m"]:
    """Each T as it is, and as it was a quarter and two quarters of its steps earlier, if
    there are so many."""
    num_steps = projections.shape[1]
    stride = max(1, num_steps // 4)
    sizes = [num_steps - stride * less for less in range(3) if stride * less < num_steps]
    return jax.vmap(partial(truncated, sizes=sizes), out_axes=1)(projections)


class Residual(NamedTuple):
    """`scale` times `block` is the part of A times the last block that is orthogonal to the
    basis. Each column is exact to a length of `noise`, in units of `scale`."""

    block: Inexact[Array, "n b"]
    scale: Float[Array, ""]
    noise: Float[Array, " b"]


class BlockKrylov(NamedTuple):
    """The orthonormal columns Z of `basis` span K(A, block). T = Z* A Z is the projection,
    and A Z = Z T + (0 .. 0, residual). Columns that breakdown leaves empty are zero, and
    not `filled`. The block itself is `starts` in the first columns of Z."""

    basis: Inexact[Array, "n r"]
    projection: Inexact[Array, "r r"]
    filled: Bool[Array, " r"]
    starts: Inexact[Array, "b b"]
    residual: Residual

    @property
    def width(self) -> int:
        return self.starts.shape[0]

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return self.filled.size // self.width

    @property
    def is_exhausted(self) -> Bool[Array, ""]:
        """Whether its last block is empty: then T has all that there is."""
        return ~jnp.any(self.filled[-self.width :])


def block_krylov(
    linear_map: BlockMap,
    block: Inexact[Array, "n b"],
    depth: int,
    hermitian: bool = True,
    meter: Any = None,
) -> BlockKrylov:
    """By depth * b applications, which a progress meter shows, with full
    reorthogonalisation. The block has entries of the size of 1. If `hermitian` this is
    Lanczos' process, with NaN if the operator is found not to be Hermitian; else it is
    Arnoldi's."""
    n, width = block.shape
    eps = float(jnp.finfo(block.dtype).eps)
    # Eigenvectors of a matrix that is not symmetric do not bear columns of noise.
    least = 0 if hermitian else ROUNDINGS * eps * n**0.5

    def step(carry: tuple, places: Array) -> tuple[tuple, None]:
        (basis, projection, residual, shown), (here, before) = carry, places
        new, factor = next_block(basis, residual)
        basis = jax.lax.dynamic_update_slice(basis, new, (0, here))
        # The first step writes this into the last columns, which the last step overwrites.
        projection = jax.lax.dynamic_update_slice(projection, factor, (here, before))
        product = linear_map(new)
        scale = jnp.maximum(residual.scale, largest_modulus(product))
        product = over(product, scale)
        rest, inside = _project_out(basis, product)
        rest, again = _project_out(basis, rest)
        inside = inside + again
        column = times(scale, inside)
        projection = jax.lax.dynamic_update_slice(projection, column, (0, here))
        lengths = jnp.sqrt(column_norms_squared(product))
        noise = ROUNDINGS * eps * lengths
        if not hermitian:
            noise = jnp.maximum(noise, least + eps**0.75 * jnp.max(lengths))
        if meter is not None:
            shown = meter.step(shown, (here + width) / (depth * width))
        return (basis, projection, Residual(rest, scale, noise), shown), None

    empty = (jnp.zeros((rows, depth * width), block.dtype) for rows in (n, depth * width))
    shown = None if meter is None else meter.init()
    lengths = jnp.sqrt(column_norms_squared(block))
    start = Residual(block, jnp.zeros_like(lengths[0]), ROUNDINGS * eps * lengths)
    carry = (*empty, start, shown)
    places = width * np.arange(depth)
    places = jnp.array([places, np.roll(places, 1)]).T
    (basis, projection, residual, shown), _ = jax.lax.scan(step, carry, places)
    if meter is not None:
        meter.close(shown)
    if hermitian:
        scaled = over(projection, largest_modulus(projection))
        skew, size = map(jnp.linalg.norm, (scaled - scaled.conj().T, scaled))
        projection = jnp.where(skew > ASYMMETRY * size, jnp.nan, projection)
    filled = column_norms_squared(basis) > 0
    starts = dot(basis[:, :width].conj().T, block)
    return BlockKrylov(basis, projection, filled, starts, residual)


def next_block(
    basis: Inexact[Array, "n r"], residual: Residual
) -> tuple[Inexact[Array, "n b"], Inexact[Array, "b b"]]:
    """The next columns of the basis, and the coordinates of the residual in them.

    Columns are measured by their own noise: as a space converges they become smaller by
    orders of magnitude, and what is noise in one may be all that another has. A direction
    at the level of noise becomes a zero column *before* the others are orthogonalised, so
    it cannot take from them what they have along it.
    """
    block, scale, noise = residual
    noise = jnp.where(noise > 0, noise, 1)[None, :]
    block = over(block, noise)
    sizes, right = approximate_svd(block)
    eps = float(jnp.finfo(sizes.dtype).eps)
    sizes = jnp.where(sizes > jnp.maximum(1, ROUNDINGS * eps * sizes[0]), sizes, 0)
    tall = dot(block, over(right.conj().T, jnp.where(sizes > 0, sizes, jnp.inf)[None, :]))
    tall, _ = _project_out(basis, tall)
    root, inverse = square_roots(dot(tall.conj().T, tall))
    factor = dot(root, times(sizes[:, None], times(right, noise)))
    return dot(tall, inverse), times(scale, factor)


def _project_out(
    basis: Inexact[Array, "n r"], block: Inexact[Array, "n b"]
) -> tuple[Inexact[Array, "n b"], Inexact[Array, "r b"]]:
    inside = dot(basis.conj().T, block)
    return block - dot(basis, inside), inside


class Complements(NamedTuple):
    """For every start i: N_i, with zero for columns that are not needed; `remainders`
    r_i = N_i N_i* w_i, the part of w_i outside of S_i; and n - dim S_i. And which
    coordinates of Z are in K."""

    vectors: Inexact[Array, "k r p"]
    remainders: Inexact[Array, "k r"]
    dimensions: Float[Array, " k"]
    inside: Bool[Array, " r"]

    def resphered(self) -> Complements:
        """The remainders times sqrt(c_i), so that |r_i|^2 = n - dim S_i."""
        squares = jnp.sum(squared_modulus(self.remainders), axis=1)
        factor = jnp.sqrt(self.dimensions / jnp.where(squares > 0, squares, 1))
        return self._replace(remainders=times(factor[:, None], self.remainders))


class Frame(NamedTuple):
    """Coordinates in which T is applied. The rows of `axes` are the coordinates of the
    columns of Z. T is a matrix in them, or a vector if it is diagonal, divided by its
    largest entry."""

    axes: Inexact[Array, "r r"]
    square: Inexact[Array, "..."]

    def apply(self, block: Inexact[Array, "r k"]) -> tuple[Array, Float[Array, " k"]]:
        """T times a block, and the size at which each column of it is noise. No terms
        cancel in eigenvectors, so rounding errors are as small as the image."""
        eps, r = float(jnp.finfo(block.dtype).eps), len(block)
        if self.square.ndim == 1:
            image = times(self.square[:, None], block)
            return image, ROUNDINGS * eps * jnp.sqrt(column_norms_squared(image))
        image = dot(self.square, block)
        longest = jnp.sqrt(jnp.max(column_norms_squared(image)))
        noise = eps**0.5 * longest + 100 * eps * r**0.5
        return image, jnp.full(image.shape[1], noise)


def plain_frame(projection: Inexact[Array, "r r"], filled: Bool[Array, " r"]) -> Frame:
    """The coordinates of Z itself."""
    square = over(jnp.where(filled[None, :], projection, 0), largest_modulus(projection))
    return Frame(jnp.eye(len(square), dtype=square.dtype), square)


def eigenframe(
    projection: Inexact[Array, "r r"],
    filled: Bool[Array, " r"],
    bound: Float[Array, ""] | None = None,
) -> Frame:
    """The eigenvectors of T in single precision, and the coordinates of Z in double.

    The columns s that S_i received last are short of the dominant directions, but only to
    rounding. What this leaves of them is multiplied by the largest eigenvalues. In the
    coordinates of Z it would spread over all starts, and S_i would no longer be independent
    of w_i. In eigenvectors it stays in the dominant directions, which are in S_i."""
    identity, square = plain = plain_frame(projection, filled)
    if float(jnp.finfo(square.dtype).eps) < DOUBLE:
        return plain
    scale = largest_modulus(projection)
    shift = jnp.zeros_like(scale) if bound is None else over(bound, scale)
    kept = jnp.where(jnp.diag(~filled), 1, square)
    values, axes, _ = lapack.eigh_above(kept - times(shift, identity))
    return Frame(axes, (values + shift).astype(square.dtype))


def complements(
    frame: Frame,
    filled: Bool[Array, " r"],
    starts: Inexact[Array, "k k"],
    n: int,
    kept: int = 0,
) -> Complements:
    """`frame` has T, r = q k. `starts` has the w_i in the coordinates of the first block;
    the first `kept` of them stay in every S_i. Only `filled` coordinates exist."""
    r, k = len(filled), starts.shape[0]
    scaled = dot(frame.axes[:k].conj().T, starts / n**0.5)
    # In each block the coordinates that exist come first.
    exists = filled.reshape(r // k, k).astype(starts.real.dtype)
    places = exists * jnp.arange(1, k + 1, dtype=exists.dtype)[None, :]
    numbers = jnp.sum(exists, axis=1)
    depth = jnp.asarray(r // k, numbers.dtype)

    def attempt(state: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        _, limit, _ = state
        one = partial(_complement, frame, scaled, places, numbers, limit)
        *found, ends = jax.lax.map(one, jnp.arange(kept, k))
        return found, jnp.min(ends), limit

    empty = (
        jnp.zeros((k - kept, r, r // k + k), starts.dtype),
        jnp.zeros(k - kept, depth.dtype),
    )
    (vectors, count), limit, _ = jax.lax.while_loop(
        lambda state: state[1] < state[2], attempt, ([*empty], depth, depth + 1)
    )
    vectors = dot(frame.axes, vectors)
    own = einsum("krp,rk->kp", vectors[:, :k].conj(), starts[:, kept:])
    remainders = einsum("krp,kp->kr", vectors, own)
    inside = filled & (jnp.repeat(jnp.arange(r // k, dtype=limit.dtype), k) < limit)
    dimensions = n - jnp.sum(inside, dtype=count.dtype) + count
    return Complements(vectors, remainders, dimensions, inside)


def _complement(
    frame: Frame,
    starts: Inexact[Array, "r k"],
    places: Float[Array, "q k"],
    numbers: Float[Array, " q"],
    limit: Float[Array, ""],
    i: Int[Array, ""],
) -> tuple[Inexact[Array, "r p"], Float[Array, ""], Float[Array, ""]]:
    """N_i in the first `limit` blocks, its number of columns that are not zero, and in how
    many of these blocks there is room for it. Row b of `places` has the place of each
    coordinate of block b, from 1 on, or zero, and `numbers` counts them."""
    (depth, k), r = places.shape, len(starts)
    capacity = depth + k  # N_i has more than q columns only where ranks are exhausted
    eps = float(jnp.finfo(starts.dtype).eps)
    mixed = random_rotation(k, starts.dtype)
    # Counts are of a floating type, whose reductions compile faster.
    index = jnp.arange(capacity + k, dtype=numbers.dtype)

    def step(carry: tuple[Array, ...], block: tuple[Array, ...]) -> tuple:
        # `extended` is [E, N_i], of which the first `count` columns exist. The reflections
        # of QR do not change the others.
        (extended, count, new, noise, end), (number, here, size, rows) = carry, block
        target = jnp.where(here > 0, count + here - 1, -1)
        added = (target[:, None] == index[None, :]).astype(new.dtype)
        extended = extended + dot(rows.conj().T, added)
        count = count + size
        # In units of their noise; some may be larger by orders of magnitude.
        new = over(new, jnp.where(noise > 0, noise, 1)[None, :])
        turn, triangle = lapack.complete_qr(dot(extended.conj().T, dot(new, mixed)))
        sizes = jnp.sqrt(row_norms_squared(triangle))
        # S_i is never all of K, so the last column stays in N_i.
        inside = (sizes > 1) & (index < count - 1)
        taken = index.size - jnp.max(jnp.where(inside, 0, index.size - index))
        latest = dot(extended, jnp.where(index[None, :] < taken, turn, 0)[:, :k])
        count = count - taken
        source = jnp.where(index < count, index + taken, -1)
        left = (index[:, None] == source[None, :]).astype(turn.dtype)
        extended = dot(extended, dot(turn, left))
        image, noise = frame.apply(latest)
        after = extended, count, image, noise, end + 1
        goes_on = (end == number) & (number < limit) & (count <= capacity)
        return jax.tree.map(partial(jnp.where, goes_on), after, carry), None

    extended = jnp.zeros((r, capacity + k), starts.dtype)
    new = jnp.where((jnp.arange(k) == i)[None, :], 0, starts)
    none = jnp.zeros_like(index[0])
    carry = extended, none, new, jnp.full(k, eps**0.5, none.dtype), none
    rows = frame.axes.reshape(depth, k, r)
    blocks = jnp.arange(depth, dtype=index.dtype), places, numbers, rows
    (extended, count, *_, end), _ = jax.lax.scan(step, carry, blocks)
    return extended[:, :capacity], count, end
