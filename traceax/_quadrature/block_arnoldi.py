"""tr f(A) of any square A from one block Krylov run, in which each probe measures what the
others leave, or the whole trace.

Notation of `block_quadrature`, whose identity holds for any A. With H = Z* A Z, which
Arnoldi's process computes, f(A) ~ Z f(H) Z*, and

    tr f(A) = E e_i,    e_i = tr(P_i f(A) P_i) + c_i r_i* f(A) r_i,
    tr f(A) = E p_i,    p_i = w_i* f(A) w_i.

The same run gives both, exactly for polynomials of degree d - q + 1 and d. The e_i are far
better if few directions have most of the sum. The p_i are better if the probes have a
structure that projections destroy: signs have no variance for diagonals, nor for the
skew-symmetric part. So the value is the mean of both by inverse variances:

    value = (1 - s) mean p_i + s mean e_i = tr(f(H) M),
    M = (1 - s) W W*/k + s mean over i of J - N_i N_i* + c_i r_i r_i*,    E[Z M Z*] = I.

If one of them is exact, it gets all of the weight. The error bar is the mean of both by the
same weights, as if their errors were fully correlated.

c_i = (n - dim S_i)/|r_i|^2 is unbiased for probes of no preferred direction. For signs c_i
= 1 is unbiased. But then |r_i|^2 is most of the error. The ratio has a bias of about

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

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._core.rule import Outcome, with_own_jvp
from traceax._linalg import jackknife, lapack
from traceax._linalg.columns import dot, einsum, largest_modulus, mean
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

    plain: Inexact[Array, "..."]
    left_out: Inexact[Array, "..."]

    def mean(self, share: Float[Array, "*values"]) -> Inexact[Array, "..."]:
        """`share` is the weight s of the second one."""
        share = share.astype(self.plain.dtype)
        return (1 - share) * self.plain + share * self.left_out


def block_arnoldi(
    subject: MatrixFunction,
    probes: Inexact[Array, "n k"],
    *,
    depth: int,
    resphered: bool,
    real: bool,
) -> Outcome:
    """`resphered`: c_i is not 1. `real`: the value of a real operator should be real."""
    n = len(probes)
    space = block_krylov(subject.linear_map, probes, depth, hermitian=False)
    levels, spaces = levels_and_complements(space, n, hermitian=False)
    spaces = spaces.resphered() if resphered else spaces
    modes = _modes(levels, spaces.remainders.shape[1])
    weights, matrices = _weights_and_matrices(space, modes, spaces)
    # LAPACK may return finite eigenvectors for NaN input.
    broken = jnp.any(jnp.isnan(levels))
    weights = Both(*(jnp.where(broken, jnp.nan, x) for x in weights))
    known = resphered, real, depth == 1 and n > 1, subject.linear_map.eps
    rule = Rule(modes, weights, spaces, *known)
    values = jnp.swapaxes(at_nodes(subject.fn, modes.nodes), -1, -2)
    value, error, share = rule.value_and_error(values)
    by_value = jax.vmap(Both.mean, in_axes=(None, 0))
    first = Both(*(jnp.mean(x[0], axis=0) for x in weights))
    modes = Modes(*(x[0] for x in modes))
    pairs = ArnoldiPairs(space.basis, modes, by_value(matrices, share), real)
    return Outcome(value, error, Nodes(modes.nodes, by_value(first, share), pairs))


def _modes(projections: Inexact[Array, "levels m m"], rank: int) -> Modes:
    """A perturbation at the level of rounding makes eigenvectors independent. LAPACK
    decomposes the levels one by one, as in `dense.decompose`."""
    rounding = perturbation(projections, float(jnp.finfo(projections.dtype).eps))
    nodes, vectors = jax.vmap(lapack.eig)(projections + rounding)
    unit = jnp.eye(nodes.shape[1], rank, dtype=nodes.dtype)
    return Modes(nodes, vectors, jax.vmap(lambda v: lapack.solve((v, unit)))(vectors))


def _weights_and_matrices(
    space: BlockKrylov, modes: Modes, spaces: Complements
) -> tuple[Both, Both]:
    """The diagonals of f's left vectors times M_i times its right vectors, and M."""
    k, rank = spaces.remainders.shape
    probes = jnp.pad(space.starts, ((0, rank - k), (0, 0))).T
    matrices = Both(dot(probes.T, probes.conj()) / k, quadrature_matrix(spaces))
    vectors, remainders, probes = (
        x.astype(modes.nodes.dtype) for x in (spaces.vectors, spaces.remainders, probes)
    )

    def weights(right: Inexact[Array, "r m"], left: Inexact[Array, "m r"]) -> Both:
        def forms(rows: Inexact[Array, "k r"]) -> Inexact[Array, "k m"]:
            return dot(left, rows.T).T * dot(rows.conj(), right)

        after = einsum("mr,krp->kpm", left, vectors)
        before = einsum("krp,rm->kpm", vectors.conj(), right)
        total = jnp.sum(left.T * jnp.where(spaces.inside[:, None], right, 0), axis=0)
        inside = total[None, :] - jnp.sum(after * before, axis=1)
        return Both(forms(probes), inside + forms(remainders))

    return jax.vmap(weights)(modes.vectors[:, :rank], modes.inverse), matrices


