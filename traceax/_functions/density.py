"""The spectral density."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from traceax._core.checks import check_grid, check_positive, check_request
from traceax._core.estimate import Estimate
from traceax._core.operator import Operator, size
from traceax._functions.function_trace import checked_run
from traceax._functions.slq import Plan, Real, planned_slq_trace, real_dtype
from traceax._probes.samplers import Sampler, sphere
from traceax._probes.stream import ProgressMeter
from traceax._quadrature.block_quadrature import Shape

_WIDTHS = "Pass one in the units of the grid, or, of a grid of two points or more, None."


def spectral_density(
    operator: Operator,
    grid: Float[Array, " points"],
    key: PRNGKeyArray,
    num_matvecs: int = 240,
    *,
    num_probes: int | None = None,
    num_steps: int | None = None,
    width: Real | None = None,
    sampler: Sampler = sphere,
    reorthogonalise: bool = True,
    batch_size: int | None = None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Estimate the density of the eigenvalues of a Hermitian operator, on a grid.

        phi(t) = 1/n sum_i N(t; lambda_i, width^2)

    by `slq_trace` of a Gaussian about each point of the grid, from one run; unbiased but
    for quadrature. It is a probability density: its integral over the line is 1.
    Eigenvalues that are separated from the rest are found exactly; within the bulk, m steps
    resolve about its m-th part. Exact if num_probes * num_steps reaches n^2.

    **Arguments** (the others are in the guide's conventions)

    - `operator`: Hermitian; tags are not needed.
    - `grid`: where to evaluate it, a vector of real numbers, in the units of the
      eigenvalues.
    - `num_matvecs`: the budget. Default 240.
    - `num_probes`, `num_steps`: how many probes, and how many Lanczos steps for each. By
      default about four times as many steps as probes: 7 and 34 of 240.
    - `width`: the standard deviation of the Gaussians, positive, in the units of the grid.
      Default: twice the span of the grid over `num_steps`, which half of the steps resolve;
      for smaller widths the error bar grows.
    - `sampler`, `reorthogonalise`: as in `slq_trace`; a density hardly needs the latter.

    **Returns** an `Estimate` with a value of the shape of `grid`, per unit of it.

    **Derivatives**: as those of `slq_trace`: one matvec-VJP for each probe and point of the
    grid, so use coarse grids. **Cost**: at most `num_matvecs` applications.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> operator = lx.DiagonalLinearOperator(jnp.linspace(0.0, 1.0, 400))
        >>> grid = jnp.linspace(-0.5, 1.5, 201)
        >>> density = tx.spectral_density(operator, grid, jax.random.key(0))
        >>> bool(abs(density.value.sum() * 0.01 - 1) < 1e-3)
        True

    **Reference**: Lin, Saad and Yang (2016), Approximating spectral densities,
    doi:10.1137/130934283.
    """
    name = "spectral_density"
    operator = check_request(name, operator, key, num_matvecs)
    check_grid(name, grid)
    grid = jnp.asarray(grid, real_dtype(operator))
    shape, _ = checked_run(name, num_matvecs, num_probes, num_steps, _resolving)
    spread = _resolved(grid, shape.depth) if width is None else width
    check_positive(name, "width", spread, _WIDTHS)
    scale = 1 / (spread * (2 * jnp.pi) ** 0.5 * size(operator))

    def bumps(x: Float[Array, ""]) -> Float[Array, " points"]:
        return scale * jnp.exp(-(((grid - x) / spread) ** 2) / 2)

    run = Plan(*shape, sampler, reorthogonalise, batch_size, progress_meter)
    return planned_slq_trace(name, operator, bumps, key, run)


def _resolving(num_matvecs: int) -> Shape:
    """Details take steps; a few probes are enough, as they meet all eigenvalues."""
    width = max(1, math.isqrt(num_matvecs // 4))
    return Shape(width, num_matvecs // width)


def _resolved(grid: Float[Array, " points"], num_steps: int) -> Float[Array, ""] | float:
    """The default width; 0, which is refused, for a grid of one point."""
    if grid.size == 1:
        return 0.0
    return 2 * (jnp.max(grid) - jnp.min(grid)) / num_steps
