"""`check_estimator` names what is wrong with an estimator, and passes those of traceax."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import traceax as tx
from tests.calls import hutchinson
from tests.helpers import nightly, refused, slow
from tests.tables import DIAGONALS, ESTIMATORS, Entry
from traceax.testing import check_estimator

COUNTER = count()


RIGHT = [slow(DIAGONALS[0]), *map(nightly, ESTIMATORS + DIAGONALS[1:])]


@pytest.mark.parametrize("entry", RIGHT, ids=lambda entry: entry.name)
def test_the_estimators_of_traceax_are_right(entry: Entry) -> None:
    how = {"semidefinite": entry.semidefinite, "euler": entry.euler}
    check_estimator(entry.estimate, truth=entry.truth, **how)


@pytest.mark.parametrize("double", [slow(True), nightly(False)])
def test_the_automatic_choice_and_a_custom_trace_are_right(double: bool) -> None:
    with jax.enable_x64(double):
        custom = partial(tx.custom_trace, hutchinson, sampler=tx.rademacher)
        check_estimator(lambda a, key, num_matvecs: custom(a, key, num_matvecs))
        check_estimator(tx.trace, num_keys=20)  # of 20 dimensions it is exact


def altered(**change: Callable[[Any], Any]) -> Callable[..., tx.Estimate]:
    """Hutchinson's estimator with changed parts."""

    def algorithm(apply: Any, probes: Any) -> Any:
        value, error, (left, right) = hutchinson(apply, probes)
        parts = {"value": value, "error": error, "left": left}
        parts |= {name: fn(parts[name]) for name, fn in change.items()}
        return parts["value"], parts["error"], (parts["left"], right)

    return lambda operator, key: tx.custom_trace(algorithm, operator, key, 8)


def plain(operator: Any, key: Any) -> tx.Estimate:
    return tx.hutchinson_trace(operator, key, 8)


def with_value(change: Callable[[Any], Any]) -> Callable[..., tx.Estimate]:
    put = partial(eqx.tree_at, lambda e: e.value, replace_fn=change)
    return lambda operator, key: put(plain(operator, key))


def dearer(operator: Any, key: Any, num_matvecs: int) -> tx.Estimate:
    return tx.xtrace(operator, key, num_matvecs + 2)


def by_python(operator: Any, key: Any) -> tx.Estimate:
    return plain(operator, jax.random.fold_in(key, next(COUNTER)))


ALONG = "derivative along A = value: off by"
FAULTS: list[tuple[Any, str]] = [
    (altered(value=lambda v: 1.3 * v), "flat float: value unbiased: off by"),
    (
        altered(left=lambda b: 1.3 * b),
        rf"euler=True, {ALONG}(.|\n)*derivative unbiased: off",
    ),
    (altered(error=lambda e: e / 10), r"share that interval\(0.95\) misses: off by"),
    (altered(error=lambda e: 0 * e), "exact where standard_error is 0: off by"),
    (with_value(jax.lax.stop_gradient), "derivative unbiased: off by"),
    (with_value(lambda v: v[None]), r"must be Estimate of \[\(\), \(\)\], but got Est"),
    (lambda operator, key: plain(operator, key).value, "but got ArrayImpl"),
    (by_python, "same key, same value: off by"),
    (dearer, "num_matvecs is at most 12: off by 2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("estimator", "words"), FAULTS)
def test_faults_are_named(estimator: Any, words: str) -> None:
    words = rf"check_estimator: .* fails:(.|\n)*{words}"
    refused(AssertionError, words, check_estimator, estimator, num_keys=100)


@pytest.mark.parametrize("double", [slow(True), nightly(False)])
def test_absolute_thresholds_are_seen(double: bool) -> None:
    small = with_value(lambda value: jnp.where(abs(value) < 1e-8, 0, value))
    large = with_value(lambda value: jnp.where(abs(value) > 1e8, 0, value))
    for words, judged in [("value of .e-", small), (r"value of .e\+", large)]:
        with jax.enable_x64(double):
            refused(AssertionError, words, check_estimator, judged, num_keys=10)


def test_errors() -> None:
    refused(TypeError, r"check_estimator\(estimator=.*got int", check_estimator, 3)
    keyless = lambda operator, key: plain(operator, 3)  # noqa: E731
    refused(TypeError, "traceax.*key=", check_estimator, keyless)  # by the estimator
