"""What always holds, on generated operators: classes, sizes, dtypes, keys, budgets."""

from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import (
    ESTIMATORS,
    EVERY,
    Entry,
    as_semidefinite,
    close,
    hermitian,
    part_of,
)

SIZES = (1, 2, 3, 8)  # each is a compilation
DTYPES = ("float32", "float64", "complex64", "complex128")

hypothesis.settings.register_profile(
    "suite", max_examples=6, deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("suite")


class Case(NamedTuple):
    """An operator and the dense matrix that is its oracle. Shrinks to n = 1, Matrix."""

    kind: str
    matrix: Any
    dense: Any
    key: Any
    budget: int

    def estimate(self, entry: Entry, matrix: Any, budget: int | None = None) -> tx.Estimate:
        operator = as_semidefinite(entry, EVERY[self.kind](matrix))
        return entry.estimate(operator, self.key, max(budget or self.budget, entry.minimum))

    @property
    def tolerance(self) -> float:
        return 5e3 * float(jnp.finfo(self.matrix.dtype).eps)

    @property
    def size(self) -> float:
        return float(jnp.sum(jnp.abs(self.dense))) + 1e-30


@st.composite
def cases(draw: Any) -> Case:
    kind = draw(st.sampled_from([k for k in EVERY if k not in ("Tangent", "Tridiagonal")]))
    n = draw(st.sampled_from(SIZES))
    dtype = draw(st.sampled_from(DTYPES))
    rank = draw(st.integers(1, n))
    seed = draw(st.integers(0, 99))
    eigenvalues = np.where(np.arange(n) < rank, 1 + np.arange(n), 0.0)
    matrix = hermitian(eigenvalues, dtype, seed)
    budget = draw(st.sampled_from((4, 5, n, 50)))
    return Case(kind, matrix, part_of(kind, matrix), jax.random.key(seed), budget)


every_estimator = pytest.mark.parametrize("entry", ESTIMATORS, ids=lambda e: e.name)


@every_estimator
@hypothesis.given(case=cases(), factor=st.sampled_from((1e-20, 0.25, 3.0, 1e20)))
def test_linear_in_the_scale(entry: Entry, case: Case, factor: float) -> None:
    plain, scaled = (case.estimate(entry, f * case.matrix) for f in (1.0, factor))
    close(scaled.value / factor, plain.value, case.tolerance, case.size)


@every_estimator
@hypothesis.given(case=cases())
def test_exact_at_full_budget(entry: Entry, case: Case) -> None:
    n = case.matrix.shape[0]
    exact = case.estimate(entry, case.matrix, n)
    close(exact.value, jnp.trace(case.dense), case.tolerance, case.size)
    assert exact.standard_error == 0
    assert exact.num_matvecs == n


@every_estimator
@hypothesis.given(case=cases())
def test_jvp_is_vjp_and_euler(entry: Entry, case: Case) -> None:
    def value(matrix: Any) -> Any:
        return case.estimate(entry, matrix).value.real

    rng = np.random.default_rng(0)
    direction = jnp.asarray(rng.standard_normal(case.matrix.shape), case.matrix.dtype)
    got, slope = jax.jvp(value, (case.matrix,), (direction,))
    gradient = jax.grad(value)(case.matrix)
    close(jnp.sum(gradient * direction).real, slope, case.tolerance, 100)
    _, itself = jax.jvp(value, (case.matrix,), (case.matrix,))
    if entry.euler:
        close(itself, got, case.tolerance, case.size)


@every_estimator
@hypothesis.given(case=cases())
def test_same_key_same_answer_and_within_budget(entry: Entry, case: Case) -> None:
    one, two = (case.estimate(entry, case.matrix) for _ in range(2))
    assert one.value == two.value
    assert one.num_matvecs <= max(case.budget, entry.minimum)
    assert not jnp.isnan(one.value)
    assert one.standard_error >= 0


@hypothesis.given(case=cases())
def test_the_front_door_on_small_operators_is_exact(case: Case) -> None:
    operator = EVERY[case.kind](case.matrix)
    estimate = tx.trace(operator, case.key, case.budget)
    close(estimate.value, jnp.trace(case.dense), case.tolerance, case.size)
    gradient = jax.grad(
        lambda m: tx.trace(EVERY[case.kind](m), case.key, case.budget).value.real
    )(case.matrix)
    dense = jax.grad(lambda m: jnp.trace(part_of(case.kind, m)).real)(case.matrix)
    close(gradient, dense, case.tolerance, 10)


@hypothesis.given(
    case=cases(), sampler=st.sampled_from((tx.rademacher, tx.sphere, tx.normal))
)
def test_a_probe_does_not_depend_on_the_cut_into_leaves(case: Case, sampler: Any) -> None:
    n = case.matrix.shape[0]
    dtype = case.matrix.dtype
    whole = jax.ShapeDtypeStruct((n,), dtype)
    leaves = tuple(jax.ShapeDtypeStruct((), dtype) for _ in range(n))
    one = sampler(case.key, whole, 3)
    many = sampler(case.key, leaves, 3)
    np.testing.assert_array_equal(one, jnp.stack(many, axis=1))
    assert isinstance(lx.IdentityLinearOperator(leaves), lx.AbstractLinearOperator)
