"""Krylov spaces and functions of small matrices, of which quadrature is made."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from tests.helpers import close, nightly, slow
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


@pytest.mark.parametrize("dtype", [np.complex128, slow(np.float32), nightly(np.float64)])
def test_lanczos_projects(dtype: Any) -> None:
    """Q A Q* = T on orthonormal rows, the first of them the start; clean at breakdown."""
    run, v = jax.jit(lambda m, v: lanczos(linear_map(m), v, STEPS)), starts(dtype)
    eps = float(jnp.finfo(dtype).eps)
    for spectrum, eigenvalues in SPECTRA.items():
        matrix = hermitian(eigenvalues, dtype)
        krylov = run(matrix, v)
        for i in range(3):
            basis, t = krylov.basis[i], krylov.projection[i]
            live = np.asarray(jnp.any(basis != 0, axis=1))
            assert live.sum() == {"many": STEPS, "few": 3}.get(spectrum, 1)
            close(basis.conj() @ basis.T, np.diag(live), 100 * eps, 1)
            inside = np.where(np.outer(live, live), t, 0)
            close(basis.conj() @ matrix @ basis.T, inside, 100 * eps, 5)
            close(times(basis[0], krylov.length[i]), v[i], 100 * eps)
            assert np.all(np.diagonal(t)[~live] == t[0, 0])


def test_lanczos_is_free_of_scale() -> None:
    matrix, v = hermitian(SPECTRA["many"], np.float32), starts(np.float32)
    run = jax.jit(lambda m: lanczos(linear_map(m), v, STEPS).projection)
    for scale in map(np.float32, (1e-30, 1e30)):
        close(run(matrix * scale) / scale, run(matrix), 1e-4)


def test_n_steps_are_exact_and_more_digits_need_reorthogonalisation() -> None:
    matrix, v = hermitian(10.0 ** np.linspace(-6, 0, N)), starts(float, 1)
    truth = v[0] @ jax.scipy.linalg.sqrtm(matrix).real @ v[0]
    for reorthogonalise, digits in ((True, 1e-12), (False, 1e-3)):
        how = {"reorthogonalise": reorthogonalise}
        run = jax.jit(lambda v, how=how: lanczos(linear_map(matrix), v, N, **how))
        krylov = run(v)
        theta, vectors = np.linalg.eigh(krylov.projection[0])
        form = np.sum(vectors[0] ** 2 * np.sqrt(np.abs(theta)))
        close(krylov.length[0] ** 2 * form, truth, digits)


@pytest.mark.parametrize("dtype", [nightly(float), complex])
def test_what_is_not_hermitian_is_seen(dtype: Any) -> None:
    bad, v = linear_map(general(N, dtype)), starts(dtype)

    @jax.jit
    def projections() -> Any:
        both = [lanczos(bad, v, STEPS, reorthogonalise=again) for again in (True, False)]
        return [x.projection for x in both], block_krylov(bad, v.T, 4).projection

    each, block = projections()
    for projection in each:
        assert jnp.all(jnp.isnan(jnp.diagonal(projection, axis1=1, axis2=2)))
    assert jnp.any(jnp.isnan(block))


@pytest.mark.parametrize("dtype", [np.complex128, slow(np.float32), nightly(np.float64)])
def test_block_krylov_projects(dtype: Any) -> None:
    """A Z = Z' T on orthonormal columns, the first block's span among them."""
    block, eps = starts(dtype).T, float(jnp.finfo(dtype).eps)

    @jax.jit
    def run(matrix: Any) -> Any:
        space = block_krylov(linear_map(matrix), block, 4, extend=True)
        return space, space.projection, space.basis

    for spectrum, eigenvalues in SPECTRA.items():
        matrix = hermitian(eigenvalues, dtype)
        space, projection, z = run(matrix)
        live = np.asarray(space.filled)
        assert live.sum() == {"many": 12, "few": 9}.get(spectrum, 3)
        close(z.conj().T @ z, np.diag(live), 1e3 * eps, 1)
        new, factor = space.extended[:, -3:], space.tall[-3:, -3:]
        rest = matrix @ z - z @ projection
        # Where a column was left out, sqrt(eps) of the product may go with it.
        tolerance = 1e3 * eps if spectrum == "many" else eps**0.5
        close(rest[:, :-3], 0 * rest[:, :-3], tolerance, 5)
        close(rest[:, -3:], new @ factor, tolerance, 5)
        close(z[:, :3] @ (z[:, :3].conj().T @ block), block, 100 * eps)


def test_divided_differences_of_near_eigenvalues() -> None:
    """The second derivative is right, or where they coincide not a number."""
    swap = jnp.array([[0.0, 1.0], [1.0, 0.0]])

    @jax.jit
    def derivatives(gap: Any) -> Any:
        def entries(t: Any) -> Any:
            m = jnp.eye(2).at[1, 1].add(gap) + t * swap
            eigen = jax.lax.stop_gradient(decompose(m))
            return columns(ScalarFunction(jnp.log), m, eigen, count=1)[0, :, 0]

        return jax.jvp(jax.jacfwd(entries), (0.0,), (1.0,))

    for gap in (0.0, 1e-12, 1e-8, 1e-4, 1e-2, 1.0):
        first, second = derivatives(gap)
        close(first[1], np.log1p(gap) / gap if gap else 1.0, 1e-10)
        if gap == 1:
            close(second[0], 2 * np.log(2) - 2, 1e-8)
        elif gap == 0:
            assert jnp.isnan(second[0]) or abs(second[0] + 1) < 1e-8
