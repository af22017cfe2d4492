"""tr f(A) from one block Krylov run, in which each probe measures what the others leave.

Let Z be the orthonormal columns of K_d(A, W), W the block of k probes, and T = Z* A Z. For
q < d let P_i project on S_i = K_q(A, W without w_i). Because w_i is independent of S_i and
has no preferred direction, for every i

    tr f(A) = E e_i,    e_i = tr(P_i f(A) P_i) + c_i r_i* f(A) r_i,
    r_i = (I - P_i) w_i,    c_i = (n - dim S_i) / |r_i|^2.

S_i and r_i lie in the first q blocks of Z, on which f(A) ~ Z f(T) Z*. This is exact for
polynomials of degree 2 (d - q) + 1 in the quadratic forms. So every application serves
twice, for the spaces and for the quadrature, and all that follows is small: N_i, an
orthonormal basis of the complement of S_i in the first q blocks (`krylov`), J, the identity
on these blocks, and the quadrature matrix

    M = mean over i of J - N_i N_i* + c_i r_i r_i*,    E[Z M Z*] = I,    value = tr(f(T) M).

The nodes of the quadrature are the eigenvalues of T, and each sample e_i gives each node a
weight. The derivative is that of the split rule, with Z M Z* in place of the probes.

**The standard error.** The samples share their probes, so their spread is too small, rarely
by more than sqrt(2), the most that parts of two probes can do (`shared_error`). Where as
many directions matter as there are probes, all samples are low together, which only the
jackknife shows (`krylov_replicates`). Half of it was enough in every spectrum measured. If
few important directions are left, the samples are skewed, and theory estimates their
variance (`no_less_than_theory`): on what S_i leaves, the variance of r* f(A) r follows from
the length of f(A) r. The quadrature error is the change when T lacks its last blocks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact

from traceax._core.rule import Outcome
from traceax._linalg import jackknife
from traceax._linalg.columns import (
    dot,
    einsum,
    largest_modulus,
    mean,
    over,
    promoted,
    squared_modulus,
)
from traceax._linalg.krylov import (
    DOUBLE,
    BlockKrylov,
    Complements,
    block_krylov,
    complements,
    eigenframe,
    plain_frame,
    truncated,
)
from traceax._quadrature.dense import Eigen, decompose_above, largest_of
from traceax._quadrature.nodes import SplitRule, at_nodes, slopes_at, weighted_sum
from traceax._quadrature.scalar import MatrixFunction, Traces, traces_outcome


class Shape(NamedTuple):
    """`depth` blocks of `width` probes, the first `inner` of them for the spaces."""

    width: int
    depth: int

    @property
    def inner(self) -> int:
        """Two blocks, or a fifth of them, serve the quadrature alone. But the spaces have
        two blocks if possible, since the first one takes no application."""
        inner = min(self.depth - 2, round(0.8 * self.depth))
        return max(1, min(2, self.depth - 1), inner)

    @property
    def num_matvecs(self) -> int:
        return self.width * self.depth


def shape_for(num_matvecs: int) -> Shape:
    """Measured over many kinds of spectra (`tests/benchmarks/spectra.py`): wider runs have
    worse gradients and no better values, deeper ones fewer samples for the error bar."""
    depth = num_matvecs // math.isqrt(num_matvecs)
    return Shape(num_matvecs // depth, depth)


def block_quadrature(
    subject: MatrixFunction, probes: Inexact[Array, "n k"], *, depth: int, meter: Any = None
) -> Outcome:
    space = block_krylov(subject.linear_map, probes, depth, meter=meter)
    return trace_from_space(space, subject)


def trace_from_space(
    space: BlockKrylov, subject: MatrixFunction, *, kept: int = 0
) -> Outcome:
    """The estimate from a space whose first `kept` starts are no probes. They are in every
    S_i, which is independent of w_i as before."""
    n = subject.linear_map.operator.in_size()
    # Sums are made in this precision; the noise of a coarser operator is measured.
    eps = float(jnp.finfo(space.basis.dtype).eps)
    levels, spaces = levels_and_complements(
        space, n, hermitian=True, kept=kept, bound=subject.bound
    )
    eigen, grain = decompose_above(levels, subject.bound)
    rule = _quadrature(eigen, spaces.resphered(), eps, space.depth == 1 and n > 1)
    noise = node_noise(space, eigen, grain[0])
    own = jnp.diagonal(noise)
    eigen, slopes, bends = into_domain(eigen, subject, space.is_exhausted, own)
    rule = eqx.tree_at(lambda r: r.blur, rule, _blur(rule.matrix, eigen, noise))
    values = jnp.swapaxes(at_nodes(subject.fn, eigen.values), -1, -2)
    samples = _samples(rule.weights[0], values[0])
    whole = Eigen(*(x[:1] for x in eigen))
    num_steps = max(5 * space.depth, 40)
    nodes = SplitRule(space.basis.T[None], whole, rule.matrix[None], num_steps).nodes()
    bounds = jnp.abs(values[0]), slopes.T, bends.T
    traces = Traces(mean(samples), samples, values, bounds, nodes)
    return traces_outcome(subject.combine, traces, rule.error, eps)


def levels_and_complements(
    space: BlockKrylov,
    n: int,
    *,
    hermitian: bool,
    kept: int = 0,
    bound: Float[Array, ""] | None = None,
) -> tuple[Inexact[Array, "levels m m"], Complements]:
    """T, T without its last block, and without its last two (but none smaller than q
    blocks); and the complements of the S_i."""
    k, depth = space.width, space.depth
    inner = Shape(k, depth).inner
    square, filled, rank = space.projection, space.filled, k * inner
    if hermitian:
        square = (square + square.conj().T) / 2
    # A Rayleigh quotient fills the diagonal at empty columns.
    square = jnp.where(jnp.diag(~filled), square[0, 0], square)
    of_k = square[:rank, :rank], filled[:rank]
    frame = eigenframe(*of_k, bound) if hermitian else plain_frame(*of_k)
    spaces = complements(frame, filled[:rank], space.starts, n, kept)
    sizes = [k * (depth - less) for less in range(3) if inner <= depth - less]
    return truncated(square, sizes), spaces


# Neighbours of an eigenvalue, in their order, that have about the same noise.
_NEAR = 4


def node_noise(
    space: BlockKrylov, eigen: Eigen, grain: Float[Array, " m"]
) -> Float[Array, "m m"]:
    """The standard deviations of the entries of V* T V, over the largest eigenvalue.

    A matvec with an error e_j gives T the error Z* e_j in its column j, and T - T* shows
    the difference of two such errors wherever both halves of T were computed. The part of T
    that is used, (T + T*)/2, has half of their sum, which is as large. So the noise needs
    no model: in the eigenvectors of T it comes out small where the operator is accurate (an
    operator that rounds its argument has small errors along small eigenvalues), and large
    where it is not. The diagonal is not seen; it is taken from its neighbours.
    """
    skew = space.projection - space.projection.conj().T
    largest, vectors = largest_modulus(eigen.values[0]), eigen.vectors[0]
    turned = dot(vectors.conj().T, over(skew, largest), vectors)
    squares = squared_modulus(turned) / 4
    m = grain.size
    apart = np.abs(np.arange(m)[:, None] - np.arange(m))
    near = jnp.asarray((apart > 0) & (apart <= _NEAR), squares.dtype)
    own = 2 * jnp.sum(near * squares, axis=1) / jnp.maximum(jnp.sum(near, axis=1), 1)
    own = own + (grain / largest) ** 2
    return jnp.sqrt(jnp.where(jnp.eye(m, dtype=bool), own[:, None], squares))


def _blur(
    matrix: Inexact[Array, "r r"], eigen: Eigen, noise: Float[Array, "m m"]
) -> Float[Array, "m m"]:
    """The variance of the value is g* (this) g, where g is |f'| times the largest node.

    The noise S of V* T V changes the value by the sum of f[a, b] M_ba S_ab, where f[a, b]
    are divided differences and M is the quadrature matrix in the coordinates of V. Between
    nodes, |f[a, b]|^2 is about the geometric mean of the squares of |f'|."""
    inside = eigen.vectors[0, : len(matrix)]
    turned = squared_modulus(dot(inside.conj().T, matrix, inside))
    both = jnp.where(jnp.eye(len(noise), dtype=bool), 1, 2)
    return both * turned * noise**2


