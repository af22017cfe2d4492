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

from traceax._core.operator import size, unit_roundoff
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
from traceax._quadrature.combination import bounds_through, combined, slope_of, through
from traceax._quadrature.dense import Eigen, decompose
from traceax._quadrature.nodes import Nodes, at_nodes, slopes_at, split_nodes, weighed
from traceax._quadrature.scalar import Flat, MatrixFunction


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
    return read_off(space, subject, inner=inner)


def read_off(
    space: BlockKrylov, subject: MatrixFunction, *, inner: int, kept: int = 0
) -> Outcome:
    """The estimate from a space whose first `kept` starts are no probes: they are in every
    S_i, which is independent of w_i as before."""
    width = space.starts.shape[0]
    depth = space.projection.shape[1] // width
    rule = quadrature(space, depth, inner, kept)
    eigen, slopes = defined(rule.eigen, subject.fn, is_unfinished(space))
    rule = eqx.tree_at(lambda r: r.eigen, rule, eigen)
    eps = unit_roundoff(subject.linear_map.operator)
    unresolved = depth == 1 and size(subject.linear_map.operator) > 1
    values = jnp.swapaxes(at_nodes(subject.fn, rule.eigen.values), -1, -2)
    sizes = jnp.abs(values[0]) + slopes.T
    samples = _read(rule.weights[0], values[0])
    slope = slope_of(subject.combine, mean(samples))
    mapped = through(slope, values), bounds_through(slope, sizes)
    error = _error(rule, *mapped, eps, unresolved)
    traces = Outcome(mean(samples), error, nodes_of(space, rule, depth))
    return combined(subject.combine, traces, samples, eps)


def is_unfinished(space: BlockKrylov) -> Bool[Array, ""]:
    """Whether something is left beyond its last block but one."""
    return jnp.any(space.filled[-space.starts.shape[1] :])


def defined(
    eigen: Eigen, fn: Flat, is_open: Bool[Array, ""]
) -> tuple[Eigen, Float[Array, "m p"]]:
    """The nodes of all levels, and by how much the rounding of one moves f there.

    Nodes that rounding may have moved to where f is not defined, below zero for a
    logarithm, are moved back by as much, and may be anything down to the square of that.
    But if the space is not `is_open`, because nothing is left beyond it, zero is zero; in
    single precision a small eigenvalue is more likely.
    """
    nodes = eigen.values
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
    return Eigen(nodes, eigen.vectors), slopes


def nodes_of(space: BlockKrylov, rule: Quadrature, depth: int) -> Nodes:
    basis = space.basis[:, : rule.eigen.values.shape[1]].T[None]
    whole = Eigen(*(x[:1] for x in rule.eigen))
    return split_nodes(basis, whole, rule.mixture[None], num_steps=max(5 * depth, 40))


def quadrature(space: BlockKrylov, depth: int, inner: int, kept: int = 0) -> Quadrature:
    rank = space.starts.shape[0] * inner
    filled = space.filled[:rank]
    eigen, spaces = levels(space, depth, inner, kept)
    inside = jnp.where(filled[None, :, None], eigen.vectors[:, :rank], 0)
    outside = outside_of(spaces, space.basis.shape[0])
    weights = jax.vmap(partial(_weights, outside))(inside)
    # What LAPACK makes of NaN need not be NaN.
    weights = jnp.where(jnp.isnan(eigen.values)[:, None], jnp.nan, weights)
    mixture = mixture_of(outside, filled)
    return Quadrature(eigen, weights, mixture, outside, inside[0])


def levels(
    space: BlockKrylov, depth: int, inner: int, kept: int = 0
) -> tuple[Eigen, LeftOut]:
    """T decomposed, and T without its last blocks; and what the S_i are in it."""
    k = space.starts.shape[0]
    rank, filled = k * inner, space.filled
    square = (space.projection + space.projection.conj().T) / 2
    # Columns that breakdown left empty: any Rayleigh quotient will do.
    square = jnp.where(jnp.diag(~filled), square[0, 0], square)
    spaces = left_out(square[:rank, :rank], filled[:rank], space.starts, kept)
    sizes = [k * (depth - less) for less in range(3) if inner <= depth - less]
    return decompose(jax.vmap(partial(truncated, square))(jnp.array(sizes))), spaces


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
        error = jnp.maximum(error, _least_error(rule, values[0]))
    return both_errors(error, gap)


def _least_error(rule: Quadrature, values: Inexact[Array, "p m"]) -> Float[Array, " p"]:
    """What the spread of samples must not be below: half the jackknife, and theory.

    Of f less a constant, whose trace is certain, or its rounding would count."""
    outside, inside, weights = rule.outside, rule.inside, rule.weights[0]
    centre = mean(_read(weights, values)) / jnp.mean(jnp.sum(weights, axis=1))
    used = jnp.any(weights != 0, axis=0)
    values = jnp.where(used, values - centre[:, None], 0)
    scale = jax.vmap(magnitude)(values)
    values = values / scale[:, None]
    samples = _read(weights, values)
    missing = outside.missing[..., : inside.shape[0] // samples.shape[1]]
    vectors = inside, inside.conj().T
    pairs = missing, outside.remainder, outside.dimension, *vectors, values.T, samples
    half = jackknife_error(replicates(*pairs), jnp.zeros_like(samples[:, 0].real)) / 2
    # Of spaces that lack more than they have blocks, for the rest of it is rounding, pairs
    # say nothing.
    exhausted = jnp.any(outside.missing[..., missing.shape[-1] :] != 0)
    half = jnp.where(exhausted, 0, half)
    real = not jnp.iscomplexobj(rule.mixture)
    return scale * no_less_than_theory(half, _variances(rule, values), real=real)


def _read(
    weights: Float[Array, "k m"], values: Inexact[Array, "p m"]
) -> Inexact[Array, "p k"]:
    """f of each sample."""
    return weighed(weights[None], values[:, None])


def _variances(rule: Quadrature, values: Inexact[Array, "p m"]) -> Float[Array, "p k"]:
    """|B w - w w* B w/|w|^2|^2, w what S_i leaves of probe i, B what it leaves of f(A)."""
    remainder, missing = rule.outside.remainder, rule.outside.missing
    vectors = rule.eigen.vectors[0]
    r = remainder.shape[1]
    turned = remainder @ vectors[:r].conj()
    image = jnp.einsum("km,pm,rm->pkr", turned, values, vectors)
    inner = jnp.einsum("krs,pkr->pks", missing.conj(), image[..., :r])
    w = jnp.einsum("krs,kr->ks", missing.conj(), remainder)
    lengths = jnp.sum(squared_modulus(remainder), axis=1)
    # Before squares are taken: of multiples of I nothing but rounding is left.
    along = jnp.einsum("ks,pks->pk", w.conj(), inner)
    along = along / jnp.where(lengths > 0, lengths, 1).astype(along.dtype)[None]
    inner = inner - along[..., None] * w[None]
    squares = jnp.sum(squared_modulus(image[..., r:]), axis=-1)
    return squares + jnp.sum(squared_modulus(inner), axis=-1)
