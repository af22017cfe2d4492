"""tr f(A) of any square A from one block Krylov run, in which each probe measures what the
others leave, or the whole trace.

The notation is that of `block_quadrature`, whose identity holds for any A. With
H = Z* A Z, which Arnoldi's process computes, f(A) ~ Z f(H) Z*, and

    tr f(A) = E e_i,    e_i = tr(P_i f(A) P_i) + c_i r_i* f(A) r_i,
    tr f(A) = E p_i,    p_i = w_i* f(A) w_i.

The same run gives both. The quadrature is exact for polynomials of degree d - q + 1 in the
e_i, and of degree d in the p_i. The e_i are far better if few directions have most of the
sum. The p_i are better if the probes have a structure that projections destroy: signs have
no variance for diagonal operators, nor for the skew-symmetric part. So the value is the
mean of both, weighted by inverse variances:

    value = (1 - s) mean p_i + s mean e_i = tr(f(H) M),
    M = (1 - s) W W*/k + s mean over i of J - N_i N_i* + c_i r_i r_i*,    E[Z M Z*] = I.

If one of them is exact, it gets all of the weight. The error bar is the mean of both error
bars with the same weights, as if the errors were fully correlated.

For probes of no preferred direction c_i = (n - dim S_i)/|r_i|^2 is unbiased. For signs
c_i = 1 is unbiased, but then |r_i|^2 causes most of the error. With the ratio, signs have a
bias of about

    -2 sum_j B_jj (P_i)_jj / (n - dim S_i),    B = (I - P_i) f(A) (I - P_i) less its mean,

which means over 400 keys did not show. For unknown samplers c_i = 1. (The means did show
that the weights s are correlated with the samples: up to 0.2 of the error is bias.)

**Colours.** The probes of a colouring measure entries that are near in a graph, which
projections would mix. So each has its own Arnoldi process, and the value is the mean of the
p_i. If a colour has the probes z and z' with independent signs s and s', the difference of
s_a (f(A) z)_a and s'_a (f(A) z')_a has the variance of twice the sum of |f(A)_ab|^2 over
all b of this colour but a. The variance of z* f(A) z is at most twice the sum of this over
all a, which is twice the sum of |f(A)_ab|^2, and equal to it if f(A) is Hermitian. (The
neighbour residuals of `_probes.probing` rely on f(A) being Hermitian.) With C colours, a
few of which have a second probe, C times the mean over these few gives the error bar. If
there are several repeats, it comes from their spread.

**The derivative.** With Z_r the first columns of Z, E[Z_r M Z_r*] = I, and
f(A) Z_r ~ Z f(H)[:, :r],

    tr f(A) = E tr(M Z_r* f(A) Z_r),
    d tr f(A) = tr(f'(A) dA) = E tr(M Z_r* dA f'(A) Z_r).

(The better balanced factors of the split rule would need a space of the adjoint, too.)
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from traceax._core.rule import Outcome, Values, with_own_jvp
from traceax._linalg import jackknife, lapack
from traceax._linalg.columns import (
    dot,
    einsum,
    largest_modulus,
    largest_of_rows,
    mean,
    over,
    times,
)
from traceax._linalg.krylov import Complements, block_krylov, truncated
from traceax._quadrature.block_quadrature import (
    Run,
    Shape,
    forms_on_complements,
    levels_and_complements,
    quadrature_matrix,
    squared_norm_on_complements,
)
from traceax._quadrature.nodes import (
    Direction,
    Nodes,
    at_nodes,
    perturbation,
    refuse_second,
    slopes_at,
    weighted_sum,
)
from traceax._quadrature.scalar import MatrixFunction, Slope


class Modes(NamedTuple):
    """The decomposition f(H)[:, :r] = vectors diag(f(nodes)) inverse, for each level of H
    or for one."""

    nodes: Inexact[Array, "*levels m"]
    vectors: Inexact[Array, "*levels m m"]
    inverse: Inexact[Array, "*levels m r"]


def block_arnoldi(
    subject: MatrixFunction, run: Run, *, resphered: bool, real: bool
) -> Outcome:
    """Estimate tr f(A) from a block Krylov run by Arnoldi's process. If it is `resphered`,
    the c_i are not 1. If `real`, the operator is real and the value should be.

    A leading axis of two entries belongs to the p_i and to the e_i, in this order."""
    # What the run leaves out.
    space = run.space
    levels, spaces = levels_and_complements(space, subject=subject)
    spaces = spaces.resphered() if resphered else spaces
    k, rank, _ = spaces.sides.shape

    # The matrices M, and nodes and weights of all levels.
    starts = jnp.pad(space.starts.T, ((0, 0), (0, rank - k)))
    plain = dot(starts.T, starts.conj()) / k
    matrices = jnp.stack([plain, quadrature_matrix(spaces)])
    modes = _modes(levels, rank)
    sides, starts = (x.astype(modes.nodes.dtype) for x in (spaces.sides, starts))
    spaces = spaces._replace(sides=sides)
    each = jax.vmap(partial(_mode_weights, spaces, starts), out_axes=(1, 0, 0))
    weights, before, after = each(modes)
    # LAPACK may return finite eigenvectors for NaN input.
    weights = jnp.where(jnp.any(jnp.isnan(levels)), jnp.nan, weights)

    # The samples and the errors of both means.
    values = jnp.swapaxes(at_nodes(subject.fn, modes.nodes), -1, -2)
    # How far f moves if rounding moves the nodes.
    largest = largest_modulus(modes.nodes[0])
    step = (4 * subject.linear_map.eps * largest).reshape(1, 1)
    moves = largest * slopes_at(subject.fn, modes.nodes[:1], step)[0].T
    of_weights = partial(_samples, values[:, :, None], moves[:, None], real)
    samples, sizes, gaps = jax.vmap(of_weights)(weights)
    rounding = subject.linear_map.eps * sizes
    error = jackknife.standard_error(samples[0], rounding[0])
    spread = jackknife.shared_error(samples[1], rounding[1])
    modes = Modes(*(x[0] for x in modes))
    if resphered and k > 1:
        # What theory makes of the part of f(A) on the N_i, as for Hermitian A.
        scale, sides = largest_of_rows(values[0]), (before[0], after[0])
        forms = forms_on_complements(*sides, over(values[0], scale[:, None]))[1]
        lengths = jnp.abs(jnp.sum(before[0, :, -1] * after[0, :, -1], axis=-1))
        square = squared_norm_on_complements(forms, lengths)
        spread = jnp.maximum(spread, scale * jnp.sqrt(2 * square / k))
    errors = jnp.hypot(jnp.stack([error, spread]), gaps)

    # The mean of both, in which the e_i have a share. It is zero if no variance is known.
    ratio = errors[1] / jnp.maximum(errors[0], jnp.finfo(errors.dtype).tiny)
    share = jnp.where(jnp.isinf(errors[0]), 0, 1 / (1 + ratio**2))

    def mixed(pair: Inexact[Array, "2 ..."], share: Array) -> Array:
        return times(1 - share, pair[0]) + times(share, pair[1])

    value = mixed(mean(samples), share)
    error, gap = (jnp.where(share == 0, x[0], mixed(x, share)) for x in (errors, gaps))
    weights = mixed(jnp.mean(weights[:, 0], axis=1)[:, None], share[:, None])
    matrices = mixed(matrices[:, None], share[:, None, None])
    pairs = ArnoldiPairs(space.basis, modes, real, matrices)
    readout = Nodes(modes.nodes[None, None], weights[None, None], pairs)
    return Outcome(value, error, readout, quadrature_error=gap)


def _modes(levels: Inexact[Array, "levels m m"], rank: int) -> Modes:
    """Decompose all levels of H, one by one as in `dense.in_one_loop`. A perturbation at
    the level of rounding makes the eigenvectors independent."""
    eps = float(jnp.finfo(levels.dtype).eps)
    nodes, vectors = jax.vmap(lambda h: lapack.eig(h + perturbation(h, eps)))(levels)
    unit = jnp.eye(nodes.shape[1], rank, dtype=nodes.dtype)
    return Modes(nodes, vectors, jax.vmap(lambda v: lapack.solve((v, unit)))(vectors))


def _mode_weights(
    spaces: Complements, starts: Inexact[Array, "k r"], modes: Modes
) -> tuple[Array, Inexact[Array, "k s m"], Inexact[Array, "k s m"]]:
    """Return the weight [which mean, probe, node] of each node in each sample, which is the
    diagonal of the inverse times M_i times the eigenvectors V; [N_i, r_i]* V; and the
    transpose of V^{-1} [N_i, r_i]."""
    left, right = modes.inverse, modes.vectors[: modes.inverse.shape[1]]
    after = einsum("mr,krp->kpm", left, spaces.sides)
    before = einsum("krp,rm->kpm", spaces.sides.conj(), right)
    total = jnp.sum(left.T * jnp.where(spaces.inside[:, None], right, 0), axis=0)
    changed = jnp.sum(times(spaces.signs[None, :, None], after * before), axis=1)
    plain = dot(left, starts.T).T * dot(starts.conj(), right)
    return jnp.stack([plain, total[None, :] + changed]), before, after


def _samples(
    values: Inexact[Array, "levels p _ m"],
    moves: Float[Array, "p _ m"],
    real: bool,
    weights: Inexact[Array, "levels k m"],
) -> tuple[Inexact[Array, "p k"], Float[Array, " p"], Float[Array, " p"]]:
    """Return the samples; four times the size of the terms of their mean, which grows with
    the condition of the eigenvectors, and of the `moves` of f over those of its nodes; and
    the quadrature error."""
    levels = weighted_sum(weights[:, None], values)
    sizes = weighted_sum(jnp.abs(weights[0])[None], jnp.abs(values[0]))
    if real:
        # Conjugate eigenvalues have conjugate values, except on a branch cut. A probe that
        # nearly misses all large values says nothing about that.
        crossed = jnp.abs(levels[0].imag) > 1e-3 * jnp.maximum(sizes, mean(sizes)[:, None])
        levels = jnp.where(crossed, jnp.nan, levels.real)
    # Without a shorter run to compare with, the quadrature error is unknown.
    rounding = 4 * float(jnp.finfo(sizes.dtype).eps) * mean(sizes)
    gap = jackknife.quadrature_error(mean(levels), unresolved=True, rounding=rounding)
    moved = weighted_sum(jnp.abs(weights[0])[None], moves)
    return levels[0], 4 * mean(sizes + moved), gap.astype(sizes.dtype)


def coloured_arnoldi(
    subject: MatrixFunction, probes: ColouredProbes, *, depth: int, design: Any, real: bool
) -> Outcome:
    """Estimate tr f(A) by an Arnoldi process of `depth` steps for each coloured probe."""
    count = design.num_probes
    block = jnp.hstack([probes.first, probes.again])
    sizes = Shape(1, depth).levels(mixed=False)

    def run(start: Inexact[Array, " n"]) -> tuple[Array, Array, Array]:
        space = block_krylov(subject.linear_map, start[:, None], depth, hermitian=False)
        return space.basis, truncated(space.completed(), sizes), space.starts[0, 0]

    basis, levels, lengths = jax.vmap(run)(block.T)
    modes = jax.vmap(partial(_modes, rank=1))(levels)
    lengths = lengths.astype(modes.nodes.dtype)[:, None, None, None]
    inverse = lengths * modes.inverse
    weights = (inverse * lengths.conj())[..., 0] * modes.vectors[:, :, 0]
    weights = jnp.where(jnp.any(jnp.isnan(levels)), jnp.nan, weights)
    values = at_nodes(subject.fn, modes.nodes)
    modes = Modes(modes.nodes[:, 0], modes.vectors[:, 0], inverse[:, 0])

    # The samples, and the error of quadrature.
    scales = jax.vmap(largest_modulus)(modes.nodes)[:count, None]
    moves = slopes_at(subject.fn, modes.nodes[:count], 4 * subject.linear_map.eps * scales)
    moves = jnp.moveaxis(scales[..., None] * moves, -1, 0)
    by_level = jnp.moveaxis(values[:count], (1, 3), (0, 1))
    weights = jnp.moveaxis(weights[:count], 1, 0)
    samples, size, gap = _samples(by_level, moves, real, weights)
    rounding = subject.linear_map.eps * size
    if design.num_samples > 1:
        error = design.mean_and_error(samples, rounding)[1]
    else:
        # What f(A) adds to the diagonal along the probes of some colours, and again.
        known = jnp.where(modes.inverse == 0, 0, values[:, 0])
        chosen = jnp.concatenate([probes.chosen, jnp.arange(count, len(basis))])
        factors = (x[chosen] for x in (modes.vectors, known, modes.inverse[..., 0]))
        inner = einsum("Nam,Nmp,Nm->Npa", *factors)
        images = einsum("Nna,Npa->Npn", basis[chosen].astype(inner.dtype), inner)
        images = images * block.T[chosen].conj()[:, None].astype(images.dtype)
        once, again = jnp.split(images.real if real else images, 2)
        apart = jnp.moveaxis(once - again, 1, 0).reshape(images.shape[1], -1)
        apart = apart / (count * len(probes.chosen)) ** 0.5
        error = jackknife.length(apart, rounding)

    weights = weights[0].reshape(1, 1, 1, -1) / count
    modes = Modes(*(x[:count] for x in modes))
    pairs = ColouredPairs(basis[:count], modes, real, probes.first)
    readout = Nodes(modes.nodes.reshape(1, 1, -1), weights, pairs)
    return Outcome(mean(samples), jnp.hypot(error, gap), readout, quadrature_error=gap)


class ColouredProbes(NamedTuple):
    """The probes of all colours, for each repeat; and, if there is one repeat, probes of
    the `chosen` colours with fresh signs."""

    first: Inexact[Array, "n N"]
    again: Inexact[Array, "n t"]
    chosen: Int[Array, " t"]


class Pairs(eqx.Module):
    """The right vectors of the derivative, f'(A) Z[:, :r] ~ Z f'(H)[:, :r] of one basis Z
    or of several."""

    basis: Inexact[Array, "*N n m"]
    modes: Modes
    real: bool = eqx.field(static=True)

    def right(self, subject: MatrixFunction) -> Inexact[Array, "p *N r n"]:
        modes = with_own_jvp(self.modes, refuse_second, subject.linear_map)
        slopes = at_nodes(Slope(subject.fn), modes.nodes).astype(modes.nodes.dtype)
        how = "...am,...mp,...mr->p...ar"
        inside = einsum(how, modes.vectors, slopes, modes.inverse)
        inside = inside.real if self.real else inside
        return einsum("...na,p...ar->p...rn", self.basis.astype(inside.dtype), inside)


class ColouredPairs(Pairs):
    """The derivative d tr f(A) = mean over probes of w_i* dA f'(A) w_i."""

    probes: Inexact[Array, "n N"]

    def __call__(self, subject: MatrixFunction, direction: Direction) -> Values:
        right = self.right(subject)[:, :, 0]
        left = self.probes.T.conj().astype(right.dtype) / len(self.basis)
        return jnp.sum(left[None] * direction.images(right), axis=(1, 2))


class ArnoldiPairs(Pairs):
    """The derivative d tr f(A), by f(A) ~ Z f(H) Z*. Each value of f has its own M."""

    matrices: Inexact[Array, "p r r"]

    def __call__(self, subject: MatrixFunction, direction: Direction) -> Values:
        """Return tr(M Z_r* dA Z f'(H)[:, :r])."""
        right = self.right(subject)
        copies = len(right) // len(self.matrices)
        matrices = jnp.repeat(self.matrices, copies, axis=0).astype(right.dtype)
        rows = self.basis[:, : matrices.shape[1]].conj().astype(right.dtype)
        turned = einsum("nr,psn->prs", rows, direction.images(right))
        return einsum("psr,prs->p", matrices, turned)
