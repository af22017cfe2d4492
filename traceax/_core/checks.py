"""Argument checks: static, before anything is computed, each with its cure."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.core import Tracer
from jaxtyping import ArrayLike, PyTree

from traceax._core.operator import (
    dimension,
    is_negative,
    is_positive,
    prepare,
    size,
)


def check_request(
    name: str,
    operator: lx.AbstractLinearOperator,
    key: object,
    num_matvecs: object,
    minimum: int = 1,
    *,
    square: bool = True,
) -> lx.AbstractLinearOperator:
    """What every estimator demands of its arguments, and the operator prepared: as many
    applications as there are columns, or rows, are enough for any."""
    operator = check_operator(name, operator, square=square)
    check_key(name, key)
    enough = min(size(operator), dimension(operator.out_structure()))
    check_count(name, "num_matvecs", num_matvecs, min(minimum, enough))
    return operator


def check_function_request(
    name: str,
    operator: object,
    key: object,
    counts: dict[str, int],
    *,
    square: bool = True,
) -> lx.AbstractLinearOperator:
    """The same, of estimators by probes and steps."""
    operator = check_operator(name, operator, square=square)
    check_key(name, key)
    for argument, count in counts.items():
        check_count(name, argument, count, 1, "because nothing can be told from none")
    return operator


def check_operator(
    name: str, operator: object, *, square: bool = True
) -> lx.AbstractLinearOperator:
    """Prepared before anything is asked of it: what Equinox and lineax are asked about a
    user's functions they keep for ever."""
    if not isinstance(operator, lx.AbstractLinearOperator):
        raise TypeError(
            f"traceax.{name}(operator=...) must be a lineax operator, but got "
            f"{type(operator).__name__}. Wrap a matrix as lx.MatrixLinearOperator(matrix), "
            "a function as lx.FunctionLinearOperator(fn, input_structure), one of SciPy's "
            "sparse matrices first as BCOO.from_scipy_sparse(matrix), a sparse matrix as "
            "lx.FunctionLinearOperator(lambda v: matrix @ v, "
            "jax.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype))."
        )
    operator = prepare(operator)
    into, out = operator.in_structure(), operator.out_structure()
    if square and eqx.tree_equal(into, out) is not True:
        raise ValueError(
            f"traceax.{name}(operator=...) must be square, that is, have equal input and "
            f"output structures, but got an operator from {show(into)} to {show(out)}. "
            "Compose it with its transpose, or make shapes and dtypes equal."
        )
    complexity = {
        jnp.issubdtype(leaf.dtype, jnp.complexfloating)
        for leaf in jax.tree.leaves((into, out))
    }
    if len(complexity) > 1:
        raise ValueError(
            f"traceax.{name}(operator=...) must have leaves that are all real or all "
            "complex, because a space that mixes them is not linear over either, but got "
            f"{show((into, out) if not square else into)}. Make the real leaves complex."
        )
    if 0 in (size(operator), dimension(out)):
        raise ValueError(
            f"traceax.{name}(operator=...) must act on a space of at least one dimension, "
            f"but got {show(into)}. An empty operator adds nothing: leave it out."
        )
    return operator


def check_key(name: str, key: object) -> None:
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if shape is None or not (typed or dtype == jnp.uint32):
        raise TypeError(
            f"traceax.{name}(key=...) must be a JAX random key, because no default is "
            f"hidden anywhere, but got {type(key).__name__}. Pass jax.random.key(0), say."
        )
    words = jax.eval_shape(jax.random.key_data, jax.random.key(0)).shape
    if shape != (() if typed else words):
        raise ValueError(
            f"traceax.{name}(key=...) must be one key, a raw one of shape {words}, but got "
            f"shape {shape}. Use jax.vmap or jax.lax.map over several."
        )


def check_count(
    name: str,
    argument: str,
    count: object,
    minimum: int | None = None,
    why: str = "the fewest applications that the algorithm can use",
    cure: str = "Pass 100, say.",
) -> int:
    """A Python int of at least `minimum`, if there is one."""
    if isinstance(count, bool) or not isinstance(count, int):
        cure = "Pass a whole number: 100, say, or convert an array with int()."
        if isinstance(count, Tracer):
            cure = "Close over it, or mark it static with static_argnames."
        raise TypeError(
            f"traceax.{name}({argument}=...) must be a Python int, because it sets the "
            f"shapes of arrays, but got {count!r}. {cure}"
        )
    if minimum is not None and count < minimum:
        raise ValueError(
            f"traceax.{name}({argument}=...) must be at least {minimum}, {why}, but got "
            f"{count}. {cure}"
        )
    return count


