"""A sampler's probes for an operator: checked, constant, as columns of a block.

Estimators must know of a sampler whether its probes are independent of each other, whether
they may be resphered, how many of them make one sample. Of a sampler that is not one of the
library's nothing is assumed but that E[z z*] = I.

Where the user names no sampler, the choice is this:

*Sketches.* Points of the sphere have projections that can be resphered, which takes all of
the variance that a multiple of I contributes; signs cost a fifth to a tenth of them to draw
(50 probes, n = 200,000: 28 against 135 ms, where applying a stencil takes 35). What
resphering gains falls with n. Measured (`tests.benchmarks.samplers`, XTrace with 40
matvecs): where eigenvalues lie between 1 and 3 signs have 1.5, 1.3, 1.1, 0.9 times the
error of the sphere at n = 300, 1000, 3000, 10,000; where they decay, 1.0 to 1.1 times at
any. Where all lie within a percent of each other, signs go on being worse, by a little: at
n = 30,000 7e-5 of the trace against 6e-6, falling as 1/n. From MANY on that is 1e-5 or
less.

*Means* of quadratic forms. Signs that exclude each other, rows of a Hadamard matrix, have
(m - k)/(m - 1) times the variance of independent ones for any operator, with m the least
power of 2 from n on: for m = n .94 of the error where k is an eighth of n, .71 where it is
half. Drawing them takes a sort of m numbers, which is not worth it below PART of the
dimensions.

*Operators of which a pattern is known.* Measured (n = 1000 to 1300, budgets of 20, 50 and
100; the inverse of a graph's Laplacian plus 0.1 or 1, and exp(A)): where the budget buys
colours for three steps or more (grids of two and three axes, roads, random graphs of mean
degree 2 and 4), probing has 1.1 to 10^9 times less error than sketches, of diagonals and
traces. Where it buys one step or two (random graphs of mean degree 8, those grown by
preferential attachment) it has from 0.2 of the error to 6 times as much. Plus 0.01, where
nearly everything is near, sketches win by up to ten times on grids of three axes: such a
matrix does not decay within its pattern.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Key, PRNGKeyArray, UInt32

from traceax._core.canonical import compiled
from traceax._core.operator import Structure, as_columns, size, working_dtype
from traceax._probes.colouring import best_colouring, graph
from traceax._probes.hadamard import hadamard, order
from traceax._probes.probing import Probing, of_graph, probing
from traceax._probes.samplers import Sampler, normal, orthogonal, rademacher, sphere


def is_rotation_invariant(sampler: Sampler) -> bool:
    """Whether projected probes may be resphered; a sampler we do not know, never."""
    return _is_any(sampler, sphere, normal, orthogonal)


def _innermost(sampler: Sampler) -> Sampler:
    while isinstance(sampler, partial):
        sampler = sampler.func
    return sampler


def _is_any(sampler: Sampler, *known: Sampler) -> bool:
    """By identity: what is no sampler at all, an array say, may compare as it likes."""
    return any(_innermost(sampler) is one for one in known)


def is_without_replacement(sampler: Sampler) -> bool:
    """Whether its probes exclude each other, hence are dependent."""
    return _is_any(sampler, orthogonal, hadamard)


def population(sampler: Sampler, n: int) -> float:
    """How many probes there are to draw from, so to speak: infinitely many, unless they
    exclude each other."""
    sampler = _innermost(sampler)
    if sampler is orthogonal:
        return n
    return order(n) if sampler is hadamard else math.inf


def comes_in_samples(sampler: Sampler) -> bool:
    """Whether samples may be drawn one by one: of a sampler we do not know, never."""
    independent = is_known(sampler) and not is_without_replacement(sampler)
    return independent or probes_a_sample(sampler) > 1


def is_known(sampler: Sampler) -> bool:
    """Whether it is one of ours."""
    return _is_any(sampler, rademacher, normal, sphere, orthogonal, hadamard)


def probes_a_sample(sampler: Sampler) -> int:
    """How many probes make one sample, E[sum of z z*] their number times I: the colours of
    `probing`; for all others each probe is one."""
    return getattr(_innermost(sampler), "num_colours", 1)


def check_independent(name: str, sampler: Sampler) -> None:
    if is_without_replacement(sampler) or probes_a_sample(sampler) > 1:
        alone = is_without_replacement(sampler)
        got = getattr(_innermost(sampler), "__name__", "") if alone else "probing"
        raise ValueError(
            f"traceax.{name}(sampler=...) must draw independent probes, because each probe "
            "is tested against a sketch made of the others or is a sample of its own, but "
            f"got traceax.{got}. Use traceax.sphere or traceax.rademacher; traceax.{got} "
            "is for traceax.hutchinson_trace and traceax.hutchinson_diagonal."
        )


MANY = 100_000
PART = 1 / 8

# Steps that colours must keep apart, or a sketch is the better choice.
ENOUGH = 3


def for_sketch(sampler: Sampler | None, operator: lx.AbstractLinearOperator) -> Sampler:
    if sampler is not None:
        return sampler
    return sphere if size(operator) < MANY else rademacher


def for_mean(
    sampler: Sampler | None, operator: lx.AbstractLinearOperator, num_probes: int
) -> Sampler:
    if sampler is not None:
        return sampler
    many = num_probes > 1 and num_probes >= PART * size(operator)
    return hadamard if many else rademacher


def check_pattern(name: str, operator: lx.AbstractLinearOperator, pattern: Any) -> None:
    n = size(operator)
    shape = (n, n) if pattern is None else graph(name, pattern).shape
    if shape != (n, n):
        raise ValueError(
            f"traceax.{name}(pattern=...) must be {n} x {n}, a row and a column for each "
            f"dimension of the operator, but got shape {shape}. Pass the pattern of this "
            "operator, or of the matrix it is a function of."
        )


def for_pattern(name: str, num_matvecs: int, pattern: Any) -> Probing | None:
    """Probing, if so many colours keep enough steps apart in the graph of the pattern."""
    if pattern is None:
        return None
    step = graph(name, pattern)
    best = best_colouring(step, ENOUGH, num_matvecs)
    return None if best is None else of_graph(step, best)


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

    def __call__(
        self, keys: Key[Array, " samples"] | UInt32[Array, "samples words"]
    ) -> Inexact[Array, "n k"]:
        group = probes_a_sample(self.sampler)
        space = lx.IdentityLinearOperator(jax.tree.unflatten(self.treedef, self.leaves))

        def one(key: PRNGKeyArray) -> Inexact[Array, "n group"]:
            return draw(self.name, self.sampler, key, space, group, in_samples=True)

        columns = jax.vmap(one, out_axes=1)(keys)
        return columns.reshape(columns.shape[0], -1)
