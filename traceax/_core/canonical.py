"""Functions in canonical form, so that what is compiled for one serves its equals.

A function that users make anew for every call, a lambda mostly, is a new one to whatever
keeps compiled programs. Traced, it is a jaxpr and arrays. The arrays become leaves, and the
first of several equal jaxprs stands for all of them: equal in every operation, variable,
type and parameter. A parameter that cannot be compared is equal only to itself.

JAX keeps the arrays that a jitted function closes over inside of that function's jaxpr.
They are hoisted, and so leaves, too: none is hashed, copied or kept after the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun
from jax.tree_util import Partial
from jaxtyping import Array, PyTree


class Canonical(eqx.Module):
    """A function of arrays: those that it refers to are leaves, what it does is static."""

    arrays: list[Array]
    jaxpr: Jaxpr = eqx.field(static=True)
    result: Any = eqx.field(static=True)

    def __call__(self, *args: PyTree[Any]) -> PyTree[Array]:
        count = len(self.jaxpr.constvars)
        run = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, self.arrays[:count]))
        inputs = jax.tree.leaves(eqx.filter(args, eqx.is_array))
        return jax.tree.unflatten(self.result, run(*self.arrays[count:], *inputs))


def canonical(fn: Callable[..., Any], *args: Any) -> Canonical:
    """`fn`, to be called with arrays like those in `args`, and what else is in them."""
    if isinstance(fn, Canonical):
        return fn
    own, rest = eqx.partition(fn, eqx.is_array)
    arrays, others = eqx.partition(args, _is_like_array)

    def call(own: Any, arrays: Any) -> Any:
        return eqx.combine(own, rest)(*eqx.combine(arrays, others))

    closed, shape = jax.make_jaxpr(call, return_shape=True)(own, arrays)
    if any(map(_holds_arrays, closed.eqns)):
        inputs = [variable.aval for variable in closed.jaxpr.invars]
        closed = jax.make_jaxpr(partial(_hoisted, closed))(*inputs)
    arrays = [*map(jnp.asarray, closed.consts), *jax.tree.leaves(own)]
    made = Canonical(arrays, closed.jaxpr, jax.tree.structure(shape))
    return _shared(made) if is_concrete(arrays) else made


def _is_like_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or eqx.is_array(leaf)


def is_concrete(tree: PyTree) -> bool:
    """Whether nothing in it is being traced."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def compiled(run: Callable[..., Any], *args: Any) -> Any:
    """run(*args) as one program, which equal functions among the arguments share. Where
    something is being traced, a part of that program."""
    if not is_concrete((run, args)):
        return run(*args)

    return _program(*jax.tree.map(_shared, (run, *args), is_leaf=_is_leaf))


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Canonical | partial)


def _shared(node: Any) -> Any:
    """A partial function becomes a pytree, which is equal to another if its parts are."""
    if isinstance(node, partial):
        parts = (node.func, *node.args), node.keywords
        (fn, *args), keywords = jax.tree.map(_shared, parts, is_leaf=_is_leaf)
        return Partial(fn, *args, **keywords)
    if not isinstance(node, Canonical) or node.jaxpr.effects:
        return node
    return Canonical(node.arrays, _first(_Comparable(node.jaxpr)).jaxpr, node.result)


@eqx.filter_jit
def _program(run: Callable[..., Any], *args: Any) -> Any:
    return run(*args)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def held_arrays(equation: Any) -> Iterator[Any]:
    """Those that the jaxprs inside of an equation hold."""
    for inner in filter(_is_jaxpr, jax.tree.leaves(equation.params, is_leaf=_is_jaxpr)):
        yield from getattr(inner, "consts", ())
        for each in inner.eqns:
            yield from held_arrays(each)


def _holds_arrays(equation: Any) -> bool:
    return any(True for _ in held_arrays(equation))


def _hoisted(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """The same, but jitted functions that hold arrays are run in place."""
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= zip(jaxpr.invars, args, strict=True)
    needed = _variables([*jaxpr.outvars, *(v for e in jaxpr.eqns for v in e.invars)])

    for equation in jaxpr.eqns:
        if equation.primitive.name == "jit" and _holds_arrays(equation):
            inputs = [values.get(v, getattr(v, "val", None)) for v in equation.invars]
            outputs = _hoisted(equation.params["jaxpr"], *inputs)
            values |= zip(equation.outvars, outputs, strict=True)
            continue
        inputs = _variables(equation.invars)
        outputs = [v for v in equation.outvars if v in needed]
        effects, info = equation.effects, jaxpr.debug_info
        alone = Jaxpr((), inputs, outputs, [equation], effects, info)
        run = jaxpr_as_fun(ClosedJaxpr(alone, ()))
        values |= zip(outputs, run(*(values[v] for v in inputs)), strict=True)
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def _variables(atoms: list[Any]) -> list[Any]:
    return list(dict.fromkeys(v for v in atoms if not isinstance(v, Literal)))


class _Comparable:
    """A jaxpr, compared by what it does."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.jaxpr, self.tokens = jaxpr, list(_tokens(jaxpr))

    def __hash__(self) -> int:
        return hash(tuple(t.name for t in self.tokens if isinstance(t, Primitive)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Comparable) or len(self.tokens) != len(other.tokens):
            return False
        return all(map(_same, self.tokens, other.tokens))


@lru_cache(maxsize=128)
def _first(jaxpr: _Comparable) -> _Comparable:
    return jaxpr


def _tokens(jaxpr: Jaxpr) -> Iterator[Any]:
    """All that a jaxpr is made of, its variables being numbered."""
    numbers: dict[Any, int] = {}

    def token(atom: Any) -> Any:
        if isinstance(atom, Literal):  # bit by bit: 0.0 is not -0.0
            return type(atom.val), np.asarray(atom.val).tobytes(), atom.aval
        return numbers.setdefault(atom, len(numbers)), atom.aval

    yield from map(token, [*jaxpr.constvars, *jaxpr.invars])
    for equation in jaxpr.eqns:
        parameters, structure = jax.tree.flatten(equation.params, is_leaf=_is_jaxpr)
        yield from (equation.primitive, equation.ctx, structure)
        yield from map(token, [*equation.invars, *equation.outvars])
        for value in parameters:
            if isinstance(value, ClosedJaxpr):
                yield tuple(map(id, value.consts))
                value = value.jaxpr
            if isinstance(value, Jaxpr):
                yield from _tokens(value)
            else:
                yield repr(value) if isinstance(value, float | complex) else value
    yield from map(token, jaxpr.outvars)


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and (one == other) is True)
    except Exception:
        return False
