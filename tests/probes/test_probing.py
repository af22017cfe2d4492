"""Probes from colourings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import traceax as tx
from tests.helpers import close, is_unbiased, nightly, over_keys, refused, slow
from tests.matrices import general
from tests.probes.helpers import alike, grid, laplacian
from tests.wrappers import PSD, function, two_leaves

KEY = jax.random.key(9)
N = 66


def band(width: int, dtype: Any = float, n: int = N) -> Any:
    i, j = np.indices((n, n))
    return jnp.where(abs(i - j) <= width, general(n, dtype), 0)


KINDS = [(tx.hutchinson_diagonal, complex), slow(tx.hutchinson_trace, complex)]


@pytest.mark.parametrize(
    ("estimate", "dtype"), [*KINDS, nightly(tx.hutchinson_trace, float)]
)
def test_as_many_colours_as_the_pattern_needs_are_exact(estimate: Any, dtype: Any) -> None:
    """For a matrix of bandwidth 2 and its pattern; and for its square with power 2. A row
    may have two entries in one colour, so that the test probe does not see exactness."""
    matrix = band(2, dtype)
    pattern = np.asarray(matrix) != 0
    for a, power in ((matrix, 1), (matrix @ matrix, 2)):
        sampler = tx.probing(pattern, power=power)
        np.testing.assert_array_equal(sampler.colours, np.arange(N) % (2 * power + 1))
        truth = jnp.trace(a) if estimate is tx.hutchinson_trace else jnp.diagonal(a)
        budgets = sampler.num_colours + 1, 2 * sampler.num_colours
        one, two = (estimate(function(a), KEY, m, sampler=sampler) for m in budgets)
        close((one.value, two.value), (truth, truth), 1e-12)
        assert jnp.all((one.standard_error > 0.01) & (one.standard_error < 100))
        assert jnp.all(two.standard_error < 1e-12 * jnp.max(jnp.abs(truth)) * N)
        assert (one.num_matvecs, two.num_matvecs) == budgets


@pytest.mark.parametrize("dtype", [nightly(float), slow(complex)])
def test_too_few_colours_leave_the_error_of_theory(dtype: Any) -> None:
    """The variance of entry a is the sum of squared moduli in row a at the other places of
    its colour, over the repeats. The mean square of the standard error is the variance."""
    matrix, colours, repeats = np.asarray(general(N, dtype)), np.arange(N) % 11, 4
    sampler, operator = tx.probing(colours), function(jnp.asarray(matrix))

    def run(key: Any) -> tx.Estimate:
        return tx.hutchinson_diagonal(operator, key, 11 * repeats, sampler=sampler)

    estimates = over_keys(run, KEY, 1000)
    variance = np.sum(np.abs(matrix * alike(colours)) ** 2, axis=1) / repeats
    errors = np.asarray(estimates.value) - np.diag(matrix)
    assert np.all(np.abs(errors.mean(0)) <= 6 * np.sqrt(variance / 1000))
    for squares in (np.abs(errors) ** 2, np.asarray(estimates.standard_error) ** 2):
        deviation = 6 * squares.std(0) / np.sqrt(1000)
        assert np.all(np.abs(squares.mean(0) - variance) <= deviation)
        assert np.all(deviation < 0.7 * variance)


def test_derivatives_are_those_of_the_value() -> None:
    sampler = tx.probing(np.arange(N) % 11)

    def loss(matrix: Any) -> Any:
        runs = (tx.hutchinson_diagonal, tx.hutchinson_trace)
        both = [run(function(matrix), KEY, 22, sampler=sampler).value for run in runs]
        return jnp.sum(jnp.cos(jnp.arange(N)) * both[0]) + both[1]

    value, gradient = jax.jit(jax.value_and_grad(loss))(general(N))
    close(jnp.sum(gradient * general(N)), value, 1e-12, N)


def test_pytrees_of_colours() -> None:
    """Colours in the operator's structure; each leaf's probes in its own dtype."""
    like = jax.ShapeDtypeStruct
    structure = {"a": like((3, 4), jnp.float32), "b": like((55,), float)}
    colours = {"a": np.arange(12).reshape(3, 4) % 5, "b": jnp.arange(55) % 5 + 10}
    sampler = tx.probing(colours)
    assert sampler.num_colours == 10
    probes = sampler(KEY, structure, 20)
    assert jax.tree.map(lambda p: p.dtype, probes) == {"a": jnp.float32, "b": jnp.float64}
    flat = np.concatenate([probes["a"].reshape(20, 12), probes["b"]], axis=1)
    np.testing.assert_allclose(flat.T @ flat * np.eye(67) / 20, np.eye(67), rtol=1e-6)
    np.testing.assert_array_equal((flat != 0).sum(0), 2)


def test_errors() -> None:
    probing, kind, value, traced = tx.probing, TypeError, ValueError, jax.jit(tx.probing)
    a, space = function(band(1)), jax.ShapeDtypeStruct((4,), float)
    refused(value, "colours=.*at least 0.*got -1", probing, np.arange(3) - 1)
    refused(value, "colours=.*got none", probing, np.arange(0))
    refused(value, r"pattern=.*square.*\(2, 3\)", probing, np.ones((2, 3)))
    refused(value, "power=.*come with a pat", probing, np.arange(3), power=2)
    refused(kind, r"colours=.*float64.*\.astype\(int\)", probing, np.ones(3))
    refused(kind, "colours=.*traced", traced, jnp.arange(3))
    refused(value, "colours=.*4 rows.*got 5", probing(np.arange(5)), KEY, space, 5)
    refused(
        value, "colours=.*multiple of 4.*Draw 4 or 8", probing(np.arange(4)), KEY, space, 6
    )
    how: Any = {"sampler": probing(np.arange(N) % 9)}
    words = r"hutchinson_diagonal\(num_matvecs=.*at least 9.*colour.*got 8"
    refused(value, words, tx.hutchinson_diagonal, a, KEY, 8, **how)
    words = r"trace\(pattern=.*must be 66 x 66.*got shape \(25, 25\)"
    refused(value, words, tx.trace, a, KEY, 40, pattern=grid(5, 5))
    others = [tx.xtrace, tx.hutchpp_trace, tx.na_hutchpp_trace, tx.xdiag, tx.diagpp]
    for estimate in (*others, tx.row_norms_squared, tx.frobenius_norm_squared):
        refused(value, "sampler=.*independent.*probing", estimate, a, KEY, 24, **how)


# Traces by colours, with the dominant directions deflated where that is better.

START = jax.random.key(3)
FIELD, M = grid(14, 14), 40
SIZE, NAME = len(FIELD), "the better of hutchpp_trace and hutchinson_trace"
SAMPLER = tx.probing(FIELD, num_colours=M - 1)
SMOOTH = jnp.asarray(np.linalg.inv(laplacian(FIELD) + 0.01 * np.eye(SIZE)))  # deflated
MIDDLE = jnp.asarray(np.linalg.inv(laplacian(FIELD) + 0.06 * np.eye(SIZE)))  # as it happens
RIGID = jnp.asarray(scipy.linalg.expm(FIELD))  # never deflated


def phases(matrix: Any) -> Any:
    turn = np.exp(2j * np.arange(SIZE) ** 2)
    return turn[:, None] * matrix.astype(complex) * turn.conj()[None, :]


def deflated(operator: Any, key: Any = START) -> tx.Estimate:
    return tx.trace(operator, key, M, pattern=FIELD)


def by_colours(operator: Any, key: Any = START) -> tx.Estimate:
    return tx.hutchinson_trace(operator, key, M, sampler=SAMPLER)


LESS = RIGID + 0.1 * general(SIZE) * FIELD


@pytest.mark.parametrize("matrix", [slow(phases(LESS)), *map(nightly, (RIGID, LESS))])
def test_what_decays_is_probed_as_without_a_sketch(matrix: Any) -> None:
    operator = function(matrix)
    found, plain = deflated(operator), by_colours(operator)
    assert found.method == f"{NAME}, {SAMPLER.num_colours} colours"
    assert found.num_matvecs == plain.num_matvecs
    close((found.value, found.standard_error), (plain.value, plain.standard_error), 1e-13)


@pytest.mark.parametrize(
    ("wrap", "turn"), [(function, jnp.asarray), slow(two_leaves, phases)]
)
def test_low_rank_is_exact(wrap: Any, turn: Any) -> None:
    """Probes of two leaves are in another order than the pattern."""
    modes = jnp.asarray(np.linalg.qr(general(SIZE)[:, :7])[0])
    matrix = turn(modes @ modes.T * SIZE)
    found = deflated(wrap(matrix))
    close(found.value, jnp.trace(matrix), 1e-12)
    assert found.standard_error < 1e-9 * SIZE


@pytest.mark.parametrize("turn", [nightly(jnp.asarray), slow(phases)])
def test_values_derivatives_and_intervals(turn: Any) -> None:
    """In `MIDDLE` the colours of the sketch decide differently."""
    tangent = general(SIZE) / SIZE + jnp.eye(SIZE)

    @jax.jit
    def runs(matrix: Any) -> Any:
        def run(key: Any) -> Any:
            def trace(t: Any) -> Any:
                found = deflated(function(turn(matrix + t * tangent)), key)
                return found.value.real, found.standard_error

            (value, error), (derivative, _) = jax.jvp(trace, (0.0,), (1.0,))
            return value, error, derivative

        return over_keys(run, START, 300)

    for matrix in (MIDDLE, SMOOTH):
        values, errors, derivatives = runs(jnp.asarray(matrix))
        truth = jnp.trace(matrix)
        assert is_unbiased(values, truth, 4)
        assert not is_unbiased(values + 0.02 * truth, truth, 4)
        assert is_unbiased(derivatives, jnp.trace(tangent), 4)
        assert jnp.mean(abs(values - truth) < 2.57 * errors) > 0.9


@pytest.mark.slow
def test_low_modes_cost_less_than_by_colours() -> None:
    operator, truth = function(SMOOTH, PSD), jnp.trace(SMOOTH)

    def errors(key: Any) -> Any:
        return [run(operator, key).value - truth for run in (deflated, by_colours)]

    new, old = over_keys(errors, START, 32)
    assert jnp.linalg.norm(new) < 0.6 * jnp.linalg.norm(old)


def test_gradients_are_those_of_the_value() -> None:
    grad = jax.jit(jax.value_and_grad(lambda matrix: deflated(function(matrix)).value))
    for matrix in (SMOOTH, RIGID):
        value, gradient = grad(matrix)
        close(jnp.sum(gradient * matrix), value, 1e-11)
