"""`python -m traceax [FILE]`: estimates of a matrix in a file, or of a road network."""

from __future__ import annotations

import argparse
import gzip
import io
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import lineax as lx
import numpy as np
import scipy.io
from scipy.sparse import csc_array, csr_array, diags_array, issparse, load_npz
from scipy.sparse.linalg import LinearOperator, splu

import traceax as tx

DENSE = 4000  # Up to this dimension a dense factorisation takes about a second.
# For the tour, whose programs run once: to optimise them takes longer than to run them.
QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def read_matrix(path: Path) -> Any:
    """Read a square matrix of finite numbers, in double precision, sparse or dense.

    If anything is wrong with the file, raise a `ValueError` of one line that names it."""
    array = partial(np.load, mmap_mode="r", allow_pickle=False)
    reader = {".npz": _read_npz, ".npy": array}.get(path.suffix.lower(), _read_market)
    try:
        return _in_double_precision(reader(path))
    except Exception as error:  # Damaged files make parsers raise errors of any class.
        reason = (str(error) or type(error).__name__).split(". ")[0].rstrip(".")
        message = f"{path} cannot be read: {reason[:200]}. Write a square matrix by "
        message += "scipy.io.mmwrite (.mtx), scipy.sparse.save_npz or numpy.save."
        raise ValueError("".join(filter(str.isprintable, message))) from error


def _read_npz(path: Path) -> Any:
    matrix = load_npz(path)
    # SciPy 1.17 checks all but this, without which the conversion corrupts memory.
    if matrix.format == "bsr" and np.any(np.mod(matrix.shape, matrix.blocksize)):
        raise ValueError(f"Its blocks of shape {matrix.blocksize} do not divide its shape")
    if hasattr(matrix, "check_format"):
        matrix.check_format(full_check=True)
    return matrix


def _read_market(path: Path) -> Any:
    """Read text, and check its characters and the number of its words, because SciPy 1.17
    reads 1.0D+02 as 1, ignores what follows a number, and crashes at null bytes."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        text = stream.read()
    found = re.fullmatch(rb"(?s:((?:\s*%[^\0\n]*\n)+)(.*))", text)
    header, numbers = found.groups() if found else (b"", b"x")
    numbers = numbers.translate(bytes.maketrans(b"dDE", b"eee"))
    if not re.fullmatch(rb"[-+.\de\s]*+", numbers):
        raise ValueError("It is not a %%MatrixMarket line, comments, and lines of numbers")
    text = header + numbers
    rows, columns, count, layout, field, _ = scipy.io.mminfo(io.BytesIO(text))
    _check_shape((rows, columns))  # SciPy 1.17 crashes at 0 x 0
    words = 3 + count * (2 + {"pattern": 0, "complex": 2}.get(field, 1))
    if layout == "coordinate" and len(numbers.split()) != words:
        raise ValueError(f"It has {len(numbers.split())} numbers where {words} must be")
    return scipy.io.mmread(io.BytesIO(text), spmatrix=False)


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or shape[0] != shape[1] or 0 in shape:
        raise ValueError(f"Its shape is {' x '.join(map(str, shape))}")


def _in_double_precision(matrix: Any) -> Any:
    _check_shape(matrix.shape)
    if matrix.dtype.kind not in "biufc":
        raise ValueError(f"Its entries are of type {matrix.dtype}, and no numbers")
    matrix = matrix.astype(complex if matrix.dtype.kind == "c" else float)
    if issparse(matrix):
        matrix = csr_array(matrix)
        matrix.sum_duplicates()
    if not np.isfinite(abs(matrix).max()):
        raise ValueError("Some of its entries are NaN or infinite")
    return matrix


def of_matrix(matrix: Any) -> None:
    """Print the estimates that any matrix has, and, if it is definite, `logdet`."""
    key = jax.random.key(0)
    diagonal, hermitian = matrix.diagonal(), abs(matrix - matrix.conj().T).max() == 0
    kind = "Hermitian" if hermitian else "not Hermitian"
    print(f"n = {len(diagonal)}, nnz = {(matrix != 0).sum()}, {kind}", flush=True)
    tags = [lx.symmetric_tag] if hermitian and not np.iscomplexobj(matrix) else []
    # By its matvecs alone: the trace of a stored matrix is known.
    stored = tx.as_operator(matrix)
    operator = tx.as_operator(stored.mv, stored.in_structure(), tags=tags)
    _show("trace", tx.trace(operator, key), diagonal.sum())
    norm = tx.frobenius_norm_squared(operator, key, 100)
    _show("frobenius_norm_squared", norm, (abs(matrix) ** 2).sum())
    definite, exact = _definite(matrix) if hermitian else (False, None)
    if definite:
        tagged = lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)
        _show("logdet", tx.logdet(tagged, key), exact)


def _definite(matrix: Any) -> tuple[bool, float | None]:
    """Return whether a Hermitian matrix is seen to be positive definite, and its exact
    log-determinant if it is known. Cholesky's factorisation of a small matrix gives both. A
    large matrix is taken for definite if its diagonal dominates."""
    if matrix.shape[0] > DENSE:
        sums = np.asarray(abs(matrix).sum(axis=1)).ravel()
        return bool(np.all(2 * matrix.diagonal().real > sums)), None
    try:
        factor = np.linalg.cholesky(matrix.toarray() if issparse(matrix) else matrix)
    except np.linalg.LinAlgError:
        return False, None
    return True, 2 * np.sum(np.log(factor.diagonal().real))


def _show(name: str, estimate: tx.Estimate, exact: Any = None) -> None:
    known = "" if exact is None else f"; exact: {exact:.10g}"
    print(f"  {name}: {estimate}{known}", flush=True)


def tour() -> None:
    """Estimate two traces of a road network."""
    os.environ.setdefault("XLA_FLAGS", QUICKLY)
    key = jax.random.key(0)
    roads = read_matrix(Path(__file__).parent / "data" / "minnesota.mtx")
    print(f"""\
