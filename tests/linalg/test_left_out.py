"""Krylov spaces without one of their starts, against those spaces made one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import close, hermitian
from traceax._linalg.krylov import block_krylov, complements

N, WIDTH, DEPTH, INNER = 40, 4, 5, 3
SPECTRA = {
    "many": np.linspace(-1, 2, N),
    "graded": 0.6 ** np.arange(N),
    "few": np.where(np.arange(N) < 3, 5.0, np.where(np.arange(N) < 9, 2.0, 1.0)),
    "rank 5 of a large scale": np.where(np.arange(N) < 5, 1e4 * np.arange(1, N + 1), 1.0),
    "one": np.full(N, 2.0),
    "zero": np.zeros(N),
}


def projector(matrix: Any, starts: Any) -> Any:
    """On K(matrix, starts), by an SVD of the Krylov matrix, every block scaled."""
    blocks = [starts]
    for _ in range(INNER - 1):
        product = matrix @ blocks[-1]
        size = np.linalg.norm(product, axis=0).max()
        blocks.append(product / size if size > 0 else product)
    columns, sizes, _ = np.linalg.svd(np.hstack(blocks), full_matrices=False)
    kept = columns[:, sizes > 1e-9 * sizes[0]]
    return kept @ kept.conj().T


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("dtype", [float, complex])
def test_what_is_left_out(dtype: Any, spectrum: str) -> None:
    matrix = hermitian(SPECTRA[spectrum], dtype)
    rng = np.random.default_rng(3)
    block = rng.standard_normal((N, WIDTH)).astype(dtype)
    if dtype is complex:
        block += 1j * rng.standard_normal((N, WIDTH))
    rank = WIDTH * INNER

    @jax.jit
    def spaces(matrix: Any, block: Any) -> Any:
        space = block_krylov(lambda x: matrix @ x, block, DEPTH)
        coordinates = space.basis[:, :WIDTH].conj().T @ block
        square = space.projection[:rank, :rank]
        result = complements(square, space.filled[:rank], coordinates, N)
        return space.basis[:, :rank], space.filled[:rank], result

    basis, filled, result = spaces(matrix, block)
    whole = np.asarray(basis) @ np.asarray(basis).conj().T
    for i in range(WIDTH):
        missing = np.asarray(basis @ result.vectors[i])
        sizes = np.linalg.norm(missing, axis=0)
        used = sizes > 0
        assert used.sum() == filled.sum() - (N - result.dimensions[i]) >= 1
        close(missing[:, used].conj().T @ missing[:, used], np.eye(used.sum()), 1e-13, 1)
        others = projector(np.asarray(matrix), np.delete(block, i, axis=1))
        assert round(np.trace(others).real) == N - result.dimensions[i]
        close(whole - missing @ missing.conj().T, others, 1e-7, 1)
        remainder = block[:, i] - others @ block[:, i]
        size = float(np.linalg.norm(block[:, i]))
        close(basis @ result.remainders[i], remainder, 1e-7, size)


def test_one_start_leaves_nothing() -> None:
    matrix = hermitian(SPECTRA["many"])
    block = np.random.default_rng(0).standard_normal((N, 1))
    space = block_krylov(lambda x: matrix @ x, jnp.asarray(block), INNER)
    coordinates = space.basis[:, :1].T @ block
    square = space.projection[:INNER, :INNER]
    result = complements(square, space.filled[:INNER], coordinates, N)
    assert result.dimensions[0] == N
    close(space.basis[:, :INNER] @ result.remainders[0], block[:, 0], 1e-13)
