"""`pattern=` of `function_trace` and `logdet`: plain quadrature with probes of colours."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, contains, nightly, over_keys, slow
from tests.probes.helpers import grid, laplacian
from tests.wrappers import PSD, function

KEY = jax.random.key(3)
PATTERN = grid(12, 11)
PRECISION = jnp.asarray(laplacian(PATTERN)) + 0.3 * jnp.eye(132)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [float, complex])
def test_what_colours_keep_apart_is_exact(dtype: Any) -> None:
    """A cube reaches three steps, and two steps of Lanczos integrate it: the value and both
    derivatives are exact, and the error bar is rounding."""
    phases = np.exp(1j * np.arange(132)) if dtype is complex else np.ones(132)
    matrix = jnp.asarray(phases[:, None] * np.asarray(PRECISION) * phases.conj())

    def run(size: Any, power: Any) -> Any:
        operator = function(matrix * size.astype(matrix.dtype))
        how = {"num_probes": 17, "num_steps": 4, "pattern": PATTERN}
        found = tx.function_trace(operator, lambda x: power * x**3, KEY, 68, **how)
        return found.value, found

    truth = jnp.trace(jnp.linalg.matrix_power(PRECISION, 3))
    at = jnp.asarray(1.0), jnp.asarray(2.0)
    gradients, found = jax.jit(jax.grad(run, (0, 1), has_aux=True))(*at)
    close((found.value, *gradients), (2 * truth, 6 * truth, truth), 1e-12)
    assert found.standard_error <= 1e-12 * truth
    assert (found.method, found.num_matvecs) == ("function_trace, 16 colours", 68)


def test_a_combination_has_the_error_of_its_parts() -> None:
    """Twice one trace, by a combination, has twice its value, error and gradient."""

    @jax.jit
    def runs(shift: Any) -> Any:
        def run(shift: Any, fn: Any, combine: Any) -> Any:
            operator = function(PRECISION + shift * jnp.eye(132))
            how: Any = {"combine": combine, "pattern": PATTERN}
            estimate = tx.function_trace(operator, fn, KEY, 60, **how)
            return estimate.value, estimate

        both = jax.grad(run, has_aux=True)
        parts = lambda x: (x, jnp.log(x))  # noqa: E731
        return both(shift, jnp.log, None), both(shift, parts, lambda t: 2 * t[1])

    (gradient, plain), (twice_gradient, twice) = runs(0.0)
    close((twice.value, twice_gradient), (2 * plain.value, 2 * gradient), 1e-12)
    close(twice.standard_error, 2 * plain.standard_error, 1e-10)
    assert contains(plain, jnp.linalg.slogdet(PRECISION)[1])
    close(gradient, jnp.trace(jnp.linalg.inv(PRECISION)), 0.05)


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


@pytest.mark.nightly
def test_error_bars_beat_those_without_a_pattern() -> None:
    matrix = jnp.asarray(laplacian(PATTERN)) + 0.02 * jnp.eye(132)
    truth = jnp.linalg.slogdet(matrix)[1]

    def errors(pattern: Any) -> Any:
        run = lambda key: tx.logdet(function(matrix), key, 100, pattern=pattern)  # noqa: E731
        found = over_keys(run, KEY, 300)
        assert jnp.mean(contains(found, truth)) >= 0.9
        return jnp.mean((found.value - truth) ** 2)

    assert errors(PATTERN) < errors(None)


@pytest.mark.parametrize("tag", [slow(lx.symmetric_tag), nightly(PSD)])
def test_steps_that_runs_do_not_resolve_have_wide_bars(tag: object) -> None:
    """Runs four or two steps shorter meet a step in the middle of the spectrum alike."""
    disorder = np.random.default_rng(18).uniform(-1, 1, 196)
    matrix = jnp.asarray(np.diag(5.5 + 1.5 * disorder) - grid(14, 14))
    ends = 5.5 + jnp.asarray([-0.4, 0.0, 0.1, 0.3])

    def fn(x: Any) -> Any:
        soft = jax.nn.sigmoid((ends - x) / 0.05)
        return jnp.stack([jnp.where(x < ends, 1.0, 0.0), soft, jnp.abs(x - ends)])

    truth = jax.vmap(fn)(jnp.linalg.eigvalsh(matrix)).sum(0)
    how: Any = {"num_probes": 11, "num_steps": 16, "pattern": grid(14, 14)}
    run = lambda key: tx.function_trace(function(matrix, tag), fn, key, **how)  # noqa: E731
    assert jnp.min(jnp.mean(contains(over_keys(run, KEY, 25), truth[None]), axis=0)) >= 0.88
