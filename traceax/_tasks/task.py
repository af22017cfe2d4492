"""What is to be estimated, by what, and how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import lineax as lx
import numpy as np
from jaxtyping import PRNGKeyArray

import traceax as tx
from traceax._command.progress import progress
from traceax._command.table import Row

Run = Callable[[lx.AbstractLinearOperator, PRNGKeyArray], tx.Estimate]


class Task(NamedTuple):
    """An operator, and what there is to estimate of it.

    `runs`, by the names that are printed, begin with the front door; `real` says that the
    answer is, and `exact` it, where that is known.
    """

    heading: str
    operator: lx.AbstractLinearOperator
    runs: dict[str, Run]
    exact: float | complex | None
    real: bool = True


class Compiled(NamedTuple):
    """An estimator compiled for an operator, and what it says."""

    name: str
    again: Callable[[], tx.Estimate]
    estimate: tx.Estimate

    def seconds(self) -> float:
        """The best of three runs, or of as many as begin within a fifth of a second."""
        times: list[float] = []
        while len(times) < 3 and sum(times) < 0.2:
            start = time.perf_counter()
            jax.block_until_ready(self.again())
            times.append(time.perf_counter() - start)
        return min(times)


def compiled(task: Task, seed: int) -> Iterator[Compiled]:
    """In the order of the task; two are compiled at a time, which is most of the work."""
    arguments = task.operator, jax.random.key(seed)
    with ThreadPoolExecutor(2) as pool:
        waiting = {
            name: pool.submit(_compile, run, *arguments) for name, run in task.runs.items()
        }
        for name, future in waiting.items():
            with progress(name):
                again = partial(future.result(), *arguments)
                yield Compiled(name, again, jax.block_until_ready(again()))


def only(name: str, run: Run, operator: lx.AbstractLinearOperator, seed: int) -> Compiled:
    """What stands alone, with nothing beside it."""
    (found,) = compiled(Task("", operator, {name: run}, None), seed)
    return found


def _compile(run: Run, *arguments: Any) -> Callable[..., tx.Estimate]:
    jitted: Any = eqx.filter_jit(run)
    return jitted.lower(*arguments).compile()


def as_row(found: Compiled, *, real: bool) -> Row:
    with progress(found.name):
        seconds = found.seconds()
    estimate = found.estimate
    # lineax has no tag for Hermitian: the estimate of a real trace may come out complex.
    value = estimate.value.real.item() if real else estimate.value.item()
    error = estimate.standard_error.item()
    return Row(found.name, value, error, int(estimate.num_matvecs), seconds)


def interval(found: Compiled, *, real: bool) -> tuple[float, float] | None:
    """In which 95 % of such answers are; complex numbers have none."""
    if not real:
        return None
    estimate = found.estimate
    low, high = eqx.tree_at(lambda e: e.value, estimate, estimate.value.real).interval()
    return low.item(), high.item()


def split(num_matvecs: int, *, probes_a_step: float) -> dict[str, Any]:
    """Probes and steps of a budget, two of each at least."""
    num_steps = max(2, int(np.sqrt(num_matvecs / probes_a_step)))
    num_steps = min(num_steps, max(2, num_matvecs // 2))
    return {"num_probes": max(2, num_matvecs // num_steps), "num_steps": num_steps}
