"""Error bars of probing, from the residuals of neighbours."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse

import traceax as tx
from tests.helpers import cases, close, over_keys, slow
from tests.matrices import general, hermitian
from tests.probes.helpers import grid, laplacian, left, near, path, roads
from tests.wrappers import PSD, function
from traceax._core.keys import keys_of
from traceax._probes.probing import neighbour_residuals, neighbourhood_of

KEY = jax.random.key(4)
ESTIMATES = [tx.hutchinson_diagonal, tx.hutchinson_trace]
KEYS = jax.random.split(jax.random.key(7), 60)


def variances_of(matrix: Any, colours: Any, pattern: Any, signs: Any) -> Any:
    """What each dimension shows of its variance, computed pair by pair."""
    variances = np.zeros(len(colours))
    for a in range(len(colours)):
        squares = []
        for b in np.flatnonzero(pattern[a]):
            mine, others = colours == colours[a], colours == colours[b]
            there = matrix[b] @ (signs * mine) * np.conj(signs[a])
            here = matrix[a] @ (signs * others) * np.conj(signs[b])
            squares.append(abs(here - np.conj(there)) ** 2 / 2)
        variances[a] = np.mean(squares)
    return variances


def walk(pattern: Any) -> Any:
    """Eight lazy steps. Whoever has fewer neighbours than others stays more often."""
    degrees = pattern.sum(1)
    once = pattern + np.diag(degrees.max() - degrees)
    return np.linalg.matrix_power((np.eye(len(once)) + once / degrees.max()) / 2, 8)


@pytest.mark.parametrize("dtype", [float, slow(complex)])
@pytest.mark.parametrize("make", [general, lambda n, dtype: hermitian(np.ones(n), dtype)])
def test_error_bars_are_differences_of_neighbours(make: Any, dtype: Any) -> None:
    """For a diagonal, averaged over near dimensions; and for the trace as the sum of its
    entries, whose errors come in equal pairs if the probes are real."""
    pattern = grid(11, 6)
    matrix = make(66, dtype) + general(66, dtype, seed=1)
    matrix = matrix + matrix.conj().T if make is not general else matrix
    sampler = tx.probing(pattern, power=2)
    colours, count = sampler.colours, sampler.num_colours
    operator = function(matrix)
    diagonal, trace = (f(operator, KEY, count, sampler=sampler) for f in ESTIMATES)
    block = sampler(KEY, operator.in_structure(), count).T
    signs = np.asarray(block).sum(1) / np.sqrt(count)  # of each dimension
    expected = variances_of(np.asarray(matrix), np.asarray(colours), pattern, signs)
    close(diagonal.standard_error, np.sqrt(walk(pattern) @ expected), 1e-12)
    alike = 1 if dtype is complex else 2
    close(trace.standard_error, np.sqrt(alike * expected.sum()), 1e-12)
    assert diagonal.degrees_of_freedom == trace.degrees_of_freedom == 5


def test_variances_over_all_signs() -> None:
    """Enumeration for a symmetric matrix: the squared error bar is on average the mean of
    the variances of neighbours, each with the row of the other."""
    n, pattern = 9, grid(9)
    matrix = np.asarray(general(n))
    matrix = matrix + matrix.T
    sampler = tx.probing(pattern, power=2)
    space = jax.ShapeDtypeStruct((n,), float)
    colours, witnesses = sampler.colours, neighbourhood_of(sampler, space)
    assert witnesses is not None
    mine = jnp.asarray(colours[:, None] == np.arange(3))

    def variance(signs: Any) -> Any:
        z = 3**0.5 * jnp.where(mine, signs[:, None], 0)
        found = neighbour_residuals(z, jnp.asarray(matrix) @ z, witnesses)
        return found.squares * found.scale**2

    every = 1 - 2.0 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    mean = jnp.mean(jax.vmap(variance)(jnp.asarray(every)), axis=0)
    expected = np.zeros(n)
    for a in range(n):
        neighbours = np.flatnonzero(pattern[a])
        for b in neighbours:
            of_a = (colours == colours[a]) & (np.arange(n) != a)
            of_b = (colours == colours[b]) & (np.arange(n) != b)
            pair = np.sum(matrix[b, of_a] ** 2) + np.sum(matrix[a, of_b] ** 2)
            expected[a] += pair / 2 / len(neighbours)
    close(mean, expected, 1e-12)


SIDE = 24
FIELD = grid(SIDE, SIDE)
ROADS = roads()[:700, :700]
EXPONENT = scipy.linalg.expm(ROADS.astype(float))


def resolvent(adjacency: Any, shift: float) -> Any:
    return np.linalg.inv(laplacian(adjacency * 1.0) + shift * np.eye(len(adjacency)))


def shares(matrix: Any, pattern: Any, repeats: int, factor: float = 1) -> Any:
    """The share of entries in the interval, over keys; and error bars over errors."""
    truth = np.diag(matrix)[None]
    sampler = tx.probing(pattern, num_colours=30)
    operator = function(jnp.asarray(matrix))
    budget = repeats * sampler.num_colours

    def run(key: Any) -> Any:
        estimate = tx.hutchinson_diagonal(operator, key, budget, sampler=sampler)
        return (estimate.value, *estimate.interval(0.95), estimate.standard_error)

    value, low, high, error = over_keys(run, KEY, 8)
    low, high = value + factor * (low - value), value + factor * (high - value)
    ratio = jnp.linalg.norm(error) / jnp.linalg.norm(value - truth)
    return float(jnp.mean((low <= truth) & (truth <= high))), float(ratio)


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize(
    ("matrix", "pattern", "widest"),
    [
        (resolvent(FIELD, 0.1), FIELD, 1.3),
        (resolvent(FIELD, 1.0), FIELD, 1.8),
        (resolvent(ROADS, 0.1), ROADS, 1.3),
        (resolvent(ROADS, 1.0), ROADS, 2.1),
        (EXPONENT, ROADS, 6.0),
    ],
    ids=["field, far", "field, near", "roads, far", "roads, near", "roads, exp"],
)
def test_intervals_hold(matrix: Any, pattern: Any, widest: float, repeats: int) -> None:
    """Bars are on the whole as large as the errors. Shorter intervals fail."""
    held, ratio = shares(matrix, pattern, repeats)
    assert held >= 0.92
    assert 0.9 < ratio < (widest if repeats == 1 else 1.1)
    shortened, _ = shares(matrix, pattern, repeats, factor=0.25 / max(ratio, 1))
    assert shortened < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("estimate", ESTIMATES)
def test_a_band_of_its_own_pattern_has_no_error(estimate: Any) -> None:
    """Also if it is not symmetric: A_ab and A_ba are each seen exactly, and differ. Four
    colours of a chain keep three steps apart."""
    band = jnp.eye(300) * 2.0 - jnp.eye(300, k=1) + 0.3 * jnp.eye(300, k=-1)
    pattern = np.asarray(band != 0)
    for count in (12, 4):
        sampler = tx.probing(pattern, num_colours=count)
        found = estimate(function(band), KEY, count, sampler=sampler)
        truth = jnp.trace(band) if estimate is tx.hutchinson_trace else jnp.diagonal(band)
        close(found.value, truth, 1e-14)
        assert jnp.max(found.standard_error) < 1e-13 * jnp.trace(band)
    # The cube reaches three steps, which three colours do not keep apart.
    sampler = tx.probing(pattern, num_colours=3)
    other = estimate(function(band @ band @ band), KEY, 3, sampler=sampler)
    assert jnp.min(other.standard_error) > 0.1


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


@pytest.mark.parametrize("repeats", [1, slow(2)])
@pytest.mark.parametrize("name", cases(BARS, "chain"))
def test_no_entry_is_without_an_error_bar(name: str, repeats: int) -> None:
    """Residuals that vanish by chance: the largest |error|/bar, and of all but 1 %, are
    4.5 and 1.4, of the slow chain 3 and 2.3, of the leverages 6 and 2. Without the average
    over near dimensions they are 2e10 and 1e5, 5600 and 94, 760 and 2.4."""
    matrix, pattern, count = BARS[name]
    sampler, truth = tx.probing(pattern, num_colours=count), np.diag(matrix)
    budget = repeats * sampler.num_colours

    def run(key: Any) -> Any:
        found = tx.hutchinson_diagonal(function(matrix), key, budget, sampler=sampler)
        return found.value, found.standard_error

    value, bar = over_keys(run, KEY, 8)
    error = jnp.abs(value - truth[None])
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


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [1, 3])
def test_scale_changes_nothing(repeats: int) -> None:
    sampler = tx.probing(FIELD, power=3)
    single = jnp.asarray(resolvent(FIELD, 0.5), jnp.float32)
    budget = repeats * sampler.num_colours
    for estimate in ESTIMATES:
        expected = estimate(function(single), KEY, budget, sampler=sampler)
        for scale in (1e-25, 1e30):
            got = estimate(function(scale * single), KEY, budget, sampler=sampler)
            close(got.standard_error / scale, expected.standard_error, 1e-4)


def test_each_colour_has_a_spread_of_its_own() -> None:
    """Traces of two repeats have one degree of freedom for each colour."""
    sampler = tx.probing(FIELD, power=3)
    count = sampler.num_colours
    matrix = jnp.asarray(resolvent(FIELD, 0.5))
    estimate = tx.hutchinson_trace(function(matrix), KEY, 2 * count, sampler=sampler)
    assert estimate.degrees_of_freedom == count / 3
    keys = keys_of(KEY, 2)
    space = jax.ShapeDtypeStruct(matrix[0].shape, matrix.dtype)
    block = jnp.concatenate([sampler(k, space, count).T for k in keys], axis=1)
    forms = jnp.sum(block * (matrix @ block), axis=0).reshape(2, count) / count
    spread = jnp.sum((forms[0] - forms[1]) ** 2) / 4
    close(estimate.standard_error, jnp.sqrt(spread), 1e-9)


# The automatic choices.


@pytest.mark.slow
@pytest.mark.parametrize("automatic", [tx.diagonal, tx.trace])
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
    by_hand = tx.hutchinson_diagonal if automatic is tx.diagonal else tx.hutchinson_trace
    same = by_hand(operator, KEY, 40, sampler=by_pattern)
    close(probed.value, same.value, 1e-12)
    close(probed.standard_error, same.standard_error, 1e-12)
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


@pytest.mark.parametrize("which", [tx.trace, slow(tx.logdet)])
@pytest.mark.parametrize("dtype", [jnp.float32, slow(float)])
def test_a_pattern_that_does_not_cover(which: Any, dtype: Any) -> None:
    """Error bars cover a chain in another order than its pattern, and entries between
    dimensions of one colour. Those of the right pattern are at the level of rounding."""
    n, budget = 300, 25 if which is tx.trace else 150
    chain = 3 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    order, space = (
        np.random.default_rng(0).permutation(n),
        jax.ShapeDtypeStruct((n,), dtype),
    )
    colours = budget - 1 if which is tx.trace else 11
    far = 0.5 * (np.eye(n, k=colours) + np.eye(n, k=-colours))
    for matrix, covered in (
        (chain[order][:, order], False),
        (chain + far, False),
        (chain, True),
    ):
        truth = np.trace(matrix) if which is tx.trace else np.linalg.slogdet(matrix)[1]

        def held(key: Any, entries: Any, truth: float = float(truth)) -> Any:
            operator = lx.FunctionLinearOperator(lambda v: entries @ v, space, PSD)
            estimate = which(operator, key, budget, pattern=chain)
            low, high = estimate.interval(0.95)
            return (low <= truth) & (truth <= high), estimate.standard_error

        entries = jnp.asarray(matrix, dtype)
        inside, bars = jax.jit(lambda e: jax.lax.map(lambda k: held(k, e), KEYS))(entries)
        assert jnp.mean(inside) >= 0.88
        assert (jnp.max(bars) < 1e-3 * n) == covered


@pytest.mark.slow
def test_the_colour_that_is_tested_does_not_speak_for_all() -> None:
    """In a graph of several components, the largest colour may have no two dimensions that
    A connects, while others have. Without a tag, errors of .4 had bars of 9e-5."""
    points = np.random.default_rng(65).uniform(size=(200, 2))
    within = np.linalg.norm(points[:, None] - points, axis=-1) < 0.1
    edges = 1.0 * (within & ~np.eye(200, dtype=bool))
    inverse = np.linalg.inv(laplacian(edges) + np.eye(200) / 10)
    operator, truth = function(jnp.asarray(inverse, jnp.float32)), float(np.trace(inverse))

    def held(key: Any) -> Any:
        low, high = tx.trace(operator, key, 60, pattern=within).interval(0.95)
        return (low <= truth) & (truth <= high)

    assert jnp.mean(jax.lax.map(held, KEYS)) >= 0.88


def test_a_test_probe_is_within_the_budget() -> None:
    """It takes the matvec that colours leave over, if they leave one."""
    chain = np.eye(90) + np.eye(90, k=1) + np.eye(90, k=-1)
    operator, sampler = function(jnp.asarray(chain), PSD), tx.probing(chain, num_colours=9)
    for budget in (9, 10, 17):
        estimate = tx.hutchinson_trace(operator, KEY, budget, sampler=sampler)
        assert estimate.num_matvecs == min(budget, 10)
    assert tx.trace(operator, KEY, 9, pattern=chain).num_matvecs == 9
