"""First calls: seconds of tracing and compilation, and the sizes of programs.

`python -m tests.benchmarks.compilation [NAME ...]`, from the root of the repository, on a
machine that does nothing else; three minutes.

A stored matrix in a plain function, n = 1000, float64, 100 matvecs: 10 probes of 10 steps
for quadratures, 50 probes for `xtrace`. Everything is in `jax.jit`, and gives the value and
the standard error, or the value and the gradient in the matrix. Columns are the seconds for
tracing and lowering in Python and for XLA, each the least of five that are taken in turn;
their sum over that of the peer in the last column, matfree's quadrature or XTrace of as
many matvecs, without an error bar; operations of the traced program; and loops that XLA
compiles by LLVM, most of which take 5 to 10 ms. *aim* is what the ratio should be at most.
No program is read from a cache.
"""

import argparse
import gc
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Array, PRNGKeyArray
from matfree import decomp, funm, stochtrace

import traceax as tx
from tests.benchmarks.speed import Matrix

N, NUM_MATVECS, REPEATS = 1000, 100, 5
RUN: dict[str, int] = {"num_probes": 10, "num_steps": 10}
PSD = lx.positive_semidefinite_tag
Function = Callable[[Matrix, PRNGKeyArray], Any]


def of(matrix: Matrix, *tags: object) -> lx.FunctionLinearOperator:
    space = jax.ShapeDtypeStruct((N,), matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, space, tags)


def slq(matrix: Matrix, key: PRNGKeyArray) -> Array:
    """By matfree, which has no error bar."""
    rule = decomp.tridiag_sym(10, reortho="full", custom_vjp=True)
    integrand = funm.monte_carlo_funm_sym_logdet(rule)
    return of_matfree(integrand, 10, stochtrace.estimator_monte_carlo)(matrix, key)


def xtrace(matrix: Matrix, key: PRNGKeyArray) -> Array:
    integrand = stochtrace.leave_one_out_xtrace()
    return of_matfree(integrand, 50, stochtrace.estimator_leave_one_out)(matrix, key)


def of_matfree(integrand: Any, num_probes: int, estimator: Callable) -> Function:
    sampler = stochtrace.sampler_sphere(jnp.zeros(N), num=num_probes)
    estimate = estimator(integrand, sampler)
    return lambda matrix, key: estimate(lambda v, matrix: matrix @ v, key, matrix)


def with_bar(estimator: Callable[..., tx.Estimate], *tags: object, **how: Any) -> Function:
    def function(matrix: Matrix, key: PRNGKeyArray) -> tuple[Array, Array]:
        estimate = estimator(of(matrix, *tags), key=key, **how)
        return estimate.value, estimate.standard_error

    return function


def likelihood(matrix: Matrix, key: PRNGKeyArray) -> Any:
    vector = jnp.ones(N, matrix.dtype)
    found = tx.inv_quad_logdet(of(matrix), vector, key, NUM_MATVECS, shift=0.1)
    parts = found.inv_quad, found.logdet
    return [part.value for part in parts], [part.standard_error for part in parts]


NEAR = tx.nearest_neighbours(range(N), 10)


def whitened(matrix: Matrix, key: PRNGKeyArray) -> tuple[Array, Array]:
    white = tx.vecchia(lambda i, j: matrix[i, j], NEAR)
    estimate = tx.logdet(of(matrix), key, NUM_MATVECS, whitening=white)
    return estimate.value, estimate.standard_error


def value_of(function: Function) -> Function:
    return lambda matrix, key: sum(jax.tree.leaves(function(matrix, key)[0]))


class Row(NamedTuple):
    """A function, the peer that its ratio is to, and what that should be at most."""

    function: Function
    peer: str
    aim: float


