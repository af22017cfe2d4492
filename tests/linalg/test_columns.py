"""Reductions and products of small arrays against plain ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import close
from tests.matrices import numbers
from traceax._linalg.columns import (
    Moments,
    adjoint_dot_columns,
    dot_columns,
    largest_modulus,
    largest_of_rows,
    summed,
)
from traceax._linalg.jackknife import sums_of_others


@pytest.mark.parametrize("dtype", [float, complex])
def test_reductions(dtype: Any) -> None:
    """Folded axes are whole, whether 32 divides them or not."""
    arrays = [jnp.asarray(numbers((3, n), dtype)) for n in (1, 32, 101, 1025)]

    @jax.jit
    def reduced(x: Any) -> Any:
        lost = largest_modulus(x.at[1, -1].set(jnp.nan))
        sums, largest = (
            (summed(x), summed(x.T, axis=0)),
            (largest_of_rows(x), largest_modulus(x)),
        )
        return sums, largest, lost

    for x, (sums, largest, lost) in zip(arrays, map(reduced, arrays), strict=True):
        close(sums, 2 * (np.sum(x, axis=1),), 1e-13)
        close(largest, (np.max(np.abs(x), axis=1), np.max(np.abs(x))), 1e-14)
        assert jnp.isnan(lost)


def test_products_with_few_columns() -> None:
    for count in (1, 2):
        matrix, block = numbers((40, 7), complex), numbers((40, count), complex, seed=1)
        got = adjoint_dot_columns(jnp.asarray(matrix), jnp.asarray(block))
        close(got, matrix.conj().T @ block, 1e-13)
        close(dot_columns(jnp.asarray(matrix), got), matrix @ np.asarray(got), 1e-13)


def test_sums_of_others_do_not_cancel() -> None:
    x = jnp.asarray([1e20, 1.0, 2.0, 3.0])
    close(sums_of_others(x)[0], 6.0, 0)


@pytest.mark.parametrize("dtype", [float, complex])
def test_moments_of_parts_make_those_of_the_whole(dtype: Any) -> None:
    """Also if the parts are divided by other scales."""
    p, q = numbers((4, 6), dtype), abs(numbers((4, 6), seed=1))

    def moments(part: slice, scale: float) -> Moments:
        x, weights = p[:, part] / scale, q[:, part]
        r = x - (x.sum(1) / weights.sum(1))[:, None] * weights
        sums = x, abs(x), r * weights, abs(r) ** 2, weights, weights**2
        return Moments(*(jnp.asarray(y.sum(1)) for y in sums), scale=jnp.asarray(scale))

    both = moments(slice(0, 2), 1.0).merged(moments(slice(2, 6), 2.0))
    for got, want in zip(
        *map(jax.tree.leaves, (both, moments(slice(0, 6), 2.0))), strict=True
    ):
        close(got, want, 1e-12, 1.0)
