"""Entries on a sparse pattern, by the coloured products that give the diagonal.

With s the signs of the probes and P_ac the entry a of A times the probe of colour c,
P_bc(a) conj(s_a) estimates A_ba for every b (`probing`): its own disturbance, that of the
colour of a as seen from b, is independent of the sign of a. For a Hermitian A there are two
such estimates, A_ba and the conjugate of A_ab, and their mean is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.checks import check_request, invalid
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator, working_dtype
from traceax._core.sparse import Pattern
from traceax._core.vectors import Structure, in_rows
from traceax._estimators.driver import estimate
from traceax._estimators.hutchinson import HUTCHINSON_DIAGONAL
from traceax._estimators.readouts import ByRow
from traceax._probes.colouring import places
from traceax._probes.draw import for_pattern
from traceax._probes.samplers import rademacher


def selected_entries(
    operator: Operator, pattern: Any, key: PRNGKeyArray, num_matvecs: int
) -> Estimate:
    """Estimate the entries of an operator where a sparse pattern has entries.

    Of the inverse of a precision matrix: covariances of neighbours. With the probes of
    `probing`,

        value_ab = mean over repeats of (A z_c)_a conj(z_c)_b,    c the colour of b

    and for Hermitian operators the mean of this and the conjugate of value_ba. Unbiased.
    Exact if A has no entries outside of the pattern and colours keep two steps apart. With
    fewer matvecs than that takes, independent signs are the probes, with a larger error.

    **Arguments** (the others are in the guide's conventions): `pattern`: n x n, as in
    `colouring`; the operator's entries should decay with the distance in its graph.
    `num_matvecs`: at least 1. More colours are more accurate than more repeats.

    **Returns** an `Estimate` of one array, in the order of the entries of the pattern
    (of `scipy.sparse.coo_array(pattern)`, or of the indices of a BCOO).

    **Derivatives**: exactly those of the value. **Cost**: `num_matvecs` applications in one
    batch; a block of k numbers for each entry of the pattern.

    **Example**

        >>> import jax, lineax as lx, numpy as np, traceax as tx
        >>> band = 3 * np.eye(300) + np.eye(300, k=1) + np.eye(300, k=-1)
        >>> precision = tx.as_operator(band, tags=lx.positive_semidefinite_tag)
        >>> inverse = lx.invert(precision, lx.CG(rtol=1e-6, atol=1e-6))
        >>> estimate = tx.selected_entries(inverse, band, jax.random.key(0), 24)
        >>> bool(np.allclose(estimate.value, np.linalg.inv(band)[band != 0], atol=1e-3))
        True

    **Reference**: Tang and Saad (2012), doi:10.1002/nla.779; Rue, Martino and Chopin
    (2009), doi:10.1111/j.1467-9868.2008.00700.x.
    """
    name = "selected_entries"
    operator = check_request(name, operator, key, num_matvecs)
    sampler = for_pattern(name, operator, num_matvecs, pattern, 2) or rademacher
    target = SelectedEntries(pattern=places(name, pattern))
    if not target.pattern.rows.size:
        must, cure = "have entries", "Store what may be zero, too: stored zeros count."
        raise invalid(ValueError, name, "pattern", must, "none", cure)
    method = HUTCHINSON_DIAGONAL._replace(name=name, target=target)
    return estimate(method, operator, key, num_matvecs, sampler)


class Entries(LinearMap):
    """Of a Hermitian operator only the diagonal is real."""

    @property
    def is_read_real(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class SelectedEntries(ByRow):
    """The probes of one repeat have modulus 1 in every dimension, together."""

    pattern: Pattern
    subject: Callable[[Operator], LinearMap] = Entries

    def structure(self, operator: Operator) -> Structure:
        return jax.ShapeDtypeStruct((self.pattern.rows.size,), working_dtype(operator))

    def __call__(self, linear_map: LinearMap, block: Inexact[Array, "n k"]) -> Array:
        return jnp.sum(self.ratio(block, linear_map(block), linear_map)[0], axis=1)

    def ratio(
        self, z: Inexact[Array, "n k"], products: Inexact[Array, "n k"], linear_map: Any
    ) -> tuple[Inexact[Array, "entries k"], Float[Array, "entries k"]]:
        a, b = self._places(linear_map)
        entries = products[a] * z[b].conj()
        if linear_map.is_hermitian:
            entries = (entries + products[b].conj() * z[a]) / 2
        return entries, jnp.ones(entries.shape, entries.real.dtype)

    def error_by(self, rows: Float[Array, " n"], linear_map: Any) -> Array:
        a, b = self._places(linear_map)
        halved = linear_map.is_hermitian & (a != b)
        return jnp.hypot(rows[a], rows[b]) / jnp.where(halved, 2, 2**0.5)

    def _places(self, linear_map: LinearMap) -> tuple[np.ndarray, np.ndarray]:
        """In the order of the rows of a block."""
        space, pattern = linear_map.operator.in_structure(), self.pattern
        place = np.argsort(in_rows(np.arange(pattern.shape[0]), space))
        return place[pattern.rows], place[pattern.columns]
