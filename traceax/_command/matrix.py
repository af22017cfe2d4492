"""Matrices from files: read, examined, and made into lineax operators."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.io
import scipy.sparse
from jax.experimental import sparse

# Up to this dimension all eigenvalues are computed to see whether any is negative.
_SPECTRUM = 2000

_WRITE = "Write it with scipy.io.mmwrite (.mtx) or scipy.sparse.save_npz (.npz)."


class MatrixError(ValueError):
    """What is wrong with a matrix, and the cure, in one line for the user."""


class Matrix(NamedTuple):
    """A square matrix in double precision, and what is known about it.

    `entries` is a `scipy.sparse.csr_array` or a NumPy array; `field` says what kind of
    numbers the file held. `positive` is how the matrix was proven positive semidefinite,
    "" if proven not to be, None if neither.
    """

    entries: Any
    field: str
    symmetric: bool
    hermitian: bool
    positive: str | None

    @property
    def size(self) -> int:
        return self.entries.shape[0]

    @property
    def num_nonzeros(self) -> int:
        return int(np.count_nonzero(_values(self.entries)))

    def describe(self) -> str:
        """One line: dimension, entries, their type, and the properties found."""
        kind = "sparse" if scipy.sparse.issparse(self.entries) else "dense"
        dtype = str(self.entries.dtype)
        field = dtype if self.field == dtype else f"{self.field} read as {dtype}"
        return (
            f"n = {self.size}, nnz = {self.num_nonzeros}, {kind}, {field}, "
            f"{self._properties()}"
        )

    def _properties(self) -> str:
        if not self.hermitian:
            is_complex = np.iscomplexobj(self.entries)
            symmetric = "complex symmetric, " if self.symmetric else ""
            return f"{symmetric}not Hermitian" if is_complex else "not symmetric"
        name = "symmetric" if self.symmetric else "Hermitian"
        if self.positive is None:
            return f"{name}, not known to be positive semidefinite"
        if not self.positive:
            return f"{name}, not positive semidefinite"
        return f"{name}, positive semidefinite (by its {self.positive})"


def read_matrix(path: Path) -> Matrix:
    """A matrix from a MatrixMarket (.mtx, .mtx.gz) or SciPy (.npz) file."""
    if not os.path.exists(path):  # Unlike Path.exists, also False for impossible names.
        raise MatrixError(
            f"{path} does not exist. Check the path, or give none for a tour on a road "
            "network that comes with traceax."
        )
    if not path.is_file():
        what = "a directory" if path.is_dir() else "not a regular file"
        raise MatrixError(f"{path} is {what}. Name an .mtx, .mtx.gz or .npz file.")
    entries, field = _load(path)
    _check(path, entries)
    return examine(_in_double_precision(path, entries), field)


def examine(entries: Any, field: str) -> Matrix:
    """Find the properties of a square matrix in double precision."""
    symmetric = _equal(entries, entries.T)
    hermitian = _equal(entries, entries.conj().T)
    positive = _prove_positive(entries) if hermitian else ""
    return Matrix(entries, field, symmetric, hermitian, positive)


def matrix_operator(matrix: Matrix) -> lx.AbstractLinearOperator:
    """The matrix as an operator, tagged with what is known; a sparse one stays sparse.

    For lineax a symmetric operator has A = A^T, complex or not: only the tag for positive
    semidefinite means that a complex operator is Hermitian.
    """
    tags = {lx.symmetric_tag} if matrix.symmetric else set[object]()
    tags |= {lx.positive_semidefinite_tag} if matrix.positive else set()
    if not scipy.sparse.issparse(matrix.entries):
        return lx.MatrixLinearOperator(jnp.asarray(matrix.entries), frozenset(tags))
    product = sparse.BCOO.from_scipy_sparse(matrix.entries)
    structure = jax.ShapeDtypeStruct((matrix.size,), product.dtype)
    return lx.FunctionLinearOperator(lambda v: product @ v, structure, frozenset(tags))


def _load(path: Path) -> tuple[Any, str]:
    is_npz = path.suffix.lower() == ".npz"
    try:
        if is_npz:
            entries = scipy.sparse.load_npz(path)
            _check_indices(entries)
            return entries, str(entries.dtype)
        # In this order: what is no MatrixMarket file at all fails before it is parsed.
        field = scipy.io.mminfo(path)[4]
        entries = scipy.io.mmread(path, spmatrix=False)
    except Exception as error:  # Garbage raises whatever the parsers stumble over.
        what = "a sparse .npz matrix of SciPy" if is_npz else "a MatrixMarket file"
        reason = error.strerror if isinstance(error, OSError) else None
        reason = reason or str(error) or type(error).__name__
        raise MatrixError(
            f"{path} cannot be read as {what} ({reason.rstrip('.')}). {_WRITE}"
        ) from error
    return entries, str(entries.dtype) if field in ("real", "complex") else field


def _check_indices(entries: Any) -> None:
    """SciPy trusts the indices of a compressed matrix: wrong ones would crash later."""
    if entries.format in ("csr", "csc", "bsr"):
        entries.check_format(full_check=True)


def _check(path: Path, entries: Any) -> None:
    if entries.ndim != 2 or entries.shape[0] != entries.shape[1]:
        shape = " x ".join(map(str, entries.shape))
        raise MatrixError(
            f"{path} must hold a square matrix, because only square ones have a trace, but "
            f"its shape is {shape}. Take a square block, or its product with its transpose."
        )
    if not 0 < entries.shape[0] < 2**31:
        raise MatrixError(
            f"{path} must have between 1 and 2^31 - 1 rows, but has {entries.shape[0]}. "
            "Take a smaller block, or one that is not empty."
        )
    if entries.dtype.kind not in "biufc":
        raise MatrixError(
            f"{path} must hold numbers, but its entries are of type {entries.dtype}. "
            f"Convert them to float. {_WRITE}"
        )


def _in_double_precision(path: Path, entries: Any) -> Any:
    """As a `csr_array` without duplicates, or a NumPy array, of finite numbers."""
    dtype = np.complex128 if entries.dtype.kind == "c" else np.float64
    with np.errstate(over="ignore"):
        if scipy.sparse.issparse(entries):
            entries = scipy.sparse.csr_array(entries.astype(dtype))
            entries.sum_duplicates()
        else:
            entries = np.asarray(entries, dtype)
    if not np.isfinite(_values(entries)).all():
        raise MatrixError(
            f"{path} must have finite entries, but some are NaN or infinite in double "
            "precision. Replace them, or leave their rows and columns out."
        )
    return entries


def _values(entries: Any) -> np.ndarray:
    return entries.data if scipy.sparse.issparse(entries) else entries


def _equal(a: Any, b: Any) -> bool:
    different = a != b
    return not (different.nnz if scipy.sparse.issparse(different) else different.any())


def _prove_positive(entries: Any) -> str | None:
    """How a Hermitian matrix is known to be positive semidefinite; see `Matrix`.

    Gershgorin: every eigenvalue lies within sum_{j != i} |a_ij| of some a_ii. The computed
    eigenvalues of a small matrix may be negative by rounding: n eps |largest|.
    """
    diagonal = entries.diagonal().real
    if diagonal.min() < 0:
        return ""
    radii = _radii(entries)
    if (diagonal >= radii).all():
        return "Gershgorin discs"
    if (radii[diagonal == 0] > 0).any():  # Some 2 x 2 minor is negative.
        return ""
    if entries.shape[0] > _SPECTRUM:
        return None
    dense = entries.toarray() if scipy.sparse.issparse(entries) else entries
    spectrum = np.linalg.eigvalsh(dense / np.abs(dense).max())
    rounding = len(spectrum) * np.finfo(float).eps * np.abs(spectrum).max()
    return "eigenvalues" if spectrum.min() >= -rounding else ""


def _radii(entries: Any) -> np.ndarray:
    """The sums of |a_ij| over j != i. The diagonal is taken out first: no cancellation."""
    diagonal = entries.diagonal()
    sparse_entries = scipy.sparse.issparse(entries)
    diagonal = scipy.sparse.diags_array(diagonal) if sparse_entries else np.diag(diagonal)
    with np.errstate(over="ignore"):
        return np.asarray(abs(entries - diagonal).sum(axis=1)).ravel()
