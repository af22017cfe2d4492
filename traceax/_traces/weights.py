"""Readouts: what an operator is read through, with frozen blocks. See `rule`.

Each is a module whose blocks are constants, called on a `LinearMap` B.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from traceax._core.operator import LinearMap
from traceax._probes.meters import SILENT, ProgressMeter
from traceax._probes.stream import Stream


class TraceWeight(eqx.Module):
    """tr B = E <B, L R*>, the sum over entries of conj(L) o (B R)."""

    left: Inexact[Array, "n r"]
    right: Inexact[Array, "n r"]

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, ""]:
        return jnp.sum(self.left.conj() * linear_map(self.right))


class MeanForm(eqx.Module):
    """tr B = E z* B z: `share` times the sum over probes z."""

    probes: Stream
    share: float = eqx.field(static=True)

    def __call__(
        self, linear_map: LinearMap, meter: ProgressMeter = SILENT
    ) -> Inexact[Array, ""]:
        def forms(z: Inexact[Array, "n b"]) -> Inexact[Array, ""]:
            return jnp.sum(z.conj() * linear_map(z))

        return self.share * self.probes.reduce(forms, meter=meter)
