"""Krylov spaces: Lanczos' process from single vectors, Lanczos' and Arnoldi's from a block,
and block spaces without one of their starts.

If a space is exhausted ("breakdown"), the process divides by 1 instead of a zero residual,
and the new basis vectors are zero. The projection T then is block diagonal, and its first
block is exact. The rest of its diagonal is filled with a Rayleigh quotient, at which every
function is defined that is defined on the spectrum.

**Spaces without one start.** Let Z be the orthonormal columns of a block Krylov space of A
from w_1 .. w_k, T = Z* A Z and K the span of its first q blocks. The space of the others,

    S_i = K_q(A, all w_j but w_i),

is a subspace of K with at most q dimensions less. (Starts that stay in every S_i come
first, and no i belongs to them.) So its orthogonal complement in K is small: it has an
orthonormal basis N_i with

    K = S_i + range(N_i),

in the coordinates of Z. `complements` computes the N_i block by block. It remembers the
columns s that S_i received last. In the first step V has the other starts. A step is

    V = T s,                                  (1)
    [E, N_i]* V = U R,                        (2)
    [new s, new N_i] = [E, N_i] U.            (3)

The V of (1) lies in the span of S_i, N_i and the next block E of coordinates. So all that
is new to S_i in it has the k + q coordinates [E, N_i]* V. Their QR decomposition
(2) has the new directions in its first columns, as its pivots are the longest columns that
are left, and (3) hands these to S_i and leaves the others in N_i.
Each step multiplies by another rotation, and orthogonalises nothing again, so the N_i are
orthonormal to rounding however small the residuals are.

Directions at the level of rounding stay in N_i, and S_i is smaller. `Frame.apply` measures
this level by V itself, which becomes smaller by orders of magnitude as a space converges.
If S_i lost a direction of the other starts, a direction of w_i would take its place.
Directions that stay may be too many for N_i. Then K ends with the last block for which
every N_i has room.

Rounding errors of S_i lie in K, too, so they have a part along N_i, which are directions of
w_i. If an eigenvalue far from all others has more eigenvectors than there are starts, this
part grows from step to step, until S_i depends on w_i. (In the same way Lanczos' process
finds converged eigenvectors again if nothing is orthogonalised against them.) If half of
the eigenvalues are zero and the others lie between 1 and 2, this takes 10 blocks in single
precision, and 20 in double precision. So `complements` computes two of the spaces again
with other rounding errors. K ends with the last block for which both versions agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact

from traceax._linalg import lapack
from traceax._linalg.basis import approximate_svd, hashed_signs, pivoted_qr, square_roots
from traceax._linalg.columns import (
    Block,
    Number,
    OfProbes,
    column_norms_squared,
    dot,
    eps_of,
    largest_modulus,
    over,
    positive,
    squared_modulus,
    summed,
    times,
)

# If eps is below this, differences of nearby numbers keep enough digits.
FINE = 1e-10

# A residual is noise if it is shorter than so many rounding errors of the product.
ROUNDINGS = 10

# An operator whose asymmetry exceeds this part of its size is not Hermitian. Noise explains
# a smaller one, and widens error bars: solves at a tolerance of 1e-2 have about 0.05.
ASYMMETRY = 0.1

# So many spaces without one start are computed twice, to see what rounding does to them.
# These parts of r_i, and of what T makes of it, may depend on rounding. (They are
# multiplied by 4 or more in the next block if an eigenvalue has too many eigenvectors.)
TWINS, CHANGE, DIFFERENCE = 2, 0.02, 0.05

# A linear map of blocks, which takes one matvec for each column.
Matvecs = Callable[[Block], Block]

Panel = Inexact[Array, "n b"]
OnSpace = Inexact[Array, "r r"]
Filled = Bool[Array, " r"]


class Lanczos(NamedTuple):
    """The result of Lanczos' process from N vectors v.

    A q_j = sum_i q_i T_ij + a residual, with the orthonormal rows q_j of `basis` and
    q_1 = v/|v|. `length` is |v|, and `projection` is T. `noise` is the largest entry of
    Q* A Q off the three diagonals of T, which only the noise of matvecs explains. `new` is
    q_{m+1}, the direction of the last residual, and `below` is the size of that residual.
    """

    basis: Inexact[Array, "N m n"]
    projection: Float[Array, "N m m"]
    length: Float[Array, " N"]
    noise: Float[Array, " N"]
    new: Inexact[Array, "N n"]
    below: Float[Array, " N"]


def lanczos(
    linear_map: Matvecs,
    starts: Inexact[Array, "N n"],
    num_steps: int,
    *,
    reorthogonalise: bool = True,
    differentiable: bool = False,
) -> Lanczos:
    """Run Lanczos' process from each of N vectors, in one batch.

    T is NaN if A is found not to be Hermitian. Set `differentiable` to differentiate the
    recurrence itself. If the space is exhausted, the residual is zero, but its derivative
    has a direction, which second derivatives need (for a multiple of I already after the
    first step). So the recurrence then continues in a new direction, with a negligible
    coupling sqrt(eps).
    """

    def step(state: _State, j: Array) -> tuple[_State, tuple[Array, ...]]:
        basis, q = state[:2]
        if basis is not None:
            basis = _updated(basis, q[:, None], (0, j, 0))
        # A stored matrix multiplies the columns of a block in half the time of its rows.
        product = linear_map(q.T).T
        return jax.vmap(partial(_advance, differentiable, j))((basis, *state[1:]), product)

    count, n = starts.shape
    length = jax.vmap(norm)(starts)
    q = over(starts, positive(length)[:, None])
    keeps_basis = reorthogonalise or differentiable
    basis = jnp.zeros((count, num_steps, n), q.dtype) if keeps_basis else None
    none = jnp.zeros_like(length)
    start = basis, q, q, none, none, none  # the first predecessor is multiplied by zero
    steps = jnp.asarray(np.arange(num_steps))
    (basis, new, _, below, scale, skew), outputs = jax.lax.scan(step, start, steps)
    entries, rows = (jnp.moveaxis(x, 0, 1) for x in outputs)
    alphas, betas = entries[:, :, 0], entries[:, :, 1]
    # Columns of zeros follow a residual that is zero.
    alphas = jnp.where(jnp.pad(betas[:, :-1], ((0, 0), (1, 0))) > 0, alphas, alphas[:, :1])
    # The couplings of a zero operator are made up.
    alphas = jnp.where((skew > ASYMMETRY * positive(scale))[:, None], jnp.nan, alphas)
    # Selections and products compile faster than `jnp.diag`.
    above = jnp.where(jnp.eye(num_steps, k=1, dtype=bool)[None], betas[:, :, None], 0)
    projection = jnp.eye(num_steps, dtype=alphas.dtype)[None] * alphas[:, :, None]
    projection = projection + above + jnp.swapaxes(above, 1, 2)
    basis = rows if basis is None else basis
    return Lanczos(basis, projection, length, skew, new, below)


def _updated(array: Array, part: Array, place: tuple[Array | int, ...]) -> Array:
    """Replace the part of an array that begins at a place, which is not negative."""
    return jax.lax.dynamic_update_slice(array, part, place, allow_negative_indices=False)


# The state of Lanczos' process: `basis`, which is None if nothing is orthogonalised again;
# `q` and its predecessor; `beta`, the size of the last residual; the largest part of an A q
# so far; and `skew`, the largest entry of Q* A Q off the three diagonals.
_State = tuple[Array | None, Array, Array, Array, Array, Array]


def _advance(differentiable: bool, j: Array, state: _State, product: Array) -> tuple:
    """Take step j from one vector q, given the product A q.

    Return the new state, and the output: [alpha, beta] and q. If q is zero, the caller
    fills the diagonal of T.
    """
    basis, q, previous, beta, scale, skew = state
    alpha = dot(q.conj(), product).real
    scale = jnp.maximum(scale, jax.lax.stop_gradient(jnp.abs(alpha)))
    residual = product - times(alpha, q) - times(beta, previous)
    against = jnp.stack([previous, q]) if basis is None else basis
    overlaps = dot(against.conj(), residual)
    skew = jnp.maximum(skew, jnp.max(jnp.abs(jax.lax.stop_gradient(overlaps))))
    if basis is not None:
        residual = residual - dot(overlaps, basis)
    size = norm(residual)
    # A coupling that was made up causes rounding, but is not part of the scale of A.
    held, known = jax.lax.stop_gradient((size, jnp.maximum(scale, beta)))
    alive = held > 10 * eps_of(q) * q.size**0.5 * known
    scale = jnp.where(alive, jnp.maximum(scale, held), scale)
    if differentiable and basis is not None:
        added = times(eps_of(q) ** 0.5 * positive(scale), _new_direction(basis, j))
        residual = jnp.where(alive, residual, residual + jax.lax.stop_gradient(added))
        size = norm(residual)
        alive = size > 0  # false only if the basis spans the whole space
    beta = jnp.where(alive, size, 0)
    new = jnp.where(alive, over(residual, jnp.where(alive, size, 1)), 0)
    return (basis, new, q, beta, scale, skew), (jnp.stack([alpha, beta]), q)


def norm(vector: Inexact[Array, " n"]) -> Number:
    """Return |v|: its squares do not overflow, and its derivative at 0 is 0."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(vector)))
    # Derivatives are divided by the scale, so it must not be zero.
    scale = jnp.maximum(largest, float(jnp.finfo(largest.dtype).tiny) ** 0.5)
    squares = jnp.sum(squared_modulus(over(vector, scale)))
    return jnp.where(squares > 0, scale * jnp.sqrt(positive(squares)), 0)


