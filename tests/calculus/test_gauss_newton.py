"""Gauss-Newton and Fisher matrices, beside dense ones."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tx
from tests.helpers import close, leaks_checked, refused

KEY = jax.random.key(2)
NET = eqx.nn.MLP(4, 3, 8, 1, jnp.tanh, key=KEY, dtype=float)
PARAMETERS, STATIC = eqx.partition(NET, eqx.is_inexact_array)
FLAT, UNFLATTEN = ravel_pytree(PARAMETERS)
DATA = jax.random.normal(KEY, (10, 4)), jnp.arange(10) % 3
N = FLAT.size


def model(parameters: Any, data: Any) -> Any:
    return jax.vmap(eqx.combine(parameters, STATIC))(data[0])


def each(outputs: Any, data: Any) -> Any:
    return -jax.nn.log_softmax(outputs)[jnp.arange(10), data[1]]


def loss(outputs: Any, data: Any) -> Any:
    return jnp.sum(each(outputs, data))


def jacobian(fn: Any, v: Any) -> Any:
    return jax.jacobian(lambda v: fn(UNFLATTEN(v), DATA).ravel())(v)


def dense_gauss_newton(v: Any, scale: Any = 1.0) -> Any:
    outputs = model(UNFLATTEN(v), DATA)
    inner = jax.hessian(lambda o: scale * loss(o.reshape(10, 3), DATA))(outputs.ravel())
    j = jacobian(model, v)
    return j.T @ inner @ j


def losses(parameters: Any, data: Any) -> Any:
    return each(model(parameters, data), data)


def as_matrix(operator: lx.AbstractLinearOperator) -> Any:
    return jax.vmap(lambda v: ravel_pytree(operator.mv(UNFLATTEN(v)))[0])(jnp.eye(N)).T


def test_they_are_the_dense_matrices_and_semidefinite() -> None:
    gauss_newton = tx.gauss_newton(model, loss, PARAMETERS, args=DATA)
    fisher = tx.empirical_fisher(losses, PARAMETERS, args=DATA)
    j = jacobian(losses, FLAT)
    wants = dense_gauss_newton(FLAT), j.T @ j
    for operator, want in zip((gauss_newton, fisher), wants, strict=True):
        close(as_matrix(operator), want, 1e-12)
        assert lx.is_positive_semidefinite(operator)
        assert operator.in_structure() == jax.eval_shape(lambda: PARAMETERS)


def test_everything_takes_them_and_has_its_slope() -> None:
    """Trace, diagonal and log-determinant at a budget that is exact: value and slope in the
    parameters and in what the loss closes over, without leaks."""

    def results(operator: Any) -> Any:
        trace = tx.trace(operator, KEY, N).value
        diagonal = ravel_pytree(tx.diagonal(operator, KEY, N).value)[0]
        logdet = tx.logdet(operator, KEY, N**2, shift=0.5).value
        return trace + jnp.cos(jnp.arange(N)) @ diagonal + logdet

    def ours(v: Any, scale: Any) -> Any:
        scaled = lambda outputs, data: scale * loss(outputs, data)  # noqa: E731
        return results(tx.gauss_newton(model, scaled, UNFLATTEN(v), args=DATA))

    def truth(v: Any, scale: Any) -> Any:
        matrix = dense_gauss_newton(v, scale)
        logdet = jnp.linalg.slogdet(matrix + 0.5 * jnp.eye(N))[1]
        diagonal = jnp.diagonal(matrix)
        return jnp.trace(matrix) + jnp.cos(jnp.arange(N)) @ diagonal + logdet

    with leaks_checked():
        got = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(FLAT, 1.3)
    want = jax.jit(jax.value_and_grad(truth, argnums=(0, 1)))(FLAT, 1.3)
    close(got, want, 1e-9)


def test_wrong_use_says_the_cure() -> None:
    call: Any = tx.gauss_newton
    fisher: Any = tx.empirical_fisher
    imaginary = lambda p, data: model(p, data).astype(complex)  # noqa: E731
    whole = lambda p, data: jnp.arange(3)  # noqa: E731
    p, how, real = PARAMETERS, {"args": DATA}, "must return arrays of real"
    refused(TypeError, r"newton\(fn=.*must be a function", call, 3, loss, p, **how)
    refused(TypeError, r"loss=.*must be a function", call, model, 3, p, **how)
    refused(TypeError, r"loss=.*one real number.*Sum", call, model, each, p, **how)
    refused(TypeError, rf"newton\(fn=.*{real}", call, imaginary, loss, p, **how)
    refused(TypeError, r"newton\(x=.*eqx\.partition", call, model, loss, NET, **how)
    refused(TypeError, rf"fisher\(fn=.*{real}", fisher, whole, p, **how)
    refused(ValueError, r"fisher\(x=.*at least one entry", fisher, losses, (), **how)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    """A function whose derivative only reverse mode knows, as of a kernel by hand."""
    return jnp.tanh(x)


clipped.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g / jnp.cosh(x) ** 2,))


def by_hand(v: Any, args: Any) -> Any:
    return clipped(v[:4] * args) ** 2 + v[4:]


def without(v: Any, args: Any) -> Any:
    return jnp.tanh(v[:4] * args) ** 2 + v[4:]


def squares(outputs: Any, args: Any) -> Any:
    return jnp.sum(jnp.log1p(outputs**2))


@pytest.mark.slow
def test_reverse_mode_alone_is_enough() -> None:
    """With jac="bwd" a custom VJP gives the matrices of plain code, and their slopes."""
    v, key = jnp.linspace(-1.0, 1.0, 8), jax.random.key(0)
    whole = lambda fn, v, s: jnp.sum(fn(v, s) ** 3)  # noqa: E731
    calls = {
        "gauss_newton": lambda fn, s, **how: tx.trace(
            tx.gauss_newton(fn, squares, v, args=s, **how), key
        ),
        "empirical_fisher": lambda fn, s, **how: tx.trace(
            tx.empirical_fisher(fn, v, args=s, **how), key
        ),
        "hessian_diagonal": lambda fn, s, **how: tx.hessian_diagonal(
            lambda v, s: whole(fn, v, s), v, key, 8, args=s, **how
        ),
    }
    for name, call in calls.items():
        total = lambda fn, s, call=call, **how: jnp.sum(call(fn, s, **how).value)  # noqa: E731
        want = jax.value_and_grad(total, 1)(without, 0.7)
        got = jax.value_and_grad(lambda s: total(by_hand, s, jac="bwd"))(0.7)  # noqa: B023
        close(got[0], want[0], 1e-12)
        close(got[1], want[1], 1e-12)
        close(total(without, 0.7, jac="fwd"), want[0], 1e-12)
        message = rf"{name}\(jac=.*'fwd' or 'bwd'"
        refused(ValueError, message, lambda call=call: call(without, 0.7, jac="rev"))
