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
Parts = tuple[Float[Array, "n t"], ...]


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
        length = alpha.astype(image.dtype)[None, :]
        solution = state.solution + length * state.direction
        residual = state.residual - length * image
        direction = precondition(residual)
        left = column_dots(residual, direction).real
        ratio = left / jnp.where(state.left > 0, state.left, 1)
        direction = direction + ratio.astype(image.dtype)[None, :] * state.direction
        energy = state.energy + alpha * state.left
        return _State(solution, residual, direction, left, energy, state.num_steps + 1)

    sizes = column_sizes(residual)  # squares could leave the range
    energy = jnp.asarray(energy, sizes.dtype) / sizes / sizes
    residual = residual / sizes[None, :].astype(residual.dtype)
    direction = precondition(residual)
    left = column_dots(residual, direction).real
    zero = jnp.zeros_like(residual)
    state = _State(zero, residual, direction, left, energy, jnp.asarray(0))
    state = jax.lax.while_loop(goes_on, step, state)
    solution = sizes[None, :].astype(residual.dtype) * state.solution
    return Solved(solution, state.num_steps)


class Solve(eqx.Module):
    """The solution of B x = y from a solution that is known, differentiable in both, to
    any order: the derivative of a solution is a solution.

    Complex numbers go as pairs of real ones, on which B is symmetric: then nobody asks for
    the transpose of B, which an operator need not have.
    """

    solution: Inexact[Array, "n t"]
    precondition: BlockMap
    rtol: Float[Array, ""]
    max_steps: int = eqx.field(static=True)

    def __call__(self, apply: BlockMap, y: Inexact[Array, "n t"]) -> Inexact[Array, "n t"]:
        def on_parts(parts: Parts) -> Parts:
            return _parts(apply(_joined(parts)))

        def solve(on_parts: Callable[[Parts], Parts], parts: Parts) -> Parts:
            def applied(block: Inexact[Array, "n t"]) -> Inexact[Array, "n t"]:
                return _joined(on_parts(_parts(block)))

            how = {"rtol": self.rtol, "max_steps": self.max_steps}
            residual = _joined(parts)
            solved = conjugate_gradients(applied, self.precondition, residual, **how)
            return _parts(solved.solution)

        rest = _parts(y - apply(self.solution))
        more = jax.lax.custom_linear_solve(on_parts, rest, solve, symmetric=True)
        return self.solution + _joined(more)


def _parts(block: Inexact[Array, "n t"]) -> Parts:
    return (block.real, block.imag) if jnp.iscomplexobj(block) else (block,)


def _joined(parts: Parts) -> Inexact[Array, "n t"]:
    return jax.lax.complex(*parts) if len(parts) == 2 else parts[0]
