"""Log-determinants: by Krylov spaces, exact where that is cheap."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, contains, over_keys, refused
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
def test_second_derivatives() -> None:
    """Up to the few probes."""

    def value(v: Any) -> Any:
        return tx.logdet(function(kernel(v[0])), KEY, BUDGET, shift=jnp.exp(v[1])).value

    def truth(v: Any) -> Any:
        return jnp.linalg.slogdet(kernel(v[0]) + jnp.exp(v[1]) * jnp.eye(N))[1]

    want = jax.hessian(truth)(POINT)
    np.testing.assert_allclose(jax.jit(jax.hessian(value))(POINT), want, rtol=0.2)


STEEP = hermitian(10.0 ** -np.linspace(0, 15, N))
SCALED = [(kernel(POINT[0]) + jnp.eye(N), -N / 4), (STEEP, np.nan)]


@pytest.mark.slow
@pytest.mark.parametrize(("matrix", "want"), SCALED, ids=["right", "visible"])
def test_second_derivatives_in_a_scale(matrix: Any, want: float) -> None:
    """No probe matters to them. Forty steps from each vector are too few for the second
    matrix: NaN, not a number."""

    def value(s: Any) -> Any:
        return tx.logdet(function(s * matrix), KEY, BUDGET).value

    got = jax.jit(jax.grad(jax.grad(value)))(2.0)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.slow
def test_shifts_share_a_run() -> None:
    """Fifty of them, each in its interval, with gradients in all."""
    shifts = jnp.geomspace(0.1, 10.0, 50)
    operator = function(kernel(POINT[0]))
    run = lambda t: tx.logdet(operator, KEY, BUDGET, shift=t)  # noqa: E731
    result = jax.jit(run)(shifts)
    eigenvalues = jnp.linalg.eigvalsh(kernel(POINT[0]))
    want = jnp.sum(jnp.log(eigenvalues[:, None] + shifts[None]), axis=0)
    assert result.value.shape == (50,)
    assert jnp.mean(contains(result, want, 0.99)) > 0.9
    np.testing.assert_allclose(result.value, want, atol=0.02 * float(jnp.max(want)))
    slopes = jax.jit(jax.grad(lambda t: jnp.sum(run(t).value)))(shifts)
    inverse = jnp.sum(1 / (eigenvalues[:, None] + shifts[None]), axis=0)
    np.testing.assert_allclose(slopes, inverse, rtol=0.05)


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
        got, slopes = run(1.0, 0.1, matrix)
        close(got, jnp.sum(jnp.log(eigenvalues + 0.1)), 1e-9)
        close(slopes[0], jnp.sum(eigenvalues / (eigenvalues + 0.1)), 1e-8, N)
        close(slopes[1], jnp.sum(1 / (eigenvalues + 0.1)), 1e-8)


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_other_dtypes(dtype: Any) -> None:
    matrix = hermitian(1 / (1.0 + np.arange(N)) ** 2, dtype)
    want = float(np.log(1 / (1.0 + np.arange(N)) ** 2 + 1e-2).sum())

    def value(s: Any) -> Any:
        return tx.logdet(function(s * matrix, PSD), KEY, BUDGET, shift=1e-2)

    def loss(s: Any) -> Any:
        result = value(s)
        return result.value, result

    slope, result = jax.jit(jax.grad(loss, has_aux=True))(1.0)
    assert result.value.dtype == np.finfo(dtype).dtype
    low, high = result.interval(0.999)
    assert low - 1e-3 < want < high + 1e-3
    eigenvalues = 1 / (1.0 + np.arange(N)) ** 2
    np.testing.assert_allclose(slope, (eigenvalues / (eigenvalues + 1e-2)).sum(), rtol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_free_of_scale(scale: float) -> None:
    matrix = hermitian(1 / (1.0 + np.arange(N)) ** 2, np.float32)
    factor = np.float32(scale)

    @jax.jit
    def value(factor: Any) -> Any:
        operator = function(matrix * factor, PSD)
        return tx.logdet(operator, KEY, BUDGET, shift=factor / 100).value

    close(float(value(factor)) - N * np.log(scale), value(np.float32(1)), 1e-3)


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


@pytest.mark.slow
@pytest.mark.parametrize("decay", DECAYS)
def test_intervals_hold_in_single_precision(decay: str) -> None:
    """Where the last blocks of the space are rounding, seen from the first ones. Errors of
    the powers were 4 bars; of the diagonal, too."""
    spectrum = DECAYS[decay](np.arange(1.0, 501))
    diagonal, truth = jnp.asarray(spectrum, jnp.float32), np.log(spectrum + 0.1)
    single = truth.astype(np.float32)
    operator = matrix_free(lambda v: diagonal * v, 500, PSD, jnp.float32)
    fn = lambda x: jnp.log(x + np.float32(0.1))  # noqa: E731
    runs = over_keys(lambda key: tx.logdet(operator, key, 240, shift=0.1), KEY, 16)
    assert np.mean(contains(runs, np.float32(truth.sum()))) > 0.8
    entries = tx.function_diagonal(operator, fn, KEY, 240)
    assert np.mean(abs(entries.value - single) < 2.2 * entries.standard_error) > 0.9


def test_diagonal_shifts() -> None:
    """Values and gradients, of arrays and pytrees, and where it is exact."""
    noise = jnp.asarray(np.random.default_rng(1).uniform(0.5, 5.0, N)) * 1e-2

    def dense(v: Any, noise: Any) -> Any:
        return jnp.linalg.slogdet(kernel(v) + jnp.diag(noise))[1]

    def got(v: Any, noise: Any, make: Any = function) -> Any:
        shift = lx.DiagonalLinearOperator(noise)
        result = tx.logdet(make(kernel(v)), KEY, BUDGET, shift=shift)
        return result.value, result

    both = jax.jit(jax.value_and_grad(got, (0, 1), has_aux=True))
    (_, result), slopes = both(POINT[0], noise)
    assert contains(result, dense(POINT[0], noise), 0.999)
    want = jax.grad(dense, (0, 1))(POINT[0], noise)
    close(slopes[0], want[0], 0.05)
    close(jnp.sum(slopes[1] * noise), jnp.sum(want[1] * noise), 0.02)
    exact, _ = got(POINT[0], noise, lx.MatrixLinearOperator)
    close(exact, dense(POINT[0], noise), 1e-12)
    halves = {"a": jnp.ones(N // 2), "b": jnp.ones(N - N // 2)}
    parted = lx.DiagonalLinearOperator(halves) * 2.0
    split = lx.DiagonalLinearOperator({"a": noise[: N // 2], "b": noise[N // 2 :]})
    close(tx.logdet(parted, KEY, shift=split).value, jnp.sum(jnp.log(2 + noise)), 1e-12)
    other, call = lx.DiagonalLinearOperator(noise[1:]), tx.logdet
    refused(ValueError, r"logdet\(shift=.*must", call, function(squares), KEY, shift=other)


@pytest.mark.slow
def test_single_precision_at_any_condition() -> None:
    """Of condition 2e6: finite, and within the error bar, with the noise known or not."""
    i = np.arange(1.0, N + 1)
    spectra = {"power": np.maximum(i**-3.6, 5e-7), "geometric": np.geomspace(1, 5e-7, N)}
    for eigenvalues in spectra.values():
        whole = hermitian(eigenvalues)
        for shift in (0.0, 5e-7):
            matrix = jnp.asarray(whole - shift * jnp.eye(N), np.float32)

            def run(key: Any, matrix: Any = matrix, shift: float = shift) -> Any:
                return tx.logdet(function(matrix), key, BUDGET, shift=shift).interval()

            low, high = over_keys(run, KEY, 4)
            want = float(np.log(eigenvalues).sum())
            assert jnp.all((low < want) & (want < high))
