"""The split rule: the derivative of tr f(A), A Hermitian, read off a Krylov space.

d tr f(A) = tr(f'(A) dA), and for probes v with E[v v*] = I and f' = g1 g2,

    d tr f(A) = E[ (g1(A) v)* dA (g2(A) v) ].

Both vectors lie in the Krylov space that the value v* f(A) v was computed from, and cost
no application; the derivative costs one vector-Jacobian product a probe. An entry ij of
U* dA U, U the eigenvectors, comes in with weight (g1_i g2_j + g1_j g2_i)/2, which is least,
by the inequality of the means, for |g1| = |g2| = |f'|^(1/2): then it is the geometric mean
of f'_i and f'_j, where the usual (f'(A) v)* dA v has the arithmetic one, larger without
bound where dA couples small eigenvalues with large ones.

Unlike those of traces, the vectors depend on A in a way that second derivatives need (else
that of log det(s A) in s would be 0). So they are `settled`: computed once, and where
somebody differentiates again, differentiated as a Krylov recurrence from the same starts.
What `fn` depends on moves the sum as another function would, d tr f(A) = tr((df)(A)), by
the same nodes: so it is the same sum, of df.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._core.operator import LinearMap
from traceax._core.rule import settled
from traceax._linalg.columns import magnitude
from traceax._linalg.krylov import lanczos
from traceax._quadrature.dense import Eigen, columns, decompose
from traceax._quadrature.scalar import (
    Factor,
    Flat,
    MatrixFunction,
    Slope,
    moving,
    softening,
)

Vectors = Inexact[Array, "p s n"]

# How well a recurrence must give blocks again that it is to be differentiated for.
TOLERANCE = 0.1


class Run(eqx.Module):
    """N projections T_i of A, Hermitian, on orthonormal rows, read at the first of them:

        tr f(A) = E sum over i of tr(C_i f(T_i)[:count, :count]),

    the `coefficients` C_i being Hermitian matrices, or the diagonals of diagonal ones.
    `again` makes basis and projections from the operator once more, to be differentiated.
    """

    basis: Inexact[Array, "N m n"]
    eigen: Eigen
    coefficients: Inexact[Array, "N count *count"]
    again: Callable[[LinearMap], tuple[Array, Array]]

    @property
    def count(self) -> int:
        return self.coefficients.shape[1]

    def samples(self, fn: Flat) -> Inexact[Array, "p N"]:
        return weighed(self.coefficients, self.eigen, at_nodes(fn, self.eigen.values))

    def weigh(self, rows: Inexact[Array, "p N*count n"]) -> Inexact[Array, "p N*count n"]:
        """C_i times the rows that belong to T_i."""
        each = rows.reshape(rows.shape[0], -1, self.count, rows.shape[-1])
        if self.coefficients.ndim == 2:
            return (self.coefficients[None, ..., None] * each).reshape(rows.shape)
        return jnp.einsum("Nab,pNbn->pNan", self.coefficients, each).reshape(rows.shape)


def at_nodes(fn: Flat, nodes: Float[Array, "N m"]) -> Inexact[Array, "N m p"]:
    return jax.vmap(jax.vmap(fn))(nodes)


def slopes_at(
    fn: Flat, nodes: Float[Array, "N m"], values: Inexact[Array, "N m p"]
) -> Float[Array, "N m p"]:
    """|f'|, by which the rounding of nodes moves `values`, those of f. Where it is large
    (that of a square root at 0) what matters is how far f rises within the rounding."""
    slopes = jnp.abs(at_nodes(Slope(fn), nodes))
    step = 4 * jnp.finfo(nodes.dtype).eps * jnp.max(jnp.abs(nodes), axis=1, keepdims=True)
    return _finite(slopes, values, at_nodes(fn, nodes + step), step)


def _finite(
    slopes: Float[Array, "N m p"],
    values: Inexact[Array, "N m p"],
    beside: Inexact[Array, "N m p"],
    step: Float[Array, "N 1"],
) -> Float[Array, "N m p"]:
    step = step[..., None]
    secants = jnp.abs(beside - values) / jnp.where(step > 0, step, 1)
    # A value that is not finite itself shows by itself.
    secants = jnp.where(jnp.isfinite(secants), secants, 0)
    return jnp.where(jnp.isfinite(slopes), jnp.minimum(slopes, secants), secants)


def weighed(
    coefficients: Inexact[Array, "N count *count"],
    eigen: Eigen,
    values: Inexact[Array, "N m p"],
) -> Inexact[Array, "p N"]:
    """A node of no weight does not count, even where its value is infinite."""
    rows = eigen.vectors[:, : coefficients.shape[1]]
    if coefficients.ndim == 2:
        mixed = coefficients[..., None] * rows
    else:
        mixed = coefficients @ rows
    weights = jnp.sum((rows.conj() * mixed).real, axis=1)[..., None]
    return jnp.sum(weights * jnp.where(weights == 0, 0, values), axis=1).T


class Traced(eqx.Module):
    """The readout of runs."""

    runs: tuple[Run, ...]

    def __call__(self, subject: MatrixFunction) -> Inexact[Array, " p"]:
        return read(subject, self.runs)


@eqx.filter_custom_jvp
def read(subject: MatrixFunction, runs: tuple[Run, ...]) -> Inexact[Array, " p"]:
    """tr f(A) by Krylov runs, with the split rule for its derivative."""
    totals = [jnp.sum(run.samples(subject.fn), axis=1) for run in runs]
    return jnp.sum(jnp.stack(totals), axis=0)


@read.def_jvp
def _read_jvp(
    primals: tuple[MatrixFunction, tuple[Run, ...]], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    subject, runs = primals
    tangent, _ = tangents
    value = read(subject, runs)
    moved = jnp.zeros_like(value)
    if jax.tree.leaves(tangent.fn):
        jacobian, numbers = moving(subject.fn, tangent.fn)
        rates = read(MatrixFunction(subject.linear_map, jacobian), runs)
        moved = moved + rates.reshape(value.shape[0], -1) @ numbers
    if jax.tree.leaves(tangent.linear_map):
        for run in runs:
            moved = moved + _pair(subject, run, tangent.linear_map)
    moved = moved if jnp.iscomplexobj(value) else moved.real
    return value, moved.astype(value.dtype)


def _pair(subject: MatrixFunction, run: Run, tangent: Any) -> Inexact[Array, " p"]:
    """The sum of c (g1(A) v)* dA (g2(A) v)."""
    each = jax.vmap(partial(softening, subject.fn))
    soft = jax.lax.stop_gradient(each(run.eigen.values))
    blocks = _vectors(subject.fn, soft, run.basis, None, run.eigen, run.count)
    num_starts = run.count * run.basis.shape[0]
    left, right = settled(blocks, _Again(run.again, soft, num_starts, blocks[1]), subject)
    p, s, n = right.shape
    block = right.reshape(p * s, n).T
    _, image = eqx.filter_jvp(lambda a: a(block), (subject.linear_map,), (tangent,))
    if image is None:
        return jnp.zeros(p, right.dtype)
    return jnp.sum(run.weigh(left.conj()) * image.T.reshape(p, s, n), axis=(1, 2))


class _Again(eqx.Module):
    """The vectors of the split rule from the operator and f, differentiable in both."""

    again: Callable[[LinearMap], tuple[Array, Array]]
    softening: Float[Array, "N p"]
    num_starts: int = eqx.field(static=True)
    expected: Vectors

    def __call__(self, subject: MatrixFunction) -> tuple[Vectors, Vectors]:
        """NaN if the second block is far from what is `expected` of it: then so are
        derivatives."""
        left, right = self._blocks(subject)
        missed = magnitude(jax.lax.stop_gradient(right) - self.expected)
        passed = jnp.where(missed < TOLERANCE * magnitude(self.expected), 1, jnp.nan)
        return passed * left, passed * right

    def _blocks(self, subject: MatrixFunction) -> tuple[Vectors, Vectors]:
        basis, projection = self.again(subject.linear_map)
        eigen = jax.lax.stop_gradient(decompose(projection))
        # One start for each, or all from one basis.
        count = self.num_starts // basis.shape[0]
        soft = jnp.repeat(self.softening, basis.shape[0] // self.softening.shape[0], axis=0)
        return _vectors(subject.fn, soft, basis, projection, eigen, count)


def _vectors(
    fn: Flat,
    soft: Float[Array, "N p"],
    basis: Inexact[Array, "N m n"],
    projection: Inexact[Array, "N m m"] | None,
    eigen: Eigen,
    count: int,
) -> tuple[Vectors, Vectors]:
    """g1(A) v and g2(A) v for the first `count` rows v of every basis."""

    def one(
        first: bool, soft: Array, rows: Array, matrix: Array | None, eigen: Eigen
    ) -> Inexact[Array, "p count n"]:
        applied = columns(Factor(fn, soft, first), matrix, eigen, count=count)
        return jnp.einsum("pmc,mn->pcn", applied, rows)

    def all_of(first: bool) -> Vectors:
        batch = eqx.filter_vmap(partial(one, first))(soft, basis, projection, eigen)
        return jnp.moveaxis(batch, 0, 1).reshape(batch.shape[1], -1, basis.shape[-1])

    return all_of(True), all_of(False)


class FromRows(eqx.Module):
    """A Lanczos recurrence of its own from each of the first `count` rows of bases."""

    basis: Inexact[Array, "N m n"]
    count: int = eqx.field(static=True)
    num_steps: int = eqx.field(static=True)

    def __call__(self, linear_map: LinearMap) -> tuple[Array, Array]:
        starts = self.basis[:, : self.count].reshape(-1, self.basis.shape[-1])
        num_steps = min(self.num_steps, starts.shape[1])
        krylov = lanczos(linear_map, starts, num_steps, differentiable=True)
        return krylov.basis, krylov.projection


class Whole(eqx.Module):
    """The matrix itself, on the basis of unit vectors."""

    def __call__(self, linear_map: LinearMap) -> tuple[Array, Array]:
        matrix = linear_map.dense()
        return jnp.eye(matrix.shape[0], dtype=matrix.dtype)[None], matrix[None]
