"""Estimates of a diagonal, one for each probe."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._linalg.columns import mean
from traceax._linalg.jackknife import standard_error, unevenness


class Samples(eqx.Module):
    """Everything over `scale`. Samples that share probes make the variance of their mean up
    to `sharing` times that of independent ones (`jackknife.shared_error`)."""

    values: Inexact[Array, "n k"]
    rounding: Float[Array, " n"]
    scale: Float[Array, ""]
    sharing: Float[Array, ""] | float = 2.0

    def judge(
        self, weights: Float[Array, " k"] | None = None
    ) -> tuple[Inexact[Array, " n"], Float[Array, " n"]]:
        """Value and standard error of each entry; `weights`, of sum 1, make the mean a
        weighted one."""
        return _judge(self, weights)


def _judge(
    samples: Samples, weights: Float[Array, " k"] | None
) -> tuple[Inexact[Array, " n"], Float[Array, " n"]]:
    values, scale = samples.values, samples.scale
    error = standard_error(samples.sharing**0.5 * values, samples.rounding)
    if weights is None:
        return scale * mean(values), scale * error
    error = unevenness(weights) * error
    return scale * jnp.sum(weights[None, :] * values, axis=1), scale * error


def independent(
    products: Inexact[Array, "n k"], scale: Float[Array, ""], eps: float, hermitian: bool
) -> Samples:
    """Hutchinson's."""
    values = products.real if hermitian else products
    return Samples(values, 4 * eps * mean(jnp.abs(products)), scale, 1.0)
