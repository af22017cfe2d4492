"""Diagonals of inverses and exponentials, written to a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import traceax as tx
from traceax._command.matrix import Matrix, MatrixError, matrix_operator
from traceax._command.options import Options
from traceax._command.spectrum import DENSE, dense, ends
from traceax._tasks.definite import check_hermitian, definite, parenthesised
from traceax._tasks.task import Compiled, Run, only, split
from traceax._tasks.traces import inverse_operator, pattern_of

_LARGEST = 700.0


class Diagonal(NamedTuple):
    """What was asked for, what the front door says, and the exact one of a small matrix."""

    words: str
    measured: Compiled
    exact: np.ndarray | None

    @property
    def deviation(self) -> float | None:
        """The root-mean-square error, relative to the whole diagonal."""
        if self.exact is None:
            return None
        error = np.linalg.norm(np.asarray(self.measured.estimate.value) - self.exact)
        return float(error / np.linalg.norm(self.exact))


def diagonal(path: Path, matrix: Matrix, options: Options) -> Diagonal:
    of_inverse = options.of == "inverse"
    return (_of_inverse if of_inverse else _of_exponential)(path, matrix, options)


def _of_inverse(path: Path, matrix: Matrix, options: Options) -> Diagonal:
    positive = definite(path, matrix, options).matrix
    door = partial(
        tx.diagonal, num_matvecs=options.num_matvecs, pattern=pattern_of(positive)
    )
    measured = only("diagonal", door, inverse_operator(positive), options.seed)
    exact = None
    if positive.size <= DENSE:
        exact = np.diag(np.linalg.inv(dense(positive.entries))).real
    return Diagonal(f"diag({parenthesised(options.shift)}^-1)", measured, exact)


def _of_exponential(path: Path, matrix: Matrix, options: Options) -> Diagonal:
    check_hermitian(path, matrix, "--estrada")
    top = ends(matrix).high
    if top > _LARGEST:
        raise MatrixError(
            f"{path} must have eigenvalues of at most {_LARGEST:g} for the diagonal of "
            f"exp(A), because larger ones overflow, but has {top:.4g}. Divide the matrix "
            f"by {np.ceil(top / _LARGEST):.0f}, or subtract a multiple of I."
        )
    run = _exponential(options.num_matvecs)
    measured = only("function_diagonal", run, matrix_operator(matrix), options.seed)
    return Diagonal("diag(exp(A))", measured, _exact(matrix))


def _exponential(num_matvecs: int) -> Run:
    counts = split(num_matvecs, probes_a_step=2.0)

    def run(operator, key):
        return tx.function_diagonal(operator, jnp.exp, key, **counts)

    return run


def _exact(matrix: Matrix) -> np.ndarray | None:
    if matrix.size > DENSE:
        return None
    values, vectors = np.linalg.eigh(dense(matrix.entries))
    return (np.abs(vectors) ** 2) @ np.exp(values)


def write(output: Path, estimate: tx.Estimate) -> None:
    """Two rows: the diagonal, and its standard errors."""
    rows = np.stack([jnp.real(estimate.value), estimate.standard_error])
    try:
        with output.open("wb") as target:
            np.save(target, rows)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise MatrixError(
            f"{output} cannot be written ({reason}). Name a file elsewhere."
        ) from error
