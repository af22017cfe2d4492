"""How many applications a program makes, told before it runs.

An operator that is handed to somebody else's algorithm is applied under a name. The name
stands in the program that is traced of the algorithm, with the shape of what it returns: so
columns are counted as they are under `jax.vmap`, and as often as a loop goes round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array, Inexact

from traceax._core.jaxprs import inner_jaxprs
from traceax._core.operator import LinearMap

Apply = Callable[[Inexact[Array, "n k"]], Inexact[Array, "n k"]]

_NAME = "traceax_application"


def named(linear_map: LinearMap) -> Apply:
    """The same map of blocks, under a name."""
    arrays, rest = eqx.partition(linear_map, eqx.is_array)

    def application(arrays: Any, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        return eqx.combine(arrays, rest)(block)

    application.__name__ = _NAME
    compiled = jax.jit(application)

    def apply(block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        with jax.disable_jit(False):  # or there would be no name
            return compiled(arrays, block)

    return apply


def entries_applied(program: Jaxpr, *, real: bool) -> float:
    """Of all blocks together; a complex block of a real operator is two. Of the branches of
    a choice, the dearest one's. Infinitely many in a loop that stops when it likes."""
    return sum(_entries(equation, real) for equation in program.eqns)


def _entries(equation: JaxprEqn, real: bool) -> float:
    params = equation.params
    if params.get("name") == _NAME:
        blocks: list[Any] = [out.aval for out in equation.outvars]
        return sum(b.size * (2 if real and jnp.iscomplexobj(b) else 1) for b in blocks)
    counts = [entries_applied(inner, real=real) for inner in inner_jaxprs(equation)]
    match equation.primitive.name:
        case "while":
            return math.inf if any(counts) else 0
        case "cond":
            return max(counts)
        case "scan":
            return params["length"] * sum(counts) if any(counts) else 0
        case _:
            return sum(counts)
