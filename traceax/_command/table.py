"""Estimates beside the exact value, as aligned text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """One line of a table."""

    name: str
    value: float | complex
    error: float
    num_matvecs: int
    seconds: float
    interval: tuple[float, float] | None = None


def table(rows: list[Row], exact: float | complex | None) -> Iterator[str]:
    """Aligned lines; numbers far from 1 share a power of ten. `exact` if it is known."""
    known = [] if exact is None else [exact]
    power = _power_of_ten([abs(value) for value in [*known, *(row.value for row in rows)]])
    rows = [_divide(row, 10.0**power) for row in rows]
    known = [value / 10.0**power for value in known]
    forms = [_forms(row.error) for row in rows]
    values = _aligned(
        [*(row.value for row in rows), *known],
        [*(form for form, _ in forms), *(_exact_form(value, rows) for value in known)],
    )
    errors = [f"± {row.error:{form}}" for row, (_, form) in zip(rows, forms, strict=True)]
    blank = [""] * len(known)
    pairs = [" ".join(pair) for pair in zip(values, [*errors, *blank], strict=True)]
    unit = f" (times 1e{power:+d})" if power else ""
    columns = (
        _left(["estimator", *(row.name for row in rows), *["exact"][: len(known)]]),
        _left([f"estimate ± standard error{unit}", *pairs]),
        _right(["matvecs", *(str(row.num_matvecs) for row in rows), *blank]),
        _right(["time", *(f"{1000 * row.seconds:,.1f} ms" for row in rows), *blank]),
    )
    for line in zip(*columns, strict=True):
        yield ("  " + "   ".join(line)).rstrip()


def _divide(row: Row, scale: float) -> Row:
    return row._replace(value=row.value / scale, error=row.error / scale)


def _power_of_ten(magnitudes: list[float]) -> int:
    typical = float(np.median(magnitudes))
    if typical == 0 or not np.isfinite(typical) or 1e-3 <= typical < 1e9:
        return 0
    return int(np.clip(np.floor(np.log10(typical)), -300, 300))


def _forms(error: float) -> tuple[str, str]:
    """How to print a value and its error: in as many decimals as show two digits of it."""
    if error == 0:
        return "z.12g", "g"
    if not np.isfinite(error):
        return "z.6g", "g"
    decimals = _decimals(error)
    return ("z.1e", ".1e") if decimals > 16 else (f"z.{decimals}f", f".{decimals}f")


def _decimals(error: float) -> int:
    return max(0, 1 - int(np.floor(np.log10(error))))


def _exact_form(value: float | complex, rows: list[Row]) -> str:
    """To 8 digits, or as many as the most precise estimate shows, 15 at most."""
    precise = [row.error for row in rows if 0 < row.error < np.inf]
    digits = [len(str(int(abs(value)))) + _decimals(error) for error in precise]
    digits += [12 for row in rows if row.error == 0]
    return f"z.{min(max([8, *digits]), 15)}g"


def _aligned(values: list[float | complex], forms: list[str]) -> list[str]:
    """At the decimal points; complex numbers at both of theirs."""
    pairs = list(zip(values, forms, strict=True))
    real = _at_point([f"{value.real:{form}}" for value, form in pairs])
    if not any(isinstance(value, complex) for value in values):
        return real
    imag = _at_point([f"{abs(value.imag):{form}}j" for value, form in pairs])
    signs = ["-" if value.imag < 0 else "+" for value in values]
    return [" ".join(parts) for parts in zip(real, signs, imag, strict=True)]


def _left(cells: list[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell.ljust(width) for cell in cells]


def _right(cells: list[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell.rjust(width) for cell in cells]


def _at_point(cells: list[str]) -> list[str]:
    """Aligned where the whole digits end."""
    rest = [cell.lstrip("-0123456789") for cell in cells]
    whole = [cell.removesuffix(end) for cell, end in zip(cells, rest, strict=True)]
    return [w + end for w, end in zip(_right(whole), _left(rest), strict=True)]
