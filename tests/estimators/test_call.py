"""The degrees of freedom of every estimator."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import traceax as tx
from tests.calls import CALLS, MATRIX
from tests.helpers import cases
from tests.wrappers import function

DEGREES = {"hutchinson_trace": 5 / 3, "hutchpp_trace": 3 / 3, "xtrace": 5, "xnystrace": 9}
DEGREES |= {"hutchinson_diagonal": 5, "xdiag": 5, "custom_trace": 5, "laplacian": 5 / 3}
DEGREES |= {"function_trace": 10 / 3, "slq_trace": 3 / 3, "function_diagonal": 3}


DEGREES |= {"trace, general": 9, "diagonal, general": 9}
QUICK = ("hutchinson_trace", "xnystrace", "hutchinson_diagonal", "trace, general")


@pytest.mark.parametrize("name", cases(DEGREES, *QUICK))
def test_degrees_of_freedom(name: str) -> None:
    """One less than there are probes; of independent quadratic forms, which are skewed, a
    third of that, and of those of a Krylov space two thirds."""
    found, (name, _, is_general) = [], name.partition(", ")

    def record(key: Any) -> Any:
        eye = jnp.eye(len(MATRIX))
        if is_general:
            estimate = getattr(tx, name)(function(eye), key, 20)
        else:
            estimate = CALLS[name](eye, key)
        found.append(estimate.degrees_of_freedom)
        return estimate.value

    jax.eval_shape(record, jax.random.key(3))
    assert found == pytest.approx([DEGREES[f"{name}{', general' * bool(is_general)}"]])
