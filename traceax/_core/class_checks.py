"""Checks of operator classes that users write: what lineax must have been told of them."""

from __future__ import annotations

from typing import Any

import jax
import lineax as lx

from traceax._core.operator import is_hermitian

# lineax itself asks these where an operator is made, up to the first yes.
_ALWAYS = (
    lx.is_symmetric,
    lx.is_positive_semidefinite,
    lx.is_negative_semidefinite,
)
_LINES = """
    for question in (lx.is_symmetric, lx.is_positive_semidefinite,
                     lx.is_negative_semidefinite, lx.is_diagonal):
        question.register({name}, lambda operator: False)  # True where it holds
    lx.conj.register({name}, lambda operator: operator)  # if it is real
"""
_BY_STRUCTURE = ("trace", "diagonal", "leaf_traces", "logdet", "inv_quad_logdet")
_BY_STRUCTURE += ("function_trace", "function_diagonal", "schatten_norm")
"""Functions that look for a known diagonal, too."""

_BY_ADJOINT = ("na_hutchpp_trace", "xdiag", "diagpp", "diagonal", "leaf_traces")
_BY_ADJOINT += ("schatten_norm", "row_norms_squared", "frobenius_norm_squared")
"""Those that apply the adjoint of what is not known to be Hermitian."""


def check_answers(name: str, operator: lx.AbstractLinearOperator) -> None:
    """lineax asks classes by `functools.singledispatch`, and has no default."""
    questions = _ALWAYS + ((lx.is_diagonal,) if name in _BY_STRUCTURE else ())
    for question in questions:
        try:
            question(operator)
        except NotImplementedError:
            _refuse(name, question, operator)
            raise
    if name in _BY_ADJOINT and not is_hermitian(operator):
        _refuse(name, lx.conj, operator)


def _refuse(name: str, question: Any, operator: lx.AbstractLinearOperator) -> None:
    """If there is a class that it is not registered for."""
    own = _class_without(question, operator)
    if own is not None:
        raise NotImplementedError(
            f"traceax.{name}(operator=...) must be of a class that lineax knows, because "
            "tags and structure choose the algorithm, but got "
            f"{own.__name__}, for which lineax.{question.__name__} is not registered. "
            f"Write once, below the class:\n{_LINES.format(name=own.__name__)}"
        )


def _class_without(question: Any, operator: lx.AbstractLinearOperator) -> type | None:
    """It may be inside of one of lineax's."""
    unasked = question.dispatch(object)

    def is_unknown(node: object) -> bool:
        is_operator = isinstance(node, lx.AbstractLinearOperator)
        return is_operator and question.dispatch(type(node)) is unasked

    nodes = jax.tree.leaves(operator, is_leaf=is_unknown)
    return next((type(node) for node in nodes if is_unknown(node)), None)
