"""Quadratures: what the value of tr f(A) and its derivatives are read off.

A quadrature has nodes x with weights w, and pairs of vectors l, r, both made of A, so that

    tr f(A) ~ sum over nodes of w f(x),
    d tr f(A) = tr(f'(A) dA) ~ sum over pairs of l^T dA r.

The pairs depend on f and on A. A first derivative takes them as constants; for a second
one, whatever makes the pairs differentiates them or refuses (`with_own_jvp`). What `fn`
depends on moves the sum as another function would, d tr f(A) = tr((df)(A)), so its
derivative is the same quadrature, of df.

**The split rule** makes the pairs for Hermitian A. With probes v for which E[v v*] = I, and
f' = g1 g2,

    d tr f(A) = E[ (g1(A) v)* dA (g2(A) v) ].

Both vectors lie in the Krylov space that the value v* f(A) v was computed from, and cost
no application; the derivative costs one vector-Jacobian product a probe. An entry ij of
U* dA U, U the eigenvectors, comes in with weight (g1_i g2_j + g1_j g2_i)/2, which is least,
by the inequality of the means, for |g1| = |g2| = |f'|^(1/2): then it is the geometric mean
of f'_i and f'_j, where the usual (f'(A) v)* dA v has the arithmetic one, larger without
bound where dA couples small eigenvalues with large ones.

Unlike those of traces, the vectors depend on A in a way that second derivatives need (else
that of log det(s A) in s would be 0). So they are computed once, and differentiated as a
Krylov recurrence from the same starts.

**Arnoldi's projections** make the pairs for any A. With Z orthonormal, H = Z* A Z, Z_r the
first columns of Z, and a random matrix M for which E[Z_r M Z_r*] = I,

    tr f(A) = E tr(M Z_r* f(A) Z_r),            f(A) Z_r ~ Z f(H)[:, :r]
    d tr f(A) = tr(f'(A) dA) = E tr(M Z_r* dA f'(A) Z_r).

(The better balanced factors of the split rule would need a space of the adjoint, too.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox.internal import Static
from jax.tree_util import Partial
from jaxtyping import Array, Float, Inexact

from traceax._core.operator import LinearMap
from traceax._core.rule import with_own_jvp
from traceax._linalg import lapack
from traceax._linalg.columns import magnitude
from traceax._linalg.krylov import lanczos
from traceax._quadrature.dense import Eigen, columns, decompose
from traceax._quadrature.scalar import (
    Factor,
    Flat,
    MatrixFunction,
    Slope,
    moving,
    softening,
)

# How well a recurrence must give blocks again that it is to be differentiated for.
TOLERANCE = 0.1

# The rows r, s of them for each of p values or for all; None stands for all unit vectors.
# And the sum of l^T dA r, a linear function of the rows (dA r)^T.
Paired = tuple[Inexact[Array, "... s n"] | None, Callable[[Array], Inexact[Array, " p"]]]


class Nodes(eqx.Module):
    """A quadrature, called on f and the operator that is to be read: the readout of traces
    of functions. Its weights are the same for each value of f, or one row for each."""

    nodes: Inexact[Array, " m"]
    weights: Inexact[Array, "... m"]
    pairs: Callable[[MatrixFunction], Paired]

    def __call__(self, subject: MatrixFunction) -> Inexact[Array, " p"]:
        return read(subject, self)

    def total(self, fn: Flat) -> Inexact[Array, " p"]:
        values = jax.vmap(fn)(self.nodes).T
        # The Jacobian of f has several values for each one of f.
        weights = jnp.repeat(self.weights, len(values) // len(self.weights), axis=0)
        return weighed(weights, values)


@eqx.filter_custom_jvp
def read(subject: MatrixFunction, nodes: Nodes) -> Inexact[Array, " p"]:
    """tr f(A) by a quadrature, with its pairs for the derivative."""
    return nodes.total(subject.fn)


@read.def_jvp
def _read_jvp(
    primals: tuple[MatrixFunction, Nodes], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    (subject, nodes), (tangent, _) = primals, tangents
    value = read(subject, nodes)
    moved = jnp.zeros_like(value)

    def like_value(part: Array) -> Array:
        part = part if jnp.iscomplexobj(value) else part.real
        return part.astype(value.dtype)

    if jax.tree.leaves(tangent.fn):
        jacobian, numbers = moving(subject.fn, tangent.fn)
        rates = read(MatrixFunction(subject.linear_map, jacobian), nodes)
        moved += like_value(rates.reshape(value.size, -1) @ numbers.astype(rates.dtype))
    if jax.tree.leaves(tangent.linear_map):
        pairs = nodes.pairs(subject)
        moved += like_value(_paired(pairs, subject.linear_map, tangent.linear_map))
    return value, moved


def _paired(pairs: Paired, linear_map: LinearMap, tangent: Any) -> Inexact[Array, " p"]:
    right, total = pairs

    def images(a: LinearMap) -> Inexact[Array, "... s n"]:
        if right is None:
            return a.dense().T
        return a(right.reshape(-1, right.shape[-1]).T).T.reshape(right.shape)

    _, moved = eqx.filter_jvp(images, (linear_map,), (tangent,))
    return jnp.zeros(()) if moved is None else total(moved)


def weighed(
    weights: Inexact[Array, "... m"], values: Inexact[Array, "... m"]
) -> Inexact[Array, ...]:
    """The sum over nodes of weights times values. A node of no weight does not count, even
    where its value is infinite."""
    dtype = weights.dtype if jnp.iscomplexobj(weights) else values.dtype
    counted = jnp.where(weights == 0, 0, values).astype(dtype)
    return jnp.sum(weights.astype(dtype) * counted, axis=-1)


def at_nodes(fn: Flat, nodes: Inexact[Array, "N m"]) -> Inexact[Array, "N m p"]:
    return jax.vmap(jax.vmap(fn))(nodes)


def slopes_at(
    fn: Flat, nodes: Float[Array, "N m"], values: Inexact[Array, "N m p"]
) -> Float[Array, "N m p"]:
    """|f'|, by which the rounding of nodes moves `values`, those of f. Where it is large
    (that of a square root at 0) what matters is how far f rises within the rounding."""
    slopes = jnp.abs(at_nodes(Slope(fn), nodes))
    step = 4 * jnp.finfo(nodes.dtype).eps * jnp.max(jnp.abs(nodes), axis=1, keepdims=True)
    beside, step = at_nodes(fn, nodes + step), step[..., None]
    secants = jnp.abs(beside - values) / jnp.where(step > 0, step, 1)
    # A value that is not finite shows in the estimate.
    secants = jnp.where(jnp.isfinite(secants), secants, 0)
    return jnp.where(jnp.isfinite(slopes), jnp.minimum(slopes, secants), secants)


def split_nodes(
    basis: Inexact[Array, "N m n"],
    eigen: Eigen,
    coefficients: Inexact[Array, "N count count"],
    num_steps: int,
) -> Nodes:
    """The quadrature of N projections T_i = `eigen` of A on orthonormal rows, read at the
    first of them:

        tr f(A) = E sum over i of tr(C_i f(T_i)[:count, :count]),

    the `coefficients` C_i being Hermitian matrices. For second derivatives a recurrence of
    `num_steps` starts from each of the first rows.
    """
    weights = node_weights(coefficients, eigen).reshape(1, -1)
    pairs = Partial(_split_pairs, basis, eigen, coefficients, Static(num_steps))
    return Nodes(eigen.values.ravel(), weights, pairs)


def node_weights(
    coefficients: Inexact[Array, "N count count"], eigen: Eigen
) -> Float[Array, "N m"]:
    rows = eigen.vectors[:, : coefficients.shape[1]]
    return jnp.sum((rows.conj() * (coefficients.astype(rows.dtype) @ rows)).real, axis=1)


def _split_pairs(
    basis: Inexact[Array, "N m n"],
    eigen: Eigen,
    coefficients: Inexact[Array, "N count count"],
    num_steps: Static,
    subject: MatrixFunction,
) -> Paired:
    """C_i (g1(A) v)* and g2(A) v for the starts v."""
    count, n = coefficients.shape[1], basis.shape[2]
    soft = jax.vmap(partial(softening, subject.fn))(eigen.values)
    soft = jax.lax.stop_gradient(soft)
    blocks = _vectors(subject.fn, soft, basis, None, eigen, count)
    starts = basis[:, :count].reshape(-1, n)
    again = Partial(_again, starts, soft, blocks[1], num_steps)
    left, right = with_own_jvp(blocks, again, subject)
    rows = left.conj().reshape(len(left), -1, count, n)
    weighted = jnp.einsum("Nab,pNbn->pNan", coefficients.astype(rows.dtype), rows)
    weighted = weighted.reshape(left.shape)
    return right, lambda images: jnp.sum(weighted * images, axis=(1, 2))


def _again(
    starts: Inexact[Array, "s n"],
    soft: Float[Array, "N p"],
    expected: Inexact[Array, "p s n"],
    num_steps: Static,
    subject: MatrixFunction,
) -> tuple[Inexact[Array, "p s n"], Inexact[Array, "p s n"]]:
    """The vectors of the split rule by a recurrence of its own from each start, which is
    differentiable in the operator and in f. NaN if the second block is far from what is
    `expected` of it: then so are derivatives."""
    count = min(num_steps.value, starts.shape[1])
    krylov = lanczos(subject.linear_map, starts, count, differentiable=True)
    eigen = jax.lax.stop_gradient(decompose(krylov.projection))
    soft = jnp.repeat(soft, len(starts) // len(soft), axis=0)
    left, right = _vectors(
        subject.fn, soft, krylov.basis, krylov.projection, eigen, count=1
    )
    missed = magnitude(jax.lax.stop_gradient(right) - expected)
    passed = jnp.where(missed < TOLERANCE * magnitude(expected), 1, jnp.nan)
    return passed * left, passed * right


def _vectors(
    fn: Flat,
    soft: Float[Array, "N p"],
    basis: Inexact[Array, "N m n"],
    projection: Inexact[Array, "N m m"] | None,
    eigen: Eigen,
    count: int,
) -> tuple[Inexact[Array, "p s n"], Inexact[Array, "p s n"]]:
    """g1(A) v and g2(A) v for the first `count` rows v of every basis."""

    def block(first: bool) -> Inexact[Array, "p s n"]:
        def one(soft: Array, matrix: Array | None, eigen: Eigen) -> Inexact[Array, "p m c"]:
            return columns(Factor(fn, soft, first), matrix, eigen, count=count)

        applied = eqx.filter_vmap(one)(soft, projection, eigen)
        rows = jnp.einsum("Npmc,Nmn->pNcn", applied, basis)
        return rows.reshape(rows.shape[0], -1, rows.shape[3])

    return block(True), block(False)


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
    pairs = Partial(_arnoldi_pairs, basis, modes, mixtures, share, Static(real))
    return Nodes(modes.nodes, by_value, pairs)


def _by_share(share: Float[Array, " p"], parts: Any) -> Inexact[Array, "p ..."]:
    return jax.vmap(mixed, in_axes=(0, None, None))(share, *parts)


def _arnoldi_pairs(
    basis: Inexact[Array, "n m"],
    modes: Modes,
    mixtures: Inexact[Array, "2 r r"],
    share: Float[Array, " p"],
    real: Static,
    subject: MatrixFunction,
) -> Paired:
    """The columns of Z f'(H)[:, :r], and tr(M Z_r* dA Z f'(H)[:, :r])."""
    modes = with_own_jvp(modes, refuse_second, subject.linear_map)
    slopes = jax.vmap(Slope(subject.fn))(modes.nodes).astype(modes.nodes.dtype)
    inside = jnp.einsum("ma,ap,ar->pmr", modes.vectors, slopes, modes.inverse)
    inside = inside.real if real.value else inside
    right = jnp.einsum("nm,pmr->prn", basis.astype(inside.dtype), inside)
    share = jnp.repeat(share, len(right) // len(share))
    mixture = _by_share(share, mixtures).astype(right.dtype)
    rows = basis[:, : mixture.shape[1]].conj().astype(right.dtype)

    def total(images: Inexact[Array, "p s n"]) -> Inexact[Array, " p"]:
        turned = jnp.einsum("nr,psn->prs", rows, images)
        return jnp.einsum("psr,prs->p", mixture, turned)

    return right, total
