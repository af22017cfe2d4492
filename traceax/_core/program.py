"""Operators taken apart, into code and arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import Array, PyTree

from traceax._core.code import fingerprint, first_of_equals
from traceax._core.coded import are_here
from traceax._core.operator import (
    Structure,
    is_hermitian,
    is_negative,
    is_positive,
    prepare,
    stores_matrix,
    working_dtype,
)


class Program(NamedTuple):
    """An operator taken apart, into its code and the arrays in it: its own, and whatever
    else its code refers to. Functions that are traced twice are not equal, so the code is
    no part of a state, but a hash of it is."""

    arrays: list[Array]
    code: Jaxpr
    num_own: int
    fingerprint: Array

    def with_arrays(
        self, arrays: list[Array], structure: Structure, tags: frozenset = frozenset()
    ) -> lx.AbstractLinearOperator:
        own, constants = arrays[: self.num_own], arrays[self.num_own :]
        run = jaxpr_as_fun(ClosedJaxpr(self.code, constants))

        def apply(vector: PyTree[Array]) -> PyTree[Array]:
            results = run(*own, *jax.tree.leaves(vector))
            return jax.tree.unflatten(jax.tree.structure(structure), results)

        return lx.FunctionLinearOperator(apply, structure, tags)


def program_of(operator: lx.AbstractLinearOperator) -> Program:
    own, rest = eqx.partition(prepare(operator), eqx.is_array)

    def apply(own: Any, vector: PyTree[Array]) -> PyTree[Array]:
        return eqx.combine(own, rest).mv(vector)

    code = jax.make_jaxpr(apply)(own, operator.in_structure())
    own = jax.tree.leaves(own)
    digest = fingerprint(code.jaxpr)
    arrays = [*own, *map(jnp.asarray, code.consts)]
    jaxpr = first_of_equals(code.jaxpr, digest) if are_here(arrays) else code.jaxpr
    words = jnp.asarray(np.frombuffer(digest, np.uint32))
    return Program(arrays, jaxpr, len(own), words)


def by_program(
    operator: lx.AbstractLinearOperator, program: Program
) -> lx.AbstractLinearOperator:
    """The operator, applied by code that may have been compiled for an equal one before."""
    if stores_matrix(operator):
        return operator
    kinds = {
        lx.symmetric_tag: is_hermitian(operator) and not _is_complex(operator),
        lx.positive_semidefinite_tag: is_positive(operator),
        lx.negative_semidefinite_tag: is_negative(operator),
    }
    tags = frozenset(tag for tag, holds in kinds.items() if holds)
    return program.with_arrays(program.arrays, operator.in_structure(), tags)


def _is_complex(operator: lx.AbstractLinearOperator) -> bool:
    return jnp.issubdtype(working_dtype(operator), jnp.complexfloating)
