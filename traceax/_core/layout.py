"""In which layout a block goes through what is made for one vector.

Blocks are columns, n x k: products of two tall blocks, which come after every application,
take three times as long on rows. The application itself has three ways, and one of them is
chosen when the program is traced, by what one application does. Measured on two cores,
n = 1000 to 10^6, k = 5 to 100, float32 and float64 (`tests.benchmarks.layouts`), with the
transpositions that a way needs:

- Stored matrices: as rows 50 columns take 0.65 (float32) to 0.85 of the time, 100 take 0.8,
  but five 1.6 times as long; if the compiler is kept from turning the product round.
- Shifts (`jnp.roll`, which joins two pieces), alone or in the steps of a solver: the
  batched program asks for each entry in which piece it lies, and takes 2 to 4 times as long
  as one row after the other. Of few entries a loop has no time to win.
- Gathered and scattered entries, sparse matrices among them: the loop takes half of the
  time once the block does not fit into the cache, and 1.5 times as long before.
- All else, elementwise, padded, transformed by FFT, products of matrices, networks: as one
  batch, and as columns; rows make no difference, and a loop reads a matrix k times.

On an accelerator, where small kernels in sequence are fatal, there are no loops; nor for
what is spread over devices.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Array, Inexact

from traceax._core.jaxprs import inner_jaxprs

Apply = Callable[[Inexact[Array, " n"]], Inexact[Array, " p"]]

# From so many columns on, a stored matrix is applied to rows.
MANY_COLUMNS = 32
# From so many entries of a block on, its rows go one after the other.
SHIFTED, SCATTERED = 50_000, 1_000_000

_PRODUCTS = {"dot_general", "conv_general_dilated", "triangular_solve", "bcsr_dot_general"}
_SHIFTS = {"concatenate"}
_SCATTERS = {"gather", "scatter", "scatter-add", "scatter_add", "bcoo_dot_general"}


class Layout(enum.Enum):
    """How a block of vectors goes through an operator: one of the operator's tags.

    Without a tag traceax chooses by what an application does, its size and the platform,
    and is rarely wrong by much. Values do not depend on it, except for rounding.

    - `COLUMNS`: `jax.vmap` over the last axis.
    - `ROWS`: `jax.vmap` over the first.
    - `LOOP`: `jax.lax.map`, one vector after the other.

    Transposed and composed operators do not inherit it: tag them by
    `lx.TaggedLinearOperator`.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> structure = jax.ShapeDtypeStruct((500,), jax.numpy.float32)
        >>> def second_difference(v):
        ...     return 2 * v - jax.numpy.roll(v, 1) - jax.numpy.roll(v, -1)
        >>> tags = (lx.positive_semidefinite_tag, tx.Layout.LOOP)
        >>> operator = lx.FunctionLinearOperator(second_difference, structure, tags)
        >>> estimate = tx.hutchinson_trace(operator, jax.random.key(0), 30)
        >>> bool(abs(estimate.value - 1000) < 60)
        True
    """

    COLUMNS = "columns"
    ROWS = "rows"
    LOOP = "loop"


def through(
    apply: Apply, block: Inexact[Array, "n k"], layout: Layout | None
) -> Inexact[Array, "p k"]:
    """`apply` to each column of a block, laid out as it is wished, or as it is best."""
    if block.shape[1] == 1:
        # A batch of one costs transposes where the caller batches, too: a third of the
        # time of a flow's gradient.
        return apply(block[:, 0])[:, None]
    match layout or _best(apply, block):
        case Layout.COLUMNS:
            return jax.vmap(apply, in_axes=1, out_axes=1)(block)
        case Layout.ROWS:
            return jax.vmap(apply)(block.T).T
        case Layout.LOOP:
            return jax.lax.map(apply, block.T).T


def through_matrix(
    apply: Apply, block: Inexact[Array, "n k"], layout: Layout | None
) -> Inexact[Array, "p k"]:
    """The same, of a stored matrix: which the compiler turns round where it may."""
    many = block.shape[1] >= MANY_COLUMNS
    layout = layout or (Layout.ROWS if many else Layout.COLUMNS)
    kept = jax.lax.optimization_barrier
    if layout is Layout.ROWS:
        return kept(jax.vmap(apply)(kept(block.T))).T
    return kept(through(apply, kept(block), layout))


def _best(apply: Apply, block: Inexact[Array, "n k"]) -> Layout:
    if block.size < SHIFTED or jax.default_backend() != "cpu" or _is_spread(block):
        return Layout.COLUMNS
    column = jax.ShapeDtypeStruct(block.shape[:1], block.dtype)
    program = jax.make_jaxpr(apply)(column)
    if any(map(_is_spread, program.consts)):
        return Layout.COLUMNS
    done = set(_operations(program.jaxpr))
    if done & _PRODUCTS:
        return Layout.COLUMNS
    scatters = done & _SCATTERS and block.size >= SCATTERED
    return Layout.LOOP if scatters or done & _SHIFTS else Layout.COLUMNS


def _is_spread(array: Any) -> bool:
    """Whether it is computed from arrays on a mesh of devices."""
    return jax.typeof(jnp.asarray(array)).sharding.mesh.size > 1


def _operations(program: Jaxpr | ClosedJaxpr) -> Iterator[str]:
    """The names of all, also of what is inside loops, branches and compiled functions."""
    for equation in program.eqns:
        # An inner product is none.
        if any(getattr(out.aval, "ndim", 0) for out in equation.outvars):
            yield equation.primitive.name
        for inner in inner_jaxprs(equation):
            yield from _operations(inner)
