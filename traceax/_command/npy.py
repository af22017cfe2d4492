"""Arrays as NumPy writes them, believed as far as their headers go."""

from __future__ import annotations

import io
import math
import os
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from traceax._command.claim import Claim

# Two such as NumPy writes; it refuses to parse longer headers than 10,000 characters.
_HEADER = 2**14

_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class Header(NamedTuple):
    """What stands before an array, and how long it is."""

    shape: tuple[int, ...]
    dtype: np.dtype
    length: int

    @property
    def num_bytes(self) -> int:
        """Of the header and the array."""
        return self.length + math.prod(self.shape) * self.dtype.itemsize


def read_header(name: str, stream: IO[bytes], num_bytes: int) -> Header:
    """From a stream of so many bytes, all of which must be the array's."""
    head = io.BytesIO(stream.read(_HEADER))
    version = np.lib.format.read_magic(head)
    try:
        shape, _, dtype = _READERS[version](head)
    except Exception as error:  # Also MemoryError, of Python's own parser.
        raise ValueError(f"the header of {name} cannot be parsed") from error
    header = Header(shape, dtype, head.tell())
    whole = dtype.hasobject or header.num_bytes == num_bytes
    if min(shape, default=0) < 0 or not whole:
        raise ValueError(f"{name} must have {header.num_bytes} bytes, but has {num_bytes}")
    return header


def read_array(stream: IO[bytes]) -> np.ndarray:
    """One whose header was read, and found good."""
    return np.lib.format.read_array(stream, allow_pickle=False)


def open_npy(path: Path) -> Claim:
    """The claim of a .npy file."""
    with path.open("rb") as stream:
        header = read_header("the array", stream, os.path.getsize(path))
    return Claim(
        shape=header.shape,
        dtype=header.dtype,
        field=header.dtype.name,
        num_entries=math.prod(header.shape),
        dense=True,
        read=partial(_read, path),
    )


def _read(path: Path) -> Any:
    with path.open("rb") as stream:
        return read_array(stream)
