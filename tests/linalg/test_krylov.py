"""Krylov spaces and functions of small matrices, of which quadrature is made."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from tests.helpers import cases, close, slow
from tests.matrices import general, hermitian, numbers
from traceax._core.operator import LinearMap
from traceax._linalg.columns import times
from traceax._linalg.krylov import block_krylov, lanczos
from traceax._quadrature.dense import columns, decompose
from traceax._quadrature.scalar import ScalarFunction

N, STEPS = 24, 8


def linear_map(matrix: Any) -> LinearMap:
    return LinearMap(lx.MatrixLinearOperator(matrix))


def starts(dtype: Any, count: int = 3) -> Any:
    """The same for whichever test asks, in whatever order."""
    return jnp.asarray(numbers((count, N), dtype, seed=1))


# Few distinct eigenvalues, none, one: where the space is exhausted before its steps are.
SPECTRA = {
    "many": np.linspace(-1, 2, N),
    "few": np.where(np.arange(N) < 3, 5.0, np.where(np.arange(N) < 9, 2.0, 1.0)),
    "one": np.full(N, 2.0),
    "zero": np.zeros(N),
}


@pytest.mark.parametrize("spectrum", cases(SPECTRA, "many", "few"))
@pytest.mark.parametrize("dtype", [slow(np.float64), np.complex128, slow(np.float32)])
def test_lanczos_projects(dtype: Any, spectrum: str) -> None:
    """Q A Q* = T on orthonormal rows, the first of them the start; clean at breakdown."""
    matrix = hermitian(SPECTRA[spectrum], dtype)
    v = starts(dtype)
    krylov = lanczos(linear_map(matrix), v, STEPS)
    eps = float(jnp.finfo(dtype).eps)
    for i in range(3):
        basis, t = krylov.basis[i], krylov.projection[i]
        live = np.asarray(jnp.any(basis != 0, axis=1))
        assert live.sum() == {"many": STEPS, "few": 3}.get(spectrum, 1)
        gram = basis.conj() @ basis.T
        close(gram, np.diag(live), 100 * eps, 1)
        inside = np.outer(live, live)
        close((basis.conj() @ matrix @ basis.T), np.where(inside, t, 0), 100 * eps, 5)
        close(times(basis[0], krylov.length[i]), v[i], 100 * eps)
        assert np.all(np.diagonal(t)[~live] == t[0, 0])


@pytest.mark.parametrize("scale", [1e-30, slow(1e30)])
def test_lanczos_is_free_of_scale(scale: float) -> None:
    matrix = hermitian(SPECTRA["many"], np.float32)
    v = starts(np.float32)
    one = lanczos(linear_map(matrix), v, STEPS)
    other = lanczos(linear_map(matrix * np.float32(scale)), v, STEPS)
    close(other.projection / np.float32(scale), one.projection, 1e-4)


def test_n_steps_are_exact_and_more_digits_need_reorthogonalisation() -> None:
    matrix = hermitian(10.0 ** np.linspace(-6, 0, N))
    v = starts(float, 1)
    truth = jnp.einsum("ij,jk,ik->i", v, jax.scipy.linalg.sqrtm(matrix).real, v)

    def quadrature(reorthogonalise: bool) -> Any:
        krylov = lanczos(linear_map(matrix), v, N, reorthogonalise=reorthogonalise)
        theta, vectors = jnp.linalg.eigh(krylov.projection[0])
        return krylov.length[0] ** 2 * jnp.sum(vectors[0] ** 2 * jnp.sqrt(jnp.abs(theta)))

    close(quadrature(True), truth[0], 1e-12)
    close(quadrature(False), truth[0], 1e-3)


@pytest.mark.parametrize("reorthogonalise", [True, False])
@pytest.mark.parametrize("dtype", [slow(float), complex])
def test_what_is_not_hermitian_is_seen(dtype: Any, reorthogonalise: bool) -> None:
    bad = linear_map(general(N, dtype))
    krylov = lanczos(bad, starts(dtype), STEPS, reorthogonalise=reorthogonalise)
    assert jnp.all(jnp.isnan(jnp.diagonal(krylov.projection, axis1=1, axis2=2)))
    block = starts(dtype).T
    assert jnp.any(jnp.isnan(block_krylov(bad, block, 4).projection))


@pytest.mark.parametrize("spectrum", cases(SPECTRA, "many", "few"))
@pytest.mark.parametrize("dtype", [slow(np.float64), np.complex128, slow(np.float32)])
def test_block_krylov_projects(dtype: Any, spectrum: str) -> None:
    """A Z = Z' T on orthonormal columns, the first block's span among them."""
    matrix = hermitian(SPECTRA[spectrum], dtype)
    block = starts(dtype).T
    space = block_krylov(linear_map(matrix), block, 4, extend=True)
    eps = float(jnp.finfo(dtype).eps)
    live = np.asarray(space.filled)
    assert live.sum() == {"many": 12, "few": 9}.get(spectrum, 3)
    close(space.basis.conj().T @ space.basis, np.diag(live), 1e3 * eps, 1)
    new, factor = space.extended[:, -3:], space.tall[-3:, -3:]
    rest = matrix @ space.basis - space.basis @ space.projection
    # Where a column was left out, sqrt(eps) of the product may go with it.
    tolerance = 1e3 * eps if spectrum == "many" else eps**0.5
    close(rest[:, :-3], 0 * rest[:, :-3], tolerance, 5)
    close(rest[:, -3:], new @ factor, tolerance, 5)
    inside = space.basis[:, :3] @ (space.basis[:, :3].conj().T @ block)
    close(inside, block, 100 * eps)


@pytest.mark.parametrize("gap", cases([0.0, 1e-12, 1e-8, 1e-4, 1e-2, 1.0], 1e-8))
def test_divided_differences_of_near_eigenvalues(gap: float) -> None:
    """The second derivative is right, or where they coincide not a number."""
    matrix = jnp.diag(jnp.array([1.0, 1.0 + gap]))
    swap = jnp.array([[0.0, 1.0], [1.0, 0.0]])

    def entries(t: Any) -> Any:
        m = matrix + t * swap
        eigen = jax.lax.stop_gradient(decompose(m))
        return columns(ScalarFunction(jnp.log), m, eigen, count=1)[0, :, 0]

    ratio = np.log1p(gap) / gap if gap else 1.0
    close(jax.jacfwd(entries)(0.0)[1], ratio, 1e-10)
    if gap in (0, 1):
        second = jax.hessian(entries)(0.0)[0]
        assert jnp.isnan(second) or abs(second - (2 * np.log(2) - 2 if gap else -1)) < 1e-8
        assert not (gap and jnp.isnan(second))
