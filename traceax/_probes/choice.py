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
(m - k)/(m - 1) times the variance of independent ones, m about n, for any operator: .94 of
the error where k is an eighth of n, .71 where it is half. Drawing them takes a sort of m
numbers, which is not worth it below PART of the dimensions.
"""

from __future__ import annotations

import lineax as lx

from traceax._core.operator import size
from traceax._probes.hadamard import hadamard
from traceax._probes.samplers import Sampler, rademacher, sphere

MANY = 100_000
PART = 1 / 8


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
