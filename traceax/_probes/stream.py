"""Probes a batch at a time, for what does not need all of them together.

Estimates that are sums over independent probes can take them in batches: what lives at a
time is one batch, its images, and the sums. A gradient would bring everything back, the
probes and whatever the applications leave for their transposes; so each batch is a
`jax.checkpoint`: drawn and applied again where its derivative is taken. Each sample is
drawn with a key of its own: the numbers are the same in batches of any size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from traceax._probes.meters import SILENT, ProgressMeter

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
