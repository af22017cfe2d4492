"""The trace of an operator with the help of another one."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, given, refused, slow
from tests.matrices import all_signs, general, hermitian
from tests.wrappers import function, two_leaves
from traceax._linalg.jackknife import slopes_of_others

KEY = jax.random.key(4)
N = 80


def close_to(matrix: Any, size: float = 0.05) -> Any:
    return matrix + size * general(len(matrix), matrix.dtype, seed=5)


def estimate(
    matrix: Any, control: Any, key: Any = KEY, budget: int = 20, **how: Any
) -> Any:
    how = {"control_trace": jnp.trace(control), **how}
    operators = function(matrix), function(control)
    return tx.control_variate_trace(*operators, key, budget, **how)


@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("k", [4, slow(7)])
def test_slopes_are_regressions_of_the_others(dtype: Any, k: int) -> None:
    x, y = general(k, dtype)[:2]
    got = slopes_of_others(x, y, floor=jnp.zeros(()))
    for i in range(k):
        one, other = np.delete(x, i), np.delete(y, i)
        one_off, other_off = one - one.mean(), other - other.mean()
        want = np.vdot(one_off, other_off) / np.vdot(one_off, one_off).real
        close(got[i], want, 1e-12)


@pytest.mark.parametrize("dtype", [float, complex])
def test_it_is_the_loop_that_leaves_a_probe_out(dtype: Any) -> None:
    matrix = general(N, dtype)
    control = close_to(matrix)
    got = estimate(matrix, control)
    z = np.asarray(tx.rademacher(KEY, jax.ShapeDtypeStruct((N,), matrix.dtype), 20)).T
    a, c = (np.sum(z.conj() * (np.asarray(m) @ z), axis=0) for m in (matrix, control))
    samples = []
    for i in range(20):
        x, y = np.delete(c, i), np.delete(a, i)
        x, y = x - x.mean(), y - y.mean()
        slope = np.vdot(x, y) / np.vdot(x, x).real
        samples.append(a[i] - slope * (c[i] - np.trace(control)))
    close(got.value, np.mean(samples), 1e-10)
    close(got.standard_error, np.std(samples, ddof=1) / 20**0.5, 1e-9)


def test_the_mean_over_all_signs_is_the_trace_and_so_are_gradients() -> None:
    """Four probes in five dimensions, in both operators and the trace of the control. Forms
    do not depend on the sign of a probe, so its first entry is 1. Sabotage: with one slope
    for all probes the mean is biased."""
    matrix, control, direction = general(5), general(5, seed=2), general(5, seed=3)
    signs = all_signs(16).reshape(-1, 4, 4)
    signs = jnp.asarray(np.pad(signs, ((0, 0), (0, 0), (1, 0)), constant_values=1.0))

    def value(t: Any, z: Any) -> Any:
        moved = control + t[1] * direction
        return estimate(matrix + t[0] * direction, moved, KEY, 4, sampler=given(z)).value

    both = jax.vmap(lambda z: jax.value_and_grad(value)(jnp.zeros(2), z))
    values, slopes = jax.jit(both)(signs)
    close(jnp.mean(values), jnp.trace(matrix), 1e-11)
    close(jnp.mean(slopes, axis=0), jnp.array([jnp.trace(direction), 0.0]), 1e-11, 10)
    a, c = (jnp.einsum("rki,ij,rkj->rk", signs, m, signs) for m in (matrix, control))
    x, y = (m - jnp.mean(m, axis=1, keepdims=True) for m in (c, a))
    naive = jnp.sum(x * y, axis=1) / jnp.maximum(jnp.sum(x * x, axis=1), 1e-9)
    naive = jnp.mean(a - naive[:, None] * (c - jnp.trace(control)), axis=1)
    assert abs(jnp.mean(naive) - jnp.trace(matrix)) > 1e-3


@pytest.mark.parametrize("dtype", [jnp.float32, slow(float), slow(complex)])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_a_multiple_of_the_operator_makes_it_exact(dtype: Any, size: float) -> None:
    matrix = hermitian(1.0 + np.arange(N), dtype) / 10
    truth = jnp.trace(matrix)
    got = estimate(matrix, jnp.asarray(size, matrix.dtype) * matrix)
    eps = float(jnp.finfo(matrix.dtype).eps)
    close(got.value, truth, 100 * eps)
    assert got.standard_error < 1000 * eps * abs(truth)
    assert abs(got.value - truth) < 4 * got.standard_error


@pytest.mark.parametrize("dtype", [jnp.float32, slow(float)])
@pytest.mark.parametrize("control", ["identity", "zero", "one large entry"])
def test_a_control_whose_forms_are_constant_is_not_used(dtype: Any, control: str) -> None:
    """Their deviations are rounding, and so would be the slope."""
    matrix = hermitian(1.0 + np.arange(N) % 7, dtype)
    other = jnp.eye(N, dtype=dtype) * float(control != "zero")
    if control == "one large entry":
        other = other.at[3, 3].set(1e6)
    plain = tx.hutchinson_trace(function(matrix), KEY, 20)
    got = estimate(matrix, other)
    eps = float(jnp.finfo(matrix.dtype).eps)
    close(got.value, plain.value, 1000 * eps)
    close(got.standard_error, plain.standard_error, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, float])
def test_intervals_hold_and_are_narrower(dtype: Any) -> None:
    matrix = hermitian(1 / (1.0 + np.arange(N)), dtype)
    control = matrix + 0.01 * hermitian(np.cos(np.arange(N)), dtype)
    keys = jax.random.split(KEY, 200)
    got = jax.jit(jax.vmap(lambda key: estimate(matrix, control, key)))(keys)
    plain = jax.jit(jax.vmap(lambda k: tx.hutchinson_trace(function(matrix), k, 20)))(keys)
    low, high = got.interval(0.95)
    truth = jnp.trace(matrix)
    assert jnp.mean((low <= truth) & (truth <= high)) >= 0.93
    assert 5 * jnp.median(got.standard_error) < jnp.median(plain.standard_error)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_scale(size: float) -> None:
    """In single precision the squares of such forms are out of range."""
    matrix = hermitian(1 / (1.0 + np.arange(N)), jnp.float32)
    control = matrix + 0.01 * hermitian(np.cos(np.arange(N)), jnp.float32)
    want, got = estimate(matrix, control), estimate(size * matrix, size * control)
    close(got.value / size, want.value, 1e-5)
    close(got.standard_error / size, want.standard_error, 1e-3)


def test_batches_pytrees_and_meters() -> None:
    matrix, control = general(N), close_to(general(N))
    whole = estimate(matrix, control)
    close(estimate(matrix, control, batch_size=7).value, whole.value, 1e-12)
    trees = two_leaves(matrix), two_leaves(control)
    got = tx.control_variate_trace(*trees, KEY, 20, control_trace=jnp.trace(control))
    close(got.value, whole.value, 1e-11)
    stored = tx.as_operator(control)
    known = tx.control_variate_trace(function(matrix), stored, KEY, 20)
    close(known.value, whole.value, 1e-12)
    exact = estimate(matrix, control, budget=N)
    close(exact.value, jnp.trace(matrix), 1e-12)
    assert exact.standard_error == 0


def test_wrong_controls_are_named() -> None:
    operator = function(general(N))
    call: Any = tx.control_variate_trace
    refused(TypeError, r"control=.*lineax operator", call, operator, general(N), KEY, 9)
    refused(ValueError, "control=.*space", call, operator, function(general(9)), KEY, 9)
    refused(TypeError, "control_trace=.*trace", call, operator, operator, KEY, 9)
    for wrong in (jnp.ones(3), 1j):
        args = operator, operator, KEY, 9
        refused(ValueError, "control_trace=.*one real", call, *args, control_trace=wrong)
    both = lx.MatrixLinearOperator(general(N)), operator
    assert jnp.isinf(call(*both, KEY, 1, control_trace=0.0).standard_error)
