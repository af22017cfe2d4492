"""Nyström approximations of semidefinite operators, for traces and for sums over leaves.

Let S be a test matrix, and A<S> = A S (S* A S)^{-1} (A S)* the Nyström approximation made
from it. A<S_-j> is the approximation that lacks probe j and everything made from probe j.
Then

    tr A = E[ tr A<S_-j> + c_j w_j* (A - A<S_-j>) w_j ]        for every j,

because w_j is isotropic and independent of the other probes. The estimate is the mean of
the k samples in the brackets. If the probes are resphered, then

    c_j = (n - dim S_-j) / (w_j* (I - P_j) w_j)

with P_j the projector on S_-j. This factor removes all of the variance that a multiple of I
contributes. Otherwise c_j is 1. `_linalg.nystrom` computes the approximations without one
probe, and the approximations without two, from which the jackknife makes the standard
error. With I in the place of A it also computes dim S_-j and w_j* (I - P_j) w_j.

**XNysTrace** uses S = Omega with all k probes. It takes one matvec per probe.

**In a Krylov space.** XNysTrace leaves an error of about tr(rest)/k in the direction of a
large eigenvalue. XTrace leaves hardly any error there, because it also computes A Q, but
its sketch has only half as many probes, which is worse if eigenvalues decay. So the
estimate here spends a quarter of the budget on *second matvecs*, which apply A to a basis
of images. Omega_1 and Omega_2 hold the probes, a of them in Omega_1. With Q R = A Omega_1,

    S = [Omega_1, Omega_2, Q].

To leave out probe j of Omega_1 is to leave out the direction s_j of Q, too, which is
orthogonal to all other columns of R (`basis.downdate`). The budget is always split in this
way, so there is no decision that could be wrong.

This estimate is worse than XNysTrace if nearly all of the trace lies in more eigenvalues
than there are second matvecs, and in fewer than the budget has matvecs
(`tests.benchmarks.choices`).

**Derivative.** The derivative uses XTrace's readout on the range of A S. Probe j is left
out of that range in the same way, and a ridge takes the place of the shift (`_pairs`).

**Sums over leaves** are the same estimates, each summed over the rows of one leaf. They are
not resphered, so that random signs are exact for the diagonal part of the remainder
(`second_batch`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.checks import check_semidefinite
from traceax._core.estimate import Estimate
from traceax._core.operator import DOUBLE, LinearMap, Operator, is_negative
from traceax._core.rule import Outcome
from traceax._core.vectors import unflatten_rows
from traceax._estimators.call import SMALL, Blocks, Call, begin
from traceax._estimators.near_diagonal import FEWEST, NearDiagonal, near_diagonal
from traceax._estimators.readouts import (
    LeafSums,
    Pairs,
    ValueAndError,
    leave_one_out,
    trace_pairs,
)
from traceax._linalg import jackknife, lapack
from traceax._linalg.basis import downdate, orthonormalise
from traceax._linalg.columns import (
    Block,
    Number,
    OfProbes,
    column_norms_squared,
    diagonal_of,
    dot,
    einsum,
    largest_modulus,
    mean,
    over,
    row_norms_squared,
    squared_modulus,
    summed,
    times,
    trace_of,
)
from traceax._linalg.nystrom import Fit, fit, fit_to_cores, left_out_in_pairs
from traceax._probes.draw import for_sketch
from traceax._probes.samplers import SamplerLike

# An error bar is at least this many standard deviations of the noise of matvecs. The shift
# that the noise requires leaves a bias of about one such standard deviation.
NOISES = 3

# Images are independent if each is so many units of roundoff away from all others.
INDEPENDENT = 64

# The least budget, in matvecs, that has second matvecs. Two directions would take too large
# a part of a smaller budget.
FEWEST_PROBES = 8


def xnystrace(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: SamplerLike | None = None,
) -> Estimate:
    """Estimate tr A of a semidefinite operator by XNysTrace, with one matvec per probe.

    k = num_matvecs probes make a Nyström approximation `A<Omega>` of A. Each probe in turn
    is left out. It estimates the remainder of the approximation that the others make:

        value = 1/k sum_i [ tr A<Omega_-i> + c_i w_i* (A - A<Omega_-i>) w_i ]

    The estimate is unbiased. It is exact (to rounding) if the rank of A is below k, or if A
    is a multiple of I (and probes are resphered). `trace` adds second matvecs to this
    method, which is usually even more accurate.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a lineax operator tagged positive or negative semidefinite, real or
      complex, on arrays or pytrees.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the number of probes, at least 1.
    - `sampler`: a sampler of independent probes. Default `None`, which is `sphere` below
      100,000 dimensions and `rademacher` from there on. The factor c_i rescales projected
      probes (resphering) if the sampler is invariant under rotations, like `sphere`.
      Otherwise c_i is 1.

    **Returns** an `Estimate` with a real value of shape `()`. `standard_error` includes the
    noise of matvecs, because an operator may compute in TF32 or bfloat16 internally. The
    asymmetry of Omega* A Omega shows this noise. An operator that is semidefinite only up
    to rounding of its entries is estimated without bias. The tag is taken to be wrong if
    the most negative eigenvalue is larger in modulus than a hundredth of the largest one,
    and noise does not explain this. The value and the error are then NaN. Use a correct tag
    then, for example `lx.symmetric_tag`. If large parts cancel in the products, compute
    them in float64, or estimate the whole operator and subtract the trace of the part.

    **Derivatives**: they follow XTrace's rule on the same sketch, which is frozen. The rule
    is exact for a multiple of I, and also holds for indefinite tangents. A gradient costs
    2k matvec-VJPs.

    **Cost**: k matvecs in one batch, 4 blocks of n x k, and about 16 n k^2 flops.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> operator = tx.as_operator(jnp.ones((99, 99)), tags=lx.positive_semidefinite_tag)
        >>> print(tx.xnystrace(operator, jax.random.key(1), 20).value.round())
        99.0

    **Reference**: Epperly, Tropp and Webber (2024), Algorithm 2.2,
    [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323).

    **See also**: `trace`, `xtrace`, `xnysdiag`.
    """
    call = begin("xnystrace", operator, key, num_matvecs, sampler=sampler)
    check_semidefinite("xnystrace", call.operator, "xtrace")
    if call.is_exact:
        return call.exact()
    return estimate_by_nystrom(call, "xnystrace", plain=True)


def estimate_by_nystrom(
    call: Call, method: str, *, cost: int = 1, plain: bool = False
) -> Estimate:
    """Estimate the trace, with second matvecs if the budget is large enough.

    One matvec with `call.operator` counts as `cost` matvecs of the budget. For example, a
    Gram matrix A* A costs 2 matvecs. If the operator turns out to be nearly diagonal, the
    estimate is a mean of `near_diagonal`'s forms. XNysTrace is `plain`: it has neither
    second matvecs nor these forms.
    """
    call = call.using(for_sketch(call.operator))
    blocks, spent = draw_for_products(call, cost, plain)
    mixed = not plain and sum(block.shape[1] for block in blocks) >= FEWEST
    algorithm = partial(_trace, resphere=call.resphere, mixed=mixed)
    return call.finish(algorithm, blocks, method=method, spent=spent)


def draw_for_products(call: Call, cost: int = 1, plain: bool = False) -> tuple[Blocks, int]:
    """Draw the probes for a budget of which a quarter goes to second matvecs.

    Return Omega_1, whose images get second matvecs, and Omega_2, whose images do not, and
    the number of matvecs that all of it costs. `cost` and `plain` are those arguments of
    `estimate_by_nystrom`. In single precision at most 3n/4 matvecs are spent. With more of
    them, rounding makes the remainders, which are small then, too large.
    """
    count, n = call.num_matvecs // cost, call.operator.in_size()
    if n > SMALL and LinearMap(call.operator).eps > DOUBLE:
        count = min(count, 3 * n // 4)
    again = 0 if plain or count < FEWEST_PROBES else count // 4
    (block,) = call.draw(count - again)
    return (block[:, :again], block[:, again:]), count * cost


class Products(NamedTuple):
    """The matvecs of an estimate, from which value, error and derivative are made.

    `block` holds all probes, `test` is S, and `images` is A S/scale, with -A in the place
    of A if `sign` is -1. `directions` are the s_j of `basis.downdate`, one for each probe
    of Omega_1; there are none without second matvecs.
    """

    block: Block
    test: Inexact[Array, "n m"]
    images: Inexact[Array, "n m"]
    directions: Inexact[Array, "a a"]
    sign: int
    scale: Number

    @property
    def eps(self) -> float:
        """The unit roundoff of sums. The core shows the noise of a coarser operator."""
        return float(jnp.finfo(self.images.dtype).eps)

    @property
    def divisor(self) -> Float[Array, ""]:
        """The scale, or 1 if the sketch is zero: XLA may divide by a part of the least
        normal number, which is zero to it."""
        return jnp.where(self.scale > jnp.finfo(self.scale.dtype).tiny, self.scale, 1)

    def fits(self, *more: Block) -> Fit:
        """Return the Nyström approximations of A, with a shift that covers rounding of the
        images, and of other operators, which have the images `more` of S."""
        size = jnp.maximum(jnp.linalg.norm(self.images), 1e-3)
        noise = self.eps * self.block.shape[0] ** 0.5 * size
        images = jnp.stack([self.images, *more])
        return fit_to_cores(self.test, images, self.directions, noise)

    @property
    def fitted(self) -> Fit:
        """The Nyström approximation of A alone."""
        return jax.tree.map(lambda leaf: leaf[0], self.fits())

    @property
    def sketch(self) -> Block:
        """The images of the probes alone, A Omega/scale."""
        return self.images[:, : self.block.shape[1]]


def products(linear_map: LinearMap, *blocks: Inexact[Array, "n _"]) -> Products:
    """Apply the operator to all probes and, if there are two blocks, to Q.

    Q is a basis of the images of the first block. If these images are linearly dependent
    up to rounding, the directions s_j are rounding errors, and Q is not used: the test
    matrix and its images have zeros in its place. The other probes are three times as many,
    so that Q has nothing to add then.
    """
    block, sign = jnp.hstack(blocks), -1 if is_negative(linear_map.operator) else 1
    again, sketch = block.shape[1] - blocks[-1].shape[1], sign * linear_map(block)
    known = products_of_sketch(sketch, block)._replace(sign=sign)
    if again == 0:
        return known
    basis, root = orthonormalise(sketch[:, :again]), block.shape[0] ** 0.5
    images = over(root * sign * linear_map(basis.columns), known.divisor)
    directions, distances = downdate(basis)
    longest = jnp.sqrt(jnp.max(column_norms_squared(basis.factor)))
    usable = jnp.min(distances) > INDEPENDENT * known.eps * longest
    return known._replace(
        test=jnp.hstack([block, jnp.where(usable, root * basis.columns, 0)]),
        images=jnp.hstack([known.images, jnp.where(usable, images, 0)]),
        directions=jnp.where(usable, directions, 0),
    )


def products_of_sketch(sketch: Block, block: Block) -> Products:
    """Collect what is known from one batch, the sketch A Omega of the probes `block`."""
    scale, none = largest_modulus(sketch), jnp.zeros((0, 0), block.dtype)
    known = Products(block, block, sketch, none, 1, scale)
    return known._replace(images=over(sketch, known.divisor))


def _trace(linear_map: LinearMap, probes: Blocks, resphere: bool, mixed: bool) -> Outcome:
    known = products(linear_map, *probes)
    near = near_diagonal(known.block, known.sketch) if mixed else None
    value, error, weights = value_and_error(known, resphere=resphere, near=near)
    shares = weights / weights.size
    forms = None if near is None else near.left((1 - weights) / weights.size)
    return Outcome(known.sign * value, error, _pairs(known, shares, forms, resphere))


def _pairs(known: Products, shares: OfProbes, forms: Block | None, resphere: bool) -> Pairs:
    """Return the readout for derivatives, the sum of 2 P_j - P_j^2 + c_j mu_j mu_j*.

    `shares` are the weights of this sum, and conj(`forms`) o (B Omega) is added to it.
    Without second matvecs the P_j are projectors, as in `trace_pairs`.

    Otherwise P_j = F C_j F* with C_j = I - N_j N_j*, where F comes from A S as in
    `_linalg.nystrom`, and mu_j = (I - P_j) w_j. The ridge makes P_j differ from a
    projector. The expectation of the readout is I nevertheless, because E[mu_j mu_j*] =
    (I - P_j)^2.
    """
    block, (n, m) = known.block, known.images.shape
    k = block.shape[1]
    if m == k:
        loo = leave_one_out(known.images, block, resphere=resphere)
        return trace_pairs(loo, shares, forms)
    # Singular values of A S may span many orders of magnitude. So they are computed from
    # the block and squared, because rounding in (A S)* A S would destroy the small ones.
    basis = orthonormalise(known.images)
    sizes, right = lapack.svd(basis.factor)[1:]
    ridge = 16 * known.eps * sizes[0] ** 2
    images, vectors = over(known.images, basis.scale), right.conj().T
    space = fit(sizes**2, vectors, images, known.directions, ridge)
    v, gram, columns = space.vectors, space.gram, space.columns
    inner = dot(v.conj().swapaxes(1, 2), gram, v)
    weighted = times(columns, jnp.repeat(shares, 2)[None, :]).conj().T
    spread = dot(jnp.moveaxis(dot(v, inner), 0, 1).reshape(m, 2 * k), weighted)
    removed = dot(columns, weighted)
    cross, unit = dot(removed, gram), jnp.eye(m, dtype=gram.dtype)
    kept = times(summed(shares), 2 * unit - gram)
    kept = kept - 2 * removed + cross + cross.conj().T - spread

    inside = dot(space.left.conj().T, block)
    along = einsum("kma,mk->ka", v.conj(), inside)
    inside = inside - einsum("kma,ka->mk", v, along)
    mu = block - dot(space.left, inside)
    lengths = jnp.ones(k, sizes.dtype)
    if resphere:  # the trace n - tr(2 P_j - P_j^2), over |mu_j|^2
        second = jnp.sum(column_norms_squared(dot(gram, columns)).reshape(k, 2), axis=1)
        squares = summed(row_norms_squared(gram)) - 2 * second
        squares = squares + jnp.sum(squared_modulus(inner), axis=(1, 2))
        lengths = (n - 2 * space.traces + squares) / column_norms_squared(mu)
    left, tested = dot(space.left, kept), times(mu, (lengths * shares)[None, :])
    if forms is not None:  # w_j is mu_j plus a column in the range of `space.left`
        left, tested = left + dot(forms, inside.conj().T), tested + forms
    return Pairs(jnp.hstack([left, tested]), jnp.hstack([space.left, mu]))


def value_and_error(
    known: Products, *, resphere: bool, near: NearDiagonal | None = None
) -> tuple[Number, Number, OfProbes]:
    """Return the estimate of the trace, of -A if `known.sign` is -1, and its error bar.

    The third result are weights of the samples, 1 unless the forms of `near` are better.
    """
    (n, k), both = known.block.shape, known.fits(known.test)
    without = jax.vmap(lambda fit: (fit.traces, fit.squares - fit.shift))
    (traces, ranks), (remainders, lengths) = without(both)
    factors = (n - ranks) / lengths if resphere else jnp.ones(k, traces.dtype)
    samples, weights = traces + factors * remainders, jnp.ones(k, factors.dtype)
    roundoff = 4 * known.eps * known.test.shape[1] ** 0.5
    rounding = roundoff * mean(samples) + NOISES * both.noise[0]
    error = jnp.full_like(rounding, jnp.inf)
    if k > 1:
        # The samples without each pair of probes, indexed [i, j]; j evaluates.
        (traces, ranks), (rests, sizes) = jax.vmap(_parts_of_pairs)(both)
        pairs = traces + ((n - ranks) / sizes if resphere else 1) * rests
        real = not jnp.iscomplexobj(known.test)
        if near is not None:
            weights, forms = _weights(pairs, near, real), near.samples(known.eps)
            plain = forms.values.real
            spread = mean(plain) + forms.sharing**0.5 * (plain - mean(plain))
            samples = weights * samples + (1 - weights) * plain
            pairs = weights[None, :] * pairs + ((1 - weights) * spread)[None, :]
            share = mean(weights)
            rounding = share * rounding + (1 - share) * forms.rounding
        error = jackknife.jackknife_error(jackknife.mean_of_others(pairs), rounding)
        if resphere:
            of_a, of_one = dot(both.left, both.residuals)
            across = of_a - times((remainders / lengths)[None, :], of_one)
            missed = (weights * factors) ** 2 * column_norms_squared(across)
            error = jackknife.no_less_than_theory(error, missed, real=real)
    return known.scale * mean(samples), known.scale * error, weights


def _weights(pairs: Float[Array, "k k"], near: NearDiagonal, real: bool) -> OfProbes:
    """Return the weight of each sample, computed from all other probes.

    It falls from 1 to 0 as the variance of the forms of `near` falls from a half to a fifth
    of the variance of the samples without probe i, a row of `pairs`.
    """
    k = len(pairs)
    deviations = pairs - jackknife.mean_of_others(pairs)[:, None]
    spread = jackknife.mean_of_others(deviations**2) * ((k - 1) / (k - 2))
    ratio = near.off * near.excess / jnp.maximum(spread, jnp.finfo(spread.dtype).tiny)
    return jnp.clip(((2 if real else 1) * ratio - 0.2) / 0.3, 0, 1)


def _parts_of_pairs(fit: Fit) -> tuple[Float[Array, "k k"], Float[Array, "k k"]]:
    """Return tr A<S_-ij> and w_j* (A - A<S_-ij>) w_j, as matrices indexed [i, j]."""
    pairs, columns = left_out_in_pairs(fit), fit.columns
    removed = pairs.removed(dot(columns.conj().T, fit.gram, columns))
    traces = trace_of(fit.gram).real - removed
    return traces, pairs.inverse[..., 1, 1].real * fit.squares[None, :] - fit.shift


def leaf_by_leaf(known: Products, weights: OfProbes, leaves: LeafSums) -> ValueAndError:
    """Return the sums over leaves and their error bars.

    Let F_L and W_L be the rows of F and of the probes that belong to one leaf. The sample
    of probe j for the sum over that leaf is

        t_j = tr F_L C_j F_L* + w_jL* F_L u_j/|u_j|^2,

    with C_j = I - N_j N_j* in the notation of `_linalg.nystrom`. The sample without i and j
    is similar. So only F_L* F_L and W_L* F_L are needed. The estimate mixes the t_j, with
    these `weights`, and the quadratic forms w_jL* (A w_j)_L, with weights 1 - `weights`.
    """
    (n, k), fitted = known.block.shape, known.fitted
    both = fitted.left, known.block
    grams, tested = (_of_leaves(x, fitted.left, leaves) for x in both)
    forms = leaves(known.block.conj() * known.sketch).real
    pairs, columns = left_out_in_pairs(fitted), fitted.columns
    roots = jnp.sqrt(fitted.squares)

    def of_leaf(leaf: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        gram, tested, plain = leaf
        forms, along = dot(columns.conj().T, gram, columns), dot(tested, columns)
        whole, plain = trace_of(gram).real, (1 - weights) * plain
        of_one = jnp.sum(diagonal_of(forms).real.reshape(k, 2), axis=1)
        rest = diagonal_of(along.reshape(k, k, 2)[..., 1]).real
        samples = weights * (whole - of_one + roots * rest) + plain
        rest = roots[None, :] * pairs.tested(along)
        of_two = weights[None, :] * (whole - pairs.removed(forms) + rest)
        return mean(samples), jackknife.mean_of_others(of_two + plain[None, :])

    values, replicates = jax.lax.map(of_leaf, (grams, tested, forms))
    counts = jnp.asarray(np.bincount(leaves.places, leaves.sizes), values.dtype)
    rounding = 4 * known.eps * summed(values) + NOISES * fitted.noise
    rounding = counts / n * rounding + 4 * known.eps * jnp.abs(values)
    error = jackknife.jackknife_error(replicates, rounding)
    return times(known.scale, values), times(known.scale, error)


def _of_leaves(a: Array, b: Array, leaves: LeafSums) -> Inexact[Array, "sums ..."]:
    """Return A_L* B_L for each sum over leaves, with A_L and B_L the rows of its leaves."""
    parts = (unflatten_rows(x.T, leaves.structure(x.dtype)) for x in (a, b))
    products = [dot(a.conj(), b.T) for a, b in zip(*parts, strict=True)]
    return jax.ops.segment_sum(jnp.stack(products), np.asarray(leaves.places), leaves.count)
