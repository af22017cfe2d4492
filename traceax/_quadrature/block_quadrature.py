"""tr f(A) from one block Krylov run, in which each probe measures what the others leave.

Let Z have the orthonormal columns of K_d(A, W), where W is the block of k probes, and let
T = Z* A Z. For q < d let P_i be the projector on S_i = K_q(A, W without w_i). Because w_i
is independent of S_i and has no preferred direction, for every i

    tr f(A) = E e_i,    e_i = tr(P_i f(A) P_i) + c_i r_i* f(A) r_i,
    r_i = (I - P_i) w_i,    c_i = (n - dim S_i) / |r_i|^2.

S_i and r_i lie in the first q blocks of Z, on which f(A) ~ Z f(T) Z*. In the quadratic
forms this is exact for polynomials of degree 2 (d - q) + 1. So every matvec serves twice,
for the spaces and for the quadrature, and all that follows is small. With N_i, an
orthonormal basis of the complement of S_i in the first q blocks (`krylov`), and J, the
identity on these blocks, the quadrature matrix is

    M = mean over i of J - N_i N_i* + c_i r_i r_i*,    E[Z M Z*] = I,    value = tr(f(T) M).

The nodes of the quadrature are the eigenvalues of T, and each sample e_i gives each node a
weight. The derivative is that of the split rule, with Z M Z* in place of the probes.

**The standard error.** The samples share their probes, so their spread is too small, but
rarely by more than sqrt(2), which is the most that parts of two probes can do
(`shared_error`). If few important directions are left, the samples are skewed. If as many
directions matter as there are probes, all samples are low together. In both cases theory
estimates their variance from what S_i leaves of f(A) (`_error_by_theory`). The quadrature
error comes from the changes when T lacks its last blocks.

**Two rules.** This is Gauss's rule, f(T). If a number bounds the spectrum (the `node` of
the subject), Radau's rule is f(T_R), where T_R has one block more, and the node as an
eigenvalue (`dense.Radau`). The last residual gives that block, so it takes no matvec. M
reads the first q blocks of f(T_R) as it reads those of f(T). For functions whose
derivatives alternate in sign the truth lies between both, and `nodes.mixture` joins them,
by what they change when T and T_R lack two blocks. The distance of both rules gives the
quadrature error.

**The order of the computation.** `levels_and_complements` makes T, T without its last
blocks, and the N_i from a run. `spectrum_of` decomposes these matrices, adds Radau's rules,
and evaluates f at all nodes. `Quadrature` has the weights of the nodes, and the standard
error. `trace_from_spectrum` puts them together.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact

from traceax._core.rule import Outcome
from traceax._linalg import jackknife
from traceax._linalg.columns import (
    Block,
    Number,
    OfProbes,
    diagonal_of,
    dot,
    einsum,
    largest_of_rows,
    mean,
    over,
    promoted,
    squared_modulus,
    summed,
    times,
)
from traceax._linalg.krylov import (
    FINE,
    BlockKrylov,
    Complements,
    Filled,
    block_krylov,
    complements,
    frame_of,
    truncated,
)
from traceax._quadrature.dense import (
    Eigen,
    OfNodes,
    decompose_above,
    largest_of,
)
from traceax._quadrature.nodes import (
    Rules,
    SplitRule,
    at_nodes,
    in_domain,
    mixture,
    slopes_at,
    weighted_sum,
)
from traceax._quadrature.scalar import (
    Flat,
    MatrixFunction,
    Slope,
    Traces,
    traces_outcome,
)

Levels = Inexact[Array, "levels m m"]
AllValues = Inexact[Array, "levels rules p w"]
Bound = Float[Array, "p w"]
Errors = Float[Array, " p"]
Sides = Inexact[Array, "k s m"]
Forms = Inexact[Array, "v k s s"]


# Up to so many functions of one run, such as the points of a grid, share a product.
FEW = 8


class Shape(NamedTuple):
    """The shape of a run: `depth` blocks of `width` probes, of which the first `inner`
    blocks make the spaces S_i."""

    width: int
    depth: int

    @property
    def inner(self) -> int:
        """The number q of blocks. The last two blocks, or a fifth of all, serve the
        quadrature alone. But the spaces have two blocks if possible, since the first one
        takes no matvec."""
        inner = min(self.depth - 2, round(0.8 * self.depth))
        return max(1, min(2, self.depth - 1), inner)

    @property
    def num_matvecs(self) -> int:
        return self.width * self.depth

    def levels(self, *, mixed: bool) -> list[int]:
        """Return the depths at which T is read: all blocks, and one and two less; or, for
        the mixture of two rules, two less, or one if that is too few. (What one block more
        changes alternates in size if the spectrum is symmetric.) None has fewer blocks than
        the spaces."""
        depths = [self.depth - less for less in range(3) if self.depth - less >= self.inner]
        return [depths[0], *depths[1:][-1:]] if mixed else depths


def shape_for(num_matvecs: int) -> Shape:
    """Return the shape of a run on a budget, about as wide as it is deep.

    It was measured over many kinds of spectra (`tests/benchmarks/spectra.py`): wider runs
    have worse gradients and no better values, and deeper runs have fewer samples for the
    error bar."""
    depth = num_matvecs // math.isqrt(num_matvecs)
    return Shape(num_matvecs // depth, depth)


class Run(NamedTuple):
    """A block Krylov space, and the probes that it begins with."""

    space: BlockKrylov
    probes: Block


def krylov_run(subject: MatrixFunction, probes: Block, *, depth: int, **how: Any) -> Run:
    """Make a block Krylov space of `depth` blocks. It has the next block, too, if the
    subject has a node. `how` are further arguments of `block_krylov`."""
    how["extend"] = subject.node is not None
    return Run(block_krylov(subject.linear_map, probes, depth, **how), probes)


def block_quadrature(
    subject: MatrixFunction, run: Run, *, resphered: bool = True
) -> Outcome:
    """Estimate tr f(A) from a block Krylov run. The c_i are 1 if the r_i must not be
    `resphered`."""
    space = run.space
    levels, spaces = levels_and_complements(space, subject=subject)
    spaces = spaces.resphered() if resphered else spaces
    return trace_from_spectrum(space, spectrum_of(space, levels, subject), spaces, subject)


def trace_from_spectrum(
    space: BlockKrylov, spectrum: Spectrum, spaces: Complements, subject: MatrixFunction
) -> Outcome:
    """Estimate tr f(A) from a space, and the spectrum and the complements made of it."""
    rule = quadrature(spectrum, spaces)
    whole = Eigen(*(x[:1] for x in spectrum.eigen))
    weights = jnp.mean(rule.weights, axis=2, keepdims=True)
    parts = space.extended.T[None], whole, rule.matrix[None], max(5 * space.depth, 40)
    split = SplitRule(*parts, spectrum.rules, weights)
    values = spectrum.rules.values[:, :, 0]
    samples = mixture(rule.samples(values))[0]
    traces = Traces(mean(samples), samples, values, spectrum.bounds, split.nodes())
    return traces_outcome(subject, traces, rule.error)


def levels_and_complements(
    space: BlockKrylov, *, subject: MatrixFunction, kept: int = 0
) -> tuple[Levels, Complements]:
    """Return T at all of its levels, and the complements of the S_i.

    The first `kept` starts are not probes. They belong to every S_i, and S_i is still
    independent of w_i."""
    shape = Shape(space.width, space.depth)
    # T itself has less noise than its Hermitian part (see `frame_of`).
    rank = space.width * shape.inner
    first, filled = space.projection[:rank, :rank], space.filled[:rank]
    frame = frame_of(first, space.asymmetry, filled, subject.bound)
    spaces = complements(frame, filled, space.starts, len(space.extended), kept)
    sizes = [space.width * depth for depth in shape.levels(mixed=subject.node is not None)]
    return truncated(space.completed(), sizes), spaces


class Spectrum(NamedTuple):
    """The eigenvalues of all levels of T, which are the nodes, and f at them.

    `noise` are the standard deviations of the entries of V* T V, over the largest
    eigenvalue, where V has the eigenvectors of the first level. The `bounds` are for its
    nodes: the sizes of f; its slopes, which are |f'| times the largest node; and its bends,
    which are how far noise moves the mean of f.

    `eigen` has the nodes that are eigenvalues of T, and `theta` the eigenvalues as they
    were computed, at which f may be undefined. If the subject has a node, there are two
    rules for each level, Gauss's and Radau's, and `radau` has the latter. All `nodes` end
    with the node, which Gauss's rule does not use.
    """

    eigen: Eigen
    theta: Float[Array, "levels m"]
    noise: Float[Array, "m m"]
    bounds: tuple[Bound, ...]
    rules: Rules


def spectrum_of(space: BlockKrylov, levels: Levels, subject: MatrixFunction) -> Spectrum:
    """Decompose all levels of T, and evaluate f at their eigenvalues.

    Rounding may move a node to where f is undefined, below zero for a logarithm. Such a
    node moves back by the size of its noise. Its true value may be as small as the square
    of that. If the space is exhausted the true node is zero, but in single precision a
    small eigenvalue is more likely.
    """
    eigen, grain = decompose_above(levels, subject.bound)
    noise = _noise(space, eigen, grain[0])
    own = diagonal_of(noise)[None]
    fn = subject.fn
    edge = 0 if subject.bound is None else subject.bound
    largest = largest_of(eigen.values)
    eps = float(jnp.finfo(noise.dtype).eps)
    reach = 4 * jnp.maximum(own.size**0.5 * eps, own) * largest
    zero = 0 if eps < FINE else eps * largest
    is_exhausted = ~jnp.any(space.filled[-space.width :])
    near_edge = edge + jnp.where(is_exhausted, zero, own * largest)
    may_move = jnp.abs(eigen.values - edge) <= reach
    nodes, values, moved = in_domain(fn, eigen.values, near_edge, may_move)
    first = nodes[0]
    step = own[0] * largest[0]
    around = jnp.stack([first + step, first - step, edge + eps * (first - edge)])
    up, down, deeper = at_nodes(fn, around) - values[:1]
    slopes = slopes_at(fn, first, step, up)
    step = step[:, None]
    # Noise may reach the end of the domain of f. Besides, it makes S_i depend on w_i, which
    # moves all nodes at its level one way, by a part of its size.
    bends = jnp.where(jnp.isfinite(down), jnp.abs(up + down) / 2, 2 * jnp.abs(up))
    bends = jnp.where(jnp.isfinite(bends), bends, 0) + slopes * step / 4
    if subject.bound is not None:
        reach = eps * largest[0, 0]
        is_near = (jnp.abs(first - edge) <= reach)[:, None]
        bend = bend_at_edge(fn, subject.bound, reach)
        bends = bends + jnp.where(is_near, bend[None], 0)
    spans = jnp.abs(deeper) / jnp.where(step > 0, step, 1)
    slopes = largest[0, 0] * jnp.where(moved[0][:, None], spans, slopes)
    values = jnp.swapaxes(values, -1, -2)
    bounds = jnp.abs(values[0]), slopes.T, bends.T
    rules = Rules(nodes[:, None, None], values[:, None, None])
    if subject.node is not None:
        tall, k = space.tall, space.width
        ends = k * np.array(Shape(k, space.depth).levels(mixed=True))
        below = jnp.stack([tall[end : end + k] for end in ends])
        below = jnp.where(np.arange(tall.shape[1]) < ends[:, None, None], below, 0)
        theta = Eigen(eigen.values[:, None], eigen.vectors[:, None])
        around = jnp.maximum(grain, own * largest)[:, None]
        rules = rules.with_node(subject, theta, below[:, None], around, 10 * around[0])
        bounds = tuple(jnp.pad(x, ((0, 0), (0, 1))) for x in bounds)
    return Spectrum(Eigen(nodes, eigen.vectors), eigen.values, noise, bounds, rules)


def bend_at_edge(fn: Flat, edge: Number, reach: Number) -> Float[Array, " p"]:
    """Return how far f bends away from its tangent within `reach` of the edge.

    The noise that T - T* shows lacks the errors that both halves of T share, which are
    several times larger if A = B* B. They move the zeros of A by up to `reach`, which is
    eps times the largest eigenvalue. Over such a distance a smooth f follows its tangent,
    for which the noise that was measured is enough. A root does not: half of its rise is
    bend. It counts in full, because all zeros move one way."""
    top = edge + reach
    bend = jnp.abs(fn(top) - fn(edge) - times(reach, Slope(fn)(top)))
    return jnp.where(jnp.isfinite(bend), bend, 0)


# Neighbours of an eigenvalue, in their order, that have about the same noise.
_NEAR = 4


def _noise(space: BlockKrylov, eigen: Eigen, grain: OfNodes) -> Float[Array, "m m"]:
    """Return the standard deviations of the entries of V* T V, over the largest eigenvalue.
    `grain` is the rounding error of each eigenvalue.

    A matvec with an error e_j gives T the error Z* e_j in its column j, and T - T* shows
    the difference of two such errors wherever both halves of T were computed. The part of T
    that is used, (T + T*)/2, has half of their sum, which is as large. So the noise needs
    no model. In the eigenvectors of T it comes out small where the operator is accurate (an
    operator that rounds its argument has small errors along small eigenvalues), and large
    where it is not. The errors on the diagonal cannot be seen; they are taken from the
    neighbours.
    """
    skew = space.projection - space.projection.conj().T
    largest = jnp.maximum(largest_of(eigen.values[0])[0], jnp.finfo(grain.dtype).tiny)
    vectors = eigen.vectors[0]
    squares = squared_modulus(dot(vectors.conj().T, over(skew, largest), vectors)) / 4
    m = grain.size
    apart = np.abs(np.arange(m)[:, None] - np.arange(m))
    near = jnp.asarray((apart > 0) & (apart <= _NEAR), squares.dtype)
    own = 2 * jnp.sum(near * squares, axis=1) / jnp.maximum(jnp.sum(near, axis=1), 1)
    own = own + (grain / largest) ** 2
    return jnp.sqrt(jnp.where(jnp.eye(m, dtype=bool), own[:, None], squares))


class Quadrature(eqx.Module):
    """The weight of each node in each sample, for every level of T and every rule.

    `vectors` are the eigenvectors V of T, `sides` are [N_i, r_i]* V, the last ones with
    factors sqrt(c_i), and `matrix` is M. The variance of the value by noise is g* blur g,
    where g is |f'| times the largest node. K has the coordinates of Z that are `inside`."""

    vectors: Inexact[Array, "m m"]
    weights: Float[Array, "levels rules k w"]
    sides: Sides
    matrix: Inexact[Array, "r r"]
    blur: Float[Array, "m m"]
    inside: Filled

    def samples(self, values: AllValues) -> Inexact[Array, "levels rules p k"]:
        """Return all samples of the trace of a function, given its values at all nodes."""
        return weighted_sum(self.weights[:, :, None], values[..., None, :])

    def error(self, values: AllValues, *bounds: Bound) -> tuple[Errors, Errors]:
        """Return the error of sampling and rounding, and the error of quadrature, of the
        trace of a function, given its values at the nodes and its `bounds` as in
        `Spectrum`."""
        every = self.samples(values)
        samples, share = mixture(every)
        weights = jnp.mean(self.weights[0, 0], axis=0)[None, :]
        bends, *rates = (jnp.where(weights > 0, x, 0) for x in bounds[::-1])
        # Squares must not overflow. Slopes may be far larger than values.
        rates = jnp.stack(rates)
        scales = largest_of_rows(rates)
        slopes, sizes = over(rates, scales[..., None])
        m, value = len(self.blur), mean(samples)
        moved = slopes[:, :m] * dot(slopes[:, :m], self.blur)
        moved = jnp.pad(moved, [(0, 0), (0, weights.shape[1] - m)])
        sums = summed(jnp.stack([moved, (weights * sizes) ** 2, weights * bends]))
        moved, size = scales * jnp.sqrt(sums[:2])
        # Sums are made in this precision. The noise of a coarser operator is measured.
        eps = float(jnp.finfo(weights.dtype).eps)
        rounding = jnp.hypot(4 * eps * (size + jnp.abs(value)), 2 * moved + sums[2])
        error = jackknife.shared_error(samples, rounding)
        if samples.shape[-1] > 1:
            used = jnp.where(weights > 0, values[0, 0], 0)[:, :m]
            used = over(used, scales[1][:, None])
            if len(used) <= FEW:
                theory = self._error_by_theory(used)
            else:  # together they are larger than the basis
                theory = jax.lax.map(lambda f: self._error_by_theory(f[None])[0], used)
            error = jnp.maximum(error, scales[1] * theory)
        return error, jackknife.error_of_rules(mean(every), share, rounding=rounding)

    def _error_by_theory(self, values: Inexact[Array, "p m"]) -> Errors:
        """Return what theory makes of B = (I - P_i) f(A) (I - P_i), given f at the nodes.

        The variance of a sample is a |B|_F^2, with a = 2 if B is real and 1 if it is
        complex. |B|_F^2 is the mean of |B r_i|^2 less what is along r_i. It is also at
        least |N_i* B N_i|_F^2, which does not depend on how large r_i is in few important
        directions. There all samples may be low together, so this part of |B|_F^2 counts
        twice, as in `shared_error`."""
        sides, k = self.sides, len(self.sides)
        values, forms = forms_on_complements(sides, sides.conj(), values)
        lengths = summed(squared_modulus(sides[:, -1]))
        images = times(sides[None, :, -1].conj(), values[:, None])
        images = dot(*promoted(images, self.vectors.T))
        missing = len(self.vectors) - self.inside.size
        outside = jnp.pad(~self.inside, (0, missing), constant_values=True)
        beyond = summed(jnp.where(outside[None, None], squared_modulus(images), 0))
        square = squared_norm_on_complements(forms, lengths, beyond)
        return jnp.sqrt((1 if jnp.iscomplexobj(sides) else 2) * square / k)


