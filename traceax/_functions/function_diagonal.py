"""Diagonals of functions, from one block Krylov run.

The notation is as in `block_quadrature`. Z has the orthonormal columns of K_d(A, W),
T = Z* A Z, and F = f(T). S_i = K_q(A, W without w_i) has the projector P_i, and
r_i = (I - P_i) w_i. As in `xdiag`, for probes with E[w w*] = I and for every i

    diag f(A) = E[ diag(f(A) - B_i) + conj(w_i) o B_i w_i ],
    B_i = (I - P_i) f(A) (I - P_i).

Here f(A) - B_i = P_i f(A) + f(A) P_i - P_i f(A) P_i. This and f(A) r_i are computed from
the run by f(A) ~ Z F Z*, which is exact for polynomials of degree d - q. K is the span of
the first q blocks of Z, and N_i the complement of S_i in K (`krylov`). In the coordinates
of Z, I - P_i is G_i = E + N_i N_i*, where E is the identity on the blocks after K. So each
probe gives a sample d_i, the expectation of which is diag f(A):

    d_i = diag(Z (F - G_i F G_i) Z*) + conj(w_i) o Z G_i F r_i
        = diag(Z (F - E F E) Z*) - 2 Re diag((Z N_i) (Z E F N_i)*)
          - diag((Z N_i) (N_i* F N_i) (Z N_i)*) + conj(w_i) o Z (E + N_i N_i*) F r_i.

The part of f(A) that a Krylov space leaves is nearly a multiple of I. The diagonal of a
multiple of I is known, but d_i would estimate it, with the off-diagonal entries of I - P_i
as noise. So f(A) is split,

    f(A) = c I + (f(A) - c I),    c = sum_i r_i* F r_i / sum_i |r_i|^2,

and d_i is computed for the second term alone. Then multiples of I are exact. (For traces
the factor c_i has the same effect.) c is computed from the same probes, so it is not
independent of the d_i. By the Cauchy-Schwarz inequality the bias that this causes is at
most of the order of (n k)^(-1/2) standard errors.

The samples share probes, as in `xdiag`. The derivative is the derivative of `xdiag` of
f(A) - c I. The run gives a sketch of this matrix without further matvecs,
Y = Z (F - c I) Z* W. It uses half of the probes, because f(A) is applied to each of them
twice. If f(A) is a multiple of I, Y is only rounding, and its columns would be dependent.
So a small multiple of W, above rounding, is added.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox.internal import Static
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Inexact, PRNGKeyArray, Shaped

from traceax._core.checks import check_samples, check_scalar
from traceax._core.estimate import Estimate
from traceax._core.keys import BLOCKS, keys_of
from traceax._core.operator import Operator, frozen
from traceax._core.rule import Outcome
from traceax._core.vectors import as_result
from traceax._estimators.call import Call
from traceax._estimators.hutchinson import estimate_by_ratio
from traceax._estimators.readouts import TwoSided, by_row, leave_one_out, two_sided
from traceax._functions.arguments import Function, real_dtype, subject_of
from traceax._functions.exact_functions import (
    AllEntries,
    asymmetry_error,
    entries,
    exact_estimate,
)
from traceax._functions.krylov import Krylov, begin_run, checked_run, first_stage
from traceax._linalg.columns import (
    Block,
    Number,
    OfProbes,
    dot,
    einsum,
    largest_modulus,
    mean,
    row_dots,
    squared_modulus,
    times,
)
from traceax._linalg.jackknife import bracket_error, quadrature_error, shared_error
from traceax._linalg.krylov import Complements
from traceax._probes.draw import draw
from traceax._probes.samplers import SamplerLike, rademacher
from traceax._probes.stream import ProgressMeter
from traceax._quadrature.block_quadrature import (
    Run,
    Shape,
    Spectrum,
    levels_and_complements,
    shape_for,
    spectrum_of,
)
from traceax._quadrature.dense import FunctionMap, columns, decompose
from traceax._quadrature.nodes import mixture
from traceax._quadrature.scalar import MatrixFunction, ScalarFunction, scalar_function

OfNodes = Float[Array, " m"]
OfRows = Float[Array, " n"]
OnRun = Inexact[Array, "m m"]  # a function of T
Kept = Bool[Array, "... m"]

# The number of probes that test the quadrature error if the estimate uses colours.
_TESTS = 4


def function_diagonal(
    operator: Operator | Krylov,
    fn: Function,
    key: PRNGKeyArray | None = None,
    num_matvecs: int = 240,
    *,
    num_probes: int | None = None,
    num_steps: int | None = None,
    sampler: SamplerLike | None = None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Estimate the diagonal of f(A) of a Hermitian A.

    You can use it for subgraph centralities (exp), leverages, Fermi-Dirac densities, or
    variances (1/x). There is one block Krylov run, as in `function_trace`. With P_i the
    projector on the space of all probes but w_i, and B_i = (I - P_i) f(A) (I - P_i),

        diag f(A) = E[diag(f(A) - B_i) + conj(w_i) o B_i w_i]

    for each i. The value is the mean over i, and unbiased except for quadrature. With
    `probing`, which suits an f(A) that decays along a graph, the estimate is
    `hutchinson_diagonal` of f(A), and Lanczos' process computes the matvecs of f(A). The
    value is exact whenever `function_trace` is.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a Hermitian lineax operator A, as in `function_trace`, or a finished run,
      as in `krylov`.
    - `fn`: the function f, a real function of a real scalar, made of JAX operations.
    - `key`: one JAX random key, for example `jax.random.key(0)`; none with a run.
    - `num_matvecs`: the budget, at least min(6, n). It is ignored if n <= 64. Default 240.
    - `num_probes`: the number of probes, as in `function_trace`. With `probing`, it is a
      multiple of the number of colours. Default `None`, which lets traceax choose.
    - `num_steps`: the number of steps, as in `function_trace`. Default `None`, which lets
      traceax choose.
    - `sampler`: a sampler of independent probes, or `probing`. Default `None`, which is
      `rademacher`, or the sampler of the run.
    - `progress_meter`: an object that shows the progress of the Krylov run, for example
      `diffrax.TqdmProgressMeter()`. Default `None`, which shows nothing.

    **Returns** an `Estimate` with a real value of the operator's input structure.

    **Derivatives**: they are unbiased except for quadrature, as for `xdiag` of f(A) in its
    two-sided form, from half of the probes and a sketch of the same run. Lanczos' process
    applies f(A) to num_probes vectors, which takes num_steps matvecs and as many
    matvec-VJPs for each of them.

    **Cost**: m <= `num_matvecs` matvecs, in blocks of num_probes. The orthonormal basis of
    m vectors, which must fit in memory, takes 8 n m^2 flops to compute, and about (8 +
    num_probes / num_steps) n m^2 flops to read. With `probing`, the cost is (num_probes +
    6) * num_steps matvecs, and num_probes blocks of n x num_steps.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> ring = jnp.roll(jnp.eye(200), 1, axis=0)
        >>> graph = lx.MatrixLinearOperator(ring + ring.T, lx.symmetric_tag)
        >>> centrality = tx.function_diagonal(graph, jnp.exp, jax.random.key(0))
        >>> print(centrality.value[:3].round(2))
        [2.28 2.28 2.28]

    **Reference**: Epperly, Tropp and Webber (2024),
    [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323). An application is the
    subgraph centrality of Estrada and Rodríguez-Velázquez (2005), Physical Review E 71,
    056103, [doi:10.1103/PhysRevE.71.056103](https://doi.org/10.1103/PhysRevE.71.056103).

    **See also**: `function_trace`, `diagonal`, `probing`.
    """
    name = "function_diagonal"
    budgets, how = (num_matvecs, num_probes, num_steps), {"left_out": {"sampler": sampler}}
    how |= {"sampler": rademacher if sampler is None else sampler, "takes": "coloured"}
    call = begin_run(name, operator, key, budgets, progress_meter, **how)
    operator, colours = call.operator, call.group
    converted, structure = scalar_function(name, fn, real_dtype(operator))
    check_scalar(name, "fn", structure)
    choose, tests = shape_for, 0
    if colours > 1:
        choose, tests = partial(_coloured, name=name, colours=colours), 3 * _TESTS // 2
    shape, budget = checked_run(call, budgets, choose, tests)
    check_samples(name, shape.width, colours, "num_probes")
    if (known := entries(operator, budget)) is not None:
        value = _exact_diagonal(converted, known.array)
        error = asymmetry_error(known.array, value, _exact_diagonal, converted)
        value, error = (as_result(x, operator.in_structure()) for x in (value, error))
        return exact_estimate(value, known.spent, error if known.array.ndim > 1 else None)
    if colours > 1:
        return _probed(call, converted, shape)
    subject = subject_of(operator, converted)
    (first, start), space = first_stage(call, shape), operator.in_structure()
    how: dict[str, Any] = {"spent": shape.num_matvecs, "degrees": max(shape.width - 1, 1)}
    how |= {"structure": space, "subject": subject}
    return call.finish((first, block_diagonal), start, **how)


