"""Second derivatives along many directions, summed in one sweep: collapsed Taylor mode.

Along x + t v, each intermediate quantity y of a program has two Taylor coefficients, the
first y' and the second y''. They pass through an operation y = g(u) as

    y' = Dg u',        y'' = Dg u'' + D2g[u', u'].

The second formula is linear in u''. So for the *sum* over directions v_1, ..., v_k one
second coefficient is carried along, not k:

    sum y''_i = Dg (sum u''_i) + sum D2g[u'_i, u'_i].

For a network this takes k + 1 multiplications with each weight matrix. Hessian-vector
products, or k separate Taylor expansions, take 2k. There is no backward pass, so nothing is
stored, and a gradient of the sum is cheaper by the same factor. If the directions are the n
unit vectors, the sum is the Laplacian.

Every operation g of the program is differentiated by JAX, so whatever JAX differentiates
forwards twice works here. A loop or a custom rule counts as one operation g.

Reference: Li et al. (2023), arXiv:2307.08214; Dangel et al. (2025), arXiv:2505.13644.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxtyping import Array, PyTree

from traceax._core.canonical import varying, varying_axes


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# D2g vanishes for these operations, so it need not be traced and compiled. The first ones
# are linear in all of their inexact inputs together. The second ones are linear in each
# input alone.
_LINEAR = _names(
    "add add_any broadcast_in_dim concatenate convert_element_type copy cumsum"
    " dynamic_slice dynamic_update_slice gather imag neg pad real reduce_sum reshape rev"
    " scatter-add select_n slice squeeze sub transpose"
)
_MULTILINEAR = _names("conv_general_dilated dot_general mul")
# These operations act on each entry alone, so that D2g[u', u'] is g''(u) u'^2, and one g''
# serves all directions.
_ENTRYWISE = _names(
    "abs acos acosh asin asinh atan atanh cbrt cos cosh digamma div erf erf_inv erfc exp"
    " exp2 expm1 integer_pow lgamma log log1p logistic max min pow rsqrt sin sinh sqrt"
    " square tan tanh"
)

Along = Callable[..., list[Any]]
Coefficients = tuple[list[Any], list[Any]]


class _Jet(NamedTuple):
    """A value, its first coefficient along each direction (a leading axis), and the sum of
    its second coefficients. A coefficient is `None` if it is known to vanish."""

    value: Any
    first: Any = None
    second: Any = None


def second_derivatives_sum(fn: Callable, x: PyTree, directions: PyTree) -> PyTree[Array]:
    """Return the sum over i of d2/dt2 fn(x + t v_i) at t = 0.

    The v_i are `directions`, along a leading axis of every leaf.
    """
    axes = varying_axes(x)
    directions = jax.tree.map(lambda leaf: varying(leaf, axes), directions)
    program, structure = jax.make_jaxpr(fn, return_shape=True)(x)
    outputs = _run_jets(program, map(_Jet, jax.tree.leaves(x), jax.tree.leaves(directions)))
    seconds = [jnp.zeros_like(j.value) if j.second is None else j.second for j in outputs]
    return jax.tree.unflatten(jax.tree.structure(structure), seconds)


def _run_jets(program: ClosedJaxpr, inputs: Iterable[_Jet]) -> list[_Jet]:
    """Pass all coefficients through a program, one operation after the other."""
    jaxpr = program.jaxpr
    jets = dict(zip(jaxpr.constvars, map(_Jet, program.consts), strict=True))
    jets.update(zip(jaxpr.invars, inputs, strict=True))

    def look_up(atom: Any) -> _Jet:
        return _Jet(atom.val) if isinstance(atom, Literal) else jets[atom]

    for equation in jaxpr.eqns:
        if (inside := _program_inside(equation)) is not None:
            outputs = _run_jets(inside, [look_up(atom) for atom in equation.invars])
        else:
            outputs = _step(jaxpr, equation, look_up)
        jets.update(zip(equation.outvars, outputs, strict=True))
    return [look_up(atom) for atom in jaxpr.outvars]


def _program_inside(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Return the program inside an operation, if it has one."""
    match equation.primitive.name:
        case "jit" | "pjit":
            return equation.params["jaxpr"]
        case "pad" if isinstance(equation.invars[1], Var):
            fill = partial(_fill, config=equation.params["padding_config"])
            types: list[Any] = [atom.aval for atom in equation.invars]
            inexact = jnp.issubdtype(types[0].dtype, jnp.inexact)
            return jax.make_jaxpr(fill)(*types) if inexact else None
    return None


def _fill(array: Array, value: Array, config: Sequence[tuple[int, int, int]]) -> Array:
    """Evaluate `jax.lax.pad` by a selection.

    If the value has a tangent and the array has none, JAX cannot transpose the operation
    itself.
    """
    outside = jax.lax.pad(jnp.zeros(array.shape, bool), jnp.asarray(True), config)
    return jnp.where(outside, value, jax.lax.pad(array, jnp.zeros_like(value), config))


