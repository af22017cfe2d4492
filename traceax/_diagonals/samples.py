"""Estimates of a diagonal, one for each probe that is left out."""

from __future__ import annotations

import equinox as eqx
import jax
from jaxtyping import Array, Float, Inexact

from traceax._linalg.columns import mean
from traceax._linalg.jackknife import shared_error


class Samples(eqx.Module):
    """Everything over `scale`."""

    values: Inexact[Array, "n k"]
    rounding: Float[Array, " n"]
    scale: Float[Array, ""]

    def judge(self) -> tuple[Inexact[Array, " n"], Float[Array, " n"]]:
        """Value and standard error of each entry."""
        return _judge(self)


@jax.jit
def _judge(samples: Samples) -> tuple[Inexact[Array, " n"], Float[Array, " n"]]:
    error = shared_error(samples.values, samples.rounding)
    return samples.scale * mean(samples.values), samples.scale * error
