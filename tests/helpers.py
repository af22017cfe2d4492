"""One dense matrix in the clothes of every operator class, and the table of estimators."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax import monitoring

import traceax as tx

# Normal numbers are drawn in single precision. The compiler's older emitters, which the
# suite asks for, round their last digit by the shape of the batch.
DRAWN = 1e-6 if "use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", "") else 0.0

Maker = Callable[[Any], lx.AbstractLinearOperator]
PSD = lx.positive_semidefinite_tag


def slow(*values: Any) -> Any:
    """A parameter of the tests that `python -m pytest -m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def row_norms(matrix: Any) -> Any:
    return jnp.sum(abs(matrix) ** 2, axis=1)


class Entry(NamedTuple):
    """`euler`: the value is read through the frozen blocks of its derivative; `truth`: of a
    dense matrix, homogeneous of degree `degree` in it."""

    name: str
    estimate: Callable[..., tx.Estimate]
    minimum: int
    semidefinite: bool = False
    euler: bool = True
    truth: Callable[[Any], Any] = jnp.trace
    degree: int = 1

    def contracted(self, value: Any) -> Any:
        """A scalar loss of the value, whatever its structure."""
        flat = flatten(value)
        weights = 1.5 + jnp.cos(jnp.arange(flat.size)).astype(flat.real.dtype)
        return flat if flat.ndim == 0 else jnp.sum(flat * weights)


def flatten(tree: Any) -> Any:
    leaves = jax.tree.leaves(tree)
    if len(leaves) == 1 and leaves[0].ndim == 0:
        return leaves[0]
    return jnp.concatenate([leaf.ravel() for leaf in leaves])


ESTIMATORS = [
    Entry("hutchinson_trace", tx.hutchinson_trace, 1),
    Entry("hutchpp_trace", tx.hutchpp_trace, 3),
    Entry("na_hutchpp_trace", tx.na_hutchpp_trace, 4, euler=False),
    Entry("xtrace", tx.xtrace, 2),
    Entry("xnystrace", tx.xnystrace, 1, semidefinite=True, euler=False),
]
FRONT_DOOR = Entry("trace", tx.trace, 1)
ALL = [*ESTIMATORS, FRONT_DOOR]
"""The traces."""

DIAGONALS = [
    Entry("hutchinson_diagonal", tx.hutchinson_diagonal, 1, truth=jnp.diagonal),
    Entry("diagpp", tx.diagpp, 3, truth=jnp.diagonal, euler=False),
    Entry("xdiag", tx.xdiag, 2, truth=jnp.diagonal, euler=False),
    Entry("xnysdiag", tx.xnysdiag, 1, semidefinite=True, truth=jnp.diagonal, euler=False),
]
NORMS = [
    Entry("row_norms_squared", tx.row_norms_squared, 3, truth=row_norms, degree=2),
    Entry(
        "frobenius_norm_squared",
        tx.frobenius_norm_squared,
        2,
        truth=lambda m: jnp.sum(row_norms(m)),
        degree=2,
        euler=False,
    ),
]
DIAGONAL_DOOR = Entry("diagonal", tx.diagonal, 1, truth=jnp.diagonal)
REST = [*DIAGONALS, *NORMS]
REST_ALL = [*REST, DIAGONAL_DOOR]
"""Diagonals and norms."""


def names(entries: list[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def as_semidefinite(entry: Entry, operator: lx.AbstractLinearOperator) -> Any:
    """The operator, tagged where the estimator insists on it."""
    return lx.TaggedLinearOperator(operator, PSD) if entry.semidefinite else operator


# Every class, made from the matrix it stands for (so that derivatives reach the matrix).


def function(matrix: Any) -> lx.AbstractLinearOperator:
    structure = jax.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure)


def jacobian(matrix: Any) -> lx.AbstractLinearOperator:
    point = jnp.zeros(matrix.shape[1], matrix.dtype)

    def bent(x: Any, args: Any) -> Any:
        return matrix @ jnp.sin(x)

    return lx.JacobianLinearOperator(bent, point)


def pytree(matrix: Any) -> lx.AbstractLinearOperator:
    n, k = matrix.shape[0], matrix.shape[0] // 3
    structure = {
        "a": jax.ShapeDtypeStruct((k,), matrix.dtype),
        "b": jax.ShapeDtypeStruct((n - k,), matrix.dtype),
    }
    rows = {"a": matrix[:k], "b": matrix[k:]}
    blocks = {i: {"a": row[:, :k], "b": row[:, k:]} for i, row in rows.items()}
    return lx.PyTreeLinearOperator(blocks, structure)


def tangent(matrix: Any) -> lx.AbstractLinearOperator:
    """The derivative of theta -> theta^2 matrix + const at theta = 1/2."""

    def make(theta: Any) -> lx.AbstractLinearOperator:
        return function(theta**2 * matrix + jnp.eye(matrix.shape[0], dtype=matrix.dtype))

    half = jnp.asarray(0.5, jnp.finfo(matrix.dtype).dtype)
    primal, tangent = eqx.filter_jvp(make, (half,), (jnp.ones_like(half),))
    return lx.TangentLinearOperator(primal, tangent)


def composed(matrix: Any) -> lx.AbstractLinearOperator:
    swap = jnp.eye(matrix.shape[0], dtype=matrix.dtype)[::-1]
    return lx.MatrixLinearOperator(matrix @ swap) @ function(swap)


def nested(matrix: Any) -> lx.AbstractLinearOperator:
    third = jnp.asarray(3.0, jnp.finfo(matrix.dtype).dtype)
    inner = composed(matrix) + function(matrix) + (-jacobian(matrix))
    return -((lx.MatrixLinearOperator(matrix) - third * inner) / 2)


FULL: dict[str, Maker] = {
    "Matrix": lx.MatrixLinearOperator,
    "PyTree": pytree,
    "Jacobian": jacobian,
    "Function": function,
    "Tagged": lambda m: lx.TaggedLinearOperator(function(m), object()),
    "Tangent": tangent,
    "Add": lambda m: function(m / 4) + lx.MatrixLinearOperator(3 * m / 4),
    "Mul": lambda m: 2.0 * function(m / 2),
    "Neg": lambda m: -function(-m),
    "Div": lambda m: function(2 * m) / 2.0,
    "Composed": composed,
    "nested": nested,
}
"""Classes that hold any matrix."""

BANDED: dict[str, Maker] = {
    "Diagonal": lambda m: lx.DiagonalLinearOperator(jnp.diagonal(m)),
    "Tridiagonal": lambda m: lx.TridiagonalLinearOperator(
        jnp.diagonal(m), jnp.diagonal(m, -1), jnp.diagonal(m, 1)
    ),
    "Identity": lambda m: (
        m[0, 0] * lx.IdentityLinearOperator(jax.ShapeDtypeStruct(m.shape[1:], m.dtype))
    ),
}
"""Classes that hold a part of a matrix; `part_of` says which."""

EVERY: dict[str, Maker] = FULL | BANDED


def part_of(kind: str, matrix: Any) -> Any:
    """The matrix that `EVERY[kind](matrix)` stands for."""
    n = matrix.shape[0]
    i, j = np.indices((n, n))
    match kind:
        case "Diagonal":
            return matrix * (i == j)
        case "Tridiagonal":
            return matrix * (abs(i - j) <= 1)
        case "Identity":
            return matrix[0, 0] * jnp.eye(n, dtype=matrix.dtype)
        case _:
            return matrix


def spectrum(name: str, n: int) -> np.ndarray:
    i = np.arange(n)
    return {
        "flat": np.linspace(3, 1, n),
        "poly": (i + 1.0) ** -2,
        "exp": 0.7**i,
        "step": np.where(i < n // 20, 1, 1e-3),
        "rank5": (i < 5) * 1.0,
        "zero": 0.0 * i,
    }[name]


def hermitian(eigenvalues: np.ndarray, dtype: Any = float, seed: int = 0) -> Any:
    """A dense Hermitian matrix with these eigenvalues in a random orthonormal basis."""
    n = len(eigenvalues)
    rng = np.random.default_rng(seed)
    block: Any = rng.standard_normal((n, n))
    if np.issubdtype(np.dtype(dtype), np.complexfloating):
        block = block + 1j * rng.standard_normal((n, n))
    basis, _ = np.linalg.qr(block)
    matrix = (basis * eigenvalues) @ basis.conj().T
    return jnp.asarray((matrix + matrix.conj().T) / 2, dtype)


def general(n: int, dtype: Any = float, seed: int = 0) -> Any:
    """A dense non-normal matrix."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((n, n)) / np.sqrt(n) + 0.5 * np.triu(np.ones((n, n)))
    if np.issubdtype(np.dtype(dtype), np.complexfloating):
        matrix = matrix + 1j * rng.standard_normal((n, n))
    return jnp.asarray(matrix, dtype)


def suitable(entry: Entry, n: int, dtype: Any = float, seed: int = 0) -> Any:
    """A matrix that the estimator may be given."""
    if entry.semidefinite:
        return hermitian(1.0 + np.arange(n) % 5, dtype, seed)
    return general(n, dtype, seed)


@contextmanager
def leaks_checked(on_new_versions: bool = False) -> Iterator[None]:
    """jax 0.12's checker reports the functions that Equinox 0.13 keeps in its caches after
    converting closures, though nothing has leaked.

    For each program that is traced the checker collects all garbage: what there was before
    is set apart, so that it looks through what is new."""
    if not (on_new_versions or jax.__version__.startswith("0.10")):
        yield
        return
    gc.collect()
    gc.freeze()
    with jax.checking_leaks():
        yield


_COMPILED: list[float] = []


def _heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COMPILED.append(duration_secs)


monitoring.register_event_duration_secs_listener(_heard)


@contextmanager
def compilations() -> Iterator[list[float]]:
    """The seconds of each program that is compiled in here, to be read afterwards."""
    before, inside = len(_COMPILED), []
    yield inside
    inside.extend(_COMPILED[before:])


def close(got: Any, want: Any, tolerance: float, scale: float | None = None) -> None:
    """Relative to `scale`, the size of what was computed with; never a bare `atol`."""
    scale = float(np.max(np.abs(want))) if scale is None else scale
    error = np.max(np.abs(np.asarray(got) - np.asarray(want)))
    assert error <= tolerance * scale, f"{error} > {tolerance} * {scale}: {got} != {want}"
