"""Traces to a tolerance, by sketches that double until the error bar meets the tolerance.

Stopping at the first estimate that looks good enough favours estimates that look better
than they are. To make up for this, the search stops only when two standard errors of the
jackknife, which is conservative, are within the tolerance (`tests/benchmarks/stopping.py`
counts how often this is not enough).

The sizes are powers of two times the first size, so they are known when the program is
traced. With concrete arrays, each size is a separate program, which runs only if it is
needed. In a traced program, each size is a branch of a conditional.

Let Omega be k probes with Y = A Omega = Q R and Z = A Q. When new probes are added, their
images are appended to Y. An orthonormal basis of the part of these images that is
orthogonal to Q is appended to Q, so that R stays block triangular. The images of Q's new
columns are appended to Z. So every matvec is used again, and a single run with all of the
probes would give the same kind of estimate.

The search itself treats the operator as constant. The derivative rule (`_core.rule`) is
applied to the estimate that was reached.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Inexact, PRNGKeyArray

from traceax._core.canonical import compiled, is_concrete
from traceax._core.checks import check_tolerance
from traceax._core.estimate import Estimate, nondifferentiable
from traceax._core.operator import (
    LinearMap,
    Operator,
    frozen,
    is_negative,
    is_semidefinite,
    working_dtype,
)
from traceax._core.rule import Outcome, run
from traceax._estimators.call import SMALL, Call, begin
from traceax._estimators.krylov_nystrom import products_of_sketch, value_and_error
from traceax._estimators.readouts import Pairs, ValueAndError, leave_one_out
from traceax._estimators.xtrace import xtrace_of
from traceax._linalg.basis import Basis, extend, orthonormalise
from traceax._linalg.columns import Block, OfProbes, Square, column_dots, dot, times
from traceax._probes.draw import draw, for_sketch
from traceax._probes.samplers import SamplerLike
from traceax._probes.stream import ProgressMeter

# The size of the first sketch. With fewer probes the jackknife is not reliable.
FIRST = 8


def adaptive_trace(
    operator: Operator,
    key: PRNGKeyArray,
    *,
    rtol: ArrayLike = 1e-2,
    atol: ArrayLike = 0.0,
    max_matvecs: int = 1000,
    sampler: SamplerLike | None = None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Estimate tr A to a tolerance, with as few matvecs as it takes.

    A sketch of 8 probes is doubled until two standard errors are within the tolerance:

        2 * standard_error <= atol + rtol * |value|

    The search also ends when `max_matvecs` is spent. All earlier probes and matvecs are
    used again. The method is `xnystrace` if the operator is tagged positive or negative
    semidefinite, else `xtrace`. At each size the estimate is unbiased, but stopping by the
    error bar leaves a small bias.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `rtol`: the relative tolerance, at least 0. It may be traced. Default 0.01.
    - `atol`: the absolute tolerance, at least 0. It may be traced. Default 0.
    - `max_matvecs`: the most matvecs that may be spent, a Python int of at least min(2, n).
      Default 1000. If it is at least n + 8 (n if n <= 64), the last size is n, which
      is exact.
    - `sampler`: a sampler of independent probes. Default `None`, which is `sphere` below
      100,000 dimensions and `rademacher` from there on.
    - `progress_meter`: an object that shows how much of `max_matvecs` is spent, for example
      `diffrax.TqdmProgressMeter()`. Default `None`, which shows nothing.

    **Returns** an `Estimate`. Its `converged` says whether the tolerance was met.
    `num_matvecs` is an array, because it is decided at run time. If the value or the error
    is NaN, the search ends at once and has not converged. With a tolerance of 0, all of
    `max_matvecs` is spent.

    **Derivatives**: the same as for the estimator at the size that was reached.

    **Cost**: the `num_matvecs` of the result, and about 12 n k^2 flops for k probes. In a
    traced program every size is compiled. The largest size determines the memory, which is
    6 blocks of n x k, or of n x n if it is exact. The gradient of a traced program keeps 2
    blocks of every size. Under `jax.vmap` every size is run.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> operator = tx.as_operator(jnp.diag(0.9 ** jnp.arange(500.0)))
        >>> estimate = tx.adaptive_trace(operator, jax.random.key(0), rtol=1e-2)
        >>> print(estimate.converged, estimate.num_matvecs, abs(estimate.value - 10) < 0.1)
        True 128 True

    **Reference**: Epperly, Tropp and Webber (2024),
    [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323).

    **See also**: `adaptive`, `xtrace`, `xnystrace`.
    """
    name = "adaptive_trace"
    call = begin(
        name, operator, key, max_matvecs, argument="max_matvecs", least=2, sampler=sampler
    )
    call = call.in_batches(None, progress_meter).using(for_sketch(call.operator))
    check_tolerance(name, "rtol", rtol)
    check_tolerance(name, "atol", atol)
    wanted = jax.lax.stop_gradient((jnp.asarray(rtol), jnp.asarray(atol)))
    empty = jnp.zeros((call.operator.in_size(), 0), working_dtype(call.operator))
    start = _Sketch(empty, empty, None, empty)
    (value, error, *report), shown = _search(call, wanted, 0, start, call.meter.init())
    call.meter.close(shown)
    return Estimate(value, nondifferentiable(error, value), *report, method=name)


