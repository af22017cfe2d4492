"""Traces to a tolerance: sketches are doubled until their error bar fits it.

To stop at the first estimate that looks good enough favours those that look better than
they are. Two standard errors of the jackknife, conservative as it is, make up for it
(`tests/benchmarks/adaptive.py` counts how often they do not).

Sizes are powers of two times the first, so they are known when the program is traced. With
concrete arrays the next size is run if it is needed; in a traced program each stands in a
branch of a conditional, and what branches return is padded to the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int, PRNGKeyArray

from traceax._core.canonical import compiled, is_concrete
from traceax._core.checks import (
    check_count,
    check_key,
    check_operator,
    check_tolerance,
)
from traceax._core.estimate import AdaptiveEstimate
from traceax._core.operator import LinearMap, is_negative, is_positive, size
from traceax._core.rule import Outcome, run
from traceax._probes.choice import for_sketch
from traceax._probes.draw import draw
from traceax._probes.meters import ProgressMeter, checked_meter
from traceax._probes.samplers import Sampler
from traceax._probes.traits import check_independent, is_rotation_invariant
from traceax._traces.choice import SMALL
from traceax._traces.growing import Growing, Sketch
from traceax._traces.weights import TraceWeight

# The first sketch: the fewest probes whose jackknife can be relied on.
FIRST = 8


def adaptive_trace(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    *,
    rtol: ArrayLike = 1e-2,
    atol: ArrayLike = 0.0,
    max_matvecs: int = 1000,
    sampler: Sampler | None = None,
    progress_meter: ProgressMeter | None = None,
) -> AdaptiveEstimate:
    """Estimate tr A to a tolerance: spend as few applications as it takes.

    A sketch of 8 probes is doubled until two standard errors fit the tolerance,

        2 * standard_error <= atol + rtol * |value|,

    or `max_matvecs` is spent: the last size takes what it leaves. All probes and products
    are used again, by `xnystrace` if the operator is tagged positive or negative
    semidefinite, else by `xtrace`. Works under `jax.jit`, `jax.vmap` and in loops.

    **Arguments**

    - `operator`: any square lineax operator, real or complex, of arrays or pytrees.
    - `key`: a JAX random key.
    - `rtol`: the relative tolerance, a number of at least 0, or an array of shape `()`,
      which may be traced. Default 0.01.
    - `atol`: the absolute tolerance, likewise. Default 0.
    - `max_matvecs`: how many applications may be spent, a Python int of at least 2, or n.
      Default 1000. If it reaches n + 8, the last size is all of n, and exact; for n <= 64,
      at once.
    - `sampler`: draws the probes, independent of each other, with E[z z*] = I. Default
      `None`: `sphere`, and from 100,000 dimensions on `rademacher`, cheaper to draw.
    - `progress_meter`: shows how much of `max_matvecs` is spent: one of diffrax's progress
      meters, `diffrax.TextProgressMeter()`, say, or any object with their methods. Default
      `None`.

    **Returns** an `Estimate` of shape `()` with one field more, `converged`: whether the
    tolerance was met. `num_matvecs` is an array, decided at run time. NaN ends at once, and
    never counts as converged; a tolerance of 0 ends where `max_matvecs` ends.

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `max_matvecs` not a Python int, a tolerance not a real number, the sampler not a
    function, `progress_meter` no progress meter; `ValueError` if `operator` is not square,
    mixes real and complex leaves, or has no dimension; if `key` is an array of keys; if
    `max_matvecs` is below 2 and n, a tolerance negative or an array of several; if the
    sampler's probes are dependent or of the wrong shape.

    **Derivatives**: forward and reverse, to any order, those of the estimator at the size
    that was reached; the choice of the size is frozen.

    **Cost**: `num_matvecs` of the result; about 12 n k^2 flops for k probes. In a traced
    program every size is compiled, and memory is that of the largest: 6 blocks of n x k,
    or of n x n if it is exact; under `jax.vmap` every size is run.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
    >>> operator = lx.MatrixLinearOperator(jnp.diag(0.9 ** jnp.arange(500.0)))
    >>> estimate = tx.adaptive_trace(operator, jax.random.key(0), rtol=1e-2)
    >>> bool(estimate.converged), bool(abs(estimate.value - 10) < 0.1)
    (True, True)
    >>> print(estimate.num_matvecs)
    128

    ```

    **Reference**: doubling as in Epperly, Tropp and Webber (2024), XTrace: Making the most
    of every sample in stochastic trace estimation, SIAM Journal on Matrix Analysis and
    Applications 45(1), doi:10.1137/23M1548323.
    """
    operator = check_operator("adaptive_trace", operator)
    check_key("adaptive_trace", key)
    check_count("adaptive_trace", "max_matvecs", max_matvecs, min(2, size(operator)))
    sampler = for_sketch(sampler, operator)
    check_independent("adaptive_trace", sampler)
    check_tolerance("adaptive_trace", "rtol", rtol)
    check_tolerance("adaptive_trace", "atol", atol)
    meter = checked_meter("adaptive_trace", progress_meter)
    semidefinite = is_positive(operator) or is_negative(operator)
    method = Growing(
        semidefinite, -1 if is_negative(operator) else 1, is_rotation_invariant(sampler)
    )
    ladder = _ladder(size(operator), max_matvecs, method.matvecs_a_probe)
    ascent = _Ascent(method, ladder, max_matvecs, sampler, meter)
    outcome = run(ascent, operator, (key, jnp.asarray(rtol), jnp.asarray(atol)))
    report = outcome.report
    return AdaptiveEstimate(
        outcome.value,
        outcome.standard_error,
        report.num_matvecs,
        report.degrees_of_freedom,
        report.converged,
    )


class _Ladder(NamedTuple):
    """The numbers of probes to try, and whether to be exact after them."""

    sizes: tuple[int, ...]
    exact: bool


def _ladder(n: int, max_matvecs: int, matvecs_a_probe: int) -> _Ladder:
    if n <= min(max_matvecs, SMALL):
        return _Ladder((), exact=True)
    doubled = [FIRST << j for j in range(max_matvecs.bit_length())]
    useful = [k for k in doubled if k * matvecs_a_probe < n]
    affordable = tuple(k for k in useful if n + k <= max_matvecs)
    if affordable:
        return _Ladder(affordable, exact=True)
    largest = min(max_matvecs, n - 1) // matvecs_a_probe
    return _Ladder((*(k for k in useful if k < largest), largest), exact=False)


class _Report(NamedTuple):
    num_matvecs: Int[Array, ""]
    degrees_of_freedom: Float[Array, ""]
    converged: Bool[Array, ""]


class _ReachedWeight(eqx.Module):
    """The weight of the size that was reached, padded to the largest in a traced program,
    where only as much of it is read as is there."""

    left: Inexact[Array, "n r"]
    right: Inexact[Array, "n r"]
    rung: Int[Array, ""]
    widths: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, ""]:
        def read(width: int) -> Inexact[Array, ""]:
            return TraceWeight(self.left[:, :width], self.right[:, :width])(linear_map)

        if not is_concrete(self.rung):
            return jax.lax.switch(self.rung, [partial(read, w) for w in self.widths])
        return read(self.widths[int(self.rung)])

    def padded(self) -> _ReachedWeight:
        missing = ((0, 0), (0, max(self.widths) - self.left.shape[1]))
        left, right = jnp.pad(self.left, missing), jnp.pad(self.right, missing)
        return _ReachedWeight(left, right, self.rung, self.widths)


class _Ascent(NamedTuple):
    """From size to size, each compiled by itself where the next one may not be needed."""

    method: Growing
    ladder: _Ladder
    max_matvecs: int
    sampler: Sampler
    meter: Any

    @property
    def in_pieces(self) -> bool:
        return True

    def __call__(self, linear_map: LinearMap, given: Any) -> Outcome:
        outcome, meter_state = self._climb(linear_map, given, 0, None, 0, self.meter.init())
        self.meter.close(meter_state)
        return outcome

    def _climb(
        self,
        linear_map: LinearMap,
        given: tuple[PRNGKeyArray, Float[Array, ""], Float[Array, ""]],
        rung: int,
        sketch: Sketch | None,
        spent: int,
        meter_state: Any,
    ) -> tuple[Outcome, Any]:
        """This size and, if need be, the ones above."""
        key, rtol, atol = given
        if rung == len(self.ladder.sizes):
            value, weight, cost = compiled(
                Growing.complete, self.method, linear_map, sketch
            )
            meter_state = self.meter.step(meter_state, jnp.asarray(1.0))
            error = jnp.zeros_like(value.real)
            n = size(linear_map.operator)
            report = _report(spent + cost, n, ~jnp.isnan(value), error)
            return self._outcome(value, error, weight, rung, report), meter_state
        have = 0 if sketch is None else sketch.probes.shape[1]
        k = self.ladder.sizes[rung]
        probes = draw(
            "adaptive_trace",
            self.sampler,
            jax.random.fold_in(key, rung),
            linear_map.operator,
            k - have,
        )
        sketch = compiled(Growing.enlarge, self.method, linear_map, sketch, probes)
        value, error = compiled(Growing.value_and_error, self.method, linear_map, sketch)
        spent = k * self.method.matvecs_a_probe
        converged = 2 * error <= atol + rtol * jnp.abs(value)
        ended = converged | jnp.isnan(error) | jnp.isnan(value)
        progress = jnp.where(ended, 1.0, spent / self.max_matvecs)
        meter_state = self.meter.step(meter_state, progress)
        report = _report(spent, k - 1, converged, error)

        def stop() -> tuple[Outcome, Any]:
            weight = compiled(Growing.weight, self.method, sketch)
            return self._outcome(value, error, weight, rung, report), meter_state

        def go() -> tuple[Outcome, Any]:
            return self._climb(linear_map, given, rung + 1, sketch, spent, meter_state)

        is_last = rung + 1 == len(self.ladder.sizes) + self.ladder.exact
        return stop() if is_last else _either(ended, stop, go)

    def _outcome(
        self,
        value: Inexact[Array, ""],
        error: Float[Array, ""],
        weight: TraceWeight,
        rung: int,
        report: _Report,
    ) -> Outcome:
        widths = [2 * k for k in self.ladder.sizes]
        if self.ladder.exact:
            widths.append(weight.left.shape[0])
        reached = _ReachedWeight(
            weight.left, weight.right, jnp.asarray(rung), tuple(widths)
        )
        return Outcome(value, error, reached, report)


def _report(
    spent: int, degrees: int, converged: Bool[Array, ""], error: Float[Array, ""]
) -> _Report:
    return _Report(jnp.int32(spent), jnp.asarray(degrees, error.dtype), converged)


Result = TypeVar("Result")


def _either(
    condition: Bool[Array, ""], stop: Callable[[], Result], go: Callable[[], Result]
) -> Result:
    """One of the two: by Python where the condition is known."""
    if is_concrete(condition):
        return stop() if condition else go()

    def padded(branch: Callable[[], Result]) -> Result:
        is_weight = lambda node: isinstance(node, _ReachedWeight)  # noqa: E731
        pad = lambda node: node.padded() if is_weight(node) else node  # noqa: E731
        return jax.tree.map(pad, branch(), is_leaf=is_weight)

    return jax.lax.cond(condition, partial(padded, stop), partial(padded, go))
