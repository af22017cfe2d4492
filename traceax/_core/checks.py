"""Argument checks. They use static information only and run before any computation.

A message has three parts: the argument by its name, what was got, and the cure. A check
states what must hold and `require`s it. Only what costs little is computed for a message
that may not be needed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jaxtyping import Array, ArrayLike, PyTree, Real

from traceax._core.operator import Operator, canonicalise, is_negative, is_semidefinite
from traceax._core.questions import class_name
from traceax._core.vectors import dimension


def invalid(
    kind: type[Exception], name: str, argument: str, must: str, got: object, cure: str
) -> Exception:
    """The exception for an argument of the public function `name`, or for its object."""
    call = f"{name}({argument}=...)" if argument else name
    got = got() if isinstance(got, partial) else got
    return kind(f"traceax.{call} must {must}, but got {got}. {cure}")


def require(holds: Any, *message: Any, kind: type[Exception] = ValueError) -> None:
    """Raise `invalid(kind, *message)` unless something holds."""
    if not holds:
        raise invalid(kind, *message)


require_type = partial(require, kind=TypeError)


def written(thing: object) -> Callable[[], str]:
    """Say what was got as Python writes it, in case that a message needs it."""
    return partial(repr, thing)


def show(structure: object) -> str:
    def short(leaf: Any) -> str:
        if not hasattr(leaf, "shape"):
            return type(leaf).__name__
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"

    return str(jax.tree.map(short, structure)).replace("'", "")


# Operators, keys and budgets.


def check_operator(
    name: str, operator: object, *, argument: str = "operator", square: bool = True
) -> Operator:
    """The canonical operator. The conversion comes before any other question, because
    Equinox and lineax keep the functions that they are asked about for ever."""
    if not isinstance(operator, Operator):
        must, got = "be a lineax operator", with_library(operator)
        is_function = callable(operator) and not hasattr(operator, "matvec")
        cure = f"Make it one: traceax.as_operator({'function, n' if is_function else 'a'})."
        if isinstance(getattr(operator, "operator", None), Operator):
            cure = "Pass its attribute `operator`. A finished run is for function_trace, "
            cure += "function_diagonal, logdet, inv_quad_logdet and spectral_density."
        if _is_key(operator):
            got = "a random key"
            cure = f"The operator comes first, then the key: traceax.{name}(operator, ...)."
        raise invalid(TypeError, name, argument, must, got, cure)
    operator = canonicalise(operator)
    spaces = operator.in_structure(), operator.out_structure()
    into, out = map(show, spaces)
    must = "be square, that is, have equal input and output structures"
    cure = "Compose it with its transpose, or make shapes and dtypes equal."
    got = f"an operator from {into} to {out}"
    require(not square or into == out, name, argument, must, got, cure)
    is_complex = {jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(spaces)}
    must = "have leaves that are all real or all complex, because one field is needed"
    cure = "Make the real leaves complex."
    require(len(is_complex) < 2, name, argument, must, f"({into}, {out})", cure)
    must = "act on a space of at least one dimension"
    cure = "An empty operator adds nothing: leave it out."
    require(all(map(dimension, spaces)), name, argument, must, into, cure)
    return operator


_LIBRARIES = {"numpy": "NumPy", "scipy": "SciPy", "jax": "JAX", "jaxlib": "JAX"}


def with_library(thing: object) -> str:
    """Return the type of an object, and the library that it is from."""
    kind = "array" if isinstance(thing, jax.Array) else type(thing).__name__
    library = _LIBRARIES.get(type(thing).__module__.split(".")[0])
    return f"{kind} of {library}" if library else kind


def _is_typed(key: Any) -> bool:
    return isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def _is_key(thing: Any) -> bool:
    """Return whether it is one random key, typed or raw."""
    is_vector = isinstance(thing, jax.Array) and thing.ndim == 1
    return _is_typed(thing) or (is_vector and thing.dtype == jnp.uint32)


def check_key(name: str, key: Any, subject: PyTree = None) -> None:
    """One key, and the same in all processes that arrays of `subject` are spread over."""
    shape, typed = getattr(key, "shape", None), _is_typed(key)
    is_key = typed or (shape is not None and getattr(key, "dtype", None) == jnp.uint32)
    must = "be a JAX random key, because there is no default one"
    cure = "Pass jax.random.key(0), for example."
    require_type(is_key, name, "key", must, type(key).__name__, cure)
    raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    must, cure = f"be one key, a raw one of shape {raw}", "Use jax.vmap for several."
    require(shape == (() if typed else raw), name, "key", must, f"shape {shape}", cure)
    if not isinstance(key, Tracer) and any(map(_is_spread, jax.tree.leaves(subject))):
        data = np.asarray(jax.random.key_data(key) if typed else key)
        differs = np.ptp(multihost_utils.process_allgather(data), axis=0).any()
        must = "be the same in every process, because each draws a part of every probe"
        got, cure = f"{data} in this one, others elsewhere", "Use one seed in all."
        require(not differs, name, "key", must, got, cure)


def _is_spread(leaf: Any) -> bool:
    known = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return known and not leaf.is_fully_addressable


def check_count(
    name: str,
    argument: str,
    count: Any,
    minimum: float = -math.inf,
    why: str = "the fewest that the algorithm can use",
    cure: str = "Pass 100, for example.",
) -> int:
    """Return a Python int of at least `minimum`, if there is one. NumPy's are converted."""
    is_int = isinstance(count, int | np.integer) and not isinstance(count, bool)
    must = "be a Python int, because it sets the shapes of arrays"
    advice = "Pass a whole number, such as 100, or convert an array with int()."
    if isinstance(count, Tracer):
        advice = "Close over it, or mark it static with static_argnames."
    require_type(is_int, name, argument, must, written(count), advice)
    must = f"be at least {minimum}, {why}"
    require(count >= minimum, name, argument, must, int(count), cure)
    return int(count)


