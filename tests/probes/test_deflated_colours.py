"""Traces by colours, with the dominant directions deflated where that is better."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

import traceax as tx
from tests.helpers import close, is_unbiased, slow
from tests.matrices import general
from tests.probes.helpers import grid, laplacian
from tests.wrappers import PSD, function, two_leaves

KEY = jax.random.key(3)
FIELD, M = grid(14, 14), 40
N, NAME = len(FIELD), "the better of hutchpp_trace and hutchinson_trace"
SAMPLER = tx.probing(FIELD, num_colours=M - 1)
SMOOTH = jnp.asarray(np.linalg.inv(laplacian(FIELD) + 0.01 * np.eye(N)))  # deflated
MIDDLE = jnp.asarray(np.linalg.inv(laplacian(FIELD) + 0.06 * np.eye(N)))  # as it happens
RIGID = jnp.asarray(scipy.linalg.expm(FIELD))  # never deflated


def phases(matrix: Any) -> Any:
    turn = np.exp(2j * np.arange(N) ** 2)
    return turn[:, None] * matrix.astype(complex) * turn.conj()[None, :]


def deflated(operator: Any, key: Any = KEY) -> tx.Estimate:
    return tx.trace(operator, key, M, pattern=FIELD)


def by_colours(operator: Any, key: Any = KEY) -> tx.Estimate:
    return tx.hutchinson_trace(operator, key, M, sampler=SAMPLER)


@pytest.mark.slow
@pytest.mark.parametrize("matrix", [RIGID, RIGID + 0.1 * general(N) * FIELD])
@pytest.mark.parametrize("turn", [jnp.asarray, phases])
def test_what_decays_is_probed_as_without_a_sketch(matrix: Any, turn: Any) -> None:
    operator = function(turn(matrix))
    found, plain = deflated(operator), by_colours(operator)
    assert found.method == f"{NAME}, {SAMPLER.num_colours} colours"
    assert found.num_matvecs == plain.num_matvecs
    close((found.value, found.standard_error), (plain.value, plain.standard_error), 1e-13)


@pytest.mark.parametrize("wrap", [function, slow(two_leaves)])
@pytest.mark.parametrize("turn", [jnp.asarray, slow(phases)])
def test_low_rank_is_exact(wrap: Any, turn: Any) -> None:
    """Also for two leaves, whose probes are in another order than the pattern."""
    modes = jnp.asarray(np.linalg.qr(general(N)[:, :7])[0])
    matrix = turn(modes @ modes.T * N)
    found = deflated(wrap(matrix))
    close(found.value, jnp.trace(matrix), 1e-12)
    assert found.standard_error < 1e-9 * N


@pytest.mark.slow
@pytest.mark.parametrize("turn", [jnp.asarray, phases])
def test_values_slopes_and_intervals(turn: Any) -> None:
    """In `MIDDLE` the colours of the sketch decide differently."""
    tangent = general(N) / N + jnp.eye(N)

    @jax.jit
    def runs(matrix: Any) -> Any:
        def run(key: Any) -> Any:
            def trace(t: Any) -> Any:
                found = deflated(function(turn(matrix + t * tangent)), key)
                return found.value.real, found.standard_error

            (value, error), (slope, _) = jax.jvp(trace, (0.0,), (1.0,))
            return value, error, slope

        return jax.lax.map(run, jax.random.split(KEY, 300))

    for matrix in (MIDDLE, SMOOTH):
        values, errors, slopes = runs(jnp.asarray(matrix))
        truth = jnp.trace(matrix)
        assert is_unbiased(values, truth, 4)
        assert not is_unbiased(values + 0.02 * truth, truth, 4)
        assert is_unbiased(slopes, jnp.trace(tangent), 4)
        assert jnp.mean(abs(values - truth) < 2.57 * errors) > 0.9


@pytest.mark.slow
def test_low_modes_cost_less_than_by_colours() -> None:
    def errors(key: Any) -> Any:
        operator, truth = function(SMOOTH, PSD), jnp.trace(SMOOTH)
        return deflated(operator, key).value - truth, by_colours(
            operator, key
        ).value - truth

    new, old = jax.jit(jax.vmap(errors))(jax.random.split(KEY, 32))
    assert jnp.linalg.norm(new) < 0.6 * jnp.linalg.norm(old)


def test_gradients_are_those_of_the_value() -> None:
    grad = jax.jit(jax.value_and_grad(lambda matrix: deflated(function(matrix)).value))
    for matrix in (SMOOTH, RIGID):
        value, slope = grad(matrix)
        close(jnp.sum(slope * matrix), value, 1e-11)
