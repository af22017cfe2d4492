"""Several estimates of one quantity, made one. Weights w_j, the shares of the applications
spent, are fixed before anything is seen. The variance is the larger of sum w_j^2 se_j^2 and
sum w_j (x_j - mean)^2 / (J - 1)."""

from __future__ import annotations

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._core.estimate import Estimate
from traceax._core.rule import refusing


def pool(estimates: Sequence[Estimate] | Estimate) -> Estimate:
    """Combine several estimates of the same quantity, made with independent keys, into one.

        value = sum_j m_j value_j / sum_j m_j,    m_j the applications spent on estimate j

    Unbiased if the estimates are.

    **Arguments**

    - `estimates`: a sequence, or one `Estimate` of which every leaf has a leading axis of
      runs, as from `jax.vmap`. Two estimates with the *same* key cannot be detected.

    **Returns** an `Estimate` like the parts. `standard_error` comes from theirs, added in
    squares, or from their spread, if this is larger or if each has one probe only.
    `num_matvecs` is the sum. **Raises** `TypeError` if `estimates` is no Estimate and no
    sequence of them; `ValueError` if there are none, they differ in structure, or a single
    one is no batch.

    **Derivatives**: those of the weighted mean. **Cost**: no applications.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> matrix = jax.random.normal(jax.random.key(0), (200, 200))
        >>> operator = lx.MatrixLinearOperator(matrix)
        >>> keys = jax.random.split(jax.random.key(1), 4)
        >>> estimates = [tx.hutchinson_trace(operator, key, 50) for key in keys]
        >>> print(tx.pool(estimates).num_matvecs)
        200

    **Reference**: Welch (1947), The generalization of Student's problem, Biometrika 34.
    """
    if isinstance(estimates, Estimate):
        _check_batch("pool", estimates)
        whole, parts = estimates, []
    else:
        _check_parts("pool", estimates)
        names = ("value", "standard_error", "num_matvecs", "degrees_of_freedom")
        parts = [Estimate(*(getattr(e, name) for name in names)) for e in estimates]
        whole = jax.tree.map(lambda *x: jnp.stack(list(map(jnp.asarray, x))), *parts)
    values, structure = jax.tree.flatten(whole.value)
    errors = jax.lax.stop_gradient(jax.tree.leaves(whole.standard_error))
    runs = values[0].shape[:1]
    counts = jnp.broadcast_to(jnp.asarray(whole.num_matvecs), runs)
    degrees = jnp.broadcast_to(jnp.asarray(whole.degrees_of_freedom), runs)
    shares = jnp.where(jnp.any(counts), counts, 1)
    shares = shares / jnp.sum(shares)
    pooled = [_pooled(*leaf, shares, degrees) for leaf in zip(values, errors, strict=True)]
    return Estimate(
        jax.tree.unflatten(structure, [value for value, _, _ in pooled]),
        jax.tree.unflatten(structure, [refusing(e, value) for value, e, _ in pooled]),
        sum(e.num_matvecs for e in parts) if parts else jnp.sum(counts),
        jnp.min(jnp.stack([freedom for _, _, freedom in pooled])),
    )


def _pooled(
    values: Inexact[Array, "runs ..."],
    errors: Float[Array, "runs ..."],
    shares: Float[Array, " runs"],
    degrees: Float[Array, " runs"],
) -> tuple[Inexact[Array, ...], Float[Array, ...], Float[Array, ""]]:
    """Value, standard error, and the least degrees of freedom of any entry."""
    runs, axes = values.shape[0], (-1,) + (1,) * (values.ndim - 1)
    share, degree = (x.astype(errors.dtype).reshape(axes) for x in (shares, degrees))
    value = jnp.sum(share.astype(values.dtype) * values, axis=0)
    deviations = jnp.abs(jax.lax.stop_gradient(values - value))
    sizes = jnp.maximum(jnp.where(jnp.isinf(errors), 0, errors), deviations)
    scale = jnp.maximum(jnp.max(sizes, axis=0), jnp.finfo(errors.dtype).tiny)
    squares = (share * (errors / scale)) ** 2
    within = jnp.sum(squares, axis=0)
    between = jnp.sum(share * (deviations / scale) ** 2, axis=0) / max(runs - 1, 1)
    known = jnp.isfinite(within) | (runs == 1)
    error = scale * jnp.sqrt(jnp.maximum(jnp.where(known, within, 0), between))
    welch = within**2 / jnp.sum(squares**2 / degree, axis=0)
    # Runs of one probe each have skewed forms (see `_linalg.jackknife`).
    few = jnp.where(within == 0, 1e4, max(runs - 1, 1) / 3)
    freedom = jnp.where(jnp.isfinite(welch), jnp.minimum(welch, 1e4), few)
    return value, error, jnp.min(freedom)


def _check_parts(name: str, estimates: object) -> None:
    """A sequence of estimates of one quantity."""
    if not isinstance(estimates, Sequence):
        raise TypeError(
            f"traceax.{name}(estimates=...) must be a sequence of estimates, or a batch of "
            f"them, but got {type(estimates).__name__}. Pass a list, or what jax.vmap "
            "returned."
        )
    if not estimates:
        raise ValueError(
            f"traceax.{name}(estimates=...) must hold at least one estimate, but got none. "
            "Nothing can be told from nothing."
        )
    for place, part in enumerate(estimates):
        if not isinstance(part, Estimate):
            raise TypeError(
                f"traceax.{name}(estimates=...) must hold estimates, but got "
                f"{type(part).__name__} as number {place}. Keep what the estimators "
                "return, not its `value`."
            )
        if _described(part) != _described(estimates[0]):
            raise ValueError(
                f"traceax.{name}(estimates=...) must be of one quantity, but number "
                f"{place} has the value {_described(part)}, number 0 "
                f"{_described(estimates[0])}. Pool each quantity with its own."
            )


def _check_batch(name: str, estimates: Estimate) -> None:
    """One estimate, of which every leaf has a leading axis of runs."""
    leaves = jax.tree.leaves((estimates.value, estimates.standard_error))
    runs = {jnp.shape(leaf)[:1] for leaf in leaves}
    counts = jnp.shape(estimates.num_matvecs), jnp.shape(estimates.degrees_of_freedom)
    if len(runs) != 1 or runs == {()} or not set(counts) & runs or max(runs)[0] == 0:
        raise ValueError(
            f"traceax.{name}(estimates=...) must be a sequence of estimates, or one whose "
            "leaves, num_matvecs among them, have a leading axis of runs, but got "
            f"{_described(estimates)} with num_matvecs of shape {counts[0]}. Pass a list, "
            "or what jax.vmap over keys returned."
        )


def _described(part: Estimate) -> str:
    return eqx.tree_pformat(jax.tree.map(jnp.asarray, part.value))
