"""Argument checks: static, before anything is computed, each with its cure."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.core import Tracer
from jaxtyping import ArrayLike

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
    check_budget(name, num_matvecs, min(minimum, enough))
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
    if len(shape) != (0 if typed else 1):
        raise ValueError(
            f"traceax.{name}(key=...) must be one key, but got keys of shape {shape}. Use "
            "jax.vmap or jax.lax.map over them."
        )
    whole = shape if typed else jax.eval_shape(jax.random.key_data, jax.random.key(0)).shape
    if shape != whole:
        raise ValueError(
            f"traceax.{name}(key=...) must be a key of {whole} words, as JAX's default "
            f"generator takes, but got shape {shape}. Pass jax.random.key(0), say."
        )


def check_budget(name: str, num_matvecs: object, minimum: int = 1) -> None:
    if check_count(name, "num_matvecs", num_matvecs) < minimum:
        raise ValueError(
            f"traceax.{name}(num_matvecs=...) must be at least {minimum}, the fewest "
            f"applications that the algorithm can use, but got {num_matvecs}. Pass 100, "
            "say."
        )


def check_count(name: str, argument: str, count: object) -> int:
    if isinstance(count, int) and not isinstance(count, bool):
        return count
    if isinstance(count, Tracer):
        cure = "Close over it, or mark it static with static_argnames"
    elif _is_whole(count):
        cure = "Convert it with int()"
    else:
        cure = "Pass a whole number: 100, say"
    raise TypeError(
        f"traceax.{name}({argument}=...) must be a Python int, because it sets the shapes "
        f"of arrays, but got {count!r}. {cure}."
    )


def _is_whole(number: object) -> bool:
    """Of another type than int."""
    if isinstance(number, bool) or not isinstance(number, float | jax.Array | np.generic):
        return False
    return np.ndim(number) == 0 and float(number).is_integer()


def check_function_request(
    name: str,
    operator: object,
    key: object,
    counts: dict[str, int],
    *,
    square: bool = True,
) -> lx.AbstractLinearOperator:
    """What every estimator by probes and steps demands of its arguments, and the operator
    prepared."""
    operator = check_operator(name, operator, square=square)
    check_key(name, key)
    for argument, count in counts.items():
        if check_count(name, argument, count) < 1:
            raise ValueError(
                f"traceax.{name}({argument}=...) must be at least 1, because nothing can "
                f"be told from none, but got {count}. Raise it: 20, say."
            )
    return operator


def check_samples(
    name: str, count: int, probes_a_sample: int, argument: str = "num_matvecs"
) -> None:
    if count < probes_a_sample:
        raise ValueError(
            f"traceax.{name}({argument}=...) must be at least {probes_a_sample}, one for "
            f"each colour of its probing sampler, but got {count}. Raise it, or use fewer "
            "colours: traceax.colouring with a lower power makes them."
        )


def check_batch_size(name: str, batch_size: object, probes_a_sample: int) -> None:
    if batch_size is None:
        return
    if check_count(name, "batch_size", batch_size) < probes_a_sample:
        raise ValueError(
            f"traceax.{name}(batch_size=...) must be at least {probes_a_sample}, because a "
            f"sample of so many probes stays together, but got {batch_size}. Raise it, or "
            "pass None for all probes at once."
        )


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


def _as_float(number: Any) -> float:
    """Of what is not traced, and without an operation, which would be."""
    return float(number)


def _is_real(number: Any) -> bool:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return (is_number or hasattr(number, "dtype")) and not jnp.iscomplexobj(number)


def check_positive(name: str, argument: str, number: ArrayLike, cure: str) -> None:
    if not _is_real(number) or jnp.ndim(number):
        raise TypeError(
            f"traceax.{name}({argument}=...) must be a positive number, or an array of "
            f"shape (), but got {number!r}. {cure}"
        )
    if not isinstance(number, Tracer) and not 0 < _as_float(number) < float("inf"):
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


def check_limit(name: str, max_matvecs: object, n: int) -> None:
    minimum = min(2, n)
    if check_count(name, "max_matvecs", max_matvecs) < minimum:
        raise ValueError(
            f"traceax.{name}(max_matvecs=...) must be at least {minimum}, the fewest "
            "applications that the algorithm can use, but got "
            f"{max_matvecs}. Raise it: 1000, say."
        )


def check_tolerance(name: str, argument: str, tolerance: ArrayLike) -> None:
    if not _is_real(tolerance):
        raise TypeError(
            f"traceax.{name}({argument}=...) must be a real number, or an array of shape "
            f"(), but got {tolerance!r}. Pass 0.01, say."
        )
    if jnp.ndim(tolerance):
        raise ValueError(
            f"traceax.{name}({argument}=...) must be a real number, or an array of shape "
            f"(), but got shape {jnp.shape(tolerance)}. Use jax.vmap for several."
        )
    if not isinstance(tolerance, Tracer) and not _as_float(tolerance) >= 0:
        raise ValueError(
            f"traceax.{name}({argument}=...) must be at least 0, because errors are "
            f"measured against it, but got {tolerance!r}. Pass 0 for the most accurate "
            "answer that max_matvecs allows."
        )


def show(structure: object) -> str:
    def short(leaf: jax.ShapeDtypeStruct) -> str:
        if not hasattr(leaf, "dtype"):
            return repr(leaf)
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"

    return str(jax.tree.map(short, structure)).replace("'", "")