class Rule(eqx.Module):
    """What values and errors are computed from. Before the run it is known whether c_i is
    not 1, whether the value is real, and whether the quadrature error is unknown."""

    modes: Modes
    weights: Both
    spaces: Complements
    resphered: bool = eqx.field(static=True)
    real: bool = eqx.field(static=True)
    unresolved: bool = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def value_and_error(
        self, values: Inexact[Array, "levels p m"]
    ) -> tuple[Inexact[Array, " p"], Float[Array, " p"], Float[Array, " p"]]:
        """The mean of both estimates by inverse variances, its standard error, and the
        weight of the leave-one-out samples; that is zero if no variance is known."""
        plain, sizes, gap = self._samples(self.weights.plain, values)
        error = jnp.hypot(jackknife.standard_error(plain, self.eps * sizes), gap)
        samples, sizes, gap = self._samples(self.weights.left_out, values)
        spread = jackknife.shared_error(samples, self.eps * sizes)
        if self.resphered and samples.shape[1] > 1:
            spread = jnp.maximum(spread, self._half_jackknife(values[0], samples))
        other = jnp.hypot(spread, gap)
        tiny = jnp.finfo(error.dtype).tiny
        share = 1 / (1 + (other / jnp.maximum(error, tiny)) ** 2)
        share = jnp.where(jnp.isinf(error), 0, share)
        value = Both(mean(plain), mean(samples)).mean(share)
        return value, jnp.where(share == 0, error, Both(error, other).mean(share)), share

    def _samples(
        self, weights: Inexact[Array, "levels k m"], values: Inexact[Array, "levels p m"]
    ) -> tuple[Inexact[Array, "p k"], Float[Array, " p"], Float[Array, " p"]]:
        """Samples; four times the size of their mean's terms, which grows with the
        condition of the eigenvectors; and the quadrature error."""
        levels = weighted_sum(weights[:, None], values[:, :, None])
        sizes = weighted_sum(jnp.abs(weights[0])[None], jnp.abs(values[0])[:, None])
        if self.real:
            # Conjugate eigenvalues have conjugate values, except on a branch cut.
            crossed = jnp.abs(levels[0].imag) > 1e-3 * sizes
            levels = jnp.where(crossed, jnp.nan, levels.real)
        means = mean(levels)
        changes = jnp.abs(means[:-1] - means[1:])
        gap = jackknife.quadrature_error(changes, self.unresolved)
        return levels[0], 4 * mean(sizes), gap

    def _half_jackknife(
        self, values: Inexact[Array, "p m"], samples: Inexact[Array, "p k"]
    ) -> Float[Array, " p"]:
        """As for Hermitian operators, where it was enough in every spectrum measured."""
        left, scale = self.modes.inverse[0], jax.vmap(largest_modulus)(values)
        right = self.modes.vectors[0, : left.shape[1]]
        unit = scale[:, None].astype(left.dtype)
        values, samples = (x.astype(left.dtype) / unit for x in (values, samples))
        vectors, remainders = (x.astype(left.dtype) for x in self.spaces[:2])
        spaces = self.spaces._replace(vectors=vectors, remainders=remainders)
        return scale * jackknife.half_jackknife_error(spaces, right, values, left, samples)


class ArnoldiPairs(eqx.Module):
    """f(A) ~ Z f(H) Z*; each value of f has its own M."""

    basis: Inexact[Array, "n m"]
    modes: Modes
    matrices: Inexact[Array, "p r r"]
    real: bool = eqx.field(static=True)

    def __call__(self, subject: MatrixFunction) -> Paired:
        """The columns of Z f'(H)[:, :r], and tr(M Z_r* dA Z f'(H)[:, :r])."""
        modes = with_own_jvp(self.modes, refuse_second, subject.linear_map)
        slopes = jax.vmap(Slope(subject.fn))(modes.nodes).astype(modes.nodes.dtype)
        inside = einsum("ma,ap,ar->pmr", modes.vectors, slopes, modes.inverse)
        inside = inside.real if self.real else inside
        right = einsum("nm,pmr->prn", self.basis.astype(inside.dtype), inside)
        copies = len(right) // len(self.matrices)
        matrices = jnp.repeat(self.matrices, copies, axis=0).astype(right.dtype)
        rows = self.basis[:, : matrices.shape[1]].conj().astype(right.dtype)

        def total(images: Inexact[Array, "p s n"]) -> Inexact[Array, " p"]:
            turned = einsum("nr,psn->prs", rows, images)
            return einsum("psr,prs->p", matrices, turned)

        return right, total
