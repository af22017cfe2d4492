"""Samples with two probes left out, against spaces that are made without both."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import close, hermitian
from traceax._linalg.jackknife import krylov_replicates
from traceax._linalg.krylov import block_krylov, complements

N, WIDTH, DEPTH, INNER = 30, 4, 4, 2


def projector(matrix: Any, starts: Any) -> Any:
    blocks = [starts]
    for _ in range(INNER - 1):
        blocks.append(matrix @ blocks[-1])
    columns, _ = np.linalg.qr(np.hstack(blocks))
    return columns @ columns.conj().T


@pytest.mark.parametrize("is_hermitian", [True, False])
@pytest.mark.parametrize("dtype", [float, complex])
def test_replicates(dtype: Any, is_hermitian: bool) -> None:
    """Of functions of the matrix, and of any other matrix that is read off the space."""
    matrix = hermitian(np.linspace(-1, 2, N), dtype)
    rng = np.random.default_rng(3)
    block = rng.standard_normal((N, WIDTH)).astype(dtype)
    if dtype is complex:
        block += 1j * rng.standard_normal((N, WIDTH))
    rank = WIDTH * INNER
    space = block_krylov(lambda x: matrix @ x, jnp.asarray(block), DEPTH)
    z, t = np.asarray(space.basis), np.asarray(space.projection)
    theta, v = np.linalg.eigh((t + t.conj().T) / 2)
    coordinates = jnp.asarray(z[:, :WIDTH].conj().T @ block)
    spaces = complements(jnp.asarray(t[:rank, :rank]), space.filled[:rank], coordinates, N)
    twist = 0 if is_hermitian else rng.standard_normal(t.shape) / 4
    left = v.conj().T @ (np.eye(len(t)) + twist)
    f = (z @ (v * np.exp(theta))) @ left @ z.conj().T

    def sample(tested: int, others: Any) -> Any:
        p = projector(np.asarray(matrix), block[:, others])
        r = block[:, tested] - p @ block[:, tested]
        c = (N - np.trace(p).real) / np.vdot(r, r).real
        return np.trace(p @ f) + c * np.vdot(r, f @ r)

    everyone = range(WIDTH)
    samples = [sample(i, [j for j in everyone if j != i]) for i in everyone]
    want = [
        np.mean(
            [
                sample(j, [m for m in everyone if m not in (i, j)])
                for j in everyone
                if j != i
            ]
        )
        for i in everyone
    ]
    spaces = spaces.resphered()._replace(vectors=spaces.vectors[..., :INNER])
    got = jax.jit(krylov_replicates)(
        spaces,
        jnp.asarray(v[:rank]),
        jnp.exp(jnp.asarray(theta))[None],
        jnp.asarray(left[:, :rank]),
        jnp.asarray(samples)[None],
    )
    close(got[0], np.array(want), 1e-9)
