"""SciPy's archives. An index that is wrong would be written to, wherever it points."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from tests.command.helpers import CSR, changed, dense, refused, save

_BSR = {
    "format": b"bsr",
    "shape": (4, 4),
    "data": np.ones((2, 2, 2)),
    "indices": np.arange(2),
    "indptr": np.arange(3),
}
_DIA = {"format": b"dia", "shape": (4, 4), "data": np.ones((2, 4)), "offsets": [0, 1]}
_COO = {"format": b"coo", "shape": (4, 4), "data": np.ones(2), "row": [0, 1], "col": [0, 3]}
_COORDS = {
    "format": b"coo",
    "shape": (4, 4),
    "data": np.ones(2),
    "coords": np.eye(2, dtype=int),
}


@pytest.mark.parametrize("kind", [np.int8, np.uint64, ">i4"])
@pytest.mark.parametrize("arrays", [CSR, _BSR, _DIA, _COO, _COORDS])
def test_archives_of_any_integers(
    arrays: dict[str, Any], kind: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.npz"
    save(path, **arrays)
    expected = sp.load_npz(path).toarray()
    others = {"format", "shape", "data"}
    cast = {n: p if n in others else np.asarray(p, kind) for n, p in arrays.items()}
    save(path, **cast | {"data": arrays["data"].astype(">f4")})
    assert (dense(path) == expected).all()


@pytest.mark.parametrize(
    ("arrays", "fault"),
    [
        (changed(_BSR, shape=(5, 5)), "blocks of 2 x 2 do not tile 5 x 5"),
        (changed(_BSR, data=np.ones((2, 0, 2))), "blocks of 0 x 2 do not tile 4 x 4"),
        (changed(_BSR, data=np.ones((2, 2))), "data must have 3 axes, but has 2"),
        (
            changed(_BSR, indptr=[0, 1, 9]),
            "indptr must be from 0 to 2, but are from 0 to 9",
        ),
        (changed(_BSR, indices=[0, 2]), "indices must be from 0 to 1, but are from 0 to 2"),
        (changed(_BSR, indptr=[0, 2]), "indptr must have shape (3,), but has (2,)"),
        (
            changed(CSR, indptr=[0, 3, 1, 4, 4]),
            "indptr must begin with 0 and never decrease",
        ),
        (changed(CSR, indptr=[1, 1, 2, 3, 4]), "indptr must begin with 0"),
        (changed(CSR, indptr=[0, -1, 2, 3, 4]), "indptr must be from 0 to 4"),
        (changed(CSR, indices=[0, 1, 2, -1]), "indices must be from 0 to 3"),
        (changed(CSR, indices=[0.0, 1, 2, 3]), "indices must hold integers"),
        (changed(CSR, indices=[0, 1, 2]), "indices must have shape (4,), but has (3,)"),
        (changed(CSR, data=np.ones(3)), "indices must have shape (3,), but has (4,)"),
        (changed(CSR, data=np.ones((4, 1))), "data must have 1 axes, but has 2"),
        (changed(CSR, format=b"csc", indptr=None), "it has no array indptr"),
        (
            changed(CSR, format=b"lil"),
            "its format 'lil' is none of csr, csc, bsr, dia, coo",
        ),
        (changed(CSR, format=b"csr" * 9999), "format is of type |S29997"),
        (changed(CSR, shape=(4.0, 4.0)), "shape is of type float64"),
        (changed(CSR, shape=None), "it has no array shape"),
        (changed(CSR, data=None), "it has no array data"),
        (changed(_DIA, offsets=[0]), "offsets must have shape (2,), but has (1,)"),
        (
            changed(_DIA, offsets=[0, 4]),
            "offsets must be from -3 to 3, but are from 0 to 4",
        ),
        (changed(_DIA, offsets=[1, 1]), "offsets must differ from each other"),
        (changed(_DIA, data=np.ones(2)), "data must have 2 axes, but has 1"),
        (changed(_COO, row=[0]), "row must have shape (2,), but has (1,)"),
        (changed(_COO, row=[0, -1]), "row must be from 0 to 3, but are from -1 to 0"),
        (changed(_COO, col=[0, 4]), "col must be from 0 to 3, but are from 0 to 4"),
        (changed(_COO, col=np.array([0, 2**63], np.uint64)), "col must be from 0 to 3"),
        (changed(_COORDS, coords=np.zeros((3, 2), int)), "coords must have shape (2, 2)"),
        (changed(_COORDS, coords=[[0, 4], [0, 0]]), "coords must be from 0 to 3"),
    ],
)
def test_archive_that_would_crash(
    arrays: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    save(tmp_path / "a.npz", **arrays)
    assert fault in refused(tmp_path / "a.npz")


def test_objects_are_not_loaded(tmp_path: Path) -> None:
    save(tmp_path / "a.npz", **changed(CSR, data=np.array([1, "x", None, []], object)))
    assert "its entries are of type object" in refused(tmp_path / "a.npz")
    np.save(tmp_path / "a.npy", np.array(sp.eye_array(3), object))
    assert "its entries are of type object" in refused(tmp_path / "a.npy")
