"""Second derivatives of a function along probes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import lineax as lx
from jaxtyping import Array, Inexact, PyTree

from traceax._calculus.taylor import second_derivatives_sum
from traceax._core.operator import (
    Structure,
    common_dtype,
    flatten,
    size,
    unflatten,
)
from traceax._probes.stream import Stream, unit_vectors


class Curvature(eqx.Module):
    """A function `fn(x, args)` of p numbers at a point x of n: a subject of the rule."""

    fn: Callable[[Any, Any], Any]
    x: PyTree[Array]
    args: PyTree

    @property
    def space(self) -> lx.AbstractLinearOperator:
        """What probes are drawn for."""
        return lx.IdentityLinearOperator(jax.eval_shape(lambda: self.x))

    @property
    def result(self) -> Structure:
        return eqx.filter_eval_shape(self.fn, self.x, self.args)

    def basis(self, batch_size: int | None) -> Stream:
        """Probes of which nothing is random, and whose sum is exact."""
        return unit_vectors(self.space, batch_size or size(self.space))

    def along(self, block: Inexact[Array, "n k"]) -> Inexact[Array, " p"]:
        """The sum of the second derivatives along all columns."""
        structure = self.space.in_structure()
        cut = jax.vmap(partial(unflatten, structure=structure), in_axes=1)
        total = second_derivatives_sum(lambda x: self.fn(x, self.args), self.x, cut(block))
        return flatten(total, common_dtype(total))

    def along_each(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "p k"]:
        return jax.vmap(lambda column: self.along(column[:, None]), 1, 1)(block)