def check_samples(
    name: str, count: int, probes_a_sample: int, argument: str = "num_matvecs"
) -> None:
    why = "one for each colour of its probing sampler"
    cure = (
        "Raise it, or use fewer colours: traceax.colouring with a lower power makes them."
    )
    check_count(name, argument, count, probes_a_sample, why, cure)


def check_batch_size(name: str, batch_size: object, probes_a_sample: int) -> None:
    if batch_size is not None:
        why = "because a sample of so many probes stays together"
        cure = "Raise it, or pass None for all probes at once."
        check_count(name, "batch_size", batch_size, probes_a_sample, why, cure)


def check_semidefinite(
    name: str, operator: lx.AbstractLinearOperator, instead: str
) -> None:
    if not (is_positive(operator) or is_negative(operator)):
        raise ValueError(
            f"traceax.{name}(operator=...) must be tagged positive or negative "
            "semidefinite, because the algorithm is wrong for other operators, but got a "
            f"{type(operator).__name__} that is not known to be. If it is semidefinite, "
            "pass lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag), also "
            "around products with scalars; if not, or if there is a TangentLinearOperator "
            f"in it (whose tags are those of its primal), use traceax.{instead}."
        )


def _is_real(number: Any) -> bool:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return (is_number or hasattr(number, "dtype")) and not jnp.iscomplexobj(number)


def check_positive(name: str, argument: str, number: Any, cure: str) -> None:
    if not _is_real(number) or jnp.ndim(number):
        raise TypeError(
            f"traceax.{name}({argument}=...) must be a positive number, or an array of "
            f"shape (), but got {number!r}. {cure}"
        )
    if not isinstance(number, Tracer) and not 0 < float(number) < float("inf"):
        raise ValueError(
            f"traceax.{name}({argument}=...) must be positive and finite, but got "
            f"{number!r}. {cure}"
        )


def check_grid(name: str, grid: ArrayLike) -> None:
    if jnp.ndim(grid) != 1 or jnp.iscomplexobj(grid) or not jnp.size(grid):
        raise ValueError(
            f"traceax.{name}(grid=...) must be a vector of real numbers, because the "
            f"eigenvalues lie on a line, but got shape {jnp.shape(grid)} of "
            f"{jnp.result_type(grid)}. Pass jax.numpy.linspace(low, high, 200), say."
        )


def check_tracked(name: str, state: object, kind: type, arrays: list[jax.Array]) -> None:
    """A state, and what it would have to hold to belong to an operator of these arrays."""
    if not isinstance(state, kind):
        raise TypeError(
            f"traceax.{name}(state=...) must be a state made by init or update, but got "
            f"{type(state).__name__}. Call update(operator, state, key), in this order."
        )
    before = [jax.typeof(array) for array in getattr(state, "arrays", [])]
    now = [jax.typeof(array) for array in arrays]
    if [(a.shape, a.dtype) for a in before] != [(a.shape, a.dtype) for a in now]:
        raise ValueError(
            f"traceax.{name}(operator=...) must be the operator of the state with other "
            "numbers in it, because the two are applied to the same probes, but got arrays "
            f"{show(now)} after {show(before)}. Make it by the same code each time, "
            "init and update inside the same jax.jit or both outside."
        )
    if not now:
        raise ValueError(
            f"traceax.{name}(operator=...) must hold arrays, because they are what "
            "changes, but got an operator without any. Give them to the function as a "
            "closure or an eqx.Module, or to lx.JacobianLinearOperator as args."
        )


def check_same_program(name: str, before: jax.Array, now: jax.Array) -> None:
    """Hashes of the code of two operators, where they are known."""
    traced = isinstance(before, Tracer) or isinstance(now, Tracer)
    if not traced and not bool(jnp.array_equal(before, now)):
        raise ValueError(
            f"traceax.{name}(operator=...) must be the operator of the state with other "
            "arrays in it, because the two are applied to the same probes, but got one "
            "that differs in something else. If a number changes that is no array, make it "
            "one: jax.numpy.asarray(number); if an array does that a jitted function closes"
            " over, make it an argument of that function."
        )


