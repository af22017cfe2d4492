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
"""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox.internal import Static
from jax.tree_util import Partial
from jaxtyping import Array, Float, Inexact

from traceax._core.rule import settled
from traceax._linalg.columns import magnitude
from traceax._linalg.krylov import lanczos
from traceax._quadrature.dense import Eigen, columns, decompose
from traceax._quadrature.nodes import Nodes, Pairs
from traceax._quadrature.scalar import Factor, Flat, MatrixFunction, softening

# How well a recurrence must give blocks again that it is to be differentiated for.
TOLERANCE = 0.1


def split_nodes(
    basis: Inexact[Array, "N m n"],
    eigen: Eigen,
    coefficients: Inexact[Array, "N count count"],
    num_steps: int,
) -> Nodes:
    """The quadrature of N projections T_i = `eigen` of A on orthonormal rows, read at the
    first of them:

        tr f(A) = E sum over i of tr(C_i f(T_i)[:count, :count]),

    the `coefficients` C_i being Hermitian matrices. For second derivatives a recurrence of
    `num_steps` starts from each of the first rows.
    """
    weights = node_weights(coefficients, eigen).reshape(1, -1)
    pairs = Partial(_split_pairs, basis, eigen, coefficients, Static(num_steps))
    return Nodes(eigen.values.ravel(), weights, pairs)


def node_weights(
    coefficients: Inexact[Array, "N count count"], eigen: Eigen
) -> Float[Array, "N m"]:
    rows = eigen.vectors[:, : coefficients.shape[1]]
    return jnp.sum((rows.conj() * (coefficients.astype(rows.dtype) @ rows)).real, axis=1)


def _split_pairs(
    basis: Inexact[Array, "N m n"],
    eigen: Eigen,
    coefficients: Inexact[Array, "N count count"],
    num_steps: Static,
    subject: MatrixFunction,
) -> Pairs:
    """C_i (g1(A) v)* and g2(A) v for the starts v."""
    count, n = coefficients.shape[1], basis.shape[2]
    soft = jax.vmap(partial(softening, subject.fn))(eigen.values)
    soft = jax.lax.stop_gradient(soft)
    blocks = _vectors(subject.fn, soft, basis, None, eigen, count)
    starts = basis[:, :count].reshape(-1, n)
    again = Partial(_again, starts, soft, blocks[1], num_steps)
    left, right = settled(blocks, again, subject)
    rows = left.conj().reshape(len(left), -1, count, n)
    weighted = jnp.einsum("Nab,pNbn->pNan", coefficients.astype(rows.dtype), rows)
    return weighted.reshape(left.shape), right


def _again(
    starts: Inexact[Array, "s n"],
    soft: Float[Array, "N p"],
    expected: Inexact[Array, "p s n"],
    num_steps: Static,
    subject: MatrixFunction,
) -> tuple[Inexact[Array, "p s n"], Inexact[Array, "p s n"]]:
    """The vectors of the split rule by a recurrence of its own from each start, which is
    differentiable in the operator and in f. NaN if the second block is far from what is
    `expected` of it: then so are derivatives."""
    count = min(num_steps.value, starts.shape[1])
    krylov = lanczos(subject.linear_map, starts, count, differentiable=True)
    eigen = jax.lax.stop_gradient(decompose(krylov.projection))
    soft = jnp.repeat(soft, len(starts) // len(soft), axis=0)
    left, right = _vectors(
        subject.fn, soft, krylov.basis, krylov.projection, eigen, count=1
    )
    missed = magnitude(jax.lax.stop_gradient(right) - expected)
    passed = jnp.where(missed < TOLERANCE * magnitude(expected), 1, jnp.nan)
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

    def one(
        first: bool, soft: Array, rows: Array, matrix: Array | None, eigen: Eigen
    ) -> Inexact[Array, "p count n"]:
        applied = columns(Factor(fn, soft, first), matrix, eigen, count=count)
        return jnp.einsum("pmc,mn->pcn", applied, rows)

    def all_of(first: bool) -> Inexact[Array, "p s n"]:
        batch = eqx.filter_vmap(partial(one, first))(soft, basis, projection, eigen)
        return jnp.moveaxis(batch, 0, 1).reshape(batch.shape[1], -1, basis.shape[-1])

    return all_of(True), all_of(False)
