"""Singular operators, and functions whose slope is infinite there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import cases, over_keys
from tests.wrappers import PSD, function, matrix_free

N = 96


def star() -> np.ndarray:
    """The Laplacian of a star."""
    matrix = np.eye(N)
    matrix[0], matrix[:, 0] = -1, -1
    matrix[0, 0] = N - 1
    return matrix


def columns(rank: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(0).normal(size=(N, rank)))[0]


MATRICES = {
    "blocks of ones": np.kron(np.eye(N // 8), np.ones((8, 8))),
    "star": star(),
    "projector": columns(10) @ columns(10).T,
    "rank one": columns(1) @ columns(1).T,
}


def entropy(x: Any) -> Any:
    return jnp.where(x == 0, 0, x * jnp.log(jnp.where(x == 0, 1, x)))


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sqrt": jnp.sqrt,
    "x^0.7": lambda x: x**0.7,
    "x log x": entropy,
}


@pytest.mark.parametrize("fn", cases(FUNCTIONS, "x log x"))
def test_bars_are_finite_where_values_are(fn: str) -> None:
    """The slope at 0 is infinite; what zero is uncertain by is rounding all the same."""
    f = FUNCTIONS[fn]

    def estimates(matrix: Any) -> tuple[tx.Estimate, tx.Estimate]:
        operator, key = function(matrix, PSD), jax.random.key(1)
        sampled = tx.slq_trace(operator, f, key, num_probes=8, num_steps=12)
        return tx.function_trace(operator, f, key, 60), sampled

    run = jax.jit(estimates)
    for matrix in MATRICES.values():
        eigenvalues = np.linalg.eigvalsh(matrix)
        nonzero = eigenvalues[eigenvalues > 1e-10]
        truth = float(np.sum(np.asarray(jax.vmap(f)(jnp.asarray(nonzero)))))
        for estimate in run(jnp.asarray(matrix)):
            assert abs(estimate.value - truth) <= 4 * estimate.standard_error + 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_nilpotent_operator(dtype: Any) -> None:
    """u v* with v* u = 0 has no basis of eigenvectors: tr exp(u v*) = n."""
    u, v = (jnp.asarray(column, dtype) for column in columns(2).T)
    operator = matrix_free(lambda x: u * (v @ x), N, dtype=dtype)

    def one(key: Any) -> tx.Estimate:
        return tx.arnoldi_trace(operator, jnp.exp, key, num_probes=4, num_steps=10)

    found = over_keys(one, jax.random.key(0), 400)
    assert jnp.all(jnp.abs(found.value - N) < 5)
    assert jnp.all(jnp.isfinite(found.standard_error))
