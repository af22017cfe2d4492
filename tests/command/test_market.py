"""MatrixMarket text. SciPy's parser passes over whatever follows a number."""

import bz2
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

from tests.command.helpers import ARRAY, COORDINATE, Write, dense, refused
from traceax._command import market


@pytest.mark.parametrize("name", ["a.mtx", "a.mtx.gz"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (COORDINATE + "2 2 3\n1 1 1.0D+02\n2 1 -.5d0\n2 2 3.D-1", [[100, 0], [-0.5, 0.3]]),
        (ARRAY + "2 2\n1.0D+02\n-.5d0\n0\n3D-1\n", [[100, 0], [-0.5, 0.3]]),
        (
            COORDINATE.replace("real", "complex") + "2 2 2\n1 1 1D1 2d-1\n2 2 1e1 2\n",
            [[10 + 0.2j, 0], [0, 10 + 2j]],
        ),
        (
            COORDINATE + "2 2 2\r\n\r\n  1\t1 5.\r\n \n\n2  2 1E+1 \r\n\n",
            [[5, 0], [0, 10]],
        ),
        (ARRAY.replace("general", "symmetric") + "2 2\n\n1\n \n2\n3\n", [[1, 2], [2, 3]]),
        (ARRAY.replace("general", "skew-symmetric") + "2 2\n2\n", [[0, -2], [2, 0]]),
        (COORDINATE + "% D\n\n%\n1 1 1\n1 1 7\n", [[7]]),
        (COORDINATE + "2 2 0", np.zeros((2, 2))),
    ],
)
def test_text_is_read_right(name: str, text: str, expected: Any, write: Write) -> None:
    assert (dense(write(name, text)) == np.array(expected)).all()


@pytest.mark.parametrize("name", ["a.mtx", "a.mtx.gz"])
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            COORDINATE + "2 2 2\n1 1 1.0 5\n2 2 1\n",
            "line 3 must hold a row, a column, a number, but is '1 1 1.0 5'",
        ),
        (COORDINATE + "2 2 2\n1 1\n2 2 1 7 8\n", "line 3 must hold a row"),
        (COORDINATE + "2 2 2\n\n1 1 1\n% 2\n2 2 1\n", "line 5 must hold a row"),
        (COORDINATE + "2 2 1\n1 1 1.0-2\n", "but is '1 1 1.0-2'"),
        (COORDINATE + "2 2 1\n1 1 0x1p3\n", "but is '1 1 0x1p3'"),
        (COORDINATE + "2 2 1\n1 1 5e\n", "but is '1 1 5e'"),
        (COORDINATE + "2 2 1\n1 1 1,5\n", "but is '1 1 1,5'"),
        (COORDINATE + "2 2 1\n1 1 2\0\n", "but is '1 1 2\\x00'"),
        (COORDINATE + "2 2 1\n0 1 2\n", "index out of bounds"),
        (COORDINATE + "2 2 2\n1 1 2\n2 2 1\n2 1 1\n", "has 3"),
        (COORDINATE.replace("real", "integer") + "2 2 1\n1 1 1.5\n", "an integer, but is"),
        (COORDINATE.replace("real", "integer") + "2 2 1\n1 1 1D3\n", "an integer, but is"),
        (COORDINATE.replace("real", "pattern") + "2 2 1\n1 1 1\n", "a row, a column, but"),
        (
            COORDINATE.replace("real", "complex") + "2 2 1\n1 1 1\n",
            "an imaginary part, but",
        ),
        (ARRAY + "2 2\n1 2\n3 4\n5\n6\n", "line 3 must hold a number, but is '1 2'"),
        (ARRAY + "2 2\n1\n3\n4\n5\n6\n", "has 5"),
        (ARRAY.replace("general", "symmetric") + "2 2\n1234567\n2\n", "but has 2"),
        (ARRAY.replace("real", "pattern") + "1 1\n\n", "may not be pattern"),
        (COORDINATE.replace("matrix c", "vector c") + "1 1\n1 2\n", "Vector"),
        (COORDINATE + "2 2 1 1\n1 1 1\n", "a line of sizes"),
        (COORDINATE.replace("real", "real\0") + "2 2 1\n1 1 1\n", "a line of sizes"),
    ],
)
def test_text_that_would_be_misread(name: str, text: str, fault: str, write: Write) -> None:
    message = refused(write(name, text))
    assert fault in message
    assert len(message) < 600


def test_headers_and_lines_have_an_end(write: Write) -> None:
    comment = COORDINATE + "%" * 2**20 + "\n2 2 1\n1 1 1\n"
    assert "within its first MiB" in refused(write("a.mtx.gz", comment))
    for digits in (2**19, 2**21):
        text = COORDINATE + f"2 2 1\n{'1' * digits} 1 1 x\n"
        assert "line 3 must hold" in refused(write("a.mtx.gz", text))


def test_bz2(tmp_path: Path) -> None:
    text = (COORDINATE + "1 1 1\n1 1 5D1\n").encode()
    (tmp_path / "a.mtx.bz2").write_bytes(bz2.compress(text))
    assert dense(tmp_path / "a.mtx.bz2") == 50


@pytest.mark.parametrize("chunk", [80, 81, 97, 1000])
def test_text_is_read_in_pieces(
    chunk: int, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = sp.random_array((40, 40), density=0.3, rng=np.random.default_rng(0))
    text = io.BytesIO()
    scipy.io.mmwrite(text, matrix, symmetry="general")
    monkeypatch.setattr(market, "_CHUNK", chunk)
    for content in (text.getvalue(), text.getvalue().replace(b"\n", b"\n\n").rstrip()):
        assert (dense(write("a.mtx", content)) == matrix.toarray()).all()
    last = text.getvalue().count(b"\n")
    broken = text.getvalue().rstrip() + b" 1\n"
    assert f"line {last} must hold" in refused(write("a.mtx", broken))


@pytest.mark.parametrize("sizes", ["0 0", "0 3", "3 0", "3 2"])
@pytest.mark.parametrize("symmetry", ["general", "symmetric"])
def test_array_of_no_square_shape(sizes: str, symmetry: str, write: Write) -> None:
    """SciPy divides by the number of rows: the process would end without a message."""
    text = ARRAY.replace("general", symmetry) + f"{sizes}\n" + "1\n" * 6
    message = refused(write("a.mtx", text))
    assert "square matrix, because only" in message or "but has 0" in message
