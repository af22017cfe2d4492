"""Colourings: as few colours as a power needs, or the best use of a given number."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental.sparse import BCOO

import traceax as tx
from tests.helpers import refused, slow
from tests.probes.helpers import alike, grid, laplacian, left, near, roads
from traceax._probes.colouring import as_grid, fewest, graph, places, undirected, within


def step_of(pattern: Any) -> Any:
    return graph(undirected(places("colouring", pattern)))


# Grids.


@pytest.mark.parametrize("power", [1, 2, slow(3), slow(6), slow(7)])
def test_grids_in_the_plane_get_the_fewest_colours_there_are(power: int) -> None:
    """Balls of radius power/2 about vertices or edges are cliques, and lattices need as
    many colours as these have vertices."""
    pattern = grid(18, 20)
    colours = tx.colouring(pattern, power=power)
    assert not np.any(near(pattern, power) & alike(colours))
    assert colours.max() + 1 == ((power + 1) ** 2 + 1) // 2


@pytest.mark.parametrize(
    ("pattern", "shape", "steps"),
    [
        (grid(40), (40,), 1),
        (grid(40, closed=True), (40,), 1),
        (grid(12, 9), (12, 9), 2),
        (near(grid(12), 1) * 1.0, (12,), 1),
        (np.kron(near(grid(12), 1), near(grid(9), 1)), (12, 9), 4),
        (grid(5, 5, 5, closed=True), (5, 5, 5), 3),
    ],
)
def test_grids_are_recognised(pattern: Any, shape: tuple[int, ...], steps: int) -> None:
    found = as_grid(step_of(pattern))
    assert found is not None
    assert found.sides == shape
    assert len(found.stencil) == 2 * steps
    pattern = pattern.copy()
    edge = np.argwhere(np.triu(pattern, 1))[7]
    pattern[tuple(edge)] = pattern[tuple(edge[::-1])] = 0
    broken = as_grid(step_of(pattern))
    assert broken is None or broken.sides != shape


@pytest.mark.parametrize(
    "pattern", [grid(41), grid(9, 8, closed=True), grid(6, 7, 8), roads()[:500, :500]]
)
@pytest.mark.parametrize("num_colours", [1, slow(4), slow(7), 12, slow(30)])
def test_too_few_colours_are_an_error(pattern: Any, num_colours: int) -> None:
    """It says how many colours suffice."""
    for power in (1, 2, 3):
        needed = tx.colouring(pattern, power=power).max() + 1
        if needed > num_colours:
            with pytest.raises(ValueError, match=f"must be at least {needed}"):
                tx.colouring(pattern, power=power, num_colours=num_colours)
            continue
        colours = tx.colouring(pattern, power=power, num_colours=num_colours)
        assert colours.max() < num_colours
        assert set(colours.tolist()) == set(range(colours.max() + 1))
        assert not np.any(near(pattern, power) & alike(colours))


def by_hand(sides: tuple[int, int], block: tuple[int, int]) -> Any:
    """One colour for each place in a block, repeated."""
    i, j = np.indices(sides)
    return (i % block[0] * block[1] + j % block[1]).ravel()


@pytest.mark.parametrize("kappa_squared", [0.1, slow(1.0)])
@pytest.mark.parametrize(("count", "block"), [(25, (5, 5)), (49, (7, 7)), (56, (7, 8))])
def test_no_worse_than_by_hand(kappa_squared: float, count: int, block: Any) -> None:
    """Marginal variances of a Gaussian field: better than blocks, and than the largest
    power that a greedy colouring reaches."""
    sides = (30, 26)
    pattern = grid(*sides)
    field = np.linalg.inv(laplacian(pattern) + kappa_squared * np.eye(len(pattern)))
    found = tx.colouring(pattern, num_colours=count)
    assert left(field, found) < 0.97 * left(field, by_hand(sides, block))
    step = step_of(pattern)
    greedy = [fewest(within(step, power)) for power in range(1, 12)]
    largest = [colours for colours in greedy if colours.max() < count][-1]
    assert left(field, found) < 0.9 * left(field, largest)


# Other graphs.


@pytest.mark.slow
def test_spare_colours_are_used() -> None:
    pattern = roads()
    inverse = np.linalg.inv(laplacian(pattern) + 0.1 * np.eye(len(pattern)))
    lefts = []
    for count in (23, 29):
        colours = tx.colouring(pattern, num_colours=count)
        assert colours.max() + 1 == count
        lefts.append(left(inverse, colours))
    assert np.all(np.diff(lefts) < 0)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    n=st.integers(1, 30),
    density=st.floats(0, 0.3),
    power=st.integers(1, 4),
    spare=st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_colours_differ_within_the_power(
    n: int, density: float, power: int, spare: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    pattern = rng.random((n, n)) < density
    reached = near(pattern, power)
    fewest = tx.colouring(pattern, power=power)
    assert fewest.max() + 1 <= reached.sum(1).max()
    count = int(fewest.max()) + 1 + spare
    for colours in (fewest, tx.colouring(pattern, power=power, num_colours=count)):
        assert not np.any(reached & alike(colours))
        assert set(colours.tolist()) == set(range(colours.max() + 1))
        assert colours.max() < count


def test_patterns_of_every_kind() -> None:
    dense = grid(5, 5)
    expected = tx.colouring(dense)
    padded = BCOO.fromdense(jnp.asarray(dense), nse=200)
    rows, columns = np.nonzero(np.triu(dense))
    zeros = jnp.zeros(len(rows)), jnp.stack([rows, columns], 1)
    explicit_zeros = BCOO(zeros, shape=(25, 25))
    for pattern in (scipy.sparse.csr_array(dense), padded, explicit_zeros):
        np.testing.assert_array_equal(tx.colouring(pattern), expected)
    np.testing.assert_array_equal(tx.colouring(scipy.sparse.coo_array((4, 4))), np.zeros(4))
    np.testing.assert_array_equal(tx.colouring(dense, num_colours=30), np.arange(25))


def test_errors() -> None:
    kind, value, eye, name = TypeError, ValueError, np.eye(3), r"traceax\.colouring\("
    traced = jax.jit(lambda m: tx.colouring(BCOO.fromdense(m, nse=3)))
    colours: Any = tx.colouring  # so that wrong types may be passed
    rectangle, four = np.ones((2, 3)), jnp.array(4)
    refused(value, rf"{name}pattern=.*\(2, 3\).*B\.T @ B", colours, rectangle)
    refused(value, f"{name}power=.*at least 1.*got 0", colours, eye, power=0)
    refused(kind, f"{name}power=.*Python int.*got 2.0", colours, eye, power=2.0)
    refused(value, f"{name}num_colours=.*at least 1", colours, eye, num_colours=0)
    words = f"{name}num_colours=.*Python int.*with int"
    refused(kind, words, colours, eye, num_colours=four)
    words = f"{name}num_colours=.*at least 5.*keeps 1 step.*got 4.*Raise it"
    refused(value, words, colours, np.ones((5, 5)), num_colours=4)
    refused(kind, f"{name}pattern=.*concrete.*traced", traced, jnp.eye(3))