def check_samples(name: str, count: int, group: int, argument: str = "num_matvecs") -> None:
    why = "one for each colour of its probing sampler"
    cure = "Raise it, or use fewer colours: those of traceax.colouring with a lower power."
    check_count(name, argument, count, group, why, cure)


def check_batch_size(name: str, batch_size: object, group: int) -> int | None:
    if batch_size is None:
        return None
    why = "because a batch holds whole samples of so many probes"
    cure = "Raise it, or pass None for all probes at once."
    return check_count(name, "batch_size", batch_size, group, why, cure)


def check_semidefinite(name: str, operator: Operator, instead: str) -> None:
    must = "be tagged positive or negative semidefinite, as its algorithm needs"
    got = f"a {class_name(operator)} that is not"
    cure = "If it is, use lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)."
    cure += " If not, or if an lx.TangentLinearOperator is in it (whose tags are those of "
    cure += f"its primal), use traceax.{instead}."
    require(is_semidefinite(operator), name, "operator", must, got, cure)


# Numbers and vectors.


def _is_real(number: Any) -> bool:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    is_array = jnp.issubdtype(getattr(number, "dtype", bool), jnp.number)
    return (is_number or is_array) and not jnp.iscomplexobj(number)


def check_positive(name: str, argument: str, x: Any, cure: str, zero: bool = False) -> None:
    """Check that `x` is positive and finite or, with `zero`, at least 0."""
    must = "be a real number, or an array of shape ()"
    require_type(_is_real(x), name, argument, must, written(x), cure)
    require(not jnp.ndim(x), name, argument, must, f"shape {jnp.shape(x)}", cure)
    must = "be at least 0" if zero else "be positive and finite"
    fits = isinstance(x, Tracer) or (float(x) >= 0 if zero else 0 < float(x) < math.inf)
    require(fits, name, argument, must, written(x), cure)


def check_tolerance(name: str, argument: str, tolerance: Any) -> None:
    cure = "Pass 0 for the most accurate answer that max_matvecs allows."
    check_positive(name, argument, tolerance, cure, zero=True)


def check_rtol(name: str, rtol: Any) -> None:
    is_float = isinstance(rtol, int | float) and not isinstance(rtol, bool)
    must, cure = "be a Python float between 0 and 1", "Pass 1e-6, for example."
    require_type(is_float, name, "rtol", must, repr(rtol), cure)
    require(0 < rtol < 1, name, "rtol", must, repr(rtol), cure)


def check_grid(name: str, grid: ArrayLike) -> None:
    is_line = jnp.ndim(grid) == 1 and not jnp.iscomplexobj(grid)
    must = "be a vector of real numbers, because the eigenvalues lie on a line"
    got = f"shape {jnp.shape(grid)} of {jnp.result_type(grid)}"
    cure = "Pass jax.numpy.linspace(low, high, 200), for example."
    require(is_line and jnp.size(grid), name, "grid", must, got, cure)


