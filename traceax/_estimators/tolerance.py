"""`adaptive`: any estimator to a tolerance, by runs whose budget grows.

Two ways of spending more are weighed after every run. Let tau be the standard error that is
wanted. Let there be R runs of c matvecs each, with the sampling error s in one run and the
quadrature error b.

- **More runs**, which are pooled: the error is sqrt(s^2/R + b^2), because quadrature errors
  do not average out. So R = s^2 / (tau^2 - b^2) runs are enough, if b < tau. They need no
  new program.
- **A larger run**: the errors of the last two sizes give the order p at which the error
  falls, so that about c (e / tau)^(1/p) matvecs are enough, where e is the error of one
  run. Plain probes have p = 1/2, for which both cost the same. Sketches have a larger p if
  eigenvalues decay. A Krylov run has p = 1/4 where only sampling is left, since it grows in
  width and in depth, and then more runs are better.

A larger run is preferred if costs are similar, and tried if it costs little against what
is left to do, because it may meet the end of a plateau, or n, where it is exact. Runs of
all budgets so far are kept, so that more runs are made of whatever budget promises most.
The first estimate that looks good enough is one that tends to look better than it is. To
make up for this, the search stops only if two standard errors are within the tolerance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from traceax._core import checks
from traceax._core.canonical import is_concrete
from traceax._core.estimate import Estimate
from traceax._core.pooling import pool
from traceax._probes.stream import ProgressMeter, checked_meter

# A run grows by these factors at a time, and by the smaller one while its order is unknown.
LEAST_GROWTH, MOST_GROWTH = 2, 4

# So many more runs are made rather than a larger one, which would be compiled.
FEW = 3

# A larger run is tried, whatever it promises, if more runs would cost so many times more.
EXPLORED = 4

_CURE = "Pass lambda key, m: traceax.logdet(operator, key, m), for example."


def adaptive(
    estimate: Callable[[PRNGKeyArray, int], Estimate],
    key: PRNGKeyArray,
    *,
    rtol: float = 1e-2,
    atol: float = 0.0,
    max_matvecs: int = 10_000,
    max_seconds: float | None = None,
    first: int = 32,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Run any estimator to a tolerance, with budgets that grow until its error bar fits.

        2 |standard_error| <= atol + rtol |value|

    For diagonals and pytrees, |.| is the Euclidean norm of all entries. The budget doubles
    or quadruples, or independent runs of the same budget are pooled, whichever promises to
    take fewer matvecs. Pooling reduces only the error of sampling. So for functions of an
    operator, runs get deeper while quadrature is the larger part of the error, and there
    are more runs if sampling is the larger part.

    **Arguments**

    - `estimate`: a function `estimate(key, num_matvecs)` that returns an `Estimate`, made
      by any function of traceax or by your own. `num_matvecs` is a Python int.
    - `key`: one JAX random key, for example `jax.random.key(0)`. Each run has its own key,
      made from it.
    - `rtol`: the relative tolerance, at least 0. Default 0.01.
    - `atol`: the absolute tolerance, at least 0. Default 0.
    - `max_matvecs`: the most matvecs that all runs together may take. Default 10,000.
    - `max_seconds`: the time limit. The search stops before a run that would exceed it,
      judged by the time that earlier runs took. The first run is always made. Default
      `None`, which means no limit.
    - `first`: the budget of the first run. Default 32.
    - `progress_meter`: an object that shows how much of `max_matvecs`, or of `max_seconds`,
      is spent, for example `diffrax.TqdmProgressMeter()`. Default `None`, which shows
      nothing.

    **Returns** the `Estimate` with the smallest error bar that was reached. It comes from
    one run, or is the `pool` of several. `converged` says whether the tolerance was met.
    `num_matvecs` counts all runs. If a value or an error is NaN, the search ends and
    returns it. Stopping by the error bar leaves a small bias.

    **Derivatives**: they are the derivatives of the runs whose estimate is returned.

    **Cost**: the matvecs of all runs. Runs that are not part of the result take about a
    third of all matvecs. Each budget compiles its own program.

    The search is a Python loop, which decides from the values of earlier runs. So inside
    `jax.jit`, `jax.vmap` and `jax.lax.scan` it raises an error. For traces, use
    `adaptive_trace` there. For other quantities, first find a budget outside, and use it as
    a constant.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> x = jnp.linspace(1.0, 3.0, 500)
        >>> operator = tx.as_operator(lambda v: x * v, 500)
        >>> run = lambda key, m: tx.logdet(operator, key, m)
        >>> found = tx.adaptive(run, jax.random.key(0), rtol=1e-2)
        >>> print(found.converged, bool(abs(found.value / jnp.log(x).sum() - 1) < 1e-2))
        True True

    **Reference**: derived in `traceax/_estimators/tolerance.py`. For why two standard
    errors are used, compare `adaptive_trace`.

    **See also**: `adaptive_trace`, `pool`.
    """
    name = "adaptive"
    checks.check_callable(name, "estimate", estimate, "of a key and a budget", _CURE, 2)
    checks.check_key(name, key)
    _check_eager(name, "key", key)
    for argument, number in (("rtol", rtol), ("atol", atol)):
        _check_eager(name, argument, number)
        checks.check_tolerance(name, argument, number)
    max_matvecs = checks.check_count(name, "max_matvecs", max_matvecs, 1)
    first = checks.check_count(name, "first", first, 1)
    meter, limit = checked_meter(name, progress_meter), math.inf
    if max_seconds is not None:
        checks.check_positive(name, "max_seconds", max_seconds, "Pass 60.0, or None.")
        limit = float(max_seconds)
    start, shown = time.monotonic(), meter.init()
    size: int | None = min(first, max_matvecs)
    best, spent, count, is_met = _Level(size), 0, 0, False
    levels = {size: best}
    while size is not None:
        level, began = levels.setdefault(size, _Level(size)), time.monotonic()
        run = estimate(jax.random.fold_in(key, count), size)
        must, got = "return an Estimate", type(run).__name__
        checks.require_type(isinstance(run, Estimate), name, "estimate", must, got, _CURE)
        numbers = jax.lax.stop_gradient((run.value, run.standard_error))
        _check_eager(name, "estimate", numbers)
        jax.block_until_ready(numbers)
        seconds = time.monotonic() - start
        level.add(run, start + seconds - began)
        count, spent = count + 1, spent + level.cost
        wanted = float(atol) + float(rtol) * level.length
        is_met = 2 * level.error <= wanted
        shown = meter.step(shown, min(1.0, max(spent / max_matvecs, seconds / limit)))
        ended = is_met or math.isnan(level.error + wanted)
        best = level if ended or level.error < best.error else best
        left = max_matvecs - spent, limit - seconds
        size = None if ended else _next_size([*levels.values()], wanted / 2, *left)
    meter.close(meter.step(shown, 1.0))
    found = pool(best.runs) if len(best.runs) > 1 else best.runs[0]
    return replace(found, num_matvecs=spent, converged=is_met)


