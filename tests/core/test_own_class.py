"""Operators of a class of one's own, which has told lineax little or nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tx
from tests.helpers import close, nightly, refused, slow
from tests.matrices import hermitian, spectrum
from tests.wrappers import NEEDED, PSD, Plain
from traceax.testing import check_operator

N = 70
KEY = jax.random.key(4)


class WithDiagonal(Plain):
    """It knows its diagonal."""


lx.diagonal.register(WithDiagonal, lambda operator: jnp.diagonal(operator.matrix))

MATRIX = hermitian(spectrum("poly", N))
SLOW = ["trace", "logdet", "function_diagonal"]
REST = ["diagonal", "na_hutchpp_trace", "frobenius_norm_squared", "leaf_traces"]
REST += ["inv_quad_logdet", "schatten_norm"]
ARGUMENTS = {"inv_quad_logdet": [jnp.ones(N)], "function_diagonal": [jnp.exp]}
ARGUMENTS["schatten_norm"] = [1]


@pytest.mark.parametrize("name", ["xdiag", *map(slow, SLOW), *map(nightly, REST)])
def test_what_a_class_does_not_answer_is_no(name: str) -> None:
    """They raised lineax's NotImplementedError, one question after the other. In a sum and
    in a product lineax itself asks."""

    def value(operator: Any) -> Any:
        args = ARGUMENTS.get(name, [])
        found = getattr(tx, name)(operator, *args, key=KEY, num_matvecs=40)
        return found.inv_quad.value if name == "inv_quad_logdet" else found.value

    want = value(tx.as_operator(lambda v: MATRIX @ v, N))
    zero = tx.as_operator(lambda v: 0 * v, N)
    plain = Plain(MATRIX)
    for operator in (plain, lx.TaggedLinearOperator(plain, ()), plain + zero):
        close(value(operator), want, 1e-9, float(jnp.max(jnp.abs(want))))


def test_a_registered_diagonal_is_exact_without_matvecs() -> None:
    """Alone, tagged, scaled and added to one that is stored; and it is differentiated."""
    own, stored = WithDiagonal(MATRIX), lx.DiagonalLinearOperator(jnp.ones(N))
    tagged = lx.TaggedLinearOperator(own, PSD)
    for operator, factor in ((own, 1), (tagged, 1), (own * 2.0, 2)):
        estimate = tx.trace(operator + stored, KEY, 20)
        assert estimate.num_matvecs == estimate.standard_error == 0
        close(estimate.value, factor * jnp.trace(MATRIX) + N, 1e-12)
    diagonal = tx.diagonal(own, KEY, 20)
    assert diagonal.num_matvecs == 0
    close(diagonal.value, jnp.diagonal(MATRIX), 1e-12)
    gradient = jax.grad(lambda m: tx.trace(WithDiagonal(m), KEY, 20).value)(MATRIX)
    close(gradient, jnp.eye(N), 1e-12)


def test_missing_answers_are_listed() -> None:
    missing = check_operator(WithDiagonal(MATRIX), KEY)
    assert missing["is_diagonal"] == "it is taken as no"
    assert "conj" in missing
    assert not missing.keys() & {"diagonal", *(question.__name__ for question in NEEDED)}
    words = r"\(operator=.*got a Plain that is not"
    refused(ValueError, words, tx.xnystrace, Plain(MATRIX), KEY, 20)


@pytest.mark.slow
def test_missing_answers_inside_a_sum_and_those_that_seem_true_are_listed() -> None:
    inside = check_operator(2.0 * Plain(jnp.eye(N)) + lx.MatrixLinearOperator(MATRIX), KEY)
    assert "diagonal" in inside
    alone = check_operator(Plain(jnp.eye(N)), KEY)
    assert alone["is_diagonal"].endswith("seems to be true: register it")
    assert not check_operator(lx.MatrixLinearOperator(MATRIX), KEY)
    words = "(?s)Plain fails.*lx.conj: must be registered, because the operator is complex"
    refused(AssertionError, words, check_operator, Plain(MATRIX.astype(complex)), KEY)
