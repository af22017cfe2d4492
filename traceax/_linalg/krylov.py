"""Krylov spaces: Lanczos from single vectors, Lanczos and Arnoldi from a block.

Both come to a clean end where the space is exhausted ("breakdown"): what would be divided
by a zero residual is zero instead, and the projection T falls into blocks, of which the
first is exact. The diagonal of what is left is filled with a Rayleigh quotient, at which
every function is defined that is defined on the spectrum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact, Int

from traceax._linalg.basis import orthonormalise
from traceax._linalg.columns import column_norms_squared, magnitude

# Of the largest product: beyond this an operator does not pass for Hermitian.
ASYMMETRY = 1e-2


# One application a column.
BlockMap = Callable[[Inexact[Array, "n k"]], Inexact[Array, "n k"]]


class Krylov(NamedTuple):
    """A q_j = sum_i q_i T_ij + rest, the rows q_j of `basis` orthonormal, q_1 = v/|v|."""

    basis: Inexact[Array, "N m n"]
    projection: Float[Array, "N m m"]
    length: Float[Array, " N"]


def lanczos(
    linear_map: BlockMap,
    starts: Inexact[Array, "N n"],
    num_steps: int,
    *,
    reorthogonalise: bool = True,
    differentiable: bool = False,
) -> Krylov:
    """From each of N vectors, in one batch; NaN if the operator is seen not to be
    Hermitian.

    `differentiable` is for differentiating the recurrence itself. Where the space is
    exhausted the residual is zero and has no direction, but its derivative has one, that a
    second derivative needs (of a multiple of I the first step has all of it). So there the
    recurrence goes on, into any new direction, coupled by a negligible sqrt(eps): that is
    the recurrence of a start next to this one.
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
    q = starts / jnp.where(length > 0, length, 1)[:, None]
    zero = jnp.zeros_like(length)
    state = _State(basis, q, jnp.zeros_like(q), zero, zero, zero)
    state, outputs = jax.lax.scan(step, state, jnp.arange(num_steps))
    alphas, betas, live, rows = (jnp.moveaxis(x, 0, 1) for x in outputs)
    alphas = jnp.where(live, alphas, alphas[:, :1])
    skewed = state.skew > ASYMMETRY * state.scale
    alphas = jnp.where(skewed[:, None], jnp.nan, alphas)
    basis = rows if state.basis is None else state.basis
    return Krylov(basis, jax.vmap(tridiagonal)(alphas, betas[:, :-1]), length)


class _State(NamedTuple):
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
    alpha = jnp.vdot(q, product).real
    residual = product - alpha * q - beta * previous
    known = jnp.stack([previous, q]) if basis is None else basis
    overlaps = known.conj() @ residual
    skew = jnp.maximum(skew, jnp.max(jnp.abs(jax.lax.stop_gradient(overlaps))))
    if basis is not None:
        residual = residual - overlaps @ basis
    size = norm(residual)
    alive = jax.lax.stop_gradient(size) > 10 * eps * q.size**0.5 * scale
    if differentiable and basis is not None:
        anew = eps**0.5 * jnp.where(scale > 0, scale, 1) * _direction(basis, j)
        residual = jnp.where(alive, residual, residual + jax.lax.stop_gradient(anew))
        size = norm(residual)
        alive = size > 0  # but where the basis has all of the space
    beta = jnp.where(alive, size, 0)
    new = jnp.where(alive, residual / jnp.where(alive, size, 1), 0)
    # Whether q itself was alive tells the padding of T.
    output = alpha, beta, jnp.any(q != 0), q
    return _State(basis, new, q, beta, scale, skew), output


def norm(vector: Inexact[Array, " n"]) -> Float[Array, ""]:
    """Without squares that leave the range; its derivative at 0 is 0."""
    scale = jax.lax.stop_gradient(magnitude(vector))
    squares = jnp.sum(((vector / scale) * (vector / scale).conj()).real)
    positive = squares > 0
    return jnp.where(positive, scale * jnp.sqrt(jnp.where(positive, squares, 1)), 0)


def _direction(basis: Inexact[Array, "m n"], j: Array) -> Inexact[Array, " n"]:
    """A unit vector orthogonal to the basis: of a sequence that nothing else repeats."""
    steps = jnp.arange(1, basis.shape[1] + 1, dtype=basis.real.dtype)
    turn = 0.6180339887 * (j + 1).astype(steps.dtype)
    vector = jnp.modf(steps * turn)[0] - 0.5
    vector = vector.astype(basis.dtype)
    for _ in range(2):
        vector = vector - (basis.conj() @ vector) @ basis
    length = norm(vector)
    return vector / jnp.where(length > 0, length, 1)


def tridiagonal(
    alphas: Float[Array, " m"], betas: Float[Array, " m-1"]
) -> Float[Array, "m m"]:
    """By masks: made of `jnp.diag` it takes longer to compile."""
    index = jnp.arange(alphas.size)
    beside = jnp.append(betas, jnp.zeros_like(alphas[:1]))[:, None]
    above = jnp.where(index[:, None] + 1 == index[None, :], beside, 0)
    diagonal = jnp.where(index[:, None] == index[None, :], alphas[:, None], 0)
    return diagonal + above + above.T


