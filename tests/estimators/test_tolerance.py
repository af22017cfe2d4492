"""Any estimator to a tolerance."""

import math
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, nightly, refused, slow
from tests.matrices import hermitian, spectrum
from tests.wrappers import PSD, function
from traceax._estimators.tolerance import _Level

KEY = jax.random.key(7)


class Fake:
    """An estimator of 100 with a known error, which writes down its budgets."""

    def __init__(self, order: float = 0.5, gap: float = 0.0, seconds: float = 0.0) -> None:
        self.order, self.gap, self.seconds = order, gap, seconds
        self.sizes: list[int] = []

    def __call__(self, key: Any, num_matvecs: int) -> tx.Estimate:
        self.sizes.append(num_matvecs)
        time.sleep(self.seconds * num_matvecs)
        error = jnp.asarray(100 * num_matvecs**-self.order)
        total, gap = jnp.hypot(error, self.gap), jnp.asarray(self.gap)
        value = 100 + error * jax.random.normal(key, (), error.dtype) / 10
        return tx.Estimate(value, total, num_matvecs, 50.0, quadrature_error=gap)


def test_it_stops_where_two_errors_fit() -> None:
    fake = Fake(order=1.0)
    found = tx.adaptive(fake, KEY, rtol=0.02)
    assert found.converged
    assert 2 * found.standard_error <= 0.02 * found.value
    assert found.num_matvecs == sum(fake.sizes)
    assert fake.sizes[0] == 32
    assert sum(fake.sizes) < 400  # one run of 100 is enough


@pytest.mark.slow
def test_an_error_that_falls_fast_gets_larger_runs_and_a_slow_one_more_runs() -> None:
    fast, slowly = Fake(order=1.5), Fake(order=0.25)
    for fake in (fast, slowly):
        assert tx.adaptive(fake, KEY, rtol=0.02, max_matvecs=1_000_000).converged
    assert len(fast.sizes) == len(set(fast.sizes))
    assert len(slowly.sizes) > 2 * len(set(slowly.sizes))
    # As many runs of 32 as needed would be 1770 of them.
    needed = 32 * (100 * 32**-0.25) ** 2
    assert needed / 2 < sum(slowly.sizes) < 2 * needed


def test_more_runs_do_not_reduce_the_error_of_quadrature() -> None:
    fake = Fake(order=0.5, gap=3.0)
    found = tx.adaptive(fake, KEY, rtol=0.02, max_matvecs=5000)
    assert not found.converged
    assert found.standard_error >= 3
    assert float(found.quadrature_error) == 3
    # Where it is the larger part, more runs of one budget are a waste.
    assert max(map(fake.sizes.count, set(fake.sizes))) <= 2


def test_the_budget_is_never_passed() -> None:
    for limit in (1, 31, 32, 33, 100, 1000):
        fake = Fake()
        found = tx.adaptive(fake, KEY, rtol=0.0, max_matvecs=limit)
        assert found.num_matvecs == sum(fake.sizes) <= limit
        assert sum(fake.sizes) > limit - max(fake.sizes)
        assert found.converged is False


def test_the_time_is_not_passed() -> None:
    fake = Fake(seconds=1e-4)
    found = tx.adaptive(fake, KEY, rtol=0.0, max_matvecs=10**6, max_seconds=1.0)
    assert 0.2 < fake.seconds * sum(fake.sizes) < 1.0
    assert not found.converged
    assert len(fake.sizes) > 1
    fake = Fake(seconds=1e-3)
    tx.adaptive(fake, KEY, rtol=0.0, max_seconds=1e-3)
    assert fake.sizes == [32]  # the first run is always made


def test_the_best_is_returned() -> None:
    """A larger run with a larger error does not take the place of a better one."""

    def worse(key: Any, num_matvecs: int) -> tx.Estimate:
        error = 5.0 if num_matvecs == 32 else 50.0
        return tx.Estimate(jnp.asarray(100.0), jnp.asarray(error), num_matvecs)

    found = tx.adaptive(worse, KEY, rtol=1e-3, max_matvecs=500)
    assert found.standard_error <= 5.0
    assert found.num_matvecs <= 500


