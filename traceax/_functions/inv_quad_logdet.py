"""Likelihoods: log det B and y* B^{-1} y from one block Krylov run, B = A + shift I.

The right-hand sides y are in the first block of the run, before the probes, and in every
space that leaves a probe out. The spaces still do not depend on the probe that is left out,
and `block_quadrature` needs no more than that. So the matvecs that begin with y also serve
twice, for the log-determinant and for Galerkin's solution. Preconditioned conjugate
gradients improve this solution. Their preconditioner is the Nyström approximation from the
same space.

For any u, with r = y - B u,

    y* B^{-1} y = y* u + u* r + r* B^{-1} r,

The first two terms are the value. The third term is its error, which is of second order in
the error of u, and lies between 0 and r* P^{-1} r if P <= B. If it is not known whether
P <= B, this bound is multiplied by the largest eigenvalue of B^{-1} P that
`conjugate_gradients` has seen. It is infinite if the iteration meets an eigenvalue that is
zero to rounding.

The value equals 2 Re y* u - u* B u, which is stationary in u. So its derivative,
2 Re u* dy - u* dB u, costs one matvec-VJP for each right-hand side, and no solve. A second
derivative also solves an equation for du.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, ArrayLike, Float, Inexact, PRNGKeyArray, PyTree

from traceax._core.checks import Shift, check_rtol, check_shift, require
from traceax._core.estimate import Estimate, exportable
from traceax._core.operator import Operator, frozen
from traceax._core.rule import Outcome, Readout, run, with_own_jvp
from traceax._core.vectors import unflatten_rows
from traceax._estimators.call import Call
from traceax._functions.equations import (
    Equation,
    equation_of,
    num_tests,
    right_hand_sides,
    whitened,
)
from traceax._functions.exact_functions import (
    CHOLESKY,
    AllEntries,
    asymmetry_error,
    entries,
    exact_estimate,
    factorised,
)
from traceax._functions.krylov import Krylov, begin_run, checked_run, diagonal_only
from traceax._functions.whitening import Whitening
from traceax._linalg.columns import (
    Block,
    Number,
    OfProbes,
    column_dots,
    column_norms_squared,
    column_scales,
    over,
    times,
)
from traceax._linalg.conjugate_gradients import (
    Preconditioner,
    Projection,
    Sides,
    Solve,
    conjugate_gradients,
    galerkin,
    preconditioner_of,
    projected,
)
from traceax._linalg.jackknife import shared_degrees_of_freedom
from traceax._linalg.krylov import BlockKrylov, block_krylov
from traceax._probes.samplers import sphere
from traceax._probes.stream import ProgressMeter
from traceax._quadrature.block_quadrature import (
    Run,
    levels_and_complements,
    spectrum_of,
    trace_from_spectrum,
)
from traceax._quadrature.scalar import MatrixFunction


class InvQuadLogdet(eqx.Module):
    """The result of `inv_quad_logdet`, a pytree.

    **Attributes**

    - `inv_quad`: an `Estimate` of y* (A + shift I)^-1 y, summed over right-hand sides.
    - `logdet`: an `Estimate` of log det(A + shift I).
    - `solution`: (A + shift I)^-1 y, with the structure of the given vector.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> operator = lx.DiagonalLinearOperator(jnp.array([2.0, 8.0]))
        >>> both = tx.inv_quad_logdet(operator, jnp.array([1.0, 4.0]), jax.random.key(0))
        >>> print(both.inv_quad.value, both.logdet.value.round(3), both.solution)
        2.5 2.773 [0.5 0.5]

    **See also**: `inv_quad_logdet`, `Estimate`.
    """

    inv_quad: Estimate
    logdet: Estimate
    solution: PyTree[Inexact[Array, "..."]]

    def __str__(self) -> str:
        return f"inv_quad: {self.inv_quad}\nlogdet: {self.logdet}"

    def __repr__(self) -> str:
        return f"<inv_quad: {self.inv_quad!r}, logdet: {self.logdet!r}>"


exportable(InvQuadLogdet(Estimate(None, None, 0), Estimate(None, None, 0), None))


def inv_quad_logdet(
    operator: Operator | Krylov,
    vector: PyTree[ArrayLike],
    key: PRNGKeyArray | None = None,
    num_matvecs: int = 240,
    *,
    shift: Shift = 0.0,
    rtol: float = 1e-6,
    guess: PyTree[ArrayLike] | None = None,
    whitening: Whitening | None = None,
    progress_meter: ProgressMeter | None = None,
) -> InvQuadLogdet:
    """Estimate y* (A + shift I)^-1 y and log det(A + shift I), the terms of a likelihood.

    One block Krylov run gives the log-determinant, as in `logdet`, and Galerkin's solution
    of (A + shift I) u = y. Conjugate gradients improve this solution, with a preconditioner
    from the same run. The first block consists of probes and y, or of probes alone if y
    would be more than a quarter of it. The log-determinant is unbiased except for
    quadrature. Both values are exact, from a Cholesky factorisation, whenever `logdet` is.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a Hermitian lineax operator A. A + shift I must be positive definite. It
      needs no tags. Or a finished run, as in `krylov`, which has probes alone.
    - `vector`: y, with the operator's input structure. For several right-hand sides, every
      leaf has an additional leading axis.
    - `key`: one JAX random key, for example `jax.random.key(0)`; none with a run.
    - `num_matvecs`: the budget of the Krylov run, without the solve, at least min(6, n).
      Default 240.
    - `shift`: a real number, or an `lx.DiagonalLinearOperator`, as in `logdet`. Default 0.
    - `rtol`: the relative error in the energy norm at which the solve stops, a Python float
      between 0 and 1. Default 1e-6. Gradients have this error, and values have its square.
    - `guess`: the vector at which the solve starts, with the structure of `vector`, for
      example the `solution` of the last training step. A good guess saves steps of the
      solve. It changes no answer by more than `rtol` and is a constant for derivatives.
      Default `None`.
    - `whitening`: a `Whitening` of A + shift I, as in `logdet`. Solutions, right-hand sides
      and guesses are those of A + shift I itself. Default `None`.
    - `progress_meter`: an object that shows the progress of the Krylov run, for example
      `diffrax.TqdmProgressMeter()`. Default `None`, which shows nothing.

    **Returns** an `InvQuadLogdet`, which holds two real `Estimate`s and the solution.
    `inv_quad.standard_error` comes from the residual of the solution, so it also shows if
    the solve does not reach `rtol` in 10 num_matvecs steps. If A is positive semidefinite
    and the shift positive (as far as the run can see), the value is at most
    `inv_quad.standard_error` below the truth. Otherwise the bound uses an estimate of the
    least eigenvalue, and is infinite if that is 0 to rounding. `inv_quad.num_matvecs`
    counts the matvecs of the run and the solve. Results are NaN in the same cases as in
    `logdet`. For a singular operator without a shift, the error bar of `inv_quad` is
    infinite, or NaN after a factorisation.

    **Derivatives**: both estimates can be differentiated with respect to the operator,
    `vector` and `shift`, without another solve. This takes about 0.8 num_matvecs
    matvec-VJPs for the log-determinant, and one for each right-hand side. Each derivative
    of the solution, and each second derivative, takes another solve.

    **Cost**: at most `num_matvecs` matvecs in blocks, and a basis of as many vectors.
    Conjugate gradients take at most 10 num_matvecs matvecs for each right-hand side.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> spectrum, y = 1 / jnp.arange(1.0, 401.0) ** 2, jnp.sin(jnp.arange(400.0))
        >>> operator = tx.as_operator(lambda v: spectrum * v, 400)
        >>> both = tx.inv_quad_logdet(operator, y, jax.random.key(0), 120, shift=0.01)
        >>> bool(jnp.allclose(both.solution, y / (spectrum + 0.01), rtol=1e-3, atol=1e-3))
        True

    **Reference**: derived in `traceax/_functions/inv_quad_logdet.py`. Gardner et al.
    (2018), [arXiv:1809.11165](https://arxiv.org/abs/1809.11165). Wenger et al. (2022),
    [arXiv:2107.00243](https://arxiv.org/abs/2107.00243), for preconditioners.

    **See also**: `logdet`, `preconditioner`.
    """
    name = "inv_quad_logdet"
    tests = num_tests(name, whitening)
    others = {"whitening": whitening, "shift": diagonal_only(shift)}
    how: dict[str, Any] = {"least": 6 + tests, "left_out": others}
    call = begin_run(name, operator, key, (num_matvecs, None, None), progress_meter, **how)
    check_shift(name, call.operator, shift, several=False)
    check_rtol(name, rtol)
    columns, several = right_hand_sides(name, call.operator, vector)
    start, structure = None, call.operator.in_structure()
    if guess is not None:
        start, many = right_hand_sides(name, call.operator, guess, "guess")
        must, cure = "be like `vector`", "Pass the solution of a call with such a vector."
        got = f"{start.shape[1]} for {columns.shape[1]}"
        is_like = (many, start.shape) == (several, columns.shape)
        require(is_like, name, "guess", must, got, cure)
    equation = equation_of(call.operator, shift)
    if (known := entries(call.operator, call.num_matvecs, CHOLESKY)) is not None:
        array, shift = equation.scaled(known.array), equation.shift
        known_sides = shift, equation.whiten(columns)
        values, error, solution = _exact_solve(*known_sides, array)
        errors = error + asymmetry_error(array, values, _exact_solve, *known_sides)
        form = exact_estimate(values[0], known.spent, errors[0])
        logdet = exact_estimate(values[1] + equation.rest, known.spent, errors[1])
        solution = equation.back(solution)
    else:
        if whitening is not None:
            equation = whitened(call, equation, whitening)
            call = replace(call, num_matvecs=call.num_matvecs - tests, num_checks=tests)
        subject = Likelihood(equation.logarithm(name)[0], columns, equation)
        start = jax.lax.stop_gradient(start)
        form, logdet, solution = _estimated(call, subject, float(rtol), start)
        logdet = equation.completed(logdet)
    solution = unflatten_rows(solution.T, structure)
    one = solution if several else jax.tree.map(lambda leaf: leaf[0], solution)
    return InvQuadLogdet(form, logdet, one)


def _exact_solve(shift: Number, y: Sides, array: AllEntries) -> tuple[Array, Number, Sides]:
    """Return the quadratic form and the log-determinant, their error, and the solution.

    `array` is the matrix A, or its diagonal if it has no other entries.
    """
    solve, logs, error = factorised(array, shift)
    solution = solve(y)
    form = jnp.sum(column_dots(y, solution).real)
    return jnp.stack([form, logs]), error, solution


def _estimated(
    call: Call, subject: Likelihood, rtol: float, start: Sides | None
) -> tuple[Estimate, Estimate, Sides]:
    """Return estimates of the quadratic form and the log-determinant, and the solution.

    `start` is the guess.
    """
    shape, _ = checked_run(call, (call.num_matvecs, None, None))
    t, finished, call = subject.vectors.shape[1], call.finished, call.using(sphere)
    # Right-hand sides take at most a quarter of the first block.
    kept = t if finished is None and 4 * t <= shape.width else 0
    width = shape.width - kept
    probes = call.draw(width)[0] if finished is None else finished.run
    stages = (
        partial(likelihood_run, depth=shape.depth, kept=kept, meter=call.meter),
        partial(likelihood_prepared, kept=kept, resphered=call.resphere),
        partial(likelihood_solved, rtol=rtol, max_steps=10 * call.num_matvecs),
    )
    outcome = run(stages, subject, (probes, start))
    (logs, form), (error, bound) = outcome.value, outcome.standard_error
    spent, (solve, num_steps) = shape.num_matvecs + call.num_checks, outcome.report
    degrees, method = shared_degrees_of_freedom(width), call.name
    logdet = Estimate(logs, error, spent, degrees, method=method)
    if outcome.quadrature_error is not None:
        logdet = replace(logdet, quadrature_error=outcome.quadrature_error[0])
    checks = 1 if start is None else 2
    form = Estimate(form, bound, spent + t * (num_steps + checks), method=method)
    return form, logdet, _solution(solve, subject)


class Likelihood(eqx.Module):
    """The subject of the derivative rule: log(B + shift I) and (A + S) u = y.

    `function` has the operator B and the logarithm, `vectors` are the right-hand sides y,
    and `equation` says how W turns A + S into B + shift I.
    """

    function: MatrixFunction
    vectors: Sides
    equation: Equation

    @property
    def at_rest(self) -> Likelihood:
        """The same with a function of the identity."""
        function = self.function.at_rest
        parts = {"operator": function.linear_map.operator, "white": None}
        held = replace(self.equation, linear_map=function.linear_map, **parts)
        return replace(self, function=function, equation=held)

    @property
    def scaled(self) -> tuple[Sides, OfProbes]:
        """The right-hand sides in units of their largest entries, and these units."""
        sizes = column_scales(self.vectors)
        return over(self.vectors, sizes[None, :]), sizes

    def white(self, block: Block) -> Block:
        """Return (B + shift I) block."""
        shift = self.equation.shift.astype(block.dtype)
        return self.function.linear_map(block) + shift * block


class Started(NamedTuple):
    """A run, and a guess: what it leaves of the right-hand sides, and what it takes of
    them (or None without W), both whitened, and its energy."""

    space: BlockKrylov
    guess: Sides
    left: Sides
    taken: Sides | None
    energy: OfProbes


class Prepared(NamedTuple):
    """The log-determinant, and what conjugate gradients need: the projection of B and its
    preconditioner, the guess, the whitened solution on the space, what it leaves, and the
    energy of both. `of_guess` is W^{-*} times the guess, on the space if there is a W."""

    traced: Outcome
    known: Projection
    inverse: Preconditioner
    guess: Sides
    start: Sides
    residual: Sides
    energy: OfProbes
    of_guess: Sides


def likelihood_run(
    subject: Likelihood, probes: tuple[Any, Any], *, depth: int, kept: int, meter: Any
) -> Started:
    """Make a block Krylov space with its next block.

    `probes` are a block of probes, or a finished run; and the guess or None. The first
    `kept` right-hand sides are in the run, or their residuals if there is a guess.
    """
    (block, guess), (y, sizes), equation = probes, subject.scaled, subject.equation
    taken = None
    if guess is None:
        left, guess, energy = y, jnp.zeros_like(y), jnp.zeros_like(sizes)
    else:
        guess = over(guess, sizes[None, :])
        left = y - equation(guess)
        energy = column_dots(guess, y + left).real
        taken = None if equation.white is None else equation.whiten(y - left)
    white = equation.whiten(left)
    if isinstance(block, Run):
        return Started(block.space, guess, white, taken, energy)
    in_run = over(white, column_scales(white)[None, :])[:, :kept]
    block = jnp.concatenate([in_run, block], axis=1)
    how = {"meter": meter, "extend": True}
    space = block_krylov(subject.function.linear_map, block, depth, **how)
    return Started(space, guess, white, taken, energy)


def likelihood_prepared(
    subject: Likelihood, made: Started, *, kept: int, resphered: bool
) -> Prepared:
    """Estimate the log-determinant, and prepare the solve, from a run."""
    (space, guess, left, taken, energy), function = made, subject.function
    levels, spaces = levels_and_complements(space, kept=kept, subject=function)
    spaces = spaces.resphered() if resphered else spaces
    spectrum = spectrum_of(space, levels, function)
    traced = trace_from_spectrum(space, spectrum, spaces, function)
    shift, eigen = subject.equation.shift, spectrum.eigen
    known = projected(space, shift, spectrum.theta[0], eigen.vectors[0])
    start, residual = galerkin(known, left)
    energy = jnp.maximum(energy + column_dots(start, left - residual).real, 0)
    of_guess = guess if taken is None else galerkin(known, taken)[0]
    parts = known, preconditioner_of(known), guess, start, residual, energy, of_guess
    return Prepared(traced, *parts)


def likelihood_solved(
    subject: Likelihood, made: Prepared, *, rtol: float, max_steps: int
) -> Outcome:
    """Estimate the log-determinant and the quadratic form, in this order."""
    (y, sizes), equation = subject.scaled, subject.equation
    traced, known, inverse = made.traced, made.known, made.inverse
    how = {"rtol": rtol, "max_steps": max_steps}
    rest = conjugate_gradients(subject.white, inverse, made.residual, made.energy, **how)
    white = made.start + rest.solution
    solution = made.guess + equation.back(white)
    residual = y - equation(solution)
    forms = column_dots(solution, y + residual).real
    residual = equation.whiten(residual)
    bounds = rest.inverse_norm * column_dots(residual, inverse(residual)).real
    scales = column_scales(solution)
    lengths = column_norms_squared(over(solution, scales[None, :]))
    lengths = scales * jnp.sqrt(lengths * column_norms_squared(y))
    rounding = 4 * float(jnp.finfo(forms.dtype).eps) * lengths
    noise = jnp.hypot(rounding, 4 * known.form_noise(white + made.of_guess))
    errors = jnp.maximum(bounds, 0) + noise
    value, error = (jnp.sum(sizes * (sizes * part)) for part in (forms, errors))
    solution = times(sizes[None, :], solution)
    solve = Solve(solution, inverse, jnp.asarray(rtol, value.dtype), max_steps)
    of_logs = traced.value, traced.standard_error, traced.quadrature_error
    value, error, gap = jax.tree.map(jnp.append, of_logs, (value, error, 0))
    readout = Partial(_read_both, traced.readout, solve)
    return Outcome(value, error, readout, (solve, rest.num_steps), gap)


def _solution(solve: Solve, subject: Likelihood) -> Sides:
    """Return the solution, with the derivative of the equation."""
    return with_own_jvp(solve.solution, solve, subject)


def _read_both(traces: Readout, solve: Solve, subject: Likelihood) -> Float[Array, " 2"]:
    """Return both values as functions of the subject.

    The first derivative holds the solution u. Only the second one includes the change of u.
    """
    form = _form(frozen(subject), solve.solution)
    form = with_own_jvp(form, _form, subject, Partial(_solution, solve))
    return jnp.append(traces(subject.function), form)


def _form(subject: Likelihood, solution: Sides) -> Number:
    """Return 2 Re y* u - u* (A + S) u, where u is the solution."""
    dots = column_dots(solution, 2 * subject.vectors - subject.equation(solution))
    return jnp.sum(dots.real)
