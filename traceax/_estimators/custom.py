"""A user's algorithm under the derivative rule.

Its matvecs are counted before it runs. The operator is applied by a compiled function with
a known name. This name appears in the traced program of the algorithm, with the shape of
the result. So columns are also counted under `jax.vmap`, and in every iteration of a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core import checks
from traceax._core.canonical import Canonical, canonical
from traceax._core.estimate import Estimate
from traceax._core.layout import inner_jaxprs
from traceax._core.operator import LinearMap, Operator, working_dtype
from traceax._core.rule import Outcome
from traceax._estimators.call import begin
from traceax._estimators.readouts import Pairs
from traceax._linalg.columns import promoted
from traceax._probes.samplers import SamplerLike, sphere

Block = Inexact[Array, "n r"]
Answer = tuple[Inexact[Array, ""], Float[Array, ""], tuple[Block, Block]]


def custom_trace(
    algorithm: Callable[[Apply, Block], Answer],
    operator: Operator,
    key: PRNGKeyArray,
    num_probes: int,
    *,
    sampler: SamplerLike = sphere,
) -> Estimate:
    """Estimate tr A of any square operator by an algorithm of your own.

    traceax adds derivatives, batches and checks. In addition to its value, the algorithm
    returns two blocks L, R with E[L R*] = I (a resolution of the identity) from which the
    value is computed as sum conj(L) o (A R). The derivative is sum conj(L) o (dA R). The
    estimate is unbiased if the algorithm is.

    Hutchinson's estimator is the mean of k forms z* A z, with L = Z/k and R = Z. Hutch++
    makes a sketch A S from half of the probes. Let Q be its orthonormal basis, P = I - Q
    Q*, and z independent of Q. Then I = Q Q* + P and E[P z z* P] = P, so L = [Q, P Z/l] and
    R = [Q, P Z].

    **Arguments** (details are in the guide's conventions)

    - `algorithm`: a function `algorithm(apply, probes)` that returns `(value,
      standard_error, (left, right))`. `probes` is n x num_probes. `apply` maps an n x k
      block to A times this block. The rows of a block are the entries of the flattened
      space, in an order that traceax chooses. The algorithm is traced.
    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_probes`: the number of probes, a Python int of at least 1.
    - `sampler`: a sampler for the probes. Default `sphere`. Your own sampler may draw
      groups that the algorithm splits.

    **Returns** an `Estimate` of shape `()`. `num_matvecs` counts the columns to which the
    operator is applied. If there are branches, the most expensive one counts, and complex
    blocks of real operators count twice. Do not call `apply` in a loop of unknown length.

    **Derivatives**: they are unbiased if E[L R*] = I for every operator from which the
    blocks could be computed. Values that the algorithm closes over are frozen too. A
    gradient costs r matvec-VJPs, with r the number of columns of L.

    **Cost**: the cost of the algorithm.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> def hutchinson(apply, probes):
        ...     samples = jnp.sum(probes.conj() * apply(probes), axis=0)
        ...     error = jnp.std(samples, ddof=1) / len(samples) ** 0.5
        ...     return jnp.mean(samples), error, (probes / len(samples), probes)
        >>> operator = tx.as_operator(jnp.diag(jnp.arange(300.0)))
        >>> key = jax.random.key(0)
        >>> estimate = tx.custom_trace(hutchinson, operator, key, 10, sampler=tx.rademacher)
        >>> print(estimate.value, estimate.num_matvecs)
        44850.0 10

    **Reference**: Meyer et al. (2021), Hutch++,
    [doi:10.1137/1.9781611976496.16](https://doi.org/10.1137/1.9781611976496.16).

    **See also**: `hutchpp_trace`, and `check_estimator` in `traceax.testing`.
    """
    form, cure = "algorithm(apply, probes)", "The example of custom_trace is Hutchinson's."
    checks.check_callable("custom_trace", "algorithm", algorithm, form, cure, 2)
    call = begin(
        "custom_trace",
        operator,
        key,
        num_probes,
        argument="num_probes",
        sampler=sampler,
        takes="dependent",
    )
    num_probes = call.num_matvecs
    (probes,) = call.draw(num_probes)
    operator, linear_map = call.operator, LinearMap(call.operator)
    arrays, rest = eqx.partition(linear_map, eqx.is_array)

    def run(arrays: Any, probes: Block) -> Outcome:
        return _run(algorithm, eqx.combine(arrays, rest), probes)

    num_matvecs = _num_matvecs(jax.make_jaxpr(run)(arrays, probes).jaxpr, operator)
    program = _Program(canonical(run, arrays, probes))
    degrees = max(num_probes - 1, 1)
    return call.finish(program, probes, spent=num_matvecs, degrees=degrees)


class _Program(eqx.Module):
    """An algorithm, as a program that takes the operator's arrays.

    Arrays and tracers that the algorithm closes over are leaves of this module. The
    derivative rule treats them as constants.
    """

    code: Canonical

    def __call__(self, linear_map: LinearMap, probes: Block) -> Outcome:
        return self.code(eqx.filter(linear_map, eqx.is_array), probes)


def _run(
    algorithm: Callable[[Apply, Block], Answer], linear_map: LinearMap, probes: Block
) -> Outcome:
    name, n = "custom_trace", probes.shape[0]
    one_call = named(linear_map)

    def apply(block: Block) -> Block:
        checks.check_block(name, block, n)
        block = jnp.asarray(block)
        return one_call(promoted(block, probes)[0])

    answer: Any = algorithm(apply, probes)
    checks.check_result(name, answer)
    value, error, left, right = map(jnp.asarray, (*answer[:2], *answer[2]))
    dtype = linear_map.dtype
    real = not jnp.issubdtype(dtype, jnp.complexfloating)
    checks.check_value(name, "value", value, real=real)
    checks.check_value(name, "standard_error", error, real=True)
    checks.check_blocks(name, left, right, n)
    left, right = (promoted(block, probes)[0] for block in (left, right))
    error = error.astype(jnp.finfo(dtype).dtype)
    return Outcome(value.astype(dtype), error, Pairs(left, right))


def _num_matvecs(program: Jaxpr, operator: Operator) -> int:
    real = not jnp.issubdtype(working_dtype(operator), jnp.complexfloating)
    entries = entries_applied(program, real=real)
    known = int(entries) // operator.in_size() if math.isfinite(entries) else None
    return checks.check_applied("custom_trace", known)


Apply = Callable[[Inexact[Array, "n k"]], Inexact[Array, "n k"]]

_CALL = "traceax_application"


def named(linear_map: LinearMap) -> Apply:
    """Return the same map of blocks, as a function that has a name in traced programs."""
    arrays, rest = eqx.partition(linear_map, eqx.is_array)

    def application(arrays: Any, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        return eqx.combine(arrays, rest)(block)

    application.__name__ = _CALL
    compiled = jax.jit(application)

    def apply(block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        with jax.disable_jit(False):  # otherwise the program has no named call
            return compiled(arrays, block)

    return apply


def entries_applied(program: Jaxpr | ClosedJaxpr, *, real: bool) -> float:
    """Return the number of entries of all blocks to which a program applies the operator.

    A complex block of an operator that is `real` counts twice. If there are branches, the
    most expensive one counts. The number is infinite if a while loop applies the operator.
    """
    return sum(_entries(equation, real) for equation in program.eqns)


def _entries(equation: JaxprEqn, real: bool) -> float:
    params = equation.params
    if params.get("name") == _CALL:
        blocks: list[Any] = [out.aval for out in equation.outvars]
        return sum(b.size * (2 if real and jnp.iscomplexobj(b) else 1) for b in blocks)
    counts = [entries_applied(inner, real=real) for inner in inner_jaxprs(equation)]
    match equation.primitive.name:
        case "while":
            return math.inf if any(counts) else 0
        case "cond":
            return max(counts)
        case "scan":
            return params["length"] * sum(counts) if any(counts) else 0
        case _:
            return sum(counts)
