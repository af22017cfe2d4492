"""Arrays that functions close over reach the gradient, in default arguments too."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import pytest

from tests.calls import CALLS, MATRIX, N, operator
from tests.helpers import close, slow
from tests.wrappers import PSD, matrix_free

KEY = jax.random.key(5)


def positional(k: Any) -> lx.AbstractLinearOperator:
    return matrix_free(lambda v, k=k: k @ v, N, PSD)


def keyword(k: Any) -> lx.AbstractLinearOperator:
    def apply(v: Any, *, k: Any = k) -> Any:
        return k @ v

    return matrix_free(apply, N, PSD)


def of_a_function(k: Any) -> lx.AbstractLinearOperator:
    product = lambda v: k @ v  # noqa: E731
    return matrix_free(lambda v, fn=product: fn(v), N, PSD)


def nested(k: Any) -> lx.AbstractLinearOperator:
    half = positional(k / 2)
    return lx.TaggedLinearOperator(2.0 * half + 0.0 * half, PSD)


def jacobian(k: Any) -> lx.AbstractLinearOperator:
    def bent(x: Any, args: Any, k: Any = k) -> Any:
        return k @ jnp.sin(x)

    return lx.JacobianLinearOperator(bent, jnp.zeros(N), tags=PSD)


def loss_of(name: str, make: Callable[[Any], lx.AbstractLinearOperator]) -> Any:
    def loss(scale: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.calls.operator", make)
            return jnp.sum(CALLS[name](scale * MATRIX, KEY).value)

    return loss


@pytest.mark.parametrize("name", ["xtrace", slow("slq_trace")])
def test_every_kind_of_closure(name: str) -> None:
    expected = jax.grad(loss_of(name, operator))(1.3)
    for make in (positional, keyword, of_a_function, nested, jacobian):
        close(jax.grad(loss_of(name, make))(1.3), expected, 1e-8)
