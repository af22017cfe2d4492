"""Traces of functions of Hermitian operators, with an automatic choice of the run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import lineax as lx
from jaxtyping import PRNGKeyArray, PyTree

from traceax._core.checks import check_count, check_request
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap
from traceax._core.rule import estimate
from traceax._functions.exact_functions import exact_function_trace, is_cheap
from traceax._functions.slq import Function, real_dtype
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
    fn: Function,
    key: PRNGKeyArray,
    num_matvecs: int = 240,
    *,
    num_probes: int | None = None,
    num_steps: int | None = None,
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
    - `num_probes`, `num_steps`: the width k and the depth of the run. More steps help for
      functions that are not smooth and for gradients, more probes if many eigenvalues
      contribute alike. Default: about 1.5 times the root of `num_matvecs` probes.
    - `combine`: a function of the traces that returns an array or a pytree of arrays: an
      energy tr(A e^-bA) / tr(e^-bA), say. Value, error bar (with the covariances of the
      traces) and derivatives are those of the combination. Default `None`, the traces.

    **Derivatives**: in the operator and in whatever `fn` and `combine` depend on, unbiased
    but for quadrature (and the second order of `combine`), from the same spaces: about 0.8
    num_matvecs matvec-VJPs for each trace. Second derivatives differentiate a Lanczos
    recurrence from each, and are NaN if that does not resolve the spectrum. **Cost**: at
    most `num_matvecs` applications, in blocks of k; 8 n num_matvecs^2 flops for an
    orthonormal basis of `num_matvecs` vectors, which must fit in memory.

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
    shape, budget = checked_run("function_trace", num_matvecs, num_probes, num_steps)
    if is_cheap(operator, budget):
        return exact_function_trace(operator, fn, structure, combined)
    return block_trace("function_trace", operator, fn, structure, key, shape, combined)


def checked_run(
    name: str,
    num_matvecs: int,
    num_probes: int | None,
    num_steps: int | None,
    choose: Callable[[int], Shape] = shape_for,
    tests: int = 0,
) -> tuple[Shape, int]:
    """The block Krylov run that the user asks for, and its budget: if that reaches n, the
    matrix costs no more. The budget pays for `tests` more probes."""
    named = {"num_probes": num_probes, "num_steps": num_steps}
    named = {argument: count for argument, count in named.items() if count is not None}
    for argument, count in named.items():
        check_count(name, argument, count, 1, "the fewest that can be used")
    if num_probes is None and num_steps is None:
        return choose(num_matvecs), num_matvecs
    if num_probes is not None and num_steps is not None:
        return Shape(num_probes, num_steps), num_probes * num_steps
    ((argument, count),) = named.items()
    least = count + tests if num_steps is None else count * (1 + tests)
    check_count(name, "num_matvecs", num_matvecs, least, f"for {argument}={count}")
    if num_steps is None:
        return Shape(count, num_matvecs // (count + tests)), num_matvecs
    return Shape(num_matvecs // count - tests, count), num_matvecs


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
