"""The automatic choices: `trace`, `diagonal` and `leaf_traces`.

They choose an estimator by structure, tags and budget, and never look at the estimate.

The entries of a leaf have correlated errors. So each sample of the diagonal is summed over
the leaf first, and the error of the sum is computed from these sums. For samples of XDiag
the covariance of pairs is enough (`jackknife.shared_error`). For samples of a Nyström
approximation, parts that depend on many probes matter if the decay is fast, and the
jackknife is needed (`krylov_nystrom`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import PRNGKeyArray

from traceax._core.checks import check_callable
from traceax._core.estimate import Estimate, exact_estimate
from traceax._core.operator import Operator, is_hermitian, is_semidefinite, known_diagonal
from traceax._estimators.call import SMALL, Call, begin
from traceax._estimators.deflated_colours import deflated_colours
from traceax._estimators.hutchinson import estimate_by_forms, estimate_by_ratio
from traceax._estimators.krylov_nystrom import FEWEST_PROBES, estimate_by_nystrom
from traceax._estimators.readouts import by_leaf, by_row
from traceax._estimators.second_batch import (
    nystrom_or_hutchinson,
    xdiag_or_hutchinson,
    xnysdiag_or_hutchinson,
    xtrace_or_hutchinson,
)
from traceax._probes.draw import check_pattern, for_pattern


def trace(
    operator: Operator, key: PRNGKeyArray, num_matvecs: int = 100, *, pattern: Any = None
) -> Estimate:
    """Estimate the trace of any square operator by an automatic choice of estimator.

    The choice depends on structure, tags and budget:

    1. If the operator stores its diagonal (as matrices and their sums do), the trace is
       exact and takes no matvecs. If it is tagged diagonal, one matvec gives it exactly.
    2. If n <= 64 or `num_matvecs` reaches n, the trace is exact and takes n matvecs.
    3. If a `pattern` is given and `num_matvecs` colours are enough for a `colouring` of
       power 3, `hutchinson_trace` with `probing` is used. If a matvec is left over, it
       tests whether the pattern covers the operator, and widens the error bar if it does
       not. If there are at least 32 colours,
       the matvecs with 8 of them decide whether dominant directions are deflated, as in
       Hutch++, and fewer colours probe the rest.
    4. If the operator is tagged positive or negative semidefinite, `xnystrace` is used from
       4 matvecs on. From 8 matvecs on, a quarter of them are second matvecs A Q, as in
       `xtrace`. They make the estimate accurate for decaying eigenvalues and for a few
       large eigenvalues above a flat rest.
    5. For all others, from 12 matvecs on, `xtrace` is used if singular values decay and
       `hutchinson_trace` if they do not. Half of the budget is spent on this decision,
       which is random if the probes disagree.
    6. With fewer matvecs, `xtrace` is used if there are at least 6, else
       `hutchinson_trace`.

    In choices 4 to 6, an operator that turns out to be nearly diagonal is estimated without
    a sketch, from the same matvecs. Its diagonal then adds nothing to the error, as if the
    probes were random signs.

    The estimate is unbiased, because the choice for each probe depends only on the other
    probes.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least 1. It is ignored if n <= 64. Default 100.
    - `pattern`: a graph in which the entries of the operator decay with the distance, given
      as the sparse pattern of the operator or, if the operator is a function of a sparse
      matrix, of that matrix. It is n x n, as in `colouring`, and not traced. Deflation
      helps if entries hardly decay within the steps that colours keep apart, but for
      semidefinite operators sketches without a pattern may be better still. Only choice 3
      uses the pattern, and `method` then names the number of colours. Default `None`.

    **Returns** an `Estimate` with a value of shape `()`. The value is real if the operator
    is known to be Hermitian.

    **Cost**: the cost of the chosen estimator. A pattern is coloured on the host, once for
    all calls with entries at the same places. The latest eight colourings are kept.

    **Example**

        >>> import jax, traceax as tx
        >>> operator = tx.as_operator(lambda v: 2 * v, 1000)
        >>> print(tx.trace(operator, jax.random.key(0)).value.round())
        2000.0

    **Reference**: Epperly, Tropp and Webber (2024), XTrace,
    [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323).

    **See also**: `adaptive`, `diagonal`, `leaf_traces`, `function_trace`.
    """
    call = begin("trace", operator, key, num_matvecs)
    pattern = check_pattern(call.name, call.operator, pattern)
    if (exact := exact_if_cheap(call)) is not None:
        return exact
    if (sampler := for_pattern(pattern, num_matvecs)) is not None:
        deflated = deflated_colours(call, sampler, pattern)
        return deflated or estimate_by_forms(call.using(sampler))
    if is_semidefinite(call.operator) and num_matvecs >= 4:
        more = " with second matvecs" if num_matvecs >= FEWEST_PROBES else ""
        return estimate_by_nystrom(call, f"xnystrace{more}")
    return xtrace_or_hutchinson(call) if num_matvecs >= 6 else estimate_by_forms(call)


def diagonal(
    operator: Operator, key: PRNGKeyArray, num_matvecs: int = 100, *, pattern: Any = None
) -> Estimate:
    """Estimate the diagonal of any square operator by an automatic choice of estimator.

    The choice is made as in `trace`, but among other estimators. Like `trace`, the estimate
    is unbiased, and it is exact whenever `trace` is. With a `pattern`,
    `hutchinson_diagonal` with `probing` is used, without deflation. Otherwise the estimator
    is chosen as follows.

    - For operators tagged positive or negative semidefinite, from 3 matvecs on, it is
      `xnysdiag` if eigenvalues decay and `hutchinson_diagonal` if they do not. Both use the
      same matvecs.
    - For all others, from 12 matvecs on, it is `xdiag` if singular values decay and
      `hutchinson_diagonal` if they do not. Half of the budget is spent on this decision.
    - With fewer matvecs, it is `xdiag` if there are at least 6 and the operator does not
      turn out to be nearly diagonal, else `hutchinson_diagonal`.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least 1. It is ignored if n <= 64. Default 100.
    - `pattern`: a graph in which the entries of the operator decay with the distance, as in
      `trace`. Default `None`.

    **Returns** an `Estimate` with a value of the operator's input structure. The value is
    real if the operator is known to be Hermitian.

    **Cost**: the cost of the chosen estimator.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> points = jnp.linspace(0, 1, 200)
        >>> matrix = jnp.eye(200) + jnp.exp(-50 * (points[:, None] - points) ** 2)
        >>> precision = tx.as_operator(matrix, tags=lx.positive_semidefinite_tag)
        >>> estimate = tx.diagonal(lx.invert(precision, lx.Cholesky()), jax.random.key(0))
        >>> error = abs(estimate.value - jnp.diag(jnp.linalg.inv(matrix)))
        >>> bool(jnp.mean(error < 2 * estimate.standard_error) > 0.9)
        True

    **Reference**: Epperly, Tropp and Webber (2024), section 6.1,
    [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323).

    **See also**: `trace`, `xdiag`, `xnysdiag`, `function_diagonal`, `selected_entries`.
    """
    call = begin("diagonal", operator, key, num_matvecs)
    call = call.reading(by_row(call.operator))
    pattern = check_pattern(call.name, call.operator, pattern)
    if (exact := exact_if_cheap(call)) is not None:
        return exact
    if (sampler := for_pattern(pattern, num_matvecs)) is not None:
        return estimate_by_ratio(call.using(sampler))
    return choose_diagonal(call)


def choose_diagonal(call: Call) -> Estimate:
    """Choose an estimator of the diagonal by the operator's tags and the budget."""
    if is_semidefinite(call.operator) and call.num_matvecs >= 3:
        return xnysdiag_or_hutchinson(call)
    return xdiag_or_hutchinson(call) if call.num_matvecs >= 6 else estimate_by_ratio(call)


