"""Noise that is not the same in all directions, made so."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float

from traceax._core.operator import LinearMap, flatten, prepare, stores_matrix, working_dtype
from traceax._functions.slq import real_dtype


class White(NamedTuple):
    """A + D = D^{1/2} (D^{-1/2} A D^{-1/2} + I) D^{1/2}: the operator in the middle, the
    diagonal of D^{-1/2}, and log det D."""

    operator: lx.AbstractLinearOperator
    scale: Float[Array, " n"]
    log_determinant: Float[Array, ""]


def whitened(
    operator: lx.AbstractLinearOperator, noise: lx.DiagonalLinearOperator
) -> White:
    operator = prepare(operator)
    dtype = real_dtype(operator)
    entries = jax.tree.map(lambda d: jnp.asarray(d, dtype), noise.diagonal)
    logs = sum(jnp.sum(jnp.log(leaf)) for leaf in jax.tree.leaves(entries))
    root = jax.tree.map(
        lambda d, like: (d**-0.5).astype(like.dtype), entries, operator.in_structure()
    )
    root = lx.DiagonalLinearOperator(root)
    white = root @ operator @ root
    scale = flatten(root.diagonal, working_dtype(operator))
    if stores_matrix(operator) and not lx.is_diagonal(operator):
        matrix = scale[:, None] * LinearMap(operator).dense() * scale[None, :]
        white = lx.MatrixLinearOperator(matrix)
    return White(white, scale, jnp.asarray(logs, dtype))
