"""Answers from n applications, where nothing is random."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import lineax as lx

from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Structure, size
from traceax._core.rule import Outcome, Readout, estimate
from traceax._probes.meters import SILENT, ProgressMeter
from traceax._probes.stream import unit_vectors
from traceax._traces.weights import MeanForm


def exact_trace(
    operator: lx.AbstractLinearOperator,
    batch_size: int | None = None,
    meter: ProgressMeter = SILENT,
) -> Estimate:
    n = size(operator)
    readout = MeanForm(unit_vectors(operator, batch_size or n), 1.0)
    return exactly(operator, readout, n, meter=meter)


def exactly(
    operator: lx.AbstractLinearOperator,
    readout: Readout,
    num_matvecs: int,
    structure: Structure | None = None,
    meter: ProgressMeter = SILENT,
) -> Estimate:
    """`meter`: for readouts that take batches, and show them to it."""
    degrees, algorithm = float(num_matvecs), partial(_read, meter=meter)
    return estimate(algorithm, operator, readout, num_matvecs, degrees, structure)


def _read(linear_map: LinearMap, readout: Any, *, meter: ProgressMeter) -> Outcome:
    value = readout(linear_map) if meter is SILENT else readout(linear_map, meter)
    return Outcome(value, jnp.zeros_like(value.real), readout)
