"""Samplers that are wrong in one thing each are told so; the library's are right."""

from collections.abc import Callable
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import traceax as tx
from traceax.testing import check_sampler

COUNTER = count()
# Half a minute of statistics each.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sampler", [tx.rademacher, tx.sphere, tx.normal])
def test_independent_samplers_are_right(sampler: Any) -> None:
    check_sampler(sampler)


@pytest.mark.parametrize("sampler", [tx.orthogonal, tx.hadamard])
def test_samplers_without_replacement_are_right_and_not_independent(sampler: Any) -> None:
    check_sampler(sampler, independent=False)
    check_sampler(sampler, independent=False, num_probes=6)  # all that there are
    with pytest.raises(AssertionError, match=r"independent, E\|z_i\* z_j\|\^2 = n"):
        check_sampler(sampler)


def test_probing_is_right_in_whole_samples() -> None:
    pattern = jnp.eye(6) + jnp.eye(6, k=1) + jnp.eye(6, k=-1)
    probing = tx.probing(tx.colouring(pattern))
    colours = probing.num_colours  # pyright: ignore[reportFunctionMemberAccess]
    check_sampler(probing, independent=False, num_probes=colours)


def leafwise(key: Any, structure: Any, num_probes: int, *, keys: Callable[..., Any]) -> Any:
    leaves, treedef = jax.tree.flatten(structure)
    drawn = [
        tx.rademacher(k, leaf, num_probes)
        for k, leaf in zip(keys(key, len(leaves)), leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, drawn)


def test_leaf_by_leaf_is_right_for_who_allows_it() -> None:
    def own_keys(key: Any, structure: Any, num_probes: int) -> Any:
        return leafwise(key, structure, num_probes, keys=jax.random.split)

    check_sampler(own_keys, same_for_any_cut=False)
    with pytest.raises(AssertionError, match="the same for any cut of 6 dimensions"):
        check_sampler(own_keys)


def changed(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def sampler(key: Any, structure: Any, num_probes: int) -> Any:
        return jax.tree.map(change, tx.normal(key, structure, num_probes))

    return sampler


def repeated(key: Any, structure: Any, num_probes: int) -> Any:
    one = tx.rademacher(key, structure, 1)
    return jax.tree.map(lambda leaf: leaf.repeat(num_probes, 0), one)


def repeated_with_signs(key: Any, structure: Any, num_probes: int) -> Any:
    line = jax.ShapeDtypeStruct((), jnp.float32)
    signs = tx.rademacher(jax.random.fold_in(key, 1), line, num_probes)
    return jax.tree.map(
        lambda leaf: (leaf.T * signs.astype(leaf.dtype)).T,
        repeated(key, structure, num_probes),
    )


def of_one_length(key: Any, structure: Any, num_probes: int) -> Any:
    """Directions are independent, lengths are shared."""
    shared = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, 1)), 1.2**0.5, 0.8**0.5)
    drawn = tx.sphere(key, structure, num_probes)
    return jax.tree.map(lambda leaf: leaf * shared.astype(leaf.dtype), drawn)


def by_python(key: Any, structure: Any, num_probes: int) -> Any:
    return tx.normal(jax.random.key(next(COUNTER)), structure, num_probes)


def same_key_for_all_leaves(key: Any, structure: Any, num_probes: int) -> Any:
    return leafwise(key, structure, num_probes, keys=lambda key, n: [key] * n)


def real_for_complex(key: Any, structure: Any, num_probes: int) -> Any:
    def real(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32)

    return tx.rademacher(key, jax.tree.map(real, structure), num_probes)


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (repeated, r"independent, E\[z_i z_j\*\] = 0: off by"),
        (repeated_with_signs, r"independent, E\|z_i\* z_j\|\^2 = n: off by"),
        (of_one_length, r"independent, cov\(z\* B z\) = 0: off by"),
        (changed(lambda x: 1.1 * x), r"E\[z z\*\] = I: off by"),
        (changed(lambda x: x + 0.5), r"E\[z z\*\] = I: off by"),
        (changed(jnp.abs), "shape and dtype|E.z z"),
        (changed(lambda x: x[:-1]), "shape and dtype of 3 must be"),
        (changed(lambda x: jnp.zeros_like(x)), "every key gives the same"),
        (by_python, "the same key gives others"),
        (same_key_for_all_leaves, r"E\[z z\*\] = I: off by"),
        (real_for_complex, "complex probes: shape and dtype"),
        (changed(lambda x: x * (float(x.sum()) > 0)), "raises Concretization"),
    ],
)
def test_what_is_wrong_is_named(sampler: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=rf"check_sampler: \w+ fails:(.|\n)*({words})"):
        check_sampler(sampler)


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"check_sampler\(sampler=.*function.*got str"):
        check_sampler("rademacher")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"check_sampler\(num_probes=.*least 2.*got 1"):
        check_sampler(tx.rademacher, num_probes=1)
