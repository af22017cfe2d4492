"""Colourings of grids by lattices (Korobov's, who took them for quadrature): dimension
(i, j, k) has the colour (i + s j + s^2 k) mod c. On the host; nothing random.

A grid is recognised by its pattern alone: its strides are offsets of diagonals, and each
step between neighbours occurs as often as in a grid, open or closed (a torus) on each axis.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from traceax._probes.graph import Sparse

_MOST_OFFSETS = 130  # of diagonals: a stencil that reaches five steps in a plane
_MOST_IN_BOX, _MOST_WORK = 40_000, 400_000_000


class Grid(NamedTuple):
    """Its sides, slowest first, and the steps from a dimension to its neighbours."""

    sides: tuple[int, ...]
    stencil: Int[np.ndarray, "steps axes"]


def as_grid(step: Sparse) -> Grid | None:
    """The grid that a pattern is, if it is one of at most three axes."""
    n, edges = step.shape[0], np.stack(step.tocoo().coords)
    edges = edges[:, edges[0] != edges[1]]
    offsets = np.unique(np.abs(edges[1] - edges[0]))
    if not 0 < offsets.size <= _MOST_OFFSETS:
        return None
    near = np.unique([offsets, offsets + 1]).tolist()  # a closed axis has m - 1, too
    strides = [s for s in near if 1 < s < n and n % s == 0]
    for chosen in (c for axes in range(3) for c in itertools.combinations(strides, axes)):
        pairs = list(itertools.pairwise((1, *chosen, n)))
        if all(b % a == 0 for a, b in pairs):
            sides = tuple(b // a for a, b in pairs)[::-1]
            stencil = _stencil(sides, edges)
            if stencil is not None:
                return Grid(sides, stencil)
    return None


def _stencil(sides: tuple[int, ...], edges: Int[np.ndarray, "2 e"]) -> Any:
    """The steps that all edges are, if each occurs wherever it can and is short."""
    side, (rows, columns) = np.array(sides)[:, None], edges
    steps = np.stack(np.unravel_index(columns, sides)) - np.unravel_index(rows, sides)
    closed = np.max(np.abs(steps), axis=1, keepdims=True) > side / 2
    steps = np.where(closed, (steps + side // 2) % side - side // 2, steps)
    kinds, counts = np.unique(steps, axis=1, return_counts=True)
    room = np.prod(np.where(closed, side, side - np.abs(kinds)), axis=0)
    fits = np.all(4 * np.abs(kinds) <= side) and np.array_equal(room, counts)
    return kinds.T if fits else None


def best_lattice(grid: Grid, counts: range, power: int) -> tuple[Any, int] | None:
    """Colours, and how many steps they keep apart: of lattices of so many colours that keep
    `power` steps apart, and at most one less than any other, the one whose colours share
    the least of the box's weights."""
    differences, distances, weights = _box(grid, counts[0])
    axes, most, found = len(grid.sides), counts[0] // 2 if len(grid.sides) > 1 else 1, []
    for count in counts[: max(1, _MOST_WORK // (weights.size * max(1, most)))]:
        for slope in range(1, max(1, min(most, count // 2)) + 1):
            generator = np.array([pow(slope, axis, count) for axis in range(axes)])
            same = differences @ generator % count == 0
            kept = int(np.min(distances[same], initial=np.max(distances) + 1)) - 1
            found.append((kept, np.sum(weights[same]), generator, count))
    power = max(power, max(kept for kept, *_ in found) - 1)
    fitting = [lattice for lattice in found if lattice[0] >= power]
    if not fitting:
        return None
    kept, _, generator, count = min(fitting, key=lambda lattice: lattice[1])
    return generator @ np.indices(grid.sides).reshape(axes, -1) % count, kept


def _box(grid: Grid, num_colours: int) -> tuple[Any, Any, Any]:
    """Differences of places in an endless grid, within twice the distance of neighbours in
    a lattice, their steps, and the squares of a resolvent that reaches a third of it."""
    axes, spacing = len(grid.sides), num_colours ** (1 / len(grid.sides))
    most = int((_MOST_IN_BOX ** (1 / axes) - 1) / 2)
    side = 2 * max(2, min(math.ceil(2.2 * spacing), most)) + 1
    kernel, reached = np.zeros((2, *(side,) * axes))
    kernel[tuple(grid.stencil.T % side)] = 1 / len(grid.stencil)
    kernel, reached[(0,) * axes] = np.fft.fftn(kernel), 1
    reach = np.mean(grid.stencil**2) / 2 * (3 / spacing) ** 2
    green = np.fft.ifftn(1 / (1 + reach - kernel.real)).real.ravel()
    steps = np.zeros(reached.shape, int)
    for _ in range(side * axes):
        steps += reached == 0
        reached = (np.fft.ifftn(np.fft.fftn(reached) * (1 + kernel)).real > 1e-6) * 1.0
        if np.all(reached):
            break
    places = np.indices(steps.shape).reshape(axes, -1).T
    differences = np.where(places > side // 2, places - side, places)
    return differences[1:], steps.ravel()[1:], green[1:] ** 2
