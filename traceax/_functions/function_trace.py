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
from traceax._probes.draw import draw
from traceax._probes.samplers import sphere
from traceax._quadrature.block_quadrature import Shape, block_quadrature, shape_for
from traceax._quadrature.combination import combination
from traceax._quadrature.scalar import MatrixFunction, ScalarFunction, scalar_function


def function_trace(
    operator: lx.AbstractLinearOperator,
    fn: Callable[[Float[Array, ""]], PyTree[Array]],
    key: PRNGKeyArray,
    num_matvecs: int = 240,
    *,
    combine: Callable | None = None,
) -> Estimate:
    """The trace of a function of a Hermitian operator, by the best means there is for it.

    One block Krylov run of k probes w_i. The space S_i of all probes but w_i contains what
    matters most to smooth functions, and is independent of w_i; so with its projector P_i

        tr f(A) = E[tr(P_i f(A) P_i) + c_i r_i* f(A) r_i],    r_i = (I - P_i) w_i,

    c_i restoring the length that r_i should have, for each i. All of it is read off the one
    run, so every application works twice. Where few eigenvalues have most of the sum (exp
    of a graph, log of a kernel) it is better than `slq_trace` by orders of magnitude; on
    flat spectra its error is 1.0 to 1.6 times that of the best number of steps there.

    Exact, by an eigendecomposition, from n applications where `num_matvecs` reaches n, for
    n <= 64, and without any for operators that store their matrix up to n = 1024. Exact for
    diagonal operators: free, or, if they are only tagged, from one application.

    **Arguments**

    - `operator`: a Hermitian (real: symmetric) lineax operator, of arrays or pytrees. Tags
      are not needed; an operator that shows itself not to be Hermitian gives NaN:
      `arnoldi_trace` is for those.
    - `fn`: a function of a real scalar, made of JAX operations, that returns an array or a
      pytree of arrays: each entry is another trace from the same run. It may close over
      parameters, or be an `eqx.Module`.
    - `key`: a JAX random key.
    - `num_matvecs`: how many applications may be spent (beyond n = 64), a Python int of at
      least 6, or n. Default 240.
    - `combine`: a function of the traces, a pytree like what `fn` returns, that returns an
      array or a pytree of arrays: an energy tr(A e^-bA) / tr(e^-bA), a free energy
      -log tr(e^-bA) / b. Value, error bar (with the covariances of the traces) and
      derivatives are then those of the combination. It may close over parameters, or be an
      `eqx.Module`. Default `None`, the traces.

    **Returns** an `Estimate` with the structure of what `fn` returns, or `combine`.
    `standard_error` covers sampling and quadrature, the latter by comparison with fewer
    steps; 0 where the value is exact. Where fn is not defined at a Ritz value (the log of a
    negative one), NaN.

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `fn` not a function of a scalar that returns arrays, `combine` not a function of the
    traces that returns arrays, `num_matvecs` not a Python int; `ValueError` if `operator`
    is not square, mixes real and complex leaves, or has no dimension; if `key` is an array
    of keys; if `num_matvecs` is below 6 and n.

    **Derivatives**: forward and reverse, in the operator and in whatever `fn` and `combine`
    depend on, unbiased but for quadrature (and for what a combination's bends leave): by
    the split rule, with the same spaces; about 0.8 num_matvecs matvec-VJPs for each
    trace. Second derivatives differentiate a Lanczos recurrence from each, and are NaN
    where that falls short.

    **Cost**: at most `num_matvecs` applications (or n, for n <= 64), in blocks of k, about
    1.5 times the root of `num_matvecs`; 8 n num_matvecs^2 flops for an orthonormal basis of
    as many vectors, which is what has to fit.

    **Example**

    ```python
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

    ```

    **Reference**: derived in `traceax/_quadrature/block_quadrature.py`. Compare Epperly,
    Tropp and Webber (2024), XTrace, doi:10.1137/23M1548323, for leaving probes out; Chen
    and Hallman (2023), Krylov-aware stochastic trace estimation, SIAM Journal on Matrix
    Analysis and Applications 44(3), doi:10.1137/22M1494257, for reading f(A) off the space.
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
    algorithm = partial(block_quadrature, depth=shape.depth, inner=shape.inner)
    # Less skewed than samples of plain quadrature, of which a third count.
    degrees = max(2 * (shape.width - 1) / 3, 1)
    return estimate(algorithm, subject, probes, shape.num_matvecs, degrees, structure)
