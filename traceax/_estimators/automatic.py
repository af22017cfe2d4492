"""The automatic choices: `trace`, `diagonal`, `leaf_traces`.

They choose by structure, tags and budget, never by looking at the estimate.

The entries of a leaf have correlated errors, so the error of their sum is computed from the
samples of the diagonal's estimators, each summed first. For XDiag's samples the covariance
of pairs is enough (`jackknife.shared_error`); for a Nyström approximation's, if the decay
is fast, parts of many probes matter, and the jackknife is needed (`krylov_nystrom`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jaxtyping import PRNGKeyArray

from traceax._core.checks import check_callable, check_request
from traceax._core.estimate import Estimate, exact_estimate
from traceax._core.operator import (
    LinearMap,
    Operator,
    is_hermitian,
    is_negative,
    is_positive,
    known_diagonal,
)
from traceax._core.vectors import as_result
from traceax._estimators.deflated_colours import deflated_colours
from traceax._estimators.driver import SMALL, Method, estimate
from traceax._estimators.hutchinson import HUTCHINSON_DIAGONAL, HUTCHINSON_TRACE
from traceax._estimators.krylov_nystrom import FEWEST, KRYLOV_NYSTROM, XNYSTRACE
from traceax._estimators.readouts import DIAGONAL, LEAVES, TRACE, Target
from traceax._estimators.second_batch import (
    EITHER_DIAGONAL,
    EITHER_TRACE,
    MIXED_DIAGONAL,
    MIXED_LEAVES,
)
from traceax._estimators.xdiag import XDIAG, XNYSDIAG
from traceax._estimators.xtrace import XTRACE
from traceax._probes.draw import check_pattern, for_pattern
from traceax._probes.stream import SILENT


def trace(
    operator: Operator, key: PRNGKeyArray, num_matvecs: int = 100, *, pattern: Any = None
) -> Estimate:
    """Estimate the trace of any square operator by an automatic choice of estimator.

    The choice depends on structure, tags and budget:

    1. exact without products if the operator stores its diagonal (as matrices and their
       sums do), exact from one application if it is tagged diagonal;
    2. exact from n applications if n <= 64 or if `num_matvecs` reaches n;
    3. `hutchinson_trace` with `probing` if a `pattern` is given and `num_matvecs` colours
       are enough to keep three steps apart; from 32 colours on, products with 8 of them
       decide whether Hutch++ deflates low modes and fewer colours probe the rest;
    4. if it is tagged positive or negative semidefinite, from 3 matvecs on, `xnystrace`, to
       which from 8 on a quarter of the budget adds products A Q, as in `xtrace`: so it is
       right for decaying eigenvalues and for a few large ones over a flat rest;
    5. for all others, from 12 matvecs on, `xtrace` if singular values decay and
       `hutchinson_trace` if they do not; half of the budget is spent on this decision,
       which is random where the probes disagree;
    6. with fewer matvecs, `xtrace` from 6 on, else `hutchinson_trace`.

    Unbiased: what is chosen for a probe is computed from the other probes only.

    **Arguments** (the others are in the guide's conventions)

    - `num_matvecs`: the budget if n > 64, at least 1. Default 100.
    - `pattern`: a graph in which the entries of the operator decay with the distance: where
      the operator has entries or, if it is a function of a sparse matrix, where that has.
      Not traced, n x n, as in `colouring`. If entries hardly decay within the steps that
      colours keep apart, deflation helps, but for semidefinite operators sketches without a
      pattern may be better still. Only 3. uses it: `method` then names colours.

    **Cost**: that of the estimator chosen. A pattern is coloured at each call, or
    when the call is compiled; for many calls make the sampler once, by `probing`.

    **Example**

        >>> import jax, traceax as tx
        >>> operator = tx.as_operator(lambda v: 2 * v, 1000)
        >>> print(tx.trace(operator, jax.random.key(0)).value.round())
        2000.0

    **Reference**: Epperly, Tropp and Webber (2024), XTrace, doi:10.1137/23M1548323.
    """
    return _automatic("trace", FOR_TRACES, operator, key, num_matvecs, pattern)


def diagonal(
    operator: Operator, key: PRNGKeyArray, num_matvecs: int = 100, *, pattern: Any = None
) -> Estimate:
    """Estimate the diagonal of any square operator by an automatic choice of estimator.

    The choice is that of `trace`, as unbiased, with other estimators: exact where `trace`
    is; with a `pattern`, `hutchinson_diagonal` with `probing`, without deflation; else

    - for operators tagged positive or negative semidefinite, from 6 matvecs on, `xnysdiag`
      if eigenvalues decay and `hutchinson_diagonal` if they do not, from the same products;
    - for all others, from 12 matvecs on, `xdiag` if singular values decay and
      `hutchinson_diagonal` if they do not; half of the budget is spent on this decision;
    - with fewer, `xnysdiag` from 3 on, `xdiag` from 6 on, else `hutchinson_diagonal`.

    **Arguments** (the others are in the guide's conventions): `num_matvecs`, `pattern`: as
    in `trace`.

    **Cost**: that of the estimator chosen.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> points = jnp.linspace(0, 1, 200)
        >>> matrix = jnp.eye(200) + jnp.exp(-50 * (points[:, None] - points) ** 2)
        >>> precision = tx.as_operator(matrix, tags=lx.positive_semidefinite_tag)
        >>> estimate = tx.diagonal(lx.invert(precision, lx.Cholesky()), jax.random.key(0))
        >>> error = abs(estimate.value - jnp.diag(jnp.linalg.inv(matrix)))
        >>> bool(jnp.mean(error < 2 * estimate.standard_error) > 0.9)
        True

    **Reference**: Epperly, Tropp and Webber (2024), section 6.1, doi:10.1137/23M1548323.
    """
    return _automatic("diagonal", FOR_DIAGONALS, operator, key, num_matvecs, pattern)


def leaf_traces(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int = 100,
    *,
    groups: Callable[[tuple[Any, ...]], str] | None = None,
) -> Estimate:
    """Estimate the traces of the diagonal blocks of an operator, one for each leaf.

        value[leaf] = sum of diag A over the entries of the leaf

    The curvature of each layer of a network, say. One sketch serves all leaves, where it
    helps: that of `trace` for operators tagged semidefinite (signs in the place of the
    sphere), for others that of `diagonal`; else, and for small budgets, plain probes do.
    Unbiased. Exact where `trace` is, whose error bar is that of the sum over all leaves.

    **Arguments** (the others are in the guide's conventions): `num_matvecs`: as in `trace`.
    `groups`: for sums over several leaves, a function from the path of a leaf, a tuple of
    JAX's keys, to a name: of its layer, say. Errors of leaves are correlated, so the error
    of a sum is not known from theirs.

    **Returns** an `Estimate` with the operator's input structure, one number for each leaf;
    with `groups` of a dict, one for each name.

    **Derivatives**: by the rule of the diagonal; exact where the value is. **Cost**: that
    of `diagonal`; for semidefinite operators that of `trace`.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> layer = {"bias": jnp.ones(10), "weight": jnp.ones((10, 20)) / 4}
        >>> fn = lambda p, x: jnp.sin(p["weight"] @ x + p["bias"])
        >>> operator = tx.empirical_fisher(fn, layer, args=jnp.ones(20))
        >>> value = tx.leaf_traces(operator, jax.random.key(0), 40).value
        >>> bool(abs(value["weight"] / value["bias"] - 20) < 1e-3)
        True

    **Reference**: Epperly, Tropp and Webber (2024), section 6.1, doi:10.1137/23M1548323.
    """
    choices = FOR_LEAVES
    if groups is not None:
        operator = check_request("leaf_traces", operator, key, num_matvecs)
        cure = "Pass lambda path: path[0].key, say, the first key of a dict."
        check_callable("leaf_traces", "groups", groups, "of a path", cure)
        paths, _ = jax.tree.flatten_with_path(operator.in_structure())
        names = tuple(str(groups(path)) for path, _ in paths)
        choices = choices._replace(target=replace(LEAVES, groups=names))
    return _automatic("leaf_traces", choices, operator, key, num_matvecs, None)


class Choices(NamedTuple):
    """Methods for operators that are semidefinite and for others, each with the fewest
    matvecs from which it is chosen, the best one first; and one for smaller budgets."""

    target: Target
    semidefinite: tuple[tuple[int, Method], ...]
    general: tuple[tuple[int, Method], ...]
    few: Method

    def method(self, operator: Operator, num_matvecs: int) -> Method:
        semidefinite = is_positive(operator) or is_negative(operator)
        methods = (self.semidefinite if semidefinite else ()) + self.general
        affordable = (method for least, method in methods if num_matvecs >= least)
        return next(affordable, self.few)._replace(target=self.target)


FOR_TRACES = Choices(
    TRACE,
    semidefinite=((FEWEST, KRYLOV_NYSTROM), (3, XNYSTRACE)),
    general=((12, EITHER_TRACE), (6, XTRACE)),
    few=HUTCHINSON_TRACE,
)
FOR_DIAGONALS = Choices(
    DIAGONAL,
    semidefinite=((6, MIXED_DIAGONAL), (3, XNYSDIAG)),
    general=((12, EITHER_DIAGONAL), (6, XDIAG)),
    few=HUTCHINSON_DIAGONAL,
)
FOR_LEAVES = Choices(
    LEAVES,
    semidefinite=((3, MIXED_LEAVES),),
    general=((12, EITHER_DIAGONAL), (6, XDIAG)),
    few=HUTCHINSON_TRACE,
)


def _automatic(
    name: str,
    choices: Choices,
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    pattern: Any,
) -> Estimate:
    operator = check_request(name, operator, key, num_matvecs)
    check_pattern(name, operator, pattern)
    known = known_diagonal(operator)
    if known is not None:
        return _known(choices.target, operator, *known)
    if operator.in_size() <= max(num_matvecs, SMALL):
        return choices.target.exact(operator, None, SILENT)
    method = choices.method(operator, num_matvecs)
    sampler = for_pattern(name, operator, num_matvecs, pattern)
    if sampler is not None:
        deflated = choices.target is TRACE and deflated_colours(
            name, operator, sampler, num_matvecs, pattern
        )
        method = deflated or choices.few
    return estimate(method, operator, key, num_matvecs, sampler=sampler, name=name)


def _known(target: Target, operator: Operator, diagonal: Any, spent: int) -> Estimate:
    """From a diagonal that structure gives, by `spent` applications."""
    diagonal = diagonal.real if is_hermitian(operator) else diagonal
    value, structure = target.of(diagonal, LinearMap(operator)), target.structure(operator)
    value = value if structure is None else as_result(value, structure)
    return exact_estimate(value, spent)
