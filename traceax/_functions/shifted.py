"""log det(A + shift I) by a preconditioner, and its derivative."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact

from traceax._core.operator import LinearMap, is_positive
from traceax._core.rule import Outcome, settled
from traceax._functions.deflation import Split, resphering
from traceax._functions.dense import decompose
from traceax._functions.preconditioner import Preconditioned, Preconditioner, preconditioner
from traceax._linalg.jackknife import both_errors, standard_error
from traceax._linalg.krylov import Krylov, block_krylov, lanczos, radau, truncated

# A lower bound of the spectrum of M with room for rounding; the bracket hardly depends on
# it.
BOUND = 0.999


class Shifted(eqx.Module):
    """A + shift I: a subject of the rule."""

    linear_map: LinearMap
    shift: Float[Array, ""]

    def __call__(self, block: Inexact[Array, "n k"]) -> Inexact[Array, "n k"]:
        return self.linear_map(block) + self.shift * block

    def coded(self) -> Shifted:
        return Shifted(self.linear_map.coded(), self.shift)


def preconditioned(
    subject: Shifted,
    probes: tuple[Inexact[Array, "n b"], Inexact[Array, "n k"]],
    *,
    parts: Split,
    reorthogonalise: bool,
    noise: float,
) -> Outcome:
    """log det P + tr log M, the latter by probes of the complement of W."""
    block, tests = probes
    space = block_krylov(subject.linear_map, block, parts.depth)
    frame = preconditioner(space, subject.shift)
    remainder, scale = _complement(frame, tests)
    operator = Preconditioned(subject, frame)
    krylov = lanczos(operator, remainder, parts.num_steps, reorthogonalise=reorthogonalise)
    bounded = is_positive(subject.linear_map.operator)
    return Outcome(*_judge(frame, krylov, scale, noise, bounded))


@jax.jit
def _complement(
    frame: Preconditioner, tests: Inexact[Array, "n k"]
) -> tuple[Inexact[Array, "k n"], Float[Array, " k"]]:
    """The probes outside of W, as rows, and the factors that resphere them."""
    remainder = frame.complement(tests).T
    rank = tests.shape[0] - frame.rank
    return remainder, resphering(remainder, rank) / remainder.shape[0]


@partial(jax.jit, static_argnums=(3, 4))
def _judge(
    frame: Preconditioner,
    krylov: Krylov,
    scale: Float[Array, " k"],
    noise: float,
    bounded: bool,
) -> tuple[Float[Array, ""], Float[Array, ""], Inverse]:
    """Value, standard error, readout: by Gauss's rule, half of its steps, Radau's."""
    num_steps = krylov.projection.shape[1]
    half = jax.vmap(lambda t: truncated(t, max(num_steps // 2, 1)))(krylov.projection)
    below = jax.vmap(lambda t: radau(t, BOUND))(krylov.projection)
    eigen = decompose(jnp.stack([krylov.projection, half, below]))
    weights = (eigen.vectors[:, :, 0] * eigen.vectors[:, :, 0].conj()).real
    positive = jnp.where((weights == 0) | (eigen.values > 0), 1, jnp.nan)
    logs = jnp.log(jnp.where(eigen.values > 0, eigen.values, 1)) * positive
    factor = scale * krylov.length**2
    terms, by_half, by_radau = factor[None, :] * jnp.sum(weights * logs, axis=-1)

    has_bound = frame.is_below & bounded
    gap = jnp.where(has_bound, jnp.sum(terms - by_radau), jnp.sum(terms - by_half))
    known = frame.log_determinant()
    ratio = jnp.max(frame.values) / frame.nu
    rounding = 4 * noise * (jnp.abs(known) + frame.rank * (1 + ratio))
    error = both_errors(standard_error(terms * terms.size, rounding), jnp.abs(gap))

    roots = eigen.vectors[0] * (eigen.values[0] ** -0.5 * eigen.vectors[0][:, 0])[:, None]
    inner = jnp.einsum("Njm,Njn->Nn", jnp.sum(roots, axis=-1)[..., None], krylov.basis)
    rest = frame.power(-0.5, inner.T)
    vectors = jnp.concatenate([frame.galerkin(), rest], axis=1)
    ones = jnp.ones(vectors.shape[1] - factor.size, factor.dtype)
    readout = Inverse(vectors, jnp.concatenate([ones, factor]), frame)
    return known + jnp.sum(terms), error, readout


class Inverse(eqx.Module):
    """tr((A + shift I)^{-1} B) = E sum_i c_i z_i* B z_i, with E sum_i c_i z_i z_i* the
    inverse."""

    vectors: Inexact[Array, "n s"]
    coefficients: Float[Array, " s"]
    frame: Preconditioner

    def __call__(self, subject: Shifted) -> Float[Array, ""]:
        return _read(subject, self)


@eqx.filter_custom_jvp
def _read(subject: Shifted, inverse: Inverse) -> Float[Array, ""]:
    """Something whose derivative is that of the log-determinant; itself it is not read."""
    return jnp.zeros((), inverse.coefficients.dtype)


@_read.def_jvp
def _read_jvp(
    primals: tuple[Shifted, Inverse], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    subject, inverse = primals
    right = inverse.vectors
    left = settled(right, Solved(inverse), subject)
    _, image = eqx.filter_jvp(lambda a: a(right), (subject,), (tangents[0],))
    value = _read(subject, inverse)
    if image is None:
        return value, jnp.zeros_like(value)
    return value, jnp.sum(inverse.coefficients * jnp.sum(left.conj() * image, axis=0).real)


class Solved(eqx.Module):
    """A^{-1} (A_0 z), which is z where A = A_0, and E[z z*] = A_0^{-1} makes of it and z a
    resolution of A^{-1} for every A: to be differentiated in A, by solves with it."""

    inverse: Inverse

    def __call__(self, subject: Shifted) -> Inexact[Array, "n s"]:
        inverse = self.inverse
        right = jax.lax.stop_gradient(subject(inverse.vectors))
        n, dtype = right.shape[0], right.dtype
        structure = jax.ShapeDtypeStruct((n,), dtype)
        tag = lx.positive_semidefinite_tag
        frame = jax.lax.stop_gradient(inverse.frame)
        helper = lx.FunctionLinearOperator(
            lambda v: frame.power(-1.0, v[:, None])[:, 0], structure, tag
        )
        tolerance = float(jnp.finfo(dtype).eps) ** 0.5 / 10
        solver = lx.CG(rtol=tolerance, atol=0.0, max_steps=10 * n)

        def apply(v: Array) -> Array:
            return subject(v[:, None])[:, 0]

        def of(known: Array, guess: Array) -> Array:
            def solve(apply: Callable[[Array], Array], b: Array) -> Array:
                start = jnp.where(jnp.all(b == known), guess, 0)
                options = {"preconditioner": helper, "y0": start}
                operator = lx.FunctionLinearOperator(apply, structure, tag)
                solution = lx.linear_solve(
                    operator, b, solver, options=options, throw=False
                )
                ok = solution.result == lx.RESULTS.successful
                return jnp.where(ok, solution.value, jnp.nan)

            def conjugate_solve(_: Any, b: Array) -> Array:
                return solve(apply, b.conj()).conj()

            # Not lineax's own derivative, of which a solve that fails backwards is zero.
            return jax.lax.custom_linear_solve(apply, known, solve, conjugate_solve)

        return jax.vmap(of, in_axes=1, out_axes=1)(right, inverse.vectors)