def _new_direction(basis: Inexact[Array, "m n"], j: Array) -> Inexact[Array, " n"]:
    """Return a unit vector orthogonal to the basis, from a quasi-random sequence."""
    steps = jnp.arange(1, basis.shape[1] + 1, dtype=basis.real.dtype)
    turn = 0.6180339887 * (j + 1).astype(steps.dtype)
    vector = (jnp.modf(steps * turn)[0] - 0.5).astype(basis.dtype)
    for _ in range(2):
        vector = vector - dot(basis.conj(), vector, basis)
    return over(vector, positive(norm(vector)))


def truncated(projection: OnSpace, sizes: list[int]) -> Inexact[Array, "levels r r"]:
    """Restrict T to its first `size` rows and columns, for each of the sizes.

    The rest of the diagonal is filled as after a breakdown.
    """
    kept = jnp.arange(len(projection))[None, :] < jnp.array(sizes)[:, None]
    inside = jnp.where(kept[:, :, None] & kept[:, None, :], projection[None], 0)
    is_filled = jnp.eye(len(projection), dtype=bool)[None] & ~kept[:, :, None]
    return jnp.where(is_filled, projection[0, 0], inside)


class Residual(NamedTuple):
    """The part of A times the last block that is orthogonal to the basis.

    It is `scale` times `block`. Each column is exact to a length of `noise`, in units of
    `scale`.
    """

    block: Panel
    scale: Number
    noise: Float[Array, " b"]


