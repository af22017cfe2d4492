"""The door that every public function goes through.

`begin` checks the arguments and makes the operator canonical, once. The `Call` that it
returns draws probes, answers exactly if the budget reaches n, and finishes: it runs an
algorithm under the derivative rule (`_core.rule`), which compiles it, and makes an
`Estimate` of the outcome. A public function reads like this:

    call = begin("xtrace", operator, key, num_matvecs, least=2, sampler=sampler)
    return call.exact(TOTAL) if call.is_exact else estimate_by_xtrace(call)

    k = call.num_matvecs // 2
    return call.finish(_xtrace, call.draw(k), method="xtrace", spent=2 * k, degrees=k - 1)

An automatic choice is an `if` that passes its call on to the function that it chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray

from traceax._core import checks, rule
from traceax._core.estimate import Estimate
from traceax._core.operator import (
    DOUBLE,
    LinearMap,
    Operator,
    is_negative,
    is_positive,
    unit_roundoff,
    working_dtype,
)
from traceax._core.rule import Algorithm, Outcome, Subject
from traceax._core.vectors import Structure
from traceax._estimators.readouts import Batches, Forms, Reduce
from traceax._probes.draw import Takes, check_dependence, coloured, draw
from traceax._probes.probing import Neighbourhood, neighbourhood_of
from traceax._probes.samplers import Sampler, SamplerLike, as_sampler
from traceax._probes.stream import (
    SILENT,
    ProgressMeter,
    SamplingDesign,
    Stream,
    checked_meter,
    design_of,
    stream,
    unit_vectors,
)

# Up to this dimension a batch of n matvecs takes as long as a batch of a few.
SMALL = 64


class Streamed(eqx.Module):
    """Independent samples, a batch at a time; `neighbourhood` is that of `probing`."""

    probes: Stream
    neighbourhood: Neighbourhood | None
    meter: ProgressMeter
    design: SamplingDesign = eqx.field(static=True)


@dataclass(frozen=True)
class Call:
    """The checked arguments of a public function; messages name it.

    `num_checks` are the matvecs that measure the noise of matvecs (`measured`). They are no
    longer in the budget `num_matvecs`."""

    name: str
    operator: Operator
    key: PRNGKeyArray
    num_matvecs: int
    sampler: Sampler | None = None
    batch_size: int | None = None
    meter: ProgressMeter = SILENT
    num_checks: int = 0

    @property
    def num_exact(self) -> int:
        """The matvecs of an exact answer: those of the adjoint if rows are fewer."""
        return min(self.operator.in_size(), self.operator.out_size())

    @property
    def is_exact(self) -> bool:
        return self.num_matvecs >= self.num_exact

    @property
    def is_semidefinite(self) -> bool:
        return is_positive(self.operator) or is_negative(self.operator)

    @property
    def resphere(self) -> bool:
        """Whether what is projected of a probe may be rescaled to its expected length."""
        return self.sampler is not None and self.sampler.rotation_invariant

    @property
    def source(self) -> Sampler:
        assert self.sampler is not None, "neither the user nor the function named a sampler"
        return self.sampler

    @property
    def group(self) -> int:
        """How many probes make one sample."""
        return 1 if self.sampler is None else self.sampler.group

    def in_batches(self, batch_size: int | None, progress_meter: Any) -> Call:
        """Take so many probes at a time, None for all, and show progress."""
        checks.check_batch_size(self.name, batch_size, 1)
        meter = checked_meter(self.name, progress_meter)
        return replace(self, batch_size=batch_size, meter=meter)

    def using(self, sampler: Sampler) -> Call:
        """Draw from this sampler if the user has named none."""
        return self if self.sampler is not None else replace(self, sampler=sampler)

    def on(self, operator: Operator) -> Call:
        """Apply, and draw probes for, another operator."""
        return replace(self, operator=operator)

    def measured(self) -> Call:
        """Spend two matvecs on measuring the noise of matvecs, for algorithms whose samples
        do not show it. Only in single precision, and at most a tenth of the budget."""
        if unit_roundoff(self.operator) <= DOUBLE or self.num_matvecs < 20:
            return self
        return replace(self, num_matvecs=self.num_matvecs - 2, num_checks=2)

    def draw(self, *counts: int) -> tuple[Inexact[Array, "n _"], ...]:
        """Draw a block of independent probes for each count, with a key of its own."""
        keys = [self.key] if len(counts) == 1 else jax.random.split(self.key, len(counts))
        return tuple(
            draw(self.name, self.source, key, self.operator, count)
            for key, count in zip(keys, counts, strict=True)
        )

    def stream(self) -> Streamed:
        """Draw as many independent samples as the budget allows, in batches."""
        sampler, operator = self.source, self.operator
        design = design_of(self.name, operator.in_size(), self.num_matvecs, sampler)
        count, batch = design.num_probes, self.batch_size
        probes = stream(self.name, operator, self.key, count, sampler, batch)
        neighbourhood = neighbourhood_of(sampler, operator.in_structure())
        return Streamed(probes, neighbourhood, self.meter, design)

    def exact(self, reduce: Reduce) -> Estimate:
        """Answer from every unit vector."""
        return self.exact_by(Forms(reduce.fn), reduce.structure)

    def exact_by(
        self,
        read: Callable[[Any, Array], Array],
        structure: Structure | None = None,
        *,
        subject: Subject | None = None,
        units: Stream | None = None,
    ) -> Estimate:
        """Answer from every unit vector: all columns of the operator, or the rows if these
        are fewer. `read(subject, block)` is the sum over a block of them."""
        dtype = working_dtype(self.operator)
        if units is None:
            units = unit_vectors(self.num_exact, dtype, self.batch_size or self.num_exact)
        readout = Batches(units, jnp.ones((), jnp.finfo(dtype).dtype), read)
        algorithm, spent = partial(_read_all, meter=self.meter), units.num_probes
        return rule.estimate(
            algorithm,
            LinearMap(self.operator) if subject is None else subject,
            readout,
            method="exact",
            spent=spent,
            degrees=spent,
            structure=structure,
        )

    def finish(
        self,
        algorithm: Algorithm,
        probes: Any,
        *,
        spent: int,
        degrees: float,
        method: str = "",
        structure: Structure | None = None,
        subject: Subject | None = None,
    ) -> Estimate:
        """Run `algorithm(subject, probes)` under the derivative rule. The subject is the
        operator, as a `LinearMap`, unless another one is given. `method` is the function
        that the estimate names, by default the one that was called."""
        if self.num_checks:
            algorithm = partial(_with_noise, algorithm)
        return rule.estimate(
            algorithm,
            LinearMap(self.operator) if subject is None else subject,
            probes,
            method=coloured(method or self.name, self.sampler),
            spent=spent + self.num_checks,
            degrees=degrees,
            structure=structure,
        )


def begin(
    name: str,
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    argument: str = "num_matvecs",
    least: int = 1,
    square: bool = True,
    sampler: SamplerLike | None = None,
    takes: Takes = "independent",
) -> Call:
    """Check the arguments of the public function `name`. `argument` is the name of its
    budget, of which at least `least` is needed, unless n is less. `takes` are the samplers
    that the function can use."""
    operator = checks.check_operator(name, operator, square=square)
    checks.check_key(name, key, operator)
    made = None if sampler is None else as_sampler(name, sampler)
    if made is not None:
        check_dependence(name, made, takes)
    enough = min(operator.in_size(), operator.out_size())
    checks.check_count(name, argument, num_matvecs, min(least, enough))
    return Call(name, operator, key, num_matvecs, made)


def _read_all(subject: Subject, readout: Batches, *, meter: ProgressMeter) -> Outcome:
    """Nothing is random."""
    value = readout(subject, meter)
    return Outcome(value, jnp.zeros_like(value.real), readout)


def _with_noise(run: Algorithm, linear_map: LinearMap, probes: Any) -> Outcome:
    """Run an algorithm with a linear map that knows its noise, by one of its probes."""
    return run(linear_map.measured(jax.tree.leaves(probes)[0][:, 0]), probes)
