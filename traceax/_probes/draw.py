"""Blocks of probes for an operator, and the default choice of a sampler.

`draw` checks the probes of a sampler, and returns them as constant columns of a block.
Estimators read from a sampler whether its samples are independent, whether its probes may
be resphered, and how many probes make one sample. Of a plain function they only assume that
E[z z*] = I.

If the user names no sampler, the default is as follows.

*Sketches* use points on the sphere. Their projections can be resphered, which removes all
of the variance that a multiple of I contributes. But signs are drawn in a fifth to a tenth
of the time, and the gain of resphering falls with n (`tests.benchmarks.samplers`). From
MANY dimensions on, both errors are the same, or at most 1e-5 of the trace, so sketches then
use signs.

*Means of quadratic forms* use signs without replacement, the rows of a Hadamard matrix, if
there are many probes. For any operator they have (m - k)/(m - 1) times the variance of
independent signs, for k probes, with m the least power of 2 that is at least n. To draw
them takes a sort of m numbers. This is too slow if there are fewer probes than PART of the
dimensions, so independent signs are used then.

*Operators with a known pattern* use probing if the budget pays for colours that keep ENOUGH
steps apart. Then it has less error than sketches. With fewer steps it has 0.2 to 6 times
their error (`tests.benchmarks.probing`).
"""

from __future__ import annotations

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PRNGKeyArray, UInt32

from traceax._core.canonical import compiled
from traceax._core.checks import require
from traceax._core.operator import Operator, working_dtype
from traceax._core.sparse import Pattern, own_pattern
from traceax._core.vectors import Structure, as_columns, common_dtype
from traceax._linalg.columns import Block
from traceax._probes.colouring import best_colouring, places, undirected
from traceax._probes.probing import Probing, probing_of
from traceax._probes.samplers import (
    PlainSampler,
    Sampler,
    SamplerLike,
    as_sampler,
    hadamard,
    rademacher,
    sphere,
)

Takes = Literal["independent", "dependent", "coloured", "any"]
"""The samplers that a function can use, by how their probes depend on each other."""

MANY = 100_000
PART = 1 / 8
ENOUGH = 3  # if colours keep fewer steps apart, a sketch is the better choice


def coloured(method: str, sampler: Sampler | None) -> str:
    """Name the method and the colours that it uses: `hutchinson_trace, 36 colours`."""
    colours = getattr(sampler, "num_colours", 0)
    return f"{method}, {colours} colour{'s' * (colours > 1)}" if colours else method


def checked_sampler(name: str, given: SamplerLike, takes: Takes = "independent") -> Sampler:
    """Return the sampler that the user gave.

    Refuse it if its probes depend on each other, unless the function `takes` such samplers.

    Probes drawn without replacement are "dependent", and those that come in groups, one for
    each colour, are "coloured".
    """
    sampler = as_sampler(name, given)
    alone = sampler.population is not None and takes not in ("dependent", "any")
    grouped = sampler.group > 1 and takes not in ("coloured", "any")
    got = f"traceax.{sampler!r}" if alone else f"a sampler of group={sampler.group}"
    got = "traceax.probing" if isinstance(sampler, Probing) else got
    must = "draw independent probes, because each is a sample of its own"
    cure = f"Use traceax.sphere or traceax.rademacher; {got} is for "
    cure += "traceax.hutchinson_trace and traceax.hutchinson_diagonal."
    require(not (alone or grouped), name, "sampler", must, got, cure)
    return sampler


def check_pattern(name: str, operator: Operator, pattern: Any) -> Pattern | None:
    """Read the pattern that the user gave, and return its places.

    If `pattern` is None, return the operator's own pattern, or None if that is not known.
    The result may be passed as `pattern` again.
    """
    n = operator.in_size()
    known = own_pattern(operator) if pattern is None else places(name, pattern)
    if known is not None:
        must, got = f"be {n} x {n}, like the operator's matrix", f"shape {known.shape}"
        cure = "Pass the pattern of this operator, or of the matrix it is a function of."
        require(known.shape == (n, n), name, "pattern", must, got, cure)
    return known


def for_sketch(operator: Operator) -> Sampler:
    """Return the default sampler for sketches."""
    return sphere if operator.in_size() < MANY else rademacher


def for_mean(operator: Operator, num_probes: int) -> Sampler:
    """Return the default sampler for means of quadratic forms."""
    many = num_probes > 1 and num_probes >= PART * operator.in_size()
    return hadamard if many else rademacher


def for_pattern(
    known: Pattern | None, num_probes: int, enough: int = ENOUGH, *, tests: int = 1
) -> Probing | None:
    """Return `probing` if colours keep `enough` steps of the pattern's graph apart.

    `known` is the result of `check_pattern`. Of `num_probes`, `tests` are left for a test
    of the pattern, unless all are needed. If there are too few, or if no pattern is known,
    return None. If the edges are the same as in the last call, its graph, colouring and
    sampler are used again.
    """
    if known is None:
        return None
    edges, least = undirected(known), max(num_probes - tests, 1)
    tries = (best_colouring(edges, enough, count) for count in (least, num_probes))
    return next((probing_of(found) for found in tries if found), None)


def draw(
    name: str, sampler: Sampler, key: PRNGKeyArray, operator: Operator, num_probes: int
) -> Block:
    """Draw probes for an operator, check them, and return them as columns of a block.

    They are constants for derivatives.
    """
    one = Draws(name, sampler, operator.in_structure(), num_probes).one
    drawn = one(key) if isinstance(sampler, PlainSampler) else compiled(one, key)
    return jax.lax.stop_gradient(drawn.astype(working_dtype(operator)))


class Draws(eqx.Module):
    """A function that draws one sample of `num_probes` probes for each key.

    It must be hashable, because `Stream` has it in a static field.
    """

    name: str
    sampler: Sampler
    structure: Structure
    num_probes: int

    def one(self, key: PRNGKeyArray) -> Block:
        """Draw probes, and check that they have the operator's input structure."""
        count, structure, like = self.num_probes, self.structure, jax.ShapeDtypeStruct
        probes = self.sampler(key, structure, count)
        want = jax.tree.map(lambda x: like((count, *x.shape), x.dtype), structure)
        got = jax.tree.map(lambda x: like(jnp.shape(x), jnp.result_type(x)), probes)
        fits = eqx.tree_equal(got, want) is True
        must = f"return the operator's input structure with a leading axis of {count}"
        cure = "Draw every leaf as shape (num_probes, *leaf.shape), leaf.dtype."
        require(fits, self.name, "sampler", must, got, cure)
        return as_columns(probes, common_dtype(structure))

    def __call__(self, keys: Key[Array, " s"] | UInt32[Array, "s words"]) -> Block:
        columns = jax.vmap(self.one, out_axes=1)(keys)
        return jax.lax.stop_gradient(columns.reshape(columns.shape[0], -1))
