"""Operators: all calls of lineax."""

from __future__ import annotations

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, Inexact

from traceax._core.canonical import Canonical, canonical
from traceax._core.layout import Layout, through, through_matrix
from traceax._core.sparse import SparseOperator, own_pattern
from traceax._core.vectors import common_dtype, flatten, in_leaves, unflatten

Module = TypeVar("Module", bound=eqx.Module)
Operator = lx.AbstractLinearOperator


def working_dtype(operator: Operator) -> jnp.dtype:
    """The dtype of blocks of vectors."""
    return common_dtype((operator.in_structure(), operator.out_structure()))


def unit_roundoff(operator: Operator) -> float:
    """The relative rounding error of one application: eps of the coarsest leaf."""
    leaves = jax.tree.leaves((operator.in_structure(), operator.out_structure()))
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in leaves)


def canonicalise(module: Module) -> Module:
    """The same operator, or other module, with inexact leaves as strongly typed JAX arrays
    and with its functions in canonical form.

    Under an eager `jax.grad(f)(1.3)` a derivative rule would get the bare Python float, and
    a closure-converted operator cannot be applied with it.
    """

    def strong(leaf: Any) -> Any:
        array = isinstance(leaf, np.ndarray | jax.Array)
        if array and jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.lax.convert_element_type(leaf, leaf.dtype)
        return leaf

    def with_canonical_function(node: Any) -> Any:
        match node:
            case lx.FunctionLinearOperator():
                fn = canonical(node.fn, node.in_structure())
            case lx.JacobianLinearOperator():
                fn = canonical(node.fn, node.x, node.args)
            case _:
                return node
        return eqx.tree_at(lambda op: op.fn, node, fn)

    kinds = (lx.FunctionLinearOperator, lx.JacobianLinearOperator, lx.TangentLinearOperator)
    module = jax.tree.map(strong, module)
    is_leaf = lambda node: isinstance(node, kinds)  # noqa: E731
    return jax.tree.map(with_canonical_function, module, is_leaf=is_leaf)


def jacobian_operator(fn: Any, x: Any, args: Any, tags: Any = ()) -> Operator:
    """That of `fn(x, args)`. Inside of `jax.shard_map` lineax cannot convert every `fn`."""
    code = canonical(fn, x, args)
    return lx.JacobianLinearOperator(code, x, args, tags, closure_convert=False)


def frozen(module: Module) -> Module:
    """The same module with constant leaves: their derivative is zero."""
    inexact, rest = eqx.partition(module, eqx.is_inexact_array)
    return eqx.combine(jax.lax.stop_gradient(inexact), rest)


# Of numbers that are finer than this, rounding errors are rarely seen.
DOUBLE = 1e-10


class LinearMap(eqx.Module):
    """An operator, p x n, as a map of n x k blocks: one application for each column.

    `noise` is what `measured` found: a float32 operator may compute in TF32 or bfloat16
    inside, or end a solve at a tolerance, which its dtype does not show."""

    operator: Operator
    noise: Float[Array, ""] | None = None

    def __call__(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "p k"]:
        return _apply(self.operator, block)

    def dense(self) -> Inexact[Array, "p n"]:
        """The matrix, stored or computed column by column."""
        if stores_matrix(self.operator):
            return self.operator.as_matrix().astype(self.dtype)
        return self(jnp.eye(self.operator.in_size(), dtype=self.dtype))

    @property
    def dtype(self) -> jnp.dtype:
        """That of blocks."""
        return working_dtype(self.operator)

    @property
    def eps(self) -> Any:
        """The relative error of a form w* A w: a float, the rounding error of a matvec; or
        an array, its noise if that was measured, but at least the rounding of sums."""
        if self.noise is None:
            return unit_roundoff(self.operator)
        return jnp.maximum(self.noise, float(jnp.finfo(self.dtype).eps))

    def measured(self, vector: Inexact[Array, " n"]) -> LinearMap:
        """The same with its noise, by two matvecs: A(1.37 x)/1.37 is A x but for rounding.
        (A power of two would show nothing.) The error of a matvec has no preferred
        direction, so that of a form is smaller than its length by the root of n."""
        factors = jnp.array([1, 1.37], vector.real.dtype).astype(vector.dtype)
        one, other = (self(vector[:, None] * factors[None, :]) / factors[None, :]).T
        scale = jnp.max(jnp.abs(one))
        scale = jnp.where(scale > 0, scale, 1).astype(one.dtype)
        size, error = map(jnp.linalg.norm, (one / scale, (one - other) / scale))
        noise = 2 * error / jnp.where(size > 0, size, 1) / vector.size**0.5
        return LinearMap(self.operator, jax.lax.stop_gradient(noise))

    @property
    def is_hermitian(self) -> bool:
        return is_hermitian(self.operator)

    @property
    def is_read_real(self) -> bool:
        """Whether what is estimated of it is real."""
        return self.is_hermitian

    @property
    def adjoint(self) -> LinearMap:
        """The conjugate transpose; a Hermitian operator is its own."""
        if self.is_hermitian:
            return self
        return LinearMap(lx.conj(self.operator).transpose())


