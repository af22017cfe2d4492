"""Norms of operators that need not be square."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tx
from tests.helpers import close, contains, nightly, refused, slow
from tests.matrices import general
from tests.tables import row_norms
from tests.wrappers import function, matrix_free

KEY = jax.random.key(13)


def low_rank(p: int, n: int, rank: int, dtype: Any) -> Any:
    left, right = general(max(p, n), dtype), general(max(p, n), dtype, seed=1)
    return left[:p, :rank] @ right[:rank, :n]


def both(operator: Any, budget: int) -> Any:
    estimates = (tx.row_norms_squared, tx.frobenius_norm_squared)
    return [estimate(operator, KEY, budget) for estimate in estimates]


@pytest.mark.parametrize("dtype", [nightly("float32"), slow("complex128")])
def test_rectangular(dtype: Any) -> None:
    """Exact below the sketch's rank, honest above it, differentiable, real."""
    shape = (40, 70) if dtype == "float32" else (70, 40)
    eps, real = float(jnp.finfo(dtype).eps), jnp.finfo(dtype).dtype
    low = low_rank(*shape, 5, dtype)
    for matrix in (low, low_rank(*shape, 40, dtype)):
        truth = row_norms(matrix)
        rows, norm = both(lx.MatrixLinearOperator(matrix), 30)
        assert rows.value.shape == rows.standard_error.shape == shape[:1]
        assert norm.value.shape == ()
        assert rows.value.dtype == norm.value.dtype == real
        assert jnp.mean(contains(rows, truth)) >= 0.9
        assert jnp.abs(norm.value - truth.sum()) <= 6 * norm.standard_error
        if matrix is low:
            close((rows.value, norm.value), (truth, truth.sum()), 2000 * eps)
    weights = jnp.linspace(1.0, 2.0, shape[0]).astype(real)

    def ours(matrix: Any) -> Any:
        rows, norm = both(lx.MatrixLinearOperator(matrix), 30)
        return weights @ rows.value + norm.value

    turned = low @ general(shape[1], dtype)
    gradients = [jax.grad(f)(low) for f in (ours, lambda m: (weights + 1) @ row_norms(m))]
    assert gradients[0].shape == shape
    got, want = (jnp.sum(gradient * turned).real for gradient in gradients)
    close(got, want, 1e4 * eps)


@pytest.mark.parametrize("shape", [(40, 70), slow((70, 40))])
def test_exact_from_the_smaller_side(shape: tuple[int, int]) -> None:
    operator = lx.MatrixLinearOperator(low_rank(*shape, 40, complex))
    truth = row_norms(operator.matrix)
    for budget in (40, 1000):
        rows, norm = both(operator, budget)
        close((rows.value, norm.value), (truth, truth.sum()), 1e-13)
        assert rows.num_matvecs == norm.num_matvecs == 40
        assert norm.standard_error == jnp.max(rows.standard_error) == 0
    assert tx.row_norms_squared(operator, KEY, 39).num_matvecs == 39


@pytest.mark.slow
def test_rows_are_the_leaves_of_the_output() -> None:
    """From a pytree to another of other shapes and precision."""
    matrix = low_rank(40, 70, 8, float)
    into = {"x": jax.ShapeDtypeStruct((7, 10), jnp.float32)}

    def apply(v: Any) -> Any:
        out = matrix @ v["x"].ravel().astype(float)
        return out[:10].reshape(2, 5), out[10:].astype(jnp.float32)

    rows, norm = both(lx.FunctionLinearOperator(apply, into), 33)
    first, second = rows.value
    assert (first.shape, first.dtype) == ((2, 5), float)
    assert (second.shape, second.dtype) == ((30,), jnp.float32)
    truth = row_norms(matrix)
    close(jnp.append(first, second.astype(float)), truth, 1e-4)
    close(norm.value, truth.sum(), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(100_000, 6), (6, 100_000)])
def test_probes_are_those_of_the_smaller_space(shape: tuple[int, int]) -> None:
    """In the larger one they would be signs."""
    matrix = jax.random.normal(KEY, shape, jnp.float32)
    norm = partial(tx.frobenius_norm_squared, lx.MatrixLinearOperator(matrix), KEY, 4)
    assert norm().value == norm(sampler=tx.sphere).value
    assert norm().value != norm(sampler=tx.rademacher).value


@pytest.mark.slow
def test_a_tangent_inside() -> None:
    """Its tags promise nothing, but the Gram operator is semidefinite all the same."""
    matrix, direction = general(70, complex), general(70, complex, seed=1)
    primal, tangent = eqx.filter_jvp(function, (matrix,), (direction,))
    derivative = lx.TangentLinearOperator(primal, tangent)
    estimate = tx.frobenius_norm_squared(derivative, KEY, 40)
    assert estimate.value.dtype == float
    truth = jnp.sum(row_norms(direction))
    assert abs(estimate.value - truth) <= 4 * estimate.standard_error


@pytest.mark.parametrize("name", ["row_norms_squared", "frobenius_norm_squared"])
def test_norms_refuse_what_mixes_real_and_complex(name: str) -> None:
    operator = matrix_free(lambda v: v.astype(complex), 5)
    message = rf"{name}\(operator=.*all real or all complex"
    refused(ValueError, message, getattr(tx, name), operator, KEY, 3)
