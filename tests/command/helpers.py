"""Files of matrices, as they should be or not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from traceax._command.files import read_matrix
from traceax._command.matrix import MatrixError

COORDINATE = "%%MatrixMarket matrix coordinate real general\n"
ARRAY = "%%MatrixMarket matrix array real general\n"

CSR = {
    "format": b"csr",
    "shape": (4, 4),
    "data": np.ones(4),
    "indices": np.arange(4),
    "indptr": np.arange(5),
}

Write = Callable[[str, "str | bytes"], Path]


def refused(path: Path) -> str:
    """The one line, which names the file and a cure."""
    with pytest.raises(MatrixError) as caught:
        read_matrix(path)
    message = str(caught.value)
    assert str(path) in message
    assert message.endswith(".")
    assert "\n" not in message
    return message


def dense(path: Path) -> np.ndarray:
    entries = read_matrix(path).entries
    return entries.toarray() if sp.issparse(entries) else entries


def save(path: Path, **arrays: Any) -> None:
    np.savez_compressed(path, allow_pickle=True, **arrays)


def changed(arrays: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: part for name, part in (arrays | changes).items() if part is not None}
