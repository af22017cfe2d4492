"""The trace of an operator that changes slowly: DeltaShift.

Let A_1, A_2, ... be operators, and t_j an estimate of tr A_j with variance v_j. Write

    tr A_j = b tr A_(j-1) + tr(A_j - b A_(j-1))

and estimate the first trace by t_(j-1), and the second one with l fresh probes g_i:

    t_j = b t_(j-1) + mean g_i* (w_i - b z_i),    z_i = A_(j-1) g_i,  w_i = A_j g_i.

A quadratic form of a symmetric B with a probe on the sphere has the variance 2 E|B g - g
(g* B g)/n|^2 (1 instead of 2 for complex probes). Remove from z and w their components
along g. Let N, M and C be the means of |z|^2, |w|^2 and Re z* w after that, and c = 2/l.
Then

    v_j = b^2 v_(j-1) + c (M + b^2 N - 2 b C),    least for  b = c C / (v_(j-1) + c N).

If b were computed from all probes, t_j would be biased. If a few eigenvalues dominate, the
bias would be larger than the standard error. So each probe has its own b_i, which is
computed from the *other* probes,

    t_j = mean of  b_i t_(j-1) + g_i* (w_i - b_i z_i),

and the part of t_j that comes from fresh probes has no bias. Nor may b_i depend on the
error of t_(j-1). If a few eigenvalues dominate, probes that miss them give too small a
trace together with too small a v, so a wrong estimate would be trusted most. Therefore
v_(j-1) is stored as a multiple of the mean of |w|^2 over the same probes, and this mean is
replaced by N, from the fresh probes. The bias that remains is small next to the standard
error, but it is not zero. The standard error uses the average of the two variances, one
with N and one with the old mean. For other probes, and for operators that are not
symmetric, the standard error is too large and b is not optimal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray, UInt32

from traceax._core.canonical import Canonical, compiled, program_hash
from traceax._core.checks import check_count, check_tracked
from traceax._core.estimate import Estimate
from traceax._core.operator import (
    LinearMap,
    Operator,
    application,
    by_application,
    stores_matrix,
)
from traceax._core.rule import Outcome, run
from traceax._estimators.call import Call, begin
from traceax._estimators.hutchinson import estimate_by_forms
from traceax._estimators.readouts import Pairs
from traceax._estimators.xtrace import estimate_by_xtrace
from traceax._linalg.columns import (
    Block,
    Number,
    OfProbes,
    column_dots,
    column_norms_squared,
    largest_modulus,
    mean,
    over,
    times,
)
from traceax._linalg.jackknife import sums_of_others
from traceax._probes.draw import checked_sampler
from traceax._probes.samplers import SamplerLike, sphere


class Tracked(NamedTuple):
    """The state of `deltashift`. It holds arrays only, so a loop can carry it.

    **Attributes**

    - `value`, `standard_error`: the latest estimate of the trace.
    - `size`: the root mean square length of the images of the last probes, without their
      components along the probes. It is 0 if it is not known.
    - `arrays`: the arrays of the operator whose trace is `value`.
    - `program`: a hash of the code of that operator.
    """

    value: Inexact[Array, ""]
    standard_error: Number
    size: Number
    arrays: list[Array]
    program: UInt32[Array, 8]


class DeltaShift(NamedTuple):
    """The pair of pure functions that `deltashift` returns.

    They are `init(operator, key) -> state` and `update(operator, state, key) -> (Estimate,
    state)`.
    """

    init: Callable[[Operator, PRNGKeyArray], Tracked]
    update: Callable[[Operator, Tracked, PRNGKeyArray], tuple[Estimate, Tracked]]


def deltashift(num_matvecs: int = 20, *, sampler: SamplerLike = sphere) -> DeltaShift:
    """Follow the trace of a slowly changing operator, such as the curvature of a network.

    As in optax, there are two pure functions and a state that `jax.lax.scan` may carry:

        state = tracker.init(operator, key)
        estimate, state = tracker.update(operator, state, key)

    Each update applies the new operator and the previous one to the same fresh probes, and
    corrects the previous estimate by the difference. The weight of the previous estimate is
    small after a jump.

    **Arguments** (details are in the guide's conventions)

    - `num_matvecs`: the budget of one update, at least min(4, n). Half of it is spent on
      the previous operator. If it reaches n, updates are exact. Default 20.
    - `sampler`: a sampler of independent probes. Default `sphere`.

    **Returns** the pair `(init, update)`.

    - `init(operator, key)` spends `num_matvecs` matvecs on a first estimate by `xtrace` (by
      `hutchinson_trace` if there are fewer than 6), which is in `state.value`
      and `state.standard_error`.
    - `update(operator, state, key)` takes the same operator with other arrays in it, and
      returns an `Estimate` and the next state. `standard_error` covers the whole chain of
      estimates, and is too large for operators that are not symmetric. An earlier estimate
      that is not finite is ignored. You must not pass a different operator, or one with a
      different Python float in a closure. traceax raises an error if it can see such a
      change.

    **Derivatives**: the `Estimate` can be differentiated with respect to the new operator,
    without bias, as `hutchinson_trace` with num_matvecs // 2 probes. The state is frozen.

    **Cost**: num_matvecs // 2 matvecs of each operator in two batches, without the adjoint.
    The state holds copies of all arrays of the operator, including data. From the third
    update on, only lineax's solves and, in loops, your own derivative rules are compiled.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> base = jax.random.normal(jax.random.key(0), (100, 100))
        >>> operators = [tx.as_operator(base + j * 0.01) for j in range(20)]
        >>> tracker = tx.deltashift(num_matvecs=20)
        >>> state = tracker.init(operators[0], jax.random.key(1))
        >>> for j in range(1, 20):
        ...     estimate, state = tracker.update(operators[j], state, jax.random.key(j + 1))
        >>> bool(abs(estimate.value - jnp.trace(base + 0.19)) < 3 * estimate.standard_error)
        True

    **Reference**: Dharangutte and Musco (2021),
    [arXiv:2110.13752](https://arxiv.org/abs/2110.13752).

    **See also**: `trace`, `control_variate_trace`.
    """
    checked_sampler("deltashift", sampler)
    num_matvecs = check_count("deltashift", "num_matvecs", num_matvecs)
    begun = partial(begin, "deltashift", num_matvecs=num_matvecs, least=4, sampler=sampler)
    return DeltaShift(partial(_init, begun), partial(_update, begun))


def _init(begun: Callable[..., Call], operator: Operator, key: PRNGKeyArray) -> Tracked:
    """Make the first estimate, and return it as a state."""
    call = begun(operator, key)
    estimate = estimate_by_xtrace if call.num_matvecs >= 6 else estimate_by_forms
    first = call.exact() if call.is_exact else estimate(call)
    return _state(first, application(call.operator))


def _update(
    begun: Callable[..., Call], operator: Operator, state: Tracked, key: PRNGKeyArray
) -> tuple[Estimate, Tracked]:
    """Update the estimate for a new operator."""
    call = begun(operator, key)
    operator, code = call.operator, application(call.operator)
    check_tracked("deltashift.update", state, Tracked, code.arrays, program_hash(code))
    before = by_application(operator, Canonical(state.arrays, code.jaxpr, code.result))
    # Operators of classes outside lineax are replaced as well, because otherwise their
    # functions would be compiled at every update.
    if not stores_matrix(operator):
        call = call.on(by_application(operator, code))
    if call.is_exact:
        exact = call.exact()
        return exact, _state(exact, code)
    num_probes = call.num_matvecs // 2
    (probes,) = call.draw(num_probes)
    images = compiled(LinearMap.__call__, LinearMap(before), probes)
    known = jax.lax.stop_gradient((probes, images, state))
    outcome = run(_correct, LinearMap(call.operator), known)
    value, error = outcome.value, outcome.standard_error
    result = Estimate(value, error, 2 * num_probes, float(num_probes), method="deltashift")
    return result, _state(result, code, outcome.report)


def _correct(linear_map: LinearMap, known: tuple[Block, Block, Tracked]) -> Outcome:
    """Correct the previous trace with fresh probes.

    `known` has the probes, their images under the previous operator, and the state. The
    outcome reports the new `size`.
    """
    probes, before, (old, error, size, *_) = known
    w, eps = linear_map(probes), linear_map.eps
    usable = jnp.isfinite(old) & jnp.isfinite(error) & jnp.all(jnp.isfinite(before))
    old, error = jnp.where(usable, old, 0), jnp.where(usable, error, 0)
    old, z = old.astype(w.dtype), jnp.where(usable, before, 0)
    scale = jnp.maximum(largest_modulus(z), largest_modulus(w))
    off = _off(probes, over(z, scale)), _off(probes, over(w, scale))
    # If the operator is a multiple of I, the parts off the probes are rounding errors, so b
    # would be an arbitrary number without this term.
    grain = eps * mean(column_norms_squared(over(z, scale)))
    b, after = _damping(*off, error / scale, size / scale, grain)
    value = times(mean(b), old) + mean(column_dots(probes, w - times(b[None, :], z)))
    rounding = mean(column_dots(jnp.abs(probes), jnp.abs(w)))
    after = jnp.hypot(scale * after, 4 * eps * rounding)
    size = scale * jnp.sqrt(mean(column_norms_squared(off[1])))
    return Outcome(value, after, Pairs(probes / probes.shape[1], probes), report=size)


def _damping(
    z: Block, w: Block, error: Number, size: Number, grain: Number
) -> tuple[OfProbes, Number]:
    """Return the best b for each probe, and the standard error after the correction.

    `z` and `w` are the images without their components along the probes, `error` and `size`
    belong to the state, and `grain` is added to N, to cover rounding.
    """
    c = (1 if jnp.iscomplexobj(z) else 2) / z.shape[1]
    squares = column_norms_squared(z)
    known = (size > 0) & (mean(squares) > 0)

    def anew(squares: Array) -> Array:
        """Return v_(j-1), rescaled to other squared lengths than `size` squared."""
        ratio = jnp.where(known, error / jnp.where(known, size, 1), 0)
        return jnp.where(known, ratio**2 * squares, error**2)

    others = sums_of_others(squares) / (squares.size - 1)
    whole = anew(others) + c * (others + grain)
    cross = c * sums_of_others(column_dots(z, w).real) / (squares.size - 1)
    b = jnp.where(whole > 0, cross / jnp.where(whole > 0, whole, 1), 0)
    before = (error**2 + anew(mean(squares))) / 2
    rest = w - times(b[None, :], z)
    left = mean(b) ** 2 * before + c * mean(column_norms_squared(rest))
    return b, jnp.sqrt(left)


def _off(probes: Block, block: Block) -> Array:
    """Remove from each column its component along the probe."""
    along = over(column_dots(probes, block), column_norms_squared(probes))
    return block - probes * along[None, :]


def _state(latest: Estimate, code: Canonical, size: Number | None = None) -> Tracked:
    """Return the state after an estimate. `size` is zero if it is not known."""
    # The state holds copies, so a user who donates it does not lose the operator's arrays.
    arrays = [jnp.array(array, copy=True) for array in code.arrays]
    value, error = latest.value, latest.standard_error
    size = jnp.zeros_like(error) if size is None else size
    return jax.lax.stop_gradient(Tracked(value, error, size, arrays, program_hash(code)))
