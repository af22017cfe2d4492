"""`pattern=` of `function_trace` and `logdet`: plain quadrature with probes of colours."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, contains, over_keys
from tests.probes.helpers import grid, laplacian
from tests.wrappers import function

KEY = jax.random.key(3)
PATTERN = grid(12, 11)
PRECISION = jnp.asarray(laplacian(PATTERN)) + 0.3 * jnp.eye(132)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [float, complex])
def test_what_colours_keep_apart_is_exact(dtype: Any) -> None:
    """A cube reaches three steps, and two steps of Lanczos integrate it: the value and the
    slopes in the operator and in the function are exact, and the error bar is rounding."""
    phases = np.exp(1j * np.arange(132)) if dtype is complex else np.ones(132)
    matrix = jnp.asarray(phases[:, None] * np.asarray(PRECISION) * phases.conj())

    def estimate(size: Any, power: Any) -> tx.Estimate:
        operator = function(matrix * size.astype(matrix.dtype))
        how = {"num_probes": 17, "num_steps": 4, "pattern": PATTERN}
        return tx.function_trace(operator, lambda x: power * x**3, KEY, 68, **how)

    truth = jnp.trace(jnp.linalg.matrix_power(PRECISION, 3))
    at = jnp.asarray(1.0), jnp.asarray(2.0)
    found = estimate(*at)
    close(found.value, 2 * truth, 1e-13)
    assert found.standard_error <= 1e-12 * truth
    assert (found.method, found.num_matvecs) == ("function_trace, 16 colours", 68)
    slopes = jax.grad(lambda *x: estimate(*x).value, (0, 1))(*at)
    close(slopes, (6 * truth, truth), 1e-12)


def test_a_combination_has_the_error_of_its_parts() -> None:
    """Twice one trace, by a combination, has twice its value, error and slope."""

    def run(fn: Any, combine: Any, shift: Any) -> tx.Estimate:
        operator = function(PRECISION + shift * jnp.eye(132))
        return tx.function_trace(operator, fn, KEY, 60, combine=combine, pattern=PATTERN)

    plain = run(jnp.log, None, 0.0)
    twice = run(lambda x: (x, jnp.log(x)), lambda t: 2 * t[1], 0.0)
    close(twice.value, 2 * plain.value, 1e-13)
    close(twice.standard_error, 2 * plain.standard_error, 1e-10)
    slope = jax.grad(lambda s: run(jnp.log, None, s).value)(0.0)
    close(slope, jnp.trace(jnp.linalg.inv(PRECISION)), 0.05)


@pytest.mark.slow
def test_repeats_are_the_same_in_batches() -> None:
    """Two repeats or more have an error bar from their spread, colour by colour."""
    sampler = tx.probing(PATTERN, num_colours=8)
    how = {"num_probes": 24, "num_steps": 6, "sampler": sampler}
    operator = function(PRECISION)
    whole = tx.slq_trace(operator, jnp.log, KEY, **how)
    parts = tx.slq_trace(operator, jnp.log, KEY, **how, batch_size=8)
    close(parts.value, whole.value, 1e-13)
    close(parts.standard_error, whole.standard_error, 1e-10)
    assert whole.degrees_of_freedom == pytest.approx(8 * 2 / 3)


@pytest.mark.slow
def test_patterns_that_are_too_dense_are_left() -> None:
    """Where colours cannot keep two steps apart, the estimate is that without a pattern."""
    dense = np.ones((132, 132))
    operator = function(PRECISION)
    with_pattern = tx.logdet(operator, KEY, 60, pattern=dense)
    without = tx.logdet(operator, KEY, 60)
    assert with_pattern.method == without.method == "logdet"
    assert with_pattern.value == without.value
    with pytest.raises(ValueError, match=r"pattern=...\) must be 132 x 132"):
        tx.logdet(operator, KEY, 60, pattern=grid(5, 5))


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.02, 0.3, 2.0])
def test_error_bars_hold_and_beat_those_without_a_pattern(shift: float) -> None:
    matrix = jnp.asarray(laplacian(PATTERN)) + shift * jnp.eye(132)
    truth = jnp.linalg.slogdet(matrix)[1]

    def run(pattern: Any) -> Any:
        def one(key: Any) -> Any:
            estimate = tx.logdet(function(matrix), key, 100, pattern=pattern)
            return estimate.value, contains(estimate, truth)

        return over_keys(one, KEY, 300)

    (ours, held), (others, _) = run(PATTERN), run(None)
    assert jnp.mean(held) >= 0.9
    assert jnp.mean((ours - truth) ** 2) < jnp.mean((others - truth) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("tag", [lx.symmetric_tag, lx.positive_semidefinite_tag])
def test_steps_that_runs_do_not_resolve_have_wide_bars(tag: object) -> None:
    """Runs four or two steps shorter meet a step in the middle of the spectrum alike."""
    disorder = np.random.default_rng(18).uniform(-1, 1, 196)
    matrix = jnp.asarray(np.diag(5.5 + 1.5 * disorder) - grid(14, 14))
    ends = 5.5 + jnp.asarray([-0.4, 0.0, 0.1, 0.3])

    def fn(x: Any) -> Any:
        soft = jax.nn.sigmoid((ends - x) / 0.05)
        return jnp.stack([jnp.where(x < ends, 1.0, 0.0), soft, jnp.abs(x - ends)])

    truth = jax.vmap(fn)(jnp.linalg.eigvalsh(matrix)).sum(0)

    def held(key: Any) -> Any:
        operator = function(matrix, tag)
        how = {"num_probes": 11, "num_steps": 16, "pattern": grid(14, 14)}
        return contains(tx.function_trace(operator, fn, key, **how), truth)

    assert jnp.min(jnp.mean(over_keys(held, KEY, 25), axis=0)) >= 0.88
