"""`arnoldi_trace` by the colours of a pattern."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import traceax as tx
from tests.helpers import close, contains, is_unbiased, nightly, over_keys, refused, slow
from tests.wrappers import function

KEY = jax.random.key(3)
SIDE = 18
N = SIDE**2


def spatial(seed: int = 0) -> np.ndarray:
    """Random weights of the four neighbours on a grid, scaled to rows of sum one."""
    rng = np.random.default_rng(seed)
    place = np.arange(N)
    x, y = place % SIDE, place // SIDE
    near = abs(x[:, None] - x) + abs(y[:, None] - y) == 1
    weights = near * rng.uniform(0.2, 1.0, (N, N))
    return weights / weights.sum(axis=1, keepdims=True)


WEIGHTS = spatial()
SYSTEM = np.eye(N) - 0.8 * WEIGHTS
TRUTH = float(np.linalg.slogdet(SYSTEM)[1])


def estimate(key: Any, budget: int = 240, matrix: Any = SYSTEM, **how: Any) -> tx.Estimate:
    operator = function(jnp.asarray(matrix))
    how = {"pattern": SYSTEM != 0, **how}
    return tx.arnoldi_trace(operator, jnp.log, key, budget, **how)


@pytest.mark.slow
def test_blocks_are_exact() -> None:
    """No two indices of one colour are connected, and the steps exhaust each block."""
    block = np.array([[2.0, 1.0, 0.0], [0.5, 3.0, 1.0], [0.0, 0.2, 2.0]])
    matrix = np.kron(np.eye(60), block)
    found = estimate(KEY, 140, matrix, pattern=matrix != 0)
    close(found.value, 60 * np.log(np.linalg.det(block)), 1e-12)
    assert found.standard_error < 1e-9
    assert found.method == "arnoldi_trace, 3 colours"
    assert found.num_matvecs <= 140


@pytest.mark.nightly
def test_colours_are_far_better_than_none() -> None:
    for budget in (60, 240):
        coloured, plain = estimate(KEY, budget), estimate(KEY, budget, pattern=None)
        assert "colours" in coloured.method
        assert max(coloured.num_matvecs, plain.num_matvecs) <= budget
        assert coloured.standard_error < plain.standard_error / 10
        assert abs(coloured.value - TRUTH) < 4 * coloured.standard_error


@pytest.mark.parametrize("how", [slow({}), nightly({"num_probes": 24, "num_steps": 10})])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_interval_contains_the_truth(dtype: str, how: Any) -> None:
    """One repeat of colours, whose error bar comes from four more probes, and several."""
    matrix = jnp.asarray(SYSTEM, dtype)
    by: Any = {"sampler": SAMPLER} if how else {"pattern": WEIGHTS != 0}
    operator: Any = function(matrix)
    run = lambda key: tx.arnoldi_trace(operator, jnp.log, key, **by, **how)  # noqa: E731
    found = over_keys(run, KEY, 200)
    assert jnp.mean(contains(found, TRUTH)) > 0.90
    rms = np.sqrt(np.mean((found.value - TRUTH) ** 2))
    assert np.sqrt(np.mean(np.square(found.standard_error))) < 2.5 * rms
    if dtype == "float64" and how:  # ten steps, whose quadrature has no error
        assert is_unbiased(found.value, TRUTH)


SAMPLER = tx.probing(WEIGHTS != 0, power=2)


def test_derivatives_are_those_of_the_estimate() -> None:
    """In the operator and in the function, and both agree with exact ones."""
    weights = jnp.asarray(WEIGHTS)

    def value(rho: Any, shift: Any) -> Any:
        operator = function(jnp.eye(N) - rho * weights)
        fn = lambda x: jnp.log(x + shift)  # noqa: E731
        found = tx.arnoldi_trace(operator, fn, KEY, 240, pattern=SYSTEM != 0)
        return found.value, found

    def exact(rho: Any, shift: Any) -> Any:
        return jnp.linalg.slogdet((1 + shift) * jnp.eye(N) - rho * weights)[1]

    run = jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))
    (_, found), got = run(0.8, 0.1)
    assert abs(found.value - exact(0.8, 0.1)) < 4 * found.standard_error < 1
    for one, other in zip(got, jax.grad(exact, (0, 1))(0.8, 0.1), strict=True):
        close(one, other, 5e-3)


def test_the_error_bar_of_one_repeat() -> None:
    """Its square is about twice the sum of the squares of all entries of f(A) between
    indices of one colour."""
    sampler: Any = SAMPLER
    how: Any = {"sampler": sampler, "num_probes": sampler.num_colours, "num_steps": 10}
    same = (sampler.colours[:, None] == sampler.colours) & ~np.eye(N, dtype=bool)
    log: Any = scipy.linalg.logm(SYSTEM)
    operator = function(jnp.asarray(SYSTEM))
    found = jax.jit(lambda: tx.arnoldi_trace(operator, jnp.log, KEY, **how))()
    bar = np.sum(2 * log.real**2 * same) ** 0.5
    assert 0.85 < found.standard_error / bar < 1.2
    assert abs(found.value - TRUTH) < 3 * found.standard_error


@pytest.mark.slow
def test_complex_operators_and_values() -> None:
    matrix = SYSTEM + 0.3j * np.diag(np.linspace(0, 1, N)) + 0.1j * WEIGHTS
    found = estimate(KEY, 240, matrix)
    log = np.linalg.slogdet(matrix)[1] + 1j * np.sum(np.angle(np.linalg.eigvals(matrix)))
    for part in (np.real, np.imag):
        assert abs(part(found.value) - part(log)) <= 4 * found.standard_error


@pytest.mark.slow
def test_the_sign_of_a_determinant() -> None:
    """The phase over pi is the number of negative eigenvalues: exact from n matvecs, known
    if one lies alone, and not if there are many."""
    log = lambda x: jnp.log(x.astype(complex))  # noqa: E731
    upper = np.triu(np.full((80, 80), 0.01), 1)

    def run(eigenvalues: Any, budget: int) -> tx.Estimate:
        matrix = jnp.asarray(np.diag(eigenvalues) + upper)
        return tx.arnoldi_trace(function(matrix), log, KEY, budget)

    alone, many = np.append(-2.0, np.linspace(1, 3, 79)), np.linspace(-3, 3.1, 80)
    exact = run(alone, 80)
    close(exact.value.imag, np.pi, 1e-9)
    assert exact.num_matvecs == 80
    assert abs(run(alone, 40).value.imag - np.pi) < 0.1
    close(run(many, 80).value.imag, 39 * np.pi, 1e-9)
    assert run(many, 40).standard_error > 1


def test_budgets() -> None:
    operator = function(jnp.asarray(SYSTEM))

    def run(**how: Any) -> Any:  # what is spent is known without running
        return eqx.filter_eval_shape(tx.arnoldi_trace, operator, jnp.log, KEY, **how)

    assert run().num_matvecs == 240
    assert run(num_matvecs=60, num_steps=5).num_matvecs == 60
    colours = SAMPLER.num_colours
    both = run(num_probes=2 * colours, num_steps=5, sampler=SAMPLER)
    assert both.num_matvecs == 10 * colours
    few = {"num_probes": colours - 1, "num_steps": 5, "sampler": SAMPLER}
    refused(ValueError, r"arnoldi_trace\(num_probes=", lambda: run(**few))
    least = r"arnoldi_trace\(num_matvecs=.*at least 6"
    refused(ValueError, least, lambda: run(num_matvecs=5))
