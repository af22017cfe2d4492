"""Intervals of everything that takes a pattern, half of the time the wrong one.

`python -m tests.benchmarks.patterns [--keys 128] [--functions trace ...] [--double]`,
from the root of the repository.

Six graphs of 200 dimensions, twelve operators on each. The pattern is the graph of the
Laplacian L. The first six operators have it, or their entries decay with distances in it:
L + I/2, L with random signs, (L + I/2)^-1, (L + I/10)^-1, exp(-L), and L with independent
entries, which is not symmetric. The others are not covered: L + I/2 and (L + I/2)^-1 in
another order, L plus a weak dense part, L plus entries between dimensions of one colour, L
plus rank 3, a random matrix. Where a function needs it, the operator is made positive
definite, by its square plus I/2.

*held* is the share of keys whose `interval(0.95)` has the truth, the least of all six
operators; *ratio* is the median bar over the root mean square error, where it is largest
and smallest (of errors that are not rounding). For `selected_entries`, all are shares of
entries and keys.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.spatial
from jaxtyping import Float, Inexact

import traceax as tx

N, BUDGET = 200, 25
Dense = Float[np.ndarray, "n n"]


def graphs() -> dict[str, Dense]:
    """Adjacency matrices, whose largest components count."""
    rng = np.random.default_rng(0)
    chain = np.eye(N, k=1) + np.eye(N, k=-1)
    small = chain.copy()
    ends = rng.integers(0, N, (2, N // 10))
    small[ends[0], ends[1]] = small[ends[1], ends[0]] = 1
    tree = np.zeros((N, N))
    child = np.arange(1, N)
    tree[child, (child - 1) // 2] = tree[(child - 1) // 2, child] = 1
    line = lambda m: np.eye(m, k=1) + np.eye(m, k=-1)  # noqa: E731
    grid = np.kron(line(10), np.eye(20)) + np.kron(np.eye(10), line(20))
    points = rng.uniform(size=(N, 2))
    near = scipy.spatial.distance.cdist(points, points) < 0.1
    sparse = rng.uniform(size=(N, N)) < 1.5 / N
    found = {"chain": chain, "grid": grid, "tree": tree, "small world": small}
    found |= {"geometric": near.astype(float), "random": (sparse | sparse.T).astype(float)}
    for matrix in found.values():
        np.fill_diagonal(matrix, 0)
    return found


def operators(adjacency: Dense, colours: Any) -> dict[str, Dense]:
    rng, eye = np.random.default_rng(1), np.eye(N)
    laplacian = np.diag(np.sum(adjacency, axis=1)) - adjacency
    signs = np.triu(rng.choice([-1.0, 1.0], (N, N)))
    signs = np.triu(signs, 1).T + signs
    order = rng.permutation(N)
    inverse = np.linalg.inv(laplacian + eye / 2)
    dense = rng.normal(size=(N, N)) / N**0.5
    dense = (dense + dense.T) / 2
    same = (colours[:, None] == colours) & (rng.uniform(size=(N, N)) < 0.3)
    same = (same | same.T) & ~eye.astype(bool)
    low = rng.normal(size=(N, 3))
    return {
        "L": laplacian + eye / 2,
        "signs": laplacian * signs,
        "inverse, 1/2": inverse,
        "inverse, 1/10": np.linalg.inv(laplacian + eye / 10),
        "exp(-L)": np.asarray(scipy.linalg.expm(-laplacian)),
        "not symmetric": laplacian * rng.normal(size=(N, N)),
        "L in another order": (laplacian + eye / 2)[order][:, order],
        "inverse in another order": inverse[order][:, order],
        "weak dense part": laplacian + 0.1 * dense,
        "in one colour": laplacian + 0.3 * same * signs,
        "rank 3": laplacian + low @ low.T / N**0.5,
        "random": dense,
    }


def positive(matrix: Dense) -> Dense:
    if np.allclose(matrix, matrix.T) and np.linalg.eigvalsh(matrix)[0] > 1e-3:
        return matrix
    return matrix @ matrix.T + np.eye(N) / 2


def operator(matrix: Any, *tags: object) -> lx.AbstractLinearOperator:
    structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tags)


PSD = lx.positive_semidefinite_tag
Case = tuple[Callable[..., Any], Callable[[Dense], Any], bool]
POINTS = 128


def _log_trace(matrix: Dense) -> float:
    return float(np.sum(np.log(np.linalg.eigvalsh(matrix))))


def _root(matrix: Dense) -> float:
    return float(np.sum(np.sqrt(np.linalg.eigvalsh(matrix))))


def functions(pattern: Dense) -> dict[str, Case]:
    """Of each function: a call, its truth, whether operators are positive definite."""
    rows, columns = np.nonzero(pattern)
    sampler = tx.probing(pattern, num_colours=BUDGET - 1)
    return {
        "trace": (
            lambda a, key: tx.trace(operator(a), key, BUDGET, pattern=pattern),
            np.trace,
            False,
        ),
        "trace, symmetric": (
            lambda a, key: tx.trace(operator(a, PSD), key, BUDGET, pattern=pattern),
            np.trace,
            True,
        ),
        "trace, 60 matvecs": (
            lambda a, key: tx.trace(operator(a), key, 60, pattern=pattern),
            np.trace,
            False,
        ),
        "hutchinson_trace": (
            lambda a, key: tx.hutchinson_trace(operator(a), key, BUDGET, sampler=sampler),
            np.trace,
            False,
        ),
        "diagonal": (
            lambda a, key: tx.diagonal(operator(a), key, BUDGET, pattern=pattern),
            np.diag,
            False,
        ),
        "selected_entries": (
            lambda a, key: tx.selected_entries(operator(a), pattern, key, BUDGET),
            lambda matrix: matrix[rows, columns],
            False,
        ),
        "function_trace": (
            lambda a, key: tx.function_trace(
                operator(a, PSD), jnp.sqrt, key, POINTS, pattern=pattern
            ),
            _root,
            True,
        ),
        "logdet": (
            lambda a, key: tx.logdet(operator(a, PSD), key, POINTS, pattern=pattern),
            _log_trace,
            True,
        ),
        "slq_trace": (
            lambda a, key: tx.slq_trace(
                operator(a, PSD),
                jnp.log,
                key,
                num_probes=BUDGET,
                num_steps=8,
                sampler=sampler,
            ),
            _log_trace,
            True,
        ),
        "arnoldi_trace": (
            lambda a, key: tx.arnoldi_trace(
                operator(a), jnp.exp, key, POINTS, pattern=pattern
            ),
            lambda matrix: np.trace(np.asarray(scipy.linalg.expm(matrix))),
            False,
        ),
    }


def measure(
    call: Callable[..., Any], truth: Callable[[Dense], Any], matrices: Any, keys: Any
) -> list[tuple[float, float, float, float]]:
    """Of each operator: error, median bar, share of intervals, size of the truth."""

    def one(matrix: Any, key: Any) -> Any:
        found = call(matrix, key)
        low, high = found.interval(0.95)
        return found.value, found.standard_error, low, high

    run = jax.jit(lambda a, keys: jax.lax.map(partial(one, a), keys))
    rows = []
    for matrix in matrices:
        value, bar, low, high = (np.asarray(x) for x in run(matrix, keys))
        true: Inexact[np.ndarray, ...] = np.asarray(truth(np.asarray(matrix, float)))
        error = np.sqrt(np.mean(np.abs(value - true) ** 2))
        held = np.mean((low <= true) & (true <= high))
        rows.append((error, np.median(bar), held, np.sqrt(np.mean(np.abs(true) ** 2))))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=128)
    parser.add_argument("--functions", nargs="*")
    parser.add_argument("--graphs", nargs="*")
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--all", action="store_true", help="a line for each operator")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", arguments.double)
    keys = jax.random.split(jax.random.key(3), arguments.keys)
    eps = float(jnp.finfo(float).eps)
    print(f"{'function':<20}{'graph':<13}{'pattern':<9}{'held':>6}   {'ratio':<14}worst")
    for where, adjacency in graphs().items():
        if arguments.graphs and where not in arguments.graphs:
            continue
        pattern = adjacency + np.eye(N)
        colours = tx.colouring(pattern, num_colours=BUDGET - 1)
        named = operators(adjacency, colours)
        for name, (call, truth, is_positive) in functions(pattern).items():
            if arguments.functions and name not in arguments.functions:
                continue
            made = [positive(a) if is_positive else a for a in named.values()]
            rows = measure(call, truth, [jnp.asarray(a, float) for a in made], keys)
            for half, label in ((slice(6), "covers"), (slice(6, 12), "does not")):
                part, names = rows[half], list(named)[half]
                worst = min(range(len(part)), key=lambda i: part[i][2])
                ratios = [bar / e for e, bar, _, size in part if e > 1e3 * eps * size]
                shown = f"{min(ratios):.2g} to {max(ratios):.2g}" if ratios else "rounding"
                least = f"{part[worst][2]:.2f}"
                head = f"{name:<20}{where:<13}{label:<9}"
                print(f"{head}{least:>6}   {shown:<14}{names[worst]}", flush=True)
            if arguments.all:
                for what, (error, bar, held, size) in zip(named, rows, strict=True):
                    line = f"{error:>10.2e}{bar:>10.2e}{held:>6.2f}  of {size:.3g}"
                    print(f"    {what:<26}{line}", flush=True)


if __name__ == "__main__":
    main()
