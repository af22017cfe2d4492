"""Error bars of quadrature by hand, and regressions that leave one out."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import close
from tests.matrices import numbers
from traceax._linalg import jackknife

INF = np.inf
# Gauss's and Radau's rules of the full run and of a shorter one, the share of Radau's, the
# level of rounding; and the error.
BRACKETS: list[tuple[list[list[float]], float, float, float]] = [
    ([[0, 1]], 0.5, 0, 0.5),
    ([[0, 1], [0.3, 2.3]], 0.5, 0, 0.07),
    ([[0, 1], [0.3, 2.3]], 0.002, 0, 20 * 0.002 * 0.998),
    ([[0, 1], [0.3, 20.3]], 0.01, 0, 0.8 * 0.01 * 0.99),
    ([[0, 1], [0.3, 1.55]], 0.5, 0, 0.8**4 / 2),
    ([[0, 1], [0.3, 0.8]], 0.5, 0, 0.99**4 / 2),
    ([[0, 1], [0.3, 0.8]], 0.5, 0.02, 0.99**4 / 2),
    ([[0, 1], [0.3, 0.8]], 0.5, 0.04, 0.07),
    ([[0, 1], [0.3, 1.55]], 1, 0, 0.3 * 4),
    ([[0, 1], [0.3, 2.3]], 1, 0, 0.3),
    ([[0, INF], [0.3, INF]], 1, 0, 0.3 * 8),
    # With rules of one step less, of which Gauss's goes back by 0.3, or lies between.
    ([[3, 4], [1.3, 3.3], [1, 3.5]], 0.5, 0, 0.3),
    ([[3, 4], [1.3, 3.3], [2, 3.5]], 0.5, 0, 0.07),
    ([[3, 4], [1.3, 3.3], [1, 3.5]], 0.5, 0.04, 0.07),
]


@pytest.mark.parametrize(("totals", "share", "rounding", "error"), BRACKETS)
def test_errors_of_brackets(
    totals: Any, share: float, rounding: float, error: float
) -> None:
    how: Any = {"rounding": jnp.asarray(rounding, float)}
    got = jackknife.bracket_error(
        jnp.asarray(totals, float), jnp.asarray(share, float), **how
    )
    close(got, error, 1e-12)


ROOT = 0.8**0.5
# Results of all steps and of fewer, the level of rounding; and the error.
CHANGES: list[tuple[list[complex], float, float]] = [
    ([0, 1, 5], 0, 1),
    ([0, 0.81, 1.81], 0, 0.81 * 0.9 / 0.1),
    ([0, 1, 1.81], 0, 0.9 / 0.1),
    ([0, 1, 2], 0, 0.98**0.5 / (1 - 0.98**0.5)),
    ([0, 1, 0], 0, ROOT / (1 - ROOT)),
    ([0, 1j, 2j], 0, 0.98**0.5 / (1 - 0.98**0.5)),
    ([0, 1, 2], 0.09, 0.98**0.5 / (1 - 0.98**0.5)),
    ([0, 1, 2], 0.11, ROOT / (1 - ROOT)),
    ([0, 1], 0, 1),
    ([0, 1, 5, 7], 0, 7),
]


@pytest.mark.parametrize(("totals", "rounding", "error"), CHANGES)
def test_errors_of_changes(totals: Any, rounding: float, error: float) -> None:
    dtype = complex if 1j in totals else float
    how: Any = {"unresolved": True, "rounding": rounding}
    got = jackknife.quadrature_error(jnp.asarray(totals, dtype), **how)
    close(got, error, 1e-12)
    one = jackknife.quadrature_error(jnp.zeros(1), unresolved=True)
    assert (one, jackknife.quadrature_error(jnp.zeros(1), unresolved=False)) == (INF, 0)


@pytest.mark.parametrize("dtype", [float, complex])
def test_regressions_without_one(dtype: Any) -> None:
    """They are zero if the others are all alike, or too few."""
    x, y = numbers((2, 7), dtype)
    x = x - x.mean()

    def by_loop(i: int) -> Any:
        a, b = np.delete(x, i), np.delete(y, i)
        return np.vdot(a - a.mean(), b - b.mean()) / np.linalg.norm(a - a.mean()) ** 2

    def run(x: Any, floor: float) -> Any:
        given = jnp.asarray(x), jnp.asarray(y[: len(x)])
        return jackknife.slopes_of_others(*given, floor=jnp.asarray(floor, float))

    close(run(x, 0.0), np.array([by_loop(i) for i in range(7)]), 1e-11)
    assert jnp.all(run(x, 10 * float(np.linalg.norm(x))) == 0)
    assert jnp.all(run(x[:3] - x[:3].mean(), 0.0) == 0)


def test_degrees_of_freedom() -> None:
    of = jackknife
    assert [of.fourth_order_degrees_of_freedom(k) for k in (4, 100)] == [1, 5]
    assert [of.shared_degrees_of_freedom(k) for k in (2, 7)] == [1, 4]
    assert of.independent_degrees_of_freedom(7) == 2
