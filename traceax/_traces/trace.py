"""The front door to the trace: it chooses for the user."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import lineax as lx
from jaxtyping import PRNGKeyArray

from traceax._core.checks import check_request
from traceax._core.estimate import Estimate
from traceax._core.operator import (
    is_hermitian,
    known_diagonal,
)
from traceax._probes.choice import check_pattern, for_pattern
from traceax._traces.choice import choice
from traceax._traces.exact import exact_trace
from traceax._traces.hutchinson import hutchinson_trace
from traceax._traces.second_batch import FEWEST, sketched_or_sampled_trace
from traceax._traces.xnystrace import xnystrace
from traceax._traces.xtrace import xtrace


def trace(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int = 100,
    *,
    pattern: Any = None,
) -> Estimate:
    """The trace of any square operator, by the best means there is for it.

    The choice depends on structure, tags and budget:

    1. exact and free for operators that store their diagonal (matrices, pytrees of
       matrices, diagonal, tridiagonal and identity operators, their sums and multiples),
       exact from one application for those tagged diagonal;
    2. exact from n applications for n <= 64, whatever the budget, and where `num_matvecs`
       reaches n;
    3. `hutchinson_trace` with `probing` where a `pattern` is given of which as many
       colours as matvecs, or fewer, keep at least three steps apart;
    4. `xnystrace` for operators tagged positive or negative semidefinite, from 3 matvecs;
    5. for all others, from 12 matvecs, `xtrace` where singular values decay and
       `hutchinson_trace` where they do not, half of the budget being spent on finding out;
       each probe is left out of its own choice, so that no estimate chooses itself, and
       where they disagree the key decides;
    6. `xtrace` from 6 matvecs, `hutchinson_trace` for smaller budgets.

    Unbiased.

    **Arguments**

    - `operator`: any square lineax operator, real or complex, of arrays or pytrees.
    - `key`: a JAX random key.
    - `num_matvecs`: how many applications may be spent (beyond n = 64), a Python int of at
      least 1. Default 100.
    - `pattern`: a graph in which the entries of the operator decay with the distance: where
      it has entries or, if it is the inverse or another function of a sparse matrix, where
      that one has. As for `colouring`: concrete, n x n, a sparse
      `jax.experimental.sparse.BCOO` or anything that `scipy.sparse.coo_array` takes. Where
      hardly anything decays within the steps that colours keep apart, sketches are better:
      leave it out. Default `None`.

    **Returns** an `Estimate` of shape `()`, in the operator's dtype (at least 32 bits;
    real if the operator is known to be Hermitian). `standard_error` is 0 where the value
    is exact.

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `num_matvecs` not a Python int, `pattern` traced; `ValueError` if `operator` is not
    square, mixes real and complex leaves, or has no dimension; if `key` is an array of
    keys; if `num_matvecs` is below 1; if `pattern` is not a square matrix of the operator's
    dimension.

    **Derivatives**: forward and reverse, to any order, unbiased; exact where the value is.

    **Cost**: that of the estimator chosen; `num_matvecs` of the result tells. A pattern is
    coloured at each call, under `jax.jit` when it is compiled; for many calls outside of it
    make a sampler, `probing(pattern, num_colours=num_matvecs)`, once.

    **Example**

    ```python
    >>> import jax, lineax as lx, traceax as tx
    >>> structure = jax.ShapeDtypeStruct((1000,), jax.numpy.float32)
    >>> operator = lx.FunctionLinearOperator(lambda v: 2 * v, structure)
    >>> print(tx.trace(operator, jax.random.key(0)).value.round())
    2000.0

    ```

    **Reference**: Epperly, Tropp and Webber (2024), XTrace: Making the most of every sample
    in stochastic trace estimation, SIAM Journal on Matrix Analysis and Applications 45(1),
    doi:10.1137/23M1548323.
    """
    operator = check_request("trace", operator, key, num_matvecs)
    check_pattern("trace", operator, pattern)
    known = known_diagonal(operator)
    if known is not None:
        diagonal, spent = known
        value = jnp.sum(diagonal)
        value = value.real if is_hermitian(operator) else value
        return Estimate(value, jnp.zeros((), value.real.dtype), spent)
    kind = choice(operator, num_matvecs)
    if kind == "exact":
        return exact_trace(operator)
    sampler = for_pattern("trace", num_matvecs, pattern)
    if sampler is not None:
        return hutchinson_trace(operator, key, num_matvecs, sampler=sampler)
    match kind:
        case "semidefinite":
            return xnystrace(operator, key, num_matvecs)
        case "general" if num_matvecs >= FEWEST:
            return sketched_or_sampled_trace("trace", operator, key, num_matvecs)
        case "general":
            return xtrace(operator, key, num_matvecs)
        case "few":
            return hutchinson_trace(operator, key, num_matvecs)
