"""Every public function with the settings of JAX: types, precision, checks, batches.

JAX rounds the factors of products in single precision on GPUs and TPUs, if nobody asks for
more. traceax's own products ask for more, the user's have the precision of the user. A CPU
does not round, so sources and programs are read.
"""

import ast
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax import export
from jax.experimental import checkify

import traceax as tx
from tests.calls import CALLS, MATRIX, OTHERS, WAYS
from tests.helpers import DRAWN, cases, close, nightly, slow
from tests.tables import ALL, REST_ALL, names
from traceax._core.layout import inner_jaxprs

KEY = jax.random.key(5)
SINGLE = MATRIX.astype(np.float32)
EVERY = CALLS | WAYS
QUICK = ("xtrace", "xdiag", "slq_trace")
CALCULUS = {"divergence", "laplacian", "biharmonic", "hessian_diagonal"}
# Most faults show in tracing. These functions are run, too.
EXECUTED = ("xtrace", "xnystrace", "xdiag", "row_norms_squared", "slq_trace", "deltashift")


def loss(name: str, matrix: Any, key: Any = KEY) -> Any:
    """The sum of all values, and what is logged beside it."""
    estimate = EVERY[name](matrix, key)
    total = sum(jnp.sum(jnp.real(value)) for value in jax.tree.leaves(estimate.value))
    return total, estimate.standard_error


def test_the_table_is_complete() -> None:
    """Estimators of traces, diagonals and norms are in the tables of `tests.tables`. Other
    functions with the same arguments have tests of their own."""
    public = {n: v for n, v in vars(tx).items() if not inspect.ismodule(v)}
    public = {name: thing for name, thing in public.items() if name[0] != "_"}
    assert public.keys() == CALLS.keys() | OTHERS
    first = ["operator", "key", "num_matvecs"]
    same = {
        name
        for name, thing in public.items()
        if inspect.isroutine(thing) or hasattr(thing, "__wrapped__")
        if list(inspect.signature(thing).parameters)[:3] == first
    }
    others = {"leaf_traces", "logdet", "preconditioner", "krylov"}
    assert same == {*names(ALL + REST_ALL), *others}


def products(program: Any) -> Iterator[Any]:
    """All products of matrices or vectors of floating-point numbers in a program."""
    for equation in program.eqns:
        is_product = equation.primitive.name in ("dot_general", "conv_general_dilated")
        if is_product and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.inexact):
            yield equation
        for inner in inner_jaxprs(equation):
            yield from products(inner)


def traced(fn: Any, *args: Any) -> tuple[Any, list[Any]]:
    """Shapes, and the products that a GPU would round."""
    with jax.default_matmul_precision("bfloat16"):
        program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    highest = (jax.lax.Precision.HIGHEST,) * 2
    every = products(program)
    return shapes, [one for one in every if one.params["precision"] != highest]


@pytest.mark.parametrize("name", cases(EVERY, *QUICK))
def test_single_precision(name: str) -> None:
    """While x64 is on, value, error bar and gradient, also of exact answers, stay float32.
    No product is rounded, and nothing is NaN."""
    value_and_grad = jax.value_and_grad(partial(loss, name), has_aux=True)
    ((value, _), gradient), rounded = traced(value_and_grad, SINGLE)
    assert value.dtype == gradient.dtype == jnp.float32
    assert not rounded
    if name in CALLS:
        small = jax.eval_shape(lambda m: EVERY[name](m, KEY).value, SINGLE[:6, :6])
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(small))
    if name in EXECUTED:
        with jax.debug_nans(True):
            jax.jit(value_and_grad)(SINGLE)


@pytest.mark.parametrize("name", cases([n for n in CALLS if n not in CALCULUS], *QUICK))
def test_complex_operators(name: str) -> None:
    """Real numbers beside complex ones are promoted by name, as these settings demand."""
    matrix = SINGLE.astype(np.complex64)
    value_and_grad = jax.value_and_grad(partial(loss, name), has_aux=True)
    ((value, _), gradient), rounded = traced(value_and_grad, matrix)
    assert (value.dtype, gradient.dtype) == (jnp.float32, jnp.complex64)
    assert not rounded
    jax.eval_shape(lambda m: CALLS[name](m, KEY).value, matrix[:6, :6])


# Modules whose `@` multiplies arrays of NumPy and SciPy, or operators of lineax.
NOT_OF_JAX = {"colouring", "probing", "gauss_newton", "testing", "__main__"}
PRODUCTS = {"matmul", "dot", "vdot", "inner", "tensordot", "einsum", "dot_general"}
PRODUCTS |= {"conv_general_dilated", "convolve", "matvec", "vecmat"}


def careless(source: str) -> list[str]:
    """Products of JAX for which no precision is asked. (`operator @ ...` is of lineax.)"""
    tree = ast.parse(source)
    asked = {
        id(part)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and any(k.arg == "precision" for k in call.keywords)
        for part in (call.func, *call.args)
    }
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult))
        or (isinstance(node, ast.Attribute) and node.attr in PRODUCTS)
        if id(node) not in asked
        if not ast.unparse(node).startswith(("operator @", "adjoint @", "self.", "shape."))
    ]