def _sizes(call: Call, cost: int) -> tuple[int, ...]:
    """Return the numbers of probes to try, of `cost` matvecs each. The size n is exact.

    It is tried if the budget pays for it and for at least one size before it. Small
    operators have only the exact size, if the budget pays for it. Without it, the last size
    is the largest that the budget pays for.
    """
    n, max_matvecs = call.operator.in_size(), call.num_matvecs
    if n <= min(max_matvecs, SMALL):
        return (n,)
    doubled = [FIRST << j for j in range(max_matvecs.bit_length())]
    useful = [k for k in doubled if k * cost < n]
    if affordable := [k for k in useful if n + k <= max_matvecs]:
        return (*affordable, n)
    largest = min(max_matvecs, n - 1) // cost
    return (*(k for k in useful if k < largest), largest)


# The value, its error, and the `num_matvecs`, degrees of freedom and `converged` of an
# `Estimate`; and the state of the progress meter.
Reached = tuple[tuple[Array, ...], Any]
Wanted = tuple[Array, Array]  # rtol and atol


def _search(call: Call, wanted: Wanted, level: int, sketch: _Sketch, shown: Any) -> Reached:
    """Search from this level on, given the sketch of the level below."""
    linear_map = LinearMap(frozen(call.operator))
    cost = 1 if is_semidefinite(call.operator) else 2
    (n, known), sizes, (rtol, atol) = sketch.probes.shape, _sizes(call, cost), wanted
    size = sizes[level]
    if size == n:
        value, spent = compiled(_complete, linear_map, sketch)
        error, converged = jnp.zeros_like(value.real), ~jnp.isnan(value)
        spent, degrees = spent + cost * known, n
    else:
        key = jax.random.fold_in(call.key, level)
        probes = draw(call.name, call.source, key, call.operator, size - known)
        sketch = compiled(_enlarged, linear_map, sketch, probes)
        value, error = compiled(_estimate, linear_map, sketch, call.resphere)
        converged = 2 * error <= atol + rtol * jnp.abs(value)
        spent, degrees = size * cost, size - 1
    ended = converged | jnp.isnan(error) | jnp.isnan(value)
    shown = call.meter.step(shown, jnp.where(ended, 1.0, spent / call.num_matvecs))

    def stop() -> Reached:
        algorithm = partial(_reached, resphere=call.resphere, exact=size == n)
        outcome = run(algorithm, LinearMap(call.operator), (value, error, sketch))
        held = jax.lax.stop_gradient(outcome.standard_error)
        report = jnp.int32(spent), jnp.asarray(degrees, error.dtype), converged
        return (outcome.value, held, *report), shown

    def go() -> Reached:
        return _search(call, wanted, level + 1, sketch, shown)

    if level + 1 == len(sizes):
        return stop()
    if is_concrete(ended):
        return stop() if ended else go()
    return jax.lax.cond(ended, stop, go)


