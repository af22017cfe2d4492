"""Matrices from files: nothing is believed, or read, that was not checked."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from traceax._command.claim import WRITE, Claim, in_double_precision
from traceax._command.market import open_market
from traceax._command.matrix import Matrix, MatrixError, examine
from traceax._command.npy import open_npy
from traceax._command.npz import open_npz


class _Format(NamedTuple):
    name: str
    open: Callable[[Path], Claim]


_FORMATS = {
    ".npz": _Format("a sparse .npz matrix of SciPy", open_npz),
    ".npy": _Format("a .npy array of NumPy", open_npy),
}
_TEXT = _Format("a MatrixMarket file", open_market)


def read_matrix(path: Path) -> Matrix:
    """A matrix from a MatrixMarket (.mtx, .mtx.gz), SciPy (.npz) or NumPy (.npy) file."""
    _check_regular(path)
    with _telling(path):
        claim = _format(path).open(path)
    claim.check(path)
    with _telling(path):
        entries = claim.read()
    return examine(_finite(path, entries), claim.field)


def _check_regular(path: Path) -> None:
    if not os.path.exists(path):  # Unlike Path.exists, also False for impossible names.
        raise MatrixError(
            f"{path} does not exist. Check the path, or give none for a tour on a road "
            "network that comes with traceax."
        )
    if not path.is_file():
        what = "a directory" if path.is_dir() else "not a regular file"
        raise MatrixError(f"{path} is {what}. Name an .mtx, .mtx.gz, .npz or .npy file.")


def _format(path: Path) -> _Format:
    return _FORMATS.get(path.suffix.lower(), _TEXT)


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Garbage raises whatever the parsers stumble over, and may make them warn."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except (MatrixError, MemoryError):
        raise
    except Exception as error:
        raise MatrixError(
            f"{path} cannot be read as {_format(path).name} ({_reason(error)}). {WRITE}"
        ) from error


def _reason(error: Exception) -> str:
    """Short, and without the control characters that a parser may quote."""
    reason = error.strerror if isinstance(error, OSError) else None
    words = " ".join((reason or str(error) or type(error).__name__).split())
    return "".join(filter(str.isprintable, words))[:200].rstrip(".")


def _finite(path: Path, entries: Any) -> Any:
    """As a `csr_array` without duplicates, or a NumPy array, in double precision."""
    entries = in_double_precision(entries)
    is_sparse = scipy.sparse.issparse(entries)
    if is_sparse:
        entries = scipy.sparse.csr_array(entries)
        entries.sum_duplicates()
    if not np.isfinite(entries.data if is_sparse else entries).all():
        raise MatrixError(
            f"{path} must have finite entries, but some are NaN or infinite in double "
            "precision. Replace them, or leave their rows and columns out."
        )
    return entries
