"""Conversion of matrices and functions to operators: `as_operator`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact

from traceax._core.canonical import canonical, is_concrete
from traceax._core.checks import (
    check_array,
    check_callable,
    invalid,
    require,
    require_type,
    show,
)
from traceax._core.operator import Operator
from traceax._core.sparse import SparseOperator, entries_of, is_of_jax, table

NAME = "as_operator"

# What to pass in place of objects of other libraries.
_CURES = {
    "torch": "Pass a.numpy(force=True).",
    "pandas": "Pass a.to_numpy().",
    "networkx": "Pass networkx.to_scipy_sparse_array(a).",
}


def as_operator(matrix: Any, structure: Any = None, *, tags: Any = ()) -> Operator:
    """Make a lineax operator of a matrix, dense or sparse, or of a function v -> A v.

    Sparse matrices are stored in a format for blocks of vectors. On a CPU, traces are 2.8
    to 5 times as fast as with a BCOO, and traces with gradients are 1.6 to 2.3 times as
    fast, even if a few rows are long. Sparse operators are differentiable with respect to
    their data. Their trace and diagonal are known without a matvec, and `logdet` and
    `function_trace` need no `pattern`. You can combine them with lineax's `+`, `*` and `@`.

    **Arguments**

    - `matrix`: an n x n array of NumPy or JAX, a sparse matrix of SciPy in any format, a
      BCOO or a BCSR. Integers become floats. The places of the entries of a sparse matrix
      must be concrete, but its data may be traced. It may also be a function, a
      `scipy.sparse.linalg.LinearOperator`, or an operator of lineax. A `LinearOperator` is
      called on the host for a whole block of vectors at a time, and is a constant for
      derivatives. An operator of lineax is returned as it is.
    - `structure`: the space of a function's vectors. It is either an int n, for vectors of
      n floats, or an example of a vector (a complex one if the function returns complex
      numbers), or a pytree of `jax.ShapeDtypeStruct`s. Matrices do not need it.
      Default `None`.
    - `tags`: a tag of lineax, for example `lx.positive_semidefinite_tag`, or several. Tags
      are not verified. Default `()`.

    **Returns** an `lx.AbstractLinearOperator`.

    **Cost**: a sparse matrix takes a sort on the host, and memory of about four integers
    for each entry, or two if it is tagged symmetric.

    **Example**

        >>> import jax, scipy.sparse, traceax as tx
        >>> operator = tx.as_operator(scipy.sparse.eye_array(9, k=1))
        >>> print(operator.mv(jax.numpy.arange(9.0)))
        [1. 2. 3. 4. 5. 6. 7. 8. 0.]

    **Reference**: `traceax/_core/sparse.py` derives the storage. Tables of slices are from
    Monakov, Lokhmotov and Avetisyan (2010),
    [doi:10.1007/978-3-642-11515-8_10](https://doi.org/10.1007/978-3-642-11515-8_10).

    **See also**: `Layout`, and `check_operator` in `traceax.testing`.
    """
    tags = frozenset(tags if isinstance(tags, list | tuple | set | frozenset) else [tags])
    has_text = any(isinstance(tag, str) for tag in tags)
    must, cure = "be a tag of lineax", "Pass lx.positive_semidefinite_tag, for example."
    require_type(not has_text, NAME, "tags", must, f"a string in {set(tags)}", cure)
    if isinstance(matrix, Operator):
        return lx.TaggedLinearOperator(matrix, tags) if tags else matrix
    library = type(matrix).__module__.split(".")[0]
    if is_of_jax(matrix) or hasattr(matrix, "tocoo"):
        return _sparse(matrix, tags)
    if all(hasattr(matrix, name) for name in ("matmat", "rmatmat", "shape", "dtype")):
        return _on_host(matrix, tags)
    if callable(matrix) and library not in _CURES:
        return _of_function(matrix, structure, tags)
    is_array = isinstance(matrix, np.ndarray | jax.Array | list | tuple)
    must = "be an array, a sparse matrix, a function v -> A v, or an operator"
    cure = _CURES.get(library, "Pass a function, and its structure.")
    require_type(is_array, NAME, "matrix", must, type(matrix).__name__, cure)
    array = matrix if isinstance(matrix, jax.Array) else check_array(NAME, "matrix", matrix)
    _check_square(array.shape)
    return lx.MatrixLinearOperator(_as_inexact(array), tags)


def _on_host(matrix: Any, tags: frozenset[object]) -> Operator:
    """Make an operator of an object with the methods of a SciPy `LinearOperator`.

    `custom_linear_solve` is used for nothing but its rules: it says that a function is
    linear, and what its transpose is. A block of vectors is one call.
    """
    _check_square(matrix.shape)
    dtype = jax.dtypes.canonicalize_dtype(_inexact(np.dtype(matrix.dtype)))
    space = jax.ShapeDtypeStruct(matrix.shape[:1], dtype)

    def called(of_block: Any) -> Any:
        def host(v: Any) -> np.ndarray:
            block = np.asarray(v).reshape(-1, v.shape[-1]).T
            return np.asarray(of_block(block), dtype).T.reshape(v.shape)

        return lambda _, v: jax.pure_callback(host, space, v, vmap_method="broadcast_all")

    def transposed(block: np.ndarray) -> np.ndarray:
        try:
            return matrix.rmatmat(block.conj()).conj()
        # If it is missing, SciPy calls None, which is a TypeError.
        except (NotImplementedError, TypeError) as error:
            must = "have rmatvec, because the adjoint is applied"
            cure = "Define it, or tag the operator if it is symmetric."
            raise invalid(TypeError, NAME, "matrix", must, repr(error), cure) from error

    solves = called(matrix.matmat), called(transposed)

    def mv(v: Inexact[Array, " n"]) -> Inexact[Array, " n"]:
        return jax.lax.custom_linear_solve(lambda x: x, v, *solves)

    return lx.FunctionLinearOperator(mv, space, tags)


def _sparse(matrix: Any, tags: frozenset[object]) -> SparseOperator:
    _check_square(matrix.shape)
    if is_of_jax(matrix):
        must, got = "be one matrix", f"{matrix.n_batch=}, {matrix.n_dense=}"
        cure = "Make a BCOO with n_batch = n_dense = 0, and use jax.vmap."
        require(not matrix.n_batch + matrix.n_dense, NAME, "matrix", must, got, cure)
        must = "have concrete indices, because they are sorted on the host"
        cure = "Make it outside of jax.jit, and trace its data alone."
        require_type(is_concrete(matrix.indices), NAME, "matrix", must, "traced ones", cure)
    stored, pattern = entries_of(matrix)
    data, rows, columns = _as_inexact(stored), pattern.rows, pattern.columns
    symmetric = {lx.symmetric_tag}
    if not jnp.iscomplexobj(data):
        symmetric |= {lx.positive_semidefinite_tag, lx.negative_semidefinite_tag}
    forwards = table(rows, columns, matrix.shape[0])
    backwards = None if symmetric & tags else table(columns, rows, matrix.shape[0])
    return SparseOperator(data, forwards, backwards, pattern, tags)


def _as_inexact(array: Any) -> Inexact[Array, "..."]:
    """Return an array of numbers, with integers converted to floats."""
    is_number = any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.number, jnp.bool_))
    got, cure = str(array.dtype), "Convert it."
    require_type(is_number, NAME, "matrix", "have numbers as entries", got, cure)
    return jnp.asarray(array.astype(_inexact(array.dtype), copy=False))


def _inexact(dtype: Any) -> Any:
    """Return a dtype, or the one of floats if it is not inexact. Refuse a long one."""
    name = "complex128" if jnp.issubdtype(dtype, jnp.complexfloating) else "float64"
    fits = np.dtype(dtype).itemsize <= np.dtype(name).itemsize
    must = "have numbers of at most double precision, which are the longest of JAX"
    require_type(fits, NAME, "matrix", must, str(dtype), f"Pass a.astype(numpy.{name}).")
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


def _of_function(fn: Any, structure: Any, tags: frozenset[object]) -> Operator:
    """Make an operator of a function. Refuse a complex function of real vectors."""
    check_callable(NAME, "matrix", fn, "v -> A v", "Close over all but v.")
    if isinstance(structure, int) and not isinstance(structure, bool) and structure > 0:
        structure = jax.ShapeDtypeStruct((structure,), jnp.result_type(float))
    leaves = jax.tree.leaves(structure)
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]
    fits, must = leaves and all(is_array), "say what vectors the function takes"
    cure = "Pass their number of entries, or an example of one. Of a module, take it by "
    cure += "eqx.filter(module, eqx.is_inexact_array)."
    require_type(fits, NAME, "structure", must, show(structure), cure)
    # The type of a result: inside `jax.shard_map` it has a mesh, which lineax compares.
    once = lambda x: x * jnp.ones((), x.dtype)  # noqa: E731
    space = jax.eval_shape(partial(jax.tree.map, once), structure)
    code = canonical(fn, space)
    operator = lx.FunctionLinearOperator(code, space, tags, closure_convert=False)
    images = jax.tree.leaves(operator.out_structure())
    fits = any(map(jnp.iscomplexobj, leaves)) or not any(map(jnp.iscomplexobj, images))
    must = "be of complex vectors, because the function returns complex numbers"
    cure = "Pass a complex example, jax.numpy.zeros(n, complex)."
    require_type(fits, NAME, "structure", must, "real ones", cure)
    return operator


def _check_square(shape: tuple[int, ...]) -> None:
    """Refuse a matrix that is not square, or empty."""
    fits = len(shape) == 2 and shape[0] == shape[1] > 0
    must = "be square, with a row and a column for each dimension"
    cure = "Of a rectangular B take B.T @ B; for norms, lx.MatrixLinearOperator(B)."
    require(fits, NAME, "matrix", must, f"shape {shape}", cure)
