"""LAPACK's decompositions, under `vmap` one after the other.

The CPU runtime of jax 0.10 runs independent operations of a program side by side, and on
few cores now and then forgets one for ever: all threads wait, for nothing. Batches of
LAPACK calls beside each other bring it about, within one estimator or in two that have
nothing to do with each other, and no ordering inside an estimator can tell these apart. So
here a batch is a loop over its members: LAPACK goes through them one by one anyway, and it
takes no longer. (Measured: of three processes that evaluate two vmapped XTraces 200 times,
none came beyond the tenth; as loops all end.) Elsewhere than on the CPU a batch is a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Inexact, PyTree

Decomposition = Callable[[Any], Any]


def _one_by_one(decompose: Decomposition) -> Decomposition:
    """Of one array, or a tuple of them, batched together; with JAX's own derivative."""
    single = custom_vmap(decompose)

    @single.def_vmap
    def batched(size: int, is_batched: Any, argument: Any) -> tuple[PyTree, PyTree]:
        def whole(leaf: Array, batched: bool) -> Array:
            return leaf if batched else jnp.broadcast_to(leaf, (size, *leaf.shape))

        argument = jax.tree.map(whole, argument, is_batched[0])
        result = jax.lax.platform_dependent(
            argument,
            cpu=lambda xs: jax.lax.map(single, xs),
            default=jax.vmap(decompose),
        )
        return result, jax.tree.map(lambda _: True, result)

    # A function with a batching rule of its own has no reverse mode.
    differentiable = jax.custom_jvp(lambda argument: single(argument))
    differentiable.defjvp(lambda primals, tangents: jax.jvp(decompose, primals, tangents))
    return differentiable


@_one_by_one
def qr(block: Inexact[Array, "n k"]) -> tuple[Inexact[Array, "n k"], Inexact[Array, "k k"]]:
    columns, triangle = jnp.linalg.qr(block)
    return columns, triangle


@_one_by_one
def complete_qr(
    block: Inexact[Array, "n k"],
) -> tuple[Inexact[Array, "n n"], Inexact[Array, "n k"]]:
    columns, triangle = jnp.linalg.qr(block, mode="complete")
    return columns, triangle


@_one_by_one
def svd(
    block: Inexact[Array, "n k"],
) -> tuple[Inexact[Array, "n k"], Float[Array, " k"], Inexact[Array, "k k"]]:
    """Reduced; singular values fall."""
    left, sizes, right = jnp.linalg.svd(block, full_matrices=False)
    return left, sizes, right


@_one_by_one
def cholesky(matrix: Inexact[Array, "k k"]) -> Inexact[Array, "k k"]:
    """Of the lower triangle; NaN if it is not positive definite."""
    return jnp.linalg.cholesky(matrix, symmetrize_input=False)


@_one_by_one
def eigh(
    matrix: Inexact[Array, "... k k"],
) -> tuple[Float[Array, "... k"], Inexact[Array, "... k k"]]:
    values, vectors = jnp.linalg.eigh(matrix)
    return values, vectors


@_one_by_one
def eig(
    matrix: Inexact[Array, "... k k"],
) -> tuple[Inexact[Array, "... k"], Inexact[Array, "... k k"]]:
    values, vectors = jnp.linalg.eig(matrix)
    return values, vectors


@_one_by_one
def eigvals(matrix: Inexact[Array, "... k k"]) -> Inexact[Array, "... k"]:
    return jnp.linalg.eigvals(matrix)


@_one_by_one
def solve(
    equations: tuple[Inexact[Array, "... k k"], Inexact[Array, "... k p"]],
) -> Inexact[Array, "... k p"]:
    return jnp.linalg.solve(*equations)


@_one_by_one
def pinv(matrix: Inexact[Array, "p k"]) -> Inexact[Array, "k p"]:
    """Singular values that rounding cannot tell from zero are zero."""
    return jnp.linalg.pinv(matrix, rtol=jnp.finfo(matrix.dtype).eps * matrix.shape[0])
