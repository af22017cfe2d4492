"""How estimates print.

A number is shown to two digits of its standard error, an exact one as it is. An array of
more than ten numbers is shown by its shape and the norm of its errors, relative to that of
its values. Values that cannot be read here (traced, abstract, on other machines) print as
Equinox prints any module.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import numpy as np

from traceax._core.canonical import is_concrete

_MOST_SHOWN = 10


def in_words(estimate: Any) -> str:
    """`96.6 ± 3.1 (50 matvecs)`, or a line for each leaf."""
    if not is_here(estimate):
        return eqx.tree_pformat(estimate)
    rows = leaf_rows(estimate)
    total = int(np.sum(np.asarray(estimate.num_matvecs)))  # of a batch, too
    cost = f"({total} matvec{'s' if total != 1 else ''})"
    if len(rows) == 1 and not rows[0][0]:
        return f"{rows[0][1]} {cost}"
    return "\n".join([f"{path}: {words}" for path, words in rows] + [cost])


def formatted(estimate: Any, spec: str) -> str:
    """One number and its error, each by `spec`."""
    if not spec:
        return str(estimate)
    leaves = jax.tree.leaves(estimate.value)
    if not is_here(estimate) or len(leaves) != 1 or np.ndim(leaves[0]):
        shapes = jax.tree.map(np.shape, estimate.value)
        raise TypeError(
            "traceax.Estimate.__format__(spec=...) must be asked of one number whose value "
            f"is there, but got {spec!r} for values of shape {shapes}. Format entries of "
            "`value` and `standard_error`."
        )
    value = np.asarray(leaves[0]).item()
    error = np.asarray(jax.tree.leaves(estimate.standard_error)[0]).item()
    shown = format(value, spec)
    return shown if error == 0 else f"{shown} ± {error:{spec}}"


def is_here(estimate: Any) -> bool:
    """Whether every number in it can be looked at."""

    def here(leaf: Any) -> bool:
        if isinstance(leaf, jax.Array):
            return leaf.is_fully_addressable and not leaf.is_deleted()
        return isinstance(leaf, int | float | complex | np.ndarray | np.generic)

    leaves = jax.tree.leaves(estimate)
    same = jax.tree.structure(estimate.value) == jax.tree.structure(estimate.standard_error)
    return bool(leaves) and same and is_concrete(leaves) and all(map(here, leaves))


def leaf_rows(estimate: Any) -> list[tuple[str, str]]:
    """Where each leaf is, and what it says."""
    pairs = zip(
        jax.tree.leaves_with_path(estimate.value),
        jax.tree.leaves(estimate.standard_error),
        strict=True,
    )
    return [
        (
            jax.tree_util.keystr(path, simple=True, separator="."),
            leaf_in_words(np.asarray(value), np.asarray(error)),
        )
        for (path, value), error in pairs
    ]


def leaf_in_words(value: np.ndarray, error: np.ndarray) -> str:
    if value.size > _MOST_SHOWN:
        return f"{value.shape} {_relative_error(value, error)}"
    pairs = zip(value.ravel(), error.ravel(), strict=True)
    return ", ".join(number(v, e.item()) for v, e in pairs)


def _relative_error(value: np.ndarray, error: np.ndarray) -> str:
    if not np.any(error):
        return "exact"
    with np.errstate(all="ignore"):
        error = error / np.max(np.abs(value))
        value = value / np.max(np.abs(value))
        share = np.linalg.norm(error) / np.linalg.norm(value)
    return f"± {100 * share:.2g} % in norm"


def number(value: np.generic, error: float) -> str:
    """To two digits of the error."""
    if error == 0:
        return str(value)
    if not np.isfinite(error) or not np.isfinite(value):
        shown = f"{value.item():.6g}"
        shown = f"({shown})" if np.iscomplexobj(value) else shown
        return f"{shown} ± {error:.2g}"
    size = max(abs(value.item()), error)
    power = int(np.floor(np.log10(size) + 1e-6))
    if -4 <= power < 6:
        return _plain(value.item(), error)
    # A power of ten that double precision holds, of what single precision may not.
    scale = 10.0 ** max(power, -300)
    return f"({_plain(value.item() / scale, error / scale)})e{max(power, -300):+03d}"


def _plain(value: float | complex, error: float) -> str:
    # A little more, for what single precision makes of 0.1.
    decimals = max(0, 1 - int(np.floor(np.log10(error) + 1e-6)))
    shown = f"{value:.{min(decimals, 16)}f}"
    shown = f"({shown})" if isinstance(value, complex) else shown
    return f"{shown} ± {error:.1e}" if decimals > 6 else f"{shown} ± {error:.{decimals}f}"
