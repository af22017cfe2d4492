"""NumPy's arrays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command.helpers import Write, refused
from traceax._command.files import read_matrix


@pytest.mark.parametrize("dtype", [bool, np.int8, np.float16, ">f8", np.longdouble, "c8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy(dtype: Any, order: Any, tmp_path: Path) -> None:
    matrix = np.arange(9).reshape(3, 3).astype(dtype, order=order)
    np.save(tmp_path / "a.npy", matrix)
    got = read_matrix(tmp_path / "a.npy")
    assert (got.entries == matrix).all()
    assert got.entries.dtype == (complex if matrix.dtype.kind == "c" else float)
    assert got.field == matrix.dtype.name


def _npy(header: str, num_bytes: int = 72, version: bytes = b"\1\0") -> bytes:
    return (
        b"\x93NUMPY"
        + version
        + len(header).to_bytes(2, "little")
        + header.encode()
        + (bytes(num_bytes))
    )


_GOOD = "{'descr': '<f8', 'fortran_order': False, 'shape': (3, 3), }\n"


_WRONG = {
    "empty": (b"", "cannot be read as a .npy array of NumPy"),
    "other": (b"not NumPy's", "the magic string is not correct"),
    "short": (_npy(_GOOD, 71), "the array must have 142 bytes, but has 141"),
    "long": (_npy(_GOOD, 73), "the array must have 142 bytes, but has 143"),
    "version": (_npy(_GOOD, version=b"\3\0"), "the header of the array cannot be parsed"),
    "brackets": (_npy("(" * 9000), "the header of the array cannot be parsed"),
    "long header": (_npy(" " * 60000), "the header of the array cannot be parsed"),
    "negative": (_npy(_GOOD.replace("3, 3", "-3, -3")), "the array must have"),
    "three axes": (_npy(_GOOD.replace("3, 3", "3, 3, 1")), "its shape is 3 x 3 x 1"),
    "one axis": (_npy(_GOOD.replace("3, 3", "9,")), "its shape is 9"),
    "many axes": (_npy(_GOOD.replace("3, 3", "1," * 999), 8), "shape is one of 999 axes"),
    "no axis": (_npy(_GOOD.replace("3, 3", ""), 8), "its shape is that of a number"),
    "no entries": (_npy(_GOOD.replace("3, 3", "0, 0"), 0), "but has 0"),
    "text": (_npy(_GOOD.replace("<f8", "<U2")), "must hold numbers, but its entries are"),
    "times": (_npy(_GOOD.replace("<f8", "<m8")), "must hold numbers, but its entries are"),
    "objects": (_npy(_GOOD.replace("<f8", "|O")), "its entries are of type object"),
    "huge": (_npy(_GOOD.replace("3, 3", "99999999, 99999999")), "the array must have"),
}


@pytest.mark.parametrize("name", _WRONG)
def test_wrong_npy(name: str, write: Write) -> None:
    content, fault = _WRONG[name]
    assert fault in refused(write("a.npy", content))


def test_infinite_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.diag([1, np.inf]))
    assert "must have finite entries" in refused(tmp_path / "a.npy")
