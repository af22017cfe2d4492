"""Diag++: the diagonal on a sketched subspace exactly, the rest from fresh probes."""

from __future__ import annotations

import jax.numpy as jnp
import lineax as lx
from jaxtyping import PRNGKeyArray

from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, unit_roundoff
from traceax._core.rule import Outcome
from traceax._estimators.driver import InBlocks, Method, Probes, estimate
from traceax._estimators.leave_one_out import outside
from traceax._estimators.readouts import DIAGONAL, Target, TwoSided
from traceax._linalg.basis import orthonormalise
from traceax._linalg.columns import largest_modulus, mean, row_dots
from traceax._linalg.jackknife import standard_error
from traceax._probes.samplers import Sampler, rademacher


def diagpp(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: Sampler = rademacher,
) -> Estimate:
    """Estimate diag A of any square operator by Diag++.

    k = num_matvecs // 3 probes sketch the range of A; P projects on it. The diagonal on it
    is exact, and l = num_matvecs - 2k fresh probes g_i estimate the rest:

        value = diag(P A + A P - P A P) + 1/l sum_i conj(g_i) o (I - P) A (I - P) g_i

    for operators known to be Hermitian; for others the published, one-sided form
    diag(P A) + 1/l sum_i conj(g_i) o (I - P) A g_i, which needs the adjoint. Unbiased.
    Exact (to rounding) if the rank of A is at most k, or if `num_matvecs` reaches n.
    `xdiag` is more accurate; here the samples of the remainder are independent.

    **Arguments** (the others are in the guide's conventions): `operator`: if it is not
    Hermitian, its transpose must exist. `num_matvecs`: at least 3, or n. `sampler`: default
    `rademacher`.

    **Derivatives**: by the two-sided form; the sketch is frozen. A gradient costs k + l
    matvec-VJPs for Hermitian operators, 2k + l (k of them of the adjoint) for others.
    **Cost**: 2k + l applications in three batches, k of them of the adjoint if the operator
    is not known to be Hermitian; 5 blocks of n x k; about 14 n k^2 flops.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> matrix = jax.random.normal(jax.random.key(0), (200, 10))
        >>> operator = lx.MatrixLinearOperator(matrix @ matrix.T)
        >>> estimate = tx.diagpp(operator, jax.random.key(1), 45)
        >>> bool(jax.numpy.allclose(estimate.value, (matrix**2).sum(1), rtol=1e-3))
        True

    **Reference**: Baston and Nakatsukasa (2022), Stochastic diagonal estimation,
    arXiv:2201.10684, for the one-sided form.
    """
    return estimate(DIAGPP, operator, key, num_matvecs, sampler=sampler)


def _diagpp(linear_map: LinearMap, probes: Probes, target: Target) -> Outcome:
    test, rest = probes.blocks
    q = orthonormalise(linear_map(test)).columns
    shares = jnp.full(rest.shape[1], 1 / rest.shape[1], rest.real.dtype)
    one, mu = jnp.ones((), shares.dtype), rest - q @ (q.conj().T @ rest)
    weight = TwoSided(target, q, None, rest, mu, shares, one, one)
    image, hermitian = linear_map.adjoint(q), linear_map.is_hermitian
    remainder = outside(q, None, linear_map(mu if hermitian else rest))
    samples = remainder * rest.conj()
    samples = samples.real if hermitian else samples
    known = weight.known(image, image) if hermitian else row_dots(q, image)
    scattered = largest_modulus(image) / q.shape[0] ** 0.5
    rounding = row_dots(jnp.abs(q), jnp.abs(image)) + mean(jnp.abs(samples)) + scattered
    error = standard_error(samples, 4 * unit_roundoff(linear_map.operator) * rounding)
    return Outcome(known + mean(samples), error, weight)


def _split(num_matvecs: int) -> tuple[int, int]:
    k = num_matvecs // 3
    return k, num_matvecs - 2 * k


DIAGPP = Method(
    "diagpp",
    DIAGONAL,
    _diagpp,
    InBlocks(_split, (2, 1), lambda rest: max(rest - 1, 1)),
    minimum=3,
    sampler=rademacher,
    independent=False,
)
