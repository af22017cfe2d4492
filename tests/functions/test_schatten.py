"""Schatten norms: rectangular, special, exact."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import cases, close, contains, over_keys
from tests.wrappers import PSD, function
from traceax._core.operator import LinearMap
from traceax._estimators.call import begin
from traceax._functions.exact_functions import exact_power_sum
from traceax._quadrature.block_quadrature import bend_at_edge

KEY = jax.random.key(11)


def truth(matrix: Any, p: Any) -> Any:
    return jnp.sum(jnp.linalg.svd(matrix, compute_uv=False) ** p) ** (1 / p)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "p"), [((90, 150), 1.0), ((150, 90), 3.0)])
def test_rectangular(shape: tuple[int, int], p: float) -> None:
    """With derivatives in the operator and in p."""
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=shape))

    def run(s: Any, p: Any) -> Any:
        how: Any = {"num_probes": 12, "num_steps": 6}
        estimate = tx.schatten_norm(function(s * matrix), p, KEY, **how)
        return estimate.value, estimate

    (by_scale, by_p), estimate = jax.jit(jax.grad(run, (0, 1), has_aux=True))(1.0, p)
    assert contains(estimate, truth(matrix, p), 0.999)
    assert estimate.num_matvecs == 2 * 12 * 6 + 1
    close(by_scale, estimate.value, 1e-9)  # homogeneous of degree one
    close(by_p, jax.grad(lambda p: truth(matrix, p))(p), 0.1)


@pytest.mark.parametrize("kind", cases(["budget", "small", "stored"], "budget"))
def test_exact_where_exact_is_cheap(kind: str) -> None:
    """From the smaller dimension on; for small and stored operators at any budget."""
    shape, probes = ((150, 90), 18) if kind == "budget" else ((90, 40), 4)
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=shape))
    make = lx.MatrixLinearOperator if kind == "stored" else function

    def run(matrix: Any) -> Any:
        how: Any = {"num_probes": probes, "num_steps": 5}
        estimate = tx.schatten_norm(make(matrix), 1.5, KEY, **how)
        return estimate.value, estimate

    gradient, estimate = jax.jit(jax.grad(run, has_aux=True))(matrix)
    close(estimate.value, truth(matrix, 1.5), 1e-12)
    u, sizes, v = jnp.linalg.svd(matrix, full_matrices=False)
    want = (u * sizes[None] ** 0.5) @ v * estimate.value ** (1 - 1.5)
    close(gradient, want, 1e-9)
    assert estimate.standard_error == 0
    spent = {"budget": 90 + 1, "small": 40 + 1, "stored": 1}
    assert estimate.num_matvecs == spent[kind]


@pytest.mark.nightly
def test_special_operators() -> None:
    nine = jnp.diag(jnp.where(jnp.arange(70) < 9, 1.0, 0))
    few = tx.schatten_norm(function(2 * nine, PSD), 1, KEY, num_probes=20, num_steps=3)
    close(few.value, 18.0, 1e-10)  # the space has all of it
    assert few.num_matvecs == 61

    def nuclear(s: Any) -> Any:
        operator = function(s * nine)
        return tx.schatten_norm(operator, 1, KEY, num_probes=3, num_steps=3).value

    norm = jax.jit(nuclear)
    assert nuclear(0.0) == norm(0.0) == 0
    for unit in (1e-200, 1e200):  # whose squares are out of range
        close(norm(unit) / unit, norm(1.0), 1e-10)
    assert jnp.isfinite(jax.grad(nuclear)(1.0))  # those that are 0 have no part in it


@pytest.mark.slow
def test_singular_values_that_are_rounding_errors() -> None:
    """In A* A those below sqrt(eps) of the largest are, and the root makes them large. (In
    half of the runs the error was beyond the interval.)"""
    draw = np.random.default_rng(0).normal
    matrix = draw(size=(100, 5)) @ draw(size=(5, 100))
    single = function(jnp.asarray(matrix, np.float32))

    run = lambda key: tx.schatten_norm(single, 1, key, 120)  # noqa: E731
    estimate, want = over_keys(run, KEY, 40), float(truth(matrix, 1.0))
    error = jnp.mean((estimate.value - want) ** 2) ** 0.5
    assert jnp.mean(contains(estimate, want)) >= 0.9
    assert jnp.all(estimate.standard_error < 4 * error)


def test_only_roots_bend_at_the_edge() -> None:
    """A logarithm with a shift, an exponential and an inverse follow their tangents."""
    fn = lambda x: jnp.stack([x**0.5, jnp.log(x + 1e-2), jnp.exp(-x), 1 / (1 + x)])  # noqa: E731
    edge, reach = jnp.zeros(()), jnp.asarray(1e-7)
    bends = bend_at_edge(fn, edge, reach)
    close(bends[0], reach**0.5 / 2, 1e-6)
    assert jnp.all(bends[1:] < 1e-9)


@pytest.mark.parametrize("budget", [15, 23, 100])
def test_the_budget_is_kept(budget: int) -> None:
    """By the operator and its adjoint together."""
    run = lambda: tx.schatten_norm(function(jnp.ones((300, 200))), 1, KEY, budget)  # noqa: E731
    assert budget / 2 < eqx.filter_eval_shape(run).num_matvecs <= budget


def test_exact_answers_apply_the_shorter_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tall operator not the adjoint."""
    matrix = jnp.asarray(np.random.default_rng(1).normal(size=(61, 41)))
    monkeypatch.setattr(LinearMap, "adjoint", None)
    call = begin("schatten_norm", function(matrix), KEY, 50, square=False)
    close(exact_power_sum(call, jnp.asarray(1.0)).value, truth(matrix, 1), 1e-12)
