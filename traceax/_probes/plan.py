"""How a budget becomes probes, and probes become independent samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.canonical import compiled
from traceax._core.checks import check_batch_size, check_samples
from traceax._core.operator import size
from traceax._linalg.columns import mean
from traceax._linalg.jackknife import (
    independent_degrees_of_freedom,
    standard_error_of_parts,
)
from traceax._probes.draw import Samples, draw
from traceax._probes.samplers import Sampler
from traceax._probes.stream import Stream, all_at_once
from traceax._probes.traits import comes_in_samples, population, probes_a_sample


class Plan(NamedTuple):
    """Probes come as samples of a number of probes each; `shrink` is the factor by which
    samples that exclude each other bring down the standard error of their mean.

    The probes of one sample are independent, too, but of different means, one for each
    colour: of a sum over them each colour has a spread of its own."""

    num_samples: int
    num_probes: int
    shrink: float

    @property
    def group(self) -> int:
        """Probes a sample."""
        return self.num_probes // self.num_samples

    @property
    def degrees_of_freedom(self) -> float:
        """Of the interval of a mean of quadratic forms."""
        return self.group * independent_degrees_of_freedom(self.num_samples)

    def totals(self, by_probe: Inexact[Array, "*values k"]) -> Inexact[Array, "*values _"]:
        return jnp.sum(self._by_sample(by_probe), axis=-1)

    def _by_sample(self, by_probe: Inexact[Array, "*values k"]) -> Array:
        return by_probe.reshape((*by_probe.shape[:-1], -1, self.group))

    def error_of_mean(
        self, by_probe: Inexact[Array, "*values k"], rounding: Float[Array, "*values"]
    ) -> Float[Array, "*values"]:
        return self.mean_and_error(by_probe, rounding)[1]

    def mean_and_error(
        self, by_probe: Inexact[Array, "*values k"], rounding: Float[Array, "*values"]
    ) -> tuple[Inexact[Array, "*values"], Float[Array, "*values"]]:
        samples = self.shrink * self._by_sample(by_probe / self.group)
        return mean(by_probe), standard_error_of_parts(samples, rounding)


def plan_and_draw(
    name: str,
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int,
    sampler: Sampler,
    batch_size: int | None = None,
) -> tuple[Plan, Stream]:
    group = probes_a_sample(sampler)
    check_samples(name, num_matvecs, group)
    num_samples = num_matvecs // group
    num_probes = num_samples * group
    # The finite-population correction of a survey of k out of m.
    shrink = (1 - num_probes / population(sampler, size(operator))) ** 0.5
    plan = Plan(num_samples, num_probes, shrink)
    return plan, stream(name, operator, key, num_probes, sampler, batch_size)


def stream(
    name: str,
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_probes: int,
    sampler: Sampler,
    batch_size: int | None,
) -> Stream:
    """All probes drawn, if nothing says that they must not live together."""
    group = probes_a_sample(sampler)
    check_batch_size(name, batch_size, group)
    count = num_probes // group
    batch = count if batch_size is None else batch_size // group
    if count == 1 or not comes_in_samples(sampler):
        block = draw(name, sampler, key, operator, num_probes, in_samples=True)
        return Stream(block, None, count, group, batch)
    how = Samples.of(name, sampler, operator.in_structure())
    if batch >= count:
        return all_at_once(compiled(_at_once, how, key, count), group)
    return Stream(jax.random.split(key, count), how, count, group, batch)


def _at_once(
    how: Callable[[PRNGKeyArray], Inexact[Array, "n k"]], key: PRNGKeyArray, count: int
) -> Inexact[Array, "n k"]:
    return how(jax.random.split(key, count))
