"""Probes in batches, for estimators that do not need all of them together.

An estimate that is a sum over independent probes can take them in batches. Then only one
batch, its images, and the sums are in memory at any time. Reverse-mode differentiation
would store all probes and all residuals of the matvecs. So each batch is a
`jax.checkpoint`: the derivative draws its probes and applies the operator again. Each
sample has a key of its own, so the numbers are the same for any batch size.

A `SamplingDesign` has the numbers of samples and of probes that a budget pays for, and the
standard error of their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, Shaped

from traceax._core.checks import check_samples, require_type
from traceax._linalg import jackknife
from traceax._linalg.columns import mean
from traceax._linalg.jackknife import ByProbe, Errors
from traceax._probes.probing import DEGREES
from traceax._probes.samplers import Sampler


@runtime_checkable
class ProgressMeter(Protocol):
    """The methods of diffrax's progress meters."""

    def init(self) -> Any: ...
    def step(self, state: Any, progress: Any) -> Any: ...
    def close(self, state: Any) -> Any: ...


class Silent:
    """A progress meter that shows nothing."""

    def init(self, *_: Any, **__: Any) -> Any: ...

    step = close = init


SILENT = Silent()


def checked_meter(name: str, progress_meter: Any) -> ProgressMeter:
    """Check the meter that the user gave. If it is None, return one that shows nothing."""
    meter = SILENT if progress_meter is None else progress_meter
    methods = [getattr(meter, method, None) for method in ("init", "step", "close")]
    is_class, fits = isinstance(meter, type), all(map(callable, methods))
    must = "be a progress meter of diffrax, or have its methods init, step and close"
    got = "a class" if is_class else type(meter).__name__
    cure = "Pass diffrax.TextProgressMeter(), for example."
    require_type(fits and not is_class, name, "progress_meter", must, got, cure)
    return meter


T = TypeVar("T")
Columns = Array


