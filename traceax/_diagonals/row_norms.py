"""XRowNorm: the leave-one-out estimator of row norms; operators need not be square.

Notation: B the operator, p x n, of rows b_a; the sketch lies in the space of the rows. In
the notation of `leave_one_out`, with the sketch B* B Omega, or B Omega if B is Hermitian,

    |b_a|^2 = |b_a P_i|^2 + E[ c_i |b_a (I - P_i) w_i|^2 ]        for every i:

cross terms vanish, because P_i (I - P_i) = 0. The derivative is that of this quadratic
with P_i, w_i frozen (`weights.RowNorms`), unbiased because the identity holds for every B.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.checks import check_operator, check_request
from traceax._core.estimate import Estimate
from traceax._core.operator import (
    LinearMap,
    is_hermitian,
    resolution,
)
from traceax._core.rule import Outcome, estimate
from traceax._diagonals.exact import cost_of_norms, exact_row_norms
from traceax._diagonals.weights import RowNorms
from traceax._linalg.columns import column_norms_squared, magnitude, mean
from traceax._linalg.jackknife import (
    independent_degrees_of_freedom,
    jackknife_error,
    row_norm_replicates,
    standard_error,
)
from traceax._probes.draw import draw
from traceax._probes.samplers import Sampler, rademacher
from traceax._probes.traits import check_independent, is_rotation_invariant
from traceax._traces.leave_one_out import LeaveOneOut, leave_one_out


def row_norms_squared(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: Sampler = rademacher,
) -> Estimate:
    """Estimate the squared norm of every row of an operator B, p x n, by XRowNorm.

    k probes w_i make a sketch of the space of the rows b_a. Each in turn is left out; the
    part of the rows in the range of the others is exact, and the probe left out estimates
    the rest:

        value_a = 1/k sum_i [ |b_a P_i|^2 + c_i |b_a (I - P_i) w_i|^2 ]

    Unbiased. Exact (to rounding) if the rank of B is below k, or if `num_matvecs` reaches n
    or p. For column norms, transpose the operator.

    **Arguments**

    - `operator`: any lineax operator, square or not, real or complex, of arrays or pytrees;
      if it is not Hermitian, its transpose must exist. float16 and bfloat16 operators are
      sketched in float32; norms must be in range.
    - `key`: a JAX random key.
    - `num_matvecs`: how many applications may be spent, a Python int of at least 3, or
      n or p, of which the largest multiple of 3 is; of 2 if the operator is known to be
      Hermitian. From n or p on, the smaller, as many are spent.
    - `sampler`: draws the probes, independent of each other, with E[z z*] = I. Default
      `rademacher`, blind to rows of one entry; `sphere` and `normal` are resphered (for
      others c_i = 1), which gains little here and costs much on nearly diagonal
      operators.

    **Returns** an `Estimate` with the operator's output structure (real leaves of at least
    32 bits). `standard_error` is, row by row, the jackknife's: conservative (of two probes
    the spread, which is not); `inf` for k = 1; 0 where n or p applications were spent.

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `num_matvecs` not a Python int, the sampler not a function; `ValueError` if `operator`
    mixes real and complex leaves, or has no dimension; if `key` is an array of keys; if
    `num_matvecs` is below 3 (2 if Hermitian), n and p; if the sampler's probes are
    dependent or of the wrong shape.

    **Derivatives**: forward and reverse, to any order, unbiased; the sketch is frozen. A
    gradient costs 2k matvec-VJPs.

    **Cost**: 2k applications and k of the adjoint (none if the operator is known to be
    Hermitian), in three batches; 4 blocks of n x k, 6 of p x k; about 10 (n + p) k^2 flops.

    **Example**

    ```python
    >>> import jax, lineax as lx, traceax as tx
    >>> left = jax.random.normal(jax.random.key(0), (300, 10))
    >>> right = jax.random.normal(jax.random.key(1), (10, 200))
    >>> operator = lx.MatrixLinearOperator(left @ right)
    >>> estimate = tx.row_norms_squared(operator, jax.random.key(2), 60)
    >>> truth = ((left @ right) ** 2).sum(1)
    >>> bool(jax.numpy.allclose(estimate.value, truth, rtol=1e-3))
    True

    ```

    **Reference**: Epperly (2025), Make the most of what you have: resource-efficient
    randomized algorithms for matrix computations, PhD thesis, Caltech, arXiv:2512.15929.
    """
    operator = check_operator("row_norms_squared", operator, square=False)
    hermitian = is_hermitian(operator)
    cost = 2 if hermitian else 3
    operator = check_request(
        "row_norms_squared", operator, key, num_matvecs, cost, square=False
    )
    check_independent("row_norms_squared", sampler)
    if num_matvecs >= cost_of_norms(operator):
        return exact_row_norms(operator)
    k = num_matvecs // cost
    probes = draw("row_norms_squared", sampler, key, operator, k)
    algorithm = partial(_row_norms, resphere=is_rotation_invariant(sampler))
    degrees = independent_degrees_of_freedom(k)
    structure = operator.out_structure()
    return estimate(algorithm, operator, probes, cost * k, degrees, structure)


def _row_norms(
    linear_map: LinearMap, probes: Inexact[Array, "n k"], *, resphere: bool
) -> Outcome:
    first = linear_map(probes)
    sketch = first
    if not linear_map.is_hermitian:
        sketch = linear_map.adjoint(first / magnitude(first))
    loo = leave_one_out(sketch, probes, resphere=resphere)
    image = linear_map(loo.basis.columns)
    eps = resolution(linear_map.operator)
    value, error = _judge(loo, first, image, eps, resphere)
    return Outcome(value, error, RowNorms.of(loo))


def _judge(
    loo: LeaveOneOut,
    first: Inexact[Array, "p k"],
    image: Inexact[Array, "p k"],
    eps: float,
    resphere: bool,
) -> tuple[Float[Array, " p"], Float[Array, " p"]]:
    """Value and standard error from B Omega and B Q."""
    readout = RowNorms.of(loo)
    scale = magnitude(first)
    remainder = (first - image @ loo.x) / scale
    known = readout.known(image / scale)
    samples = known + readout.tested(remainder)
    sizes = mean(jnp.abs(samples))
    rounding = 4 * eps * (sizes + mean(sizes))
    n, k = loo.probes.shape
    if k < 3:
        error = standard_error(samples, rounding)
    else:
        replicates = row_norm_replicates(
            known,
            (image / scale) @ loo.directions,
            remainder,
            loo.directions,
            loo.basis.columns.conj().T @ loo.probes,
            column_norms_squared(loo.mu),
            n - k + 2 if resphere else None,
        )
        error = jackknife_error(replicates, rounding)
    return scale * (scale * mean(samples)), scale * (scale * error)
