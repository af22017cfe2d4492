"""Probes that know a graph against probes that do not, at equal matvecs.

`python -m tests.benchmarks.probing [--keys 20]`, from the root of the repository.

The diagonal of the inverse of a precision matrix on a 32 x 32 grid, a Laplacian of 5 points
plus kappa^2: the larger kappa, the faster correlations decay. `probing` gets as many
colours as the budget has matvecs, or a third as many, so that they repeat and there is an
error bar: those of the largest power of the pattern that needs no more. It may spend less
than the budget. The error is the root mean square over keys and entries, relative to that
of the true entries; *held* the share of entries in `interval(0.95)`; a factor the error of
an unstructured estimator over that of probing.
"""

import argparse
import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Float, Int

import traceax as tx
from tests.benchmarks.scores import (
    SEMIDEFINITE,
    Matrix,
    Score,
    claim_intervals,
    ours,
    over_keys,
    score,
    verdict,
)

SIDE = 32
KAPPAS_SQUARED = (0.1, 1.0)
GRID_BUDGETS = (25, 50, 100)
MOST_POWER = 16  # needs more colours than any budget has


class GridCell(NamedTuple):
    """One estimator on one grid with one budget; `spent` no more than that."""

    name: str
    kappa_squared: float
    num_matvecs: int
    spent: int
    score: Score

    @property
    def is_probing(self) -> bool:
        return self.name.startswith("probing")


def precision(kappa_squared: float) -> Float[np.ndarray, "n n"]:
    """The Laplacian of 5 points, zero beyond the edges, plus kappa^2."""
    one = np.eye(SIDE)
    path = 2 * one - np.eye(SIDE, k=1) - np.eye(SIDE, k=-1)
    return np.kron(path, one) + np.kron(one, path) + kappa_squared * np.eye(SIDE**2)


@cache
def colours(power: int) -> Int[np.ndarray, " n"]:
    return tx.colouring(precision(1.0), power)


def largest_power(most: int) -> int:
    """Of the pattern, that `most` colours are enough for. Greedy colouring may need fewer
    for a larger power."""
    powers = [p for p in range(1, MOST_POWER + 1) if colours(p).max() < most]
    return max(powers)


def as_function(matrix: Matrix) -> lx.AbstractLinearOperator:
    structure = jax.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, SEMIDEFINITE)


def on_grid(kappa_squared: float, num_matvecs: int, num_keys: int) -> list[GridCell]:
    inverse = jnp.linalg.inv(jnp.asarray(precision(kappa_squared)))
    keys = jax.random.split(jax.random.key(1), num_keys)
    functions: dict[str, tuple[Callable[..., tx.Estimate], int]] = {
        "hutchinson_diagonal": (tx.hutchinson_diagonal, num_matvecs),
        "xdiag": (tx.xdiag, num_matvecs // 2 * 2),
        "xnysdiag": (tx.xnysdiag, num_matvecs),
    }
    for repeats in (1, 3):
        power = largest_power(num_matvecs // repeats)
        sampler = tx.probing(colours(power))
        name = f"probing, power {power}, {sampler.num_colours} colours"
        spent = num_matvecs // sampler.num_colours * sampler.num_colours
        functions[name] = partial(tx.hutchinson_diagonal, sampler=sampler), spent
    cells = []
    for name, (function, spent) in functions.items():
        run = over_keys(ours(function, as_function, spent))(inverse, keys)
        outcome = score(run, jnp.diagonal(inverse))
        cells.append(GridCell(name, kappa_squared, num_matvecs, spent, outcome))
    return cells


def unstructured(cells: list[GridCell], probed: GridCell) -> list[GridCell]:
    """What else was measured on the same grid with the same budget."""
    same = (probed.kappa_squared, probed.num_matvecs)
    return [
        cell
        for cell in cells
        if (cell.kappa_squared, cell.num_matvecs) == same and not cell.is_probing
    ]


def print_grid(cells: list[GridCell]) -> None:
    print(
        f"{'':<64}{'factor of probing over':>30}\n{'estimator':<35}{'kappa^2':>7}"
        f"{'matvecs':>8}{'spent':>6}{'error':>10}{'held':>8}"
        f"{'hutchinson':>12}{'xdiag':>7}{'xnysdiag':>10}"
    )
    for cell in cells:
        held = f"{cell.score.held:.1%}" if math.isfinite(cell.score.held) else "none"
        row = (
            f"{cell.name:<35}{cell.kappa_squared:>7}{cell.num_matvecs:>8}{cell.spent:>6}"
            f"{cell.score.error:>10.2e}{held:>8}"
        )
        if cell.is_probing:
            for other, width in zip(unstructured(cells, cell), (12, 7, 10), strict=True):
                row += f"{other.score.error / cell.score.error:>{width}.1f}"
        print(row)


def claim_probing(grid: list[GridCell], kappa_squared: float) -> None:
    factors = [
        (other.score.error / cell.score.error, cell, other)
        for cell in grid
        if cell.is_probing and cell.kappa_squared == kappa_squared
        for other in unstructured(grid, cell)
    ]
    factor, cell, other = min(factors, key=lambda entry: entry[0])
    verdict(
        factor >= 3,
        f"probing beats all others by >= 3, kappa^2 = {kappa_squared}, at least",
        f"{factor:.1f} ({cell.name}, over {other.name}, {cell.num_matvecs} matvecs)",
    )


def main(num_keys: int = 20) -> None:
    jax.config.update("jax_enable_x64", True)
    grid = [
        cell
        for kappa_squared in KAPPAS_SQUARED
        for budget in GRID_BUDGETS
        for cell in on_grid(kappa_squared, budget, num_keys)
    ]
    print(f"Inverse of a precision matrix on a grid of {SIDE} x {SIDE}, {num_keys} keys.\n")
    print_grid(grid)
    print()
    claim_intervals(
        [(c.score, f"{c.name}, kappa^2 {c.kappa_squared}, {c.num_matvecs}") for c in grid]
    )
    for kappa_squared in KAPPAS_SQUARED:
        claim_probing(grid, kappa_squared)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=20, help="keys for every number")
    main(parser.parse_args().keys)