def into_domain(
    eigen: Eigen,
    subject: MatrixFunction,
    is_exhausted: Bool[Array, ""],
    noise: Float[Array, " m"],
) -> tuple[Eigen, Float[Array, "m p"], Float[Array, "m p"]]:
    """The nodes of all levels; how fast f moves, |f'| times the largest node; and how far
    noise moves it one way. `noise` are standard deviations of nodes, over the largest one.

    Rounding may move a node to where f is undefined, below zero for a logarithm. Such a
    node moves back by the size of its noise. Its true value may be as small as the square
    of that. If the space is exhausted the true node is zero, but in single precision a
    small eigenvalue is more likely.
    """
    nodes, fn = eigen.values, subject.fn
    largest = largest_of(nodes)
    eps = float(jnp.finfo(nodes.dtype).eps)
    edge = jnp.zeros_like(largest) if subject.bound is None else subject.bound
    undefined = jnp.any(~jnp.isfinite(at_nodes(fn, nodes)), axis=-1)
    reach = 4 * jnp.maximum(nodes.shape[1] ** 0.5 * eps, noise)[None, :] * largest
    moved = undefined & (jnp.abs(nodes - edge) <= reach)
    zero = 0 if eps < DOUBLE else eps * largest
    moved_to = edge + jnp.where(is_exhausted, zero, noise[None, :] * largest)
    nodes = jnp.where(moved, moved_to, nodes)
    values = at_nodes(fn, nodes[:1])
    step = noise[None] * largest[:1]
    slopes = slopes_at(fn, nodes[:1], values, step)[0]
    up, down = (at_nodes(fn, nodes[:1] + side * step)[0] - values[0] for side in (1, -1))
    # Noise may reach the end of the domain of f. Besides, it makes S_i depend on w_i, which
    # moves all nodes at its level one way, by a part of its size.
    bends = jnp.where(jnp.isfinite(down), jnp.abs(up + down) / 2, 2 * jnp.abs(up))
    bends = jnp.where(jnp.isfinite(bends), bends, 0) + slopes * step[0][:, None] / 4
    deeper = at_nodes(fn, edge + eps * (nodes[:1] - edge))[0]
    spans = jnp.abs(values[0] - deeper) / jnp.where(step[0] > 0, step[0], 1)[:, None]
    slopes = largest[0, 0] * jnp.where(moved[0][:, None], spans, slopes)
    return Eigen(nodes, eigen.vectors), slopes, bends


