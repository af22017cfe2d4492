"""Answers from n applications, where nothing is random."""

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact

from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Structure, dimension, size, working_dtype
from traceax._core.rule import Outcome, Readout, estimate
from traceax._probes.stream import unit_vectors
from traceax._traces.weights import AllRowNorms, MeanForm, MeanProduct, SquaredNorm


def exact_trace(
    operator: lx.AbstractLinearOperator, batch_size: int | None = None
) -> Estimate:
    n = size(operator)
    return _exact(operator, MeanForm(unit_vectors(operator, batch_size or n), 1.0), n)


def exact_diagonal(
    operator: lx.AbstractLinearOperator, batch_size: int | None = None
) -> Estimate:
    n = size(operator)
    ones = jnp.ones(n, jnp.finfo(working_dtype(operator)).dtype)
    readout = MeanProduct(unit_vectors(operator, batch_size or n), ones)
    return _exact(operator, readout, n, operator.in_structure())


def cost_of_norms(operator: lx.AbstractLinearOperator) -> int:
    """Whichever are fewer: the columns, or by the adjoint the rows."""
    return min(size(operator), dimension(operator.out_structure()))


def exact_row_norms(operator: lx.AbstractLinearOperator) -> Estimate:
    spent = cost_of_norms(operator)
    return _exact(operator, _all_rows(operator), spent, operator.out_structure())


def exact_norm(operator: lx.AbstractLinearOperator) -> Estimate:
    return _exact(operator, SquaredNorm(_all_rows(operator)), cost_of_norms(operator))


def _all_rows(operator: lx.AbstractLinearOperator) -> AllRowNorms:
    spent = cost_of_norms(operator)
    return AllRowNorms(_basis(operator, spent), by_adjoint=spent < size(operator))


def _basis(operator: lx.AbstractLinearOperator, n: int) -> Inexact[Array, "n n"]:
    return jnp.eye(n, dtype=working_dtype(operator))


def _exact(
    operator: lx.AbstractLinearOperator,
    readout: Readout,
    num_matvecs: int,
    structure: Structure | None = None,
) -> Estimate:
    degrees = float(num_matvecs)
    return estimate(_read, operator, readout, num_matvecs, degrees, structure)


def _read(linear_map: LinearMap, readout: Readout) -> Outcome:
    value = readout(linear_map)
    return Outcome(value, jnp.zeros_like(value.real), readout)