class Stream(eqx.Module):
    """The probes of an estimate: samples of equally many probes, in batches of samples.

    `batch` is the number of samples in a batch. `source` is a block of all probes. If there
    is a function `draw`, `source` has its argument for each sample instead, and each batch
    is drawn when it is needed.
    """

    source: Columns | Shaped[Array, " samples"]
    draw: Callable[[Any], Columns] | None = eqx.field(static=True)
    num_samples: int = eqx.field(static=True)
    batch: int = eqx.field(static=True)

    @property
    def is_whole(self) -> bool:
        """Return whether one batch has all samples."""
        return self.batch >= self.num_samples

    def shown(self, meter: ProgressMeter) -> Stream:
        """Return this stream, in up to twenty batches if a meter would see only one."""
        if meter is SILENT or not self.is_whole:
            return self
        return replace(self, batch=-(-self.num_samples // 20))

    def _scan(self, fn: Callable, carry: T, meter: ProgressMeter) -> tuple[T, Any]:
        """Run `carry, output = fn(carry, columns)` over all batches.

        Return the last carry, and the outputs, joined along their last axis, which is for
        probes.
        """
        if self.is_whole:
            return fn(carry, self._columns(0, self.num_samples))

        def step(carry: T, first: Array, count: int) -> tuple[T, Any]:
            return fn(carry, self._columns(first, count))

        whole, rest = divmod(self.num_samples, self.batch)
        often = jax.checkpoint(partial(step, count=self.batch), prevent_cse=False)

        def shown(both: tuple[T, Any], first: Array) -> tuple[tuple[T, Any], Any]:
            carry, output = often(both[0], first)
            done = (first + self.batch) / self.num_samples
            return (carry, meter.step(both[1], done)), output

        starts = self.batch * jnp.arange(whole)
        (carry, state), outputs = jax.lax.scan(shown, (carry, meter.init()), starts)
        outputs = jax.tree.map(partial(jnp.concatenate, axis=-1), outputs)
        if rest:
            last = jax.checkpoint(partial(step, count=rest))
            carry, output = last(carry, jnp.asarray(self.batch * whole))
            outputs = jax.tree.map(lambda *x: jnp.concatenate(x, axis=-1), outputs, output)
            state = meter.step(state, jnp.asarray(1.0))
        meter.close(state)
        return carry, outputs

    def collect(self, fn: Callable[[Columns], Any], meter: ProgressMeter = SILENT) -> Any:
        """Return `fn` of all batches, joined along the last axis, which is for probes."""
        return self.shown(meter)._scan(lambda _, z: (None, fn(z)), None, meter)[1]

    def reduce(
        self, fn: Callable[..., T], merge: Callable = jnp.add, meter: ProgressMeter = SILENT
    ) -> T:
        """Return the sum of `fn` over all batches.

        `merge` adds two results. It must leave a result unchanged if the other one is zero.
        """
        stream = self.shown(meter)
        if stream.is_whole:
            return fn(self._columns(0, self.num_samples))
        like = jax.eval_shape(lambda: fn(self._columns(0, stream.batch)))
        zeros = jax.tree.map(jnp.zeros_like, like)
        return stream._scan(lambda sums, z: (merge(sums, fn(z)), None), zeros, meter)[0]

    def _columns(self, first: int | Array, count: int) -> Columns:
        """Return the probes of `count` samples, from the sample with number `first` on."""
        if self.draw is not None:
            return self.draw(jax.lax.dynamic_slice_in_dim(self.source, first, count))
        if count == self.num_samples:
            return self.source
        group = self.source.shape[1] // self.num_samples
        return jax.lax.dynamic_slice_in_dim(self.source, first * group, count * group, 1)


class Units(NamedTuple):
    """A function that makes unit vectors from their indices."""

    n: int
    dtype: Any

    def __call__(self, indices: Int[Array, " b"]) -> Columns:
        return jax.nn.one_hot(indices, self.n, axis=0, dtype=self.dtype)


class SamplingDesign(NamedTuple):
    """The numbers of samples and of probes, and the standard error of a mean over them.

    `correction` is the factor by which sampling without replacement reduces this standard
    error, as in a survey. The probes of one sample are also independent of each other, but
    each colour has its own mean. So the standard error of a sum over colours pools the
    spreads within each colour.
    """

    num_samples: int
    num_probes: int
    correction: float

    @property
    def group(self) -> int:
        """The number of probes in one sample."""
        return self.num_probes // self.num_samples

    def degrees(self, has_neighbours: bool = False) -> float:
        """Return the degrees of freedom of the interval of a mean of quadratic forms.

        Neighbour residuals give the error of a single sample of `probing`.
        """
        if has_neighbours and self.num_samples == 1:
            return DEGREES
        return self.group * jackknife.independent_degrees_of_freedom(self.num_samples)

    def totals(self, by_probe: ByProbe) -> Inexact[Array, "*values _"]:
        """Return the sum over the probes of each sample."""
        return jnp.sum(self._by_sample(by_probe), axis=-1)

    def _by_sample(self, by_probe: ByProbe) -> Array:
        """Split the last axis into one for samples and one for the probes of a sample."""
        return by_probe.reshape((*by_probe.shape[:-1], -1, self.group))

    def mean_and_error(self, by_probe: ByProbe, rounding: Errors) -> tuple[Array, Errors]:
        """Return the mean over probes, and its standard error.

        `rounding` is the rounding error of the mean.
        """
        samples = self.correction * self._by_sample(by_probe / self.group)
        return mean(by_probe), jackknife.standard_error_of_parts(samples, rounding)


def design_of(name: str, n: int, num_matvecs: int, sampler: Sampler) -> SamplingDesign:
    """Make the design with as many samples as the budget allows, in n dimensions."""
    check_samples(name, num_matvecs, sampler.group)
    num_samples = num_matvecs // sampler.group
    num_probes = num_samples * sampler.group
    # The finite-population correction.
    population = sampler.population(n) if sampler.population else math.inf
    return SamplingDesign(num_samples, num_probes, (1 - num_probes / population) ** 0.5)
