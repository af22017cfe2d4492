"""Error bars of probing, from the residuals of neighbours."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse

import traceax as tx
from tests.helpers import close, contains, nightly, over_keys, slow
from tests.matrices import all_signs, general, hermitian
from tests.probes.helpers import alike, grid, laplacian, left, near, path, roads
from tests.wrappers import PSD, function
from traceax._core.keys import keys_of
from traceax._probes.probing import (
    combined_error,
    neighbour_residuals,
    neighbourhood_of,
)

KEY = jax.random.key(4)
ESTIMATES = [tx.hutchinson_diagonal, tx.hutchinson_trace]
KEYS = jax.random.split(jax.random.key(7), 60)


def by_neighbours(squares: Any, pattern: Any) -> Any:
    """The mean over the neighbours of each dimension."""
    return (pattern * squares).sum(1) / pattern.sum(1)


def walk(pattern: Any) -> Any:
    """Eight lazy steps. Dimensions with fewer neighbours than others stay more often."""
    degrees = pattern.sum(1)
    once = pattern + np.diag(degrees.max() - degrees)
    return np.linalg.matrix_power((np.eye(len(once)) + once / degrees.max()) / 2, 8)


@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("make", [general, lambda n, dtype: hermitian(np.ones(n), dtype)])
def test_error_bars_are_differences_of_neighbours(make: Any, dtype: Any) -> None:
    """A diagonal averages them over near dimensions. The error of a trace sums them. Real
    probes have errors in equal pairs."""
    pattern = grid(11, 6)
    matrix = make(66, dtype) + general(66, dtype, seed=1)
    matrix = matrix + matrix.conj().T if make is not general else matrix
    sampler = tx.probing(pattern, power=2)
    colours, count = sampler.colours, sampler.num_colours
    operator = function(matrix)
    diagonal, trace = (f(operator, KEY, count, sampler=sampler) for f in ESTIMATES)
    block = sampler(KEY, operator.in_structure(), count).T
    signs = np.asarray(block).sum(1) / np.sqrt(count)  # of each dimension
    seen = (np.asarray(matrix) * signs) @ (colours[:, None] == colours) * np.conj(signs)
    expected = by_neighbours(abs(seen - seen.conj().T) ** 2 / 2, pattern)
    close(diagonal.standard_error, np.sqrt(walk(pattern) @ expected), 1e-12)
    pairs = 1 if dtype is complex else 2
    close(trace.standard_error, np.sqrt(pairs * expected.sum()), 1e-12)
    assert diagonal.degrees_of_freedom == trace.degrees_of_freedom == 5


def test_variances_over_all_signs() -> None:
    """Enumeration for a symmetric matrix: the squared error bar is on average the mean of
    the variances of neighbours, each with the row of the other."""
    n, pattern = 9, grid(9)
    matrix = np.asarray(general(n))
    matrix = matrix + matrix.T
    sampler = tx.probing(pattern, power=2)
    colours = sampler.colours
    witnesses = neighbourhood_of(sampler, jax.ShapeDtypeStruct((n,), float))
    assert witnesses is not None
    mine = jnp.asarray(colours[:, None] == np.arange(3))

    def variance(signs: Any) -> Any:
        z = 3**0.5 * jnp.where(mine, signs[:, None], 0)
        found = neighbour_residuals(z, jnp.asarray(matrix) @ z, witnesses)
        return found.squares * found.scale**2

    mean = jnp.mean(jax.jit(jax.vmap(variance))(jnp.asarray(all_signs(n))), axis=0)
    disturbed = matrix**2 @ alike(colours)
    close(mean, by_neighbours((disturbed + disturbed.T) / 2, pattern), 1e-12)


def test_a_dimension_without_neighbours_has_the_mean_of_other_colours() -> None:
    pattern = np.pad(path(5) > 0, (0, 1)) | np.eye(6, dtype=bool)
    sampler = tx.probing(pattern, power=2)
    space, count = jax.ShapeDtypeStruct((6,), float), sampler.num_colours
    z = sampler(KEY, space, count).T
    seen, witnesses = general(6) @ z, neighbourhood_of(sampler, space)
    assert witnesses is not None
    found = neighbour_residuals(z, seen, witnesses)
    others = np.delete(np.asarray(seen[5]), sampler.colours[5])
    close(found.squares[5] * found.scale**2, np.mean(others**2) / count, 1e-12)


@pytest.mark.parametrize("power", [2, 4])
def test_colours_beyond_are_those_of_two_distances(power: int) -> None:
    """The last two that the colouring keeps apart, and the next two, where both exist."""
    pattern = path(40)
    sampler = tx.probing(pattern, power=power)
    witnesses = neighbourhood_of(sampler, jax.ShapeDtypeStruct((40,), float))
    assert witnesses is not None
    own = sampler.colours[:, None] == np.arange(sampler.num_colours)
    first, count = max(power - 2, 1), min(power, 3) + 2
    seen = [near(pattern, first + j).astype(float) @ own > 0 for j in range(count)]
    for side, (closer, one, two) in enumerate((seen[:3], seen[-3:])):
        both = np.any(one & ~closer, axis=1) & np.any(two & ~one, axis=1)
        expected = (one | two) & ~closer & both[:, None]
        np.testing.assert_array_equal(witnesses.beyond[:, :, side], expected)


def test_combined_errors() -> None:
    """By hand: the indicator is scaled to the spread of all, and counts as 5 repeats."""
    spread, indicator = jnp.array([1.0, 2.0]), jnp.array([2.0, 2.0])
    got = combined_error(spread, indicator, 3)
    close(got, np.sqrt((2 * np.array([1, 4]) + 5 * 2.5) / 7), 1e-12)


FIELD, ROADS = grid(24, 24), roads()[:700, :700]


def resolvent(adjacency: Any, shift: float) -> Any:
    return np.linalg.inv(laplacian(adjacency * 1.0) + shift * np.eye(len(adjacency)))


# A pattern, a resolvent's shift (none for the exponential), repeats, and the widest bars.
HELD = [slow(FIELD, 0.1, 1, 1.3), slow(ROADS, None, 1, 6.0), slow(ROADS, 1.0, 2, 1.1)]
HELD += [
    nightly(FIELD, 1.0, 1, 1.8),
    nightly(ROADS, 0.1, 1, 1.3),
    nightly(ROADS, 1.0, 1, 2.1),
]
HELD += [nightly(FIELD, 0.1, 2, 1.1), nightly(FIELD, 1.0, 2, 1.1)]
HELD += [nightly(ROADS, 0.1, 2, 1.1), nightly(ROADS, None, 2, 1.1)]


@pytest.mark.parametrize(("pattern", "shift", "repeats", "widest"), HELD)
def test_intervals_contain_the_truth(
    pattern: Any, shift: float | None, repeats: int, widest: float
) -> None:
    """Bars are on the whole as large as the errors. Shorter intervals fail."""
    matrix = resolvent(pattern, shift) if shift else scipy.linalg.expm(1.0 * pattern)
    sampler, truth = tx.probing(pattern, num_colours=30), np.diag(matrix)[None]
    operator, budget = function(jnp.asarray(matrix)), repeats * sampler.num_colours

    def run(key: Any) -> Any:
        estimate = tx.hutchinson_diagonal(operator, key, budget, sampler=sampler)
        return estimate.value, estimate.interval(0.95)[1], estimate.standard_error

    value, high, bar = over_keys(run, KEY, 8)
    error, width = abs(value - truth), high - value
    ratio = jnp.linalg.norm(bar) / jnp.linalg.norm(error)
    assert jnp.mean(error <= width) >= 0.92
    assert 0.9 < ratio < widest
    assert jnp.mean(error <= 0.25 / jnp.maximum(ratio, 1) * width) < 0.9


@pytest.mark.parametrize("estimate", [ESTIMATES[0], nightly(ESTIMATES[1])])
def test_a_band_of_its_own_pattern_has_no_error(estimate: Any) -> None:
    """Also if it is not symmetric: A_ab and A_ba are each seen exactly, and differ. Four
    colours of a chain keep three steps apart."""
    band = jnp.eye(300) * 2.0 - jnp.eye(300, k=1) + 0.3 * jnp.eye(300, k=-1)
    truth = jnp.trace(band) if estimate is tx.hutchinson_trace else jnp.diagonal(band)

    def found(matrix: Any, count: int) -> tx.Estimate:
        sampler = tx.probing(np.asarray(band != 0), num_colours=count)
        return estimate(function(matrix), KEY, count, sampler=sampler)

    for one in (found(band, 12), found(band, 4)):
        close(one.value, truth, 1e-14)
        assert jnp.max(one.standard_error) < 1e-13 * jnp.trace(band)
    # The cube reaches three steps, which three colours do not keep apart.
    assert jnp.min(found(band @ band @ band, 3).standard_error) > 0.1


def leverages() -> Any:
    """X (X'X)^-1 X' of a sparse X, with the pattern of XX'."""
    x = scipy.sparse.random(600, 200, density=0.01, rng=2).toarray()
    gram = x.T @ x + 1e-8 * np.eye(200)
    return x @ np.linalg.solve(gram, x.T), x @ x.T != 0


CHAIN = path(400)
BARS = {
    "chain": (resolvent(CHAIN, 1.0), CHAIN, 12),
    "slow chain": (resolvent(CHAIN, 0.1), CHAIN, 12),
    "leverages": (*leverages(), 60),
}


ENTRIES = [("chain", 1), slow("leverages", 1), nightly("slow chain", 1)]
ENTRIES += [nightly(name, 2) for name in BARS]


@pytest.mark.parametrize(("name", "repeats"), ENTRIES)
def test_no_entry_is_without_an_error_bar(name: str, repeats: int) -> None:
    """Residuals may vanish by chance. Without the average over near dimensions the largest
    |error|/bar was 2e10, 5600 and 760. It is 4.5, 3 and 6."""
    matrix, pattern, count = BARS[name]
    sampler = tx.probing(pattern, num_colours=count)
    budget = repeats * sampler.num_colours

    def run(key: Any) -> Any:
        found = tx.hutchinson_diagonal(function(matrix), key, budget, sampler=sampler)
        return jnp.abs(found.value - np.diag(matrix)), found.standard_error

    error, bar = over_keys(run, KEY, 8)
    ratio = error / jnp.where(bar > 0, bar, 1e-20)
    assert jnp.quantile(ratio, 0.99) < 6
    assert jnp.max(ratio) < 20
    assert jnp.linalg.norm(bar) < 2 * jnp.linalg.norm(error)


def test_without_edges_the_error_is_infinite() -> None:
    """For colours alone, and for a graph without edges."""
    operator = function(jnp.asarray(resolvent(FIELD, 1.0)))
    colours = tx.colouring(FIELD, power=2)
    sampler = tx.probing(colours)
    np.testing.assert_array_equal(sampler.colours, tx.probing(FIELD, power=2).colours)
    for estimate in ESTIMATES:
        alone = estimate(operator, KEY, sampler.num_colours, sampler=sampler)
        assert jnp.all(alone.standard_error == jnp.inf)
    assert type(colours) is np.ndarray
    space = jax.ShapeDtypeStruct((5,), float)
    assert neighbourhood_of(tx.probing(np.eye(5)), space) is None


@pytest.mark.parametrize("repeats", [slow(1), nightly(3)])
def test_scale_changes_nothing(repeats: int) -> None:
    sampler = tx.probing(FIELD, power=3)
    single = jnp.asarray(resolvent(FIELD, 0.5), jnp.float32)

    def error(estimate: Any, scale: float) -> Any:
        operator, budget = function(scale * single), repeats * sampler.num_colours
        return estimate(operator, KEY, budget, sampler=sampler).standard_error / scale

    for estimate in ESTIMATES:
        small, one, large = (error(estimate, scale) for scale in (1e-25, 1.0, 1e30))
        close((small, large), (one, one), 1e-4)


def test_each_colour_has_a_spread_of_its_own() -> None:
    """Traces of two repeats have one degree of freedom for each colour."""
    sampler, matrix = tx.probing(FIELD, power=3), jnp.asarray(resolvent(FIELD, 0.5))
    count, space = sampler.num_colours, jax.eval_shape(lambda: matrix[0])
    estimate = tx.hutchinson_trace(function(matrix), KEY, 2 * count, sampler=sampler)
    assert estimate.degrees_of_freedom == count / 3
    block = jnp.concatenate([sampler(k, space, count).T for k in keys_of(KEY, 2)], axis=1)
    forms = jnp.sum(block * (matrix @ block), axis=0).reshape(2, count) / count
    spread = jnp.sum((forms[0] - forms[1]) ** 2) / 4
    close(estimate.standard_error, jnp.sqrt(spread), 1e-9)


# The automatic choices.


@pytest.mark.parametrize("automatic", [slow(tx.diagonal), nightly(tx.trace)])
def test_probing_is_chosen_if_colours_keep_three_steps_apart(automatic: Any) -> None:
    field = jnp.asarray(resolvent(FIELD, 1.0))
    operator = function(field, PSD)
    truth = jnp.diagonal(field) if automatic is tx.diagonal else jnp.trace(field)
    sketched = automatic(operator, KEY, 40)
    pattern = scipy.sparse.csr_array(FIELD)
    probed = jax.jit(lambda key: automatic(operator, key, 40, pattern=pattern))(KEY)
    wrong = [float(jnp.linalg.norm(e.value - truth)) for e in (sketched, probed)]
    assert wrong[1] < 0.1 * wrong[0]
    by_pattern = tx.probing(pattern, num_colours=39)
    by_hand = ESTIMATES[automatic is tx.trace](operator, KEY, 40, sampler=by_pattern)
    close(probed.value, by_hand.value, 1e-12)
    close(probed.standard_error, by_hand.standard_error, 1e-12)
    # Eight colours are enough for three steps, seven are not.
    assert left(np.asarray(field), tx.colouring(FIELD, power=3)) > 0
    assert automatic(operator, KEY, 8, pattern=pattern).degrees_of_freedom == 5
    few = automatic(operator, KEY, 7, pattern=pattern)
    close(few.value, automatic(operator, KEY, 7).value, 1e-12)
    # Small and stored operators are not probed.
    stored = lx.MatrixLinearOperator(field)
    assert automatic(stored, KEY, 40, pattern=FIELD).num_matvecs == 0
    assert automatic(function(general(60)), KEY, 40, pattern=grid(60)).num_matvecs == 60
    # In a star two steps reach all vertices.
    star = np.zeros_like(FIELD)
    star[0] = star[:, 0] = 1
    assert np.all(near(star, 2))
    close(automatic(operator, KEY, 40, pattern=star).value, sketched.value, 1e-12)


COVERS = [(tx.trace, jnp.float32), slow(tx.logdet, jnp.float32)]
COVERS += [nightly(tx.trace, float), nightly(tx.logdet, float)]


@pytest.mark.parametrize(("which", "dtype"), COVERS)
def test_a_pattern_that_does_not_cover(which: Any, dtype: Any) -> None:
    """Error bars cover a chain in another order than its pattern, and entries between
    dimensions of one colour. Those of the right pattern are at the level of rounding."""
    n, budget, colours = 300, *((25, 24) if which is tx.trace else (150, 11))
    chain = 3 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    order = np.random.default_rng(0).permutation(n)
    far = 0.5 * (np.eye(n, k=colours) + np.eye(n, k=-colours))

    @jax.jit
    def runs(matrix: Any, truth: Any) -> Any:
        def run(key: Any) -> Any:
            operator = function(matrix, PSD)
            estimate = which(operator, key, budget, pattern=chain)
            return contains(estimate, truth), estimate.standard_error

        return jax.lax.map(run, KEYS)

    for matrix in (chain[order][:, order], chain + far, chain):
        truth = np.trace(matrix) if which is tx.trace else np.linalg.slogdet(matrix)[1]
        inside, bars = runs(jnp.asarray(matrix, dtype), float(truth))
        assert jnp.mean(inside) >= 0.88
        assert (jnp.max(bars) < 1e-3 * n) == (matrix is chain)


@pytest.mark.slow
def test_the_colour_that_is_tested_does_not_speak_for_all() -> None:
    """The largest colour may have no two dimensions that A connects, while others have.
    Without a tag, errors of .4 had bars of 9e-5."""
    points = np.random.default_rng(65).uniform(size=(200, 2))
    within = np.linalg.norm(points[:, None] - points, axis=-1) < 0.1
    edges = 1.0 * (within & ~np.eye(200, dtype=bool))
    inverse = np.linalg.inv(laplacian(edges) + np.eye(200) / 10)
    operator, truth = function(jnp.asarray(inverse, jnp.float32)), float(np.trace(inverse))

    def inside(key: Any) -> Any:
        return contains(tx.trace(operator, key, 60, pattern=within), truth)

    assert jnp.mean(jax.lax.map(inside, KEYS)) >= 0.88


def test_a_test_probe_is_within_the_budget() -> None:
    """It takes the matvec that colours leave over, if they leave one."""
    chain = np.eye(90) + np.eye(90, k=1) + np.eye(90, k=-1)
    operator, sampler = function(jnp.asarray(chain), PSD), tx.probing(chain, num_colours=9)

    def spent(budget: int) -> int:
        run = partial(tx.hutchinson_trace, operator, KEY, budget, sampler=sampler)
        return eqx.filter_eval_shape(run).num_matvecs

    assert [spent(budget) for budget in (9, 10, 17)] == [9, 10, 10]
    by_pattern = partial(tx.trace, operator, KEY, 9, pattern=chain)
    assert eqx.filter_eval_shape(by_pattern).num_matvecs == 9