logdet = with_bar(partial(tx.logdet, num_matvecs=NUM_MATVECS))
ROWS = {
    "matfree slq": Row(slq, "matfree slq", 1),
    "slq_trace": Row(with_bar(tx.slq_trace, fn=jnp.log, **RUN), "matfree slq", 1.3),
    "slq_trace, bracket": Row(
        with_bar(tx.slq_trace, PSD, fn=jnp.sqrt, **RUN), "matfree slq", 1.3
    ),
    "function_trace": Row(
        with_bar(tx.function_trace, fn=jnp.log, num_matvecs=NUM_MATVECS), "matfree slq", 2
    ),
    "logdet": Row(logdet, "matfree slq", 2),
    "logdet, bracket": Row(
        with_bar(tx.logdet, PSD, num_matvecs=NUM_MATVECS, shift=0.1), "matfree slq", 2
    ),
    "inv_quad_logdet": Row(likelihood, "matfree slq", 2.5),
    "logdet, whitened": Row(whitened, "matfree slq", 2),
    "value of logdet": Row(value_of(logdet), "value of logdet", 1),
    "its gradient, too": Row(jax.value_and_grad(value_of(logdet)), "value of logdet", 1.7),
    "value of likelihood": Row(value_of(likelihood), "value of likelihood", 1),
    "and its gradient": Row(
        jax.value_and_grad(value_of(likelihood)), "value of likelihood", 1.7
    ),
    "matfree xtrace": Row(xtrace, "matfree xtrace", 1),
    "xtrace": Row(with_bar(tx.xtrace, num_matvecs=NUM_MATVECS), "matfree xtrace", 1.6),
    "trace": Row(with_bar(tx.trace, num_matvecs=NUM_MATVECS), "matfree xtrace", 1.6),
    "trace, semidefinite": Row(
        with_bar(tx.trace, PSD, num_matvecs=NUM_MATVECS), "matfree xtrace", 1.6
    ),
}


class Program(NamedTuple):
    tracing: float
    compiling: float
    operations: int
    loops: int


def sum_of_times(program: Program) -> float:
    return program.tracing + program.compiling


def jaxprs(value: Any) -> Iterator[Jaxpr]:
    """All that a parameter of an operation holds."""
    for leaf in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, Jaxpr)):
        if isinstance(leaf, Jaxpr | ClosedJaxpr):
            yield leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf


def operations(jaxpr: Jaxpr) -> int:
    inner = (
        operations(inner)
        for equation in jaxpr.eqns
        for parameter in equation.params.values()
        for inner in jaxprs(parameter)
    )
    return len(jaxpr.eqns) + sum(inner)


def compile_afresh(function: Function, matrix: Matrix, key: PRNGKeyArray) -> Program:
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    traced = jax.jit(function).trace(matrix, key)
    lowered = traced.lower()
    middle = time.perf_counter()
    text = lowered.compile().as_text() or ""
    end = time.perf_counter()
    # Products and large sums are not compiled but taken from a library, YNNPACK.
    fusions = re.findall(r"%(\S+) = \S+ fusion\(", text)
    loops = sum(not name.startswith("ynn") for name in fusions)
    size = operations(traced.jaxpr.jaxpr)
    return Program(middle - start, end - middle, size, loops)


def main(names: list[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_enable_compilation_cache", False)
    matrix, key = jnp.eye(N), jax.random.key(1)
    chosen = [name for name in ROWS if not names or name in names]
    peers = [row.peer for name, row in ROWS.items() if name in chosen]
    chosen = [name for name in ROWS if name in chosen or name in peers]
    compile_afresh(slq, matrix, key)  # the first compilation of a process is slow
    found: dict[str, list[Program]] = {name: [] for name in chosen}
    for _ in range(REPEATS):  # in turn, because the speed of a machine changes
        for name, runs in found.items():
            runs.append(compile_afresh(ROWS[name].function, matrix, key))
    best = {
        n: min(runs, key=lambda p: p.tracing + p.compiling) for n, runs in found.items()
    }
    print(f"n = {N}, {NUM_MATVECS} matvecs, float64; least of {REPEATS}.\n")
    titles = ("Python/s", "XLA/s", "ratio", "aim", "operations", "loops")
    print(f"{'':<22}" + "".join(f"{title:>11}" for title in titles) + "   peer")
    for name, program in best.items():
        row, peer = ROWS[name], best[ROWS[name].peer]
        ratio = sum_of_times(program) / sum_of_times(peer)
        times = f"{program.tracing:>11.2f}{program.compiling:>11.2f}"
        falls_short = " !"[ratio > row.aim]
        compared = f"{ratio:>10.2f}{falls_short}{row.aim:>11.1f}"
        sizes = f"{program.operations:>11}{program.loops:>11}"
        print(f"{name:<22}{times}{compared}{sizes}   {row.peer}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ROWS)}")
    main(parser.parse_args().names)
