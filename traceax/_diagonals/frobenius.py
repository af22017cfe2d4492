"""The Frobenius norm: ||B||_F^2 = tr B* B by XNysTrace, two applications a probe."""

from __future__ import annotations

import lineax as lx
from jaxtyping import PRNGKeyArray

from traceax._core.checks import check_request
from traceax._core.estimate import Estimate
from traceax._core.operator import (
    gram,
)
from traceax._diagonals.exact import cost_of_norms, exact_norm
from traceax._probes.choice import for_sketch
from traceax._probes.samplers import Sampler
from traceax._probes.traits import check_independent
from traceax._traces.xnystrace import nystrom_trace


def frobenius_norm_squared(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: Sampler | None = None,
) -> Estimate:
    """Estimate ||B||_F^2, the sum of the squared moduli of an operator's entries.

    tr B* B, or tr B B* if B has fewer rows than columns, by XNysTrace (see `xnystrace`)
    from k = num_matvecs // 2 probes. Unbiased. Exact (to rounding) if the rank of B is
    below k, if B* B is a multiple of I (and probes are resphered), or if `num_matvecs`
    reaches the smaller of B's dimensions. On flat spectra the mean of |B w|^2, one
    application a probe, has up to 1.5 times less error.

    **Arguments**

    - `operator`: any lineax operator B, p x n, square or not, real or complex, of arrays or
      pytrees; if it is not Hermitian, its transpose must exist. float16 and bfloat16
      operators are sketched in float32, but B* B w must be in their range.
    - `key`: a JAX random key.
    - `num_matvecs`: how many applications may be spent, a Python int of at least 2, or
      n or p; the largest even number up to it is. From n or p on, the smaller, as many are
      spent.
    - `sampler`: draws the probes, independent of each other, with E[z z*] = I. Default
      `None`: `sphere`, whose remainders can be resphered (so can those of `normal`), and
      from 100,000 dimensions on (of the smaller space, where it draws) `rademacher`,
      cheaper to draw.

    **Returns** an `Estimate` of shape `()`, real, of at least 32 bits. `standard_error` is
    the jackknife's: conservative (of two probes the spread, which is not); `inf` for k = 1;
    0 where n or p applications were spent.

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `num_matvecs` not a Python int, the sampler not a function; `ValueError` if `operator`
    mixes real and complex leaves, or has no dimension; if `key` is an array of keys; if
    `num_matvecs` is below 2, n and p; if the sampler's probes are dependent or of the wrong
    shape.

    **Derivatives**: forward and reverse, to any order, unbiased; the sketch is frozen. A
    gradient costs 4k matvec-VJPs.

    **Cost**: k applications and k of the adjoint, in two batches; 3 blocks of n x k; about
    8 n k^2 flops.

    **Example**

    ```python
    >>> import jax, lineax as lx, traceax as tx
    >>> left = jax.random.normal(jax.random.key(0), (300, 10))
    >>> right = jax.random.normal(jax.random.key(1), (10, 200))
    >>> operator = lx.MatrixLinearOperator(left @ right)
    >>> estimate = tx.frobenius_norm_squared(operator, jax.random.key(2), 60)
    >>> truth = ((left @ right) ** 2).sum()
    >>> bool(abs(estimate.value - truth) < 1e-3 * truth)
    True

    ```

    **Reference**: Epperly, Tropp and Webber (2024), XTrace: Making the most of every sample
    in stochastic trace estimation, SIAM Journal on Matrix Analysis and Applications 45(1),
    Algorithm 2.2, doi:10.1137/23M1548323.
    """
    name = "frobenius_norm_squared"
    operator = check_request(name, operator, key, num_matvecs, minimum=2, square=False)
    square = gram(operator)
    sampler = for_sketch(sampler, square)
    check_independent(name, sampler)
    if num_matvecs >= cost_of_norms(operator):
        return exact_norm(operator)
    k = num_matvecs // 2
    of_gram = nystrom_trace(name, square, key, k, sampler)
    value = of_gram.value.real  # a tangent inside the operator has voided the Gram's tag
    return Estimate(value, of_gram.standard_error, 2 * k, of_gram.degrees_of_freedom)
