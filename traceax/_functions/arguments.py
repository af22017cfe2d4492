"""The arguments that functions of an operator share: f, and probes and steps.

`subject_of` says what the tags of an operator tell about its spectrum. What a budget
becomes is in `krylov`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from traceax._core.canonical import is_concrete
from traceax._core.operator import (
    LinearMap,
    Operator,
    is_negative,
    is_positive,
    working_dtype,
)
from traceax._linalg.columns import Number
from traceax._quadrature.scalar import (
    Flat,
    MatrixFunction,
    ScalarFunction,
    scalar_function,
)

Function = Callable[[Inexact[Array, ""]], PyTree[Array]]
"""The type of f in f(A): a function of a scalar."""
Real = float | Float[Array, ""]
Shifts = Float[Array, "*shifts"]
Budgets = tuple[int, int | None, int | None]
"""The arguments `num_matvecs`, `num_probes` and `num_steps` of a function."""


def real_dtype(operator: Operator) -> jnp.dtype:
    """Return the dtype of the real numbers that go with the operator's working dtype."""
    return jnp.finfo(working_dtype(operator)).dtype


def subject_of(
    operator: Operator, fn: ScalarFunction, combine: ScalarFunction | None = None
) -> MatrixFunction:
    """Return f of a Hermitian operator as the subject of the derivative rule.

    If a tag says so, 0 bounds the spectrum. It is the node, too, if f can be evaluated
    there.
    """
    dtype, negative = real_dtype(operator), is_negative(operator)
    bound = jnp.zeros((), dtype) if is_positive(operator) else None
    node = _zero_if_defined(fn, dtype) if bound is not None or negative else None
    side = -1 if negative else 1
    return MatrixFunction(LinearMap(operator), fn, combine, bound, node, side)


def logarithm_of(
    name: str,
    linear_map: LinearMap,
    shift: Shifts,
    *,
    is_zero: bool,
    control: Number | None = None,
) -> tuple[MatrixFunction, PyTree]:
    """Return log(A + shift I) as the subject of the derivative rule, and the structure of
    its traces. With a `control` c, the function is log x - c (x - 1).

    0 is taken for a bound of the spectrum without a tag: a run that finds an eigenvalue on
    the other side drops it. If the shift is zero, the logarithm is infinite there.
    """

    dtype = jnp.finfo(linear_map.dtype).dtype
    fn, structure = scalar_function(name, lambda x: jnp.log(x + shift), shift.dtype)
    node = None if is_zero else _zero_if_defined(fn, dtype)
    bound = -jax.lax.stop_gradient(jnp.min(shift))
    if control is None:
        return MatrixFunction(linear_map, fn, bound=bound, node=node), structure
    part = lambda x: jnp.log(x + shift) - control * (x - 1)  # noqa: E731
    sampled, _ = scalar_function(name, part, shift.dtype)
    return Controlled(linear_map, sampled, bound=bound, node=node, plain=fn), structure


class Controlled(MatrixFunction):
    """log x - c (x - 1) of W A W*, whose trace is known. `plain` is log x.

    The known trace does not change with A and W if W is made of the entries of A. If W is
    held constant, what A adds to the derivative of the trace is not known, so that the
    derivative is then that of log x.
    """

    plain: Flat = eqx.field(kw_only=True)

    def along(self, tangent: Any) -> MatrixFunction:
        is_moved = bool(jax.tree.leaves(getattr(tangent, "white", None)))
        return self if is_moved else replace(self, fn=self.plain)


def _zero_if_defined(fn: ScalarFunction, dtype: jnp.dtype) -> Float[Array, ""] | None:
    """Return zero, or None if f is known not to be finite there."""
    if is_concrete(fn):
        with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
            if not np.all(np.isfinite(fn(jnp.zeros((), dtype)))):
                return None
    return jnp.zeros((), dtype)
