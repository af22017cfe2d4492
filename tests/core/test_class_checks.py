"""Operators of a class of one's own: what lineax must be told, line by line."""

import re
from collections.abc import Callable
from typing import Any

import jax
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, hermitian
from traceax.testing import check_operator

KEY = jax.random.key(0)
N = 70
MATRIX = jax.numpy.asarray(hermitian(1.0 + np.arange(N)))


class Shape(lx.AbstractLinearOperator):
    """All that lineax demands of a class, but for what it asks by dispatch."""

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


def new_class(*told: Any, symmetric: bool = False) -> Any:
    """lineax asks for symmetry, and up to the first yes, when an operator is made."""
    metaclass: Any = type(Shape)
    own = metaclass("Own", (Shape,), {"__module__": __name__})
    lx.is_symmetric.register(own, lambda _: symmetric)
    for question in told:
        question.register(own, lambda _: False)
    return own


TOLD = (lx.is_positive_semidefinite, lx.is_negative_semidefinite)
CALLS: dict[str, Callable[[Any], tx.Estimate]] = {
    "trace": lambda a: tx.trace(a, KEY, 20),
    "xtrace": lambda a: tx.xtrace(a, KEY, 20),
    "hutchinson_trace": lambda a: tx.hutchinson_trace(a, KEY, 20),
    "diagonal": lambda a: tx.diagonal(a, KEY, 20),
    "xdiag": lambda a: tx.xdiag(a, KEY, 20),
    "row_norms_squared": lambda a: tx.row_norms_squared(a, KEY, 20),
    "leaf_traces": lambda a: tx.leaf_traces(a, KEY, 20),
    "function_trace": lambda a: tx.function_trace(a, jax.numpy.sin, KEY, 20),
    "function_diagonal": lambda a: tx.function_diagonal(
        a, jax.numpy.sin, KEY, num_probes=4, num_steps=5
    ),
    "schatten_norm": lambda a: tx.schatten_norm(a, 1, KEY, num_probes=4, num_steps=5),
    "logdet": lambda a: tx.logdet(a, KEY, 20),
}


@pytest.mark.parametrize("name", CALLS)
def test_who_says_only_symmetric_is_told_the_lines_to_write(name: str) -> None:
    own = new_class(symmetric=True)
    for operator in (own(MATRIX), lx.TaggedLinearOperator(own(MATRIX), ())):
        with pytest.raises(NotImplementedError) as caught:
            CALLS[name](operator)
        words = str(caught.value)
        assert words.startswith(f"traceax.{name}(operator=...) must be of a class that")
        assert "got Own, for which lineax.is_positive_semidefinite is not reg" in words


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("trace", "is_diagonal"),
        ("diagonal", "is_diagonal"),
        ("leaf_traces", "is_diagonal"),
        ("function_trace", "is_diagonal"),
        ("function_diagonal", "is_diagonal"),
        ("schatten_norm", "is_diagonal"),
        ("logdet", "is_diagonal"),
        ("xdiag", "conj"),
        ("row_norms_squared", "conj"),
        ("xtrace", None),
        ("hutchinson_trace", None),
    ],
)
def test_only_what_is_asked_must_be_told(name: str, question: str | None) -> None:
    operator = new_class(*TOLD)(MATRIX)
    if question is None:
        assert CALLS[name](operator).num_matvecs == 20
        return
    words = rf"traceax\.{name}.*got Own, for which lineax\.{question} is not registered"
    with pytest.raises(NotImplementedError, match=words):
        CALLS[name](operator)


def test_the_lines_are_the_cure() -> None:
    """They are run as they are shown."""
    own = new_class(*TOLD)
    with pytest.raises(NotImplementedError) as caught:
        tx.trace(own(MATRIX), KEY, 20)
    lines = str(caught.value).split("below the class:\n")[1]
    exec(re.sub("(?m)^    ", "", lines), {"lx": lx, "Own": own})
    structure = jax.ShapeDtypeStruct((N,), MATRIX.dtype)
    same = lx.FunctionLinearOperator(lambda v: MATRIX @ v, structure)
    for call in CALLS.values():
        close(call(own(MATRIX)).value, call(same).value, 1e-12)
    check_operator(own(MATRIX), KEY)  # with what else lineax may ask left open


def test_check_operator_tells_too() -> None:
    own = new_class(symmetric=True)
    with pytest.raises(NotImplementedError, match=r"check_operator.*not registered"):
        check_operator(own(MATRIX), KEY)


def test_errors_of_a_registered_rule_are_its_own() -> None:
    own = new_class(symmetric=True)

    def undecided(operator: Any) -> bool:
        raise NotImplementedError("nobody knows")

    lx.is_positive_semidefinite.register(own, undecided)
    with pytest.raises(NotImplementedError, match="nobody knows"):
        tx.xtrace(own(MATRIX), KEY, 20)