def truncated(
    projection: Inexact[Array, "m m"], size: int | Int[Array, ""]
) -> Inexact[Array, "m m"]:
    """T as it was when it had `size` rows, padded as after a breakdown."""
    kept = jnp.arange(projection.shape[0]) < size
    inside = jnp.where(kept[:, None] & kept[None, :], projection, 0)
    return jnp.where(jnp.diag(~kept), projection[0, 0], inside)


def by_levels(projection: Inexact[Array, "N m m"]) -> Inexact[Array, "levels N m m"]:
    """As they are, as they were when they had a quarter of their rows less, and two
    quarters: fewer levels where there are not so many rows."""
    num_steps = projection.shape[1]
    stride = max(1, num_steps // 4)
    sizes = [num_steps - stride * less for less in range(3) if stride * less < num_steps]
    each = jax.vmap(truncated, in_axes=(0, None))
    return jax.vmap(partial(each, projection))(jnp.array(sizes))


class Residual(NamedTuple):
    """What a step of a block Krylov process leaves to the next one, `scale` times `block`;
    directions of a size of `noise` are rounding."""

    block: Inexact[Array, "n b"]
    scale: Float[Array, ""]
    noise: Float[Array, ""]


class BlockKrylov(NamedTuple):
    """The orthonormal columns Z span K(A, block), T = Z* A Z is the projection, and what is
    left is A Z = Z T + (0 .. 0, residual). Columns that breakdown left empty are zero. The
    block itself is the first of Z times `starts`."""

    basis: Inexact[Array, "n r"]
    projection: Inexact[Array, "r r"]
    filled: Bool[Array, " r"]
    starts: Inexact[Array, "b b"]
    residual: Residual


def block_krylov(
    linear_map: BlockMap, block: Inexact[Array, "n b"], depth: int, hermitian: bool = True
) -> BlockKrylov:
    """With full reorthogonalisation, by depth * b applications: Lanczos' process, with NaN
    if the operator is seen not to be Hermitian, or, if it need not be, Arnoldi's."""
    n, width = block.shape
    eps = float(jnp.finfo(block.dtype).eps)

    def step(carry: tuple, places: Array) -> tuple[tuple, None]:
        (basis, projection, residual), (here, before) = carry, places
        new, factor = following(basis, residual, in_loop=True)
        basis = jax.lax.dynamic_update_slice(basis, new, (0, here))
        # Of the first step this lies in the last columns, which are written at last.
        projection = jax.lax.dynamic_update_slice(projection, factor, (here, before))
        product = linear_map(new)
        scale = jnp.maximum(jnp.where(here > 0, residual.scale, 0), magnitude(product))
        rest, inside = _without(basis, product / scale)
        rest, again = _without(basis, rest)
        column = scale * (inside + again)
        projection = jax.lax.dynamic_update_slice(projection, column, (0, here))
        longest = jnp.sqrt(jnp.max(column_norms_squared(inside)))
        noise = 10 * eps * n**0.5 + eps**0.75 * longest
        return (basis, projection, Residual(rest, scale, noise)), None

    one = jnp.ones((), block.real.dtype)
    # All of the first block is kept, also what is at the level of rounding.
    empty = (jnp.zeros((rows, depth * width), block.dtype) for rows in (n, depth * width))
    carry = (*empty, Residual(block, one, -one))
    places = width * np.arange(depth)
    places = jnp.array([places, np.roll(places, 1)]).T
    (basis, projection, residual), _ = jax.lax.scan(step, carry, places)
    if hermitian:
        skew = jnp.max(jnp.abs(projection - projection.conj().T))
        projection = jnp.where(skew > ASYMMETRY * residual.scale, jnp.nan, projection)
    filled = jnp.any(basis != 0, axis=0)
    starts = basis[:, :width].conj().T @ block
    return BlockKrylov(basis, projection, filled, starts, residual)


def following(
    basis: Inexact[Array, "n r"], residual: Residual, *, in_loop: bool = False
) -> tuple[Inexact[Array, "n b"], Inexact[Array, "b b"]]:
    """The next block of a basis, and what the residual is in it."""
    columns, factor, _, sizes, size = orthonormalise(residual.block, in_loop=in_loop)
    lost = sizes * size <= residual.noise
    new, _ = _without(basis, jnp.where(lost[None, :], 0, columns))
    lengths = jnp.sqrt(column_norms_squared(new))
    new = new / jnp.where(lengths > 0, lengths, 1)[None, :]
    return new, jnp.where(lost[:, None], 0, residual.scale * size * factor)


def _without(
    basis: Inexact[Array, "n r"], block: Inexact[Array, "n b"]
) -> tuple[Inexact[Array, "n b"], Inexact[Array, "r b"]]:
    inside = basis.conj().T @ block
    return block - basis @ inside, inside
