"""Entries of operators where a pattern has entries."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
from jax.experimental.sparse import BCOO

import traceax as tx
from tests.helpers import close, contains, is_unbiased, leaks_checked, refused, slow
from tests.matrices import general
from tests.wrappers import PSD, function, matrix_free
from traceax._estimators.selected_entries import check_pattern, for_pattern

diags: Any = scipy.sparse.diags_array

KEY, SIDE = jax.random.key(8), 12
N = SIDE**2
CHAIN = diags(np.ones((3, N)), offsets=np.array([-1, 0, 1]), shape=(N, N))
PATH = diags(np.ones((2, SIDE)), offsets=np.array([-1, 1]), shape=(SIDE, SIDE))
LAPLACE = scipy.sparse.kronsum(PATH, PATH)
GRID = scipy.sparse.coo_array(4.5 * scipy.sparse.eye_array(N) - LAPLACE)


def at(matrix: Any, pattern: Any = GRID) -> Any:
    rows, columns = scipy.sparse.coo_array(pattern).coords
    return matrix[rows, columns]


@pytest.mark.parametrize(("dtype", "hermitian"), [(complex, True), slow(complex, False)])
def test_a_band_is_exact(dtype: Any, hermitian: bool) -> None:
    """From three colours, which keep two steps apart; with the derivative along any band.
    Six show that nothing reaches further."""
    inside = CHAIN.toarray() > 0
    matrix = jnp.where(inside, general(N, dtype), 0)
    tangent = jnp.where(inside, 3.0, 0).astype(dtype)
    if hermitian:
        matrix = matrix + matrix.conj().T
        tangent = 2 * matrix

    def run(t: Any, budget: int = 3) -> Any:
        moved = function(matrix + t * tangent, PSD if hermitian else ())
        estimate = tx.selected_entries(moved, CHAIN, KEY, budget)
        return estimate.value, estimate

    value, derivative, estimate = jax.jvp(run, (0.0,), (1.0,), has_aux=True)
    close(value, at(matrix, CHAIN), 1e-12)
    close(derivative, at(tangent, CHAIN), 1e-12)
    assert estimate.num_matvecs == 3
    assert "3 colours" in estimate.method
    assert jnp.all(run(0.0, 6)[1].standard_error < 1e-10)


@pytest.mark.parametrize("hermitian", [True, False])
def test_bars_are_those_of_both_rows(hermitian: bool) -> None:
    """The mean of their squares, and half of that where both entries of a pair are read."""
    matrix = general(N)
    operator = function(matrix + matrix.T, PSD) if hermitian else function(matrix)
    sampler: Any = for_pattern(check_pattern("", operator, GRID), 9, 2)
    rows = tx.hutchinson_diagonal(operator, KEY, 9, sampler=sampler).standard_error
    got = tx.selected_entries(operator, GRID, KEY, 9).standard_error
    a, b = GRID.coords
    pairs = np.where(hermitian & (a != b), 4.0, 2.0)
    close(got, np.sqrt((rows[a] ** 2 + rows[b] ** 2) / pairs), 1e-10)


@pytest.mark.slow
def test_an_inverse_with_honest_bars() -> None:
    """Neighbours' covariances of a field: over keys unbiased, with intervals that contain
    the truth."""
    inverse = np.linalg.inv(GRID.toarray())
    operator, truth = function(jnp.asarray(inverse), PSD), at(inverse)

    def run(key: Any) -> Any:
        estimate = tx.selected_entries(operator, GRID, key, 18)
        return estimate.value, contains(estimate, truth)

    values, contained = jax.jit(jax.vmap(run))(jax.random.split(KEY, 400))
    assert is_unbiased(values, truth)
    assert jnp.mean(contained) > 0.9
    assert jnp.mean(jnp.std(values, axis=0)) < 0.06 * jnp.mean(truth)


@pytest.mark.slow
def test_the_order_is_that_of_the_pattern_whose_padding_has_no_entries() -> None:
    indices = np.stack(GRID.coords, axis=1)
    shuffled = np.random.default_rng(0).permutation(len(indices))
    pattern = BCOO((jnp.ones(GRID.nnz), jnp.asarray(indices[shuffled])), shape=(N, N))
    run = functools.partial(tx.selected_entries, function(general(N)))
    plain = run(GRID, KEY, 40)
    close(run(pattern, KEY, 40).value, plain.value[shuffled], 1e-12)
    pair = run(GRID, KEY, N)
    assert (pair.num_matvecs, pair.method) == (N, "exact")
    close(pair.value, at(general(N)), 1e-12)
    matrix = jnp.asarray(GRID.toarray())
    padded = BCOO.fromdense(matrix, nse=GRID.nnz + 3)
    rows, columns = padded.indices[: GRID.nnz].T
    value = tx.selected_entries(function(matrix), padded, KEY, 30).value
    close(value, matrix[rows, columns], 1e-12)


def test_few_matvecs_are_plain_probes() -> None:
    """Unbiased; the diagonal part is that of `hutchinson_diagonal`, of the same probes."""
    matrix = general(N)
    estimate = tx.selected_entries(function(matrix), GRID, KEY, 4)
    diagonal = tx.hutchinson_diagonal(function(matrix), KEY, 4)
    own = np.equal(*GRID.coords)
    close(estimate.value[own], diagonal.value, 1e-12)
    close(estimate.standard_error[own], diagonal.standard_error, 1e-12)
    assert "colour" not in estimate.method


def test_pytrees_and_own_patterns() -> None:
    """Dimensions are numbered leaf after leaf."""
    matrix = jnp.asarray(GRID.toarray())
    tree = [jax.ShapeDtypeStruct((SIDE, 4), float), jax.ShapeDtypeStruct((96,), float)]

    def apply(v: Any) -> Any:
        flat = matrix @ jnp.concatenate([leaf.ravel() for leaf in v])
        return [flat[: 4 * SIDE].reshape(SIDE, 4), flat[4 * SIDE :]]

    for operator in (lx.FunctionLinearOperator(apply, tree, PSD), tx.as_operator(GRID)):
        estimate = tx.selected_entries(operator, GRID, KEY, 30)
        close(estimate.value, at(matrix), 1e-12)


@pytest.mark.parametrize("scale", [1e-30, slow(1e30)])
def test_single_precision_at_any_scale(scale: float) -> None:
    def run(scale: Any) -> tx.Estimate:
        matrix = jnp.asarray(GRID.toarray(), jnp.float32) * scale
        return tx.selected_entries(function(matrix, PSD), GRID, KEY, 12)

    one, other = run(jnp.float32(1)), run(jnp.float32(scale))
    close(other.value / scale, one.value, 1e-6)
    close(other.standard_error / scale, one.standard_error, 1e-5)


@pytest.mark.slow
def test_in_loops_and_batches_without_leaks() -> None:
    operator = function(jnp.linalg.inv(jnp.asarray(GRID.toarray())), PSD)

    def twice(key: Any) -> Any:
        def step(state: Any) -> Any:
            run = tx.selected_entries(operator, GRID, state[1], 8)
            return state[0] + 1, jax.random.fold_in(state[1], 1), run.value

        start = 0, key, jnp.zeros(GRID.nnz)
        return jax.lax.while_loop(lambda state: state[0] < 2, step, start)[2]

    with leaks_checked():
        values = jax.jit(jax.vmap(twice))(jax.random.split(KEY, 2))
    again = jax.random.fold_in(jax.random.split(KEY, 2)[1], 1)
    close(values[1], tx.selected_entries(operator, GRID, again, 8).value, 1e-10)


def test_the_pattern_is_checked() -> None:
    operator, words = matrix_free(lambda v: v, 5), r"selected_entries.*pattern"
    refused(ValueError, words, tx.selected_entries, operator, GRID, KEY, 3)
