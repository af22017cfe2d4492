"""Hutch++ and its non-adaptive form: a sketch for the bulk, Hutchinson for the rest.

For any orthonormal Q that is independent of the isotropic z, with P = Q Q*,

    tr A = tr(Q* A Q) + E[z* (I - P) A (I - P) z].

If Q spans the dominant range of A, little is left for the second term. NA-Hutch++ replaces
the projection by an oblique one that needs no second pass over A. With Z = A R, W = A* S,
Q an orthonormal basis of Z, and Pi = (S* Q)^+,

    A ~ Q Pi W*,        tr A = tr(Pi W* Q) + E[z* A z - z* Q Pi W* z].

(The published form has Z itself in the place of Q, and S narrower than R. Its core is
ill-conditioned. With an orthonormal Q and S twice as wide as R, the core is
well-conditioned.)

Diag++ applies Hutch++ to the diagonal. The diagonal is exact on the sketch, and fresh
probes estimate the rest.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator
from traceax._core.rule import Algorithm, Outcome
from traceax._estimators.call import Blocks, Call, begin
from traceax._estimators.readouts import TOTAL, Pairs, TwoSided, by_row, each, outside
from traceax._linalg import lapack
from traceax._linalg.basis import orthonormalise
from traceax._linalg.columns import (
    column_dots,
    column_norms_squared,
    dot,
    frobenius_norm,
    largest_modulus,
    mean,
    row_dots,
    summed,
    times,
)
from traceax._linalg.jackknife import independent_degrees_of_freedom, standard_error
from traceax._probes.draw import for_sketch
from traceax._probes.samplers import SamplerLike, rademacher

# Columns of Q whose images are nearly dependent have lengths that are off by up to 20 units
# of roundoff. These are units of the dtype, even if matvecs have more noise.
OF_BASIS = 12


def hutchpp_trace(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: SamplerLike | None = None,
) -> Estimate:
    """Estimate tr A of any square operator by Hutch++: sketch first, then sample the rest.

    k = num_matvecs // 3 probes make a sketch with orthonormal basis Q. The trace on its
    range is exact, and the l = num_matvecs - 2k other probes z_j estimate the rest:

        value = tr(Q* A Q) + 1/l sum_j c_j z_j* (I - Q Q*) A (I - Q Q*) z_j

    The estimate is unbiased. It is exact (to rounding) if the rank of A is at most k, or if
    A is a multiple of I (and probes are resphered). `xtrace` is more accurate at equal
    cost.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least min(3, n).
    - `sampler`: a sampler for the probes. Default `None`, which is `sphere` below 100,000
      dimensions and `rademacher` from there on. The factor c_j is (n - k)/|(I - Q Q*)
      z_j|^2 if the sampler is invariant under rotations, like `sphere`. Otherwise it is 1.

    **Returns** an `Estimate` with a value of shape `()`. The value is real if the operator
    is known to be Hermitian.

    **Derivatives**: the sketch is frozen. A gradient costs k + l matvec-VJPs.

    **Cost**: `num_matvecs` matvecs in three batches, memory for 2k + 2l vectors, and about
    8 n k^2 flops.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> operator = tx.as_operator(jnp.outer(jnp.arange(200.0), jnp.ones(200)))
        >>> print(tx.hutchpp_trace(operator, jax.random.key(1), 40).value.round())
        19900.0

    **Reference**: Meyer et al. (2021), Algorithm 1,
    [doi:10.1137/1.9781611976496.16](https://doi.org/10.1137/1.9781611976496.16).

    **See also**: `xtrace`, `na_hutchpp_trace`, `diagpp`.
    """
    name, takes = "hutchpp_trace", "dependent"
    call = begin(name, operator, key, num_matvecs, least=3, sampler=sampler, takes=takes)
    call = call.using(for_sketch(call.operator))
    return _estimate(call, partial(_hutchpp, resphere=call.resphere), 3, 1)


def na_hutchpp_trace(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: SamplerLike = rademacher,
) -> Estimate:
    """Estimate tr A by the non-adaptive Hutch++, whose matvecs can all be issued at once.

    r = num_matvecs // 4 probes R and 2r probes S approximate A by Q (S* Q)^+ (A* S)*, with
    Q an orthonormal basis of A R. The l = num_matvecs - 3r other probes z_j estimate the
    rest:

        value = tr(Pi S* A Q) + 1/l sum_j z_j* (A - Q Pi S* A) z_j,      Pi = (S* Q)^+

    This is the stable form, in which S is the wider block. The estimate is unbiased. It is
    exact (to rounding) if the rank of A is at most r, or if `num_matvecs` reaches n. Use it
    for operators that are streamed or applied in parallel. If matvecs run one after the
    other, `xtrace` is better.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least min(4, n). 2r of the matvecs are with the adjoint.
    - `sampler`: a sampler for the probes. Default `rademacher`.

    **Returns** an `Estimate` with a value of shape `()`. The value is real if the operator
    is known to be Hermitian.

    **Derivatives**: they follow Hutch++'s rule on the same sketch, which is frozen. This is
    more accurate than the oblique projection of the value. A gradient costs r + l
    matvec-VJPs.

    **Cost**: `num_matvecs` matvecs in one batch for each of R, S and z, memory for 3r + 2l
    columns of length n, and about 16 n r^2 flops.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> operator = tx.as_operator(jnp.outer(jnp.arange(200.0), jnp.ones(200)))
        >>> print(tx.na_hutchpp_trace(operator, jax.random.key(1), 48).value.round())
        19900.0

    **Reference**: Meyer et al. (2021), Algorithm 2,
    [doi:10.1137/1.9781611976496.16](https://doi.org/10.1137/1.9781611976496.16).

    **See also**: `hutchpp_trace`, `xtrace`.
    """
    name, takes = "na_hutchpp_trace", "dependent"
    call = begin(name, operator, key, num_matvecs, least=4, sampler=sampler, takes=takes)
    return _estimate(call, partial(_na_hutchpp, resphere=call.resphere), 4, 1, 2)


def _estimate(call: Call, algorithm: Algorithm, parts: int, *widths: int) -> Estimate:
    """Spend all but one of the `parts` of the budget on a sketch, and the rest on samples.

    `widths` are the widths of the blocks of the sketch, in parts. The other matvecs of the
    sketch apply the operator to its basis.
    """
    if call.is_exact:
        return call.exact()
    call = call.measured()
    part = call.num_matvecs // parts
    rest = call.num_matvecs - (parts - 1) * part
    probes = call.draw(*(width * part for width in widths), rest)
    of_forms = call.reduce is TOTAL
    degrees = independent_degrees_of_freedom(rest) if of_forms else max(rest - 1, 1)
    return call.finish(algorithm, probes, degrees=degrees)


def _hutchpp(linear_map: LinearMap, probes: Blocks, *, resphere: bool) -> Outcome:
    test, rest = probes
    sketch = linear_map(test)
    eps, basis = linear_map.eps_of(test, sketch), orthonormalise(sketch)
    q = basis.columns
    mu, resphering, readout = _left_out(rest, q, resphere)
    h = column_dots(q, linear_map(q))
    samples = times(resphering, column_dots(mu, linear_map(mu)))
    least = basis.scale * frobenius_norm(basis.factor) / test.shape[1] ** 0.5
    rounding = summed(jnp.abs(h)) + mean(jnp.abs(samples))
    error = standard_error(samples, _roundoff(eps) * jnp.maximum(rounding, least))
    return Outcome(summed(h) + mean(samples), error, readout)


def _roundoff(eps: Float[Array, ""]) -> Float[Array, ""]:
    """Return the relative rounding error of a trace on the range of Q."""
    return 4 * eps + OF_BASIS * float(jnp.finfo(eps.dtype).eps)


def _na_hutchpp(linear_map: LinearMap, probes: Blocks, *, resphere: bool) -> Outcome:
    """Run NA-Hutch++.

    The value uses the oblique approximation. The derivative uses the weight of Hutch++ for
    the same Q, because its two-sided projections leave less of a tangent to chance.
    """
    right, left, rest = probes
    q = orthonormalise(linear_map(right)).columns
    co_range, products = linear_map.adjoint(left), linear_map(rest)
    inverse = lapack.pinv(dot(left.conj().T, q))
    low = jnp.sum(dot(co_range, inverse.conj().T).conj() * q)
    missed = products - dot(q, dot(inverse, dot(co_range.conj().T, rest)))
    samples = column_dots(rest, missed)
    rounding = mean(column_dots(jnp.abs(rest), jnp.abs(products)))
    roundoff = _roundoff(linear_map.eps_of(rest, products))
    error = standard_error(samples, roundoff * rounding)
    *_, readout = _left_out(rest, q, resphere)
    return Outcome(low + mean(samples), error, readout)


def _left_out(
    probes: Inexact[Array, "n l"], q: Inexact[Array, "n k"], resphere: bool
) -> tuple[Inexact[Array, "n l"], Float[Array, " l"], Pairs]:
    """Project probes on the complement of range(Q).

    Return the projected probes, the factors that resphering puts on their squares, and the
    readout for derivatives.
    """
    (n, k), count = q.shape, probes.shape[1]
    mu = outside(q, None, probes)
    lengths = column_norms_squared(mu)
    resphering = (n - k) / lengths if resphere else jnp.ones_like(lengths)
    left = jnp.hstack([q, times(mu, (resphering / count)[None, :])])
    return mu, resphering, Pairs(left, jnp.hstack([q, mu]))


def diagpp(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    sampler: SamplerLike = rademacher,
) -> Estimate:
    """Estimate diag A of any square operator by Diag++.

    k = num_matvecs // 3 probes sketch the range of A, and P projects on it. The diagonal on
    this range is exact, and l = num_matvecs - 2k fresh probes g_i estimate the rest. For
    operators known to be Hermitian,

        value = diag(P A + A P - P A P) + 1/l sum_i conj(g_i) o (I - P) A (I - P) g_i.

    For others, the published one-sided form is used, which needs the adjoint. It is diag(P
    A) + 1/l sum_i conj(g_i) o (I - P) A g_i. The estimate is unbiased. It is exact (to
    rounding) if the rank of A is at most k, or if `num_matvecs` reaches n. `xdiag` is more
    accurate, but in `diagpp` the samples of the remainder are independent.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least min(3, n).
    - `sampler`: a sampler for the probes. Default `rademacher`.

    **Returns** an `Estimate` with a value of the operator's input structure. The value is
    real if the operator is known to be Hermitian.

    **Derivatives**: they use the two-sided form, and the sketch is frozen. A gradient costs
    k + l matvec-VJPs for Hermitian operators, and 2k + l (k of them with the adjoint) for
    others.

    **Cost**: 2k + l matvecs in three batches, 5 blocks of n x k, and about 14 n k^2 flops.
    k of the matvecs are with the adjoint if the operator is not known to be Hermitian.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> operator = tx.as_operator(jnp.outer(jnp.arange(1.0, 201.0), jnp.ones(200)))
        >>> print(tx.diagpp(operator, jax.random.key(1), 45).value[:3].round(3))
        [1. 2. 3.]

    **Reference**: Baston and Nakatsukasa (2022),
    [arXiv:2201.10684](https://arxiv.org/abs/2201.10684), for the one-sided form.

    **See also**: `xdiag`, `hutchpp_trace`, `diagonal`.
    """
    name, takes = "diagpp", "dependent"
    call = begin(name, operator, key, num_matvecs, least=3, sampler=sampler, takes=takes)
    call = call.reading(by_row(call.operator))
    return _estimate(call, _diagpp, 3, 1)


def _diagpp(linear_map: LinearMap, probes: Blocks) -> Outcome:
    test, rest = probes
    sketch = linear_map(test)
    eps, q = linear_map.eps_of(test, sketch), orthonormalise(sketch).columns
    shares = jnp.full(rest.shape[1], 1 / rest.shape[1], rest.real.dtype)
    mu = outside(q, None, rest)
    weight = TwoSided(each, q, None, rest, mu, shares)
    image, hermitian = linear_map.adjoint(q), linear_map.is_hermitian
    remainder = outside(q, None, linear_map(mu if hermitian else rest))
    samples = remainder * rest.conj()
    samples = samples.real if hermitian else samples
    known = weight.known(image, image).real if hermitian else row_dots(q, image)
    scattered = largest_modulus(image) / q.shape[0] ** 0.5
    rounding = row_dots(jnp.abs(q), jnp.abs(image)) + mean(jnp.abs(samples)) + scattered
    error = standard_error(samples, 4 * eps * rounding)
    return Outcome(known + mean(samples), error, weight)
