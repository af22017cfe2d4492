"""Small dense factors of a tall block: orthonormal bases, downdates, Nyström factors.

What is made of many small operations is compiled as one (here, and wherever blocks are
judged), for whoever does not compile his own program: a first call is faster by far.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact


def column_dots(a: Inexact[Array, "n k"], b: Inexact[Array, "n k"]) -> Inexact[Array, " k"]:
    """<a_j, b_j> = a_j* b_j for every column j."""
    return jnp.sum(a.conj() * b, axis=0)


def column_norms_squared(a: Inexact[Array, "n k"]) -> Float[Array, " k"]:
    return column_dots(a, a).real


def row_dots(a: Inexact[Array, "n k"], b: Inexact[Array, "n k"]) -> Inexact[Array, " n"]:
    """The diagonal of a b*: the sum of a_j o conj(b_j) over columns j."""
    return jnp.sum(a * b.conj(), axis=1)


def row_norms_squared(a: Inexact[Array, "n k"]) -> Float[Array, " n"]:
    return row_dots(a, a).real


def squared_modulus(a: Inexact[Array, "..."]) -> Float[Array, "..."]:
    """Not `abs(a)**2`: its derivative at 0 is one, too."""
    return (a * a.conj()).real


def magnitude(block: Inexact[Array, "..."]) -> Float[Array, ""]:
    """The largest modulus in a block, or the least normal number: what to divide by."""
    largest = jnp.max(jnp.abs(block))
    return jnp.maximum(largest, jnp.finfo(largest.dtype).tiny)


def mean(samples: Inexact[Array, "*values k"]) -> Inexact[Array, "*values"]:
    """Divided before they are summed: k times the mean may be out of range."""
    return jnp.sum(samples / samples.shape[-1], axis=-1)


class Basis(NamedTuple):
    """block = scale * columns @ triangle, columns orthonormal."""

    columns: Inexact[Array, "n k"]
    triangle: Inexact[Array, "k k"]
    scale: Float[Array, ""]


@jax.jit
def orthonormalise(block: Inexact[Array, "n k"]) -> Basis:
    """A QR decomposition that never divides by zero later.

    Householder's Q is orthonormal whatever the rank. Diagonal entries of R below
    eps * (largest column norm) are raised to that floor: a backward perturbation of the
    block at rounding level, so that identities keep holding to rounding, and every column
    of R^{-*} exists. The floor is real, because the phase of a subnormal is noise.
    """
    scale = magnitude(block)
    columns, triangle = jnp.linalg.qr(block / scale)
    return Basis(columns, _raised(triangle, _floor(triangle)), scale)


@jax.jit
def extend(
    basis: Basis, block: Inexact[Array, "n j"], noise: Inexact[Array, "n j"]
) -> Basis:
    """The basis of a block to which more columns are appended; those it has stay.

    What is left of a column that is already in the range is rounding, and may lie in the
    range itself, however often it is projected. So such columns get a direction of their
    own from `noise`, random columns: at the level of rounding, too, but projected before
    it is scaled down. One QR decomposition finds them, one takes in the noise, and one
    makes the projection of that orthonormal again.
    """
    q, triangle = basis.columns, basis.triangle
    block = block / basis.scale
    floor = jnp.maximum(_floor(triangle), _floor(block))
    inside = q.conj().T @ block
    columns, corner = jnp.linalg.qr(block - q @ inside)
    for _ in range(2):
        noise = noise - q @ (q.conj().T @ noise)
    grain = 10 * jnp.finfo(block.dtype).eps / jnp.sqrt(column_norms_squared(noise))
    for fresh in (noise * grain[None, :], 0):
        missed = q.conj().T @ columns
        inside = inside + missed @ corner
        columns, turn = jnp.linalg.qr(columns - q @ missed + fresh)
        corner = turn @ corner
    zeros = jnp.zeros((block.shape[1], q.shape[1]), block.dtype)
    whole = jnp.block([[triangle, inside], [zeros, _raised(corner, floor)]])
    return Basis(jnp.hstack([q, columns]), whole, basis.scale)


def _floor(block: Inexact[Array, "n k"]) -> Float[Array, ""]:
    longest = jnp.sqrt(jnp.max(column_norms_squared(block)))
    return jnp.finfo(block.dtype).eps * jnp.maximum(longest, 1)


def _raised(
    triangle: Inexact[Array, "k k"], floor: Float[Array, ""]
) -> Inexact[Array, "k k"]:
    diagonal = jnp.diagonal(triangle)
    raised = jnp.where(jnp.abs(diagonal) < floor, floor, diagonal)
    return triangle + jnp.diag(raised - diagonal)


@jax.jit
def inverse_adjoint(triangle: Inexact[Array, "k k"]) -> Inexact[Array, "k k"]:
    """R^{-*} of an upper triangular R, by doubling the size of inverted diagonal blocks:

        [ A  0 ]^-1     [    A^-1          0   ]
        [ B  C ]     =  [ -C^-1 B A^-1    C^-1 ]

    in log2(k) rounds of products, each over all blocks at once: as accurate and as fast as
    substitution, and not a `solve_triangular`, for the reason given at `after`.
    """
    k = triangle.shape[0]
    padded = 1 << max(k - 1, 0).bit_length()
    identity = jnp.eye(padded, dtype=triangle.dtype)
    lower = identity.at[:k, :k].set(triangle.conj().T)
    inverses = (1 / jnp.diagonal(lower)).reshape(padded, 1, 1)
    while inverses.shape[0] > 1:
        count, width, _ = inverses.shape
        tiles = lower.reshape(count, width, count, width)
        first = jnp.arange(0, count, 2)
        below = tiles[first + 1, :, first, :]
        top, bottom = inverses[0::2], inverses[1::2]
        corner = -bottom @ (below @ top)
        inverses = jnp.block([[top, jnp.zeros_like(top)], [corner, bottom]])
    return inverses[0, :k, :k]


def after(
    finished: Inexact[Array, "..."], block: Inexact[Array, "n k"]
) -> Inexact[Array, "n k"]:
    """`block`, but not before `finished`: call it between two LAPACK calls.

    The CPU runtime of jax 0.10 runs independent operations side by side. On two cores,
    under `vmap`, it waits for ever where a batched product that feeds one LAPACK call runs
    beside another LAPACK call, or beside a batched triangular solve (a loop of the
    compiler's, with products in it). So no estimator solves with a triangle, and the
    LAPACK calls of each form a chain. An optimisation barrier is dropped too early to help.
    """
    return block + 0 * jnp.sum(finished)


class Downdate(NamedTuple):
    """How to take one column out of a block = Q R.

    The range of the block without column i is range(Q) less the direction Q s_i:
    P_i = Q (I - s_i s_i*) Q*. `distances` are those of each column of R from the span of
    the others, 1/|R^{-*} e_i| = s_i* r_i, without cancellation.
    """

    directions: Inexact[Array, "k k"]
    distances: Float[Array, " k"]


@jax.jit
def downdate(triangle: Inexact[Array, "k k"]) -> Downdate:
    """s_i = R^{-*} e_i / |R^{-*} e_i| (Epperly, Tropp and Webber 2024, section 3.1)."""
    scale = magnitude(triangle)
    columns = inverse_adjoint(triangle / scale)
    largest = jnp.max(jnp.abs(columns), axis=0)
    columns = columns / largest[None, :]
    norms = jnp.sqrt(column_norms_squared(columns))
    return Downdate(columns / norms[None, :], scale / (norms * largest))


class Nystrom(NamedTuple):
    """A Nyström approximation F F* of A/scale + shift I from the sketch A Omega.

    `right` holds columns g_i with (Omega* (A/scale + shift I) Omega)^{-1} = G* G, so that
    z_i = F g_i / |g_i| is what probe i contributes: without it, F F* - z_i z_i* is left.
    `test_inverse` is R^{-*} of Omega = U R, with which (Omega* Omega)^{-1} = T* T.
    """

    left: Inexact[Array, "n k"]
    right: Inexact[Array, "k k"]
    shift: Float[Array, ""]
    scale: Float[Array, ""]
    test_inverse: Inexact[Array, "k k"]
    indefinite: Float[Array, ""]


@jax.jit
def nystrom(sketch: Inexact[Array, "n k"], probes: Inexact[Array, "n k"]) -> Nystrom:
    """Stable Nyström factors of a positive semidefinite operator, never NaN.

    The textbook core Omega* A Omega is as ill-conditioned as A, and in floating point need
    not be definite. So: orthonormalise the *probes*, Omega = U R (no new application);
    shift by rounding plus the core's measured asymmetry, a free estimate of the matvec's
    noise; floor the eigenvalues at the shift. An operator that is semidefinite only up to a
    noise that is symmetric (a kernel rounded to float32, say) shows in negative eigenvalues
    of the core: then the shift is four times their depth, and `indefinite` is the depth.
    """
    scale = magnitude(sketch)
    basis = orthonormalise(probes)
    inverse = inverse_adjoint(basis.triangle * basis.scale)
    # A probe that repeats others (signs do in few dimensions) adds a column to U that is
    # not in their span, where A is not known: it is left out.
    diagonal = jnp.abs(jnp.diagonal(basis.triangle))
    repeated = diagonal < 10 * probes.shape[0] ** 0.5 * jnp.finfo(sketch.dtype).eps
    columns = jnp.where(repeated[None, :], 0, basis.columns)
    turned = jnp.where(repeated[None, :], 0, (sketch / scale) @ inverse.conj().T)
    core = columns.conj().T @ turned
    skew = jnp.linalg.norm(core - core.conj().T) / 2
    size = jnp.maximum(jnp.linalg.norm(turned), 1e-3)
    noise = jnp.finfo(sketch.dtype).eps * size + skew
    eigenvalues, vectors = jnp.linalg.eigh((core + core.conj().T) / 2)
    indefinite = jnp.maximum(-eigenvalues[0] - noise, 0)
    shift = jnp.maximum(noise, 4 * indefinite)
    half = vectors / jnp.sqrt(jnp.maximum(eigenvalues + shift, shift))[None, :]
    left = (turned + shift * columns) @ half
    return Nystrom(left, half.conj().T @ inverse, shift, scale, inverse, indefinite)
