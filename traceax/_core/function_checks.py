"""Checks of functions that users give, of where they are evaluated and what they return."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp

from traceax._core.checks import show


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


def check_arrays(name: str, results: object) -> None:
    """Of what `estimate_fn` returned, if that is no Estimate."""
    for leaf in jax.tree.leaves(results):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.number):
            raise TypeError(
                f"traceax.{name}(estimate_fn=...) must return an Estimate, or arrays of "
                f"numbers, because they are multiplied, but there was {leaf!r} in what it "
                "returned. Return the `value` of estimates, and leave out the rest."
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


def check_inexact_values(name: str, structure: object) -> None:
    leaves = jax.tree.leaves(structure)
    kinds = [getattr(leaf, "dtype", None) for leaf in leaves]
    if not leaves or not all(k and jnp.issubdtype(k, jnp.inexact) for k in kinds):
        raise TypeError(
            f"traceax.{name}(fn=...) must return arrays of real or complex numbers, "
            "because they are differentiated, but it returned "
            f"{show(structure)}. Return what depends on x, as floats."
        )


def is_one_real_number(structure: object) -> bool:
    leaves = jax.tree.leaves(structure)
    kind = getattr(leaves[0], "dtype", None) if len(leaves) == 1 else None
    if kind is None or leaves[0].shape != ():
        return False
    return bool(jnp.issubdtype(kind, jnp.floating))


def check_scalar_values(name: str, structure: object) -> None:
    if not is_one_real_number(structure):
        raise TypeError(
            f"traceax.{name}(fn=...) must return one real number, because there is one "
            f"diagonal, but it returned {show(structure)}. Return an array of "
            "shape (), and call it once for each of several functions."
        )


def check_outputs(name: str, structure: object) -> None:
    """Of a model, whose Jacobian is to map real spaces."""
    leaves = jax.tree.leaves(structure)
    kinds = [getattr(leaf, "dtype", None) for leaf in leaves]
    if not leaves or not all(k and jnp.issubdtype(k, jnp.floating) for k in kinds):
        raise TypeError(
            f"traceax.{name}(fn=...) must return arrays of real numbers, because its "
            f"Jacobian maps real vectors to them, but it returned {show(structure)}. "
            "Return floats; take complex numbers apart, (real, imag)."
        )


def check_loss(name: str, loss: object, outputs: object, args: object) -> None:
    """Of a model's outputs."""
    if not callable(loss):
        raise TypeError(
            f"traceax.{name}(loss=...) must be a function loss(outputs, args), but got "
            f"{type(loss).__name__}. Pass lambda outputs, args: ..., of what fn returns."
        )
    structure = eqx.filter_eval_shape(loss, outputs, args)
    if not is_one_real_number(structure):
        raise TypeError(
            f"traceax.{name}(loss=...) must return one real number, because its Hessian is "
            f"taken, but it returned {show(structure)}. Sum or average it over examples."
        )


def check_combine(name: str, combine: object) -> None:
    if not callable(combine):
        raise TypeError(
            f"traceax.{name}(combine=...) must be a function of the traces, because their "
            f"combination is what is estimated, but got {type(combine).__name__}. Pass a "
            "function of what fn returns, lambda t: t['a'] / t['b'], say."
        )


def check_combined(name: str, result: object) -> None:
    """The structure of what `combine` returns."""
    leaves = jax.tree.leaves(result)
    kinds = [getattr(leaf, "dtype", None) for leaf in leaves]
    if not leaves or not all(k and jnp.issubdtype(k, jnp.number) for k in kinds):
        raise TypeError(
            f"traceax.{name}(combine=...) must return an array, or a pytree of arrays of "
            "numbers, because that is the value of the estimate, but it returned "
            f"{result!r}. Return what depends on the traces, and leave out the rest."
        )
