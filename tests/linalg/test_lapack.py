"""Decompositions in single precision: of matrices of any scale, and with a lower bound."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.matrices import general, hermitian
from traceax._linalg import lapack

K = 40
EPS = float(np.finfo(np.float32).eps)
FALLING = 10.0 ** -np.linspace(0, 6, K)


def decomposed(matrix: Any, bound: float) -> tuple[Any, Any, Any]:
    """Eigenvalues, their errors, and the errors that `eigh_above` expects."""
    rounded = np.asarray(matrix, np.float32)
    truth = np.linalg.eigvalsh(rounded.astype(float))
    values, vectors, grain = lapack.eigh_above(jnp.asarray(rounded), jnp.float32(bound))
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(K), atol=20 * EPS)
    return truth, np.abs(np.asarray(values, float) - truth), np.asarray(grain)


def test_eigenvalues_near_the_bound_keep_their_digits() -> None:
    """They are moved by eps times the geometric mean of the largest and themselves. LAPACK
    moves each one by eps times the largest."""
    truth, errors, grain = decomposed(hermitian(FALLING), 0.0)
    np.testing.assert_allclose(grain, 2 * EPS * np.sqrt(truth * truth[-1]), rtol=0.1)
    assert np.all(errors <= 20 * grain)
    by_lapack = jnp.linalg.eigh(jnp.asarray(hermitian(FALLING), jnp.float32))[0]
    assert np.any(np.abs(np.asarray(by_lapack, float) - truth) > 20 * grain)


def test_other_bounds() -> None:
    """One far below takes no digits. If rounding moves the least eigenvalues below it, by a
    little, that changes nothing. Otherwise a decomposition is as usual."""
    for bound in (-1e2, -1e6, -1e30):
        _, errors, grain = decomposed(hermitian(FALLING), bound)
        largest = min(K * np.abs(hermitian(FALLING)).max(), -bound)
        assert np.max(grain) <= 2.2 * EPS * (largest + 1)
        # LAPACK rounds differently on different processors. On one it is 4.01 times.
        assert np.max(errors) <= 8 * np.max(grain)
    falling = np.where(np.arange(K) < 20, FALLING, -3 * EPS)
    truth, errors, grain = decomposed(hermitian(falling), 0.0)
    assert truth[0] < -2 * EPS
    assert np.all(errors <= 4 * grain + 10 * EPS * falling.clip(0).sum())
    assert np.max(grain[:20]) < EPS / 10
    _, errors, grain = decomposed(hermitian(np.linspace(-1, 1, K)), 0.0)
    np.testing.assert_allclose(grain, EPS, rtol=1e-3)
    assert np.max(errors) <= 20 * EPS


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_eigenvalues_of_general_matrices_of_any_scale(dtype: Any) -> None:
    matrix = general(K, dtype)
    values, vectors = map(np.asarray, lapack.eig(matrix))
    for power in (-60, -40, 40, 60):
        unit = np.float32(2.0**power)
        scaled, vectors_too = map(np.asarray, lapack.eig(matrix * unit.astype(dtype)))
        np.testing.assert_array_equal(scaled / unit, values)
        np.testing.assert_array_equal(vectors_too, vectors)
        alone = np.asarray(lapack.eigvals(matrix * unit.astype(dtype)))
        np.testing.assert_allclose(np.sum(alone / unit), np.trace(matrix), rtol=1e-5)
    np.testing.assert_array_equal(lapack.eigvals(0 * matrix), 0)