def check_trace(name: str, argument: str, trace: Any, dtype: Any) -> Array:
    """A known trace, as a number of the working dtype, complex only if that is."""
    is_number = jnp.issubdtype(getattr(trace, "dtype", type(trace)), jnp.number)
    must = "be a number, because the structure of the control does not give its trace"
    cure = "Pass its exact trace, or a control that stores its matrix."
    require_type(is_number, name, argument, must, written(trace), cure)
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    fits = not jnp.ndim(trace) and (is_complex or not jnp.iscomplexobj(trace))
    must = f"be one {'' if is_complex else 'real '}number"
    got = f"shape {jnp.shape(trace)} of {jnp.result_type(trace)}"
    require(fits, name, argument, must, got, "Sum it to shape ().")
    return jnp.asarray(trace, dtype)


Shift = Real[ArrayLike, "*shifts"] | lx.DiagonalLinearOperator


def check_shift(name: str, operator: Operator, shift: Shift, several: bool = True) -> None:
    """The shift of log det(A + shift I), and that A is not tagged negative semidefinite."""
    must = "not be tagged negative semidefinite, because log det A would not be real"
    got, cure = f"a {class_name(operator)} that is", "Negate it, and estimate log det(-A)."
    require(not is_negative(operator), name, "operator", must, got, cure)
    is_diagonal = isinstance(shift, lx.DiagonalLinearOperator)
    given = shift.diagonal if is_diagonal else shift
    numbers = jax.tree.leaves(given) if is_diagonal else [shift]
    kinds = "a number, an array of them" if several else "a number"
    must = f"be real, {kinds} or an lx.DiagonalLinearOperator"
    cure = "Pass 0.0 for none, a complex number's real part, or a list as an array."
    kind = jax.tree.structure(shift)
    if kind == jax.tree.structure(operator.in_structure()) and kind.num_nodes > 1:
        cure = "Pass a pytree of shifts as lx.DiagonalLinearOperator(pytree)."
    require_type(all(map(_is_real, numbers)), name, "shift", must, written(shift), cure)
    must, cure = "have at least one number", "Pass 0.0 for none."
    require(any(map(jnp.size, numbers)), name, "shift", must, "an empty array", cure)
    space = jax.tree.map(lambda leaf: leaf.shape, operator.in_structure())
    expected, shapes = space if is_diagonal else (), jax.tree.map(jnp.shape, given)
    fits = shapes == expected or (several and not is_diagonal)
    must = f"have the shapes {expected}, of one number or of the operator's space"
    cure = "Use jax.vmap over shifts, or give an entry for each dimension."
    require(fits, name, "shift", must, f"shapes {shapes}", cure)


def check_vector(name: str, operator: Operator, vector: PyTree, argument: str) -> bool:
    """Whether there are several vectors, along a first axis of every leaf."""
    expected = operator.in_structure()
    shapes, one = (jax.tree.map(jnp.shape, x) for x in (vector, expected))
    axis = next((jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(vector)), ())
    many = jax.tree.map(lambda leaf: axis + leaf.shape, expected)
    fits = shapes == one or (shapes == many and 0 not in axis)
    must = f"be of the operator's space, {show(expected)}, or several along a first axis"
    cure = "Make arrays of these shapes: each right-hand side is a row."
    require(fits, name, argument, must, f"shapes {shapes}", cure)
    into, given = (map(jnp.iscomplexobj, jax.tree.leaves(x)) for x in (expected, vector))
    must, got = "be real, because the operator is", "complex numbers"
    cure = "Give real and imaginary parts as two right-hand sides."
    require_type(any(into) or not any(given), name, argument, must, got, cure)
    return shapes != one


# States of `deltashift`.


