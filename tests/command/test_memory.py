"""What a file promises is compared with the memory, and with the length of the file."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from tests.command.helpers import ARRAY, COORDINATE, CSR, Write, changed, refused, save
from traceax._command import memory
from traceax._command.files import read_matrix


@pytest.mark.parametrize("name", ["a.mtx", "a.mtx.gz"])
def test_few_bytes_that_declare_many_rows(
    name: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 16e9)
    text = COORDINATE + "2000000000 2000000000 1\n1 1 1.0\n"
    assert "needs about 80.0 GB to be read, for n = 2000000000 and nnz up to 1, but" in (
        refused(write(name, text))
    )


@pytest.mark.parametrize("name", ["a.mtx", "a.mtx.gz"])
@pytest.mark.parametrize(
    "text",
    [
        COORDINATE + "9 9 1000000000\n1 1 1.0\n",
        ARRAY + "30000 30000\n1\n",
        ARRAY.replace("general", "symmetric") + "30000 30000\n1\n",
    ],
)
def test_few_bytes_that_declare_many_entries(name: str, text: str, write: Write) -> None:
    assert "Truncated file: it is too short for" in refused(write(name, text))


def test_matrices_that_need_more_memory_than_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npz, npy = tmp_path / "a.npz", tmp_path / "a.npy"
    sp.save_npz(npz, sp.eye_array(10_000, format="csr"))
    np.save(npy, np.eye(200))
    monkeypatch.setattr(memory, "free_memory", lambda: 1e6)
    assert "needs about 0.0 GB to be read, for n = 10000 and nnz up to 10000" in refused(
        npz
    )
    assert "for n = 200 and nnz up to 40000" in refused(npy)
    monkeypatch.setattr(memory, "free_memory", lambda: 1e7)
    assert read_matrix(npz).size == 10_000
    assert read_matrix(npy).size == 200


def test_free_memory_is_that_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, meminfo = tmp_path / "memory.max", tmp_path / "meminfo"
    monkeypatch.setattr(memory, "_CONTAINER", (limit, tmp_path / "absent"))
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    everything = memory.free_memory()
    assert everything > 1e8
    limit.write_text("max\n")
    assert memory.free_memory() == everything
    limit.write_text("4000000\n")
    assert memory.free_memory() == pytest.approx(3.6e6)
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    2000 kB\n")
    assert memory.free_memory() == pytest.approx(0.9 * 2000 * 1024)


_ZEROS = np.zeros(4_000_000, np.int8)
_LONG = changed(CSR, data=_ZEROS, indices=_ZEROS, indptr=[0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("arrays", "fault"),
    [
        (changed(_LONG, shape=(5, 4)), "its shape is 5 x 4"),
        (changed(_LONG, shape=(5, 5)), "indptr must have shape (6,), but has (5,)"),
        (changed(_LONG, indices=_ZEROS[1:]), "indices must have shape (4000000,)"),
        (changed(_LONG, format=_ZEROS), "format is of type int8"),
        (changed(_LONG, shape=_ZEROS), "shape is of type int8"),
        (changed(_LONG, data=_ZEROS.view("S4000000")), "entries are of type |S4000000"),
    ],
)
def test_archive_is_refused_before_it_is_inflated(
    arrays: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    save(tmp_path / "a.npz", **arrays)
    assert (tmp_path / "a.npz").stat().st_size < 20_000
    refused(tmp_path / "a.npz")  # What is loaded once is loaded.
    tracemalloc.start()
    try:
        assert fault in refused(tmp_path / "a.npz")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
