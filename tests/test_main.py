"""`python -m traceax`: the tour, every kind of file, and every way in which one is bad."""

import gzip
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

from traceax.__main__ import main, read_matrix

COORDINATE = "%%MatrixMarket matrix coordinate real general\n"
ARRAY = "%%MatrixMarket matrix array real general\n"
FOUND = ["trace", "frobenius_norm_squared", "logdet"]
COMPLEX = COORDINATE.replace("real", "complex")


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    """`main` turns double precision on; here it is put back."""
    before = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    yield
    jax.config.update("jax_enable_x64", before)


def write(path: Path, content: Any) -> Path:
    """Text or bytes, an array, a sparse matrix, or the parts of an archive."""
    if isinstance(content, str):
        content = content.encode()
    if isinstance(content, bytes):
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    elif isinstance(content, dict):
        np.savez(path, **content)
    elif path.suffix == ".mtx":
        scipy.io.mmwrite(path, content)
    elif path.suffix == ".npz":
        sp.save_npz(path, content)
    else:
        np.save(path, content)
    return path


def shown(output: str) -> dict[str, tuple[float, float, float]]:
    """By name the value, its standard error and the exact number, which may be unknown."""
    number = r"[-+.\de]+"
    line = rf"  (\w+): \(?({number}) ± ({number})\)?(e[-+]\d+)? \(.*?\)(?:; exact: (.*))?"
    return {
        name: (float(value + power), float(error + power), float(exact or "nan"))
        for name, value, error, power, exact in re.findall(line, output)
    }


# What is printed.


