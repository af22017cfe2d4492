"""Every public function with the settings of JAX."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.experimental import checkify

import traceax as tx
from tests.calls import CALLS, MATRIX, OTHERS
from tests.helpers import DRAWN, cases, close
from tests.tables import ALL, REST_ALL, names

KEY = jax.random.key(5)

QUICK = ("xtrace", "xdiag", "slq_trace")
FUNCTIONS = cases(CALLS, *QUICK)
every_function = pytest.mark.parametrize("name", FUNCTIONS)
CALCULUS = {"divergence", "laplacian", "biharmonic", "hessian_diagonal"}
OF_OPERATORS = [name for name in CALLS if name not in CALCULUS]


def loss(name: str, matrix: Any, key: Any) -> Any:
    values = jax.tree.leaves(CALLS[name](matrix, key).value)
    return sum(jnp.sum(jnp.real(value)) for value in values)


def test_the_table_is_complete() -> None:
    public = {n for n, v in vars(tx).items() if not inspect.ismodule(v)}
    public = {name for name in public if not name.startswith("_")}
    assert public == CALLS.keys() | OTHERS


def test_no_estimator_escapes_the_tables() -> None:
    """Estimators of traces, diagonals and norms are in the tables of `tests.tables`. Other
    functions with the same arguments have tests of their own."""
    first = ["operator", "key", "num_matvecs"]
    same = {
        name
        for name, thing in vars(tx).items()
        if inspect.isroutine(thing) or hasattr(thing, "__wrapped__")
        if list(inspect.signature(thing).parameters)[:3] == first
    }
    others = {"leaf_traces", "logdet", "preconditioner", "krylov"}
    assert same == {*names(ALL + REST_ALL), *others}


# Most faults show in tracing. These functions are run, too.
EXECUTED = ("xtrace", "xnystrace", "xdiag", "row_norms_squared", "slq_trace", "deltashift")


@every_function
def test_float32_stays_float32_and_nothing_is_nan(name: str) -> None:
    """While x64 is on, also for exact answers."""
    matrix = MATRIX.astype(jnp.float32)
    value_and_grad = jax.value_and_grad(loss, 1)
    value, slope = jax.eval_shape(lambda m: value_and_grad(name, m, KEY), matrix)
    small = jax.eval_shape(lambda m: CALLS[name](m, KEY).value, matrix[:6, :6])
    if name in EXECUTED:
        with jax.debug_nans(True):
            jax.jit(value_and_grad, static_argnums=0)(name, matrix, KEY)
    assert value.dtype == slope.dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(small))


@pytest.mark.parametrize("name", cases(OF_OPERATORS, *QUICK))
def test_complex_operators(name: str) -> None:
    """Real numbers beside complex ones are promoted by name, as these settings demand."""
    matrix = MATRIX.astype(jnp.complex64)
    value_and_grad = jax.value_and_grad(loss, 1)
    value, slope = jax.eval_shape(lambda m: value_and_grad(name, m, KEY), matrix)
    jax.eval_shape(lambda m: CALLS[name](m, KEY).value, matrix[:6, :6])
    assert (value.dtype, slope.dtype) == (jnp.float32, jnp.complex64)


@every_function
def test_nested_batches(name: str) -> None:
    """vmap in vmap in jit."""
    keys = jax.random.split(KEY, (2, 2))
    call = jax.jit(jax.vmap(jax.vmap(lambda k: CALLS[name](MATRIX, k).value)))
    single = jax.eval_shape(lambda k: CALLS[name](MATRIX, k).value, KEY)
    assert jax.eval_shape(call, keys).shape == (2, 2, *single.shape)
    if name in EXECUTED:
        close(call(keys)[1, 1], CALLS[name](MATRIX, keys[1, 1]).value, 1e-5)


@every_function
def test_without_jit(name: str) -> None:
    """Loops and branches run as Python's."""
    with jax.disable_jit():
        shape = jax.eval_shape(lambda m: CALLS[name](m, KEY).value, MATRIX)
        few = name in ("xtrace", "row_norms_squared")  # slow: operation by operation
        value = CALLS[name](MATRIX, KEY).value if few else None
    assert all(leaf.dtype == MATRIX.dtype for leaf in jax.tree.leaves(shape))
    if value is not None:
        close(value, CALLS[name](MATRIX, KEY).value, 1e-9 + DRAWN)


# `checkify` fails at an index inside of `jax.checkpoint`, as the entries are in `vecchia`.
@pytest.mark.parametrize("name", cases([n for n in CALLS if n != "vecchia"], *QUICK))
def test_checked_for_errors(name: str) -> None:
    """No NaN, no division by zero and no index out of bounds, not even in unused values.
    (Only Arnoldi's iteration writes at an index.)"""
    call = jax.jit(lambda m: CALLS[name](m, KEY).value)
    checked = checkify.checkify(call, errors=checkify.all_checks)
    _, value = jax.eval_shape(checked, MATRIX)
    assert all(leaf.dtype == MATRIX.dtype for leaf in jax.tree.leaves(value))
    if name in ("xtrace", "slq_trace", "arnoldi_trace"):
        checked(MATRIX)[0].throw()


@pytest.mark.parametrize("name", cases(EXECUTED, "xtrace"))
def test_exported(name: str) -> None:
    """A program that is serialised and read back gives the same numbers."""
    call = jax.jit(lambda m: CALLS[name](m, KEY).value)
    exported = export.export(call)(MATRIX)
    close(exported.call(MATRIX), call(MATRIX), 1e-12)
    read = export.deserialize(exported.serialize())
    close(read.call(MATRIX), exported.call(MATRIX), 1e-12)
