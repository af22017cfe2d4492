"""f(A) as an operator, by Lanczos, for estimators that apply it."""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PyTree

from traceax._core.operator import (
    LinearMap,
    Structure,
    flatten,
    unflatten,
    working_dtype,
)
from traceax._core.rule import settled
from traceax._linalg.krylov import lanczos
from traceax._quadrature.dense import columns, decompose
from traceax._quadrature.scalar import Flat


class FunctionOfOperator(lx.AbstractLinearOperator):
    """f(A) v ~ |v| Q f(T) e_1, of `num_steps` applications of A; real f, Hermitian A.

    Its derivative in A is that of the recurrence.
    """

    operator: lx.AbstractLinearOperator
    fn: Flat
    num_steps: int = eqx.field(static=True)

    def mv(self, vector: PyTree[Array]) -> PyTree[Array]:
        column = flatten(vector, working_dtype(self.operator))
        subject = (LinearMap(self.operator), self.fn, column)
        apply = partial(_apply, num_steps=self.num_steps)
        value = apply(subject, differentiable=False)
        value = settled(value, partial(apply, differentiable=True), subject)
        return unflatten(value, self.operator.out_structure())

    def as_matrix(self) -> Inexact[Array, "n n"]:
        return LinearMap(self).dense()

    def transpose(self) -> FunctionOfOperator:
        return FunctionOfOperator(self.operator.transpose(), self.fn, self.num_steps)

    def in_structure(self) -> Structure:
        return self.operator.in_structure()

    def out_structure(self) -> Structure:
        return self.operator.out_structure()


def _apply(
    subject: tuple[LinearMap, Flat, Array], *, num_steps: int, differentiable: bool
) -> Inexact[Array, " n"]:
    linear_map, fn, column = subject
    krylov = lanczos(linear_map, column[None], num_steps, differentiable=differentiable)
    projection = krylov.projection[0]
    eigen = jax.lax.stop_gradient(decompose(projection))
    coordinates = columns(fn, projection, eigen, count=1)[0, :, 0]
    return krylov.length[0] * (coordinates @ krylov.basis[0])


@lx.conj.register(FunctionOfOperator)
def _(operator: FunctionOfOperator) -> FunctionOfOperator:
    return FunctionOfOperator(lx.conj(operator.operator), operator.fn, operator.num_steps)


def _is_real(operator: FunctionOfOperator) -> bool:
    return not jnp.issubdtype(working_dtype(operator.operator), jnp.complexfloating)


lx.linearise.register(FunctionOfOperator, lambda operator: operator)
lx.is_symmetric.register(FunctionOfOperator, _is_real)
for question in (
    lx.is_diagonal,
    lx.is_tridiagonal,
    lx.is_lower_triangular,
    lx.is_upper_triangular,
    lx.is_positive_semidefinite,
    lx.is_negative_semidefinite,
    lx.has_unit_diagonal,
):
    question.register(FunctionOfOperator, lambda _: False)