def leaf_traces(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int = 100,
    *,
    groups: Callable[[tuple[Any, ...]], str] | None = None,
) -> Estimate:
    """Estimate the traces of the diagonal blocks of an operator, one for each leaf.

        value[leaf] = sum of diag A over the entries of the leaf

    An example is the curvature of each layer of a network. All leaves share one sketch: the
    one that `trace` uses for operators tagged semidefinite (with signs instead of points on
    the sphere), and the one that `diagonal` uses for others. Small budgets use plain
    probes. The estimate is unbiased, and exact whenever `trace` is. For the error bar of
    the sum over all leaves, use `trace`.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least 1. It is ignored if n <= 64. Default 100.
    - `groups`: a function that gives a name to each leaf, for sums over several leaves. It
      maps the path of a leaf, a tuple of JAX's keys, to a name, for example the name of its
      layer. Leaves with the same name are summed. Errors of leaves are correlated, so the
      error of a sum cannot be computed from their error bars. Default `None`, which means
      one trace for each leaf.

    **Returns** an `Estimate` with the operator's input structure, one number for each leaf.
    With `groups` its structure is a dict, with one number for each name.

    **Derivatives**: they follow the rule of the diagonal, and are exact if the value is.

    **Cost**: the cost of `diagonal`, or of `trace` for semidefinite operators.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> layer = {"bias": jnp.ones(10), "weight": jnp.ones((10, 20)) / 4}
        >>> fn = lambda p, x: jnp.sin(p["weight"] @ x + p["bias"])
        >>> operator = tx.empirical_fisher(fn, layer, args=jnp.ones(20))
        >>> value = tx.leaf_traces(operator, jax.random.key(0), 40).value
        >>> bool(abs(value["weight"] / value["bias"] - 20) < 1e-3)
        True

    **Reference**: Epperly, Tropp and Webber (2024), section 6.1,
    [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323).

    **See also**: `trace`, `gauss_newton`, `empirical_fisher`.
    """
    call = begin("leaf_traces", operator, key, num_matvecs)
    if groups is not None:
        cure = "Pass lambda path: path[0].key, the first key of a dict."
        check_callable("leaf_traces", "groups", groups, "of a path", cure)
    call = call.reading(by_leaf(call.operator, groups))
    if (exact := exact_if_cheap(call)) is not None:
        return exact
    if is_semidefinite(call.operator) and num_matvecs >= 3:
        return nystrom_or_hutchinson(call)
    return xdiag_or_hutchinson(call) if num_matvecs >= 6 else estimate_by_forms(call)


def exact_if_cheap(call: Call) -> Estimate | None:
    """Answer exactly if that is cheap, and return None if it is not.

    It is cheap if the structure of the operator gives its diagonal, if n is small, or if
    the budget reaches n. In the last two cases the answer takes n matvecs.
    """
    operator, known = call.operator, known_diagonal(call.operator)
    if known is not None:
        diagonal, spent = known
        value = call.reduce.fn(diagonal.real if is_hermitian(operator) else diagonal)
        return exact_estimate(call.reduce.shaped(value), spent)
    return call.exact() if operator.in_size() <= max(call.num_matvecs, SMALL) else None
