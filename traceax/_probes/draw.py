"""The sampler's probes for an operator: checked, constant, as columns of a block.

Estimators ask of a sampler whether its probes are independent of each other, whether they
may be resphered, and how many of them make one sample. Of a sampler that is not one of the
library's only E[z z*] = I is assumed.

If the user names no sampler, the choice is this:

*Sketches.* Points of the sphere have projections that can be resphered, which removes all
of the variance that a multiple of I contributes; drawing signs takes a fifth to a tenth of
the time. The gain of resphering falls with n (`tests.benchmarks.samplers`): from MANY
dimensions on both errors are the same, or 1e-5 of the trace or less.

*Means* of quadratic forms. Signs without replacement, rows of a Hadamard matrix, have (m -
k)/(m - 1) times the variance of independent ones for any operator, where m is the least
power of 2 that is at least n. Drawing them takes a sort of m numbers, too long for fewer
probes than PART of the dimensions.

*Operators with a known pattern.* If the budget buys colours for three steps or more,
probing has less error than sketches, else 0.2 to 6 times (`tests.benchmarks.probing`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, Key, PRNGKeyArray, UInt32

from traceax._core.canonical import compiled
from traceax._core.checks import invalid
from traceax._core.operator import Operator, working_dtype
from traceax._core.sparse import own_pattern
from traceax._core.vectors import Structure, as_columns
from traceax._probes.colouring import best_colouring, graph, places
from traceax._probes.probing import Probing, probing, probing_of_graph
from traceax._probes.samplers import (
    Sampler,
    hadamard,
    hadamard_order,
    normal,
    orthogonal,
    rademacher,
    sphere,
)

MANY = 100_000
PART = 1 / 8
Given = TypeVar("Given")  # what a user gives as a sampler, before `check_sampler`
ENOUGH = 3  # steps that colours have to keep apart, or a sketch is the better choice


def _innermost(sampler: Any) -> Any:
    while isinstance(sampler, partial):
        sampler = sampler.func
    return sampler


def _is_any(sampler: Any, *known: Sampler) -> bool:
    """By identity, because comparisons with arrays and other objects may fail."""
    return any(_innermost(sampler) is one for one in known)


def is_rotation_invariant(sampler: Any) -> bool:
    """Whether projected probes may be resphered; of an unknown sampler, never."""
    return _is_any(sampler, sphere, normal, orthogonal)


def is_without_replacement(sampler: Any) -> bool:
    """Whether its probes are dependent, because they are drawn without replacement."""
    return _is_any(sampler, orthogonal, hadamard)


def is_known(sampler: Any) -> bool:
    """Whether it is one of the library's."""
    return _is_any(sampler, rademacher, normal, sphere, orthogonal, hadamard)


def population_size(sampler: Any, n: int) -> float:
    """How many probes there are to draw from: infinitely many with replacement."""
    if _is_any(sampler, orthogonal):
        return n
    return hadamard_order(n) if _is_any(sampler, hadamard) else math.inf


def probes_per_sample(sampler: Any) -> int:
    """How many probes make one sample, with E[sum of z z*] their number times I: the number
    of colours for `probing`, 1 for all others."""
    return getattr(_innermost(sampler), "num_colours", 1)


def coloured(method: str, sampler: Any) -> str:
    """`hutchinson_trace, 36 colours`: the method, with the colours that it uses."""
    colours = getattr(_innermost(sampler), "num_colours", 0)
    return f"{method}, {colours} colour{'s' * (colours > 1)}" if colours else method


def has_independent_samples(sampler: Any) -> bool:
    """Whether samples may be drawn one by one; of an unknown sampler, never."""
    independent = is_known(sampler) and not is_without_replacement(sampler)
    return independent or probes_per_sample(sampler) > 1


def check_sampler(name: str, sampler: object) -> None:
    if not callable(sampler) or sampler is probing:
        must = "be a function (key, structure, num_probes) -> probes"
        got = "traceax.probing itself" if sampler is probing else type(sampler).__name__
        cure = "Pass traceax.rademacher, say, or, of colours, traceax.probing(colours)."
        raise invalid(TypeError, name, "sampler", must, got, cure)


