"""The front door to traces of functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from traceax._core.checks import check_request
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap
from traceax._core.rule import estimate
from traceax._functions.exact_functions import exact_function_trace, is_cheap
from traceax._functions.slq import real_dtype
from traceax._linalg.jackknife import shared_degrees_of_freedom
from traceax._probes.draw import draw
from traceax._probes.samplers import sphere
from traceax._quadrature.block_quadrature import Shape, block_quadrature, shape_for
from traceax._quadrature.scalar import (
    MatrixFunction,
    ScalarFunction,
    combination,
    scalar_function,
)


def function_trace(
    operator: lx.AbstractLinearOperator,
    fn: Callable[[Float[Array, ""]], PyTree[Array]],
    key: PRNGKeyArray,
    num_matvecs: int = 240,
    *,
    combine: Callable | None = None,
) -> Estimate:
    """Estimate tr f(A), A Hermitian, by an automatic choice of probes and steps.

    One block Krylov run of k probes w_i. The space S_i of all probes but w_i contains the
    directions that contribute most to smooth functions, and is independent of w_i. So with
    its projector P_i

        tr f(A) = E[tr(P_i f(A) P_i) + c_i r_i* f(A) r_i],    r_i = (I - P_i) w_i,

    for each i, where c_i restores the expected length of r_i; the value is the mean over i,
    unbiased but for quadrature. If few eigenvalues have most of the sum (exp of a graph,
    log of a kernel) it is better than `slq_trace` by orders of magnitude; on flat spectra
    its error is 1.0 to 1.6 times that of the best number of steps there.

    Exact, by an eigendecomposition, if `num_matvecs` reaches n, for n <= 64, and for
    operators that store their matrix up to n = 1024; for diagonal ones from one application
    or none.

    **Arguments** (the others are in the guide's conventions)

    - `operator`: Hermitian (real: symmetric); tags are not needed. `arnoldi_trace` is for
      others.
    - `fn`: a function of a real scalar, made of JAX operations, that returns an array or a
      pytree of arrays: each entry is another trace from the same run.
    - `num_matvecs`: the budget if n > 64, at least 6, or n. Default 240.
    - `combine`: a function of the traces that returns an array or a pytree of arrays: an
      energy tr(A e^-bA) / tr(e^-bA), say. Value, error bar (with the covariances of the
      traces) and derivatives are those of the combination. Default `None`, the traces.

    **Derivatives**: in the operator and in whatever `fn` and `combine` depend on, unbiased
    but for quadrature (and the second order of `combine`), from the same spaces: about 0.8
    num_matvecs matvec-VJPs for each trace. Second derivatives differentiate a Lanczos
    recurrence from each, and are NaN if that does not resolve the spectrum. **Cost**: at
    most `num_matvecs` applications, in blocks of k, about 1.5 times the root of
    `num_matvecs`; 8 n num_matvecs^2 flops for an orthonormal basis of `num_matvecs`
    vectors, which must fit in memory.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> spectrum = jax.numpy.linspace(0.0, 10.0, 300)
        >>> structure = jax.ShapeDtypeStruct((300,), spectrum.dtype)
        >>> operator = lx.FunctionLinearOperator(lambda v: spectrum * v, structure)
        >>> estimate = tx.function_trace(operator, jax.numpy.exp, jax.random.key(0), 120)
        >>> low, high = estimate.interval()
        >>> bool(low < jax.numpy.exp(spectrum).sum() < high)
        True

        The mean energy at a temperature, numerator and denominator of one run:

        >>> def boltzmann(x):
        ...     return x * jax.numpy.exp(-x), jax.numpy.exp(-x)
        >>> energy = tx.function_trace(
        ...     operator, boltzmann, jax.random.key(0), 120, combine=lambda t: t[0] / t[1]
        ... )
        >>> weights = jax.numpy.exp(-spectrum)
        >>> low, high = energy.interval()
        >>> bool(low < (spectrum * weights).sum() / weights.sum() < high)
        True

    **Reference**: derived in `traceax/_quadrature/block_quadrature.py`. Compare Epperly,
    Tropp and Webber (2024), XTrace, doi:10.1137/23M1548323; Chen and Hallman (2023),
    Krylov-aware stochastic trace estimation, doi:10.1137/22M1494257.
    """
    operator = check_request("function_trace", operator, key, num_matvecs, 6)
    fn, structure = scalar_function("function_trace", fn, real_dtype(operator))
    combined, structure = combination("function_trace", combine, fn, structure)
    if is_cheap(operator, num_matvecs):
        return exact_function_trace(operator, fn, structure, combined)
    shape = shape_for(num_matvecs)
    return block_trace("function_trace", operator, fn, structure, key, shape, combined)


def block_trace(
    name: str,
    operator: lx.AbstractLinearOperator,
    fn: Callable,
    structure: PyTree,
    key: PRNGKeyArray,
    shape: Shape,
    combine: ScalarFunction | None = None,
) -> Estimate:
    subject = MatrixFunction(LinearMap(operator), fn, combine)
    probes = draw(name, sphere, key, operator, shape.width)
    algorithm = partial(block_quadrature, depth=shape.depth)
    degrees = shared_degrees_of_freedom(shape.width)
    return estimate(algorithm, subject, probes, shape.num_matvecs, degrees, structure)
