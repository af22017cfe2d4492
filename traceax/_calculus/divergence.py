"""The divergence of a vector field: the trace of its Jacobian."""

from __future__ import annotations

import lineax as lx
from jaxtyping import PRNGKeyArray, PyTree

from traceax._calculus.sampled import Field, GivenPoint, checked_point
from traceax._core.checks import check_same_structure
from traceax._core.estimate import Estimate
from traceax._estimators.driver import estimate
from traceax._estimators.hutchinson import HUTCHINSON_TRACE
from traceax._probes.draw import for_mean
from traceax._probes.samplers import Sampler
from traceax._probes.stream import ProgressMeter


def divergence(
    fn: Field,
    x: GivenPoint,
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

    Unbiased. Exact if `num_matvecs` reaches the number n of entries of x. Continuous
    normalising flows integrate it along their path. Under `jax.jit` it shares the forward
    pass of `fn(x, args)`; `hutchinson_trace` of a linearised `fn`, as from `jax.linearize`,
    shares the backward pass as well.

    **Arguments** (the others are in the guide's conventions)

    - `fn`: a function `fn(x, args)` that returns the structure of `x`.
    - `key`: for diffrax's `BacksolveAdjoint` it must be in the `args` of the solve, as
      everything that the vector field depends on.
    - `num_matvecs`: the number of Jacobian-vector products, at least 1.
    - `sampler`: default `rademacher`, which is exact for a diagonal Jacobian, or `hadamard`
      where there are probes for an eighth of the dimensions.

    **Derivatives**: exactly those of the value. **Cost**: `num_matvecs` Jacobian-vector
    products, forwards, in one batch.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> field = lambda x, scale: scale * jnp.sin(x)
        >>> x = jnp.linspace(0.0, 1.0, 5)
        >>> estimate = tx.divergence(field, x, jax.random.key(0), 5, args=2.0)
        >>> bool(jnp.isclose(estimate.value, 2 * jnp.cos(x).sum()))
        True

    **Reference**: Hutchinson (1989), Communications in Statistics 18(3); for flows,
    Grathwohl et al. (2019), FFJORD, arXiv:1810.01367.
    """
    x = checked_point("divergence", fn, x, key, num_matvecs)
    operator = lx.JacobianLinearOperator(fn, x, args)
    check_same_structure("divergence", operator.in_structure(), operator.out_structure())
    sampler = for_mean(sampler, operator, num_matvecs)
    how = sampler, batch_size, progress_meter
    method = HUTCHINSON_TRACE._replace(name="divergence")
    return estimate(method, operator, key, num_matvecs, *how)
