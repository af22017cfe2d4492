"""Log-determinants: by Krylov spaces, exact where that is cheap."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, contains, nightly, over_keys, refused, slow
from tests.matrices import hermitian
from tests.wrappers import PSD, function, matrix_free

KEY = jax.random.key(4)
N, BUDGET = 200, 120
points = jnp.asarray(np.random.default_rng(0).random((N, 2)))
squares = jnp.sum((points[:, None] - points[None]) ** 2, axis=-1)
POINT = jnp.log(jnp.array([0.15, 1e-2]))


def kernel(log_length: Any) -> Any:
    return jnp.exp(-squares / (2 * jnp.exp(2 * log_length)))


@pytest.mark.slow
def test_second_derivatives_in_a_scale() -> None:
    """No probe matters to them. Forty steps from each vector are too few for the second
    matrix: NaN, not a number."""

    def value(s: Any, matrix: Any) -> Any:
        return tx.logdet(function(s * matrix), KEY, BUDGET).value

    second = jax.jit(jax.grad(jax.grad(value)))
    steep = hermitian(10.0 ** -np.linspace(0, 15, N))
    for matrix, want in ((kernel(POINT[0]) + jnp.eye(N), -N / 4), (steep, np.nan)):
        np.testing.assert_allclose(second(2.0, matrix), want, rtol=1e-5)


@pytest.mark.slow
def test_shifts_share_a_run() -> None:
    """Fifty of them, each in its interval, with gradients in all."""
    shifts, operator = jnp.geomspace(0.1, 10.0, 50), function(kernel(POINT[0]))

    def total(shifts: Any) -> Any:
        result = tx.logdet(operator, KEY, BUDGET, shift=shifts)
        return jnp.sum(result.value), result

    gradients, result = jax.jit(jax.grad(total, has_aux=True))(shifts)
    values = np.linalg.eigvalsh(kernel(POINT[0]))[:, None] + np.asarray(shifts)
    want = np.sum(np.log(values), axis=0)
    assert result.value.shape == (50,)
    assert jnp.mean(contains(result, want, 0.99)) > 0.9
    close(result.value, want, 0.02, float(np.max(want)))
    np.testing.assert_allclose(gradients, np.sum(1 / values, axis=0), rtol=0.05)


@pytest.mark.slow
def test_a_shift_decides_what_is_positive_definite() -> None:
    """One that is too small for the negative eigenvalues, and one that is not."""
    eigenvalues = np.linspace(-1, 1, N)
    operator = function(hermitian(eigenvalues))
    assert not jnp.isfinite(tx.logdet(operator, KEY, BUDGET, shift=0.5).value)
    enough = tx.logdet(operator, KEY, BUDGET, shift=1.5)
    assert contains(enough, np.log(eigenvalues + 1.5).sum(), 0.999)


@pytest.mark.slow
def test_low_rank_and_multiples_of_the_identity() -> None:
    """The space is exhausted: exact, with its gradient, without NaN."""
    low_rank = hermitian((np.arange(N) < 5) * (3.0 + np.arange(N)))

    @partial(jax.value_and_grad, argnums=(0, 1))
    def value(s: Any, t: Any, matrix: Any) -> Any:
        return tx.logdet(function(s * matrix, PSD), KEY, BUDGET, shift=t).value

    run = jax.jit(value)
    for matrix in (low_rank, jnp.zeros((N, N)), jnp.eye(N)):
        eigenvalues = jnp.linalg.eigvalsh(matrix)
        got, gradients = run(1.0, 0.1, matrix)
        close(got, jnp.sum(jnp.log(eigenvalues + 0.1)), 1e-9)
        close(gradients[0], jnp.sum(eigenvalues / (eigenvalues + 0.1)), 1e-8, N)
        close(gradients[1], jnp.sum(1 / (eigenvalues + 0.1)), 1e-8)


def test_a_zero_operator_in_single_precision() -> None:
    """The shift is far larger than the largest entry of T."""
    matrix = jnp.zeros((N, N), jnp.float32)

    @jax.jit
    def run(shift: Any) -> Any:
        return tx.logdet(function(matrix), KEY, BUDGET, shift=shift)

    for shift in (0.1, 5.0, 1e6):
        estimate, want = run(jnp.float32(shift)), N * np.log(shift)
        close(estimate.value, want, 1e-6, N)
        assert float(estimate.standard_error) < 1e-5 * abs(want)


DECAY = 1 / (1.0 + np.arange(N)) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_other_dtypes(dtype: Any) -> None:
    matrix = hermitian(DECAY, dtype)

    def value(s: Any) -> Any:
        result = tx.logdet(function(s * matrix, PSD), KEY, BUDGET, shift=1e-2)
        return result.value, result

    gradient, result = jax.jit(jax.grad(value, has_aux=True))(1.0)
    assert result.value.dtype == np.finfo(dtype).dtype
    low, high = result.interval(0.999)
    assert low - 1e-3 < float(np.log(DECAY + 1e-2).sum()) < high + 1e-3
    np.testing.assert_allclose(gradient, (DECAY / (DECAY + 1e-2)).sum(), rtol=0.01)


@pytest.mark.slow
def test_free_of_scale() -> None:
    matrix = hermitian(DECAY, np.float32)

    @jax.jit
    def value(factor: Any) -> Any:
        operator = function(matrix * factor, PSD)
        return tx.logdet(operator, KEY, BUDGET, shift=factor / 100).value

    for scale in (1e-25, 1e25):
        shifted = float(value(np.float32(scale))) - N * np.log(scale)
        close(shifted, value(np.float32(1)), 1e-3)


@pytest.mark.slow
def test_an_eigenvalue_as_often_as_there_are_probes() -> None:
    """15 probes, 15 times 2.5: rounding decides whether the space is one direction larger,
    which all complements share. Errors are 2.2, bars once were up to 1e5."""
    levels = np.append(0.5 * (1 + np.arange(60) % 12), 10 * [2.5])
    diagonal = jnp.asarray(np.pad(levels, (0, 530)))
    operator = matrix_free(lambda v: diagonal * v, 600, PSD)

    @jax.jit
    def run(key: Any) -> Any:
        estimate = tx.logdet(operator, key, 240, shift=0.25)
        return estimate.value, estimate.standard_error

    values, errors = jax.lax.map(run, jax.random.split(KEY, 20))
    off = values - jnp.sum(jnp.log(diagonal + 0.25))
    size = jnp.sqrt(jnp.mean(off**2))
    assert jnp.max(errors) < 10 * size
    assert size < 2 * jnp.sqrt(jnp.mean(errors**2))


DECAYS = {"powers": lambda i: 250 / i**2, "geometric": lambda i: 100 * 0.97**i}


@pytest.mark.parametrize("decay", [slow("powers"), nightly("geometric")])
def test_intervals_contain_the_truth_in_single_precision(decay: str) -> None:
    """Where the last blocks of the space are rounding, seen from the first ones. Errors of
    the powers were 4 bars; of the diagonal, too."""
    spectrum = DECAYS[decay](np.arange(1.0, 501))
    diagonal, truth = jnp.asarray(spectrum, jnp.float32), np.log(spectrum + 0.1)
    operator = matrix_free(lambda v: diagonal * v, 500, PSD, jnp.float32)
    fn = lambda x: jnp.log(x + np.float32(0.1))  # noqa: E731
    runs = over_keys(lambda key: tx.logdet(operator, key, 240, shift=0.1), KEY, 16)
    assert np.mean(contains(runs, np.float32(truth.sum()))) > 0.8
    entries = tx.function_diagonal(operator, fn, KEY, 240)
    off = abs(entries.value - truth.astype(np.float32))
    assert np.mean(off < 2.2 * entries.standard_error) > 0.9


def test_diagonal_shifts() -> None:
    """Values and gradients, of arrays and pytrees, and where it is exact."""
    noise = np.random.default_rng(1).uniform(0.5, 5.0, N) * 1e-2
    matrix = kernel(POINT[0])

    def got(v: Any, noise: Any) -> Any:
        shift = lx.DiagonalLinearOperator(noise)
        result = tx.logdet(function(kernel(v)), KEY, BUDGET, shift=shift)
        return result.value, result

    def dense(v: Any, noise: Any) -> Any:
        return jnp.linalg.slogdet(kernel(v) + jnp.diag(noise))[1]

    gradients, result = jax.jit(jax.grad(got, (0, 1), has_aux=True))(POINT[0], noise)
    truth, want = jax.jit(jax.value_and_grad(dense, (0, 1)))(POINT[0], noise)
    assert contains(result, truth, 0.999)
    close(gradients[0], want[0], 0.05)
    close(jnp.sum(gradients[1] * noise), jnp.sum(want[1] * noise), 0.02)
    shift = lx.DiagonalLinearOperator(jnp.asarray(noise))
    close(tx.logdet(lx.MatrixLinearOperator(matrix), KEY, shift=shift).value, truth, 1e-12)
    halves = {"a": jnp.ones(N // 2), "b": jnp.ones(N - N // 2)}
    parted = lx.DiagonalLinearOperator(halves) * 2.0
    split = lx.DiagonalLinearOperator({"a": noise[: N // 2], "b": noise[N // 2 :]})
    close(tx.logdet(parted, KEY, shift=split).value, np.sum(np.log(2 + noise)), 1e-12)
    other, call = lx.DiagonalLinearOperator(noise[1:]), tx.logdet
    refused(ValueError, r"logdet\(shift=.*must", call, function(squares), KEY, shift=other)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 5e-7])
def test_single_precision_at_any_condition(shift: float) -> None:
    """Of condition 2e6: finite, and within the error bar, with the noise known or not."""

    @jax.jit
    def run(key: Any, matrix: Any) -> Any:
        return tx.logdet(function(matrix), key, BUDGET, shift=shift).interval()

    i = np.arange(1.0, N + 1)
    for eigenvalues in (np.maximum(i**-3.6, 5e-7), np.geomspace(1, 5e-7, N)):
        matrix = jnp.asarray(hermitian(eigenvalues) - shift * jnp.eye(N), np.float32)
        for key in jax.random.split(KEY, 4):
            low, high = run(key, matrix)
            assert low < float(np.log(eigenvalues).sum()) < high
