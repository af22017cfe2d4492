"""How well an estimate of many entries did, over keys."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray

import traceax as tx
from tests.benchmarks.accuracy import Run

Matrix = Float[Array, "n n"]
Estimator = Callable[[Matrix, PRNGKeyArray], Run]
Operator = Callable[[Matrix], lx.AbstractLinearOperator]

SEMIDEFINITE = (lx.symmetric_tag, lx.positive_semidefinite_tag)


def ours(
    function: Callable[..., tx.Estimate], as_operator: Operator, num_matvecs: int
) -> Estimator:
    def estimate(matrix: Matrix, key: PRNGKeyArray) -> Run:
        result = function(as_operator(matrix), key, num_matvecs)
        return Run(result.value, *result.interval(0.95))

    return estimate


def over_keys(estimate: Estimator) -> Callable[[Matrix, PRNGKeyArray], Run]:
    """One key after another: see `accuracy.repeat`."""
    return jax.jit(lambda matrix, keys: jax.lax.map(partial(estimate, matrix), keys))


class Score(NamedTuple):
    """The error and the share held, each with its standard error over the keys (of the
    error a relative one); the share is infinite where there is no interval."""

    error: float
    error_noise: float
    held: float
    held_noise: float


def score(run: Run, truth: Float[Array, "..."]) -> Score:
    num_keys = run.value.shape[0]

    def by_key(entries: Array) -> tuple[float, float]:
        means = jnp.mean(entries.reshape(num_keys, -1), axis=1)
        return float(jnp.mean(means)), float(jnp.std(means) / (num_keys - 1) ** 0.5)

    mean, noise = by_key((run.value - truth) ** 2)
    error = (mean / float(jnp.mean(truth**2))) ** 0.5
    if not jnp.all(jnp.isfinite(run.high)):
        return Score(error, noise / (2 * mean), jnp.inf, 0.0)
    held = by_key((run.low <= truth) & (truth <= run.high))
    return Score(error, noise / (2 * mean), *held)


def verdict(passed: bool, claim: str, figures: str) -> None:
    print(f"{'PASS' if passed else 'FAIL'}  {claim}: {figures}")


def claim_intervals(shares: list[tuple[Score, str]]) -> None:
    shares = sorted(shares, key=lambda entry: entry[0].held)
    low = [entry for entry in shares if entry[0].held < 0.88]
    figures = "".join(
        f"\n      {score.held:.1%} +- {score.held_noise:.1%}: {where}"
        for score, where in low or shares[:1]
    )
    verdict(not low, "interval(0.95) holds >= 88 % in every cell, the lowest", figures)


# What traceax draws from a key: sums over probes draw each by a key of its own.


def one_by_one(sampler: Any, structure: Any, num_probes: int) -> Callable[..., Array]:
    def draw(key: PRNGKeyArray) -> Array:
        keys = jax.random.split(key, num_probes)
        return jax.vmap(lambda key: sampler(key, structure, 1)[0])(keys)

    return draw


def all_together(sampler: Any, structure: Any, num_probes: int) -> Callable[..., Array]:
    return partial(sampler, structure=structure, num_probes=num_probes)
