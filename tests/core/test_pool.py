"""Several estimates of one quantity, made one; and estimates kept in files."""

import io
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax import export

import traceax as tx
from tests.helpers import close, function, general

KEY = jax.random.key(21)
N = 80
MATRIX = general(N)


def parts(values: Any, errors: Any, counts: Any, degrees: Any = 9.0) -> list[tx.Estimate]:
    return [
        tx.Estimate(jnp.asarray(v, float), jnp.asarray(e, float), c, degrees)
        for v, e, c in zip(values, errors, counts, strict=True)
    ]


def test_weights_are_the_shares_and_errors_add_in_squares() -> None:
    pooled = tx.pool(parts([10.0, 10.6, 10.2], [0.5, 0.4, 0.3], [20, 30, 50]))
    close(pooled.value, (20 * 10.0 + 30 * 10.6 + 50 * 10.2) / 100, 1e-14)
    squares = [(0.2 * 0.5) ** 2, (0.3 * 0.4) ** 2, (0.5 * 0.3) ** 2]
    close(pooled.standard_error, sum(squares) ** 0.5, 1e-14)
    assert pooled.num_matvecs == 100
    welch = sum(squares) ** 2 / (sum(v**2 for v in squares) / 9)
    close(jnp.asarray(pooled.degrees_of_freedom), welch, 1e-6)


@pytest.mark.parametrize("runs", [1, 3])
def test_what_cost_nothing_is_exact(runs: int) -> None:
    """Of a matrix that is stored, whose trace takes no application."""
    estimate = tx.trace(lx.MatrixLinearOperator(MATRIX), KEY)
    pooled = tx.pool([estimate] * runs)
    assert pooled.num_matvecs == pooled.standard_error == 0
    assert pooled.value == estimate.value


def test_runs_that_contradict_each_other_are_believed() -> None:
    """Their spread counts where it is larger; where they agree, their errors do."""
    apart = tx.pool(parts([10.0, 20.0, 15.0], [0.1] * 3, [50] * 3))
    spread = np.std([10.0, 20.0, 15.0], ddof=1) / 3**0.5
    close(apart.standard_error, spread, 1e-12)
    together = tx.pool(parts([10.0] * 3, [0.1] * 3, [50] * 3))
    close(together.standard_error, 0.1 / 3**0.5, 1e-14)


def test_runs_of_one_probe_tell_their_error_together() -> None:
    values = jax.random.normal(KEY, (40,))
    pooled = tx.pool(parts(values, [jnp.inf] * 40, [1] * 40))
    close(pooled.standard_error, jnp.std(values, ddof=1) / 40**0.5, 1e-12)
    alone = tx.pool(parts([3.0], [jnp.inf], [1]))
    assert jnp.isinf(alone.standard_error)
    assert jnp.isnan(tx.pool(parts([3.0, jnp.nan], [0.1, 0.1], [1, 1])).value)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_at_any_scale_in_float32(scale: float) -> None:
    scale_ = jnp.float32(scale)

    def pooled(scale: Any) -> tx.Estimate:
        runs = [
            tx.Estimate(scale * jnp.float32(v), scale * jnp.float32(e), 10, 9.0)
            for v, e in ((10.0, 0.5), (10.5, 0.4))
        ]
        return tx.pool(runs)

    one, other = pooled(jnp.float32(1)), pooled(scale_)
    close(other.value / scale_, one.value, 1e-6)
    close(other.standard_error / scale_, one.standard_error, 1e-6)


def run(key: Any, scale: Any = 1.0) -> tx.Estimate:
    return tx.hutchinson_diagonal(function(scale * MATRIX), key, 20)


def test_a_batch_is_its_list_also_under_jit_with_its_slope() -> None:
    keys = jax.random.split(KEY, 3)
    batch = jax.jit(lambda keys: tx.pool(jax.vmap(run)(keys)))(keys)
    listed = tx.pool([run(key) for key in keys])
    close(batch.value, listed.value, 1e-10)
    close(batch.standard_error, listed.standard_error, 1e-6)
    assert batch.num_matvecs == listed.num_matvecs == 60

    def loss(scale: Any) -> Any:
        return jnp.sum(tx.pool(jax.lax.map(lambda k: run(k, scale), keys)).value)

    def error(scale: Any) -> Any:
        return jnp.sum(tx.pool([run(k, scale) for k in keys]).standard_error)

    close(jax.jit(jax.grad(loss))(1.0), jnp.sum(batch.value), 1e-10)
    with pytest.raises(Exception, match="standard_error"):
        jax.block_until_ready(jax.grad(error)(1.0))


