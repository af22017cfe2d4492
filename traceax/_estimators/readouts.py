"""Results that can be read from an operator, and the readouts of the derivative rule.

Traces, sums over the leaves of a pytree and diagonals are one estimate, read in three ways:
the rows of conj(L) o (B R) are summed over all rows, over the rows of each leaf, or not at
all. A `Reduce` says which. Squared norms of rows are quadratic in B and have a readout of
their own (`norms`).

A readout is a module whose blocks are constants. The derivative rule (`_core.rule`) calls
it on a `LinearMap` B, and it returns an unbiased estimate of the wanted result for B.

**Leaving one out** (`leave_one_out`; Epperly, Tropp and Webber 2024). Omega holds k probes
w_i, and Y = A Omega = Q R is the sketch. P_i is the orthogonal projector on the range of Y
without column i. With the directions s_i of `basis.downdate`,

    P_i = Q (I - s_i s_i*) Q*,    x_i = (I - s_i s_i*) Q* w_i,    mu_i = (I - P_i) w_i
                                                                      = w_i - Q x_i.

mu_i is formed explicitly, because the k x k formulas of the papers suffer from
cancellation. The probe w_i is independent of P_i and isotropic, so E[mu_i mu_i*] = I - P_i.
If the probes are rotation-invariant, mu_i may be rescaled to the length that it should
have, by the factor c_i = (n - k + 1)/|mu_i|^2 on its square ("resphering"). This removes
the variance that comes from its length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact

from traceax._core.operator import LinearMap, Operator
from traceax._core.vectors import Structure, as_result, common_dtype, in_rows
from traceax._linalg import jackknife
from traceax._linalg.basis import Basis, downdate, orthonormalise
from traceax._linalg.columns import (
    Block,
    Number,
    OfProbes,
    column_dots,
    column_norms_squared,
    dot,
    mean,
    over,
    row_dots,
    summed,
    times,
)
from traceax._probes.stream import SILENT, ProgressMeter, Stream

Rows = Inexact[Array, "n ..."]
Reduction = Callable[[Rows], Any]
Read = Callable[[Any, Array], Array]  # of a subject and a block
ValueAndError = tuple[Inexact[Array, "*values"], Float[Array, "*values"]]


class LeaveOneOut(NamedTuple):
    """The quantities that the sketch and the probes alone determine.

    Each column of a block, and each entry of a vector, belongs to one probe. In the
    notation of this file, `directions` are the s_i, `x` the x_i, `mu` the mu_i, and
    `resphering` the factors c_i, which are 1 if the probes are not resphered. `distances`
    are the distances of the columns of the sketch from the span of the others, and `inside`
    is Q* Omega. If `resphere` is False, the probes are not resphered.
    """

    probes: Block
    sketch: Block
    basis: Basis
    directions: Inexact[Array, "k k"]
    distances: OfProbes
    inside: Inexact[Array, "k k"]
    x: Inexact[Array, "k k"]
    mu: Block
    resphering: OfProbes
    resphere: bool

    @property
    def pairs(self) -> jackknife.EveryPair:
        """Return what the replicates need of all pairs of probes."""
        blocks = self.directions, self.inside, self.mu
        return jackknife.pairs_of_probes(*blocks, self.resphere)

    def error(
        self, samples: Array, rounding: Array, means: Callable[..., Array], *read: Array
    ) -> Float[Array, "*values"]:
        """Return the error of the mean of samples that share probes, by the jackknife.

        `means(pairs, *read)` are the means without one probe. With two probes the
        samples are taken for independent ones.
        """
        if samples.shape[-1] < 3:
            return jackknife.standard_error(samples, rounding)
        return jackknife.jackknife_error(means(self.pairs, *read), rounding)


def leave_one_out(
    sketch: Block, probes: Block, *, resphere: bool, basis: Basis | None = None
) -> LeaveOneOut:
    """Leave each probe out, given the sketch of `probes`, and a basis if it is known."""
    basis = orthonormalise(sketch) if basis is None else basis
    n, k = probes.shape
    s, distances = downdate(basis)
    w = dot(basis.columns.conj().T, probes)
    x = w - s * column_dots(s, w)[None, :]
    mu = probes - dot(basis.columns, x)
    lengths = column_norms_squared(mu)
    resphering = (n - k + 1) / lengths if resphere else jnp.ones_like(lengths)
    return LeaveOneOut(probes, sketch, basis, s, distances, w, x, mu, resphering, resphere)


def sketched_by(
    linear_map: LinearMap, probes: Block, *, resphere: bool
) -> tuple[LeaveOneOut, Float[Array, ""]]:
    """Leave each probe out of the sketch A Omega, and return the error of a form w* A w."""
    loo = leave_one_out(linear_map(probes), probes, resphere=resphere)
    return loo, linear_map.eps_of(probes, loo.sketch)


def outside(
    q: Block, s: Inexact[Array, "k l"] | None, block: Inexact[Array, "n l"]
) -> Inexact[Array, "n l"]:
    """Return (I - P_i) b_i for the columns b_i of a block.

    The directions s_i are in `s`. If it is None, return (I - Q Q*) b_i.
    """
    inside = dot(q.conj().T, block)
    if s is not None:
        inside = inside - s * column_dots(s, inside)[None, :]
    return block - dot(q, inside)


def mean_and_error(
    samples: Array, error: Array, scale: Number, weights: OfProbes | None
) -> ValueAndError:
    """Return the mean of samples over a `scale`, and its error bar, given that of the mean.

    If there are `weights`, which sum to 1, the mean is a weighted one.
    """
    if weights is None:
        return times(scale, mean(samples)), scale * error
    error = jackknife.root_design_effect(weights) * error
    return times(scale, dot(samples, weights.astype(samples.dtype))), scale * error


class Samples(eqx.Module):
    """Estimates of a diagonal, one for each probe, divided by `scale`.

    `rounding` is the rounding error of their mean. If the samples share probes, the
    variance of their mean is up to `sharing` times the variance of a mean of independent
    samples (`jackknife.shared_error`).
    """

    values: Inexact[Array, "*values k"]
    rounding: Float[Array, "*values"]
    scale: Number
    sharing: Number | float = 2.0

    def reduced(self, fn: Reduction) -> Samples:
        """Reduce the rows of the diagonal, for example to sums over leaves."""
        return Samples(fn(self.values), fn(self.rounding), self.scale, self.sharing)

    def value_and_error(self, weights: OfProbes | None = None) -> ValueAndError:
        """Return the mean of the samples and its error bar for each entry.

        If there are `weights`, which sum to 1, the mean is a weighted one.
        """
        root = jnp.sqrt(jnp.asarray(self.sharing, self.rounding.dtype))
        error = jackknife.standard_error(times(root, self.values), self.rounding)
        return mean_and_error(self.values, error, self.scale, weights)


def independent(
    forms: Block, scale: Number, eps: Any, hermitian: bool, reduce: Reduction
) -> Samples:
    """Return Hutchinson's samples of a diagonal, or of sums over it, which are independent.

    The columns of `forms` are conj(w_i) o A w_i. They are divided by `scale`.
    """
    forms = over(forms, scale)
    rounding = 4 * eps * mean(jnp.abs(forms))
    return Samples(forms.real if hermitian else forms, rounding, scale, 1.0).reduced(reduce)


class Reduce(NamedTuple):
    """The way in which the entries of a diagonal become a result.

    `fn` takes the rows of the diagonal, which may have more axes, for example one for
    probes. `structure` is the structure of the result, or None if the result is a number.
    The result `is_real` if the operator is Hermitian, unless it has entries off the
    diagonal.

    `fn` goes into compiled programs, so it must be a plain function or an object that can
    be hashed and compared.
    """

    fn: Reduction
    structure: Structure | None = None
    is_real: bool = True

    def shaped(self, column: Array) -> Any:
        """Return the entries of a result with its structure."""
        return column if self.structure is None else as_result(column, self.structure)


def total(rows: Rows) -> Inexact[Array, "..."]:
    """Sum over all rows."""
    return jnp.sum(rows, axis=0)


def each(rows: Rows) -> Rows:
    """Keep every row."""
    return rows


@dataclass(frozen=True)
class LeafSums:
    """Sums over the rows of each leaf, or of several leaves.

    Leaf i has `sizes[i]` rows, and is added to the sum number `places[i]`.
    """

    sizes: tuple[int, ...]
    places: tuple[int, ...]

    def __call__(self, rows: Rows) -> Inexact[Array, "sums ..."]:
        place = in_rows(np.repeat(self.places, self.sizes), self.structure(rows.dtype))
        return jax.ops.segment_sum(rows, place, self.count)

    @property
    def count(self) -> int:
        """The number of sums."""
        return max(self.places) + 1

    def structure(self, dtype: Any) -> Structure:
        """Return the leaves, each as one vector."""
        return [jax.ShapeDtypeStruct((size,), dtype) for size in self.sizes]


TOTAL = Reduce(total)


def by_row(operator: Operator) -> Reduce:
    """Make every entry of the diagonal a result."""
    return Reduce(each, operator.in_structure())


def by_leaf(operator: Operator, groups: Callable[[Any], Any] | None = None) -> Reduce:
    """Make the sum over each leaf a result.

    If there are `groups`, they map the path of a leaf to a name. All leaves of one name
    share a sum, and the result is a dict of the sums, in the order of the sorted names.
    """
    structure = operator.in_structure()
    leaves = jax.tree.leaves_with_path(structure)
    places = tuple(range(len(leaves)))
    sums = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((), leaf.dtype), structure)
    if groups is not None:
        names = [str(groups(path)) for path, _ in leaves]
        distinct = sorted(set(names))
        places = tuple(distinct.index(name) for name in names)
        sums = dict.fromkeys(distinct, jax.ShapeDtypeStruct((), common_dtype(structure)))
    return Reduce(LeafSums(tuple(leaf.size for _, leaf in leaves), places), sums)


@dataclass(frozen=True)
class Forms:
    """Read the diagonal of an operator with probes, and reduce its rows.

    Each row is the sum over the probes z of the entry of conj(z) o (B z).
    """

    reduce: Reduction

    def __call__(self, linear_map: LinearMap, z: Block) -> Inexact[Array, "..."]:
        return self.reduce(row_dots(linear_map(z), z))


class Pairs(eqx.Module):
    """The readout tr B = E <L, B R>, which sums the entries of conj(L) o (B R)."""

    left: Inexact[Array, "n r"]
    right: Inexact[Array, "n r"]

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, ""]:
        return jnp.sum(self.left.conj() * linear_map(self.right))


def trace_pairs(
    loo: LeaveOneOut, weights: OfProbes | None = None, forms: Block | None = None
) -> Pairs:
    """Return the sum of P_i + c_i mu_i mu_i* over the probes, as pairs of 2k columns.

    `weights` are the weights of the sum, by default 1/k. If there are `forms`, conj(forms)
    o (B Omega) is added to it.
    """
    q, s, k, dtype = loo.basis.columns, loo.directions, len(loo.x), loo.resphering.dtype
    weights = jnp.full(k, 1 / k, dtype) if weights is None else weights.astype(dtype)
    removed = dot(q, s, times(s, weights[None, :]).conj().T)
    kept = times(summed(weights), q) - removed
    tested = times(loo.mu, (loo.resphering * weights)[None, :])
    if forms is not None:  # w_i is mu_i + Q x_i
        kept, tested = kept + dot(forms, loo.x.conj().T), tested + forms
    return Pairs(jnp.hstack([kept, tested]), jnp.hstack([q, loo.mu]))


def applied(subject: Callable[[Array], Array], block: Array) -> Array:
    """Read a subject that is a function of blocks."""
    return subject(block)


class Batches(eqx.Module):
    """The sum of `read(subject, block)` over batches of probes, divided by `lengths`.

    `lengths` is the number of probes, or for each row the sum of |z|^2 over the probes. The
    subject is a `LinearMap`, or any other object that `read` can apply to a block. By
    default the subject is called.
    """

    probes: Stream
    lengths: Float[Array, "..."]
    read: Read = eqx.field(static=True, default=applied)

    def __call__(self, subject: Any, meter: ProgressMeter = SILENT) -> Array:
        total = self.probes.reduce(partial(self.read, subject), meter=meter)
        return over(total, self.lengths)


class TwoSided(eqx.Module):
    """The readout of a diagonal with two-sided projections.

    For a projector P,

        diag B = diag(P B + B P - P B P) + E[conj(w) o (I - P) B (I - P) w].

    The readout is the sum of this over l pairs P_i, w_i, weighted by `shares`, with
    P_i = Q (I - s_i s_i*) Q*. The s_i are in `directions`, which is None if P = Q Q* serves
    all probes. `tested` holds mu_i = (I - P_i) w_i. The random part is of second order in
    what P misses. With one-sided projections, diag(P B) + conj(w) o (I - P) B w, it is of
    first order: on tangents this is as bad as having no sketch. With H = Q* B Q the first
    term is

        diag( Q K (Q* B) + (B Q K - Q E) Q* ),    K = sum of shares (I - s_i s_i*),
        E = sum of shares (I - s_i s_i*) H (I - s_i s_i*).

    If a part of the estimate is Hutchinson's, `plain` holds the weights of its samples
    conj(w_i) o B w_i, and B w_i = B mu_i + B Q x_i. If the whole estimate is Hutchinson's,
    other probes q_j take the place of Q, whose samples q_j o conj(B* q_j) have the weight
    `adjoint`. Then the w_i take the place of the mu_i, `shares` are zero, and `x` is None.
    """

    reduce: Reduction = eqx.field(static=True)
    basis: Block
    directions: Inexact[Array, "k l"] | None
    probes: Inexact[Array, "n l"]
    tested: Inexact[Array, "n l"]
    shares: Float[Array, " l"]
    plain: Float[Array, " l"] | None = None
    x: Inexact[Array, "k l"] | None = None
    adjoint: Number | None = None

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, "..."]:
        coimage = linear_map.adjoint(self.basis)
        image = coimage if linear_map.is_hermitian else linear_map(self.basis)
        products = linear_map(self.tested)
        rows = self.known(image, coimage)
        remainder = outside(self.basis, self.directions, products)
        rows += row_dots(remainder, times(self.probes, self.shares[None, :]))
        if self.plain is not None:
            products = products if self.x is None else products + dot(image, self.x)
            rows += row_dots(products, times(self.probes, self.plain[None, :]))
        if self.adjoint is not None:
            rows += row_dots(times(self.adjoint, self.basis), coimage)
        return self.reduce(rows)

    def known(self, image: Block, coimage: Block) -> Inexact[Array, " n"]:
        """Return the first term, computed from B Q and B* Q."""
        q, s = self.basis, self.directions
        h = dot(q.conj().T, image)
        if s is None:
            return row_dots(q, coimage) + row_dots(image - dot(q, h), q)
        weighted = times(self.shares[:, None], s.conj().T)
        removed = dot(s, weighted)
        kept = times(summed(self.shares), jnp.eye(len(h), dtype=h.dtype)) - removed
        inside = dot(s * column_dots(s, dot(h, s))[None, :], weighted)
        core = dot(kept, h) - dot(h, removed) + inside
        left = dot(image, kept) - dot(q, core)
        return row_dots(dot(q, kept), coimage) + row_dots(left, q)


def two_sided(
    loo: LeaveOneOut, reduce: Reduction = each, shares: OfProbes | None = None
) -> TwoSided:
    """Return the readout in which each probe is left out of its own projector.

    `shares` are weights of the probes, by default equal ones that sum to 1.
    """
    k, dtype = loo.probes.shape[1], loo.probes.real.dtype
    shares = jnp.full(k, 1 / k, dtype) if shares is None else shares.astype(dtype)
    return TwoSided(reduce, loo.basis.columns, loo.directions, loo.probes, loo.mu, shares)
