"""Colourings: which dimensions may share a probe."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from traceax._probes.graph import Sparse, graph, keeps_apart, one_further, within
from traceax._probes.greedy import disturbance, fewest, improved
from traceax._probes.lattices import as_grid, best_lattice

Colours = Int[np.ndarray, " n"]

# Steps beyond the last that is kept apart, which colours to spare are spent on.
_FURTHER = 2

# From so many dimensions on, what moves at the edges of a lattice gain is not worth it, nor
# is a message that tells the number of colours, where it is less work to tell a bound.
_MANY = 20_000


def colouring(
    pattern: Any, *, power: int = 1, num_colours: int | None = None
) -> Int[np.ndarray, " n"]:
    """Colour the dimensions of a sparse operator so that neighbours differ.

    Dimensions at most `power` steps apart in the graph of the pattern get different
    colours: power 1 makes `probing` exact for A itself, power p for A^p, and nearly exact
    for inverses and functions of A whose entries decay within p steps. It runs on the host.

    As few colours as are found: greedily, in several orders; on grids of up to three axes,
    which are recognised, by lattices, colours (i + s j + s^2 k) mod c. With `num_colours`,
    the best colouring found with at most so many: that of the largest power that fits (or
    one less, if a lattice is better spread); the colours that are left separate pairs a
    little further apart.

    **Arguments**

    - `pattern`: where the operator may have entries, n x n: a sparse
      `jax.experimental.sparse.BCOO`, or anything that `scipy.sparse.coo_array` takes.
      Stored zeros count. It need not be symmetric.
    - `power`: how many steps are kept apart (with `num_colours`, at least), a Python int of
      at least 1. Default 1.
    - `num_colours`: at most how many colours, a Python int of at least 1. Default `None`,
      as few as the power needs.

    **Returns** n integers from 0, the colours, as a NumPy array: without `num_colours` at
    most one more than the greatest number of dimensions within `power` steps of one.
    **Raises** `TypeError` if the pattern is traced, or a count not a Python int;
    `ValueError` if the pattern is not a square matrix, a count is below 1, or no colouring
    of the power was found with so few colours.

    **Cost**: no applications; time and memory of the pattern of the power, of each power up
    to two beyond the largest that fits with `num_colours`.

    **Example**

        >>> import numpy as np, traceax as tx
        >>> ring = np.roll(np.eye(8), 1, axis=0)
        >>> print(tx.colouring(ring))
        [0 1 0 1 0 1 0 1]
        >>> print(tx.colouring(ring, power=3))
        [0 1 2 3 0 1 2 3]
        >>> print(tx.colouring(ring, num_colours=4))
        [0 1 2 3 0 1 2 3]

    **Reference**: Tang and Saad (2012), A probing method, doi:10.1002/nla.779, section 3;
    Korobov (1959), Doklady Akademii Nauk SSSR 124, for lattices of one parameter.
    """
    return coloured("colouring", pattern, power, num_colours)[1].colours


class Best(NamedTuple):
    """Colours, and how many steps they keep apart."""

    colours: Colours
    power: int


def coloured(
    name: str, pattern: Any, power: int, num_colours: int | None
) -> tuple[Sparse, Best]:
    """The graph of a pattern, and its colouring."""
    _check_count(name, "power", power, "Pass 1 for the pattern itself.")
    step = graph(name, pattern)
    if num_colours is None:
        return step, Best(_of_power(step, power), power)
    cure = "Pass as many as there are matvecs to spend."
    _check_count(name, "num_colours", num_colours, cure)
    found = best_colouring(step, power, num_colours)
    if found is None:
        needed = _clique(step, power)
        if needed <= num_colours or step.shape[0] <= _MANY:
            needed = int(_of_power(step, power).max()) + 1
        cure = "Raise it, or lower the power" if power > 1 else "Raise it"
        raise ValueError(
            f"traceax.{name}(num_colours=...) must be at least {needed}, because no "
            f"colouring with fewer was found that keeps {power} steps apart, but got "
            f"{num_colours}. {cure}."
        )
    return step, found


def best_colouring(step: Sparse, power: int, num_colours: int) -> Best | None:
    """With at most so many colours, that of the largest power, spread; `None` if it is less
    than `power`."""
    if num_colours >= step.shape[0]:
        return Best(np.arange(step.shape[0]), step.shape[0])
    lattice = _by_lattice(step, power, num_colours)
    best = lattice or _by_greed(step, power, num_colours)
    if best is None and _clique(step, power) <= num_colours:
        best = Best(_of_power(step, power), power)
    if best is None or best.colours.max() >= num_colours:
        return None
    if lattice is None or step.shape[0] <= _MANY:
        best = Best(_spread(best, step, num_colours), best.power)
    return Best(np.unique(best.colours, return_inverse=True)[1], best.power)


def _clique(step: Sparse, power: int) -> int:
    """So many dimensions are within `power` steps of each other: those half as far from
    one. Of graphs with hubs it tells before the power is worked out, which may be full."""
    half = power // 2
    return int(np.diff(within(step, half).indptr).max()) if half else 1


def _of_power(step: Sparse, power: int) -> Colours:
    reached = within(step, power)
    found, grid = fewest(reached), as_grid(step)
    if grid is None:
        return found
    for count in range(2, int(found.max()) + 1):
        lattice = best_lattice(grid, range(count, count - 1, -1), power)
        if lattice is not None and keeps_apart(lattice[0], reached):
            return lattice[0]
    return found


def _by_lattice(step: Sparse, power: int, num_colours: int) -> Best | None:
    """Of more than four fifths of the colours."""
    grid = as_grid(step)
    fewest = num_colours - math.ceil(num_colours / 5)
    counts = range(num_colours, fewest, -1)
    lattice = None if grid is None else best_lattice(grid, counts, power)
    # A closed grid has a seam, where colours may be nearer.
    if lattice is None or not keeps_apart(lattice[0], within(step, lattice[1])):
        return None
    return Best(*lattice)


def _by_greed(step: Sparse, power: int, num_colours: int) -> Best | None:
    """Two powers in a row that do not fit are the end: greed may need fewer colours for the
    larger one. So is one of which a dimension and those half as far from it need more."""
    best, failed, reached, balls = None, 0, step, [1]
    while failed < 2:
        colours, steps = fewest(reached), len(balls)
        fits = colours.max() < num_colours
        best, failed = (Best(colours, steps), 0) if fits else (best, failed + 1)
        balls.append(int(np.diff(reached.indptr).max()))
        further = one_further(reached, step)
        hopeless = balls[(steps + 1) // 2] > num_colours
        if further is None or hopeless or further.nnz == reached.nnz:
            break
        reached = further
    return best if best is not None and best.power >= power else None


def _spread(best: Best, step: Sparse, num_colours: int) -> Colours:
    """With what is left of the colours."""
    near = further = within(step, best.power)
    for _ in range(_FURTHER):
        reached = one_further(further, step)
        if reached is None:
            return best.colours
        further = reached
    weights = disturbance(step, near, further)
    return improved(best.colours, weights, num_colours)


def _check_count(name: str, argument: str, count: object, cure: str) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(
            f"traceax.{name}({argument}=...) must be a Python int, because it counts "
            f"{'steps in a graph' if argument == 'power' else 'probes'}, but got "
            f"{count!r}. {cure}"
        )
    if count < 1:
        raise ValueError(
            f"traceax.{name}({argument}=...) must be at least 1, but got {count}. One "
            "colour for all is numpy.zeros(n, int)."
        )
