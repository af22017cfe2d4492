"""One vector of an operator's space, or several, as columns."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PyTree

from traceax._core.checks import check_vector
from traceax._core.operator import (
    Structure,
    as_columns,
    cut,
    flatten,
    unflatten,
    working_dtype,
)


class RightHandSides(eqx.Module):
    columns: Inexact[Array, "n t"]
    structure: Structure = eqx.field(static=True)
    several: bool = eqx.field(static=True)

    def like(self, columns: Inexact[Array, "n t"]) -> PyTree[Inexact[Array, ...]]:
        """Columns in the form in which these were given."""
        if self.several:
            return cut(columns.T, self.structure)
        return unflatten(columns[:, 0], self.structure)


def right_hand_sides(
    name: str, operator: lx.AbstractLinearOperator, vector: PyTree[Array]
) -> RightHandSides:
    structure, dtype = operator.in_structure(), working_dtype(operator)
    several = check_vector(name, operator, vector)
    vector = jax.tree.map(jnp.asarray, vector)
    columns = as_columns(vector, dtype) if several else flatten(vector, dtype)[:, None]
    return RightHandSides(columns, structure, several)
