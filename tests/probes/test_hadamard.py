"""Rows of a Hadamard matrix: signs without replacement."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, refused
from tests.matrices import general
from tests.wrappers import function
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


def test_pytrees_are_parts_of_one_draw() -> None:
    structure = {"a": column(5), "b": jax.ShapeDtypeStruct((2, 4), "float32")}
    probes = tx.hadamard(KEY, structure, 7)
    whole = tx.hadamard(KEY, column(13), 7)
    np.testing.assert_array_equal(probes["a"], whole[:, :5])
    np.testing.assert_array_equal(probes["b"].reshape(7, 8), whole[:, 5:])
    assert probes["b"].dtype == jnp.float32


def test_means_use_them_where_they_lower_the_variance() -> None:
    operator = function(general(40))
    assert for_mean(operator, 4) is tx.rademacher
    assert for_mean(operator, 5) is tx.hadamard
    assert for_mean(function(general(1)), 1) is tx.rademacher


def test_wrong_use_says_the_cure() -> None:
    words, how = r"hadamard\(num_probes=.*at most 16.*got 17", {"sampler": tx.hadamard}
    refused(ValueError, words, tx.hadamard, KEY, column(13), 17)
    words, operator = r"sampler=.*independent.*got traceax\.hadamard", function(general(40))
    refused(ValueError, words, tx.xtrace, operator, KEY, 10, **how)
