"""tr f(A) of any square A from one block Krylov run, each probe measuring what the others
leave, or all of it.

Notation of `block_quadrature`, whose identity does not need A to be Hermitian: with
H = Z* A Z, which Arnoldi's process makes, f(A) ~ Z f(H) Z*, and

    tr f(A) = E e_i,    e_i = tr(P_i f(A) P_i) + c_i r_i* f(A) r_i,
    tr f(A) = E p_i,    p_i = w_i* f(A) w_i.

Both are read off the same run, exact for polynomials of degree d - q + 1 and d. The e_i are
better by far where few directions have most of the sum, the p_i where the probes know
something that projections spoil: signs have no variance on diagonals, nor on whatever is
skew. So each has its error bar, and the value is the mean of both by inverse variances:

    value = (1 - s) mean p_i + s mean e_i = tr(f(H) M),
    M = (1 - s) W W*/k + s mean over i of J - N_i N_i* + c_i r_i r_i*,    E[Z M Z*] = I.

Where one of them is exact it has all of the weight. The error bar is the mean of both by
the same weights, as if they erred together.

c_i = (n - dim S_i)/|r_i|^2 is unbiased for probes of no preferred direction. For signs
c_i = 1 is, but then |r_i|^2, which says nothing of A, is most of the error (measured: up to
80 times what is left otherwise); the ratio has a bias of about

    -2 sum_j B_jj (P_i)_jj / (n - dim S_i),    B what S_i leaves of f(A), less its mean,

which means over 400 keys did not show. For samplers that are not known c_i = 1. (What they
did show is that the shares hang together with the samples: up to 0.2 of the error is bias.)

The derivative is that of `nodes`, with this M.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Inexact

from traceax._core.operator import size, unit_roundoff
from traceax._core.rule import Outcome
from traceax._linalg.columns import magnitude, mean
from traceax._linalg.jackknife import (
    both_errors,
    jackknife_error,
    quadrature_error,
    shared_error,
    standard_error,
)
from traceax._linalg.krylov import BlockKrylov, block_krylov, truncated
from traceax._linalg.left_out import left_out
from traceax._linalg.two_left_out import replicates
from traceax._quadrature.block_quadrature import Outside, Shape, mixture_of, outside_of
from traceax._quadrature.nodes import (
    Modes,
    Weights,
    arnoldi_nodes,
    at_nodes,
    mixed,
    modes_of,
    weighed,
)
from traceax._quadrature.scalar import MatrixFunction


class Rule(NamedTuple):
    """`probes` are those in the coordinates of the first q blocks."""

    modes: Modes
    weights: Weights
    outside: Outside
    probes: Inexact[Array, "k r"]
    filled: Bool[Array, " r"]


class Kind(NamedTuple):
    """What is known beforehand: that c_i is not 1, that the value is real, that quadrature
    cannot be judged; and rounding."""

    resphered: bool
    real: bool
    unresolved: bool
    eps: float


def block_arnoldi(
    subject: MatrixFunction,
    probes: Inexact[Array, "n k"],
    *,
    depth: int,
    resphered: bool,
    real: bool,
) -> Outcome:
    """`resphered`: the probes are of a length that tells nothing; `real`: the value is
    meant to be."""
    n, k = probes.shape
    space = block_krylov(subject.linear_map, probes, depth, hermitian=False)
    rule = _rule(space, n, depth, resphered)
    operator = subject.linear_map.operator
    unresolved = depth == 1 and size(operator) > 1
    kind = Kind(resphered, real, unresolved, unit_roundoff(operator))
    values = at_nodes(subject.fn, rule.modes.nodes)
    value, error, share = _value_and_error(rule, values, kind)
    first = Modes(*(x[0] for x in rule.modes))
    weights = Weights(*(jnp.mean(x[0], axis=0) for x in rule.weights))
    basis = space.basis[:, : k * depth]
    nodes = arnoldi_nodes(basis, first, weights, _mixtures(rule), share, real)
    return Outcome(value, error, nodes)


def _rule(space: BlockKrylov, n: int, depth: int, resphered: bool) -> Rule:
    k = space.starts.shape[0]
    inner = Shape(k, depth).inner
    total, rank = k * depth, k * inner
    filled = space.filled[:total]
    square = space.projection[:total]
    # Columns that breakdown left empty: any Rayleigh quotient will do.
    square = jnp.where(jnp.diag(~filled), square[0, 0], square)
    spaces = left_out(square[:rank, :rank], filled[:rank], space.starts)
    sizes = [k * (depth - less) for less in (1, 2) if inner <= depth - less]
    modes = modes_of(jnp.stack([square, *(truncated(square, s) for s in sizes)]), rank)
    as_they_are = Outside(spaces.remainder, spaces.missing, n - spaces.rank)
    outside = outside_of(spaces, n) if resphered else as_they_are
    probes = jnp.pad(space.starts, ((0, rank - k), (0, 0))).T
    each = partial(_weights, outside, probes, filled[:rank])
    weights = jax.vmap(each)(modes.vectors[:, :rank], modes.inverse)
    # What LAPACK makes of NaN need not be NaN.
    broken = jnp.any(jnp.isnan(square))
    weights = Weights(*(jnp.where(broken, jnp.nan, x) for x in weights))
    return Rule(modes, weights, outside, probes, filled[:rank])


def _weights(
    outside: Outside,
    probes: Inexact[Array, "k r"],
    filled: Bool[Array, " r"],
    right: Inexact[Array, "r m"],
    left: Inexact[Array, "m r"],
) -> Weights:
    """The diagonals of `left` M_i `right`."""
    outside, probes = jax.tree.map(lambda x: x.astype(left.dtype), (outside, probes))

    def forms(vectors: Inexact[Array, "k r"]) -> Inexact[Array, "k m"]:
        return (left @ vectors.T).T * (vectors.conj() @ right)

    missing = outside.missing
    after = jnp.einsum("mr,krp->kpm", left, missing)
    before = jnp.einsum("krp,rm->kpm", missing.conj(), right)
    whole = jnp.sum(left.T * jnp.where(filled[:, None], right, 0), axis=0)
    inside = whole[None, :] - jnp.sum(after * before, axis=1)
    return Weights(forms(probes), inside + forms(outside.remainder))


def _mixtures(rule: Rule) -> Inexact[Array, "2 r r"]:
    """Of the plain samples, and of those that leave one out."""
    plain = rule.probes.T @ rule.probes.conj() / rule.probes.shape[0]
    return jnp.stack([plain, mixture_of(rule.outside, rule.filled)])


def _value_and_error(
    rule: Rule, values: Inexact[Array, "levels m p"], kind: Kind
) -> tuple[Inexact[Array, " p"], Float[Array, " p"], Float[Array, " p"]]:
    """The mean of both estimates by inverse variances; plain ones where none is known. Its
    standard error, and the share of leave-one-out samples in it."""
    k = rule.probes.shape[0]
    plain, sizes, bias = _samples(rule.weights.plain, values, kind)
    error = both_errors(standard_error(plain, kind.eps * sizes), bias)
    samples, sizes, bias = _samples(rule.weights.left_out, values, kind)
    spread = shared_error(samples, kind.eps * sizes)
    if kind.resphered and k > 1:
        spread = jnp.maximum(spread, _half_jackknife(rule, values[0], samples))
    other = both_errors(spread, bias)
    tiny = jnp.finfo(error.dtype).tiny
    share = 1 / (1 + (other / jnp.maximum(error, tiny)) ** 2)
    share = jnp.where(jnp.isinf(error), 0, share)
    value = mixed(share, mean(plain), mean(samples))
    both = mixed(share, error, other)
    return value, jnp.where(share == 0, error, both), share


def _samples(
    weights: Inexact[Array, "levels k m"], values: Inexact[Array, "levels m p"], kind: Kind
) -> tuple[Inexact[Array, "p k"], Float[Array, " p"], Float[Array, " p"]]:
    """Samples, four times the size of their mean's terms, which the condition of the
    eigenvectors blows up, and the error of quadrature."""
    values = jnp.swapaxes(values, -1, -2)
    levels = weighed(weights[:, None], values[:, :, None])
    sizes = weighed(jnp.abs(weights[0])[None], jnp.abs(values[0])[:, None])
    if kind.real:
        # Conjugate eigenvalues have conjugate values, but not across a branch cut.
        crossed = jnp.abs(levels[0].imag) > 1e-3 * sizes
        levels = jnp.where(crossed, jnp.nan, levels.real)
    means = mean(levels)
    changes = jnp.abs(means[:-1] - means[1:])
    return levels[0], 4 * mean(sizes), quadrature_error(changes, kind.unresolved)


def _half_jackknife(
    rule: Rule, values: Inexact[Array, "m p"], samples: Inexact[Array, "p k"]
) -> Float[Array, " p"]:
    """As for Hermitian operators, where it was enough in every spectrum measured."""
    k, r = rule.probes.shape
    right, left = rule.modes.vectors[0, :r], rule.modes.inverse[0]
    outside = rule.outside
    missing, remainder, values, samples = (
        x.astype(right.dtype)
        for x in (outside.missing[..., : r // k], outside.remainder, values, samples)
    )
    scale = jax.vmap(magnitude, in_axes=1)(values)
    values = values / scale.astype(values.dtype)[None]
    samples = samples / scale.astype(values.dtype)[:, None]
    without = replicates(
        missing, remainder, outside.dimension, right, left, values, samples
    )
    exhausted = jnp.any(outside.missing[..., r // k :] != 0)
    return jnp.where(exhausted, 0, scale * jackknife_error(without, 0 * scale) / 2)
