"""Operators of a class of one's own, which has told lineax little or nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tx
from tests.helpers import cases, close, refused
from tests.matrices import hermitian, spectrum
from tests.wrappers import PSD
from traceax.testing import check_operator

N = 70
KEY = jax.random.key(4)
NEEDED: Any = (lx.is_symmetric, lx.is_positive_semidefinite, lx.is_negative_semidefinite)


class Plain(lx.AbstractLinearOperator):
    """Its abstract methods alone, and what lineax needs to make one."""

    matrix: Any

    def mv(self, vector: Any) -> Any:
        return self.matrix @ vector

    def as_matrix(self) -> Any:
        return self.matrix

    def transpose(self) -> Any:
        return type(self)(self.matrix.T)

    def in_structure(self) -> Any:
        return jax.ShapeDtypeStruct(self.matrix.shape[1:], self.matrix.dtype)

    def out_structure(self) -> Any:
        return jax.ShapeDtypeStruct(self.matrix.shape[:1], self.matrix.dtype)


class WithDiagonal(Plain):
    """It knows its diagonal."""


for question in NEEDED:
    question.register(Plain, lambda operator: False)
lx.diagonal.register(WithDiagonal, lambda operator: jnp.diagonal(operator.matrix))

MATRIX = hermitian(spectrum("poly", N))
CALLS: dict[str, Any] = {
    "trace": lambda a: tx.trace(a, KEY, 20),
    "diagonal": lambda a: tx.diagonal(a, KEY, 20),
    "xdiag": lambda a: tx.xdiag(a, KEY, 20),
    "na_hutchpp_trace": lambda a: tx.na_hutchpp_trace(a, KEY, 20),
    "frobenius_norm_squared": lambda a: tx.frobenius_norm_squared(a, KEY, 20),
    "leaf_traces": lambda a: tx.leaf_traces(a, KEY, 20),
    "logdet": lambda a: tx.logdet(a, KEY, 40),
    "inv_quad_logdet": lambda a: tx.inv_quad_logdet(a, jnp.ones(N), KEY, 40).inv_quad,
    "function_diagonal": lambda a: tx.function_diagonal(a, jnp.exp, KEY, 40),
    "schatten_norm": lambda a: tx.schatten_norm(a, 1, KEY, 40),
}


@pytest.mark.parametrize("name", cases(CALLS, "xdiag"))
def test_what_a_class_does_not_answer_is_no(name: str) -> None:
    """They raised lineax's NotImplementedError, one question after the other. In a sum and
    in a product lineax itself asks."""
    call, want = CALLS[name], CALLS[name](tx.as_operator(lambda v: MATRIX @ v, N)).value
    zero = lx.FunctionLinearOperator(lambda v: 0 * v, jax.ShapeDtypeStruct((N,), float))
    scale = float(jnp.max(jnp.abs(want)))
    for operator in (Plain(MATRIX), lx.TaggedLinearOperator(Plain(MATRIX), ())):
        close(call(operator).value, want, 1e-9, scale)
    close(call(Plain(MATRIX) + zero).value, want, 1e-9, scale)


def test_a_registered_diagonal_is_exact_without_matvecs() -> None:
    """Alone, tagged, scaled and added to one that is stored; and it is differentiated."""
    own, stored = WithDiagonal(MATRIX), lx.DiagonalLinearOperator(jnp.ones(N))
    for operator, factor in (
        (own, 1),
        (lx.TaggedLinearOperator(own, PSD), 1),
        (own * 2.0, 2),
    ):
        estimate = tx.trace(operator + stored, KEY, 20)
        assert estimate.num_matvecs == estimate.standard_error == 0
        close(estimate.value, factor * jnp.trace(MATRIX) + N, 1e-12)
    diagonal = tx.diagonal(own, KEY, 20)
    assert diagonal.num_matvecs == 0
    close(diagonal.value, jnp.diagonal(MATRIX), 1e-12)
    slope = jax.grad(lambda m: tx.trace(WithDiagonal(m), KEY, 20).value)(MATRIX)
    close(slope, jnp.eye(N), 1e-12)


def test_missing_answers_are_listed() -> None:
    missing = check_operator(WithDiagonal(MATRIX), KEY)
    assert missing["is_diagonal"] == "it is taken as no"
    assert "conj" in missing
    assert not missing.keys() & {"diagonal", *(question.__name__ for question in NEEDED)}
    inside = check_operator(2.0 * Plain(jnp.eye(N)) + lx.MatrixLinearOperator(MATRIX), KEY)
    assert "diagonal" in inside
    alone = check_operator(Plain(jnp.eye(N)), KEY)
    assert alone["is_diagonal"].endswith("seems to be true: register it")
    assert not check_operator(lx.MatrixLinearOperator(MATRIX), KEY)
    words = "(?s)Plain fails.*lx.conj: must be registered, because the operator is complex"
    refused(AssertionError, words, check_operator, Plain(MATRIX.astype(complex)), KEY)
    words = r"\(operator=.*got a Plain that is not"
    refused(ValueError, words, tx.xnystrace, Plain(MATRIX), KEY, 20)