class BlockKrylov(NamedTuple):
    """A block Krylov space K(A, block), spanned by the orthonormal columns Z of `basis`.

    T = Z* A Z is the projection. If the next block was asked for, `extended` is Z' = [Z,
    Z_next], else it is Z itself. `tall` is T' with A Z = Z' T', or T. `asymmetry` is the
    Frobenius norm of (T - T*)/2. It comes from noise alone, and is None after Arnoldi's
    process. Columns that breakdown leaves empty are zero, and not `filled`. The block
    itself is `starts` in the first columns of Z.
    """

    extended: Inexact[Array, "n s"]
    tall: Inexact[Array, "s r"]
    asymmetry: Number | None
    filled: Filled
    starts: Inexact[Array, "b b"]

    @property
    def basis(self) -> Inexact[Array, "n r"]:
        return self.extended[:, : self.filled.size]

    @property
    def projection(self) -> OnSpace:
        return self.tall[: self.filled.size]

    @property
    def width(self) -> int:
        """The number of columns of a block."""
        return self.starts.shape[0]

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return self.filled.size // self.width

    def completed(self) -> OnSpace:
        """Return T, or its Hermitian part after Lanczos' process, with a diagonal that is
        filled."""
        square = self.projection
        if self.asymmetry is not None:
            square = (square + square.conj().T) / 2
        # A Rayleigh quotient fills the diagonal at empty columns.
        return jnp.where(jnp.diag(~self.filled), square[0, 0], square)


