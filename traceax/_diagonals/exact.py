"""Diagonals and norms from n applications, where nothing is random."""

from __future__ import annotations

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact

from traceax._core.estimate import Estimate
from traceax._core.operator import dimension, size, working_dtype
from traceax._diagonals.weights import AllRowNorms, MeanProduct, SquaredNorm
from traceax._probes.meters import SILENT, ProgressMeter
from traceax._probes.stream import unit_vectors
from traceax._traces.exact import exactly


def exact_diagonal(
    operator: lx.AbstractLinearOperator,
    batch_size: int | None = None,
    meter: ProgressMeter = SILENT,
) -> Estimate:
    n = size(operator)
    ones = jnp.ones(n, jnp.finfo(working_dtype(operator)).dtype)
    readout = MeanProduct(unit_vectors(operator, batch_size or n), ones)
    return exactly(operator, readout, n, operator.in_structure(), meter)


def cost_of_norms(operator: lx.AbstractLinearOperator) -> int:
    """Whichever are fewer: the columns, or by the adjoint the rows."""
    return min(size(operator), dimension(operator.out_structure()))


def exact_row_norms(operator: lx.AbstractLinearOperator) -> Estimate:
    spent = cost_of_norms(operator)
    return exactly(operator, _all_rows(operator), spent, operator.out_structure())


def exact_norm(operator: lx.AbstractLinearOperator) -> Estimate:
    return exactly(operator, SquaredNorm(_all_rows(operator)), cost_of_norms(operator))


def _all_rows(operator: lx.AbstractLinearOperator) -> AllRowNorms:
    spent = cost_of_norms(operator)
    return AllRowNorms(_basis(operator, spent), by_adjoint=spent < size(operator))


def _basis(operator: lx.AbstractLinearOperator, n: int) -> Inexact[Array, "n n"]:
    return jnp.eye(n, dtype=working_dtype(operator))
