"""What eigenvalues and eigenvectors of Arnoldi's projections say of f(A)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact

from traceax._functions.scalar import Flat
from traceax._functions.split import at_nodes
from traceax._linalg import lapack
from traceax._linalg.krylov import norm, truncated


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


def _decompose(
    projection: Inexact[Array, "2 N m m"],
) -> list[tuple[Inexact[Array, "N m"], Inexact[Array, "N m m"], Inexact[Array, "N m"]]]:
    """Eigenvalues, eigenvectors V and V^{-1} e_1, of both in one batch."""
    nodes, vectors = lapack.eig(_diagonalisable(projection))
    first = jnp.zeros((*nodes.shape, 1), nodes.dtype).at[..., 0, 0].set(1)
    inverse = lapack.solve((vectors, first))[..., 0]
    return list(zip(nodes, vectors, inverse, strict=True))


@partial(jax.jit, static_argnums=3)
def modes_with_half(
    starts: Inexact[Array, "N n"],
    basis: Inexact[Array, "N m n"],
    projection: Inexact[Array, "N m m"],
    size: int,
) -> tuple[Modes, Modes]:
    half = jax.vmap(partial(truncated, size=max(size, 1)))(projection)
    whole, coarse = _decompose(jnp.stack([projection, half]))
    return _modes(starts, basis, whole), _modes(starts, basis, coarse)


def _diagonalisable(matrix: Inexact[Array, "... m m"]) -> Inexact[Array, "... m m"]:
    """The matrix moved by as much as rounding has. A nilpotent one has no basis of
    eigenvectors; next to it almost every matrix has, and half of the digits."""
    m = matrix.shape[-1]
    noise = np.random.default_rng(m).normal(size=(m, m)) / m**0.5
    noise = noise.reshape((1,) * (matrix.ndim - 2) + (m, m))
    largest = jnp.max(jnp.abs(matrix), axis=(-2, -1), keepdims=True)
    eps = float(jnp.finfo(matrix.dtype).eps)
    return matrix + eps * largest * jnp.asarray(noise, matrix.dtype)


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
