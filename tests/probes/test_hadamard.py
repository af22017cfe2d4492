"""Rows of a Hadamard matrix: signs without replacement."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, function, general
from traceax._probes.draw import for_mean
from traceax._probes.samplers import hadamard_order

KEY = jax.random.key(11)


def column(n: int, dtype: Any = float) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((n,), dtype)


@pytest.mark.parametrize("n", [1, 4, 128])
def test_all_of_them_are_a_basis(n: int) -> None:
    assert hadamard_order(n) == n
    probes = np.asarray(tx.hadamard(KEY, column(n), n))
    assert set(np.unique(probes)) <= {-1, 1}
    np.testing.assert_array_equal(probes @ probes.T, n * np.eye(n))


@pytest.mark.parametrize("dtype", [float, complex])
def test_the_sum_over_all_is_the_trace_whatever_the_signs(dtype: Any) -> None:
    """With m rows for n < m. Their modulus is 1, so that diagonals are exact, too."""
    n = 30
    matrix = general(n, dtype)
    probes = tx.hadamard(KEY, column(n, dtype), hadamard_order(n))
    forms = jnp.einsum("ka,ab,kb->k", probes.conj(), matrix, probes)
    close(jnp.mean(forms), jnp.trace(matrix), 1e-12)
    close(jnp.abs(probes), 1.0, 1e-12)
    assert len(np.unique(np.asarray(probes), axis=0)) == hadamard_order(n)


def test_the_variance_has_the_finite_population_correction() -> None:
    """Enumeration of all signs and all pairs of rows at n = 4: the mean is the trace, the
    variance is (m - k)/(m - 1) of that of independent signs, and so is the mean square of
    the standard error."""
    n, k = 4, 2
    matrix = np.asarray(general(n))
    rows = np.asarray(tx.hadamard(KEY, column(n), n))  # any signs: all follow
    values, squares = [], []
    for signs in itertools.product([-1.0, 1.0], repeat=n):
        for pair in itertools.combinations(range(n), k):
            chosen = rows[list(pair)] * np.array(signs)
            forms = np.einsum("ka,ab,kb->k", chosen, matrix, chosen)
            values.append(forms.mean())
            squares.append((1 - k / n) * forms.var(ddof=1) / k)
    symmetric = (matrix + matrix.T) / 2
    off = symmetric - np.diag(np.diag(symmetric))
    theory = 2 * np.sum(off**2) / k * (n - k) / (n - 1)
    assert np.mean(values) == pytest.approx(np.trace(matrix), rel=1e-12)
    assert np.var(values) == pytest.approx(theory, rel=1e-12)
    assert np.mean(squares) == pytest.approx(theory, rel=1e-12)


@pytest.mark.slow
def test_draws_have_the_variance_and_the_bar_of_theory() -> None:
    n, k = 13, 6
    matrix = general(n)

    def run(key: Any) -> tx.Estimate:
        return tx.hutchinson_trace(function(matrix), key, k, sampler=tx.hadamard)

    estimates = jax.jit(jax.vmap(run))(jax.random.split(KEY, 4000))
    symmetric = np.asarray((matrix + matrix.T) / 2)
    off = symmetric - np.diag(np.diag(symmetric))
    m = hadamard_order(n)
    theory = 2 * np.sum(off**2) / k * (m - k) / (m - 1)
    errors = np.asarray(estimates.value) - np.trace(matrix)
    assert abs(errors.mean()) < 5 * np.sqrt(theory / 4000)
    for squares in (errors**2, np.asarray(estimates.standard_error) ** 2):
        allowed = 5 * squares.std() / 4000**0.5
        assert abs(squares.mean() - theory) < allowed
        assert (
            abs(squares.mean() - theory * (m - 1) / (m - k)) > allowed
        )  # without the correction


def test_pytrees_are_parts_of_one_draw() -> None:
    structure = {"a": column(5), "b": jax.ShapeDtypeStruct((2, 4), "float32")}
    probes = tx.hadamard(KEY, structure, 7)
    whole = tx.hadamard(KEY, column(13), 7)
    np.testing.assert_array_equal(probes["a"], whole[:, :5])
    np.testing.assert_array_equal(probes["b"].reshape(7, 8), whole[:, 5:])
    assert probes["b"].dtype == jnp.float32


def test_means_use_them_where_they_lower_the_variance() -> None:
    operator = function(general(40))
    assert for_mean(None, operator, 4) is tx.rademacher
    assert for_mean(None, operator, 5) is tx.hadamard
    assert for_mean(None, function(general(1)), 1) is tx.rademacher
    assert for_mean(tx.sphere, operator, 30) is tx.sphere


def test_wrong_use_says_the_cure() -> None:
    with pytest.raises(ValueError, match=r"hadamard\(num_probes=.*at most 16.*got 17"):
        tx.hadamard(KEY, column(13), 17)
    with pytest.raises(ValueError, match=r"sampler=.*independent.*got traceax\.hadamard"):
        tx.xtrace(function(general(40)), KEY, 10, sampler=tx.hadamard)
