"""What eigenvalues and eigenvectors of Arnoldi's projections say of f(A)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact

from traceax._core.operator import LinearMap
from traceax._linalg import lapack
from traceax._linalg.krylov import by_levels, norm
from traceax._quadrature.scalar import Flat
from traceax._quadrature.split import at_nodes


class Modes(NamedTuple):
    """v* f(A) v = sum_a w_a f(x_a) and f(A) v = sum_a f(x_a) r_a, for each of N starts."""

    nodes: Inexact[Array, "N m"]
    weights: Inexact[Array, "N m"]
    vectors: Inexact[Array, "N m n"]

    def samples(self, fn: Flat) -> Inexact[Array, "p N"]:
        return self.weighed(at_nodes(fn, self.nodes))

    def weighed(self, values: Inexact[Array, "N m p"]) -> Inexact[Array, "p N"]:
        used = self.weights[..., None] != 0
        terms = self.weights[..., None] * jnp.where(used, values, 0)
        return jnp.sum(terms, axis=1).T

    def actions(self, fn: Flat) -> Inexact[Array, "p N n"]:
        values = jax.vmap(jax.vmap(fn))(self.nodes)
        return jnp.einsum("Nap,Nan->pNn", values, self.vectors)


@jax.jit
def modes_by_levels(
    starts: Inexact[Array, "N n"],
    basis: Inexact[Array, "N m n"],
    projection: Inexact[Array, "N m m"],
) -> list[Modes]:
    """Of all steps first, then of fewer, all decomposed in one batch."""
    levels = by_levels(projection)
    # Moved by as much as rounding has.
    rounding = perturbation(levels, float(jnp.finfo(levels.dtype).eps))
    nodes, vectors = lapack.eig(levels + rounding)
    first = jnp.zeros((*nodes.shape, 1), nodes.dtype).at[..., 0, 0].set(1)
    inverse = lapack.solve((vectors, first))[..., 0]
    parts = zip(nodes, vectors, inverse, strict=True)
    return [_modes(starts, basis, part) for part in parts]


def perturbation(matrix: Inexact[Array, "... m m"], share: float) -> Inexact[Array, ...]:
    """A dense matrix of that `share` of the largest entry. A nilpotent matrix has no basis
    of eigenvectors; next to it almost every matrix has."""
    m = matrix.shape[-1]
    noise = np.random.default_rng(m).normal(size=(m, m)) / m**0.5
    noise = noise.reshape((1,) * (matrix.ndim - 2) + (m, m))
    largest = jnp.max(jnp.abs(matrix), axis=(-2, -1), keepdims=True)
    return share * largest * jnp.asarray(noise, matrix.dtype)


def _modes(
    starts: Inexact[Array, "N n"],
    basis: Inexact[Array, "N m n"],
    parts: tuple[Array, Array, Array],
) -> Modes:
    nodes, vectors, inverse = parts
    lengths = jax.vmap(norm)(starts)[:, None]
    lengths, basis = lengths.astype(nodes.dtype), basis.astype(nodes.dtype)
    weights = lengths**2 * vectors[:, 0] * inverse
    actions = (lengths * inverse)[..., None] * jnp.einsum("Nma,Nmn->Nan", vectors, basis)
    return Modes(nodes, weights, actions)


def refuse_second(linear_map: LinearMap) -> Any:
    raise NotImplementedError(
        "traceax.arnoldi_trace must not be differentiated twice in its operator, because "
        "the eigenvectors that its derivative is read from would have to be "
        "differentiated, which is not stable, but got a second derivative. Use "
        "traceax.slq_trace or traceax.function_trace if the operator is Hermitian."
    )
