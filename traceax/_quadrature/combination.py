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
from jaxtyping import Array, Float, Inexact, PyTree

from traceax._core.canonical import canonical
from traceax._core.function_checks import check_combine, check_combined
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
    check_combine(name, combine)
    traces = eqx.filter_eval_shape(fn, fn.point)

    def of_vector(t: Inexact[Array, " p"]) -> PyTree[Array]:
        return combine(as_result(t, structure))

    result = eqx.filter_eval_shape(of_vector, traces)
    check_combined(name, result)
    return ScalarFunction(canonical(of_vector, traces), traces), inexact(
        result, traces.dtype
    )


class Plain(eqx.Module):
    """Traces as they are."""

    total: Inexact[Array, " p"]

    def values(self, x: Inexact[Array, "*levels p m"]) -> Inexact[Array, "*levels p m"]:
        return x

    def sizes(self, x: Float[Array, "p m"]) -> Float[Array, "p m"]:
        return x

    def outcome(self, error: Float[Array, " p"], readout: Readout, eps: float) -> Outcome:
        return Outcome(self.total, error, readout)


class Combined(eqx.Module):
    """A combination at `total`, `slope` its derivative there, that in imaginary parts
    behind that in real ones; `away` the d_i."""

    combine: ScalarFunction
    total: Inexact[Array, " p"]
    away: Inexact[Array, "p k"] | None
    slope: Inexact[Array, "q p"]

    def values(self, x: Inexact[Array, "*levels p m"]) -> Inexact[Array, "*levels q m"]:
        """What the values of f become."""
        parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
        return _through(self.slope, jnp.concatenate(parts, axis=-2))

    def sizes(self, x: Float[Array, "p m"]) -> Float[Array, "q m"]:
        """What bounds of them become."""
        count = self.slope.shape[1] // x.shape[0]
        return _through(jnp.abs(self.slope), jnp.concatenate([x] * count))

    def outcome(self, error: Float[Array, " q"], readout: Readout, eps: float) -> Outcome:
        readout = CombinedReadout(readout, self.away)
        plain, value = self.combine(self.total), readout.of(self.combine, self.total)
        rounding = 4 * eps * jnp.abs(value)
        error = both_errors(both_errors(error, rounding), jnp.abs(value - plain))
        # A slope that is infinite where the value is not says nothing.
        unknown = jnp.isnan(error) & jnp.isfinite(value)
        return Outcome(value, jnp.where(unknown, jnp.inf, error), readout)


class CombinedReadout(eqx.Module):
    """The combination of what `traces` reads, less its bias."""

    traces: Readout
    away: Inexact[Array, "p k"] | None

    def __call__(self, subject: MatrixFunction) -> Inexact[Array, " q"]:
        assert subject.combine is not None
        return self.of(subject.combine, self.traces(subject))

    def of(
        self, combine: ScalarFunction, total: Inexact[Array, " p"]
    ) -> Inexact[Array, " q"]:
        value = combine(total)
        if self.away is None:
            return value
        return value + _less_bias(combine, value, total, self.away)


def _less_bias(
    combine: ScalarFunction,
    value: Inexact[Array, " q"],
    total: Inexact[Array, " p"],
    away: Inexact[Array, "p k"],
) -> Inexact[Array, " q"]:
    others = jax.vmap(combine, in_axes=1, out_axes=1)(total[:, None] - away)
    return (away.shape[1] - 1) * mean(value[:, None] - others)


def combined(
    combine: ScalarFunction | None,
    total: Inexact[Array, " p"],
    samples: Inexact[Array, "p k"],
) -> Plain | Combined:
    """What is to be judged, `samples` being those of which `total` is the mean."""
    if combine is None:
        return Plain(total)
    k = samples.shape[1]
    away = None
    if k >= FEWEST:
        away = _defined(combine, total, (samples - total[:, None]) / (k - 1))
    return Combined(combine, total, away, _slope(combine, total))


def _defined(
    combine: ScalarFunction, total: Inexact[Array, " p"], away: Inexact[Array, "p k"]
) -> Inexact[Array, "p k"]:
    """Zero if the combination is not defined (the log of a negative number) without each
    of the samples: then there is no telling its bias."""
    value = combine(total)
    bias = _less_bias(combine, value, total, away)
    lost = jnp.any(jnp.isfinite(value) & ~jnp.isfinite(bias))
    return jnp.where(lost, 0, away)


def _slope(combine: ScalarFunction, total: Inexact[Array, " p"]) -> Inexact[Array, "q p"]:
    def along(direction: Inexact[Array, " p"]) -> Inexact[Array, " q"]:
        return jax.jvp(combine, (total,), (direction,))[1]

    units = jnp.eye(total.size, dtype=total.dtype)
    if jnp.iscomplexobj(total):
        units = jnp.concatenate([units, 1j * units])
    return jax.vmap(along, out_axes=1)(units)


def _through(
    slope: Inexact[Array, "q p"], x: Float[Array, "*levels p m"]
) -> Inexact[Array, "*levels q m"]:
    """The product. Traces that the combination does not depend on may be undefined."""
    finite = jnp.isfinite(x)
    image = slope @ jnp.where(finite, x, 0).astype(slope.dtype)
    lost = (slope != 0).astype(x.dtype) @ (~finite).astype(x.dtype)
    return jnp.where(lost > 0, jnp.nan, image)


def exactly(
    combine: ScalarFunction | None, total: Inexact[Array, " p"], readout: Readout
) -> Outcome:
    """Of traces that are exact."""
    value = total
    if combine is not None:
        readout, value = CombinedReadout(readout, None), combine(total)
    return Outcome(value, jnp.zeros_like(value.real), readout)
