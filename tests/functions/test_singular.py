"""Singular operators, and functions whose derivative is infinite there."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import cases, over_keys, slow
from tests.wrappers import PSD, function, matrix_free

N = 96


def columns(rank: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(0).normal(size=(N, rank)))[0]


STAR = np.diag(np.append(N - 1.0, np.ones(N - 1)))
STAR[0, 1:] = STAR[1:, 0] = -1
MATRICES = {
    "blocks of ones": np.kron(np.eye(N // 8), np.ones((8, 8))),
    "Laplacian of a star": STAR,
    "projector": columns(10) @ columns(10).T,
    "rank one": columns(1) @ columns(1).T,
}


def singular(x: Any) -> Any:
    """Two roots, and x log x."""
    entropy = jnp.where(x == 0, 0, x * jnp.log(jnp.where(x == 0, 1, x)))
    return jnp.stack([jnp.sqrt(x), x**0.7, entropy])


@pytest.mark.slow
def test_bars_are_finite_where_values_are() -> None:
    """Although the derivative at 0 is infinite."""
    key = jax.random.key(1)

    @jax.jit
    def run(matrix: Any) -> tuple[tx.Estimate, tx.Estimate]:
        operator = function(matrix, PSD)
        how: Any = {"num_probes": 8, "num_steps": 12}
        sampled = tx.slq_trace(operator, singular, key, **how)
        return tx.function_trace(operator, singular, key, 60), sampled

    for matrix in MATRICES.values():
        eigenvalues = np.linalg.eigvalsh(matrix)
        nonzero = jnp.asarray(eigenvalues[eigenvalues > 1e-10])
        truth = jax.vmap(singular)(nonzero).sum(0)
        for estimate in run(jnp.asarray(matrix)):
            error = abs(estimate.value - truth)
            assert jnp.all(error <= 4 * estimate.standard_error + 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_nilpotent_operator(dtype: Any) -> None:
    """u v* with v* u = 0 has no basis of eigenvectors: tr exp(u v*) = n."""
    u, v = (jnp.asarray(column, dtype) for column in columns(2).T)
    operator = matrix_free(lambda x: u * (v @ x), N, dtype=dtype)
    how: Any = {"num_probes": 4, "num_steps": 10}
    run = lambda key: tx.arnoldi_trace(operator, jnp.exp, key, **how)  # noqa: E731
    found = over_keys(run, jax.random.key(0), 400)
    assert jnp.all(jnp.abs(found.value - N) < 5)
    assert jnp.all(jnp.isfinite(found.standard_error))


def skewed(asymmetry: float, n: int = 40) -> np.ndarray:
    """A positive definite matrix whose upper triangle is perturbed."""
    rng = np.random.default_rng(1)
    factor = rng.normal(size=(n, n))
    return factor @ factor.T / n + np.eye(n) / 2 + asymmetry * np.triu(factor, 1)


LEVELS, VECTOR = jnp.array([0.1, 1.0]), jnp.ones(40)
EXACT: dict[str, Any] = {
    "logdet": lambda a, key: tx.logdet(a, key),
    "shifts": lambda a, key: tx.logdet(a, key, shift=LEVELS),
    "likelihood": lambda a, key: tx.inv_quad_logdet(a, VECTOR, key).logdet,
    "form": lambda a, key: tx.inv_quad_logdet(a, VECTOR, key).inv_quad,
    "function_trace": lambda a, key: tx.function_trace(a, jnp.log, key),
    "schatten_norm": lambda a, key: tx.schatten_norm(a, 0.5, key),
    "function_diagonal": lambda a, key: tx.function_diagonal(a, jnp.log, key),
}


@pytest.mark.parametrize("name", cases(EXACT, "shifts", "function_trace"))
def test_the_error_of_an_exact_answer_includes_the_asymmetry(name: str) -> None:
    """It is the distance from the answer for the matrix of the lower triangle, and NaN if
    a matrix is not Hermitian. Each one of a batch has its own."""

    def run(matrix: Any) -> tx.Estimate:
        return EXACT[name](lx.MatrixLinearOperator(matrix, PSD), jax.random.key(0))

    matrix, general = skewed(1e-4), jnp.asarray(skewed(1.0))
    lower = np.tril(matrix) + np.tril(matrix, -1).T
    batch = jnp.stack([skewed(0), skewed(1e-15), matrix, lower, general])
    found = jax.jit(jax.vmap(run))(batch)
    value, error = found.value, found.standard_error
    assert jnp.all(error[:2] == 0)
    distance = jnp.abs(value[3] - value[2])
    assert jnp.all(distance > 0)
    np.testing.assert_allclose(error[2], distance, rtol=1e-6)
    assert jnp.all(jnp.isnan(value[4]) & jnp.isnan(error[4]))
    if name == "function_trace":
        assert "is not Hermitian" in str(run(general))


@pytest.mark.parametrize("num_matvecs", [slow(60), N])
def test_the_log_determinant_of_a_singular_gauss_newton_matrix(num_matvecs: int) -> None:
    """It has the same answer from a Krylov space and from a factorisation."""
    jacobian = jnp.asarray(np.random.default_rng(0).normal(size=(20, N)))
    model, loss = lambda w, _: jacobian @ w, lambda y, _: y @ y / 2
    operator, key = tx.gauss_newton(model, loss, jnp.ones(N)), jax.random.key(0)
    estimate = tx.logdet(operator, key, num_matvecs)
    assert (estimate.value, estimate.standard_error) == (-jnp.inf, jnp.inf)
    assert jnp.isfinite(tx.logdet(operator, key, num_matvecs, shift=0.1).value)


def test_exact_answers_for_singular_and_indefinite_matrices() -> None:
    """Eigenvalues of rounding have a root. A clearly indefinite matrix has no logarithm."""
    ones = lx.MatrixLinearOperator(jnp.asarray(MATRICES["blocks of ones"]), PSD)
    root = tx.function_trace(ones, jnp.sqrt, jax.random.key(0))
    np.testing.assert_allclose(root.value, N / 8 * 8**0.5, rtol=1e-12)
    operator = tx.as_operator(np.diag(np.append(np.ones(N), -1e-6)))
    assert jnp.isnan(tx.logdet(operator, jax.random.key(0)).value)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_roots_of_projectors_are_defined(dtype: Any) -> None:
    """Eigenvalues that are zero were down to -7 eps, and every third root was NaN."""
    draws = np.random.default_rng(0).normal(size=(40, 96, 10))
    bases = np.linalg.qr(draws)[0]
    projectors = jnp.asarray(bases @ bases.swapaxes(1, 2), dtype)

    @jax.jit
    @jax.vmap
    def roots(projector: Any) -> Any:
        operator = lx.MatrixLinearOperator(projector, PSD)
        return tx.function_trace(operator, jnp.sqrt, jax.random.key(0)).value

    assert jnp.max(jnp.abs(roots(projectors) - 10)) < 300 * jnp.finfo(dtype).eps ** 0.5
