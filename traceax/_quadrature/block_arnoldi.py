"""tr f(A) of any square A from one block Krylov run, in which each probe measures what the
others leave, or the whole trace.

Notation of `block_quadrature`, whose identity holds for any A. With H = Z* A Z, which
Arnoldi's process computes, f(A) ~ Z f(H) Z*, and

    tr f(A) = E e_i,    e_i = tr(P_i f(A) P_i) + c_i r_i* f(A) r_i,
    tr f(A) = E p_i,    p_i = w_i* f(A) w_i.

The same run gives both, exactly for polynomials of degree d - q + 1 and d. The e_i are far
better if few directions have most of the sum. The p_i are better if the probes have a
structure that projections destroy: signs have no variance for diagonals, nor for the
skew-symmetric part. So each has its own error bar, and the value is the mean of both by
inverse variances:

    value = (1 - s) mean p_i + s mean e_i = tr(f(H) M),
    M = (1 - s) W W*/k + s mean over i of J - N_i N_i* + c_i r_i r_i*,    E[Z M Z*] = I.

If one of them is exact, it gets all of the weight. The error bar is the mean of both by the
same weights, as if their errors were fully correlated.

c_i = (n - dim S_i)/|r_i|^2 is unbiased for probes of no preferred direction. For signs
c_i = 1 is unbiased. But then |r_i|^2, which does not depend on A, is most of the error
(measured: up to 80 times the rest). The ratio has a bias of about

    -2 sum_j B_jj (P_i)_jj / (n - dim S_i),    B = (I - P_i) f(A) (I - P_i) less its mean,

which means over 400 keys did not show. For unknown samplers c_i = 1. (The means did show
that the weights s are correlated with the samples: up to 0.2 of the error is bias.)

**The derivative.** With Z_r the first columns of Z, E[Z_r M Z_r*] = I, and
f(A) Z_r ~ Z f(H)[:, :r],

    tr f(A) = E tr(M Z_r* f(A) Z_r),
    d tr f(A) = tr(f'(A) dA) = E tr(M Z_r* dA f'(A) Z_r).

(The better balanced factors of the split rule would need a space of the adjoint, too.)
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from equinox.internal import Static
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Inexact

from traceax._core.operator import size, unit_roundoff
from traceax._core.rule import Outcome, with_own_jvp
from traceax._linalg import lapack
from traceax._linalg.columns import largest_modulus, mean
from traceax._linalg.jackknife import (
    half_jackknife_error,
    quadrature_error,
    shared_error,
    standard_error,
)
from traceax._linalg.krylov import BlockKrylov, Complements, block_krylov
from traceax._quadrature.block_quadrature import levels_and_complements, quadrature_matrix
from traceax._quadrature.nodes import (
    Nodes,
    Paired,
    at_nodes,
    perturbation,
    refuse_second,
    weighted_sum,
)
from traceax._quadrature.scalar import MatrixFunction, Slope


class Modes(NamedTuple):
    """f(H)[:, :r] = vectors diag(f(nodes)) inverse, for each of several H."""

    nodes: Inexact[Array, "levels m"]
    vectors: Inexact[Array, "levels m m"]
    inverse: Inexact[Array, "levels m r"]


class Both(NamedTuple):
    """The same for the samples p_i and e_i: weights of nodes, or quadrature matrices."""

    plain: Inexact[Array, ...]
    left_out: Inexact[Array, ...]

    def mean(self, share: Float[Array, "*values"]) -> Inexact[Array, ...]:
        """`share` is the weight s of the second one."""
        share = share.astype(self.plain.dtype)
        return (1 - share) * self.plain + share * self.left_out


class Rule(NamedTuple):
    modes: Modes
    weights: Both
    matrices: Both
    spaces: Complements


class Kind(NamedTuple):
    """What is known before the run: whether c_i is not 1, whether the value is real,
    whether the quadrature error is unknown; and the unit roundoff."""

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
    """`resphered`: c_i is not 1. `real`: the value of a real operator should be real."""
    operator = subject.linear_map.operator
    space = block_krylov(subject.linear_map, probes, depth, hermitian=False)
    rule = _rule(space, len(probes), resphered)
    unresolved = depth == 1 and size(operator) > 1
    kind = Kind(resphered, real, unresolved, unit_roundoff(operator))
    values = jnp.swapaxes(at_nodes(subject.fn, rule.modes.nodes), -1, -2)
    value, error, share = _value_and_error(rule, values, kind)
    return Outcome(value, error, _nodes(space.basis, rule, share, real))


def _rule(space: BlockKrylov, n: int, resphered: bool) -> Rule:
    levels, spaces = levels_and_complements(space, n, hermitian=False)
    spaces = spaces.resphered() if resphered else spaces
    k, rank = spaces.remainders.shape
    modes = _modes(levels, rank)
    filled = space.filled[:rank]
    probes = jnp.pad(space.starts, ((0, rank - k), (0, 0))).T
    each = partial(_weights, spaces, probes, filled)
    weights = jax.vmap(each)(modes.vectors[:, :rank], modes.inverse)
    # LAPACK may return finite eigenvectors for NaN input.
    broken = jnp.any(jnp.isnan(levels))
    weights = Both(*(jnp.where(broken, jnp.nan, x) for x in weights))
    plain = probes.T @ probes.conj() / k
    return Rule(modes, weights, Both(plain, quadrature_matrix(spaces, filled)), spaces)


def _modes(projections: Inexact[Array, "levels m m"], rank: int) -> Modes:
    """A perturbation at the level of rounding makes eigenvectors independent. LAPACK
    decomposes the levels one by one, as in `dense.decompose`."""
    rounding = perturbation(projections, float(jnp.finfo(projections.dtype).eps))
    nodes, vectors = jax.vmap(lapack.eig)(projections + rounding)
    unit = jnp.eye(nodes.shape[1], rank, dtype=nodes.dtype)
    return Modes(nodes, vectors, jax.vmap(lambda v: lapack.solve((v, unit)))(vectors))


def _weights(
    spaces: Complements,
    probes: Inexact[Array, "k r"],
    filled: Bool[Array, " r"],
    right: Inexact[Array, "r m"],
    left: Inexact[Array, "m r"],
) -> Both:
    """The diagonals of `left` M_i `right`."""
    vectors, remainders, probes = (
        x.astype(left.dtype) for x in (spaces.vectors, spaces.remainders, probes)
    )

    def forms(rows: Inexact[Array, "k r"]) -> Inexact[Array, "k m"]:
        return (left @ rows.T).T * (rows.conj() @ right)

    after = jnp.einsum("mr,krp->kpm", left, vectors)
    before = jnp.einsum("krp,rm->kpm", vectors.conj(), right)
    total = jnp.sum(left.T * jnp.where(filled[:, None], right, 0), axis=0)
    inside = total[None, :] - jnp.sum(after * before, axis=1)
    return Both(forms(probes), inside + forms(remainders))


def _value_and_error(
    rule: Rule, values: Inexact[Array, "levels p m"], kind: Kind
) -> tuple[Inexact[Array, " p"], Float[Array, " p"], Float[Array, " p"]]:
    """The mean of both estimates by inverse variances, its standard error, and the weight
    of the leave-one-out samples; that is zero if no variance is known."""
    plain, sizes, gap = _samples(rule.weights.plain, values, kind)
    error = jnp.hypot(standard_error(plain, kind.eps * sizes), gap)
    samples, sizes, gap = _samples(rule.weights.left_out, values, kind)
    spread = shared_error(samples, kind.eps * sizes)
    if kind.resphered and samples.shape[1] > 1:
        spread = jnp.maximum(spread, _half_jackknife(rule, values[0], samples))
    other = jnp.hypot(spread, gap)
    tiny = jnp.finfo(error.dtype).tiny
    share = 1 / (1 + (other / jnp.maximum(error, tiny)) ** 2)
    share = jnp.where(jnp.isinf(error), 0, share)
    value = Both(mean(plain), mean(samples)).mean(share)
    return value, jnp.where(share == 0, error, Both(error, other).mean(share)), share


def _samples(
    weights: Inexact[Array, "levels k m"], values: Inexact[Array, "levels p m"], kind: Kind
) -> tuple[Inexact[Array, "p k"], Float[Array, " p"], Float[Array, " p"]]:
    """Samples; four times the size of their mean's terms, which grows with the condition of
    the eigenvectors; and the quadrature error."""
    levels = weighted_sum(weights[:, None], values[:, :, None])
    sizes = weighted_sum(jnp.abs(weights[0])[None], jnp.abs(values[0])[:, None])
    if kind.real:
        # Conjugate eigenvalues have conjugate values, except on a branch cut.
        crossed = jnp.abs(levels[0].imag) > 1e-3 * sizes
        levels = jnp.where(crossed, jnp.nan, levels.real)
    means = mean(levels)
    changes = jnp.abs(means[:-1] - means[1:])
    return levels[0], 4 * mean(sizes), quadrature_error(changes, kind.unresolved)


def _half_jackknife(
    rule: Rule, values: Inexact[Array, "p m"], samples: Inexact[Array, "p k"]
) -> Float[Array, " p"]:
    """As for Hermitian operators, where it was enough in every spectrum measured."""
    left, scale = rule.modes.inverse[0], jax.vmap(largest_modulus)(values)
    right = rule.modes.vectors[0, : left.shape[1]]
    values, samples = (x.astype(left.dtype) / scale[:, None] for x in (values, samples))
    vectors, remainders, dimensions = rule.spaces
    spaces = Complements(
        vectors.astype(left.dtype), remainders.astype(left.dtype), dimensions
    )
    return scale * half_jackknife_error(spaces, right, values, left, samples)


def _nodes(
    basis: Inexact[Array, "n m"], rule: Rule, share: Float[Array, " p"], real: bool
) -> Nodes:
    """f(A) ~ Z f(H) Z*. Each value of f has its own weights and its own M."""
    modes = Modes(*(x[0] for x in rule.modes))
    by_value = jax.vmap(Both.mean, in_axes=(None, 0))
    weights = by_value(Both(*(jnp.mean(x[0], axis=0) for x in rule.weights)), share)
    matrices = by_value(rule.matrices, share)
    return Nodes(
        modes.nodes, weights, Partial(_pairs, basis, modes, matrices, Static(real))
    )


def _pairs(
    basis: Inexact[Array, "n m"],
    modes: Modes,
    matrices: Inexact[Array, "p r r"],
    real: Static,
    subject: MatrixFunction,
) -> Paired:
    """The columns of Z f'(H)[:, :r], and tr(M Z_r* dA Z f'(H)[:, :r])."""
    modes = with_own_jvp(modes, refuse_second, subject.linear_map)
    slopes = jax.vmap(Slope(subject.fn))(modes.nodes).astype(modes.nodes.dtype)
    inside = jnp.einsum("ma,ap,ar->pmr", modes.vectors, slopes, modes.inverse)
    inside = inside.real if real.value else inside
    right = jnp.einsum("nm,pmr->prn", basis.astype(inside.dtype), inside)
    matrices = jnp.repeat(matrices, len(right) // len(matrices), axis=0).astype(right.dtype)
    rows = basis[:, : matrices.shape[1]].conj().astype(right.dtype)

    def total(images: Inexact[Array, "p s n"]) -> Inexact[Array, " p"]:
        turned = jnp.einsum("nr,psn->prs", rows, images)
        return jnp.einsum("psr,prs->p", matrices, turned)

    return right, total