def block_krylov(
    linear_map: Matvecs,
    block: Panel,
    depth: int,
    hermitian: bool = True,
    meter: Any = None,
    extend: bool = False,
) -> BlockKrylov:
    """Make a block Krylov space by depth * b matvecs, which a progress meter shows.

    Every block is orthogonalised against all earlier ones. The entries of `block` should be
    of the size of 1. If `hermitian`, this is Lanczos' process, and T is NaN if the operator
    is found not to be Hermitian. If not, it is Arnoldi's process. Set `extend` to have the
    next block, too, from the last residual.
    """
    n, width = block.shape
    rank, eps = depth * width, eps_of(block)

    def step(carry: tuple, place: Array) -> tuple[tuple, None]:
        (basis, projection, residual, shown), (here, before) = carry, place
        new, factor = next_block(basis, residual)
        basis = _updated(basis, new, (0, here))
        # The first step writes this into the last columns, which a later one overwrites.
        projection = _updated(projection, factor, (here, before))

        def orthogonalised() -> tuple[Array, Residual, Any]:
            product = linear_map(new)
            scale = jnp.maximum(residual.scale, largest_modulus(product))
            product = over(product, scale)
            inside = dot(basis.conj().T, product)
            rest = product - dot(basis, inside)
            again = dot(basis.conj().T, rest)
            column = times(scale, inside + again)
            lengths = jnp.sqrt(column_norms_squared(product))
            # Entries of T near the least number of the dtype are noise, too.
            least = 1e3 * float(jnp.finfo(lengths.dtype).tiny) / scale
            noise = jnp.maximum(ROUNDINGS * eps * lengths, least)
            if not hermitian:  # eigenvectors of such a matrix do not bear columns of noise
                least = ROUNDINGS * eps * n**0.5 + eps**0.75 * jnp.max(lengths)
                noise = jnp.maximum(noise, least)
            left = Residual(rest - dot(basis, again), scale, noise)
            done = shown if meter is None else meter.step(shown, (here + width) / rank)
            return _updated(projection, column, (0, here)), left, done

        if not extend:
            return (basis, *orthogonalised()), None
        kept = projection, residual, shown
        return (basis, *jax.lax.cond(here < rank, orthogonalised, lambda: kept)), None

    size = rank + width if extend else rank
    lengths = jnp.sqrt(column_norms_squared(block))
    start = Residual(block, jnp.zeros_like(lengths[0]), ROUNDINGS * eps * lengths)
    shown = None if meter is None else meter.init()
    basis, projection = (jnp.zeros(s, block.dtype) for s in ((n, size), (size, rank)))
    here = np.arange(0, size, width)
    places = jnp.asarray(np.stack([here, (here - width) % rank], axis=1))
    state = basis, projection, start, shown
    (basis, projection, _, shown), _ = jax.lax.scan(step, state, places)
    if meter is not None:
        meter.close(shown)
    square, asymmetry = projection[:rank], None
    if hermitian:
        largest = largest_modulus(square)
        scaled = over(square, largest)
        parts = squared_modulus(scaled - scaled.conj().T), squared_modulus(scaled)
        skew, size = map(jnp.sum, parts)
        square = jnp.where(skew > ASYMMETRY**2 * size, jnp.nan, square)
        asymmetry = largest * jnp.sqrt(skew) / 2
    tall = jnp.concatenate([square, projection[rank:]]) if extend else square
    starts = dot(basis.conj().T, block)[:width]
    filled = column_norms_squared(basis[:, :rank]) > 0
    return BlockKrylov(basis, tall, asymmetry, filled, starts)


def next_block(basis: Inexact[Array, "n r"], residual: Residual) -> tuple[Panel, Array]:
    """Return the next columns of the basis, and the coordinates of the residual in them.

    Columns are measured by their own noise: as a space converges they become smaller by
    orders of magnitude, and what is noise in one may be all that another has. A direction
    at the level of noise becomes a zero column *before* the others are orthogonalised, so
    it cannot take from them what they have along it.
    """
    block, scale, noise = residual
    noise = positive(noise)[None, :]
    block = over(block, noise)
    sizes, right = approximate_svd(block)
    least = jnp.maximum(1, ROUNDINGS * eps_of(sizes) * sizes[0])
    sizes = jnp.where(sizes > least, sizes, 0)
    tall = dot(block, over(right.conj().T, jnp.where(sizes > 0, sizes, jnp.inf)[None, :]))
    tall = tall - dot(basis, dot(basis.conj().T, tall))
    root, inverse = square_roots(dot(tall.conj().T, tall))
    factor = dot(root, times(sizes[:, None], times(right, noise)))
    return dot(tall, inverse), times(scale, factor)


