"""Eigenvalues of Hermitian matrices, all of them where they are few, else the ends."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
import scipy.sparse.linalg

from traceax._command.matrix import Matrix

# Up to this dimension dense linear algebra takes a few seconds.
DENSE = 2000


class Ends(NamedTuple):
    """The smallest and the largest eigenvalue."""

    low: float
    high: float


def dense(entries: Any) -> np.ndarray:
    return entries.toarray() if scipy.sparse.issparse(entries) else entries


def shifted(entries: Any, shift: float) -> Any:
    """A + shift I, sparse if A is."""
    if not scipy.sparse.issparse(entries):
        return entries + shift * np.eye(len(entries))
    identity = scipy.sparse.eye_array(entries.shape[0])
    return scipy.sparse.csr_array(entries + shift * identity)


def eigenvalues(matrix: Matrix) -> np.ndarray | None:
    """All of them, in order, up to n = 2000."""
    if matrix.size > DENSE:
        return None
    entries = dense(matrix.entries)
    scale = np.abs(entries).max() or 1.0
    return np.linalg.eigvalsh(entries / scale) * scale


def ends(matrix: Matrix) -> Ends:
    every = eigenvalues(matrix)
    if every is not None:
        return Ends(float(every[0]), float(every[-1]))
    return Ends(_end(matrix, "SA"), _end(matrix, "LA"))


def largest_eigenvalues(entries: Any, count: int) -> np.ndarray:
    """Those of largest modulus."""
    return _lanczos(entries, "LM", count)


def _end(matrix: Matrix, which: str) -> float:
    """Gershgorin's bound where it takes too long."""
    try:
        return float(_lanczos(matrix.entries, which, 1)[0])
    except scipy.sparse.linalg.ArpackNoConvergence:
        return _bound(matrix, which)


def _lanczos(entries: Any, which: str, count: int) -> np.ndarray:
    """By ARPACK, from a start that is always the same."""
    start = np.random.default_rng(0).standard_normal(entries.shape[0])
    settings: Any = {"tol": 1e-6, "maxiter": 50, "return_eigenvectors": False}
    found = scipy.sparse.linalg.eigsh(entries, count, which=which, v0=start, **settings)
    return np.asarray(found)


def _bound(matrix: Matrix, which: str) -> float:
    """Gershgorin's: no eigenvalue lies beyond it."""
    diagonal = matrix.entries.diagonal().real
    radii = np.asarray(abs(matrix.entries).sum(axis=1)).ravel() - abs(diagonal)
    return float((diagonal - radii).min() if which == "SA" else (diagonal + radii).max())