def _coloured(num_matvecs: int, *, name: str, colours: int) -> Shape:
    """Choose one or more probes for each colour, and as many steps as the budget allows."""
    check_samples(name, num_matvecs, colours)
    width = max(colours, shape_for(num_matvecs).width // colours * colours)
    return Shape(width, max(1, num_matvecs // (width + 3 * _TESTS // 2)))


def _probed(call: Call, fn: ScalarFunction, shape: Shape) -> Estimate:
    """Estimate with the probes of colours, from one Lanczos run for each probe."""
    steps, name = min(shape.depth, call.operator.in_size()), call.name
    subject = FunctionMap(call.operator, fn=fn, num_steps=steps)
    key, test_key = keys_of(call.key, 2, BLOCKS)
    call = replace(call, key=key, num_matvecs=shape.width, reduce=by_row(call.operator))
    estimate = estimate_by_ratio(call, name, subject=subject)
    quadrature = _quadrature_error(name, subject, test_key)
    quadrature = as_result(quadrature, call.operator.in_structure())
    on_tests = 0 if steps == 1 else _TESTS * (steps + steps // 2)
    value = jax.tree.map(jnp.real, estimate.value)
    error = jax.tree.map(jnp.hypot, estimate.standard_error, quadrature)
    spent = estimate.num_matvecs * steps + on_tests
    estimate = replace(estimate, value=value, standard_error=error, num_matvecs=spent)
    return replace(estimate, quadrature_error=quadrature)


def _quadrature_error(name: str, subject: FunctionMap, key: PRNGKeyArray) -> OfRows:
    """Estimate the quadrature error of each entry, with a few probes.

    It is the row norm of the difference between f(A) from all steps and from half of the
    steps. It is infinite if there is a single step.
    """
    subject = frozen(subject)
    tests = draw(name, rademacher, key, subject.operator, _TESTS)
    if subject.num_steps == 1:
        return jnp.full(tests.shape[0], jnp.inf, tests.real.dtype)
    half = replace(subject, num_steps=subject.num_steps // 2)
    difference = subject(tests) - half(tests)
    return jnp.sqrt(mean(squared_modulus(difference)))


def _exact_diagonal(fn: ScalarFunction, array: AllEntries) -> OfRows:
    """Return the diagonal of f(A), where `array` is the matrix A or its diagonal."""
    if array.ndim == 1:
        return jax.vmap(fn)(array)[:, 0]
    eigen = jax.lax.stop_gradient(decompose(array))
    return jnp.diagonal(columns(fn, array, eigen, count=len(array))[0]).real


def block_diagonal(subject: MatrixFunction, made: Run) -> Outcome:
    """Estimate the diagonal of f(A) from a block Krylov run."""
    (space, probes), depth = made, made.space.depth
    levels, spaces = levels_and_complements(space, subject=subject)
    spectrum = spectrum_of(space, levels, subject)
    eigen, noise, (sizes, slopes, _) = spectrum.eigen, spectrum.noise, spectrum.bounds
    run = SpacesLeftOut(space.basis, probes, spaces)
    eps, k, m = subject.linear_map.eps, space.width, len(noise)
    ends = k * np.array(Shape(k, depth).levels(mixed=subject.node is not None))
    kept = jnp.asarray(np.arange(m)[None, :] < ends[:, None]) & space.filled[None, :]
    functions = _functions(spectrum, kept)
    identity = jnp.diag(space.filled.astype(functions.dtype))

    def mean_of(function: OnRun) -> OfRows:
        level = run.level(function)
        return run.mean(function - times(level, identity)) + level

    means = jax.vmap(mean_of)(functions.reshape(-1, m, m))
    means, function = means.reshape(*functions.shape[:2], -1), functions[0, 0]
    if subject.node is None:
        size, means = 4 * eps * jnp.linalg.norm(means[0]), means[:, 0]
        quadrature = quadrature_error(means, unresolved=True, rounding=size, together=True)
    else:
        totals = jnp.sum(means, axis=2, keepdims=True)
        share = mixture(totals[..., None])[1][0]
        rounding = 4 * eps * jnp.abs(means[0, 0])
        quadrature = bracket_error(means, share, rounding=rounding, whole=totals)
        other = jnp.where(share < 1, functions[0, 1], 0)
        function = times(share, function) + times(1 - share, other)
    level = run.level(function)
    rest = function - times(level, identity)
    samples = level + run.samples(rest)
    sizes = sizes[0, :m] + slopes[0, :m] * jnp.diagonal(noise) / eps
    moved = _function(kept[0], eigen.values[0], eigen.vectors[0], sizes)
    rounding = run.largest(moved) + jnp.abs(level) + mean(jnp.abs(samples))
    # If there is no shorter run to compare with, the quadrature error is unknown.
    error = jnp.hypot(shared_error(samples, 4 * eps * rounding), quadrature)
    # The sketch of f(A) - c I uses half of the probes. A multiple of them is added, so that
    # its columns are independent.
    tested = probes[:, : (k + 1) // 2]
    grain = jnp.finfo(error.dtype).eps ** 0.5 * largest_modulus(function)
    sketch = dot(run.basis, dot(rest[:, :k], space.starts[:, : tested.shape[1]]))
    sketch = sketch + times(grain, tested)
    weight = two_sided(leave_one_out(sketch, tested, resphere=False))
    readout = Partial(_read_spaces, weight, Static(depth))
    return Outcome(mean(samples), error, readout, quadrature_error=quadrature)


def _read_spaces(weight: TwoSided, num_steps: Static, subject: MatrixFunction) -> OfRows:
    """Read the diagonal of f(A) for another operator. Lanczos' process applies f(A)."""
    operator, steps = subject.linear_map.operator, num_steps.value
    return weight(FunctionMap(operator, fn=subject.fn, num_steps=steps)).real


def _functions(spectrum: Spectrum, kept: Kept) -> Inexact[Array, "levels rules m m"]:
    """Return f(T) at all levels, on the coordinates that are kept; with a node also
    f(T_R)."""
    values, m = spectrum.rules.values[:, :, 0, 0], kept.shape[1]
    one, rule = jax.vmap(_function), spectrum.rules.radau
    gauss = one(kept, *spectrum.eigen, values[:, 0, :m])
    if rule is None:
        return gauss[:, None]
    at_node = values[:, 1, m:]
    rise = values[:, 1, :m] - at_node
    radau = one(kept, rule.values[:, 0], rule.vectors[:, 0, :m], rise)
    identity = kept[:, None] & jnp.eye(m, dtype=bool)[None]
    radau = radau + jnp.where(identity, at_node[..., None], 0).astype(radau.dtype)
    return jnp.stack([gauss, radau], axis=1)


def _function(kept: Kept, nodes: OfNodes, vectors: OnRun, values: OfNodes) -> OnRun:
    """Return V diag(values) V* on the coordinates that are kept.

    A node without weight does not count, even if its value is infinite.
    """
    vectors = jnp.where(kept[:, None], vectors, 0)
    values = jnp.where(jnp.any(vectors != 0, axis=0), values, 0)
    # LAPACK may return finite numbers for NaN input.
    values = jnp.where(jnp.isnan(nodes), jnp.nan, values)
    return dot(times(vectors, values[None, :]), vectors.conj().T)


class SpacesLeftOut(eqx.Module):
    """The basis Z, the probes W, and the complement of every S_i in the first blocks of Z.

    The argument F of the methods is an m x m matrix in the coordinates of Z, of which the
    first r belong to the first blocks.
    """

    basis: Inexact[Array, "n m"]
    probes: Block
    spaces: Complements

    def level(self, f: OnRun) -> Number:
        """Return c, for which c I is nearest to the parts of F that the S_i leave."""
        lengths = jnp.sum(squared_modulus(self.spaces.remainders))
        return jnp.sum(self._forms(f)) / jnp.where(lengths > 0, lengths, 1)

    def samples(self, f: OnRun) -> Float[Array, "n k"]:
        """Return the d_i of F."""

        def removed(complement: Inexact[Array, "r p"]) -> OfRows:
            r = len(complement)
            image = dot(f[:, :r], complement)
            within = self._padded(dot(complement, dot(complement.conj().T, image[:r])))
            twice = dot(self.basis, 2 * times(self._outside, image) + within)
            return row_dots(twice, dot(self.basis[:, :r], complement)).real

        # This takes one probe at a time, because together they are larger than the basis.
        left = jax.lax.map(removed, self.spaces.vectors).T
        return self._diagonal(self._inside(f))[:, None] - left + self._tested(f)

    def mean(self, f: OnRun) -> OfRows:
        """Return the mean of the samples, which reads Z once for all probes."""
        complement = self.spaces.vectors
        k, r, _ = complement.shape
        lacks = einsum("kra,ksa->rs", complement, complement.conj()) / k
        core = einsum("kra,rs,ksb->kab", complement.conj(), f[:r, :r], complement)
        lost = einsum("kra,kab,ksb->rs", complement, core / k, complement.conj())
        lost = self._padded(lost) + 2 * times(self._outside, dot(f[:, :r], lacks))
        return self._diagonal(self._inside(f) - lost) + mean(self._tested(f))

    def largest(self, f: OnRun) -> OfRows:
        """Return a bound on the size of the terms of a sample, for positive F."""
        known = jnp.maximum(self._diagonal(f), 0)
        return known + jnp.sqrt(known) * mean(jnp.sqrt(jnp.maximum(self._forms(f), 0)))

    def _forms(self, f: OnRun) -> OfProbes:
        """Return r_i* F r_i."""
        r = self.spaces.remainders
        return jnp.sum(r.conj() * dot(r, f[: r.shape[1], : r.shape[1]].T), axis=1).real

    def _tested(self, f: OnRun) -> Float[Array, "n k"]:
        """Return Re conj(w_i) o Z G_i F r_i."""
        complement, remainder = self.spaces.vectors, self.spaces.remainders
        r = remainder.shape[1]
        image = dot(f[:, :r], remainder.T)
        within = einsum("kra,ksa,sk->rk", complement, complement.conj(), image[:r])
        outside = times(self._outside, image)
        return (self.probes.conj() * dot(self.basis, outside + self._padded(within))).real

    def _inside(self, f: OnRun) -> Inexact[Array, "m r"]:
        """Return (J + 2 E) F J, where J = I - E.

        For Hermitian F it has the same real quadratic forms as F - E F E, but fewer
        columns.
        """
        kept = times(1 + self._outside, f[:, : self.spaces.inside.size])
        return jnp.where(self.spaces.inside[None, :], kept, 0)

    def _diagonal(self, f: Inexact[Array, "m r"]) -> OfRows:
        """Return Re diag(Z F Z*)."""
        return row_dots(dot(self.basis, f), self.basis[:, : f.shape[1]]).real

    @property
    def _outside(self) -> Float[Array, "m 1"]:
        """Return the diagonal of E, as a column."""
        inside = self._padded(self.spaces.inside[:, None])
        return 1 - inside.astype(self.spaces.dimensions.dtype)

    def _padded(self, block: Shaped[Array, "r p"]) -> Shaped[Array, "m p"]:
        """Append rows of zeros, up to the number of columns of Z."""
        return jnp.pad(block, ((0, self.basis.shape[1] - len(block)), (0, 0)))
