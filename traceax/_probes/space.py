"""The space that a sampler draws in: what it was asked for, checked."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from traceax._core.checks import check_count, check_key
from traceax._core.operator import Structure, common_dtype, dimension


def space(
    name: str, key: object, structure: Structure, num_probes: object
) -> tuple[int, jnp.dtype]:
    """Dimension and dtype of the columns that probes are cut from: one draw for all leaves,
    so that a probe does not depend on how the space is cut into leaves."""
    check_key(name, key)
    if check_count(name, "num_probes", num_probes) < 1:
        raise ValueError(
            f"traceax.{name}(num_probes=...) must be at least 1, but got {num_probes}. "
            "Pass as many as are to be drawn."
        )
    leaves = jax.tree.leaves(structure)
    kinds = [getattr(leaf, "dtype", None) for leaf in leaves]
    if not leaves or not all(k and jnp.issubdtype(k, jnp.inexact) for k in kinds):
        raise TypeError(
            f"traceax.{name}(structure=...) must be a pytree of jax.ShapeDtypeStruct of "
            "real or complex dtypes, because probes are drawn like it, but got "
            f"{structure!r}. Pass operator.in_structure(), or "
            "jax.ShapeDtypeStruct((n,), float)."
        )
    return dimension(structure), common_dtype(structure)
