"""What estimators cost beside the bare matvecs that they spend.

`python -m tests.benchmarks.overhead [float64]`, from the root of the repository.

One dense symmetric matrix, n = 4000, 100 matvecs; values alone, jitted. Beside each stands
`A @ block` for blocks as many and as wide as the batches of the estimator, one after the
other: in turn with it, medians. Drawing probes counts as the estimator's cost.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx

import traceax as tx
from tests.benchmarks.speed import Matrix, in_turn

N, REPEATS = 4000, 15
PSD = lx.positive_semidefinite_tag

# The widths of batches; of quadrature, steps of one vector for each probe.
ESTIMATORS: dict[str, tuple[Callable[..., tx.Estimate], tuple[int, ...]]] = {
    "hutchinson_trace": (partial(tx.hutchinson_trace, num_matvecs=100), (100,)),
    "hutchpp_trace": (partial(tx.hutchpp_trace, num_matvecs=100), (33, 33, 34)),
    "na_hutchpp_trace": (partial(tx.na_hutchpp_trace, num_matvecs=100), (25, 50, 25)),
    "xtrace": (partial(tx.xtrace, num_matvecs=100), (50, 50)),
    "xnystrace": (partial(tx.xnystrace, num_matvecs=100), (100,)),
    "hutchinson_diagonal": (partial(tx.hutchinson_diagonal, num_matvecs=100), (100,)),
    "diagpp": (partial(tx.diagpp, num_matvecs=100), (33, 33, 34)),
    "xdiag": (partial(tx.xdiag, num_matvecs=100), (50, 50)),
    "xnysdiag": (partial(tx.xnysdiag, num_matvecs=100), (100,)),
    "row_norms_squared": (partial(tx.row_norms_squared, num_matvecs=100), (50, 50)),
    "slq_trace, 10 steps": (
        lambda a, key: tx.slq_trace(a, jnp.log1p, key, num_probes=10, num_steps=10),
        (10,) * 10,
    ),
    "slq_trace, 20 steps": (
        lambda a, key: tx.slq_trace(a, jnp.log1p, key, num_probes=5, num_steps=20),
        (5,) * 20,
    ),
    "function_trace": (
        lambda a, key: tx.function_trace(as_function(a), jnp.log1p, key, 100),
        (5,) * 10 + (5,) * 10,
    ),
    "logdet": (
        lambda a, key: tx.logdet(as_function(a), key, 100, shift=1.0),
        (5,) * 10 + (5,) * 10,
    ),
}


def as_function(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """Else the automatic choices would have the answer from the entries."""
    return lx.FunctionLinearOperator(operator.mv, operator.in_structure(), PSD)


def bare(widths: tuple[int, ...]) -> Callable[..., Any]:
    def once(matrix: Matrix, key: Any) -> Any:
        def step(block: Any, width: int) -> Any:
            return matrix @ block[:, :1].repeat(width, axis=1)

        block = jnp.ones((N, 1), matrix.dtype)
        for width in widths:
            block = step(block, width)
        return block

    return once


def main(names: list[str], dtype: str) -> None:
    matrix = jax.random.normal(jax.random.key(0), (N, N), dtype) / N**0.5
    matrix = matrix @ matrix.T
    key = jax.random.key(1)
    print(f"n = {N}, {dtype}, medians of {REPEATS}.\n")
    print(f"{'milliseconds':<24}{'traceax':>10}{'bare':>10}{'ratio':>8}")
    for name in names or ESTIMATORS:
        estimator, widths = ESTIMATORS[name]

        def value(
            matrix: Matrix, key: Any, estimator: Callable[..., tx.Estimate] = estimator
        ) -> Any:
            return estimator(lx.MatrixLinearOperator(matrix, PSD), key=key).value

        mine = partial(jax.jit(value), matrix, key)
        other = partial(jax.jit(bare(widths)), matrix, key)
        in_turn(mine, other, 2)
        ours, theirs = in_turn(mine, other, REPEATS)
        print(f"{name:<24}{ours:>10.1f}{theirs:>10.1f}{ours / theirs:>8.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dtype", nargs="?", default="float32")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", given.dtype == "float64")
    main(given.names, given.dtype)