@pytest.mark.parametrize("runs", [2, 8])
def test_pools_are_as_honest_as_their_parts(runs: int) -> None:
    """Of different budgets, over 400 pools."""

    def pooled(key: Any) -> Any:
        budgets = (4, 10, 20, 40) * (runs // 2) if runs > 2 else (6, 30)
        keys = jax.random.split(key, len(budgets))
        each = [
            tx.hutchinson_trace(function(MATRIX), k, m)
            for k, m in zip(keys, budgets, strict=True)
        ]
        whole = tx.pool(each[:runs])
        return (whole.value, *whole.interval())

    mapped = jax.jit(lambda ks: jax.lax.map(pooled, ks))
    value, low, high = mapped(jax.random.split(KEY, 400))
    truth = jnp.trace(MATRIX)
    assert jnp.mean((low <= truth) & (truth <= high)) > 0.92
    assert abs(jnp.mean(value) - truth) < 5 * jnp.std(value) / 400**0.5


def test_wrong_use_says_the_cure() -> None:
    one = tx.Estimate(jnp.ones(()), jnp.ones(()), 3)
    other = tx.Estimate(jnp.ones(2), jnp.ones(2), 3)
    call: Any = tx.pool
    with pytest.raises(TypeError, match=r"pool\(estimates=.*sequence.*got float.*list"):
        call(3.0)
    with pytest.raises(ValueError, match=r"pool\(estimates=.*at least one"):
        call([])
    with pytest.raises(TypeError, match=r"pool\(estimates=.*got float as number 1"):
        call([one, 3.0])
    with pytest.raises(ValueError, match=r"pool\(estimates=.*one quantity.*number 1"):
        call([one, other])
    for single in (one, other):
        with pytest.raises(ValueError, match=r"pool\(estimates=.*leading axis.*jax\.vmap"):
            call(single)


# --- files ------------------------------------------------------------------------------


def estimates() -> dict[str, Any]:
    positive = lx.MatrixLinearOperator(MATRIX @ MATRIX.T, lx.positive_semidefinite_tag)
    return {
        "trace": tx.xtrace(function(MATRIX), KEY, 20),
        "diagonal": tx.xdiag(function(MATRIX), KEY, 20),
        "adaptive": tx.adaptive_trace(function(MATRIX), KEY, rtol=1.0, max_matvecs=20),
        "likelihood": tx.inv_quad_logdet(positive, jnp.ones(N), KEY, 40, shift=1.0),
    }


def same(one: Any, other: Any) -> bool:
    return bool(eqx.tree_equal(one, other))


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return estimates()


@pytest.mark.parametrize("name", ["trace", "diagonal", "adaptive", "likelihood"])
def test_they_are_pickled_and_serialised(name: str, kept: dict[str, Any]) -> None:
    """By pickle; by Equinox; and as what savers like flax's and orbax's keep, plain arrays
    by their places in the tree."""
    estimate = kept[name]
    assert same(pickle.loads(pickle.dumps(estimate)), estimate)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, estimate)
    file.seek(0)
    blank = jax.tree.map(
        lambda leaf: (
            type(leaf)(0) if isinstance(leaf, int | float) else jnp.zeros_like(leaf)
        ),
        estimate,
    )
    assert same(eqx.tree_deserialise_leaves(file, blank), estimate)
    flat = jax.tree.leaves_with_path(estimate)
    arrays: dict[str, Any] = {
        jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat
    }
    file = io.BytesIO()
    np.savez(file, **arrays)
    file.seek(0)
    with np.load(file) as read:
        leaves = [read[place] for place in arrays]
    rebuilt = jax.tree.unflatten(jax.tree.structure(estimate), leaves)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(rebuilt), jax.tree.leaves(estimate), strict=True)
    )
    assert str(rebuilt) == str(estimate)


@pytest.mark.parametrize("name", ["trace", "adaptive", "likelihood"])
def test_they_go_through_export(name: str, kept: dict[str, Any]) -> None:
    estimate = jax.tree.map(jnp.asarray, kept[name])
    exported = export.export(jax.jit(lambda e: jax.tree.map(lambda x: x + x, e)))(estimate)
    read = export.deserialize(exported.serialize())
    doubled = read.call(estimate)
    assert type(doubled) is type(estimate)
    assert same(doubled, jax.tree.map(lambda x: x + x, estimate))


def test_stop_and_resume_are_machines_and_their_files() -> None:
    """What README does: a run each, with a key of its own, saved, read, pooled."""
    files = []
    for machine in range(4):
        key = jax.random.fold_in(KEY, machine)
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, tx.hutchinson_trace(function(MATRIX), key, 10))
        files.append(file)
    like = tx.Estimate(jnp.zeros(()), jnp.zeros(()), 0, 0.0)
    read = []
    for file in files:
        file.seek(0)
        read.append(eqx.tree_deserialise_leaves(file, like))
    pooled = tx.pool(read)
    assert pooled.num_matvecs == 40
    assert abs(pooled.value - jnp.trace(MATRIX)) < 5 * pooled.standard_error
