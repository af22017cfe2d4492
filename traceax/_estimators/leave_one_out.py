"""Sketches from which each probe in turn is left out.

Notation (Epperly, Tropp and Webber 2024; * the conjugate transpose): Omega holds k probes
w_i, Y = A Omega = Q R is the sketch, P_i the orthogonal projector on the range of Y without
column i. With the directions s_i of `basis.downdate`,

    P_i = Q (I - s_i s_i*) Q*,    x_i = (I - s_i s_i*) Q* w_i,    mu_i = (I - P_i) w_i
                                                                      = w_i - Q x_i.

mu_i is formed explicitly, where the papers' k x k formulas cancel. w_i is independent of
P_i and isotropic, so that E[mu_i mu_i*] = I - P_i; for rotation-invariant probes it may be
rescaled to the length it should have, c_i = (n - k + 1)/|mu_i|^2 ("resphering"), which
removes the variance that comes from its length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._core.operator import LinearMap
from traceax._linalg.basis import Basis, downdate, orthonormalise
from traceax._linalg.columns import column_dots, column_norms_squared, mean
from traceax._linalg.jackknife import root_design_effect, standard_error


class LeaveOneOut(NamedTuple):
    """What sketch and probes alone give; columns, one a probe."""

    probes: Inexact[Array, "n k"]
    basis: Basis
    directions: Inexact[Array, "k k"]
    distances: Float[Array, " k"]
    x: Inexact[Array, "k k"]
    mu: Inexact[Array, "n k"]
    resphering: Float[Array, " k"]


def leave_one_out(
    sketch: Inexact[Array, "n k"], probes: Inexact[Array, "n k"], *, resphere: bool
) -> LeaveOneOut:
    return leave_one_out_of(orthonormalise(sketch), probes, resphere=resphere)


def leave_one_out_of(
    basis: Basis, probes: Inexact[Array, "n k"], *, resphere: bool
) -> LeaveOneOut:
    """`basis` is that of the sketch of `probes`."""
    n, k = probes.shape
    s, distances = downdate(basis)
    w = basis.columns.conj().T @ probes
    x = w - s * column_dots(s, w)[None, :]
    mu = probes - basis.columns @ x
    lengths = column_norms_squared(mu)
    resphering = (n - k + 1) / lengths if resphere else jnp.ones_like(lengths)
    return LeaveOneOut(probes, basis, s, distances, x, mu, resphering)


def outside(
    q: Inexact[Array, "n k"], s: Inexact[Array, "k l"] | None, block: Inexact[Array, "n l"]
) -> Inexact[Array, "n l"]:
    """(I - P_i) b_i for the columns b_i; without directions, (I - Q Q*) b_i."""
    inside = q.conj().T @ block
    if s is not None:
        inside = inside - s * column_dots(s, inside)[None, :]
    return block - q @ inside


class Samples(eqx.Module):
    """Estimates of a diagonal, one for each probe, over `scale`. Samples that share probes
    make the variance of their mean up to `sharing` times that of independent ones
    (`jackknife.shared_error`)."""

    values: Inexact[Array, "n k"]
    rounding: Float[Array, " n"]
    scale: Float[Array, ""]
    sharing: Float[Array, ""] | float = 2.0

    def of(self, target: Any, linear_map: LinearMap) -> Samples:
        """Those of a target, sums over leaves say."""
        values = target.of(self.values, linear_map)
        rounding = target.of(self.rounding, linear_map)
        return Samples(values, rounding, self.scale, self.sharing)

    def value_and_error(
        self, weights: Float[Array, " k"] | None = None
    ) -> tuple[Inexact[Array, " n"], Float[Array, " n"]]:
        """Of each entry; `weights`, of sum 1, make the mean a weighted one."""
        values, scale = self.values, self.scale
        error = standard_error(self.sharing**0.5 * values, self.rounding)
        if weights is None:
            return scale * mean(values), scale * error
        error = root_design_effect(weights) * error
        return scale * jnp.sum(weights[None, :] * values, axis=1), scale * error


def independent(
    products: Inexact[Array, "n k"], scale: Float[Array, ""], eps: float, hermitian: bool
) -> Samples:
    """Hutchinson's."""
    values = products.real if hermitian else products
    return Samples(values, 4 * eps * mean(jnp.abs(products)), scale, 1.0)
