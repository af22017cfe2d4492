"""Which probes an estimator gets where the user names none.

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

from typing import Any

import lineax as lx

from traceax._core.operator import size
from traceax._probes.colouring import best_colouring
from traceax._probes.graph import graph
from traceax._probes.hadamard import hadamard
from traceax._probes.probing import Probing, of_graph
from traceax._probes.samplers import Sampler, rademacher, sphere

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