def forms_on_complements(
    before: Sides, after: Sides, values: Inexact[Array, "v m"]
) -> tuple[Inexact[Array, "v m"], Forms]:
    """Return f less the mean of r_i* f(A) r_i / |r_i|^2, and [N_i, r_i]* f(A) [N_i, r_i] of
    what is left. The factors c_i keep a multiple of I from changing the samples.

    `values` are f at the nodes, and f(T) = V diag(f) V^{-1}. `before` is [N_i, r_i]* V, and
    `after` is the transpose of V^{-1} [N_i, r_i]."""
    tested = (before[:, -1] * after[:, -1])[None]
    lengths = summed(tested)
    lengths = jnp.where(lengths == 0, 1, lengths)
    rates = over(summed(times(tested, values[:, None])), lengths)
    values = jnp.subtract(*promoted(values, mean(rates)[:, None]))
    forms = times(before[None], values[:, None, None])
    return values, einsum("vksm,ktm->vkst", *promoted(forms, after))


def squared_norm_on_complements(
    forms: Forms, lengths: OfProbes, beyond: Float[Array, "v k"] | float = 0.0
) -> Float[Array, " v"]:
    """Return |B|_F^2, in which the part on N_i counts twice, as `Quadrature` needs it.

    It comes from the `forms` of `forms_on_complements`; from the `lengths`, which are c_i
    |r_i|^2; and from the squares of what B r_i has beyond the space, with these factors."""
    squares = squared_modulus(forms)
    along = over(squares[..., -1, -1], jnp.where(lengths > 0, lengths, 1)[None])
    across = squares[..., :-1, -1] + squares[..., -1, :-1]
    across = jnp.sum(across, axis=-1) / 2 - along + beyond
    inside = jnp.sum(squares[..., :-1, :-1], axis=(-2, -1))
    return mean(inside) + jnp.maximum(mean(inside), mean(across))


