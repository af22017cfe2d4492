"""How estimates print, and the method that they name."""

import pickle
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax import export

import traceax as tx
from tests.calls import CALLS, MATRIX
from tests.helpers import cases, refused, slow
from tests.wrappers import PSD, function


def estimate(value: Any, error: Any, num_matvecs: Any = 50) -> tx.Estimate:
    value, error = jax.tree.map(np.asarray, (value, error))
    return tx.Estimate(value, error, num_matvecs, 9.0)


NAN, INF = np.nan, np.inf
SHOWN: list[tuple[Any, Any, str]] = [
    (96.612, 3.14, "96.6 ± 3.1"),
    (96.612, 31.4, "97 ± 31"),
    (-0.01234, 0.00056, "-0.01234 ± 0.00056"),
    (96.612, 0.0, "96.612"),
    (96.612, INF, "96.612 ± inf"),
    (NAN, NAN, "nan"),
    (NAN, 0.0, "nan"),
    (complex(NAN, 1), 0.5, "nan"),
    (1.2348e30, 6.7e28, "(1.235 ± 0.067)e+30"),
    (-12345678.0, 91000.0, "(-1.2346 ± 0.0091)e+07"),
    (0.0, 2e-12, "(0.0 ± 2.0)e-12"),
    (96.5999999999123, 3.1e-12, "96.59999999991 ± 3.1e-12"),
    (52.999999999999993, 4.7e-14, "53 ± 4.7e-14"),
    (3 - 1j + 1e-14, 2e-14, "(3-1j) ± 2.0e-14"),
    (1.0000004, 2e-7, "1.00000040 ± 2.0e-07"),
    (3.21 + 1.12j, 0.43, "(3.21+1.12j) ± 0.43"),
    (np.float32(2e38), np.float32(1e37), "(2.00 ± 0.10)e+38"),
]
FORMATS: list[tuple[Any, Any, str, str]] = [
    (96.612, 3.14159, ".3f", "96.612 ± 3.142"),
    (96.612, 3.14159, "+.1e", "+9.7e+01 ± +3.1e+00"),
    (96.612, 0.0, ".1f", "96.6"),
    (NAN, 0.0, ".1f", "nan"),
    (NAN, 1.0, ".1f", "nan"),
    (1 + 2j, 0.5, ".1f", "1.0+2.0j ± 0.5"),
]


def test_numbers_show_two_digits_of_their_error() -> None:
    for value, error, words in SHOWN:
        words, made = f"{words} (50 matvecs)", estimate(value, error)
        assert (str(made), f"{made}", repr([made])) == (words, words, f"[<{words}>]")
    for count, words in ((1, "1 matvec"), (np.array([4, 9]), "13 matvecs")):
        assert str(estimate(2.0, 1.0, count)).endswith(f"({words})")
    assert str(estimate(2.0, 1.0, jnp.array(7))).endswith("(7 matvecs)")


def test_formats_are_for_both_numbers() -> None:
    for value, error, spec, words in FORMATS:
        assert format(estimate(value, error), spec) == words
    words, several = r"spec=.*one number.*shape \(3,\).*Format entries", np.ones(3)
    refused(TypeError, words, format, estimate(several, several), ".3f")


def test_up_to_ten_numbers_are_shown() -> None:
    values, errors = np.array([[1.0, -2.0], [4.0, 0.0]]), np.array([[0.1, 0.1], [0.0, 3.0]])
    words = "[1.00 ± 0.10, -2.00 ± 0.10, 4.0, 0.0 ± 3.0]"
    assert str(estimate(values, errors)) == f"{words} (50 matvecs)"
    tree = estimate({"w": values, "b": np.array(3.0)}, {"w": errors, "b": np.array(0.5)})
    assert str(tree).splitlines() == ["b: 3.00 ± 0.50", f"w: {words}", "(50 matvecs)"]
    both = tx.InvQuadLogdet(estimate(2.5, 0.0), estimate(2.773, 0.1), jnp.ones(2))
    one, other = "2.5 (50 matvecs)", "2.77 ± 0.10 (50 matvecs)"
    assert str(both) == f"inv_quad: {one}\nlogdet: {other}"
    assert repr([both]) == f"[<inv_quad: <{one}>, logdet: <{other}>>]"


