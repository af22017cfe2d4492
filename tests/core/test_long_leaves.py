"""Long leaves are joined piece by piece: every entry has to find its way back."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
from jax.flatten_util import ravel_pytree

import traceax as tx
from traceax._core.vectors import flatten, in_rows, unflatten

SHAPES = {"a": (128, 700), "none": (0,), "b": (3,), "c": (128, 84), "d": (128,)}
TREE = {
    name: jnp.asarray(np.random.default_rng(seed).uniform(1, 2, shape))
    for seed, (name, shape) in enumerate(SHAPES.items())
}
SPACE = jax.eval_shape(lambda: TREE)
FLAT = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(TREE)])
KEY = jax.random.key(0)


def close(tree: object, expected: object = TREE) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11), tree, expected)


def multiplied(v: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(jnp.multiply, TREE, v)


def test_blocks_have_an_order_of_their_own_and_leaves_come_back() -> None:
    column = flatten(TREE, FLAT.dtype)
    assert np.any(np.asarray(column) != FLAT)
    np.testing.assert_array_equal(in_rows(FLAT, SPACE), column)
    close(unflatten(column, SPACE))


@pytest.mark.slow
def test_entries_come_back_from_estimates() -> None:
    """Signs are exact for diagonal operators; stored and tagged ones are known."""
    operator = lx.FunctionLinearOperator(multiplied, SPACE, lx.symmetric_tag)
    close(tx.hutchinson_diagonal(operator, KEY, 3).value)
    tagged = lx.TaggedLinearOperator(operator, lx.diagonal_tag)
    for known in (lx.DiagonalLinearOperator(TREE), tagged):
        close(tx.diagonal(known, KEY, 3).value)
        close(tx.leaf_traces(known, KEY, 3).value, jax.tree.map(jnp.sum, TREE))


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
    close(estimate.value)
    for error in jax.tree.leaves(estimate.standard_error):
        assert np.all(error < 1e-13)
