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

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._linalg.basis import Basis, downdate, orthonormalise
from traceax._linalg.columns import column_dots, column_norms_squared
from traceax._traces.weights import TraceWeight


class LeaveOneOut(NamedTuple):
    """What sketch and probes alone give; columns, one a probe."""

    probes: Inexact[Array, "n k"]
    basis: Basis
    directions: Inexact[Array, "k k"]
    distances: Float[Array, " k"]
    x: Inexact[Array, "k k"]
    mu: Inexact[Array, "n k"]
    resphering: Float[Array, " k"]

    def trace_weight(self, weights: Float[Array, " k"] | None = None) -> TraceWeight:
        """The mean of P_i + c_i mu_i mu_i*, in 2k columns; `weights`, of sum 1, make it a
        weighted one."""
        k = self.x.shape[0]
        return _trace_weight(self, jnp.full(k, 1 / k) if weights is None else weights)


def _trace_weight(loo: LeaveOneOut, weights: Float[Array, " k"]) -> TraceWeight:
    q, s = loo.basis.columns, loo.directions
    weights = weights.astype(loo.resphering.dtype)
    kept = q - (q @ s) @ (s * weights[None, :]).conj().T
    left = [kept, loo.mu * (loo.resphering * weights)[None, :]]
    return TraceWeight(jnp.hstack(left), jnp.hstack([q, loo.mu]))


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
