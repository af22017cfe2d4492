"""Log-determinants."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.checks import check_request, check_shift
from traceax._core.estimate import Estimate
from traceax._functions.equations import Shift, whitened
from traceax._functions.exact_functions import CHOLESKY, entries, exact_estimate
from traceax._functions.function_trace import block_trace, checked_run
from traceax._quadrature.scalar import scalar_function


def logdet(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int = 240,
    *,
    shift: Shift = 0.0,
    num_probes: int | None = None,
    num_steps: int | None = None,
) -> Estimate:
    """Estimate log det(A + shift I), A + shift I Hermitian positive definite.

    It is `function_trace` of log(x + shift), unbiased but for quadrature. On kernel
    matrices the error is smaller than that of `slq_trace` at its best by factors from 3
    (spectra that hardly decay) to 10^6, on flat spectra up to 1.6 times larger. No
    preconditioner is needed, and the noise need not be known.

    Exact, by a Cholesky factorisation, for operators that store their matrix up to n =
    2048, if `num_matvecs` reaches n, and for n <= 64; for diagonal ones from one
    application or none.

    **Arguments** (the others are in the guide's conventions)

    - `operator`: Hermitian (real: symmetric); tags are not needed.
    - `num_matvecs`: the budget if n > 64, at least 6, or n. Default 240.
    - `shift`: real. An array of shifts gives the log-determinants of all of them from one
      run. An `lx.DiagonalLinearOperator` D of positive entries, the noise of each
      observation say, gives log det(A + D): that of I + D^{-1/2} A D^{-1/2}, and of D.
    - `num_probes`, `num_steps`: as in `function_trace`.

    **Returns** an `Estimate` with a real value of the shape of `shift`. `standard_error`
    covers sampling, quadrature (compared with the same run two blocks shorter) and
    rounding. NaN or infinite if A + shift I is found not to be positive definite.
    Eigenvalues that are 0 up to rounding widen the error bar, unless they are certainly 0
    (in double precision, if the Krylov space ends). **Raises** `TypeError` if `shift` is
    neither real nor a diagonal operator; `ValueError` if `operator` is tagged negative
    semidefinite, or `shift` is of another space.

    **Derivatives**: in the operator and in `shift`, as those of `function_trace`. **Cost**:
    that of `function_trace`: at most `num_matvecs` applications.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> spectrum = 1 / jnp.arange(1.0, 401.0) ** 2
        >>> structure = jax.ShapeDtypeStruct((400,), spectrum.dtype)
        >>> tag = lx.positive_semidefinite_tag
        >>> operator = lx.FunctionLinearOperator(lambda v: spectrum * v, structure, tag)
        >>> estimate = tx.logdet(operator, jax.random.key(0), 120, shift=0.01)
        >>> bool(abs(estimate.value - jnp.log(spectrum + 0.01).sum()) < 0.1)
        True

    **Reference**: derived in `traceax/_quadrature/block_quadrature.py`. Compare Epperly,
    Tropp and Webber (2024), XTrace, doi:10.1137/23M1548323; Chen and Hallman (2023),
    Krylov-aware stochastic trace estimation, doi:10.1137/22M1494257.
    """
    operator = check_request("logdet", operator, key, num_matvecs, 6)
    check_shift("logdet", operator, shift)
    operator, shift, _, rest = whitened(operator, shift)
    shape, budget = checked_run("logdet", num_matvecs, num_probes, num_steps)
    if (known := entries(operator, budget, CHOLESKY)) is not None:
        logs = jnp.vectorize(partial(_log_determinant, known.array))(shift)
        return exact_estimate(logs + rest, known.spent)
    fn, structure = scalar_function("logdet", lambda x: jnp.log(x + shift), shift.dtype)
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
