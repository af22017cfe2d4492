"""XTrace: the leave-one-out estimator of any square operator.

The notation is explained in `readouts` (`leave_one_out`). Since w_i is independent of P_i
and isotropic,

    tr A = E[ tr(P_i A P_i) + w_i* (I - P_i) A (I - P_i) w_i ]        for every i.

The right-hand side has k estimates, because all probes are exchangeable. Each uses k - 1
probes for the sketch and one for the remainder, and their mean is the value. With Z = A Q
and H = Q* Z, all of them are computed by products of blocks:

    A mu_i = y_i - Z x_i        e_i = tr H - s_i* H s_i + c_i mu_i* A mu_i

Resphering removes all of the variance that a multiple of I contributes. The derivative is
read with the frozen weight of the mean of the e_i, which has 2k columns:

    W = Q (I - S S*/k) Q* + sum_i mu_i (c_i/k) mu_i*.

The e_i share probes, so their spread understates the error of their mean by up to three
times. The standard error is therefore computed by the jackknife (`jackknife`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator
from traceax._core.rule import Outcome
from traceax._estimators.call import Call, begin
from traceax._estimators.readouts import (
    LeaveOneOut,
    ValueAndError,
    leave_one_out,
    mean_and_error,
    outside,
    trace_pairs,
)
from traceax._linalg import jackknife
from traceax._linalg.columns import (
    Block,
    Number,
    OfProbes,
    column_dots,
    column_norms_squared,
    dot,
    frobenius_norm,
    mean,
    over,
    times,
    trace_of,
)
from traceax._probes.draw import for_sketch
from traceax._probes.samplers import SamplerLike


def xtrace(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: SamplerLike | None = None,
) -> Estimate:
    """Estimate tr A of any square operator by XTrace: sketch and remainder share probes.

    k = num_matvecs // 2 probes w_i make a sketch with the columns A w_i. Each probe is left
    out in turn. The trace on the range of the others, onto which P_i projects, is exact,
    and the probe that is left out estimates the rest:

        value = 1/k sum_i [ tr(P_i A P_i) + c_i w_i* (I - P_i) A (I - P_i) w_i ]

    The estimate is unbiased. It is exact (to rounding) if the rank of A is below k, if A is
    a multiple of I (and probes are resphered), or if `num_matvecs` reaches n. It is never
    much worse than `hutchinson_trace`, and better by orders of magnitude if singular values
    decay.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least min(2, n).
    - `sampler`: a sampler of independent probes. Default `None`, which is `sphere` below
      100,000 dimensions and `rademacher` from there on. The factor c_i rescales projected
      probes (resphering) if the sampler is invariant under rotations, like `sphere`.
      Otherwise c_i is 1.

    **Returns** an `Estimate` with a value of shape `()`. The value is real if the operator
    is known to be Hermitian.

    **Derivatives**: the sketch is frozen. A gradient costs one matvec-VJP for each matvec
    of the value.

    **Cost**: 2k matvecs in two batches, without the adjoint, 4 blocks of n x k, and about
    17 n k^2 flops (12 n k^2 for up to 2000 dimensions).

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> operator = tx.as_operator(jnp.outer(jnp.arange(200.0), jnp.ones(200)))
        >>> print(tx.xtrace(operator, jax.random.key(1), 40).value.round())
        19900.0

    **Reference**: Epperly, Tropp and Webber (2024), XTrace, Algorithm 2.1,
    [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323). Compare Hallman (2025),
    [arXiv:2512.02316](https://arxiv.org/abs/2512.02316).

    **See also**: `trace`, `xnystrace`, `hutchpp_trace`, `adaptive_trace`.
    """
    call = begin("xtrace", operator, key, num_matvecs, least=2, sampler=sampler)
    return call.exact() if call.is_exact else estimate_by_xtrace(call)


def estimate_by_xtrace(call: Call) -> Estimate:
    call = call.using(for_sketch(call.operator)).measured()
    k, resphere = call.num_matvecs // 2, call.resphere
    stages = _sketch, partial(_left_out, resphere=resphere), _images, _xtrace
    return call.finish(stages, call.draw(k), method="xtrace", spent=2 * k)


def _sketch(linear_map: LinearMap, made: tuple[Block]) -> tuple[Block, Block, Number]:
    """Return A Omega, Omega and the rounding error of a matvec."""
    (probes,), sketch = made, linear_map(*made)
    return sketch, probes, linear_map.eps_of(probes, sketch)


def _left_out(
    _: LinearMap, made: tuple[Block, Block, Number], *, resphere: bool
) -> tuple[LeaveOneOut, Number]:
    sketch, probes, eps = made
    return leave_one_out(sketch, probes, resphere=resphere), eps


def _images(linear_map: LinearMap, made: tuple[LeaveOneOut, Number]) -> tuple[Any, ...]:
    loo, eps = made
    return loo, linear_map(loo.basis.columns), eps


def _xtrace(_: LinearMap, made: tuple[LeaveOneOut, Block, Number]) -> Outcome:
    return Outcome(*xtrace_of(*made), trace_pairs(made[0]))


def xtrace_of(
    loo: LeaveOneOut, images: Block, eps: Number | float, weights: OfProbes | None = None
) -> ValueAndError:
    """Return the value and its standard error, computed from Y = A Omega and A Q.

    `images` is A Q. `eps` is the rounding error of a matvec. If there are
    `weights`, which sum to 1, the value is the weighted mean of the samples.
    """
    q, s, scale = loo.basis.columns, loo.directions, loo.basis.scale
    sketch, k = loo.sketch, loo.sketch.shape[1]
    h = over(dot(q.conj().T, images), scale)
    coimage = over(dot(images.conj().T, loo.mu), scale)
    remainders = over(column_dots(loo.mu, sketch), scale) - column_dots(coimage, loo.x)
    resphered = times(loo.resphering, remainders)
    samples = trace_of(h) - column_dots(s, dot(h, s)) + resphered

    # If Q contains the direction of the noise, tr H has all of it (`LinearMap.eps_of`).
    least = frobenius_norm(over(sketch, scale)) / k**0.5
    rounding = frobenius_norm(h) + mean(jnp.abs(resphered))
    rounding = 4 * eps * jnp.maximum(rounding, least)
    # `image` is Q* A mu_j and `coimage` is Q* A* mu_j. The first is computed from k x k
    # matrices, without another product of tall blocks.
    image = loo.basis.factor - dot(h, loo.x)
    read = h, image, coimage, remainders
    error = loo.error(samples, rounding, jackknife.xtrace_replicates, *read)
    if loo.resphere and k > 1:
        # The squared lengths of c_i times the part of (I - P_i) A mu_i across mu_i.
        along = over(remainders, column_norms_squared(loo.mu))
        across = outside(q, s, over(sketch - dot(images, loo.x), scale))
        across = across - loo.mu * along[None, :]
        missed = loo.resphering**2 * column_norms_squared(across)
        error = jackknife.no_less_than_theory(error, missed, real=not jnp.iscomplexobj(h))
    return mean_and_error(samples, error, scale, weights)