@pytest.mark.parametrize("scale", [1.0, 1e-250, 1e250])
def test_more_numbers_show_their_relative_error(scale: float) -> None:
    values = scale * np.array([[3.0] * 8, [-4.0] * 8])
    errors = scale * np.full((2, 8), 0.1)
    shapes = {
        "± 2.8 % in norm": estimate(values, errors),
        "exact": estimate(values, 0 * errors),
        "± inf % in norm": estimate(values, INF + errors),
    }
    for words, made in shapes.items():
        assert str(made) == f"(2, 8) {words} (50 matvecs)"
    unknown = estimate(values + NAN, 0 * errors)
    assert str(unknown) == "(2, 8), 16 of 16 nan (50 matvecs)"


def test_traced_and_abstract_estimates_print_their_fields() -> None:
    seen = []

    def look(value: Any) -> Any:
        inside = tx.Estimate(value, value, 3)
        seen.extend([str(inside), repr(inside)])
        refused(TypeError, "whose value is there", format, inside, ".3f")
        return inside

    shaped = jax.eval_shape(look, 1.0)
    assert seen[0] == seen[1]
    assert seen[0].startswith("Estimate(value=")
    assert str(shaped).startswith("Estimate(")


@pytest.mark.parametrize(("n", "num_matvecs"), [(40, 40), slow(300, 60)])
def test_nan_says_why_and_where_the_way_out_is(n: int, num_matvecs: int) -> None:
    key = jax.random.key(0)
    indefinite = tx.as_operator(lambda v: jnp.linspace(-1, 2, n) * v, n)
    words = str(tx.logdet(indefinite, key, num_matvecs))
    assert "±" not in words
    assert words.startswith("nan (")
    assert "is not positive definite" in words
    assert words.endswith("see 'What NaN means' in the guide's Conventions)")
    words = str(tx.function_trace(indefinite, jnp.log, key, num_matvecs))
    assert "has eigenvalues at which fn is not defined" in words
    broken = tx.as_operator(lambda v: NAN * v, n)
    words = str(tx.diagonal(broken, key, num_matvecs))
    assert words.startswith(f"({n},), {n} of {n} nan (")
    assert "returns nan" in words


def test_the_error_of_nan_is_nan() -> None:
    """One probe, several, and all unit vectors."""
    broken = tx.as_operator(lambda v: NAN * v, 8)
    for num_matvecs in (1, 4, 8):
        found = tx.hutchinson_trace(broken, jax.random.key(0), num_matvecs)
        assert jnp.isnan(found.value)
        assert jnp.isnan(found.standard_error)


# Methods.

KEY = jax.random.key(5)
EYE = np.eye(200)
RING = EYE + np.roll(np.eye(200), 1, 0) + np.roll(np.eye(200), -1, 0)
ALL = np.ones((200, 200))  # which takes a colour for each row
GENERAL = function(jnp.asarray(RING))
TAGGED = function(jnp.asarray(RING + 3 * np.eye(200)), PSD)
STORED = lx.MatrixLinearOperator(jnp.asarray(RING))

# Of these another function makes the estimate, or the test's own helper.
CHOSEN = {
    "trace": "xnystrace with second matvecs",
    "diagonal": "xnysdiag mixed with hutchinson_diagonal",
    "selected_entries": "selected_entries, 9 colours",
    "unbiased_square": "hutchinson_trace",
    "vecchia": "logdet",
    "krylov": "logdet",
}
NAMES = [x for x in CALLS if x not in ("inv_quad_logdet", "leaf_traces", "pool")]


