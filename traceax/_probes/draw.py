"""A sampler's probes for an operator: checked, frozen, as columns of a block."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PRNGKeyArray

from traceax._core.canonical import compiled
from traceax._core.operator import Structure, as_columns, working_dtype
from traceax._probes.probing import probing
from traceax._probes.samplers import Sampler
from traceax._probes.traits import check_independent, is_known, probes_a_sample


def draw(
    name: str,
    sampler: Sampler,
    key: PRNGKeyArray,
    operator: lx.AbstractLinearOperator,
    num_probes: int,
    *,
    in_samples: bool = False,
) -> Inexact[Array, "n k"]:
    """The sampler's probes for an operator, checked, frozen, as columns of a block.

    `in_samples`: the estimator keeps together what makes one sample (`probes_a_sample`).
    """
    structure = operator.in_structure()
    check_sampler(name, sampler)
    if probes_a_sample(sampler) > 1 and not in_samples:
        check_independent(name, sampler)
    if is_known(sampler):
        dtype = working_dtype(operator)
        drawn = compiled(_drawn, sampler, key, structure, num_probes, dtype)
        return jax.lax.stop_gradient(drawn)
    probes = sampler(key, structure, num_probes)

    def described(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_probes, *leaf.shape), leaf.dtype)

    def shaped(leaf: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))

    got = jax.tree.map(shaped, probes)
    if eqx.tree_equal(got, jax.tree.map(described, structure)) is not True:
        raise ValueError(
            f"traceax.{name}(sampler=...) must return the operator's input structure with "
            f"a leading axis of {num_probes} probes, because each is one application, but "
            f"got {got}. Draw every leaf as shape (num_probes, *leaf.shape), leaf.dtype."
        )
    dtype = working_dtype(operator)
    return jax.lax.stop_gradient(as_columns(probes, dtype))


def check_sampler(name: str, sampler: object) -> None:
    if not callable(sampler) or sampler is probing:
        got = "traceax.probing itself" if sampler is probing else type(sampler).__name__
        raise TypeError(
            f"traceax.{name}(sampler=...) must be a function (key, structure, num_probes) "
            f"-> probes, but got {got}. Pass traceax.rademacher, say, or, of colours, "
            "traceax.probing(colours)."
        )


def _drawn(
    sampler: Sampler,
    key: PRNGKeyArray,
    structure: Structure,
    num_probes: int,
    dtype: jnp.dtype,
) -> Inexact[Array, "n k"]:
    return as_columns(sampler(key, structure, num_probes), dtype)


class Samples(NamedTuple):
    """A sample for each key (see `stream`); hashable, to be kept in a static field."""

    name: str
    sampler: Sampler
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    treedef: Any

    @staticmethod
    def of(name: str, sampler: Sampler, structure: Structure) -> Samples:
        if isinstance(sampler, partial) and not sampler.args and not sampler.keywords:
            sampler = sampler.func  # which, unlike a partial, is equal to itself made anew
        leaves, treedef = jax.tree.flatten(structure)
        return Samples(name, sampler, tuple(leaves), treedef)

    def __call__(self, keys: PRNGKeyArray) -> Inexact[Array, "n k"]:
        group = probes_a_sample(self.sampler)
        space = lx.IdentityLinearOperator(jax.tree.unflatten(self.treedef, self.leaves))

        def one(key: PRNGKeyArray) -> Inexact[Array, "n group"]:
            return draw(self.name, self.sampler, key, space, group, in_samples=True)

        columns = jax.vmap(one, out_axes=1)(keys)
        return columns.reshape(columns.shape[0], -1)
