"""Functions of small Hermitian matrices, by an eigendecomposition; and f(A) as a linear
map, which is applied by Lanczos' process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from traceax._core.layout import through
from traceax._core.operator import LinearMap, layout_tag
from traceax._core.rule import with_own_jvp
from traceax._core.vectors import Column, flatten, unflatten
from traceax._linalg import lapack
from traceax._linalg.columns import (
    Number,
    dot,
    einsum,
    over,
    promoted,
    squared_modulus,
    times,
)
from traceax._linalg.krylov import FINE, lanczos
from traceax._quadrature.scalar import Flat, Slope, jacobian_and_tangent

OfNodes = Float[Array, " m"]


class Eigen(NamedTuple):
    """The decomposition M = S diag(values) S* of a Hermitian matrix."""

    values: Float[Array, "... m"]
    vectors: Inexact[Array, "... m m"]


def in_one_loop(function: Callable, shape: tuple[int, ...], *batch: PyTree[Array]) -> Any:
    """Apply a function to each member of a batch of this shape, by a single `vmap`.

    So decompositions become one loop, which compiles faster than a loop for each axis. It
    calls LAPACK for one matrix after the other. A single call for all of them would wait
    for threads that, on a mesh of many devices, wait for that call."""
    if not shape:
        return function(*batch)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(shape) :]), batch)
    found = jax.vmap(function)(*flat)
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), found)


def decompose(matrix: Inexact[Array, "... m m"]) -> Eigen:
    """Decompose a Hermitian matrix, or each one of a batch.

    Eigenvalues at the level of rounding become zero. So the logarithm of a singular matrix
    is infinite, and its square root is not NaN. (Of projectors with 20 to 1000 rows the
    lowest eigenvalues were down to -7 eps.)"""
    values, vectors = in_one_loop(lapack.eigh, matrix.shape[:-2], matrix)
    level = jnp.finfo(values.dtype).eps * largest_of(values)
    is_zero = (values <= 4 * level) & (values >= -16 * level)
    return Eigen(jnp.where(is_zero, 0, values), vectors)


def decompose_above(
    matrices: Inexact[Array, "*levels m m"], bound: Float[Array, ""] | None
) -> tuple[Eigen, Float[Array, "*levels m"]]:
    """Return the decompositions, and how far rounding may have moved each eigenvalue. In
    single precision a lower bound of the spectrum lets small eigenvalues keep more digits,
    which is worth three times the time."""
    eps = float(jnp.finfo(matrices.dtype).eps)
    if bound is None or eps < FINE:
        eigen = decompose(matrices)
        return eigen, jnp.broadcast_to(eps * largest_of(eigen.values), eigen.values.shape)
    each = partial(lapack.eigh_above, bound=bound)
    values, vectors, grain = in_one_loop(each, matrices.shape[:-2], matrices)
    return Eigen(values, vectors), grain


def largest_of(values: Float[Array, "... m"]) -> Float[Array, "... 1"]:
    """Return the largest modulus of eigenvalues, which are in rising order."""
    return jnp.maximum(-values[..., :1], values[..., -1:])


class Radau(NamedTuple):
    """The decomposition of a projection with one more block,

        T_R = [[T, E B*], [B E*, corner]],    corner = a I + B E* (T - a I)^{-1} E B*,

    where E has the coordinates of the last block of T. The corner makes the `node` a an
    eigenvalue as often as a block has columns (Golub and Underwood 1977). The others are
    the `values`, with the columns of `vectors` as eigenvectors, so that

        f(T_R) = f(a) I + vectors (f(values) - f(a)) vectors*.

    `solved` is (T - a I)^{-1} E B*, which the derivative of the corner needs.
    """

    values: Float[Array, "... m"]
    vectors: Inexact[Array, "... s m"]
    solved: Inexact[Array, "... m k"]
    node: Float[Array, "..."]


def radau(
    eigen: Eigen, below: Inexact[Array, "k m"], noise: OfNodes, node: Number, *, side: int
) -> Radau:
    """Decompose T_R, given the decomposition V diag(values) V* of T, and `below` = B E*.

    If the spectrum lies above the node, with D^2 = values - a and W = B E* V D^{-1},

        T_R - a I = G G*,    G = [[V, 0], [0, I]] [D; W].

    So G has the eigenvectors of T_R as left singular vectors, and their eigenvalues as the
    squares of its singular values. In double precision D^2 + W* W is decomposed instead,
    which takes a third of the time. If the spectrum lies below the node, the `side` is -1,
    and D^2, W and G G* change their signs.

    Eigenvalues of T are known up to their `noise`. Near the node W is nothing but noise, so
    it is zero there, and such eigenvalues stay as they are, on either side of the node.
    """
    distance = side * (eigen.values - node)
    is_apart = distance > 10 * noise
    root = jnp.sqrt(jnp.abs(distance))
    divisor = jnp.where(is_apart, root, jnp.inf)
    coupling = over(side * dot(below, eigen.vectors), divisor[None, :])
    factor = jnp.concatenate([jnp.diag(root).astype(coupling.dtype), coupling])
    if float(jnp.finfo(root.dtype).eps) < FINE:
        squares, right = lapack.eigh(dot(factor.conj().T, factor))
        sizes = jnp.sqrt(jnp.maximum(squares, 0))
        left = over(dot(factor, right), jnp.where(sizes > 0, sizes, jnp.inf)[None, :])
    else:
        left, sizes, right = lapack.svd(factor)
        squares, right = sizes**2, right.conj().T
    signs = jnp.sum(squared_modulus(right) * jnp.sign(distance)[:, None], axis=0)
    m = root.size
    vectors = jnp.concatenate([dot(eigen.vectors, left[:m]), left[m:]])
    solved = dot(eigen.vectors, over(coupling.conj().T, divisor[:, None]))
    return Radau(node + side * squares * signs, vectors, solved, node)


@jax.custom_jvp
def _distinct(matrix: Inexact[Array, "m m"]) -> Eigen:
    """Decompose a matrix, with a derivative that is NaN if eigenvalues coincide. It does
    not exist there, and JAX's own derivative depends on its version."""
    return decompose(matrix)


