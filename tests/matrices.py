"""Dense matrices of known spectra."""

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
    n = len(eigenvalues)
    rng = np.random.default_rng(seed)
    block: Any = rng.standard_normal((n, n))
    if np.issubdtype(np.dtype(dtype), np.complexfloating):
        block = block + 1j * rng.standard_normal((n, n))
    basis, _ = np.linalg.qr(block)
    matrix = (basis * eigenvalues) @ basis.conj().T
    return jnp.asarray((matrix + matrix.conj().T) / 2, dtype)


def general(n: int, dtype: Any = float, seed: int = 0) -> Any:
    """A dense non-normal matrix."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((n, n)) / np.sqrt(n) + 0.5 * np.triu(np.ones((n, n)))
    if np.issubdtype(np.dtype(dtype), np.complexfloating):
        matrix = matrix + 1j * rng.standard_normal((n, n))
    return jnp.asarray(matrix, dtype)
