"""Squares of estimates without bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from traceax._core.checks import check_callable, check_key, check_returned
from traceax._core.estimate import Estimate, nondifferentiable

Result = TypeVar("Result")


def unbiased_square(
    estimate_fn: Callable[[PRNGKeyArray], Result], key: PRNGKeyArray
) -> Result:
    """Estimate |t|^2 without bias, where `estimate_fn(key)` estimates t without bias.

        value = Re conj(a) b,    a and b estimates of t with independent keys

    The mean of the square of one estimate is too large by the variance of the estimate, and
    a network that is trained on it converges to something else than the minimum of t^2. The
    product of two independent estimates has the mean t^2, and so has its gradient.

    **Arguments** (`key` and errors are in the guide's conventions)

    - `estimate_fn`: a function of a key that returns an `Estimate`, or an array or pytree
      of arrays made from one, such as the residual `lambda key: tx.laplacian(u, x, key,
      1).value - f(x)`. It is called once, on a batch of two keys.

    **Returns** the square, entry by entry, real: an `Estimate` if `estimate_fn` returns
    one, else arrays. It may be negative. `standard_error` is that of a product; of two
    estimates of one probe each it is computed from their difference.

    **Derivatives**: those of `estimate_fn`, unbiased if it has unbiased ones. **Cost**:
    twice that of `estimate_fn`. At equal cost one estimate with twice the probes has the
    same spread where t dominates, and a bias.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> operator = lx.MatrixLinearOperator(jnp.array([[1.0, 2.0], [2.0, 3.0]]))
        >>> once = lambda key: tx.hutchinson_trace(operator, key, 1).value
        >>> keys = jax.random.split(jax.random.key(0), 10_000)
        >>> squares = jax.vmap(lambda key: tx.unbiased_square(once, key))(keys)
        >>> bool(abs(squares.mean() - 4.0**2) < 1.0)  # the mean of once(key)**2 is 32
        True

    **Reference**: Baird (1995), Residual algorithms: reinforcement learning with function
    approximation, ICML, for two independent samples; Hu et al. (2024), arXiv:2312.14499,
    for residuals of differential equations.
    """
    cure = "Pass lambda key: traceax.trace(operator, key), say."
    check_callable("unbiased_square", "estimate_fn", estimate_fn, "of a key", cure)
    check_key("unbiased_square", key)
    # A leaf that is not an array, a number of applications say, gets no batch axis.
    twice = eqx.filter_vmap(estimate_fn, out_axes=eqx.if_array(0))
    both = twice(jax.random.split(key))
    if isinstance(both, Estimate):
        return _square(both)  # pyright: ignore[reportReturnType]
    check_returned("unbiased_square", "estimate_fn", both, "numbers", "an Estimate, or ")
    return jax.tree.map(_product, both)


def _product(pair: Array) -> Array:
    return (pair[0].conj() * pair[1]).real


def _square(both: Estimate) -> Estimate:
    def error(value: Array, own: Array) -> Array:
        apart = jnp.abs(value[0] - value[1]) / 2**0.5
        own = jnp.where(jnp.isinf(own), apart, own)
        sizes = jnp.abs(value)
        return nondifferentiable(jnp.hypot(sizes[0] * own[1], sizes[1] * own[0]))

    own = jax.lax.stop_gradient(both.standard_error)
    return Estimate(
        value=jax.tree.map(_product, both.value),
        standard_error=jax.tree.map(error, both.value, own),
        num_matvecs=_total(both.num_matvecs),
        degrees_of_freedom=_at_least_one(_total(both.degrees_of_freedom)),
    )


def _at_least_one(degrees: Any) -> Any:
    return jnp.maximum(degrees, 1.0) if eqx.is_array(degrees) else max(degrees, 1.0)


def _total(count: Any) -> Any:
    """The total of both estimates; an array if each decided at run time."""
    return jnp.sum(count, axis=0, dtype=count.dtype) if eqx.is_array(count) else 2 * count
