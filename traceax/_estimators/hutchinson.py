"""Hutchinson's estimators, z isotropic: tr A = E[z* A z], diag A = E[conj(z) o A z]."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator
from traceax._core.rule import Outcome
from traceax._estimators.driver import InBatches, Method, Streamed, estimate
from traceax._estimators.readouts import DIAGONAL, TRACE, Batches, ByRow, Target
from traceax._linalg.columns import (
    Moments,
    column_dots,
    column_norms_squared,
    largest_modulus,
    mean,
    moments,
    times,
)
from traceax._linalg.jackknife import error_of_sum, length, no_less_than_coupling
from traceax._probes.probing import DEGREES, combined_error, neighbour_residuals
from traceax._probes.samplers import Sampler, rademacher
from traceax._probes.stream import ProgressMeter, SamplingDesign


def hutchinson_trace(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: Sampler = rademacher,
    batch_size: int | None = None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Estimate tr A of any square operator by the mean of quadratic forms z_i* A z_i.

    Unbiased. Exact for diagonal operators with `rademacher`, and for multiples of I with
    `sphere`. The method of choice for flat spectra and nearly diagonal operators; the error
    falls only as num_matvecs^(-1/2), so `xtrace` is better on decaying spectra.

    **Arguments** (the others are in the guide's conventions): `num_matvecs`: the number of
    probes, at least 1. `sampler`: default `rademacher`, which is exact for diagonal
    operators. (Two to four real signs cannot tell these from operators that couple two
    dimensions, and have an error bar for both.) `orthogonal` helps if the budget is a good
    part of n, `probing` if entries decay with the distance in a graph.

    **Derivatives**: exactly those of the value, at one matvec-VJP a probe. **Cost**:
    `num_matvecs` applications in one batch; 2 blocks n x k (n x batch_size); 2 n k flops.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> operator = lx.MatrixLinearOperator(jax.numpy.diag(jax.numpy.arange(300.0)))
        >>> print(tx.hutchinson_trace(operator, jax.random.key(0), 10).value)
        44850.0

    **Reference**: Girard (1989), Numerische Mathematik 56; Hutchinson (1989),
    Communications in Statistics 18(3), doi:10.1080/03610918908812806.
    """
    how = sampler, batch_size, progress_meter
    return estimate(HUTCHINSON_TRACE, operator, key, num_matvecs, *how)