def check_tracked(name: str, state: Any, kind: type, arrays: list, program: Array) -> None:
    """A state, and the arrays and the hash of the code of the operator it has to match."""
    must, cure = "be a state of init or update", "Call update(operator, state, key)."
    require_type(isinstance(state, kind), name, "state", must, type(state).__name__, cure)
    traced = isinstance(state.program, Tracer) or isinstance(program, Tracer)
    same_program = traced or bool(jnp.array_equal(state.program, program))
    fits = arrays and show(state.arrays) == show(arrays) and same_program
    must = "be the operator of the state with other numbers in its arrays"
    got = f"one that differs in something else, with arrays {show(arrays)}"
    cure = "Make it by the same code each time, init and update inside the same jax.jit or "
    cure += "both outside. If a number changes, use jax.numpy.asarray(number); if an array "
    cure += "does that a jitted function closes over, make it an argument of that function."
    require(fits, name, "operator", must, got, cure)


def check_array(name: str, argument: str, matrix: Any) -> np.ndarray:
    """A dense matrix as an array of NumPy, which makes none of a ragged list."""
    try:
        return np.asarray(matrix)
    except ValueError:
        must, got = "have rows of one length", f"a {type(matrix).__name__} of several"
        cure = "Fill up the rows with zeros."
        raise invalid(ValueError, name, argument, must, got, cure) from None


# Functions that users give, and what they return.

_NUMBERS: dict[str, Any] = {
    "real numbers": jnp.floating,
    "real or complex numbers": jnp.inexact,
    "numbers": jnp.number,
}


def are_arrays(structure: object, numbers: str) -> bool:
    """Return whether there are leaves, and all of them are arrays of such numbers."""
    kinds = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(structure)]
    return bool(kinds) and all(k and jnp.issubdtype(k, _NUMBERS[numbers]) for k in kinds)


def check_callable(
    name: str, argument: str, fn: Any, form: str, cure: str, count: int = 1
) -> None:
    """A function that can be called with `count` arguments, as far as its signature is
    known."""
    got = type(fn).__name__
    require_type(callable(fn), name, argument, f"be a function {form}", got, cure)
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(count))
    except TypeError:
        must = f"take {count} argument{'s' * (count > 1)}, as a function {form}"
        raise invalid(TypeError, name, argument, must, str(signature), cure) from None


def check_point(name: str, fn: object, x: object, jac: str | None) -> None:
    """A function `fn(x, args)`, a point, and how derivatives are taken there."""
    must, cure = "be None, 'fwd' or 'bwd', as in lineax", "Pass 'bwd', for example."
    require(jac in (None, "fwd", "bwd"), name, "jac", must, repr(jac), cure)
    cure = "Pass lambda x, args: ..., where args is None if you pass none."
    check_callable(name, "fn", fn, "fn(x, args)", cure, 2)
    cure = "Put what is not differentiated into args. Of a module, take x by "
    cure += "eqx.partition(module, eqx.is_inexact_array), and combine the rest in fn. "
    cure += "Make integers that are coordinates floats, and take complex numbers apart."
    leaves = jax.tree.leaves_with_path(x)
    for path, leaf in leaves:
        is_float = jnp.issubdtype(getattr(leaf, "dtype", float), jnp.floating)
        where = f" at x{jax.tree_util.keystr(path)}" if path else ""
        must, got = "be a pytree of real arrays of floats", show(leaf) + where
        require_type(_is_real(leaf) and is_float, name, "x", must, got, cure)
    size = sum(jnp.size(leaf) for _, leaf in leaves)
    require(size, name, "x", "have at least one entry", written(x), cure)


def check_same_structure(name: str, x: object, values: object, fn: str = "fn") -> None:
    """What a vector field returns: one component for each entry of x."""
    must = f"return what x is like, {show(x)}"
    cure = "Make shapes and dtypes equal, and use jax.vmap for a batch of points."
    require(show(x) == show(values), name, fn, must, show(values), cure)


def check_returned(name: str, fn: str, got: Any, numbers: str, instead: str = "") -> None:
    """What a function returns has to be arrays, of such numbers."""
    must = f"return {instead}arrays of {numbers}"
    cure = "Return what depends on the argument as floats, and leave out the rest."
    require_type(are_arrays(got, numbers), name, fn, must, written(got), cure)


def is_one_real_number(structure: object) -> bool:
    shapes = [getattr(leaf, "shape", None) for leaf in jax.tree.leaves(structure)]
    return shapes == [()] and are_arrays(structure, "real numbers")


def check_scalar(name: str, fn: str, got: object) -> None:
    must, cure = "return one real number", "Sum or average it to shape ()."
    require_type(is_one_real_number(got), name, fn, must, written(got), cure)