class Frame(NamedTuple):
    """The coordinates in which T is applied.

    The rows of `axes` are the coordinates of the columns of Z. They are None if those are
    the coordinates themselves. `square` is T in them, divided by its largest entry. It is
    exact to a norm of `noise`.
    """

    axes: OnSpace | None
    square: OnSpace
    noise: Number

    @property
    def rows(self) -> OnSpace:
        """The coordinates of the columns of Z, one in each row."""
        size, dtype = len(self.square), self.square.dtype
        return jnp.eye(size, dtype=dtype) if self.axes is None else self.axes

    def coordinates(self, first: Inexact[Array, "k b"]) -> Inexact[Array, "r b"]:
        """Return the coordinates of vectors, given those in the first columns of Z."""
        if self.axes is None:
            return jnp.pad(first, ((0, len(self.square) - len(first)), (0, 0)))
        return dot(self.axes[: len(first)].conj().T, first)

    def back(self, vectors: Inexact[Array, "... r p"]) -> Inexact[Array, "... r p"]:
        """Return what the vectors are in the columns of Z."""
        return vectors if self.axes is None else dot(self.axes, vectors)

    def apply(self, block: Inexact[Array, "r k"]) -> Inexact[Array, "r k"]:
        """Return T times a block, in units of the size at which a column is noise.

        In eigenvectors no terms cancel, so rounding errors are as small as the image, and
        each column has its own unit. The columns may differ by orders of magnitude. In
        other coordinates all columns have one unit.
        """
        eps, image = eps_of(block), dot(self.square, block)
        lengths = jnp.sqrt(column_norms_squared(image))
        if self.axes is None:
            noise = eps**0.5 * jnp.max(lengths) + 100 * eps * len(block) ** 0.5
        else:
            # Each block is orthogonal to the one before to several tens of eps.
            noise = 100 * eps * lengths[None, :]
        return over(image, positive(noise))


def frame_of(
    projection: OnSpace, asymmetry: Number | None, filled: Filled, bound: Number | None
) -> Frame:
    """Return eigenvectors in single precision, the coordinates of Z itself in double, and
    after Arnoldi's process, which has no `asymmetry`.

    The columns s that S_i received last are short of the dominant directions, but only to
    rounding. What this leaves of them is multiplied by the largest eigenvalues. In the
    coordinates of Z it would spread over all starts, and S_i would no longer be independent
    of w_i. In eigenvectors it stays in the dominant directions, which are in S_i. `bound`
    is a lower bound of the spectrum. Eigenvalues near it become more accurate.

    If matvecs are noisy, T is not Hermitian. Suppose that an operator rounds its argument,
    as products on GPUs do, so that T = Z* A (Z + E). Along an eigenvector of A the error
    Z* A E is as small as its eigenvalue. The Hermitian part has the adjoint error E* A Z,
    too, which is as large as the largest eigenvalue. This error would make S_i depend on
    w_i, and it turns the eigenvectors V. So T itself is applied, and the frame is V Q. The
    orthonormal Q of the QR decomposition of V* T V turns V back to eigenvectors of A.
    """
    scale, eps = largest_modulus(projection), eps_of(projection)
    square = over(projection, scale)
    noise = ROUNDINGS * eps + (0.0 if asymmetry is None else asymmetry) / scale
    plain = Frame(None, square, noise)
    if asymmetry is None or eps < FINE:
        return plain
    adjoint = square.conj().T
    skew = (square - adjoint) / 2
    completed = jnp.where(jnp.diag(~filled), 1, (square + adjoint) / 2)
    least = jnp.zeros_like(scale) if bound is None else over(bound, scale)
    values, axes, _ = lapack.eigh_above(completed, least)
    order = jnp.argsort(-jnp.abs(values))
    axes, values = axes[:, order], values[order]
    turned = times(values[:, None], plain.rows) + dot(axes.conj().T, skew, axes)
    turn, rows = lapack.qr(turned)
    return Frame(dot(axes, turn), dot(rows, turn), noise)


