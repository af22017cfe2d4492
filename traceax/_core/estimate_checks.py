"""Checks of estimates that users give back."""

from __future__ import annotations

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp

from traceax._core.estimate import Estimate


def check_parts(name: str, estimates: object) -> None:
    """A sequence of estimates of one quantity."""
    if not isinstance(estimates, Sequence):
        raise TypeError(
            f"traceax.{name}(estimates=...) must be a sequence of estimates, or a batch of "
            f"them, but got {type(estimates).__name__}. Pass a list, or what jax.vmap "
            "returned."
        )
    if not estimates:
        raise ValueError(
            f"traceax.{name}(estimates=...) must hold at least one estimate, but got none. "
            "Nothing can be told from nothing."
        )
    for place, part in enumerate(estimates):
        if not isinstance(part, Estimate):
            raise TypeError(
                f"traceax.{name}(estimates=...) must hold estimates, but got "
                f"{type(part).__name__} as number {place}. Keep what the estimators "
                "return, not its `value`."
            )
        if _shapes(part) != _shapes(estimates[0]):
            raise ValueError(
                f"traceax.{name}(estimates=...) must be of one quantity, but number "
                f"{place} has the value {_described(part)}, number 0 "
                f"{_described(estimates[0])}. Pool each quantity with its own."
            )


def check_batch(name: str, estimates: Estimate) -> None:
    """One estimate, of which every leaf has a leading axis of runs."""
    leaves = jax.tree.leaves((estimates.value, estimates.standard_error))
    runs = {jnp.shape(leaf)[:1] for leaf in leaves}
    counts = jnp.shape(estimates.num_matvecs), jnp.shape(estimates.degrees_of_freedom)
    if len(runs) != 1 or runs == {()} or not set(counts) & runs or max(runs)[0] == 0:
        raise ValueError(
            f"traceax.{name}(estimates=...) must be a sequence of estimates, or one whose "
            "leaves, num_matvecs among them, have a leading axis of runs, but got "
            f"{_described(estimates)} with num_matvecs of shape {counts[0]}. Pass a list, "
            "or what jax.vmap over keys returned."
        )


def _shapes(part: Estimate) -> object:
    leaves, structure = jax.tree.flatten(part.value)
    return structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def _described(part: Estimate) -> str:
    return eqx.tree_pformat(part.value, short_arrays=True)