@_distinct.defjvp
def _distinct_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Eigen, Eigen]:
    (matrix,), (tangent,) = primals, tangents
    values, vectors = _distinct(matrix)
    turned = dot(vectors.conj().T, tangent, vectors)
    gaps = values[None, :] - values[:, None]
    near = jnp.abs(gaps) <= jnp.finfo(values.dtype).eps ** 0.5 * jnp.max(jnp.abs(values))
    rates = jnp.where(near, jnp.nan, 1 / jnp.where(near, 1, gaps))
    rates = jnp.where(jnp.eye(values.size, dtype=bool), 0, rates)
    moved = Eigen(jnp.diagonal(turned).real, dot(vectors, times(rates, turned)))
    return Eigen(values, vectors), moved


@eqx.filter_custom_jvp
def columns(
    fn: Flat, matrix: Inexact[Array, "m m"] | None, eigen: Eigen, *, count: int
) -> Inexact[Array, "p m {count}"]:
    """Return the first `count` columns of f(M), where `eigen` is the decomposition of M.

    The derivative in M is S (F o S* dM S) S*, where F_ab is the divided difference
    f[x_a, x_b] (Daleckii and Krein 1965). It is finite if eigenvalues coincide. Without a
    matrix M there is no derivative in it.
    """
    values = jax.vmap(fn)(eigen.values)
    first = eigen.vectors[:count].conj()
    return einsum("ma,ap,ca->pmc", *promoted(eigen.vectors, values, first))


@columns.def_jvp
def _columns_jvp(primals: Any, tangents: Any, *, count: int) -> tuple[Array, Array]:
    fn, matrix, eigen = primals
    fn_tangent, matrix_tangent, _ = tangents
    value = columns(fn, matrix, eigen, count=count)
    moved = jnp.zeros_like(value)
    if jax.tree.leaves(fn_tangent):
        jacobian, numbers = jacobian_and_tangent(fn, fn_tangent)
        rates = columns(jacobian, matrix, eigen, count=count)
        rates = rates.reshape(value.shape[0], -1, *value.shape[1:])
        moved = einsum("pq...,q->p...", *promoted(rates, numbers))
    if matrix is not None and matrix_tangent is not None:
        # Second derivatives differentiate this decomposition.
        values, vectors = _distinct(matrix)
        turned = dot(vectors.conj().T, matrix_tangent, vectors)
        differences = divided_differences(fn, values)
        weighted = einsum("abp,ab->pab", *promoted(differences, turned))
        first = vectors[:count].conj()
        moved = moved + einsum("ma,pab,cb->pmc", *promoted(vectors, weighted, first))
    return value, moved.astype(value.dtype)


def divided_differences(fn: Flat, points: OfNodes) -> Inexact[Array, "m m p"]:
    """Return f[a, b] = (f(a) - f(b)) / (a - b) for all pairs of points. If two points are
    near each other it is computed as the mean of f' between them."""
    a, b = points[:, None], points[None, :]
    rounding = jnp.finfo(points.dtype).eps ** 0.5 * jnp.max(jnp.abs(points))
    near = jnp.abs(a - b) <= jnp.maximum(1e-3 * (jnp.abs(a) + jnp.abs(b)), rounding)
    values = jax.vmap(fn)(points)
    apart = jnp.where(near, 1, a - b)[..., None]
    secant = over(values[:, None] - values[None, :], apart)

    def between(node: float) -> Array:
        point = jnp.where(near, a + (node + 1) / 2 * (b - a), points[0])
        return jax.vmap(jax.vmap(Slope(fn)))(point)

    rule = zip(*np.polynomial.legendre.leggauss(3), strict=True)  # on [-1, 1]
    mean = sum(float(weight) / 2 * between(float(node)) for node, weight in rule)
    return jnp.where(near[..., None], mean, secant)


class FunctionMap(LinearMap):
    """f(A) as a linear map, for real f and Hermitian A, by f(A) v ~ |v| Q f(T) e_1.

    Each of its matvecs takes `num_steps` matvecs of A. Its derivative in A is that of the
    Lanczos recurrence.
    """

    fn: Flat = eqx.field(kw_only=True)
    num_steps: int = eqx.field(static=True, kw_only=True)

    def __call__(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        return through(self._image, block, layout_tag(self.operator))

    @property
    def is_hermitian(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.floating)

    def _image(self, column: Column) -> Column:
        subject = self, self._rounded(column)
        value = _apply_function(subject, differentiable=False)
        again = partial(_apply_function, differentiable=True)
        return self._rounded(with_own_jvp(value, again, subject))

    def _rounded(self, column: Column) -> Column:
        """Round a vector to the dtypes of the operator's leaves."""
        return flatten(unflatten(column, self.operator.in_structure()), self.dtype)


def _apply_function(subject: tuple[FunctionMap, Column], *, differentiable: bool) -> Column:
    """Return f(A) v, where the subject holds f(A) and v."""
    function, column = subject
    linear_map, steps = LinearMap(function.operator), function.num_steps
    krylov = lanczos(linear_map, column[None], steps, differentiable=differentiable)
    projection = krylov.projection[0]
    eigen = jax.lax.stop_gradient(decompose(projection))
    coordinates = columns(function.fn, projection, eigen, count=1)[0, :, 0]
    return times(krylov.length[0], dot(*promoted(coordinates, krylov.basis[0])))
