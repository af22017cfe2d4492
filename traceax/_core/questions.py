"""What lineax asks about operators, and answers for classes that do not give them.

lineax raises an error at each question that the class of an operator has not registered,
also if it is inside a sum or a product. `Answering` wraps an operator of such a class: a
question that is not answered has the answer no, and a real operator is its own conjugate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact

from traceax._core.vectors import common_dtype

TAGS: dict[Any, object] = {
    lx.is_symmetric: lx.symmetric_tag,
    lx.is_diagonal: lx.diagonal_tag,
    lx.is_tridiagonal: lx.tridiagonal_tag,
    lx.is_lower_triangular: lx.lower_triangular_tag,
    lx.is_upper_triangular: lx.upper_triangular_tag,
    lx.is_positive_semidefinite: lx.positive_semidefinite_tag,
    lx.is_negative_semidefinite: lx.negative_semidefinite_tag,
    lx.has_unit_diagonal: lx.unit_diagonal_tag,
}
_LIBRARIES = "lineax", "traceax"
_OTHERS = lx.conj, lx.diagonal, lx.linearise, lx.materialise, lx.tridiagonal


def answer(kind: type, tags: Callable[[Any], Collection[object]]) -> None:
    """Answer lineax's questions about the operators of a class by their tags. They are
    linear already, and their matrix and its bands are in `as_matrix`."""
    for question, tag in TAGS.items():
        question.register(kind, lambda operator, tag=tag: tag in tags(operator))
    stored = lambda operator: lx.MatrixLinearOperator(operator.as_matrix(), tags(operator))  # noqa: E731
    lx.materialise.register(kind, stored)
    lx.tridiagonal.register(kind, lambda operator: lx.tridiagonal(stored(operator)))
    lx.linearise.register(kind, lambda operator: operator)


def is_own(node: Any) -> bool:
    """Return whether it is an operator of a class of one's own."""
    library = type(node).__module__.partition(".")[0]
    return isinstance(node, lx.AbstractLinearOperator) and library not in _LIBRARIES


def missing(operator: lx.AbstractLinearOperator) -> list[Any]:
    """Return the functions of lineax for which the class has registered nothing."""
    nothing = lambda f: f.dispatch(type(operator)) is f.dispatch(object)  # noqa: E731
    return list(filter(nothing, (*TAGS, *_OTHERS)))


def class_name(operator: lx.AbstractLinearOperator) -> str:
    """Return the name of the class that the user knows."""
    return type(operator.operator if isinstance(operator, Answering) else operator).__name__


class Answering(lx.TaggedLinearOperator):
    """An operator of a class that has not registered all functions of lineax.

    It is tagged with the answers that the class gives.
    """

    def __init__(self, operator: lx.AbstractLinearOperator) -> None:
        given = TAGS.keys() - missing(operator)
        super().__init__(operator, [TAGS[asked] for asked in given if asked(operator)])

    def transpose(self) -> Answering:
        return Answering(self.operator.transpose())


answer(Answering, lambda wrapped: wrapped.tags)


@lx.conj.register(Answering)
def _(wrapped: Answering) -> Answering:
    operator = wrapped.operator
    is_real = jnp.issubdtype(common_dtype(operator.in_structure()), jnp.floating)
    is_own_conjugate = is_real and lx.conj in missing(operator)
    return wrapped if is_own_conjugate else Answering(lx.conj(operator))


@lx.diagonal.register(Answering)
def _(wrapped: Answering) -> Inexact[Array, " n"]:
    if lx.diagonal not in missing(wrapped.operator):
        return lx.diagonal(wrapped.operator)
    return jnp.diagonal(wrapped.as_matrix())
