"""LAPACK's threads: running times with as many as it starts by itself, over those with one.

`python -m tests.benchmarks.threads [--repeats 3]`, from the root of the repository, on a
machine that does nothing else; two minutes.

A dense positive definite matrix in a function, n = 2000, float64, `logdet` and
`inv_quad_logdet` of 100 and of 240 matvecs, compiled. Processes with one thread of OpenBLAS
(`OPENBLAS_NUM_THREADS=1`) and with its default take turns. Each prints the median of 15
runs; columns are the medians of these, and the smallest and the largest ratio of two
processes that ran one after the other.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tx
from tests.benchmarks.speed import seconds

N, RUNS = 2000, 15
CASES = [(name, m) for name in ("logdet", "inv_quad_logdet") for m in (100, 240)]


def run(name: str, num_matvecs: int) -> None:
    """Print the median of the seconds of a run."""
    jax.config.update("jax_enable_x64", True)
    matrix = jax.random.normal(jax.random.key(0), (N, N))
    matrix = jax.block_until_ready(matrix @ matrix.T / N)
    space, vector = jax.ShapeDtypeStruct((N,), matrix.dtype), jnp.ones(N)
    tag = lx.positive_semidefinite_tag

    @jax.jit
    def call(matrix: jax.Array, key: jax.Array) -> Any:
        operator = lx.FunctionLinearOperator(lambda v: matrix @ v, space, tag)
        if name == "logdet":
            return tx.logdet(operator, key, num_matvecs, shift=0.01)
        return tx.inv_quad_logdet(operator, vector, key, num_matvecs, shift=0.01)

    key = jax.random.key(1)
    jax.block_until_ready(call(matrix, key))
    timed: Callable[[], Any] = lambda: call(matrix, key)  # noqa: E731
    print(median(seconds(timed) for _ in range(RUNS)))


def in_a_process(name: str, num_matvecs: int, threads: str | None) -> float:
    command = [sys.executable, "-m", "tests.benchmarks.threads", "--case", name]
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    if threads is not None:
        environment["OPENBLAS_NUM_THREADS"] = threads
    done = subprocess.run(
        [*command, str(num_matvecs)], env=environment, stdout=subprocess.PIPE, check=True
    )
    return float(done.stdout)


def main(repeats: int) -> None:
    print(f"n = {N}; seconds, medians of {repeats} processes.\n")
    print(f"{'':<24}{'default':>9}{'one':>9}{'ratio':>8}{'least':>8}{'most':>8}")
    for name, num_matvecs in CASES:
        pairs = [
            tuple(in_a_process(name, num_matvecs, threads) for threads in (None, "1"))
            for _ in range(repeats)
        ]
        ratios = sorted(default / one for default, one in pairs)
        default, one = (median(column) for column in zip(*pairs, strict=True))
        times = f"{default:>9.3f}{one:>9.3f}{default / one:>8.2f}"
        print(f"{f'{name}, {num_matvecs}':<24}{times}{ratios[0]:>8.2f}{ratios[-1]:>8.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", nargs=2, help="one process's part")
    given = parser.parse_args()
    if given.case:
        run(given.case[0], int(given.case[1]))
    else:
        main(given.repeats)
