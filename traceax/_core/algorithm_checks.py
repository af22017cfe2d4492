"""Checks of algorithms that users give: of what they apply, and of what they return."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from traceax._core.checks import show

_RESULT = "(value, standard_error, (left, right))"


def check_algorithm(name: str, algorithm: object) -> None:
    if not callable(algorithm):
        raise TypeError(
            f"traceax.{name}(algorithm=...) must be a function algorithm(apply, probes) -> "
            f"{_RESULT}, but got {type(algorithm).__name__}. Pass a function: the example "
            f"of traceax.{name} is Hutchinson's."
        )


def check_block(name: str, block: object, n: int) -> None:
    """What an algorithm applies the operator to."""
    kind, shape = getattr(block, "dtype", None), getattr(block, "shape", ())
    is_numbers = kind is not None and jnp.issubdtype(kind, jnp.number)
    if not is_numbers or len(shape) != 2 or shape[0] != n or not shape[1]:
        got = f"{kind}{list(shape)}" if kind is not None else type(block).__name__
        raise ValueError(
            f"traceax.{name}(algorithm=...) must apply the operator to blocks of numbers of"
            f" shape ({n}, k), because each column is a vector of its flattened space, but "
            f"called apply with {got}. Pass apply(vector[:, None])[:, 0] for one vector."
        )


def check_applied(name: str, num_matvecs: int | None) -> None:
    """`None`: nobody knows how often."""
    if num_matvecs is None:
        raise ValueError(
            f"traceax.{name}(algorithm=...) must apply the operator a number of times that "
            "is known before it runs, because num_matvecs reports it, but called apply in a"
            " jax.lax.while_loop. Use jax.lax.scan, or fori_loop between Python ints."
        )
    if not num_matvecs:
        raise ValueError(
            f"traceax.{name}(algorithm=...) must apply the operator, because that is all "
            "that is known of it, but never called apply. Apply it to the probes: "
            "apply(probes)."
        )


def check_result(name: str, result: Any) -> None:
    """Three parts, the last of two."""
    is_triple = isinstance(result, tuple | list) and len(result) == 3
    if not is_triple or not isinstance(result[2], tuple | list) or len(result[2]) != 2:
        raise TypeError(
            f"traceax.{name}(algorithm=...) must return {_RESULT}, because the derivative "
            f"is read through the two blocks, but returned {_described(result)}. Return "
            "value, error, (probes / k, probes), say."
        )


def check_value(name: str, part: str, value: Array, *, real: bool) -> None:
    is_number = jnp.issubdtype(value.dtype, jnp.number)
    if value.shape != () or not is_number or (real and jnp.iscomplexobj(value)):
        kind = "one real number" if real else "one number"
        raise ValueError(
            f"traceax.{name}(algorithm=...) must return a {part} that is {kind}, an array "
            f"of shape (), but got {value.dtype}{list(value.shape)}. Sum or average what "
            "the probes say, and take .real where imaginary parts are rounding."
        )


def check_blocks(name: str, left: Array, right: Array, n: int) -> None:
    tall = left.ndim == 2 and left.shape[0] == n and left.shape[1] > 0
    numbers = all(jnp.issubdtype(block.dtype, jnp.number) for block in (left, right))
    if not tall or left.shape != right.shape or not numbers:
        got = [f"{block.dtype}{list(block.shape)}" for block in (left, right)]
        raise ValueError(
            f"traceax.{name}(algorithm=...) must return blocks (left, right) of equal "
            f"shape ({n}, r), because E[left right*] = I makes derivatives unbiased, but "
            f"got {got[0]} and {got[1]}. Hutchinson's are (probes / k, probes), k probes."
        )


def _described(result: object) -> str:
    if isinstance(result, tuple | list):
        parts = ", ".join(map(_described, result))
        return f"({parts})"
    if isinstance(result, jax.Array):
        return show(jax.typeof(result))
    return type(result).__name__
