"""What estimators ask of operators, and blocks of vectors that go through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from traceax._core.canonical import (
    Canonical,
    canonical,
    strongly_typed,
    varying,
    varying_axes,
)
from traceax._core.layout import Block, Images, Layout, through, through_matrix
from traceax._core.questions import TAGS, Answering, is_own, missing
from traceax._core.sparse import SparseOperator, own_pattern
from traceax._core.vectors import common_dtype, flatten, in_rows, unflatten

Tree = TypeVar("Tree", bound=PyTree)
Operator = lx.AbstractLinearOperator


def working_dtype(operator: Operator) -> jnp.dtype:
    """Return the dtype of blocks of vectors: one that holds every leaf."""
    return common_dtype((operator.in_structure(), operator.out_structure()))


def canonicalise(module: Tree) -> Tree:
    """Return the operator, or other module, with strongly typed leaves and with functions
    in canonical form. The functions inside a tangent stay as they are."""

    def with_canonical_function(node: Any) -> Any:
        if isinstance(node, lx.FunctionLinearOperator | lx.JacobianLinearOperator):
            is_jacobian = isinstance(node, lx.JacobianLinearOperator)
            args = (node.x, node.args) if is_jacobian else (node.in_structure(),)
            return eqx.tree_at(lambda op: op.fn, node, canonical(node.fn, *args))
        return Answering(node) if is_silent(node) else node

    kinds = (lx.FunctionLinearOperator, lx.JacobianLinearOperator, lx.TangentLinearOperator)
    is_leaf = lambda node: isinstance(node, (*kinds, Answering)) or is_silent(node)  # noqa: E731
    return jax.tree.map(with_canonical_function, strongly_typed(module), is_leaf=is_leaf)


def is_silent(node: Any) -> bool:
    """Return whether it is an operator that does not answer all questions of lineax."""
    return is_own(node) and bool(missing(node))


def jacobian(fn: Any, x: Any, args: Any, tags: Any = (), jac: Any = None) -> Operator:
    """Return the Jacobian of `fn(x, args)` in x. It is not closure-converted by lineax,
    which inside `jax.shard_map` cannot convert every `fn`."""
    code = canonical(fn, x, args)
    return lx.JacobianLinearOperator(code, x, args, tags, jac, closure_convert=False)


def frozen(module: Tree) -> Tree:
    """Return the pytree with constant leaves, whose derivative is zero."""
    inexact, rest = eqx.partition(module, eqx.is_inexact_array)
    return eqx.combine(jax.lax.stop_gradient(inexact), rest)


# Rounding errors of numbers that are finer than this are rarely seen.
DOUBLE = 1e-10


class LinearMap(eqx.Module):
    """An operator, p x n, as a map of n x k blocks: one matvec for each column.

    If it is `checked`, two matvecs measure the noise of matvecs (`eps_of`). A float32
    operator may compute in TF32 or bfloat16 inside, or end a solve at a tolerance, and its
    dtype does not show it.

    If it `reads_real`, the numbers that are estimated are real if the operator is
    Hermitian, as the trace is. Entries off the diagonal are not."""

    operator: Operator
    checked: bool = eqx.field(static=True, default=False)
    reads_real: bool = eqx.field(static=True, default=True)

    def __call__(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "p k"]:
        if jnp.iscomplexobj(block) and jnp.issubdtype(self.dtype, jnp.floating):
            return jax.lax.complex(self(block.real), self(block.imag))
        return _apply(self.operator, block)

    def dense(self) -> Inexact[Array, "p n"]:
        """Return the matrix, as it is stored or computed column by column."""
        if stores_matrix(self.operator):
            return self.operator.as_matrix().astype(self.dtype)
        return self(jnp.eye(self.operator.in_size(), dtype=self.dtype))

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of blocks."""
        return working_dtype(self.operator)

    @property
    def eps(self) -> float:
        """The relative rounding error of a matvec, as its dtypes show it: eps of the
        coarsest leaf."""
        spaces = self.operator.in_structure(), self.operator.out_structure()
        return max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(spaces))

    def eps_of(self, probes: Block, images: Images) -> Float[Array, ""]:
        """Return the relative error of a form w* A w, which is at least rounding.

        `images` are A Omega. The asymmetry of Omega* A Omega shows the noise of a Hermitian
        operator. If the operator is `checked`, two more matvecs compare A Omega c with
        (A Omega) c. Each of both sums up the noise of all probes, because the noise of a
        single matvec may be zero by chance. The error of a matvec is taken to have no
        preferred direction, so that the error of a form is smaller by the root of n."""
        (n, k), dtype = probes.shape, probes.real.dtype
        scale = jnp.max(jnp.abs(images))
        scale = jnp.where(scale > 0, scale, 1).astype(images.dtype)
        found = jnp.zeros((), dtype)
        if self.is_hermitian and k > 1:
            # What is short is divided: A Omega / scale would be one block more in memory.
            core = jnp.matmul(probes.conj().T, images, precision="highest") / scale
            found = jnp.linalg.norm(core - core.conj().T) / (k - 1) ** 0.5
        if self.checked:
            turns = np.cos(np.outer(np.arange(k), [1, 2]))
            turns = jnp.asarray(turns / np.linalg.norm(turns, axis=0), probes.dtype)
            product = partial(jnp.matmul, precision="highest")
            change = (self(product(probes, turns)) - product(images, turns)) / scale
            found = jnp.maximum(found, jnp.linalg.norm(change) * (k / 2) ** 0.5)
        size = jnp.linalg.norm(images / scale) * n**0.5
        noise = jax.lax.stop_gradient(2 * found / jnp.where(size > 0, size, 1))
        least = float(jnp.finfo(dtype).eps) if self.checked else self.eps
        return jnp.maximum(noise, jnp.asarray(least, dtype))

    @property
    def is_hermitian(self) -> bool:
        return is_hermitian(self.operator)

    @property
    def at_rest(self) -> LinearMap:
        """The identity with the same tags, for what depends on the space of A alone."""
        identity = canonical(lambda v: v, self.operator.in_structure())
        return replace(self, operator=by_application(self.operator, identity))

    @property
    def adjoint(self) -> LinearMap:
        """The conjugate transpose. A Hermitian operator is its own."""
        if self.is_hermitian:
            return self
        return replace(self, operator=lx.conj(self.operator).transpose())


