"""Traces of functions of operators small enough for an eigendecomposition."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
from jax.tree_util import Partial
from jaxtyping import Array, Float, Inexact, PyTree

from traceax._core.estimate import Estimate
from traceax._core.operator import (
    LinearMap,
    Structure,
    as_result,
    known_diagonal,
    size,
    stores_matrix,
)
from traceax._core.rule import Outcome, estimate_of, settled
from traceax._linalg.columns import magnitude
from traceax._linalg.krylov import ASYMMETRY
from traceax._quadrature.combination import exactly
from traceax._quadrature.dense import Eigen, columns, decompose
from traceax._quadrature.nodes import Nodes, Pairs
from traceax._quadrature.scalar import Flat, MatrixFunction, ScalarFunction, Slope
from traceax._traces.choice import SMALL

# Up to these dimensions a matrix that is there has its eigendecomposition in a second or so
# on two cores, its Cholesky factorisation in a tenth of one.
EIGENVALUES, CHOLESKY = 1024, 2048


def is_small(
    operator: lx.AbstractLinearOperator, num_matvecs: int, stored: int = EIGENVALUES
) -> bool:
    """Whether its whole matrix costs no more than an estimate: n applications, or none and
    a decomposition up to the dimension `stored`."""
    n = size(operator)
    return n <= max(num_matvecs, SMALL) or (stores_matrix(operator) and n <= stored)


def is_cheap(operator: lx.AbstractLinearOperator, num_matvecs: int) -> bool:
    return lx.is_diagonal(operator) or is_small(operator, num_matvecs)


class Entries(NamedTuple):
    """All of an operator: its diagonal if there is nothing else, or its matrix; and the
    applications that this took. NaN if it is clearly not Hermitian."""

    array: Inexact[Array, " *entries"]
    spent: int


def entries(
    operator: lx.AbstractLinearOperator, num_matvecs: int, stored: int = EIGENVALUES
) -> Entries | None:
    """None if they cost more than an estimate."""
    if (known := _of_diagonal(operator)) is not None:
        return known
    if not is_small(operator, num_matvecs, stored):
        return None
    matrix = hermitian_or_nan(LinearMap(operator).dense())
    return Entries(matrix, price(operator))


def price(operator: lx.AbstractLinearOperator) -> int:
    """Of its matrix in applications."""
    return 0 if stores_matrix(operator) else size(operator)


def _of_diagonal(operator: lx.AbstractLinearOperator) -> Entries | None:
    known = known_diagonal(operator) if lx.is_diagonal(operator) else None
    return None if known is None else Entries(real_or_nan(known[0]), known[1])


def hermitian_or_nan(matrix: Array) -> Array:
    """NaN all over if a matrix is clearly not Hermitian; for what reads only one half."""
    skew = jnp.max(jnp.abs(matrix - matrix.conj().T))
    return jnp.where(skew > ASYMMETRY * magnitude(matrix), jnp.nan, matrix)


def real_or_nan(diagonal: Inexact[Array, " n"]) -> Float[Array, " n"]:
    """The same for an operator that is its diagonal."""
    imaginary = jnp.max(jnp.abs(jnp.imag(diagonal)))
    return jnp.where(imaginary > ASYMMETRY * magnitude(diagonal), jnp.nan, diagonal.real)


def exact_function_trace(
    operator: lx.AbstractLinearOperator,
    fn: Flat,
    structure: Structure,
    combine: ScalarFunction | None = None,
) -> Estimate:
    known = _of_diagonal(operator)
    if known is None:
        subject = MatrixFunction(LinearMap(operator), fn, combine)
        degrees = float(size(operator))
        return estimate_of(subject, _exact, None, price(operator), degrees, structure)
    total = jnp.sum(jax.vmap(fn)(known.array), axis=0)
    total = total if combine is None else combine(total)
    return exact_estimate(as_result(total, structure), known.spent)


def exact_estimate(value: PyTree[Inexact[Array, ...]], spent: int) -> Estimate:
    return Estimate(value, jax.tree.map(lambda x: jnp.zeros_like(x.real), value), spent)


def _exact(subject: MatrixFunction, _: None) -> Outcome:
    matrix = hermitian_or_nan(subject.linear_map.dense())
    eigen = decompose(matrix)
    weights = jnp.ones((1, matrix.shape[0]), matrix.real.dtype)
    nodes = Nodes(eigen.values, weights, Partial(_pairs, matrix, eigen))
    return exactly(subject.combine, nodes.total(subject.fn), nodes)


def _pairs(matrix: Inexact[Array, "n n"], eigen: Eigen, subject: MatrixFunction) -> Pairs:
    """f'(A), with unit vectors."""
    matrix = settled(matrix, LinearMap.dense, subject.linear_map)
    return columns(Slope(subject.fn), matrix, eigen, count=matrix.shape[0]), None
