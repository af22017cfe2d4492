"""Orthonormal bases of tall blocks, by both methods, of every rank, scale and dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import cases, close, nightly, slow
from tests.matrices import hermitian
from tests.wrappers import PSD, matrix_free
from traceax._linalg.basis import downdate, orthonormalise, pivoted_qr, square_roots
from traceax._linalg.columns import times

K = 20
ROWS = {"direct": 400, "randomised": 2560}


def factors(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An orthonormal block, a small rotation, and a block of normal numbers."""
    draw = np.random.default_rng(0)
    normal = draw.normal(size=(n, K))
    left = np.linalg.qr(draw.normal(size=(n, K)))[0]
    return left, np.linalg.qr(draw.normal(size=(K, K)))[0], normal


def blocks(n: int) -> dict[str, np.ndarray]:
    left, right, normal = factors(n)
    graded = np.logspace(0, -14, K)
    few = np.zeros((n, K))
    few[:5] = normal[:5]
    twice = normal.copy()
    twice[:, 1] = normal[:, 0]
    missing = normal.copy()
    missing[:, 3] = 0
    return {
        "normal": normal,
        "condition 1e14": (left * graded) @ right,
        "graded columns": left * graded,
        "graded columns, reversed": left * graded[::-1],
        "condition 1e28": (left * graded**2) @ right,
        "rank 5": left[:, :5] @ right[:5],
        "five rows": few,
        "ones": np.ones((n, K)),
        "zero": np.zeros((n, K)),
        "a column twice": twice,
        "pairs": np.repeat(normal[:, : K // 2], 2, axis=1),
        "a column missing": missing,
        "coherent": np.eye(n, K),
        "tiny": 1e-200 * normal,
        "huge": 1e200 * normal,
    }


BLOCKS = list(blocks(ROWS["direct"]))


@pytest.mark.parametrize("name", cases(BLOCKS, "condition 1e14", "rank 5", "pairs"))
@pytest.mark.parametrize("method", ROWS)
def test_a_basis_of_any_block(method: str, name: str) -> None:
    """Orthonormal to 1e-13; gives the block back; and its inverse leaves columns out: the
    direction of column i is orthogonal to all columns but i."""
    block = jnp.asarray(blocks(ROWS[method])[name])
    basis = orthonormalise(block)
    q, factor = basis.columns, basis.factor
    assert jnp.max(jnp.abs(q.T @ q - jnp.eye(K))) < 1e-13
    size = float(jnp.max(jnp.abs(block / basis.scale)))
    assert jnp.max(jnp.abs(block / basis.scale - q @ factor)) <= 1e-13 * max(size, 1)
    directions, distances = downdate(basis)
    across = directions.T @ factor
    off = across - jnp.diag(jnp.diag(across))
    assert jnp.max(jnp.abs(off)) < 1e-13 * max(float(jnp.max(jnp.abs(factor))), 1)
    close(jnp.diag(across), distances, 1e-11, float(jnp.max(distances)))


@pytest.mark.parametrize(
    "dtype", [slow(np.complex64), *map(nightly, (np.float32, complex))]
)
def test_other_dtypes(dtype: Any) -> None:
    left, right, normal = factors(ROWS["randomised"])
    phases = np.exp(1j * normal) if np.issubdtype(dtype, np.complexfloating) else 1
    eps = float(jnp.finfo(dtype).eps)
    for values in (np.logspace(0, np.log10(4 * eps), K), np.arange(K) < 5):
        block = jnp.asarray(((left * values) @ right) * phases, dtype)
        basis = orthonormalise(block)
        q = basis.columns
        assert q.dtype == dtype
        close(q.conj().T @ q, np.eye(K), 400 * eps, 1)
        error = jnp.max(jnp.abs(block - times(basis.scale, q) @ basis.factor))
        assert error < 400 * eps * basis.scale


@pytest.mark.parametrize("dtype", [np.float32, complex])
def test_the_directions_above_noise(dtype: Any) -> None:
    """The first two columns differ by noise, so a decomposition without pivots has noise
    for its second direction. The last two rows stay as they are."""
    draw = np.random.default_rng(0)
    p, k, rank = 12, 6, 4
    signal, mixed, noise = (draw.normal(size=s) for s in ((p, rank), (rank, k), (p, k)))
    if np.issubdtype(dtype, np.complexfloating):
        signal, noise = signal * (1 + 1j), noise * np.exp(1j * noise)
    mixed[:, 1] = mixed[:, 0]
    block = 1e3 * signal @ mixed + 0.01 * noise
    block[-2:] = 0
    decompose = jax.jit(pivoted_qr)
    for most, expected in ((p - 1, rank), (3, 3)):
        most = jnp.asarray(float(most), jnp.finfo(dtype).dtype)
        turn, count = (np.asarray(x) for x in decompose(jnp.asarray(block, dtype), most))
        assert count == expected
        assert turn.dtype == dtype
        rounding = 30 * np.finfo(dtype).eps
        close(turn.conj().T @ turn, np.eye(p), rounding, 1)
        close(turn[-2:], np.eye(p)[-2:], rounding, 1)
        left = np.linalg.norm(turn[:, rank:].conj().T @ block, axis=0)
        assert (left < 1).all() == (expected == rank)


def test_nan_and_infinity_stay_visible() -> None:
    for bad in (np.nan, np.inf):
        block = jnp.asarray(factors(ROWS["randomised"])[2]).at[7, 7].set(bad)
        assert jnp.isnan(orthonormalise(block).columns).any()


REST = ["hutchpp_trace", "xdiag"]


@pytest.mark.parametrize("name", ["xtrace", slow("xnystrace"), *map(nightly, REST)])
def test_estimators_on_long_vectors(name: str) -> None:
    """Of rank 9 and 0, whose answers are exact, with gradients, in a batch of keys."""
    n = ROWS["randomised"]
    root = jnp.asarray(factors(n)[2][:, :9])
    estimator = getattr(tx, name)

    def loss(root: Any, key: Any) -> tuple[Any, tx.Estimate]:
        operator = matrix_free(lambda v: root @ (root.T @ v), n, PSD)
        estimate = estimator(operator, key, 60)
        return jnp.sum(estimate.value), estimate

    keys = jax.random.split(jax.random.key(0), 4)
    run = jax.jit(jax.vmap(jax.value_and_grad(loss, has_aux=True), (None, 0)))
    for matrix in (root, 0 * root):
        (_, estimate), gradient = run(matrix, keys)
        truth = jnp.sum(matrix**2, axis=1)
        truth = truth[None] if name == "xdiag" else jnp.sum(truth)
        worst = 1e-11 * max(float(jnp.max(jnp.abs(truth))), 1)
        assert jnp.max(jnp.abs(estimate.value - truth)) < worst
        assert jnp.max(estimate.standard_error) < 10 * worst
        close(gradient, jnp.broadcast_to(2 * matrix, gradient.shape), 1e-9)


def test_orthogonal_probes_of_long_vectors() -> None:
    n = ROWS["randomised"]
    probes = tx.orthogonal(jax.random.key(0), jax.ShapeDtypeStruct((n,), float), K)
    close(probes @ probes.T, n * jnp.eye(K), 1e-13, n)


@pytest.mark.parametrize("dtype", [float, complex])
def test_square_roots(dtype: Any) -> None:
    """Of a Gram matrix with a row and a column of zeros, which stay."""
    gram = np.asarray(hermitian(np.geomspace(1e-2, 1e2, 6), dtype))
    gram = np.pad(gram, (0, 1))
    root, inverse = square_roots(jnp.asarray(gram))
    close(root @ root, gram, 1e-12)
    close((inverse @ gram @ inverse)[:6, :6], np.eye(6), 1e-10)
    assert not jnp.any(root[6])
    assert not jnp.any(inverse[6, :6])
