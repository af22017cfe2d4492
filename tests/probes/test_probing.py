"""Probes from colourings."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, slow
from tests.matrices import general
from tests.probes.helpers import grid
from tests.wrappers import function

KEY = jax.random.key(9)
N = 66


def band(width: int, dtype: Any = float, n: int = N) -> Any:
    i, j = np.indices((n, n))
    return jnp.where(abs(i - j) <= width, general(n, dtype), 0)


@pytest.mark.parametrize(
    ("estimate", "dtype"),
    [
        (tx.hutchinson_trace, float),
        slow(tx.hutchinson_trace, complex),
        (tx.hutchinson_diagonal, complex),
    ],
)
def test_as_many_colours_as_the_pattern_needs_are_exact(
    estimate: Callable[..., tx.Estimate], dtype: Any
) -> None:
    """For a matrix of bandwidth 2 and its pattern; and for its square with power 2."""
    matrix = band(2, dtype)
    pattern = np.asarray(matrix) != 0
    for a, power in ((matrix, 1), (matrix @ matrix, 2)):
        sampler = tx.probing(pattern, power=power)
        np.testing.assert_array_equal(sampler.colours, np.arange(N) % (2 * power + 1))
        truth = jnp.trace(a) if estimate is tx.hutchinson_trace else jnp.diagonal(a)
        one, two = (
            estimate(function(a), KEY, budget, sampler=sampler)
            for budget in (sampler.num_colours + 1, 2 * sampler.num_colours)
        )
        close(one.value, truth, 1e-12)
        close(two.value, truth, 1e-12)
        # One repeat cannot know that its error is zero: see `test_probing_errors`.
        assert jnp.all(one.standard_error > 0.01)
        assert jnp.all(one.standard_error < 100)
        assert jnp.all(two.standard_error < 1e-12 * jnp.max(jnp.abs(truth)) * N)
        spent = one.num_matvecs, two.num_matvecs
        assert spent == (sampler.num_colours, 2 * sampler.num_colours)


@pytest.mark.parametrize("dtype", [slow(float), slow(complex)])
def test_too_few_colours_leave_the_error_of_theory(dtype: Any) -> None:
    """The variance of entry a is the sum of squared moduli in row a at the other places of
    its colour, over the repeats. The mean square of the standard error is the variance."""
    matrix, colours, repeats = np.asarray(general(N, dtype)), np.arange(N) % 11, 4
    sampler = tx.probing(colours)

    def run(key: Any) -> tx.Estimate:
        operator = function(jnp.asarray(matrix))
        return tx.hutchinson_diagonal(operator, key, 11 * repeats, sampler=sampler)

    keys = jax.random.split(KEY, 1000)
    estimates = jax.jit(lambda keys: jax.lax.map(run, keys))(keys)
    others = (colours[:, None] == colours) & ~np.eye(N, dtype=bool)
    variance = np.sum(np.abs(matrix * others) ** 2, axis=1) / repeats
    errors = np.asarray(estimates.value) - np.diag(matrix)
    assert np.all(np.abs(errors.mean(0)) <= 6 * np.sqrt(variance / 1000))
    for squares in (np.abs(errors) ** 2, np.asarray(estimates.standard_error) ** 2):
        deviation = 6 * squares.std(0) / np.sqrt(1000)
        assert np.all(np.abs(squares.mean(0) - variance) <= deviation)
        assert np.all(deviation < 0.7 * variance)


def test_derivatives_are_those_of_the_value() -> None:
    matrix, sampler = general(N), tx.probing(np.arange(N) % 11)

    def loss(matrix: Any) -> Any:
        operator = function(matrix)
        diagonal = tx.hutchinson_diagonal(operator, KEY, 22, sampler=sampler).value
        trace = tx.hutchinson_trace(operator, KEY, 22, sampler=sampler).value
        return jnp.sum(jnp.cos(jnp.arange(N)) * diagonal) + trace

    slope = jnp.sum(jax.jit(jax.grad(loss))(matrix) * matrix)
    close(slope, loss(matrix), 1e-12, N)


def test_pytrees_of_colours() -> None:
    """Colours in the operator's structure; each leaf's probes in its own dtype."""
    structure = {
        "a": jax.ShapeDtypeStruct((3, 4), "float32"),
        "b": jax.ShapeDtypeStruct((55,), float),
    }
    colours = {"a": np.arange(12).reshape(3, 4) % 5, "b": jnp.arange(55) % 5 + 10}
    sampler = tx.probing(colours)
    assert sampler.num_colours == 10
    probes = sampler(KEY, structure, 20)
    assert jax.tree.map(lambda p: p.dtype, probes) == {"a": jnp.float32, "b": jnp.float64}
    flat = np.concatenate([probes["a"].reshape(20, 12), probes["b"]], axis=1)
    np.testing.assert_allclose(flat.T @ flat * np.eye(67) / 20, np.eye(67), rtol=1e-6)
    np.testing.assert_array_equal((flat != 0).sum(0), 2)


# Errors.


FOUR = jax.ShapeDtypeStruct((4,), float)
probing = tx.probing


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: probing(np.arange(3) - 1), ValueError, r"colours=.*at least 0.*got -1"),
        (lambda: probing(np.arange(0)), ValueError, r"colours=.*got none"),
        (lambda: probing(np.ones((2, 3))), ValueError, r"pattern=.*square.*\(2, 3\)"),
        (lambda: probing(np.arange(3), power=2), ValueError, r"power=.*come with a pat"),
        (lambda: probing(np.ones(3)), TypeError, r"colours=.*float64.*\.astype\(int\)"),
        (lambda: jax.jit(probing)(jnp.arange(3)), TypeError, r"colours=.*traced"),
        (
            lambda: probing(np.arange(5))(KEY, FOUR, 5),
            ValueError,
            r"colours=.*4 rows.*got 5",
        ),
        (
            lambda: probing(np.arange(4))(KEY, FOUR, 6),
            ValueError,
            r"colours=.*multiple of 4",
        ),
        (
            lambda: tx.hutchinson_diagonal(
                function(band(1)), KEY, 8, sampler=probing(np.arange(N) % 9)
            ),
            ValueError,
            r"hutchinson_diagonal\(num_matvecs=.*at least 9.*colour.*got 8",
        ),
        (
            lambda: tx.trace(function(band(1)), KEY, 40, pattern=grid(5, 5)),
            ValueError,
            r"trace\(pattern=.*must be 66 x 66.*got shape \(25, 25\)",
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=rf"traceax\..*{words}"):
        call()


def test_the_others_need_independent_probes() -> None:
    others = [tx.xtrace, tx.hutchpp_trace, tx.na_hutchpp_trace, tx.xdiag, tx.diagpp]
    for estimate in (*others, tx.row_norms_squared, tx.frobenius_norm_squared):
        with pytest.raises(ValueError, match=r"sampler=.*independent.*traceax.probing"):
            estimate(function(band(1)), KEY, 24, sampler=probing(np.arange(N) % 3))
