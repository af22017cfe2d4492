"""What estimators must know of a sampler: whether its probes are independent of each other,
whether they may be resphered, how many of them make one sample.

Of a sampler that we do not know nothing is believed but that E[z z*] = I.
"""

from __future__ import annotations

import math
from functools import partial

from traceax._probes.hadamard import hadamard, order
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
