"""Conjugate gradients with a preconditioner, for a few right-hand sides in one block.

B and P are Hermitian positive definite. Of the error of x in the energy norm,

    |x* - x|_B^2 = y* B^{-1} y - y* x - x* r = r* B^{-1} r,      r = y - B x,

r* P^{-1} r, which the iteration has anyway, is a bound where P <= B, and an estimate where
P is near to B. So it stops where that is a part of y* B^{-1} y, which each step knows more
of: a step of length alpha lowers the squared error by alpha r* P^{-1} r.

(lineax has the method for real numbers, stops by the largest entry of the residual, and
raises where a tangent does not converge. Here a solve that falls short is to be seen in its
error bar.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from traceax._linalg.columns import column_dots, column_sizes

BlockMap = Callable[[Inexact[Array, "n t"]], Inexact[Array, "n t"]]


class Solved(NamedTuple):
    solution: Inexact[Array, "n t"]
    num_steps: Int[Array, ""]


class _State(NamedTuple):
    solution: Inexact[Array, "n t"]
    residual: Inexact[Array, "n t"]
    direction: Inexact[Array, "n t"]
    left: Float[Array, " t"]  # r* P^{-1} r
    energy: Float[Array, " t"]
    num_steps: Int[Array, ""]


def conjugate_gradients(
    apply: BlockMap,
    precondition: BlockMap,
    residual: Inexact[Array, "n t"],
    energy: Float[Array, " t"] | float = 0.0,
    *,
    rtol: Float[Array, ""] | float,
    max_steps: int,
) -> Solved:
    """x with B x = residual, from zero, until the energy norm of the error is `rtol` of
    that of the solution; `energy` is what a start had of the latter, squared. NaN where B
    shows itself not to be positive definite."""

    def unsolved(state: _State) -> Array:
        return state.left > rtol**2 * state.energy

    def goes_on(state: _State) -> Array:
        return jnp.any(unsolved(state)) & (state.num_steps < max_steps)

    def step(state: _State) -> _State:
        image = apply(state.direction)
        curvature = column_dots(state.direction, image).real
        alpha = state.left / jnp.where(curvature > 0, curvature, jnp.nan)
        alpha = jnp.where(unsolved(state), alpha, 0)
        solution = state.solution + alpha * state.direction
        residual = state.residual - alpha * image
        direction = precondition(residual)
        left = column_dots(residual, direction).real
        ratio = left / jnp.where(state.left > 0, state.left, 1)
        direction = direction + ratio * state.direction
        energy = state.energy + alpha * state.left
        return _State(solution, residual, direction, left, energy, state.num_steps + 1)

    sizes = column_sizes(residual)  # squares could leave the range
    residual, energy = residual / sizes, energy / sizes / sizes
    direction = precondition(residual)
    left = column_dots(residual, direction).real
    start = jnp.broadcast_to(jnp.asarray(energy, left.dtype), left.shape)
    zero = jnp.zeros_like(residual)
    state = _State(zero, residual, direction, left, start, jnp.asarray(0))
    state = jax.lax.while_loop(goes_on, step, state)
    return Solved(sizes * state.solution, state.num_steps)


class Solve(eqx.Module):
    """The solution of B x = y from a solution that is known, differentiable in both, to
    any order: the derivative of a solution is a solution."""

    solution: Inexact[Array, "n t"]
    precondition: BlockMap
    rtol: Float[Array, ""]
    max_steps: int = eqx.field(static=True)

    def __call__(self, apply: BlockMap, y: Inexact[Array, "n t"]) -> Inexact[Array, "n t"]:
        def solve(apply: BlockMap, residual: Inexact[Array, "n t"]) -> Array:
            how = {"rtol": self.rtol, "max_steps": self.max_steps}
            return conjugate_gradients(apply, self.precondition, residual, **how).solution

        def transposed(apply: BlockMap, residual: Inexact[Array, "n t"]) -> Array:
            return solve(lambda x: apply(x.conj()).conj(), residual.conj()).conj()

        rest = y - apply(self.solution)
        return self.solution + jax.lax.custom_linear_solve(apply, rest, solve, transposed)
