"""Checks of what stands beside an operator in an equation: shifts, right-hand sides,
tolerances."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import ArrayLike, PyTree

from traceax._core.checks import show
from traceax._core.operator import is_negative


def check_shift(
    name: str,
    operator: lx.AbstractLinearOperator,
    shift: ArrayLike | lx.DiagonalLinearOperator,
    *,
    several: bool = True,
) -> None:
    """Of log det(A + shift I), which A must not be known to make impossible."""
    if is_negative(operator):
        raise ValueError(
            f"traceax.{name}(operator=...) must not be tagged negative semidefinite, "
            "because the logarithm of a negative number is not real, but got a "
            f"{type(operator).__name__} that is. Negate it: log det(-A) is what there is."
        )
    if isinstance(shift, lx.DiagonalLinearOperator):
        _check_noise(name, operator, shift)
        return
    dtype = getattr(shift, "dtype", None)
    if not (isinstance(shift, int | float) or dtype is not None) or jnp.iscomplexobj(shift):
        kinds = "a number, an array of them" if several else "a number"
        raise TypeError(
            f"traceax.{name}(shift=...) must be real, {kinds} or an "
            "lx.DiagonalLinearOperator, because A + shift I must be Hermitian, but got "
            f"{shift!r}. Take the real part of what is complex, make an array of a list."
        )
    if not several and jnp.ndim(shift):
        raise ValueError(
            f"traceax.{name}(shift=...) must be one number, because each shift has a "
            f"solution of its own, but got shape {jnp.shape(shift)}. Use jax.vmap over "
            "them, or lx.DiagonalLinearOperator for a shift of each dimension."
        )


def check_vector(
    name: str, operator: lx.AbstractLinearOperator, vector: PyTree[ArrayLike]
) -> bool:
    """Whether there are several, along a first axis."""
    expected = operator.in_structure()
    shapes = jax.tree.map(jnp.shape, vector)
    one = jax.tree.map(lambda leaf: leaf.shape, expected)
    leading = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(vector)}
    axis = next(iter(leading)) if len(leading) == 1 else ()
    many = jax.tree.map(lambda leaf: axis + leaf.shape, expected)
    if shapes != one and (shapes != many or 0 in axis):
        raise ValueError(
            f"traceax.{name}(vector=...) must be of the operator's space, "
            f"{show(expected)}, or several of them along one more, first, axis of every "
            f"leaf, but got shapes {shapes}. Make arrays of these shapes: of several "
            "right-hand sides each is a row."
        )
    leaves = zip(jax.tree.leaves(vector), jax.tree.leaves(expected), strict=True)
    if any(jnp.iscomplexobj(v) and not jnp.iscomplexobj(e) for v, e in leaves):
        raise TypeError(
            f"traceax.{name}(vector=...) must be real, because the operator is, but got "
            "complex numbers. Give real and imaginary parts as two right-hand sides."
        )
    return shapes != one


def check_rtol(name: str, rtol: object) -> None:
    if not isinstance(rtol, int | float) or isinstance(rtol, bool):
        raise TypeError(
            f"traceax.{name}(rtol=...) must be a Python float, but got "
            f"{type(rtol).__name__}. Pass 1e-6, say."
        )
    if not 0 < rtol < 1:
        raise ValueError(
            f"traceax.{name}(rtol=...) must be strictly between 0 and 1, because it is a "
            f"relative error, but got {rtol}. Pass 1e-6, say."
        )


def _check_noise(
    name: str, operator: lx.AbstractLinearOperator, shift: lx.DiagonalLinearOperator
) -> None:
    leaves = jax.tree.leaves(shift.diagonal)
    if any(jnp.iscomplexobj(leaf) for leaf in leaves):
        raise TypeError(
            f"traceax.{name}(shift=...) must be real, because A + shift must be Hermitian, "
            "but got a complex diagonal. Take its real part."
        )
    shapes = jax.tree.map(jnp.shape, shift.diagonal)
    expected = jax.tree.map(lambda leaf: leaf.shape, operator.in_structure())
    if shapes != expected:
        raise ValueError(
            f"traceax.{name}(shift=...) must act on the operator's space, of shapes "
            f"{expected}, but got a diagonal of shapes {shapes}. Give an entry for each of "
            "the operator's dimensions."
        )
