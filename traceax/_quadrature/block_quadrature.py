"""tr f(A) from one block Krylov run, each probe measuring what the others leave.

Let Z be the orthonormal columns of K_d(A, W), W the block of k probes, T = Z* A Z, and for
q < d let P_i project on S_i = K_q(A, W without w_i). Because w_i is independent of S_i and
has no preferred direction, for every i

    tr f(A) = E e_i,    e_i = tr(P_i f(A) P_i) + c_i r_i* f(A) r_i,
    r_i = (I - P_i) w_i,    c_i = (n - dim S_i) / |r_i|^2.

S_i and r_i lie in the first q blocks of Z, on which f(A) ~ Z f(T) Z*: exact for polynomials
of degree 2 (d - q) + 1 in the quadratic forms, and far better where it matters, because
what a Krylov space leaves is nearly flat. So every application works twice, for the spaces
and for the quadrature, and after them all of it is small: with the orthonormal N_i that
make S_i up to the first q blocks (`left_out`) and J the identity on these,

    M = mean over i of J - N_i N_i* + c_i r_i r_i*,    E[Z M Z*] = I,    value = tr(f(T) M).

The nodes of the quadrature are the eigenvalues of T, and each sample e_i is a weight for
each node. The derivative is that of the split rule, with Z M Z* for the probes.

The samples share their probes, so their spread understates: by 0.5 to 1.9, rarely more
than sqrt(2), which is what parts of two probes each can do (`shared_error`). Where as many
directions matter as there are probes, all samples are low together, and it takes the
jackknife (`two_left_out`) to see that; it counts parts of many probes as often as they have
probes, and half of it was enough in every spectrum measured. Where few directions are left
that matter the samples are as skewed as can be, and theory says what they could be
(`no_less_than_theory`): on what S_i leaves, the variance of r* f(A) r follows from the
length of f(A) r. The quadrature error shows by what T without its last blocks says.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact

from traceax._core.operator import resolution, size
from traceax._core.rule import Outcome
from traceax._linalg.columns import magnitude, mean, squared_modulus
from traceax._linalg.jackknife import (
    both_errors,
    jackknife_error,
    no_less_than_theory,
    quadrature_error,
    shared_error,
)
from traceax._linalg.krylov import BlockKrylov, block_krylov, truncated
from traceax._linalg.left_out import LeftOut, left_out
from traceax._linalg.two_left_out import replicates
from traceax._quadrature.combination import combined
from traceax._quadrature.dense import Eigen, decompose
from traceax._quadrature.scalar import Flat, MatrixFunction
from traceax._quadrature.split import FromRows, Run, Traced, at_nodes, slopes_at


class Shape(NamedTuple):
    """`depth` blocks of `width` probes, the first `inner` of them for the spaces."""

    width: int
    depth: int

    @property
    def inner(self) -> int:
        """Two blocks, or a fifth of them, are left to quadrature; but the first block alone
        is no space, since nothing has been applied for it."""
        inner = min(self.depth - 2, round(0.8 * self.depth))
        return max(1, min(2, self.depth - 1), inner)

    @property
    def num_matvecs(self) -> int:
        return self.width * self.depth


def shape_for(num_matvecs: int) -> Shape:
    """Measured over spectra of all kinds (`tests/benchmarks/functions.py`)."""
    root = math.isqrt(num_matvecs)
    width = max(root, min(num_matvecs // 10, math.isqrt(9 * num_matvecs // 4)))
    depth = num_matvecs // width
    return Shape(num_matvecs // depth, depth)


class Quadrature(eqx.Module):
    """Nodes, and for each sample the weight of each; for T and for T without its last
    blocks. `mixture` is M; `outside`, and `inside`, the first rows of T's eigenvectors, are
    what is needed to judge the samples."""

    eigen: Eigen
    weights: Float[Array, "levels k m"]
    mixture: Inexact[Array, "r r"]
    outside: Outside
    inside: Inexact[Array, "r m"]


class Outside(eqx.Module):
    """The part of a probe outside of its space, sqrt(c_i) r_i; N_i; and n - dim S_i."""

    remainder: Inexact[Array, "k r"]
    missing: Inexact[Array, "k r p"]
    dimension: Float[Array, " k"]


def block_quadrature(
    subject: MatrixFunction, probes: Inexact[Array, "n k"], *, depth: int, inner: int
) -> Outcome:
    space = block_krylov(subject.linear_map, probes, depth)
    rule = quadrature(space, probes, depth, inner)
    k = probes.shape[1]
    is_open = jnp.any(space.filled[(depth - 1) * k : depth * k])
    rule, slopes = _defined(rule, subject.fn, is_open)
    eps = resolution(subject.linear_map.operator)
    unresolved = depth == 1 and size(subject.linear_map.operator) > 1
    values = jnp.swapaxes(at_nodes(subject.fn, rule.eigen.values), -1, -2)
    sizes = jnp.abs(values[0]) + slopes.T
    samples = _read(rule.weights[0], values[0])
    judged = combined(subject.combine, mean(samples), samples)
    error = _error(rule, judged.values(values), judged.sizes(sizes), eps, unresolved)
    return judged.outcome(error, Traced((run_of(space, rule, depth),)), eps)


def _defined(
    rule: Quadrature, fn: Flat, is_open: Bool[Array, ""]
) -> tuple[Quadrature, Float[Array, "m p"]]:
    """The rule, and by how much the rounding of a node moves f there.

    Nodes that rounding may have moved to where f is not defined, below zero for a
    logarithm, are moved back by as much, and may be anything down to the square of that.
    But if the space is not `is_open`, because nothing is left beyond it, zero is zero; in
    single precision a small eigenvalue is more likely.
    """
    nodes = rule.eigen.values
    largest = jnp.max(jnp.abs(nodes), axis=1, keepdims=True)
    eps = float(jnp.finfo(nodes.dtype).eps)
    undefined = jnp.any(~jnp.isfinite(at_nodes(fn, nodes)), axis=-1)
    moved = undefined & (jnp.abs(nodes) <= 4 * nodes.shape[1] ** 0.5 * eps * largest)
    zero = 0 if eps < 1e-10 else eps * largest
    nodes = jnp.where(moved, jnp.where(is_open, eps * largest, zero), nodes)
    values = at_nodes(fn, nodes[:1])
    slopes = largest[:1] * slopes_at(fn, nodes[:1], values)[0]
    spans = jnp.abs(values[0] - at_nodes(fn, eps * nodes[:1])[0]) / (4 * eps)
    slopes = jnp.where(moved[0][:, None], spans, slopes)
    return eqx.tree_at(lambda r: r.eigen, rule, Eigen(nodes, rule.eigen.vectors)), slopes


def run_of(space: BlockKrylov, rule: Quadrature, depth: int) -> Run:
    basis = space.basis[:, : rule.eigen.values.shape[1]].T[None]
    whole = Eigen(*(x[:1] for x in rule.eigen))
    again = FromRows(basis, rule.mixture.shape[0], max(5 * depth, 40))
    return Run(basis, whole, rule.mixture[None], again)


@partial(jax.jit, static_argnums=(2, 3))
def quadrature(
    space: BlockKrylov, probes: Inexact[Array, "n k"], depth: int, inner: int
) -> Quadrature:
    n, k = probes.shape
    total, rank = k * depth, k * inner
    filled = space.filled[:total]
    square = space.projection[:total]
    square = (square + square.conj().T) / 2
    # Columns that breakdown left empty: any Rayleigh quotient will do.
    square = jnp.where(jnp.diag(~filled), square[0, 0], square)
    spaces = left_out(square[:rank, :rank], filled[:rank], space.starts)
    sizes = [k * (depth - less) for less in (1, 2) if inner <= depth - less]
    coarser = [truncated(square, size) for size in sizes]
    eigen = decompose(jnp.stack([square, *coarser]))
    inside = jnp.where(filled[None, :rank, None], eigen.vectors[:, :rank], 0)
    outside = outside_of(spaces, n)
    weights = jax.vmap(partial(_weights, outside))(inside)
    # What LAPACK makes of NaN need not be NaN.
    weights = jnp.where(jnp.isnan(eigen.values)[:, None], jnp.nan, weights)
    mixture = mixture_of(outside, filled[:rank])
    return Quadrature(eigen, weights, mixture, outside, inside[0])


def outside_of(spaces: LeftOut, n: int) -> Outside:
    squares = jnp.sum(squared_modulus(spaces.remainder), axis=1)
    left = n - spaces.rank
    factor = jnp.sqrt(left / jnp.where(squares > 0, squares, 1))
    return Outside(factor[:, None] * spaces.remainder, spaces.missing, left)


def _weights(outside: Outside, inside: Inexact[Array, "r m"]) -> Float[Array, "k m"]:
    """The diagonal of V* M_i V for every i, V the eigenvectors of T."""
    missing = jnp.einsum("krp,rm->kpm", outside.missing.conj(), inside)
    own = squared_modulus(outside.remainder.conj() @ inside)
    whole = jnp.sum(squared_modulus(inside), axis=0, keepdims=True)
    return jnp.maximum(whole - jnp.sum(squared_modulus(missing), axis=1) + own, 0)


def mixture_of(outside: Outside, filled: Array) -> Inexact[Array, "r r"]:
    k, r, _ = outside.missing.shape
    missing = jnp.moveaxis(outside.missing, 0, 1).reshape(r, -1)
    own = outside.remainder.T
    changed = own @ own.conj().T - missing @ missing.conj().T
    return jnp.diag(filled.astype(changed.dtype)) + changed / k


@partial(jax.jit, static_argnums=(3, 4))
def _error(
    rule: Quadrature,
    values: Inexact[Array, "levels p m"],
    sizes: Float[Array, "p m"],
    eps: float,
    unresolved: bool,
) -> Float[Array, " p"]:
    """The standard error from f at the nodes, and from what rounding is judged by."""
    levels = jax.vmap(_read)(rule.weights, values)
    samples = levels[0]
    gap = quadrature_error(jnp.abs(mean(levels[:-1] - levels[1:])), unresolved)
    rounding = _read(jnp.mean(rule.weights[0], axis=0)[None], sizes)[:, 0]
    error = shared_error(samples, 4 * eps * rounding)
    if samples.shape[-1] > 1:
        used = jnp.any(rule.weights[0] != 0, axis=0)
        known = jnp.where(used, values[0], 0)
        scale = jax.vmap(magnitude)(known)[:, None]
        least = _least_error(rule, known / scale, samples / scale)
        error = jnp.maximum(error, scale[:, 0] * least)
    return both_errors(error, gap)


def _least_error(
    rule: Quadrature, values: Inexact[Array, "p m"], samples: Inexact[Array, "p k"]
) -> Float[Array, " p"]:
    """What the spread of samples must not be below: half the jackknife, and theory."""
    outside, inside = rule.outside, rule.inside
    depth = inside.shape[0] // samples.shape[1]
    missing = outside.missing[..., :depth]
    vectors = inside, inside.conj().T
    parts = missing, outside.remainder, outside.dimension, *vectors, values.T, samples
    half = jackknife_error(replicates(*parts), jnp.zeros_like(samples[:, 0].real)) / 2
    real = not jnp.iscomplexobj(rule.mixture)
    return no_less_than_theory(half, _variances(rule, values), real=real)


def _read(
    weights: Float[Array, "k m"], values: Inexact[Array, "p m"]
) -> Inexact[Array, "p k"]:
    """A node of no weight does not count, even where its value is infinite."""
    used = jnp.any(weights != 0, axis=0)
    return (weights.astype(values.dtype) @ jnp.where(used, values, 0).T).T


def _variances(rule: Quadrature, values: Inexact[Array, "p m"]) -> Float[Array, "p k"]:
    """|B w - w w* B w/|w|^2|^2, w what S_i leaves of probe i, B what it leaves of f(A)."""
    remainder, missing = rule.outside.remainder, rule.outside.missing
    vectors = rule.eigen.vectors[0]
    r = remainder.shape[1]
    turned = remainder @ vectors[:r].conj()
    image = jnp.einsum("km,pm,rm->pkr", turned, values, vectors)
    inner = jnp.einsum("krs,pkr->pks", missing.conj(), image[..., :r])
    squares = jnp.sum(squared_modulus(image[..., r:]), axis=-1)
    squares += jnp.sum(squared_modulus(inner), axis=-1)
    along = squared_modulus(jnp.einsum("kr,pkr->pk", remainder.conj(), image[..., :r]))
    lengths = jnp.sum(squared_modulus(remainder), axis=1)
    return jnp.maximum(squares - along / jnp.where(lengths > 0, lengths, 1)[None], 0)
