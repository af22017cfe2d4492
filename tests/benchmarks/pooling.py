"""Pools of runs: how honest they are, beside their parts.

`python -m tests.benchmarks.pooling [--pools 300]`, from the root of the repository.

Four spectra, n = 300; runs of one kind with independent keys, 2, 8 and 50 in a pool, and
four of different budgets. *z* is the root mean square error over that of the standard
error, *held* the share of `interval(0.95)` that holds the truth.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tx
from tests.benchmarks.accuracy import spectra, with_spectrum
from tests.benchmarks.scores import verdict

N = 300
Run = Callable[[Any, int], tx.Estimate]


def kinds(matrix: Any) -> dict[str, tuple[Run, int, tuple[int, ...]]]:
    """Each with its budget, and the budgets of a mixed pool."""
    structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
    general = lx.FunctionLinearOperator(lambda v: matrix @ v, structure, lx.symmetric_tag)
    positive = lx.TaggedLinearOperator(general, lx.positive_semidefinite_tag)
    few, many = (4, 10, 20, 40), (12, 20, 30, 50)
    return {
        "one probe": (lambda k, m: tx.hutchinson_trace(general, k, m), 1, (1, 1, 1, 4)),
        "hutchinson_trace": (lambda k, m: tx.hutchinson_trace(general, k, m), 10, few),
        "xtrace": (lambda k, m: tx.xtrace(general, k, m), 20, many),
        "trace": (lambda k, m: tx.trace(general, k, m), 20, many),
        "xnystrace": (lambda k, m: tx.xnystrace(positive, k, m), 20, many),
        "xdiag": (lambda k, m: tx.xdiag(general, k, m), 20, many),
    }


def score(
    pooled: Callable[[Any], tx.Estimate], truth: Any, keys: Any
) -> tuple[float, float]:
    def judge(key: Any) -> Any:
        estimate = pooled(key)
        low, high = estimate.interval()
        held = (low <= truth) & (truth <= high)
        return (estimate.value - truth) ** 2, estimate.standard_error**2, held

    errors, bars, held = jax.jit(lambda keys: jax.lax.map(judge, keys))(keys)
    return float(jnp.sqrt(jnp.mean(errors) / jnp.mean(bars))), float(jnp.mean(held))


def pools(run: Run, budget: int, mixed: tuple[int, ...]) -> dict[str, Callable[..., Any]]:
    def alike(count: int) -> Callable[[Any], tx.Estimate]:
        def of(key: Any) -> tx.Estimate:
            keys = jax.random.split(key, count)
            return tx.pool(jax.lax.map(lambda k: run(k, budget), keys))

        return of

    def different(key: Any) -> tx.Estimate:
        keys = jax.random.split(key, len(mixed))
        return tx.pool([run(k, m) for k, m in zip(keys, mixed, strict=True)])

    return {"2": alike(2), "8": alike(8), "50": alike(50), "mixed": different}


def main(num_pools: int = 300) -> None:
    jax.config.update("jax_enable_x64", True)
    keys = jax.random.split(jax.random.key(1), num_pools)
    lowest = []
    print(
        f"{'spectrum':<10}{'runs':<18}"
        + "".join(f"{c:>16}" for c in ("2", "8", "50", "mixed"))
    )
    for spectrum, values in spectra(N).items():
        matrix = with_spectrum(values, jax.random.key(0))
        for name, (run, budget, mixed) in kinds(matrix).items():
            truth = jnp.diagonal(matrix) if name == "xdiag" else jnp.trace(matrix)
            cells = []
            for count, pooled in pools(run, budget, mixed).items():
                z, held = score(pooled, truth, keys)
                cells.append(f"z {z:.2f}, {held:.1%}")
                lowest.append((held, f"{name} of {spectrum}, {count}"))
            print(
                f"{spectrum:<10}{name:<18}" + "".join(f"{c:>16}" for c in cells), flush=True
            )
    held, which = min(lowest)
    verdict(held >= 0.92, "pools hold at least 92 %, the lowest", f"{held:.1%} ({which})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="How honest pools are.")
    parser.add_argument("--pools", type=int, default=300)
    main(parser.parse_args().pools)
