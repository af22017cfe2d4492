"""log det B and y* B^{-1} y from one block Krylov run, B = A + shift I.

The right-hand sides y stand in the first block of the run, before the probes, and in every
space that leaves a probe out: the spaces do not depend on that probe, which is all that
`block_quadrature` asks. So the applications to y work twice, too: for the log-determinant,
and for Galerkin's solution. From there preconditioned conjugate gradients go on, with the
Nyström approximation from the same space.

For any u, with r = y - B u,

    y* B^{-1} y = y* u + u* r + r* B^{-1} r,

of which the first two terms are the value, second order in the error of u. The third one is
its error, between 0 and r* P^{-1} r where P <= B. Where that is not known, it is |r|^2 over
half the least Ritz value that is taken for it: then it is no bound, but a scale.

The derivative is that of 2 Re y* u - u* B u, which is stationary in u: 2 Re u* dy - u* dB u
costs one matvec-VJP for each right-hand side, and no solve. Second derivatives need du, and
solve for it.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float, Inexact, Int

from traceax._core.operator import frozen, resolution
from traceax._core.rule import Outcome, Readout, settled
from traceax._linalg.columns import column_dots, column_norms_squared, column_sizes
from traceax._linalg.conjugate_gradients import Solve, conjugate_gradients
from traceax._linalg.krylov import block_krylov
from traceax._linalg.preconditioning import (
    Preconditioner,
    galerkin,
    known_of,
    preconditioner_of,
)
from traceax._quadrature.block_quadrature import Shape, read_off
from traceax._quadrature.scalar import MatrixFunction


class Likelihood(eqx.Module):
    """`function` is log(x + shift) of A, the vectors are right-hand sides: a subject of the
    rule."""

    function: MatrixFunction
    vectors: Inexact[Array, "n t"]
    shift: Float[Array, ""]

    def __call__(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        """B block."""
        return self.function.linear_map(block) + self.shift * block


class Report(eqx.Module):
    """How the solution was found, to be differentiated, and in how many steps."""

    solve: Solve
    num_steps: Int[Array, ""]

    def __call__(self, subject: Likelihood) -> Inexact[Array, "n t"]:
        return self.solve(subject, subject.vectors)

    def solution(self, subject: Likelihood) -> Inexact[Array, "n t"]:
        return settled(self.solve.solution, self, subject)


def likelihood(
    subject: Likelihood,
    probes: Inexact[Array, "n k"],
    *,
    shape: Shape,
    kept: int,
    rtol: float,
    max_steps: int,
) -> Outcome:
    """The log-determinant and the quadratic form, in this order; the first `kept` of the
    vectors are in the run."""
    sizes = column_sizes(subject.vectors)
    units = sizes[None, :].astype(subject.vectors.dtype)
    y = subject.vectors / units
    block = jnp.concatenate([y[:, :kept], probes], axis=1)
    space = block_krylov(subject.function.linear_map, block, shape.depth)
    traced = read_off(space, subject.function, inner=shape.inner, kept=kept)
    known = known_of(space, subject.shift)
    frame = preconditioner_of(space, known)
    start, residual = galerkin(space, known, y)
    energy = column_dots(y, start).real
    how = {"rtol": rtol, "max_steps": max_steps}
    rest = conjugate_gradients(subject, frame, residual, energy, **how)
    solution = start + rest.solution
    rounding = 4 * resolution(subject.function.linear_map.operator)
    forms, errors = _forms_and_errors(frame, y, solution, y - subject(solution), rounding)
    value, error = (jnp.sum(sizes * (sizes * part)) for part in (forms, errors))
    solve = Solve(units * solution, frame, jnp.asarray(rtol, value.dtype), max_steps)
    report = Report(solve, rest.num_steps)
    return Outcome(
        jnp.append(traced.value, value),
        jnp.append(traced.standard_error, error),
        Partial(_read, traced.readout, report),
        report,
    )


def _forms_and_errors(
    frame: Preconditioner,
    y: Inexact[Array, "n t"],
    solution: Inexact[Array, "n t"],
    residual: Inexact[Array, "n t"],
    rounding: float,
) -> tuple[Float[Array, " t"], Float[Array, " t"]]:
    """The forms and their errors; rounding is judged by |u| (|y| + |B| |u|)."""
    forms = column_dots(solution, y + residual).real
    bounds = jnp.where(
        frame.is_below,
        column_dots(residual, frame(residual)).real,
        column_norms_squared(residual) / frame.nu,
    )
    lengths = jnp.sqrt(column_norms_squared(frame.largest * solution))
    sizes = lengths / frame.largest * (jnp.sqrt(column_norms_squared(y)) + lengths)
    return forms, jnp.maximum(bounds, 0) + rounding * sizes


def _read(traces: Readout, report: Report, subject: Likelihood) -> Float[Array, " 2"]:
    form = _form(frozen(subject), report.solve.solution)
    form = settled(form, _form, subject, report.solution)
    return jnp.append(traces(subject.function), form)


def _form(subject: Likelihood, solution: Inexact[Array, "n t"]) -> Float[Array, ""]:
    """2 Re y* u - u* B u."""
    dots = column_dots(solution, 2 * subject.vectors - subject(solution))
    return jnp.sum(dots.real)
