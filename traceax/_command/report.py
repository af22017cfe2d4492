"""Results as one JSON object, or as tables."""

from __future__ import annotations

import json
import math
from typing import Any

import scipy.sparse

from traceax._command.matrix import Matrix
from traceax._command.table import Row, table

LEGEND = """\
matvecs: how often the operator, or its adjoint, was applied
time:    the best of up to three runs, after compilation"""


def print_table(rows: list[Row], exact: float | complex | None) -> None:
    print("\n".join(table(rows, exact)), end="\n\n", flush=True)


def as_json(task: str, told: dict[str, Any], matrix: dict[str, Any]) -> str:
    """One line: what was asked for, what was found, and of which matrix."""
    return json.dumps(_plain({"task": task, **told, "matrix": matrix}), allow_nan=False)


def of_rows(rows: list[Row], exact: float | complex | None) -> dict[str, Any]:
    """The first row, which is the front door's, and the others beside it."""
    door, *others = map(of_row, rows)
    return {**door, "exact": exact, "estimators": others}


def of_row(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "value": row.value,
        "standard_error": row.error,
        "interval": row.interval,
        "num_matvecs": row.num_matvecs,
        "seconds": row.seconds,
    }


def of_matrix(matrix: Matrix, name: str) -> dict[str, Any]:
    return {
        "file": name,
        "n": matrix.size,
        "nnz": matrix.num_nonzeros,
        "sparse": bool(scipy.sparse.issparse(matrix.entries)),
        "dtype": str(matrix.entries.dtype),
        "hermitian": matrix.hermitian,
        "positive_semidefinite": None if matrix.positive is None else bool(matrix.positive),
    }


def _plain(thing: Any) -> Any:
    """JSON knows neither complex numbers nor those that are not finite: null."""
    match thing:
        case dict():
            return {name: _plain(part) for name, part in thing.items()}
        case list() | tuple():
            return [_plain(part) for part in thing]
        case complex():
            return {"real": _plain(thing.real), "imag": _plain(thing.imag)}
        case float() if not math.isfinite(thing):
            return None
        case _:
            return thing
