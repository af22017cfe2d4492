"""From a request to an estimate: the driver of traces, leaf sums, diagonals and norms.

A `Method` is an algorithm: its target, how it turns a budget into probes, and a function
`run(linear_map, probes, target) -> Outcome`. `estimate` does the rest: checks, exact
answers, draws, batches, progress, and the derivative rule, which compiles (`_core.rule`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Inexact, PRNGKeyArray

from traceax._core import rule
from traceax._core.checks import check_batch_size, check_request, check_semidefinite
from traceax._core.estimate import Estimate
from traceax._core.operator import DOUBLE, LinearMap, Operator, unit_roundoff
from traceax._core.rule import Outcome
from traceax._estimators.readouts import Target, cost_of_exact
from traceax._probes.draw import (
    check_independent,
    coloured,
    draw,
    for_sketch,
    is_rotation_invariant,
)
from traceax._probes.probing import Neighbourhood, neighbourhood_of
from traceax._probes.samplers import Sampler
from traceax._probes.stream import (
    ProgressMeter,
    SamplingDesign,
    Stream,
    checked_meter,
    design_and_draw,
)

# Up to this dimension a batch of n applications takes as long as a batch of a few.
SMALL = 64


class Request(NamedTuple):
    """The checked arguments of a call; messages name the public function `name`."""

    name: str
    operator: Operator
    key: PRNGKeyArray
    num_matvecs: int
    sampler: Sampler
    batch_size: int | None
    meter: ProgressMeter


class Drawn(NamedTuple):
    """Probes, the applications that they take, and the degrees of freedom of the error."""

    probes: Any
    num_matvecs: int
    degrees_of_freedom: float


class Method(NamedTuple):
    """An algorithm. `draw` makes probes of a budget of at least `minimum`; `sampler` is its
    default, None for that of sketches; `independent` says that probes must be; `instead`
    names an estimator for operators that are not semidefinite, if it needs one that is;
    `acts_on` is the operator that it applies; `measures` says that its samples do not show
    the noise of matvecs, which is then measured (`LinearMap.measured`)."""

    name: str
    target: Target
    run: Callable[..., Outcome]
    draw: Callable[[Request], Drawn]
    minimum: int = 1
    sampler: Sampler | None = None
    independent: bool = True
    instead: str = ""
    acts_on: Callable[[Operator], Operator] | None = None
    measures: bool = False

    def checks(self, operator: Operator, num_matvecs: int) -> int:
        """The matvecs by which noise is measured: two, in single precision, if they are at
        most a tenth of the budget."""
        single = unit_roundoff(operator) > DOUBLE
        return 2 if self.measures and single and num_matvecs >= 20 else 0


def estimate(
    method: Method,
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    sampler: Sampler | None = None,
    batch_size: int | None = None,
    progress_meter: ProgressMeter | None = None,
    *,
    name: str = "",
) -> Estimate:
    """The estimate of a method; messages name `name` (default: the method's)."""
    name, target = name or method.name, method.target
    square, least = target.is_square, method.minimum
    operator = check_request(name, operator, key, num_matvecs, least, square=square)
    if method.instead:
        check_semidefinite(name, operator, method.instead)
    acted = operator if method.acts_on is None else method.acts_on(operator)
    chosen = for_sketch(method.sampler if sampler is None else sampler, acted)
    if method.independent:
        check_independent(name, chosen)
    check_batch_size(name, batch_size, 1)
    meter = checked_meter(name, progress_meter)
    if num_matvecs >= cost_of_exact(operator):
        return target.exact(operator, batch_size, meter)
    checks = method.checks(acted, num_matvecs)
    request = Request(name, acted, key, num_matvecs - checks, chosen, batch_size, meter)
    probes, spent, degrees = method.draw(request)
    algorithm = partial(method.run, target=target)
    algorithm = partial(_measured, algorithm) if checks else algorithm
    name, structure = coloured(method.name, chosen), target.structure(operator)
    subject, spent = target.subject(acted), spent + checks
    return rule.estimate(algorithm, subject, probes, name, spent, degrees, structure)


def _measured(run: Callable[..., Outcome], linear_map: LinearMap, probes: Any) -> Outcome:
    """Run an algorithm with a linear map that knows its noise, by one of its probes."""
    return run(linear_map.measured(jax.tree.leaves(probes)[0][:, 0]), probes)


class Probes(eqx.Module):
    """Blocks of probes, and whether what is projected of them may be resphered."""

    blocks: tuple[Inexact[Array, "n _"], ...]
    resphere: bool = eqx.field(static=True)


class InBlocks(NamedTuple):
    """Draws blocks of probes: how many are in each is `split(num_matvecs)`, `costs` are the
    applications that one of each takes; `degrees` are those of the last block's size."""

    split: Callable[[int], tuple[int, ...]]
    costs: tuple[int, ...]
    degrees: Callable[[int], float]

    def __call__(self, request: Request) -> Drawn:
        counts = self.split(request.num_matvecs)
        key, several = request.key, len(counts) > 1
        keys = jax.random.split(key, len(counts)) if several else [key]
        name, sampler, operator = request.name, request.sampler, request.operator
        pairs = zip(keys, counts, strict=True)
        blocks = tuple(draw(name, sampler, key, operator, count) for key, count in pairs)
        spent = sum(c * k for c, k in zip(self.costs, counts, strict=True))
        probes = Probes(blocks, is_rotation_invariant(sampler))
        return Drawn(probes, spent, self.degrees(counts[-1]))


def one_block(
    cost: int, degrees: Callable[[int], float] = lambda k: max(k - 1, 1)
) -> InBlocks:
    """As many probes as there are for `cost` applications each."""
    return InBlocks(lambda num_matvecs: (num_matvecs // cost,), (cost,), degrees)


class Streamed(eqx.Module):
    """Independent samples, a batch at a time; `neighbourhood` is that of `probing`."""

    probes: Stream
    neighbourhood: Neighbourhood | None
    meter: ProgressMeter
    design: SamplingDesign = eqx.field(static=True)


class InBatches(NamedTuple):
    """Draws independent samples, one application a probe."""

    degrees: Callable[[SamplingDesign, bool], float]

    def __call__(self, request: Request) -> Drawn:
        design, probes = design_and_draw(*request[:-1])
        neighbourhood = neighbourhood_of(request.sampler, request.operator.in_structure())
        streamed = Streamed(probes, neighbourhood, request.meter, design)
        degrees = self.degrees(design, neighbourhood is not None)
        return Drawn(streamed, design.num_probes, degrees)
