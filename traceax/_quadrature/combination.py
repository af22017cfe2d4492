"""Combinations of several traces of one run: their value, error bar and bias.

Let t be the mean of samples s_i, each a vector of all p traces, and g the combination. To
first order g(t) - E = mean of Dg(t) s_i - E, so the error of g(t) is judged like that of
one trace, by the samples Dg(t) s_i, which are those of the function Dg(t) f: so are its
quadrature and rounding. Covariances are in them: what numerator and denominator of a
thermal mean have in common, most of their error, cancels.

To second order g(t) is biased by half of tr(D^2 g(t) Cov t). The jackknife takes that off,
from the means t_{-i} = t - d_i of all samples but one, d_i = (s_i - t)/(k - 1):

    value = g(t) + (k - 1) mean of (g(t) - g(t - d_i)).

Samples that share probes vary less than their mean does, so of their bias at least a half
goes, and never more than all. The d_i are frozen like probes: derivatives in what only
`combine` depends on are those of the value; others move t, by the split rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float, Inexact, PyTree

from traceax._core.canonical import canonical
from traceax._core.checks import check_callable, check_returned
from traceax._core.operator import Structure, as_result
from traceax._core.rule import Outcome, Readout
from traceax._linalg.columns import mean
from traceax._linalg.jackknife import both_errors
from traceax._quadrature.scalar import MatrixFunction, ScalarFunction, inexact

# Fewer samples do not tell the bias.
FEWEST = 3


def combination(
    name: str,
    combine: Callable[[Any], PyTree[Array]] | None,
    fn: ScalarFunction,
    structure: Structure,
) -> tuple[ScalarFunction | None, Structure]:
    """`combine` as a function of the traces of `fn`, of a `structure`, in one vector, and
    the structure of its result."""
    if combine is None:
        return None, structure
    cure = "Pass a function of what fn returns, lambda t: t['a'] / t['b'], say."
    check_callable(name, "combine", combine, "of the traces", cure)
    traces = eqx.filter_eval_shape(fn, fn.point)

    def of_vector(t: Inexact[Array, " p"]) -> PyTree[Array]:
        return combine(as_result(t, structure))

    result = eqx.filter_eval_shape(of_vector, traces)
    check_returned(name, "combine", result, "numbers")
    return ScalarFunction(canonical(of_vector, traces), traces), inexact(
        result, traces.dtype
    )


def slope_of(
    combine: ScalarFunction | None, total: Inexact[Array, " p"]
) -> Inexact[Array, "q p"] | None:
    """Dg at the traces; in their imaginary parts, where they are complex, behind that in
    real ones."""
    if combine is None:
        return None

    def along(direction: Inexact[Array, " p"]) -> Inexact[Array, " q"]:
        return jax.jvp(combine, (total,), (direction,))[1]

    units = jnp.eye(total.size, dtype=total.dtype)
    if jnp.iscomplexobj(total):
        units = jnp.concatenate([units, 1j * units])
    return jax.vmap(along, out_axes=1)(units)


def through(
    slope: Inexact[Array, "q p"] | None, values: Inexact[Array, "*levels p m"]
) -> Inexact[Array, "*levels q m"]:
    """Dg times values of f; the values if there is no combination."""
    if slope is None:
        return values
    parts = [values.real, values.imag] if jnp.iscomplexobj(values) else [values]
    return _product(slope, jnp.concatenate(parts, axis=-2))


def bounds_through(
    slope: Inexact[Array, "q p"] | None, sizes: Float[Array, "p m"]
) -> Float[Array, "q m"]:
    """Bounds of Dg times values that have the bounds `sizes`."""
    if slope is None:
        return sizes
    count = slope.shape[1] // sizes.shape[0]
    return _product(jnp.abs(slope), jnp.concatenate([sizes] * count))


def _product(
    slope: Inexact[Array, "q p"], x: Float[Array, "*levels p m"]
) -> Inexact[Array, "*levels q m"]:
    """Traces that the combination does not depend on may be undefined."""
    finite = jnp.isfinite(x)
    image = slope @ jnp.where(finite, x, 0).astype(slope.dtype)
    lost = (slope != 0).astype(x.dtype) @ (~finite).astype(x.dtype)
    return jnp.where(lost > 0, jnp.nan, image)


def combined(
    combine: ScalarFunction | None,
    traces: Outcome,
    samples: Inexact[Array, "p k"],
    eps: float,
) -> Outcome:
    """The combination of `traces`, the mean of `samples`. Their standard error is already
    that of Dg(t) s_i."""
    if combine is None:
        return traces
    away = _away(combine, traces.value, samples)
    plain, value = combine(traces.value), _unbiased(combine, traces.value, away)
    rounding = 4 * eps * jnp.abs(value)
    error = both_errors(both_errors(traces.standard_error, rounding), abs(value - plain))
    # A slope that is infinite where the value is not says nothing.
    unknown = jnp.isnan(error) & jnp.isfinite(value)
    readout = Partial(_read, traces.readout, away)
    return Outcome(value, jnp.where(unknown, jnp.inf, error), readout)


def exactly(
    combine: ScalarFunction | None, total: Inexact[Array, " p"], readout: Readout
) -> Outcome:
    """The combination of traces that are exact."""
    value = total
    if combine is not None:
        readout, value = Partial(_read, readout, None), combine(total)
    return Outcome(value, jnp.zeros_like(value.real), readout)


def _read(
    traces: Readout, away: Inexact[Array, "p k"] | None, subject: MatrixFunction
) -> Inexact[Array, " q"]:
    assert subject.combine is not None
    return _unbiased(subject.combine, traces(subject), away)


def _unbiased(
    combine: ScalarFunction,
    total: Inexact[Array, " p"],
    away: Inexact[Array, "p k"] | None,
) -> Inexact[Array, " q"]:
    """The combination less the bias that the jackknife finds with d_i = `away`."""
    value = combine(total)
    if away is None:
        return value
    others = jax.vmap(combine, in_axes=1, out_axes=1)(total[:, None] - away)
    return value + (away.shape[1] - 1) * mean(value[:, None] - others)


def _away(
    combine: ScalarFunction, total: Inexact[Array, " p"], samples: Inexact[Array, "p k"]
) -> Inexact[Array, "p k"] | None:
    """The d_i, if there are enough samples. Zero if the combination is not defined (the log
    of a negative number) without each of the samples: then there is no telling its bias."""
    k = samples.shape[1]
    if k < FEWEST:
        return None
    away = (samples - total[:, None]) / (k - 1)
    value, unbiased = combine(total), _unbiased(combine, total, away)
    lost = jnp.any(jnp.isfinite(value) & ~jnp.isfinite(unbiased))
    return jnp.where(lost, 0, away)
