"""Conjugate gradients with a preconditioner, for a few right-hand sides in one block.

B and P are Hermitian positive definite. With r = y - B x, the error of x in the energy norm
is

    |x* - x|_B^2 = y* B^{-1} y - y* x - x* r = r* B^{-1} r.

The iteration computes r* P^{-1} r anyway, which is a bound of this error where P <= B, and
an estimate where P is near to B. It stops when that is a small part of y* B^{-1} y, of
which each step learns more: a step of length alpha lowers the squared error by
alpha r* P^{-1} r.

(lineax has the method for real numbers only. It stops by the largest entry of the residual,
and raises if a tangent does not converge. Here the error bar shows an unfinished solve.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int

from traceax._linalg.columns import column_dots, column_scales

BlockMap = Callable[[Inexact[Array, "n t"]], Inexact[Array, "n t"]]
Parts = tuple[Float[Array, "n t"], ...]


class Solved(NamedTuple):
    solution: Inexact[Array, "n t"]
    num_steps: Int[Array, ""]


class _State(NamedTuple):
    solution: Inexact[Array, "n t"]
    residual: Inexact[Array, "n t"]
    direction: Inexact[Array, "n t"]
    error: Float[Array, " t"]  # r* P^{-1} r
    energy: Float[Array, " t"]  # y* B^{-1} y, as far as it is known
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
    """The solution x of B x = residual, which starts at zero. It stops when the error is
    `rtol` times the solution, both in the energy norm. If the residual is that of a first
    solution, `energy` is the squared energy norm of this one. NaN if B is found not to be
    positive definite."""

    def unsolved(state: _State) -> Array:
        return state.error > rtol**2 * state.energy

    def goes_on(state: _State) -> Array:
        return jnp.any(unsolved(state)) & (state.num_steps < max_steps)

    def step(state: _State) -> _State:
        image = apply(state.direction)
        curvature = column_dots(state.direction, image).real
        alpha = state.error / jnp.where(curvature > 0, curvature, jnp.nan)
        alpha = jnp.where(unsolved(state), alpha, 0)
        length = alpha.astype(image.dtype)[None, :]
        solution = state.solution + length * state.direction
        residual = state.residual - length * image
        direction = precondition(residual)
        error = column_dots(residual, direction).real
        ratio = error / jnp.where(state.error > 0, state.error, 1)
        direction = direction + ratio.astype(image.dtype)[None, :] * state.direction
        energy = state.energy + alpha * state.error
        return _State(solution, residual, direction, error, energy, state.num_steps + 1)

    scales = column_scales(residual)  # without them squares may overflow
    energy = jnp.asarray(energy, scales.dtype) / scales / scales
    residual = residual / scales[None, :].astype(residual.dtype)
    direction = precondition(residual)
    error = column_dots(residual, direction).real
    zero = jnp.zeros_like(residual)
    state = _State(zero, residual, direction, error, energy, jnp.asarray(0))
    state = jax.lax.while_loop(goes_on, step, state)
    solution = scales[None, :].astype(residual.dtype) * state.solution
    return Solved(solution, state.num_steps)


class Solve(eqx.Module):
    """The solution of B x = y, which is known already, as a function of B and y: it is
    differentiable to any order, because the derivative of a solution is a solution.

    Complex blocks are pairs of real ones, on which B is symmetric. So JAX never asks for
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
            solved = conjugate_gradients(
                lambda block: _joined(on_parts(_parts(block))),
                self.precondition,
                _joined(parts),
                rtol=self.rtol,
                max_steps=self.max_steps,
            )
            return _parts(solved.solution)

        rest = _parts(y - apply(self.solution))
        more = jax.lax.custom_linear_solve(on_parts, rest, solve, symmetric=True)
        return self.solution + _joined(more)


def _parts(block: Inexact[Array, "n t"]) -> Parts:
    return (block.real, block.imag) if jnp.iscomplexobj(block) else (block,)


def _joined(parts: Parts) -> Inexact[Array, "n t"]:
    return jax.lax.complex(*parts) if len(parts) == 2 else parts[0]