class Complements(NamedTuple):
    """The complements of the spaces S_i, for every probe i, in the coordinates of Z.

    `sides` are [N_i, r_i], in which columns of N_i that are not needed are zero, and
    r_i = N_i N_i* w_i is the part of w_i outside S_i. `dimensions` are n - dim S_i.
    `inside` says which coordinates of Z are in K; it is the same for all i.
    """

    sides: Inexact[Array, "k r s"]
    dimensions: OfProbes
    inside: Filled

    @property
    def vectors(self) -> Inexact[Array, "k r p"]:
        return self.sides[..., :-1]

    @property
    def remainders(self) -> Inexact[Array, "k r"]:
        return self.sides[..., -1]

    @property
    def signs(self) -> Float[Array, " s"]:
        """The signs of the outer products of the sides in J - N_i N_i* + r_i r_i*."""
        signs = np.append(-np.ones(self.sides.shape[2] - 1), 1)
        return jnp.asarray(signs, self.dimensions.dtype)

    def resphered(self) -> Complements:
        """Multiply the r_i by sqrt(c_i), so that |r_i|^2 = n - dim S_i."""
        squares = summed(squared_modulus(self.remainders))
        factor = jnp.sqrt(self.dimensions / positive(squares))
        factors = jnp.where(self.signs > 0, factor[:, None], 1)
        return self._replace(sides=times(factors[:, None], self.sides))


def complements(
    frame: Frame, filled: Filled, starts: Inexact[Array, "k k"], n: int, kept: int = 0
) -> Complements:
    """Compute what every S_i lacks of K, by (1) to (3) of the module docstring.

    `frame` has T on K, and r = q k. `starts` has the w_i in the coordinates of the first
    block; the first `kept` of them stay in every S_i. Only `filled` coordinates exist.

    These lines of NumPy compute the same, up to a rotation of the columns of N_i, from a
    dense matrix A and the starts W. They make a new space for each i:

        def complement(A, W, Z, q, i):  # Z: the orthonormal basis of K, n x r
            block, blocks = np.delete(W, i, axis=1), []
            for _ in range(q):
                blocks.append(block / np.linalg.norm(block))
                block = A @ block
            S, sizes, _ = np.linalg.svd(np.hstack(blocks), full_matrices=False)
            S = S[:, sizes > 1e-10 * sizes[0]]
            outside = Z - S @ (S.conj().T @ Z)
            columns, sines, _ = np.linalg.svd(outside, full_matrices=False)
            N = Z.conj().T @ columns[:, sines > 0.5]  # every sine is 0 or 1
            return N, N @ (N.conj().T @ (Z.conj().T @ W[:, i])), len(A) - S.shape[1]

    Powers of A lose digits at every step, so the lines serve small q only.
    `tests/linalg/test_left_out.py` compares with such spaces.
    """
    r, k = len(filled), starts.shape[0]
    depth, dtype, eps = r // k, starts.real.dtype, eps_of(starts)
    capacity = depth + k  # N_i has more than q columns only if ranks are exhausted
    # Second versions come first, and then all spaces as they are.
    twins = min(TWINS, k - kept)
    without = np.append(np.arange(kept, kept + twins), np.arange(kept, k))
    is_twin = (np.arange(len(without)) < twins)[:, None, None]
    scaled = frame.coordinates(starts / n**0.5)
    tested = scaled.T[kept : kept + twins]
    errors = 1 + eps * jnp.where(is_twin, hashed_signs(r, k, dtype), 0)

    def step(carry: tuple[Array, ...], block: tuple[Array, ...]) -> tuple:
        (extended, count, new, limit, scatter), (number, exists, rows) = carry, block
        add = jax.vmap(partial(_add_block, frame, exists, rows))
        *after, new = add([extended, count, times(new, errors)])
        pairs = after[0][: 2 * twins].reshape(2, twins, *extended.shape[1:])
        differ, scatter = _differ(frame, _along(pairs, tested[None]), scatter)
        # K ends with the last block for which every N_i has room, and twins agree.
        goes_on = (limit == number) & jnp.all(after[1] <= capacity) & ~differ
        after, before = (*after, limit + 1), (extended, count, limit)
        extended, count, limit = jax.tree.map(partial(jnp.where, goes_on), after, before)
        return (extended, count, new, limit, scatter), None

    # The noise of the starts is taken for sqrt(eps).
    others = jnp.where(np.eye(k, dtype=bool)[without, None], 0, scaled[None] / eps**0.5)
    extended = jnp.zeros((len(without), r, capacity + k), starts.dtype)
    # Counts are of a floating type, whose reductions compile faster.
    numbers, zero = np.arange(depth, dtype=dtype), jnp.zeros(len(without), dtype)
    blocks = jnp.asarray(numbers), filled.reshape(depth, k), frame.rows.reshape(depth, k, r)
    carry = extended, zero, others, jnp.zeros((), dtype), jnp.full(twins, jnp.inf, dtype)
    (extended, count, _, limit, _), _ = jax.lax.scan(step, carry, blocks)
    vectors = frame.back(extended[twins:, :, : capacity + 1])  # the last column is zero
    remainders = _along(vectors, starts.T[kept:])[..., None]
    sides = jnp.where(np.arange(capacity + 1) < capacity, vectors, remainders)
    inside = filled & (np.repeat(numbers, k) < limit)
    dimensions = n - summed(inside.astype(dtype)) + count[twins:]
    return Complements(sides, dimensions, inside)


