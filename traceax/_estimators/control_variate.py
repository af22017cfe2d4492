"""The trace of an operator, with the help of a cheaper operator whose trace is known.

Let C be an operator like A with known trace, for example A on a coarse grid, the inverse of
a preconditioner, or the Hessian of the last epoch. Let z_i be independent isotropic probes,
and

    a_i = z_i* A z_i,        c_i = z_i* C z_i.

The error of c_i is known, so the part that it shares with the error of a_i can be
subtracted:

    tr A = E[ a_i - b_i (c_i - tr C) ]        for any b_i that does not depend on z_i.

The best b is the slope of the regression of a on c. If it were computed from all probes,
the mean would be biased. So each probe has its own b_i, which is computed from the *other*
probes (`jackknife.slopes_of_others`), and the value is the mean over i.

The derivative treats the b_i as constants: d value = mean of z_i* dA z_i - b_i (z_i* dC z_i
- d tr C). Its expectation is tr dA, whatever dC is.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Inexact, PRNGKeyArray

from traceax._core.checks import check_operator, check_trace, require, show
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator, known_diagonal, working_dtype
from traceax._core.rule import Outcome
from traceax._estimators.call import Streamed, begin
from traceax._linalg.columns import column_dots, mean, times
from traceax._linalg.jackknife import slopes_of_others
from traceax._probes.samplers import SamplerLike, rademacher
from traceax._probes.stream import ProgressMeter, Stream


def control_variate_trace(
    operator: Operator,
    control: Operator,
    key: PRNGKeyArray,
    num_matvecs: int,
    *,
    control_trace: Inexact[ArrayLike, ""] | None = None,
    sampler: SamplerLike = rademacher,
    batch_size: int | None = None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Estimate tr A from probes of A and of a similar, cheaper operator C of known trace.

        value = mean of a_i - b_i (c_i - tr C),    a_i = z_i* A z_i,  c_i = z_i* C z_i

    b_i is the slope of a_j against c_j over the other probes j. The estimate is unbiased.
    It is exact if C is a multiple of A and there are at least 4 probes, or if `num_matvecs`
    reaches n. The error is smaller, the closer C is to a multiple of A plus a multiple
    of I. A C that does not resemble A costs little accuracy. C can be, for example, A on a
    coarse grid, the inverse of a preconditioner, or the Hessian of the last epoch.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `control`: the operator C. It acts on the same space as `operator`. It is applied to
      the same probes.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the number of probes, and of matvecs of `operator`, at least 1. Matvecs
      of `control` are not counted. With fewer than 4 probes the control is not used.
    - `control_trace`: the number tr C. You can leave it out if `control` stores its
      diagonal, as matrices do. Default `None`.
    - `sampler`: a sampler of independent probes. Default `rademacher`.
    - `batch_size`: how many probes are in memory at a time, an int of at least 1. Default
      `None`, which means all of them.
    - `progress_meter`: an object that shows the progress, for example
      `diffrax.TqdmProgressMeter()`. Default `None`, which shows nothing.

    **Returns** an `Estimate` with a value of shape `()`. The value is real if the operator
    is known to be Hermitian.

    **Derivatives**: they are unbiased with respect to both operators and `control_trace`.
    b_i is frozen. A gradient costs one matvec-VJP of each operator per probe.

    **Cost**: k = `num_matvecs` matvecs of each operator in one batch, and 3 blocks of n x k
    (n x batch_size).

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> coarse = jnp.diag(jnp.arange(300.0)) + jnp.sin(jnp.arange(300.0))[:, None]
        >>> operator = tx.as_operator(lambda v: coarse @ v + 1e-3 * jnp.roll(v, 1), 300)
        >>> control, key = tx.as_operator(coarse), jax.random.key(0)
        >>> estimate = tx.control_variate_trace(operator, control, key, 20)
        >>> bool(abs(estimate.value - jnp.trace(coarse)) < 0.1)
        True

    **Reference**: Lavenberg and Welch (1981), A perspective on the use of control
    variables, [doi:10.1287/mnsc.27.3.322](https://doi.org/10.1287/mnsc.27.3.322), on slopes
    and their bias.

    **See also**: `hutchinson_trace`, `deltashift`.
    """
    name = "control_variate_trace"
    call = begin(name, operator, key, num_matvecs, sampler=sampler)
    call = call.in_batches(batch_size, progress_meter)
    control = check_operator(name, control, argument="control")
    space, own = call.operator.in_structure(), control.in_structure()
    must, cure = f"act on the operator's space, {show(space)}", "Restrict or extend it."
    require(show(own) == show(space), name, "control", must, show(own), cure)
    if control_trace is None and (known := known_diagonal(control)) is not None:
        control_trace = jnp.sum(known[0])
    trace = check_trace(name, "control_trace", control_trace, working_dtype(control))
    subject = _Pair(LinearMap(call.operator), LinearMap(control), trace)
    if call.is_exact:
        return call.exact()
    streamed = call.stream()
    degrees, spent = streamed.design.degrees(), streamed.design.num_probes
    return call.finish(_estimate, streamed, spent=spent, degrees=degrees, subject=subject)


class _Pair(eqx.Module):
    """A, C and tr C, which together are the subject of the derivative rule."""

    linear_map: LinearMap
    control: LinearMap
    trace: Inexact[Array, ""]

    def forms(self, z: Inexact[Array, "n b"]) -> tuple[Array, Array, Array]:
        """Return a_i, c_i - tr C, and the sizes of a_i and c_i.

        A size is the sum of the moduli of all terms, from which rounding is estimated.
        """
        images = self.linear_map(z), self.control(z)
        a, c = (column_dots(z, image) for image in images)
        a, off = a.real if self.linear_map.is_hermitian else a, c - self.trace
        off = off.real if self.control.is_hermitian else off
        sizes = [column_dots(jnp.abs(z), jnp.abs(image)) for image in images]
        return a, off, jnp.stack(sizes)


def _read(probes: Stream, slopes: Array, subject: _Pair) -> Inexact[Array, ""]:
    """Read both operators: the mean of a_i - b_i (c_i - tr C). `slopes` are the b_i."""
    a, off, _ = probes.collect(subject.forms)
    return mean(_corrected(a, off, slopes))


def _corrected(a: Array, off: Array, slopes: Array) -> Inexact[Array, " k"]:
    """Return a_i - b_i (c_i - tr C), or its real part if the a_i are real."""
    correction = times(slopes, off)
    return a - (correction if jnp.iscomplexobj(a) else correction.real)


def _estimate(subject: _Pair, streamed: Streamed) -> Outcome:
    """Estimate the trace, with a readout that keeps the slopes."""
    a, off, sizes = streamed.probes.collect(subject.forms, streamed.meter)
    sizes, k = mean(sizes), off.size
    eps = jnp.maximum(subject.linear_map.eps, subject.control.eps)
    slopes = slopes_of_others(off, a, floor=k**0.5 * 4 * eps * sizes[1])
    rounding = 4 * eps * (sizes[0] + jnp.max(jnp.abs(slopes)) * sizes[1])
    samples = _corrected(a, off, slopes)
    value, error = streamed.design.mean_and_error(samples, rounding)
    return Outcome(value, error, Partial(_read, streamed.probes, slopes))