@pytest.mark.slow
def test_the_tour(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    output = capsys.readouterr().out
    for words in ("Gleich/minnesota", "CC-BY 4.0", "three products with A", "exact: 53\n"):
        assert words in output
    estimates = re.findall(r": ([\d.]+) ± ([\d.e-]+) \((\d+) matvecs, [^)]+\)", output)
    assert [spent for _, _, spent in estimates] == ["100", "12", "100", "100"]
    assert estimates[1][0] == "53"
    truths = (53, 53, 1019.66256, 1019.66256)
    for (value, error, _), truth in zip(estimates, truths, strict=True):
        assert abs(float(value) - truth) < 4 * float(error) + 1e-5


def symmetric(n: int) -> Any:
    offsets: Any = [-1, 0, 1]
    return sp.diags_array([-1.0, 2.5, -1.0], offsets=offsets, shape=(n, n)).tocsr()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.mtx", "a.npy"])
def test_a_definite_matrix(name: str, tmp_path: Path, capsys: Any) -> None:
    matrix = symmetric(300)
    file = write(tmp_path / name, matrix if name != "a.npy" else matrix.toarray())
    assert main([str(file)]) == 0
    output = capsys.readouterr().out
    assert output.startswith("n = 300, nnz = 898, Hermitian\n")
    found = shown(output)
    assert list(found) == FOUND
    truths = (750.0, 300 * 6.25 + 598, np.linalg.slogdet(matrix.toarray())[1])
    for what, truth in zip(FOUND, truths, strict=True):
        value, error, exact = found[what]
        assert exact == pytest.approx(truth, rel=1e-9)
        assert 0 < abs(value - truth) < 4 * error
    assert list(tmp_path.iterdir()) == [file]  # nothing is written


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_other_matrices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A large one is known to be definite by its diagonal, an indefinite one has no
    logarithm, and a complex one is a complex estimate."""
    large, indefinite = symmetric(5000), symmetric(200) - 2 * sp.eye_array(200)
    general, two = np.random.default_rng(0).random((200, 200)), FOUND[:2]
    given = (large, FOUND), (indefinite, two), (sp.csr_array(general), two)
    for matrix, names in given:
        assert main([str(write(tmp_path / "a.npz", matrix))]) == 0
        assert list(shown(capsys.readouterr().out)) == names
    rotated = general + 1j * general.T
    assert main([str(write(tmp_path / "a.npy", rotated))]) == 0
    assert re.search(r"trace: \(\S+j\) ± .*exact: \S+j", capsys.readouterr().out)


# What is read.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (COORDINATE + "2 2 3\n1 1 1.0D+02\n2 1 -.5d0\n2 2 3.D-1", [[100, 0], [-0.5, 0.3]]),
        (ARRAY + "2 2\n1.0D+02\n-.5d0\n0\n3D-1\n", [[100, 0], [-0.5, 0.3]]),
        (COMPLEX + "2 2 2\n1 1 1D1 2d-1\n2 2 1e1 2\n", [[10 + 0.2j, 0], [0, 10 + 2j]]),
        (COORDINATE + "2 2 2\r\n\r\n  1\t1 5.\r\n \n2  2 1E+1 \r\n\n", [[5, 0], [0, 10]]),
        (ARRAY.replace("general", "symmetric") + "2 2\n\n1\n \n2\n3\n", [[1, 2], [2, 3]]),
        (COORDINATE + "% D\n\n%\n1 1 1\n1 1 7\n", [[7]]),
    ],
)
def test_text_is_read_right(text: str, expected: Any, tmp_path: Path) -> None:
    for name in ("a.mtx", "a.mtx.gz"):
        matrix = read_matrix(write(tmp_path / name, text))
        dense = matrix.toarray() if sp.issparse(matrix) else matrix
        np.testing.assert_array_equal(dense, expected)


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "coo", "dia"])
def test_archives_are_read_right(layout: str, tmp_path: Path) -> None:
    matrix = symmetric(6)
    for dtype in (np.float32, np.int8, complex):
        file = write(tmp_path / "a.npz", matrix.astype(dtype).asformat(layout))
        expected = matrix.toarray().astype(dtype)
        np.testing.assert_array_equal(read_matrix(file).toarray(), expected)


# What is bad.

CSR: dict[str, Any] = {"format": b"csr", "shape": (4, 4), "data": np.ones(4)}
CSR |= {"indices": np.arange(4), "indptr": np.arange(5)}
BSR = CSR | {"format": b"bsr", "data": np.ones((2, 2, 2))}
BSR |= {"indices": np.arange(2), "indptr": np.arange(3)}
COO = {"format": b"coo", "shape": (4, 4), "data": np.ones(2), "row": [0, 1], "col": [0, 3]}


class Trap:
    """Unpickling it would write a file."""

    def __reduce__(self) -> Any:
        return (open, ("executed", "w"))


HEADER = "{'descr': '<f8', 'fortran_order': False, 'shape': (3000000, 3000000), }\n"
BAD: dict[str, tuple[str, Any, str]] = {
    "a pickle": ("a.mtx", pickle.dumps(Trap()), "not a %%MatrixMarket line"),
    "a pickle as an archive": ("a.npz", pickle.dumps(Trap()), "pickle"),
    "a pickle in an array": ("a.npy", np.array([[Trap()]], object), "Python objects"),
    "a pickle in an archive": ("a.npz", CSR | {"data": np.array([Trap()] * 4)}, "pickle"),
    "cut short": ("a.mtx", COORDINATE + "2 2 2\n1 1 1\n", "6 numbers where 9"),
    "an array cut short": ("a.npy", b"\x93NUMPY\1\0" + bytes(20), ""),
    "words for numbers": ("a.mtx", COORDINATE + "1 1 1\n1 1 one\n", "lines of numbers"),
    "one dimension": ("a.npy", np.ones(9), "shape is 9"),
    "not square": ("a.npy", np.ones((2, 3)), "shape is 2 x 3"),
    "NaN": ("a.npy", np.full((2, 2), np.nan), "NaN or infinite"),
    "NaN in text": ("a.mtx", COORDINATE + "1 1 1\n1 1 nan\n", "lines of numbers"),
    "overflow": ("a.mtx", COORDINATE + "1 1 1\n1 1 1e999\n", "NaN or infinite|range"),
    "strings": ("a.npy", np.array([["a"]]), "type <U1"),
    "0 x 0": ("a.mtx", ARRAY + "0 0\n", "shape is 0 x 0"),
    "a large header": ("a.mtx", ARRAY + "3000000 3000000\n1\n", ""),
    "a large array": ("a.npy", b"\x93NUMPY\1\0" + b"v\0" + HEADER.encode() + b" " * 99, ""),
    "an index": ("a.mtx", COORDINATE + "2 2 1\n3 1 1\n", "out of bounds"),
    "an index of an archive": ("a.npz", CSR | {"indices": [0, 1, 2, 9]}, "must be < 4"),
    "an index of pairs": ("a.npz", COO | {"col": [0, 4]}, "exceeds matrix dimension"),
    "pointers": ("a.npz", CSR | {"indptr": [0, 3, 1, 4, 4]}, "non-decreasing"),
    "blocks": ("a.npz", BSR | {"shape": (5, 5)}, "do not divide"),
    "a fraction as an index": ("a.mtx", COORDINATE + "2 2 1\n1.5 1 1\n", ""),
    "a column too many": ("a.mtx", COORDINATE + "1 1 1\n1 1 1 7\n", "7 numbers where 6"),
    "a line too many": ("a.mtx", COORDINATE + "1 1 1\n1 1 1\n1 1 1\n", "9 numbers where 6"),
    "a null byte": ("a.mtx", COORDINATE + "1 1 1\n1 1 2\0\n", "lines of numbers"),
    "a header of brackets": ("a.npy", b"\x93NUMPY\1\0\x28\x23" + b"(" * 9000, ""),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_one_line(
    what: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, content, reason = BAD[what]
    write(tmp_path / name, content)
    assert main([name]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert re.match(rf"traceax: {name} cannot be read: .*({reason}).*\.\n$", error)
    assert error.count("\n") == 1
    assert not (tmp_path / "executed").exists()


def test_names_that_are_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reasons = {".": "directory", "none": "No such file", "a\x1b\nb": "No such file"}
    for name, reason in reasons.items():
        assert main([str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert "\x1b" not in error
        assert error.count("\n") == 1


# How it ends.


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="Windows has no such signals")
@pytest.mark.slow
@pytest.mark.parametrize("end", ["closed pipe", "interrupt"])
def test_it_ends_without_a_traceback(end: str) -> None:
    command = [sys.executable, "-u", "-m", "traceax"]
    with subprocess.Popen(command, stdout=-1, stderr=-1) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert b"Roads of Minnesota" in program.stdout.readline()
        if end == "interrupt":
            program.send_signal(signal.SIGINT)
        program.stdout.close()
        assert program.stderr.read() == b""
    assert program.returncode in (-signal.SIGINT, -signal.SIGPIPE)
