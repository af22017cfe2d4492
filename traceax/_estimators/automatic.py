"""The automatic choices: `trace`, `diagonal`, `leaf_traces`.

They choose by structure, tags and budget, never by looking at the estimate.

A sum over a leaf has an error that is not to be had from those of its entries, which are
correlated. It is from the samples of the diagonal's estimators, each summed first. What
probes that are shared do to it: of XDiag's samples the allowance for pairs suffices
(`jackknife.shared_error`); of XNysDiag's, where decay is fast, parts of many probes matter,
as in `xnystrace`, and the jackknife is needed (`jackknife.xnysdiag_replicates`). Measured,
11 spectra, n = 300 in four leaves and in one, 10 to 100 matvecs, 200 keys: intervals of the
first held at least 90 % everywhere, of the second with the allowance for pairs 59 %.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import lineax as lx
from jaxtyping import PRNGKeyArray

from traceax._core.checks import check_request
from traceax._core.estimate import Estimate
from traceax._core.operator import (
    LinearMap,
    as_result,
    is_hermitian,
    is_negative,
    is_positive,
    known_diagonal,
    size,
)
from traceax._estimators.driver import SMALL, Method, estimate
from traceax._estimators.hutchinson import (
    HUTCHINSON_DIAGONAL,
    HUTCHINSON_LEAVES,
    HUTCHINSON_TRACE,
)
from traceax._estimators.readouts import DIAGONAL, LEAVES, TRACE, Target
from traceax._estimators.second_batch import EITHER_DIAGONAL, EITHER_TRACE
from traceax._estimators.shared_batch import MIXED_DIAGONAL
from traceax._estimators.xdiag import XDIAG
from traceax._estimators.xnysdiag import XNYSDIAG
from traceax._estimators.xnystrace import XNYSTRACE
from traceax._estimators.xtrace import XTRACE
from traceax._probes.draw import check_pattern, for_pattern
from traceax._probes.stream import SILENT


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
    return _automatic("trace", FOR_TRACES, operator, key, num_matvecs, pattern)


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
    return _automatic("diagonal", FOR_DIAGONALS, operator, key, num_matvecs, pattern)


def leaf_traces(
    operator: lx.AbstractLinearOperator, key: PRNGKeyArray, num_matvecs: int = 100
) -> Estimate:
    """The traces of the blocks of an operator that belong to each leaf of its space.

        value[leaf] = sum of diag A over the entries of the leaf

    How the curvature of a network, a Gauss-Newton matrix or a Fisher matrix is spread over
    its layers, say. One sketch serves all leaves: Nyström's of operators tagged
    semidefinite, XDiag's of others, plain probes for few matvecs; exact where structure
    gives it, or n is at most 64 or `num_matvecs`. Unbiased. For the sum of all use `trace`,
    whose error bar is that of the sum.

    **Arguments**

    - `operator`: any square lineax operator, real or complex, of arrays or pytrees; if it
      is neither Hermitian nor semidefinite, its transpose must exist.
    - `key`: a JAX random key.
    - `num_matvecs`: how many applications may be spent (beyond n = 64), a Python int of at
      least 1. Default 100.

    **Returns** an `Estimate` with the operator's input structure, one number a leaf (of at
    least 32 bits; real if the operator is known to be Hermitian). `standard_error` is each
    sum's own; `inf` for one probe; 0 where the value is exact.

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `num_matvecs` not a Python int; `ValueError` if `operator` is not square, mixes real and
    complex leaves, or has no dimension; if `key` is an array of keys; if `num_matvecs` is
    below 1.

    **Derivatives**: forward and reverse, to any order, unbiased, by the rule of the
    diagonal; exact where the value is.

    **Cost**: that of `diagonal`; for semidefinite operators 10 n k^2 flops more.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
    >>> layer = {"bias": jnp.ones(10), "weight": jnp.ones((10, 20)) / 4}
    >>> fn = lambda p, x: jax.numpy.sin(p["weight"] @ x + p["bias"])
    >>> operator = tx.empirical_fisher(fn, layer, jnp.ones(20))
    >>> estimate = tx.leaf_traces(operator, jax.random.key(0), 40)
    >>> ratio = estimate.value["weight"] / estimate.value["bias"]
    >>> bool(abs(ratio - 20) < 1e-3)
    True

    ```

    **Reference**: Epperly, Tropp and Webber (2024), XTrace: Making the most of every sample
    in stochastic trace estimation, SIAM Journal on Matrix Analysis and Applications 45(1),
    section 6.1, doi:10.1137/23M1548323, for the diagonal.
    """
    return _automatic("leaf_traces", FOR_LEAVES, operator, key, num_matvecs, None)


class Choices(NamedTuple):
    """Methods for operators that are semidefinite and for others, each with the fewest
    matvecs from which it is chosen, the best one first; and one for smaller budgets."""

    target: Target
    semidefinite: tuple[tuple[int, Method], ...]
    general: tuple[tuple[int, Method], ...]
    few: Method

    def method(self, operator: lx.AbstractLinearOperator, num_matvecs: int) -> Method:
        semidefinite = is_positive(operator) or is_negative(operator)
        methods = (self.semidefinite if semidefinite else ()) + self.general
        affordable = (method for least, method in methods if num_matvecs >= least)
        return next(affordable, self.few)


FOR_TRACES = Choices(
    TRACE,
    semidefinite=((3, XNYSTRACE),),
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
    semidefinite=((3, XNYSDIAG._replace(target=LEAVES)),),
    general=((6, XDIAG._replace(target=LEAVES)),),
    few=HUTCHINSON_LEAVES,
)


def _automatic(
    name: str,
    choices: Choices,
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int,
    pattern: Any,
) -> Estimate:
    operator = check_request(name, operator, key, num_matvecs)
    check_pattern(name, operator, pattern)
    known = known_diagonal(operator)
    if known is not None:
        return _known(choices.target, operator, *known)
    if size(operator) <= max(num_matvecs, SMALL):
        return choices.target.exact(operator, None, SILENT)
    method = choices.method(operator, num_matvecs)
    sampler = for_pattern(name, num_matvecs, pattern)
    method = method if sampler is None else choices.few
    return estimate(method, operator, key, num_matvecs, sampler=sampler, name=name)


def _known(
    target: Target, operator: lx.AbstractLinearOperator, diagonal: Any, spent: int
) -> Estimate:
    """From a diagonal that structure gives, by `spent` applications."""
    diagonal = diagonal.real if is_hermitian(operator) else diagonal
    value = target.of(diagonal, LinearMap(operator))
    zero, structure = jnp.zeros_like(value.real), target.structure(operator)
    if structure is not None:
        value, zero = as_result(value, structure), as_result(zero, structure)
    return Estimate(value, zero, spent)
