"""Functions in canonical form, so that equal functions share one compiled program.

Users often make a function anew for every call, mostly a lambda. A cache of compiled
programs takes it for a new one. When the function is traced, it becomes a jaxpr and arrays.
The arrays become leaves of a pytree. The jaxpr is replaced by the first one that is equal
to it, in every operation, variable, type and parameter (`_parts`). What cannot be compared
is equal only to itself. Arrays that compiled functions close over become leaves, too, so
that no array is hashed, copied or kept for later calls.
"""

from __future__ import annotations

import hashlib
import re
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
from jaxtyping import Array, PyTree, UInt32

from traceax._core.layout import held_arrays, is_jaxpr

_LATEST: deque[Jaxpr] = deque(maxlen=128)  # each replaces the jaxprs that are equal to it
_ARRAYS = np.ndarray | jax.Array


class Canonical(eqx.Module):
    """A function of arrays. The arrays that it closes over are its leaves, and its code is
    static."""

    arrays: list[Array]
    jaxpr: Jaxpr = eqx.field(static=True)
    result: Any = eqx.field(static=True)

    def __call__(self, *args: PyTree[Any]) -> PyTree[Array | np.ndarray]:
        run = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, ()))
        inputs = [*self.arrays, *jax.tree.leaves(eqx.filter(args, eqx.is_array))]
        # lineax asks for the result of arguments that vary over no axis.
        axes = (_axes(variable.aval) for variable in self.jaxpr.invars)
        return jax.tree.unflatten(self.result, run(*map(varying, inputs, axes)))


def strongly_typed(tree: PyTree) -> PyTree:
    """Return the tree with its inexact arrays as strongly typed arrays of JAX.

    Under an eager `jax.grad(f)(1.3)` a derivative rule would get the bare Python float, and
    a closure-converted operator cannot be applied with it."""

    inexact, rest = eqx.partition(tree, eqx.is_inexact_array)
    strong = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), inexact)
    return eqx.combine(strong, rest)


def varying_axes(*trees: PyTree) -> frozenset[str]:
    """Return the axes of a mesh over which arrays vary inside `jax.shard_map`, by their
    types. There are none elsewhere, and none with `check_vma=False`."""
    arrays = jax.tree.leaves(eqx.filter(trees, eqx.is_array))
    return frozenset().union(*(_axes(jax.typeof(array)) for array in arrays))


def _axes(kind: Any) -> frozenset[str]:
    kind = getattr(kind, "manual_axis_type", None)
    return getattr(kind, "varying", frozenset())


def varying(array: Any, axes: frozenset[str]) -> Any:
    """Return an array whose type says that it varies over these axes, too."""
    others = tuple(axes - varying_axes(array))
    return jax.lax.pcast(array, others, to="varying") if others else array


def canonical(fn: Callable[..., Any], *args: Any) -> Canonical:
    """Trace `fn` for arguments like `args`. Their arrays may change later, if shapes and
    dtypes do not; everything else in `args` becomes a constant."""
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
    arrays = strongly_typed([*consts, *jax.tree.leaves(own)])
    return Canonical(arrays, jaxpr, jax.tree.structure(shape))


