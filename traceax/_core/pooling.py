"""Several estimates become one: the mean of independent runs, and the square of a number.

`pool` has weights w_j, the shares of the matvecs spent. They are fixed before any value is
seen. The variance is the larger of

    sum_j w_j^2 se_j^2    and    sum_j w_j (x_j - mean)^2 / (J - 1).

Here se_j is the error of sampling alone. The quadrature errors b_j of functions of an
operator have the same sign in every run, so sum_j w_j b_j is added to it.

An infinite se_j is unknown. It is taken from the known ones, as if the variance of one
matvec were the same in all parts. Then w_j se_j^2 = c is the same in all parts, too, and c
is the sum of w_i^2 se_i^2 over the known parts, divided by the sum of their w_i. An unknown
se_j is no less than the distance of x_j from the mean of the known parts, which matters if
they are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.canonical import compiled, is_concrete
from traceax._core.checks import (
    check_callable,
    check_key,
    check_returned,
    require,
    require_type,
)
from traceax._core.estimate import Estimate, nondifferentiable
from traceax._core.keys import ESTIMATES, keys_of


def pool(estimates: Sequence[Estimate] | Estimate) -> Estimate:
    """Combine several estimates of the same quantity, made with independent keys, into one.

        value = sum_j m_j value_j / sum_j m_j,    m_j the matvecs spent on estimate j

    The result is unbiased if the estimates are. The weights are the costs, not the error
    bars. For a function that makes a sketch or a Krylov space, a single run is better than
    many short ones with the same number of matvecs in total.

    If each estimate is for a different batch of data, the value is the mean over these
    batches. Most of the spread then does not come from the probes. The error bar says how
    far this mean may be from the mean over all data, of which the batches are a sample.
    More matvecs for each batch do not reduce it. The part that the probes cause is the root
    of the sum of the squares (w_j standard_error_j)^2, w_j = m_j / sum m.

    **Arguments**

    - `estimates`: a sequence of `Estimate`s, or one `Estimate` whose leaves all have a
      leading axis of runs, as `jax.vmap` returns it. traceax does not detect if you use the
      *same* key twice.

    **Returns** an `Estimate` with the same structure as the given ones. `standard_error` is
    the root of the sum of their squared errors, or comes from the spread of their values if
    this is larger or if each part has only one probe. The quadrature errors of functions of
    an operator do not average out, so their mean remains a part of `standard_error`. An
    infinite error among finite ones is replaced by the error that the finite ones suggest.
    `num_matvecs` is the sum.

    **Derivatives**: they are the derivatives of the weighted mean.

    **Cost**: no matvecs.

    **Example**

        >>> import jax, traceax as tx
        >>> operator = tx.as_operator(jax.random.normal(jax.random.key(0), (200, 200)))
        >>> keys = jax.random.split(jax.random.key(1), 4)
        >>> estimates = [tx.hutchinson_trace(operator, key, 50) for key in keys]
        >>> print(tx.pool(estimates).num_matvecs)
        200

    **Reference**: Welch (1947), The generalization of Student's problem, Biometrika 34.

    **See also**: `Estimate`, `adaptive`.
    """
    if isinstance(estimates, Estimate):
        _check_batch("pool", estimates)
        parts, whole = [estimates], _fields(estimates)
    else:
        _check_parts("pool", estimates)
        parts, columns = estimates, map(_fields, estimates)
        whole = jax.tree.map(lambda *x: jnp.stack(list(map(jnp.asarray, x))), *columns)
    values, *frozen, counts, degrees = whole
    runs = jax.tree.leaves(values)[0].shape[:1]
    counts, degrees = (jnp.broadcast_to(jnp.asarray(x), runs) for x in (counts, degrees))
    shares = jnp.where(jnp.any(counts), counts, 1)
    pooled = partial(compiled, _pooled, shares / jnp.sum(shares), degrees)
    pairs = jax.tree.map(pooled, values, *jax.lax.stop_gradient(frozen))
    value, error, gap, least = jax.tree.transpose(jax.tree.structure(values), None, pairs)
    spent = sum(part.num_matvecs for part in parts)
    spent = jnp.sum(counts) if isinstance(estimates, Estimate) else spent
    method = " and ".join(dict.fromkeys(part.method for part in parts))
    freedom = jax.tree.reduce(jnp.minimum, least)
    return Estimate(value, error, spent, freedom, method=method, quadrature_error=gap)


def _fields(part: Estimate) -> list[Any]:
    """Return the fields that are pooled. Quadrature errors get the shapes of values."""
    errors, gaps = part.standard_error, part.quadrature_error
    if jax.tree.map(jnp.shape, errors) != jax.tree.map(jnp.shape, gaps):
        gaps = jax.tree.map(jnp.zeros_like, errors)  # the default, one 0 for all
    return [part.value, errors, gaps, part.num_matvecs, part.degrees_of_freedom]


Reals = Float[Array, "runs ..."]
Numbers = Inexact[Array, "runs ..."]


def _pooled(
    shares: Reals, degrees: Reals, values: Numbers, errors: Reals, gaps: Reals
) -> tuple[Inexact[Array, "..."], Float[Array, "..."], Float[Array, "..."], Array]:
    """Return the value, its standard error, the part of it that comes from quadrature, and
    the least degrees of freedom of any entry. The shares and the degrees are vectors.

    Errors are divided by the largest one (`scale`) before they are squared, so that their
    squares neither overflow nor vanish.
    """
    axes = (-1,) + (1,) * (values.ndim - 1)
    share, degree = (x.astype(errors.dtype).reshape(axes) for x in (shares, degrees))
    ratio = jnp.where(gaps > 0, gaps / errors, 0)  # NaN if both are infinite
    errors = jnp.where(ratio > 0, errors * jnp.sqrt(jnp.maximum(1 - ratio**2, 0)), errors)
    frozen, weight = jax.lax.stop_gradient(values), share.astype(values.dtype)
    value = jnp.sum(weight * values, axis=0)
    deviations = jnp.abs(frozen - jax.lax.stop_gradient(value)[None])
    unknown = jnp.isinf(errors)
    sizes = jnp.maximum(jnp.where(unknown, 0, errors), deviations)
    scale = jnp.maximum(jnp.max(sizes, axis=0), jnp.finfo(errors.dtype).tiny)
    squares = jnp.where(unknown, 0, (share * (errors / scale[None])) ** 2)
    within = jnp.sum(squares, axis=0)
    welch = within**2 / jnp.sum(jnp.where(unknown, 0, squares**2 / degree), axis=0)
    # The squares of unknown parts are c w_j, but at least those of their distances.
    known = jnp.sum(jnp.where(unknown, 0, share), axis=0)
    total = jnp.where(known > 0, known, 1)
    share_of_known = jnp.where(unknown, 0, share) / total[None]
    mean = jnp.sum(share_of_known.astype(values.dtype) * frozen, axis=0)
    apart = share * (jnp.abs(frozen - mean[None]) / scale[None])
    alike = share * (within / total)[None]
    within += jnp.sum(jnp.where(unknown, jnp.maximum(alike, apart**2), 0), axis=0)
    runs = jnp.sum(share > 0, dtype=errors.dtype)
    others = jnp.maximum(runs - 1, 1)
    between = jnp.sum(share * (deviations / scale[None]) ** 2, axis=0) / others
    within = jnp.where(known > 0, within, jnp.where(runs > 1, 0, jnp.inf))
    error = scale * jnp.sqrt(jnp.maximum(within, between))
    # The quadratic forms of single probes are skewed (see `_linalg.jackknife`).
    few = jnp.where((within == 0) & (known > 0), 1e4, others / 3)
    freedom = jnp.where(jnp.isfinite(welch), jnp.minimum(welch, 1e4), few)
    gap = jnp.sum(share * gaps, axis=0)
    error, gap = (nondifferentiable(x, value) for x in (jnp.hypot(error, gap), gap))
    return value, error, gap, jnp.min(freedom)


def _check_parts(name: str, estimates: Any) -> None:
    """Check that `estimates` is a sequence of estimates of one quantity."""
    is_sequence = isinstance(estimates, Sequence)
    got = "none" if is_sequence else type(estimates).__name__
    must, cure = "be a sequence or batch of estimates", "Pass a list of at least one."
    require_type(is_sequence, name, "estimates", must, got, cure)
    require(estimates, name, "estimates", must, got, cure)
    for place, part in enumerate(estimates):
        must, got = "hold estimates", f"{type(part).__name__} as number {place}"
        cure = "Keep what the estimators return, not its `value`."
        require_type(isinstance(part, Estimate), name, "estimates", must, got, cure)
        first, own = _described(estimates[0]), _described(part)
        must = f"be of one quantity, like number 0, {first}"
        got, cure = f"{own} as number {place}", "Pool each on its own."
        require(own == first, name, "estimates", must, got, cure)


def _check_batch(name: str, estimates: Estimate) -> None:
    """Check that every leaf of the estimate has a leading axis of runs."""
    leaves = jax.tree.leaves((estimates.value, estimates.standard_error))
    runs = {jnp.shape(leaf)[:1] for leaf in leaves}
    counts = jnp.shape(estimates.num_matvecs), jnp.shape(estimates.degrees_of_freedom)
    fits = len(runs) == 1 and runs != {()} and set(counts) & runs and max(runs)[0]
    must = "be a sequence of estimates, or one whose leaves have a leading axis of runs"
    got = f"{_described(estimates)} with num_matvecs of shape {counts[0]}"
    cure = "Pass a list, or what jax.vmap over keys returned."
    require(fits, name, "estimates", must, got, cure)


def _described(part: Estimate) -> str:
    return eqx.tree_pformat(jax.tree.map(jnp.asarray, part.value))


Result = TypeVar("Result")


def unbiased_square(
    estimate_fn: Callable[[PRNGKeyArray], Result], key: PRNGKeyArray
) -> Result:
    """Estimate |t|^2 without bias, given a function that estimates t without bias.

        value = Re conj(a) b,    a and b estimates of t with independent keys

    The square of one estimate is on average too large by its variance, and training on it
    does not minimise t^2. The product of two independent estimates has the mean t^2, and
    the mean of its gradient is the gradient of t^2. If you need no gradient, and the
    estimate is a mean of independent probes, value^2 - standard_error^2 also has the mean
    t^2, and no second estimate is needed. `hessian_diagonal` says when this holds.

    **Arguments** (details are in the guide's conventions)

    - `estimate_fn`: a function of a key that returns an `Estimate`, or an array or pytree
      of arrays made from one, such as the residual `lambda key: tx.laplacian(u, x, key,
      1).value - f(x)`. Inside `jax.jit` it is called on a batch of two keys, outside for
      one key after the other.
    - `key`: one JAX random key, for example `jax.random.key(0)`.

    **Returns** the real square of each entry, as an `Estimate` if `estimate_fn` returns
    one, else as arrays. It may be negative. `standard_error` is the error of a product. If
    each of the two estimates has only one probe, it is computed from their difference.

    **Derivatives**: they come from the derivatives of `estimate_fn`, and are unbiased if
    these are.

    **Cost**: twice the cost of `estimate_fn`.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> operator = lx.MatrixLinearOperator(jnp.array([[1.0, 2.0], [2.0, 3.0]]))
        >>> once = lambda key: tx.hutchinson_trace(operator, key, 1).value
        >>> keys = jax.random.split(jax.random.key(0), 10_000)
        >>> squares = jax.vmap(lambda key: tx.unbiased_square(once, key))(keys)
        >>> bool(abs(squares.mean() - 4.0**2) < 1.0)  # the mean of once(key)**2 is 32
        True

    **Reference**: Baird (1995), Residual algorithms, ICML. Hu et al. (2024),
    [arXiv:2312.14499](https://arxiv.org/abs/2312.14499).

    **See also**: `laplacian`, `hessian_diagonal`, `biharmonic`, `divergence`.
    """
    cure = "Pass lambda key: traceax.trace(operator, key), for example."
    check_callable("unbiased_square", "estimate_fn", estimate_fn, "of a key", cure)
    check_key("unbiased_square", key)
    keys = keys_of(key, 2, ESTIMATES)
    if is_concrete(key):  # a batch would compile each operation of `estimate_fn` by itself
        both: Any = jax.tree.map(_stacked, *map(estimate_fn, keys))
    else:
        both = eqx.filter_vmap(estimate_fn, out_axes=eqx.if_array(0))(keys)
    if isinstance(both, Estimate):
        return compiled(_square, both)  # pyright: ignore[reportReturnType]
    check_returned("unbiased_square", "estimate_fn", both, "numbers", "an Estimate, or ")
    return jax.tree.map(_product, both)


def _stacked(one: Any, other: Any) -> Any:
    """Stack two arrays. Anything else, for example a number of matvecs, is the same."""
    return jnp.stack([one, other]) if eqx.is_array(one) else one


def _product(pair: Array) -> Array:
    return (pair[0].conj() * pair[1]).real


def _square(both: Estimate) -> Estimate:
    """Multiply two estimates, stacked along a first axis. The error bar of a b is
    the length of (a se_b, b se_a), to first order."""

    def error(value: Array, own: Array) -> Array:
        sizes = jnp.abs(jax.lax.stop_gradient(value))
        apart = jnp.abs(jax.lax.stop_gradient(value[0] - value[1])) / 2**0.5
        own = jnp.where(jnp.isinf(own), apart, own)
        error = jnp.hypot(sizes[0] * own[1], sizes[1] * own[0])
        return nondifferentiable(error, _product(value))

    own = jax.lax.stop_gradient(both.standard_error)
    value, errors = jax.tree.map(_product, both.value), jax.tree.map(error, both.value, own)
    spent, degrees = map(_total, (both.num_matvecs, both.degrees_of_freedom))
    return Estimate(value, errors, spent, jnp.maximum(degrees, 1.0), method=both.method)


def _total(count: Any) -> Any:
    """Add the counts of both estimates: an array if each was decided at run time."""
    return jnp.sum(count, axis=0, dtype=count.dtype) if eqx.is_array(count) else 2 * count
