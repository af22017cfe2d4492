"""Colourings: as few colours as a power needs, or the best use of a given number."""

from collections.abc import Callable
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
from tests.helpers import slow
from tests.probes.helpers import alike, grid, laplacian, left, near, roads
from traceax._probes.colouring import as_grid, disturbance, fewest, graph, improved, within

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
    found = as_grid(graph("colouring", pattern))
    assert found is not None
    assert found.sides == shape
    assert len(found.stencil) == 2 * steps
    pattern = pattern.copy()
    edge = np.argwhere(np.triu(pattern, 1))[7]
    pattern[tuple(edge)] = pattern[tuple(edge[::-1])] = 0
    broken = as_grid(graph("colouring", pattern))
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
def test_no_worse_than_by_hand(
    kappa_squared: float, count: int, block: tuple[int, int]
) -> None:
    """Marginal variances of a Gaussian field: better than blocks, and than the largest
    power that a greedy colouring reaches."""
    sides = (30, 26)
    pattern = grid(*sides)
    field = np.linalg.inv(laplacian(pattern) + kappa_squared * np.eye(len(pattern)))
    found = tx.colouring(pattern, num_colours=count)
    assert left(field, found) < 0.97 * left(field, by_hand(sides, block))
    step = graph("colouring", pattern)
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


def test_moves_keep_the_power_and_lower_the_error() -> None:
    step = graph("colouring", roads()[:300, :300])
    kept, seen = within(step, 2), within(step, 4)
    weights = disturbance(step, kept, seen)
    before = fewest(kept)
    after = improved(before, weights, int(before.max()) + 3)
    dense = weights.toarray()
    assert np.sum(dense * alike(after)) < 0.7 * np.sum(dense * alike(before))
    assert not np.any(kept.toarray() & alike(after))


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
    explicit_zeros = BCOO(
        (jnp.zeros(len(rows)), jnp.stack([rows, columns], 1)), shape=(25, 25)
    )
    for pattern in (scipy.sparse.csr_array(dense), padded, explicit_zeros):
        np.testing.assert_array_equal(tx.colouring(pattern), expected)
    np.testing.assert_array_equal(tx.colouring(scipy.sparse.coo_array((4, 4))), np.zeros(4))
    np.testing.assert_array_equal(tx.colouring(dense, num_colours=30), np.arange(25))


# Errors.


TRACED: Any = jax.jit(lambda m: tx.colouring(BCOO.fromdense(m, nse=3)))
colouring: Any = tx.colouring  # so that wrong types may be passed
EYE = np.eye(3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: colouring(np.ones((2, 3))), ValueError, r"pattern=.*\(2, 3\).*B\.T @ B"),
        (lambda: colouring(EYE, power=0), ValueError, r"power=.*at least 1.*got 0"),
        (lambda: colouring(EYE, power=2.0), TypeError, r"power=.*Python int.*got 2.0"),
        (lambda: colouring(EYE, num_colours=0), ValueError, r"num_colours=.*at least 1"),
        (
            lambda: colouring(EYE, num_colours=jnp.array(4)),
            TypeError,
            r"num_colours=.*Python int.*with int",
        ),
        (
            lambda: colouring(np.ones((5, 5)), num_colours=4),
            ValueError,
            r"num_colours=.*at least 5.*keeps 1 step.*got 4.*Raise it",
        ),
        (lambda: TRACED(jnp.eye(3)), TypeError, r"pattern=.*concrete.*traced"),
    ],
)
def test_errors(call: Callable[[], Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=rf"traceax\.colouring\({words}"):
        call()