def _check_eager(name: str, argument: str, value: Any) -> None:
    must = "be known, because a Python loop decides by it how often to run"
    cure = "Call it outside of jax.jit, jax.vmap and jax.lax.scan, or use adaptive_trace."
    checks.require_type(is_concrete(value), name, argument, must, "a traced array", cure)


def _numbers(tree: Any) -> np.ndarray:
    """Return all entries as one vector of double precision."""
    leaves = jax.tree.leaves(jax.lax.stop_gradient(tree))
    vector = np.concatenate([np.ravel(np.asarray(leaf)) for leaf in leaves])
    return vector.astype(np.result_type(vector.dtype, np.float64))


def _norm(vector: np.ndarray) -> float:
    """Return the Euclidean norm, which neither overflows nor vanishes."""
    scale = float(np.max(np.abs(vector), initial=0.0))
    is_finite = 0 < scale < math.inf
    return scale * float(np.linalg.norm(vector / scale)) if is_finite else scale


class _Level:
    """The runs of one budget, `size`, and the seconds that each of them took.

    `cost` is the number of matvecs of one run, as it reports them. `error` is the standard
    error of the pool of all runs, and `of_one` the error of one run. `sampling` is the part
    of `of_one` that comes from sampling, and `gap` the part of both that comes from
    quadrature. They are the numbers of `pool`, computed by NumPy, because `pool` would
    compile its operations again for every number of runs. `gains` says whether more runs
    reduce the larger part of the error.
    """

    def __init__(self, size: int) -> None:
        self.size, self.runs, self.seconds = size, list[Estimate](), list[float]()
        self._sums: tuple[Any, ...] = 0.0, 0.0, 0.0, 0.0

    def add(self, run: Estimate, seconds: float) -> None:
        self.runs.append(run)
        self.seconds.append(seconds)
        count = len(self.runs)
        value, error = _numbers(run.value), _numbers(run.standard_error)
        gap = np.broadcast_to(_numbers(run.quadrature_error), error.shape)
        squares = np.maximum(error**2 - np.where(np.isinf(gap), 0, gap) ** 2, 0)
        before, spread, within, gaps = self._sums
        after = before + (value - before) / count
        spread = spread + (np.conj(value - before) * (value - after)).real
        within, gaps = within + squares, gaps + gap
        self._sums = after, spread, within, gaps
        mean, between = within / count, spread / max(count - 1, 1)
        one = np.where(np.isinf(mean) & (count > 1), between, np.maximum(mean, between))
        self.cost = max(int(np.max(jax.lax.stop_gradient(run.num_matvecs))), 1)
        self.length, self.gap = _norm(after), _norm(gaps / count)
        self.sampling = _norm(np.sqrt(one))
        self.of_one = math.hypot(self.sampling, self.gap)
        pooled = self.sampling / count**0.5
        self.error, self.gains = math.hypot(pooled, self.gap), self.gap < pooled < math.inf

    def more(self, wanted: float) -> float:
        """Return how many more runs make the error as small as is wanted."""
        if not self.gap < wanted or math.isinf(self.sampling):
            return math.inf
        runs = math.ceil(self.sampling**2 / (wanted**2 - self.gap**2))
        return max(runs - len(self.runs), 1)


