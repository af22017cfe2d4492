"""Whether A + S I is what an inverse or a logarithm asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from traceax._command.matrix import Matrix, MatrixError, examine
from traceax._command.options import Options
from traceax._command.spectrum import eigenvalues, ends, shifted


class Definite(NamedTuple):
    """A + S I, tagged, and its eigenvalues if they are few."""

    matrix: Matrix
    spectrum: np.ndarray | None


def definite(path: Path, matrix: Matrix, options: Options) -> Definite:
    """A `MatrixError` where A + S I is seen not to be positive definite."""
    check_hermitian(path, matrix, f"--{options.task}")
    whole = matrix
    if options.shift:
        entries: Any = shifted(matrix.entries, options.shift)
        whole = examine(entries, matrix.field)
    spectrum = eigenvalues(whole)
    if whole.positive == "" or _singular(whole, spectrum):
        raise _not_definite(path, matrix, options)
    whole = whole._replace(positive=whole.positive or "smallest eigenvalue")
    return Definite(whole, spectrum)


def check_hermitian(path: Path, matrix: Matrix, option: str) -> None:
    if not matrix.hermitian:
        raise MatrixError(
            f"{path} must be {_kind(matrix)} for {option}, but is not. Take its "
            f"{_kind(matrix)} part (A + A*)/2, or its product with its transpose; the "
            "trace and --norm are of any matrix."
        )


def moved(shift: float) -> str:
    return f"A {'+' if shift > 0 else '-'} {abs(shift):g} I" if shift else "A"


def parenthesised(shift: float) -> str:
    return f"({moved(shift)})" if shift else "A"


def _kind(matrix: Matrix) -> str:
    return "Hermitian" if np.iscomplexobj(matrix.entries) else "symmetric"


def _singular(matrix: Matrix, spectrum: np.ndarray | None) -> bool:
    """By all eigenvalues, or by the smallest where nothing else is proven."""
    if spectrum is not None:
        return bool(spectrum[0] <= _rounding(spectrum))
    return not matrix.positive and ends(matrix).low <= 0


def _rounding(spectrum: np.ndarray) -> float:
    return len(spectrum) * np.finfo(float).eps * np.abs(spectrum).max()


def _not_definite(path: Path, matrix: Matrix, options: Options) -> MatrixError:
    low, high = ends(matrix)
    size = max(abs(low), abs(high)) or 1.0
    enough = max(-low, 0) + 0.01 * size
    found = f"{low + options.shift:.2g}"
    return MatrixError(
        f"{path} must be positive definite for --{options.task}, but the smallest "
        f"eigenvalue of {moved(options.shift)} is {found}. Pass --shift {enough:.3g}, say, "
        "which makes it so."
    )
