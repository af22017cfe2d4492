"""A matrix of the user's, and what was asked about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from traceax._command.files import read_matrix
from traceax._command.matrix import Matrix, MatrixError
from traceax._command.memory import Blocks, too_large_to_read
from traceax._command.options import Options
from traceax._command.progress import progress
from traceax._command.report import (
    LEGEND,
    as_json,
    of_matrix,
    of_rows,
    print_table,
)
from traceax._command.table import Row
from traceax._tasks.density import check_matplotlib, density, draw
from traceax._tasks.diagonals import diagonal, write
from traceax._tasks.functions import estrada_task, logdet_task, norm_task
from traceax._tasks.task import Task, as_row, compiled, interval
from traceax._tasks.traces import inverse_task, trace_task

_TASKS: dict[str, Callable[[Path, Matrix, Options], Task]] = {
    "trace": trace_task,
    "inverse": inverse_task,
    "logdet": logdet_task,
    "estrada": estrada_task,
    "norm": norm_task,
}


def own_matrix(path: Path, name: str, options: Options) -> None:
    """Read it, and print what was asked for. `name` is the user's for the file."""
    if options.task == "density":
        check_matplotlib()
    with enough_memory(lambda: too_large_to_read(path)), progress(f"reading {name}"):
        matrix = read_matrix(path)
    blocks = _blocks(matrix, options)
    if jax.default_backend() == "cpu":  # Others have a memory of their own.
        blocks.check(path)
    if not options.json:
        print(f"{name}: {matrix.describe()}\n", flush=True)
    with enough_memory(lambda: blocks.too_large(path)):
        match options.task:
            case "density":
                _density(path, name, matrix, options)
            case "diagonal":
                _diagonal(path, name, matrix, options)
            case _:
                _table(path, name, matrix, options)


def _blocks(matrix: Matrix, options: Options) -> Blocks:
    num_matvecs = min(options.num_matvecs, matrix.size)
    fewest = min(options.fewest, matrix.size)
    return Blocks(matrix.size, matrix.entries.dtype.itemsize, num_matvecs, fewest)


@contextmanager
def enough_memory(otherwise: Callable[[], MatrixError]) -> Iterator[None]:
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, MemoryError):
            raise
        raise otherwise() from error


def _table(path: Path, name: str, matrix: Matrix, options: Options) -> None:
    with progress("the exact answer"):
        task = _TASKS[options.task](path, matrix, options)
    if not options.json:
        print(f"{task.heading}\n", flush=True)
    rows = list(_rows(path, task, options))
    if options.json:
        told = of_rows(rows, task.exact)
        print(as_json(options.task, told, of_matrix(matrix, name)))
        return
    print_table(rows, task.exact)
    print(LEGEND)


def _rows(path: Path, task: Task, options: Options) -> Iterator[Row]:
    """The front door's first; intervals where they are read."""
    found = list(compiled(task, options.seed))
    for one in found:
        row = as_row(one, real=task.real)
        if one is found[0]:
            _check_told(path, options.task, row.value)
        if options.json:
            row = row._replace(interval=interval(one, real=task.real))
        yield row


def _check_told(path: Path, task: str, value: np.ndarray | float | complex) -> None:
    """Solves that did not end, and logarithms of negative numbers, are NaN."""
    if not np.isnan(value).any():
        return
    if task in ("inverse", "diagonal"):
        raise MatrixError(
            f"{path} is too ill-conditioned for conjugate gradients, or singular: they did "
            "not converge. Pass --shift, or a larger one."
        )
    raise MatrixError(
        f"{path} must be positive definite for a logarithm, and of numbers whose functions "
        "double precision holds, but shows itself not to be. Pass --shift, or a larger "
        "one, or divide the matrix."
    )


def _diagonal(path: Path, name: str, matrix: Matrix, options: Options) -> None:
    found = diagonal(path, matrix, options)
    estimate = found.measured.estimate
    _check_told(path, "diagonal", np.asarray(estimate.value))
    assert options.output is not None
    write(options.output, estimate)
    told = {
        "name": found.measured.name,
        "output": str(options.output),
        "relative_error": found.deviation,
        "num_matvecs": int(estimate.num_matvecs),
        "seconds": found.measured.seconds(),
    }
    if options.json:
        print(as_json("diagonal", told, of_matrix(matrix, name)))
        return
    print(f"{found.words} by tx.{found.measured.name}: {estimate}")
    _tell_error("relative error of the whole", found.deviation)
    print(f"{options.output}: two rows, the diagonal and its standard errors")


def _density(path: Path, name: str, matrix: Matrix, options: Options) -> None:
    found = density(path, matrix, options)
    estimate = found.measured.estimate
    assert options.output is not None
    draw(found, options.output, f"{name}, n = {matrix.size}")
    told = {
        "name": "spectral_density",
        "output": str(options.output),
        "grid": found.grid.tolist(),
        "value": np.asarray(estimate.value).tolist(),
        "standard_error": np.asarray(estimate.standard_error).tolist(),
        "width": found.width,
        "relative_error": found.deviation,
        "num_matvecs": int(estimate.num_matvecs),
        "seconds": found.measured.seconds(),
    }
    if options.json:
        print(as_json("density", told, of_matrix(matrix, name)))
        return
    ends = f"{found.grid[0]:.4g} to {found.grid[-1]:.4g}"
    print(
        f"the density of eigenvalues from {ends}, by Gaussians of width {found.width:.2g}"
    )
    print(f"by tx.spectral_density: {estimate}")
    _tell_error("largest error, relative to the highest peak", found.deviation)
    print(f"{options.output}: the picture")


def _tell_error(words: str, error: float | None) -> None:
    if error is not None:
        print(f"{words}: {error:.1e}, by dense linear algebra")
