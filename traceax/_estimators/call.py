"""The door that every public function goes through.

`begin` checks the arguments and makes the operator canonical, once. It returns a `Call`,
which draws probes and answers exactly if the budget reaches n. `Call.finish` runs an
algorithm under the derivative rule (`_core.rule`), which compiles it, and turns the outcome
into an `Estimate`. A public function reads like this:

    call = begin("xtrace", operator, key, num_matvecs, least=2, sampler=sampler)
    return call.exact() if call.is_exact else estimate_by_xtrace(call)

    k = call.num_matvecs // 2
    return call.finish(_xtrace, call.draw(k), method="xtrace", spent=2 * k)

An automatic choice is an `if` that passes the call on to the function that it chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray

from traceax._core import checks
from traceax._core.canonical import hidden
from traceax._core.estimate import Estimate
from traceax._core.keys import BLOCKS, keys_of
from traceax._core.operator import (
    DOUBLE,
    LinearMap,
    Operator,
    working_dtype,
)
from traceax._core.rule import Algorithm, Outcome, Subject, run
from traceax._core.vectors import Structure
from traceax._estimators.readouts import TOTAL, Batches, Forms, Read, Reduce, each
from traceax._probes.draw import Draws, Takes, checked_sampler, coloured, draw
from traceax._probes.probing import Neighbourhood, neighbourhood_of
from traceax._probes.samplers import Sampler, SamplerLike
from traceax._probes.stream import (
    SILENT,
    ProgressMeter,
    SamplingDesign,
    Stream,
    Units,
    checked_meter,
    design_of,
)

# Up to this dimension, a batch of n matvecs takes about as long as a batch of a few.
SMALL = 64


Blocks = tuple[Inexact[Array, "n _"], ...]


class Streamed(eqx.Module):
    """Independent samples, which are read one batch at a time.

    `probes` yields the blocks of probes. `neighbourhood` is the graph that `probing` has
    coloured, from which its error bar is computed, and None for other samplers. `meter`
    shows the progress, and `design` says how probes are grouped into samples.
    """

    probes: Stream
    neighbourhood: Neighbourhood | None
    meter: ProgressMeter
    design: SamplingDesign = eqx.field(static=True)

    @property
    def num_matvecs(self) -> int:
        tested = self.neighbourhood is not None and self.neighbourhood.weights is not None
        return self.design.num_probes + tested


@dataclass(frozen=True)
class Call:
    """The checked arguments of a public function.

    `name` is the name of that function, which error messages contain. `num_matvecs` is the
    budget. `num_checks` is the number of matvecs that are spent on measuring the noise of
    matvecs (see `measured`). They have been subtracted from the budget. `sampler` is None
    if neither the user nor the function has named one yet. `reduce` says what is read: the
    trace, the diagonal or sums over leaves. `finished` is a Krylov run that the user has
    passed in place of an operator.
    """

    name: str
    operator: Operator
    key: Any  # one random key, or None with a finished run
    num_matvecs: int
    sampler: Sampler | None = None
    batch_size: int | None = None
    meter: ProgressMeter = SILENT
    num_checks: int = 0
    reduce: Reduce = TOTAL
    finished: Any = None

    @property
    def num_exact(self) -> int:
        """The number of matvecs that an exact answer takes.

        They are matvecs of the adjoint if the operator has fewer rows than columns.
        """
        return min(self.operator.in_size(), self.operator.out_size())

    @property
    def is_exact(self) -> bool:
        return self.num_matvecs >= self.num_exact

    @property
    def resphere(self) -> bool:
        """Say whether a projected probe may be rescaled to its expected length.

        That is right for rotation-invariant probes only.
        """
        return self.sampler is not None and self.sampler.rotation_invariant

    @property
    def source(self) -> Sampler:
        assert self.sampler is not None, "neither the user nor the function named a sampler"
        return self.sampler

    @property
    def group(self) -> int:
        """The number of probes that make one sample."""
        return 1 if self.sampler is None else self.sampler.group

    def in_batches(self, batch_size: int | None, progress_meter: Any) -> Call:
        """Take `batch_size` probes at a time, or all if it is None, and show progress."""
        batch_size = checks.check_batch_size(self.name, batch_size, 1)
        meter = checked_meter(self.name, progress_meter)
        return replace(self, batch_size=batch_size, meter=meter)

    def using(self, sampler: Sampler) -> Call:
        """Draw from this sampler if the user has named none."""
        return self if self.sampler is not None else replace(self, sampler=sampler)

    def on(self, operator: Operator) -> Call:
        """Replace the operator, which is applied and for which probes are drawn."""
        return replace(self, operator=operator)

    def reading(self, reduce: Reduce) -> Call:
        """Estimate what `reduce` makes of the diagonal, in the place of the trace."""
        return replace(self, reduce=reduce)

    def measured(self) -> Call:
        """Set two matvecs of the budget aside to measure the noise of matvecs.

        Algorithms whose samples do not show this noise need the measurement. It is made in
        single precision only, and only if it takes at most a tenth of the budget.
        """
        if LinearMap(self.operator).eps <= DOUBLE or self.num_matvecs < 20:
            return self
        return replace(self, num_matvecs=self.num_matvecs - 2, num_checks=2)

    def draw(self, *counts: int) -> Blocks:
        """Draw a block of independent probes for each count, each with its own key."""
        several = len(counts) > 1
        keys = keys_of(self.key, len(counts), BLOCKS) if several else [self.key]
        one = partial(draw, self.name, self.source, operator=self.operator)
        return tuple(one(key, num_probes=n) for key, n in zip(keys, counts, strict=True))

    def stream(self) -> Streamed:
        """Draw as many independent samples as the budget allows, in batches.

        All probes are drawn at once, or each batch when it is needed. The second way needs
        a `batch_size`, and a sampler of independent samples.
        """
        sampler, space = self.source, self.operator.in_structure()
        design = design_of(self.name, self.operator.in_size(), self.num_matvecs, sampler)
        count, group = design.num_samples, design.group
        checks.check_batch_size(self.name, self.batch_size, group)
        batch = count if self.batch_size is None else self.batch_size // group
        if batch < count and sampler.independent:
            draws = Draws(self.name, sampler, space, group)
            probes = Stream(keys_of(self.key, count), draws, count, batch)
        else:
            (block,) = self.draw(design.num_probes)
            probes = Stream(block, None, count, batch)
        near = neighbourhood_of(sampler, space)
        if near is not None and count == 1 and design.num_probes < self.num_matvecs:
            near = near.tested(self.key, working_dtype(self.operator))
        return Streamed(probes, near, self.meter, design)

    def exact(self) -> Estimate:
        """Answer from every unit vector."""
        return self.exact_by(Forms(self.reduce.fn))

    def exact_by(
        self, read: Read, *, subject: Subject | None = None, units: Stream | None = None
    ) -> Estimate:
        """Answer exactly, by applying the operator to every unit vector.

        If the operator has fewer rows than columns, its adjoint is applied instead.
        `read(subject, block)` returns the sum over the unit vectors of one block. The
        `subject` is the operator, as a `LinearMap`, unless another one is given. `units`
        yields the blocks, by default all unit vectors in batches of `batch_size`.
        """
        n, dtype = self.num_exact, working_dtype(self.operator)
        if units is None:
            units = Stream(jnp.arange(n), Units(n, dtype), n, self.batch_size or n)
        readout = Batches(units, jnp.ones((), jnp.finfo(dtype).dtype), read)
        algorithm, count = partial(_read_all, meter=self.meter), units.num_samples
        how = {"spent": count, "degrees": count, "method": "exact"}
        return self.finish(algorithm, readout, subject=subject, **how)

    def finish(
        self,
        algorithm: Algorithm,
        probes: Any,
        *,
        spent: int | None = None,
        degrees: float | None = None,
        method: str = "",
        structure: Structure | None = None,
        subject: Subject | None = None,
    ) -> Estimate:
        """Run `algorithm(subject, probes)` under the derivative rule.

        The subject is the operator, as a `LinearMap`, unless another one is given. `spent`
        is the number of matvecs that the algorithm takes, by default the whole budget.
        `degrees` is the number of degrees of freedom of its error bar, by default one less
        than there are probes in the blocks `probes`. `method` is the function that the
        estimate names, by default the one that was called. `structure` is the structure
        into whose leaves the results are cut, by default that of `reduce`.
        """
        spent = self.num_matvecs if spent is None else spent
        checked, is_real = self.num_checks > 0, self.reduce.is_real
        subject = subject or LinearMap(self.operator, checked, is_real)
        outcome = run(algorithm, subject, probes)
        parts = outcome.value, outcome.standard_error, outcome.quadrature_error
        reduce = self.reduce if structure is None else Reduce(each, structure)
        value, error, gap = jax.tree.map(reduce.shaped, parts)
        if degrees is None:
            degrees = max(sum(block.shape[1] for block in probes) - 1, 1)
        name = method or self.name
        name = name if name == "exact" else coloured(name, self.sampler)
        spent = spent + self.num_checks
        made = Estimate(value, error, spent, float(degrees), method=name)
        return made if gap is None else replace(made, quadrature_error=gap)


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
    """Check the arguments of the public function `name`, and make its operator canonical.

    `argument` is the name of the argument that holds the budget. The budget must be at
    least `least`, or n if n is smaller. The operator must be `square`, if that is true.
    `takes` are the samplers that the function can use; others are refused.
    """
    operator = checks.check_operator(name, operator, square=square)
    checks.check_key(name, key, operator)
    operator = hidden(operator, key)
    made = None if sampler is None else checked_sampler(name, sampler, takes)
    enough = min(operator.in_size(), operator.out_size())
    budget = checks.check_count(name, argument, num_matvecs, min(least, enough))
    return Call(name, operator, key, budget, made)


def _read_all(subject: Subject, readout: Batches, *, meter: ProgressMeter) -> Outcome:
    """Read all unit vectors. The result is exact, so its error is zero."""
    value = readout(subject, meter)
    return Outcome(value, jnp.zeros_like(value.real), readout)
