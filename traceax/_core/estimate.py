"""What every estimator returns.

How estimates print.

A number is shown to two digits of its standard error, an exact one as it is. An array of
more than ten numbers is shown by its shape and the norm of its errors, relative to that of
its values. Values that cannot be read here (traced, abstract, on other machines) print as
Equinox prints any module.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer
from jax.scipy.special import betainc
from jaxtyping import Array, Bool, Float, Inexact, Int, PyTree, Real

from traceax._core.canonical import is_concrete

_MOST_SHOWN = 10


def in_words(estimate: Any) -> str:
    """`96.6 ± 3.1 (50 matvecs)`, or a line for each leaf."""
    if not is_here(estimate):
        return eqx.tree_pformat(estimate)
    rows = leaf_rows(estimate)
    total = int(np.sum(np.asarray(estimate.num_matvecs)))  # of a batch, too
    cost = f"({total} matvec{'s' if total != 1 else ''})"
    if len(rows) == 1 and not rows[0][0]:
        return f"{rows[0][1]} {cost}"
    return "\n".join([f"{path}: {words}" for path, words in rows] + [cost])


def formatted(estimate: Any, spec: str) -> str:
    """One number and its error, each by `spec`."""
    if not spec:
        return str(estimate)
    leaves = jax.tree.leaves(estimate.value)
    if not is_here(estimate) or len(leaves) != 1 or np.ndim(leaves[0]):
        shapes = jax.tree.map(np.shape, estimate.value)
        raise TypeError(
            "traceax.Estimate.__format__(spec=...) must be asked of one number whose value "
            f"is there, but got {spec!r} for values of shape {shapes}. Format entries of "
            "`value` and `standard_error`."
        )
    value = np.asarray(leaves[0]).item()
    error = np.asarray(jax.tree.leaves(estimate.standard_error)[0]).item()
    shown = format(value, spec)
    return shown if error == 0 else f"{shown} ± {error:{spec}}"


def is_here(estimate: Any) -> bool:
    """Whether every number in it can be looked at."""

    def here(leaf: Any) -> bool:
        if isinstance(leaf, jax.Array):
            return leaf.is_fully_addressable and not leaf.is_deleted()
        return isinstance(leaf, int | float | complex | np.ndarray | np.generic)

    leaves = jax.tree.leaves(estimate)
    same = jax.tree.structure(estimate.value) == jax.tree.structure(estimate.standard_error)
    return bool(leaves) and same and is_concrete(leaves) and all(map(here, leaves))


def leaf_rows(estimate: Any) -> list[tuple[str, str]]:
    """Where each leaf is, and what it says."""
    pairs = zip(
        jax.tree.leaves_with_path(estimate.value),
        jax.tree.leaves(estimate.standard_error),
        strict=True,
    )
    return [
        (
            jax.tree_util.keystr(path, simple=True, separator="."),
            leaf_in_words(np.asarray(value), np.asarray(error)),
        )
        for (path, value), error in pairs
    ]


def leaf_in_words(value: np.ndarray, error: np.ndarray) -> str:
    if value.size > _MOST_SHOWN:
        return f"{value.shape} {_relative_error(value, error)}"
    pairs = zip(value.ravel(), error.ravel(), strict=True)
    return ", ".join(number(v, e.item()) for v, e in pairs)


def _relative_error(value: np.ndarray, error: np.ndarray) -> str:
    if not np.any(error):
        return "exact"
    with np.errstate(all="ignore"):
        error = error / np.max(np.abs(value))
        value = value / np.max(np.abs(value))
        share = np.linalg.norm(error) / np.linalg.norm(value)
    return f"± {100 * share:.2g} % in norm"


def number(value: np.generic, error: float) -> str:
    """To two digits of the error."""
    if error == 0:
        return str(value)
    if not np.isfinite(error) or not np.isfinite(value):
        shown = f"{value.item():.6g}"
        shown = f"({shown})" if np.iscomplexobj(value) else shown
        return f"{shown} ± {error:.2g}"
    size = max(abs(value.item()), error)
    power = int(np.floor(np.log10(size) + 1e-6))
    if -4 <= power < 6:
        return _plain(value.item(), error)
    # A power of ten that double precision holds, of what single precision may not.
    scale = 10.0 ** max(power, -300)
    return f"({_plain(value.item() / scale, error / scale)})e{max(power, -300):+03d}"


def _plain(value: float | complex, error: float) -> str:
    # A little more, for what single precision makes of 0.1.
    decimals = max(0, 1 - int(np.floor(np.log10(error) + 1e-6)))
    shown = f"{value:.{min(decimals, 16)}f}"
    shown = f"({shown})" if isinstance(value, complex) else shown
    return f"{shown} ± {error:.1e}" if decimals > 6 else f"{shown} ± {error:.{decimals}f}"


class Estimate(eqx.Module):
    """An estimate, its standard error, and what it cost.

    It is a pytree: return it from `jax.jit`, batch it with `jax.vmap`, stack it with
    `jax.lax.scan`. Only `value` is differentiable. `print` shows it to two digits of its
    error, `96.6 ± 3.1 (50 matvecs)`, and formats like `f"{estimate:.3f}"` work.

    **Attributes** (more on error bars is in the guide's conventions)

    - `value`: an array of shape `()` for a trace; for a diagonal, a pytree with the
      operator's input structure.
    - `standard_error`: real, with the structure of `value`: the standard deviation of
      `value`, estimated from the same probes, at least the rounding error of the operator's
      dtype. `inf` for a single probe, 0 if `value` is exact. Differentiation in reverse
      mode raises an error, the tangent in forward mode is infinite (0 for a stored
      diagonal). To weight a loss by it, use `jax.lax.stop_gradient`.
    - `num_matvecs`: the number of operator applications spent, adjoint ones included.
    - `degrees_of_freedom`: of Student's t in `interval`: how well the probes determine
      `standard_error`. At most their number less one, and fewer where samples are skewed.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> operator = lx.DiagonalLinearOperator(jax.numpy.arange(1.0, 101.0))
        >>> estimate = tx.xtrace(operator, jax.random.key(0), 40)
        >>> low, high = estimate.interval(0.95)
        >>> bool(low < 5050.0 < high)
        True
    """

    value: PyTree[Inexact[Array, ...]]
    standard_error: PyTree[Float[Array, ...]]
    num_matvecs: int | Int[Array, ...]
    degrees_of_freedom: float | Float[Array, ...] = 1e6

    def __str__(self) -> str:
        return in_words(self)

    def __format__(self, spec: str) -> str:
        return formatted(self, spec)

    def __repr__(self) -> str:
        return f"<{in_words(self)}>" if is_here(self) else in_words(self)

    def interval(
        self, level: float | Float[Array, ""] = 0.95
    ) -> tuple[PyTree[Array], PyTree[Array]]:
        """A two-sided Student-t confidence interval for the exact value.

        **Arguments**

        - `level`: the probability, strictly between 0 and 1, that the interval contains the
          exact value. Default 0.95.

        **Returns** `(low, high)`, each with the structure and shape of `value`; they cannot
        be differentiated. **Raises** `ValueError` if `level` is not between 0 and 1;
        `TypeError` if it is not a number, or if `value` is complex: take the interval of an
        `Estimate` of its real part.

        **Cost**: no operator applications.
        """
        if not isinstance(level, float | int | np.generic | np.ndarray | jax.Array):
            raise TypeError(
                "traceax.Estimate.interval(level=...) must be a number, because it is a "
                f"probability, but got {level!r}. Pass 0.95, say."
            )
        known = [] if isinstance(level, Tracer) else np.ravel(level)
        if not all(0 < number < 1 for number in known):
            raise ValueError(
                "traceax.Estimate.interval(level=...) must be strictly between 0 and 1, "
                f"because it is a probability, but got {level!r}. Pass 0.95, say."
            )
        if any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(self.value)):
            raise TypeError(
                "traceax.Estimate.interval(...) must be asked of a real value, because "
                "complex numbers have no order, but got a complex value. Use `value` and "
                "`standard_error` directly, or estimate the operator's Hermitian part."
            )

        degrees = jnp.asarray(self.degrees_of_freedom)

        def ends(value: Array, error: Array) -> tuple[Array, Array]:
            quantile = student_quantile(level, degrees.astype(error.dtype))
            # Each estimate of a batch has its own, for all of its entries.
            entries = (1,) * (error.ndim - quantile.ndim)
            quantile = quantile.reshape(quantile.shape + entries)
            width = jnp.where(error == 0, 0, error * quantile)
            return value - width, value + width

        pairs = jax.tree.map(ends, self.value, self.standard_error)
        outer, inner = jax.tree.structure(self.value), jax.tree.structure((0, 0))
        low, high = jax.tree.transpose(outer, inner, pairs)
        return low, high


class AdaptiveEstimate(Estimate):
    """An `Estimate` that was to meet a tolerance.

    **Attributes**, besides those of `Estimate`:

    - `converged`: whether two standard errors fit the tolerance. Never true for NaN.
    """

    converged: Bool[Array, ""] | bool = False


def exportable(example: eqx.Module) -> None:
    """Let `jax.export` write the class of `example`, which has no static field: so there is
    nothing to write of it, and all that are read are alike."""
    kind, node = type(example), jax.tree.structure(example).node_data()
    assert node is not None
    export.register_pytree_node_serialization(
        kind,
        serialized_name=f"traceax.{kind.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: node[1],
    )


exportable(Estimate(0.0, 0.0, 0))
exportable(AdaptiveEstimate(0.0, 0.0, 0))


@jax.jit
def student_quantile(
    level: float | Float[Array, ""], degrees: Real[Array, ...]
) -> Real[Array, ...]:
    """The t with P(|T| > t) = 1 - level, T having Student's distribution.

    P(|T| > t) = I_u(degrees/2, 1/2) with u = degrees / (degrees + t^2), the regularised
    incomplete beta function; it increases in u. Log u is found by bisection: 1 - u cannot
    tell the long tails of few degrees apart, nor u the narrow ones of many. Traced, since
    the degrees of freedom become an array when an `Estimate` leaves `jax.jit`.
    """
    dtype = degrees.dtype
    degrees = jnp.clip(degrees, 0.25, 1e4)
    half = jnp.asarray(0.5, dtype)

    def tail(log_u: Array) -> Array:
        u, complement = jnp.exp(log_u), -jnp.expm1(log_u)
        direct = betainc(degrees / 2, half, u)
        return jnp.where(u < 0.5, direct, 1 - betainc(half, degrees / 2, complement))

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = (low + high) / 2
        below = tail(middle) < 1 - level
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    least = jnp.full_like(degrees, jnp.log(jnp.finfo(dtype).tiny))
    log_u, _ = jax.lax.fori_loop(0, 60, halve, (least, jnp.zeros_like(degrees)))
    return jnp.sqrt(degrees * -jnp.expm1(log_u) / jnp.exp(log_u))
