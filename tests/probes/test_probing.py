"""Probes from colourings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, over_keys, refused, slow
from tests.matrices import general
from tests.probes.helpers import grid
from tests.wrappers import function

KEY = jax.random.key(9)
N = 66


def band(width: int, dtype: Any = float, n: int = N) -> Any:
    i, j = np.indices((n, n))
    return jnp.where(abs(i - j) <= width, general(n, dtype), 0)


KINDS = [(tx.hutchinson_diagonal, complex)]
KINDS += [slow(tx.hutchinson_trace, dtype) for dtype in (float, complex)]


@pytest.mark.parametrize(("estimate", "dtype"), KINDS)
def test_as_many_colours_as_the_pattern_needs_are_exact(estimate: Any, dtype: Any) -> None:
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
        # A row may have two entries in one colour, so the test probe cannot tell that the
        # error is zero: see `test_probing_errors`.
        assert jnp.all(one.standard_error > 0.01)
        assert jnp.all(one.standard_error < 100)
        assert jnp.all(two.standard_error < 1e-12 * jnp.max(jnp.abs(truth)) * N)
        spent = one.num_matvecs, two.num_matvecs
        assert spent == (sampler.num_colours + 1, 2 * sampler.num_colours)


@pytest.mark.parametrize("dtype", [slow(float), slow(complex)])
def test_too_few_colours_leave_the_error_of_theory(dtype: Any) -> None:
    """The variance of entry a is the sum of squared moduli in row a at the other places of
    its colour, over the repeats. The mean square of the standard error is the variance."""
    matrix, colours, repeats = np.asarray(general(N, dtype)), np.arange(N) % 11, 4
    sampler = tx.probing(colours)

    def run(key: Any) -> tx.Estimate:
        operator = function(jnp.asarray(matrix))
        return tx.hutchinson_diagonal(operator, key, 11 * repeats, sampler=sampler)

    estimates = over_keys(run, KEY, 1000)
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
    leaves = {"a": jnp.zeros((3, 4), "float32"), "b": jnp.zeros(55)}
    structure = jax.eval_shape(lambda: leaves)
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
    refused(value, "colours=.*multiple of 4", probing(np.arange(4)), KEY, space, 6)
    how: Any = {"sampler": probing(np.arange(N) % 9)}
    words = r"hutchinson_diagonal\(num_matvecs=.*at least 9.*colour.*got 8"
    refused(value, words, tx.hutchinson_diagonal, a, KEY, 8, **how)
    words = r"trace\(pattern=.*must be 66 x 66.*got shape \(25, 25\)"
    refused(value, words, tx.trace, a, KEY, 40, pattern=grid(5, 5))
    others = [tx.xtrace, tx.hutchpp_trace, tx.na_hutchpp_trace, tx.xdiag, tx.diagpp]
    for estimate in (*others, tx.row_norms_squared, tx.frobenius_norm_squared):
        refused(value, "sampler=.*independent.*probing", estimate, a, KEY, 24, **how)
