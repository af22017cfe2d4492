"""Functions of operators small enough for all of their eigenvalues.

Of operators that need not be Hermitian

    tr f(A) = sum_a f(x_a),    d tr f(A) = tr(f'(A) dA) = sum_a f'(x_a) (V^{-1} dA V)_aa

Both are as well-conditioned as f and f' are at A, but the terms of the second are as large
as the condition of V, and cancel. Then A +- E are decomposed in the place of A, E random
and of relative size d: almost always that brings the condition down to about 1/d (Banks,
Garza-Vargas, Kulkarni and Srivastava 2022, doi:10.1007/s10208-022-09577-5), and in the mean
of both signs the error is of order d^2, since tr(f'(A + E) dA) is analytic in E.
Derivatives so keep half of their digits.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
from jax.tree_util import Partial
from jaxtyping import Array, Inexact

from traceax._core.estimate import Estimate, exact_estimate
from traceax._core.operator import LinearMap, Operator, known_diagonal, stores_matrix
from traceax._core.rule import Algorithm, Outcome, Values, estimate, with_own_jvp
from traceax._core.vectors import Structure, as_result
from traceax._estimators.call import SMALL, Call
from traceax._linalg import lapack
from traceax._linalg.columns import dot, einsum, largest_modulus
from traceax._quadrature.dense import Eigen, columns, decompose
from traceax._quadrature.nodes import (
    Direction,
    Nodes,
    at_nodes,
    perturbation,
    refuse_second,
)
from traceax._quadrature.scalar import (
    Flat,
    MatrixFunction,
    ScalarFunction,
    Slope,
    exact_outcome,
)

# Up to these dimensions a matrix that is there has its eigendecomposition in a second or so
# on two cores, its Cholesky factorisation in a tenth of one.
EIGENVALUES, CHOLESKY = 1024, 2048

# A matrix whose asymmetry exceeds this part of its largest entry is not Hermitian.
ASYMMETRY = 1e-2


def is_small(operator: Operator, num_matvecs: int, stored: int = EIGENVALUES) -> bool:
    """Whether its whole matrix costs no more than an estimate: n applications, or none and
    a decomposition up to the dimension `stored`."""
    n = operator.in_size()
    return n <= max(num_matvecs, SMALL) or (stores_matrix(operator) and n <= stored)


def is_cheap(operator: Operator, num_matvecs: int) -> bool:
    return lx.is_diagonal(operator) or is_small(operator, num_matvecs)


class Entries(NamedTuple):
    """All of an operator: its diagonal if there is nothing else, or its matrix; and the
    applications that this took. NaN if it is clearly not Hermitian."""

    array: Inexact[Array, " *entries"]
    spent: int


def entries(
    operator: Operator, num_matvecs: int, stored: int = EIGENVALUES
) -> Entries | None:
    """None if they cost more than an estimate."""
    if (known := _of_diagonal(operator)) is not None:
        return known
    if not is_small(operator, num_matvecs, stored):
        return None
    matrix = hermitian_or_nan(LinearMap(operator).dense())
    return Entries(matrix, price(operator))


def price(operator: Operator) -> int:
    """Return the matvecs that its matrix takes."""
    return 0 if stores_matrix(operator) else operator.in_size()


def _of_diagonal(operator: Operator) -> Entries | None:
    known = known_diagonal(operator) if lx.is_diagonal(operator) else None
    return None if known is None else Entries(hermitian_or_nan(known[0]).real, known[1])


def hermitian_or_nan(matrix: Array) -> Array:
    """NaN all over if a matrix, or the diagonal that is given instead, is clearly not
    Hermitian; for what reads only one half."""
    skew = jnp.max(jnp.abs(matrix - matrix.conj().T))
    return jnp.where(skew > ASYMMETRY * largest_modulus(matrix), jnp.nan, matrix)


def exact_function_trace(
    call: Call, fn: Flat, structure: Structure, combine: ScalarFunction | None = None
) -> Estimate:
    known = _of_diagonal(call.operator)
    if known is None:
        subject = MatrixFunction(LinearMap(call.operator), fn, combine)
        return _from_matrix(call, _exact, subject, structure)
    total = jnp.sum(jax.vmap(fn)(known.array), axis=0)
    total = total if combine is None else combine(total)
    return exact_estimate(as_result(total, structure), known.spent)


def _from_matrix(
    call: Call, algorithm: Algorithm, subject: MatrixFunction, structure: Structure
) -> Estimate:
    spent, degrees = price(call.operator), call.operator.in_size()
    how = {"method": "exact", "spent": spent, "degrees": degrees}
    return estimate(algorithm, subject, None, structure=structure, **how)


def _exact(subject: MatrixFunction, _: None) -> Outcome:
    matrix = hermitian_or_nan(subject.linear_map.dense())
    eigen = decompose(matrix)
    weights = jnp.ones((1, matrix.shape[0]), matrix.real.dtype)
    nodes = Nodes(eigen.values, weights, Partial(_pairs, matrix, eigen))
    return exact_outcome(subject.combine, nodes.total(subject.fn), nodes)


def _pairs(
    matrix: Array, eigen: Eigen, subject: MatrixFunction, direction: Direction
) -> Values:
    """Return tr(f'(A) dA)."""
    matrix = with_own_jvp(matrix, LinearMap.dense, subject.linear_map)
    slopes = columns(Slope(subject.fn), matrix, eigen, count=len(matrix))
    return einsum("pij,ji->p", slopes, direction.matrix().astype(slopes.dtype))


def exact_general_trace(
    call: Call, fn: Flat, structure: Structure, *, real: bool
) -> Estimate:
    """`real`: the value is meant to be."""
    subject = MatrixFunction(LinearMap(call.operator), fn)
    return _from_matrix(call, partial(_exact_general, real=real), subject, structure)


def _exact_general(subject: MatrixFunction, _: None, *, real: bool) -> Outcome:
    matrix = subject.linear_map.dense()
    nodes = lapack.eigvals(matrix)
    values = at_nodes(subject.fn, nodes[None])[0]
    value = jnp.sum(values, axis=0)
    if real:
        # Conjugate eigenvalues have conjugate values, but not across a branch cut. (The
        # root of a zero that rounding has made negative is not across.)
        noise = 30 * subject.linear_map.eps**0.5
        sizes = jnp.sum(jnp.abs(values), axis=0)
        crossed = jnp.abs(value.imag) > min(noise, 1e-3) * sizes
        value = jnp.where(crossed, jnp.nan, value.real)
    weights = jnp.ones((1, nodes.size), nodes.dtype)
    readout = Nodes(nodes, weights, Partial(_general_pairs, matrix))
    return Outcome(value, jnp.zeros_like(value.real), readout)


def _general_pairs(
    matrix: Inexact[Array, "n n"], subject: MatrixFunction, direction: Direction
) -> Values:
    """Return tr(f'(A) dA)."""
    spectrum = with_own_jvp(_spectrum(matrix), refuse_second, subject.linear_map)
    nodes, vectors, inverse = spectrum
    slopes = at_nodes(Slope(subject.fn), nodes).astype(nodes.dtype)
    turned = dot(inverse, direction.matrix().astype(nodes.dtype))
    rates = einsum("kab,kba->ka", turned, vectors)
    return einsum("kap,ka->p", slopes, rates) / 2


class _Spectrum(NamedTuple):
    """The decomposition of A, twice, or of the matrices on both sides of it."""

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
