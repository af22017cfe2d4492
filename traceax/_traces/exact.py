"""Answers from n applications, where nothing is random."""

from __future__ import annotations

import jax.numpy as jnp
import lineax as lx

from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Structure, size
from traceax._core.rule import Outcome, Readout, estimate
from traceax._probes.stream import unit_vectors
from traceax._traces.weights import MeanForm


def exact_trace(
    operator: lx.AbstractLinearOperator, batch_size: int | None = None
) -> Estimate:
    n = size(operator)
    return exactly(operator, MeanForm(unit_vectors(operator, batch_size or n), 1.0), n)


def exactly(
    operator: lx.AbstractLinearOperator,
    readout: Readout,
    num_matvecs: int,
    structure: Structure | None = None,
) -> Estimate:
    degrees = float(num_matvecs)
    return estimate(_read, operator, readout, num_matvecs, degrees, structure)


def _read(linear_map: LinearMap, readout: Readout) -> Outcome:
    value = readout(linear_map)
    return Outcome(value, jnp.zeros_like(value.real), readout)
