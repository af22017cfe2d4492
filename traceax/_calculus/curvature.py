"""Second derivatives of a function along probes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree

from traceax._calculus.taylor import second_derivatives_sum
from traceax._core.checks import check_batch_size
from traceax._core.estimate import Estimate
from traceax._core.operator import (
    Structure,
    common_dtype,
    flatten,
    prepare,
    size,
    unflatten,
)
from traceax._core.rule import Outcome, estimate_of
from traceax._linalg.columns import mean
from traceax._probes.plan import Plan, plan_and_draw
from traceax._probes.samplers import Sampler
from traceax._probes.stream import Stream, unit_vectors


class Curvature(eqx.Module):
    """A function `fn(x, args)` of p numbers at a point x of n: a subject of the rule."""

    fn: Callable[[Any, Any], Any]
    x: PyTree[Array]
    args: PyTree

    @property
    def space(self) -> lx.AbstractLinearOperator:
        """What probes are drawn for."""
        return lx.IdentityLinearOperator(jax.eval_shape(lambda: self.x))

    @property
    def result(self) -> Structure:
        return eqx.filter_eval_shape(self.fn, self.x, self.args)

    def along(self, block: Inexact[Array, "n k"]) -> Inexact[Array, " p"]:
        """The sum of the second derivatives along all columns."""
        structure = self.space.in_structure()
        cut = jax.vmap(partial(unflatten, structure=structure), in_axes=1)
        total = second_derivatives_sum(lambda x: self.fn(x, self.args), self.x, cut(block))
        return flatten(total, common_dtype(total))

    def along_each(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "p k"]:
        return jax.vmap(lambda column: self.along(column[:, None]), 1, 1)(block)


class MeanCurvature(eqx.Module):
    """The readout: `share` times the sum over probes."""

    probes: Stream
    share: float = eqx.field(static=True)

    def __call__(self, subject: Curvature) -> Inexact[Array, " p"]:
        return self.probes.reduce(subject.along) * self.share


def sampled_laplacian(
    name: str,
    subject: Curvature,
    key: PRNGKeyArray,
    num_matvecs: int,
    sampler: Sampler,
    batch_size: int | None,
) -> Estimate:
    """The mean over probes, or the sum over a basis, on behalf of the public function
    `name`, which has checked the rest."""
    check_batch_size(name, batch_size, 1)
    space = subject.space
    if num_matvecs >= size(space):
        probes = unit_vectors(space, batch_size or size(space))
        algorithm, degrees = _exact, float(size(space))
    else:
        plan, probes = plan_and_draw(name, space, key, num_matvecs, sampler, batch_size)
        algorithm = partial(_mean, plan=plan)
        degrees = plan.degrees_of_freedom
    spent = probes.num_probes
    return estimate_of(prepare(subject), algorithm, probes, spent, degrees, subject.result)


def _exact(subject: Curvature, basis: Stream) -> Outcome:
    readout = MeanCurvature(basis, 1.0)
    value = readout(subject)
    return Outcome(value, jnp.zeros_like(value.real), readout)


def _mean(subject: Curvature, probes: Stream, *, plan: Plan) -> Outcome:
    """The samples are for the standard error alone, and cost nothing if it is not used."""
    readout = MeanCurvature(probes, 1 / plan.num_probes)
    samples = probes.collect(subject.along_each)
    leaves = jax.tree.leaves((subject.x, subject.result))
    eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in leaves)
    rounding = 4 * eps * mean(jnp.abs(samples))
    return Outcome(readout(subject), plan.error_of_mean(samples, rounding), readout)
