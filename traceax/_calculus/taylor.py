"""Second derivatives along many directions, summed in one sweep: collapsed Taylor mode.

Along x + t v, each intermediate quantity y of a program has two Taylor coefficients, the
first y' and the second y''. Through y = g(u) they pass as

    y' = Dg u',        y'' = Dg u'' + D2g[u', u'].

The second rule is linear in u''. So of the *sum* over directions v_1, ..., v_k one second
coefficient is carried along, not k:

    sum y''_i = Dg (sum u''_i) + sum D2g[u'_i, u'_i].

For a network this is k + 1 products with each weight matrix, where Hessian-vector products
(or k separate Taylor expansions) need 2k; no backward pass, so nothing is stored; and a
gradient of it is shorter by as much. With the n unit vectors it is the Laplacian.

Every operation g of the program is taken with JAX's own derivatives of it, so whatever JAX
differentiates forwards twice works here, loops and custom rules among it, as one g.

Reference: Li et al. (2023), arXiv:2307.08214; Dangel et al. (2025), arXiv:2505.13644.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jaxtyping import Array, PyTree


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that are linear in all of their inexact inputs together, and those that are in
# each alone: of these D2g vanishes, so it need not be traced and compiled.
_LINEAR = _names(
    "add add_any broadcast_in_dim concatenate convert_element_type copy cumsum"
    " dynamic_slice dynamic_update_slice gather imag neg pad real reduce_sum reshape rev"
    " scatter-add select_n slice squeeze sub transpose"
)
_MULTILINEAR = _names("conv_general_dilated dot_general mul")
# Those that act on each entry alone: their D2g[u', u'] is g''(u) u'^2, and the sum of the
# squares is taken first.
_ENTRYWISE = _names(
    "abs acos acosh asin asinh atan atanh cbrt cos cosh digamma div erf erf_inv erfc exp"
    " exp2 expm1 integer_pow lgamma log log1p logistic max min pow rsqrt sin sinh sqrt"
    " square tan tanh"
)

Along = Callable[..., list[Any]]
Coefficients = tuple[list[Any], list[Any]]


class _Jet(NamedTuple):
    """A value, its first coefficient along each direction (a leading axis), the sum of its
    second ones; `None` where they are known to vanish."""

    value: Any
    first: Any = None
    second: Any = None


_Push = Callable[[Along, list[_Jet]], Coefficients]


def second_derivatives_sum(
    fn: Callable[[PyTree[Array]], PyTree[Array]],
    x: PyTree[Array],
    directions: PyTree[Array],
) -> PyTree[Array]:
    """The sum over i of d2/dt2 fn(x + t v_i) at t = 0, the v_i along leading axes."""
    program, structure = jax.make_jaxpr(fn, return_shape=True)(x)
    leaves = zip(jax.tree.leaves(x), jax.tree.leaves(directions), strict=True)
    outputs = _run(program, [_Jet(leaf, first) for leaf, first in leaves])
    seconds = [
        jnp.zeros_like(jet.value) if jet.second is None else jet.second for jet in outputs
    ]
    return jax.tree.unflatten(jax.tree.structure(structure), seconds)


def _run(program: ClosedJaxpr, inputs: Sequence[_Jet]) -> list[_Jet]:
    jaxpr = program.jaxpr
    jets = dict(zip(jaxpr.constvars, map(_Jet, program.consts), strict=True))
    jets.update(zip(jaxpr.invars, inputs, strict=True))

    def look_up(atom: Any) -> _Jet:
        return _Jet(atom.val) if isinstance(atom, Literal) else jets[atom]

    for equation in jaxpr.eqns:
        inside = _program_inside(equation)
        if inside is not None:
            outputs = _run(inside, [look_up(atom) for atom in equation.invars])
        else:
            # Each variable once, without constants.
            atoms = equation.invars
            variables = list(dict.fromkeys(v for v in atoms if not isinstance(v, Literal)))
            apply = _operation(jaxpr, equation, variables)
            moves = [look_up(atom).first is not None for atom in atoms]
            inputs = [jets[variable] for variable in variables]
            if equation.primitive.name == "stop_gradient":
                inputs = [_Jet(jet.value) for jet in inputs]
            outputs = _step(apply, inputs, _choose(equation, moves))
        jets.update(zip(equation.outvars, outputs, strict=True))
    return [look_up(atom) for atom in jaxpr.outvars]


def _program_inside(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The program inside of an operation, if it has one."""
    match equation.primitive.name:
        case "jit" | "pjit":
            return equation.params["jaxpr"]
        case "pad" if isinstance(equation.invars[1], Var):
            fill = partial(_fill, config=equation.params["padding_config"])
            types: list[Any] = [atom.aval for atom in equation.invars]
            like = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types]
            inexact = jnp.issubdtype(like[0].dtype, jnp.inexact)
            return jax.make_jaxpr(fill)(*like) if inexact else None
    return None


