"""`python -m traceax [FILE]`: the estimators side by side, on a real matrix or on yours."""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import NamedTuple, NoReturn

import equinox as eqx
import jax
import lineax as lx
import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from jaxtyping import PRNGKeyArray

import traceax as tx
from traceax._command.files import read_matrix
from traceax._command.matrix import (
    Matrix,
    MatrixError,
    examine,
    matrix_operator,
)
from traceax._command.memory import Blocks, too_large_to_read
from traceax._command.table import Row, table

Estimator = Callable[[lx.AbstractLinearOperator, PRNGKeyArray, int], tx.Estimate]

# Each with the fewest applications that it can use.
_ESTIMATORS: dict[Estimator, int] = {
    tx.hutchinson_trace: 1,
    tx.hutchpp_trace: 3,
    tx.na_hutchpp_trace: 4,
    tx.xtrace: 2,
    tx.xnystrace: 1,
}

_ATTRIBUTION = """\
The road network of Minnesota: Gleich/minnesota of the SuiteSparse Matrix Collection,
CC-BY 4.0. Its rows are intersections, its entries roads.
"""

_TRIANGLES = """\
1. How many triangles of roads are there? tr(A^3)/6, with A the adjacency matrix.
   One application of A^3/6 is three products with A.
"""

_INVERSE = """\
2. tr((I + L)^-1), with L the Laplacian of the graph. One application of the inverse
   is a solve by conjugate gradients: lx.invert(operator, lx.CG(rtol=1e-8, atol=1e-8)).
"""

_LEGEND = """\
matvecs: how often the operator, or its adjoint, was applied
time:    the best of three runs, after compilation"""


class Job(NamedTuple):
    """An operator whose trace is sought, and the trace."""

    operator: lx.AbstractLinearOperator
    exact: float | complex


def main(argv: list[str]) -> int:
    """Print the tables; the exit status is 2 after wrong use, told in one line."""
    jax.config.update("jax_enable_x64", True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # A terminal may lack the ± sign.
    try:
        options = _parse(argv)
        if options.file is None:
            _tour(options)
        else:
            _own_matrix(options)
    except MatrixError as error:
        message = " ".join(str(error).split())
        print(f"traceax: error: {message}", file=sys.stderr)
        return 2
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MatrixError(f"{message}. `{self.prog} --help` lists what may be given.")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m traceax",
        description="Estimate the trace of a matrix in a file, by each method that fits; "
        "with no file, two traces of a road network.",
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a square matrix: MatrixMarket (.mtx, .mtx.gz), SciPy sparse (.npz) or NumPy "
        "(.npy)",
    )
    parser.add_argument(
        "--num-matvecs",
        type=int,
        default=100,
        help="how many products with the matrix an estimate may cost (default: 100)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the random probes (default: 0)"
    )
    options = parser.parse_args(argv)
    _check_options(options)
    return options


def _check_options(options: argparse.Namespace) -> None:
    fewest = min(_ESTIMATORS.values())
    if options.num_matvecs < fewest:
        raise MatrixError(
            f"--num-matvecs must be at least {fewest}, the fewest products that any "
            f"estimator can use, but got {options.num_matvecs}. Raise it, to 100 say."
        )
    if not 0 <= options.seed < 2**32:
        raise MatrixError(
            f"--seed must be between 0 and 2^32 - 1, but got {options.seed}. Pass 0, say."
        )


def _own_matrix(options: argparse.Namespace) -> None:
    with _enough_memory(lambda: too_large_to_read(options.file)):
        matrix = read_matrix(options.file)
        job = Job(matrix_operator(matrix), _diagonal_sum(options.file, matrix))
    blocks = _blocks(matrix, options)
    if jax.default_backend() == "cpu":  # Others have a memory of their own.
        blocks.check(options.file)
    print(f"{options.file}: {matrix.describe()}\n")
    print("tr(A), from products with A alone; exact: the sum of its diagonal")
    if options.num_matvecs >= matrix.size:
        print("(--num-matvecs reaches n, and n products give the exact trace)")
    print(flush=True)
    with _enough_memory(lambda: blocks.too_large(options.file)):
        _compare(job, options, real=matrix.hermitian)
    print(_LEGEND)


