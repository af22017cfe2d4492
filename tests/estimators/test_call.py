"""The door: one estimator reduced in several ways, and the degrees of freedom."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.calls import CALLS, MATRIX
from tests.helpers import close
from tests.matrices import general, hermitian
from tests.tables import flatten
from tests.wrappers import two_leaves
from traceax._estimators.call import Call, begin
from traceax._estimators.readouts import TOTAL, Reduce, by_leaf, by_row
from traceax._estimators.second_batch import xdiag_or_hutchinson
from traceax._estimators.xdiag import estimate_by_xdiag

KEY = jax.random.key(3)
N, FIRST = 80, 26


Estimator = Callable[[Call], tx.Estimate]


def value_of(estimator: Estimator, matrix: Any, reduce: Callable[[Any], Reduce]) -> Any:
    call = begin("test", two_leaves(matrix), KEY, 20)
    return flatten(estimator(call.reading(reduce(call.operator))).value)


def slope(
    estimator: Estimator, matrix: Any, weights: Any, reduce: Callable[[Any], Reduce]
) -> Any:
    def loss(matrix: Any) -> Any:
        return jnp.sum(weights * value_of(estimator, matrix, reduce)).real

    return jax.grad(loss)(matrix)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [estimate_by_xdiag, xdiag_or_hutchinson])
def test_a_diagonal_is_read_leaf_by_leaf_and_as_a_trace(estimator: Estimator) -> None:
    """The same probes: values and slopes are sums of those of the diagonal."""
    matrix = hermitian(1 / np.arange(1.0, N + 1), float) + 0.1 * general(N, float)
    diagonal = value_of(estimator, matrix, by_row)
    sums = jnp.stack([jnp.sum(diagonal[:FIRST]), jnp.sum(diagonal[FIRST:])])
    weights = jnp.array([0.3, -1.7])
    every = jnp.repeat(weights, jnp.array([FIRST, N - FIRST]), total_repeat_length=N)
    for reduce, want in ((by_leaf, sums), (lambda _: TOTAL, jnp.sum(sums))):
        close(value_of(estimator, matrix, reduce), want, 1e-12)
    got = slope(estimator, matrix, weights, by_leaf)
    close(got, slope(estimator, matrix, every, by_row), 1e-11)


DEGREES = {"hutchinson_trace": 5 / 3, "hutchpp_trace": 3 / 3, "xtrace": 5, "xnystrace": 9}
DEGREES |= {"hutchinson_diagonal": 5, "xdiag": 5, "custom_trace": 5, "laplacian": 5 / 3}
DEGREES |= {"function_trace": 10 / 3, "slq_trace": 3 / 3, "function_diagonal": 3}


@pytest.mark.slow
def test_degrees_of_freedom() -> None:
    """One less than there are probes; of independent quadratic forms, which are skewed, a
    third of that, and of those of a Krylov space two thirds."""
    found = {}

    def record(key: Any, name: str) -> Any:
        estimate = CALLS[name](jnp.eye(len(MATRIX)), key)
        found[name] = estimate.degrees_of_freedom
        return estimate.value

    for name in DEGREES:
        jax.eval_shape(partial(record, name=name), KEY)
    assert found == pytest.approx(DEGREES)
