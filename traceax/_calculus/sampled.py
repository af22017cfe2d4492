"""Means of a function's derivatives along random probes.

`AlongProbes` is a function at a point, together with the kind of derivative that is taken
along a probe. `Curvature` is the case of second derivatives. `sampled_mean` estimates the
mean over probes, and `hessian` is the Hessian as an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Inexact, PyTree

from traceax._calculus.taylor import second_derivatives_sum
from traceax._core.canonical import varying, varying_axes
from traceax._core.checks import check_point
from traceax._core.estimate import Estimate
from traceax._core.operator import Operator, jacobian
from traceax._core.rule import Outcome
from traceax._core.vectors import Structure, common_dtype, flatten, unflatten_rows
from traceax._estimators.call import Call, Streamed
from traceax._estimators.readouts import Batches, applied
from traceax._linalg.columns import Block, mean
from traceax._linalg.jackknife import independent_degrees_of_freedom
from traceax._probes.draw import for_mean
from traceax._probes.stream import Stream

GivenPoint = PyTree[Float[ArrayLike, "..."]]
Point = PyTree[Inexact[Array, "..."]]
Field = Callable[[Any, Any], Any]


def checked_point(name: str, fn: Any, x: Any, *others: Any, jac: Any = None) -> Point:
    """Check a function and a point x, and return x as strongly typed arrays of floats.

    `name` is the public function that errors name, and `jac` says how it differentiates.
    Inside `jax.shard_map` x has the types of that mesh, even if it is closed over, and
    varies wherever `others` do.
    """
    check_point(name, fn, x, jac)
    axes = varying_axes(x, others)
    inside = bool(jax.sharding.get_abstract_mesh().manual_axes)

    def strong(leaf: Any) -> Array:
        dtype = jnp.result_type(float if isinstance(leaf, int) else leaf)
        leaf = jax.lax.convert_element_type(leaf, dtype)
        return varying(leaf * 1 if inside else leaf, axes)

    return jax.tree.map(strong, x)


def hessian(fn: Field, x: Point, args: PyTree, jac: str | None = None) -> Operator:
    """Make the Hessian of `fn` at x, as an operator.

    A matvec is forward over reverse mode, or reverse over reverse mode if `jac` is "bwd".
    All matvecs share one backward pass.
    """

    return jacobian(jax.grad(fn), x, args, lx.symmetric_tag, jac)


def has_gradient(fn: Field, x: Point, args: PyTree) -> bool:
    """Return whether reverse mode works. It does not through a `jax.lax.while_loop`."""
    with suppress(TypeError, ValueError, NotImplementedError):
        eqx.filter_eval_shape(jax.grad(fn), x, args)
        return True
    return False


class AlongProbes(eqx.Module):
    """A function `fn(x, args)` of p numbers at a point x, and derivatives along probes.

    A subclass says how to compute their sum (`__call__`) or each of them (`along_one`). It
    is a subject of the derivative rule, under which the mean of these derivatives over
    probes is estimated. `degrees` says how many degrees of freedom a mean of k samples has.
    """

    degrees = staticmethod(independent_degrees_of_freedom)
    fn: Field
    x: PyTree[Array]
    args: PyTree

    @property
    def result(self) -> Structure:
        return eqx.filter_eval_shape(self.fn, self.x, self.args)

    @property
    def space(self) -> Operator:
        """Return an operator on the space of the probes."""
        return lx.IdentityLinearOperator(jax.eval_shape(lambda: self.x))

    def __call__(self, block: Block) -> Inexact[Array, " p"]:
        """Return the sum of the derivatives along all columns."""
        return jnp.sum(self.along_each(block), axis=1)

    def along_each(self, block: Block) -> Inexact[Array, "p k"]:
        """Return the derivative along each column."""
        return jax.vmap(self.along_one, 1, 1)(block)

    def along_one(self, column: Inexact[Array, " n"]) -> Inexact[Array, " p"]:
        """Return the derivative along one probe."""
        return self(column[:, None])


def sampled_mean(call: Call, subject: AlongProbes, basis: Stream | None = None) -> Estimate:
    """Estimate the mean over probes, or compute the exact sum over a basis.

    The sum is chosen if the budget reaches the number of probes in the basis, which are the
    unit vectors by default. `call` must read results of the structure `subject.result`.
    """
    if call.num_matvecs >= (call.num_exact if basis is None else basis.num_samples):
        return call.exact_by(applied, subject=subject, units=basis)
    streamed = call.using(for_mean(call.operator, call.num_matvecs)).stream()
    design = streamed.design
    spent, freedom = design.num_probes, design.group * subject.degrees(design.num_samples)
    return call.finish(_mean_along, streamed, spent=spent, degrees=freedom, subject=subject)


def _mean_along(subject: AlongProbes, streamed: Streamed) -> Outcome:
    """Take the mean over all probes, and its standard error.

    The samples serve the standard error alone. If a program does not use it, the compiler
    removes them.
    """
    probes, design = streamed.probes, streamed.design
    samples = probes.collect(subject.along_each)
    error = design.mean_and_error(samples, rounding(subject, samples))[1]
    readout = Batches(probes, jnp.asarray(design.num_probes, error.dtype))
    return Outcome(readout(subject, streamed.meter), error, readout)


def rounding(subject: AlongProbes, samples: Inexact[Array, "p k"]) -> Float[Array, " p"]:
    """Return the rounding error of the mean of some samples."""
    leaves = jax.tree.leaves((subject.x, subject.result))
    eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in leaves)
    return 4 * eps * mean(jnp.abs(samples))


class Curvature(AlongProbes):
    """Second derivatives of a function along probes."""

    def __call__(self, block: Block) -> Inexact[Array, " p"]:
        rows = unflatten_rows(block.T, self.space.in_structure())
        total = second_derivatives_sum(lambda x: self.fn(x, self.args), self.x, rows)
        return flatten(total, common_dtype(total))