MIXED = "xnystrace mixed with hutchinson_trace"
CHOICES: list[tuple[str, Callable[[], tx.Estimate]]] = [
    ("the better of xtrace and hutchinson_trace", lambda: tx.trace(GENERAL, KEY, 20)),
    (r"hutch.*_trace, \d+ colours", lambda: tx.trace(GENERAL, KEY, 20, pattern=RING)),
    ("hutchinson_trace, 1 colour", lambda: tx.trace(GENERAL, KEY, 20, pattern=EYE)),
    (CHOSEN["trace"], lambda: tx.trace(TAGGED, KEY, 20, pattern=ALL)),
    ("hutchinson_diagonal", lambda: tx.diagonal(GENERAL, KEY, 4, pattern=ALL)),
    (MIXED, lambda: tx.leaf_traces(TAGGED, KEY, 20)),
    (MIXED, lambda: tx.leaf_traces(TAGGED, KEY, 7)),
    ("exact", lambda: tx.trace(GENERAL, KEY, 200, pattern=RING)),
    ("exact", lambda: tx.trace(STORED, KEY)),
    ("exact", lambda: tx.xtrace(GENERAL, KEY, 200)),
    ("exact", lambda: tx.logdet(TAGGED, KEY)),
    ("exact", lambda: tx.schatten_norm(STORED, 1, KEY)),
    ("adaptive_trace", lambda: tx.adaptive_trace(GENERAL, KEY, max_matvecs=20)),
]


@pytest.mark.parametrize("name", cases(NAMES, "trace", "laplacian"))
def test_the_method_is_the_function_that_made_it(name: str) -> None:
    estimate = jax.eval_shape(lambda: CALLS[name](MATRIX, KEY))  # known without a run
    assert estimate.method == CHOSEN.get(name, name)


def test_automatic_choices_are_printed() -> None:
    for method, call in CHOICES:
        estimate = jax.eval_shape(call)
        assert re.fullmatch(method, estimate.method), estimate.method
    estimate = tx.trace(STORED, KEY)
    assert str(estimate).endswith(f", {estimate.method})")


ONE, OTHER = (
    tx.Estimate(jnp.ones(()), jnp.ones(()), jnp.asarray(9), jnp.ones(()), method=method)
    for method in ("xtrace", "exact")
)


def twice(x: Any) -> Any:
    return 2 * x


def test_estimates_of_two_methods_meet() -> None:
    """Conditionals, loops, selections and pools do not compare names."""
    assert ONE.method != OTHER.method
    for either in (True, False):
        chosen = jax.lax.cond(either, lambda: ONE, lambda: OTHER)
        assert chosen.method in ("xtrace", "exact")
    last, _ = jax.lax.scan(lambda carry, _: (OTHER, None), ONE, length=2)
    double = lambda e: jax.tree.map(twice, OTHER)  # noqa: E731
    once = jax.lax.while_loop(lambda e: e.value < 2, double, ONE)
    picked = jax.tree.map(lambda x, y: jnp.where(x < y, x, y), ONE, OTHER)
    assert (last.value, once.value, picked.method) == (1, 2, "xtrace")
    assert tx.pool([ONE, OTHER]).num_matvecs == 18


@pytest.mark.slow
def test_the_method_stays_in_transformations_and_files() -> None:
    double = jax.jit(lambda e: jax.tree.map(twice, e))
    exported = export.export(double)(ONE).serialize()
    keys = jax.random.split(KEY, 2)
    batch = jax.eval_shape(jax.vmap(lambda key: tx.xtrace(GENERAL, key, 20)), keys)
    kept: Any = double(ONE), export.deserialize(exported).call(ONE), batch
    kept = (*kept, pickle.loads(pickle.dumps(ONE)))
    assert {estimate.method for estimate in kept} == {"xtrace"}
    # One trace serves all methods: the result has the method of the first.
    assert double(OTHER).method == "xtrace"