def _blocks(matrix: Matrix, options: argparse.Namespace) -> Blocks:
    num_matvecs, fewest = min(options.num_matvecs, matrix.size), min(_ESTIMATORS.values())
    return Blocks(matrix.size, matrix.entries.dtype.itemsize, num_matvecs, fewest)


@contextmanager
def _enough_memory(otherwise: Callable[[], MatrixError]) -> Iterator[None]:
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, MemoryError):
            raise
        raise otherwise() from error


def _diagonal_sum(path: Path, matrix: Matrix) -> float | complex:
    with np.errstate(all="ignore"):
        exact = matrix.entries.diagonal().sum().item()
    if not np.isfinite(exact):
        raise MatrixError(
            f"{path} must have a finite trace, but the sum of its diagonal overflows "
            "double precision. Divide the matrix by a power of ten."
        )
    return exact


def _tour(options: argparse.Namespace) -> None:
    shipped = resources.files("traceax") / "data" / "minnesota.mtx"
    with resources.as_file(shipped) as path:
        matrix = read_matrix(path)
    print(f"{shipped.name}: {matrix.describe()}\n{_ATTRIBUTION}")
    print(_TRIANGLES, flush=True)
    _compare(_triangles(matrix), options, real=True)
    print(_INVERSE, flush=True)
    _compare(_shifted_inverse(matrix), options, real=True)
    print(_LEGEND)


def _triangles(matrix: Matrix) -> Job:
    """Every closed walk of three steps starts at one of 3 corners, in one of 2 senses."""
    a = matrix.entries
    product = matrix_operator(matrix).mv
    operator = lx.FunctionLinearOperator(
        lambda v: product(product(product(v))) / 6,
        jax.ShapeDtypeStruct((matrix.size,), a.dtype),
        lx.symmetric_tag,
    )
    return Job(operator, float((a @ a).multiply(a).sum()) / 6)


def _shifted_inverse(matrix: Matrix) -> Job:
    """The inverse of I + L by conjugate gradients, and its trace by a sparse factor."""
    a = matrix.entries
    degrees = np.asarray(a.sum(axis=1)).ravel()
    shifted = scipy.sparse.csr_array(scipy.sparse.diags_array(1 + degrees) - a)
    positive = matrix_operator(examine(shifted, matrix.field))  # By Gershgorin's discs.
    inverse = scipy.sparse.linalg.splu(shifted.tocsc()).solve(np.eye(matrix.size))
    operator = lx.invert(positive, lx.CG(rtol=1e-8, atol=1e-8))
    return Job(operator, float(np.trace(inverse)))


def _compare(job: Job, options: argparse.Namespace, *, real: bool) -> None:
    """Run what fits, and print the table. `real`: the trace is known to be."""
    positive = lx.is_positive_semidefinite(job.operator)
    rows = [
        _measure(estimator, job.operator, options, real=real)
        for estimator, minimum in _ESTIMATORS.items()
        if options.num_matvecs >= min(minimum, job.operator.in_size())
        and (positive or estimator is not tx.xnystrace)
    ]
    exact = job.exact.real if real else job.exact
    print("\n".join(table(rows, exact)), end="\n\n")


def _measure(
    estimator: Estimator,
    operator: lx.AbstractLinearOperator,
    options: argparse.Namespace,
    *,
    real: bool,
) -> Row:
    run = eqx.filter_jit(estimator)
    arguments = operator, jax.random.key(options.seed), options.num_matvecs
    result = jax.block_until_ready(run(*arguments))
    seconds = min(_seconds(run, *arguments) for _ in range(3))
    # lineax has no tag for Hermitian: the estimate of a real trace may come out complex.
    value = result.value.real.item() if real else result.value.item()
    error = result.standard_error.item()
    return Row(estimator.__name__, value, error, int(result.num_matvecs), seconds)


def _seconds(run: Callable[..., tx.Estimate], *arguments: object) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
