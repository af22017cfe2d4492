"""Traces to a tolerance, by sketches that double until the error bar meets the tolerance.

Stopping at the first estimate that looks good enough favours estimates that look better
than they are. To make up for this, the search stops only when two standard errors of the
jackknife, which is conservative, are within the tolerance (`tests/benchmarks/stopping.py`
counts how often this is not enough).

The sizes are powers of two times the first size, so they are known when the program is
traced. With concrete arrays, each size is a separate program, which runs only if it is
needed. In a traced program, each size is a branch of a conditional, and all results are
padded to the largest size.

Let Omega be k probes with Y = A Omega = Q R and Z = A Q. When new probes are added, their
images are appended to Y. An orthonormal basis of the part of these images that is
orthogonal to Q is appended to Q, so that R stays block triangular. The images of Q's new
columns are appended to Z. So every matvec is used again, and a single run with all of the
probes would give the same kind of estimate.

The search itself treats the operator as constant. The derivative rule (`_core.rule`) is
applied afterwards, to the estimate that was reached.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Inexact, Int, PRNGKeyArray

from traceax._core.canonical import compiled, is_concrete
from traceax._core.checks import check_tolerance
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator, frozen, is_negative, working_dtype
from traceax._core.rule import Outcome, run
from traceax._estimators.call import SMALL, Call, begin
from traceax._estimators.krylov_nystrom import products_of_sketch, value_and_error
from traceax._estimators.readouts import leave_one_out_of
from traceax._estimators.xtrace import xtrace_of
from traceax._linalg.basis import Basis, extend, orthonormalise
from traceax._linalg.columns import Block, Number, OfProbes, column_dots, dot, times
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
    6 blocks of n x k, or of n x n if it is exact. Under `jax.vmap` every size is run.

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
    call = call.in_batches(None, progress_meter)
    check_tolerance(name, "rtol", rtol)
    check_tolerance(name, "atol", atol)
    operator, meter = call.operator, call.meter
    call = call.using(for_sketch(operator))
    sign = -1 if is_negative(operator) else 1
    growing = _Growing(call.is_semidefinite, sign, call.resphere)
    levels = _levels(operator.in_size(), call.num_matvecs, growing.matvecs_a_probe)
    tolerances = jax.lax.stop_gradient((jnp.asarray(rtol), jnp.asarray(atol)))
    search = _Search(call, growing, LinearMap(frozen(operator)), levels, tolerances)
    empty = jnp.zeros((operator.in_size(), 0), working_dtype(operator))
    start = _Sketch(empty, empty, None, empty)
    reached, shown = search.from_level(0, start, meter.init())
    meter.close(shown)
    outcome = run(_as_it_is, LinearMap(operator), reached)
    return Estimate(outcome.value, outcome.standard_error, *outcome.report, method=name)


def _as_it_is(linear_map: LinearMap, reached: Outcome) -> Outcome:
    del linear_map
    return reached


class _Levels(NamedTuple):
    """The numbers of probes to try, and whether an exact level follows them."""

    sizes: tuple[int, ...]
    exact: bool

    @property
    def total(self) -> int:
        return len(self.sizes) + self.exact


def _levels(n: int, max_matvecs: int, matvecs_a_probe: int) -> _Levels:
    """Return the levels of a search on n dimensions.

    The exact level exists if the budget pays for at least one size before it. Small
    operators have only the exact level, if the budget pays for it. Without an exact level,
    the last size is the largest that the budget pays for.
    """
    if n <= min(max_matvecs, SMALL):
        return _Levels((), exact=True)
    doubled = [FIRST << j for j in range(max_matvecs.bit_length())]
    useful = [k for k in doubled if k * matvecs_a_probe < n]
    affordable = tuple(k for k in useful if n + k <= max_matvecs)
    if affordable:
        return _Levels(affordable, exact=True)
    largest = min(max_matvecs, n - 1) // matvecs_a_probe
    return _Levels((*(k for k in useful if k < largest), largest), exact=False)


Reached = tuple[Outcome, Any]


class _Search(NamedTuple):
    """The search, level by level.

    A result is the outcome that was reached, and the state of the progress meter.
    """

    call: Call
    growing: _Growing
    linear_map: LinearMap
    levels: _Levels
    tolerances: tuple[Number, Number]

    def from_level(self, level: int, sketch: _Sketch, shown: Any) -> Reached:
        """Search from this level on, given the sketch of the level below."""
        if level == len(self.levels.sizes):
            return self.complete(level, sketch, shown)
        sketch = self.enlarged(level, sketch)
        growing, linear_map = self.growing, self.linear_map
        value, error = compiled(_Growing.value_and_error, growing, linear_map, sketch)
        rtol, atol = self.tolerances
        converged = 2 * error <= atol + rtol * jnp.abs(value)
        ended = converged | jnp.isnan(error) | jnp.isnan(value)
        k = self.levels.sizes[level]
        spent = k * self.growing.matvecs_a_probe
        share = jnp.where(ended, 1.0, spent / self.call.num_matvecs)
        shown = self.call.meter.step(shown, share)

        def stop() -> Reached:
            pairs = compiled(_Growing.pairs, self.growing, sketch)
            report = _report(spent, k - 1, converged, error)
            return Outcome(value, error, self.read_by(pairs, level), report), shown

        def go() -> Reached:
            return self.from_level(level + 1, sketch, shown)

        if level + 1 == self.levels.total:
            return stop()
        if is_concrete(ended):
            return stop() if ended else go()
        return jax.lax.cond(ended, stop, go)

    def enlarged(self, level: int, sketch: _Sketch) -> _Sketch:
        """Add fresh probes to a sketch, up to the size of this level."""
        count = self.levels.sizes[level] - sketch.probes.shape[1]
        key = jax.random.fold_in(self.call.key, level)
        probes = draw(self.call.name, self.call.source, key, self.call.operator, count)
        return compiled(_Growing.enlarge, self.growing, self.linear_map, sketch, probes)

    def complete(self, level: int, sketch: _Sketch, shown: Any) -> Reached:
        """Return the exact trace, which is the last level."""
        growing, linear_map = self.growing, self.linear_map
        value, pairs, cost = compiled(_Growing.complete, growing, linear_map, sketch)
        error, n = jnp.zeros_like(value.real), linear_map.operator.in_size()
        spent = sketch.probes.shape[1] * self.growing.matvecs_a_probe + cost
        report = _report(spent, n, ~jnp.isnan(value), error)
        outcome = Outcome(value, error, self.read_by(pairs, level), report)
        return outcome, self.call.meter.step(shown, jnp.asarray(1.0))

    def read_by(self, pairs: _Pairs, level: int) -> _Pairs:
        """Return the readout. In a traced program, pad it to the largest level."""
        if is_concrete((pairs, self.tolerances)):
            return pairs
        n, exact = self.linear_map.operator.in_size(), self.levels.exact
        widths = (*self.levels.sizes, *(((n + 1) // 2,) if exact else ()))
        more = (0, max(widths) - pairs.lengths.size)
        basis, tested = (jnp.pad(x, ((0, 0), more)) for x in (pairs.basis, pairs.tested))
        blocks = basis, tested, jnp.pad(pairs.core, more), jnp.pad(pairs.lengths, more)
        return _Pairs(*blocks, jnp.asarray(level), widths)


class _Pairs(eqx.Module):
    """The readout tr B = E[<Q C, B Q> + sum_i c_i mu_i* B mu_i].

    It equals the readout of `trace_pairs`, but takes half the memory. `basis` is Q, `core`
    is C, `tested` holds the mu_i, and `lengths` the c_i. If a traced program has padded the
    blocks, only the first `widths[level]` columns of each block are read.
    """

    basis: Block
    tested: Block
    core: Inexact[Array, "k k"]
    lengths: OfProbes
    level: Int[Array, ""] | None = None
    widths: tuple[int, ...] = eqx.field(static=True, default=())

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, ""]:
        def read(width: int | None) -> Inexact[Array, ""]:
            q, mu = self.basis[:, :width], self.tested[:, :width]
            c = self.lengths[:width].astype(q.dtype)
            left = dot(q, self.core[:width, :width]), times(mu, c[None, :])
            right = jnp.hstack([q, mu])
            return jnp.sum(jnp.hstack(left).conj() * linear_map(right))

        if self.level is None:
            return read(None)
        return jax.lax.switch(self.level, [partial(read, w) for w in self.widths])


def _report(
    spent: int, degrees: int, converged: Bool[Array, ""], error: Number
) -> tuple[Int[Array, ""], Number, Bool[Array, ""]]:
    """Return `num_matvecs`, the degrees of freedom, and `converged`, for an `Estimate`."""
    return jnp.int32(spent), jnp.asarray(degrees, error.dtype), converged


class _Sketch(NamedTuple):
    """The probes and their images, `products`.

    For XTrace, `basis` is a basis Q of these images, and `images` is A Q. `basis` is None
    for XNysTrace, and as long as there are no probes.
    """

    probes: Block
    products: Block
    basis: Basis | None
    images: Inexact[Array, "n _"]


class _Growing(NamedTuple):
    """The estimator whose sketch grows.

    This is XNysTrace if the operator is `semidefinite`, applied to -A if `sign` is -1.
    Otherwise it is XTrace.
    """

    semidefinite: bool
    sign: int
    resphere: bool

    @property
    def matvecs_a_probe(self) -> int:
        return 1 if self.semidefinite else 2

    def enlarge(self, linear_map: LinearMap, sketch: _Sketch, probes: Block) -> _Sketch:
        """Add probes to a sketch, and apply the operator to them and to Q's new columns."""
        products = self.sign * linear_map(probes)
        basis, images = sketch.basis, sketch.images
        if not self.semidefinite:
            known = images.shape[1]
            basis = extend(basis, products, probes) if basis else orthonormalise(products)
            images = jnp.hstack([images, linear_map(basis.columns[:, known:])])
        every = jnp.hstack([sketch.probes, probes])
        return _Sketch(every, jnp.hstack([sketch.products, products]), basis, images)

    def value_and_error(
        self, linear_map: LinearMap, sketch: _Sketch
    ) -> tuple[Inexact[Array, ""], Number]:
        """Return the estimate of tr A from a sketch, and its error bar."""
        resphere = self.resphere
        if sketch.basis is None:
            known = products_of_sketch(sketch.products, sketch.probes)
            value, error, _ = value_and_error(known, resphere=resphere)
            return self.sign * value, error
        loo = leave_one_out_of(sketch.basis, sketch.probes, resphere=resphere)
        eps = linear_map.eps_of(sketch.probes, sketch.products)
        return xtrace_of(loo, sketch.products, sketch.images, eps, resphere=resphere)

    def pairs(self, sketch: _Sketch) -> _Pairs:
        """Return the readout, which is needed only for the size that was reached."""
        basis = sketch.basis or orthonormalise(sketch.products)
        loo = leave_one_out_of(basis, sketch.probes, resphere=self.resphere)
        s, k = loo.directions, loo.x.shape[0]
        kept = jnp.eye(k, dtype=s.dtype) - dot(s, s.conj().T) / k
        return _Pairs(basis.columns, loo.mu, kept, loo.resphering / k)

    def complete(
        self, linear_map: LinearMap, sketch: _Sketch
    ) -> tuple[Inexact[Array, ""], _Pairs, int]:
        """Return the exact trace, its readout, and the number of matvecs that it costs.

        If A Q is known, matvecs are needed only for a basis of the orthogonal complement
        of Q.
        """
        n = linear_map.operator.in_size()
        identity = jnp.eye(n, dtype=linear_map.dtype)
        half, ones = (n + 1) // 2, jnp.ones((n + 1) // 2, identity.real.dtype)
        rest = jnp.pad(identity[:, half:], ((0, 0), (0, n % 2)))
        core = jnp.eye(half, dtype=identity.dtype)
        pairs = _Pairs(identity[:, :half], rest, core, ones)
        if sketch.basis is None:
            value = jnp.trace(linear_map(identity))
            return (value.real if self.semidefinite else value), pairs, n
        q = sketch.basis.columns
        rest = jnp.linalg.qr(q, mode="complete")[0][:, q.shape[1] :]
        known = jnp.sum(column_dots(q, sketch.images))
        value = known + jnp.sum(column_dots(rest, linear_map(rest)))
        return value, pairs, rest.shape[1]
