"""Estimators that are wrong in one thing each are told so; the library's are right."""

from collections.abc import Callable
from itertools import count
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import traceax as tx
from tests.calls import hutchinson
from tests.helpers import DIAGONALS, ESTIMATORS, Entry, slow
from traceax.testing import check_estimator

COUNTER = count()
LINEAR = [*ESTIMATORS, *DIAGONALS]
# Half a minute of statistics each.
pytestmark = pytest.mark.slow

QUICK = ("hutchinson_trace", "xdiag")


@pytest.mark.parametrize("entry", [e if e.name in QUICK else slow(e) for e in LINEAR])
def test_the_librarys_are_right(entry: Entry) -> None:
    check_estimator(
        entry.estimate,
        truth=entry.truth,
        semidefinite=entry.semidefinite,
        euler=entry.euler,
    )


def custom(algorithm: Callable[..., Any]) -> Callable[..., tx.Estimate]:
    def estimator(operator: Any, key: Any) -> tx.Estimate:
        return tx.custom_trace(algorithm, operator, key, 8)

    return estimator


def test_one_of_ones_own_and_the_front_door_are_right() -> None:
    check_estimator(custom(hutchinson), num_keys=200)
    check_estimator(tx.trace, num_keys=20)  # of 20 dimensions it is exact


def altered(**change: Callable[[Any], Any]) -> Callable[..., tx.Estimate]:
    """Hutchinson's, with something done to its parts."""

    def algorithm(apply: Any, probes: Any) -> Any:
        value, error, (left, right) = hutchinson(apply, probes)
        parts = {"value": value, "error": error, "left": left}
        parts |= {name: fn(parts[name]) for name, fn in change.items()}
        return parts["value"], parts["error"], (parts["left"], right)

    return custom(algorithm)


def plain(operator: Any, key: Any) -> tx.Estimate:
    return tx.hutchinson_trace(operator, key, 8)


def with_value(change: Callable[[tx.Estimate], Any]) -> Callable[..., tx.Estimate]:
    def estimator(operator: Any, key: Any) -> tx.Estimate:
        estimate = plain(operator, key)
        return eqx.tree_at(lambda e: e.value, estimate, change(estimate))

    return estimator


@jax.custom_jvp
def wrongly(x: Any) -> Any:
    return x


@wrongly.defjvp
def _wrongly_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], 1.5 * tangents[0]


def by_python(operator: Any, key: Any) -> tx.Estimate:
    return plain(operator, jax.random.fold_in(key, next(COUNTER)))


def greedy(operator: Any, key: Any, num_matvecs: int) -> tx.Estimate:
    return tx.hutchinson_trace(operator, key, num_matvecs + 1)


def never_sure_of_small(operator: Any, key: Any) -> tx.Estimate:
    """An absolute threshold, which a scale gives away."""
    e = plain(operator, key)
    return tx.Estimate(jnp.where(jnp.abs(e.value) > 1e-9, e.value, 0), e.standard_error, 8)


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (altered(value=lambda v: 1.3 * v), "flat: unbiased: off by"),
        (altered(left=lambda b: 1.3 * b), "flat: derivative unbiased: off by"),
        (altered(left=lambda b: 1.3 * b), "derivative along the operator = value: off by"),
        (altered(error=lambda e: e / 10), r"interval\(0.95\) holds the truth in"),
        (altered(error=lambda e: 0 * e), "exact where the error is 0: off by"),
        (with_value(lambda e: jax.lax.stop_gradient(e.value)), "derivative unbiased"),
        (with_value(lambda e: wrongly(e.value)), "derivative unbiased"),
        (with_value(lambda e: e.value[None]), r"shape: .*must be \(\)"),
        (by_python, "same key, same value: off by"),
        (greedy, "num_matvecs: 13 spent, 12 allowed"),
        (never_sure_of_small, "value of 1e-20 A = 1e-20 value: off by"),
        (lambda operator, key: plain(operator, key).value, "must return an Estimate"),
        (lambda operator, key: plain(operator, 3), "call: raises TypeError: traceax"),
    ],
)
def test_what_is_wrong_is_named(estimator: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=rf"check_estimator: .* fails:(.|\n)*{words}"):
        check_estimator(estimator, num_keys=100)


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"check_estimator\(estimator=.*got int"):
        check_estimator(3)  # pyright: ignore[reportArgumentType]
