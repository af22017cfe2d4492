"""Estimates in words, as they print.

A number prints to two digits of its standard error. An exact number prints as it is. A
number whose error is only rounding prints as the shortest number within that error. More
than ten numbers print as their shape and the relative norm of their errors. NaN prints
without an error, and the last line says what it may mean. Values that this process cannot
read print as Equinox prints a module.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import numpy as np

from traceax._core.canonical import is_concrete
from traceax._core.checks import require_type

_MOST_SHOWN = 10

# What is wrong with an operator if the value is NaN, by the first of these names that is in
# `method`. An exact answer does not say which function gave it.
_OUTSIDE = "has eigenvalues at which fn is not defined"
_CAUSES = {
    "logdet": "is not Hermitian, is not positive definite with this shift, or returns nan",
    "spectral_density": "is not Hermitian, or returns nan",
    "arnoldi_trace": "has eigenvalues on a branch cut of fn, or returns nan",
    "function_": f"is not Hermitian, {_OUTSIDE}, or returns nan",
    "slq_trace": f"is not Hermitian, {_OUTSIDE}, or returns nan",
    "schatten_norm": "is not semidefinite as tagged, is not Hermitian, or returns nan",
    "xnys": "is not semidefinite as tagged, or returns nan",
    "exact": "returns nan or, for a function of it, is not Hermitian, is not positive "
    f"definite, or {_OUTSIDE}",
}


def in_words(estimate: Any) -> str:
    """Return `96.6 ± 3.1 (50 matvecs, xtrace)`, or one such line for each leaf."""
    if not is_readable(estimate):
        return eqx.tree_pformat(estimate)
    values = jax.tree.leaves_with_path(estimate.value)
    lines, errors = [], jax.tree.leaves(estimate.standard_error)
    for (path, value), error in zip(values, errors, strict=True):
        words = _array_in_words(np.asarray(value), np.asarray(error))
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        lines.append(f"{name}: {words}" if path else words)
    total = int(np.sum(np.asarray(estimate.num_matvecs)))  # the sum over a batch
    method = f", {estimate.method}" if estimate.method else ""
    has_nan = any(np.isnan(value).any() for _, value in values)
    why = _cause(estimate.method) if method and has_nan else ""
    cost = f"({total} matvec{'s' if total != 1 else ''}{method}{why})"
    return f"{lines[0]} {cost}" if len(lines) == 1 else "\n".join([*lines, cost])


def _cause(method: str) -> str:
    """Return what may have made the value NaN, and where the way out is described."""
    causes = (cause for name, cause in _CAUSES.items() if name in method)
    cause = next(causes, "or the given function returns nan")
    return f"; the operator {cause}: see 'What NaN means' in the guide's Conventions"


def formatted(estimate: Any, spec: str) -> str:
    """Format one number and its error, each by `spec`."""
    if not spec:
        return str(estimate)
    leaves = jax.tree.leaves((estimate.value, estimate.standard_error))
    fits = is_readable(estimate) and len(leaves) == 2 and not np.ndim(leaves[0])
    must = "be asked of one number whose value is there"
    got = f"{spec!r} for values of shape {jax.tree.map(np.shape, estimate.value)}"
    cure = "Format entries of `value` and `standard_error`."
    require_type(fits, "Estimate.__format__", "spec", must, got, cure)
    value, error = (np.asarray(leaf).item() for leaf in leaves)
    shown = format(value, spec)
    return shown if error == 0 or np.isnan(value) else f"{shown} ± {error:{spec}}"


def is_readable(estimate: Any) -> bool:
    """Return whether this process can read every number of the estimate."""

    def readable(leaf: Any) -> bool:
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            return leaf.is_fully_addressable or leaf.is_fully_replicated
        return isinstance(leaf, int | float | complex | np.ndarray | np.generic)

    leaves = jax.tree.leaves(estimate)
    same = jax.tree.structure(estimate.value) == jax.tree.structure(estimate.standard_error)
    return bool(leaves) and same and is_concrete(leaves) and all(map(readable, leaves))


def _array_in_words(value: np.ndarray, error: np.ndarray) -> str:
    if value.size <= _MOST_SHOWN:
        pairs = zip(value.ravel(), error.ravel(), strict=True)
        words = ", ".join(_number_in_words(v, e.item()) for v, e in pairs)
        return f"[{words}]" if value.ndim else words
    if undefined := np.count_nonzero(np.isnan(value)):
        return f"{value.shape}, {undefined} of {value.size} nan"
    if not np.any(error) and np.all(np.isfinite(value)):
        return f"{value.shape} exact"
    with np.errstate(all="ignore"):
        largest = np.max(np.abs(value))
        share = np.linalg.norm(error / largest) / np.linalg.norm(value / largest)
    return f"{value.shape} ± {100 * share:.2g} % in norm"


def _number_in_words(value: np.generic, error: float) -> str:
    """Write a number to two digits of its error, with a power of ten if it is very large
    or very small."""
    if np.isnan(value):
        return "nan"
    if error == 0:
        return str(value)
    if not np.isfinite(error) or not np.isfinite(value):
        shown = f"{value.item():.6g}"
        shown = f"({shown})" if np.iscomplexobj(value) else shown
        return f"{shown} ± {error:.2g}"
    # The number may be subnormal: 10^power must not be.
    power = max(_power_of_ten(max(abs(value.item()), error)), -300)
    if -4 <= power < 6:
        return _fixed_point(value.item(), error)
    scale = 10.0**power
    return f"({_fixed_point(value.item() / scale, error / scale)})e{power:+03d}"


def _power_of_ten(size: float) -> int:
    # 1e-6 makes up for single precision, in which 0.1 may be a little less.
    return int(np.floor(np.log10(size) + 1e-6))


def _fixed_point(value: float | complex, error: float) -> str:
    decimals = max(0, 1 - _power_of_ten(error))
    shown = f"{value:.{min(decimals, 16)}f}"
    if decimals > 9:
        shorter = (f"{value:.{d}f}" for d in range(17))
        shown = next((s for s in shorter if abs(complex(s) - value) <= error), shown)
    shown = f"({shown})" if isinstance(value, complex) else shown
    return f"{shown} ± {error:.1e}" if decimals > 6 else f"{shown} ± {error:.{decimals}f}"
