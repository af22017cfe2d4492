"""Colourings: as few colours as a power needs, or the best use of a given number."""

import itertools
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
from tests.helpers import nightly, refused, slow
from tests.probes.helpers import alike, grid, laplacian, left, near, roads
from traceax._probes.colouring import as_grid, fewest, graph, places, undirected, within


def step_of(pattern: Any) -> Any:
    return graph(undirected(places("colouring", pattern)))


def are_right(colours: Any, pattern: Any, power: int) -> None:
    """They differ within so many steps, and none is left out."""
    assert not np.any(near(pattern, power) & alike(colours))
    assert set(colours.tolist()) == set(range(colours.max() + 1))


# Grids.


@pytest.mark.parametrize("power", [1, 2, slow(6), nightly(3), nightly(7)])
def test_grids_in_the_plane_get_the_fewest_colours_there_are(power: int) -> None:
    """Balls of radius power/2 about vertices or edges are cliques, and lattices need as
    many colours as these have vertices."""
    pattern = grid(18, 20)
    colours = tx.colouring(pattern, power=power)
    are_right(colours, pattern, power)
    assert colours.max() + 1 == ((power + 1) ** 2 + 1) // 2


GRIDS = [
    (grid(40), (40,), 1),
    (grid(40, closed=True), (40,), 1),
    (grid(12, 9), (12, 9), 2),
    (near(grid(12), 1) * 1.0, (12,), 1),
    (np.kron(near(grid(12), 1), near(grid(9), 1)), (12, 9), 4),
    (grid(5, 5, 5, closed=True), (5, 5, 5), 3),
]


@pytest.mark.parametrize(("pattern", "shape", "steps"), GRIDS)
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


GRAPHS = [grid(41), grid(9, 8, closed=True), grid(6, 7, 8), roads()[:500, :500]]


@pytest.mark.parametrize("num_colours", [1, 12, slow(30), nightly(4), nightly(7)])
def test_too_few_colours_are_an_error(num_colours: int) -> None:
    """It says how many colours suffice."""
    for pattern, power in itertools.product(GRAPHS, (1, 2, 3)):
        needed = tx.colouring(pattern, power=power).max() + 1
        how: Any = {"power": power, "num_colours": num_colours}
        if needed > num_colours:
            refused(ValueError, f"must be at least {needed}", tx.colouring, pattern, **how)
            continue
        colours = tx.colouring(pattern, **how)
        assert colours.max() < num_colours
        are_right(colours, pattern, power)


BLOCKS = [(0.1, (5, 5)), slow(0.1, (7, 8)), slow(1.0, (7, 7)), nightly(0.1, (7, 7))]
BLOCKS += [nightly(1.0, (5, 5)), nightly(1.0, (7, 8))]


@pytest.mark.parametrize(("kappa_squared", "block"), BLOCKS)
def test_no_worse_than_by_hand(kappa_squared: float, block: tuple[int, int]) -> None:
    """Marginal variances of a Gaussian field: better than blocks, and than the largest
    power that a greedy colouring reaches."""
    (i, j), count = np.indices((30, 26)), block[0] * block[1]
    pattern, by_hand = grid(30, 26), (i % block[0] * block[1] + j % block[1]).ravel()
    field = np.linalg.inv(laplacian(pattern) + kappa_squared * np.eye(len(pattern)))
    found = tx.colouring(pattern, num_colours=count)
    assert left(field, found) < 0.97 * left(field, by_hand)
    step = step_of(pattern)
    greedy = [fewest(within(step, power)) for power in range(1, 12)]
    largest = [colours for colours in greedy if colours.max() < count][-1]
    assert left(field, found) < 0.9 * left(field, largest)


# Other graphs.


@pytest.mark.slow
def test_spare_colours_are_used() -> None:
    pattern = roads()
    inverse = np.linalg.inv(laplacian(pattern) + 0.1 * np.eye(len(pattern)))
    few, many = (tx.colouring(pattern, num_colours=count) for count in (23, 29))
    assert (few.max(), many.max()) == (22, 28)
    assert left(inverse, many) < left(inverse, few)


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
    pattern = np.random.default_rng(seed).random((n, n)) < density
    fewest = tx.colouring(pattern, power=power)
    assert fewest.max() + 1 <= near(pattern, power).sum(1).max()
    count = int(fewest.max()) + 1 + spare
    for colours in (fewest, tx.colouring(pattern, power=power, num_colours=count)):
        are_right(colours, pattern, power)
        assert colours.max() < count


def test_patterns_of_every_kind() -> None:
    dense = grid(5, 5)
    expected = tx.colouring(dense)
    upper = jnp.argwhere(np.triu(dense))
    explicit_zeros = BCOO((jnp.zeros(len(upper)), upper), shape=(25, 25))
    padded = BCOO.fromdense(jnp.asarray(dense), nse=200)
    for pattern in (scipy.sparse.csr_array(dense), padded, explicit_zeros):
        np.testing.assert_array_equal(tx.colouring(pattern), expected)
    np.testing.assert_array_equal(tx.colouring(scipy.sparse.coo_array((4, 4))), np.zeros(4))
    np.testing.assert_array_equal(tx.colouring(dense, num_colours=30), np.arange(25))


def test_errors() -> None:
    kind, value, eye, colours = TypeError, ValueError, np.eye(3), tx.colouring
    traced = jax.jit(lambda m: tx.colouring(BCOO.fromdense(m, nse=3)))
    words = r"colouring\(pattern=.*\(2, 3\).*B\.T @ B"
    refused(value, words, colours, np.ones((2, 3)))
    refused(value, r"colouring\(power=.*at least 1.*got 0", colours, eye, power=0)
    refused(kind, r"colouring\(power=.*Python int.*got 2.0", colours, eye, power=2.0)
    words = r"colouring\(num_colours=.*"
    refused(value, f"{words}at least 1", colours, eye, num_colours=0)
    refused(kind, f"{words}Python int.*with int", colours, eye, num_colours=jnp.array(4))
    words += "at least 5.*keeps 1 step.*got 4.*Raise it"
    refused(value, words, colours, np.ones((5, 5)), num_colours=4)
    refused(kind, r"colouring\(pattern=.*concrete.*traced", traced, jnp.eye(3))
