"""XDiag: the leave-one-out estimator of the diagonal of any square operator.

The notation is explained in `readouts` (`leave_one_out`). Let A_i be an approximation of A
that is made by a sketch without probe i and whose diagonal is known, and let B_i = A - A_i
be the part of A that it misses. The estimates

    d_i = diag A_i + conj(w_i) o B_i w_i,      E[ conj(w_i) o B_i w_i | B_i ] = diag B_i,

are unbiased for every i, and their mean is the value.

**XDiag of a Hermitian operator** has A_i = P_i A + A P_i - P_i A P_i. So the remainder
B_i = (I - P_i) A (I - P_i) is of second order in what P_i misses. This takes the matvecs
A Q, which the published, one-sided form A_i = P_i A takes as well. With v_i = Q s_i,
leaving v_i out of Q Q* subtracts from A_i the terms

    v_i n_i* + n_i v_i* + v_i (s_i* H s_i) v_i*,      n_i = (I - Q Q*) A v_i.

They are products of blocks, and their diagonals are sums of columns.

**XDiag of any other operator** is one-sided. The other side would cost k more matvecs (A Q
in addition to A* Q), and the range of A says little about the range of A*. At an equal
number of matvecs, the one-sided form is 1.2 to 200 times more accurate (n = 300, singular
vectors independent or nearly equal, five spectra). It has B_i w_i = (I - P_i) y_i =
v_i s_i* r_i, where s_i* r_i is the distance of y_i from the other columns of the sketch.

**XNysDiag** is for semidefinite operators. A_i = A<Omega_-i> is the Nyström approximation
without probe i, which is F F* - z_i z_i* with z_i = F u_i/|u_i|, and B_i w_i = z_i/|u_i|
(`nystrom`).

All three are differentiated by `readouts.TwoSided`, because a one-sided form is only of
first order on tangents.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from traceax._core.checks import check_semidefinite
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator
from traceax._core.rule import Outcome
from traceax._estimators.call import Call, begin
from traceax._estimators.krylov_nystrom import NOISES, Products, products
from traceax._estimators.readouts import (
    LeaveOneOut,
    Reduction,
    Samples,
    by_row,
    each,
    leave_one_out,
    outside,
    sketched_by,
    two_sided,
)
from traceax._linalg import jackknife
from traceax._linalg.columns import (
    Block,
    Number,
    column_dots,
    dot,
    mean,
    over,
    row_dots,
    row_norms_squared,
    squared_modulus,
    times,
)
from traceax._linalg.nystrom import Fit
from traceax._probes.samplers import SamplerLike, rademacher


def xdiag(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: SamplerLike = rademacher,
) -> Estimate:
    """Estimate diag A of any square operator by XDiag: sketch and remainder share probes.

    k = num_matvecs // 2 probes w_i make a sketch with the columns A w_i. Each probe is left
    out in turn. The diagonal on the range of the others, onto which P_i projects, is exact,
    and the probe that is left out estimates the rest. For operators known to be Hermitian,

        value = 1/k sum_i [ diag(P_i A + A P_i - P_i A P_i)
                            + conj(w_i) o (I - P_i) A (I - P_i) w_i ].

    For others, the published one-sided form is used, which needs the adjoint. Its terms are
    diag(P_i A) + conj(w_i) o (I - P_i) A w_i. The estimate is unbiased. It is exact (to
    rounding) if the rank of A is below k, or if `num_matvecs` reaches n.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees. With `lx.symmetric_tag` the error is up to 3 times smaller.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least min(2, n).
    - `sampler`: a sampler of independent probes. Default `rademacher`, which is exact for
      the diagonal of the remainder.

    **Returns** an `Estimate` with a value of the operator's input structure. The value is
    real if the operator is known to be Hermitian.

    **Derivatives**: they use the two-sided form, and the sketch is frozen. A gradient costs
    2k matvec-VJPs for operators known to be Hermitian, and 3k (k of them with the adjoint)
    for others.

    **Cost**: 2k matvecs in two batches, 7 blocks of n x k, and about 26 n k^2 flops. k of
    the matvecs are with the adjoint if the operator is not known to be Hermitian.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> operator = tx.as_operator(jnp.ones((200, 200)), tags=lx.symmetric_tag)
        >>> print(tx.xdiag(operator, jax.random.key(1), 40).value[:3].round(3))
        [1. 1. 1.]

    **Reference**: Epperly, Tropp and Webber (2024), XTrace, section 6.1,
    [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323), for the one-sided form.

    **See also**: `diagonal`, `xnysdiag`, `hutchinson_diagonal`.
    """
    call = begin("xdiag", operator, key, num_matvecs, least=2, sampler=sampler)
    call = call.reading(by_row(call.operator))
    return call.exact() if call.is_exact else estimate_by_xdiag(call)


def estimate_by_xdiag(call: Call) -> Estimate:
    """Estimate the diagonal, or the sums over parts of it that are read."""
    call = call.using(rademacher).measured()
    k, algorithm = call.num_matvecs // 2, partial(_xdiag, reduce=call.reduce.fn)
    return call.finish(algorithm, call.draw(k), method="xdiag", spent=2 * k)


def _xdiag(linear_map: LinearMap, probes: tuple[Block], *, reduce: Reduction) -> Outcome:
    loo, eps = sketched_by(linear_map, *probes, resphere=False)
    image = linear_map.adjoint(loo.basis.columns)
    samples = xdiag_samples(loo, image, eps, reduce, linear_map.is_hermitian)
    return Outcome(*samples.value_and_error(), two_sided(loo, reduce))


def xdiag_samples(
    loo: LeaveOneOut, image: Block, eps: Number | float, reduce: Reduction, hermitian: bool
) -> Samples:
    """Return the samples of XDiag, computed from Y = A Omega and A* Q.

    `image` is A* Q. `eps` is the rounding error of a matvec. If `reduce` sums rows, the
    samples are sums of XDiag's.
    """
    q, scale = loo.basis.columns, loo.basis.scale
    loo, image = loo._replace(sketch=over(loo.sketch, scale)), over(image, scale)
    samples = _two_sided(loo, image) if hermitian else _one_sided(loo, image)
    lengths = jnp.sqrt(row_norms_squared(q) * row_norms_squared(image))
    rounding = lengths + mean(jnp.abs(samples)) + jnp.linalg.norm(image) / q.shape[0]
    sharing = 2.0 if reduce is each else _sharing_of_sums(loo, image, hermitian=hermitian)
    return Samples(samples, 4 * eps * rounding, scale, sharing).reduced(reduce)


def _sharing_of_sums(loo: LeaveOneOut, image: Block, *, hermitian: bool) -> Number:
    """Return by how much shared probes raise the variance V of the mean of sums over rows.

    Parts of the error that depend on many probes hardly matter for single entries, but they
    do for sums, for example if the rank is about k. In the notation of
    `jackknife.shared_error`, let V_r be the variance of all parts of r probes. Then

        V = sum V_r,   variance of a sample over k >= sum V_r/r,   jackknife J = sum r V_r,

    and V^2 <= J (sum V_r/r) by Cauchy and Schwarz. The spread of the samples shows S, their
    variance over k without what they have in common, which is about (V - S)/k. So

        V/S <= h + (h^2 + J/S)^(1/2),    h = J/(2 k S).

    If samples have nearly all of their error in common, S is small in many runs, and the
    bound too low. So V is at least J/9. (Jackknife errors were up to five times the true
    ones.) The sum over all rows is the trace. J/S is computed for it, and taken for all
    sums. The result is at least 2, as for entries.
    """
    q, s, k = loo.basis.columns, loo.directions, loo.x.shape[0]
    if k < 3:
        return jnp.full((), 2.0, loo.resphering.dtype)
    h, remainders = dot(image.conj().T, q), column_dots(loo.mu, loo.sketch)
    inside, coimage = dot(q.conj().T, loo.sketch), None
    if hermitian:
        inside, coimage = inside - dot(h, loo.x), dot(image.conj().T, loo.mu)
        remainders = remainders - column_dots(coimage, loo.x)
    read = h, inside, coimage, remainders
    replicates = jackknife.xtrace_replicates(loo.pairs, *read)
    none = jnp.zeros((), loo.resphering.dtype)
    samples = remainders - column_dots(s, dot(h, s))
    spread = jackknife.standard_error(samples, none)
    ratio = jackknife.jackknife_error(replicates, none) / jnp.where(spread > 0, spread, 1)
    half = ratio**2 / (2 * k)
    bound = jnp.maximum(half + jnp.hypot(half, ratio), ratio**2 / 9)
    return jnp.maximum(bound, 2)


def _two_sided(loo: LeaveOneOut, image: Block) -> Block:
    q, s = loo.basis.columns, loo.directions
    h = dot(q.conj().T, image)
    beyond = image - dot(q, h)
    known = 2 * row_dots(image, q).real - row_dots(dot(q, h), q).real
    v, n = dot(q, s), dot(beyond, s)
    inside = column_dots(s, dot(h, s)).real[None, :]
    removed = 2 * (v * n.conj()).real + squared_modulus(v) * inside
    remainder = outside(q, s, loo.sketch - dot(image, loo.x))
    return known[:, None] - removed + (loo.probes.conj() * remainder).real


def _one_sided(loo: LeaveOneOut, coimage: Block) -> Block:
    q, s = loo.basis.columns, loo.directions
    v = dot(q, s)
    missed = times(loo.probes.conj(), loo.distances[None, :]) - dot(coimage, s).conj()
    return row_dots(q, coimage)[:, None] + v * missed


def xnysdiag(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: SamplerLike = rademacher,
) -> Estimate:
    """Estimate diag A of a semidefinite operator by XNysDiag: one matvec for each probe.

    k = num_matvecs probes make a Nyström approximation `A<Omega>` of A. Each probe in turn
    is left out. It estimates the remainder of the approximation that the others make:

        value = 1/k sum_i [ diag A<Omega_-i> + conj(w_i) o (A - A<Omega_-i>) w_i ]

    The estimate is unbiased. It is exact (to rounding) if the rank of A is below k. Without
    a pattern, it is the most accurate estimator if eigenvalues decay, and
    `hutchinson_diagonal` is the most accurate on flat spectra.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a lineax operator tagged positive or negative semidefinite, real or
      complex, on arrays or pytrees.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the number of probes, at least 1.
    - `sampler`: a sampler of independent probes. Default `rademacher`, which is exact for
      the diagonal of the remainder.

    **Returns** an `Estimate` with a real value of the operator's input structure. As in
    `xnystrace`, `standard_error` includes the noise of matvecs.

    **Derivatives**: they follow XDiag's rule on the same sketch, which is frozen. Tangents
    need not be semidefinite. A gradient costs 2k matvec-VJPs.

    **Cost**: k matvecs in one batch, without the adjoint, 5 blocks of n x k, and about 6 n
    k^2 flops.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> operator = tx.as_operator(jnp.ones((99, 99)), tags=lx.positive_semidefinite_tag)
        >>> print(tx.xnysdiag(operator, jax.random.key(1), 20).value[:3].round(3))
        [1. 1. 1.]

    **Reference**: Epperly (2025), PhD thesis, Caltech,
    [arXiv:2512.15929](https://arxiv.org/abs/2512.15929).

    **See also**: `diagonal`, `xdiag`, `xnystrace`.
    """
    call = begin("xnysdiag", operator, key, num_matvecs, sampler=sampler)
    check_semidefinite("xnysdiag", call.operator, "xdiag")
    call = call.reading(by_row(call.operator)).using(rademacher)
    if call.is_exact:
        return call.exact()
    return call.finish(_xnysdiag, call.draw(call.num_matvecs))


def _xnysdiag(linear_map: LinearMap, probes: tuple[Block]) -> Outcome:
    known = products(linear_map, *probes)
    value, error = xnysdiag_samples(known, known.fitted).value_and_error()
    weight = two_sided(leave_one_out(known.sketch, known.block, resphere=False))
    return Outcome(known.sign * value, error, weight)


def xnysdiag_samples(known: Products, fitted: Fit) -> Samples:
    """Return the samples of XNysDiag, diag F F* - |z_i|^2 + conj(w_i) o z_i/|u_i|.

    Here z_i = F u_i/|u_i|. F and the u_i are in `fitted`, the Nyström approximation of the
    operator, and the probes w_i are in `known`.
    """
    whole, missed = row_norms_squared(fitted.left), dot(fitted.left, fitted.residuals)
    removed = over(squared_modulus(missed), fitted.squares[None, :])
    tested = (missed * known.block.conj()).real
    rounding = 4 * known.eps * (whole + mean(whole)) + NOISES * fitted.noise / whole.size
    return Samples(whole[:, None] - removed + tested, rounding, known.scale)
