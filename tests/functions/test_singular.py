"""Singular operators, and functions whose slope is infinite there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import over_keys, slow
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


@pytest.mark.slow
@pytest.mark.parametrize("fn", FUNCTIONS)
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


def skewed(asymmetry: float, n: int = 80) -> np.ndarray:
    """A positive definite matrix whose upper triangle is perturbed."""
    rng = np.random.default_rng(1)
    factor = rng.normal(size=(n, n))
    return factor @ factor.T / n + np.eye(n) / 2 + asymmetry * np.triu(factor, 1)


def exact_answers(matrix: Any) -> dict[str, tx.Estimate]:
    operator, key = lx.MatrixLinearOperator(jnp.asarray(matrix), PSD), jax.random.key(0)
    both = tx.inv_quad_logdet(operator, jnp.ones(len(matrix)), key)
    return {
        "logdet": tx.logdet(operator, key),
        "shifts": tx.logdet(operator, key, shift=jnp.array([0.1, 1.0])),
        "likelihood": both.logdet,
        "form": both.inv_quad,
        "function_trace": tx.function_trace(operator, jnp.log, key),
        "schatten_norm": tx.schatten_norm(operator, 0.5, key),
        "function_diagonal": tx.function_diagonal(operator, jnp.log, key),
    }


@pytest.mark.slow
def test_the_error_of_an_exact_answer_includes_the_asymmetry() -> None:
    """It is the distance from the answers for the matrices of either triangle."""
    exact, asymmetric = map(exact_answers, (skewed(0), skewed(1e-4)))
    matrix, rounded = skewed(1e-4), exact_answers(skewed(1e-15))
    lower = exact_answers(np.tril(matrix) + np.tril(matrix, -1).T)
    for name, estimate in asymmetric.items():
        np.testing.assert_array_equal(exact[name].standard_error, 0, name)
        np.testing.assert_array_equal(rounded[name].standard_error, 0, name)
        distance = jnp.abs(lower[name].value - estimate.value)
        assert jnp.all(distance > 0)
        assert jnp.allclose(estimate.standard_error, distance, rtol=1e-6), name


@pytest.mark.slow
def test_an_exact_answer_for_a_matrix_that_is_not_hermitian_is_nan() -> None:
    for name, estimate in exact_answers(skewed(1.0)).items():
        assert jnp.all(jnp.isnan(estimate.value)), name
        assert jnp.all(jnp.isnan(estimate.standard_error)), name
        assert "is not Hermitian" in str(estimate)


@pytest.mark.parametrize("num_matvecs", [slow(60), N])
def test_the_log_determinant_of_a_singular_gauss_newton_matrix(num_matvecs: int) -> None:
    """It has the same answer from a Krylov space and from a factorisation."""
    jacobian = jnp.asarray(np.random.default_rng(0).normal(size=(20, N)))
    model, loss = lambda w, _: jacobian @ w, lambda y, _: y @ y / 2
    operator, key = tx.gauss_newton(model, loss, jnp.ones(N)), jax.random.key(0)
    estimate = tx.logdet(operator, key, num_matvecs)
    assert (estimate.value, estimate.standard_error) == (-jnp.inf, jnp.inf)
    assert jnp.isfinite(tx.logdet(operator, key, num_matvecs, shift=0.1).value)


def test_a_clearly_indefinite_matrix_has_no_log_determinant() -> None:
    matrix = np.diag(np.r_[-1e-6, np.ones(N)])
    operator = tx.as_operator(matrix[:, ::-1][::-1].copy())
    assert jnp.isnan(tx.logdet(operator, jax.random.key(0)).value)


@pytest.mark.slow
def test_batches_of_asymmetric_matrices() -> None:
    """Each has its own error, under jit and vmap."""
    matrices = jnp.stack([skewed(0), skewed(1e-4), skewed(1.0)])

    def run(matrix: Any) -> tx.Estimate:
        operator = lx.MatrixLinearOperator(matrix, PSD)
        return tx.logdet(operator, jax.random.key(0))

    batch = jax.jit(jax.vmap(run))(matrices)
    for k, matrix in enumerate(matrices):
        one = run(matrix)
        np.testing.assert_allclose(batch.value[k], one.value, rtol=1e-12)
        np.testing.assert_allclose(batch.standard_error[k], one.standard_error, rtol=1e-6)
    assert (batch.standard_error[0], bool(jnp.isnan(batch.value[2]))) == (0, True)


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64), slow(np.complex64)])
def test_the_gradient_of_a_diagonal_at_the_zero_operator(dtype: Any) -> None:
    """It is that of a multiple of I: in both, spaces are exhausted after one step."""

    @jax.jit
    @jax.value_and_grad
    def run(c: Any, level: Any) -> Any:
        fn = lambda x: jnp.exp(x - level)  # noqa: E731
        operator = matrix_free(lambda v: c.astype(dtype) * v, N, lx.symmetric_tag, dtype)
        how: Any = {"num_probes": 4, "num_steps": 5}
        return jnp.sum(tx.function_diagonal(operator, fn, jax.random.key(0), **how).value)

    level = np.ones((), np.finfo(dtype).dtype)
    (at_zero, slope), (at_one, expected) = run(0 * level, 0 * level), run(level, level)
    np.testing.assert_allclose((at_zero, at_one), N, rtol=1e-5)
    np.testing.assert_allclose(slope, expected, rtol=0.05)
    assert abs(slope - N) < 0.05 * N
