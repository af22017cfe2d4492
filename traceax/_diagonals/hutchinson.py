"""Hutchinson's estimator of the diagonal: diag A = E[conj(z) o A z], z isotropic."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.checks import check_batch_size, check_request
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, resolution, size
from traceax._core.rule import Outcome, estimate
from traceax._diagonals.exact import exact_diagonal
from traceax._diagonals.weights import MeanProduct
from traceax._linalg.jackknife import (
    both_errors,
    error_of_sum,
)
from traceax._linalg.moments import Moments, moments
from traceax._probes.meters import ProgressMeter, checked_meter
from traceax._probes.plan import Plan, plan_and_draw
from traceax._probes.samplers import Sampler, rademacher
from traceax._probes.stream import Stream
from traceax._probes.witnesses import (
    DEGREES,
    Account,
    Witnesses,
    account,
    pooled,
    witnesses_of,
)


def hutchinson_diagonal(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: Sampler = rademacher,
    batch_size: int | None = None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Estimate diag A of any square operator by comparing probes with their images.

        value = sum_i conj(z_i) o A z_i  /  sum_i |z_i|^2        (entry by entry)

    Unbiased for probes with entries of random sign or phase. Exact for diagonal operators,
    and if `num_matvecs` reaches n. The error of entry a is that of reading the other
    entries of row a as noise, (sum over b != a of |A_ab|^2 / num_matvecs)^(1/2): the
    method of choice for diagonally dominant operators, and with `probing` for sparse ones
    and their functions; elsewhere `xdiag` and `xnysdiag` remove most of it.

    **Arguments**

    - `operator`: any square lineax operator, real or complex, of arrays or pytrees. float16
      and bfloat16 operators are averaged in float32.
    - `key`: a JAX random key.
    - `num_matvecs`: how many applications, one a probe, a Python int of at least 1. From n
      on, n are spent.
    - `sampler`: draws the probes, with E[z z*] = I. Default `rademacher`, as no other
      has less variance that knows nothing of the operator; `probing` does, and spends a
      multiple of its number of colours.
    - `batch_size`: how many probes live at a time, a Python int of at least 1 (for
      `probing`, its number of colours). Default `None`, all. The numbers are the same; they
      are drawn and the operator applied again in a gradient rather than stored.
      `orthogonal`, `hadamard` and samplers of your own still draw all probes together.
    - `progress_meter`: shows how far along the batches of the value are: one of diffrax's
      progress meters, `diffrax.TextProgressMeter()`, say, or any object with their methods.
      Default `None`: nothing is shown; nor is it without `batch_size`.

    **Returns** an `Estimate` with the operator's input structure (leaves of at least 32
    bits; real if the operator is known to be Hermitian). `standard_error` is, entry by
    entry, that of a mean of independent samples (for `probing`, repeats); `inf` for one,
    but for `probing` of a pattern; 0 where n applications were spent.

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `num_matvecs` or `batch_size` not a Python int, the sampler not a function,
    `progress_meter` no progress meter; `ValueError` if `operator` is not square, mixes real
    and complex leaves, or has no dimension; if `key` is an array of keys; if `num_matvecs`
    or `batch_size` is below 1, or below the number of colours; if the sampler's probes are
    of the wrong shape.

    **Derivatives**: forward and reverse, to any order, unbiased, exactly those of the
    value. A gradient costs one matvec-VJP a probe.

    **Cost**: `num_matvecs` applications, no adjoints, in one batch; 2 blocks of n x k (of
    n x batch_size); 4 n k flops.

    **Example**

    ```python
    >>> import jax, lineax as lx, traceax as tx
    >>> operator = lx.MatrixLinearOperator(jax.numpy.diag(jax.numpy.arange(300.0)))
    >>> estimate = tx.hutchinson_diagonal(operator, jax.random.key(0), 10)
    >>> bool(jax.numpy.allclose(estimate.value, jax.numpy.arange(300.0)))
    True

    ```

    **Reference**: Bekas, Kokiopoulou and Saad (2007), An estimator for the diagonal of a
    matrix, Applied Numerical Mathematics 57(11-12), doi:10.1016/j.apnum.2007.01.003.
    """
    operator = check_request("hutchinson_diagonal", operator, key, num_matvecs)
    return sampled_diagonal(
        "hutchinson_diagonal",
        operator,
        key,
        num_matvecs,
        sampler,
        batch_size,
        progress_meter,
    )


