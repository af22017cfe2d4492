"""traceax's own products are made in full precision, the user's in that of the user.

JAX rounds the factors of products in single precision on GPUs and TPUs, if nobody asks for
more. A CPU does not, so the programs are read.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import traceax as tx
from tests.calls import CALLS, MATRIX, WAYS
from tests.helpers import cases
from traceax._core.layout import inner_jaxprs

HIGHEST = (jax.lax.Precision.HIGHEST,) * 2
KEY = jax.random.key(0)
SINGLE = MATRIX.astype(np.float32)
EVERY = CALLS | WAYS
OF_REAL_POINTS = {"laplacian", "biharmonic", "hessian_diagonal", "divergence"}
DIFFERENTIATED_ONCE = {"arnoldi_trace"}


def products(program: Any) -> Iterator[Any]:
    """All products of matrices or vectors of floating-point numbers in a program."""
    for equation in program.eqns:
        is_product = equation.primitive.name in ("dot_general", "conv_general_dilated")
        if is_product and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.inexact):
            yield equation
        for inner in inner_jaxprs(equation):
            yield from products(inner)


def rounded(fn: Any, *args: Any) -> list[Any]:
    """The products in `fn` that a GPU would round."""
    with jax.default_matmul_precision("bfloat16"):
        program = jax.make_jaxpr(fn)(*args)
    return [one for one in products(program) if one.params["precision"] != HIGHEST]


def total(call: Any) -> Any:
    def value(matrix: Any) -> Any:
        leaves = jax.tree.leaves(call(matrix, KEY).value)
        return sum(jnp.sum(leaf.real) for leaf in leaves)

    return value


@pytest.mark.parametrize("name", [*CALLS, *cases(WAYS)])
def test_own_products_are_exact(name: str) -> None:
    def both(matrix: Any) -> Any:
        estimate = EVERY[name](matrix, KEY)
        return estimate.value, estimate.standard_error

    assert not rounded(both, SINGLE)
    assert not rounded(jax.grad(total(EVERY[name])), SINGLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in EVERY if n not in OF_REAL_POINTS])
def test_own_products_are_exact_for_complex_operators(name: str) -> None:
    assert not rounded(total(EVERY[name]), SINGLE.astype(np.complex64))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in EVERY if n not in DIFFERENTIATED_ONCE])
def test_products_of_second_derivatives_are_exact(name: str) -> None:
    slope = jax.grad(total(EVERY[name]))
    assert not rounded(lambda m: jax.jvp(slope, (m,), (m,))[1], SINGLE)


def test_the_test_finds_rounded_products() -> None:
    assert rounded(lambda a: a @ a, SINGLE)
    assert not rounded(lambda a: jnp.matmul(a, a, precision="highest"), SINGLE)
    assert not rounded(lambda a: a @ a, np.ones((3, 3), int))


@pytest.mark.parametrize("name", ["trace", "logdet", "diagonal"])
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
        of_user = [
            one.params["precision"][0]
            for one in products(program)
            if SINGLE.shape in [x.aval.shape for x in one.invars]
        ]
        assert of_user
        assert {precision.name for precision in of_user} == {expected}


def test_sparse_matrices_are_not_rounded() -> None:
    band = np.tri(70, k=1) - np.tri(70, k=-2)
    operator: Any = tx.as_operator(scipy.sparse.csr_array(band.astype(np.float32)))
    assert not rounded(lambda v: operator.mv(v), SINGLE[0])
    apply = lambda data, v: eqx.tree_at(lambda op: op.data, operator, data).mv(v)  # noqa: E731
    slope = jax.grad(lambda data: jnp.sum(apply(data, SINGLE[0])))
    assert not rounded(slope, operator.data)
