"""The front door to the diagonal: it chooses for the user."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import lineax as lx
from jaxtyping import PRNGKeyArray

from traceax._core.checks import check_request
from traceax._core.estimate import Estimate
from traceax._core.operator import (
    as_result,
    is_hermitian,
    known_diagonal,
)
from traceax._diagonals.exact import exact_diagonal
from traceax._diagonals.hutchinson import hutchinson_diagonal
from traceax._diagonals.second_batch import sketched_or_sampled_diagonal
from traceax._diagonals.shared_batch import ENOUGH, semidefinite_diagonal
from traceax._diagonals.xdiag import xdiag
from traceax._diagonals.xnysdiag import xnysdiag
from traceax._probes.choice import check_pattern, for_pattern
from traceax._traces.choice import choice
from traceax._traces.second_batch import FEWEST


def diagonal(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int = 100,
    *,
    pattern: Any = None,
) -> Estimate:
    """The diagonal of any square operator, by the best means there is for it.

    The choice depends on structure, tags and budget:

    1. exact and free for operators that store their diagonal (matrices, pytrees of
       matrices, diagonal, tridiagonal and identity operators, their sums and multiples),
       exact from one application for those tagged diagonal;
    2. exact from n applications for n <= 64, whatever the budget, and where `num_matvecs`
       reaches n;
    3. `hutchinson_diagonal` with `probing` where a `pattern` is given of which as many
       colours as matvecs, or fewer, keep at least three steps apart;
    4. for operators tagged positive or negative semidefinite, from 6 matvecs, `xnysdiag`
       where eigenvalues decay and `hutchinson_diagonal` where they do not, both made of the
       same products;
    5. for all others, from 12 matvecs, `xdiag` where singular values decay and
       `hutchinson_diagonal` where they do not, half of the budget being spent on finding
       out; where the probes disagree the key decides;
    6. below, `xnysdiag` from 3 matvecs, `xdiag` from 6, `hutchinson_diagonal` for less.

    Each probe is left out of its own choice, so that no estimate chooses itself: unbiased.

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

    **Returns** an `Estimate` with the operator's input structure (leaves of at least 32
    bits; real if the operator is known to be Hermitian). `standard_error` is 0 where the
    value is exact.

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
    >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
    >>> points = jnp.linspace(0, 1, 200)
    >>> kernel = jnp.exp(-50 * (points[:, None] - points) ** 2)
    >>> precision = lx.MatrixLinearOperator(
    ...     jnp.eye(200) + kernel, lx.positive_semidefinite_tag
    ... )
    >>> estimate = tx.diagonal(lx.invert(precision, lx.Cholesky()), jax.random.key(0))
    >>> truth = jnp.diag(jnp.linalg.inv(precision.matrix))
    >>> bool(jnp.mean(abs(estimate.value - truth) < 2 * estimate.standard_error) > 0.9)
    True

    ```

    **Reference**: Epperly, Tropp and Webber (2024), XTrace: Making the most of every sample
    in stochastic trace estimation, SIAM Journal on Matrix Analysis and Applications 45(1),
    section 6.1, doi:10.1137/23M1548323.
    """
    operator = check_request("diagonal", operator, key, num_matvecs)
    check_pattern("diagonal", operator, pattern)
    known = known_diagonal(operator)
    if known is not None:
        value, spent = known
        value = value.real if is_hermitian(operator) else value
        zero = jnp.zeros_like(value.real)
        structure = operator.in_structure()
        return Estimate(as_result(value, structure), as_result(zero, structure), spent)
    kind = choice(operator, num_matvecs)
    if kind == "exact":
        return exact_diagonal(operator)
    sampler = for_pattern("diagonal", num_matvecs, pattern)
    if sampler is not None:
        return hutchinson_diagonal(operator, key, num_matvecs, sampler=sampler)
    match kind:
        case "semidefinite" if num_matvecs >= ENOUGH:
            return semidefinite_diagonal("diagonal", operator, key, num_matvecs)
        case "semidefinite":
            return xnysdiag(operator, key, num_matvecs)
        case "general" if num_matvecs >= FEWEST:
            return sketched_or_sampled_diagonal("diagonal", operator, key, num_matvecs)
        case "general":
            return xdiag(operator, key, num_matvecs)
        case "few":
            return hutchinson_diagonal(operator, key, num_matvecs)