def test_nan_ends_the_search() -> None:
    for value in (math.nan, 1.0):

        def broken(key: Any, num_matvecs: int, value: float = value) -> tx.Estimate:
            value, error = (value, math.nan) if num_matvecs > 32 else (1.0, 1.0)
            return tx.Estimate(jnp.asarray(value), jnp.asarray(error), num_matvecs)

        found = tx.adaptive(broken, KEY)
        assert jnp.isnan(found.standard_error)
        assert not found.converged
        assert found.num_matvecs == 32 + 64


def test_the_tolerance_is_for_all_entries_together() -> None:
    """The norm of the error of three is 3^(1/2)/m, and two of them must fit."""

    def tree(key: Any, m: int) -> tx.Estimate:
        value = {"a": jnp.ones(3), "b": jnp.ones(())}
        return tx.Estimate(value, {"a": jnp.ones(3) / m, "b": jnp.zeros(())}, m)

    for share, spent in ((1.001, 35), (0.999, 2 * 35)):
        tolerance = share * 2 * 3**0.5 / 35
        for rtol, atol in ((0.0, tolerance), (tolerance / 2, 0.0)):
            found = tx.adaptive(tree, KEY, first=35, rtol=rtol, atol=atol)
            assert found.num_matvecs == spent
            assert found.converged


def test_several_runs_are_what_pool_makes_of_them() -> None:
    """Value, error and its part by quadrature, also of complex numbers."""
    runs = []

    def run(key: Any, num_matvecs: int) -> tx.Estimate:
        value = jax.random.normal(key, (3,), complex)
        error, gap = 0.5 + jax.random.uniform(key, (3,)), jnp.full(3, 0.1)
        errors = {"a": jnp.hypot(error, gap), "b": error[0]}
        gaps = {"a": gap, "b": jnp.zeros(())}
        values = {"a": value, "b": value[0].real}
        estimate = tx.Estimate(values, errors, num_matvecs, 7.0, quadrature_error=gaps)
        runs.append(estimate)
        return estimate

    found = tx.adaptive(run, KEY, rtol=0.0, max_matvecs=590, first=200)
    assert [r.num_matvecs for r in runs] == [200, 200]
    pooled = tx.pool(runs)
    for name in ("value", "standard_error", "quadrature_error"):
        close(getattr(found, name), getattr(pooled, name), 1e-12)
    assert found.degrees_of_freedom > 7


def test_equal_keys_give_equal_numbers_and_runs_have_their_own() -> None:
    seen = []

    def run(key: Any, num_matvecs: int) -> tx.Estimate:
        seen.append(tuple(np.asarray(jax.random.key_data(key))))
        return Fake()(key, num_matvecs)

    first, second = (tx.adaptive(run, KEY, rtol=0.05) for _ in range(2))
    assert first.value == second.value
    assert len(set(seen)) == len(seen) / 2


def test_it_is_differentiable_and_eager() -> None:
    """The derivative of the pool of several runs gives their value (Euler)."""
    matrix = hermitian(0.8 ** np.arange(100))

    def loss(scale: Any) -> Any:
        run = lambda key, m: tx.hutchinson_trace(function(scale * matrix), key, m)  # noqa: E731
        return tx.adaptive(run, KEY, rtol=0.15).value

    value, derivative = jax.value_and_grad(loss)(1.0)
    close(value, jnp.trace(matrix), 0.3)
    close(derivative, value, 1e-12)
    for how in (jax.jit(loss), lambda x: jax.vmap(loss)(jnp.stack([x, x]))):
        refused(TypeError, r"adaptive\(estimate=.*adaptive_trace", lambda how=how: how(1.0))


def test_it_shows_progress() -> None:
    seen: list[float] = []

    def step(state: int, progress: Any) -> int:
        seen.append(float(progress))
        return state + 1

    close: Any = lambda state: seen.append(-state)  # noqa: E731
    meter: Any = SimpleNamespace(init=int, step=step, close=close)
    tx.adaptive(Fake(order=1.0), KEY, rtol=0.02, progress_meter=meter)
    *steps, last = seen
    assert steps == sorted(steps)
    assert steps[-1] == 1.0
    assert last == -len(steps)


WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, r"adaptive\(estimate=.*function of a key", {"estimate": 3}),
    (TypeError, r"\(estimate=.*return an Estimate", {"estimate": lambda k, m: 1.0}),
    (ValueError, r"adaptive\(rtol=.*at least 0", {"rtol": -1.0}),
    (ValueError, r"adaptive\(max_seconds=.*positive", {"max_seconds": 0.0}),
    (TypeError, r"adaptive\(max_matvecs=.*Python int", {"max_matvecs": 1e3}),
    (TypeError, r"adaptive\(key=.*JAX random key", {"key": 0}),
    (TypeError, r"adaptive\(progress_meter=", {"progress_meter": 1}),
]


def test_wrong_use_says_the_cure() -> None:
    for kind, message, how in WRONG:
        refused(kind, message, tx.adaptive, **({"estimate": Fake(), "key": KEY} | how))


N = 300
FUNCTIONS: dict[str, Any] = {
    "trace": (lambda a, k, m: tx.trace(function(a, PSD), k, m), jnp.trace),
    "logdet": (
        lambda a, k, m: tx.logdet(function(a, PSD), k, m, shift=0.1),
        lambda a: jnp.linalg.slogdet(a + 0.1 * jnp.eye(N))[1],
    ),
    "diagonal": (lambda a, k, m: tx.diagonal(function(a), k, m), jnp.diag),
}
RUNS = [slow("trace", "float32"), slow("logdet", "float64"), nightly("trace", "float64")]


@pytest.mark.parametrize(("name", "dtype"), [*RUNS, nightly("diagonal", "float64")])
def test_how_often_the_tolerance_is_met(name: str, dtype: str) -> None:
    """In 100 runs, at most 5 % of the answers that claim it are not within it, but for
    four standard deviations of such a count."""
    run, truth_of = FUNCTIONS[name]
    run = jax.jit(run, static_argnums=2)
    for spectral in ("flat", "poly", "step"):
        matrix = hermitian(np.abs(spectrum(spectral, N)) + 1e-3).astype(dtype)
        truth, missed, claimed = np.asarray(truth_of(matrix.astype("float64"))), 0, 0
        for key in jax.random.split(KEY, 34):
            estimate = partial(run, matrix)
            found = tx.adaptive(estimate, key, rtol=0.05, max_matvecs=2500)
            error = np.linalg.norm(np.asarray(found.value) - truth) / np.linalg.norm(truth)
            claimed += bool(found.converged)
            missed += bool(found.converged) and bool(error > 0.05)
            assert found.num_matvecs <= 2500
        assert missed <= 1.7 + 5
        assert claimed >= 33


def test_a_level_has_the_numbers_of_a_pool() -> None:
    """And says how many more runs are needed."""
    level, runs = _Level(10), []
    for number, error in enumerate([2.0, 1.0, 1.5, 1.2, 1.4]):
        value = jnp.asarray([number / 3.0, 1.0])
        bars = jnp.asarray([error, 2 * error])
        gap = jnp.asarray([0.5, 0.25])
        runs.append(tx.Estimate(value, bars, 10, 4.0, quadrature_error=gap))
        level.add(runs[-1], 0.1)
        if number > 0:
            pooled = tx.pool(runs)
            close(level.error, np.linalg.norm(pooled.standard_error), 1e-12)
            close(level.length, np.linalg.norm(pooled.value), 1e-12)
            close(level.gap, np.linalg.norm(pooled.quadrature_error), 1e-12)
    assert level.gains
    assert level.more(0.5 * level.gap) == math.inf
    more, wanted = level.more(0.8), 0.8
    of = lambda runs: math.hypot(level.sampling / runs**0.5, level.gap)  # noqa: E731
    assert of(5 + more) <= wanted < of(4 + more)
    unknown = _Level(10)
    for value in (1.0, 3.0):  # runs of one probe, whose own bars are infinite
        unknown.add(tx.Estimate(jnp.asarray(value), jnp.asarray(jnp.inf), 1), 0.1)
        assert (unknown.error == math.inf) is (value == 1.0)
    close(unknown.error, 1.0, 1e-12)
    infinite = _Level(10)
    gap = jnp.asarray(jnp.inf)
    infinite.add(tx.Estimate(jnp.asarray(1.0), gap, 1, quadrature_error=gap), 0.1)
    assert (infinite.sampling, infinite.gap) == (math.inf, math.inf)
