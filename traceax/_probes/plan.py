"""How a budget becomes probes, and probes become independent samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.checks import check_batch_size, check_samples
from traceax._core.coded import by_value
from traceax._core.operator import size, skeleton
from traceax._linalg.columns import mean
from traceax._linalg.jackknife import standard_error
from traceax._probes.draw import draw, draw_samples
from traceax._probes.samplers import (
    Sampler,
    comes_in_samples,
    population,
    probes_a_sample,
)
from traceax._probes.stream import Stream, all_at_once


class Plan(NamedTuple):
    """Probes come as samples of a number of probes each; `shrink` is the factor by which
    samples that exclude each other bring down the standard error of their mean."""

    num_samples: int
    num_probes: int
    shrink: float

    def totals(self, by_probe: Inexact[Array, "*values k"]) -> Inexact[Array, "*values _"]:
        shape = (*by_probe.shape[:-1], -1, self.num_probes // self.num_samples)
        return jnp.sum(by_probe.reshape(shape), axis=-1)

    def error_of_mean(
        self, by_probe: Inexact[Array, "*values k"], rounding: Float[Array, "*values"]
    ) -> Float[Array, "*values"]:
        return self.mean_and_error(by_probe, rounding)[1]

    @partial(jax.jit, static_argnums=0)
    def mean_and_error(
        self, by_probe: Inexact[Array, "*values k"], rounding: Float[Array, "*values"]
    ) -> tuple[Inexact[Array, "*values"], Float[Array, "*values"]]:
        average = mean(by_probe)
        deviations = by_probe - average[..., None]
        spread = self.totals(deviations * (self.num_samples / self.num_probes))
        return average, standard_error(self.shrink * spread, rounding)


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
    how = partial(draw_samples, name=name, sampler=sampler, operator=skeleton(operator))
    if batch >= count:
        return all_at_once(_at_once(by_value(how), key, count), group)
    return Stream(jax.random.split(key, count), how, count, group, batch)


@eqx.filter_jit
def _at_once(
    how: Callable[[PRNGKeyArray], Inexact[Array, "n k"]], key: PRNGKeyArray, count: int
) -> Inexact[Array, "n k"]:
    return how(jax.random.split(key, count))
