"""What is inside of jaxprs: the bodies of loops, branches and jitted functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Any]:
    """Those among the parameters of an equation, closed or not."""
    return filter(is_jaxpr, jax.tree.leaves(equation.params, is_leaf=is_jaxpr))


def held_arrays(equation: JaxprEqn) -> Iterator[Any]:
    """Those that the jaxprs inside of an equation hold."""
    for inner in inner_jaxprs(equation):
        yield from getattr(inner, "consts", ())
        for each in inner.eqns:
            yield from held_arrays(each)