def check_tolerance(name: str, argument: str, tolerance: Any) -> None:
    if not _is_real(tolerance) or jnp.ndim(tolerance):
        is_array = _is_real(tolerance)
        got = f"shape {jnp.shape(tolerance)}" if is_array else repr(tolerance)
        raise (ValueError if is_array else TypeError)(
            f"traceax.{name}({argument}=...) must be a real number, or an array of shape "
            f"(), but got {got}. Pass 0.01, say, and use jax.vmap for several."
        )
    if not isinstance(tolerance, Tracer) and not float(tolerance) >= 0:
        raise ValueError(
            f"traceax.{name}({argument}=...) must be at least 0, because errors are "
            f"measured against it, but got {tolerance!r}. Pass 0 for the most accurate "
            "answer that max_matvecs allows."
        )


def check_shift(
    name: str,
    operator: lx.AbstractLinearOperator,
    shift: ArrayLike | lx.DiagonalLinearOperator,
    *,
    several: bool = True,
) -> None:
    """Of log det(A + shift I), which A must not be known to make impossible."""
    if is_negative(operator):
        raise ValueError(
            f"traceax.{name}(operator=...) must not be tagged negative semidefinite, "
            "because the logarithm of a negative number is not real, but got a "
            f"{type(operator).__name__} that is. Negate it: log det(-A) is what there is."
        )
    is_diagonal = isinstance(shift, lx.DiagonalLinearOperator)
    numbers = jax.tree.leaves(shift.diagonal) if is_diagonal else [shift]
    if not all(map(_is_real, numbers)):
        kinds = "a number, an array of them" if several else "a number"
        raise TypeError(
            f"traceax.{name}(shift=...) must be real, {kinds} or an "
            "lx.DiagonalLinearOperator, because A + shift I must be Hermitian, but got "
            f"{shift!r}. Take the real part of what is complex, make an array of a list."
        )
    if is_diagonal:
        shapes = jax.tree.map(jnp.shape, shift.diagonal)
        expected = jax.tree.map(lambda leaf: leaf.shape, operator.in_structure())
        if shapes != expected:
            raise ValueError(
                f"traceax.{name}(shift=...) must act on the operator's space, of shapes "
                f"{expected}, but got a diagonal of shapes {shapes}. Give an entry for "
                "each of the operator's dimensions."
            )
    elif not several and jnp.ndim(shift):
        raise ValueError(
            f"traceax.{name}(shift=...) must be one number, because each shift has a "
            f"solution of its own, but got shape {jnp.shape(shift)}. Use jax.vmap over "
            "them, or lx.DiagonalLinearOperator for a shift of each dimension."
        )


def check_vector(
    name: str, operator: lx.AbstractLinearOperator, vector: PyTree[ArrayLike]
) -> bool:
    """Whether there are several, along a first axis."""
    expected = operator.in_structure()
    shapes = jax.tree.map(jnp.shape, vector)
    one = jax.tree.map(lambda leaf: leaf.shape, expected)
    leading = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(vector)}
    axis = next(iter(leading)) if len(leading) == 1 else ()
    many = jax.tree.map(lambda leaf: axis + leaf.shape, expected)
    if shapes != one and (shapes != many or 0 in axis):
        raise ValueError(
            f"traceax.{name}(vector=...) must be of the operator's space, "
            f"{show(expected)}, or several of them along one more, first, axis of every "
            f"leaf, but got shapes {shapes}. Make arrays of these shapes: of several "
            "right-hand sides each is a row."
        )
    leaves = zip(jax.tree.leaves(vector), jax.tree.leaves(expected), strict=True)
    if any(jnp.iscomplexobj(v) and not jnp.iscomplexobj(e) for v, e in leaves):
        raise TypeError(
            f"traceax.{name}(vector=...) must be real, because the operator is, but got "
            "complex numbers. Give real and imaginary parts as two right-hand sides."
        )
    return shapes != one


def check_rtol(name: str, rtol: object) -> None:
    if not isinstance(rtol, int | float) or isinstance(rtol, bool):
        raise TypeError(
            f"traceax.{name}(rtol=...) must be a Python float, but got "
            f"{type(rtol).__name__}. Pass 1e-6, say."
        )
    if not 0 < rtol < 1:
        raise ValueError(
            f"traceax.{name}(rtol=...) must be strictly between 0 and 1, because it is a "
            f"relative error, but got {rtol}. Pass 1e-6, say."
        )


def show(structure: object) -> str:
    def short(leaf: Any) -> str:
        if not hasattr(leaf, "dtype"):
            return type(leaf).__name__
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"

    return str(jax.tree.map(short, structure)).replace("'", "")
