"""Operators taken apart, into code and arrays."""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import Array, PyTree

from traceax._core.operator import Structure, prepare


class Program(NamedTuple):
    """An operator taken apart, into its code and the arrays in it: its own, and whatever
    else its code refers to. Functions that are traced twice are not equal, so the code is
    no part of a state, but a hash of it is."""

    arrays: list[Array]
    code: Jaxpr
    num_own: int
    fingerprint: Array

    def with_arrays(
        self, arrays: list[Array], structure: Structure
    ) -> lx.AbstractLinearOperator:
        own, constants = arrays[: self.num_own], arrays[self.num_own :]
        run = jaxpr_as_fun(ClosedJaxpr(self.code, constants))

        def apply(vector: PyTree[Array]) -> PyTree[Array]:
            results = run(*own, *jax.tree.leaves(vector))
            return jax.tree.unflatten(jax.tree.structure(structure), results)

        return lx.FunctionLinearOperator(apply, structure)


def program_of(operator: lx.AbstractLinearOperator) -> Program:
    own, rest = eqx.partition(prepare(operator), eqx.is_array)

    def apply(own: Any, vector: PyTree[Array]) -> PyTree[Array]:
        return eqx.combine(own, rest).mv(vector)

    code = jax.make_jaxpr(apply)(own, operator.in_structure())
    own = jax.tree.leaves(own)
    text = re.sub("0x[0-9a-f]+", "", str(code.jaxpr))  # addresses of functions
    digest = hashlib.sha256(text.encode()).digest()
    fingerprint = jnp.asarray(np.frombuffer(digest, np.uint32))
    arrays = [*own, *map(jnp.asarray, code.consts)]
    return Program(arrays, code.jaxpr, len(own), fingerprint)
