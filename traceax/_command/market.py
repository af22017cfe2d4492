"""MatrixMarket text, every line of it checked before SciPy parses it."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import scipy.io

from traceax._command.claim import Claim

# SciPy's parser passes over whatever follows a number, the exponent of 1.0D+02 for one,
# and crashes at null bytes. These patterns never go back: 240 MB a second, a third of its
# own speed.
_INDEX = rb"[0-9]++"
_INTEGER = rb"-?+[0-9]++"
_REAL = (
    rb"-?+(?:[0-9]++\.?+[0-9]*+|\.[0-9]++|(?i:nan|inf(?:inity)?+))(?:[eEdD][+-]?+[0-9]++)?+"
)
_EXPONENTS = bytes.maketrans(b"dD", b"ee")

# By layout and by field, what stands in the columns of a line.
_INDICES = {"array": {}, "coordinate": {"a row": _INDEX, "a column": _INDEX}}
_NUMBERS = {
    "pattern": {},
    "integer": {"an integer": _INTEGER},
    "unsigned-integer": {"an integer": _INTEGER},
    "complex": {"a real part": _REAL, "an imaginary part": _REAL},
}
_DTYPES = {"integer": np.int64, "unsigned-integer": np.uint64, "complex": np.complex128}

# The banner, comments, and the line of sizes.
_HEAD = re.compile(
    rb"%%?MatrixMarket[^\0\n]*+\n(?:[ \t\r]*+(?:%[^\0\n]*+)?+\n)*+"
    rb"[ \t]*+[0-9]++[ \t]++[0-9]++(?:[ \t]++[0-9]++)?+[ \t\r]*+\n"
)

_BLANK = re.compile(rb"(?:[ \t\r]*+\n)++")

# How many bytes are read at once; a header must fit into them, and a line.
_CHUNK = 2**20

# How to open a file, and how many bytes one byte of it can hold.
_OPENERS = {".gz": (gzip.open, 1032), ".bz2": (bz2.open, 2**21)}


class _Head(NamedTuple):
    text: bytes
    rows: int
    columns: int
    declared: int
    layout: str
    field: str
    symmetry: str

    @property
    def line(self) -> dict[str, bytes]:
        """What stands in every line that follows, and its pattern."""
        return _INDICES[self.layout] | _NUMBERS.get(self.field, {"a number": _REAL})

    @property
    def num_lines(self) -> int:
        if self.layout == "coordinate":
            return self.declared
        if self.symmetry == "general":
            return self.rows * self.columns
        diagonal = 0 if self.symmetry == "skew-symmetric" else self.rows
        return self.rows * (self.rows - 1) // 2 + diagonal

    @property
    def num_entries(self) -> int:
        """Counts those twice that may stand for two."""
        if self.layout == "array":
            return self.rows * self.columns
        return self.declared if self.symmetry == "general" else 2 * self.declared


def open_market(path: Path) -> Claim:
    """The claim of a .mtx file, which may be compressed."""
    head = _read_head(path)
    _check_length(path, head)
    dtype = np.dtype(_DTYPES.get(head.field, np.float64))
    return Claim(
        shape=(head.rows, head.columns),
        dtype=dtype,
        field=str(dtype) if head.field in ("real", "complex") else head.field,
        num_entries=head.num_entries,
        dense=head.layout == "array",
        read=partial(_read, path, head),
    )


def _read_head(path: Path) -> _Head:
    with _open(path) as stream:
        text = stream.read(_CHUNK)
    text += b"\n" if len(text) < _CHUNK else b""
    match = _HEAD.match(text)
    if not match:
        raise ValueError(
            "it must begin with %%MatrixMarket, comments and a line of sizes, all within "
            "its first MiB"
        )
    return _Head(match[0], *scipy.io.mminfo(io.BytesIO(match[0])))


def _check_length(path: Path, head: _Head) -> None:
    """Every number takes a digit, and a blank or the end of the line after it."""
    _, ratio = _OPENERS.get(path.suffix.lower(), (open, 1))
    least = len(head.text) + 2 * len(head.line) * head.num_lines
    if least > ratio * os.path.getsize(path) + 2:  # The last two lines may lack their ends.
        raise ValueError(f"Truncated file: it is too short for {head.num_lines} lines")


def _read(path: Path, head: _Head) -> Any:
    with _open(path) as stream:
        stream.read(len(head.text))
        return scipy.io.mmread(_Stream(head.text, _checked(stream, head)), spmatrix=False)


def _open(path: Path) -> BinaryIO:
    opener, _ = _OPENERS.get(path.suffix.lower(), (open, 1))
    return cast(BinaryIO, opener(path, "rb"))


def _checked(stream: BinaryIO, head: _Head) -> Iterator[bytes]:
    """The lines of numbers, without blank ones, with exponents as C writes them."""
    line = rb"[ \t]++".join(head.line.values())
    lines = re.compile(rb"(?:[ \t]*+%s[ \t\r]*+\n)*+" % line)
    count, others = 0, head.text.count(b"\n")
    for text in _whole_lines(stream):
        at = 0
        while at < len(text):
            good = _end(lines, text, at)
            count += text.count(b"\n", at, good)
            yield text[at:good].translate(_EXPONENTS)
            at = _end(_BLANK, text, good)
            others += text.count(b"\n", good, at)
            if at == good < len(text):
                raise ValueError(_fault(head, 1 + count + others, text[at:]))
    if count != head.num_lines:
        raise ValueError(f"it announces {head.num_lines} lines of numbers, but has {count}")


def _whole_lines(stream: BinaryIO) -> Iterator[bytes]:
    """As many as come at once. The last may lack its end; too long ones are cut."""
    text = b""
    while more := stream.read(_CHUNK):
        text += more
        end = text.rfind(b"\n") + 1 or (len(text) if len(text) > _CHUNK else 0)
        yield text[:end]
        text = text[end:]
    if text:
        yield text + b"\n"


def _end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _fault(head: _Head, number: int, text: bytes) -> str:
    shown = text.split(b"\n")[0][:60].decode("ascii", "replace")
    return f"line {number} must hold {', '.join(head.line)}, but is {shown!r}"


class _Stream:
    """Pieces of text as a file, as far as SciPy asks for one."""

    def __init__(self, head: bytes, rest: Iterator[bytes]) -> None:
        self._ready, self._at, self._rest = head, 0, rest

    def read(self, size: int) -> bytes:
        if self._at >= len(self._ready):
            self._ready, self._at = next(filter(None, self._rest), b""), 0
        self._at += size
        return self._ready[self._at - size : self._at]
