"""`check_sampler` names what is wrong with a sampler, and passes those of traceax."""

from collections.abc import Callable
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import traceax as tx
from tests.helpers import nightly, refused, slow
from traceax.testing import check_sampler

COUNTER = count()


@pytest.mark.nightly
def test_independent_samplers_are_right() -> None:
    check_sampler(tx.rademacher, num_probes=2)
    check_sampler(tx.sphere)
    check_sampler(tx.normal)


@pytest.mark.parametrize("sampler", [nightly(tx.orthogonal), nightly(tx.hadamard)])
def test_samplers_without_replacement_are_right_and_not_independent(sampler: Any) -> None:
    check_sampler(sampler, independent=False)
    check_sampler(sampler, independent=False, num_probes=6)  # all that there are
    words = r"independent=True, E\|z_i\* z_j\|\^2 = n"
    refused(AssertionError, words, check_sampler, sampler)


@pytest.mark.slow
def test_probing_is_right_with_complete_samples() -> None:
    pattern = jnp.eye(6) + jnp.eye(6, k=1) + jnp.eye(6, k=-1)
    probing = tx.probing(tx.colouring(pattern))
    colours = probing.num_colours  # pyright: ignore[reportFunctionMemberAccess]
    check_sampler(probing, independent=False, num_probes=colours)


def leafwise(keys: Callable[..., Any]) -> Callable[..., Any]:
    def sampler(key: Any, structure: Any, num_probes: int) -> Any:
        leaves, treedef = jax.tree.flatten(structure)
        pairs = zip(keys(key, len(leaves)), leaves, strict=True)
        return treedef.unflatten([tx.rademacher(k, leaf, num_probes) for k, leaf in pairs])

    return sampler


@pytest.mark.slow
def test_draws_of_each_leaf() -> None:
    check_sampler(leafwise(jax.random.split), same_for_any_cut=False)
    words = "same_for_any_cut=True: off by"
    refused(AssertionError, words, check_sampler, leafwise(jax.random.split))


def changed(sampler: Any, change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda key, structure, k: jax.tree.map(change, sampler(key, structure, k))


def repeated(key: Any, structure: Any, num_probes: int) -> Any:
    one = tx.rademacher(key, structure, 1)
    return jax.tree.map(lambda leaf: leaf.repeat(num_probes, 0), one)


def of_one_length(key: Any, structure: Any, num_probes: int) -> Any:
    """Directions are independent; all probes have the same length."""
    shared = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, 1)), 1.2**0.5, 0.8**0.5)
    drawn = tx.sphere(key, structure, num_probes)
    return jax.tree.map(lambda leaf: leaf * shared.astype(leaf.dtype), drawn)


def by_python(key: Any, structure: Any, num_probes: int) -> Any:
    return tx.normal(jax.random.key(next(COUNTER)), structure, num_probes)


FAULTS: list[tuple[Any, str]] = [
    (changed(tx.normal, jnp.zeros_like), r"E\|z\|\^2 = n: off by 6, "),
    (changed(tx.normal, lambda z: z[:-1]), r"leaf.dtype: must be .*, but .*\[2,6\]"),
    (repeated, r"independent=True, E\|z_i\* z_j\|\^2 = n: off by"),
    (of_one_length, r"independent=True, cov\(z\* B z\) = 0: off by"),
    (by_python, "same key, same probes: off by"),
    (leafwise(lambda key, n: [key] * n), r"E\[z z\*\] = I: off by"),
    (changed(tx.normal, jnp.real), r"complex64: .*, but got .*float32"),
]


@pytest.mark.parametrize(("sampler", "words"), [slow(*fault) for fault in FAULTS])
def test_faults_are_named(sampler: Any, words: str) -> None:
    words = rf"check_sampler: .* fails:(.|\n)*{words}"
    refused(AssertionError, words, check_sampler, sampler)


@pytest.mark.parametrize("sampler", [nightly(tx.normal), nightly(tx.rademacher)])
def test_small_errors_of_length_and_mean_are_seen(sampler: Any) -> None:
    for change, words in [
        (lambda z: 1.02 * z, r"E\|z\|\^2 = n: off by 0.2"),
        (lambda z: 0.98 * z, r"E\|z\|\^2 = n: off by 0.2"),
        (lambda z: 0.2 + 0.96**0.5 * z, r"E\|sum z_i\|\^2 = n: off by 1.2"),
    ]:
        refused(AssertionError, words, check_sampler, changed(sampler, change))


def test_errors() -> None:
    check, name, sign = check_sampler, r"check_sampler\(", tx.rademacher
    refused(TypeError, f"{name}sampler=.*function.*got str", check, "rademacher")
    refused(ValueError, f"{name}num_probes=.*least 2.*got 1", check, sign, num_probes=1)
    by_float = changed(tx.normal, lambda z: z * float(jnp.real(z).sum()))
    refused(jax.errors.ConcretizationTypeError, "concrete", check, by_float)
