"""Functions as code and arrays, so that what is compiled for one serves its equals.

A function that users make anew for every call, a lambda mostly, is a new one to whatever
keeps compiled programs; its code is not (`code`). So outside of `jax.jit` an algorithm may
be compiled as one with the operator inside it: the first call takes the time of one
compilation, not of dozens, and no later one any.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.tree_util import Partial
from jaxtyping import Array, PyTree

from traceax._core.code import fingerprint, first_of_equals


class Coded(eqx.Module):
    """A function of arrays; what it refers to are its leaves, what it does is static."""

    arrays: list[Array]
    code: Jaxpr = eqx.field(static=True)
    result: Any = eqx.field(static=True)
    fingerprint: bytes = eqx.field(static=True)

    def __call__(self, *args: PyTree[Array]) -> PyTree[Array]:
        num_constants = len(self.code.constvars)
        own, constants = self.arrays[num_constants:], self.arrays[:num_constants]
        run = jaxpr_as_fun(ClosedJaxpr(self.code, constants))
        return jax.tree.unflatten(self.result, run(*own, *jax.tree.leaves(args)))

    def with_arrays(self, arrays: list[Array]) -> Coded:
        return Coded(arrays, self.code, self.result, self.fingerprint)


def code_of(fn: Callable[..., Any], *args: Any) -> Coded:
    """`fn`, to be called with what `args` are like; shared with its equals if nothing in it
    is being traced."""
    own, rest = eqx.partition(fn, eqx.is_array)

    def call(own: Any, *args: Any) -> Any:
        return eqx.combine(own, rest)(*args)

    code, shape = jax.make_jaxpr(call, return_shape=True)(own, *args)
    arrays = [*map(jnp.asarray, code.consts), *jax.tree.leaves(own)]
    digest = fingerprint(code.jaxpr)
    jaxpr = first_of_equals(code.jaxpr, digest) if are_here(arrays) else code.jaxpr
    return Coded(arrays, jaxpr, jax.tree.structure(shape), digest)


class Unknown(Exception):  # noqa: N818
    """What is not made of functions of arrays."""


def coded(fn: Callable[..., Any], *args: Any) -> Coded:
    """`code_of` what may be compiled as one with others."""
    if not all(map(_is_like_array, jax.tree.leaves(args))):
        raise Unknown
    code = fn if isinstance(fn, Coded) else code_of(fn, *args)
    if code.code.effects or not are_here(code):
        raise Unknown
    return code


def _is_like_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or eqx.is_array(leaf)


def are_here(tree: PyTree) -> bool:
    """Whether nothing in it is being traced."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def coded_operator(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """The same, its functions coded."""
    functions = (lx.FunctionLinearOperator, lx.JacobianLinearOperator)

    def with_code(node: Any) -> Any:
        match node:
            case lx.FunctionLinearOperator():
                fn = coded(node.fn, node.in_structure())
            case lx.JacobianLinearOperator():
                fn = coded(node.fn, node.x, node.args)
            case _:
                return node
        return eqx.tree_at(lambda op: op.fn, node, fn)

    for node in jax.tree.leaves(operator, is_leaf=_is_foreign):
        if _is_foreign(node):
            raise Unknown
    return jax.tree.map(with_code, operator, is_leaf=lambda x: isinstance(x, functions))


def _is_foreign(node: Any) -> bool:
    """Not lineax's: it may hold functions anywhere; nor a tangent, which holds half of
    one."""
    if isinstance(node, lx.TangentLinearOperator):
        return True
    is_operator = isinstance(node, lx.AbstractLinearOperator)
    return is_operator and type(node).__module__.split(".")[0] != "lineax"


def algorithm_by_value(fn: Callable[..., Any]) -> Callable[..., Any]:
    """One that is equal to another if it does the same. Not one that is made anew at each
    call, or decides by itself what it compiles, as methods may; unless it knows better."""
    inner = fn
    while isinstance(inner, partial):
        inner = inner.args[0] if inner.args else inner.func
    if getattr(inner, "is_by_value", False):
        return by_value(fn)
    if not isinstance(inner, types.FunctionType) or inner.__closure__:
        raise Unknown
    return by_value(fn)


def by_value(fn: Any) -> Any:
    """Partial functions as pytrees, which are equal if their parts are."""
    if not isinstance(fn, partial):
        return fn
    keywords = {name: by_value(value) for name, value in fn.keywords.items()}
    return Partial(by_value(fn.func), *map(by_value, fn.args), **keywords)


class Static(NamedTuple):
    """A partial function that is equal to another if their parts are."""

    parts: tuple[Any, ...]
    structure: Any

    def __call__(self, *args: Any) -> Any:
        return jax.tree.unflatten(self.structure, self.parts)(*args)


def static(fn: Any) -> Any:
    """`fn`, to be kept in a static field: there what is compiled for one partial function
    would serve no other, though it does the same. One that holds arrays stays as it is."""
    if not isinstance(fn, partial):
        return fn
    parts, structure = jax.tree.flatten(by_value(fn))
    by_parts = Static(tuple(parts), structure)
    try:
        hash(by_parts)
    except TypeError:
        return fn
    return by_parts
