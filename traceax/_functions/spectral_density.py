"""Spectral densities: the trace of a Gaussian about each point of a grid.

The run is that of `function_trace`, with more steps than probes. Separated eigenvalues
are in all of the spaces that leave a probe out, so their weights have no noise. With the
quadrature of each probe, which is all that remains in batches and with colours, the weight
of a separated eigenvalue has the relative error sqrt(2/k).
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray

from traceax._core import checks
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator, frozen
from traceax._functions.arguments import Real, real_dtype
from traceax._functions.exact_functions import entries, exact_function_trace, is_small
from traceax._functions.function_trace import leave_one_out
from traceax._functions.krylov import Krylov, begin_run, checked_run, kept_run
from traceax._functions.slq import quadratures
from traceax._linalg.columns import largest_modulus
from traceax._probes.samplers import SamplerLike, sphere
from traceax._probes.stream import ProgressMeter
from traceax._quadrature.block_quadrature import Shape
from traceax._quadrature.dense import decompose
from traceax._quadrature.scalar import MatrixFunction, scalar_function

_WIDTHS = "Pass one in the units of the grid, or, of a grid of two points or more, None."


def spectral_density(
    operator: Operator | Krylov,
    grid: Float[Array, " points"] | None,
    key: PRNGKeyArray | None = None,
    num_matvecs: int = 240,
    *,
    num_probes: int | None = None,
    num_steps: int | None = None,
    width: Real | None = None,
    sampler: SamplerLike | None = None,
    reorthogonalise: bool = True,
    batch_size: int | None = None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Estimate the density of the eigenvalues of a Hermitian operator, on a grid.

        phi(t) = 1/n sum_i N(t; lambda_i, width^2)

    It is `function_trace` of a Gaussian about each point of the grid, from one run, and
    unbiased except for quadrature. Its integral over the line is 1. Eigenvalues that are
    separated from the rest are found exactly, their places and their weights. Within the
    bulk, m steps resolve about an m-th part of it. The value is exact whenever
    `function_trace` is.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a Hermitian lineax operator, as in `function_trace`, or a finished run, as
      in `krylov`. A run for densities has four times as many steps as probes.
    - `grid`: the points at which to evaluate the density, a vector of real numbers in the
      units of the eigenvalues. `None` means 200 points, from three widths below the least
      eigenvalue that the run sees to three widths above the largest. These points are
      constants, and `batch_size` cannot be given. To `pool` several runs, pass the grid of
      the first to all others.
    - `key`: one JAX random key, for example `jax.random.key(0)`; none with a run.
    - `num_matvecs`: the budget. Default 240.
    - `num_probes`: the number of probes. Default `None`, which lets traceax choose. The
      default budget gives 7 probes.
    - `num_steps`: the number of steps for each probe. Default `None`, which lets traceax
      choose. The default budget gives 34 steps.
    - `width`: the standard deviation of the Gaussians, positive, in the units of the grid.
      For smaller widths the error bar grows. Default `None`, which means twice the span of
      the grid (or of the eigenvalues seen, if `grid` is `None`) divided by `num_steps`.
      Half of the steps are enough to resolve this width.
    - `sampler`: a sampler of independent probes, or, with a `grid`, `probing`. Default
      `None`, which is `sphere`.
    - `reorthogonalise`: whether each step is made orthogonal to all earlier steps. `False`
      is quicker, and is used if there is a `grid`. The density is then `slq_trace` of the
      Gaussians, in which the weights of separated eigenvalues have the noise of the probes,
      as they have with `probing` and in batches. Default `True`.
    - `batch_size`: how many probes are in memory at a time, an int of at least 1. Default
      `None`, which means all of them.
    - `progress_meter`: an object that shows the progress, for example
      `diffrax.TqdmProgressMeter()`. Default `None`, which shows nothing.

    **Returns** an `Estimate` with a value of the shape of its `grid`. The value is a
    density per unit of the grid.

    **Derivatives**: they are as for `function_trace`, with 0.8 `num_matvecs` matvec-VJPs
    for each point of the grid, or, with `reorthogonalise=False`, one for each probe and
    point. So use coarse grids.

    **Cost**: at most `num_matvecs` matvecs.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> operator = lx.DiagonalLinearOperator(jnp.linspace(0.0, 1.0, 400))
        >>> density = tx.spectral_density(operator, None, jax.random.key(0))
        >>> bool(abs(jnp.trapezoid(density.value, density.grid) - 1) < 1e-2)
        True

    **Reference**: Lin, Saad and Yang (2016),
    [doi:10.1137/130934283](https://doi.org/10.1137/130934283). Compare Matti and others
    (2025), [arXiv:2502.18626](https://arxiv.org/abs/2502.18626).

    **See also**: `slq_trace`, `pool`.
    """
    name, takes = "spectral_density", "independent" if grid is None else "coloured"
    budgets, how = (num_matvecs, num_probes, num_steps), {"least": 1, "takes": takes}
    how |= {"left_out": {"sampler": sampler, "batch_size": batch_size}}
    how |= {"sampler": sphere if sampler is None else sampler}
    call = begin_run(name, operator, key, budgets, progress_meter, **how)
    call = replace(call, batch_size=checks.check_batch_size(name, batch_size, 1))
    shape, budget = checked_run(call, budgets, _resolving)
    checks.check_samples(name, shape.width, call.group, "num_probes")
    checks.check_positive(name, "width", 1.0 if width is None else width, _WIDTHS)
    is_exact = lx.is_diagonal(call.operator) or is_small(call.operator, budget)
    if grid is not None:
        checks.check_grid(name, grid)
        points = jnp.asarray(grid, real_dtype(call.operator))
        spread = 2 * jnp.ptp(points) / shape.depth if width is None else width
        checks.check_positive(name, "width", spread, _WIDTHS)
    elif batch_size is not None:
        must = "be given with batch_size, because no batch sees the whole spectrum"
        cure = "Pass jax.numpy.linspace(low, high, 200), or leave out batch_size."
        raise checks.invalid(ValueError, name, "grid", must, "None", cure)
    else:
        run = call.finished or kept_run(call, shape, budget)  # gives the density, too
        call = replace(call, operator=run.operator, finished=run)
        points, spread = _about(_seen(run), width, shape.depth)
    scale = 1 / (spread * (2 * jnp.pi) ** 0.5 * call.operator.in_size())

    def bumps(x: Float[Array, ""]) -> Float[Array, " points"]:
        return scale * jnp.exp(-(((points - x) / spread) ** 2) / 2)

    fn, structure = scalar_function(name, bumps, real_dtype(call.operator))
    subject = MatrixFunction(LinearMap(call.operator), fn)
    if is_exact:
        density = exact_function_trace(call, fn, structure)
    elif call.group > 1 or batch_size is not None or not (reorthogonalise or grid is None):
        how = {"reorthogonalise": reorthogonalise}
        density = quadratures(call, subject, structure, shape, **how)
        if call.group == 1:
            density = _with_theory(density, scale / shape.width)
    else:
        density = leave_one_out(call, subject, structure, shape)
    return replace(density, grid=jax.lax.stop_gradient(points))


