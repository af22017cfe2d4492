"""What eigenvalues and eigenvectors of Arnoldi's projections say of f(A).

With Z orthonormal, H = Z* A Z, Z_r the first columns of Z and a random matrix M for which
E[Z_r M Z_r*] = I,

    tr f(A) = E tr(M Z_r* f(A) Z_r),            f(A) Z_r ~ Z f(H)[:, :r]
    d tr f(A) = tr(f'(A) dA) = E tr(M Z_r* dA f'(A) Z_r).

(The better balanced factors of the split rule would need a space of the adjoint, too.)
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact

from traceax._core.operator import LinearMap
from traceax._core.rule import settled
from traceax._linalg import lapack
from traceax._quadrature.scalar import Flat, MatrixFunction, Slope
from traceax._quadrature.split import at_nodes


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


class Readout(eqx.Module):
    """f(A) ~ Z f(H) Z* by eigenvalues of H, and what its trace is made of."""

    basis: Inexact[Array, "n m"]
    modes: Modes
    weights: Weights
    mixtures: Inexact[Array, "2 r r"]
    share: Float[Array, " p"]
    real: bool = eqx.field(static=True)

    def __call__(self, subject: MatrixFunction) -> Inexact[Array, " p"]:
        return _read_off(subject, self)

    def mixed(self, parts: Any) -> Inexact[Array, "p ..."]:
        """By the shares of each value."""
        return jax.vmap(mixed, in_axes=(0, None, None))(self.share, *parts)

    def total(self, modes: Modes, fn: Flat) -> Inexact[Array, " p"]:
        weights = self.mixed(self.weights)
        values = at_nodes(fn, modes.nodes[None])[0].T.astype(weights.dtype)
        return jnp.sum(weights * jnp.where(weights == 0, 0, values), axis=1)

    def rate(self, image: Inexact[Array, "p n r"]) -> Inexact[Array, " p"]:
        """tr(M Z* image)."""
        mixture = self.mixed(self.mixtures)
        rows = self.basis[:, : mixture.shape[1]].conj().astype(image.dtype)
        turned = jnp.einsum("nr,pns->prs", rows, image)
        return jnp.einsum("psr,prs->p", mixture.astype(image.dtype), turned)

    def actions(self, modes: Modes, slope: Flat) -> Inexact[Array, "p n r"]:
        """Z f'(H), its first columns."""
        values = at_nodes(slope, modes.nodes[None])[0].astype(modes.nodes.dtype)
        inside = jnp.einsum("ma,ap,ar->pmr", modes.vectors, values, modes.inverse)
        inside = inside.real if self.real else inside
        return jnp.einsum("nm,pmr->pnr", self.basis.astype(inside.dtype), inside)


@eqx.filter_custom_jvp
def _read_off(subject: MatrixFunction, readout: Readout) -> Inexact[Array, " p"]:
    return readout.total(readout.modes, subject.fn)


@_read_off.def_jvp
def _read_off_jvp(
    primals: tuple[MatrixFunction, Readout], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    subject, readout = primals
    tangent, _ = tangents
    value = _read_off(subject, readout)
    modes = settled(readout.modes, refuse_second, subject.linear_map)
    moved = jnp.zeros_like(value)
    if jax.tree.leaves(tangent.fn):
        total = partial(readout.total, modes)
        _, moved = eqx.filter_jvp(total, (subject.fn,), (tangent.fn,))
    if jax.tree.leaves(tangent.linear_map):
        right = readout.actions(modes, Slope(subject.fn))
        p, n, r = right.shape
        block = jnp.moveaxis(right, 1, 0).reshape(n, p * r)
        _, image = eqx.filter_jvp(
            lambda a: a(block), (subject.linear_map,), (tangent.linear_map,)
        )
        if image is not None:
            image = jnp.moveaxis(image.reshape(n, p, r), 0, 1)
            moved = moved + readout.rate(image).astype(moved.dtype)
    return value, moved.astype(value.dtype)
