"""The Laplacian of a function: Hutch++ of its Hessian, by directional second derivatives.

With Q an orthonormal basis of the range of H Omega, Omega of k columns, and U a random
orthonormal frame of l directions outside of it,

    tr H = sum_j q_j* H q_j + E (n - k)/l sum_i u_i* H u_i,

in which all products but H Omega are second derivatives of the function along q_j and u_i:
one forward sweep in collapsed Taylor mode. A column of H Omega, forward over reverse mode,
costs twice as much; but it is frozen (`rule`), so gradients do not differentiate it. With
an orthonormal frame, multiples of I are exact, and the variance has the finite-population
correction for l directions out of n - k.
"""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree

from traceax._calculus.sampled import (
    Curvature,
    Field,
    Point,
    along,
    checked_point,
    has_gradient,
    hessian,
    rounding,
    sampled_mean,
)
from traceax._core.canonical import canonical
from traceax._core.checks import check_returned, is_one_real_number
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, size
from traceax._core.rule import Outcome, estimate
from traceax._estimators.readouts import Batches
from traceax._linalg.basis import orthonormalise
from traceax._linalg.jackknife import independent_degrees_of_freedom
from traceax._probes.draw import draw
from traceax._probes.samplers import Sampler, normal
from traceax._probes.stream import ProgressMeter, SamplingDesign, all_at_once

# With so many directions a sketch costs at most a seventh of the accuracy if the spectrum
# is flat (networks before training), and gains factors if it is not (after training).
SKETCHED = 10


def laplacian(
    fn: Field,
    x: Point,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    args: PyTree = None,
    sampler: Sampler | None = None,
    batch_size: int | None = None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Estimate the Laplacian of a function at x, the trace of its Hessian.

        value = mean of d2/dt2 fn(x + t v_i, args) at t = 0

    Unbiased. Exact if `num_matvecs` reaches the number n of entries of x. It is computed
    forwards in collapsed Taylor mode: one sweep carries a first derivative for each probe,
    and one second derivative, the sum over the probes. For squares of residuals in a loss
    there is `unbiased_square`, for the Laplacian of a Laplacian `biharmonic`.

    From 10 directions on, for a function of one real number, a sixth of the directions is
    spent on a sketch of the Hessian. The trace on the range of the sketch is exact, and
    probes estimate the rest. For trained networks in 50 and 100 dimensions, with 16
    directions, the error is 7 to 40 times smaller; where no directions dominate it is 0.9
    to 1.15 times that of probes. Value and gradient together take 0.7 to 0.9 of the time of
    as many probes, the value alone 2 to 4 times as long.

    **Arguments** (the others are in the guide's conventions)

    - `fn`: a function `fn(x, args)` that returns a number, or an array or pytree of
      numbers, real or complex, each of which has a Laplacian.
    - `num_matvecs`: the number of directions, one for each probe, at least 1.
    - `sampler`, `batch_size`: with one there is no sketch. Default: as in `divergence`.

    **Derivatives**: without a sketch exactly those of the value. `fn` must be
    differentiable forwards twice: a `jax.custom_vjp` in it raises JAX's error. If it is not
    differentiable backwards, as a `jax.lax.while_loop` is not, there is no sketch.
    **Cost**: about k + 1 forward passes of `fn` for k = `num_matvecs`; k Hessian-vector
    products would cost 2k and a backward pass. A sketch costs a sixth more, and two QR
    decompositions. The standard error needs up to 2k passes if it is used.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> x = jnp.ones(3)
        >>> estimate = tx.laplacian(lambda x, args: jnp.sum(x**3), x, jax.random.key(0), 3)
        >>> print(estimate.value)
        18.0

    **Reference**: Hutchinson (1989), Communications in Statistics 18(3); Dangel et al.
    (2025), Collapsing Taylor mode automatic differentiation, arXiv:2505.13644; for the
    sketch Meyer et al. (2021), Hutch++, arXiv:2010.09649.
    """
    x = checked_point("laplacian", fn, x, key, num_matvecs)
    check_returned(
        "laplacian", "fn", eqx.filter_eval_shape(fn, x, args), "real or complex numbers"
    )
    subject = Curvature(canonical(fn, x, args), x, args)
    chosen = sampler is None and batch_size is None
    if chosen and SKETCHED <= num_matvecs < size(subject.space) and _sketchable(subject):
        return sketched_laplacian("laplacian", subject, key, num_matvecs)
    return sampled_mean(
        "laplacian", subject, key, num_matvecs, sampler, batch_size, progress_meter
    )


def _sketchable(subject: Curvature) -> bool:
    alone = is_one_real_number(subject.result)
    return alone and has_gradient(subject.fn, subject.x, subject.args)


def sketched_laplacian(
    name: str, subject: Curvature, key: PRNGKeyArray, num_matvecs: int
) -> Estimate:
    """The estimate that messages attribute to the public function `name`, arguments
    checked."""
    space, width = subject.space, _width(num_matvecs)
    rest = num_matvecs - 2 * width
    probes = draw(name, normal, key, space, width + rest)
    shrink = (1 - rest / (size(space) - width)) ** 0.5
    algorithm = partial(_sketched, plan=SamplingDesign(rest, rest, shrink))
    degrees = independent_degrees_of_freedom(rest)
    return estimate(algorithm, subject, probes, num_matvecs, degrees, subject.result)


def _width(num_matvecs: int) -> int:
    """The width of the sketch: a sixth of the budget, but at least 2 columns, because one
    often misses a dominant direction."""
    return max(2, (num_matvecs + 2) // 6)


def _sketched(
    subject: Curvature, probes: Inexact[Array, "n _"], *, plan: SamplingDesign
) -> Outcome:
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
    return Outcome(value, plan.mean_and_error(samples, floor)[1], readout)
