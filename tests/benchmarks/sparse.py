"""Sparse operators beside BCOO, BCSR and SciPy: seconds of a trace and of its gradient.

`python -m tests.benchmarks.sparse [--dimensions 100000]`, from the root of the repository.

`hutchinson_trace` with 50 probes, float32, compiled, and its value with the gradient in all
entries: of `as_operator`, and of functions that apply a BCOO and a BCSR to one vector.
SciPy's is one product of a CSR matrix with a block of 50 vectors. Milliseconds, the
medians of seven rounds in which all take turns; and how many times as long as ours. The
graphs: ten random entries a row; preferential attachment, whose degrees follow a power law;
a grid of two axes.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import networkx
import numpy as np
import scipy.sparse
from jax.experimental.sparse import BCOO, BCSR

import traceax as tx

PROBES, ROUNDS = 50, 7
diags: Any = scipy.sparse.diags_array


def graphs(n: int) -> Iterator[tuple[str, Any]]:
    rng, side = np.random.default_rng(0), int(n**0.5)
    places = np.repeat(np.arange(n), 10), rng.integers(0, n, 10 * n)
    yield "ten a row", scipy.sparse.csr_array((rng.normal(size=10 * n), places), (n, n))
    attached = networkx.barabasi_albert_graph(n, 5, seed=0)
    yield "power law", scipy.sparse.csr_array(networkx.to_scipy_sparse_array(attached))
    path = diags(np.ones((2, side)), offsets=[-1, 1], shape=(side, side))
    yield "grid", scipy.sparse.csr_array(scipy.sparse.kronsum(path, path))


def operators(matrix: Any) -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """Data, and the operator that is made of them."""
    n, coo, csr = matrix.shape[0], BCOO.from_scipy_sparse(matrix), BCSR.from_scipy_sparse
    csr, structure = csr(matrix), jax.ShapeDtypeStruct((n,), jnp.float32)

    def of(product: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        return lambda data: lx.FunctionLinearOperator(lambda v: product(data, v), structure)

    return {
        "traceax": (
            coo.data,
            lambda data: tx.as_operator(BCOO((data, coo.indices), shape=(n, n))),
        ),
        "BCOO": (coo.data, of(lambda d, v: BCOO((d, coo.indices), shape=(n, n)) @ v)),
        "BCSR": (
            csr.data,
            of(lambda d, v: BCSR((d, csr.indices, csr.indptr), shape=(n, n)) @ v),
        ),
    }


def calls(matrix: Any, *, gradient: bool) -> dict[str, Callable[[], Any]]:
    key, found = jax.random.key(0), {}
    for name, (data, make) in operators(matrix).items():

        def value(data: Any, make: Any = make) -> Any:
            return tx.hutchinson_trace(make(data), key, PROBES).value

        run = jax.jit(jax.value_and_grad(value) if gradient else value)
        found[name] = lambda run=run, data=data: jax.block_until_ready(run(data))
    if not gradient:
        block = np.random.default_rng(1).normal(size=(matrix.shape[0], PROBES))
        block = block.astype(np.float32)
        found["SciPy"] = lambda: matrix @ block
    return found


def milliseconds(sides: dict[str, Callable[[], Any]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(ROUNDS + 1):
        for name, call in sides.items():
            start = time.perf_counter()
            call()
            if turn > 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: float(np.median(each)) for name, each in times.items()}


def main(n: int) -> None:
    print(f"n = {n}, {PROBES} probes, float32. Milliseconds (times ours).\n")
    print(f"{'':<20}{'longest row':>12}{'traceax':>9}{'BCOO':>14}{'BCSR':>14}{'SciPy':>14}")
    for name, matrix in graphs(n):
        matrix, longest = matrix.astype(np.float32), np.diff(matrix.indptr).max()
        for gradient in (False, True):
            found = milliseconds(calls(matrix, gradient=gradient))
            title = f"{name}{', gradient' * gradient}"
            ours = found.pop("traceax")
            others = "".join(f"{t:>7.0f} ({t / ours:.2f})" for t in found.values())
            print(f"{title:<20}{longest:>12}{ours:>9.0f}{others}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dimensions", type=int, default=100_000)
    main(parser.parse_args().dimensions)
