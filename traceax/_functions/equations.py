"""Equations with A + shift I or A + D: right-hand sides, and the scaling by D^{-1/2}."""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PyTree

from traceax._core.checks import check_vector
from traceax._core.operator import (
    LinearMap,
    Structure,
    as_columns,
    flatten,
    stores_matrix,
    unflatten,
    unflatten_rows,
    working_dtype,
)
from traceax._functions.slq import real_dtype

Shift = float | Float[Array, "*shifts"] | lx.DiagonalLinearOperator


class White(NamedTuple):
    """A + D = D^{1/2} (B + shift I) D^{1/2} with B = D^{-1/2} A D^{-1/2} and shift = 1: the
    diagonal of D^{-1/2} is the `scale`. Of A + shift I the scale is 1."""

    operator: lx.AbstractLinearOperator
    shift: Float[Array, "*shifts"]
    scale: Float[Array, "*n"]
    log_determinant: Float[Array, ""]


def whitened(
    operator: lx.AbstractLinearOperator,
    shift: Shift,
) -> White:
    """A + D with log det D, or A + shift I with 0."""
    dtype = real_dtype(operator)
    one = jnp.ones((), dtype)
    if not isinstance(shift, lx.DiagonalLinearOperator):
        return White(operator, jnp.asarray(shift, dtype), one, 0 * one)
    entries = jax.tree.map(lambda d: jnp.asarray(d, dtype), shift.diagonal)
    logs = sum(jnp.sum(jnp.log(leaf)) for leaf in jax.tree.leaves(entries))
    root = jax.tree.map(
        lambda d, like: (d**-0.5).astype(like.dtype), entries, operator.in_structure()
    )
    root = lx.DiagonalLinearOperator(root)
    white = root @ operator @ root
    scale = flatten(root.diagonal, working_dtype(operator))
    if stores_matrix(operator) and not lx.is_diagonal(operator):
        matrix = scale[:, None] * LinearMap(operator).dense() * scale[None, :]
        white = lx.MatrixLinearOperator(matrix)
    return White(white, one, scale, jnp.asarray(logs, dtype))


class RightHandSides(eqx.Module):
    columns: Inexact[Array, "n t"]
    structure: Structure = eqx.field(static=True)
    several: bool = eqx.field(static=True)

    def like(self, columns: Inexact[Array, "n t"]) -> PyTree[Inexact[Array, ...]]:
        """Columns in the structure of the right-hand sides that were given."""
        if self.several:
            return unflatten_rows(columns.T, self.structure)
        return unflatten(columns[:, 0], self.structure)


def right_hand_sides(
    name: str, operator: lx.AbstractLinearOperator, vector: PyTree[Array]
) -> RightHandSides:
    structure, dtype = operator.in_structure(), working_dtype(operator)
    several = check_vector(name, operator, vector)
    vector = jax.tree.map(jnp.asarray, vector)
    columns = as_columns(vector, dtype) if several else flatten(vector, dtype)[:, None]
    return RightHandSides(columns, structure, several)
