"""Traces of functions of operators small enough for an eigendecomposition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact

from traceax._core.estimate import Estimate
from traceax._core.operator import (
    LinearMap,
    Structure,
    as_result,
    known_diagonal,
    size,
    stores_matrix,
)
from traceax._core.rule import Outcome, estimate
from traceax._estimators.driver import SMALL
from traceax._linalg.columns import magnitude
from traceax._linalg.krylov import ASYMMETRY
from traceax._quadrature.combination import exactly
from traceax._quadrature.dense import decompose
from traceax._quadrature.scalar import Flat, MatrixFunction, ScalarFunction
from traceax._quadrature.split import Run, Traced, Whole

# Up to this dimension the eigendecomposition of a matrix that is there takes less than a
# second or so on two cores.
STORED = 1024


def is_cheap(operator: lx.AbstractLinearOperator, num_matvecs: int) -> bool:
    n = size(operator)
    return (
        n <= max(num_matvecs, SMALL)
        or lx.is_diagonal(operator)
        or (stores_matrix(operator) and n <= STORED)
    )


def exact_function_trace(
    operator: lx.AbstractLinearOperator,
    fn: Flat,
    structure: Structure,
    combine: ScalarFunction | None = None,
) -> Estimate:
    subject = MatrixFunction(LinearMap(operator), fn, combine)
    if lx.is_diagonal(operator):
        known = known_diagonal(operator)
        if known is not None:
            return _of_diagonal(*known, subject, structure)
    spent = 0 if stores_matrix(operator) else size(operator)
    return estimate(_exact, subject, None, spent, float(size(operator)), structure)


def hermitian_or_nan(matrix: Array) -> Array:
    """NaN all over if a matrix is clearly not Hermitian; for what reads only one half."""
    skew = jnp.max(jnp.abs(matrix - matrix.conj().T))
    return jnp.where(skew > ASYMMETRY * magnitude(matrix), jnp.nan, matrix)


def real_or_nan(diagonal: Inexact[Array, " n"]) -> Float[Array, " n"]:
    """The same for an operator that is its diagonal."""
    imaginary = jnp.max(jnp.abs(jnp.imag(diagonal)))
    return jnp.where(imaginary > ASYMMETRY * magnitude(diagonal), jnp.nan, diagonal.real)


def _exact(subject: MatrixFunction, _: None) -> Outcome:
    matrix = hermitian_or_nan(subject.linear_map.dense())
    n = matrix.shape[0]
    ones = jnp.ones((1, n), matrix.real.dtype)
    basis = jnp.eye(n, dtype=matrix.dtype)[None]
    run = Run(basis, decompose(matrix[None]), ones, Whole())
    value = jnp.sum(jax.vmap(subject.fn)(run.eigen.values[0]), axis=0)
    return exactly(subject.combine, value, Traced((run,)))


def _of_diagonal(
    diagonal: Inexact[Array, " n"],
    spent: int,
    subject: MatrixFunction,
    structure: Structure,
) -> Estimate:
    total = jnp.sum(jax.vmap(subject.fn)(real_or_nan(diagonal)), axis=0)
    total = total if subject.combine is None else subject.combine(total)
    value = as_result(total, structure)
    return Estimate(value, jax.tree.map(lambda x: jnp.zeros_like(x.real), value), spent)