def _step(jaxpr: Jaxpr, equation: JaxprEqn, look_up: Callable[[Any], _Jet]) -> list[_Jet]:
    """Pass all coefficients through one operation."""
    # The operation becomes a function of each variable once, and constants are left out.
    variables = list(dict.fromkeys(v for v in equation.invars if isinstance(v, Var)))
    parts = {"outvars": equation.outvars, "eqns": [equation], "effects": equation.effects}
    alone = jaxpr.replace(constvars=[], invars=variables, **parts)
    apply = jaxpr_as_fun(ClosedJaxpr(alone, []))
    inputs = [look_up(variable) for variable in variables]
    moving = [i for i, jet in enumerate(inputs) if jet.first is not None]
    outputs = [_Jet(value) for value in apply(*(jet.value for jet in inputs))]
    smooth = [i for i, jet in enumerate(outputs) if eqx.is_inexact_array(jet.value)]
    if not (moving and smooth) or equation.primitive.name == "stop_gradient":
        return outputs

    def along(*moved: Array) -> list[Any]:
        values = dict(zip(moving, moved, strict=True))
        results = apply(*(values.get(i, jet.value) for i, jet in enumerate(inputs)))
        return [results[i] for i in smooth]

    push = _choose(equation, [look_up(atom).first is not None for atom in equation.invars])
    coefficients = push(along, [inputs[i] for i in moving])
    for i, first, second in zip(smooth, *coefficients, strict=True):
        outputs[i] = _Jet(outputs[i].value, first, second)
    return outputs


def _choose(equation: JaxprEqn, moves: list[bool]) -> Callable[..., Coefficients]:
    """Choose how coefficients pass through an operation, some of whose inputs move."""
    name = equation.primitive.name
    linear = name in _LINEAR or (name in _MULTILINEAR and sum(moves) == 1)
    if linear or (name == "div" and not moves[1]):
        return _push_linear
    atoms = [*itertools.compress(equation.invars, moves), *equation.outvars]
    types: list[Any] = [atom.aval for atom in atoms]
    alone = sum(moves) == 1 and all(aval.shape == types[0].shape for aval in types)
    # Not every entrywise operation on complex numbers has a derivative in one direction.
    alone = alone and jnp.issubdtype(types[0].dtype, jnp.floating)
    return _push_entrywise if alone and name in _ENTRYWISE else _push_any


def _point(moved: list[_Jet]) -> tuple[Any, ...]:
    return tuple(jet.value for jet in moved)


def _slope_along_second(along: Along, moved: list[_Jet]) -> list[Any] | None:
    """Return Dg u'', or `None` if all second coefficients vanish."""
    if all(jet.second is None for jet in moved):
        return None
    # `jvp` needs zeros for the coefficients that vanish.
    seconds = (jnp.zeros_like(j.value) if j.second is None else j.second for j in moved)
    return jax.jvp(along, _point(moved), tuple(seconds))[1]


def _push_linear(along: Along, moved: list[_Jet]) -> Coefficients:
    """Pass coefficients through a linear operation, for which D2g = 0."""
    first = _for_each(lambda *u: jax.jvp(along, _point(moved), u)[1], moved)
    return first, _slope_along_second(along, moved) or [None] * len(first)


def _for_each(push: Callable[..., Any], moved: list[_Jet]) -> Any:
    """Evaluate `push` for every direction, and stack the results along a leading axis.

    A single direction does not use `vmap`, which would add a transposition.
    """
    firsts = [jet.first for jet in moved]
    if len(firsts[0]) == 1:
        return jax.tree.map(lambda y: y[None], push(*(first[0] for first in firsts)))
    return jax.vmap(push)(*firsts)


def _push_any(along: Along, moved: list[_Jet]) -> Coefficients:
    """Pass coefficients through any operation, with one D2g[u', u'] for each direction."""
    point = _point(moved)

    def slope_and_second(*directions: Array) -> tuple[list[Any], list[Any]]:
        return jax.jvp(lambda *x: jax.jvp(along, x, directions)[1], point, directions)

    first, seconds = _for_each(slope_and_second, moved)
    sums = [jnp.sum(second, axis=0) for second in seconds]
    linear = _slope_along_second(along, moved)
    return first, sums if linear is None else list(map(jnp.add, linear, sums))


def _push_entrywise(along: Along, moved: list[_Jet]) -> Coefficients:
    """Pass coefficients through an entrywise operation, with one g'' for all directions."""
    (jet,) = moved
    ones = (jnp.ones_like(jet.value),)
    slope_at = lambda x: jax.jvp(along, (x,), ones)[1][0]  # noqa: E731
    slope, second = jax.jvp(slope_at, (jet.value,), ones)
    # g'' is multiplied by u' twice, because the square of u' may overflow while g'' is 0.
    second = jnp.sum(second[None] * jet.first * jet.first, axis=0)
    if jet.second is not None:
        second = second + slope * jet.second
    return [slope[None] * jet.first], [second]
