"""What every estimator returns."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import betainc
from jaxtyping import Array, Float, Inexact, Int, PyTree, Real


class Estimate(eqx.Module):
    """An estimate, its standard error, and what it cost.

    It is a pytree: return it from `jax.jit`, batch it with `jax.vmap`, stack it with
    `jax.lax.scan`. Only `value` is differentiable.

    **Attributes**

    - `value`: the estimate. An array of shape `()` for a trace; for a diagonal, a pytree
      with the operator's input structure.
    - `standard_error`: real, same structure as `value`: the standard deviation of
      `value`, estimated from the same probes, with a floor at the rounding error of the
      operator's dtype. `inf` if a single probe cannot tell; `0` if `value` is exact.
      Reverse-mode differentiation through it raises an error that says so; its
      forward-mode tangent is NaN. Wrap it in `jax.lax.stop_gradient` to weight a loss.
    - `num_matvecs`: the number of operator applications spent, adjoint ones included.
    - `degrees_of_freedom`: of Student's distribution in `interval`: how well the probes
      determine `standard_error`. Fewer than their number less one where samples are skewed.

    **Example**

    ```python
    >>> import jax, lineax as lx, traceax as tx
    >>> operator = lx.DiagonalLinearOperator(jax.numpy.arange(1.0, 101.0))
    >>> estimate = tx.xtrace(operator, jax.random.key(0), 40)
    >>> low, high = estimate.interval(0.95)
    >>> bool(low < 5050.0 < high)
    True

    ```
    """

    value: PyTree[Inexact[Array, "..."]]
    standard_error: PyTree[Float[Array, "..."]]
    num_matvecs: int | Int[Array, "..."]
    degrees_of_freedom: float | Real[Array, "..."] = 1e6

    def interval(self, level: float = 0.95) -> tuple[PyTree[Array], PyTree[Array]]:
        """A two-sided Student-t confidence interval for the exact value.

        **Arguments**

        - `level`: the probability, strictly between 0 and 1, with which the interval is
          meant to hold the exact value. Default 0.95.

        **Returns** `(low, high)`, each with the structure and shape of `value`.

        **Raises** `ValueError` if `level` is not between 0 and 1; `TypeError` if `value`
        is complex, because a complex number has no low and high end: take the interval of
        an `Estimate` of its real part.

        **Derivatives**: none; the ends depend on `standard_error`, which refuses.

        **Cost**: no operator applications.
        """
        if isinstance(level, (int, float)) and not 0 < level < 1:
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

        def ends(value: Array, error: Array) -> tuple[Array, Array]:
            degrees = jnp.asarray(self.degrees_of_freedom)
            width = error * _student_quantile(level, degrees, error.dtype)
            width = jnp.where(error == 0, 0, width)
            return value - width, value + width

        pairs = jax.tree.map(ends, self.value, self.standard_error)
        outer, inner = jax.tree.structure(self.value), jax.tree.structure((0, 0))
        low, high = jax.tree.transpose(outer, inner, pairs)
        return low, high


def _student_quantile(level: float, degrees: Array, dtype: jnp.dtype) -> Real[Array, "..."]:
    """The t with P(|T| <= t) = level, T having Student's distribution.

    P(|T| <= t) = I_y(1/2, degrees/2) with y = t^2 / (degrees + t^2), the regularised
    incomplete beta function; it increases in y, so y is found by bisection. Traced, since
    the degrees of freedom become an array as soon as an `Estimate` leaves `jax.jit`.
    """
    degrees = jnp.clip(degrees, 0.25, 1e6).astype(dtype)
    half = jnp.asarray(0.5, dtype)

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = (low + high) / 2
        below = betainc(half, degrees / 2, middle) < level
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    bracket = jnp.zeros_like(degrees), jnp.ones_like(degrees)
    y, _ = jax.lax.fori_loop(0, 60, halve, bracket)
    return jnp.sqrt(degrees * y / (1 - y))