Roads of Minnesota: {roads.shape[0]} intersections, {roads.nnz // 2} roads, a graph of the
SuiteSparse Matrix Collection (Gleich/minnesota, CC-BY 4.0). A: its adjacency.

How many triangles? tr(A^3)/6; a matvec is three products with A.""")
    a = tx.as_operator(roads)
    cube = lx.TaggedLinearOperator(a @ a @ a / 6, lx.symmetric_tag)
    _show("trace(operator, key, 100)", tx.trace(cube, key, 100))
    _show("trace(operator, key, 12, pattern=A)", tx.trace(cube, key, 12, pattern=roads))
    print(f"  exact: {(roads @ roads).multiply(roads).sum() / 6:g}\n")
    print("What is tr((I + L)^-1), L the Laplacian? A matvec is a solve by SciPy.")
    shifted = csc_array(diags_array(1 + roads.sum(axis=1)) - roads)
    solve = splu(shifted).solve  # of one vector or of a block
    of_block = {"matvec": solve, "rmatvec": solve, "matmat": solve, "dtype": float}
    inverse: Any = LinearOperator(shifted.shape, **of_block)
    inverse = tx.as_operator(inverse, tags=lx.positive_semidefinite_tag)
    _show("trace(operator, key, 100)", tx.trace(inverse, key, 100))
    _show("trace(operator, key, 100, pattern=A)", tx.trace(inverse, key, pattern=roads))
    print(f"  exact: {np.linalg.inv(shifted.toarray()).trace():.10g}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m traceax", description=__doc__)
    parser.add_argument("file", nargs="?", help="a matrix: .mtx, .mtx.gz, .npz or .npy")
    file = parser.parse_args(argv).file
    jax.config.update("jax_enable_x64", True)
    try:
        matrix = read_matrix(Path(file)) if file else None
    except ValueError as error:
        print(f"traceax: {error}", file=sys.stderr)
        return 2
    with np.errstate(all="ignore"):  # What overflows is shown as infinite.
        tour() if matrix is None else of_matrix(matrix)
    return 0


if __name__ == "__main__":
    for name in {"SIGINT", "SIGPIPE"} & set(dir(signal)):  # They end it without a word.
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
