"""How the front doors choose: by structure, tags and budget, never by the estimate."""

from __future__ import annotations

from typing import Literal

import lineax as lx

from traceax._core.operator import is_negative, is_positive, size

# Up to this dimension a batch of n applications is as quick as one of a few.
SMALL = 64


def choice(
    operator: lx.AbstractLinearOperator, num_matvecs: int
) -> Literal["exact", "semidefinite", "general", "few"]:
    """The kind of estimator for an operator whose diagonal is not known."""
    if size(operator) <= max(num_matvecs, SMALL):
        return "exact"
    if num_matvecs >= 3 and (is_positive(operator) or is_negative(operator)):
        return "semidefinite"
    return "general" if num_matvecs >= 6 else "few"