def _along(vectors: Inexact[Array, "... r p"], start: Inexact[Array, "... s"]) -> Array:
    """Return N N* w, where w is zero beyond its first coordinates."""
    first = vectors[..., : start.shape[-1], :]
    inside = jnp.sum(first.conj() * start[..., None], axis=-2)
    return jnp.sum(vectors * inside[..., None, :], axis=-1)


def _differ(frame: Frame, rests: Array, before: Array) -> tuple[Array, Array]:
    """Tell whether other rounding errors change an r_i, and also change (T - m) r_i.

    Here m is the Rayleigh quotient of r_i. `rests` are the r_i of both versions of the
    spaces, [version, space, coordinate]. The second result is the squares of |(T - m) r_i|,
    which show the error of the samples. `before` has those of the block before, and shows
    the error if K ends there. K ends only if rounding changes r_i by more than `CHANGE` of
    its length, and (T - m) r_i by more than `DIFFERENCE` of its length in the block before
    and by more than the noise of T. As a space converges, T becomes a multiple of I on what
    is left, up to its noise. Then rounding decides on r_i, but r_i does not matter. A
    difference that is NaN does not end K.
    """
    images = dot(rests, frame.square.T)
    squares = summed(squared_modulus(rests[1]))
    forms = summed(rests[1].conj() * images[1])
    means = over(forms, positive(squares))
    images = images - means[None, :, None] * rests
    change, difference = (summed(squared_modulus(x[0] - x[1])) for x in (rests, images))
    least = jnp.maximum(DIFFERENCE**2 * before, times(frame.noise**2, squares))
    differ = (change > CHANGE**2 * squares) & (difference > least)
    return jnp.any(differ), summed(squared_modulus(images[1]))


def _add_block(frame: Frame, exists: Array, rows: Array, state: list[Array]) -> tuple:
    """Add a block E to K for one start, by (1) to (3) of the module docstring.

    `exists` says which of the coordinates E exist, and `rows` are these coordinates in the
    frame. The state is the matrix [E, N_i], of which the first `count` columns exist; this
    count; and V of (1), whose columns are in units of their noise.
    """
    extended, count, new = state
    k, index = len(exists), jnp.arange(extended.shape[1], dtype=count.dtype)
    # In a block, the coordinates that exist come first.
    added = exists[:, None] & (count + index[:k, None] == index[None, :])
    extended = extended + dot(rows.conj().T, added.astype(new.dtype))
    count = count + jnp.sum(exists, dtype=count.dtype)
    # S_i is never all of K, so the last column stays in N_i.
    turn, taken = pivoted_qr(dot(extended.conj().T, new), count - 1)
    latest = dot(extended, jnp.where(index[None, :] < taken, turn, 0)[:, :k])
    count = count - taken
    stays = (index[:, None] == index[None, :] + taken) & (index[None, :] < count)
    extended = dot(extended, dot(turn, stays.astype(turn.dtype)))
    return extended, count, frame.apply(latest)
