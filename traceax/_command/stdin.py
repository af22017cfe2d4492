"""A matrix from standard input: a file first, so that it can be judged like one."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from traceax._command.matrix import MatrixError
from traceax._command.memory import free_memory

_NAME = "standard input"
_CHUNK = 1 << 20
_MAGIC = {b"\x93NUMPY": ".npy", b"PK\x03\x04": ".npz", b"\x1f\x8b": ".mtx.gz"}


@contextmanager
def standard_input() -> Iterator[Path]:
    """The path of a temporary file with all of it; messages say `standard input`."""
    with tempfile.TemporaryDirectory(prefix="traceax-") as directory:
        path = Path(directory) / "matrix"
        try:
            yield _spooled(sys.stdin.buffer, Path(directory))
        except MatrixError as error:
            words = str(error)
            for suffix in (*_MAGIC.values(), ".mtx"):  # .mtx.gz before .mtx
                words = words.replace(f"{path}{suffix}", _NAME)
            raise MatrixError(words) from error


def _spooled(source: BinaryIO, directory: Path) -> Path:
    first = source.read(_CHUNK)
    suffix = next((s for magic, s in _MAGIC.items() if first.startswith(magic)), ".mtx")
    path = directory / f"matrix{suffix}"
    try:
        with path.open("wb") as target:
            _copy(first, source, target)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise MatrixError(
            f"{_NAME} cannot be kept in {directory} ({reason}). Set TMPDIR to a directory "
            "with room, or name a file."
        ) from error
    return path


def _copy(chunk: bytes, source: BinaryIO, target: BinaryIO) -> None:
    """No more than what is free: a matrix takes more in memory than in a file."""
    room = free_memory()
    while chunk:
        room -= len(chunk)
        if room < 0:
            raise MatrixError(
                f"{_NAME} is longer than what memory is free. Take a smaller block, or a "
                "machine with more memory."
            )
        target.write(chunk)
        chunk = source.read(_CHUNK)
