"""The trace of a matrix, and of its inverse."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse
from jaxtyping import Array

import traceax as tx
from traceax._command.matrix import Matrix, MatrixError, matrix_operator
from traceax._command.options import Options
from traceax._tasks.definite import definite, parenthesised
from traceax._tasks.task import Run, Task

# Each with the fewest applications that it can use.
_TRACES = {
    tx.trace: 1,
    tx.hutchinson_trace: 1,
    tx.hutchpp_trace: 3,
    tx.na_hutchpp_trace: 4,
    tx.xtrace: 2,
    tx.xnystrace: 1,
}
_OF_INVERSES = {tx.hutchinson_trace: 1, tx.xtrace: 2, tx.xnystrace: 1}

_TRACE = "tr(A), from products with A alone; exact: the sum of its diagonal"
_EXACT = "(--num-matvecs reaches n, and n products give the exact trace)"
_INVERSE = """\
tr({of}^-1); an application is a solve by conjugate gradients, to 1e-8
"""
_TOLERANCE = 1e-8

_PATTERN = """\
`trace` knows the pattern of the matrix, along which the inverse decays
"""


def trace_task(path: Path, matrix: Matrix, options: Options) -> Task:
    operator = matrix_operator(matrix)
    heading = _TRACE
    if options.num_matvecs >= matrix.size:
        heading += f"\n{_EXACT}"
    exact = _diagonal_sum(path, matrix)
    runs = _fitting(_TRACES, operator, options)
    return Task(heading, operator, runs, exact, matrix.hermitian)


def inverse_task(path: Path, matrix: Matrix, options: Options) -> Task:
    """With the pattern of a sparse matrix for the front door, and without for the rest."""
    positive, spectrum = definite(path, matrix, options)
    operator = inverse_operator(positive)
    heading = _INVERSE.format(of=parenthesised(options.shift))
    pattern = pattern_of(positive)
    if pattern is not None:
        heading += _PATTERN
    exact = None if spectrum is None else float(np.sum(1 / spectrum))
    door = partial(tx.trace, num_matvecs=options.num_matvecs, pattern=pattern)
    runs = {"trace": door, **_fitting(_OF_INVERSES, operator, options)}
    return Task(heading.rstrip(), operator, runs, exact)


def inverse_operator(
    positive: Matrix, *, tolerance: float = 1e-8
) -> lx.AbstractLinearOperator:
    """By conjugate gradients, of a matrix divided by its size.

    The tolerance of a solver is absolute, too: eigenvalues of at most 1 make solutions that
    are no shorter than right-hand sides.
    """
    size = float(np.asarray(abs(positive.entries).sum(axis=1)).max())
    divided = matrix_operator(positive._replace(entries=positive.entries / size))
    solver = lx.CG(_TOLERANCE, _TOLERANCE, max_steps=min(10 * positive.size, 20_000))
    tags = {lx.positive_semidefinite_tag}
    return lx.FunctionLinearOperator(
        lambda v: _solution(divided, v, solver) / size,
        jax.ShapeDtypeStruct((positive.size,), positive.entries.dtype),
        frozenset(tags | ({lx.symmetric_tag} if positive.symmetric else set())),
    )


def _solution(operator: lx.AbstractLinearOperator, v: Array, solver: lx.CG) -> Array:
    """NaN where the steps did not suffice, which is told when all are through."""
    solution = lx.linear_solve(operator, v, solver, throw=False)
    return jnp.where(solution.result == lx.RESULTS.successful, solution.value, jnp.nan)


def pattern_of(matrix: Matrix) -> scipy.sparse.csr_array | None:
    return matrix.entries if scipy.sparse.issparse(matrix.entries) else None


def _fitting(
    minima: dict, operator: lx.AbstractLinearOperator, options: Options
) -> dict[str, Run]:
    """The estimators whose minimum the budget reaches, and whose promise is kept."""
    positive = lx.is_positive_semidefinite(operator)
    return {
        estimator.__name__: partial(estimator, num_matvecs=options.num_matvecs)
        for estimator, minimum in minima.items()
        if options.num_matvecs >= min(minimum, operator.in_size())
        and (positive or estimator is not tx.xnystrace)
    }


def _diagonal_sum(path: Path, matrix: Matrix) -> float | complex:
    with np.errstate(all="ignore"):
        exact = matrix.entries.diagonal().sum().item()
    if not np.isfinite(exact):
        raise MatrixError(
            f"{path} must have a finite trace, but the sum of its diagonal overflows "
            "double precision. Divide the matrix by a power of ten."
        )
    return exact.real if matrix.hermitian else exact
