"""Hutchinson's estimators of traces and diagonals.

If z is isotropic, then tr A = E[z* A z] and diag A = E[conj(z) o A z].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator
from traceax._core.rule import Outcome
from traceax._estimators.call import Call, Streamed, begin
from traceax._estimators.readouts import (
    Batches,
    Forms,
    Reduction,
    by_row,
    each,
)
from traceax._linalg.columns import (
    Block,
    Moments,
    column_dots,
    column_norms_squared,
    largest_modulus,
    mean,
    moments,
    squared_modulus,
    times,
)
from traceax._linalg.jackknife import error_of_sum, length
from traceax._probes.probing import DEGREES, combined_error, neighbour_residuals
from traceax._probes.samplers import SamplerLike, rademacher
from traceax._probes.stream import ProgressMeter


def hutchinson_trace(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: SamplerLike = rademacher,
    batch_size: int | None = None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Estimate tr A of any square operator by the mean of quadratic forms z_i* A z_i.

    The estimate is unbiased. It is exact for diagonal operators with `rademacher`, and for
    multiples of I with `sphere`. Use it for flat spectra and nearly diagonal operators. The
    error falls only as num_matvecs^(-1/2), so `xtrace` is better on decaying spectra.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the number of probes, at least 1.
    - `sampler`: a sampler for the probes. Default `rademacher`, which is exact for diagonal
      operators. (Two to four real signs cannot tell these from operators that couple two
      dimensions, so the error bar allows for both.) `orthogonal` helps if the budget is a
      good part of n, and `probing` helps if entries decay with the distance in a graph.
    - `batch_size`: how many probes are in memory at a time, an int of at least 1. Default
      `None`, which means all of them.
    - `progress_meter`: an object that shows the progress, for example
      `diffrax.TqdmProgressMeter()`. Default `None`, which shows nothing.

    **Returns** an `Estimate` with a value of shape `()`. The value is real if the operator
    is known to be Hermitian.

    **Derivatives**: they are the exact derivatives of the value. A gradient costs one
    matvec-VJP for each probe.

    **Cost**: k = `num_matvecs` matvecs in one batch, 2 blocks of n x k (n x batch_size),
    and 2 n k flops.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> operator = lx.MatrixLinearOperator(jax.numpy.diag(jax.numpy.arange(300.0)))
        >>> print(tx.hutchinson_trace(operator, jax.random.key(0), 10).value)
        44850.0

    **Reference**: Girard (1989), Numerische Mathematik 56. Hutchinson (1989),
    Communications in Statistics 18(3),
    [doi:10.1080/03610918908812806](https://doi.org/10.1080/03610918908812806).

    **See also**: `trace`, `xtrace`, `hutchinson_diagonal`, `probing`.
    """
    name = "hutchinson_trace"
    call = begin(name, operator, key, num_matvecs, sampler=sampler, takes="any")
    call = call.in_batches(batch_size, progress_meter)
    return call.exact() if call.is_exact else estimate_by_forms(call)


def estimate_by_forms(call: Call, method: str = "hutchinson_trace") -> Estimate:
    """Estimate the trace or sums over leaves by the mean of quadratic forms.

    `method` is the function that the estimate names.
    """
    streamed = call.using(rademacher).stream()
    algorithm, spent = partial(_forms, reduce=call.reduce.fn), streamed.num_matvecs
    degrees = streamed.design.degrees(streamed.neighbourhood is not None)
    return call.finish(algorithm, streamed, method=method, spent=spent, degrees=degrees)