def _fill(array: Array, value: Array, config: Sequence[tuple[int, int, int]]) -> Array:
    """`jax.lax.pad` whose value has a tangent. JAX cannot transpose that if the array has
    none."""
    outside = jax.lax.pad(jnp.zeros(array.shape, bool), jnp.asarray(True), config)
    return jnp.where(outside, value, jax.lax.pad(array, jnp.zeros_like(value), config))


def _step(apply: Callable[..., list[Any]], inputs: list[_Jet], push: _Push) -> list[_Jet]:
    """One operation."""
    values = apply(*(jet.value for jet in inputs))
    moving = [i for i, jet in enumerate(inputs) if jet.first is not None]
    smooth = [i for i, v in enumerate(values) if jnp.issubdtype(v.dtype, jnp.inexact)]
    outputs = [_Jet(value) for value in values]
    if not (moving and smooth):
        return outputs

    def along(*moved: Array) -> list[Any]:
        arguments = [jet.value for jet in inputs]
        for i, value in zip(moving, moved, strict=True):
            arguments[i] = value
        results = apply(*arguments)
        return [results[i] for i in smooth]

    moved = [inputs[i] for i in moving]
    for i, first, second in zip(smooth, *push(along, moved), strict=True):
        outputs[i] = _Jet(values[i], first, second)
    return outputs


def _choose(equation: JaxprEqn, moves: list[bool]) -> _Push:
    """How coefficients pass through an operation, of whose inputs some move."""
    name = equation.primitive.name
    if (
        name in _LINEAR
        or (name in _MULTILINEAR and sum(moves) == 1)
        or (name == "div" and not moves[1])
    ):
        return _push_linear
    pairs = zip(equation.invars, moves, strict=True)
    moving: list[Any] = [atom.aval for atom, moved in pairs if moved]
    # Of complex numbers not every entrywise operation is differentiable in one direction.
    alone = len(moving) == 1 and jnp.issubdtype(moving[0].dtype, jnp.floating)
    results: list[Any] = [variable.aval for variable in equation.outvars]
    alone = alone and all(result.shape == moving[0].shape for result in results)
    return _push_entrywise if alone and name in _ENTRYWISE else _push_any


def _push_linear(along: Along, moved: list[_Jet]) -> Coefficients:
    point = tuple(jet.value for jet in moved)

    def slope(*directions: Array) -> list[Any]:
        return jax.jvp(along, point, directions)[1]

    first = _for_each(slope, moved)
    if all(jet.second is None for jet in moved):
        return first, [None] * len(first)
    # `jvp` needs zeros where coefficients vanish.
    others = (jnp.zeros_like(j.value) if j.second is None else j.second for j in moved)
    return first, slope(*others)


def _for_each(push: Callable[..., Any], moved: list[_Jet]) -> Any:
    """For every direction; without `vmap` for one, which would transpose."""
    firsts = [jet.first for jet in moved]
    if len(firsts[0]) == 1:
        return jax.tree.map(lambda y: y[None], push(*(first[0] for first in firsts)))
    return jax.vmap(push)(*firsts)


def _push_any(along: Along, moved: list[_Jet]) -> Coefficients:
    point = tuple(jet.value for jet in moved)

    def slope_and_second(*directions: Array) -> tuple[list[Any], list[Any]]:
        def slope_at(*near: Array) -> list[Any]:
            return jax.jvp(along, near, directions)[1]

        return jax.jvp(slope_at, point, directions)

    first, seconds = _for_each(slope_and_second, moved)
    linear = _push_linear(along, moved)[1]
    sums = [jnp.sum(second, axis=0) for second in seconds]
    return first, [b if a is None else a + b for a, b in zip(linear, sums, strict=True)]


def _push_entrywise(along: Along, moved: list[_Jet]) -> Coefficients:
    (jet,) = moved
    ones = jnp.ones_like(jet.value)

    def slope_at(near: Array) -> Array:
        return jax.jvp(along, (near,), (ones,))[1][0]

    slope, second = jax.jvp(slope_at, (jet.value,), (ones,))
    # Times u' twice: the square of u' may overflow where g'' is 0.
    second = jnp.sum(second[None] * jet.first * jet.first, axis=0)
    if jet.second is not None:
        second = second + slope * jet.second
    return [slope[None] * jet.first], [second]


def _operation(
    jaxpr: Jaxpr, equation: JaxprEqn, variables: list[Var]
) -> Callable[..., list[Any]]:
    """One equation of a program as a function of its variables."""
    alone = jaxpr.replace(
        constvars=[],
        invars=variables,
        outvars=equation.outvars,
        eqns=[equation],
        effects=equation.effects,
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, []))
