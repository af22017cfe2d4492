"""The front door to log-determinants."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.checks import check_request, check_shift
from traceax._core.estimate import Estimate
from traceax._functions.equations import whitened
from traceax._functions.exact_functions import CHOLESKY, entries, exact_estimate
from traceax._functions.function_trace import block_trace
from traceax._quadrature.block_quadrature import shape_for
from traceax._quadrature.scalar import scalar_function


def logdet(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int = 240,
    *,
    shift: float | Float[Array, "*shifts"] | lx.DiagonalLinearOperator = 0.0,
) -> Estimate:
    """log det(A + shift I), A + shift I Hermitian positive definite.

    `function_trace` of log(x + shift): one block Krylov run, in which each probe measures
    what the spaces of the others leave. On kernel matrices the error is smaller than that
    of `slq_trace` at its best by factors from 3 (spectra that hardly decay) to 10^6, on
    flat spectra up to 1.6 times larger; no preconditioner is needed, and no known noise.

    Exact, by a Cholesky factorisation: without an application for operators that store
    their matrix, up to n = 2048; from n applications where `num_matvecs` reaches n, and
    for n <= 64. Exact for diagonal operators: free, or, if they are only tagged, from one
    application.

    **Arguments**

    - `operator`: a Hermitian (real: symmetric) lineax operator, of arrays or pytrees. Tags
      are not needed.
    - `key`: a JAX random key.
    - `num_matvecs`: how many applications may be spent (beyond n = 64), a Python int of at
      least 6, or n. Default 240.
    - `shift`: real. An array of shifts gives the log-determinants of all of them from one
      run. An `lx.DiagonalLinearOperator` D of positive entries, the noise of each
      observation say, gives log det(A + D): that of I + D^{-1/2} A D^{-1/2}, and of D.

    **Returns** an `Estimate` with a real value of the shape of `shift`. `standard_error`
    covers sampling, quadrature (compared with fewer blocks) and rounding; 0 where the value
    is exact. NaN or infinite if A + shift I shows itself not to be positive definite,
    never an error. In a run eigenvalues that rounding cannot tell from 0 count as rounding,
    with an error bar that says so, unless it is certain that they are 0 (in double
    precision, where the Krylov space ends).

    **Raises** what `function_trace` raises; `TypeError` if `shift` is neither real nor a
    diagonal operator; `ValueError` if `operator` is tagged negative semidefinite, or if
    `shift` is an operator of another space.

    **Derivatives**: forward and reverse, in the operator and in `shift`, as of
    `function_trace`: about 0.8 num_matvecs matvec-VJPs. Second derivatives are right too;
    they differentiate a Lanczos recurrence from each of these, and are NaN where that does
    not resolve the spectrum.

    **Cost**: at most `num_matvecs` applications, or n, for n <= 64; 8 n num_matvecs^2 flops
    for an orthonormal basis of as many vectors, which is what has to fit.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
    >>> spectrum = 1 / jnp.arange(1.0, 401.0) ** 2
    >>> structure = jax.ShapeDtypeStruct((400,), spectrum.dtype)
    >>> tag = lx.positive_semidefinite_tag
    >>> operator = lx.FunctionLinearOperator(lambda v: spectrum * v, structure, tag)
    >>> estimate = tx.logdet(operator, jax.random.key(0), 120, shift=0.01)
    >>> bool(abs(estimate.value - jnp.log(spectrum + 0.01).sum()) < 0.1)
    True

    ```

    **Reference**: derived in `traceax/_quadrature/block_quadrature.py`. Compare Epperly,
    Tropp and Webber (2024), XTrace, doi:10.1137/23M1548323, for leaving probes out; Chen
    and Hallman (2023), Krylov-aware stochastic trace estimation, doi:10.1137/22M1494257.
    """
    operator = check_request("logdet", operator, key, num_matvecs, 6)
    check_shift("logdet", operator, shift)
    operator, shift, _, rest = whitened(operator, shift)
    if (known := entries(operator, num_matvecs, CHOLESKY)) is not None:
        logs = jnp.vectorize(partial(_log_determinant, known.array))(shift)
        return exact_estimate(logs + rest, known.spent)
    fn, structure = scalar_function("logdet", lambda x: jnp.log(x + shift), shift.dtype)
    shape = shape_for(num_matvecs)
    estimate = block_trace("logdet", operator, fn, structure, key, shape)
    return dataclasses.replace(estimate, value=estimate.value + rest)


def _log_determinant(array: Inexact[Array, " *entries"], shift: Float[Array, ""]) -> Array:
    """Of the diagonal or matrix that is given, and a multiple of I."""
    if array.ndim == 1:
        return jnp.sum(jnp.log(shift + array))
    return factorised(array, shift)[1]


def factorised(
    matrix: Inexact[Array, "n n"], shift: Float[Array, ""]
) -> tuple[Inexact[Array, "n n"], Float[Array, ""]]:
    """The Cholesky factor of matrix + shift I, and its log-determinant."""
    identity = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
    factor = jnp.linalg.cholesky(matrix + shift * identity)
    return factor, 2 * jnp.sum(jnp.log(jnp.diagonal(factor).real))
