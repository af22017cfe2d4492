"""Stochastic Lanczos quadrature: tr f(A) = E[v* f(A) v], each form by Gauss quadrature.

`slq_trace` estimates a trace, and `quadratures` is what it shares with the functions that
use colours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox.internal import Static
from jax.tree_util import Partial
from jaxtyping import Array, Float, Inexact, PRNGKeyArray, PyTree

from traceax._core import checks
from traceax._core.estimate import Estimate
from traceax._core.operator import (
    Operator,
    frozen,
)
from traceax._core.rule import Outcome, Readout, Values
from traceax._estimators.call import Call, Streamed, begin
from traceax._functions.arguments import (
    Function,
    real_dtype,
    subject_of,
)
from traceax._functions.exact_functions import exact_function_trace
from traceax._linalg import jackknife
from traceax._linalg.columns import Block, einsum, promoted
from traceax._linalg.krylov import Lanczos, lanczos, truncated
from traceax._probes.probing import neighbour_residuals
from traceax._probes.samplers import SamplerLike, sphere
from traceax._probes.stream import ProgressMeter, SamplingDesign, Stream
from traceax._quadrature.block_quadrature import Shape
from traceax._quadrature.dense import Eigen, decompose_above
from traceax._quadrature.nodes import (
    Nodes,
    Rules,
    SplitRule,
    in_domain,
    mixture,
    node_weights,
    slopes_at,
    weighted_sum,
)
from traceax._quadrature.scalar import (
    MatrixFunction,
    Traces,
    combination,
    scalar_function,
    traces_outcome,
)


def slq_trace(
    operator: Operator,
    fn: Function,
    key: PRNGKeyArray,
    *,
    num_probes: int,
    num_steps: int,
    sampler: SamplerLike = sphere,
    reorthogonalise: bool = True,
    batch_size: int | None = None,
    progress_meter: ProgressMeter | None = None,
    combine: Callable | None = None,
) -> Estimate:
    """Estimate tr f(A) of a Hermitian operator by stochastic Lanczos quadrature.

        value = mean over probes v of |v|^2 e_1* f(T) e_1,    T the Lanczos matrix of v

    The estimate is unbiased except for the quadrature error, which falls geometrically with
    `num_steps` if f is smooth on the spectrum. `function_trace` is better if few
    eigenvalues make up most of the sum, and `logdet` is better for log-determinants. The
    value is exact, from an eigendecomposition, if num_probes * num_steps reaches n^2, which
    is the cost of n steps from n probes.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a Hermitian lineax operator A, as in `function_trace`.
    - `fn`: the function f of a real scalar, as in `function_trace`.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_probes`: the number of probes, an int of at least 1. With `probing`, it is a
      multiple of the number of colours.
    - `num_steps`: the number of Lanczos steps for each probe, an int of at least 1.
    - `sampler`: a sampler of independent probes, or `probing`. Default `sphere`.
    - `reorthogonalise`: whether each step is made orthogonal to all earlier steps, which
      takes 4 n num_steps more flops for each step. Without it, converged eigenvalues appear
      again as copies. This is harmless for few steps or smooth functions, and faster for
      cheap operators, but logarithms and inverses of ill-conditioned operators lose digits.
      Default `True`.
    - `batch_size`: how many probes are in memory at a time, an int of at least 1. Default
      `None`, which means all of them.
    - `progress_meter`: an object that shows the progress, for example
      `diffrax.TqdmProgressMeter()`. Default `None`, which shows nothing.
    - `combine`: a function of the traces, as in `function_trace`. Default `None`.

    **Returns** an `Estimate` with the structure of what `fn` returns, or of what `combine`
    returns if it is given.

    **Derivatives**: the value can be differentiated as in `function_trace`, with one
    matvec-VJP for each probe and trace, or three if the operator is tagged semidefinite.
    Second derivatives differentiate the recurrence (num_steps matvec-JVPs for each probe).
    Gradients need about twice as many steps as it takes to make `standard_error` small.

    **Cost**: num_probes * num_steps matvecs, in num_steps batches, and memory for
    num_probes blocks of n x num_steps. With `reorthogonalise=False`, if you compile the
    value alone, three vectors are enough. An exact value takes n matvecs, or none if the
    operator stores its matrix.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> x, key = jnp.linspace(1.0, 2.0, 500), jax.random.key(0)
        >>> operator = lx.DiagonalLinearOperator(x)
        >>> estimate = tx.slq_trace(operator, jnp.log, key, num_probes=30, num_steps=8)
        >>> bool(abs(estimate.value - jnp.log(x).sum()) < 3 * estimate.standard_error)
        True

    **Reference**: Ubaru, Chen and Saad (2017),
    [doi:10.1137/16M1104974](https://doi.org/10.1137/16M1104974). The derivative is derived
    in `traceax/_quadrature/nodes.py`.

    **See also**: `function_trace`, `logdet`, `spectral_density`.
    """
    name = "slq_trace"
    num_probes = checks.check_count(name, "num_probes", num_probes, 1)
    num_steps = checks.check_count(name, "num_steps", num_steps, 1)
    budget = num_probes * num_steps
    call = begin(name, operator, key, budget, sampler=sampler, takes="coloured")
    call = call.in_batches(batch_size, progress_meter)
    checks.check_samples(name, num_probes, call.group, "num_probes")
    shape = Shape(num_probes, num_steps)
    fn, structure = scalar_function(name, fn, real_dtype(call.operator))
    together, structure = combination(name, combine, fn, structure)
    if call.num_matvecs >= call.operator.in_size() ** 2:
        return exact_function_trace(call, fn, structure, together)
    subject = subject_of(call.operator, fn, together)
    return quadratures(call, subject, structure, shape, reorthogonalise=reorthogonalise)


def quadratures(
    call: Call,
    subject: MatrixFunction,
    structure: PyTree,
    shape: Shape,
    *,
    reorthogonalise: bool = True,
) -> Estimate:
    """Estimate a trace by the quadrature of each probe. `shape` has the number of probes
    and of steps."""
    steps = min(shape.depth, call.operator.in_size()), reorthogonalise
    streamed = replace(call, num_matvecs=shape.width).stream()
    design, spent, source = streamed.design, streamed.num_matvecs, streamed.probes
    near = streamed.neighbourhood if design.num_samples == 1 else None
    algorithm, probes = partial(_slq_in_batches, steps=steps), streamed
    if source.shown(call.meter).is_whole:
        algorithm = partial(_spaces, steps=steps), partial(_slq, design=design)
        probes = source.source, near
    cost = {"spent": spent * steps[0], "degrees": design.degrees(near is not None)}
    return call.finish(algorithm, probes, structure=structure, subject=subject, **cost)


Steps = tuple[int, bool]
"""The number of Lanczos steps, and whether each is made orthogonal to all earlier ones."""


Spaces = tuple[Lanczos, Any, Any]
"""The Krylov spaces of some probes. If these are a single repeat of `probing`, they come
next, with the neighbourhood of their colours."""


def _spaces(subject: MatrixFunction, made: tuple[Block, Any], *, steps: Steps) -> Spaces:
    """Run Lanczos' process from each probe, and from the test probe if there is one."""
    z, near = made
    block, (num_steps, again) = z if near is None else near.with_test(z), steps
    krylov = lanczos(subject.linear_map, block.T, num_steps, reorthogonalise=again)
    return krylov, None if near is None else z, near


def _slq(subject: MatrixFunction, spaces: Spaces, *, design: SamplingDesign) -> Outcome:
    """Estimate the traces from the Krylov spaces of all probes."""
    samples, readout = sample(subject, spaces, design.num_probes)
    return samples.outcome(subject, design, readout)


def _slq_in_batches(subject: MatrixFunction, made: Streamed, *, steps: Steps) -> Outcome:
    """Estimate the traces from one batch of probes after the other."""
    how, probes = Static((made.design.num_probes, steps)), made.probes
    samples = probes.collect(lambda z: _of_batch(subject, how, z)[0], made.meter)
    return samples.outcome(subject, made.design, Partial(_read_batches, probes, how))


def _of_batch(subject: MatrixFunction, how: Static, z: Block) -> tuple[Sampled, Nodes]:
    num_probes, steps = how.value
    return sample(subject, _spaces(subject, (z, None), steps=steps), num_probes)


def _read_batches(probes: Stream, how: Static, subject: MatrixFunction) -> Values:
    """Read the traces by quadratures that are made again, one batch at a time, because the
    batches do not keep their Krylov spaces.

    The nodes are constants here: the Krylov run is computed on a frozen subject.
    """
    held = frozen(subject)
    return probes.reduce(lambda z: _of_batch(held, how, z)[1](subject))


Levels = Inexact[Array, "levels rules p N"]
Terms = Float[Array, "p N"]
OfRows = Float[Array, "p n"]
Errors = tuple[Float[Array, " p"], Float[Array, " p"]]


class Sampled(eqx.Module):
    """The results of N probes for the traces of p functions.

    `levels` has the term of each probe in the estimate, first from all steps and then from
    fewer steps. `sizes` and `slopes` are the same terms of |f| and of |f'|, and `moved` is
    the distance by which noise may have moved a node. `indicator` is empty, or has the
    errors of the entries of the diagonal, which all probes together show by neighbour
    residuals. The quadrature error of a single step is unknown, unless n = 1.
    """

    levels: Levels
    sizes: Terms
    slopes: Terms
    moved: Float[Array, " N"]
    indicator: tuple[OfRows, ...]

    def outcome(
        self, subject: MatrixFunction, design: SamplingDesign, readout: Readout
    ) -> Outcome:
        """Return the value, its standard error, and the readout for the derivative."""
        terms = mixture(self.levels)[0]
        eps = float(jnp.finfo(self.moved.dtype).eps)
        total = jnp.sum(terms, axis=1)
        samples = design.totals(terms * design.num_samples)
        bounds = self.sizes, self.slopes, *self.indicator
        # A single step has a single level.
        is_unresolved = len(self.levels) == 1 and subject.linear_map.operator.in_size() > 1
        traces = Traces(total, samples, self.levels, bounds, readout)

        def error_of(levels: Levels, sizes: Terms, slopes: Terms, *rows: OfRows) -> Errors:
            """Return the error of sampling and rounding, and the error of quadrature.

            The rounding error includes the change of f at nodes that noise has moved.
            """
            totals = jnp.sum(levels, axis=-1)
            rounding = 4 * eps * jnp.sum(sizes, axis=1)
            rounding = rounding + jnp.max(self.moved) * jnp.sum(slopes, axis=1)
            terms, share = mixture(levels)
            if rows:
                error = jackknife.length(rows[0], rounding)
            else:
                error = design.mean_and_error(terms * design.num_probes, rounding)[1]
            how = {"rounding": rounding, "unresolved": is_unresolved}
            return error, jackknife.error_of_rules(totals, share, **how)

        return traces_outcome(subject, traces, error_of)


def sample(
    subject: MatrixFunction, spaces: Spaces, num_probes: int
) -> tuple[Sampled, Nodes]:
    """Return v* f(A) v / num_probes for each of some probes v, by quadrature.

    `num_probes` counts the probes of all batches. The second result has the nodes and
    weights of the quadratures, from which the derivative is read.
    """
    krylov, _, near = spaces
    num_steps = krylov.projection.shape[1]
    sizes = _sizes(num_steps, mixed=subject.node is not None)
    projections = jax.vmap(partial(truncated, sizes=sizes), out_axes=1)(krylov.projection)
    found, grain = decompose_above(projections, subject.bound)
    # Eigenvalues at the level of rounding become zero, as in `decompose`.
    theta = jnp.where(jnp.abs(found.values) <= 4 * grain, 0, found.values)
    found = Eigen(theta, found.vectors)
    eps, noise = float(jnp.finfo(theta.dtype).eps), jax.lax.stop_gradient(krylov.noise)
    # How far noise may have moved the nodes of each probe.
    moved = noise + 4 * eps * jnp.max(jnp.abs(theta[0]), axis=1)
    near_zero = jnp.broadcast_to(noise[None, :, None], theta.shape)
    may_move = (theta < 0) & (theta >= -4 * near_zero)
    nodes, values, _ = in_domain(subject.fn, theta, near_zero, may_move)
    # A test probe, which comes after all others, is no part of the value.
    counted = jnp.asarray(np.arange(len(krylov.length)) < num_probes, krylov.length.dtype)
    coefficients = (krylov.length**2 * (counted / num_probes))[:, None, None]
    whole, basis = Eigen(nodes[0], found.vectors[0]), krylov.basis
    values = jnp.swapaxes(values, -1, -2)
    rules = Rules(nodes[:, None], values[:, None])
    slopes = jnp.swapaxes(slopes_at(subject.fn, nodes[0], moved[:, None]), -1, -2)
    each = jax.vmap(partial(node_weights, coefficients))
    if subject.node is not None:
        below, blur = _below(krylov, sizes), 4 * grain + near_zero
        rules = rules.with_node(subject, found, below, blur, moved[:, None])
        basis = jnp.concatenate([basis, krylov.new[:, None]], axis=1)
        slopes = jnp.pad(slopes, ((0, 0), (0, 0), (0, 1)))
    weights = rules.weights(each(found.vectors), each)
    rows = weights.reshape(*weights.shape[:2], 1, -1)
    split = SplitRule(basis, whole, coefficients, num_steps, rules, rows)
    indicator = () if near is None else (_indicator(spaces, whole, values[0]),)
    first = weights[0, 0, :, None]
    terms = (
        weighted_sum(weights[..., None, :], rules.values),
        weighted_sum(first, jnp.abs(rules.values[0, 0])),
        weighted_sum(first, slopes),
    )
    levels, sizes, slopes = (jnp.moveaxis(x, -1, -2)[..., :num_probes] for x in terms)
    return Sampled(levels, sizes, slopes, moved[:num_probes], indicator), split.nodes()


def _sizes(num_steps: int, *, mixed: bool) -> list[int]:
    """Return the numbers of steps at which T is read: all, and a quarter and two quarters
    of them less, and one and two less than all (see `jackknife.quadrature_error`); or, for
    the mixture of two rules, two steps less and one less (`jackknife.bracket_error`)."""
    stride = max(1, num_steps // 4)
    fewer = [0, 2, 1] if mixed else [0, stride, 2 * stride, *range(1, min(stride, 3))]
    return [num_steps - less for less in fewer if less < num_steps]


def _below(krylov: Lanczos, sizes: list[int]) -> Inexact[Array, "levels N 1 m"]:
    """Return the row below T that couples it to the next step, for every size."""
    m = krylov.projection.shape[1]
    padded = jnp.pad(krylov.projection, ((0, 0), (0, 1), (0, 0)))
    padded = padded.at[:, m, m - 1].set(krylov.below)
    rows = [jnp.where(np.arange(m) < s, padded[:, s, :], 0)[:, None] for s in sizes]
    return jnp.stack(rows)


def _indicator(spaces: Spaces, eigen: Eigen, values: Inexact[Array, "N p m"]) -> OfRows:
    """Return the errors of the entries of the diagonal of f(A), for each of p functions.

    They come from neighbour residuals, so f(A) z is computed for the probes z of one
    repeat.
    """
    krylov, z, near = spaces
    first = krylov.length[:, None] * eigen.vectors[:, 0].conj()
    values = jnp.where(first[:, None] == 0, 0, values)
    eps, real = float(jnp.finfo(z.dtype).eps), not jnp.iscomplexobj(z)

    def of_one(values: Inexact[Array, "N m"]) -> Float[Array, " n"]:
        inner = einsum("Nab,Nb,Nb->Na", *promoted(eigen.vectors, first, values))
        products = einsum("Nmn,Nm->nN", *promoted(krylov.basis, inner))
        residuals = neighbour_residuals(z, products, near)
        return residuals.error_in_sum(near, eps, real=real, hermitian=True)

    return jax.lax.map(of_one, jnp.swapaxes(values, 0, 1))
