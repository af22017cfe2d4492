"""First calls outside of `jax.jit`, and first calls of the same in it.

`python -m tests.benchmarks.first_calls [--repeats 3] [NAME ...]`, from the root of the
repository, on a machine that does nothing else; three minutes.

A dense positive definite matrix, n = 1000, in a function that is made anew at every call,
100 matvecs, float32; value and standard error. Columns are the seconds of the first call of
a process, those of its second, which should be running time alone, and, in a process of its
own, those of the first call of the whole in `jax.jit`. The ratio is the first column to the
third: above 1 whoever does not write `jax.jit` waits longer. Processes of either kind take
turns, medians; none reads programs that another has compiled.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, PRNGKeyArray

import traceax as tx
from tests.benchmarks.speed import Matrix, seconds

N, NUM_MATVECS = 1000, 100
QUADRATURE: dict[str, Any] = {"num_probes": 5, "num_steps": NUM_MATVECS // 5}
PSD = lx.positive_semidefinite_tag

ESTIMATORS: dict[str, Callable[..., tx.Estimate]] = {
    "xtrace": partial(tx.xtrace, num_matvecs=NUM_MATVECS),
    "hutchinson_trace": partial(tx.hutchinson_trace, num_matvecs=NUM_MATVECS),
    "hutchpp_trace": partial(tx.hutchpp_trace, num_matvecs=NUM_MATVECS),
    "slq_trace": lambda a, key: tx.slq_trace(a, lambda x: jnp.log(x), key, **QUADRATURE),
    "function_trace": lambda a, key: tx.function_trace(
        a, lambda x: jnp.log(x), key, NUM_MATVECS
    ),
    "logdet": partial(tx.logdet, num_matvecs=NUM_MATVECS),
    "schatten_norm": lambda a, key: tx.schatten_norm(a, 1, key, **QUADRATURE),
}


def run(name: str, in_jit: bool) -> None:
    """Print the seconds of the first call and of the second."""

    def call(matrix: Matrix, key: PRNGKeyArray) -> tuple[Array, Array]:
        space = jax.ShapeDtypeStruct((N,), matrix.dtype)
        operator = lx.FunctionLinearOperator(lambda v: matrix @ v, space, PSD)
        found = ESTIMATORS[name](operator, key=key)
        return found.value, found.standard_error

    matrix = jax.random.normal(jax.random.key(0), (N, N))
    matrix = jax.block_until_ready(matrix @ matrix.T / N + jnp.eye(N))
    keys = jax.block_until_ready(jax.random.split(jax.random.key(1)))
    function = jax.jit(call) if in_jit else call
    print(*(seconds(partial(function, matrix, key)) for key in keys))


def afresh(name: str, how: str) -> list[float]:
    """The seconds of the first call of a process, and of its second."""
    command = [sys.executable, "-m", "tests.benchmarks.first_calls", name, "--how", how]
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return [float(word) for word in done.stdout.split()]


def main(names: list[str], repeats: int) -> None:
    print(f"n = {N}, {NUM_MATVECS} matvecs, medians of {repeats} processes.\n")
    columns = f"{'first':>10}{'second':>10}{'jit, first':>12}{'ratio':>8}"
    print(f"{'seconds':<20}{columns}", flush=True)
    for name in names or ESTIMATORS:
        rows = [(*afresh(name, "eager"), *afresh(name, "jit")) for _ in range(repeats)]
        first, second, jitted, _ = map(median, zip(*rows, strict=True))
        times = f"{first:>10.2f}{second:>10.3f}{jitted:>12.2f}{first / jitted:>8.2f}"
        print(f"{name:<20}{times}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ESTIMATORS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--how", choices=["eager", "jit"], help="one process's part")
    given = parser.parse_args()
    if given.how:
        run(given.names[0], given.how == "jit")
    else:
        main(given.names, given.repeats)
