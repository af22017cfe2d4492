"""What holds for all generated operators: classes, sizes, dtypes, keys, budgets."""

from typing import Any, NamedTuple

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tx
from tests.helpers import close
from tests.tables import ESTIMATORS, Entry, each
from tests.wrappers import PSD
from traceax.testing import operators

hypothesis.settings.register_profile(
    "suite", max_examples=6, deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("suite")


class Case(NamedTuple):
    """An operator and its dense matrix. It shrinks to a MatrixLinearOperator with n = 1."""

    operator: lx.AbstractLinearOperator
    dense: Any
    key: Any
    budget: int

    def estimate(self, entry: Entry, scale: Any = None, budget: int = 0) -> tx.Estimate:
        operator = self.operator
        if scale is not None:
            operator = scale.astype(self.dense.dtype) * operator
            if lx.is_positive_semidefinite(self.operator):  # lineax forgets it
                operator = lx.TaggedLinearOperator(operator, PSD)
        budget = max(budget or self.budget, entry.minimum)
        return entry.of(operator, self.key, budget)

    @property
    def tolerance(self) -> float:
        return 5e3 * float(jnp.finfo(self.dense.dtype).eps)

    @property
    def size(self) -> float:
        return float(jnp.sum(jnp.abs(self.dense))) + 1e-30

    def number(self, value: float) -> Any:
        return jnp.asarray(value, jnp.finfo(self.dense.dtype).dtype)


@st.composite
def drawn(draw: Any, *, semidefinite: bool) -> Case:
    operator, dense = draw(operators(semidefinite=semidefinite))
    key = jax.random.key(draw(st.integers(0, 99)))
    budget = draw(st.sampled_from((4, 5, dense.shape[0], 50)))
    return Case(operator, dense, key, budget)


@pytest.mark.slow
@each(ESTIMATORS)
@hypothesis.given(data=st.data())
def test_exact_at_full_budget_and_within_budget(entry: Entry, data: st.DataObject) -> None:
    """And the same key gives the same answer."""
    case: Case = data.draw(drawn(semidefinite=entry.semidefinite))
    n = case.dense.shape[0]
    exact = case.estimate(entry, budget=n)
    if n >= entry.minimum:
        assert exact.num_matvecs == n
    close(exact.value, jnp.trace(case.dense), case.tolerance, case.size)
    assert exact.standard_error == 0
    one, two = (case.estimate(entry) for _ in range(2))
    assert one.value == two.value
    assert one.num_matvecs <= max(case.budget, entry.minimum)
    assert not jnp.isnan(one.value)
    assert one.standard_error >= 0


@each(ESTIMATORS, "xtrace")
@hypothesis.given(data=st.data())
def test_jvp_is_vjp_and_euler(entry: Entry, data: st.DataObject) -> None:
    """In a factor of the operator, and in all its arrays."""
    case: Case = data.draw(drawn(semidefinite=entry.semidefinite))

    def value(scale: Any) -> Any:
        return case.estimate(entry, scale).value.real

    one = case.number(1.0)
    got, slope = jax.jvp(value, (one,), (one,))
    close(jax.grad(value)(one), slope, case.tolerance, case.size)
    if entry.euler:
        close(slope, got, case.tolerance, case.size)
    arrays, rest = eqx.partition(case.operator, eqx.is_inexact_array)

    def of_arrays(arrays: Any) -> Any:
        operator = eqx.combine(arrays, rest)
        return case._replace(operator=operator).estimate(entry).value.real

    _, forwards = jax.jvp(of_arrays, (arrays,), (arrays,))
    gradient = jax.grad(of_arrays)(arrays)
    pairs = zip(*map(jax.tree.leaves, (gradient, arrays)), strict=True)
    products = [jnp.sum(g * a) for g, a in pairs]
    size = sum((float(jnp.sum(jnp.abs(p))) for p in products), case.size)
    backwards = sum((p.real for p in products), case.number(0.0))
    if products:
        close(backwards, forwards, case.tolerance, size)
