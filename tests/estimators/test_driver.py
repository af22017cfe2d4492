"""The driver: one method read in several ways."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.calls import CALLS, MATRIX
from tests.helpers import close, slow
from tests.matrices import general, hermitian
from tests.tables import flatten
from tests.wrappers import two_leaves
from traceax._estimators.driver import Method, estimate
from traceax._estimators.readouts import LEAVES, TRACE
from traceax._estimators.second_batch import EITHER_DIAGONAL
from traceax._estimators.xdiag import XDIAG

KEY = jax.random.key(3)
N, FIRST = 80, 26


def slope(method: Method, matrix: Any, weights: Any) -> Any:
    def loss(matrix: Any) -> Any:
        value = estimate(method, two_leaves(matrix), KEY, 20).value
        return jnp.sum(weights * flatten(value)).real

    return jax.grad(loss)(matrix)


@pytest.mark.parametrize("method", [slow(XDIAG), EITHER_DIAGONAL], ids=lambda m: m.name)
def test_a_diagonal_is_read_leaf_by_leaf_and_as_a_trace(method: Method) -> None:
    """The same probes: values and slopes are sums of those of the diagonal."""
    matrix = hermitian(1 / np.arange(1.0, N + 1), float) + 0.1 * general(N, float)
    operator = two_leaves(matrix)
    diagonal = flatten(estimate(method, operator, KEY, 20).value)
    sums = jnp.stack([jnp.sum(diagonal[:FIRST]), jnp.sum(diagonal[FIRST:])])
    weights = jnp.array([0.3, -1.7])
    every = jnp.repeat(weights, jnp.array([FIRST, N - FIRST]), total_repeat_length=N)
    for target, want in ((LEAVES, sums), (TRACE, jnp.sum(sums))):
        value = estimate(method._replace(target=target), operator, KEY, 20).value
        close(flatten(value), want, 1e-12)
    got = slope(method._replace(target=LEAVES), matrix, weights)
    close(got, slope(method, matrix, every), 1e-11)


DEGREES = {"hutchinson_trace": 5 / 3, "hutchpp_trace": 3 / 3, "xtrace": 5, "xnystrace": 9}
DEGREES |= {"hutchinson_diagonal": 5, "xdiag": 5, "custom_trace": 5, "laplacian": 5 / 3}
DEGREES |= {"function_trace": 10 / 3, "slq_trace": 3 / 3, "function_diagonal": 3}


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
