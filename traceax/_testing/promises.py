"""Whether what lineax is told of an operator is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import lineax as lx
import numpy as np

from traceax._core.operator import dimension
from traceax._testing.report import Report
from traceax._testing.subject import Subject, length

_KRYLOV_PROBES, _KRYLOV_STEPS = 8, 4
_Violation = Callable[[Subject], tuple[Any, Any]]


def _symmetric(s: Subject) -> tuple[Any, Any]:
    x, y = s.vector(10), s.vector(11)
    ax, ay = s.apply(x), s.apply(y)
    size = length(ax) * length(y) + length(ay) * length(x)
    return abs(y @ ax - x @ ay), size


def _diagonal(s: Subject) -> tuple[Any, Any]:
    x = s.vector(12)
    ax = s.apply(x)
    return jnp.max(jnp.abs(ax - x * s.apply(jnp.ones_like(x)))), jnp.max(jnp.abs(ax))


def _zero_above(s: Subject, *, shift: int, lower: bool) -> tuple[Any, Any]:
    """Of x that ends, or begins, somewhere: how far A x goes beyond."""
    x = s.vector(13)
    cuts = np.unique(np.linspace(0, x.size - 1, 16).astype(int))[None, :]
    i = np.arange(x.size)[:, None]
    kept, beyond = (i >= cuts, i < cuts - shift) if lower else (i <= cuts, i > cuts + shift)
    images = s.apply_block(jnp.where(kept, x[:, None], 0))
    return jnp.max(jnp.abs(images) * beyond), length(s.apply(x))


def _lower(s: Subject) -> tuple[Any, Any]:
    return _zero_above(s, shift=0, lower=True)


def _upper(s: Subject) -> tuple[Any, Any]:
    return _zero_above(s, shift=0, lower=False)


def _tridiagonal(s: Subject) -> tuple[Any, Any]:
    parts = [_zero_above(s, shift=1, lower=lower) for lower in (True, False)]
    return max(part for part, _ in parts), parts[0][1]


def _unit_diagonal(s: Subject) -> tuple[Any, Any]:
    n = dimension(s.operator.in_structure())
    chosen = np.unique(np.linspace(0, n - 1, 16).astype(int))
    units = jnp.asarray(np.arange(n)[:, None] == chosen, s.vector(0).dtype)
    entries = s.apply_block(units)[chosen, np.arange(len(chosen))]
    return jnp.max(jnp.abs(entries - 1)), 1.0


def _semidefinite(s: Subject, sign: int) -> tuple[Any, Any]:
    """The part of a Ritz value beyond zero; and of z* A z what is not real."""
    block = jnp.stack([s.vector(20 + i) for i in range(_KRYLOV_PROBES)], axis=1)
    blocks = [block]
    for _ in range(_KRYLOV_STEPS - 1):
        image = s.apply_block(blocks[-1])
        largest = jnp.max(jnp.abs(image))
        blocks.append(image / jnp.where(largest > 0, largest, 1))
    basis, _ = jnp.linalg.qr(jnp.hstack(blocks))
    core = basis.conj().T @ s.apply_block(basis)
    lowest = jnp.min(sign * jnp.linalg.eigvalsh((core + core.conj().T) / 2))
    skew = jnp.max(jnp.abs(core - core.conj().T))
    return jnp.maximum(-lowest, skew), jnp.max(jnp.abs(core)) * core.shape[0]


_PROMISES: dict[str, tuple[Callable[[Any], bool], _Violation]] = {
    "symmetric": (lx.is_symmetric, _symmetric),
    "positive semidefinite": (lx.is_positive_semidefinite, lambda s: _semidefinite(s, 1)),
    "negative semidefinite": (lx.is_negative_semidefinite, lambda s: _semidefinite(s, -1)),
    "diagonal": (lx.is_diagonal, _diagonal),
    "lower triangular": (lx.is_lower_triangular, _lower),
    "upper triangular": (lx.is_upper_triangular, _upper),
    "tridiagonal": (lx.is_tridiagonal, _tridiagonal),
    "unit diagonal": (lx.has_unit_diagonal, _unit_diagonal),
}


def _promised(claims: Callable[[Any], bool], s: Subject) -> bool:
    """What lineax was not told of a class is not promised."""
    try:
        return claims(s.operator)
    except NotImplementedError:
        return False


def promises(report: Report, s: Subject) -> None:
    for name, (claims, violation) in _PROMISES.items():
        with report.step(name):
            if not _promised(claims, s):
                continue
            excess, size = violation(s)
            cure = f"It says that it is {name}, and is not: take back the tag, or the rule."
            report.close(name, excess, 0.0, s.rtol * size, cure)
