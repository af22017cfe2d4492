"""Hutchinson's estimator of the trace: tr A = E[z* A z], z isotropic."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.checks import check_batch_size, check_request
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, resolution, size
from traceax._core.rule import Outcome, estimate
from traceax._linalg.columns import column_dots, mean
from traceax._linalg.jackknife import length
from traceax._probes.meters import ProgressMeter, checked_meter
from traceax._probes.plan import Plan, plan_and_draw
from traceax._probes.samplers import Sampler, rademacher
from traceax._probes.stream import Stream, all_at_once
from traceax._probes.witnesses import DEGREES, Witnesses, account, witnesses_of
from traceax._traces.exact import exact_trace
from traceax._traces.weights import MeanForm


def hutchinson_trace(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: Sampler = rademacher,
    batch_size: int | None = None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Estimate tr A of any square operator by the mean of quadratic forms z_i* A z_i.

    Unbiased. Exact for diagonal operators with `rademacher` probes, for multiples of I with
    `sphere` probes, and if `num_matvecs` reaches n. The method of choice for flat spectra
    and for operators that are nearly diagonal; its error falls only as
    num_matvecs^(-1/2), so on decaying spectra `xtrace` needs far fewer applications.

    **Arguments**

    - `operator`: any square lineax operator, real or complex, of arrays or pytrees. float16
      and bfloat16 operators are averaged in float32.
    - `key`: a JAX random key.
    - `num_matvecs`: how many applications, one a probe, a Python int of at least 1. From n
      on, n are spent.
    - `sampler`: draws the probes, with E[z z*] = I. Default `rademacher`, which is
      blind to the diagonal; `orthogonal` helps if the budget is a good part of n,
      `probing` (which spends a multiple of its number of colours) if entries decay with
      distance in a graph.
    - `batch_size`: how many probes live at a time, a Python int of at least 1 (for
      `probing`, its number of colours). Default `None`, all. The numbers are the same; they
      are drawn and the operator applied again in a gradient rather than stored.
      `orthogonal`, `hadamard` and samplers of your own still draw all probes together.
    - `progress_meter`: shows how far along the batches of the value are: one of diffrax's
      progress meters, `diffrax.TextProgressMeter()`, say, or any object with their methods.
      Default `None`: nothing is shown; nor is it without `batch_size`.

    **Returns** an `Estimate` of shape `()`, in the operator's dtype (at least 32 bits;
    real if the operator is known to be Hermitian). `standard_error` is that of a mean of
    independent samples (for `probing`, repeats); `inf` for one, but for `probing` of a
    pattern; 0 where n applications were spent.

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `num_matvecs` or `batch_size` not a Python int, the sampler not a function,
    `progress_meter` no progress meter; `ValueError` if `operator` is not square, mixes real
    and complex leaves, or has no dimension; if `key` is an array of keys; if `num_matvecs`
    or `batch_size` is below 1, or below the number of colours; if the sampler's probes are
    of the wrong shape.

    **Derivatives**: forward and reverse, to any order, unbiased, exactly those of the
    value. A gradient costs one matvec-VJP a probe.

    **Cost**: `num_matvecs` applications, no adjoints, in one batch; 2 blocks of n x k (of
    n x batch_size); 2 n k flops.

    **Example**

    ```python
    >>> import jax, lineax as lx, traceax as tx
    >>> operator = lx.MatrixLinearOperator(jax.numpy.diag(jax.numpy.arange(300.0)))
    >>> print(tx.hutchinson_trace(operator, jax.random.key(0), 10).value)
    44850.0

    ```

    **Reference**: Girard (1989), Numerische Mathematik 56; Hutchinson (1989),
    Communications in Statistics 18(3), doi:10.1080/03610918908812806.
    """
    operator = check_request("hutchinson_trace", operator, key, num_matvecs)
    return sampled_trace(
        "hutchinson_trace", operator, key, num_matvecs, sampler, batch_size, progress_meter
    )


def sampled_trace(
    name: str,
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int,
    sampler: Sampler,
    batch_size: int | None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Hutchinson's trace on behalf of the public function `name`, which has checked the
    rest."""
    check_batch_size(name, batch_size, 1)
    meter = checked_meter(name, progress_meter)
    if num_matvecs >= size(operator):
        return exact_trace(operator, batch_size, meter)
    plan, probes = plan_and_draw(name, operator, key, num_matvecs, sampler, batch_size)
    witnesses = witnesses_of(sampler)
    if plan.num_samples == 1 and witnesses is not None:
        block = probes.collect(lambda z: z), witnesses
        return estimate(_only_trace, operator, block, plan.num_probes, DEGREES)
    algorithm, degrees = partial(_trace, plan=plan, meter=meter), plan.degrees_of_freedom
    return estimate(algorithm, operator, probes, plan.num_probes, degrees)


def _trace(
    linear_map: LinearMap, probes: Stream, *, plan: Plan, meter: ProgressMeter
) -> Outcome:
    samples, sizes = probes.collect(lambda z: _forms(z, linear_map(z)), meter)
    rounding = 4 * resolution(linear_map.operator) * mean(sizes)
    value, error = plan.mean_and_error(samples, rounding)
    return Outcome(value, error, MeanForm(probes, 1 / plan.num_probes))


def _only_trace(
    linear_map: LinearMap, probes: tuple[Inexact[Array, "n c"], Witnesses]
) -> Outcome:
    """By one repeat of `probing`. For real signs an entry of A disturbs two entries of the
    diagonal alike, those of a symmetric A twice as much in variance as two independent
    disturbances, others less; phases disturb them independently."""
    z, witnesses = probes
    products, eps = linear_map(z), resolution(linear_map.operator)
    samples, sizes = _forms(z, products)
    told = account(z, products, witnesses).error(witnesses, 1, eps)
    alike = 1 if jnp.iscomplexobj(z) else 2
    error = length(alike**0.5 * told, 4 * eps * mean(sizes))
    readout = MeanForm(all_at_once(z), 1 / witnesses.num_colours)
    return Outcome(mean(samples), error, readout)


def _forms(
    z: Inexact[Array, "n b"], products: Inexact[Array, "n b"]
) -> tuple[Inexact[Array, " b"], Float[Array, " b"]]:
    """Quadratic forms, and their sizes."""
    return column_dots(z, products), column_dots(jnp.abs(z), jnp.abs(products))