def _apply(operator: Operator, block: Inexact[Array, "n k"]) -> Inexact[Array, "p k"]:
    """Apply an operator to each column of a block that is real if the operator is.

    Sparse matrices, alone or plus a diagonal, take the block as a whole (`_core.sparse`).
    All other operators take one vector at a time, and `_core.layout` says in which order.
    """
    structure, dtype = operator.in_structure(), working_dtype(operator)
    layout = layout_tag(operator)

    def apply(column: Inexact[Array, " n"]) -> Inexact[Array, " p"]:
        return flatten(operator.mv(unflatten(column, structure)), dtype)

    match untagged(operator):
        case SparseOperator() as bare:
            return bare.times(block.astype(bare.data.dtype)).astype(dtype)
        case lx.AddLinearOperator() as bare if own_pattern(bare) is not None:
            return _apply(bare.operator1, block) + _apply(bare.operator2, block)
        case lx.MatrixLinearOperator():
            return through_matrix(apply, block, layout)
        case lx.JacobianLinearOperator() as bare:  # a tangent has to vary as its point does
            block = varying(block, varying_axes(bare))
    return through(apply, block, layout)


# lineax answers questions about a TangentLinearOperator by the tags of its primal. But the
# tangent of a positive semidefinite operator need not be positive semidefinite. So no tag
# counts if there is a tangent anywhere inside an operator.


def _says(question: Callable[[Any], bool], operator: Operator) -> bool:
    return question(operator) and not _has_tangent(operator)


is_positive = partial(_says, lx.is_positive_semidefinite)
is_negative = partial(_says, lx.is_negative_semidefinite)


def is_semidefinite(operator: Operator) -> bool:
    return is_positive(operator) or is_negative(operator)