class _Sketch(NamedTuple):
    """The probes and their images, `products`.

    For XTrace, `basis` is a basis Q of these images, and `images` is A Q. `basis` is None
    for XNysTrace, which is used if the operator is semidefinite, and as long as there are
    no probes.
    """

    probes: Block
    products: Block
    basis: Basis | None
    images: Inexact[Array, "n _"]


Found = tuple[Array, Array, _Sketch]  # the value and its error, and what they were made of


def _enlarged(linear_map: LinearMap, sketch: _Sketch, added: Block) -> _Sketch:
    """Add probes to a sketch, and apply the operator to them and to Q's new columns."""
    (probes, products, basis, images), new = sketch, linear_map(added)
    if not is_semidefinite(linear_map.operator):
        basis = extend(basis, new, added) if basis else orthonormalise(new)
        fresh = basis.columns[:, images.shape[1] :]
        images = jnp.hstack([images, linear_map(fresh)])
    probes, products = jnp.hstack([probes, added]), jnp.hstack([products, new])
    return _Sketch(probes, products, basis, images)


def _estimate(linear_map: LinearMap, sketch: _Sketch, resphere: bool) -> ValueAndError:
    """Return the estimate of tr A from a sketch, and its error bar."""
    probes, products, basis, images = sketch
    if basis is None:
        sign = -1 if is_negative(linear_map.operator) else 1
        known = products_of_sketch(sign * products, probes)
        value, error, _ = value_and_error(known, resphere=resphere)
        return sign * value, error
    loo = leave_one_out(products, probes, resphere=resphere, basis=basis)
    return xtrace_of(loo, images, linear_map.eps_of(probes, products))


def _trace_of(q: Block, s: Square, mu: Block, c: OfProbes, linear_map: LinearMap) -> Array:
    """Read what `trace_pairs` reads, by blocks that take half the memory until then.

    The blocks and factors are those of `leave_one_out`: Q, the s_i, the mu_i and the c_i.
    """
    k = len(c)
    kept = dot(q, jnp.eye(k, dtype=s.dtype) - dot(s, s.conj().T) / k)
    left = jnp.hstack([kept, times(mu, c[None, :] / k)])
    return Pairs(left, jnp.hstack([q, mu]))(linear_map)


def _reached(linear_map: LinearMap, found: Found, resphere: bool, exact: bool) -> Outcome:
    """Add the readout to an estimate: only the size that was reached needs one."""
    value, error, (probes, products, basis, _) = found
    if exact:
        identity = jnp.eye(len(probes), dtype=probes.dtype)
        return Outcome(value, error, Pairs(identity, identity))
    loo = leave_one_out(products, probes, resphere=resphere, basis=basis)
    blocks = loo.basis.columns, loo.directions, loo.mu, loo.resphering
    return Outcome(value, error, Partial(_trace_of, *blocks))


def _complete(linear_map: LinearMap, sketch: _Sketch) -> tuple[Array, int]:
    """Return the exact trace, and the number of matvecs that it costs.

    If A Q is known, matvecs are needed only for a basis of the orthogonal complement of Q.
    """
    if sketch.basis is None:
        value = jnp.trace(linear_map.dense())
        return (value.real if linear_map.is_hermitian else value), sketch.probes.shape[0]
    q = sketch.basis.columns
    rest = jnp.linalg.qr(q, mode="complete")[0][:, q.shape[1] :]
    value = jnp.sum(column_dots(q, sketch.images))
    return value + jnp.sum(column_dots(rest, linear_map(rest))), rest.shape[1]
