"""Sketches that take more probes without loss.

To k probes Omega with Y = A Omega = Q R and Z = A Q come new ones: Y grows by their images,
Q by an orthonormal basis of what is new in these, R stays block triangular, Z grows by the
images of Q's new columns. Nothing that was spent is lost, and the estimate from all probes
is one that a single run with as many could have made.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._core.operator import LinearMap, resolution, size, working_dtype
from traceax._linalg.basis import Basis, extend, orthonormalise
from traceax._linalg.columns import column_dots
from traceax._traces.leave_one_out import leave_one_out_of
from traceax._traces.weights import TraceWeight
from traceax._traces.xnystrace import xnystrace_of
from traceax._traces.xtrace import xtrace_of


class Sketch(NamedTuple):
    """Probes and their images; for XTrace a basis Q of these, and A Q."""

    probes: Inexact[Array, "n k"]
    products: Inexact[Array, "n k"]
    basis: Basis | None = None
    images: Inexact[Array, "n k"] | None = None


class Growing(NamedTuple):
    """XTrace; or XNysTrace, if the operator is known to be `semidefinite`, of -A if `sign`
    is -1."""

    semidefinite: bool
    sign: int
    resphere: bool

    @property
    def matvecs_a_probe(self) -> int:
        return 1 if self.semidefinite else 2

    def enlarge(
        self, linear_map: LinearMap, sketch: Sketch | None, probes: Inexact[Array, "n j"]
    ) -> Sketch:
        products = self.sign * linear_map(probes)
        if self.semidefinite:
            if sketch is None:
                return Sketch(probes, products)
            return Sketch(
                jnp.hstack([sketch.probes, probes]), jnp.hstack([sketch.products, products])
            )
        if sketch is None:
            basis = orthonormalise(products)
            return Sketch(probes, products, basis, linear_map(basis.columns))
        assert sketch.basis is not None
        assert sketch.images is not None
        basis = extend(sketch.basis, products, probes)
        fresh = linear_map(basis.columns[:, sketch.probes.shape[1] :])
        return Sketch(
            jnp.hstack([sketch.probes, probes]),
            jnp.hstack([sketch.products, products]),
            basis,
            jnp.hstack([sketch.images, fresh]),
        )

    def value_and_error(
        self, linear_map: LinearMap, sketch: Sketch
    ) -> tuple[Inexact[Array, ""], Float[Array, ""]]:
        eps, resphere = resolution(linear_map.operator), self.resphere
        if sketch.basis is None or sketch.images is None:
            of_sketch = xnystrace_of(sketch.products, sketch.probes, eps, resphere=resphere)
            return self.sign * of_sketch[0], of_sketch[1]
        loo = leave_one_out_of(sketch.basis, sketch.probes, resphere=resphere)
        return xtrace_of(loo, sketch.products, sketch.images, eps, resphere=resphere)

    def weight(self, sketch: Sketch) -> TraceWeight:
        """The frozen weight of the derivative, which is wanted for the last size only."""
        basis = sketch.basis or orthonormalise(sketch.products)
        loo = leave_one_out_of(basis, sketch.probes, resphere=self.resphere)
        return loo.trace_weight()

    def complete(
        self, linear_map: LinearMap, sketch: Sketch | None
    ) -> tuple[Inexact[Array, ""], TraceWeight, int]:
        """The exact trace, its weight, and what it costs: where A Q is known, only the
        images of a basis of what is orthogonal to Q."""
        n = size(linear_map.operator)
        identity = jnp.eye(n, dtype=working_dtype(linear_map.operator))
        weight = TraceWeight(identity, identity)
        if sketch is None or sketch.basis is None or sketch.images is None:
            value = weight(linear_map)
            return (value.real if self.semidefinite else value), weight, n
        q = sketch.basis.columns
        rest = jnp.linalg.qr(q, mode="complete")[0][:, q.shape[1] :]
        known = jnp.sum(column_dots(q, sketch.images))
        value = known + jnp.sum(column_dots(rest, linear_map(rest)))
        return value, weight, rest.shape[1]
