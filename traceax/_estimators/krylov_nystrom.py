"""Nyström in a Krylov space: traces of semidefinite operators, whatever their spectrum is.

XNysTrace's approximation leaves about tr(rest)/k in the direction of a large eigenvalue.
XTrace's second product A Q leaves next to nothing there, but a sketch by half of the
probes is worse where eigenvalues decay. So a quarter of the budget is spent on second
products: with probes Omega_1, a of them, Omega_2, and Q R = A Omega_1, the test matrix is

    S = [Omega_1, Omega_2, Q],        A<S> = A S (S* A S)^{-1} (A S)*.

Without probe j, S_-j lacks the column w_j and, if that is one of Omega_1, the direction
s_j of Q, which the other columns of R do not have (`basis.downdate`). So S_-j depends on
the other probes only, all k probes are left out in turn, and the mean of

    t_j = tr A<S_-j> + c_j w_j* (A - A<S_-j>) w_j

is unbiased, with c_j = (n - dim S_-j)/(w_j* (I - P_j) w_j) if the probes are resphered.
No decision is made, so none can be wrong.

**Without a rank.** In the directions of A = c I + (low rank) S has dependent columns, and
how many is not for rounding to decide. So let a shift be added to the core, H = S* A S +
shift I = G^{-1} G^{-*}, with the columns of S of length about 1. This is the approximation
of diag(A, shift I) from the rows [S; I], which are independent. It is computed from the
others only, whatever the shift is, so that nothing is biased. F = A S G*, and

    A<S> = F F*,   A<S_-j> = F (I - N_j N_j*) F*,   N_j = [v_j, u_j/|u_j|],
    v_j = G [0; s_j], normalised (0 for Omega_2),   u_j = g_j - v_j v_j* g_j,
    w_j* (A - A<S_-j>) w_j = 1/|u_j|^2 - shift,     (A - A<S_-j>) w_j = F u_j/|u_j|^2.

The same with I in the place of A gives dim S_-j and w_j* (I - P_j) w_j. So both are
consistent, and multiples of I are exact.

**Derivative.** It is read through XTrace's weight on the range of A S, from which probe j
is left out in the same way, with a ridge in the place of the shift (`_readout`).

**Error.** The jackknife's (`jackknife`), where the pair {i, j} lacks span(N_i, N_j). With
C = N_i* N_j and K = (I - C* C)^{-1}, both 2 x 2, and M = F* F,

    tr A<S_-ij> = |F|^2 - tr N_i* M N_i - tr K (N_j - N_i C)* M (N_j - N_i C),

and probe j's remainder is K_uu/|u_j|^2 - shift.

Measured (`tests.benchmarks.choices`): on decaying spectra .7 to .95 of XNysTrace's error,
on a few large eigenvalues over a flat rest at most XTrace's, on flat spectra 1.15 times
Hutchinson's. It is worse than XNysTrace only where nearly all of the trace is in more
eigenvalues than there are second products, and in fewer than there are products.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._core.operator import LinearMap, gram, is_negative, unit_roundoff
from traceax._core.rule import Outcome
from traceax._estimators.driver import Drawn, Method, Probes, Request
from traceax._estimators.readouts import TRACE, Pairs, Target
from traceax._estimators.xtrace import XNYSTRACE
from traceax._linalg import jackknife, lapack
from traceax._linalg.basis import downdate, orthonormalise
from traceax._linalg.columns import (
    column_dots,
    column_norms_squared,
    column_scales,
    mean,
    over,
    promoted,
    squared_modulus,
    times,
)
from traceax._linalg.nystrom import NOISE
from traceax._probes.draw import draw, is_rotation_invariant

# Products; with fewer, second ones of two directions would take too many.
FEWEST = 8


def _drawn(request: Request, cost: int = 1) -> Drawn:
    spent = request.num_matvecs // cost
    again = spent // 4 if spent >= FEWEST else 0
    count = spent - again
    block = draw(request.name, request.sampler, request.key, request.operator, count)
    blocks = block[:, :again], block[:, again:]
    probes = Probes(blocks, is_rotation_invariant(request.sampler))
    return Drawn(probes, spent * cost, max(count - 1, 1))


def _krylov_nystrom(linear_map: LinearMap, probes: Probes, target: Target) -> Outcome:
    first, block = probes.blocks[0], jnp.hstack(probes.blocks)
    if first.shape[1] == 0:
        return XNYSTRACE.run(linear_map, Probes((block,), probes.resphere), target)
    sign = -1 if is_negative(linear_map.operator) else 1
    sketch = sign * linear_map(block)
    basis = orthonormalise(sketch[:, : first.shape[1]])
    images = sign * linear_map(basis.columns)
    root, scale = block.shape[0] ** 0.5, column_scales(sketch.reshape(-1, 1))[0]
    test = jnp.hstack([block / root, basis.columns])
    images = over(jnp.hstack([sketch / root, images]), scale)
    directions = downdate(basis).directions
    eps = unit_roundoff(linear_map.operator)
    value, error = _value_and_error(test, images, directions, eps, probes.resphere)
    weight = _readout(block, images, directions, eps, probes.resphere)
    return Outcome(sign * scale * value, scale * error, weight)


KRYLOV_NYSTROM = Method("xnystrace + A Q", TRACE, _krylov_nystrom, _drawn)
KRYLOV_NYSTROM_OF_GRAM = KRYLOV_NYSTROM._replace(draw=partial(_drawn, cost=2), acts_on=gram)


class Fit(NamedTuple):
    """F, M = F* F, and of each probe N_j, the root of H^{-1} times u_j/|u_j|^2, and
    1/|u_j|^2."""

    left: Inexact[Array, "n m"]
    gram: Inexact[Array, "m m"]
    vectors: Inexact[Array, "k m 2"]
    residuals: Inexact[Array, "m k"]
    squares: Float[Array, " k"]
    shift: Float[Array, ""]

    @property
    def columns(self) -> Inexact[Array, "m twice"]:
        """All N_j side by side."""
        return jnp.moveaxis(self.vectors, 0, 1).reshape(len(self.gram), -1)

    @property
    def traces(self) -> Float[Array, " k"]:
        """tr A<S_-j>."""
        removed = column_dots(self.columns, self.gram @ self.columns).real
        return jnp.trace(self.gram).real - jnp.sum(removed.reshape(-1, 2), axis=1)

    @property
    def remainders(self) -> Float[Array, " k"]:
        """w_j* (A - A<S_-j>) w_j."""
        return self.squares - self.shift


def fit_to_core(
    test: Inexact[Array, "n m"],
    images: Inexact[Array, "n m"],
    directions: Inexact[Array, "a a"],
    noise: Float[Array, ""],
) -> Fit:
    """NaN if the core clearly is not positive semidefinite."""
    core = test.conj().T @ images
    noise = noise + jnp.linalg.norm(core - core.conj().T) / 2
    values, vectors = lapack.eigh((core + core.conj().T) / 2)
    indefinite = jnp.maximum(-values[0] - noise, 0)
    indefinite = jnp.where(indefinite > NOISE * values[-1], jnp.nan, indefinite)
    shift = jnp.maximum(noise, 4 * indefinite)
    return fit(values, vectors, images, directions, shift)


def fit(
    values: Float[Array, " m"],
    vectors: Inexact[Array, "m m"],
    images: Inexact[Array, "n m"],
    directions: Inexact[Array, "a a"],
    shift: Float[Array, ""],
) -> Fit:
    """From the eigenvalues and eigenvectors of the core."""
    again = directions.shape[0]
    k = values.size - again
    half = over(vectors, jnp.sqrt(jnp.maximum(values + shift, shift))[None, :])
    right, left = half.conj().T, images @ half
    v = right[:, k:] @ directions
    v = over(v, jnp.sqrt(column_norms_squared(v))[None, :])
    v = jnp.pad(v, ((0, 0), (0, k - again)))
    g = right[:, :k]
    for _ in range(2):
        g = g - times(column_dots(v, g)[None, :], v)
    squares = 1 / column_norms_squared(g)
    residuals = times(squares[None, :], g)
    removed = jnp.stack([v, times(jnp.sqrt(squares)[None, :], g)], axis=-1)
    gram = left.conj().T @ left
    return Fit(left, gram, jnp.moveaxis(removed, 1, 0), residuals, squares, shift)


def _readout(
    block: Inexact[Array, "n k"],
    images: Inexact[Array, "n m"],
    directions: Inexact[Array, "a a"],
    eps: float,
    resphere: bool,
) -> Pairs:
    """The mean of 2 P_j - P_j^2 + c_j mu_j mu_j*, P_j = F C_j F* of A S with C_j =
    I - N_j N_j*, mu_j = (I - P_j) w_j: its expectation is I, projector or not."""
    (n, k), (_, m) = block.shape, images.shape
    # The squares of the singular values, which fall far, without squaring the block.
    basis = orthonormalise(images)
    sizes, right = lapack.svd(basis.factor)[1:]
    ridge = 16 * eps * sizes[0] ** 2
    images, vectors = over(images, basis.scale), right.conj().T
    space = fit(sizes**2, vectors, images, directions, ridge)
    v, gram, columns = space.vectors, space.gram, space.columns
    inner = v.conj().swapaxes(1, 2) @ gram @ v
    spread = jnp.moveaxis(v @ inner, 0, 1).reshape(m, 2 * k) @ columns.conj().T / k
    removed = columns @ columns.conj().T / k
    cross, unit = removed @ gram, jnp.eye(m, dtype=gram.dtype)
    kept = 2 * (unit - removed) - gram + cross + cross.conj().T - spread

    inside = space.left.conj().T @ block
    along = jnp.einsum("kma,mk->ka", v.conj(), inside)
    mu = block - space.left @ (inside - jnp.einsum("kma,ka->mk", v, along))
    lengths = jnp.ones(k, sizes.dtype)
    if resphere:  # n - tr(2 P_j - P_j^2)
        second = jnp.sum(column_norms_squared(gram @ columns).reshape(k, 2), axis=1)
        squares = jnp.sum(squared_modulus(gram)) - 2 * second
        squares = squares + jnp.sum(squared_modulus(inner), axis=(1, 2))
        lengths = (n - 2 * space.traces + squares) / column_norms_squared(mu)
    left = space.left @ kept, times(mu, lengths[None, :] / k)
    return Pairs(jnp.hstack(left), jnp.hstack([space.left, mu]))


def _value_and_error(
    test: Inexact[Array, "n m"],
    images: Inexact[Array, "n m"],
    directions: Inexact[Array, "a a"],
    eps: float,
    resphere: bool,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """From S and A S."""
    (n, m), size = test.shape, jnp.linalg.norm(images)
    noise = eps * jnp.maximum(size, 1e-3)
    of_a = fit_to_core(test, images, directions, noise)
    ridge = jnp.asarray(10 * m * eps, size.dtype)
    of_one = fit_to_core(test, test, directions, ridge)
    factors = jnp.full_like(of_a.squares, n)
    if resphere:
        factors = (n - of_one.traces) / of_one.remainders
    samples = of_a.traces + factors * of_a.remainders
    rounding = 4 * eps * mean(samples) + n * of_a.shift
    replicates = _replicates(of_a, of_one, n, resphere)
    error = jackknife.jackknife_error(replicates, rounding)
    if resphere:
        along = of_a.remainders / of_one.remainders
        across = of_a.left @ of_a.residuals
        across = across - of_one.left @ times(along[None, :], of_one.residuals)
        missed = factors**2 * column_norms_squared(across) / n
        real = not jnp.iscomplexobj(test)
        error = jackknife.no_less_than_theory(error, missed, real=real)
    return mean(samples), error


def _replicates(of_a: Fit, of_one: Fit, n: int, resphere: bool) -> Float[Array, " k"]:
    (traces, remainders), (ranks, lengths) = _of_pairs(of_a), _of_pairs(of_one)
    factors = (n - ranks) / lengths if resphere else n
    return jackknife.mean_of_others(traces + factors * remainders)


def _of_pairs(fit: Fit) -> tuple[Float[Array, "k k"], Float[Array, "k k"]]:
    """tr A<S_-ij> and w_j* (A - A<S_-ij>) w_j."""
    columns = fit.columns
    c = _blocks(columns.conj().T @ columns)
    forms = _blocks(columns.conj().T @ fit.gram @ columns)
    own, adjoint = jnp.einsum("iiab->iab", forms), jnp.swapaxes(c, 2, 3).conj()
    unit, cross = jnp.eye(2, dtype=c.dtype)[None, None], adjoint @ forms
    inverse = _inverse(unit - adjoint @ c)
    mixed = own[None] - cross - jnp.swapaxes(cross, 2, 3).conj()
    mixed = mixed + adjoint @ own[:, None] @ c
    removed = jnp.einsum("ijab,ijba->ij", inverse, mixed).real
    removed = removed + jnp.einsum("iaa->i", own).real[:, None]
    traces = jnp.trace(fit.gram).real - removed
    return traces, inverse[..., 1, 1].real * fit.squares[None, :] - fit.shift


def _blocks(square: Inexact[Array, "twice twice"]) -> Inexact[Array, "k k 2 2"]:
    """Of each pair."""
    k = square.shape[0] // 2
    return jnp.moveaxis(square.reshape(k, 2, k, 2), 1, 2)


def _inverse(matrices: Inexact[Array, "k k 2 2"]) -> Inexact[Array, "k k 2 2"]:
    """Of I - C* C, by elimination of the first row. That is skipped where v_i and v_j
    coincide, as they do if A has fewer dimensions than Q."""
    first, last = matrices[..., 0, 0].real, matrices[..., 1, 1].real
    corner = matrices[..., 1, 0]
    eps = float(jnp.finfo(first.dtype).eps)
    above = jnp.where(first > 1e3 * eps, 1 / first, 0)
    ratio = times(above, corner)
    below = 1 / jnp.maximum(last - above * squared_modulus(corner), eps)
    beside = -times(below, ratio)
    outer = above + squared_modulus(ratio) * below
    entries = promoted(outer, beside.conj(), beside, below)
    return jnp.stack(entries, axis=-1).reshape(matrices.shape)