def hutchinson_diagonal(
    operator: Operator,
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
    and if `num_matvecs` reaches n. The error of entry a comes from the other entries of its
    row: (sum over b != a of |A_ab|^2 / num_matvecs)^(1/2). So it is the method of choice
    for diagonally dominant operators, and with `probing` for sparse ones and their
    functions; elsewhere `xdiag` and `xnysdiag` remove most of this error.

    **Arguments** (the others are in the guide's conventions): `num_matvecs`: the number of
    probes, at least 1. `sampler`: default `rademacher`, which has the least variance of all
    that do not use the structure of the operator; `probing` uses it.

    **Derivatives**: exactly those of the value, at one matvec-VJP a probe. **Cost**:
    `num_matvecs` applications in one batch; 2 blocks n x k (n x batch_size); 4 n k flops.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> operator = lx.MatrixLinearOperator(jax.numpy.diag(jax.numpy.arange(300.0)))
        >>> print(tx.hutchinson_diagonal(operator, jax.random.key(0), 10).value[:3])
        [0. 1. 2.]

    **Reference**: Bekas, Kokiopoulou and Saad (2007), doi:10.1016/j.apnum.2007.01.003.
    """
    how = sampler, batch_size, progress_meter
    return estimate(HUTCHINSON_DIAGONAL, operator, key, num_matvecs, *how)


def _sums(linear_map: LinearMap, streamed: Streamed, target: Target) -> Outcome:
    """The trace, or sums over leaves: means of independent samples.

    One repeat of `probing` has an error bar from neighbour residuals."""
    probes, design = streamed.probes, streamed.design
    near = streamed.neighbourhood if design.num_samples == 1 else None
    few_signs = design.group == 1 and 2 <= design.num_samples <= 4
    few_signs = few_signs and not lx.is_diagonal(linear_map.operator)

    def samples_of(z: Inexact[Array, "n b"]) -> tuple[Array, Array, Any, Any]:
        products = linear_map(z)
        samples = target.of(z.conj() * products, linear_map)
        sizes = target.of(jnp.abs(z) * jnp.abs(products), linear_map)
        residuals = None if near is None else neighbour_residuals(z, products, near)
        real_signs = few_signs and not jnp.iscomplexobj(z)
        off = _off_identity(z, products, linear_map, target) if real_signs else None
        return samples, sizes, residuals, off

    samples, sizes, residuals, off = probes.collect(samples_of, streamed.meter)
    eps = linear_map.eps
    rounding = 4 * eps * mean(sizes)
    value, error = design.mean_and_error(samples, rounding)
    if off is not None:
        error = no_less_than_coupling(error, off)
    if near is not None:
        real = not jnp.iscomplexobj(probes.source)
        error = length(residuals.error_in_sum(near, eps, real=real), rounding)
    lengths = jnp.asarray(design.num_probes, rounding.dtype)
    return Outcome(value, error, Batches(probes, lengths, target))


def _off_identity(
    z: Inexact[Array, "n b"],
    products: Inexact[Array, "n b"],
    linear_map: LinearMap,
    target: Target,
) -> Float[Array, "*values b"]:
    """The 4-norm of A z - z (z* A z)/|z|^2."""
    lengths = column_norms_squared(z)
    forms = column_dots(z, products) / jnp.where(lengths > 0, lengths, 1)
    rest = jnp.abs(products - z * forms[None, :])
    scale = largest_modulus(rest)
    return scale * target.of((rest / scale) ** 4, linear_map) ** 0.25


def ratio(linear_map: LinearMap, streamed: Streamed, target: ByRow) -> Outcome:
    """The diagonal, or entries: a ratio of sums, whose error is that of the sum of
    residuals; for probes of modulus 1 it is a mean. Each repeat of `probing` also has an
    error bar from neighbour residuals."""
    probes, near, design = streamed.probes, streamed.neighbourhood, streamed.design
    repeats, eps = design.num_samples, linear_map.eps

    def sums_of(z: Inexact[Array, "n b"]) -> tuple[Moments, Any]:
        products = linear_map(z)
        residuals = None if near is None else neighbour_residuals(z, products, near)
        numerators, weights = target.ratio(z, products, linear_map)
        return moments(design.totals(numerators), design.totals(weights)), residuals

    def merged(one: Any, other: Any) -> Any:
        pairs = zip(one, other, strict=True)
        return tuple(None if a is None else a.merged(b) for a, b in pairs)

    total, residuals = probes.reduce(sums_of, merged, streamed.meter)
    spread = design.correction * error_of_sum(jnp.sqrt(total.squares), repeats)
    unit = total.scale / total.weight
    error, rounding = unit * spread, unit * 4 * eps * total.size
    if residuals is not None:
        indicated = target.error_by(residuals.error(near, repeats, eps), linear_map)
        error = combined_error(error, indicated.astype(error.dtype), repeats)
    readout = Batches(probes, total.weight, target)
    return Outcome(times(total.scale, total.value()), jnp.hypot(error, rounding), readout)


def _degrees_of_ratio(design: SamplingDesign, has_neighbours: bool) -> float:
    degrees = design.num_samples - 1
    return degrees + DEGREES if has_neighbours else max(degrees, 1)


HUTCHINSON_TRACE = Method(
    "hutchinson_trace",
    TRACE,
    _sums,
    InBatches(SamplingDesign.degrees),
    sampler=rademacher,
    independent=False,
)
HUTCHINSON_DIAGONAL = HUTCHINSON_TRACE._replace(
    name="hutchinson_diagonal",
    target=DIAGONAL,
    run=ratio,
    draw=InBatches(_degrees_of_ratio),
)
