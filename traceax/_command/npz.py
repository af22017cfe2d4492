"""Sparse matrices as SciPy writes them, every index checked before SciPy sees it."""

from __future__ import annotations

import math
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from traceax._command.claim import Claim, in_double_precision
from traceax._command.npy import Header, read_array, read_header

# NumPy writes these two. The others inflate without a limit.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

# The dimension of the data, by layout.
_LAYOUTS = {"csr": 1, "csc": 1, "bsr": 3, "dia": 2, "coo": 1}


class _Indices(NamedTuple):
    """What an array of indices must be: of a shape, and with values in a range."""

    shape: tuple[int, ...]
    least: int
    most: int


def open_npz(path: Path) -> Claim:
    """The claim of a .npz file. Nothing is inflated but the headers of its arrays."""
    with zipfile.ZipFile(path) as archive:
        if "format.npy" not in archive.namelist():
            raise ValueError("it does not contain a sparse array or matrix")
        layout = _text(_small(archive, "format", "SU", 0).item())
        if layout not in _LAYOUTS:
            raise ValueError(f"its format {layout!r} is none of {', '.join(_LAYOUTS)}")
        shape = tuple(_small(archive, "shape", "iu", 1).tolist())
        data = _header(archive, "data")
    return Claim(
        shape=shape,
        dtype=data.dtype,
        field=data.dtype.name,
        num_entries=math.prod(data.shape),
        dense=False,
        read=partial(_read, path, layout, shape, data.shape),
    )


def _read(path: Path, layout: str, shape: tuple[int, int], data: tuple[int, ...]) -> Any:
    with zipfile.ZipFile(path) as archive:
        expected = _expected(layout, shape[0], data, archive.namelist())
        for name, indices in expected.items():
            _check_header(name, _header(archive, name), indices)
        parts = [_indices(archive, name, wanted) for name, wanted in expected.items()]
        entries = in_double_precision(_array(archive, "data"))
    if layout == "coo":
        parts = [tuple(np.concatenate([np.atleast_2d(part) for part in parts]))]
    return getattr(scipy.sparse, f"{layout}_array")((entries, *parts), shape=shape)


def _expected(
    layout: str, n: int, data: tuple[int, ...], names: list[str]
) -> dict[str, _Indices]:
    """By name, the arrays of indices that belong to an n x n matrix with such data."""
    if len(data) != _LAYOUTS[layout]:
        raise ValueError(f"data must have {_LAYOUTS[layout]} axes, but has {len(data)}")
    count = data[0]
    if layout == "dia":
        return {"offsets": _Indices((count,), 1 - n, n - 1)}
    if layout == "coo" and "coords.npy" in names:
        return {"coords": _Indices((2, count), 0, n - 1)}
    if layout == "coo":
        return dict.fromkeys(("row", "col"), _Indices((count,), 0, n - 1))
    height, width = data[1:] or (1, 1)
    if not height or not width or n % height or n % width:
        raise ValueError(f"blocks of {height} x {width} do not tile {n} x {n}")
    return {
        "indices": _Indices((count,), 0, n // width - 1),
        "indptr": _Indices((n // height + 1,), 0, count),
    }


def _check_header(name: str, header: Header, expected: _Indices) -> None:
    if header.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, but holds {header.dtype}")
    if header.shape != expected.shape:
        raise ValueError(f"{name} must have shape {expected.shape}, but has {header.shape}")


def _indices(archive: zipfile.ZipFile, name: str, expected: _Indices) -> np.ndarray:
    """In a type that SciPy's compiled code knows, of half the size where that is enough."""
    indices = _array(archive, name)
    _check_range(name, indices, expected)
    if name == "indptr" and (indices[0] != 0 or (indices[1:] < indices[:-1]).any()):
        raise ValueError("indptr must begin with 0 and never decrease")
    if name == "offsets" and len(np.unique(indices)) < len(indices):
        raise ValueError("offsets must differ from each other")
    dtype = np.int32 if expected.most < 2**31 else np.int64
    return indices.astype(dtype, copy=False)


def _check_range(name: str, indices: np.ndarray, expected: _Indices) -> None:
    if not indices.size:
        return
    least, most = indices.min(), indices.max()
    if least < expected.least or most > expected.most:
        raise ValueError(
            f"{name} must be from {expected.least} to {expected.most}, but are from "
            f"{least} to {most}"
        )


def _header(archive: zipfile.ZipFile, name: str) -> Header:
    try:
        member = archive.getinfo(f"{name}.npy")
    except KeyError as error:
        raise ValueError(f"it has no array {name}") from error
    if member.compress_type not in _METHODS:
        raise ValueError(f"{name} is compressed, but not as NumPy does")
    with archive.open(member) as stream:
        return read_header(name, stream, member.file_size)


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as stream:
        return read_array(stream)


def _small(archive: zipfile.ZipFile, name: str, kinds: str, axes: int) -> np.ndarray:
    header = _header(archive, name)
    good = header.dtype.kind in kinds and len(header.shape) == axes
    if not good or header.num_bytes > 2**14:
        raise ValueError(f"{name} is of type {header.dtype} and shape {header.shape}")
    return _array(archive, name)


def _text(text: str | bytes) -> str:
    """Old versions of SciPy wrote text, newer ones write bytes."""
    return text.decode("ascii") if isinstance(text, bytes) else text
