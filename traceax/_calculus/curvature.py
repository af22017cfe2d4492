"""Second derivatives of a function along probes."""

from __future__ import annotations

from functools import partial

import jax
import lineax as lx
from jaxtyping import Array, Inexact

from traceax._calculus.sampled import AlongProbes
from traceax._calculus.taylor import second_derivatives_sum
from traceax._core.operator import (
    common_dtype,
    flatten,
    size,
    unflatten,
    working_dtype,
)
from traceax._probes.stream import Stream, unit_vectors


class Curvature(AlongProbes):
    @property
    def space(self) -> lx.AbstractLinearOperator:
        return lx.IdentityLinearOperator(jax.eval_shape(lambda: self.x))

    def basis(self, batch_size: int | None) -> Stream:
        n = size(self.space)
        return unit_vectors(n, working_dtype(self.space), batch_size or n)

    def along(self, block: Inexact[Array, "n k"]) -> Inexact[Array, " p"]:
        structure = self.space.in_structure()
        cut = jax.vmap(partial(unflatten, structure=structure), in_axes=1)
        total = second_derivatives_sum(lambda x: self.fn(x, self.args), self.x, cut(block))
        return flatten(total, common_dtype(total))

    def along_each(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "p k"]:
        return jax.vmap(lambda column: self.along(column[:, None]), 1, 1)(block)