def sampled_diagonal(
    name: str,
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int,
    sampler: Sampler,
    batch_size: int | None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Hutchinson's diagonal on behalf of the public function `name`, which has checked the
    rest."""
    check_batch_size(name, batch_size, 1)
    meter = checked_meter(name, progress_meter)
    if num_matvecs >= size(operator):
        return exact_diagonal(operator, batch_size, meter)
    plan, probes = plan_and_draw(name, operator, key, num_matvecs, sampler, batch_size)
    degrees, structure = plan.num_samples - 1, operator.in_structure()
    witnesses = witnesses_of(sampler)
    if witnesses is None:
        algorithm, degrees = partial(_diagonal, plan=plan, meter=meter), max(degrees, 1)
        return estimate(algorithm, operator, probes, plan.num_probes, degrees, structure)
    algorithm, heard = partial(_witnessed, plan=plan, meter=meter), (probes, witnesses)
    degrees += DEGREES
    return estimate(algorithm, operator, heard, plan.num_probes, degrees, structure)


def _diagonal(
    linear_map: LinearMap, probes: Stream, *, plan: Plan, meter: ProgressMeter
) -> Outcome:
    """A ratio of sums, whose error is that of the sum of residuals; for probes of modulus 1
    no more than a mean."""

    hermitian = linear_map.is_hermitian

    def moments_of(z: Inexact[Array, "n b"]) -> Moments:
        return _moments_of(z, linear_map(z), plan, hermitian)

    total = probes.reduce(moments_of, Moments.merged, meter)
    value, spread, rounding = _judge(total, plan, resolution(linear_map.operator))
    return Outcome(value, both_errors(spread, rounding), MeanProduct(probes, total.weight))


def _witnessed(
    linear_map: LinearMap,
    heard: tuple[Stream, Witnesses],
    *,
    plan: Plan,
    meter: ProgressMeter,
) -> Outcome:
    """The same by `probing`, each repeat of which tells something of its error."""
    probes, witnesses = heard
    eps, hermitian = resolution(linear_map.operator), linear_map.is_hermitian

    def sums_of(z: Inexact[Array, "n b"]) -> tuple[Moments, Account]:
        products = linear_map(z)
        told = account(z, products, witnesses)
        return _moments_of(z, products, plan, hermitian), told

    def merged(one: Any, other: Any) -> Any:
        return one[0].merged(other[0]), one[1].merged(other[1])

    total, told = probes.reduce(sums_of, merged, meter)
    value, spread, rounding = _judge(total, plan, eps)
    word = told.error(witnesses, plan.num_samples, eps)
    error = both_errors(pooled(spread, word, plan.num_samples), rounding)
    return Outcome(value, error, MeanProduct(probes, total.weight))


def _moments_of(
    z: Inexact[Array, "n b"], products: Inexact[Array, "n b"], plan: Plan, hermitian: bool
) -> Moments:
    products = z.conj() * products
    products = products.real if hermitian else products
    return moments(plan.totals(products), plan.totals((z * z.conj()).real))


def _judge(
    total: Moments, plan: Plan, eps: float
) -> tuple[Inexact[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
    """The value, and its errors by the spread of samples and by rounding."""
    spread = plan.shrink * error_of_sum(jnp.sqrt(total.squares), plan.num_samples)
    unit = total.scale / total.weight
    return total.scale * total.value(), unit * spread, unit * 4 * eps * total.size