def quadrature_matrix(spaces: Complements) -> Inexact[Array, "r r"]:
    k, r, _ = spaces.vectors.shape
    outside = jnp.moveaxis(spaces.vectors, 0, 1).reshape(r, -1)
    tested = spaces.remainders.T
    changed = dot(tested, tested.conj().T) - dot(outside, outside.conj().T)
    return jnp.diag(spaces.inside.astype(changed.dtype)) + changed / k


def _quadrature(
    eigen: Eigen, spaces: Complements, eps: float, unresolved: bool
) -> Quadrature:
    inside = eigen.vectors[:, : spaces.inside.size]
    weights = jax.vmap(partial(_weights, spaces))(inside)
    # LAPACK may return finite eigenvectors for NaN input.
    weights = jnp.where(jnp.isnan(eigen.values)[:, None], jnp.nan, weights)
    matrix = quadrature_matrix(spaces)
    blur = jnp.zeros(eigen.vectors.shape[1:], weights.dtype)
    return Quadrature(eigen.vectors[0], weights, matrix, blur, spaces, eps, unresolved)


def _weights(spaces: Complements, inside: Inexact[Array, "r m"]) -> Float[Array, "k m"]:
    """The diagonal of V* M_i V for every i, V the eigenvectors of T."""
    outside = einsum("krp,rm->kpm", spaces.vectors.conj(), inside)
    tested = squared_modulus(dot(spaces.remainders.conj(), inside))
    total = dot(spaces.inside.astype(tested.dtype)[None, :], squared_modulus(inside))
    return jnp.maximum(total - jnp.sum(squared_modulus(outside), axis=1) + tested, 0)