def test_every_product_asks_for_its_precision() -> None:
    found = {
        path.stem: careless(path.read_text())
        for path in Path(tx.__file__).parent.rglob("*.py")
        if path.stem not in NOT_OF_JAX
    }
    assert {name: lines for name, lines in found.items() if lines} == {}
    for line in ("a @ b", "jnp.dot(a, b)", "partial(jax.lax.dot_general)(a, b)"):
        assert careless(line)
    assert not careless("partial(jnp.matmul, precision='highest')(a, b)")
    assert traced(lambda a: a @ a, SINGLE)[1]
    assert not traced(lambda a: jnp.matmul(a, a, precision="highest"), SINGLE)[1]


@pytest.mark.parametrize("name", ["trace", slow("logdet"), slow("diagonal")])
@pytest.mark.parametrize("compiled", [False, True])
def test_users_products_have_the_users_precision(name: str, compiled: bool) -> None:
    """That in force outside of the call, or what the product asks for itself."""

    def value(matrix: Any, asked: Any) -> Any:
        apply = lambda v: jnp.matmul(matrix, v, precision=asked)  # noqa: E731
        operator = tx.as_operator(apply, jax.eval_shape(lambda: matrix[0]))
        return getattr(tx, name)(operator, KEY, 40).value

    for default, asked, expected in (
        ("tensorfloat32", None, "HIGH"),
        ("float32", None, "HIGHEST"),
        ("float32", jax.lax.Precision.DEFAULT, "DEFAULT"),
    ):
        run = eqx.filter_jit(value) if compiled else value
        with jax.default_matmul_precision(default):
            program = jax.make_jaxpr(partial(run, asked=asked))(SINGLE)
        of_user = {
            one.params["precision"][0].name
            for one in products(program)
            if SINGLE.shape in [x.aval.shape for x in one.invars]
        }
        assert of_user == {expected}


def test_sparse_matrices_are_not_rounded() -> None:
    band = np.tri(70, k=1) - np.tri(70, k=-2)
    operator: Any = tx.as_operator(scipy.sparse.csr_array(band.astype(np.float32)))
    apply = lambda data, v: eqx.tree_at(lambda op: op.data, operator, data).mv(v)  # noqa: E731
    gradient = jax.value_and_grad(lambda data: jnp.sum(apply(data, SINGLE[0])))
    assert not traced(gradient, operator.data)[1]


@pytest.mark.parametrize("name", cases(CALLS, *QUICK, rest=nightly))
def test_nested_batches(name: str) -> None:
    """vmap in vmap in jit."""
    keys = jax.random.split(KEY, (2, 2))
    call = jax.jit(jax.vmap(jax.vmap(lambda k: CALLS[name](MATRIX, k).value)))
    single = jax.eval_shape(lambda k: CALLS[name](MATRIX, k).value, KEY)
    assert jax.eval_shape(call, keys).shape == (2, 2, *single.shape)
    if name in EXECUTED:
        close(call(keys)[1, 1], CALLS[name](MATRIX, keys[1, 1]).value, 1e-5)


@pytest.mark.parametrize("name", cases(CALLS, "xtrace", "slq_trace", rest=nightly))
def test_without_jit(name: str) -> None:
    """Loops and branches run as Python's."""
    with jax.disable_jit():
        shape = jax.eval_shape(lambda m: CALLS[name](m, KEY).value, MATRIX)
        few = name in ("xtrace", "row_norms_squared")  # slow: operation by operation
        value = CALLS[name](MATRIX, KEY).value if few else None
    assert all(leaf.dtype == MATRIX.dtype for leaf in jax.tree.leaves(shape))
    if value is not None:
        close(value, CALLS[name](MATRIX, KEY).value, 1e-9 + DRAWN)


CHECKED = ("logdet", "inv_quad_logdet", "function_diagonal", "laplacian", "leaf_traces")


@pytest.mark.parametrize("name", cases(CALLS, "xtrace", some=CHECKED, rest=nightly))
def test_checked_for_errors(name: str) -> None:
    """No NaN, no division by zero and no index out of bounds, not even in unused values.
    (`checkify` fails at an index inside of `jax.checkpoint`, as entries are in `vecchia`;
    only Arnoldi's iteration writes at an index.)"""
    errors = checkify.float_checks if name == "vecchia" else checkify.all_checks
    run = lambda m: eqx.filter(CALLS[name](m, KEY), eqx.is_array)  # noqa: E731
    error, _ = jax.jit(checkify.checkify(run, errors=errors))(MATRIX)
    error.throw()


@pytest.mark.parametrize("name", cases(EXECUTED, "xtrace", rest=nightly))
def test_exported(name: str) -> None:
    """A program that is serialised and read back gives the same numbers."""
    call = jax.jit(lambda m: CALLS[name](m, KEY).value)
    exported = export.export(call)(MATRIX)
    close(exported.call(MATRIX), call(MATRIX), 1e-12)
    read = export.deserialize(exported.serialize())
    close(read.call(MATRIX), exported.call(MATRIX), 1e-12)
