"""Traces of functions of operators of any kind, small enough for all of their eigenvalues.

    tr f(A) = sum_a f(x_a),    d tr f(A) = tr(f'(A) dA) = sum_a f'(x_a) (V^{-1} dA V)_aa

Both are as well-conditioned as f and f' are at A, but the terms of the second are as large
as the condition of V, and cancel. That of a triangle of random numbers, n = 60, is 10^16.
Then A +- E are decomposed in its place, E random and of relative size d: almost always
that brings the condition down to about 1/d (Banks, Garza-Vargas, Kulkarni and Srivastava
2022, doi:10.1007/s10208-022-09577-5), and in the mean of both signs the error is of order
d^2, since tr(f'(A + E) dA) is analytic in E. (By one E of the size of rounding the
derivatives of triangles and Jordan blocks are wrong in all digits; so half of them hold.)
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
from jax.tree_util import Partial
from jaxtyping import Array, Inexact

from traceax._core.estimate import Estimate
from traceax._core.operator import (
    LinearMap,
    Structure,
    resolution,
    size,
    stores_matrix,
)
from traceax._core.rule import Outcome, estimate_of, settled
from traceax._linalg import lapack
from traceax._quadrature.modes import perturbation, refuse_second
from traceax._quadrature.nodes import Nodes, Pairs, at_nodes
from traceax._quadrature.scalar import Flat, MatrixFunction, Slope


def exact_general_trace(
    operator: lx.AbstractLinearOperator, fn: Flat, structure: Structure, *, real: bool
) -> Estimate:
    """`real`: the value is meant to be."""
    spent = 0 if stores_matrix(operator) else size(operator)
    subject = MatrixFunction(LinearMap(operator), fn)
    algorithm = partial(_exact, real=real)
    return estimate_of(subject, algorithm, None, spent, float(size(operator)), structure)


def _exact(subject: MatrixFunction, _: None, *, real: bool) -> Outcome:
    matrix = subject.linear_map.dense()
    nodes = lapack.eigvals(matrix)
    values = at_nodes(subject.fn, nodes[None])[0]
    value = jnp.sum(values, axis=0)
    if real:
        # Conjugate eigenvalues have conjugate values, but not across a branch cut. (The
        # root of a zero that rounding has made negative is not across.)
        noise = 30 * resolution(subject.linear_map.operator) ** 0.5
        sizes = jnp.sum(jnp.abs(values), axis=0)
        crossed = jnp.abs(value.imag) > min(noise, 1e-3) * sizes
        value = jnp.where(crossed, jnp.nan, value.real)
    weights = jnp.ones((1, nodes.size), nodes.dtype)
    readout = Nodes(nodes, weights, Partial(_pairs, matrix))
    return Outcome(value, jnp.zeros_like(value.real), readout)


def _pairs(matrix: Inexact[Array, "n n"], subject: MatrixFunction) -> Pairs:
    """f'(A), with unit vectors."""
    spectrum = settled(_spectrum(matrix), refuse_second, subject.linear_map)
    nodes, vectors, inverse = spectrum
    slopes = at_nodes(Slope(subject.fn), nodes).astype(nodes.dtype)
    return jnp.einsum("kja,kap,kai->pji", vectors, slopes, inverse) / 2, None


class _Spectrum(NamedTuple):
    """Of A twice, or of the matrices on both sides of it."""

    nodes: Inexact[Array, "2 n"]
    vectors: Inexact[Array, "2 n n"]
    inverse: Inexact[Array, "2 n n"]


def _spectrum(matrix: Inexact[Array, "n n"]) -> _Spectrum:
    eps = float(jnp.finfo(matrix.dtype).eps)
    near = _decomposed((matrix + perturbation(matrix, eps))[None])
    condition = jnp.linalg.norm(near.vectors) * jnp.linalg.norm(near.inverse)
    aside = perturbation(matrix, eps**0.4)
    return jax.lax.cond(
        condition < matrix.shape[0] * eps**-0.5,
        lambda: _Spectrum(*(jnp.concatenate([x, x]) for x in near)),
        lambda: _decomposed(jnp.stack([matrix + aside, matrix - aside])),
    )


def _decomposed(matrices: Inexact[Array, "k n n"]) -> _Spectrum:
    nodes, vectors = lapack.eig(matrices)
    unit = jnp.broadcast_to(jnp.eye(nodes.shape[1], dtype=nodes.dtype), vectors.shape)
    return _Spectrum(nodes, vectors, lapack.solve((vectors, unit)))
