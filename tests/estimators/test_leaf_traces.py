"""Traces leaf by leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tx
from tests.helpers import close, is_unbiased, nightly, over_keys, slow
from tests.matrices import general, hermitian
from tests.wrappers import PSD, two_leaves

KEY = jax.random.key(4)
SIZES = (20, 1, 59)
N, K = sum(SIZES), 8
TAGS = {"general": (), "symmetric": lx.symmetric_tag, "psd": PSD}


def operator(matrix: Any, tag: Any = ()) -> lx.AbstractLinearOperator:
    shapes = {"a": (4, 5), "b": (), "c": (59,)}
    zeros = {name: jnp.zeros(shape, matrix.dtype) for name, shape in shapes.items()}
    back, space = ravel_pytree(zeros)[1], jax.eval_shape(lambda: zeros)
    apply = lambda v: back(matrix @ ravel_pytree(v)[0])  # noqa: E731
    return lx.FunctionLinearOperator(apply, space, tag)


def sums(matrix: Any) -> Any:
    parts = jnp.split(jnp.diagonal(matrix), np.cumsum(SIZES)[:-1])
    return jnp.stack([part.sum() for part in parts])


def matrices(kind: str, dtype: Any = float, rank: int = N) -> Any:
    square = general(N, dtype)
    if kind == "general":
        return square[:, :rank] @ general(N, dtype)[:rank].conj()
    factor, signs = square[:, :rank], jnp.where(jnp.arange(rank)[None] % 3 == 0, -1.0, 1.0)
    return (factor * signs if kind == "symmetric" else factor) @ factor.conj().T / N


def in_one(path: Any) -> str:
    """The group of all leaves."""
    return "all"


def stacked(tree: Any) -> Any:
    return jnp.stack(jax.tree.leaves(tree))


KINDS = [slow("general", complex), ("psd", float), slow("symmetric", float)]


@pytest.mark.parametrize(("kind", "dtype"), [*KINDS, nightly("psd", complex)])
def test_low_rank_is_exact(kind: str, dtype: Any) -> None:
    """Rank 5: to rounding, with a bar of that size; the derivative, too (Euler)."""
    matrix = matrices(kind, dtype, 5)

    def run(scale: Any) -> Any:
        estimate = tx.leaf_traces(operator(scale * matrix, TAGS[kind]), KEY, 2 * K)
        return jnp.sum(stacked(estimate.value).real * jnp.arange(1.0, 4.0)), estimate

    (total, estimate), derivative = jax.jit(jax.value_and_grad(run, has_aux=True))(1.0)
    tolerance = 1e-6 if kind == "psd" else 1e-11  # Nyström's shift: a root of eps
    want = sums(matrix)
    size = float(jnp.max(jnp.abs(want)))
    close(stacked(estimate.value), want, tolerance, size)
    assert jnp.all(stacked(estimate.standard_error) < 10 * tolerance * size)
    close(derivative, total, tolerance, size)
    assert set(estimate.value) == {"a", "b", "c"}
    assert estimate.num_matvecs == 2 * K


def test_exact_answers() -> None:
    """A budget of all dimensions; the sum of a group, with its derivative; and operators
    that store their diagonal, of which only that is read."""
    matrix = matrices("general")
    estimate = tx.leaf_traces(operator(matrix), KEY, 200)
    close(stacked(estimate.value), sums(matrix), 1e-12)
    assert jnp.all(stacked(estimate.standard_error) == 0)
    assert estimate.num_matvecs == N
    group = lambda t: tx.leaf_traces(operator(t * matrix), KEY, N, groups=in_one)  # noqa: E731
    both = jax.value_and_grad(lambda t: group(t).value["all"])(1.0)
    close(both, 2 * (jnp.trace(matrix),), 1e-12)
    free = two_leaves(jnp.diag(jnp.arange(6.0)), lx.diagonal_tag)
    estimate = tx.leaf_traces(free, KEY, 1)
    assert estimate.num_matvecs == 1
    close(stacked(estimate.value), jnp.array([1.0, 14.0]), 1e-14)


RUNS = [slow("general", 4, None), slow("psd", 10, None), slow("symmetric", 20, None)]
RUNS += [slow("psd", 20, in_one), nightly("general", 20, in_one)]


@pytest.mark.parametrize(("kind", "budget", "groups"), RUNS)
def test_unbiased_with_honest_bars(kind: str, budget: int, groups: Any) -> None:
    """Over 1,000 keys: means within six standard errors, and intervals that contain the
    truth in at least nine of ten; also of the sum, whose errors are correlated."""
    roots = jnp.exp(-jnp.arange(N) / 30)
    base = matrices(kind) * roots[:, None] * roots[None, :]
    direction, of = general(N) if kind == "general" else base, sums
    if groups is not None:
        of = lambda matrix: jnp.trace(matrix)[None]  # noqa: E731
    truth, weights = of(base), jnp.arange(1.0, 1 + len(of(base)))

    def run(t: Any, key: Any) -> Any:
        moved = operator(base + t * direction, TAGS[kind])
        estimate = tx.leaf_traces(moved, key, budget, groups=groups)
        low, high = map(stacked, estimate.interval())
        value = stacked(estimate.value)
        return value @ weights, (value, (low <= truth) & (truth <= high))

    each = jax.vmap(jax.value_and_grad(run, has_aux=True), (None, 0))
    (_, (values, contained)), got = jax.jit(each)(0.0, jax.random.split(KEY, 1000))
    assert is_unbiased(values, truth)
    assert jnp.all(jnp.mean(contained, axis=0) > 0.9)
    assert is_unbiased(got, of(direction) @ weights)


@pytest.mark.parametrize(("kind", "budget"), [slow("symmetric", 20), slow("general", 20)])
def test_a_leaf_of_one_entry_is_an_entry_of_the_diagonal(kind: str, budget: int) -> None:
    """From the same probes. The bar may be larger, by what sums have in common."""
    one = operator(matrices(kind) + jnp.eye(N), TAGS[kind])
    leaf, entry = (f(one, KEY, budget) for f in (tx.leaf_traces, tx.diagonal))
    close(leaf.value["b"], entry.value["b"], 1e-12)
    ratio = leaf.standard_error["b"] / entry.standard_error["b"]
    assert 1 - 1e-12 < ratio < 2
    assert leaf.method == entry.method


def test_single_precision_at_any_scale() -> None:
    matrix = matrices("psd").astype(jnp.float32)
    run = jax.jit(lambda m: tx.leaf_traces(operator(m, TAGS["psd"]), KEY, 10))
    plain, zero = run(matrix), run(0 * matrix)
    assert not jnp.any(stacked((zero.value, zero.standard_error)))
    for factor in map(np.float32, (1e-30, 1e30)):
        scaled = run(factor * matrix)
        close(stacked(scaled.value) / factor, stacked(plain.value), 1e-4)
        close(stacked(scaled.standard_error) / factor, stacked(plain.standard_error), 1e-2)


@pytest.mark.parametrize(("kind", "budget"), [slow("psd", 20), slow("general", 4)])
def test_sums_over_groups_have_their_own_bars(kind: str, budget: int) -> None:
    """All leaves in one group: the diagonal's sum, from the same samples. One leaf in each
    is what there is without groups. Errors of leaves in a group are correlated."""
    one = operator(matrices(kind), TAGS[kind])

    def by(name: Any) -> Any:
        return tx.leaf_traces(one, KEY, budget, groups=name)

    each, plain = by(lambda path: path[0].key), tx.leaf_traces(one, KEY, budget)
    for part in ("value", "standard_error"):
        close(stacked(getattr(each, part)), stacked(getattr(plain, part)), 1e-12)
    some = by(lambda path: "first" if path[0].key in "ab" else "last")
    assert list(some.value) == ["first", "last"]
    close(some.value["first"], plain.value["a"] + plain.value["b"], 1e-12)
    close(some.standard_error["last"], plain.standard_error["c"], 1e-12)
    assert by(lambda path: 0).value.keys() == {"0"}


@pytest.mark.parametrize(("rest", "tag"), [nightly(0.0, ()), slow(1e-3, lx.symmetric_tag)])
def test_bars_where_the_rank_is_the_number_of_probes(rest: float, tag: Any) -> None:
    """All samples then have most of their error in common. Intervals for 95 % contained the
    truth in 62 % (both leaves) and 50 % (their sum)."""
    n, first, rank = 200, 50, 32
    matrix = hermitian(np.where(np.arange(n) < rank, 1, rest))
    shapes = [jax.ShapeDtypeStruct((size,), float) for size in (first, n - first)]
    apply = lambda v: jnp.split(matrix @ jnp.concatenate(v), (first,))  # noqa: E731
    leaves = lx.FunctionLinearOperator(apply, shapes, tag)
    parts = jnp.split(jnp.diagonal(matrix), (first,))
    each = jnp.stack([jnp.sum(part) for part in parts])
    for groups, truth in ((None, each), (in_one, jnp.sum(each)[None])):

        def run(key: Any, groups: Any = groups, truth: Any = truth) -> Any:
            got = tx.leaf_traces(leaves, key, 2 * rank, groups=groups)
            low, high = map(stacked, got.interval(0.95))
            errors = stacked(got.value) - truth, stacked(got.standard_error)
            return *errors, (low <= truth) & (truth <= high)

        error, bar, contained = over_keys(run, KEY, 400)
        assert jnp.mean(contained) > 0.91
        assert jnp.sqrt(jnp.mean(bar**2)) < 2.3 * jnp.sqrt(jnp.mean(error**2))


@pytest.mark.slow
def test_where_a_sketch_does_not_help_the_error_is_that_of_plain_probes() -> None:
    """A flat spectrum, 60 keys: 1.33 times that of 20 probes, XNysDiag's 2.8 times."""
    flat = operator(hermitian(np.linspace(1.0, 3.0, N), float), PSD)

    def error(estimator: Any) -> Any:
        values = over_keys(lambda key: estimator(flat, key, 20).value, KEY, 60)
        total = jnp.stack([jnp.sum(x.reshape(60, -1), 1) for x in jax.tree.leaves(values)])
        return jnp.sqrt(jnp.mean((total - sums(flat.as_matrix())[:, None]) ** 2))

    assert error(tx.leaf_traces) < 1.7 * error(tx.hutchinson_diagonal)


def test_of_one_probe_the_error_is_unknown() -> None:
    for tag, budget in (((), 1), (PSD, 2)):
        estimate = tx.leaf_traces(operator(matrices("psd"), tag), KEY, budget)
        unknown = jnp.isinf(stacked(estimate.standard_error))
        assert jnp.all(unknown) if budget == 1 else not jnp.any(unknown)
