"""Diag++: the diagonal on a sketched subspace exactly, the rest from fresh probes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.checks import check_request
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, resolution, size
from traceax._core.rule import Outcome, estimate
from traceax._diagonals.exact import exact_diagonal
from traceax._diagonals.weights import TwoSidedWeight
from traceax._linalg.basis import orthonormalise
from traceax._linalg.columns import magnitude, mean, row_dots
from traceax._linalg.jackknife import standard_error
from traceax._probes.draw import draw
from traceax._probes.samplers import Sampler, rademacher


def diagpp(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: Sampler = rademacher,
) -> Estimate:
    """Estimate diag A of any square operator by Diag++.

    k = num_matvecs // 3 probes sketch the range of A; P projects on it. What it determines
    of the diagonal is exact, and l = num_matvecs - 2k fresh probes g_i estimate the rest:

        value = diag(P A + A P - P A P) + 1/l sum_i conj(g_i) o (I - P) A (I - P) g_i

    for operators known to be Hermitian; for others the published, one-sided form
    diag(P A) + 1/l sum_i conj(g_i) o (I - P) A g_i, which needs the adjoint. Unbiased.
    Exact (to rounding) if the rank of A is at most k, or if `num_matvecs` reaches n.
    `xdiag` is more accurate; here the samples of the remainder are independent.

    **Arguments**

    - `operator`: any square lineax operator, real or complex, of arrays or pytrees; if it
      is not Hermitian, its transpose must exist. float16 and bfloat16 operators are
      sketched in float32.
    - `key`: a JAX random key.
    - `num_matvecs`: how many applications are spent, a Python int of at least 3, or n. From
      n on, n are spent.
    - `sampler`: draws the probes, with E[z z*] = I. Default `rademacher`.

    **Returns** an `Estimate` with the operator's input structure (leaves of at least 32
    bits; real if the operator is known to be Hermitian). `standard_error` is, entry by
    entry, that of the mean of l independent samples; `inf` for one; 0 where n applications
    were spent.

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `num_matvecs` not a Python int, the sampler not a function; `ValueError` if `operator`
    is not square, mixes real and complex leaves, or has no dimension; if `key` is an array
    of keys; if `num_matvecs` is below 3 and n; if the sampler is `probing`, or its probes
    are of the wrong shape.

    **Derivatives**: forward and reverse, to any order, unbiased, by the two-sided form; the
    sketch is frozen. A gradient costs k + l matvec-VJPs if the operator is known to be
    Hermitian, 2k + l (k of them of the adjoint) if not.

    **Cost**: 2k + l applications, of which k are of the adjoint if the operator is not
    known to be Hermitian, in three batches; 5 blocks of n x k; about 14 n k^2 flops.

    **Example**

    ```python
    >>> import jax, lineax as lx, traceax as tx
    >>> matrix = jax.random.normal(jax.random.key(0), (200, 10))
    >>> operator = lx.MatrixLinearOperator(matrix @ matrix.T)
    >>> estimate = tx.diagpp(operator, jax.random.key(1), 45)
    >>> bool(jax.numpy.allclose(estimate.value, (matrix**2).sum(1), rtol=1e-3))
    True

    ```

    **Reference**: Baston and Nakatsukasa (2022), Stochastic diagonal estimation:
    probabilistic bounds and an improved algorithm, arXiv:2201.10684, for the one-sided
    form.
    """
    operator = check_request("diagpp", operator, key, num_matvecs, minimum=3)
    if num_matvecs >= size(operator):
        return exact_diagonal(operator)
    k = num_matvecs // 3
    rest = num_matvecs - 2 * k
    sketch_key, rest_key = jax.random.split(key)
    probes = (
        draw("diagpp", sampler, sketch_key, operator, k),
        draw("diagpp", sampler, rest_key, operator, rest),
    )
    degrees, structure = max(rest - 1, 1), operator.in_structure()
    return estimate(_diagpp, operator, probes, num_matvecs, degrees, structure)


def _diagpp(
    linear_map: LinearMap, probes: tuple[Inexact[Array, "n k"], Inexact[Array, "n l"]]
) -> Outcome:
    test, rest = probes
    q = orthonormalise(linear_map(test)).columns
    weight = _weight(q, rest)
    hermitian, eps = linear_map.is_hermitian, resolution(linear_map.operator)
    image = linear_map.adjoint(q)
    remainder = linear_map(weight.complement if hermitian else rest)
    value, error = _judge(weight, image, remainder, hermitian, eps)
    return Outcome(value, error, weight)


def _weight(q: Inexact[Array, "n k"], rest: Inexact[Array, "n l"]) -> TwoSidedWeight:
    return TwoSidedWeight(q, None, rest, rest - q @ (q.conj().T @ rest))


def _judge(
    weight: TwoSidedWeight,
    image: Inexact[Array, "n k"],
    remainder: Inexact[Array, "n l"],
    hermitian: bool,
    eps: float,
) -> tuple[Inexact[Array, " n"], Float[Array, " n"]]:
    """Value and standard error from A* Q, and A applied to what the other probes leave: to
    all of them if A is not Hermitian."""
    q = weight.basis
    if hermitian:
        known = weight.known(image, image)
        samples = (weight.residual(remainder) * weight.probes.conj()).real
    else:
        known = row_dots(q, image)
        samples = weight.residual(remainder) * weight.probes.conj()
    scattered = magnitude(image) / q.shape[0] ** 0.5
    rounding = row_dots(jnp.abs(q), jnp.abs(image)) + mean(jnp.abs(samples)) + scattered
    return known + mean(samples), standard_error(samples, 4 * eps * rounding)
