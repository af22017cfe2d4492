"""Entries on a sparse pattern, from the coloured matvecs that also give the diagonal.

Let s be the signs of the probes, c(a) the colour of a, and P_ac the entry a of A times the
probe of colour c. Then P_bc(a) conj(s_a) estimates A_ba for every b (`probing`). It is
disturbed by the other dimensions of the colour of a, as seen from b, and their signs are
independent of the sign of a. For a Hermitian A there is a second such estimate, the
conjugate of the estimate of A_ab, and the mean of both is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.checks import invalid
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator, working_dtype
from traceax._core.sparse import Pattern
from traceax._core.vectors import in_rows
from traceax._estimators.call import begin
from traceax._estimators.hutchinson import estimate_by_ratio
from traceax._estimators.readouts import Reduce, each
from traceax._linalg.columns import Block
from traceax._probes.draw import check_pattern, for_pattern
from traceax._probes.samplers import rademacher


def selected_entries(
    operator: Operator, pattern: Any, key: PRNGKeyArray, num_matvecs: int
) -> Estimate:
    """Estimate the entries of an operator at the places of the entries of a sparse pattern.

    For the inverse of a precision matrix, these are the covariances of neighbours. With the
    probes of `probing`,

        value_ab = mean over repeats of (A z_c)_a conj(z_c)_b,    c the colour of b.

    For Hermitian operators, the mean of this and the conjugate of value_ba is taken. The
    estimate is unbiased. It is exact if A has no entries outside the pattern and
    `num_matvecs` colours are enough for a `colouring` of power 2. If they are not, the
    probes are independent signs, and the error is larger.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `pattern`: the sparse pattern, n x n, as in `colouring`. The operator's entries should
      decay with the distance in its graph.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least 1. More colours are more accurate than more
      repeats.

    **Returns** an `Estimate` of one array, in the order of the entries of the pattern (of
    `scipy.sparse.coo_array(pattern)`, or of the indices of a BCOO without padding).

    **Derivatives**: they are the exact derivatives of the value.

    **Cost**: k = `num_matvecs` matvecs in one batch, and a block of k numbers for each
    entry of the pattern.

    **Example**

        >>> import jax, lineax as lx, numpy as np, traceax as tx
        >>> band = 3 * np.eye(300) + np.eye(300, k=1) + np.eye(300, k=-1)
        >>> precision = tx.as_operator(band, tags=lx.positive_semidefinite_tag)
        >>> inverse = lx.invert(precision, lx.CG(rtol=1e-6, atol=1e-6))
        >>> estimate = tx.selected_entries(inverse, band, jax.random.key(0), 24)
        >>> bool(np.allclose(estimate.value, np.linalg.inv(band)[band != 0], atol=1e-3))
        True

    **Reference**: Tang and Saad (2012),
    [doi:10.1002/nla.779](https://doi.org/10.1002/nla.779). Rue, Martino and Chopin (2009),
    [doi:10.1111/j.1467-9868.2008.00700.x](https://doi.org/10.1111/j.1467-9868.2008.00700.x).

    **See also**: `diagonal`, `probing`, `colouring`.
    """
    name = "selected_entries"
    call = begin(name, operator, key, num_matvecs)
    operator = call.operator
    known = check_pattern(name, operator, pattern)
    if known is None or not known.rows.size:
        must, cure = "have entries", "Store what may be zero, too: stored zeros count."
        raise invalid(ValueError, name, "pattern", must, "none", cure)
    sampler = for_pattern(known, num_matvecs, 2) or rademacher
    structure = jax.ShapeDtypeStruct((known.rows.size,), working_dtype(operator))
    call = call.reading(Reduce(each, structure, is_real=False)).using(sampler)
    entries = SelectedEntries(known)
    if call.is_exact:
        return call.exact_by(entries)
    return estimate_by_ratio(call, name, entries)


@dataclass(frozen=True)
class SelectedEntries:
    """The entries on a pattern.

    In every dimension, the probes of one repeat together have modulus 1. So the weights of
    the ratio are 1.
    """

    pattern: Pattern

    def __call__(self, linear_map: LinearMap, block: Block) -> Array:
        return jnp.sum(self.ratio(block, linear_map(block), linear_map)[0], axis=1)

    def ratio(self, z: Block, products: Block, linear_map: Any) -> tuple[Array, Array]:
        a, b = self._places(linear_map)
        entries: Inexact[Array, "entries k"] = products[a] * z[b].conj()
        if linear_map.is_hermitian:
            entries = (entries + products[b].conj() * z[a]) / 2
        return entries, jnp.ones(entries.shape, entries.real.dtype)

    def error_by(self, rows: Float[Array, " n"], linear_map: Any) -> Array:
        a, b = self._places(linear_map)
        halved = linear_map.is_hermitian & (a != b)
        return jnp.hypot(rows[a], rows[b]) / jnp.where(halved, 2, 2**0.5)

    def _places(self, linear_map: LinearMap) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows and columns of the entries, in the order of a block's rows."""
        space, pattern = linear_map.operator.in_structure(), self.pattern
        place = np.argsort(in_rows(np.arange(pattern.shape[0]), space))
        return place[pattern.rows], place[pattern.columns]
