"""Equal codes are one; what differs where the text does not is told apart."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close
from traceax._core.operator import by_code, layout_wished, operator_code

STRUCTURE = jax.ShapeDtypeStruct((5,), float)
MATRICES = [jnp.eye(5) * (i + 1.0) for i in range(2)]
Apply = Callable[[Any], Any]


def scanned(i: int) -> Apply:
    def apply(v: Any) -> Any:
        return jax.lax.scan(lambda c, _: (MATRICES[i] @ c, None), v, None, length=2)[0]

    return apply


def branched(i: int) -> Apply:
    return lambda v: jax.lax.cond(v[0] > i, lambda u: MATRICES[0] @ u, lambda u: -u, v)


def jitted(i: int) -> Apply:
    inner = jax.jit(lambda m, v: jnp.where(v > 0, m @ v, 0.0))
    return lambda v: inner(MATRICES[i], v)


def gradient(i: int) -> Apply:
    def loss(x: Any) -> Any:
        return jnp.sum(jax.lax.map(jnp.tanh, MATRICES[i] @ x) ** 2)

    return lambda v: jax.jvp(jax.grad(loss), (MATRICES[i][0],), (v,))[1]


def with_constant(i: int) -> Apply:
    inner = jax.jit(lambda v: MATRICES[i] @ v)
    return lambda v: MATRICES[0] @ inner(v)


def with_rule(i: int) -> Apply:
    @jax.custom_jvp
    def bent(v: Any) -> Any:
        return MATRICES[0] @ v

    bent.defjvp(lambda x, t: (bent(*x), (i + 1.0) * t[0]))
    return lambda v: jax.jit(bent)(v)


def with_zero(i: int) -> Apply:
    zero = (0.0, -0.0)[i]
    return lambda v: MATRICES[0] @ jax.lax.map(lambda x: jnp.maximum(x, zero), v)


def with_length(i: int) -> Apply:
    return lambda v: jax.lax.scan(lambda c, _: (2 * c, None), v, None, length=i + 2)[0]


def crossed(i: int) -> Apply:
    def inner(c: Any, _: None) -> tuple[Any, None]:
        a, b = jnp.sin(c), jnp.cos(c)
        return MATRICES[0] @ (a - b if i else b - a), None

    return lambda v: jax.lax.scan(inner, v, None, length=2)[0]


def operator(apply: Apply) -> lx.AbstractLinearOperator:
    return lx.FunctionLinearOperator(apply, STRUCTURE)


@pytest.mark.parametrize("make", [scanned, jitted, gradient])
def test_traced_anew_it_is_the_same(make: Callable[[int], Apply]) -> None:
    """And applies the arrays that it is given."""
    codes = [operator_code(operator(make(i))) for i in range(2)]
    assert codes[0].code is codes[1].code
    for i, code in enumerate(codes):
        v = jnp.arange(5.0)
        again = by_code(operator(make(i)), code)
        close(again.mv(v), make(i)(v), 1e-14)


@pytest.mark.parametrize(
    "make", [branched, with_constant, with_rule, with_zero, with_length, crossed]
)
def test_what_differs_is_told_apart(make: Callable[[int], Apply]) -> None:
    codes = [operator_code(operator(make(i))) for i in range(2)]
    assert codes[0].code is not codes[1].code
    for i, code in enumerate(codes):
        v = jnp.arange(5.0) - 2
        got = jax.jvp(by_code(operator(make(i)), code).mv, (v,), (v,))
        np.testing.assert_array_equal(got, jax.jvp(make(i), (v,), (v,)))


def test_promises_are_kept() -> None:
    tags = (lx.positive_semidefinite_tag, lx.negative_semidefinite_tag, lx.symmetric_tag)
    for tag in tags:
        one = lx.FunctionLinearOperator(scanned(0), STRUCTURE, tag)
        two = by_code(one, operator_code(one))
        for holds in (lx.is_positive_semidefinite, lx.is_negative_semidefinite):
            assert holds(one) == holds(two)
        assert lx.is_symmetric(two)


@pytest.mark.parametrize("layout", [*tx.Layout, None])
def test_the_layout_that_was_wished_is_kept(layout: tx.Layout | None) -> None:
    one = lx.FunctionLinearOperator(scanned(0), STRUCTURE, [layout] if layout else [])
    one = 2.0 * one
    assert layout_wished(by_code(one, operator_code(one))) == layout