def _seen(run: Krylov) -> Float[Array, " m"]:
    """Return the eigenvalues that a run sees, or all if answers are exact."""
    if run.run is not None:
        return decompose(run.run.space.completed()).values
    known = entries(frozen(run.operator), run.budget)
    assert known is not None
    return known.array if known.array.ndim == 1 else decompose(known.array).values


def _with_theory(density: Estimate, peak: Real) -> Estimate:
    """Make the standard error at least what theory says of sums of positive terms.

    A mean of k forms v* f(A) v has the variance 2 sum_i f_i^2 / k, and `peak` is the
    largest f_i over k. The sum of squares is the largest f_i times the sum of all if one
    eigenvalue alone is near, and 1/sqrt(2) of that within a bulk, for which this is right.
    If one is near, the samples are so skewed that a low mean comes with a small spread.
    """
    value = jnp.maximum(jax.lax.stop_gradient(density.value), 0)
    error = jnp.sqrt(2**0.5 * jax.lax.stop_gradient(peak) * value)
    return replace(density, standard_error=jnp.maximum(density.standard_error, error))


def _about(
    values: Float[Array, "..."], width: Real | None, num_steps: int
) -> tuple[Float[Array, " points"], Real]:
    """Return the grid about the eigenvalues that a run sees, and the width."""
    low, high = jnp.min(values), jnp.max(values)
    rounding = jnp.finfo(values.dtype).eps ** 0.5 * largest_modulus(values)
    span = jnp.maximum(high - low, rounding)
    span = jnp.where(span == 0, 1, span)
    width = 2 * span / num_steps if width is None else width
    margin = 3 * jax.lax.stop_gradient(jnp.asarray(width, values.dtype))
    return jnp.linspace(low - margin, high + margin, 200, dtype=values.dtype), width


def _resolving(num_matvecs: int) -> Shape:
    """Choose a run with more steps than probes.

    Only steps resolve details. A few probes are enough, because each one meets all
    eigenvalues.
    """
    width = max(1, math.isqrt(num_matvecs // 4))
    return Shape(width, num_matvecs // width)
