"""One dense matrix wrapped in every operator class.

Each operator is made from the matrix it stands for, so that derivatives reach the matrix.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

PSD = lx.positive_semidefinite_tag
Wrapper = Callable[[Any], lx.AbstractLinearOperator]


def number(x: float, matrix: Any) -> Any:
    """lineax does not promote numbers if JAX does not."""
    return jnp.asarray(x, matrix.dtype)


def matrix_free(
    fn: Callable[[Any], Any], n: int, tags: Any = (), dtype: Any = float
) -> lx.AbstractLinearOperator:
    return lx.FunctionLinearOperator(fn, jax.ShapeDtypeStruct((n,), dtype), tags)


def function(matrix: Any, tags: Any = ()) -> lx.AbstractLinearOperator:
    return matrix_free(lambda v: matrix @ v, matrix.shape[1], tags, matrix.dtype)


def jacobian(matrix: Any) -> lx.AbstractLinearOperator:
    point = jnp.zeros(matrix.shape[1], matrix.dtype)
    return lx.JacobianLinearOperator(lambda x, args: matrix @ jnp.sin(x), point)


def pytree(matrix: Any) -> lx.AbstractLinearOperator:
    n, k = matrix.shape[0], matrix.shape[0] // 3
    structure = {
        "a": jax.ShapeDtypeStruct((k,), matrix.dtype),
        "b": jax.ShapeDtypeStruct((n - k,), matrix.dtype),
    }
    rows = {"a": matrix[:k], "b": matrix[k:]}
    blocks = {i: {"a": row[:, :k], "b": row[:, k:]} for i, row in rows.items()}
    return lx.PyTreeLinearOperator(blocks, structure)


def two_leaves(matrix: Any, tags: Any = ()) -> lx.AbstractLinearOperator:
    blocks = pytree(matrix)
    return lx.FunctionLinearOperator(blocks.mv, blocks.in_structure(), tags)


def tangent(matrix: Any) -> lx.AbstractLinearOperator:
    """The derivative of theta -> theta^2 matrix + const at theta = 1/2."""

    def make(theta: Any) -> lx.AbstractLinearOperator:
        return function(theta**2 * matrix + jnp.eye(matrix.shape[0], dtype=matrix.dtype))

    half = number(0.5, matrix)
    primal, tangent = eqx.filter_jvp(make, (half,), (jnp.ones_like(half),))
    return lx.TangentLinearOperator(primal, tangent)


def composed(matrix: Any) -> lx.AbstractLinearOperator:
    swap = jnp.eye(matrix.shape[0], dtype=matrix.dtype)[::-1]
    return lx.MatrixLinearOperator(matrix @ swap) @ function(swap)


def nested(matrix: Any) -> lx.AbstractLinearOperator:
    two, third = number(2, matrix), number(3, matrix)
    inner = composed(matrix) + function(matrix) + (-jacobian(matrix))
    return -((lx.MatrixLinearOperator(matrix) - third * inner) / two)


class Plain(lx.AbstractLinearOperator):
    """Its abstract methods alone, and what lineax needs to make one."""

    matrix: Any

    def mv(self, vector: Any) -> Any:
        return self.matrix @ vector

    def as_matrix(self) -> Any:
        return self.matrix

    def transpose(self) -> Any:
        return type(self)(self.matrix.T)

    def in_structure(self) -> Any:
        return jax.ShapeDtypeStruct(self.matrix.shape[1:], self.matrix.dtype)

    def out_structure(self) -> Any:
        return jax.ShapeDtypeStruct(self.matrix.shape[:1], self.matrix.dtype)


NEEDED: Any = (lx.is_symmetric, lx.is_positive_semidefinite, lx.is_negative_semidefinite)
for question in NEEDED:
    question.register(Plain, lambda operator: False)


FULL: dict[str, Wrapper] = {
    "Matrix": lx.MatrixLinearOperator,
    "PyTree": pytree,
    "Jacobian": jacobian,
    "Function": function,
    "Tagged": lambda m: lx.TaggedLinearOperator(function(m), object()),
    "Tangent": tangent,
    "Add": lambda m: function(m / 4) + lx.MatrixLinearOperator(3 * m / 4),
    "Mul": lambda m: number(2, m) * function(m / 2),
    "Neg": lambda m: -function(-m),
    "Div": lambda m: function(2 * m) / number(2, m),
    "Composed": composed,
    "nested": nested,
}
"""Classes that hold any matrix."""

BANDED: dict[str, Wrapper] = {
    "Diagonal": lambda m: lx.DiagonalLinearOperator(jnp.diagonal(m)),
    "Tridiagonal": lambda m: lx.TridiagonalLinearOperator(
        jnp.diagonal(m), jnp.diagonal(m, -1), jnp.diagonal(m, 1)
    ),
    "Identity": lambda m: (
        m[0, 0] * lx.IdentityLinearOperator(jax.ShapeDtypeStruct(m.shape[1:], m.dtype))
    ),
}
"""Classes that hold a part of a matrix; `part_of` says which."""

EVERY: dict[str, Wrapper] = FULL | BANDED


def part_of(kind: str, matrix: Any) -> Any:
    """The matrix that `EVERY[kind](matrix)` stands for."""
    i, j = np.indices(matrix.shape)
    match kind:
        case "Diagonal":
            return jnp.where(i == j, matrix, 0)
        case "Tridiagonal":
            return jnp.where(abs(i - j) <= 1, matrix, 0)
        case "Identity":
            return jnp.where(i == j, matrix[0, 0], 0)
        case _:
            return matrix
