"""Krylov spaces without one of their starts, against spaces made one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import close, nightly
from tests.matrices import hermitian, krylov_basis, numbers, projector
from traceax._linalg.krylov import block_krylov, complements, frame_of

N, WIDTH, DEPTH, INNER = 40, 4, 5, 3
SPECTRA = {
    "many": np.linspace(-1, 2, N),
    "graded": 0.6 ** np.arange(N),
    "few": np.where(np.arange(N) < 3, 5.0, np.where(np.arange(N) < 9, 2.0, 1.0)),
    "rank 5 of a large scale": np.where(np.arange(N) < 5, 1e4 * np.arange(1, N + 1), 1.0),
    "one": np.full(N, 2.0),
    "zero": np.zeros(N),
}


@pytest.mark.parametrize("dtype", [nightly(float), complex])
def test_what_is_left_out(dtype: Any) -> None:
    block, rank = numbers((N, WIDTH), dtype, seed=3), WIDTH * INNER

    @jax.jit
    def spaces(matrix: Any) -> Any:
        space = block_krylov(lambda x: matrix @ x, jnp.asarray(block), DEPTH)
        square, filled = space.projection[:rank, :rank], space.filled[:rank]
        frame = frame_of(square, None, filled, None)
        coordinates = space.basis[:, :WIDTH].conj().T @ block
        return space.basis[:, :rank], filled, complements(frame, filled, coordinates, N)

    for eigenvalues in SPECTRA.values():
        matrix = hermitian(eigenvalues, dtype)
        basis, filled, result = spaces(matrix)
        whole = np.asarray(basis) @ np.asarray(basis).conj().T
        for i in range(WIDTH):
            missing = np.asarray(basis @ result.vectors[i])
            used = np.linalg.norm(missing, axis=0) > 0
            assert used.sum() == filled.sum() - (N - int(result.dimensions[i])) >= 1
            close(
                missing[:, used].conj().T @ missing[:, used], np.eye(used.sum()), 1e-13, 1
            )
            others = projector(krylov_basis(matrix, np.delete(block, i, axis=1), INNER))
            assert round(np.trace(others).real) == N - result.dimensions[i]
            close(whole - missing @ missing.conj().T, others, 1e-7, 1)
            remainder = block[:, i] - others @ block[:, i]
            size = float(np.linalg.norm(block[:, i]))
            close(basis @ result.remainders[i], remainder, 1e-7, size)


def test_one_start_leaves_nothing() -> None:
    matrix, block = hermitian(SPECTRA["many"]), jnp.asarray(numbers((N, 1)))

    @jax.jit
    def run() -> Any:
        space = block_krylov(lambda x: matrix @ x, block, INNER)
        frame = frame_of(space.projection, None, space.filled, None)
        coordinates = space.basis[:, :1].T @ block
        return space.basis, complements(frame, space.filled, coordinates, N)

    basis, result = run()
    assert result.dimensions[0] == N
    close(basis @ result.remainders[0], block[:, 0], 1e-13)
