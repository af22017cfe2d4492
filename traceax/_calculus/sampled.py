"""Means over probes of a function's derivatives along them.

`AlongProbes` is a function at a point, of which derivatives along probes are taken;
`Curvature` takes second ones. `hessian` is the Hessian as an operator.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Inexact, PRNGKeyArray, PyTree, Real

from traceax._calculus.taylor import second_derivatives_sum
from traceax._core.checks import check_batch_size, check_count, check_field, check_key
from traceax._core.estimate import Estimate
from traceax._core.operator import Operator, jacobian_operator, working_dtype
from traceax._core.rule import Outcome, estimate
from traceax._core.vectors import Structure, common_dtype, flatten, unflatten
from traceax._estimators.readouts import Batches, exactly
from traceax._linalg.columns import mean
from traceax._probes.draw import for_mean
from traceax._probes.samplers import Sampler
from traceax._probes.stream import (
    ProgressMeter,
    SamplingDesign,
    Stream,
    checked_meter,
    design_and_draw,
    unit_vectors,
)

GivenPoint = PyTree[Real[ArrayLike, "..."]]
Point = PyTree[Inexact[Array, "..."]]
Field = Callable[[Any, Any], Any]


def checked_point(
    name: str, fn: object, x: PyTree, key: PRNGKeyArray, num_matvecs: object
) -> Point:
    """x as strongly typed arrays of floats, the arguments of an estimator checked."""
    point = differentiable_point(name, fn, x)
    check_key(name, key, point)
    check_count(name, "num_matvecs", num_matvecs, 1)
    return point


def differentiable_point(name: str, fn: object, x: PyTree) -> Point:
    """x as strongly typed arrays of floats, function and point checked."""
    check_field(name, fn, x)

    def inexact(leaf: Any) -> Array:
        dtype = jnp.result_type(leaf)
        dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)
        return jax.lax.convert_element_type(leaf, dtype)

    return jax.tree.map(inexact, x)


def hessian(fn: Field, x: Point, args: PyTree) -> Operator:
    """Products with it forwards over one backward pass."""

    def gradient(x: Point, args: PyTree) -> Point:
        return jax.grad(fn)(x, args)

    return jacobian_operator(gradient, x, args, lx.symmetric_tag)


def has_gradient(fn: Field, x: Point, args: PyTree) -> bool:
    """Whether reverse mode works; it does not through a `jax.lax.while_loop`, say."""
    try:
        eqx.filter_eval_shape(jax.grad(fn), x, args)
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True


class AlongProbes(eqx.Module):
    """A function `fn(x, args)` of p numbers at a point x: a subject of the derivative rule,
    which estimates the mean of derivatives along probes."""

    fn: Field
    x: PyTree[Array]
    args: PyTree

    @property
    def result(self) -> Structure:
        return eqx.filter_eval_shape(self.fn, self.x, self.args)

    @property
    @abc.abstractmethod
    def space(self) -> Operator:
        """An operator on the space of the probes."""

    @abc.abstractmethod
    def basis(self, batch_size: int | None) -> Stream:
        """Probes that are not random, over which the sum is exact."""

    def along(self, block: Inexact[Array, "n k"]) -> Inexact[Array, " p"]:
        """The sum of the derivatives along all columns."""
        return jnp.sum(self.along_each(block), axis=1)

    @abc.abstractmethod
    def along_each(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "p k"]:
        """The derivatives along each column."""


def along(subject: AlongProbes, block: Inexact[Array, "n k"]) -> Inexact[Array, " p"]:
    return subject.along(block)


def sampled_mean(
    name: str,
    subject: AlongProbes,
    key: PRNGKeyArray,
    num_matvecs: int,
    sampler: Sampler | None,
    batch_size: int | None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """The mean over probes, or the sum over a basis, on behalf of the public function
    `name`, which has checked the rest."""
    check_batch_size(name, batch_size, 1)
    meter = checked_meter(name, progress_meter)
    space, basis, result = subject.space, subject.basis(batch_size), subject.result
    spent, dtype = basis.num_probes, jnp.finfo(working_dtype(space)).dtype
    if num_matvecs >= spent:
        every = Batches(basis, jnp.ones((), dtype), along)
        return exactly(subject, every, spent, result, meter)
    chosen = for_mean(sampler, space, num_matvecs)
    design, probes = design_and_draw(name, space, key, num_matvecs, chosen, batch_size)
    readout = Batches(probes, jnp.asarray(design.num_probes, dtype), along)
    algorithm = partial(_mean, design=design, meter=meter)
    degrees, spent = design.degrees_of_freedom, design.num_probes
    return estimate(algorithm, subject, readout, name, spent, degrees, result)


def _mean(
    subject: AlongProbes, readout: Batches, *, design: SamplingDesign, meter: ProgressMeter
) -> Outcome:
    """The samples are for the standard error alone: compiled without it, they are free."""
    samples = readout.probes.collect(subject.along_each)
    error = design.mean_and_error(samples, rounding(subject, samples))[1]
    return Outcome(readout(subject, meter), error, readout)


def rounding(subject: AlongProbes, samples: Inexact[Array, "p k"]) -> Float[Array, " p"]:
    leaves = jax.tree.leaves((subject.x, subject.result))
    eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in leaves)
    return 4 * eps * mean(jnp.abs(samples))


class Curvature(AlongProbes):
    @property
    def space(self) -> Operator:
        return lx.IdentityLinearOperator(jax.eval_shape(lambda: self.x))

    def basis(self, batch_size: int | None) -> Stream:
        n = self.space.in_size()
        return unit_vectors(n, working_dtype(self.space), batch_size or n)

    def along(self, block: Inexact[Array, "n k"]) -> Inexact[Array, " p"]:
        structure = self.space.in_structure()
        unflatten_rows = jax.vmap(partial(unflatten, structure=structure), in_axes=1)
        total = second_derivatives_sum(
            lambda x: self.fn(x, self.args), self.x, unflatten_rows(block)
        )
        return flatten(total, common_dtype(total))

    def along_each(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "p k"]:
        return jax.vmap(lambda column: self.along(column[:, None]), 1, 1)(block)
