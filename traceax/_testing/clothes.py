"""One dense matrix in the clothes of every operator class.

Each is made from the matrix it stands for, so that derivatives reach the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

Maker = Callable[[Any], lx.AbstractLinearOperator]


class Clothes(NamedTuple):
    """`make(matrix)` stands for `dense(matrix)`."""

    name: str
    make: Maker
    dense: Callable[[Any], Any]


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
    swap = _swap(matrix)
    return lx.MatrixLinearOperator(matrix @ swap) @ function(swap)


def nested(matrix: Any) -> lx.AbstractLinearOperator:
    third = jnp.asarray(3.0, jnp.finfo(matrix.dtype).dtype)
    inner = composed(matrix) + function(matrix) + (-jacobian(matrix))
    return -((lx.MatrixLinearOperator(matrix) - third * inner) / 2)


def _swap(matrix: Any) -> Any:
    return jnp.eye(matrix.shape[0], dtype=matrix.dtype)[::-1]


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


SINGLE = [
    Clothes(name, make, lambda m, name=name: part_of(name, m))
    for name, make in EVERY.items()
    if name not in ("Tagged", "Add", "Mul", "Neg", "Div", "Composed", "nested")
]
"""Classes that hold no other operator. All but `PyTree` have vectors of one leaf."""


def wrapped(outer: str, inner: Clothes) -> Clothes:
    """An operator within another."""
    make, dense = inner.make, inner.dense
    name = f"{outer}({inner.name})"
    match outer:
        case "Tagged":
            return Clothes(name, lambda m: lx.TaggedLinearOperator(make(m), ()), dense)
        case "Neg":
            return Clothes(name, lambda m: -make(m), lambda m: -dense(m))
        case "Mul":
            return Clothes(name, lambda m: make(m) * _real(3, m), lambda m: 3 * dense(m))
        case "Div":
            return Clothes(name, lambda m: make(m) / _real(4, m), lambda m: dense(m) / 4)
        case _:
            raise ValueError(outer)


def _real(number: float, matrix: Any) -> Any:
    return jnp.asarray(number, jnp.finfo(matrix.dtype).dtype)


def joined(outer: str, one: Clothes, other: Clothes) -> Clothes:
    """Two operators within another."""
    name = f"{outer}({one.name}, {other.name})"
    match outer:
        case "Add":
            return Clothes(
                name,
                lambda m: one.make(m / 4) + other.make(3 * m / 4),
                lambda m: one.dense(m / 4) + other.dense(3 * m / 4),
            )
        case "Composed":
            return Clothes(
                name,
                lambda m: one.make(m @ _swap(m)) @ other.make(_swap(m)),
                lambda m: one.dense(m @ _swap(m)) @ other.dense(_swap(m)),
            )
        case _:
            raise ValueError(outer)
