"""Functions in canonical form, so that equal functions share one compiled program.

Users often make a function anew for every call, mostly a lambda. A cache of compiled
programs takes it for a new one. Traced, it is a jaxpr and arrays. The arrays become leaves,
and the first of several equal jaxprs replaces the others: equal in every operation,
variable, type and parameter. What cannot be compared is equal only to itself. Arrays that
compiled functions close over become leaves, too: none is hashed, copied or kept afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import starmap, zip_longest
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jaxtyping import Array, PyTree

from traceax._core.layout import held_arrays, is_jaxpr

_LATEST: deque[Jaxpr] = deque(maxlen=128)  # that replace those equal to them


class Canonical(eqx.Module):
    """A function of arrays. What it closes over are leaves, its code is static."""

    arrays: list[Array]
    jaxpr: Jaxpr = eqx.field(static=True)
    result: Any = eqx.field(static=True)

    def __call__(self, *args: PyTree[Any]) -> PyTree[Array | np.ndarray]:
        run = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, ()))
        inputs = jax.tree.leaves(eqx.filter(args, eqx.is_array))
        return jax.tree.unflatten(self.result, run(*self.arrays, *inputs))


def canonical(fn: Callable[..., Any], *args: Any) -> Canonical:
    """`fn` for arguments with arrays of the shapes in `args`; all else in them is fixed."""
    if isinstance(fn, Canonical):
        return fn
    own, rest = eqx.partition(fn, eqx.is_array)

    def call(own: Any, *args: Any) -> PyTree[Array]:
        return jax.tree.map(jnp.asarray, eqx.combine(own, rest)(*args))

    closed, shape, _ = eqx.filter_make_jaxpr(call)(own, *args)
    closed = _hoisted(closed)
    consts = list(map(jnp.asarray, closed.consts))
    jaxpr = jax.make_jaxpr(
        lambda consts, *inputs: jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*inputs)
    )(consts, *closed.in_avals).jaxpr  # Constants are inputs: jax 0.12 keeps them inside.
    return Canonical([*consts, *jax.tree.leaves(own)], jaxpr, jax.tree.structure(shape))


def is_concrete(tree: PyTree) -> bool:
    """Whether nothing in it is being traced."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def compiled(run: Callable[..., Any], *args: Any) -> Any:
    """run(*args) as one compiled program, shared by calls with equal functions. If an
    argument is being traced, it becomes a part of that program."""
    if not is_concrete((run, args)):
        return run(*args)
    return _program(*_shared((run, *args)))


def _shared(tree: PyTree) -> PyTree:
    """The same with one jaxpr for all equal ones, and with partial functions as pytrees."""

    def shared(node: Any) -> Any:
        if isinstance(node, partial):
            return _shared(eqx.Partial(node.func, *node.args, **node.keywords))
        if not isinstance(node, Canonical) or node.jaxpr.effects:
            return node
        return Canonical(node.arrays, _first(node.jaxpr), node.result)

    return jax.tree.map(shared, tree, is_leaf=lambda x: isinstance(x, partial | Canonical))


@eqx.filter_jit
def _program(run: Callable[..., Any], *args: Any) -> Any:
    return run(*args)


def _hoisted(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same with compiled functions that hold arrays inlined."""
    if not any(True for equation in closed.eqns for _ in held_arrays(equation)):
        return closed

    def inlined(equation: JaxprEqn) -> JaxprEqn:
        if equation.primitive.name != "jit":
            return equation
        inner, inline = _hoisted(equation.params["jaxpr"]), equation.params["inline"]
        if inner.consts:  # `inline` is an enumeration from jax 0.12 on.
            inline = getattr(type(inline), "JAX_EARLY", True)
        return equation.replace(params=equation.params | {"jaxpr": inner, "inline": inline})

    jaxpr = closed.jaxpr.replace(eqns=list(map(inlined, closed.eqns)))
    return jax.make_jaxpr(jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts)))(*closed.in_avals)


def _first(jaxpr: Jaxpr) -> Jaxpr:
    """The first of the latest jaxprs that is equal to this one."""
    for first in tuple(_LATEST):
        if _same(first, jaxpr):
            return first
    _LATEST.append(jaxpr)
    return jaxpr


def _same(one: Any, other: Any) -> bool:
    """Jaxprs are compared by their parts, numbers as they print: 0.0 is not -0.0."""
    if one is other or type(one) is not type(other):
        return one is other
    if is_jaxpr(one):
        return all(starmap(_same, zip_longest(_parts(one), _parts(other))))
    if isinstance(one, float | complex | np.inexact):
        return repr(one) == repr(other)
    try:
        equal = one == other
    except Exception:
        return False
    return isinstance(equal, bool | np.bool_) and bool(equal)


def _parts(jaxpr: Any) -> Iterator[Any]:
    """All parts of a jaxpr. Its variables are numbered, its arrays are compared by `id`."""
    numbers: dict[Any, int] = {}

    def part(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return type(atom.val), np.asarray(atom.val).tobytes(), atom.aval
        return numbers.setdefault(atom, len(numbers)), atom.aval

    yield [equation.primitive for equation in jaxpr.eqns]
    yield [id(array) for array in getattr(jaxpr, "consts", ())]
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    yield from map(part, [*jaxpr.constvars, *jaxpr.invars])
    for equation in jaxpr.eqns:
        parameters, structure = jax.tree.flatten(equation.params, is_leaf=is_jaxpr)
        yield from (equation.ctx, structure, *parameters)
        yield from map(part, [*equation.invars, *equation.outvars])
    yield from map(part, jaxpr.outvars)
