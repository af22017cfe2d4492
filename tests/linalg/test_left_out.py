"""Krylov spaces without one of their starts, or two, against spaces made one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import cases, close, slow
from tests.matrices import hermitian, krylov_basis, numbers, projector, sample
from traceax._linalg.jackknife import krylov_replicates
from traceax._linalg.krylov import block_krylov, complements, plain_frame

N, WIDTH, DEPTH, INNER = 40, 4, 5, 3
SPECTRA = {
    "many": np.linspace(-1, 2, N),
    "graded": 0.6 ** np.arange(N),
    "few": np.where(np.arange(N) < 3, 5.0, np.where(np.arange(N) < 9, 2.0, 1.0)),
    "rank 5 of a large scale": np.where(np.arange(N) < 5, 1e4 * np.arange(1, N + 1), 1.0),
    "one": np.full(N, 2.0),
    "zero": np.zeros(N),
}


@pytest.mark.parametrize("spectrum", cases(SPECTRA, "many", "few"))
@pytest.mark.parametrize("dtype", [slow(float), complex])
def test_what_is_left_out(dtype: Any, spectrum: str) -> None:
    matrix = hermitian(SPECTRA[spectrum], dtype)
    block = numbers((N, WIDTH), dtype, seed=3)
    rank = WIDTH * INNER

    @jax.jit
    def spaces(matrix: Any, block: Any) -> Any:
        space = block_krylov(lambda x: matrix @ x, block, DEPTH)
        coordinates = space.basis[:, :WIDTH].conj().T @ block
        square = space.projection[:rank, :rank]
        result = complements(
            plain_frame(square, space.filled[:rank]), space.filled[:rank], coordinates, N
        )
        return space.basis[:, :rank], space.filled[:rank], result

    basis, filled, result = spaces(matrix, block)
    whole = np.asarray(basis) @ np.asarray(basis).conj().T
    for i in range(WIDTH):
        missing = np.asarray(basis @ result.vectors[i])
        sizes = np.linalg.norm(missing, axis=0)
        used = sizes > 0
        assert used.sum() == filled.sum() - (N - int(result.dimensions[i])) >= 1
        close(missing[:, used].conj().T @ missing[:, used], np.eye(used.sum()), 1e-13, 1)
        others = projector(krylov_basis(matrix, np.delete(block, i, axis=1), INNER))
        assert round(np.trace(others).real) == N - result.dimensions[i]
        close(whole - missing @ missing.conj().T, others, 1e-7, 1)
        remainder = block[:, i] - others @ block[:, i]
        size = float(np.linalg.norm(block[:, i]))
        close(basis @ result.remainders[i], remainder, 1e-7, size)


def test_one_start_leaves_nothing() -> None:
    matrix = hermitian(SPECTRA["many"])
    block = numbers((N, 1))
    space = block_krylov(lambda x: matrix @ x, jnp.asarray(block), INNER)
    coordinates = space.basis[:, :1].T @ block
    square = space.projection[:INNER, :INNER]
    result = complements(
        plain_frame(square, space.filled[:INNER]), space.filled[:INNER], coordinates, N
    )
    assert result.dimensions[0] == N
    close(space.basis[:, :INNER] @ result.remainders[0], block[:, 0], 1e-13)


@pytest.mark.parametrize("dtype", [slow(float), complex])
def test_replicates(dtype: Any) -> None:
    """Samples with two probes left out, of a matrix that is read off the space and is not
    Hermitian. (Those of a function of the matrix are in error bars of block quadrature.)"""
    n, depth, inner = 30, 4, 2
    matrix = hermitian(np.linspace(-1, 2, n), dtype)
    block = numbers((n, WIDTH), dtype, seed=3)
    rank = WIDTH * inner
    space = block_krylov(lambda x: matrix @ x, jnp.asarray(block), depth)
    z, t = np.asarray(space.basis), np.asarray(space.projection)
    theta, v = np.linalg.eigh((t + t.conj().T) / 2)
    coordinates = jnp.asarray(z[:, :WIDTH].conj().T @ block)
    frame = plain_frame(jnp.asarray(t[:rank, :rank]), space.filled[:rank])
    spaces = complements(frame, space.filled[:rank], coordinates, n)
    left = v.conj().T @ (np.eye(len(t)) + numbers(t.shape, seed=4) / 4)
    f = (z @ (v * np.exp(theta))) @ left @ z.conj().T

    def of(*probes: int) -> Any:
        return sample(matrix, block, inner, f, *probes)

    everyone = range(WIDTH)
    samples = [of(i, i) for i in everyone]
    want = [np.mean([of(j, i, j) for j in everyone if j != i]) for i in everyone]
    spaces = spaces.resphered()._replace(vectors=spaces.vectors[..., :inner])
    right, values = jnp.asarray(v[:rank]), jnp.exp(jnp.asarray(theta))[None]
    read = right, values, jnp.asarray(left[:, :rank]), jnp.asarray(samples)[None]
    got = jax.jit(krylov_replicates)(spaces, *read)
    close(got[0], np.array(want), 1e-9)
