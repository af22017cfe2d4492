"""How a block of vectors goes through a function that is written for one vector.

A block is n x k, and its vectors are columns. The multiplications of two tall blocks, which
follow every matvec, take three times as long if the vectors are rows. The matvecs have
three layouts: all columns at once, all rows at once, or a loop. When a program is traced,
the operations of one matvec decide between them (measured by `tests.benchmarks.layouts`):

- Stored matrices: as rows, 50 vectors take 0.65 to 0.85 of the time that they take as
  columns, and 5 vectors take 1.6 times as long. So many vectors are rows, few are columns.
- Shifts (`jnp.roll`, which joins two pieces), alone or in the steps of a solver: the
  batched program asks for each entry in which piece it lies, and takes 2 to 4 times as long
  as one vector after the other. A loop over vectors of few entries saves no time.
- Gathered and scattered entries, as in sparse matrices: the loop takes half of the time if
  the block does not fit into the cache, and 1.5 times as long if it does.
- Everything else, for example a network, takes one batch of columns, because a loop would
  read its matrices k times.

There are no loops on accelerators, where small kernels are slow, nor for sharded arrays.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxtyping import Array, Inexact

ApplyOne = Callable[[Inexact[Array, " n"]], Inexact[Array, " p"]]
Block = Inexact[Array, "n k"]
Images = Inexact[Array, "p k"]

MANY_COLUMNS = 32  # from so many vectors on, a stored matrix is applied to rows
SHIFTED, SCATTERED = 50_000, 1_000_000  # from so many entries of a block on, it is a loop

_PRODUCTS = {"dot_general", "conv_general_dilated", "triangular_solve", "bcsr_dot_general"}
_SHIFTS = {"concatenate"}
_SCATTERS = {"gather", "scatter", "scatter-add", "scatter_add", "bcoo_dot_general"}


class Layout(enum.Enum):
    """A tag that says how a block of vectors goes through an operator.

    Without such a tag, traceax chooses a layout from the operations of a matvec, its size
    and the platform. This choice is rarely wrong by much. Values depend on the layout only
    by rounding errors.

    - `COLUMNS`: `jax.vmap` over the last axis.
    - `ROWS`: `jax.vmap` over the first axis.
    - `LOOP`: `jax.lax.map`, one vector after the other. Operators without `jax.vmap` need
      it, for example operators that call `jax.pure_callback` without a `vmap_method`.

    Transposed and composed operators do not inherit the tag. Tag them again with
    `lx.TaggedLinearOperator`.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> laplacian = lambda v: 2 * v - jax.numpy.roll(v, 1) - jax.numpy.roll(v, -1)
        >>> tags = (lx.positive_semidefinite_tag, tx.Layout.LOOP)
        >>> operator = tx.as_operator(laplacian, 500, tags=tags)
        >>> estimate = tx.hutchinson_trace(operator, jax.random.key(0), 30)
        >>> bool(abs(estimate.value - 1000) < 60)
        True

    **See also**: `as_operator`.
    """

    COLUMNS = "columns"
    ROWS = "rows"
    LOOP = "loop"


def through(apply: ApplyOne, block: Block, layout: Layout | None) -> Images:
    """Apply a function of one vector to each column, in this layout or the fastest one."""
    if block.shape[1] == 1:
        # A batch of one costs transpositions if the caller batches, too: a third of the
        # time of a flow's gradient.
        return apply(block[:, 0])[:, None]
    try:
        match layout or _fastest(apply, block):
            case Layout.COLUMNS:
                return jax.vmap(apply, in_axes=1, out_axes=1)(block)
            case Layout.ROWS:
                return jax.vmap(apply)(block.T).T
            case Layout.LOOP:
                return jax.lax.map(apply, block.T).T
    except NotImplementedError as error:
        if not any(words in str(error) for words in ("vmap_method", "Batching rule")):
            raise
        raise NotImplementedError(
            "traceax applies an operator to a block of vectors by jax.vmap, but got one "
            f"that has no jax.vmap: {error} Pass vmap_method to jax.pure_callback, or tag "
            "the operator with traceax.Layout.LOOP, for one vector after the other."
        ) from error


def through_matrix(apply: ApplyOne, block: Block, layout: Layout | None) -> Images:
    """Do so for a stored matrix. The barriers keep the compiler from transposing it."""
    layout = layout or (Layout.ROWS if block.shape[1] >= MANY_COLUMNS else Layout.COLUMNS)
    kept = jax.lax.optimization_barrier
    if layout is Layout.ROWS:
        return kept(jax.vmap(apply)(kept(block.T))).T
    return kept(through(apply, kept(block), layout))


def _fastest(apply: ApplyOne, block: Block) -> Layout:
    if block.size < SHIFTED or jax.default_backend() != "cpu" or _is_sharded(block):
        return Layout.COLUMNS
    program = jax.make_jaxpr(apply)(jax.ShapeDtypeStruct(block.shape[:1], block.dtype))
    operations = set(_operations(program.jaxpr))
    if operations & _PRODUCTS or any(map(_is_sharded, program.consts)):
        return Layout.COLUMNS
    scatters = operations & _SCATTERS and block.size >= SCATTERED
    return Layout.LOOP if scatters or operations & _SHIFTS else Layout.COLUMNS


def _is_sharded(array: Any) -> bool:
    """Return whether the array is computed from arrays on a mesh of devices."""
    return jax.typeof(jnp.asarray(array)).sharding.mesh.size > 1


def _operations(program: Jaxpr | ClosedJaxpr) -> Iterator[str]:
    """List the names of all operations that return arrays, also inside other operations."""
    for equation in program.eqns:
        if any(getattr(out.aval, "ndim", 0) for out in equation.outvars):
            yield equation.primitive.name
        for inner in inner_jaxprs(equation):
            yield from _operations(inner)


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Any]:
    """List the jaxprs among the parameters of an operation, closed or not."""
    return filter(is_jaxpr, jax.tree.leaves(equation.params, is_leaf=is_jaxpr))


def held_arrays(equation: JaxprEqn) -> Iterator[Any]:
    """List the arrays that the jaxprs inside an operation hold."""
    for inner in inner_jaxprs(equation):
        yield from getattr(inner, "consts", ())
        for each in inner.eqns:
            yield from held_arrays(each)
