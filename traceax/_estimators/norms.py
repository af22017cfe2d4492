"""Norms of operators that need not be square.

XRowNorm is the leave-one-out estimator of row norms. Let B be the operator, which is p x n
and has the rows b_a. The sketch lies in the space of the rows. It is B* B Omega, or B Omega
if B is Hermitian. In the notation of `readouts`,

    |b_a|^2 = |b_a P_i|^2 + E[ c_i |b_a (I - P_i) w_i|^2 ]        for every i.

Cross terms vanish, because P_i (I - P_i) = 0. The derivative rule differentiates this
quadratic with P_i and w_i frozen (`_mean_of_squares`). It is unbiased because the identity
holds for every B.

The Frobenius norm is ||B||_F^2 = tr B* B, estimated by `krylov_nystrom`. Each matvec of
B* B takes two matvecs, one of B and one of its adjoint.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.checks import check_count
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator, gram, is_hermitian
from traceax._core.rule import Outcome
from traceax._estimators.call import begin
from traceax._estimators.krylov_nystrom import estimate_by_nystrom
from traceax._estimators.readouts import Reduce, each, leave_one_out
from traceax._linalg import columns, jackknife
from traceax._linalg.columns import (
    Block,
    OfProbes,
    Square,
    column_norms_squared,
    dot,
    largest_modulus,
    mean,
    over,
    squared_modulus,
)
from traceax._probes.samplers import SamplerLike, rademacher


def row_norms_squared(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: SamplerLike = rademacher,
) -> Estimate:
    """Estimate the squared norm of every row of an operator B, p x n, by XRowNorm.

    k probes w_i make a sketch of the space of the rows b_a. Each probe in turn is left out.
    The part in the range of the others, onto which P_i projects, is exact, and the probe
    that is left out estimates the rest:

        value_a = 1/k sum_i [ |b_a P_i|^2 + c_i |b_a (I - P_i) w_i|^2 ]

    The estimate is unbiased. It is exact (to rounding) if the rank of B is below k, or if
    `num_matvecs` reaches n or p. For column norms, transpose the operator.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a lineax operator, square or not. Squared norms must be in the range of
      its dtype.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least min(3, n, p), or min(2, n, p) if the operator is
      known to be Hermitian. The number of matvecs spent is a multiple of 3 or 2.
    - `sampler`: a sampler of independent probes. Default `rademacher`, which is exact for
      rows of one entry.

    **Returns** an `Estimate` with a real value of the operator's output structure.

    **Derivatives**: the sketch is frozen. A gradient costs 2k matvec-VJPs.

    **Cost**: 2k matvecs and k with the adjoint (none if the operator is known to be
    Hermitian) in three batches, 4 blocks of n x k, 6 blocks of p x k, and about 10 (n + p)
    k^2 flops.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> operator = lx.MatrixLinearOperator(jax.numpy.ones((300, 200)))
        >>> print(tx.row_norms_squared(operator, jax.random.key(1), 60).value[:3].round(3))
        [200. 200. 200.]

    **Reference**: Epperly (2025), PhD thesis, Caltech,
    [arXiv:2512.15929](https://arxiv.org/abs/2512.15929).

    **See also**: `frobenius_norm_squared`, `schatten_norm`, `diagonal`.
    """
    name = "row_norms_squared"
    call = begin(name, operator, key, num_matvecs, square=False, sampler=sampler)
    call = call.reading(Reduce(each, call.operator.out_structure()))
    cost = 2 if is_hermitian(call.operator) else 3
    check_count(name, "num_matvecs", num_matvecs, min(cost, call.num_exact))
    if call.is_exact:
        return call.exact_by(_squares)
    call = call.measured()
    k, algorithm = call.num_matvecs // cost, partial(_row_norms, resphere=call.resphere)
    degrees, probes = jackknife.independent_degrees_of_freedom(k), call.draw(k)
    return call.finish(algorithm, probes, spent=cost * k, degrees=degrees)


def frobenius_norm_squared(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: SamplerLike | None = None,
) -> Estimate:
    """Estimate ||B||_F^2, the sum of the squared moduli of the entries of an operator.

    It is tr B* B, or tr B B* if B has fewer rows than columns. It is estimated from m =
    num_matvecs // 2 matvecs of B* B, as `trace` does for semidefinite operators. The
    estimate is unbiased. It is exact (to rounding) if the rank of B is below 3m/4, if B* B
    is a multiple of I (and probes are resphered), or if `num_matvecs` reaches the smaller
    dimension of B. On flat spectra, the mean of |B w|^2, which takes one matvec for each
    probe, has up to 1.7 times less error.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a lineax operator B, p x n, square or not. B* B w must be in the range of
      its dtype.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least min(2, n, p).
    - `sampler`: a sampler of independent probes. Default `None`, which is `sphere` if the
      smaller dimension is below 100,000, else `rademacher`.

    **Returns** an `Estimate` with a real value of shape `()`.

    **Derivatives**: the sketch is frozen. A gradient costs up to 4m matvec-VJPs.

    **Cost**: m matvecs and m with the adjoint in four batches, 6 blocks of n x m, and 12 n
    m^2 flops.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> operator = lx.MatrixLinearOperator(jax.numpy.ones((300, 200)))
        >>> print(tx.frobenius_norm_squared(operator, jax.random.key(1), 60).value.round())
        60000.0

    **Reference**: Epperly, Tropp and Webber (2024), Algorithm 2.2,
    [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323).

    **See also**: `row_norms_squared`, `schatten_norm`.
    """
    name = "frobenius_norm_squared"
    call = begin(name, operator, key, num_matvecs, least=2, square=False, sampler=sampler)
    if call.is_exact:
        return call.exact_by(_sum_of_squares)
    return estimate_by_nystrom(call.on(gram(call.operator)), name, cost=2)


def _squares(linear_map: LinearMap, z: Inexact[Array, "r k"]) -> Float[Array, " p"]:
    """Return |b_a Z|^2 for every row b_a of B, for a block Z of unit vectors.

    If B has fewer rows than columns, Z holds unit vectors of its output space instead. Then
    return |b_a|^2 for the rows that they select, and 0 for the others.
    """
    if linear_map.operator.out_size() < linear_map.operator.in_size():
        return dot(z.real, column_norms_squared(linear_map.adjoint(z)))
    return columns.row_norms_squared(linear_map(z))


def _sum_of_squares(linear_map: LinearMap, z: Inexact[Array, "r k"]) -> Float[Array, ""]:
    return jnp.sum(_squares(linear_map, z))


def _row_norms(linear_map: LinearMap, probes: tuple[Block], *, resphere: bool) -> Outcome:
    (block,) = probes
    first = sketch = linear_map(block)
    scale = largest_modulus(first)
    if not linear_map.is_hermitian:
        sketch = linear_map.adjoint(over(first, scale))
    loo = leave_one_out(sketch, block, resphere=resphere)
    q, s = loo.basis.columns, loo.directions
    readout = Partial(_mean_of_squares, q, s, loo.mu, loo.resphering)
    image = linear_map(q)
    remainder = over(first - dot(image, loo.x), scale)
    image = over(image, scale)
    known, samples = _squares_of_rows(image, s, remainder, loo.resphering)
    sizes = mean(jnp.abs(samples))
    rounding = 4 * linear_map.eps_of(block, first) * (sizes + mean(sizes))
    read = known, dot(image, s), remainder
    error = loo.error(samples, rounding, jackknife.row_norm_replicates, *read)
    return Outcome(scale * (scale * mean(samples)), scale * (scale * error), readout)


def _squares_of_rows(
    image: Block, directions: Square, remainder: Block, resphering: OfProbes
) -> tuple[Block, Block]:
    """Return |b_a P_i|^2 for all rows and probes, and the same plus c_i |b_a mu_i|^2.

    `image` is B Q, and the columns of `remainder` are B mu_i, with mu_i = (I - P_i) w_i.
    """
    removed = squared_modulus(dot(image, directions))
    known = columns.row_norms_squared(image)[:, None] - removed
    return known, known + resphering[None, :] * squared_modulus(remainder)


def _mean_of_squares(
    q: Block, s: Square, mu: Block, resphering: OfProbes, linear_map: LinearMap
) -> Float[Array, " p"]:
    """Read the squared norms of the rows of B, as the mean over all pairs P_i, w_i."""
    return mean(_squares_of_rows(linear_map(q), s, linear_map(mu), resphering)[1])
