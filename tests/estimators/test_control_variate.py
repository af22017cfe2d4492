"""The trace of an operator with the help of another one."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, contains, given, nightly, over_keys, refused, slow
from tests.matrices import all_signs, general, hermitian
from tests.wrappers import function, two_leaves

KEY = jax.random.key(4)
N = 80


def estimate(
    matrix: Any, control: Any, key: Any = KEY, budget: int = 20, **how: Any
) -> Any:
    how = {"control_trace": jnp.trace(control), **how}
    operators = function(matrix), function(control)
    return tx.control_variate_trace(*operators, key, budget, **how)


@pytest.mark.parametrize("dtype", [complex, slow(float)])
def test_it_is_the_loop_that_leaves_a_probe_out(dtype: Any) -> None:
    """Each probe has the slope of the regression over the others."""
    matrix, control = general(N, dtype), general(N, dtype) + 0.05 * general(N, dtype, 5)
    got = estimate(matrix, control)
    z = np.asarray(tx.rademacher(KEY, jax.ShapeDtypeStruct((N,), matrix.dtype), 20)).T
    a, c = (np.sum(z.conj() * (np.asarray(m) @ z), axis=0) for m in (matrix, control))
    samples = []
    for i in range(20):
        x, y = np.delete(c, i), np.delete(a, i)
        x, y = x - x.mean(), y - y.mean()
        b = np.vdot(x, y) / np.vdot(x, x).real
        samples.append(a[i] - b * (c[i] - np.trace(control)))
    close(got.value, np.mean(samples), 1e-10)
    close(got.standard_error, np.std(samples, ddof=1) / 20**0.5, 1e-9)


def test_the_mean_over_all_signs_is_the_trace_and_so_are_gradients() -> None:
    """Four probes in five dimensions, in both operators and the trace of the control. Forms
    do not depend on the sign of a probe, so its first entry is 1. Sabotage: with one b for
    all probes the mean is biased."""
    matrix, control, direction = general(5), general(5, seed=2), general(5, seed=3)
    signs = all_signs(16).reshape(-1, 4, 4)
    signs = jnp.asarray(np.pad(signs, ((0, 0), (0, 0), (1, 0)), constant_values=1.0))

    def value(t: Any, z: Any) -> Any:
        moved = control + t[1] * direction
        return estimate(matrix + t[0] * direction, moved, KEY, 4, sampler=given(z)).value

    both = jax.vmap(lambda z: jax.value_and_grad(value)(jnp.zeros(2), z))
    values, gradients = jax.jit(both)(signs)
    close(jnp.mean(values), jnp.trace(matrix), 1e-11)
    close(jnp.mean(gradients, axis=0), jnp.array([jnp.trace(direction), 0.0]), 1e-11, 10)
    a, c = (jnp.einsum("rki,ij,rkj->rk", signs, m, signs) for m in (matrix, control))
    x, y = (m - jnp.mean(m, axis=1, keepdims=True) for m in (c, a))
    naive = jnp.sum(x * y, axis=1) / jnp.maximum(jnp.sum(x * x, axis=1), 1e-9)
    naive = jnp.mean(a - naive[:, None] * (c - jnp.trace(control)), axis=1)
    assert abs(jnp.mean(naive) - jnp.trace(matrix)) > 1e-3


@pytest.mark.parametrize("dtype", [jnp.float32, nightly(float), slow(complex)])
def test_a_multiple_of_the_operator_makes_it_exact(dtype: Any) -> None:
    matrix = hermitian(1.0 + np.arange(N), dtype) / 10
    truth, eps = jnp.trace(matrix), float(jnp.finfo(matrix.dtype).eps)
    for size in (1e-12, 1.0, 1e12):
        got = estimate(matrix, jnp.asarray(size, matrix.dtype) * matrix)
        close(got.value, truth, 100 * eps)
        assert got.standard_error < 1000 * eps * abs(truth)
        assert abs(got.value - truth) < 4 * got.standard_error


@pytest.mark.parametrize("dtype", [jnp.float32, slow(float)])
def test_a_control_whose_forms_are_constant_is_not_used(dtype: Any) -> None:
    """The identity, zero, and one large entry: deviations of their forms are rounding, and
    so would be the b."""
    matrix, eye = hermitian(1.0 + np.arange(N) % 7, dtype), jnp.eye(N, dtype=dtype)
    plain = tx.hutchinson_trace(function(matrix), KEY, 20)
    for control in (eye, 0 * eye, eye.at[3, 3].set(1e6)):
        got = estimate(matrix, control)
        close(got.value, plain.value, 1000 * float(jnp.finfo(matrix.dtype).eps))
        close(got.standard_error, plain.standard_error, 1e-2)


def a_pair(dtype: Any) -> tuple[Any, Any]:
    matrix = hermitian(1 / (1.0 + np.arange(N)), dtype)
    return matrix, matrix + 0.01 * hermitian(np.cos(np.arange(N)), dtype)


@pytest.mark.parametrize("dtype", [slow(jnp.float32), nightly(float)])
def test_intervals_contain_the_truth_and_are_narrower(dtype: Any) -> None:
    matrix, control = a_pair(dtype)
    truth = jnp.trace(matrix)

    def run(key: Any) -> Any:
        got = estimate(matrix, control, key)
        plain = tx.hutchinson_trace(function(matrix), key, 20)
        return contains(got, truth), got.standard_error, plain.standard_error

    contained, error, plain = over_keys(run, KEY, 200)
    assert jnp.mean(contained) >= 0.93
    assert 5 * jnp.median(error) < jnp.median(plain)


def test_scale() -> None:
    """In single precision the squares of such forms are out of range."""
    matrix, control = a_pair(jnp.float32)
    want = estimate(matrix, control)
    for size in (1e-30, 1e30):
        got = estimate(size * matrix, size * control)
        close(got.value / size, want.value, 1e-5)
        close(got.standard_error / size, want.standard_error, 1e-3)


def test_batches_pytrees_and_stored_controls() -> None:
    matrix, control = general(N), general(N) + 0.05 * general(N, seed=5)
    whole, trees = estimate(matrix, control), (two_leaves(matrix), two_leaves(control))
    how: Any = {"control_trace": jnp.trace(control), "batch_size": 7}
    got = tx.control_variate_trace(*trees, KEY, 20, **how)
    close(got.value, whole.value, 1e-11)
    close(got.standard_error, whole.standard_error, 1e-9)
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
