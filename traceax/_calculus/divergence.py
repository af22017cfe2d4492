"""The divergence of a vector field: the trace of its Jacobian."""

from __future__ import annotations

import lineax as lx
from jaxtyping import PRNGKeyArray, PyTree

from traceax._calculus.sampled import Field, Point, checked_point
from traceax._core.estimate import Estimate
from traceax._core.function_checks import (
    check_same_structure,
)
from traceax._estimators.driver import estimate
from traceax._estimators.hutchinson import HUTCHINSON_TRACE
from traceax._probes.draw import for_mean
from traceax._probes.samplers import Sampler
from traceax._probes.stream import ProgressMeter


def divergence(
    fn: Field,
    x: Point,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    args: PyTree = None,
    sampler: Sampler | None = None,
    batch_size: int | None = None,
    progress_meter: ProgressMeter | None = None,
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
    - `key`: a JAX random key. In a flow that is solved under diffrax's `BacksolveAdjoint`
      it must be in the `args` of the solve, as all that the vector field depends on: closed
      over it is a tracer that JAX refuses (second example).
    - `num_matvecs`: how many Jacobian-vector products, one a probe, a Python int of at
      least 1. From n on, n are spent.
    - `args`: passed on to `fn`. Default `None`.
    - `sampler`: draws the probes, with E[z z*] = I. Default `None`: signs, blind to the
      Jacobian's diagonal, `rademacher`, or `hadamard` where there are probes for an eighth
      of the dimensions (with half of them, .71 of the error).
    - `batch_size`: how many probes live at a time, a Python int of at least 1 (for
      `probing`, its number of colours). Default `None`, all. The numbers are the same; they
      are drawn and pushed forwards again in a gradient rather than stored. `orthogonal`,
      `hadamard` and samplers of your own still draw all probes together.
    - `progress_meter`: shows how far along the batches of the value are: one of diffrax's
      progress meters, `diffrax.TextProgressMeter()`, say, or any object with their methods.
      Default `None`: nothing is shown; nor is it without `batch_size`.

    **Returns** an `Estimate` of shape `()`, in the dtype of x (at least 32 bits).
    `standard_error` is that of a mean of independent samples; `inf` for one; 0 where n
    products were spent. Where `fn` is an estimate itself, its probes are the same for all
    of these, and what it is wrong by is not in the bar.

    **Raises** `TypeError` if `fn` is not callable, x has leaves that are not real numbers,
    `key` is not a random key, `num_matvecs` or `batch_size` not a Python int, the sampler
    not a function, `progress_meter` no progress meter; `ValueError` if `fn` returns another
    structure than x, if x is empty, if `key` is an array of keys, if `num_matvecs` or
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

    The change of a log-density along a flow, with gradients by solving backwards:

    ```python
    >>> import diffrax
    >>> def flow(t, state, args):
    ...     scale, key = args
    ...     growth = tx.divergence(field, state[0], key, 2, args=scale).value
    ...     return field(state[0], scale), growth
    >>> def change(scale, key):
    ...     term, solver = diffrax.ODETerm(flow), diffrax.Tsit5()
    ...     start, args = (x, 0.0), (scale, key)
    ...     how = {"adjoint": diffrax.BacksolveAdjoint()}
    ...     path = diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.1, start, args, **how)
    ...     return path.ys[1][0]
    >>> slope = jax.jit(jax.grad(change))(0.5, jax.random.key(0))
    >>> bool(jnp.isfinite(slope))
    True

    ```

    **Reference**: Hutchinson (1989), Communications in Statistics 18(3); for flows,
    Grathwohl et al. (2019), FFJORD, arXiv:1810.01367.
    """
    x = checked_point("divergence", fn, x, key, num_matvecs)
    operator = lx.JacobianLinearOperator(fn, x, args)
    check_same_structure("divergence", operator.in_structure(), operator.out_structure())
    sampler = for_mean(sampler, operator, num_matvecs)
    return estimate(
        HUTCHINSON_TRACE,
        operator,
        key,
        num_matvecs,
        sampler=sampler,
        batch_size=batch_size,
        progress_meter=progress_meter,
        name="divergence",
    )
