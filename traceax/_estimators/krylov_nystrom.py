"""Nyström approximations of semidefinite operators: traces, and sums over leaves.

With S a test matrix, A<S> = A S (S* A S)^{-1} (A S)* the Nyström approximation from it, and
A<S_-j> that without probe j and what was made of it,

    tr A = E[ tr A<S_-j> + c_j w_j* (A - A<S_-j>) w_j ]        for every j,

since w_j is isotropic and independent of the others. The k estimates of the right-hand side
are averaged. If the probes are resphered, c_j = (n - dim S_-j)/(w_j* (I - P_j) w_j) with
P_j the projector on S_-j, which removes all of the variance that a multiple of I
contributes; else c_j is 1. `_linalg.nystrom` has the approximations without a probe, and
without two, of which the jackknife's error is made. The same with I in the place of A gives
dim S_-j and w_j* (I - P_j) w_j.

**XNysTrace** has S = Omega, all k probes: one application a probe.

**In a Krylov space.** XNysTrace leaves about tr(rest)/k in the direction of a large
eigenvalue. XTrace's second product A Q leaves next to nothing there, but a sketch by half
of the probes is worse where eigenvalues decay. So a quarter of the budget is spent on
second products: with probes Omega_1, a of them, Omega_2, and Q R = A Omega_1,

    S = [Omega_1, Omega_2, Q].

With probe j of Omega_1 goes the direction s_j of Q, which the other columns of R do not
have (`basis.downdate`). No decision is made, so none can be wrong.

**Derivative.** It is read through XTrace's weight on the range of A S, from which probe j
is left out in the same way, with a ridge in the place of the shift (`_readout`).

**Sums over leaves** have the same estimates, each summed over the rows of a leaf, without
resphering, so that signs are exact for the diagonal part of the remainder (`second_batch`).

It is worse than XNysTrace (`tests.benchmarks.choices`) where nearly all of the trace is in
more eigenvalues than there are second products, and in fewer than there are products.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.checks import check_semidefinite
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator, is_negative
from traceax._core.rule import Outcome
from traceax._core.vectors import Structure, unflatten_rows
from traceax._estimators.call import Call, begin
from traceax._estimators.readouts import TOTAL, LeafSums, Pairs, leave_one_out, trace_pairs
from traceax._linalg import jackknife, lapack
from traceax._linalg.basis import downdate, orthonormalise
from traceax._linalg.columns import (
    column_dots,
    column_norms_squared,
    diagonal_of,
    dot,
    einsum,
    largest_modulus,
    mean,
    over,
    row_dots,
    squared_modulus,
    times,
)
from traceax._linalg.nystrom import Fit, fit, fit_to_core, left_out_in_pairs
from traceax._probes.draw import for_sketch
from traceax._probes.samplers import SamplerLike

# How many standard errors of the noise of matvecs an error bar has at least. The shift that
# the noise needs leaves a bias of about one.
NOISES = 3

# Products; with fewer, second ones of two directions would take too many.
FEWEST_PROBES = 8


def xnystrace(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: SamplerLike | None = None,
) -> Estimate:
    """Estimate tr A of a semidefinite operator by XNysTrace: one application a probe.

    k = num_matvecs probes make a Nyström approximation A<Omega> of A. Each in turn is left
    out of it, and estimates the remainder of the approximation by the others:

        value = 1/k sum_i [ tr A<Omega_-i> + c_i w_i* (A - A<Omega_-i>) w_i ]

    Unbiased. Exact (to rounding) if the rank of A is below k, or if A is a multiple of I
    (and probes are resphered). The most accurate estimator wherever it applies.

    **Arguments** (the others are in the guide's conventions): `num_matvecs`: at least 1.
    `sampler`: independent probes. Default: the sphere, resphered by c_i, or signs.

    **Returns** an `Estimate`. `standard_error` includes the noise of matvecs, which the
    asymmetry of Omega* A Omega shows: an operator may compute in TF32 or bfloat16 inside.
    An operator that is semidefinite only up to rounding of its entries is estimated without
    bias. If its most negative eigenvalue is deeper than a hundredth of the largest, and
    noise does not explain it, the tag was wrong: value and error are NaN.

    **Derivatives**: by XTrace's rule on the same sketch, which is frozen: exact for a
    multiple of I, also for indefinite tangents. A gradient costs 2k matvec-VJPs. **Cost**:
    k applications in one batch; 4 blocks of n x k; about 16 n k^2 flops.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> operator = tx.as_operator(jnp.ones((99, 99)), tags=lx.positive_semidefinite_tag)
        >>> print(tx.xnystrace(operator, jax.random.key(1), 20).value.round())
        99.0

    **Reference**: Epperly, Tropp and Webber (2024), Algorithm 2.2, doi:10.1137/23M1548323.
    """
    call = begin("xnystrace", operator, key, num_matvecs, sampler=sampler)
    check_semidefinite("xnystrace", call.operator, "xtrace")
    if call.is_exact:
        return call.exact(TOTAL)
    return estimate_by_nystrom(call, "xnystrace", fewest=math.inf)


def estimate_by_nystrom(
    call: Call, method: str, *, cost: int = 1, fewest: float = FEWEST_PROBES
) -> Estimate:
    """Estimate the trace, with second products from a budget of `fewest` on. A product
    costs `cost` matvecs."""
    call = call.using(for_sketch(call.operator))
    drawn = draw_for_products(call, cost, fewest)
    algorithm = partial(_trace, resphere=call.resphere)
    return call.finish(
        algorithm, drawn.blocks, method=method, spent=drawn.spent, degrees=drawn.degrees
    )


class ProbesOfProducts(NamedTuple):
    """Probes with second products and without, the matvecs they cost, and the degrees of
    freedom of the error bar."""

    blocks: tuple[Inexact[Array, "n a"], Inexact[Array, "n b"]]
    spent: int
    degrees: int


def draw_for_products(
    call: Call, cost: int = 1, fewest: float = FEWEST_PROBES
) -> ProbesOfProducts:
    """Draw the probes: a quarter of the products are second ones."""
    count = call.num_matvecs // cost
    again = count // 4 if count >= fewest else 0
    (block,) = call.draw(count - again)
    blocks = block[:, :again], block[:, again:]
    return ProbesOfProducts(blocks, count * cost, max(count - again - 1, 1))


class Products(NamedTuple):
    """All probes, S, A S/scale (of -A if `sign` is -1), and the directions of Q."""

    block: Inexact[Array, "n k"]
    test: Inexact[Array, "n m"]
    images: Inexact[Array, "n m"]
    directions: Inexact[Array, "a a"]
    sign: int
    scale: Float[Array, ""]

    @property
    def eps(self) -> float:
        """The rounding error of sums. A coarser operator shows its noise in the core."""
        return float(jnp.finfo(self.images.dtype).eps)

    @property
    def fitted(self) -> Fit:
        """With the shift of what the products are rounded by."""
        size = jnp.maximum(jnp.linalg.norm(self.images), 1e-3)
        noise = self.eps * self.block.shape[0] ** 0.5 * size
        return fit_to_core(self.test, self.images, self.directions, noise)

    @property
    def without_second(self) -> Products:
        """Those with the probes alone."""
        block, none = self.block, self.directions[:0, :0]
        return self._replace(test=block, images=self.sketch, directions=none)

    @property
    def sketch(self) -> Inexact[Array, "n k"]:
        """A/scale times the probes."""
        return self.images[:, : self.block.shape[1]]


def products(linear_map: LinearMap, *blocks: Inexact[Array, "n _"]) -> Products:
    """Apply the operator to all blocks of probes, and to a basis of the sketch of the first
    block if there are two."""
    block, sign = jnp.hstack(blocks), -1 if is_negative(linear_map.operator) else 1
    again, sketch = block.shape[1] - blocks[-1].shape[1], sign * linear_map(block)
    known = products_of_sketch(sketch, block)._replace(sign=sign)
    if again == 0:
        return known
    basis, root = orthonormalise(sketch[:, :again]), block.shape[0] ** 0.5
    images = over(root * sign * linear_map(basis.columns), known.scale)
    return known._replace(
        test=jnp.hstack([block, root * basis.columns]),
        images=jnp.hstack([known.images, images]),
        directions=downdate(basis).directions,
    )


def products_of_sketch(
    sketch: Inexact[Array, "n k"], block: Inexact[Array, "n k"]
) -> Products:
    scale, none = largest_modulus(sketch), jnp.zeros((0, 0), block.dtype)
    images = over(sketch, jnp.where(jnp.any(sketch != 0), scale, 1))
    return Products(block, block, images, none, 1, scale)


def _trace(
    linear_map: LinearMap, probes: tuple[Inexact[Array, "n _"], ...], *, resphere: bool
) -> Outcome:
    known = products(linear_map, *probes)
    value, error = value_and_error(known, resphere=resphere)
    if known.directions.size:
        weight = _readout(known, resphere)
    else:
        loo = leave_one_out(known.images, known.block, resphere=resphere)
        weight = trace_pairs(loo)
    return Outcome(known.sign * value, error, weight)


def _readout(known: Products, resphere: bool) -> Pairs:
    """The mean of 2 P_j - P_j^2 + c_j mu_j mu_j*, P_j = F C_j F* of A S with C_j =
    I - N_j N_j*, mu_j = (I - P_j) w_j: its expectation is I, projector or not."""
    block, (n, m) = known.block, known.images.shape
    k = block.shape[1]
    # The squares of the singular values, which fall far, without squaring the block.
    basis = orthonormalise(known.images)
    sizes, right = lapack.svd(basis.factor)[1:]
    ridge = 16 * known.eps * sizes[0] ** 2
    images, vectors = over(known.images, basis.scale), right.conj().T
    space = fit(sizes**2, vectors, images, known.directions, ridge)
    v, gram, columns = space.vectors, space.gram, space.columns
    inner = dot(v.conj().swapaxes(1, 2), gram, v)
    spread = dot(jnp.moveaxis(dot(v, inner), 0, 1).reshape(m, 2 * k), columns.conj().T) / k
    removed = dot(columns, columns.conj().T) / k
    cross, unit = dot(removed, gram), jnp.eye(m, dtype=gram.dtype)
    kept = 2 * (unit - removed) - gram + cross + cross.conj().T - spread

    inside = dot(space.left.conj().T, block)
    along = einsum("kma,mk->ka", v.conj(), inside)
    mu = block - dot(space.left, inside - einsum("kma,ka->mk", v, along))
    lengths = jnp.ones(k, sizes.dtype)
    if resphere:  # n - tr(2 P_j - P_j^2)
        second = jnp.sum(column_norms_squared(dot(gram, columns)).reshape(k, 2), axis=1)
        squares = jnp.sum(squared_modulus(gram)) - 2 * second
        squares = squares + jnp.sum(squared_modulus(inner), axis=(1, 2))
        lengths = (n - 2 * space.traces + squares) / column_norms_squared(mu)
    left = dot(space.left, kept), times(mu, lengths[None, :] / k)
    return Pairs(jnp.hstack(left), jnp.hstack([space.left, mu]))


def value_and_error(
    known: Products, *, resphere: bool
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    (n, k), of_a = known.block.shape, known.fitted
    # In the same proportion to I as the shift is to A, so that multiples of I are exact.
    size = jnp.sum(column_dots(known.test, known.images).real)
    proportion = jnp.sum(column_norms_squared(known.test)) / jnp.where(size != 0, size, 1)
    ridge = of_a.shift * proportion
    of_one = fit_to_core(known.test, known.test, known.directions, ridge)
    factors = jnp.ones_like(of_a.squares)
    if resphere:
        factors = (n - of_one.traces) / of_one.remainders
    samples = of_a.traces + factors * of_a.remainders
    roundoff = 4 * known.eps * len(of_a.gram) ** 0.5
    rounding = roundoff * mean(samples) + NOISES * of_a.noise
    error = jnp.full_like(rounding, jnp.inf)
    if k > 1:
        replicates = _replicates(of_a, of_one, n, resphere)
        error = jackknife.jackknife_error(replicates, rounding)
    if resphere and k > 1:
        along = of_a.remainders / of_one.remainders
        across = dot(of_a.left, of_a.residuals)
        across = across - dot(of_one.left, times(along[None, :], of_one.residuals))
        missed = factors**2 * column_norms_squared(across)
        real = not jnp.iscomplexobj(known.test)
        error = jackknife.no_less_than_theory(error, missed, real=real)
    return known.scale * mean(samples), known.scale * error


def _replicates(of_a: Fit, of_one: Fit, n: int, resphere: bool) -> Float[Array, " k"]:
    (traces, remainders), (ranks, lengths) = _of_pairs(of_a), _of_pairs(of_one)
    factors = (n - ranks) / lengths if resphere else 1
    return jackknife.mean_of_others(traces + factors * remainders)


def _of_pairs(fit: Fit) -> tuple[Float[Array, "k k"], Float[Array, "k k"]]:
    """tr A<S_-ij> and w_j* (A - A<S_-ij>) w_j."""
    pairs, columns = left_out_in_pairs(fit), fit.columns
    removed = pairs.removed(dot(columns.conj().T, fit.gram, columns))
    traces = jnp.trace(fit.gram).real - removed
    return traces, pairs.inverse[..., 1, 1].real * fit.squares[None, :] - fit.shift


def leaf_by_leaf(
    known: Products, weights: Float[Array, " k"], structure: Structure, leaves: LeafSums
) -> tuple[Float[Array, " sums"], Float[Array, " sums"]]:
    """With F_L and W_L the rows of a leaf,

        t_j = tr F_L C_j F_L* + w_jL* F_L u_j/|u_j|^2,

    and likewise without i and j: of F only the F_L* F_L and W_L* F_L are needed. `weights`
    are those of the t_j, beside those of the quadratic forms w_jL* (A w_j)_L."""
    (n, k), fitted = known.block.shape, known.fitted
    *of_leaves, counts = (
        jax.ops.segment_sum(x, np.asarray(leaves.places), leaves.count)
        for x in _of_leaves(fitted.left, known, structure)
    )
    pairs, columns = left_out_in_pairs(fitted), fitted.columns
    roots = jnp.sqrt(fitted.squares)

    def of_leaf(leaf: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        gram, tested, plain = leaf
        forms, along = dot(columns.conj().T, gram, columns), dot(tested, columns)
        whole, plain = jnp.trace(gram).real, (1 - weights) * plain
        of_one = jnp.sum(diagonal_of(forms).real.reshape(k, 2), axis=1)
        rest = diagonal_of(along.reshape(k, k, 2)[..., 1]).real
        samples = weights * (whole - of_one + roots * rest) + plain
        rest = roots[None, :] * pairs.tested(along)
        of_two = weights[None, :] * (whole - pairs.removed(forms) + rest)
        return mean(samples), jackknife.mean_of_others(of_two + plain[None, :])

    values, replicates = jax.lax.map(of_leaf, tuple(of_leaves))
    rounding = 4 * known.eps * jnp.sum(values) + NOISES * fitted.noise
    rounding = counts / n * rounding + 4 * known.eps * jnp.abs(values)
    error = jackknife.jackknife_error(replicates, rounding)
    return times(known.scale, values), times(known.scale, error)


def _of_leaves(
    left: Inexact[Array, "n m"], known: Products, structure: Structure
) -> tuple[Array, Array, Array, Float[Array, " leaves"]]:
    """Return F_L* F_L, W_L* F_L, the forms, and the number of rows of each leaf."""
    leaves = jax.tree.leaves(structure)
    as_they_are = [jax.ShapeDtypeStruct(leaf.shape, left.dtype) for leaf in leaves]
    rows = [unflatten_rows(x.T, as_they_are) for x in (left, known.block, known.sketch)]
    rows = [[leaf.reshape(leaf.shape[0], -1) for leaf in block] for block in rows]
    grams = jnp.stack([dot(f.conj(), f.T) for f in rows[0]])
    tested = jnp.stack([dot(w.conj(), f.T) for f, w, _ in zip(*rows, strict=True)])
    forms = [row_dots(y, w).real for _, w, y in zip(*rows, strict=True)]
    counts = jnp.asarray([leaf.size for leaf in leaves], left.real.dtype)
    return grams, tested, jnp.stack(forms), counts
