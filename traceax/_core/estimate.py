"""The result of every estimator: an estimate with its error bar, its cost and its name.

The error bar is `standard_error`, one standard error of the value. The derivative rule
(`_core.rule`) freezes the numbers that it is made of, so it has no derivative, and asking
for one is never silently zero: it is an error in reverse mode and infinite in forward mode
(`error_tangent`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer
from jax.scipy.special import betainc
from jaxtyping import Array, ArrayLike, Bool, Float, Inexact, Int, PyTree, Real

from traceax._core.canonical import compiled
from traceax._core.checks import require, require_type, written
from traceax._core.printing import formatted, in_words, is_readable


class Name(str):
    """A string that is a pytree without leaves. All names are equal to JAX, so that the
    estimates of different methods have one structure, as conditionals and loops need."""


@dataclass(frozen=True)
class _Any:
    """A name in the structure of a pytree. It is equal to all other names."""

    name: str = field(compare=False)


jax.tree_util.register_pytree_node(
    Name, lambda name: ((), _Any(name)), lambda structure, _: Name(structure.name)
)


def _serialised(kind: type, write: Callable[..., bytes], read: Callable[..., Any]) -> None:
    """Let `jax.export` write and read the auxiliary data of a class of pytrees."""
    how = {"serialize_auxdata": write, "deserialize_auxdata": read}
    name = f"traceax.{kind.__name__}"
    export.register_pytree_node_serialization(kind, serialized_name=name, **how)


_serialised(Name, lambda data: data.name.encode(), lambda name: _Any(name.decode()))


def _array(leaf: Any) -> Any:
    """Return a number of Python as an array of a float or of a complex number."""
    is_number = isinstance(leaf, int | float | complex)
    return jnp.asarray(leaf, jnp.result_type(leaf, float)) if is_number else leaf


_arrays = partial(jax.tree.map, _array)


class Estimate(eqx.Module):
    """An estimate, its standard error, and its cost.

    It is a pytree, so you can return it from `jax.jit`, batch it with `jax.vmap` and stack
    it with `jax.lax.scan`. Only `value` is differentiable. `print` shows it to two digits
    of its error, for example `96.6 ± 3.1 (50 matvecs, xtrace)`, and formats like
    `f"{estimate:.3f}"` work.

    **Attributes** (more on error bars is in the guide's conventions)

    - `value`: an array of shape `()` for a trace. For a diagonal, it is a pytree with the
      operator's input structure. It is NaN if the operator turns out not to satisfy the
      assumptions of the function. `print` then names the possible reasons, and the
      conventions say what to do.
    - `standard_error`: the estimated standard deviation of `value`, real, with the same
      structure. It is `inf` for a single probe, 0 if `value` is exact and NaN if `value`
      is NaN. If a stored matrix is asymmetric beyond rounding, an exact function of it
      still has an error, which is the change that the asymmetry can cause. Differentiating
      `standard_error` raises an error in reverse mode, and gives an infinite result in
      forward mode (0 for stored diagonals).
    - `num_matvecs`: the number of matvecs spent, including matvecs with the adjoint.
    - `degrees_of_freedom`: how well the probes determine `standard_error`, used for
      Student's t in `interval`. It is at most the number of probes less one, and smaller if
      samples are skewed.
    - `converged`: whether `adaptive` or `adaptive_trace` met its tolerance. It is `None`
      for other functions.
    - `grid`: the points at which `spectral_density` was evaluated. It is `None` for other
      functions.
    - `method`: a static string that says how the value was computed. It is `"exact"` or
      names the function that made the estimate, which may be an automatic choice, for
      example `"hutchinson_trace, 36 colours"`. If estimates of two methods meet in
      `jnp.where`, `jax.lax.cond` or a loop, the result names one of them. An estimate that
      goes through your own `jax.jit` as an *argument* has the method of the first call.
    - `quadrature_error`: the part of `standard_error` that comes from quadrature, for
      functions of an operator, with the structure of `value`. It is about the same in every
      run, so `pool` does not reduce it, but more steps do. If it is more than half of
      `standard_error`, derivatives of the value may have a bias that their spread over keys
      does not show. It is 0 for other functions.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> operator = lx.DiagonalLinearOperator(jax.numpy.arange(1.0, 101.0))
        >>> estimate = tx.xtrace(operator, jax.random.key(0), 40)
        >>> low, high = estimate.interval(0.95)
        >>> bool(low < 5050.0 < high)
        True

    **See also**: `pool`, `adaptive`, `unbiased_square`.
    """

    value: PyTree[Inexact[Array | np.ndarray, "..."]] = eqx.field(converter=_arrays)
    standard_error: PyTree[Float[Array | np.ndarray, "..."]] = eqx.field(converter=_arrays)
    num_matvecs: int | Int[Array | np.ndarray, "..."]
    degrees_of_freedom: float | Float[Array, "..."] = 1e6
    converged: Bool[Array, ""] | bool | None = None
    grid: Float[Array | np.ndarray, "*batch points"] | None = None
    method: str = eqx.field(converter=Name, default="")
    quadrature_error: PyTree[float | Float[Array | np.ndarray, "..."]] = 0.0

    def __str__(self) -> str:
        return in_words(self)

    def __format__(self, spec: str) -> str:
        return formatted(self, spec)

    def __repr__(self) -> str:
        return f"<{in_words(self)}>" if is_readable(self) else in_words(self)

    def interval(
        self, level: float | Float[Array | np.ndarray, "*levels"] = 0.95
    ) -> tuple[PyTree[Array], PyTree[Array]]:
        """Return a two-sided Student-t confidence interval for the exact value.

        **Arguments**

        - `level`: the probability, strictly between 0 and 1, that the interval contains the
          exact value, or an array of several. Default 0.95.

        **Returns** `(low, high)`, each with the structure and shape of `value`. An array of
        levels adds its axes in front. They cannot be differentiated. Complex values have no
        interval, so take an `Estimate` of the real part.
        """
        name, cure = "Estimate.interval", "Pass 0.95, for example."
        is_number = isinstance(level, float | int | np.generic | np.ndarray | jax.Array)
        must = "be a number or an array, because it is a probability"
        require_type(is_number, name, "level", must, written(level), cure)
        known = [] if isinstance(level, Tracer) else np.ravel(level)
        must = "be strictly between 0 and 1, because it is a probability"
        require(all(0 < p < 1 for p in known), name, "level", must, written(level), cure)
        is_real = not any(map(jnp.iscomplexobj, jax.tree.leaves(self.value)))
        must, got = "be asked of a real value, as these have an order", "a complex one"
        cure = "Use `value` and `standard_error`, or the operator's Hermitian part."
        require_type(is_real, name, "", must, got, cure)
        if jnp.ndim(level):
            return jax.vmap(self.interval)(jnp.asarray(level))
        degrees = jnp.asarray(self.degrees_of_freedom)

        def width(error: Any) -> Array:
            quantile = compiled(student_quantile, level, degrees.astype(error.dtype))
            # Each estimate of a batch has one quantile for all of its entries.
            quantile = jnp.expand_dims(quantile, range(quantile.ndim, error.ndim))
            return jnp.where(error == 0, 0, error * quantile)

        widths = jax.tree.map(width, self.standard_error)
        low = jax.tree.map(jnp.subtract, self.value, widths)
        return low, jax.tree.map(jnp.add, self.value, widths)


def exportable(example: eqx.Module) -> None:
    """Let `jax.export` write the class of `example`. The class must have no static field:
    then its auxiliary data are the same for all instances, and need not be written."""
    node = jax.tree.structure(example).node_data()
    assert node is not None
    _serialised(type(example), lambda _: b"", lambda _: node[1])


exportable(Estimate(None, None, 0))


def exact_estimate(value: PyTree[Array], spent: int, error: PyTree = None) -> Estimate:
    """Wrap an exact value. Its error is 0 or, if it is known only as far as the operator is
    Hermitian, the given one. If it is NaN, so is its error."""

    def error_of(x: Inexact[Array, "..."], error: Array | float = 0.0) -> Array:
        return jnp.where(jnp.isnan(x), jnp.nan, error).astype(x.real.dtype)

    held = jax.lax.stop_gradient(value)
    if error is None:
        errors = jax.tree.map(error_of, held)
    else:
        errors = jax.tree.map(nondifferentiable, jax.tree.map(error_of, held, error), value)
    return Estimate(value, errors, spent, method="exact")


@eqx.filter_custom_jvp
def nondifferentiable(error: Array, source: Array) -> Array:
    """Return `error`, made of frozen numbers, as the standard error of `source`, which has
    the same shape. If `source` is perturbed, the error has the tangent `error_tangent`."""
    return error


@nondifferentiable.def_jvp
def _nondifferentiable_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    error, tangent = primals[0], tangents[1]
    return error, None if tangent is None else error_tangent(error, tangent.real)


def error_tangent(error: Array, tangent: Array) -> Array:
    """Return the tangent of a standard error: infinite in forward mode, an error in reverse
    mode. The result must depend on `tangent`, the tangent of the value.

    (NaN would stop `jax_debug_nans`.) The condition always holds, but the compiler does not
    know it. So it keeps the dependence, and with it the error of reverse mode.
    """
    return eqxi.nondifferentiable_backward(
        jnp.where(error > -1, jnp.inf, tangent),
        msg="traceax: `standard_error` of an Estimate must not be differentiated, because "
        "the derivative rule freezes what it is made of, but got a cotangent for it. Wrap "
        "it in jax.lax.stop_gradient.",
        symbolic=False,
    )


def student_quantile(level: ArrayLike, degrees: Real[Array, "*n"]) -> Real[Array, "*n"]:
    """Return the t with P(|T| > t) = 1 - level, T having Student's distribution.

    The probability is I_u(degrees/2, 1/2), the regularised incomplete beta function, with
    u = degrees / (degrees + t^2), and it rises with u. Bisection finds log u, from which
    both u and 1 - u follow accurately, because u may be tiny or very close to 1.
    """
    degrees = jnp.clip(degrees, 0.25, 1e4)
    half = jnp.full_like(degrees, 0.5)

    def halve(_: Array | int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = (low + high) / 2
        u, complement = jnp.exp(middle), -jnp.expm1(middle)
        beyond = 1 - betainc(half, degrees / 2, complement)
        below = jnp.where(u < 0.5, betainc(degrees / 2, half, u), beyond) < 1 - level
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    least = jnp.full_like(degrees, jnp.log(jnp.finfo(degrees.dtype).tiny))
    log_u, _ = jax.lax.fori_loop(0, 60, halve, (least, jnp.zeros_like(degrees)))
    return jnp.sqrt(degrees * -jnp.expm1(log_u) / jnp.exp(log_u))
