"""What holds for all generated operators: classes, sizes, dtypes, keys, budgets."""

from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import lineax as lx
import pytest

from tests.helpers import close, nightly, slow
from tests.tables import ESTIMATORS, Entry
from tests.wrappers import PSD
from traceax.testing import operators

hypothesis.settings.register_profile(
    "suite", max_examples=6, deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("suite")


@st.composite
def drawn(draw: Any, *, semidefinite: bool) -> Any:
    """An operator, its dense matrix, a key and a budget. It shrinks to a
    MatrixLinearOperator with n = 1."""
    operator, dense = draw(operators(semidefinite=semidefinite))
    key = jax.random.key(draw(st.integers(0, 99)))
    return operator, dense, key, draw(st.sampled_from((4, 5, dense.shape[0], 50)))


SLOW = ("xtrace",)


@pytest.mark.parametrize(
    "entry",
    [(slow if entry.name in SLOW else nightly)(entry) for entry in ESTIMATORS],
    ids=lambda entry: entry.name,
)
@hypothesis.given(data=st.data())
def test_values_and_derivatives(entry: Entry, data: st.DataObject) -> None:
    """A budget of n is exact, the same key gives the same answer, and jvp is vjp, in a
    factor of the operator and in all its arrays."""
    operator, dense, key, budget = data.draw(drawn(semidefinite=entry.semidefinite))
    n, info, budget = len(dense), jnp.finfo(dense.dtype), max(budget, entry.minimum)
    tolerance, size = 5e3 * float(info.eps), float(jnp.sum(jnp.abs(dense))) + 1e-30
    exact = entry.of(operator, key, max(n, entry.minimum))
    assert exact.num_matvecs == n or n < entry.minimum
    close(exact.value, jnp.trace(dense), tolerance, size)
    assert exact.standard_error == 0
    one, two = (entry.of(operator, key, budget) for _ in range(2))
    assert one.value == two.value
    assert one.num_matvecs <= budget
    assert not jnp.isnan(one.value)
    assert one.standard_error >= 0

    def of_factor(scale: Any) -> Any:
        scaled = scale.astype(dense.dtype) * operator
        if lx.is_positive_semidefinite(operator):  # lineax forgets it
            scaled = lx.TaggedLinearOperator(scaled, PSD)
        return entry.of(scaled, key, budget).value.real

    unit = jnp.ones((), info.dtype)
    got, derivative = jax.jvp(of_factor, (unit,), (unit,))
    close(jax.grad(of_factor)(unit), derivative, tolerance, size)
    if entry.euler:
        close(derivative, got, tolerance, size)
    arrays, rest = eqx.partition(operator, eqx.is_inexact_array)

    def of_arrays(arrays: Any) -> Any:
        return entry.of(eqx.combine(arrays, rest), key, budget).value.real

    _, forwards = jax.jvp(of_arrays, (arrays,), (arrays,))
    gradient = jax.grad(of_arrays)(arrays)
    pairs = zip(*map(jax.tree.leaves, (gradient, arrays)), strict=True)
    products = [jnp.sum(g * a) for g, a in pairs]
    size = sum((float(jnp.sum(jnp.abs(p))) for p in products), size)
    if products:
        close(sum((p.real for p in products), 0 * unit), forwards, tolerance, size)
