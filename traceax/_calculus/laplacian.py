"""The Laplacian of a function: the trace of its Hessian."""

from __future__ import annotations

from jaxtyping import PRNGKeyArray, PyTree

from traceax._calculus.curvature import Curvature, sampled_laplacian
from traceax._calculus.point import Field, Point, checked_point
from traceax._core.closure import closed
from traceax._core.estimate import Estimate
from traceax._core.function_checks import (
    check_inexact_values,
)
from traceax._probes.samplers import Sampler, rademacher


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
    - `sampler`: draws the probes, with E[z z*] = I. Default `rademacher`, blind to the
      Hessian's diagonal.
    - `batch_size`: how many probes live at a time, a Python int of at least 1 (for
      `probing`, its number of colours). Default `None`, all. The numbers are the same; they
      are drawn and pushed forwards again in a gradient rather than stored. `orthogonal` and
      samplers of your own still draw all probes together.

    **Returns** an `Estimate` with the structure of what `fn` returns (at least 32 bits).
    `standard_error` is that of a mean of independent samples; `inf` for one; 0 where n
    directions were spent. Where `fn` is an estimate itself (the Laplacian of a Laplacian),
    its probes are the same for all of these, and what it is wrong by is not in the bar.

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
    x = checked_point("laplacian", fn, x, key, num_matvecs)
    converted = closed(fn, x, args)
    subject = Curvature(converted, x, args)
    check_inexact_values("laplacian", subject.result)
    return sampled_laplacian("laplacian", subject, key, num_matvecs, sampler, batch_size)