def check_independent(name: str, sampler: Any) -> None:
    alone = is_without_replacement(sampler)
    if alone or probes_per_sample(sampler) > 1:
        got = f"traceax.{_innermost(sampler)!r}" if alone else "traceax.probing"
        must = "draw independent probes, because each is a sample of its own"
        cure = (
            f"Use traceax.sphere or traceax.rademacher; {got} is for "
            "traceax.hutchinson_trace and traceax.hutchinson_diagonal."
        )
        raise invalid(ValueError, name, "sampler", must, got, cure)


def check_pattern(name: str, operator: Operator, pattern: Any) -> None:
    n = operator.in_size()
    shape = (n, n) if pattern is None else graph(name, pattern).shape
    if shape != (n, n):
        must, got = f"be {n} x {n}, like the operator's matrix", f"shape {shape}"
        cure = "Pass the pattern of this operator, or of the matrix it is a function of."
        raise invalid(ValueError, name, "pattern", must, got, cure)


def for_sketch(sampler: Given | None, operator: Operator) -> Given | Sampler:
    if sampler is not None:
        return sampler
    return sphere if operator.in_size() < MANY else rademacher


def for_mean(sampler: Given | None, operator: Operator, num_probes: int) -> Given | Sampler:
    if sampler is not None:
        return sampler
    many = num_probes > 1 and num_probes >= PART * operator.in_size()
    return hadamard if many else rademacher


def for_pattern(
    name: str, operator: Operator, num_colours: int, pattern: Any, enough: int = ENOUGH
) -> Probing | None:
    """Probing, if so many colours keep enough steps apart in the graph of the pattern."""
    check_pattern(name, operator, pattern)
    pattern = own_pattern(operator) if pattern is None else places(name, pattern)
    if pattern is None:
        return None
    kept, how = pattern.colourings, (num_colours, enough)
    if how not in kept:
        step = graph(name, pattern)
        best = best_colouring(step, enough, num_colours)
        kept[how] = None if best is None else probing_of_graph(step, best)
    return kept[how]


def draw(
    name: str,
    sampler: Sampler,
    key: PRNGKeyArray,
    operator: Operator,
    num_probes: int,
    *,
    in_samples: bool = False,
) -> Inexact[Array, "n k"]:
    """The sampler's probes for an operator, checked, constant, as columns of a block.

    `in_samples`: the estimator keeps the probes of each sample together.
    """
    structure, dtype = operator.in_structure(), working_dtype(operator)
    check_sampler(name, sampler)
    if probes_per_sample(sampler) > 1 and not in_samples:
        check_independent(name, sampler)
    if is_known(sampler):
        drawn = compiled(_drawn, sampler, key, structure, num_probes, dtype)
        return jax.lax.stop_gradient(drawn)
    probes = sampler(key, structure, num_probes)

    def expected(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_probes, *leaf.shape), leaf.dtype)

    def shaped(leaf: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))

    got = jax.tree.map(shaped, probes)
    if eqx.tree_equal(got, jax.tree.map(expected, structure)) is not True:
        must = f"return the operator's input structure with a leading axis of {num_probes}"
        cure = "Draw every leaf as shape (num_probes, *leaf.shape), leaf.dtype."
        raise invalid(ValueError, name, "sampler", must, got, cure)
    return jax.lax.stop_gradient(as_columns(probes, dtype))


def _drawn(
    sampler: Sampler,
    key: PRNGKeyArray,
    structure: Structure,
    num_probes: int,
    dtype: jnp.dtype,
) -> Inexact[Array, "n k"]:
    return as_columns(sampler(key, structure, num_probes), dtype)


class Samples(eqx.Module):
    """Draws one sample for each key. It is hashable: `Stream` has it in a static field."""

    name: str
    sampler: Sampler
    structure: Structure

    def __call__(
        self, keys: Key[Array, " samples"] | UInt32[Array, "samples words"]
    ) -> Inexact[Array, "n k"]:
        count = probes_per_sample(self.sampler)
        space = lx.IdentityLinearOperator(self.structure)

        def one(key: PRNGKeyArray) -> Inexact[Array, "n group"]:
            return draw(self.name, self.sampler, key, space, count, in_samples=True)

        columns = jax.vmap(one, out_axes=1)(keys)
        return columns.reshape(columns.shape[0], -1)
