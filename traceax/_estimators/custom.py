"""A user's algorithm under the derivative rule.

Its matvecs are counted before it runs. Each block to which the operator is applied has a
name in the traced program of the algorithm (`jax.ad_checkpoint.checkpoint_name`). So
columns are also counted under `jax.vmap`, and in every iteration of a loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core import checks
from traceax._core.canonical import canonical
from traceax._core.estimate import Estimate
from traceax._core.layout import inner_jaxprs
from traceax._core.operator import LinearMap, Operator
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
    how: dict[str, Any] = {"sampler": sampler, "takes": "dependent"}
    call = begin("custom_trace", operator, key, num_probes, argument="num_probes", **how)
    (probes,) = call.draw(call.num_matvecs)
    # Arrays and tracers that the algorithm closes over are leaves of its code. The
    # derivative rule treats them as constants.
    code = canonical(partial(_run, algorithm), LinearMap(call.operator), probes)
    columns = _numbers_applied(code.jaxpr) / _numbers(probes[:, 0])
    must = "apply the operator at least once, and how often must be known beforehand"
    got = "a jax.lax.while_loop" if columns else "one that never called apply"
    cure = "Apply it to the probes, apply(probes); in loops by jax.lax.scan."
    _require(0 < columns < math.inf, must, got, cure)
    degrees = max(call.num_matvecs - 1, 1)
    return call.finish(code, probes, spent=int(columns), degrees=degrees)


def _run(algorithm: Callable, linear_map: LinearMap, probes: Block) -> Outcome:
    n = probes.shape[0]

    def is_block(block: object) -> bool:
        shape = getattr(block, "shape", ())
        is_tall = len(shape) == 2 and shape[0] == n and shape[1] > 0
        return is_tall and checks.are_arrays(block, "numbers")

    def apply(block: Block) -> Block:
        must = f"apply the operator to blocks of numbers of shape ({n}, k)"
        cure = "Pass apply(vector[:, None])[:, 0] for one vector."
        _require(is_block(block), must, checks.show(block), cure)
        block = promoted(jnp.asarray(block), probes)[0]
        return linear_map(checkpoint_name(block, _APPLIED))

    answer: Any = algorithm(apply, probes)
    is_triple = isinstance(answer, tuple | list) and len(answer) == 3
    pair = answer[2] if is_triple else None
    fits = isinstance(pair, tuple | list) and len(pair) == 2
    must = "return (value, standard_error, (left, right))"
    cure = "Return value, error, (probes / k, probes), for example."
    _require(fits, must, checks.show(answer), cure, kind=TypeError)
    value, error, left, right = map(jnp.asarray, (*answer[:2], *answer[2]))
    dtype = linear_map.dtype
    one = "number" if jnp.issubdtype(dtype, jnp.complexfloating) else "real number"
    parts = ("value", value, one), ("standard_error", error, "real number")
    for part, number, kind in parts:
        fits = checks.are_arrays(number, "numbers") and number.shape == ()
        fits = fits and (kind == "number" or not jnp.iscomplexobj(number))
        must = f"return a {part} that is one {kind}, an array of shape ()"
        cure = "Sum or average over the probes, and take .real where it is real."
        _require(fits, must, checks.show(number), cure)
    fits = is_block(left) and is_block(right) and left.shape == right.shape
    must = f"return blocks (left, right) of equal shape ({n}, r), E[left right*] = I"
    cure = "Hutchinson's are (probes / k, probes), k probes."
    _require(fits, must, checks.show((left, right)), cure)
    left, right = (promoted(block, probes)[0] for block in (left, right))
    error = error.astype(jnp.finfo(dtype).dtype)
    return Outcome(value.astype(dtype), error, Pairs(left, right))


def _require(holds: Any, *message: str, kind: type[Exception] = ValueError) -> None:
    checks.require(holds, "custom_trace", "algorithm", *message, kind=kind)


Apply = Callable[[Inexact[Array, "n k"]], Inexact[Array, "n k"]]

_APPLIED = "traceax_application"


def _numbers(block: Any) -> int:
    """Return how many real numbers a block has. A complex one counts twice."""
    return block.size * (2 if jnp.iscomplexobj(block) else 1)


def _numbers_applied(program: Jaxpr | ClosedJaxpr) -> float:
    """Return how many real numbers all blocks have that a program applies the operator to.

    If there are branches, the most expensive one counts. The number is infinite if a while
    loop applies the operator.
    """

    def of_one(equation: JaxprEqn) -> float:
        counts = list(map(_numbers_applied, inner_jaxprs(equation)))
        match equation.primitive.name:
            case "name" if equation.params["name"] == _APPLIED:
                return _numbers(equation.outvars[0].aval)
            case "while":
                return math.inf if any(counts) else 0
            case "cond":
                return max(counts)
            case "scan":
                return equation.params["length"] * sum(counts)
            case _:
                return sum(counts)

    return sum(map(of_one, program.eqns))