def quadrature(spectrum: Spectrum, spaces: Complements) -> Quadrature:
    """Return the weights of the nodes, given the c_i in the `spaces`, and what noise does
    to the value.

    The noise S of V* T V changes the value by the sum of f[a, b] M_ba S_ab, where f[a, b]
    are divided differences and M is the quadrature matrix in the coordinates of V. Between
    nodes, |f[a, b]|^2 is about the geometric mean of the squares of |f'|."""
    vectors, rank = spectrum.eigen.vectors, spaces.inside.size
    each = jax.vmap(partial(_weights, spaces))
    weights, sides = each(vectors[:, :rank])
    # LAPACK may return finite eigenvectors for NaN input.
    weights = jnp.where(jnp.isnan(spectrum.eigen.values)[:, None], jnp.nan, weights)
    of_vectors = lambda vectors: each(vectors[:, 0, :rank])[0]  # noqa: E731
    weights = spectrum.rules.weights(weights, of_vectors)
    matrix, first = quadrature_matrix(spaces), vectors[0, :rank]
    pairs = squared_modulus(dot(first.conj().T, matrix, first))
    blur = jnp.where(np.eye(len(pairs), dtype=bool), pairs, 2 * pairs) * spectrum.noise**2
    return Quadrature(vectors[0], weights, sides[0], matrix, blur, spaces.inside)


def _weights(
    spaces: Complements, vectors: Inexact[Array, "r m"]
) -> tuple[Float[Array, "k m"], Sides]:
    """Return the diagonal of V* M_i V and [N_i, r_i]* V for every i, where V has the
    eigenvectors of one level, and `vectors` are their first coordinates."""
    sides = einsum("krp,rm->kpm", spaces.sides.conj(), vectors)
    squares = squared_modulus(vectors)
    whole = jnp.sum(jnp.where(spaces.inside[:, None], squares, 0), axis=0)
    changed = jnp.sum(spaces.signs[None, :, None] * squared_modulus(sides), axis=1)
    return jnp.maximum(whole[None] + changed, 0), sides


def quadrature_matrix(spaces: Complements) -> Inexact[Array, "r r"]:
    """Return M, given the c_i in the `spaces`."""
    both, rates = spaces.sides, spaces.signs / len(spaces.sides)
    changed = einsum("krp,ksp->rs", times(both, rates[None, None]), both.conj())
    return jnp.diag(spaces.inside.astype(changed.dtype)) + changed
