"""Nyström factors of a positive semidefinite operator from its sketch."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._linalg import lapack
from traceax._linalg.basis import TALL, orthonormalise
from traceax._linalg.columns import magnitude

# Of the largest eigenvalue: what is deeper below zero is no noise. The entries of a matrix
# rounded to bfloat16 may be off by 4e-3, and its eigenvalues by less.
CLEARLY = 1e-2


class Nystrom(NamedTuple):
    """A Nyström approximation F F* of A/scale + shift I from the sketch A Omega.

    `right` holds columns g_i with (Omega* (A/scale + shift I) Omega)^{-1} = G* G, so that
    z_i = F g_i / |g_i| is what probe i contributes: without it, F F* - z_i z_i* is left.
    `test_inverse` is R^{-*} of Omega = U R, with which (Omega* Omega)^{-1} = T* T.
    """

    left: Inexact[Array, "n k"]
    right: Inexact[Array, "k k"]
    shift: Float[Array, ""]
    scale: Float[Array, ""]
    test_inverse: Inexact[Array, "k k"]
    indefinite: Float[Array, ""]


def nystrom(sketch: Inexact[Array, "n k"], probes: Inexact[Array, "n k"]) -> Nystrom:
    """Stable Nyström factors of a positive semidefinite operator; NaN if it clearly is not.

    The textbook core Omega* A Omega is as ill-conditioned as A, and in floating point need
    not be definite. So: orthonormalise the *probes*, Omega = U R (no new application);
    shift by rounding plus the core's measured asymmetry, a free estimate of the matvec's
    noise; floor the eigenvalues at the shift. An operator that is semidefinite only up to a
    noise that is symmetric (a kernel rounded to float32, say) shows in negative eigenvalues
    of the core: then the shift is four times their depth, and `indefinite` is the depth.
    Deeper than noise can be, they tell that the tag was wrong, and all is NaN.
    """
    scale = magnitude(sketch)
    probes, images, turn, inverse, size = _orthonormal(probes, sketch / scale)
    core = turn.conj().T @ (probes.conj().T @ images) @ turn
    skew = jnp.linalg.norm(core - core.conj().T) / 2
    noise = jnp.finfo(sketch.dtype).eps * jnp.maximum(size, 1e-3) + skew
    eigenvalues, vectors = lapack.eigh((core + core.conj().T) / 2)
    indefinite = jnp.maximum(-eigenvalues[0] - noise, 0)
    largest = jnp.max(jnp.abs(eigenvalues))
    indefinite = jnp.where(indefinite > CLEARLY * largest, jnp.nan, indefinite)
    shift = jnp.maximum(noise, 4 * indefinite)
    half = vectors / jnp.sqrt(jnp.maximum(eigenvalues + shift, shift))[None, :]
    left = (images + shift * probes) @ (turn @ half)
    return Nystrom(left, half.conj().T @ inverse, shift, scale, inverse, indefinite)


class _Orthonormal(NamedTuple):
    """U = `block` @ `turn` and A U = `images` @ `turn`; `inverse` R^{-*}, `size` |A U|."""

    block: Inexact[Array, "n k"]
    images: Inexact[Array, "n k"]
    turn: Inexact[Array, "k k"]
    inverse: Inexact[Array, "k k"]
    size: Float[Array, ""]


def _orthonormal(
    probes: Inexact[Array, "n k"], images: Inexact[Array, "n k"]
) -> _Orthonormal:
    """Many more dimensions than probes: these are nearly orthogonal, and R may be a root of
    their Gram matrix, which loses nothing in being squared; U is never made. Else a basis.

    A probe that repeats others (signs do in few dimensions) adds a direction to U that is
    not in their span, where A is not known: it is left out.
    """
    n, k = probes.shape
    eps = jnp.finfo(probes.dtype).eps
    if n >= TALL * k:
        squares, vectors = lapack.eigh(probes.conj().T @ probes)
        kept = squares > 10 * k * eps * squares[-1]
        roots = jnp.where(kept, 1 / jnp.sqrt(jnp.where(kept, squares, 1)), 0)
        turn = vectors * roots[None, :]
        size = jnp.linalg.norm(images) * jnp.max(roots)
        return _Orthonormal(probes, images, turn, turn.conj().T, size)
    basis = orthonormalise(probes)
    inverse = basis.inverse / basis.scale
    kept = basis.sizes >= 10 * n**0.5 * eps
    columns = jnp.where(kept[None, :], basis.columns, 0)
    turned = jnp.where(kept[None, :], images @ inverse.conj().T, 0)
    turn = jnp.eye(k, dtype=inverse.dtype)
    return _Orthonormal(columns, turned, turn, inverse, jnp.linalg.norm(turned))
