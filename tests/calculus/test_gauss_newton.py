"""Gauss-Newton and Fisher matrices, next to dense ones."""

from functools import partial
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


def test_they_are_the_dense_matrices_and_semidefinite() -> None:
    gauss_newton = tx.gauss_newton(model, loss, PARAMETERS, args=DATA)
    fisher = tx.empirical_fisher(losses, PARAMETERS, args=DATA)
    j = jax.jit(lambda v: jacobian(losses, v))(FLAT)
    wants = jax.jit(dense_gauss_newton)(FLAT), j.T @ j
    for operator, want in zip((gauss_newton, fisher), wants, strict=True):
        rows = jax.vmap(lambda v, o=operator: ravel_pytree(o.mv(UNFLATTEN(v)))[0])
        close(jax.jit(rows)(jnp.eye(N)), want, 1e-12)
        assert lx.is_positive_semidefinite(operator)
        assert operator.in_structure() == jax.eval_shape(lambda: PARAMETERS)


def test_everything_takes_them_with_their_derivatives() -> None:
    """Trace, diagonal and log-determinant at a budget that is exact: value and derivative
    in the parameters and in what the loss closes over, without leaks."""

    def ours(v: Any, scale: Any) -> Any:
        scaled = lambda outputs, data: scale * loss(outputs, data)  # noqa: E731
        operator = tx.gauss_newton(model, scaled, UNFLATTEN(v), args=DATA)
        diagonal = ravel_pytree(tx.diagonal(operator, KEY, N).value)[0]
        logdet = tx.logdet(operator, KEY, N**2, shift=0.5).value
        return tx.trace(operator, KEY, N).value + jnp.cos(jnp.arange(N)) @ diagonal + logdet

    def truth(v: Any, scale: Any) -> Any:
        matrix = dense_gauss_newton(v, scale)
        logdet = jnp.linalg.slogdet(matrix + 0.5 * jnp.eye(N))[1]
        return (1 + jnp.cos(jnp.arange(N))) @ jnp.diagonal(matrix) + logdet

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


def by_hand(v: Any, args: Any, tanh: Any = clipped) -> Any:
    return tanh(v[:4] * args) ** 2 + v[4:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gauss_newton", "empirical_fisher", "hessian_diagonal"])
def test_reverse_mode_alone_is_enough(name: str) -> None:
    """With jac="bwd" a custom VJP gives the matrices of plain code, and their
    derivatives."""
    v, key = jnp.linspace(-1.0, 1.0, 8), jax.random.key(0)
    squares = lambda outputs, args: jnp.sum(jnp.log1p(outputs**2))  # noqa: E731

    def total(s: Any, tanh: Any = clipped, **how: Any) -> Any:
        fn, how = partial(by_hand, tanh=tanh), {"args": s, **how}
        if name == "hessian_diagonal":
            whole = lambda v, s: jnp.sum(fn(v, s) ** 3)  # noqa: E731
            return jnp.sum(tx.hessian_diagonal(whole, v, key, 8, **how).value)
        if name == "gauss_newton":
            return tx.trace(tx.gauss_newton(fn, squares, v, **how), key).value
        return tx.trace(tx.empirical_fisher(fn, v, **how), key).value

    want = jax.value_and_grad(partial(total, tanh=jnp.tanh))(0.7)
    close(jax.value_and_grad(partial(total, jac="bwd"))(0.7), want, 1e-12)
    close(total(0.7, jnp.tanh, jac="fwd"), want[0], 1e-12)
    refused(ValueError, rf"{name}\(jac=.*'fwd' or 'bwd'", total, 0.7, jnp.tanh, jac="rev")
