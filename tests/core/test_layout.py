"""Blocks in every layout: the numbers are the same, and the choice is the measured one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import pytest
from jax.experimental import sparse

import traceax as tx
from tests.helpers import close, slow
from tests.wrappers import matrix_free
from traceax._core import layout
from traceax._core.operator import LinearMap, layout_tag

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


LOOPS = {"rolled": rolled, "solved": solved, "scattered": scattered}
BATCHES = {"padded": padded, "elementwise": jnp.sin, "fft": jnp.fft.fft, "dense": dense}


def loops(apply: Callable[[Any], Any], n: int, k: int = K) -> bool:
    """Whether the rows of a block go one after the other."""
    block = jax.ShapeDtypeStruct((n, k), jnp.float32)
    program = jax.make_jaxpr(lambda b: layout.through(apply, b, None))(block)
    return any(eqn.primitive.name == "scan" for eqn in program.jaxpr.eqns)


@pytest.mark.parametrize("name", LOOPS | BATCHES)
def test_shifts_and_scatters_are_loops_and_others_batches(name: str) -> None:
    assert jax.default_backend() == "cpu"
    assert loops((LOOPS | BATCHES)[name], N) == (name in LOOPS)


def test_shifts_and_scattered_entries_of_small_blocks_are_a_batch() -> None:
    assert not loops(rolled, N, 2)
    assert not loops(scattered, N, 40)
    assert loops(sparsely, N)
    assert not loops(sparsely, 3000)


@pytest.mark.slow
@pytest.mark.parametrize("wish", list(tx.Layout))
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
    slopes = jax.jacobian(lambda s: estimate(s, wish)[::2])(1.5)
    close(1.5 * slopes, values[::2], 1e-12)


def test_a_layout_is_found_under_other_tags() -> None:
    operator = matrix_free(rolled, 5, tx.Layout.ROWS)
    assert layout_tag(operator) is tx.Layout.ROWS
    tagged = lx.TaggedLinearOperator(2 * operator, lx.symmetric_tag)
    assert layout_tag(tagged) is tx.Layout.ROWS
    above = lx.TaggedLinearOperator(operator, tx.Layout.LOOP)
    assert layout_tag(above) is tx.Layout.LOOP
    assert layout_tag(operator + operator) is None
    program = jax.make_jaxpr(LinearMap(above))(jnp.ones((5, 2)))
    assert "scan" in str(program)


LONG = [slow(99_999, tx.sphere), (100_000, tx.rademacher)]


@pytest.mark.parametrize(("n", "sampler"), LONG)
def test_sketches_of_long_vectors_are_made_of_signs(n: int, sampler: Any) -> None:
    operator = lx.DiagonalLinearOperator(jnp.linspace(1.0, 2.0, n))
    chosen = tx.xtrace(operator, KEY, 4, sampler=sampler)
    close(tx.xtrace(operator, KEY, 4).value, chosen.value, 1e-15)
