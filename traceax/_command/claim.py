"""What a file claims about its matrix, judged before anything large is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from traceax._command.matrix import MatrixError
from traceax._command.memory import check_memory

WRITE = (
    "Write it with scipy.io.mmwrite (.mtx), scipy.sparse.save_npz (.npz) or numpy.save "
    "(.npy)."
)


class Claim(NamedTuple):
    """A matrix as the first lines of its file describe it.

    `num_entries` counts those that are stored, `field` says what kind of numbers they are,
    and `read` reads them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    field: str
    num_entries: int
    dense: bool
    read: Callable[[], Any]

    @property
    def memory(self) -> int:
        """About the bytes that it takes to read the matrix, examine it and store it.

        Measured: 66 an entry, 95 a complex one, 32 a row; dense 25 and 49 an entry.
        """
        width = 16 if self.dtype.kind == "c" else 8
        if self.dense:
            return 4 * width * self.num_entries
        return (40 + 4 * width) * self.num_entries + 40 * self.shape[0]

    def check(self, path: Path) -> None:
        self._check_dtype(path)
        self._check_shape(path)
        what = f"n = {self.shape[0]} and nnz up to {self.num_entries}"
        check_memory(path, self.memory, what)

    def _check_shape(self, path: Path) -> None:
        if len(self.shape) != 2 or self.shape[0] != self.shape[1]:
            axes = len(self.shape)
            shape = " x ".join(map(str, self.shape)) if axes < 9 else f"one of {axes} axes"
            raise MatrixError(
                f"{path} must hold a square matrix, because only square ones have a trace, "
                f"but its shape is {shape or 'that of a number'}. Take a square block, or "
                "its product with its transpose."
            )
        if not 0 < self.shape[0] < 2**31:
            raise MatrixError(
                f"{path} must have between 1 and 2^31 - 1 rows, but has {self.shape[0]}. "
                "Take a smaller block, or one that is not empty."
            )

    def _check_dtype(self, path: Path) -> None:
        if self.dtype.kind not in "biufc":
            raise MatrixError(
                f"{path} must hold numbers, but its entries are of type {self.dtype}. "
                f"Convert them to float. {WRITE}"
            )


def in_double_precision(entries: Any) -> Any:
    """An array, sparse or not, in which infinity stands for what is too large."""
    dtype = np.complex128 if entries.dtype.kind == "c" else np.float64
    with np.errstate(over="ignore"):
        return entries.astype(dtype, copy=False)
