"""What every estimator returns."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer
from jax.scipy.special import betainc
from jaxtyping import Array, Bool, Float, Inexact, Int, PyTree, Real

from traceax._core.words import formatted, in_words, is_here


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

    def interval(self, level: float = 0.95) -> tuple[PyTree[Array], PyTree[Array]]:
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
