"""Everything that the library asks of lineax."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from traceax._core.canonical import Canonical, canonical
from traceax._core.layout import Layout, through, through_matrix

Module = TypeVar("Module", bound=eqx.Module)
Structure = PyTree[jax.ShapeDtypeStruct]


def dimension(structure: Structure) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(structure))


def size(operator: lx.AbstractLinearOperator) -> int:
    """The dimension n of the space that an operator acts on."""
    return dimension(operator.in_structure())


def _spaces(operator: lx.AbstractLinearOperator) -> tuple[Structure, Structure]:
    return operator.in_structure(), operator.out_structure()


def common_dtype(structure: Structure | PyTree[Array]) -> jnp.dtype:
    """One that holds every leaf, but at least 32 bits wide."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(structure)]
    low = [jnp.finfo(dtype).bits < 32 for dtype in dtypes]
    pairs = zip(dtypes, low, strict=True)
    return np.result_type(*(np.float32 if is_low else dtype for dtype, is_low in pairs))


def working_dtype(operator: lx.AbstractLinearOperator) -> jnp.dtype:
    """The dtype of blocks."""
    return common_dtype(_spaces(operator))


def resolution(operator: lx.AbstractLinearOperator) -> float:
    """The relative rounding error of one application: eps of the coarsest leaf."""
    leaves = jax.tree.leaves(_spaces(operator))
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in leaves)


def prepare(operator: Module) -> Module:
    """The same operator, or other module, with inexact leaves strongly typed JAX arrays,
    and its functions in canonical form.

    Under an eager `jax.grad(f)(1.3)` a derivative rule would be handed the bare Python
    float, of which a closure-converted operator cannot make an application.
    """

    def strong(leaf: Any) -> Any:
        array = isinstance(leaf, np.ndarray | jax.Array)
        if array and jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.lax.convert_element_type(leaf, leaf.dtype)
        return leaf

    kinds = (lx.FunctionLinearOperator, lx.JacobianLinearOperator, lx.TangentLinearOperator)

    def with_canonical_function(node: Any) -> Any:
        match node:
            case lx.FunctionLinearOperator():
                fn = canonical(node.fn, node.in_structure())
            case lx.JacobianLinearOperator():
                fn = canonical(node.fn, node.x, node.args)
            case _:
                return node
        return eqx.tree_at(lambda op: op.fn, node, fn)

    def is_leaf(node: Any) -> bool:
        return isinstance(node, kinds)

    operator = jax.tree.map(strong, operator)
    return jax.tree.map(with_canonical_function, operator, is_leaf=is_leaf)


def frozen(module: Module) -> Module:
    """The same module as a constant."""
    inexact, rest = eqx.partition(module, eqx.is_inexact_array)
    return eqx.combine(jax.lax.stop_gradient(inexact), rest)


def flatten(vector: PyTree[Array], dtype: jnp.dtype) -> Inexact[Array, " n"]:
    """One vector of the operator's space, as a column."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(vector)]
    leaves = [leaf if leaf.ndim == 1 else jnp.ravel(leaf) for leaf in leaves]
    leaves = [leaf.astype(dtype) for leaf in leaves]
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves)


def unflatten(column: Inexact[Array, " n"], structure: Structure) -> PyTree[Array]:
    """The inverse of `flatten`, rounded to the leaves' own dtypes."""
    leaves, treedef = jax.tree.flatten(structure)
    ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])[:-1].tolist()
    parts = jnp.split(column, ends) if ends else [column]
    pairs = zip(parts, leaves, strict=True)
    leaves = [_rounded(part, leaf.dtype).reshape(leaf.shape) for part, leaf in pairs]
    return jax.tree.unflatten(treedef, leaves)


def _rounded(part: Array, dtype: jnp.dtype) -> Array:
    is_real = not jnp.issubdtype(dtype, jnp.complexfloating)
    return (part.real if is_real and jnp.iscomplexobj(part) else part).astype(dtype)


def cut(rows: Inexact[Array, "k n"], structure: Structure) -> PyTree[Array]:
    """Vectors of a space, each leaf with a leading axis, from rows."""
    return jax.vmap(lambda row: unflatten(row, structure))(rows)


def as_columns(vectors: PyTree[Array], dtype: jnp.dtype) -> Inexact[Array, "n k"]:
    """The inverse of `cut`, but as columns."""
    return jax.vmap(lambda vector: flatten(vector, dtype), out_axes=1)(vectors)