def is_hermitian(operator: Operator) -> bool:
    is_real = jnp.issubdtype(working_dtype(operator), jnp.floating)
    return (is_real and _says(lx.is_symmetric, operator)) or is_semidefinite(operator)


def _has_tangent(operator: Operator) -> bool:
    is_tangent = lambda node: isinstance(node, lx.TangentLinearOperator)  # noqa: E731
    return any(map(is_tangent, jax.tree.leaves(operator, is_leaf=is_tangent)))


def layout_tag(operator: Operator) -> Layout | None:
    """Return the layout among its tags, or among the tags of the operator inside it."""
    layouts = (tag for tag in getattr(operator, "tags", ()) if isinstance(tag, Layout))
    inner = getattr(operator, "operator", None)
    return next(layouts, layout_tag(inner) if inner is not None else None)


def application(operator: Operator) -> Canonical:
    """Return one matvec, v -> A v, in canonical form."""
    return canonical(canonicalise(operator).mv, operator.in_structure())


def by_application(operator: Operator, code: Canonical) -> Operator:
    """Return the operator that `code` applies, with the tags of `operator`."""
    asked = lx.is_symmetric, lx.is_positive_semidefinite, lx.is_negative_semidefinite
    tags = [TAGS[question] for question in asked if _says(question, operator)]
    tags += filter(None, [layout_tag(operator)])
    structure = operator.in_structure()
    return lx.FunctionLinearOperator(code, structure, tags, closure_convert=False)


def known_diagonal(operator: Operator) -> tuple[Inexact[Array, " n"], int] | None:
    """Return the exact diagonal and the number of matvecs that it costs, or `None` if the
    structure of the operator does not give it."""
    dtype = working_dtype(operator)
    if _consists_of(operator, _stores_diagonal) and not _has_tangent(operator):
        with jax.numpy_dtype_promotion("standard"):  # lineax has I in default precision
            diagonal = lx.diagonal(operator).astype(dtype)
            return in_rows(diagonal, operator.in_structure(), jnp), 0
    if _says(lx.is_diagonal, operator):
        return LinearMap(operator)(jnp.ones((operator.in_size(), 1), dtype))[:, 0], 1
    return None


def gram(operator: Operator) -> Operator:
    """Return B* B or B B*, whichever acts on the smaller space."""
    operator = canonicalise(operator)
    adjoint = canonicalise(LinearMap(operator).adjoint.operator)
    wide = operator.out_size() < operator.in_size()
    gram = operator @ adjoint if wide else adjoint @ operator
    return lx.TaggedLinearOperator(gram, lx.positive_semidefinite_tag)


def untagged(operator: Operator) -> Operator:
    while isinstance(operator, lx.TaggedLinearOperator):
        operator = operator.operator
    return operator


def stores_matrix(operator: Any) -> bool:
    """Return whether the entries of the operator are stored."""
    return _consists_of(operator, lambda part: isinstance(part, _STORED))


_DENSE = lx.MatrixLinearOperator, lx.PyTreeLinearOperator
_BANDED = lx.DiagonalLinearOperator, lx.TridiagonalLinearOperator, lx.IdentityLinearOperator
_STORED = (*_DENSE, *_BANDED, SparseOperator)


def _stores_diagonal(part: Any) -> bool:
    """Return whether lineax knows the diagonal without a matvec: it is stored, or a class
    from outside lineax has registered it."""
    return isinstance(part, _STORED) or (is_own(part) and lx.diagonal not in missing(part))


def _consists_of(operator: Any, holds: Callable[[Any], bool]) -> bool:
    """Return whether something holds for each operator that is tagged, scaled or added."""
    match operator:
        case lx.AddLinearOperator(operator1=one, operator2=other):
            return _consists_of(one, holds) and _consists_of(other, holds)
        case lx.TaggedLinearOperator(operator=inner) | lx.NegLinearOperator(operator=inner):
            return _consists_of(inner, holds)
        case lx.MulLinearOperator(operator=inner) | lx.DivLinearOperator(operator=inner):
            return _consists_of(inner, holds)
    return holds(operator)
