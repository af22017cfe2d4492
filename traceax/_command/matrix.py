"""Matrices examined for their properties, and made into lineax operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse
from jax.experimental import sparse

# Up to this dimension all eigenvalues are computed to see whether any is negative.
_SPECTRUM = 2000


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
