"""Diagonals of functions by Krylov spaces that leave one probe out."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, is_unbiased, over_keys, slow
from tests.matrices import hermitian, krylov_basis
from tests.wrappers import function
from traceax._core.operator import LinearMap
from traceax._functions.function_diagonal import block_diagonal
from traceax._quadrature.block_quadrature import Shape, krylov_run
from traceax._quadrature.dense import FunctionMap
from traceax._quadrature.scalar import MatrixFunction, scalar_function

KEY = jax.random.key(3)
SHAPE = Shape(4, 5)
SMALL, N, SAMPLES = 30, 70, 60
COUNTS: dict[str, Any] = {"num_probes": 8, "num_steps": 7}


def by_definition(matrix: Any, block: Any, f: Any) -> tuple[Any, Any]:
    """The d_i of f, n x n, with explicit projectors; and what it is on what these leave."""
    samples, forms, lengths = [], 0, 0
    eye = np.eye(matrix.shape[0])
    for i in range(block.shape[1]):
        basis = krylov_basis(matrix, np.delete(block, i, axis=1), SHAPE.inner)
        left = eye - basis @ basis.conj().T
        missed = left @ f @ left
        w = block[:, i]
        samples.append(np.real(np.diag(f - missed) + w.conj() * (missed @ w)))
        forms += np.vdot(w, missed @ w).real
        lengths += np.vdot(w, left @ w).real
    return np.array(samples).T, forms / lengths


def matrix_function(matrix: Any, values_of: Any) -> Any:
    theta, u = np.linalg.eigh(matrix)
    return (u * np.asarray(values_of(theta))) @ u.conj().T


def probes(dtype: Any) -> Any:
    return tx.rademacher(KEY, jax.ShapeDtypeStruct((SMALL,), dtype), SHAPE.width).T


def subject_of(matrix: Any, fn: Any) -> MatrixFunction:
    converted, _ = scalar_function("test", fn, jnp.dtype(float))
    return MatrixFunction(LinearMap(function(matrix)), converted)


def run_block(subject: MatrixFunction, probes: Any) -> Any:
    return block_diagonal(subject, krylov_run(subject, probes, depth=SHAPE.depth))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [float, complex])
def test_polynomials_have_no_quadrature_error(dtype: Any) -> None:
    """Up to degree d - q: then f(A) itself may stand in the definition, and not beyond."""
    matrix = hermitian(np.linspace(-1, 2, SMALL), dtype)
    block = probes(dtype)
    ones, _ = by_definition(np.asarray(matrix), np.asarray(block), np.eye(SMALL))

    @jax.jit
    def value(matrix: Any, block: Any, power: Any) -> Any:
        return run_block(subject_of(matrix, lambda x: x**power), block).value

    errors = []
    for power in range(5):
        f = matrix_function(np.asarray(matrix), lambda x, p=power: x**p)
        want, level = by_definition(np.asarray(matrix), np.asarray(block), f)
        want = (want + level * (1 - ones)).mean(1)
        errors.append(np.max(np.abs(value(matrix, block, power) - want)))
    assert SHAPE.depth - SHAPE.inner == 2
    assert max(errors[:3]) < 1e-11
    assert errors[4] > 1e-6


@jax.jit
def exhausted(matrix: Any, scale: Any) -> tx.Estimate:
    fn = lambda x: jax.nn.softplus(x / scale)  # noqa: E731
    return tx.function_diagonal(function(scale * matrix), fn, KEY, **COUNTS)


SPECTRA = {
    "rank 5": np.append([9.0, 7, 5, -3, 2], np.zeros(N - 5)),
    "rank 5 + 1": np.append([1000.0, 200, 30, 4, 2], np.ones(N - 5)),
    "multiple of I": np.full(N, 2.0),
    "zero": np.zeros(N),
    "star": np.append([-8.0, 8.0], np.zeros(N - 2)),
    "more than probes": np.append(np.arange(10.0, 20), np.ones(N - 10)),
}


@pytest.mark.parametrize("scale", [1.0, slow(1e-200), slow(1e200)])
@pytest.mark.parametrize("name", SPECTRA)
def test_what_spaces_exhaust_is_exact(name: str, scale: float) -> None:
    """To rounding, with an error bar that says so."""
    matrix = hermitian(SPECTRA[name])
    estimate = exhausted(matrix, scale)
    truth = np.diag(matrix_function(np.asarray(matrix), jax.nn.softplus))
    close(estimate.value, truth, 1e-11)
    assert np.max(estimate.standard_error) < 1e-9 * max(np.max(truth), 1)
    assert np.all(abs(estimate.value - truth) <= 3 * estimate.standard_error)


DECAY = hermitian(1 / np.arange(1.0, N + 1))


def decaying(x: Any) -> Any:
    return 1 / (x + 0.05)


@pytest.mark.slow
def test_it_is_unbiased_and_its_intervals_hold() -> None:
    """Intervals half as wide do not, and a value 2 % off is seen."""
    operator, fn = function(DECAY), scalar_function("test", decaying, jnp.dtype(float))[0]
    mapped = FunctionMap(operator, fn=fn, num_steps=7)

    def one(vector: Any) -> Any:
        return mapped(vector[:, None])[:, 0]

    def both(key: Any) -> Any:
        ours = tx.function_diagonal(operator, decaying, key, **COUNTS)
        applied = tx.as_operator(one, N, tags=lx.symmetric_tag)
        plain = tx.hutchinson_diagonal(applied, key, 8)
        return ours.value, ours.standard_error, ours.interval(), plain.value

    truth = np.diag(matrix_function(np.asarray(DECAY), decaying))
    found = over_keys(both, KEY, SAMPLES)
    value, error, (low, high), plain = jax.tree.map(np.asarray, found)

    def holds(half: Any) -> bool:
        """Entries of one run are not independent; runs are."""
        held = (abs(value - truth) <= half).mean(1)
        return bool(held.mean() + 3 * held.std(ddof=1) / SAMPLES**0.5 > 0.95)

    assert is_unbiased(value.sum(1), truth.sum(), 4)
    assert not is_unbiased(1.02 * value.sum(1), truth.sum(), 4)
    assert holds((high - low) / 2)
    assert not holds((high - low) / 4)
    square = ((value - truth) ** 2).mean()
    assert 0.5 < (square / (error**2).mean()) ** 0.5 < 1.1
    assert square < 0.4**2 * ((plain - truth) ** 2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("matrix", ["complex", "multiple of I"])
def test_derivatives_are_unbiased(matrix: Any) -> None:
    """In the operator and the function together; forwards and backwards the same."""
    dtype = complex if matrix == "complex" else float
    decay = hermitian(1 / np.arange(1.0, N + 1), dtype)
    matrix = 2 * jnp.eye(N) if matrix == "multiple of I" else decay
    direction = hermitian(np.linspace(0, 1, N), dtype, seed=5)

    def dense(t: Any) -> Any:
        argument = (1 + t) * (matrix + t * direction)
        return jnp.diagonal(jax.scipy.linalg.expm(argument)).real

    def slopes(key: Any) -> Any:
        def diagonal(t: Any) -> Any:
            operator = function(matrix + t * direction)
            fn = lambda x: jnp.exp((1 + t) * x)  # noqa: E731
            return tx.function_diagonal(operator, fn, key, **COUNTS).value

        backwards = jax.jacrev(lambda t: diagonal(t).sum())(0.0)
        return jax.jvp(diagonal, (0.0,), (1.0,))[1], backwards

    _, truth = jax.jvp(dense, (0.0,), (1.0,))
    forwards, backwards = map(np.asarray, over_keys(slopes, KEY, SAMPLES))
    close(forwards.sum(1), backwards, 1e-10)
    assert is_unbiased(forwards.sum(1), truth.sum(), 4)
    assert not is_unbiased(1.1 * forwards.sum(1), truth.sum(), 4)
    deviations = forwards.std(0, ddof=1) / SAMPLES**0.5
    entries = (forwards - np.asarray(truth)).mean(0) / deviations
    assert 0.7 < np.mean(entries**2) ** 0.5 < 1.4


@pytest.mark.slow
@pytest.mark.parametrize(("num_probes", "num_steps"), [(1, 6), (6, 1)])
def test_one_probe_or_step_cannot_tell(num_probes: int, num_steps: int) -> None:
    estimate = tx.function_diagonal(
        function(DECAY), jnp.exp, KEY, num_probes=num_probes, num_steps=num_steps
    )
    assert np.all(np.isfinite(estimate.value))
    assert np.all(np.isinf(estimate.standard_error))
    assert estimate.num_matvecs == 6
