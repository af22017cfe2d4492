"""Dense matrices of known spectra, and the algebra that estimates are tested against."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np


def spectrum(name: str, n: int) -> np.ndarray:
    i = np.arange(n)
    return {
        "flat": np.linspace(3, 1, n),
        "poly": (i + 1.0) ** -2,
        "exp": 0.7**i,
        "step": np.where(i < n // 20, 1, 1e-3),
        "rank5": (i < 5) * 1.0,
        "zero": 0.0 * i,
    }[name]


def hermitian(eigenvalues: np.ndarray, dtype: Any = float, seed: int = 0) -> Any:
    """A dense Hermitian matrix with these eigenvalues in a random orthonormal basis."""
    n, kind = len(eigenvalues), np.dtype(dtype).kind
    basis, _ = np.linalg.qr(numbers((n, n), complex if kind == "c" else float, seed))
    matrix = (basis * eigenvalues) @ basis.conj().T
    return jnp.asarray((matrix + matrix.conj().T) / 2, dtype)


def general(n: int, dtype: Any = float, seed: int = 0) -> Any:
    """A dense non-normal matrix."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((n, n)) / np.sqrt(n) + 0.5 * np.triu(np.ones((n, n)))
    if np.dtype(dtype).kind == "c":
        matrix = matrix + 1j * rng.standard_normal((n, n))
    return jnp.asarray(matrix, dtype)


def numbers(shape: Any, dtype: Any = float, seed: int = 0) -> np.ndarray:
    """Normal numbers."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def all_signs(count: int) -> np.ndarray:
    """All 2^count vectors of signs, as rows."""
    return np.array(list(itertools.product([-1.0, 1.0], repeat=count)))


def krylov_basis(matrix: Any, starts: Any, depth: int = 1) -> np.ndarray:
    """Orthonormal columns that span `depth` blocks of a Krylov space."""
    matrix, blocks = np.asarray(matrix), [np.asarray(starts)]
    for _ in range(depth - 1):
        product = matrix @ blocks[-1]
        size = np.linalg.norm(product, axis=0).max()
        blocks.append(product / size if size > 0 else product)
    columns, sizes, _ = np.linalg.svd(np.hstack(blocks), full_matrices=False)
    return columns[:, sizes > 1e-10 * sizes[0]]


def remainder(
    matrix: Any, block: Any, depth: int, tested: int, *left_out: int, resphere: bool = True
) -> Any:
    """The projector on the Krylov space of a block without some columns, and what it leaves
    of one column, of the length that it should have."""
    columns = krylov_basis(matrix, np.delete(block, left_out, axis=1), depth)
    p = columns @ columns.conj().T
    r = block[:, tested] - p @ block[:, tested]
    free = len(matrix) - columns.shape[1]
    return p, r * (free**0.5 / np.linalg.norm(r) if resphere else 1)


def sample(matrix: Any, block: Any, depth: int, f: Any, *probes: int) -> Any:
    """tr(P f P) + r* f r of such a projector and remainder."""
    p, r = remainder(matrix, block, depth, *probes)
    return np.trace(p @ f) + np.vdot(r, f @ r)


def projector(block: Any) -> np.ndarray:
    """On the span of a block's columns, none or more."""
    if block.shape[1] == 0:
        return np.zeros((len(block), len(block)))
    basis, _ = np.linalg.qr(block)
    return basis @ basis.conj().T


def across(residual: np.ndarray, probe: np.ndarray) -> float:
    """The square of what a residual has orthogonal to its probe."""
    along = np.vdot(probe, residual) / np.vdot(probe, probe)
    return float(np.linalg.norm(residual - along * probe) ** 2)
