"""Blocks in every layout: the numbers are the same, and the choice is the measured one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse
from jax.flatten_util import ravel_pytree

import traceax as tx
from tests.helpers import close, nightly, slow
from tests.wrappers import matrix_free
from traceax._core import layout
from traceax._core.operator import LinearMap, layout_tag
from traceax._core.vectors import _num_pieces, flatten, in_rows, unflatten
from traceax._probes.draw import for_sketch

N, K = 20_000, 60
KEY = jax.random.key(0)


def rolled(v: Any) -> Any:
    return 2 * v - jnp.roll(v, 1) - jnp.roll(v, -1)


def padded(v: Any) -> Any:
    wide = jnp.pad(v, 1)
    return 2 * v - wide[2:] - wide[:-2]


def solved(v: Any) -> Any:
    return jax.scipy.sparse.linalg.cg(lambda x: rolled(x) + x, v, maxiter=3)[0]


def scattered(v: Any) -> Any:
    return jnp.zeros_like(v).at[jnp.arange(N)[::-1]].add(v)


MATRIX = sparse.BCOO.fromdense(jnp.eye(3, dtype=jnp.float32))


def sparsely(v: Any) -> Any:
    return v * (MATRIX @ v[:3])[0]


def dense(v: Any) -> Any:
    return jnp.roll(jnp.ones((5, N), v.dtype) @ v, 1)


def loops(apply: Callable[[Any], Any], n: int, k: int) -> bool:
    """Whether the rows of a block go one after the other."""
    block = jax.ShapeDtypeStruct((n, k), jnp.float32)
    program = jax.make_jaxpr(lambda b: layout.through(apply, b, None))(block)
    return any(eqn.primitive.name == "scan" for eqn in program.jaxpr.eqns)


LOOPS = [(rolled, N, K), (solved, N, K), (scattered, N, K), (sparsely, N, K)]
BATCHES = [(padded, N, K), (jnp.sin, N, K), (jnp.fft.fft, N, K), (dense, N, K)]
SMALL = [(rolled, N, 2), (scattered, N, 40), (sparsely, 3000, K)]


def test_shifts_and_scatters_of_large_blocks_are_loops_and_others_batches() -> None:
    assert jax.default_backend() == "cpu"
    assert [loops(*case) for case in LOOPS] == [True] * len(LOOPS)
    assert not any(loops(*case) for case in BATCHES + SMALL)


SLOW = [tx.Layout.LOOP, tx.Layout.COLUMNS]
REST = [wish for wish in tx.Layout if wish not in SLOW]


@pytest.mark.parametrize("wish", [*map(slow, SLOW), *map(nightly, REST)])
def test_numbers_are_the_same(wish: tx.Layout) -> None:
    """Values, errors and gradients, also of stored matrices."""
    matrix = jax.random.normal(KEY, (60, 60)) + 5 * jnp.eye(60)

    def estimate(scale: Any, wish: Any) -> Any:
        shifts = matrix_free(lambda v: scale * rolled(v), 60, wish)
        stored = lx.MatrixLinearOperator(scale * matrix, wish)
        estimates = [tx.xtrace(op, KEY, 30) for op in (shifts, stored)]
        return jnp.stack([x for e in estimates for x in (e.value, e.standard_error)])

    values = estimate(1.5, wish)
    close(values, estimate(1.5, ()), 1e-12)
    gradients = jax.jacobian(lambda s: estimate(s, wish)[::2])(1.5)
    close(1.5 * gradients, values[::2], 1e-12)


def test_a_layout_is_found_under_other_tags() -> None:
    operator = matrix_free(rolled, 5, tx.Layout.ROWS)
    assert layout_tag(operator) is tx.Layout.ROWS
    tagged = lx.TaggedLinearOperator(2 * operator, lx.symmetric_tag)
    assert layout_tag(tagged) is tx.Layout.ROWS
    above = lx.TaggedLinearOperator(operator, tx.Layout.LOOP)
    assert layout_tag(above) is tx.Layout.LOOP
    assert layout_tag(operator + operator) is None
    block = jnp.cos(jnp.arange(10.0)).reshape(5, 2)
    assert "scan" in str(jax.make_jaxpr(LinearMap(above))(block))
    for wish in tx.Layout:
        image = LinearMap(matrix_free(rolled, 5, wish))(block)
        close(image, jax.vmap(rolled, 1, 1)(block), 1e-14)


def test_sketches_of_long_vectors_are_made_of_signs() -> None:
    for n, sampler in ((99_999, tx.sphere), (100_000, tx.rademacher)):
        assert for_sketch(lx.DiagonalLinearOperator(jnp.ones(n))) is sampler


@pytest.mark.slow
def test_the_default_is_that_sampler() -> None:
    operator = lx.DiagonalLinearOperator(jnp.linspace(1.0, 2.0, 100_000))
    chosen = tx.xtrace(operator, KEY, 4, sampler=tx.rademacher)
    close(tx.xtrace(operator, KEY, 4).value, chosen.value, 1e-15)


# Long leaves are joined piece by piece: every entry has to find its way back.

SHAPES = {"a": (128, 700), "none": (0,), "b": (3,), "c": (128, 84), "d": (128,)}
TREE = {
    name: jnp.asarray(np.random.default_rng(seed).uniform(1, 2, shape))
    for seed, (name, shape) in enumerate(SHAPES.items())
}
SPACE = jax.eval_shape(lambda: TREE)
FLAT = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(TREE)])


def matches(tree: object, expected: object = TREE) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11), tree, expected)


def test_blocks_have_an_order_of_their_own_and_leaves_come_back() -> None:
    column = flatten(TREE, FLAT.dtype)
    assert np.any(np.asarray(column) != FLAT)
    np.testing.assert_array_equal(in_rows(FLAT, SPACE), column)
    matches(unflatten(column, SPACE))


@pytest.mark.slow
def test_entries_come_back_from_estimates() -> None:
    """Signs are exact for diagonal operators. Stored and tagged ones are known."""
    multiplied = partial(jax.tree.map, jnp.multiply, TREE)
    operator = lx.FunctionLinearOperator(multiplied, SPACE, lx.symmetric_tag)
    matches(tx.hutchinson_diagonal(operator, KEY, 3).value)
    tagged = lx.TaggedLinearOperator(operator, lx.diagonal_tag)
    for known in (lx.DiagonalLinearOperator(TREE), tagged):
        matches(tx.diagonal(known, KEY, 3).value)
        matches(tx.leaf_traces(known, KEY, 3).value, jax.tree.map(jnp.sum, TREE))


@pytest.mark.slow
def test_probing_keeps_entries_and_neighbours_together() -> None:
    """Three colours are exact for a chain through all leaves, and its neighbours know."""

    def chain(v: dict[str, jax.Array]) -> dict[str, jax.Array]:
        x = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(v)])
        y = jnp.asarray(FLAT) * x + jnp.pad(x[1:], (0, 1)) + jnp.pad(x[:-1], (1, 0))
        return ravel_pytree(TREE)[1](y)

    n = FLAT.size
    line: Any = scipy.sparse.eye_array(n, k=1) + scipy.sparse.eye_array(n)
    sampler = tx.probing((line + line.T).tocsr(), power=2)
    operator = lx.FunctionLinearOperator(chain, SPACE, lx.symmetric_tag)
    estimate = tx.hutchinson_diagonal(operator, KEY, 3, sampler=sampler)
    matches(estimate.value)
    for error in jax.tree.leaves(estimate.standard_error):
        assert np.all(error < 1e-13)


def test_the_number_of_pieces() -> None:
    """It divides all leaves but the small ones, which have a thousandth of a share."""
    assert _num_pieces([60_000, 90_000, 30]) == 30_000
    assert _num_pieces([60_000, 90_000, 999]) == 3
    assert _num_pieces([150_000]) == _num_pieces([60_000, 30_000]) == 1