def hutchinson_diagonal(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: SamplerLike = rademacher,
    batch_size: int | None = None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Estimate diag A of any square operator by comparing probes with their images.

        value = sum_i conj(z_i) o A z_i  /  sum_i |z_i|^2        (entry by entry)

    The estimate is unbiased for probes with entries of random sign or phase. It is exact
    for diagonal operators, and if `num_matvecs` reaches n. The error of entry a comes from
    the other entries of its row: (sum over b != a of |A_ab|^2 / num_matvecs)^(1/2). So use
    it for diagonally dominant operators and, with `probing`, for sparse operators and their
    functions. For other operators `xdiag` and `xnysdiag` remove most of this error.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the number of probes, at least 1.
    - `sampler`: a sampler for the probes. Default `rademacher`, which has the least
      variance of all samplers that do not use the structure of the operator. `probing` uses
      the structure.
    - `batch_size`: how many probes are in memory at a time, an int of at least 1. Default
      `None`, which means all of them.
    - `progress_meter`: an object that shows the progress, for example
      `diffrax.TqdmProgressMeter()`. Default `None`, which shows nothing.

    **Returns** an `Estimate` with a value of the operator's input structure. The value is
    real if the operator is known to be Hermitian.

    **Derivatives**: they are the exact derivatives of the value. A gradient costs one
    matvec-VJP for each probe.

    **Cost**: k = `num_matvecs` matvecs in one batch, 2 blocks of n x k (n x batch_size),
    and 4 n k flops.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> operator = lx.MatrixLinearOperator(jax.numpy.diag(jax.numpy.arange(300.0)))
        >>> print(tx.hutchinson_diagonal(operator, jax.random.key(0), 10).value[:3])
        [0. 1. 2.]

    **Reference**: Bekas, Kokiopoulou and Saad (2007),
    [doi:10.1016/j.apnum.2007.01.003](https://doi.org/10.1016/j.apnum.2007.01.003).

    **See also**: `diagonal`, `xdiag`, `xnysdiag`, `selected_entries`, `probing`.
    """
    name = "hutchinson_diagonal"
    call = begin(name, operator, key, num_matvecs, sampler=sampler, takes="any")
    call = call.in_batches(batch_size, progress_meter).reading(by_row(call.operator))
    return call.exact() if call.is_exact else estimate_by_ratio(call)


@dataclass(frozen=True)
class DiagonalEntries(Forms):
    """The entries of the diagonal, each the ratio of two sums over probes."""

    reduce: Reduction = each

    def ratio(self, z: Block, products: Block, linear_map: Any) -> tuple[Block, Block]:
        """Return the numerators and the weights of each probe.

        The result is the ratio of their sums.
        """
        forms = z.conj() * products
        forms = forms.real if linear_map.is_hermitian else forms
        return forms, squared_modulus(z)

    def error_by(self, rows: Float[Array, " n"], linear_map: Any) -> Float[Array, " n"]:
        """Return the error of the result, given the error of each row of the diagonal."""
        return rows


DIAGONAL = DiagonalEntries()


def estimate_by_ratio(
    call: Call,
    method: str = "hutchinson_diagonal",
    entries: Any = DIAGONAL,
    subject: LinearMap | None = None,
) -> Estimate:
    """Estimate the diagonal, or other `entries`, by a ratio of two sums over probes.

    `method` is the function that the estimate names. `entries` is a `DiagonalEntries`, or
    reads the entries on a pattern. The `subject` is the operator, unless another linear map
    is given.
    """
    streamed = call.using(rademacher).stream()
    degrees = streamed.design.num_samples - 1
    degrees = max(degrees, 1) if streamed.neighbourhood is None else degrees + DEGREES
    algorithm = partial(_ratio, entries=entries)
    how = {"method": method, "spent": streamed.num_matvecs, "degrees": degrees}
    return call.finish(algorithm, streamed, subject=subject, **how)


def _forms(linear_map: LinearMap, streamed: Streamed, *, reduce: Reduction) -> Outcome:
    """Run the algorithm of traces and sums over leaves, a mean of independent samples.

    A single repeat of `probing` has no spread, so its error bar is computed from neighbour
    residuals.
    """
    probes, design = streamed.probes, streamed.design
    near = streamed.neighbourhood if design.num_samples == 1 else None
    few_signs = design.group == 1 and 2 <= design.num_samples <= 4
    few_signs = few_signs and not lx.is_diagonal(linear_map.operator)
    is_real = jnp.issubdtype(linear_map.dtype, jnp.floating)

    def samples_of(z: Inexact[Array, "n b"]) -> tuple[Array, Array, Any, Any]:
        products = linear_map(z if near is None else near.with_test(z))
        residuals = None if near is None else neighbour_residuals(z, products, near)
        products = products[:, : z.shape[1]]
        samples = reduce(z.conj() * products)
        sizes = reduce(jnp.abs(z) * jnp.abs(products))
        off = _coupling(z, products, reduce) if few_signs and is_real else None
        return samples, sizes, residuals, off

    samples, sizes, residuals, off = probes.collect(samples_of, streamed.meter)
    eps = linear_map.eps
    rounding = 4 * eps * mean(sizes)
    value, error = design.mean_and_error(samples, rounding)
    if off is not None:
        error = jnp.maximum(error, mean(off) / 4)
    if near is not None:
        how = {"real": is_real, "hermitian": linear_map.is_hermitian}
        error = length(residuals.error_in_sum(near, eps, **how), rounding)
    lengths = jnp.asarray(design.num_probes, rounding.dtype)
    return Outcome(value, error, Batches(probes, lengths, Forms(reduce)))


def _coupling(z: Block, products: Block, reduce: Reduction) -> Float[Array, "*values k"]:
    """Return the 4-norm of A z - z (z* A z)/|z|^2 for each probe z.

    With `reduce`, return it for the rows of each leaf. The error of 2 to 4 forms of signs
    is at least a quarter of its mean.

    The forms of A = c (e_1 e_2* + e_2 e_1*) are 2 c z_1 z_2. With probability 2^(1 - k) the
    product z_1 z_2 = s is the same in all k probes. Then there is no spread, the error is
    2 |c|, and each A z is that of a diagonal operator, c s (e_1 e_1* + e_2 e_2*), for which
    an honest bar cannot be zero either. The norm is at least |c| (1 - 2/n), and an interval
    for 95 % has 12.7 bars to each side for k = 4, 44 for k = 3, so a quarter is enough. The
    power 4 makes it about the largest entry, because pairs that agree in all probes are
    few.
    """
    lengths = column_norms_squared(z)
    forms = column_dots(z, products) / jnp.where(lengths > 0, lengths, 1)
    rest = jnp.abs(products - z * forms[None, :])
    scale = largest_modulus(rest)
    return scale * reduce((rest / scale) ** 4) ** 0.25


def _ratio(linear_map: LinearMap, streamed: Streamed, *, entries: Any) -> Outcome:
    """Run the algorithm of diagonals and entries, a ratio of two sums over probes.

    The error bar of a ratio is the error bar of the sum of its residuals. For probes with
    entries of modulus 1 the ratio is a mean. With `probing`, each repeat also has an error
    bar from neighbour residuals.
    """
    probes, near, design = streamed.probes, streamed.neighbourhood, streamed.design
    repeats, eps = design.num_samples, linear_map.eps

    def sums_of(z: Inexact[Array, "n b"]) -> tuple[Moments, Any]:
        products = linear_map(z if near is None else near.with_test(z))
        residuals = None if near is None else neighbour_residuals(z, products, near)
        products = products[:, : z.shape[1]]
        numerators, weights = entries.ratio(z, products, linear_map)
        return moments(design.totals(numerators), design.totals(weights)), residuals

    def merged(one: Any, other: Any) -> Any:
        pairs = zip(one, other, strict=True)
        return tuple(None if a is None else a.merged(b) for a, b in pairs)

    sums, residuals = probes.reduce(sums_of, merged, streamed.meter)
    spread = design.correction * error_of_sum(jnp.sqrt(sums.squares), repeats)
    unit = sums.scale / sums.weight
    error, rounding = unit * spread, unit * 4 * eps * sums.size
    if residuals is not None:
        indicated = residuals.error(near, eps, hermitian=linear_map.is_hermitian) / repeats
        indicated = entries.error_by(indicated, linear_map)
        error = combined_error(error, indicated.astype(error.dtype), repeats)
    readout = Batches(probes, sums.weight, entries)
    return Outcome(times(sums.scale, sums.value()), jnp.hypot(error, rounding), readout)
