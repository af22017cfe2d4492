"""What an estimate says about how it was made, and that JAX does not tell methods apart."""

import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax import export

import traceax as tx
from tests.calls import CALLS, MATRIX
from tests.helpers import cases
from tests.wrappers import PSD, function

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


@pytest.mark.parametrize("name", cases(NAMES, "trace", "laplacian"))
def test_the_method_is_the_function_that_made_it(name: str) -> None:
    assert CALLS[name](MATRIX, KEY).method == CHOSEN.get(name, name)


@pytest.mark.parametrize(
    ("call", "method"),
    [
        (lambda: tx.trace(GENERAL, KEY, 20), "the better of xtrace and hutchinson_trace"),
        (lambda: tx.trace(GENERAL, KEY, 20, pattern=RING), r"hutch.*_trace, \d+ colours"),
        (lambda: tx.trace(GENERAL, KEY, 20, pattern=EYE), "hutchinson_trace, 1 colour"),
        (lambda: tx.trace(TAGGED, KEY, 20, pattern=ALL), "xnystrace with second matvecs"),
        (lambda: tx.diagonal(GENERAL, KEY, 4, pattern=ALL), "hutchinson_diagonal"),
        (lambda: tx.leaf_traces(TAGGED, KEY, 20), "xnystrace mixed with hutchinson_trace"),
        (lambda: tx.leaf_traces(TAGGED, KEY, 7), "xnystrace mixed with hutchinson_trace"),
        (lambda: tx.trace(GENERAL, KEY, 200, pattern=RING), "exact"),
        (lambda: tx.trace(STORED, KEY), "exact"),
        (lambda: tx.xtrace(GENERAL, KEY, 200), "exact"),
        (lambda: tx.logdet(TAGGED, KEY), "exact"),
        (lambda: tx.schatten_norm(STORED, 1, KEY), "exact"),
        (lambda: tx.adaptive_trace(GENERAL, KEY, max_matvecs=20), "adaptive_trace"),
    ],
)
def test_automatic_choices_are_printed(call: Any, method: str) -> None:
    estimate = jax.jit(call)()
    assert re.fullmatch(method, estimate.method)
    assert str(estimate).endswith(f", {estimate.method})")


ONE, OTHER = (
    tx.Estimate(jnp.ones(()), jnp.ones(()), jnp.asarray(9), jnp.ones(()), method=method)
    for method in ("xtrace", "exact")
)


def test_estimates_of_two_methods_meet() -> None:
    """As in a conditional, a loop, a selection or a pool, none of which compares names."""
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


def twice(x: Any) -> Any:
    return 2 * x


@pytest.mark.slow
def test_the_method_stays_in_transformations_and_files() -> None:
    double = jax.jit(lambda e: jax.tree.map(twice, e))
    exported = export.export(double)(ONE).serialize()
    batch = jax.vmap(lambda key: tx.xtrace(GENERAL, key, 20))(jax.random.split(KEY, 2))
    kept: Any = double(ONE), export.deserialize(exported).call(ONE), batch
    kept = (*kept, pickle.loads(pickle.dumps(ONE)))
    assert {estimate.method for estimate in kept} == {"xtrace"}
    # One trace serves all methods: the result has that of the first.
    assert double(OTHER).method == "xtrace"
