"""Quadratures, from which the value of tr f(A) and its derivatives are read.

A quadrature has nodes x with weights w, and pairs of vectors l and r, all made of A, so
that

    tr f(A) ~ sum over nodes of w f(x),
    d tr f(A) = tr(f'(A) dA) ~ sum over pairs of l^T dA r.

The pairs depend on f and on A. A first derivative takes them as constants. A second
derivative differentiates the function that makes the pairs, or that function raises an
error. A parameter of f changes the sum by the trace of another function,
d tr f(A) = tr((df)(A)), so its derivative is the same quadrature of df.

**The split rule** makes the pairs for Hermitian A. With probes v for which E[v v*] = I, and
a factorisation f' = g1 g2,

    d tr f(A) = E[ (g1(A) v)* dA (g2(A) v) ].

Both vectors lie in the Krylov space from which the value v* f(A) v is computed, so they
take no matvec. The derivative takes one vector-Jacobian product for each probe. The rule
gives the entry ij of U* dA U, where U has the eigenvectors, the weight
(g1_i g2_j + g1_j g2_i)/2. By the inequality of the arithmetic and the geometric mean this
weight is least for |g1| = |g2| = |f'|^(1/2), where it is the geometric mean of f'_i and
f'_j. The usual rule (f'(A) v)* dA v has their arithmetic mean as the weight, which is
larger without bound if dA couples small eigenvalues with large ones.

**Mixtures.** If a number bounds the spectrum, each projection has two rules, Gauss's and
Radau's (`dense.Radau`), whose errors have different signs. `mixture` joins their results,
and `SplitRule` the derivatives of both. The slope in a parameter of f is the trace of
another function, and has a mixture of its own.

Second derivatives need the dependence of the vectors on A: without it the second derivative
of log det(s A) in s would be 0. So the vectors are computed once, and differentiated as a
Krylov recurrence from the same starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Inexact

from traceax._core.operator import LinearMap, frozen
from traceax._core.rule import Values, with_own_jvp
from traceax._linalg.columns import (
    dot,
    einsum,
    largest_modulus,
    mean,
    promoted,
    summed,
    times,
)
from traceax._linalg.krylov import lanczos
from traceax._quadrature.dense import (
    Eigen,
    Radau,
    columns,
    decompose,
    in_one_loop,
    radau,
)
from traceax._quadrature.scalar import (
    Factors,
    Flat,
    MatrixFunction,
    Slope,
    jacobian_and_tangent,
    softening,
)

# A recurrence that is differentiated must reproduce its vectors to this relative error.
TOLERANCE = 0.1

# If Gauss's rule has a larger share of the trace of f', its pairs are taken alone.
SINGULAR = 0.98


class Direction(eqx.Module):
    """The direction dA of a derivative, as the tangent of an operator A."""

    linear_map: LinearMap
    tangent: Any

    def matrix(self) -> Inexact[Array, "n n"]:
        """Return dA as a matrix."""
        return self._of(LinearMap.dense)

    def images(self, rows: Inexact[Array, "... n"]) -> Inexact[Array, "... n"]:
        """Return dA r for each of the rows r."""
        block = rows.reshape(-1, rows.shape[-1]).T
        return self._of(lambda linear_map: linear_map(block)).T.reshape(rows.shape)

    def _of(self, function: Callable[[LinearMap], Array]) -> Array:
        value, moved = eqx.filter_jvp(function, (self.linear_map,), (self.tangent,))
        # The matvec may not depend on what is perturbed.
        return jnp.zeros_like(value) if moved is None else moved


SlopePairs = Callable[[MatrixFunction, Direction], Values]
"""The sum over all pairs of l^T dA r, for each of the p values of f."""


Rows = Inexact[Array, "... m"]
EveryNode = Inexact[Array, "*N m"]
AtNodes = Inexact[Array, "*N m p"]
Bases = Inexact[Array, "N s n"]
Soft = Float[Array, "N p"]  # the softenings
Vectors = Inexact[Array, "2 p N count n"]  # g1(A) v, and g2(A) v
OnBasis = Inexact[Array, "3 p N s count"]  # one of both, for the three kinds of pairs


class Nodes(eqx.Module):
    """A quadrature, which is the readout of traces of functions. It is called with f and
    the operator that is read. There are one or several rules, whose results `mixture`
    joins. All values of f share one row of weights, or each has its own."""

    nodes: Inexact[Array, "levels rules m"]
    weights: Inexact[Array, "levels rules _ m"]
    pairs: SlopePairs

    def __call__(self, subject: MatrixFunction) -> Inexact[Array, " p"]:
        return read(subject, self)

    def total(self, fn: Flat) -> Inexact[Array, " p"]:
        """Return the sum over the nodes of the weights times f."""
        return mixture(self.totals(fn))[0][:, 0]

    def totals(self, fn: Flat) -> Inexact[Array, "levels rules p 1"]:
        """Return this sum for each rule, as a single sample."""
        values = jnp.swapaxes(at_nodes(fn, self.nodes), -1, -2)
        # The Jacobian of f has several values for each value of f.
        copies = values.shape[-2] // self.weights.shape[-2]
        return weighted_sum(jnp.repeat(self.weights, copies, axis=-2), values)[..., None]


def mixture(
    samples: Inexact[Array, "levels rules p k"],
) -> tuple[Inexact[Array, "p k"], Float[Array, " p"]]:
    """Return (c G + R) / (1 + c) for each sample, and the shares c / (1 + c) of Gauss's
    rule.

    The rules are G = Gauss's and, with a node, R = Radau's, at full depth and then at less
    depth. If the signs of the derivatives of f alternate, as those of a logarithm, a power
    below 1 or an inverse, then G and R lie on different sides of the truth. Both errors
    shrink by about the same factor from one depth to the next, so that what R changes over
    what G changes estimates the ratio c of the errors. It is one number for all samples.

    If both rules move the same way, their errors have the same sign, or are rounding. Then
    G is taken alone, as it is if R is infinite, and if there is no other rule."""
    gauss = samples[0, 0]
    if samples.shape[1] == 1:
        return gauss, jnp.ones(gauss.shape[0], gauss.real.dtype)
    radau, totals = samples[0, 1], mean(samples)
    if len(samples) == 1:
        share = jnp.full(gauss.shape[0], 0.5, gauss.real.dtype)
    else:
        fall, rise = totals[1, 0] - totals[0, 0], totals[0, 1] - totals[1, 1]
        sizes, opposite = jnp.abs(rise) + jnp.abs(fall), (rise.conj() * fall).real > 0
        share = jnp.where(opposite, jnp.abs(rise) / jnp.where(opposite, sizes, 1), 1)
    share = jnp.where(jnp.isfinite(totals[0, 1]) & jnp.isfinite(share), share, 1)
    weight = share[:, None]
    mixed = times(weight, gauss) + times(1 - weight, jnp.where(weight < 1, radau, 0))
    return jnp.where(weight < 1, mixed, gauss), share


class Rules(NamedTuple):
    """Quadrature rules for N projections at all levels: Gauss's, and then Radau's if the
    spectrum has a node as its bound.

    All `nodes` then end with that node, which Gauss's rule does not use. `values` are f at
    the nodes. `radau` has the decompositions of Radau's rules, with an axis for levels and
    one for projections."""

    nodes: Float[Array, "levels rules N w"]
    values: Inexact[Array, "levels rules N p w"]
    radau: Radau | None = None

    def with_node(
        self,
        subject: MatrixFunction,
        eigen: Eigen,
        below: Inexact[Array, "levels N k m"],
        noise: Float[Array, "levels N m"],
        reach: Float[Array, "N _"],
    ) -> Rules:
        """Add Radau's rules to Gauss's, from decompositions and couplings as in `radau`.

        If an eigenvalue of T lies on the other side of the node by more than `reach`, the
        node is no bound, and f counts as undefined at it. `logdet` assumes a node without a
        tag, and relies on this."""
        node, fn, side = subject.node, subject.fn, subject.side
        assert node is not None
        each = partial(radau, node=node, side=side)
        rule = in_one_loop(each, noise.shape[:2], eigen, below, noise)
        is_bound = jnp.all(side * (eigen.values[0] - node) + reach >= 0)
        at_node = jnp.where(is_bound, fn(node), jnp.nan)

        def joined(gauss: Array, radau: Array, end: Array) -> Array:
            both = jnp.concatenate(promoted(gauss, radau[:, None]), axis=1)
            end = jnp.broadcast_to(end.astype(both.dtype), (*both.shape[:-1], 1))
            return jnp.concatenate([both, end], axis=-1)

        values = jnp.swapaxes(at_nodes(fn, rule.values), -1, -2)
        values = joined(self.values, values, at_node[:, None])
        return Rules(joined(self.nodes, rule.values, node), values, rule)

    def weights(
        self, gauss: Float[Array, "levels *N m"], of_vectors: Callable[[Array], Array]
    ) -> Float[Array, "levels rules *N w"]:
        """Return the weights of all nodes, given those of Gauss's rules, and a function
        that makes weights of the vectors of Radau's rules.

        The weight of the node is zero for Gauss's rule, and for Radau's what its other
        weights lack of the sum of all, which is the same for both rules."""
        if self.radau is None:
            return gauss[:, None]
        longer = of_vectors(self.radau.vectors)
        rest = jnp.maximum(jnp.sum(gauss, axis=-1) - jnp.sum(longer, axis=-1), 0)
        ends = jnp.stack([jnp.zeros_like(rest), rest], axis=1)[..., None]
        return jnp.concatenate([jnp.stack([gauss, longer], axis=1), ends], axis=-1)


@eqx.filter_custom_jvp
def read(subject: MatrixFunction, nodes: Nodes) -> Inexact[Array, " p"]:
    """Return tr f(A) by a quadrature, and differentiate it by the pairs."""
    return nodes.total(subject.fn)


@read.def_jvp
def _read_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (subject, nodes), (tangent, _) = primals, tangents
    value = read(subject, nodes)
    parts = []
    if jax.tree.leaves(tangent.fn):
        jacobian, numbers = jacobian_and_tangent(subject.fn, tangent.fn)
        rates = read(MatrixFunction(subject.linear_map, jacobian), nodes)
        parts.append(dot(rates.reshape(value.size, -1), numbers.astype(rates.dtype)))
    if jax.tree.leaves(tangent.linear_map):
        direction = Direction(subject.linear_map, tangent.linear_map)
        parts.append(nodes.pairs(subject.along(tangent.linear_map), direction))
    if not jnp.iscomplexobj(value):
        parts = [part.real for part in parts]
    moved = sum((part.astype(value.dtype) for part in parts), jnp.zeros_like(value))
    return value, moved


def weighted_sum(weights: Rows, values: Rows) -> Inexact[Array, "..."]:
    """Return the sum over nodes of weights times values. A node of weight zero does not
    count, even if its value is infinite."""
    return summed(times(weights, jnp.where(weights == 0, 0, values)))


def at_nodes(fn: Flat, nodes: EveryNode) -> AtNodes:
    """Return all values of f at each node of any number of quadratures."""
    return in_one_loop(fn, nodes.shape, nodes)


def in_domain(
    fn: Flat, nodes: EveryNode, near: EveryNode, may_move: Bool[Array, "*N m"]
) -> tuple[EveryNode, AtNodes, Bool[Array, "*N m"]]:
    """Return the nodes, f at them, and which nodes have moved.

    Rounding may move a node to where f is undefined. If it `may_move`, such a node moves to
    what is `near`."""
    here, there = at_nodes(fn, jnp.stack([nodes, near]))
    moved = may_move & jnp.any(~jnp.isfinite(here), axis=-1)
    return jnp.where(moved, near, nodes), jnp.where(moved[..., None], there, here), moved


def slopes_at(
    fn: Flat, nodes: EveryNode, step: Float[Array, "*N _"], changes: AtNodes | None = None
) -> Float[Array, "*N m p"]:
    """Return |f'| at the nodes, which multiplies their noise.

    If |f'| is large (as it is for a square root at 0), the change of f over a `step` of the
    size of the noise, divided by the step, replaces it. Pass these `changes` if they are
    known already."""
    slopes = jnp.abs(at_nodes(Slope(fn), nodes))
    if changes is None:
        moved = nodes + step.astype(nodes.dtype)
        changes = at_nodes(fn, moved) - at_nodes(fn, nodes)
    secants = jnp.abs(changes) / jnp.where(step > 0, step, 1)[..., None]
    # Infinite values show in the estimate itself.
    secants = jnp.where(jnp.isfinite(secants), secants, 0)
    return jnp.where(jnp.isfinite(slopes), jnp.minimum(slopes, secants), secants)


def node_weights(
    coefficients: Inexact[Array, "N count count"], vectors: Inexact[Array, "N _ m"]
) -> Float[Array, "N m"]:
    """Return the weights of the nodes in tr(C_i f(T_i)[:count, :count]), where T_i has
    these eigenvectors and the `coefficients` are the C_i."""
    rows = vectors[:, : coefficients.shape[1]]
    return jnp.sum((rows.conj() * dot(coefficients.astype(rows.dtype), rows)).real, axis=1)


class SplitRule(eqx.Module):
    """The quadrature of N projections T_i of A on orthonormal rows, which `eigen`
    decomposes:

        tr f(A) = E sum over i of tr(C_i f(T_i)[:count, :count]),

    the `coefficients` C_i being Hermitian matrices. The starts v are the first `count` rows
    of each basis. Second derivatives run a recurrence of `num_steps` from each start.

    With Radau's rules, the basis has one more block, and the derivative is that of the
    mixture. With Z for the rows of the basis and Z_b for those of the last block, the
    derivative of T_R in the direction dA is

        [[dT, dB*], [dB, dB X + X* dB* - X* dT X]],    dT = Z* dA Z, dB = Z_b* dA Z,

    X being `Radau.solved`. Its last block is the derivative of the corner, and must not be
    replaced by Z_b* dA Z_b, which has nothing to do with the corner. (With that in its
    place slopes of unresolved kernels were off by factors of hundreds.)
    """

    basis: Bases
    eigen: Eigen
    coefficients: Inexact[Array, "N count count"]
    num_steps: int = eqx.field(static=True)
    rules: Rules
    weights: Float[Array, "levels rules _ m"]

    def nodes(self) -> Nodes:
        """Return the quadrature whose pairs this rule makes."""
        nodes = self.rules.nodes[: 1 if self.rules.radau is None else None]
        return Nodes(nodes.reshape(*nodes.shape[:2], -1), self.weights[: len(nodes)], self)

    def __call__(self, subject: MatrixFunction, direction: Direction) -> Values:
        """Return the sum of C_i (g1(A) v)* dA (g2(A) v)."""
        held = frozen(subject).fn
        soft = jax.vmap(partial(softening, held))(self.eigen.values)
        count, m = self.coefficients.shape[1], self.eigen.values.shape[1]
        vectors = _vectors(subject.fn, soft, self.basis[:, :m], self.eigen, None, count)
        again = eqx.Partial(self._by_recurrence, soft, vectors)
        vectors = with_own_jvp(vectors, again, subject)
        if self.rules.radau is not None:
            # This is zero, but has a derivative.
            moved = vectors - jax.lax.stop_gradient(vectors)
            return self._mixed(held, direction, soft, moved)
        left, right = vectors
        coefficients = self.coefficients.astype(left.dtype)
        left = einsum("Nab,pNbn->pNan", coefficients, left.conj())
        return jnp.sum(left * direction.images(right), axis=(1, 2, 3))

    def _mixed(self, fn: Flat, direction: Direction, soft: Soft, moved: Vectors) -> Values:
        """Return the derivative of the mixture.

        Few right vectors go through dA themselves. If they are more than the basis has
        rows, the basis goes through it, which serves all pairs: the sum over pairs of
        l* dA r is tr(K Z* dA Z), where K is the sum of r l*, in coordinates of the basis.

        `moved` is how a recurrence moves the vectors of Gauss's rule. It is zero, and
        matters for second derivatives only, where it is the change of all vectors."""
        shares, left, right = self._pairs_on_basis(fn, soft)
        size, count = self.basis.shape[1], self.coefficients.shape[1]
        numbers = shares, self.coefficients, self.basis, left, right
        shares, forms, basis, left, right = promoted(*numbers)
        if 3 * count < size:
            vectors = einsum("ljpNsa,Nsn->ljpNan", jnp.stack([left, right]), basis)
            left, right = vectors + moved[:, None]
            images = direction.images(right)
            return einsum("jp,Nab,jpNbn,jpNan->p", shares, forms, left.conj(), images)
        kernel = einsum("jp,jpNsa,Nab,jpNtb->pNst", shares, right, forms, left.conj())
        images = direction.images(self.basis).astype(basis.dtype)
        value = einsum("pNst,Ntn,Nsn->p", kernel, basis.conj(), images)
        # The pairs of Gauss's rule come first, and dA is Hermitian.
        before, after = (einsum("pNsa,Nsn->pNan", x[0], images) for x in (left, right))
        value = value + einsum("Nab,pNbn,pNan->p", forms, moved[0].conj(), after)
        return value + einsum("Nab,pNbn,pNan->p", forms, before.conj(), moved[1])

    def _pairs_on_basis(self, fn: Flat, soft: Soft) -> tuple[Array, OnBasis, OnBasis]:
        """Return shares, and the left and right vectors in the coordinates of the basis.

        The first pairs are those of Gauss's rule. For Radau's, let [p; y] be a vector
        g2(T_R) e_a, cut above the last block, and [P; Y] a vector conj(g1)(T_R) e_b. Then

            [P; Y]* dT_R [p; y] = (s'* dA q + q'* dA s) / 2,
            s = Z (p + X y),    q = Z (p - X y) + 2 Z_b y,    s', q' likewise of [P; Y].
        """
        assert self.rules.radau is not None
        longer, count = Radau(*(x[0] for x in self.rules.radau)), self.coefficients.shape[1]

        def of_one(soft: Array, eigen: Eigen, longer: Radau) -> Inexact[Array, "3 pp s c"]:
            factors, rows = Factors(fn, soft), longer.vectors
            gauss = columns(factors, None, eigen, count=count)
            at_node = factors(longer.node)
            rise = jax.vmap(factors)(longer.values) - at_node[None]
            ends = einsum("sm,mq,cm->qsc", *promoted(rows, rise, rows[:count].conj()))
            unit = jnp.eye(*ends.shape[1:], dtype=ends.dtype)[None]
            ends = ends + times(at_node[:, None, None], unit)
            inside, beyond = jnp.split(ends, [gauss.shape[1]], axis=1)
            turned = dot(longer.solved.astype(beyond.dtype), beyond)
            none = jnp.zeros_like(beyond)
            tops = gauss, inside + turned, inside - turned
            bottoms = none, none, 2 * beyond
            return jnp.concatenate([jnp.stack(tops), jnp.stack(bottoms)], axis=2)

        found = jax.vmap(of_one, out_axes=2)(soft, self.eigen, longer)
        gauss, sums, rests = found.reshape(3, 2, -1, *found.shape[2:])
        left = jnp.stack([gauss[0], sums[0], rests[0]])
        right = jnp.stack([gauss[1], rests[1], sums[1]])
        share, of_slope = (mixture(self.nodes().totals(f))[1] for f in (fn, Slope(fn)))
        # If f' is singular at the node, as that of x log x is at 0, R overrates it.
        usable = (of_slope < SINGULAR) | (of_slope == 1)
        usable &= jnp.all(jnp.isfinite(left) & jnp.isfinite(right), axis=(0, 2, 3, 4))
        share = jax.lax.stop_gradient(jnp.where(usable, share, 1))
        alone = (share == 1)[:, None, None, None]
        left, right = (x.at[1:].set(jnp.where(alone, 0, x[1:])) for x in (left, right))
        return jnp.stack([share, (1 - share) / 2, (1 - share) / 2]), left, right

    def _by_recurrence(self, soft: Soft, known: Array, subject: MatrixFunction) -> Vectors:
        """Return g1(A) v and g2(A) v by a recurrence that is differentiable in the operator
        and in f. They are NaN if g2(A) v is far from the `known` vectors, because then
        the derivatives would be wrong."""
        count, n = self.coefficients.shape[1], self.basis.shape[2]
        starts, steps = self.basis[:, :count].reshape(-1, n), min(self.num_steps, n)
        krylov = lanczos(subject.linear_map, starts, steps, differentiable=True)
        eigen = jax.lax.stop_gradient(decompose(krylov.projection))
        soft = jnp.repeat(soft, len(starts) // len(soft), axis=0)
        vectors = _vectors(subject.fn, soft, krylov.basis, eigen, krylov.projection, 1)
        vectors = vectors.reshape(known.shape)
        error = largest_modulus(jax.lax.stop_gradient(vectors[1]) - known[1])
        is_same = error < TOLERANCE * largest_modulus(known[1])
        return jnp.where(is_same, 1, jnp.nan) * vectors


def _vectors(
    fn: Flat, soft: Soft, basis: Bases, eigen: Eigen, projection: Array | None, count: int
) -> Vectors:
    """Return g1(A) v and g2(A) v for the first `count` rows v of every basis. They are
    differentiable in the projection that `eigen` decomposes, if that is given."""

    def one(soft: Array, matrix: Array | None, eigen: Eigen) -> Inexact[Array, "pp m c"]:
        return columns(Factors(fn, soft), matrix, eigen, count=count)

    applied = eqx.filter_vmap(one)(soft, projection, eigen)
    rows = einsum("Npmc,Nmn->pNcn", *promoted(applied, basis))
    return rows.reshape(2, -1, *rows.shape[1:])


def perturbation(matrix: Inexact[Array, "m m"], size: float) -> Inexact[Array, "m m"]:
    """Return a random matrix of `size` times the largest entry. A nilpotent matrix has no
    basis of eigenvectors, but almost every perturbation of it has one."""
    m = len(matrix)
    noise = np.random.default_rng(m).normal(size=(m, m)) / m**0.5
    return times(size * jnp.max(jnp.abs(matrix)), jnp.asarray(noise, matrix.dtype))


def refuse_second(linear_map: LinearMap) -> Any:
    """Raise the error of a second derivative that does not exist."""
    raise NotImplementedError(
        "traceax.arnoldi_trace must not be differentiated twice in its operator, because "
        "the eigenvectors that its derivative is read from would have to be "
        "differentiated, which is not stable, but got a second derivative. Use "
        "traceax.slq_trace or traceax.function_trace if the operator is Hermitian."
    )
