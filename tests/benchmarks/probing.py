"""Probes that know a graph against probes that do not, at equal matvecs.

`python -m tests.benchmarks.probing [--keys 20]`, from the root of the repository.

The diagonal of the inverse of a precision matrix on a 32 x 32 grid, a Laplacian of 5 points
plus kappa^2: the larger kappa, the faster correlations decay. `probing` gets as many
colours as the budget has matvecs, or a third as many, which it then repeats. The same on
the road network of Minnesota, with its Laplacian. The error is the root mean square over
keys and entries, relative to that of the true entries; *held* the share of entries in
`interval(0.95)`; a factor the error of another estimator over that of probing.

Log-determinants with `pattern=` and without, of the Laplacian of a grid of 200 x 200 plus
0.1, from 240 matvecs: relative to the truth, which is known.

Traces with `pattern=`, by colours alone and without a pattern, where low modes dominate:
inverses of a Wilson-Dirac operator (16 x 16, random phases) and of Laplacians.

Then colourings alone, for a field of 64 x 64: what one repeat leaves, exactly, over all
signs.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse
from jaxtyping import Complex, Float

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
from tests.probes.helpers import grid as grid_graph
from tests.probes.helpers import laplacian, left, roads

SIDE, LARGE = 32, 64
KAPPAS_SQUARED = (0.1, 1.0)
BUDGETS = (25, 50, 100)
SHIFTS = (0.01, 0.1, 1.0)
FIELD = 0.0625  # kappa^2 of the field of 64 x 64


class Cell(NamedTuple):
    """One estimator on one graph with one budget; `spent` no more than that."""

    name: str
    graph: str
    kappa_squared: float
    num_matvecs: int
    spent: int
    score: Score

    @property
    def is_probing(self) -> bool:
        return self.name.startswith("probing")

    @property
    def is_once(self) -> bool:
        """Probing with as many colours as matvecs."""
        return self.name == f"probing, {self.num_matvecs} colours"


def grid(side: int) -> Float[np.ndarray, "n n"]:
    """The Laplacian of 5 points, zero beyond the edges."""
    one = np.eye(side)
    path = 2 * one - np.eye(side, k=1) - np.eye(side, k=-1)
    return np.kron(path, one) + np.kron(one, path)


def road_network() -> Float[np.ndarray, "n n"]:
    return laplacian(roads().astype(float))


def as_function(matrix: Matrix) -> lx.AbstractLinearOperator:
    structure = jax.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, SEMIDEFINITE)


def on_graph(
    name: str,
    pattern: Float[np.ndarray, "n n"],
    kappa_squared: float,
    num_matvecs: int,
    num_keys: int,
) -> list[Cell]:
    inverse = jnp.linalg.inv(jnp.asarray(pattern) + kappa_squared * jnp.eye(len(pattern)))
    keys = jax.random.split(jax.random.key(1), num_keys)
    functions: dict[str, tuple[Callable[..., tx.Estimate], int]] = {
        "hutchinson_diagonal": (tx.hutchinson_diagonal, num_matvecs),
        "diagonal, automatic": (tx.diagonal, num_matvecs),
        "diagonal, pattern=": (partial(tx.diagonal, pattern=pattern), num_matvecs),
    }
    for repeats in (1, 2, 3):
        sampler = tx.probing(pattern, num_colours=num_matvecs // repeats)
        spent = num_matvecs // sampler.num_colours * sampler.num_colours
        function = partial(tx.hutchinson_diagonal, sampler=sampler)
        functions[f"probing, {sampler.num_colours} colours"] = function, spent
    cells = []
    for what, (function, spent) in functions.items():
        run = over_keys(ours(function, as_function, spent))(inverse, keys)
        outcome = score(run, jnp.diagonal(inverse))
        cells.append(Cell(what, name, kappa_squared, num_matvecs, spent, outcome))
    return cells


def others(cells: list[Cell], probed: Cell) -> list[Cell]:
    """What knows no pattern, on the same graph with the same budget."""
    same = (probed.graph, probed.kappa_squared, probed.num_matvecs)
    return [
        cell
        for cell in cells
        if (cell.graph, cell.kappa_squared, cell.num_matvecs) == same
        and not cell.is_probing
        and "pattern" not in cell.name
    ]


def print_cells(cells: list[Cell]) -> None:
    print(
        f"{'':<68}{'factor of probing over':>24}\n{'estimator':<26}{'graph':<7}"
        f"{'kappa^2':>7}{'matvecs':>8}{'spent':>6}{'error':>10}{'held':>8}"
        f"{'hutchinson':>12}{'diagonal':>10}"
    )
    for cell in cells:
        held = f"{cell.score.held:.1%}" if math.isfinite(cell.score.held) else "none"
        row = (
            f"{cell.name:<26}{cell.graph:<7}{cell.kappa_squared:>7}{cell.num_matvecs:>8}"
            f"{cell.spent:>6}{cell.score.error:>10.2e}{held:>8}"
        )
        if cell.is_probing:
            for other, width in zip(others(cells, cell), (12, 10), strict=True):
                row += f"{other.score.error / cell.score.error:>{width}.1f}"
        print(row)


def claim_probing(cells: list[Cell], kappa_squared: float) -> None:
    factors = [
        (other.score.error / cell.score.error, cell, other)
        for cell in cells
        if cell.is_once and cell.kappa_squared == kappa_squared
        for other in others(cells, cell)
    ]
    factor, cell, other = min(factors, key=lambda entry: entry[0])
    verdict(
        factor >= 2,
        f"one repeat beats all others by >= 2, kappa^2 = {kappa_squared}, at least",
        f"{factor:.1f} ({cell.name}, {cell.graph}, over {other.name}, "
        f"{cell.num_matvecs} matvecs)",
    )


def claim_automatic(cells: list[Cell]) -> None:
    """Of one budget on one graph, the best of all that was measured."""
    worst, where = 0.0, ""
    for choice in (cell for cell in cells if "pattern" in cell.name):
        rivals = [*others(cells, choice), *(cell for cell in cells if cell.is_probing)]
        same = (choice.graph, choice.kappa_squared, choice.num_matvecs)
        errors = [
            cell.score.error
            for cell in rivals
            if (cell.graph, cell.kappa_squared, cell.num_matvecs) == same
        ]
        factor = choice.score.error / min(errors)
        if factor > worst:
            worst, where = factor, f"{choice.graph}, kappa^2 {choice.kappa_squared}"
    verdict(
        worst <= 1.01,
        "diagonal with a pattern loses to none of them, error over the best",
        f"at most {worst:.2f} ({where})",
    )


def print_colourings() -> None:
    """For a budget of 100, by what was there before and by what one makes by hand."""
    pattern = grid(LARGE)
    inverse = np.linalg.inv(laplacian(grid_graph(LARGE, LARGE)) + FIELD * np.eye(LARGE**2))
    i, j = np.indices((LARGE, LARGE))
    by_power = {power: tx.colouring(pattern, power=power) for power in (11, 12, 13)}
    found = tx.colouring(pattern, num_colours=100)
    print(
        f"\nA field of {LARGE} x {LARGE}, kappa^2 = {FIELD}: colours, error of one repeat"
    )
    rows = {
        "10 x 10 by hand": (i % 10 * 10 + j % 10).ravel(),
        "(i + 18 j) mod 100 by hand": ((i + 18 * j) % 100).ravel(),
        **{f"power {power}": colours for power, colours in by_power.items()},
        "num_colours=100": found,
    }
    for name, colours in rows.items():
        print(f"{name:<28}{colours.max() + 1:>5}{left(inverse, colours):>8.3f}")
    hand = min(left(inverse, colours) for name, colours in rows.items() if "hand" in name)
    factor = left(inverse, found) / hand
    verdict(factor <= 1, "no worse than by hand, error over that", f"{factor:.3f}")


def print_logdets(num_keys: int = 4) -> None:
    side, shift = 200, 0.1
    line = 2 - 2 * np.cos(np.pi * np.arange(1, side + 1) / (side + 1))
    truth = np.sum(np.log(line[:, None] + line[None, :] + shift))
    path = 2 * np.eye(side) - np.eye(side, k=1) - np.eye(side, k=-1)
    graph = scipy.sparse.kronsum(path, path)

    def apply(v: jax.Array) -> jax.Array:
        field = jnp.pad(v.reshape(side, side), 1)
        around = field[2:, 1:-1] + field[:-2, 1:-1] + field[1:-1, 2:] + field[1:-1, :-2]
        return (4 * field[1:-1, 1:-1] - around).ravel() + shift * v

    structure = jax.ShapeDtypeStruct((side**2,), float)
    operator = lx.FunctionLinearOperator(apply, structure, SEMIDEFINITE)
    print(f"\nLog-determinant of a grid of {side} x {side}: error, standard error, seconds")
    for name, pattern in (("with pattern=", graph), ("without", None)):
        for number in range(num_keys):
            start = time.perf_counter()
            key = jax.random.key(number)
            found = tx.logdet(operator, key, 240, pattern=pattern)
            off, bar = float(found.value) / truth - 1, float(found.standard_error) / truth
            seconds = time.perf_counter() - start
            print(f"{name:<16}{abs(off):>9.1e}{abs(bar):>9.1e}{seconds:>7.1f}")


def wilson_dirac(side: int, gap: float) -> Complex[np.ndarray, "n n"]:
    """In two dimensions, with links exp(.4 i g), g normal; eigenvalues have real parts of
    at least `gap`."""
    phases = np.exp(0.4j * np.random.default_rng(0).normal(size=(2, side, side)))
    sites = np.arange(side**2).reshape(side, side)
    dirac = np.zeros((side**2, 2, side**2, 2), complex)
    for axis, gamma in enumerate(([[0, 1], [1, 0]], [[0, -1j], [1j, 0]])):
        there = np.roll(sites, -1, axis)
        for a, b, phase in zip(sites.flat, there.flat, phases[axis].flat, strict=True):
            dirac[a, :, b] -= phase * (np.eye(2) - gamma) / 2
            dirac[b, :, a] -= np.conj(phase) * (np.eye(2) + gamma) / 2
    matrix = dirac.reshape(2 * side**2, -1)
    return matrix + (gap - np.linalg.eigvals(matrix).real.min()) * np.eye(len(matrix))


def print_traces(num_keys: int) -> None:
    print("\nTraces of inverses where low modes dominate: relative errors")
    print(f"{'operator':<24}{'matvecs':>8}{'pattern=':>10}{'colours':>10}{'without':>10}")
    shifts = {
        f"grid plus {x}": laplacian(grid_graph(24, 24)) + x * np.eye(576) for x in SHIFTS
    }
    matrices = {f"Wilson-Dirac, {x}": wilson_dirac(16, x) for x in (0.02, 0.1)} | shifts
    for name, matrix in matrices.items():
        inverse, pattern = jnp.linalg.inv(jnp.asarray(matrix)), matrix != 0
        structure = jax.ShapeDtypeStruct(inverse.shape[1:], inverse.dtype)
        tags = () if jnp.iscomplexobj(inverse) else SEMIDEFINITE
        operator = lx.FunctionLinearOperator(inverse.__matmul__, structure, tags)
        for budget in (64, 100):
            sampler = tx.probing(pattern, num_colours=budget)
            functions = (
                partial(tx.trace, pattern=pattern),
                partial(tx.hutchinson_trace, sampler=sampler),
                tx.trace,
            )
            row = f"{name:<24}{budget:>8}"
            for function in functions:
                of_key = partial(function, operator, num_matvecs=budget)
                run = jax.jit(lambda key, of_key=of_key: of_key(key).value)
                values = jax.lax.map(run, jax.random.split(jax.random.key(3), num_keys))
                off = values / jnp.trace(inverse) - 1
                row += f"{jnp.mean(abs(off) ** 2) ** 0.5:>10.1e}"
            print(row)


def main(num_keys: int = 20) -> None:
    jax.config.update("jax_enable_x64", True)
    cells = [
        cell
        for kappa_squared in KAPPAS_SQUARED
        for name, pattern, budgets in (
            ("grid", grid(SIDE), BUDGETS),
            ("roads", road_network(), BUDGETS[-1:]),
        )
        for budget in budgets
        for cell in on_graph(name, pattern, kappa_squared, budget, num_keys)
    ]
    print(f"Inverses of precision matrices on graphs, {num_keys} keys.\n")
    print_cells(cells)
    print()
    claim_intervals(
        [
            (c.score, f"{c.name}, {c.graph}, kappa^2 {c.kappa_squared}, {c.num_matvecs}")
            for c in cells
        ]
    )
    for kappa_squared in KAPPAS_SQUARED:
        claim_probing(cells, kappa_squared)
    claim_automatic(cells)
    print_traces(3 * num_keys)
    print_logdets()
    print_colourings()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=20, help="keys for every number")
    main(parser.parse_args().keys)
