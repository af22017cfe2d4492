"""Diagonals of functions by Krylov spaces that leave one probe out."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, is_unbiased, nightly, over_keys, slow
from tests.matrices import hermitian, krylov_basis
from tests.wrappers import function
from traceax._core.operator import LinearMap
from traceax._functions.function_diagonal import SpacesLeftOut, _coloured
from traceax._quadrature.block_quadrature import (
    Shape,
    krylov_run,
    levels_and_complements,
    shape_for,
)
from traceax._quadrature.dense import FunctionMap
from traceax._quadrature.scalar import MatrixFunction, scalar_function

KEY = jax.random.key(3)
SHAPE = Shape(4, 5)
N, SAMPLES = 70, 60
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


@pytest.mark.parametrize("dtype", [slow(float), complex])
def test_polynomials_have_no_quadrature_error(dtype: Any) -> None:
    """Up to degree d - q: then f(A) itself may stand in the definition, and not beyond.
    The error bar of a linear function is the spread of the samples."""
    matrix = hermitian(np.linspace(-1, 2, N), dtype)
    block = tx.rademacher(KEY, jax.ShapeDtypeStruct((N,), dtype), SHAPE.width).T
    ones, _ = by_definition(np.asarray(matrix), np.asarray(block), np.eye(N))

    @jax.jit
    def run(power: Any) -> Any:
        how: Any = {"num_probes": SHAPE.width, "num_steps": SHAPE.depth}
        fn = lambda x: x**power  # noqa: E731
        found = tx.function_diagonal(function(matrix), fn, KEY, **how)
        return found.value, found.standard_error

    assert SHAPE.depth - SHAPE.inner == 2
    for power in (0, 1, 2, 4):
        f = matrix_function(np.asarray(matrix), lambda x, p=power: x**p)
        samples, level = by_definition(np.asarray(matrix), np.asarray(block), f)
        samples = samples + level * (1 - ones)
        value, error = run(power)
        gap = np.max(np.abs(value - samples.mean(1)))
        assert (gap < 1e-11) == (power <= 2)
        if power == 1:
            spread = samples.std(1, ddof=1) * (2 / SHAPE.width) ** 0.5
            close(error, spread, 1e-9)


def test_the_mean_of_the_samples_is_that_of_their_formula() -> None:
    """`mean` reads the basis once for all probes."""
    subject = MatrixFunction(LinearMap(function(hermitian(np.arange(N), complex))), jnp.exp)
    block = tx.rademacher(KEY, jax.ShapeDtypeStruct((N,), complex), SHAPE.width).T

    @jax.jit
    def both(f: Any) -> Any:
        space = krylov_run(subject, block, depth=SHAPE.depth).space
        _, spaces = levels_and_complements(space, subject=subject)
        run = SpacesLeftOut(space.basis, block, spaces)
        return run.mean(f), jnp.mean(run.samples(f), axis=1)

    found, want = both(hermitian(np.arange(SHAPE.num_matvecs), complex))
    close(found, want, 1e-12)


@jax.jit
def exhausted(matrix: Any, scale: Any) -> Any:
    """The derivative is in the direction of I, and the estimate."""

    def run(t: Any) -> tx.Estimate:
        operator = function(scale * (matrix + t * jnp.eye(N, dtype=matrix.dtype)))
        fn = lambda x: jax.nn.softplus(x / scale)  # noqa: E731
        return tx.function_diagonal(operator, fn, KEY, **COUNTS)

    zero = 0 * scale
    found, moved = jax.jvp(run, (zero,), (1 + zero,))
    return jnp.sum(moved.value), found


SPECTRA = {
    "rank 5": np.append([9.0, 7, 5, -3, 2], np.zeros(N - 5)),
    "rank 5 + 1": np.append([1000.0, 200, 30, 4, 2], np.ones(N - 5)),
    "multiple of I": np.full(N, 2.0),
    "zero": np.zeros(N),
    "star": np.append([-8.0, 8.0], np.zeros(N - 2)),
    "more than probes": np.append(np.arange(10.0, 20), np.ones(N - 10)),
}


@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e200, slow(np.float32(1))])
@pytest.mark.parametrize("name", SPECTRA)
def test_what_spaces_exhaust_is_exact(name: str, scale: Any) -> None:
    """To rounding, with an error bar that says so. (The gradient at the zero operator was
    another than at a multiple of I.)"""
    digits = 1e-11 if isinstance(scale, float) else 1e-5
    matrix = hermitian(SPECTRA[name], np.asarray(scale).dtype)
    gradient, estimate = exhausted(matrix, scale)
    truth = np.diag(matrix_function(np.asarray(matrix), jax.nn.softplus))
    close(estimate.value, truth, digits)
    assert np.max(estimate.standard_error) < 100 * digits * max(np.max(truth), 1)
    assert np.all(abs(estimate.value - truth) <= 3 * estimate.standard_error)
    if scale == 1:
        close(gradient, np.sum(jax.nn.sigmoid(SPECTRA[name])), 0.05)


DECAY = hermitian(1 / np.arange(1.0, N + 1))


@pytest.mark.slow
def test_it_is_unbiased_and_its_intervals_contain_the_truth() -> None:
    """Intervals half as wide do not, and a value 2 % off is seen."""
    decaying = lambda x: 1 / (x + 0.05)  # noqa: E731
    fn, _ = scalar_function("test", decaying, jnp.dtype(float))
    operator = function(DECAY)
    mapped = FunctionMap(operator, fn=fn, num_steps=7)
    tag = lx.symmetric_tag
    applied = tx.as_operator(lambda v: mapped(v[:, None])[:, 0], N, tags=tag)

    def both(key: Any) -> Any:
        ours = tx.function_diagonal(operator, decaying, key, **COUNTS)
        plain = tx.hutchinson_diagonal(applied, key, 8)
        return ours.value, ours.standard_error, ours.interval(), plain.value

    truth = np.diag(matrix_function(np.asarray(DECAY), decaying))
    found = over_keys(both, KEY, SAMPLES)
    value, error, (low, high), plain = jax.tree.map(np.asarray, found)

    def is_enough(half: Any) -> bool:
        """Entries of one run are not independent; runs are."""
        inside = (abs(value - truth) <= half).mean(1)
        return bool(inside.mean() + 3 * inside.std(ddof=1) / SAMPLES**0.5 > 0.95)

    assert is_unbiased(value.sum(1), truth.sum(), 4)
    assert not is_unbiased(1.02 * value.sum(1), truth.sum(), 4)
    assert is_enough((high - low) / 2)
    assert not is_enough((high - low) / 4)
    square = ((value - truth) ** 2).mean()
    assert 0.5 < (square / (error**2).mean()) ** 0.5 < 1.1
    assert square < 0.4**2 * ((plain - truth) ** 2).mean()


@pytest.mark.parametrize("matrix", [nightly("complex"), nightly("multiple of I")])
def test_derivatives_are_unbiased(matrix: Any) -> None:
    """In the operator and the function together; forwards and backwards the same."""
    dtype = complex if matrix == "complex" else float
    decay = hermitian(1 / np.arange(1.0, N + 1), dtype)
    matrix = 2 * jnp.eye(N) if matrix == "multiple of I" else decay
    direction = hermitian(np.linspace(0, 1, N), dtype, seed=5)

    def dense(t: Any) -> Any:
        argument = (1 + t) * (matrix + t * direction)
        return jnp.diagonal(jax.scipy.linalg.expm(argument)).real

    def rates(key: Any) -> Any:
        def diagonal(t: Any) -> Any:
            operator = function(matrix + t * direction)
            fn = lambda x: jnp.exp((1 + t) * x)  # noqa: E731
            return tx.function_diagonal(operator, fn, key, **COUNTS).value

        backwards = jax.jacrev(lambda t: diagonal(t).sum())(0.0)
        return jax.jvp(diagonal, (0.0,), (1.0,))[1], backwards

    _, truth = jax.jvp(dense, (0.0,), (1.0,))
    forwards, backwards = map(np.asarray, over_keys(rates, KEY, SAMPLES))
    close(forwards.sum(1), backwards, 1e-10)
    assert is_unbiased(forwards.sum(1), truth.sum(), 4)
    assert not is_unbiased(1.1 * forwards.sum(1), truth.sum(), 4)
    deviations = forwards.std(0, ddof=1) / SAMPLES**0.5
    entries = (forwards - np.asarray(truth)).mean(0) / deviations
    assert 0.7 < np.mean(entries**2) ** 0.5 < 1.4


@pytest.mark.slow
@pytest.mark.parametrize(("num_probes", "num_steps"), [(1, 6), (6, 1)])
def test_one_probe_or_step_cannot_tell(num_probes: int, num_steps: int) -> None:
    how: Any = {"num_probes": num_probes, "num_steps": num_steps}
    estimate = tx.function_diagonal(function(DECAY), jnp.exp, KEY, **how)
    assert np.all(np.isfinite(estimate.value))
    assert np.all(np.isinf(estimate.standard_error))
    assert estimate.num_matvecs == 6


@pytest.mark.parametrize("budget", [60, 240, 1000])
def test_probes_come_in_whole_repeats_of_the_colours(budget: int) -> None:
    shape, plain = _coloured(budget, name="", colours=3), shape_for(budget)
    assert shape.width == max(3, plain.width // 3 * 3)
    assert budget / 2 <= shape.num_matvecs <= budget
