"""An operator that is being checked, with random vectors of its spaces."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.operator import (
    common_dtype,
    dimension,
    flatten,
    prepare,
    resolution,
    unflatten,
)

Column = Inexact[Array, " n"]


class Subject(NamedTuple):
    operator: lx.AbstractLinearOperator
    key: PRNGKeyArray
    rtol: float

    @staticmethod
    def of(operator: Any, key: PRNGKeyArray, rtol: float | None) -> Subject:
        rounding = resolution(operator) ** 0.6
        return Subject(prepare(operator), key, rounding if rtol is None else rtol)

    def vector(self, i: int, structure: Any = None) -> Column:
        """The i-th random one, rounded to the leaves' dtypes."""
        structure = self.operator.in_structure() if structure is None else structure
        dtype = common_dtype(structure)
        key = jax.random.fold_in(self.key, i)
        drawn = jax.random.normal(key, (dimension(structure),), dtype)
        return flatten(unflatten(drawn, structure), dtype)

    def apply(self, x: Column, operator: Any = None) -> Column:
        operator = self.operator if operator is None else operator
        image = operator.mv(unflatten(x, operator.in_structure()))
        return flatten(image, common_dtype(operator.out_structure()))

    def apply_block(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "p k"]:
        return jax.vmap(self.apply, 1, 1)(block)


def length(x: Column) -> Float[Array, ""]:
    return jnp.linalg.norm(x)
