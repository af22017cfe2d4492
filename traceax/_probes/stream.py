"""Probes a batch at a time, for what does not need all of them together.

Estimates that are sums over independent probes can take them in batches: what lives at a
time is one batch, its images, and the sums. A gradient would bring everything back, the
probes and whatever the applications leave for their transposes; so each batch is a
`jax.checkpoint`: drawn and applied again where its derivative is taken. Each sample is
drawn with a key of its own: the numbers are the same in batches of any size.

A `Plan` says how a budget becomes probes, and how these make independent samples. The
progress meters that show how far along the batches are have the methods of diffrax's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, Int, PRNGKeyArray, Shaped

from traceax._core.canonical import compiled
from traceax._core.checks import check_batch_size, check_samples
from traceax._core.operator import size
from traceax._linalg.columns import mean
from traceax._linalg.jackknife import (
    independent_degrees_of_freedom,
    standard_error_of_parts,
)
from traceax._probes.draw import (
    Samples,
    comes_in_samples,
    draw,
    population,
    probes_a_sample,
)
from traceax._probes.samplers import Sampler


@runtime_checkable
class ProgressMeter(Protocol):
    """What diffrax's progress meters do."""

    def init(self) -> Any: ...
    def step(self, state: Any, progress: Any) -> Any: ...
    def close(self, state: Any) -> Any: ...


class Silent:
    """No progress is shown."""

    def init(self) -> Any:
        return None

    def step(self, state: Any, progress: Any) -> Any:
        del progress
        return state

    def close(self, state: Any) -> Any:
        del state


SILENT = Silent()


def checked_meter(name: str, progress_meter: ProgressMeter | None) -> ProgressMeter:
    meter = SILENT if progress_meter is None else progress_meter
    _check(name, meter)
    return meter


def _check(name: str, progress_meter: object) -> None:
    parts = ("init", "step", "close")
    is_class = isinstance(progress_meter, type)
    if is_class or not all(callable(getattr(progress_meter, p, None)) for p in parts):
        raise TypeError(
            f"traceax.{name}(progress_meter=...) must be a progress meter of diffrax, or "
            "an object with its methods init, step and close, but got "
            f"{'a class' if is_class else type(progress_meter).__name__}. Pass "
            "diffrax.TextProgressMeter(), say."
        )


T = TypeVar("T")
Columns = Array


class Stream(eqx.Module):
    """Samples of `group` probes each, of which `batch` samples live at a time.

    `source` is a block of all; or has, for each sample, what `draw` makes it of.
    """

    source: Columns | Shaped[Array, " samples"]
    draw: Callable[[Any], Columns] | None = eqx.field(static=True)
    num_samples: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    batch: int = eqx.field(static=True)

    @property
    def is_whole(self) -> bool:
        """Whether all live together anyway."""
        return self.batch >= self.num_samples

    @property
    def num_probes(self) -> int:
        return self.num_samples * self.group

    def _scan(
        self, fn: Callable[[T, Columns], tuple[T, Any]], carry: T, meter: ProgressMeter
    ) -> tuple[T, Any]:
        """Batches through `fn(carry, columns)`; what it returns besides has a last axis of
        probes, and comes for all of them."""
        if self.is_whole:
            return fn(carry, self._columns(0, self.num_samples))

        def step(carry: T, first: Array, count: int) -> tuple[T, Any]:
            return fn(carry, self._columns(first, count))

        whole, rest = divmod(self.num_samples, self.batch)
        often = jax.checkpoint(partial(step, count=self.batch), prevent_cse=False)

        def shown(both: tuple[T, Any], first: Array) -> tuple[tuple[T, Any], Any]:
            carry, piece = often(both[0], first)
            done = (first + self.batch) / self.num_samples
            return (carry, meter.step(both[1], done)), piece

        starts = self.batch * jnp.arange(whole)
        (carry, seen), pieces = jax.lax.scan(shown, (carry, meter.init()), starts)
        pieces = jax.tree.map(_side_by_side, pieces)
        if rest:
            last = jax.checkpoint(partial(step, count=rest))
            carry, piece = last(carry, jnp.asarray(self.batch * whole))
            pieces = jax.tree.map(_append, pieces, piece)
            seen = meter.step(seen, jnp.asarray(1.0))
        meter.close(seen)
        return carry, pieces

    def collect(self, fn: Callable[[Columns], Any], meter: ProgressMeter = SILENT) -> Any:
        return self._scan(lambda _, columns: (None, fn(columns)), None, meter)[1]

    def reduce(
        self,
        fn: Callable[[Columns], T],
        merge: Callable[[T, T], T] = jnp.add,
        meter: ProgressMeter = SILENT,
    ) -> T:
        """Of sums over batches; `merge` must take zeros for the sum over none."""
        if self.is_whole:
            return fn(self._columns(0, self.num_samples))
        shapes = jax.eval_shape(lambda: fn(self._columns(0, self.batch)))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return self._scan(lambda sums, z: (merge(sums, fn(z)), None), zeros, meter)[0]

    def _columns(self, first: int | Array, count: int) -> Columns:
        if self.draw is not None:
            return self.draw(jax.lax.dynamic_slice_in_dim(self.source, first, count))
        if count == self.num_samples:
            return self.source
        start, width = first * self.group, count * self.group
        return jax.lax.dynamic_slice_in_dim(self.source, start, width, axis=1)


def all_at_once(block: Columns, group: int = 1) -> Stream:
    count = block.shape[1] // group
    return Stream(block, None, count, group, count)


def unit_vectors(n: int, dtype: Any, batch: int) -> Stream:
    """The probes of which nothing is random."""
    return Stream(jnp.arange(n), _Units(n, dtype), n, 1, min(batch, n))


class _Units(NamedTuple):
    n: int
    dtype: Any

    def __call__(self, indices: Int[Array, " b"]) -> Columns:
        return jax.nn.one_hot(indices, self.n, axis=0, dtype=self.dtype)


def _side_by_side(pieces: Array) -> Array:
    moved = jnp.moveaxis(pieces, 0, -2)
    return moved.reshape(*moved.shape[:-2], -1)


def _append(pieces: Array, piece: Array) -> Array:
    return jnp.concatenate([pieces, piece], axis=-1)


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
