"""Quadratures, from which the value of tr f(A) and its derivatives are read.

A quadrature has nodes x with weights w, and pairs of vectors l and r, all made of A, so
that

    tr f(A) ~ sum over nodes of w f(x),
    d tr f(A) = tr(f'(A) dA) ~ sum over pairs of l^T dA r.

The pairs depend on f and on A. A first derivative takes them as constants. A second
derivative differentiates the function that makes the pairs, or that function raises an
error. A parameter of f changes the sum by the trace of another function,
d tr f(A) = tr((df)(A)), so its derivative is the same quadrature of df.

**The split rule** makes the pairs for Hermitian A. With probes v for which E[v v*] = I, and
a factorisation f' = g1 g2,

    d tr f(A) = E[ (g1(A) v)* dA (g2(A) v) ].

Both vectors lie in the Krylov space from which the value v* f(A) v is computed, so they
take no matvec. The derivative takes one vector-Jacobian product for each probe. The rule
gives the entry ij of U* dA U, where U has the eigenvectors, the weight
(g1_i g2_j + g1_j g2_i)/2. By the inequality of the arithmetic and the geometric mean this
weight is least for |g1| = |g2| = |f'|^(1/2), where it is the geometric mean of f'_i and
f'_j. The usual rule (f'(A) v)* dA v has their arithmetic mean as the weight, which is
larger without bound if dA couples small eigenvalues with large ones.

Second derivatives need the dependence of the vectors on A: without it the second derivative
of log det(s A) in s would be 0. So the vectors are computed once, and differentiated as a
Krylov recurrence from the same starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact

from traceax._core.operator import LinearMap
from traceax._core.rule import Values, with_own_jvp
from traceax._linalg.columns import dot, einsum, largest_modulus, promoted, times
from traceax._linalg.krylov import lanczos
from traceax._quadrature.dense import Eigen, columns, decompose
from traceax._quadrature.scalar import (
    Factors,
    Flat,
    MatrixFunction,
    Slope,
    jacobian_and_tangent,
    softening,
)

# A recurrence that is differentiated must reproduce its vectors to this relative error.
TOLERANCE = 0.1


class Direction(eqx.Module):
    """The direction dA of a derivative, as the tangent of an operator A."""

    linear_map: LinearMap
    tangent: Any

    def matrix(self) -> Inexact[Array, "n n"]:
        """Return dA as a matrix."""
        return self._of(LinearMap.dense)

    def images(self, rows: Inexact[Array, "... n"]) -> Inexact[Array, "... n"]:
        """Return dA r for each of the rows r."""
        block = rows.reshape(-1, rows.shape[-1]).T
        return self._of(lambda linear_map: linear_map(block)).T.reshape(rows.shape)

    def _of(self, function: Callable[[LinearMap], Array]) -> Array:
        value, moved = eqx.filter_jvp(function, (self.linear_map,), (self.tangent,))
        # The matvec may not depend on what is perturbed.
        return jnp.zeros_like(value) if moved is None else moved


SlopePairs = Callable[[MatrixFunction, Direction], Values]
"""The sum over all pairs of l^T dA r, for each of the p values of f."""


class Nodes(eqx.Module):
    """A quadrature, which is the readout of traces of functions. It is called with f and
    the operator that is read. All values of f share one row of weights, or each has its
    own."""

    nodes: Inexact[Array, " m"]
    weights: Inexact[Array, "... m"]
    pairs: SlopePairs

    def __call__(self, subject: MatrixFunction) -> Inexact[Array, " p"]:
        return read(subject, self)

    def total(self, fn: Flat) -> Inexact[Array, " p"]:
        """Return the sum over the nodes of the weights times f."""
        values = jax.vmap(fn)(self.nodes).T
        # The Jacobian of f has several values for each value of f.
        weights = jnp.repeat(self.weights, len(values) // len(self.weights), axis=0)
        return weighted_sum(weights, values)


@eqx.filter_custom_jvp
def read(subject: MatrixFunction, nodes: Nodes) -> Inexact[Array, " p"]:
    """Return tr f(A) by a quadrature, and differentiate it by the pairs."""
    return nodes.total(subject.fn)


@read.def_jvp
def _read_jvp(
    primals: tuple[MatrixFunction, Nodes], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    (subject, nodes), (tangent, _) = primals, tangents
    value = read(subject, nodes)
    parts = []
    if jax.tree.leaves(tangent.fn):
        jacobian, numbers = jacobian_and_tangent(subject.fn, tangent.fn)
        rates = read(MatrixFunction(subject.linear_map, jacobian), nodes)
        parts.append(dot(rates.reshape(value.size, -1), numbers.astype(rates.dtype)))
    if jax.tree.leaves(tangent.linear_map):
        direction = Direction(subject.linear_map, tangent.linear_map)
        parts.append(nodes.pairs(subject, direction))
    if not jnp.iscomplexobj(value):
        parts = [part.real for part in parts]
    moved = sum((part.astype(value.dtype) for part in parts), jnp.zeros_like(value))
    return value, moved


def weighted_sum(
    weights: Inexact[Array, "... m"], values: Inexact[Array, "... m"]
) -> Inexact[Array, "..."]:
    """Return the sum over nodes of weights times values. A node of weight zero does not
    count, even if its value is infinite."""
    return jnp.sum(times(weights, jnp.where(weights == 0, 0, values)), axis=-1)


def at_nodes(fn: Flat, nodes: Inexact[Array, "N m"]) -> Inexact[Array, "N m p"]:
    """Return all values of f at each node of N quadratures."""
    return jax.vmap(jax.vmap(fn))(nodes)


def slopes_at(
    fn: Flat, nodes: Float[Array, "N m"], step: Float[Array, "N _"]
) -> Float[Array, "N m p"]:
    """Return |f'| at the nodes, which multiplies their noise.

    If |f'| is large (as it is for a square root at 0), the change of f over a `step` of the
    size of the noise, divided by the step, replaces it."""
    slopes = jnp.abs(at_nodes(Slope(fn), nodes))
    secants = jnp.abs(at_nodes(fn, nodes + step) - at_nodes(fn, nodes))
    secants = secants / jnp.where(step > 0, step, 1)[..., None]
    # Infinite values show in the estimate itself.
    secants = jnp.where(jnp.isfinite(secants), secants, 0)
    return jnp.where(jnp.isfinite(slopes), jnp.minimum(slopes, secants), secants)


def node_weights(
    coefficients: Inexact[Array, "N count count"], eigen: Eigen
) -> Float[Array, "N m"]:
    """Return the weights of the nodes in tr(C_i f(T_i)[:count, :count]), where T_i is the
    matrix that `eigen` decomposes and the `coefficients` are the C_i."""
    rows = eigen.vectors[:, : coefficients.shape[1]]
    return jnp.sum((rows.conj() * dot(coefficients.astype(rows.dtype), rows)).real, axis=1)


class SplitRule(eqx.Module):
    """The quadrature of N projections T_i of A on orthonormal rows, which `eigen`
    decomposes:

        tr f(A) = E sum over i of tr(C_i f(T_i)[:count, :count]),

    the `coefficients` C_i being Hermitian matrices. The starts v are the first `count` rows
    of each basis. Second derivatives run a recurrence of `num_steps` from each start.
    """

    basis: Inexact[Array, "N m n"]
    eigen: Eigen
    coefficients: Inexact[Array, "N count count"]
    num_steps: int = eqx.field(static=True)

    def nodes(self) -> Nodes:
        """Return the quadrature whose pairs this rule makes."""
        weights = node_weights(self.coefficients, self.eigen).reshape(1, -1)
        return Nodes(self.eigen.values.ravel(), weights, self)

    def __call__(self, subject: MatrixFunction, direction: Direction) -> Values:
        """Return the sum of C_i (g1(A) v)* dA (g2(A) v)."""
        soft = jax.vmap(partial(softening, subject.fn))(self.eigen.values)
        soft = jax.lax.stop_gradient(soft)
        count = self.coefficients.shape[1]
        vectors = _vectors(subject.fn, soft, self.basis, self.eigen, count=count)
        again = eqx.Partial(self._by_recurrence, soft, vectors)
        left, right = with_own_jvp(vectors, again, subject)
        coefficients = self.coefficients.astype(left.dtype)
        left = einsum("Nab,pNbn->pNan", coefficients, left.conj())
        return jnp.sum(left * direction.images(right), axis=(1, 2, 3))

    def _by_recurrence(
        self, soft: Array, expected: Array, subject: MatrixFunction
    ) -> Inexact[Array, "2 p N count n"]:
        """Return g1(A) v and g2(A) v by a recurrence that is differentiable in the operator
        and in f. They are NaN if g2(A) v is far from the `expected` vectors, because then
        the derivatives would be wrong."""
        starts = self.basis[:, : self.coefficients.shape[1]]
        starts = starts.reshape(-1, starts.shape[2])
        steps = min(self.num_steps, starts.shape[1])
        krylov = lanczos(subject.linear_map, starts, steps, differentiable=True)
        eigen = jax.lax.stop_gradient(decompose(krylov.projection))
        soft = jnp.repeat(soft, len(starts) // len(soft), axis=0)
        vectors = _vectors(subject.fn, soft, krylov.basis, eigen, krylov.projection)
        vectors = vectors.reshape(expected.shape)
        error = largest_modulus(jax.lax.stop_gradient(vectors[1]) - expected[1])
        is_same = error < TOLERANCE * largest_modulus(expected[1])
        return jnp.where(is_same, 1, jnp.nan) * vectors


def _vectors(
    fn: Flat,
    soft: Float[Array, "N p"],
    basis: Inexact[Array, "N m n"],
    eigen: Eigen,
    projection: Inexact[Array, "N m m"] | None = None,
    *,
    count: int = 1,
) -> Inexact[Array, "2 p N count n"]:
    """Return g1(A) v and g2(A) v for the first `count` rows v of every basis. They are
    differentiable in the projection that `eigen` decomposes, if that is given."""

    def one(soft: Array, matrix: Array | None, eigen: Eigen) -> Inexact[Array, "pp m c"]:
        return columns(Factors(fn, soft), matrix, eigen, count=count)

    applied = eqx.filter_vmap(one)(soft, projection, eigen)
    rows = einsum("Npmc,Nmn->pNcn", *promoted(applied, basis))
    return rows.reshape(2, -1, *rows.shape[1:])


def perturbation(matrix: Inexact[Array, "... m m"], size: float) -> Inexact[Array, "..."]:
    """Return a random matrix of `size` times the largest entry. A nilpotent matrix has no
    basis of eigenvectors, but almost every perturbation of it has one."""
    m = matrix.shape[-1]
    noise = np.random.default_rng(m).normal(size=(m, m)) / m**0.5
    noise = noise.reshape((1,) * (matrix.ndim - 2) + (m, m))
    largest = jnp.max(jnp.abs(matrix), axis=(-2, -1), keepdims=True)
    return times(size * largest, jnp.asarray(noise, matrix.dtype))


def refuse_second(linear_map: LinearMap) -> Any:
    """Raise the error of a second derivative that does not exist."""
    raise NotImplementedError(
        "traceax.arnoldi_trace must not be differentiated twice in its operator, because "
        "the eigenvectors that its derivative is read from would have to be "
        "differentiated, which is not stable, but got a second derivative. Use "
        "traceax.slq_trace or traceax.function_trace if the operator is Hermitian."
    )
