"""Colourings of grids by lattices: dimension (i, j, k) has the colour

    (i + s j + s^2 k) mod c,

so that each colour is a lattice (Korobov's, who took them for quadrature). On the host.

The grid is recognised by its pattern alone: strides are offsets of its diagonals, and each
offset occurs as often as in a grid, open or closed (a torus) along each axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from traceax._probes.graph import Sparse

_MOST_AXES = 3
_MOST_OFFSETS = 130  # of diagonals: a stencil that reaches five steps in a plane
_MOST_IN_BOX = 40_000
_SHARE = 0.8  # of the colours: lattices are tried with more than that
_MOST_WORK = 200_000_000


class Grid(NamedTuple):
    """Its sides, slowest first, and the steps of its stencil, one of each pair of opposite
    ones."""

    shape: tuple[int, ...]
    stencil: Int[np.ndarray, "steps axes"]

    def coloured(self, slope: int, count: int) -> Int[np.ndarray, " n"]:
        weights = _generator(slope, count, len(self.shape))
        return weights @ np.indices(self.shape).reshape(len(self.shape), -1) % count


def _generator(slope: int, count: int, axes: int) -> Int[np.ndarray, " axes"]:
    return np.array([pow(slope, axis, count) for axis in range(axes)])


def as_grid(step: Sparse) -> Grid | None:
    """The grid that a pattern is, if it is one of at most three axes."""
    rows, columns = step.tocoo().coords
    upper = columns > rows
    rows, columns = rows[upper], columns[upper]
    offsets = np.unique(columns - rows)
    if not 0 < offsets.size <= _MOST_OFFSETS:
        return None
    n = step.shape[0]
    for shape in _shapes(n, offsets):
        stencil = _stencil(shape, rows, columns)
        if stencil is not None:
            return Grid(shape, stencil)
    return None


def _shapes(n: int, offsets: Int[np.ndarray, " k"]) -> Iterator[tuple[int, ...]]:
    """By strides, each of which divides the next, that are offsets of diagonals, or one
    more (a closed axis of side m has offsets of m - 1 as well)."""
    near = {int(o) + d for o in offsets for d in (0, 1)}
    strides = sorted(s for s in near if 1 < s < n and n % s == 0)
    for axes in range(_MOST_AXES):
        for chosen in itertools.combinations(strides, axes):
            ends = (1, *chosen, n)
            if all(b % a == 0 for a, b in itertools.pairwise(ends)):
                yield tuple(b // a for a, b in itertools.pairwise(ends))[::-1]


def _stencil(
    shape: tuple[int, ...], rows: Int[np.ndarray, " e"], columns: Int[np.ndarray, " e"]
) -> Int[np.ndarray, "steps axes"] | None:
    """The steps that all edges are, if each occurs wherever it can, and reaches less than a
    quarter of the way along an axis."""
    sides = np.array(shape)
    raw = np.stack(np.unravel_index(columns, shape)) - np.stack(
        np.unravel_index(rows, shape)
    )
    closed = np.max(np.abs(raw), axis=1) > sides / 2
    half = sides[:, None] // 2
    steps = np.where(closed[:, None], (raw + half) % sides[:, None] - half, raw)
    steps = steps * _sign_of_first(steps)
    kinds, counts = np.unique(steps, axis=1, return_counts=True)
    if np.any(4 * np.max(np.abs(kinds), axis=1) > sides):
        return None
    room = np.where(closed[:, None], sides[:, None], sides[:, None] - np.abs(kinds))
    complete = np.array_equal(np.prod(room, axis=0), counts)
    return kinds.T if complete else None


def _sign_of_first(steps: Int[np.ndarray, "axes e"]) -> Int[np.ndarray, " e"]:
    """The sign of the first coordinate that is not zero."""
    sign = np.zeros(steps.shape[1], int)
    for coordinate in steps:
        sign = np.where(sign == 0, np.sign(coordinate), sign)
    return sign


class _Box(NamedTuple):
    """Differences of places in an endless grid: how many steps each is, and by how much two
    places that differ by it disturb each other."""

    differences: Int[np.ndarray, "m axes"]
    steps: Int[np.ndarray, " m"]
    weights: Float[np.ndarray, " m"]


def _box(grid: Grid, num_colours: int) -> _Box:
    """Those within about twice the distance of neighbours in a lattice. Disturbance as in
    `greedy`, by the square of a resolvent, which here reaches a third of that distance."""
    axes = len(grid.shape)
    spacing = num_colours ** (1 / axes)
    most = int((_MOST_IN_BOX ** (1 / axes) - 1) / 2)
    radius = max(2, min(math.ceil(2.2 * spacing), most))
    side = 2 * radius + 1
    shape = (side,) * axes
    both = np.concatenate([grid.stencil, -grid.stencil])
    kernel = np.zeros(shape)
    kernel[tuple(both.T % side)] = 1 / len(both)
    reach = np.mean(both**2) / 2 * (3 / spacing) ** 2
    green = np.fft.ifftn(1 / (1 + reach - np.fft.fftn(kernel).real)).real
    reached, steps = np.zeros(shape, bool), np.full(shape, -1)
    reached[(0,) * axes] = True
    for count in range(side * axes):
        steps[reached & (steps < 0)] = count
        moved = [np.roll(reached, tuple(move), range(axes)) for move in both]
        further = np.any([reached, *moved], axis=0)
        if np.array_equal(further, reached):
            break
        reached = further
    places = np.indices(shape).reshape(axes, -1).T
    differences = np.where(places > radius, places - side, places)
    steps = np.where(steps < 0, side * axes, steps).ravel()
    # Half of them: the other half are opposite. Zero is left out.
    kept = _sign_of_first(differences.T) > 0
    return _Box(differences[kept], steps[kept], green.ravel()[kept] ** 2)


class Lattice(NamedTuple):
    slope: int
    num_colours: int
    power: int
    crowding: float


def _judged(box: _Box, count: int) -> Iterator[Lattice]:
    axes = box.differences.shape[1]
    for slope in _slopes(axes, count):
        same = box.differences @ _generator(slope, count, axes) % count == 0
        power = int(np.min(box.steps[same], initial=np.max(box.steps) + 1)) - 1
        yield Lattice(slope, count, power, float(np.sum(box.weights[same])))


def _slopes(axes: int, count: int) -> range:
    """Opposite ones are reflections of each other."""
    return range(1, max(2, count // 2 + 1) if axes > 1 else 2)


def best_lattice(grid: Grid, num_colours: int, power: int) -> Lattice | None:
    """Of at most so many colours the one that leaves the least disturbance, of those that
    keep apart what is at most `power` steps apart, and what the best of all does but for a
    step."""
    box = _box(grid, num_colours)
    tries = box.weights.size * len(_slopes(len(grid.shape), num_colours))
    counts = min(math.ceil((1 - _SHARE) * num_colours), max(1, _MOST_WORK // tries))
    judged = [
        lattice
        for count in range(num_colours, num_colours - counts, -1)
        for lattice in _judged(box, count)
    ]
    power = max(power, max(lattice.power for lattice in judged) - 1)
    fitting = [lattice for lattice in judged if lattice.power >= power]
    return min(fitting, key=lambda lattice: lattice.crowding, default=None)


def smallest_lattice(grid: Grid, power: int, below: int) -> Lattice | None:
    """The one of fewest colours, fewer than `below`, for a power."""
    box = _box(grid, below)
    for count in range(2, below):
        found = [lattice for lattice in _judged(box, count) if lattice.power >= power]
        if found:
            return min(found, key=lambda lattice: lattice.crowding)
    return None
