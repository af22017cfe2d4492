"""What holds for files of all kinds."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

from tests.command.helpers import Write, refused
from traceax._command.files import read_matrix
from traceax._command.matrix import MatrixError


@pytest.mark.parametrize("name", ["a.mtx", "a.mtx.gz", "a.npz", "a.npy"])
def test_messages_list_the_formats(name: str, write: Write) -> None:
    message = refused(write(name, b"\x1b[31mgarbage"))
    assert "\x1b" not in message
    for suffix in (".mtx", ".npz", ".npy"):
        assert f"({suffix})" in message


def test_the_guide_names_what_is_read() -> None:
    guide = Path(__file__).parents[2] / "notebooks/site/docs/guide/command_line.md"
    told = guide.read_text().split("`python -m traceax FILE`")[1].split("; a sparse")[0]
    suffixes = set(re.findall(r"\.[a-z.]+[a-z]", read_matrix.__doc__ or ""))
    assert suffixes == {".mtx", ".mtx.gz", ".npz", ".npy"}
    assert suffixes == set(re.findall(r"`(\..+?)`", told))


# Damaged at random


def mutated(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(damaged) or 1)
        until = at + rng.randrange(1, 20)
        extra = rng.choice(
            [b"", b"0", b"-1", b"\0", b"D", b"\n", b" ", b"\xff", b"9999999999"]
        )
        match rng.randrange(5):
            case 0:
                del damaged[at:]
            case 1:
                del damaged[at:until]
            case 2:
                damaged[at:at] = damaged[at:until]
            case 3:
                damaged[at:at] = extra
            case _:
                damaged[at : at + 1] = bytes([rng.randrange(256)])
    return bytes(damaged)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["a.mtx", "b.mtx", "csr.npz", "bsr.npz", "dia.npz", "a.npy"]
)
def test_damaged_files_are_read_or_refused(name: str, write: Write, tmp_path: Path) -> None:
    path = tmp_path / name
    matrix = sp.csr_array(1.5 * np.eye(6) + np.diag(np.ones(5), 1))
    match path.suffix:
        case ".mtx":
            scipy.io.mmwrite(path, matrix if name == "a.mtx" else matrix.toarray())
        case ".npz":
            sp.save_npz(path, matrix.asformat(path.stem), compressed=False)
        case _:
            np.save(path, matrix.toarray())
    content, rng, refusals = path.read_bytes(), random.Random(0), 0
    for _ in range(100):
        damaged = write(name, mutated(content, rng))
        try:
            assert read_matrix(damaged).describe()
        except MatrixError:
            refusals += 1
    assert refusals > 30
