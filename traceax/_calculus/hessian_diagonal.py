"""Traces and diagonals of derivatives, for losses."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree

from traceax._calculus.curvature import Curvature, sampled_laplacian
from traceax._core.checks import check_budget, check_key
from traceax._core.estimate import Estimate
from traceax._core.function_checks import (
    check_field,
    check_inexact_values,
    check_same_structure,
    check_scalar_values,
)
from traceax._probes.samplers import Sampler, rademacher
from traceax._traces.hutchinson import sampled_diagonal, sampled_trace

Point = PyTree[Inexact[Array, "..."]]
Field = Callable[[Any, Any], Any]


def divergence(
    fn: Field,
    x: Point,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    args: PyTree = None,
    sampler: Sampler = rademacher,
    batch_size: int | None = None,
) -> Estimate:
    """Estimate the divergence of a vector field at x, the trace of its Jacobian.

        value = mean of v_i* (d fn/dx) v_i

    Unbiased. Exact if `num_matvecs` reaches the number n of entries of x. What a
    continuous normalising flow integrates along its path. Under `jax.jit` it shares the
    forward pass of `fn(x, args)`; to share the backward pass of a gradient as well, use
    `y, push = jax.linearize(...)` for both, and `hutchinson_trace` of
    `lx.FunctionLinearOperator(push, structure)`.

    **Arguments**

    - `fn`: a function `fn(x, args)` that returns what `x` is like. Whatever it depends on
      may be in `args`, in `fn` itself if it is an `eqx.Module`, or closed over.
    - `x`: one point, a pytree of real arrays. Use `jax.vmap` for a batch, with a key for
      each point; inside the vector field of a flow, so that one solve is of the batch.
    - `key`: a JAX random key.
    - `num_matvecs`: how many Jacobian-vector products, one a probe, a Python int of at
      least 1. From n on, n are spent.
    - `args`: passed on to `fn`. Default `None`.
    - `sampler`: draws the probes. Default `rademacher`.
    - `batch_size`: how many probes live at a time, a Python int of at least 1 (for
      `probing`, its number of colours). Default `None`, all. The numbers are the same; they
      are drawn and pushed forwards again in a gradient rather than stored. `orthogonal` and
      samplers of your own still draw all probes together.

    **Returns** an `Estimate` of shape `()`, in the dtype of x (at least 32 bits).
    `standard_error` is that of a mean of independent samples; `inf` for one; 0 where n
    products were spent.

    **Raises** `TypeError` if `fn` is not callable, x has leaves that are not real numbers,
    `key` is not a random key, `num_matvecs` or `batch_size` not a Python int; `ValueError`
    if `fn` returns another structure than x, if x is empty, if `num_matvecs` or
    `batch_size` is below 1.

    **Derivatives**: forward and reverse, to any order, unbiased, in x, `args`, and whatever
    `fn` closes over: exactly those of the value.

    **Cost**: `num_matvecs` Jacobian-vector products, forwards, in one batch.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, traceax as tx
    >>> field = lambda x, scale: scale * jnp.sin(x)
    >>> x = jnp.linspace(0.0, 1.0, 5)
    >>> estimate = tx.divergence(field, x, jax.random.key(0), 5, args=2.0)
    >>> bool(jnp.isclose(estimate.value, 2 * jnp.cos(x).sum()))
    True

    ```

    **Reference**: Hutchinson (1989), Communications in Statistics 18(3); for flows,
    Grathwohl et al. (2019), FFJORD, arXiv:1810.01367.
    """
    x = _point("divergence", fn, x, key, num_matvecs)
    operator = lx.JacobianLinearOperator(fn, x, args)
    check_same_structure("divergence", operator.in_structure(), operator.out_structure())
    return sampled_trace("divergence", operator, key, num_matvecs, sampler, batch_size)


def laplacian(
    fn: Field,
    x: Point,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    args: PyTree = None,
    sampler: Sampler = rademacher,
    batch_size: int | None = None,
) -> Estimate:
    """Estimate the Laplacian of a function at x, the trace of its Hessian.

        value = mean of d2/dt2 fn(x + t v_i, args) at t = 0

    Unbiased. Exact if `num_matvecs` reaches the number n of entries of x. Computed forwards
    in collapsed Taylor mode: one sweep for all probes together, which carries a first
    derivative for each probe, but the sum of the second ones only. Of a residual's square
    in a loss use `unbiased_square`.

    **Arguments**

    - `fn`: a function `fn(x, args)` of one number; or of an array or pytree of numbers,
      real or complex, each of which has a Laplacian. Whatever it depends on may be in
      `args`, in `fn` itself if it is an `eqx.Module`, or closed over.
    - `x`: one point, a pytree of real arrays. Use `jax.vmap` for a batch, with a key for
      each point.
    - `key`: a JAX random key.
    - `num_matvecs`: how many directions, one a probe, a Python int of at least 1. From n
      on, n are spent.
    - `args`: passed on to `fn`. Default `None`.
    - `sampler`: draws the probes. Default `rademacher`, blind to the Hessian's diagonal.
    - `batch_size`: how many probes live at a time, a Python int of at least 1 (for
      `probing`, its number of colours). Default `None`, all. The numbers are the same; they
      are drawn and pushed forwards again in a gradient rather than stored. `orthogonal` and
      samplers of your own still draw all probes together.

    **Returns** an `Estimate` with the structure of what `fn` returns (at least 32 bits).
    `standard_error` is that of a mean of independent samples; `inf` for one; 0 where n
    directions were spent.

    **Raises** `TypeError` if `fn` is not callable, x has leaves that are not real numbers,
    `key` is not a random key, `num_matvecs` or `batch_size` not a Python int; `ValueError`
    if x is empty, if `num_matvecs` or `batch_size` is below 1.

    **Derivatives**: forward and reverse, to any order, unbiased, in x, `args`, and whatever
    `fn` closes over: exactly those of the value. `fn` must be differentiable forwards
    twice: a `jax.custom_vjp` in it raises JAX's error.

    **Cost**: that of k + 1 forward passes of `fn` for k = `num_matvecs`, where k
    Hessian-vector products cost 2k and a backward pass. The standard error needs 2k passes
    of its own: under `jax.jit` they are made only if it is used.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, traceax as tx
    >>> x = jnp.ones(3)
    >>> estimate = tx.laplacian(lambda x, args: jnp.sum(x**3), x, jax.random.key(0), 3)
    >>> print(estimate.value)
    18.0

    ```

    **Reference**: Hutchinson (1989), Communications in Statistics 18(3); Dangel et al.
    (2025), Collapsing Taylor mode automatic differentiation, arXiv:2505.13644.
    """
    x = _point("laplacian", fn, x, key, num_matvecs)
    converted = eqx.filter_closure_convert(fn, x, args)
    subject = Curvature(converted, x, args)
    check_inexact_values("laplacian", subject.result)
    return sampled_laplacian("laplacian", subject, key, num_matvecs, sampler, batch_size)


def hessian_diagonal(
    fn: Field,
    x: Point,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    args: PyTree = None,
    sampler: Sampler = rademacher,
    batch_size: int | None = None,
) -> Estimate:
    """Estimate the diagonal of a function's Hessian at x: d2 fn/dx_a2 for every entry a.

    By Hessian-vector products with probes of random sign, compared entry by entry with
    the probes (`hutchinson_diagonal`). Unbiased. Exact if the Hessian is diagonal, or if
    `num_matvecs` reaches the number n of entries of x.

    **Arguments**

    - `fn`: a function `fn(x, args)` that returns one real number. Whatever it depends on
      may be in `args`, in `fn` itself if it is an `eqx.Module`, or closed over.
    - `x`: one point, a pytree of real arrays: a network's parameters, say.
    - `key`: a JAX random key.
    - `num_matvecs`: how many Hessian-vector products, one a probe, a Python int of at
      least 1. From n on, n are spent.
    - `args`: passed on to `fn`. Default `None`.
    - `sampler`: draws the probes. Default `rademacher`.
    - `batch_size`: how many probes live at a time, a Python int of at least 1 (for
      `probing`, its number of colours). Default `None`, all. The numbers are the same; they
      are drawn and the Hessian applied again in a gradient rather than stored. `orthogonal`
      and samplers of your own still draw all probes together.

    **Returns** an `Estimate` with the structure of x (leaves of at least 32 bits).
    `standard_error` is, entry by entry, that of a mean of independent samples; `inf` for
    one; 0 where n products were spent.

    **Raises** `TypeError` if `fn` is not callable or returns anything but one real number,
    x has leaves that are not real numbers, `key` is not a random key, `num_matvecs` not a
    Python int; `ValueError` if x is empty, if `num_matvecs` or `batch_size` is below 1.

    **Derivatives**: forward and reverse, to any order, unbiased, in x, `args`, and whatever
    `fn` closes over.

    **Cost**: `num_matvecs` Hessian-vector products, forwards over one backward pass, in one
    batch: about four times what `fn` costs, each.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, traceax as tx
    >>> fn = lambda x, args: jnp.sum(x**3)
    >>> print(tx.hessian_diagonal(fn, jnp.arange(3.0), jax.random.key(0), 1).value)
    [ 0.  6. 12.]

    ```

    **Reference**: Bekas, Kokiopoulou and Saad (2007), An estimator for the diagonal of a
    matrix, Applied Numerical Mathematics 57(11-12), doi:10.1016/j.apnum.2007.01.003.
    """
    x = _point("hessian_diagonal", fn, x, key, num_matvecs)
    check_scalar_values("hessian_diagonal", eqx.filter_eval_shape(fn, x, args))

    def gradient(x: Point, args: PyTree) -> Point:
        return jax.grad(fn)(x, args)

    operator = lx.JacobianLinearOperator(gradient, x, args, tags=lx.symmetric_tag)
    return sampled_diagonal(
        "hessian_diagonal", operator, key, num_matvecs, sampler, batch_size
    )


def _point(
    name: str, fn: object, x: PyTree, key: PRNGKeyArray, num_matvecs: object
) -> Point:
    """x as strongly typed arrays of floats, the arguments checked."""
    check_field(name, fn, x)
    check_key(name, key)
    check_budget(name, num_matvecs)

    def inexact(leaf: Any) -> Array:
        dtype = jnp.result_type(leaf)
        dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)
        return jax.lax.convert_element_type(leaf, dtype)

    return jax.tree.map(inexact, x)
