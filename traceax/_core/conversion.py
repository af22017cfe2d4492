"""From what people have to an operator."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Inexact, PyTree

from traceax._core.checks import invalid
from traceax._core.operator import Operator
from traceax._core.sparse import Pattern, SparseOperator, is_of_jax, places_of, table

NAME = "as_operator"


def as_operator(matrix: Any, structure: Any = None, *, tags: Any = ()) -> Operator:
    """Make a lineax operator of a matrix, dense or sparse, or of a function v -> A v.

    Sparse matrices are stored for blocks of vectors: traces on a CPU are 2.8 to 5 times as
    fast as with a BCOO, 1.6 to 2.3 with gradients, also where a few rows are long. They are
    differentiable in their data. Trace and diagonal are known without a product, `logdet`
    and `function_trace` need no `pattern`, and lineax's `+`, `*` and `@` compose them.

    **Arguments**

    - `matrix`: an n x n array of NumPy or JAX, a sparse matrix of SciPy in any format, a
      BCOO or a BCSR; integers become floats. Where a sparse matrix has entries must be
      concrete; its data may be traced. Or a function; or an operator, as it is.
    - `structure`: of a function, the space of its vectors: an int n, for vectors of floats;
      an example of a vector; or a pytree of `jax.ShapeDtypeStruct`s.
    - `tags`: lineax's, `lx.positive_semidefinite_tag` say. They are not verified.

    **Returns** an `lx.AbstractLinearOperator`. **Cost**: of a sparse matrix, a sort on the
    host; memory of about four integers for each entry, two if it is tagged symmetric.

    **Example**

        >>> import jax, scipy.sparse, traceax as tx
        >>> operator = tx.as_operator(scipy.sparse.eye_array(9, k=1))
        >>> print(operator.mv(jax.numpy.arange(9.0)))
        [1. 2. 3. 4. 5. 6. 7. 8. 0.]

    **Reference**: the storage is derived in `traceax/_core/sparse.py`; Monakov, Lokhmotov
    and Avetisyan (2010), doi:10.1007/978-3-642-11515-8_10, for tables of slices.
    """
    if isinstance(matrix, Operator):
        return lx.TaggedLinearOperator(matrix, tags) if tags else matrix
    library = type(matrix).__module__.split(".")[0]
    if is_of_jax(matrix) or hasattr(matrix, "tocoo"):
        return _sparse(matrix, tags)
    if hasattr(matrix, "matvec") or library in ("torch", "networkx", "pandas"):
        raise _no_matrix(matrix, library)
    if callable(matrix):
        return lx.FunctionLinearOperator(matrix, _space(structure), tags)
    if not isinstance(matrix, np.ndarray | jax.Array | list | tuple):
        raise _no_matrix(matrix, library)
    array = matrix if isinstance(matrix, jax.Array) else np.asarray(matrix)
    _check_square(array.shape)
    return lx.MatrixLinearOperator(_inexact(array), tags)


def _sparse(matrix: Any, tags: Any) -> SparseOperator:
    _check_square(matrix.shape)
    data, rows, columns = _entries(matrix)
    several = isinstance(tags, list | tuple | set | frozenset)
    n, tagged = matrix.shape[0], frozenset(tags if several else [tags])
    real = {lx.positive_semidefinite_tag, lx.negative_semidefinite_tag}
    same = {lx.symmetric_tag} | (set() if jnp.iscomplexobj(data) else real)
    symmetric = not same.isdisjoint(tagged)
    forwards = table(rows, columns, n)
    backwards = None if symmetric else table(columns, rows, n)
    return SparseOperator(data, forwards, backwards, Pattern(rows, columns, n), tagged)


def _entries(matrix: Any) -> tuple[Inexact[Array, " entries"], np.ndarray, np.ndarray]:
    """The data, and where they are. A BCOO pads with indices behind the last one."""
    if is_of_jax(matrix):
        if matrix.n_batch or matrix.n_dense:
            must, got = "be one matrix", f"{matrix.n_batch=}, {matrix.n_dense=}"
            cure = "Make a BCOO with n_batch = n_dense = 0, and use jax.vmap."
            raise invalid(ValueError, NAME, "matrix", must, got, cure)
        if isinstance(matrix.indices, Tracer):
            must = "have concrete indices, because they are sorted on the host"
            cure = "Make it outside of jax.jit, and trace its data alone."
            raise invalid(TypeError, NAME, "matrix", must, "traced ones", cure)
    rows, columns = places_of(matrix)
    if not is_of_jax(matrix):
        return _inexact(matrix.tocoo().data), rows, columns
    kept = np.flatnonzero((rows < matrix.shape[0]) & (columns < matrix.shape[1]))
    data = matrix.data if kept.size == rows.size else matrix.data[kept]
    return _inexact(data), rows[kept], columns[kept]


def _inexact(array: Any) -> Inexact[Array, "..."]:
    dtype = array.dtype
    if not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
        must, cure = "have numbers as entries", "Convert it."
        raise invalid(TypeError, NAME, "matrix", must, dtype, cure)
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return jnp.asarray(array if inexact else array.astype(jnp.result_type(float)))


def _space(structure: Any) -> PyTree[jax.ShapeDtypeStruct]:
    if isinstance(structure, int) and not isinstance(structure, bool) and structure > 0:
        return jax.ShapeDtypeStruct((structure,), jnp.result_type(float))
    leaves = jax.tree.leaves(structure)
    if not leaves or not all(hasattr(leaf, "dtype") for leaf in leaves):
        must = "say what vectors the function takes"
        cure = "Pass their number of entries, or an example of one."
        raise invalid(TypeError, NAME, "structure", must, repr(structure), cure)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), structure)


def _check_square(shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or shape[0] != shape[1] or 0 in shape:
        must = "be square, with a row and a column for each dimension"
        cure = "Of a rectangular B take B.T @ B; for norms, lx.MatrixLinearOperator(B)."
        raise invalid(ValueError, NAME, "matrix", must, f"shape {shape}", cure)


def _no_matrix(matrix: Any, library: str) -> Exception:
    cures = {
        "torch": "Pass a.numpy(force=True).",
        "pandas": "Pass a.to_numpy().",
        "networkx": "Pass networkx.to_scipy_sparse_array(a).",
        "scipy": "Pass the matrix, or a function that calls its matvec by "
        "jax.pure_callback.",
    }
    must = "be an array, a sparse matrix, a function v -> A v, or an operator"
    cure = cures.get(library, "Pass a function, and its structure.")
    return invalid(TypeError, NAME, "matrix", must, type(matrix).__name__, cure)
