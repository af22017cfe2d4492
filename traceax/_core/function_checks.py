"""Checks of functions that users give, algorithms among them, and of what they return."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from traceax._core.checks import show

_RESULT = "(value, standard_error, (left, right))"


def check_field(name: str, fn: object, x: object) -> None:
    """A function `fn(x, args)` and a point to take its derivatives at."""
    if not callable(fn):
        raise TypeError(
            f"traceax.{name}(fn=...) must be a function fn(x, args), but got "
            f"{type(fn).__name__}. Pass lambda x, args: ..., or an eqx.Module that is one."
        )
    leaves = jax.tree.leaves(x)
    for leaf in leaves:
        is_number = isinstance(leaf, int | float) and not isinstance(leaf, bool)
        dtype = getattr(leaf, "dtype", None)
        is_array = dtype is not None and jnp.issubdtype(dtype, jnp.number)
        if not (is_number or is_array) or jnp.iscomplexobj(leaf):
            got = type(leaf).__name__ if dtype is None else f"an array of {dtype}"
            raise TypeError(
                f"traceax.{name}(x=...) must be a pytree of real arrays, because "
                f"derivatives in its entries are taken, but got {got}. Put what is not "
                "differentiated into args (of a module, take its arrays by eqx.partition "
                "and combine the rest in fn); take complex numbers apart, (real, imag)."
            )
    if not sum(jnp.size(leaf) for leaf in leaves):
        raise ValueError(
            f"traceax.{name}(x=...) must have at least one entry, because derivatives in "
            f"its entries are taken, but got {x!r}. Nothing depends on it: leave it out."
        )


def check_estimate_fn(name: str, estimate_fn: object) -> None:
    if not callable(estimate_fn):
        raise TypeError(
            f"traceax.{name}(estimate_fn=...) must be a function of a key, because it is "
            f"called with two independent ones, but got {type(estimate_fn).__name__}. Pass "
            "lambda key: traceax.trace(operator, key), say."
        )


def check_same_structure(name: str, x: object, values: object) -> None:
    """Of a vector field: there is one component for each entry of x."""
    if eqx.tree_equal(x, values) is not True:
        raise ValueError(
            f"traceax.{name}(fn=...) must return what x is like, because each component is "
            f"differentiated in the entry of its place, but for x of {show(x)} it "
            f"returned {show(values)}. Make shapes and dtypes equal, and use jax.vmap "
            "for a batch of points."
        )


def _check_returned(
    name: str, argument: str, structure: object, kind: Any, must: str, cure: str
) -> None:
    """That there are arrays, all of them of a kind of numbers."""
    leaves = jax.tree.leaves(structure)
    kinds = [getattr(leaf, "dtype", None) for leaf in leaves]
    if not leaves or not all(k and jnp.issubdtype(k, kind) for k in kinds):
        raise TypeError(
            f"traceax.{name}({argument}=...) must return {must}, but it returned "
            f"{structure!r}. {cure}"
        )


def check_inexact_values(name: str, structure: object) -> None:
    must = "arrays of real or complex numbers, because they are differentiated"
    cure = "Return what depends on x, as floats."
    _check_returned(name, "fn", structure, jnp.inexact, must, cure)


def check_outputs(name: str, structure: object) -> None:
    """Of a model, whose Jacobian is to map real spaces."""
    must = "arrays of real numbers, because its Jacobian maps real vectors to them"
    cure = "Return floats; take complex numbers apart, (real, imag)."
    _check_returned(name, "fn", structure, jnp.floating, must, cure)


def check_arrays(name: str, results: object) -> None:
    """Of what `estimate_fn` returned, if that is no Estimate."""
    must = "an Estimate, or arrays of numbers, because they are multiplied"
    cure = "Return the `value` of estimates, and leave out the rest."
    _check_returned(name, "estimate_fn", results, jnp.number, must, cure)


def check_combined(name: str, result: object) -> None:
    """The structure of what `combine` returns."""
    must = "an array, or a pytree of arrays of numbers, because they are what is estimated"
    cure = "Return what depends on the traces, and leave out the rest."
    _check_returned(name, "combine", result, jnp.number, must, cure)


def is_one_real_number(structure: object) -> bool:
    leaves = jax.tree.leaves(structure)
    if [getattr(leaf, "shape", None) for leaf in leaves] != [()]:
        return False
    return bool(jnp.issubdtype(leaves[0].dtype, jnp.floating))


def _check_scalar(name: str, argument: str, structure: object, why: str, cure: str) -> None:
    if not is_one_real_number(structure):
        raise TypeError(
            f"traceax.{name}({argument}=...) must return one real number, because {why}, "
            f"but it returned {structure!r}. {cure}"
        )


def check_scalar_values(name: str, structure: object) -> None:
    why = "there is one diagonal"
    cure = "Return an array of shape (), and call it once for each of several functions."
    _check_scalar(name, "fn", structure, why, cure)


def check_loss(name: str, loss: object, outputs: object, args: object) -> None:
    """Of a model's outputs."""
    if not callable(loss):
        raise TypeError(
            f"traceax.{name}(loss=...) must be a function loss(outputs, args), but got "
            f"{type(loss).__name__}. Pass lambda outputs, args: ..., of what fn returns."
        )
    structure = eqx.filter_eval_shape(loss, outputs, args)
    cure = "Sum or average it over examples."
    _check_scalar(name, "loss", structure, "its Hessian is taken", cure)


def check_combine(name: str, combine: object) -> None:
    if not callable(combine):
        raise TypeError(
            f"traceax.{name}(combine=...) must be a function of the traces, because their "
            f"combination is what is estimated, but got {type(combine).__name__}. Pass a "
            "function of what fn returns, lambda t: t['a'] / t['b'], say."
        )


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
            f"is read through the two blocks, but returned {show(result)}. Return "
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
