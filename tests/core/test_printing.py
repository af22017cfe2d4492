"""How estimates print."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import slow


def estimate(value: Any, error: Any, num_matvecs: Any = 50) -> tx.Estimate:
    value, error = jax.tree.map(np.asarray, (value, error))
    return tx.Estimate(value, error, num_matvecs, 9.0)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (96.612, 3.14, "96.6 ± 3.1"),
        (96.612, 31.4, "97 ± 31"),
        (-0.01234, 0.00056, "-0.01234 ± 0.00056"),
        (96.612, 0.0, "96.612"),
        (96.612, np.inf, "96.612 ± inf"),
        (np.nan, np.nan, "nan"),
        (np.nan, 0.0, "nan"),
        (complex(np.nan, 1), 0.5, "nan"),
        (1.2348e30, 6.7e28, "(1.235 ± 0.067)e+30"),
        (-12345678.0, 91000.0, "(-1.2346 ± 0.0091)e+07"),
        (0.0, 2e-12, "(0.0 ± 2.0)e-12"),
        (96.5999999999123, 3.1e-12, "96.59999999991 ± 3.1e-12"),
        (52.999999999999993, 4.7e-14, "53 ± 4.7e-14"),
        (3 - 1j + 1e-14, 2e-14, "(3-1j) ± 2.0e-14"),
        (1.0000004, 2e-7, "1.00000040 ± 2.0e-07"),
        (3.21 + 1.12j, 0.43, "(3.21+1.12j) ± 0.43"),
        (np.float32(2e38), np.float32(1e37), "(2.00 ± 0.10)e+38"),
    ],
)
def test_numbers_show_two_digits_of_their_error(value: Any, error: Any, words: str) -> None:
    assert str(estimate(value, error)) == f"{words} (50 matvecs)"
    assert repr([estimate(value, error)]) == f"[<{words} (50 matvecs)>]"
    assert f"{estimate(value, error)}" == f"{words} (50 matvecs)"


def test_the_number_of_matvecs() -> None:
    assert str(estimate(2.0, 1.0, 1)).endswith("(1 matvec)")
    assert str(estimate(2.0, 1.0, np.array([4, 9]))).endswith("(13 matvecs)")
    assert str(estimate(2.0, 1.0, jnp.array(7))).endswith("(7 matvecs)")


def test_formats_are_for_both_numbers() -> None:
    assert f"{estimate(96.612, 3.14159):.3f}" == "96.612 ± 3.142"
    assert f"{estimate(96.612, 3.14159):+.1e}" == "+9.7e+01 ± +3.1e+00"
    assert f"{estimate(96.612, 0.0):.1f}" == "96.6"
    assert f"{estimate(np.nan, 0.0):.1f}" == f"{estimate(np.nan, 1.0):.1f}" == "nan"
    assert f"{estimate(1 + 2j, 0.5):.1f}" == "1.0+2.0j ± 0.5"
    with pytest.raises(TypeError, match=r"spec=.*one number.*shape \(3,\).*Format entries"):
        f"{estimate(np.ones(3), np.ones(3)):.3f}"


def test_up_to_ten_numbers_are_shown() -> None:
    values, errors = np.array([[1.0, -2.0], [4.0, 0.0]]), np.array([[0.1, 0.1], [0.0, 3.0]])
    words = "[1.00 ± 0.10, -2.00 ± 0.10, 4.0, 0.0 ± 3.0]"
    assert str(estimate(values, errors)) == f"{words} (50 matvecs)"
    tree = estimate({"w": values, "b": np.array(3.0)}, {"w": errors, "b": np.array(0.5)})
    assert str(tree).splitlines() == ["b: 3.00 ± 0.50", f"w: {words}", "(50 matvecs)"]


@pytest.mark.parametrize("scale", [1.0, 1e-250, 1e250])
def test_more_numbers_show_their_relative_error(scale: float) -> None:
    values = scale * np.array([[3.0] * 8, [-4.0] * 8])
    errors = scale * np.full((2, 8), 0.1)
    shown = str(estimate(values, errors))
    assert shown == "(2, 8) ± 2.8 % in norm (50 matvecs)"
    assert str(estimate(values, 0 * errors)) == "(2, 8) exact (50 matvecs)"
    unknown = estimate(values + np.nan, 0 * errors)
    assert str(unknown) == "(2, 8), 16 of 16 nan (50 matvecs)"
    assert str(estimate(values, np.inf + errors)) == "(2, 8) ± inf % in norm (50 matvecs)"


def test_traced_and_abstract_estimates_print_their_fields() -> None:
    seen = []

    def look(value: Any) -> Any:
        inside = tx.Estimate(value, value, 3)
        seen.extend([str(inside), repr(inside)])
        with pytest.raises(TypeError, match="whose value is there"):
            f"{inside:.3f}"
        return inside

    shaped = jax.eval_shape(look, 1.0)
    assert seen[0] == seen[1]
    assert seen[0].startswith("Estimate(value=")
    assert str(shaped).startswith("Estimate(")


@pytest.mark.parametrize("num_matvecs", [slow(60), 300])
def test_nan_says_why_and_where_the_way_out_is(num_matvecs: int) -> None:
    key = jax.random.key(0)
    indefinite = tx.as_operator(lambda v: jnp.linspace(-1, 2, 300) * v, 300)
    words = str(tx.logdet(indefinite, key, num_matvecs))
    assert "±" not in words
    assert words.startswith("nan (")
    assert "is not positive definite" in words
    assert words.endswith("see 'What NaN means' in the guide's Conventions)")
    words = str(tx.function_trace(indefinite, jnp.log, key, num_matvecs))
    assert "has eigenvalues at which fn is not defined" in words
    broken = tx.as_operator(lambda v: jnp.nan * v, 300)
    words = str(tx.diagonal(broken, key, num_matvecs))
    assert words.startswith("(300,), 300 of 300 nan (")
    assert "returns nan" in words


@pytest.mark.parametrize("num_matvecs", [1, 4, 8])
def test_the_error_of_nan_is_nan(num_matvecs: int) -> None:
    """Of one probe, of several, and of all unit vectors."""
    broken = tx.as_operator(lambda v: jnp.nan * v, 8)
    estimate = tx.hutchinson_trace(broken, jax.random.key(0), num_matvecs)
    assert jnp.isnan(estimate.value)
    assert jnp.isnan(estimate.standard_error)


def test_a_likelihood_shows_its_numbers_in_both_forms() -> None:
    both = tx.InvQuadLogdet(estimate(2.5, 0.0), estimate(2.773, 0.1), jnp.ones(2))
    assert str(both) == "inv_quad: 2.5 (50 matvecs)\nlogdet: 2.77 ± 0.10 (50 matvecs)"
    assert repr([both]) == (
        "[<inv_quad: <2.5 (50 matvecs)>, logdet: <2.77 ± 0.10 (50 matvecs)>>]"
    )