def as_result(column: Inexact[Array, " n"], structure: Structure) -> PyTree[Array]:
    """A diagonal in the shape of the space: leaves in their own dtypes, but of at least 32
    bits, and real if the column is."""

    def result(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dtype = common_dtype(leaf)
        dtype = dtype if jnp.iscomplexobj(column) else jnp.finfo(dtype).dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return unflatten(column, jax.tree.map(result, structure))


class LinearMap(eqx.Module):
    """An operator, p x n, as a map of n x k blocks, one application a column."""

    operator: lx.AbstractLinearOperator

    def __call__(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "p k"]:
        return _apply(self.operator, block)

    def dense(self) -> Inexact[Array, "p n"]:
        """The matrix: as it is stored, or column by column."""
        dtype = working_dtype(self.operator)
        if stores_matrix(self.operator):
            return self.operator.as_matrix().astype(dtype)
        return self(jnp.eye(size(self.operator), dtype=dtype))

    @property
    def is_hermitian(self) -> bool:
        return is_hermitian(self.operator)

    @property
    def adjoint(self) -> LinearMap:
        """The conjugate transpose; a Hermitian operator is its own."""
        if self.is_hermitian:
            return self
        return LinearMap(lx.conj(self.operator).transpose())


def _apply(
    operator: lx.AbstractLinearOperator, block: Inexact[Array, "n k"]
) -> Inexact[Array, "p k"]:
    structure = operator.in_structure()
    dtype = working_dtype(operator)
    if jnp.iscomplexobj(block) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(_apply(operator, block.real), _apply(operator, block.imag))

    def apply(column: Inexact[Array, " n"]) -> Inexact[Array, " p"]:
        return flatten(operator.mv(unflatten(column, structure)), dtype)

    layout = layout_wished(operator)
    if _is_dense(operator):
        return through_matrix(apply, block, layout)
    return through(apply, block, layout)


# What the tags promise. lineax answers for the primal of a TangentLinearOperator: the
# tangent of a positive semidefinite operator need not be one. So a tangent anywhere
# inside an operator voids every promise.


def is_hermitian(operator: lx.AbstractLinearOperator) -> bool:
    if _has_tangent(operator):
        return False
    real = not jnp.issubdtype(working_dtype(operator), jnp.complexfloating)
    symmetric = real and lx.is_symmetric(operator)
    return symmetric or is_positive(operator) or is_negative(operator)


def is_positive(operator: lx.AbstractLinearOperator) -> bool:
    return lx.is_positive_semidefinite(operator) and not _has_tangent(operator)


def is_negative(operator: lx.AbstractLinearOperator) -> bool:
    return lx.is_negative_semidefinite(operator) and not _has_tangent(operator)


def _has_tangent(operator: lx.AbstractLinearOperator) -> bool:
    def is_tangent(node: object) -> bool:
        return isinstance(node, lx.TangentLinearOperator)

    return any(map(is_tangent, jax.tree.leaves(operator, is_leaf=is_tangent)))


def layout_wished(operator: lx.AbstractLinearOperator) -> Layout | None:
    """Of its tags, or those of what it is a tagged or scaled form of."""
    wishes = (tag for tag in getattr(operator, "tags", ()) if isinstance(tag, Layout))
    inner = getattr(operator, "operator", None)
    return next(wishes, layout_wished(inner) if inner is not None else None)


def application(operator: lx.AbstractLinearOperator) -> Canonical:
    """One application."""
    return canonical(prepare(operator).mv, operator.in_structure())


def by_application(
    operator: lx.AbstractLinearOperator, code: Canonical
) -> lx.AbstractLinearOperator:
    """What `code` applies, with the operator's promises and its wish."""
    promises = {
        lx.symmetric_tag: lx.is_symmetric,
        lx.positive_semidefinite_tag: is_positive,
        lx.negative_semidefinite_tag: is_negative,
    }
    kept = [] if _has_tangent(operator) else promises.items()
    layout = layout_wished(operator)
    tags = [tag for tag, holds in kept if holds(operator)] + ([layout] if layout else [])
    structure = operator.in_structure()
    return lx.FunctionLinearOperator(code, structure, tags, closure_convert=False)


def known_diagonal(
    operator: lx.AbstractLinearOperator,
) -> tuple[Inexact[Array, " n"], int] | None:
    """The exact diagonal and its price in applications, where structure gives it."""
    dtype = working_dtype(operator)
    if _has_tangent(operator):
        return None
    if stores_matrix(operator):
        return lx.diagonal(operator).astype(dtype), 0
    if lx.is_diagonal(operator):
        return LinearMap(operator)(jnp.ones((size(operator), 1), dtype))[:, 0], 1
    return None


def gram(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """B* B or B B*, whichever acts on the smaller space."""
    operator = prepare(operator)
    adjoint = LinearMap(operator).adjoint.operator
    wide = dimension(operator.out_structure()) < size(operator)
    gram = operator @ adjoint if wide else adjoint @ operator
    return lx.TaggedLinearOperator(gram, lx.positive_semidefinite_tag)


def _is_dense(operator: lx.AbstractLinearOperator) -> bool:
    while isinstance(operator, lx.TaggedLinearOperator):
        operator = operator.operator
    return isinstance(operator, lx.MatrixLinearOperator)


def stores_matrix(operator: lx.AbstractLinearOperator) -> bool:
    """Whether its entries are there to be looked up."""
    match operator:
        case (
            lx.MatrixLinearOperator()
            | lx.PyTreeLinearOperator()
            | lx.DiagonalLinearOperator()
            | lx.IdentityLinearOperator()
            | lx.TridiagonalLinearOperator()
        ):
            return True
        case (
            lx.TaggedLinearOperator()
            | lx.NegLinearOperator()
            | lx.MulLinearOperator()
            | lx.DivLinearOperator()
        ):
            return stores_matrix(operator.operator)
        case lx.AddLinearOperator():
            return stores_matrix(operator.operator1) and stores_matrix(operator.operator2)
        case _:
            return False
