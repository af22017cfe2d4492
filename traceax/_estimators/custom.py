"""An algorithm of one's own under the library's rule.

How many applications it makes is told before it runs. The operator is applied under a name,
which stands in the program that is traced of the algorithm, with the shape of what it
returns: so columns are counted as they are under `jax.vmap`, and as often as a loop goes
round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.canonical import Canonical, canonical
from traceax._core.checks import check_function_request
from traceax._core.estimate import Estimate
from traceax._core.function_checks import (
    check_algorithm,
    check_applied,
    check_block,
    check_blocks,
    check_result,
    check_value,
)
from traceax._core.jaxprs import inner_jaxprs
from traceax._core.operator import LinearMap, size, working_dtype
from traceax._core.rule import Outcome, estimate
from traceax._estimators.readouts import Pairs
from traceax._probes.draw import draw
from traceax._probes.samplers import Sampler, sphere

Block = Inexact[Array, "n r"]
Answer = tuple[Inexact[Array, ""], Float[Array, ""], tuple[Block, Block]]


def custom_trace(
    algorithm: Callable[[Apply, Block], Answer],
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_probes: int,
    *,
    sampler: Sampler = sphere,
) -> Estimate:
    """Estimate tr A of any square operator by an algorithm of your own.

    It gets its derivative, its batches and its checks from the library. What it owes is a
    resolution of the identity: besides its value it returns the two blocks L, R with
    E[L R*] = I through which it read the operator, value = sum conj(L) o (A R), and they
    are read again for the derivative, sum conj(L) o (dA R).

    Hutchinson's estimator is the mean of k forms z* A z. E[z z*] = I, so L = Z/k, R = Z:

    ```python
    def hutchinson(apply, probes):
        k = probes.shape[1]
        samples = jnp.sum(probes.conj() * apply(probes), axis=0)
        error = jnp.std(samples, ddof=1) / k**0.5
        return jnp.mean(samples), error, (probes / k, probes)
    ```

    Hutch++ sketches with one half of the probes. With Q an orthonormal basis of A S and
    P = I - Q Q*, I = Q Q* + P, and E[P z z* P] = P for a z that Q does not know. So
    L = [Q, P Z/l], R = [Q, P Z]:

    ```python
    def hutchpp(apply, probes):
        sketch, rest = jnp.split(probes, 2, axis=1)
        q, _ = jnp.linalg.qr(apply(sketch))
        rest = rest - q @ (q.conj().T @ rest)
        l = rest.shape[1]
        samples = jnp.sum(rest.conj() * apply(rest), axis=0)
        value = jnp.sum(q.conj() * apply(q)) + jnp.mean(samples)
        error = jnp.std(samples, ddof=1) / l**0.5
        return value, error, (jnp.hstack([q, rest / l]), jnp.hstack([q, rest]))
    ```

    **Arguments**

    - `algorithm`: a function `algorithm(apply, probes)` that returns `(value,
      standard_error, (left, right))`. `probes` is n x num_probes, columns in the operator's
      flattened space; `apply` maps n x k blocks to n x k blocks, and is all that is to be
      seen of the operator. It is traced as by `jax.jit`, so it may not branch on numbers;
      it may close over anything, also over what is being differentiated or batched.
    - `operator`: any square lineax operator, real or complex, of arrays or pytrees. Blocks
      of float16 and bfloat16 operators are float32.
    - `key`: a JAX random key.
    - `num_probes`: how many probes to draw, a Python int of at least 1.
    - `sampler`: draws the probes, with E[z z*] = I. Default `sphere`. One of your own may
      draw its probes in groups that the algorithm then splits.

    **Returns** an `Estimate` of shape `()`, in the operator's dtype (at least 32 bits;
    real if the operator is known to be Hermitian), with the algorithm's `standard_error`.
    `num_matvecs` counts the columns that were applied (of a choice of branches those of the
    dearest; a complex block of a real operator counts twice); `degrees_of_freedom` is
    num_probes - 1, at least 1.

    **Raises** `TypeError` if `algorithm` is no function or returns anything else, if
    `operator` is not a lineax operator, `key` not a random key, `num_probes` not a Python
    int, the sampler not a function; `ValueError` if `operator` is not square, mixes real
    and complex leaves, or has no dimension; if `key` is an array of keys; if `num_probes`
    is below 1; if the sampler is `probing`, or its probes are of the wrong shape; if
    `value` or `standard_error` is not a number, the blocks are not n x r both, `apply` is
    given anything but n x k, is never called, or is called in a loop of unknown length.

    **Derivatives**: forward and reverse, to any order, unbiased if E[L R*] = I whatever
    operator the blocks were made of; they are frozen. So is what the algorithm closes over:
    the trace does not depend on it, and derivatives in it are zero. A gradient costs r
    matvec-VJPs.

    **Cost**: the algorithm's.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
    >>> def hutchinson(apply, probes):
    ...     k = probes.shape[1]
    ...     samples = jnp.sum(probes.conj() * apply(probes), axis=0)
    ...     error = jnp.std(samples, ddof=1) / k**0.5
    ...     return jnp.mean(samples), error, (probes / k, probes)
    >>> operator = lx.MatrixLinearOperator(jnp.diag(jnp.arange(300.0)))
    >>> key = jax.random.key(0)
    >>> estimate = tx.custom_trace(hutchinson, operator, key, 10, sampler=tx.rademacher)
    >>> print(estimate.value, estimate.num_matvecs)
    44850.0 10

    ```

    **Reference**: Meyer, Musco, Musco and Woodruff (2021), Hutch++: Optimal stochastic
    trace estimation, SIAM Symposium on Simplicity in Algorithms,
    doi:10.1137/1.9781611976496.16, for the second example; the rule is the library's own.
    """
    check_algorithm("custom_trace", algorithm)
    operator = check_function_request(
        "custom_trace", operator, key, {"num_probes": num_probes}
    )
    probes = draw("custom_trace", sampler, key, operator, num_probes)
    linear_map = LinearMap(operator)
    arrays, rest = eqx.partition(linear_map, eqx.is_array)

    def run(arrays: Any, probes: Block) -> Outcome:
        return _run(algorithm, eqx.combine(arrays, rest), probes)

    num_matvecs = _num_matvecs(jax.make_jaxpr(run)(arrays, probes).jaxpr, operator)
    program = _Program(canonical(run, arrays, probes))
    degrees = max(num_probes - 1, 1)
    return estimate(program, linear_map, probes, num_matvecs, degrees)


class _Program(eqx.Module):
    """An algorithm as a program of an operator's arrays. What it closes over, tracers among
    it, are leaves, which the rule sees and takes for constants."""

    code: Canonical

    def __call__(self, linear_map: LinearMap, probes: Block) -> Outcome:
        return self.code(eqx.filter(linear_map, eqx.is_array), probes)


def _run(
    algorithm: Callable[[Apply, Block], Answer], linear_map: LinearMap, probes: Block
) -> Outcome:
    name, n = "custom_trace", probes.shape[0]
    application = named(linear_map)

    def apply(block: Block) -> Block:
        check_block(name, block, n)
        block = jnp.asarray(block)
        return application(block.astype(jnp.result_type(block, probes)))

    answer: Any = algorithm(apply, probes)
    check_result(name, answer)
    value, error, left, right = map(jnp.asarray, (*answer[:2], *answer[2]))
    dtype = working_dtype(linear_map.operator)
    check_value(name, "value", value, real=not jnp.issubdtype(dtype, jnp.complexfloating))
    check_value(name, "standard_error", error, real=True)
    check_blocks(name, left, right, n)
    left, right = (block.astype(jnp.result_type(block, dtype)) for block in (left, right))
    error = error.astype(jnp.finfo(dtype).dtype)
    return Outcome(value.astype(dtype), error, Pairs(left, right))


def _num_matvecs(program: Jaxpr, operator: lx.AbstractLinearOperator) -> int:
    real = not jnp.issubdtype(working_dtype(operator), jnp.complexfloating)
    entries = entries_applied(program, real=real)
    known = math.isfinite(entries)
    check_applied("custom_trace", int(entries) // size(operator) if known else None)
    return int(entries) // size(operator)


Apply = Callable[[Inexact[Array, "n k"]], Inexact[Array, "n k"]]

_NAME = "traceax_application"


def named(linear_map: LinearMap) -> Apply:
    """The same map of blocks, under a name."""
    arrays, rest = eqx.partition(linear_map, eqx.is_array)

    def application(arrays: Any, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        return eqx.combine(arrays, rest)(block)

    application.__name__ = _NAME
    compiled = jax.jit(application)

    def apply(block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        with jax.disable_jit(False):  # or there would be no name
            return compiled(arrays, block)

    return apply


def entries_applied(program: Jaxpr, *, real: bool) -> float:
    """Of all blocks together; a complex block of a real operator is two. Of the branches of
    a choice, the dearest one's. Infinitely many in a loop that stops when it likes."""
    return sum(_entries(equation, real) for equation in program.eqns)


def _entries(equation: JaxprEqn, real: bool) -> float:
    params = equation.params
    if params.get("name") == _NAME:
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
