"""What messages and the guide advise can be done as it stands."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import pytest
from jax.experimental.sparse import BCOO

import traceax as tx
from tests.helpers import close

KEY = jax.random.key(4)
GUIDE = Path(__file__).parents[2] / "notebooks/site/docs/guide/good_to_know.md"


def test_a_sparse_matrix_is_wrapped_as_the_message_says() -> None:
    dense = jnp.diag(jnp.arange(1.0, 71.0), 0).at[0, 3].set(2.0)
    matrix: Any = BCOO.fromdense(dense)
    with pytest.raises(TypeError, match="got BCOO") as caught:
        tx.trace(matrix, KEY)
    (advice,) = re.findall(r"a sparse matrix as (lx\..+)\.$", str(caught.value))
    operator = eval(advice, {"lx": lx, "jax": jax, "matrix": matrix})
    close(tx.trace(operator, KEY, 70).value, jnp.trace(dense), 1e-14)


def test_a_matrix_is_wrapped_as_the_message_says() -> None:
    matrix: Any = jnp.arange(9.0).reshape(3, 3)
    with pytest.raises(TypeError) as caught:
        tx.trace(matrix, KEY)
    (advice,) = re.findall(r"a matrix as (lx\..+?),", str(caught.value))
    assert tx.trace(eval(advice, {"lx": lx, "matrix": matrix}), KEY).value == 12


@pytest.mark.parametrize("throw", [True, False])
def test_solvers_that_do_not_converge_are_as_the_guide_says(throw: bool) -> None:
    """`throw=False` silences the value, not the gradient."""
    told = " ".join(GUIDE.read_text().split())
    assert "raises lineax's error, in the value as in the gradient" in told
    assert "with `throw=False` in the gradient alone" in told
    matrix = jnp.diag(jnp.linspace(1.0, 100.0, 20)) + 0.1

    def value(scale: Any) -> Any:
        operator = lx.MatrixLinearOperator(scale * matrix, lx.positive_semidefinite_tag)
        solver = lx.CG(1e-10, 1e-10, max_steps=3)
        inverse = lx.invert(operator, solver, throw=throw)
        return tx.hutchinson_trace(inverse, KEY, 2).value

    if throw:
        with pytest.raises(Exception, match="maximum number of solver steps"):
            jax.block_until_ready(value(1.0))
    else:
        assert jnp.isfinite(value(1.0))
    with pytest.raises(Exception, match="maximum number of solver steps"):
        jax.block_until_ready(jax.grad(value)(1.0))
