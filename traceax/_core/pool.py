"""Estimates of one quantity, made one.

Weights are fixed before anything is seen, the shares of the applications spent. Inverse
variances would be better weights, were they known; but value and standard error of one run
are correlated (quadratic forms are skewed), and the mean would be biased.

    value = sum w_j x_j,        within^2 = sum w_j^2 se_j^2,        w_j = m_j / sum m

`within` keeps what is conservative in the parts. The spread between J runs is a second
opinion, with J - 1 degrees of freedom,

    between^2 = sum m_j (x_j - value)^2 / ((J - 1) sum m),

and counts where it is larger than chance allows: where P(F > between^2/within^2) is below
one in twenty. Degrees of freedom of `within` by Welch and Satterthwaite, (sum v)^2 / sum
(v_j^2/nu_j) with v_j = w_j^2 se_j^2.

Reference: Welch (1947), The generalization of Student's problem when several different
population variances are involved, Biometrika 34.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import betainc
from jaxtyping import Array, Bool, Float, Inexact, Int

from traceax._core.estimate import Estimate, student_quantile
from traceax._core.estimate_checks import check_batch, check_parts
from traceax._core.rule import refusing

CHANCE = 0.05


def pool(estimates: Sequence[Estimate] | Estimate) -> Estimate:
    """One estimate of several of the same quantity, made with independent keys.

        value = sum w_j value_j,    w_j = num_matvecs_j / sum num_matvecs

    As if they had been one run: of many machines, each with a key of its own, as
    `jax.random.fold_in(key, machine)` makes them, and their files; of a batch of runs; of
    what was stopped and what was resumed. Unbiased where the parts are.

    **Arguments**

    - `estimates`: estimates of one quantity whose keys are independent, by any of the
      estimators, with any budgets: a sequence, or one `Estimate` of which every leaf has a
      leading axis of runs, as `jax.vmap` and `jax.lax.map` return it. (Pooling runs with
      the *same* key claims an accuracy that is not there, and nothing can tell.)

    **Returns** an `Estimate` like the parts. `standard_error` is theirs, added in squares;
    where runs differ by more than chance allows, that of their spread, widened by Student's
    law for so few. Runs that could not tell their error, of one probe each, have that of
    the spread. If parts are exact, so is the pool. `num_matvecs` is the sum.

    **Raises** `TypeError` if `estimates` is no Estimate and no sequence of them;
    `ValueError` if there are none, if they differ in structure, shapes or dtypes, or if a
    single one is no batch.

    **Derivatives**: those of the weighted mean.

    **Cost**: no applications.

    **Example**

    ```python
    >>> import jax, lineax as lx, traceax as tx
    >>> matrix = jax.random.normal(jax.random.key(0), (200, 200))
    >>> operator = lx.MatrixLinearOperator(matrix @ matrix.T)
    >>> keys = [jax.random.fold_in(jax.random.key(1), machine) for machine in range(4)]
    >>> parts = [tx.hutchinson_trace(operator, key, 50) for key in keys]
    >>> whole = tx.pool(parts)
    >>> print(whole.num_matvecs, bool(whole.standard_error < parts[0].standard_error))
    200 True

    ```

    **Reference**: Welch (1947), The generalization of Student's problem when several
    different population variances are involved, Biometrika 34(1-2).
    """
    batch = _as_batch(estimates)
    runs = batch.counts.shape[0]
    shares = batch.counts / jnp.maximum(jnp.sum(batch.counts), 1)
    pooled = [
        _pooled(value, error, shares, batch.degrees)
        for value, error in zip(batch.values, batch.errors, strict=True)
    ]
    freedom = jnp.min(jnp.stack([jnp.min(entries.degrees) for entries in pooled]))
    errors = [refusing(entries.error(freedom, runs), entries.value) for entries in pooled]
    return Estimate(
        value=jax.tree.unflatten(batch.structure, [entries.value for entries in pooled]),
        standard_error=jax.tree.unflatten(batch.structure, errors),
        num_matvecs=batch.spent,
        degrees_of_freedom=freedom,
    )


class _Batch(NamedTuple):
    """Leaves with a leading axis of runs."""

    structure: Any
    values: list[Inexact[Array, "runs ..."]]
    errors: list[Float[Array, "runs ..."]]
    counts: Float[Array, " runs"]
    degrees: Float[Array, " runs"]
    spent: int | Int[Array, ""]


def _as_batch(estimates: Sequence[Estimate] | Estimate) -> _Batch:
    spent = None
    if isinstance(estimates, Estimate):
        check_batch("pool", estimates)
        whole = estimates
    else:
        check_parts("pool", estimates)
        parts = [Estimate(e.value, e.standard_error, 0, 0.0) for e in estimates]
        whole = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
        counts = [e.num_matvecs for e in estimates]
        degrees = jnp.stack([jnp.asarray(e.degrees_of_freedom, float) for e in estimates])
        known = all(isinstance(count, int) for count in counts)
        spent = sum(counts) if known else jnp.sum(jnp.stack(list(map(jnp.asarray, counts))))
        whole = Estimate(whole.value, whole.standard_error, jnp.asarray(counts), degrees)
    values, structure = jax.tree.flatten(whole.value)
    errors = jax.lax.stop_gradient(jax.tree.leaves(whole.standard_error))
    runs = values[0].shape[0]
    counts = jnp.broadcast_to(jnp.asarray(whole.num_matvecs), (runs,))
    degrees = jnp.broadcast_to(jnp.asarray(whole.degrees_of_freedom, float), (runs,))
    spent = jnp.sum(counts) if spent is None else spent
    return _Batch(structure, values, errors, counts.astype(float), degrees, spent)


class _Pooled(NamedTuple):
    """Entry by entry, in units of `scale`."""

    value: Inexact[Array, ...]
    within: Float[Array, ...]
    between: Float[Array, ...]
    degrees: Float[Array, ...]
    scale: Float[Array, ...]
    exact: Bool[Array, ...]

    def error(self, freedom: Float[Array, ""], runs: int) -> Float[Array, ...]:
        """`freedom` is what the interval will be made with."""
        if runs == 1:
            return jnp.where(self.exact, 0, self.within * self.scale)
        unknown = jnp.isinf(self.within)
        few = jnp.where(unknown, independent_degrees(runs), runs - 1.0)
        wider = student_quantile(0.95, few) / student_quantile(0.95, freedom)
        odd = self._by_chance(runs) < CHANCE
        chosen = jnp.where(unknown | odd, self.between * wider, self.within)
        return jnp.where(self.exact, 0, jnp.maximum(chosen, self._least()) * self.scale)

    def _least(self) -> Float[Array, ...]:
        """Runs that agree by chance do not take from what they know."""
        return jnp.where(jnp.isinf(self.within), 0, self.within)

    def _by_chance(self, runs: int) -> Float[Array, ...]:
        """How probable a spread as large as this one is: P(F > between^2/within^2)."""
        ratio = (self.between / self.within) ** 2
        share = self.degrees / (self.degrees + (runs - 1) * ratio)
        return betainc(self.degrees / 2, (runs - 1) / 2, share)


def _pooled(
    values: Inexact[Array, "runs ..."],
    errors: Float[Array, "runs ..."],
    shares: Float[Array, " runs"],
    degrees: Float[Array, " runs"],
) -> _Pooled:
    axes = (-1,) + (1,) * (values.ndim - 1)
    share, degree = (x.astype(errors.dtype).reshape(axes) for x in (shares, degrees))
    exact = (errors == 0).astype(errors.dtype)
    number = jnp.sum(exact, axis=0)
    alone = exact / jnp.maximum(number, 1)
    weights = jnp.where(number > 0, alone, share).astype(values.dtype)
    value = jnp.sum(weights * values, axis=0)
    deviations = jnp.abs(jax.lax.stop_gradient(values - value))
    sizes = jnp.maximum(jnp.where(jnp.isinf(errors), 0, errors), deviations)
    scale = jnp.maximum(jnp.max(sizes, axis=0), jnp.finfo(errors.dtype).tiny)
    parts = (share * (errors / scale)) ** 2
    within = jnp.sum(parts, axis=0)
    runs = values.shape[0]
    between = jnp.sum(share * (deviations / scale) ** 2, axis=0) / max(runs - 1, 1)
    welch = within**2 / jnp.sum(parts**2 / degree, axis=0)
    known = jnp.isfinite(welch) & (number == 0)
    most = jnp.where(number > 0, 1e4, independent_degrees(runs))
    freedom = jnp.where(known, jnp.minimum(welch, 1e4), most)
    roots = jnp.sqrt(within), jnp.sqrt(between)
    return _Pooled(value, *roots, freedom, scale, number > 0)


def independent_degrees(runs: int) -> float:
    """Of runs of one probe each, whose forms are skewed (see `_linalg.jackknife`)."""
    return max(runs - 1, 1) / 3
