"""Code that is the same, though it was traced twice.

JAX knows a compiled loop by the identity of its body, and a function that is traced anew
has a new one: a `scan` in an operator that is made at every step of a training loop is
compiled at every step. So the first of several equal codes stands for all of them.

Equal text is not enough: in it a rule for derivatives, or a constant inside of a jitted
function, is only a name. Codes are equal if their equations are, one by one: the same
operations of the same variables with equal parameters. What is neither code nor made of
parameters that compare is the same only if it is the very same object.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal


def first_of_equals(code: Jaxpr, fingerprint: bytes) -> Jaxpr:
    """`fingerprint`: equal for equal codes."""
    return _first(_Code(code, fingerprint))


def fingerprint(code: Jaxpr) -> bytes:
    """Equal for equal codes, and, but for rules of derivatives, for no others."""
    text = re.sub("0x[0-9a-f]+", "", str(code))  # addresses of functions
    inside = map(_bits, filter(_is_here, _constants_inside(code)))
    return hashlib.sha256(b"".join([text.encode(), *inside])).digest()


def _constants_inside(code: Jaxpr) -> Iterator[Any]:
    """What jitted functions in it close over, which is no part of its text."""
    for equation in code.eqns:
        for value in jax.tree.leaves(list(equation.params.values())):
            if isinstance(value, ClosedJaxpr):
                yield from value.consts
                yield from _constants_inside(value.jaxpr)
            elif isinstance(value, Jaxpr):
                yield from _constants_inside(value)


def _is_here(constant: Any) -> bool:
    if isinstance(constant, Tracer):
        return False
    return getattr(constant, "is_fully_addressable", True)  # or spread over processes


def _bits(constant: Any) -> bytes:
    if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
        constant = jax.random.key_data(constant)
    return np.asarray(constant).tobytes()


class _Code:
    """Compared by what it does."""

    def __init__(self, jaxpr: Jaxpr, fingerprint: bytes) -> None:
        self.jaxpr, self.fingerprint = jaxpr, fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Code) or self.fingerprint != other.fingerprint:
            return False
        return _same_code(self.jaxpr, other.jaxpr)


@lru_cache(maxsize=128)
def _first(code: _Code) -> Jaxpr:
    return code.jaxpr


def _same_code(one: Jaxpr, other: Jaxpr) -> bool:
    if len(one.eqns) != len(other.eqns) or one.effects or other.effects:
        return False
    names: dict[Any, Any] = {}
    return (
        _bind(names, [*one.constvars, *one.invars], [*other.constvars, *other.invars])
        and all(map(partial(_same_step, names), one.eqns, other.eqns))
        and _same_atoms(names, one.outvars, other.outvars)
    )


def _same_step(names: dict[Any, Any], one: JaxprEqn, other: JaxprEqn) -> bool:
    return (
        one.primitive is other.primitive
        and one.params.keys() == other.params.keys()
        and _same_atoms(names, one.invars, other.invars)
        and all(_same(value, other.params[key]) for key, value in one.params.items())
        and _same(getattr(one, "ctx", None), getattr(other, "ctx", None))
        and _bind(names, one.outvars, other.outvars)
    )


def _bind(names: dict[Any, Any], ones: list[Any], others: list[Any]) -> bool:
    """New variables of one stand for those of the other, if they are of equal types."""
    names.update(zip(ones, others, strict=False))
    types = [var.aval for var in ones], [var.aval for var in others]
    return types[0] == types[1]


def _same_atoms(names: dict[Any, Any], ones: list[Any], others: list[Any]) -> bool:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Literal):
            return isinstance(other, Literal) and _same_literal(one, other)
        return names[one] is other

    return len(ones) == len(others) and all(map(same, ones, others))


def _same_literal(one: Literal, other: Literal) -> bool:
    """Bit by bit: 0.0 is not -0.0."""
    alike = type(one.val) is type(other.val) and one.aval == other.aval
    return alike and np.asarray(one.val).tobytes() == np.asarray(other.val).tobytes()


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    match one:
        case ClosedJaxpr():
            consts = [id(const) for const in one.consts]
            same_consts = consts == [id(const) for const in other.consts]
            return same_consts and _same_code(one.jaxpr, other.jaxpr)
        case Jaxpr():
            return _same_code(one, other)
        case tuple() | list():
            return len(one) == len(other) and all(map(_same, one, other))
        case float() | complex():
            return repr(one) == repr(other)
    try:
        return (one == other) is True
    except Exception:
        return False
