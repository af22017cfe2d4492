"""`arnoldi_trace` by the colours of a pattern."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, is_unbiased, over_keys, refused
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
    """No two dimensions of one colour are connected, and the steps exhaust each block."""
    block = np.array([[2.0, 1.0, 0.0], [0.5, 3.0, 1.0], [0.0, 0.2, 2.0]])
    matrix = np.kron(np.eye(60), block)
    found = estimate(KEY, 140, matrix, pattern=matrix != 0)
    close(found.value, 60 * np.log(np.linalg.det(block)), 1e-12)
    assert found.standard_error < 1e-9
    assert found.method == "arnoldi_trace, 3 colours"
    assert found.num_matvecs <= 140


@pytest.mark.slow
@pytest.mark.parametrize("budget", [60, 120, 240])
def test_colours_are_far_better_than_none(budget: int) -> None:
    coloured, plain = estimate(KEY, budget), estimate(KEY, budget, pattern=None)
    assert "colours" in coloured.method
    assert coloured.num_matvecs <= budget
    assert coloured.standard_error < plain.standard_error / 10
    assert abs(coloured.value - TRUTH) < 4 * coloured.standard_error


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"num_probes": 24, "num_steps": 10}])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_interval_holds(dtype: str, how: dict[str, int]) -> None:
    """One repeat of colours, whose error bar comes from four more probes, and several."""
    matrix = jnp.asarray(SYSTEM, dtype)
    by: Any = {"sampler": SAMPLER} if how else {"pattern": WEIGHTS != 0}

    def one(key: Any) -> tx.Estimate:
        return tx.arnoldi_trace(function(matrix), jnp.log, key, **by, **how)  # pyright: ignore[reportArgumentType]

    found = over_keys(one, KEY, 200)
    low, high = found.interval(0.95)
    assert 0.90 < np.mean((low <= TRUTH) & (high >= TRUTH)) <= 1.0
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
        run = tx.arnoldi_trace(
            operator, lambda x: jnp.log(x + shift), KEY, 240, pattern=SYSTEM != 0
        )
        return run.value

    def exact(rho: Any, shift: Any) -> Any:
        return jnp.linalg.slogdet((1 + shift) * jnp.eye(N) - rho * weights)[1]

    got, want = (jax.grad(f, (0, 1))(0.8, 0.1) for f in (value, exact))
    close(got[0], want[0], 5e-3)
    close(got[1], want[1], 5e-3)
    close(jax.jvp(lambda r: value(r, 0.1), (0.8,), (1.0,))[1], got[0], 1e-9)


@pytest.mark.slow
def test_complex_operators_and_values() -> None:
    matrix = SYSTEM + 0.3j * np.diag(np.linspace(0, 1, N)) + 0.1j * WEIGHTS
    found = estimate(KEY, 240, matrix)
    log = float(np.linalg.slogdet(matrix)[1])
    close(found.value.real, log, 4 * float(found.standard_error) / abs(log))
    phases = float(np.sum(np.angle(np.linalg.eigvals(matrix))))
    close(found.value.imag, phases, 4 * float(found.standard_error) / abs(phases))


@pytest.mark.slow
def test_the_sign_of_a_determinant() -> None:
    """The phase over pi is the number of negative eigenvalues: exact from n matvecs, known
    if one lies alone, and not if there are many."""
    log = lambda x: jnp.log(x.astype(complex))  # noqa: E731
    upper = np.triu(np.full((80, 80), 0.01), 1)
    alone = function(jnp.asarray(np.diag([-2.0, *np.linspace(1, 3, 79)]) + upper))
    many = function(jnp.asarray(np.diag(np.linspace(-3, 3.1, 80)) + upper))
    exact = tx.arnoldi_trace(alone, log, KEY, 80)
    close(exact.value.imag, np.pi, 1e-9)
    assert exact.num_matvecs == 80
    rough = tx.arnoldi_trace(alone, log, KEY, 40)
    assert abs(rough.value.imag - np.pi) < 0.1
    close(tx.arnoldi_trace(many, log, KEY, 80).value.imag, 39 * np.pi, 1e-9)
    assert tx.arnoldi_trace(many, log, KEY, 40).standard_error > 1


def test_budgets() -> None:
    operator = function(jnp.asarray(SYSTEM))

    def run(**how: Any) -> Any:  # what is spent is known without running
        return eqx.filter_eval_shape(tx.arnoldi_trace, operator, jnp.log, KEY, **how)

    assert run().num_matvecs == 240
    assert run(num_matvecs=60).num_matvecs <= 60
    assert run(num_matvecs=60, num_steps=5).num_matvecs == 60
    assert run(num_probes=4, num_steps=5).num_matvecs == 20
    colours = SAMPLER.num_colours
    both = run(num_probes=2 * colours, num_steps=5, sampler=SAMPLER)
    assert both.num_matvecs == 10 * colours
    few = {"num_probes": colours - 1, "num_steps": 5, "sampler": SAMPLER}
    refused(ValueError, r"arnoldi_trace\(num_probes=", lambda: run(**few))
    least = r"arnoldi_trace\(num_matvecs=.*at least 6"
    refused(ValueError, least, lambda: run(num_matvecs=5))
