"""The front door to traces of functions: deflated quadrature."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray, PyTree

from traceax._core.checks import check_request
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, prepare, size
from traceax._core.rule import Outcome, estimate_of
from traceax._functions.deflation import Split, draw_for, resphering, split
from traceax._functions.dense import Eigen
from traceax._functions.exact_functions import exact_function_trace, is_cheap
from traceax._functions.scalar import MatrixFunction, scalar_function
from traceax._functions.slq import Sampled, Traced, decompose_with_half, real_dtype, sample
from traceax._functions.split import FromStarts, Run
from traceax._linalg.jackknife import both_errors, independent_degrees_of_freedom
from traceax._linalg.krylov import BlockKrylov, block_krylov


def function_trace(
    operator: lx.AbstractLinearOperator,
    fn: Callable[[Float[Array, ""]], PyTree[Array]],
    key: PRNGKeyArray,
    num_matvecs: int = 240,
    *,
    reorthogonalise: bool = True,
) -> Estimate:
    """The trace of a function of a Hermitian operator, by the best means there is for it.

    Half of the budget builds a block Krylov space of A, of orthonormal columns Q, which
    contains the eigenvectors that matter most to smooth functions. Then, for any Q,

        tr f(A) = tr(Q* f(A) Q) + E[c d* f(A) d],    d = (I - Q Q*) w,

    c restoring the length that d should have. The first term is read off the space itself,
    the second is quadrature from the rest of the probes. Where few eigenvalues have most
    of the sum (exp of a graph, log of a kernel) it is better by orders of magnitude than
    `slq_trace`; on flat spectra it is at most 1.5 times worse.

    Exact, by an eigendecomposition, from n applications where `num_matvecs` reaches n, for
    n <= 64, and without any for operators that store their matrix up to n = 1024. Exact
    and free for diagonal operators.

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
    - `reorthogonalise`: of the quadrature on the rest, as in `slq_trace`.

    **Returns** an `Estimate` with the structure of what `fn` returns. `standard_error`
    covers sampling and quadrature, the latter by comparison with fewer steps; 0 where the
    value is exact. Where fn is not defined at a Ritz value (the log of a negative one),
    NaN.

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `fn` not a function of a scalar that returns arrays, `num_matvecs` not a Python int;
    `ValueError` if `operator` is not square, mixes real and complex leaves, or has no
    dimension; if `key` is an array of keys; if `num_matvecs` is below 6 and n.

    **Derivatives**: forward and reverse, in the operator and in whatever `fn` depends on,
    unbiased but for quadrature: by the split rule, deflated like the value; one matvec-VJP
    for each column of Q, each probe and each entry of the value. Second derivatives
    differentiate a Lanczos recurrence from each.

    **Cost**: at most `num_matvecs` applications; with r of them for Q, 4 n r^2 flops to
    keep it orthonormal, and blocks of n x r.

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

    ```

    **Reference**: Chen and Hallman (2023), Krylov-aware stochastic trace estimation, SIAM
    Journal on Matrix Analysis and Applications 44(3), doi:10.1137/22M1494257; the
    derivative is derived in `traceax/_functions/split.py`.
    """
    check_request("function_trace", operator, key, num_matvecs, 6)
    fn, structure = scalar_function("function_trace", fn, real_dtype(operator))
    if is_cheap(operator, num_matvecs):
        return exact_function_trace(operator, fn, structure)
    return deflated_trace(
        "function_trace", operator, fn, structure, key, num_matvecs, reorthogonalise
    )


def deflated_trace(
    name: str,
    operator: lx.AbstractLinearOperator,
    fn: Callable,
    structure: PyTree,
    key: PRNGKeyArray,
    num_matvecs: int,
    reorthogonalise: bool,
) -> Estimate:
    subject = MatrixFunction(LinearMap(prepare(operator)), fn)
    parts = split(num_matvecs, size(operator), 1 / 2)
    probes = draw_for(name, parts, key, operator)
    algorithm = partial(_deflated, parts=parts, reorthogonalise=reorthogonalise)
    degrees = independent_degrees_of_freedom(parts.num_probes)
    return estimate_of(subject, algorithm, probes, parts.num_matvecs, degrees, structure)


def _deflated(
    subject: MatrixFunction,
    probes: tuple[Inexact[Array, "n b"], Inexact[Array, "n k"]],
    *,
    parts: Split,
    reorthogonalise: bool,
) -> Outcome:
    block, tests = probes
    space = block_krylov(subject.linear_map, block, parts.depth)
    known, coarse = _known(space, parts)
    inside, by_coarse = known.samples(subject.fn), known.samples(subject.fn, coarse)
    remainder, scale = _complement(known, tests)
    rest, run = sample(subject, remainder, scale, parts.num_steps, reorthogonalise)
    error = rest.error(subject.linear_map, parts.num_steps)
    value, error = _sum(inside, by_coarse, rest, error)
    return Outcome(value, error, Traced((known, run)))


@jax.jit
def _complement(
    known: Run, tests: Inexact[Array, "n k"]
) -> tuple[Inexact[Array, "k n"], Float[Array, " k"]]:
    """The probes outside of Q, as rows, and the factors that resphere them."""
    q = known.basis[0, : known.coefficients.size].T
    remainder = tests - q @ (q.conj().T @ tests)
    remainder = (remainder - q @ (q.conj().T @ remainder)).T
    rank = q.shape[0] - jnp.sum(known.coefficients)
    return remainder, resphering(remainder, rank) / tests.shape[1]


@jax.jit
def _sum(
    inside: Inexact[Array, "p 1"],
    coarse: Inexact[Array, "p 1"],
    rest: Sampled,
    error: Float[Array, " p"],
) -> tuple[Inexact[Array, " p"], Float[Array, " p"]]:
    value = jnp.sum(inside, axis=1)
    quadrature = jnp.abs(value - jnp.sum(coarse, axis=1))
    return value + jnp.sum(rest.terms, axis=1), both_errors(error, quadrature)


@partial(jax.jit, static_argnums=1)
def _known(space: BlockKrylov, parts: Split) -> tuple[Run, Eigen]:
    """The run that reads tr(Q* f(A) Q), Q all blocks of the space but the last two, which
    lend it the accuracy of a quadrature; and a coarser decomposition, by one block less."""
    width, depth = parts.width, parts.depth
    total = depth * width
    kept = width * (depth - min(2, depth // 2))
    basis, filled = space.basis[:, :total], space.filled[:total]
    square = space.projection[:total]
    square = (square + square.conj().T) / 2
    # Columns that breakdown left empty: any Rayleigh quotient will do.
    square = jnp.where(jnp.diag(~filled), square[0, 0], square)
    fine, coarse = decompose_with_half(square[None], total - width)
    again = FromStarts(basis[:, :kept].T, parts.num_steps)
    coefficients = filled[None, :kept].astype(square.real.dtype)
    return Run(basis.T[None], fine, coefficients, again), coarse
