"""Entries on a sparse pattern, by the coloured products that give the diagonal.

With s the signs of the probes and P_ac the entry a of A times the probe of colour c,
P_bc(a) conj(s_a) estimates A_ba for every b (`probing`): its own disturbance, that of the
colour of a as seen from b, is independent of the sign of a. For a Hermitian A there are two
such estimates, A_ba and the conjugate of A_ab, and their mean is taken.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PRNGKeyArray

from traceax._core.checks import check_request, invalid
from traceax._core.estimate import Estimate
from traceax._core.operator import (
    LinearMap,
    Operator,
    in_rows,
    size,
    unit_roundoff,
    working_dtype,
)
from traceax._core.rule import Outcome, estimate
from traceax._core.sparse import Pattern
from traceax._estimators.readouts import Batches, exactly
from traceax._linalg.columns import Moments, moments, times
from traceax._linalg.jackknife import error_of_sum
from traceax._probes.colouring import places
from traceax._probes.draw import coloured, for_pattern
from traceax._probes.probing import (
    DEGREES,
    Neighbourhood,
    combined_error,
    neighbour_residuals,
    neighbourhood_of,
)
from traceax._probes.samplers import rademacher
from traceax._probes.stream import SamplingDesign, design_and_draw, unit_vectors


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
    space, n = operator.in_structure(), size(operator)
    subject = Entries(LinearMap(operator), places(name, pattern))
    if not subject.pattern.rows.size:
        must, cure = "have entries", "Store what may be zero, too: stored zeros count."
        raise invalid(ValueError, name, "pattern", must, "none", cure)
    structure = jax.ShapeDtypeStruct((subject.pattern.rows.size,), working_dtype(operator))
    if num_matvecs >= n:
        one = jnp.ones((), jnp.finfo(structure.dtype).dtype)
        every = Batches(unit_vectors(n, structure.dtype, n), one, read)
        return exactly(subject, every, n, structure)
    design, probes = design_and_draw(name, operator, key, num_matvecs, sampler)
    near = neighbourhood_of(sampler, space)
    degrees = design.num_samples - 1 + (0 if near is None else DEGREES)
    algorithm = partial(_selected, design=design)
    how = coloured(name, sampler), design.num_probes, max(degrees, 1.0), structure
    return estimate(algorithm, subject, (probes, near), *how)


class Entries(eqx.Module):
    """A subject of the rule, of which `each` reads (A z)_a conj(z)_b for every probe."""

    linear_map: LinearMap
    pattern: Pattern = eqx.field(static=True)

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """In the order of the rows of a block."""
        space = self.linear_map.operator.in_structure()
        place = np.argsort(in_rows(np.arange(self.pattern.shape[0]), space))
        return place[self.pattern.rows], place[self.pattern.columns]

    def each(
        self, z: Inexact[Array, "n k"], products: Inexact[Array, "n k"]
    ) -> Inexact[Array, "entries k"]:
        a, b = self.places()
        entries = products[a] * z[b].conj()
        if not self.linear_map.is_hermitian:
            return entries
        return (entries + products[b].conj() * z[a]) / 2


def read(subject: Entries, block: Inexact[Array, "n k"]) -> Inexact[Array, " entries"]:
    return jnp.sum(subject.each(block, subject.linear_map(block)), axis=1)


def _selected(
    subject: Entries, drawn: tuple[Any, Neighbourhood | None], *, design: SamplingDesign
) -> Outcome:
    """The probes of one repeat have modulus 1 in every dimension, together."""
    (probes, near), linear_map = drawn, subject.linear_map
    eps = unit_roundoff(linear_map.operator)
    repeats, (a, b) = design.num_samples, subject.places()

    def sums_of(z: Inexact[Array, "n k"]) -> tuple[Moments, Any]:
        products = linear_map(z)
        samples = design.totals(subject.each(z, products))
        weights = jnp.full(samples.shape, design.group, samples.real.dtype)
        residuals = None if near is None else neighbour_residuals(z, products, near)
        return moments(samples, weights), residuals

    total, residuals = probes.reduce(sums_of, _merged)
    unit = total.scale / total.weight
    error = unit * design.correction * error_of_sum(jnp.sqrt(total.squares), repeats)
    if residuals is not None and near is not None:
        indicated = residuals.error(near, repeats, eps)
        one, other = indicated[a], indicated[b]
        halved = linear_map.is_hermitian & (a != b)
        indicated = jnp.hypot(one, other) / jnp.where(halved, 2, 2**0.5)
        error = combined_error(error, indicated.astype(error.dtype), repeats)
    error = jnp.hypot(error, unit * 4 * eps * total.size)
    readout = Batches(probes, total.weight, read)
    return Outcome(times(total.scale, total.value()), error, readout)


def _merged(one: Any, other: Any) -> Any:
    pairs = zip(one, other, strict=True)
    return tuple(None if a is None else a.merged(b) for a, b in pairs)
