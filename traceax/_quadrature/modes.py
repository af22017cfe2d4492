"""What eigenvalues and eigenvectors of Arnoldi's projections say of f(A).

With Z orthonormal, H = Z* A Z, Z_r the first columns of Z and a random matrix M for which
E[Z_r M Z_r*] = I,

    tr f(A) = E tr(M Z_r* f(A) Z_r),            f(A) Z_r ~ Z f(H)[:, :r]
    d tr f(A) = tr(f'(A) dA) = E tr(M Z_r* dA f'(A) Z_r).

(The better balanced factors of the split rule would need a space of the adjoint, too.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from equinox.internal import Static
from jax.tree_util import Partial
from jaxtyping import Array, Float, Inexact

from traceax._core.operator import LinearMap
from traceax._core.rule import settled
from traceax._linalg import lapack
from traceax._quadrature.nodes import Nodes, Pairs
from traceax._quadrature.scalar import MatrixFunction, Slope


class Modes(NamedTuple):
    """f(H)[:, :r] = vectors diag(f(nodes)) inverse, for each of several H."""

    nodes: Inexact[Array, "levels m"]
    vectors: Inexact[Array, "levels m m"]
    inverse: Inexact[Array, "levels m r"]


def modes_of(projections: Inexact[Array, "levels m m"], rank: int) -> Modes:
    """Each by itself, as in `dense`; moved by as much as rounding has."""
    rounding = perturbation(projections, float(jnp.finfo(projections.dtype).eps))
    nodes, vectors = jax.vmap(lapack.eig)(projections + rounding)
    unit = jnp.eye(nodes.shape[1], rank, dtype=nodes.dtype)
    inverse = jax.vmap(lambda v: lapack.solve((v, unit)))(vectors)
    return Modes(nodes, vectors, inverse)


class Weights(NamedTuple):
    """Of each node, in two ways to read the trace: in every sample, or their mean."""

    plain: Inexact[Array, "... m"]
    left_out: Inexact[Array, "... m"]


def mixed(
    share: Float[Array, "*values"], plain: Array, left_out: Array
) -> Inexact[Array, ...]:
    """Of two ways, by the share of the second."""
    share = share.astype(plain.dtype)
    return (1 - share) * plain + share * left_out


def perturbation(matrix: Inexact[Array, "... m m"], share: float) -> Inexact[Array, ...]:
    """A dense matrix of that `share` of the largest entry. A nilpotent matrix has no basis
    of eigenvectors; next to it almost every matrix has."""
    m = matrix.shape[-1]
    noise = np.random.default_rng(m).normal(size=(m, m)) / m**0.5
    noise = noise.reshape((1,) * (matrix.ndim - 2) + (m, m))
    largest = jnp.max(jnp.abs(matrix), axis=(-2, -1), keepdims=True)
    return share * largest * jnp.asarray(noise, matrix.dtype)


def refuse_second(linear_map: LinearMap) -> Any:
    raise NotImplementedError(
        "traceax.arnoldi_trace must not be differentiated twice in its operator, because "
        "the eigenvectors that its derivative is read from would have to be "
        "differentiated, which is not stable, but got a second derivative. Use "
        "traceax.slq_trace or traceax.function_trace if the operator is Hermitian."
    )


def arnoldi_nodes(
    basis: Inexact[Array, "n m"],
    modes: Modes,
    weights: Weights,
    mixtures: Inexact[Array, "2 r r"],
    share: Float[Array, " p"],
    real: bool,
) -> Nodes:
    """f(A) ~ Z f(H) Z* by one H, each value of f having its own share of the two ways in
    which its trace is read: by their `weights` and by their `mixtures` M. `real`: f(H) is
    meant to be."""
    by_value = _by_share(share, weights)
    pairs = Partial(_pairs, basis, modes, mixtures, share, Static(real))
    return Nodes(modes.nodes, by_value, pairs)


def _by_share(share: Float[Array, " p"], parts: Any) -> Inexact[Array, "p ..."]:
    return jax.vmap(mixed, in_axes=(0, None, None))(share, *parts)


def _pairs(
    basis: Inexact[Array, "n m"],
    modes: Modes,
    mixtures: Inexact[Array, "2 r r"],
    share: Float[Array, " p"],
    real: Static,
    subject: MatrixFunction,
) -> Pairs:
    """The rows of M Z_r*, and the columns of Z f'(H)[:, :r]."""
    modes = settled(modes, refuse_second, subject.linear_map)
    slopes = jax.vmap(Slope(subject.fn))(modes.nodes).astype(modes.nodes.dtype)
    inside = jnp.einsum("ma,ap,ar->pmr", modes.vectors, slopes, modes.inverse)
    inside = inside.real if real.value else inside
    right = jnp.einsum("nm,pmr->prn", basis.astype(inside.dtype), inside)
    share = jnp.repeat(share, len(right) // len(share))
    mixture = _by_share(share, mixtures).astype(right.dtype)
    rows = basis[:, : mixture.shape[1]].conj().astype(right.dtype)
    return jnp.einsum("psr,nr->psn", mixture, rows), right
