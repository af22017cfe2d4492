"""The Hessian of a function of one number, as an operator."""

from __future__ import annotations

import equinox as eqx
import jax
import lineax as lx
from jaxtyping import PyTree

from traceax._calculus.point import Field, Point


def hessian(fn: Field, x: Point, args: PyTree) -> lx.AbstractLinearOperator:
    """Products with it forwards over one backward pass."""

    def gradient(x: Point, args: PyTree) -> Point:
        return jax.grad(fn)(x, args)

    return lx.JacobianLinearOperator(gradient, x, args, tags=lx.symmetric_tag)


def has_gradient(fn: Field, x: Point, args: PyTree) -> bool:
    """Whether JAX goes through it backwards; a loop that ends when it likes it does not."""
    try:
        eqx.filter_eval_shape(jax.grad(fn), x, args)
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True