def _next_size(
    levels: list[_Level], wanted: float, matvecs: float, seconds: float
) -> int | None:
    """Return the budget of the next run: one that was used before, or a larger one.

    Return None if no run fits into the matvecs and seconds that are left. `wanted` is the
    standard error that is wanted.
    """
    last = levels[-1]
    fitting = (level for level in levels if level.cost <= matvecs and level.gains)
    usable = [level for level in fitting if min(level.seconds) <= seconds]
    # What a larger run costs that is good enough by itself, and what is tried of it.
    ratio = max(last.of_one / wanted, 1.0) if wanted > 0 else math.inf
    larger = min(ratio, 1e30) ** (1 / _order(levels))
    # Few budgets, so that programs compiled for one search serve the next.
    is_far = larger > (LEAST_GROWTH * MOST_GROWTH) ** 0.5 and len(levels) > 1
    growth = min(MOST_GROWTH if is_far else LEAST_GROWTH, matvecs / last.cost)
    size = int(last.size * growth)
    can_grow = growth >= (LEAST_GROWTH if usable else 1.25)
    can_grow = can_grow and _seconds(levels, size) <= seconds
    if not usable:
        return size if can_grow else None
    best = min(usable, key=lambda level: (level.more(wanted) * level.cost, level.error))
    repeated = best.more(wanted) * best.cost
    promised, explored = 0.7 * larger * last.cost, EXPLORED * growth * last.cost
    few = best.more(wanted) <= FEW and repeated <= matvecs
    grows = can_grow and not few and min(promised, explored) <= repeated
    return size if grows else best.size


def _order(levels: list[_Level]) -> float:
    """Return the order p of error ~ matvecs^-p, from the last two budgets. It is 1 if
    nothing is known."""
    before, last = levels[-2:][0], levels[-1]  # the same one, if there is one alone
    growth = last.cost / before.cost
    if math.isinf(before.of_one) or growth <= 1 or last.of_one == 0:
        return 1.0
    falls = math.log(before.of_one / last.of_one) / math.log(growth)
    return min(max(falls, 0.1), 4.0)


def _seconds(levels: list[_Level], size: int) -> float:
    """Predict the seconds of the first run of a larger budget, which includes compilation.

    They grow as they grew between the last two budgets, but at least in proportion."""
    level, power = levels[-1], 1.0
    if len(levels) > 1:
        before = levels[-2]
        grown = math.log(level.size / before.size)
        power = math.log(level.seconds[0] / before.seconds[0]) / grown
    return level.seconds[0] * (size / level.size) ** min(max(power, 1.0), 3.0)
