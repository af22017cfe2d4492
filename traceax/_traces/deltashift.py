"""The trace of an operator that changes slowly: DeltaShift.

A_1, A_2, ... are operators, t_j an estimate of tr A_j with variance v_j. Write

    tr A_j = b tr A_(j-1) + tr(A_j - b A_(j-1))

and estimate the first trace by t_(j-1), the second with fresh probes g_i, l of them:

    t_j = b t_(j-1) + mean g_i* (w_i - b z_i),    z_i = A_(j-1) g_i,  w_i = A_j g_i.

For b = 1 errors add up over time, for b = 0 nothing is remembered. A quadratic form of a
symmetric B with a probe on the sphere has the variance 2 E|B g - g (g* B g)/n|^2 (1 instead
of 2 for complex probes), so with N, M, C the means of |z|^2, |w|^2 and Re z* w, all without
their components along g, and c = 2/l,

    v_j = b^2 v_(j-1) + c (M + b^2 N - 2 b C),    least for  b = c C / (v_(j-1) + c N).

If b were made of all probes, t_j would be biased, by more than its standard error where
a few eigenvalues dominate. So each probe has its own b_i, made of the *others*, and

    t_j = mean of  b_i t_(j-1) + g_i* (w_i - b_i z_i)

has no bias whatever. For other probes and for operators that are not symmetric
the variance is less than that: the standard error is too large, and b not the best.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import Array, Float, Inexact, PRNGKeyArray, PyTree, UInt32

from traceax._core.checks import (
    check_budget,
    check_request,
    check_same_program,
    check_tracked,
)
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Structure, prepare, resolution, size
from traceax._core.rule import Outcome, estimate
from traceax._linalg.columns import column_dots, column_norms_squared, magnitude, mean
from traceax._probes.plan import stream
from traceax._probes.samplers import Sampler, check_independent, sphere
from traceax._traces.exact import exact_trace
from traceax._traces.hutchinson import hutchinson_trace
from traceax._traces.weights import TraceWeight
from traceax._traces.xtrace import xtrace


class Tracked(NamedTuple):
    """The state of `deltashift`: arrays only, so that it can be carried by a loop.

    **Attributes**

    - `value`, `standard_error`: the latest estimate of the trace.
    - `arrays`: those of the operator that it belongs to.
    - `program`: a hash of that operator's code.
    """

    value: Inexact[Array, ""]
    standard_error: Float[Array, ""]
    arrays: list[Array]
    program: UInt32[Array, 8]


class DeltaShift(NamedTuple):
    """`init(operator, key) -> state` and `update(operator, state, key) -> (Estimate,
    state)`, pure functions. See `deltashift`."""

    init: Callable[[lx.AbstractLinearOperator, PRNGKeyArray], Tracked]
    update: Callable[
        [lx.AbstractLinearOperator, Tracked, PRNGKeyArray], tuple[Estimate, Tracked]
    ]


def deltashift(num_matvecs: int = 20, *, sampler: Sampler = sphere) -> DeltaShift:
    """Follow the trace of a slowly changing operator: the curvature of a network, say.

    In optax's manner: a pair of pure functions and a state, which is a pytree of arrays and
    may be carried through `jax.lax.scan` or a training loop:

        state = tracker.init(operator, key)
        estimate, state = tracker.update(operator, state, key)

    Each update applies the new operator and the one before to the same fresh probes, and
    corrects the estimate that it has by what has changed. What an old estimate is worth is
    computed at every step: where the operator jumps, it is forgotten.

    **Arguments**

    - `num_matvecs`: how many applications an update may spend, a Python int of at least 4:
      half of them are of the operator before. From n on, updates are exact.
    - `sampler`: draws the probes, which must be independent. Default `sphere`.

    **Returns** the pair `(init, update)`.

    - `init(operator, key)` takes any square lineax operator and spends `num_matvecs` on a
      first estimate by `xtrace` (below 6 by `hutchinson_trace`): `state.value`,
      `state.standard_error`.
    - `update(operator, state, key)` takes the same operator with other arrays in it (what
      else changes, a Python float in a closure, say, is an error if it can be seen), and
      gives an `Estimate` and the next state. `standard_error` is that of the whole chain of
      estimates, too large for operators that are not symmetric. An estimate or an operator
      before that was not finite is forgotten.

    **Raises** `TypeError` if `num_matvecs` is not a Python int, an operator not a lineax
    operator, a key not a random key; `ValueError` if `num_matvecs` is below 4, an operator
    not square, the sampler's probes dependent; if `update` gets another operator than
    before, or a state that is none.

    **Derivatives**: of the `Estimate`, forward and reverse, to any order, in the new
    operator, unbiased: those of `hutchinson_trace` with num_matvecs // 2 probes, of which
    what is remembered takes no part. The state is frozen.

    **Cost**: num_matvecs // 2 applications of each operator, no adjoints, in two batches;
    the state holds copies of all arrays that the operator is made of, data included.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
    >>> matrix = jax.random.normal(jax.random.key(0), (100, 100))
    >>> operators = [lx.MatrixLinearOperator(matrix + j * 0.01) for j in range(20)]
    >>> tracker = tx.deltashift(num_matvecs=20)
    >>> state = tracker.init(operators[0], jax.random.key(1))
    >>> for j, operator in enumerate(operators[1:]):
    ...     estimate, state = tracker.update(operator, state, jax.random.key(2 + j))
    >>> low, high = estimate.interval()
    >>> bool(low < jnp.trace(operators[-1].matrix) < high)
    True

    ```

    **Reference**: Dharangutte and Musco (2021), Dynamic trace estimation, NeurIPS,
    arXiv:2110.13752.
    """
    check_independent("deltashift", sampler)
    check_budget("deltashift", num_matvecs, minimum=4)
    return DeltaShift(
        partial(_init, num_matvecs=num_matvecs, sampler=sampler),
        partial(_update, num_matvecs=num_matvecs, sampler=sampler),
    )


def _init(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    *,
    num_matvecs: int,
    sampler: Sampler,
) -> Tracked:
    check_request("deltashift.init", operator, key, num_matvecs)
    first = xtrace if num_matvecs >= 6 else hutchinson_trace
    estimate = first(operator, key, num_matvecs, sampler=sampler)
    return _state(estimate, _program(operator))


def _update(
    operator: lx.AbstractLinearOperator,
    state: Tracked,
    key: PRNGKeyArray,
    *,
    num_matvecs: int,
    sampler: Sampler,
) -> tuple[Estimate, Tracked]:
    check_request("deltashift.update", operator, key, num_matvecs)
    program = _program(operator)
    check_tracked("deltashift.update", state, Tracked, program.arrays)
    check_same_program("deltashift.update", state.program, program.fingerprint)
    if num_matvecs >= size(operator):
        exact = exact_trace(operator)
        return exact, _state(exact, program)
    num_probes = num_matvecs // 2
    probes = stream("deltashift", operator, key, num_probes, sampler, None).source
    structure = operator.in_structure()
    before = LinearMap(program.with_arrays(state.arrays, structure))(probes)
    frozen = jax.lax.stop_gradient((probes, before, state.value, state.standard_error))
    result = estimate(_correct, operator, frozen, 2 * num_probes, num_probes)
    return result, _state(result, program)


def _correct(
    linear_map: LinearMap,
    known: tuple[
        Inexact[Array, "n l"], Inexact[Array, "n l"], Inexact[Array, ""], Float[Array, ""]
    ],
) -> Outcome:
    probes, before, old, error = known
    num_probes = probes.shape[1]
    usable = jnp.isfinite(old) & jnp.isfinite(error) & jnp.all(jnp.isfinite(before))
    old, error = jnp.where(usable, old, 0), jnp.where(usable, error, 0)
    z, w = jnp.where(usable, before, 0), linear_map(probes)
    scale = jnp.maximum(magnitude(z), magnitude(w))
    b, after = _damping(_off(probes, z / scale), _off(probes, w / scale), error / scale)
    value = mean(b) * old + mean(column_dots(probes, w - b * z))
    rounding = mean(column_dots(jnp.abs(probes), jnp.abs(w)))
    after = jnp.hypot(scale * after, 4 * resolution(linear_map.operator) * rounding)
    return Outcome(value, after, TraceWeight(probes / num_probes, probes))


def _damping(
    z: Inexact[Array, "n l"], w: Inexact[Array, "n l"], error: Float[Array, ""]
) -> tuple[Float[Array, " l"], Float[Array, ""]]:
    """The best b for each probe, and the standard error after it, as a sum of squares."""
    c = (1 if jnp.iscomplexobj(z) else 2) / z.shape[1]
    whole = error**2 + c * _mean_of_others(column_norms_squared(z))
    cross = c * _mean_of_others(column_dots(z, w).real)
    b = jnp.where(whole > 0, cross / jnp.where(whole > 0, whole, 1), 0)
    left = (mean(b) * error) ** 2 + c * mean(column_norms_squared(w - b * z))
    return b, jnp.sqrt(left)


def _mean_of_others(numbers: Float[Array, " l"]) -> Float[Array, " l"]:
    return (jnp.sum(numbers) - numbers) / (numbers.shape[0] - 1)


def _off(probes: Inexact[Array, "n l"], block: Inexact[Array, "n l"]) -> Array:
    """Columns without their components along the probes."""
    along = column_dots(probes, block) / column_norms_squared(probes)
    return block - probes * along[None, :]


def _state(latest: Estimate, program: _Program) -> Tracked:
    # Copies: whoever donates a state does not lose the arrays of his operator.
    arrays = [jnp.array(array, copy=True) for array in program.arrays]
    return jax.lax.stop_gradient(
        Tracked(latest.value, latest.standard_error, arrays, program.fingerprint)
    )


class _Program(NamedTuple):
    """An operator taken apart, into its code and the arrays in it: its own, and whatever
    else its code refers to. Functions that are traced twice are not equal, so the code is
    no part of a state, but a hash of it is."""

    arrays: list[Array]
    code: Jaxpr
    num_own: int
    fingerprint: Array

    def with_arrays(
        self, arrays: list[Array], structure: Structure
    ) -> lx.AbstractLinearOperator:
        own, constants = arrays[: self.num_own], arrays[self.num_own :]
        run = jaxpr_as_fun(ClosedJaxpr(self.code, constants))

        def apply(vector: PyTree[Array]) -> PyTree[Array]:
            results = run(*own, *jax.tree.leaves(vector))
            return jax.tree.unflatten(jax.tree.structure(structure), results)

        return lx.FunctionLinearOperator(apply, structure)


def _program(operator: lx.AbstractLinearOperator) -> _Program:
    own, rest = eqx.partition(prepare(operator), eqx.is_array)

    def apply(own: Any, vector: PyTree[Array]) -> PyTree[Array]:
        return eqx.combine(own, rest).mv(vector)

    code = jax.make_jaxpr(apply)(own, operator.in_structure())
    own = jax.tree.leaves(own)
    text = re.sub("0x[0-9a-f]+", "", str(code.jaxpr))  # addresses of functions
    digest = hashlib.sha256(text.encode()).digest()
    fingerprint = jnp.asarray(np.frombuffer(digest, np.uint32))
    arrays = [*own, *map(jnp.asarray, code.consts)]
    return _Program(arrays, code.jaxpr, len(own), fingerprint)
