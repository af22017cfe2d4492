"""Hutchinson's estimator: tr A = E[z* A z] for isotropic probes z."""

from functools import partial

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PRNGKeyArray

from traceax._checks import check_request
from traceax._estimate import Estimate
from traceax._exact import exact_trace
from traceax._jackknife import independent_degrees_of_freedom, standard_error
from traceax._operator import LinearMap, resolution, size
from traceax._rule import Outcome, estimate
from traceax._samplers import Sampler, draw, is_without_replacement, rademacher
from traceax._sketch import column_dots, mean
from traceax._weights import TraceWeight


def hutchinson_trace(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: Sampler = rademacher,
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
    - `sampler`: draws the probes. Default `rademacher`, which is blind to the diagonal;
      `orthogonal` helps if the budget is a good part of n.

    **Returns** an `Estimate` of shape `()`, in the operator's dtype (at least 32 bits;
    real if the operator is known to be Hermitian). `standard_error` is that of a mean of
    independent samples; `inf` for one; 0 where n applications were spent.

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `num_matvecs` not a Python int; `ValueError` if `operator` is not square, mixes real and
    complex leaves, or has no dimension; if `key` is an array of keys; if `num_matvecs` is
    below 1; if the sampler's probes are of the wrong shape.

    **Derivatives**: forward and reverse, to any order, unbiased, exactly those of the
    value. A gradient costs one matvec-VJP a probe.

    **Cost**: `num_matvecs` applications, no adjoints, in one batch; 2 blocks of n x k;
    2 n k flops.

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
    check_request("hutchinson_trace", operator, key, num_matvecs)
    n = size(operator)
    if num_matvecs >= n:
        return exact_trace(operator)
    probes = draw("hutchinson_trace", sampler, key, operator, num_matvecs)
    # Orthogonal probes are drawn without replacement, so to speak: the finite-population
    # correction of a survey of k out of n.
    shrink = ((n - num_matvecs) / n) ** 0.5 if is_without_replacement(sampler) else 1.0
    algorithm = partial(_hutchinson, shrink=shrink)
    degrees = independent_degrees_of_freedom(num_matvecs)
    return estimate(algorithm, operator, probes, num_matvecs, degrees)


def _hutchinson(
    linear_map: LinearMap, probes: Inexact[Array, "n k"], *, shrink: float
) -> Outcome:
    products = linear_map(probes)
    samples = column_dots(probes, products)
    rounding = mean(column_dots(jnp.abs(probes), jnp.abs(products)))
    rounding = 4 * resolution(linear_map.operator) * rounding
    weight = TraceWeight(probes / probes.shape[1], probes)
    error = standard_error(shrink * samples, rounding)
    return Outcome(mean(samples), error, weight)
