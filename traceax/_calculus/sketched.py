"""The Laplacian by a sketch of the Hessian: Hutch++ with directional second derivatives.

With Q an orthonormal basis of the range of H Omega, Omega of k columns, and U a random
orthonormal frame of l directions outside of it,

    tr H = sum_j q_j* H q_j + E (n - k)/l sum_i u_i* H u_i,

in which all products but H Omega are second derivatives of the function along q_j and u_i:
one sweep forwards in collapsed Taylor mode. H Omega, forwards over backwards, costs twice
as much a column; but it is frozen (`rule`), so that a gradient does not go through it. The
frame makes multiples of I exact and, where it is a good part of what there is outside of
the sketch, its variance small: a survey of l out of n - k.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray

from traceax._calculus.curvature import Curvature
from traceax._calculus.hessian import hessian
from traceax._calculus.sampled import along, rounding
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, size
from traceax._core.rule import Outcome, estimate
from traceax._estimators.readouts import Batches
from traceax._linalg.basis import orthonormalise
from traceax._linalg.jackknife import independent_degrees_of_freedom
from traceax._probes.draw import draw
from traceax._probes.plan import Plan
from traceax._probes.samplers import normal
from traceax._probes.stream import all_at_once


def sketched_laplacian(
    name: str, subject: Curvature, key: PRNGKeyArray, num_matvecs: int
) -> Estimate:
    """On behalf of the public function `name`, which has checked all."""
    space, width = subject.space, _width(num_matvecs)
    rest = num_matvecs - 2 * width
    probes = draw(name, normal, key, space, width + rest)
    shrink = (1 - rest / (size(space) - width)) ** 0.5
    algorithm = partial(_sketched, plan=Plan(rest, rest, shrink))
    degrees = independent_degrees_of_freedom(rest)
    return estimate(algorithm, subject, probes, num_matvecs, degrees, subject.result)


def _width(num_matvecs: int) -> int:
    """Of a sketch that takes what few directions dominate, and hardly loses where none do:
    one column often misses what two catch, two now and then what three do."""
    return max(2, (num_matvecs + 2) // 6)


def _sketched(subject: Curvature, probes: Inexact[Array, "n _"], *, plan: Plan) -> Outcome:
    n, width = probes.shape[0], probes.shape[1] - plan.num_probes
    hessian_map = LinearMap(hessian(subject.fn, subject.x, subject.args))
    q = orthonormalise(hessian_map(probes[:, :width])).columns
    outside = probes[:, width:] - q @ (q.T @ probes[:, width:])
    frame = orthonormalise(outside).columns * (n - width) ** 0.5
    directions = jnp.hstack([q, frame / plan.num_probes**0.5])
    one = jnp.ones((), directions.dtype)
    readout = Batches(all_at_once(directions), one, along)
    value, samples = readout(subject), subject.along_each(frame)
    floor = rounding(subject, samples) + rounding(subject, value[:, None])
    return Outcome(value, plan.error_of_mean(samples, floor), readout)