def is_concrete(tree: PyTree) -> bool:
    """Return whether no leaf of the tree is being traced."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


def hidden(tree: PyTree, *others: PyTree) -> PyTree:
    """Hide the arrays that a traced call closes over from the compiler, if any of the
    others, or of the tree, is being traced.

    They are constants of the program. The compiler would compute what depends on them
    alone, which it does slowly: the largest entry of a matrix of 900 rows takes it four
    seconds, and a product of two factors 23."""
    if is_concrete((tree, others)) or not isinstance(jnp.zeros(()), Tracer):
        return tree
    known = lambda leaf: eqx.is_array(leaf) and not isinstance(leaf, Tracer)  # noqa: E731
    arrays, rest = eqx.partition(tree, known)
    return eqx.combine(jax.lax.optimization_barrier(arrays), rest)


def compiled(run: Callable[..., Any], *args: Any) -> Any:
    """Evaluate run(*args) as one compiled program, shared by calls with equal functions.
    If an argument is being traced, the call becomes a part of the traced program."""
    if not is_concrete((run, args)):
        return run(*args)
    return _program(*_shared((run, *args)))


def _shared(tree: PyTree) -> PyTree:
    """Replace each jaxpr by the first that is equal, and partial functions by pytrees."""

    def shared(node: Any) -> Any:
        if isinstance(node, partial):
            return _shared(eqx.Partial(node.func, *node.args, **node.keywords))
        if not isinstance(node, Canonical) or node.jaxpr.effects:
            return node
        return Canonical(node.arrays, _first(node.jaxpr), node.result)

    return jax.tree.map(shared, tree, is_leaf=lambda x: isinstance(x, partial | Canonical))


_program = eqx.filter_jit(lambda run, *args: run(*args))


def _hoisted(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Inline the compiled functions that hold arrays: then the outer jaxpr holds them."""
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
    """Return the first of the latest jaxprs that is equal to this one."""
    for first in tuple(_LATEST):
        if all(starmap(_same, zip_longest(_parts(first), _parts(jaxpr)))):
            return first
    _LATEST.append(jaxpr)
    return jaxpr


def program_hash(code: Canonical) -> UInt32[Array, " 8"]:
    """Hash the parts of a program, for states that must not be used with another program.

    Programs that share a compiled one have the same hash, because both questions read the
    same parts. What cannot be compared, such as a function among the parameters of an
    operation, counts here as it prints without its address, because the same code traced
    again must have the same hash. Arrays that loops hold count by their entries, and not at
    all while they are traced.
    """
    digest = hashlib.sha256()
    for part in _parts(code.jaxpr):
        if not isinstance(part, _ARRAYS):
            digest.update(re.sub("0x[0-9a-f]+", "", repr(part)).encode())
        elif is_concrete(part):
            is_key = jnp.issubdtype(part.dtype, jax.dtypes.prng_key)
            array = np.asarray(jax.random.key_data(part) if is_key else part)
            digest.update(array.tobytes())
    return jnp.asarray(np.frombuffer(digest.digest(), np.uint32))


def _same(one: Any, other: Any) -> bool:
    """Return whether two parts are equal. An array is equal only to itself. Numbers are
    compared as they print, because 0.0 is not -0.0 and NaN is NaN."""
    if one is other or type(one) is not type(other) or isinstance(one, _ARRAYS):
        return one is other
    if isinstance(one, float | complex | np.inexact):
        return repr(one) == repr(other)
    try:
        equal = one == other
    except Exception:
        return False
    return isinstance(equal, bool | np.bool_) and bool(equal)


def _parts(jaxpr: Any) -> Iterator[Any]:
    """List the parts of a program: two programs are the same if all their parts are.

    A variable becomes its number, in the order of appearance, and its type. The arrays that
    a jaxpr holds and the parameters of its operations are parts as they are. A jaxpr inside
    an operation is replaced by its own parts.
    """
    numbers: dict[Any, int] = {}

    def part(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return type(atom.val), np.asarray(atom.val).tobytes(), atom.aval
        return numbers.setdefault(atom, len(numbers)), atom.aval

    yield type(jaxpr)
    yield [equation.primitive for equation in jaxpr.eqns]
    yield from getattr(jaxpr, "consts", ())
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    yield from map(part, [*jaxpr.constvars, *jaxpr.invars])
    for equation in jaxpr.eqns:
        parameters, structure = jax.tree.flatten(equation.params, is_leaf=is_jaxpr)
        yield from (equation.ctx, structure)
        for parameter in parameters:
            yield from _parts(parameter) if is_jaxpr(parameter) else (parameter,)
        yield from map(part, [*equation.invars, *equation.outvars])
    yield from map(part, jaxpr.outvars)
