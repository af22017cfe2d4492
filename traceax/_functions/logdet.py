"""The front door to log-determinants."""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray

from traceax._core.checks import check_request, check_shift
from traceax._core.estimate import Estimate
from traceax._core.operator import (
    LinearMap,
    known_diagonal,
    size,
    stores_matrix,
)
from traceax._estimators.driver import SMALL
from traceax._functions.exact_functions import hermitian_or_nan, real_or_nan
from traceax._functions.function_trace import block_trace
from traceax._functions.slq import real_dtype
from traceax._functions.whitening import whitened
from traceax._quadrature.block_quadrature import shape_for
from traceax._quadrature.scalar import scalar_function

# Up to this dimension the Cholesky factorisation of a matrix that is there takes a tenth of
# a second or so on two cores.
STORED = 2048


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
    covers sampling and quadrature (by what fewer blocks say), and rounding; 0 where the
    value is exact. NaN or infinite if A + shift I shows itself not to be positive definite,
    never an error. In a run eigenvalues that rounding cannot tell from 0 count as rounding,
    with an error bar that says so, unless it is certain that they are 0 (in double
    precision, where the Krylov space ends).

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `num_matvecs` not a Python int, `shift` neither real nor a diagonal operator;
    `ValueError` if `operator` is not square, mixes real and complex leaves, has no
    dimension or is tagged negative semidefinite; if `shift` is an operator of another
    space; if `key` is an array of keys; if `num_matvecs` is below 6 and n.

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
    if isinstance(shift, lx.DiagonalLinearOperator):
        white = whitened(operator, shift)
        rest = logdet(white.operator, key, num_matvecs, shift=1.0)
        return eqx.tree_at(lambda e: e.value, rest, rest.value + white.log_determinant)
    shift = jnp.asarray(shift, real_dtype(operator))
    n = size(operator)
    known = known_diagonal(operator) if lx.is_diagonal(operator) else None
    if known is not None:
        diagonal, spent = known
        logs = jnp.log(_on_axis(shift) + real_or_nan(diagonal))
        return _exact(jnp.sum(logs, axis=-1), spent)
    if n <= max(num_matvecs, SMALL) or (stores_matrix(operator) and n <= STORED):
        spent = 0 if stores_matrix(operator) else n
        matrix = hermitian_or_nan(LinearMap(operator).dense())
        return _exact(jnp.vectorize(partial(_cholesky, matrix))(shift), spent)
    fn, structure = scalar_function("logdet", lambda x: jnp.log(x + shift), shift.dtype)
    shape = shape_for(num_matvecs)
    return block_trace("logdet", operator, fn, structure, key, shape)


def _on_axis(shift: Float[Array, "*shifts"]) -> Float[Array, "*shifts 1"]:
    return shift[..., None]


def _exact(value: Float[Array, "*shifts"], spent: int) -> Estimate:
    return Estimate(value, jnp.zeros_like(value), spent)


def _cholesky(matrix: Array, shift: Float[Array, ""]) -> Float[Array, ""]:
    factor = jnp.linalg.cholesky(
        matrix + shift * jnp.eye(matrix.shape[0], dtype=matrix.dtype)
    )
    return 2 * jnp.sum(jnp.log(jnp.diagonal(factor).real))