def _samples(
    weights: Float[Array, "k m"], values: Inexact[Array, "p m"]
) -> Inexact[Array, "p k"]:
    return weighted_sum(weights[None], values[:, None])


class Quadrature(eqx.Module):
    """The weight of each node in each sample, for every level of T. `vectors` are the
    eigenvectors of T, `matrix` is M, and the remainders of `spaces` are sqrt(c_i) r_i.
    `blur` is the variance of the value by noise. `unresolved`: the quadrature error is
    unknown."""

    vectors: Inexact[Array, "m m"]
    weights: Float[Array, "levels k m"]
    matrix: Inexact[Array, "r r"]
    blur: Float[Array, "m m"]
    spaces: Complements
    eps: float = eqx.field(static=True)
    unresolved: bool = eqx.field(static=True)

    def error(
        self,
        values: Inexact[Array, "levels p m"],
        sizes: Float[Array, "p m"],
        slopes: Float[Array, "p m"],
        bends: Float[Array, "p m"],
    ) -> Float[Array, " p"]:
        """From f at the nodes, its size, its slope times the largest node, and how far its
        mean moves by noise."""
        levels = jax.vmap(_samples)(self.weights, values)
        changes = jnp.abs(mean(levels[:-1] - levels[1:]))
        weights = jnp.mean(self.weights[0], axis=0)[None, :]
        used = weights > 0
        terms = weights * jnp.where(used, sizes, 0)
        summed = self.eps * (jnp.sqrt(jnp.sum(terms**2, axis=1)) + jnp.abs(mean(levels[0])))
        slopes = jnp.where(used, slopes, 0)
        moved = jnp.sqrt(jnp.sum(slopes * dot(slopes, self.blur), axis=1))
        moved = 2 * moved + jnp.sum(weights * jnp.where(used, bends, 0), axis=1)
        error = jackknife.shared_error(levels[0], jnp.hypot(4 * summed, moved))
        if levels.shape[-1] > 1:
            error = jnp.maximum(error, self._least_error(values[0]))
        return jnp.hypot(error, jackknife.quadrature_error(changes, self.unresolved))

    def _least_error(self, values: Inexact[Array, "p m"]) -> Float[Array, " p"]:
        """The larger one of half the jackknife and the error by theory. Both are those of f
        less a constant, whose trace has no error but rounding."""
        weights = self.weights[0]
        centre = over(mean(_samples(weights, values)), jnp.mean(jnp.sum(weights, axis=1)))
        used = jnp.any(weights != 0, axis=0)
        values = jnp.where(used[None, :], values - centre[:, None], 0)
        scale = jax.vmap(largest_modulus)(values)
        values = over(values, scale[:, None])
        inside = self.vectors[: self.spaces.inside.size]
        function = inside, values, inside.conj().T
        samples, real = _samples(weights, values), not jnp.iscomplexobj(self.matrix)
        half = jackknife.half_jackknife_error(self.spaces, *function, samples)
        least = jackknife.no_less_than_theory(half, self._variances(values), real=real)
        return scale * least

    def _variances(self, values: Inexact[Array, "p m"]) -> Float[Array, "p k"]:
        """|B w - w w* B w/|w|^2|^2 for w = r_i and B = (I - P_i) f(A) (I - P_i)."""
        complement, remainders, _, inside = self.spaces
        r = inside.size
        turned = dot(remainders, self.vectors[:r].conj())
        image = einsum("km,pm,rm->pkr", *promoted(turned, values, self.vectors))
        inner = einsum("krs,pkr->pks", *promoted(complement.conj(), image[..., :r]))
        w = einsum("krs,kr->ks", complement.conj(), remainders).astype(image.dtype)
        lengths = jnp.sum(squared_modulus(remainders), axis=1)
        # The subtraction precedes the squares, so that multiples of I leave only rounding.
        along = einsum("ks,pks->pk", w.conj(), inner)
        along = over(along, jnp.where(lengths > 0, lengths, 1)[None])
        inner = inner - along[..., None] * w[None]
        outside = ~jnp.pad(inside, (0, image.shape[-1] - r))
        squares = dot(squared_modulus(image), outside.astype(lengths.dtype))
        return squares + jnp.sum(squared_modulus(inner), axis=-1)
