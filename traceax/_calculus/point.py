"""Where derivatives are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree

from traceax._core.checks import check_count, check_key
from traceax._core.function_checks import (
    check_field,
)

Point = PyTree[Inexact[Array, "..."]]
Field = Callable[[Any, Any], Any]


def checked_point(
    name: str, fn: object, x: PyTree, key: PRNGKeyArray, num_matvecs: object
) -> Point:
    """x as strongly typed arrays of floats, the arguments of an estimator checked."""
    point = differentiable_point(name, fn, x)
    check_key(name, key)
    check_count(name, "num_matvecs", num_matvecs, 1)
    return point


def differentiable_point(name: str, fn: object, x: PyTree) -> Point:
    """x as strongly typed arrays of floats, function and point checked."""
    check_field(name, fn, x)

    def inexact(leaf: Any) -> Array:
        dtype = jnp.result_type(leaf)
        dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)
        return jax.lax.convert_element_type(leaf, dtype)

    return jax.tree.map(inexact, x)
