"""Quadratures, from which the value of tr f(A) and its derivatives are read.

A quadrature has nodes x with weights w, and pairs of vectors l, r, all made of A, so that

    tr f(A) ~ sum over nodes of w f(x),
    d tr f(A) = tr(f'(A) dA) ~ sum over pairs of l^T dA r.

The pairs depend on f and on A. A first derivative takes them as constants. For a second
one, the function that makes the pairs differentiates them, or raises an error. A parameter
of `fn` moves the sum by the trace of another function, d tr f(A) = tr((df)(A)), so its
derivative is the same quadrature of df.

**The split rule** makes the pairs for Hermitian A. With probes v for which E[v v*] = I, and
f' = g1 g2,

    d tr f(A) = E[ (g1(A) v)* dA (g2(A) v) ].

Both vectors lie in the Krylov space from which the value v* f(A) v is computed. They cost
no application, and the derivative one vector-Jacobian product a probe. An entry ij of U* dA
U, U the eigenvectors, has the weight (g1_i g2_j + g1_j g2_i)/2. By the inequality of the
means it is least for |g1| = |g2| = |f'|^(1/2). Then it is the geometric mean of f'_i and
f'_j. The usual (f'(A) v)* dA v has their arithmetic one, which exceeds this without bound
where dA couples small eigenvalues with large ones.

Second derivatives need the dependence of the vectors on A (without it the second derivative
of log det(s A) in s would be 0). So the vectors are computed once, and differentiated as a
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
from traceax._core.rule import with_own_jvp
from traceax._linalg.columns import dot, einsum, largest_modulus, promoted, times
from traceax._linalg.krylov import lanczos
from traceax._quadrature.dense import Eigen, columns, decompose
from traceax._quadrature.scalar import (
    Factor,
    Flat,
    MatrixFunction,
    Slope,
    jacobian_and_tangent,
    softening,
)

# A recurrence that is differentiated must give its vectors again to this relative error.
TOLERANCE = 0.1

# The rows r, s of them for each of p values or for all; None stands for all unit vectors.
# And the sum of l^T dA r, as a linear function of the rows (dA r)^T.
Paired = tuple[Inexact[Array, "... s n"] | None, Callable[[Array], Inexact[Array, " p"]]]


class Nodes(eqx.Module):
    """A quadrature, and the readout of traces of functions: it is called on f and on the
    operator that is read. All values of f share the weights, or each value has a row."""

    nodes: Inexact[Array, " m"]
    weights: Inexact[Array, "... m"]
    pairs: Callable[[MatrixFunction], Paired]

    def __call__(self, subject: MatrixFunction) -> Inexact[Array, " p"]:
        return read(subject, self)

    def total(self, fn: Flat) -> Inexact[Array, " p"]:
        values = jax.vmap(fn)(self.nodes).T
        # The Jacobian of f has several values for each value of f.
        weights = jnp.repeat(self.weights, len(values) // len(self.weights), axis=0)
        return weighted_sum(weights, values)


@eqx.filter_custom_jvp
def read(subject: MatrixFunction, nodes: Nodes) -> Inexact[Array, " p"]:
    """tr f(A) by a quadrature, whose pairs give the derivative."""
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
        pairs = nodes.pairs(subject)
        parts.append(_paired(pairs, subject.linear_map, tangent.linear_map))
    if not jnp.iscomplexobj(value):
        parts = [part.real for part in parts]
    moved = sum((part.astype(value.dtype) for part in parts), jnp.zeros_like(value))
    return value, moved


def _paired(pairs: Paired, linear_map: LinearMap, tangent: Any) -> Inexact[Array, " p"]:
    right, total = pairs

    def images(a: LinearMap) -> Inexact[Array, "... s n"]:
        if right is None:
            return a.dense().T
        return a(right.reshape(-1, right.shape[-1]).T).T.reshape(right.shape)

    _, moved = eqx.filter_jvp(images, (linear_map,), (tangent,))
    return jnp.zeros(()) if moved is None else total(moved)


def weighted_sum(
    weights: Inexact[Array, "... m"], values: Inexact[Array, "... m"]
) -> Inexact[Array, "..."]:
    """The sum over nodes of weights times values. A node of weight zero does not count,
    even if its value is infinite."""
    dtype = weights.dtype if jnp.iscomplexobj(weights) else values.dtype
    counted = jnp.where(weights == 0, 0, values).astype(dtype)
    return jnp.sum(weights.astype(dtype) * counted, axis=-1)


def at_nodes(fn: Flat, nodes: Inexact[Array, "N m"]) -> Inexact[Array, "N m p"]:
    return jax.vmap(jax.vmap(fn))(nodes)


def slopes_at(
    fn: Flat,
    nodes: Float[Array, "N m"],
    values: Inexact[Array, "N m p"],
    step: Float[Array, "N _"],
) -> Float[Array, "N m p"]:
    """|f'|, which multiplies the noise of nodes; `values` are those of f. Where |f'| is
    large (for a square root at 0), the change of f over a `step` of the size of the noise,
    divided by the step, takes its place."""
    slopes = jnp.abs(at_nodes(Slope(fn), nodes))
    beside = at_nodes(fn, nodes + step)
    secants = jnp.abs(beside - values) / jnp.where(step > 0, step, 1)[..., None]
    # Infinite values show in the estimate itself.
    secants = jnp.where(jnp.isfinite(secants), secants, 0)
    return jnp.where(jnp.isfinite(slopes), jnp.minimum(slopes, secants), secants)


def node_weights(
    coefficients: Inexact[Array, "N count count"], eigen: Eigen
) -> Float[Array, "N m"]:
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
        weights = node_weights(self.coefficients, self.eigen).reshape(1, -1)
        return Nodes(self.eigen.values.ravel(), weights, self)

    def __call__(self, subject: MatrixFunction) -> Paired:
        """C_i (g1(A) v)* and g2(A) v."""
        count, n = self.coefficients.shape[1], self.basis.shape[2]
        soft = jax.vmap(partial(softening, subject.fn))(self.eigen.values)
        soft = jax.lax.stop_gradient(soft)
        blocks = _vectors(subject.fn, soft, self.basis, None, self.eigen, count)
        again = eqx.Partial(self._by_recurrence, soft, blocks[1])
        left, right = with_own_jvp(blocks, again, subject)
        rows = left.conj().reshape(len(left), -1, count, n)
        weighted = einsum("Nab,pNbn->pNan", self.coefficients.astype(rows.dtype), rows)
        weighted = weighted.reshape(left.shape)
        return right, lambda images: jnp.sum(weighted * images, axis=(1, 2))

    def _by_recurrence(
        self, soft: Array, expected: Array, subject: MatrixFunction
    ) -> tuple[Inexact[Array, "p s n"], Inexact[Array, "p s n"]]:
        """g1(A) v and g2(A) v by a recurrence that is differentiable in the operator and in
        f. NaN if g2(A) v is far from the `expected` one: then derivatives are wrong."""
        starts = self.basis[:, : self.coefficients.shape[1]]
        starts = starts.reshape(-1, starts.shape[2])
        steps = min(self.num_steps, starts.shape[1])
        krylov = lanczos(subject.linear_map, starts, steps, differentiable=True)
        eigen = jax.lax.stop_gradient(decompose(krylov.projection))
        soft = jnp.repeat(soft, len(starts) // len(soft), axis=0)
        left, right = _vectors(subject.fn, soft, krylov.basis, krylov.projection, eigen, 1)
        error = largest_modulus(jax.lax.stop_gradient(right) - expected)
        passed = jnp.where(error < TOLERANCE * largest_modulus(expected), 1, jnp.nan)
        return passed * left, passed * right


def _vectors(
    fn: Flat,
    soft: Float[Array, "N p"],
    basis: Inexact[Array, "N m n"],
    projection: Inexact[Array, "N m m"] | None,
    eigen: Eigen,
    count: int,
) -> tuple[Inexact[Array, "p s n"], Inexact[Array, "p s n"]]:
    """g1(A) v and g2(A) v for the first `count` rows v of every basis."""

    def vectors(first: bool) -> Inexact[Array, "p s n"]:
        def one(soft: Array, matrix: Array | None, eigen: Eigen) -> Inexact[Array, "p m c"]:
            return columns(Factor(fn, soft, first), matrix, eigen, count=count)

        applied = eqx.filter_vmap(one)(soft, projection, eigen)
        rows = einsum("Npmc,Nmn->pNcn", *promoted(applied, basis))
        return rows.reshape(rows.shape[0], -1, rows.shape[3])

    return vectors(True), vectors(False)


def perturbation(matrix: Inexact[Array, "... m m"], size: float) -> Inexact[Array, "..."]:
    """A random matrix of `size` times the largest entry. A nilpotent matrix has no basis of
    eigenvectors; after a perturbation almost every matrix has one."""
    m = matrix.shape[-1]
    noise = np.random.default_rng(m).normal(size=(m, m)) / m**0.5
    noise = noise.reshape((1,) * (matrix.ndim - 2) + (m, m))
    largest = jnp.max(jnp.abs(matrix), axis=(-2, -1), keepdims=True)
    return times(size * largest, jnp.asarray(noise, matrix.dtype))


def refuse_second(linear_map: LinearMap) -> Any:
    raise NotImplementedError(
        "traceax.arnoldi_trace must not be differentiated twice in its operator, because "
        "the eigenvectors that its derivative is read from would have to be "
        "differentiated, which is not stable, but got a second derivative. Use "
        "traceax.slq_trace or traceax.function_trace if the operator is Hermitian."
    )