def _apply(operator: Operator, block: Inexact[Array, "n k"]) -> Inexact[Array, "p k"]:
    structure = operator.in_structure()
    dtype = working_dtype(operator)
    if jnp.iscomplexobj(block) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(_apply(operator, block.real), _apply(operator, block.imag))

    if isinstance(bare := untagged(operator), SparseOperator):
        return bare.times(block.astype(bare.data.dtype)).astype(dtype)
    if isinstance(bare, lx.AddLinearOperator) and own_pattern(bare) is not None:
        return _apply(bare.operator1, block) + _apply(bare.operator2, block)

    def apply(column: Inexact[Array, " n"]) -> Inexact[Array, " p"]:
        return flatten(operator.mv(unflatten(column, structure)), dtype)

    layout = layout_tag(operator)
    if isinstance(bare, lx.MatrixLinearOperator):
        return through_matrix(apply, block, layout)
    return through(apply, block, layout)


# lineax answers questions about a TangentLinearOperator by the tags of its primal. But the
# tangent of a positive semidefinite operator need not be positive semidefinite. So no tag
# holds if there is a tangent anywhere inside an operator.


def is_hermitian(operator: Operator) -> bool:
    if _has_tangent(operator):
        return False
    real = not jnp.issubdtype(working_dtype(operator), jnp.complexfloating)
    symmetric = real and lx.is_symmetric(operator)
    return symmetric or is_positive(operator) or is_negative(operator)


def is_positive(operator: Operator) -> bool:
    return lx.is_positive_semidefinite(operator) and not _has_tangent(operator)


def is_negative(operator: Operator) -> bool:
    return lx.is_negative_semidefinite(operator) and not _has_tangent(operator)


def _has_tangent(operator: Operator) -> bool:
    is_tangent = lambda node: isinstance(node, lx.TangentLinearOperator)  # noqa: E731
    return any(map(is_tangent, jax.tree.leaves(operator, is_leaf=is_tangent)))


def layout_tag(operator: Operator) -> Layout | None:
    """The layout among its tags, or among those of an operator that it tags or scales."""
    layouts = (tag for tag in getattr(operator, "tags", ()) if isinstance(tag, Layout))
    inner = getattr(operator, "operator", None)
    return next(layouts, layout_tag(inner) if inner is not None else None)


def application(operator: Operator) -> Canonical:
    """One application in canonical form."""
    return canonical(canonicalise(operator).mv, operator.in_structure())


def by_application(operator: Operator, code: Canonical) -> Operator:
    """The operator that `code` applies, with the tags of `operator`."""
    questions = {
        lx.symmetric_tag: lx.is_symmetric,
        lx.positive_semidefinite_tag: is_positive,
        lx.negative_semidefinite_tag: is_negative,
    }
    kept = [] if _has_tangent(operator) else questions.items()
    layout = layout_tag(operator)
    tags = [tag for tag, holds in kept if holds(operator)] + ([layout] if layout else [])
    structure = operator.in_structure()
    return lx.FunctionLinearOperator(code, structure, tags, closure_convert=False)


def known_diagonal(operator: Operator) -> tuple[Inexact[Array, " n"], int] | None:
    """The exact diagonal and the applications that it costs, if the structure gives it."""
    dtype = working_dtype(operator)
    if _has_tangent(operator):
        return None
    if stores_matrix(operator):
        with jax.numpy_dtype_promotion("standard"):  # lineax has I in default precision
            return in_leaves(lx.diagonal(operator), operator.in_structure(), dtype), 0
    if lx.is_diagonal(operator):
        return LinearMap(operator)(jnp.ones((operator.in_size(), 1), dtype))[:, 0], 1
    return None


def gram(operator: Operator) -> Operator:
    """B* B or B B*, whichever acts on the smaller space."""
    operator = canonicalise(operator)
    adjoint = LinearMap(operator).adjoint.operator
    wide = operator.out_size() < operator.in_size()
    gram = operator @ adjoint if wide else adjoint @ operator
    return lx.TaggedLinearOperator(gram, lx.positive_semidefinite_tag)


def untagged(operator: Operator) -> Operator:
    while isinstance(operator, lx.TaggedLinearOperator):
        operator = operator.operator
    return operator


_STORED = (
    lx.MatrixLinearOperator,
    lx.PyTreeLinearOperator,
    lx.DiagonalLinearOperator,
    lx.IdentityLinearOperator,
    lx.TridiagonalLinearOperator,
    SparseOperator,
)
_WRAPPERS = (
    lx.TaggedLinearOperator,
    lx.NegLinearOperator,
    lx.MulLinearOperator,
    lx.DivLinearOperator,
)


def stores_matrix(operator: Any) -> bool:
    """Whether its entries are stored."""
    if isinstance(operator, lx.AddLinearOperator):
        return stores_matrix(operator.operator1) and stores_matrix(operator.operator2)
    if isinstance(operator, _WRAPPERS):
        return stores_matrix(operator.operator)
    return isinstance(operator, _STORED)
