"""Traces of functions of operators that are not Hermitian."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, function, general

KEY = jax.random.key(5)
N = 24


def exact(operator: Any, fn: Any, probes: int = N, steps: int = 1) -> tx.Estimate:
    return tx.arnoldi_trace(operator, fn, KEY, num_probes=probes, num_steps=steps)


def jordan(size: int) -> np.ndarray:
    """Blocks of one eigenvalue, which have one eigenvector each."""
    return 2 * np.eye(N) + np.kron(np.eye(N // size), np.eye(size, k=1))


SHIFT = np.roll(np.eye(N), 1, axis=0)

MATRICES: dict[str, Any] = {
    "general": general(N) / 5 + 2 * np.eye(N),
    "complex": general(N, complex) / 5 + 2 * np.eye(N),
    "normal": SHIFT - SHIFT.T + 2 * np.eye(N),
    "triangular": np.triu(general(N)) / 5 + 2 * np.eye(N),
    "convection": 2 * np.eye(N) + 1.8 * np.eye(N, k=1) + 0.2 * np.eye(N, k=-1),
    "multiple of I": 2 * np.eye(N),
    "Jordan, 2": jordan(2),
    "Jordan, n": jordan(N),
}


@pytest.mark.parametrize("name", MATRICES)
def test_exact_from_n_applications(name: str) -> None:
    """Values, prices and derivatives, forward and reverse; half of the digits, and more
    here, where there is no basis of eigenvectors."""
    matrix = jnp.asarray(MATRICES[name])
    direction = jnp.asarray(general(N, matrix.dtype, seed=3)) / N**0.5

    def value(t: Any, wrap: Callable[..., Any] = function) -> Any:
        estimate = exact(wrap(matrix + t * direction), jnp.exp)
        return estimate.value.real, estimate

    expm = jax.scipy.linalg.expm(matrix)
    for wrap, spent in ((function, N), (lx.MatrixLinearOperator, 0)):
        estimate = value(0.0, wrap)[1]
        close(estimate.value, jnp.trace(expm), 1e-13)
        assert estimate.value.dtype == matrix.dtype
        assert estimate.standard_error == 0
        assert estimate.num_matvecs == spent
    want, scale = jnp.trace(expm @ direction).real, float(jnp.linalg.norm(expm))
    digits = (
        1e-8 if name in ("triangular", "convection", "Jordan, 2", "Jordan, n") else 1e-13
    )
    for slope in (jax.grad, jax.jacfwd):
        close(jax.jit(slope(lambda t: value(t)[0]))(0.0), want, digits, scale)


def test_exact_or_not() -> None:
    operator = function(MATRICES["general"])
    for probes, steps in ((N, 1), (1, N), (5, 5), (1, N + 9)):
        estimate = exact(operator, jnp.log, probes, steps)
        close(estimate.value, np.linalg.slogdet(MATRICES["general"])[1], 1e-13)
        assert estimate.num_matvecs == N
    sampled = exact(operator, jnp.log, N - 1, 1)
    assert sampled.standard_error == jnp.inf
    assert exact(operator, jnp.log, 4, 5).num_matvecs == 20


def test_what_fn_depends_on() -> None:
    matrix = MATRICES["general"]

    def value(p: Any) -> Any:
        parts = exact(function(matrix), lambda x: {"power": x**p, "count": x == x}).value
        return parts["power"], parts["count"]

    truth = lambda p: jnp.sum(jnp.linalg.eigvals(matrix) ** p).real  # noqa: E731
    (power, count), (slope, _) = jax.jvp(value, (1.5,), (1.0,))
    close(power, truth(1.5), 1e-12)
    assert count == N
    close(slope, jax.grad(truth)(1.5), 1e-12)
    curvature = jax.jit(jax.hessian(lambda p: value(p)[0]))(1.5)
    close(curvature, jax.hessian(truth)(1.5), 1e-11)


def test_second_derivatives_in_the_operator_are_refused() -> None:
    """But what `fn` depends on may come second: that reads the same vectors."""
    matrix = MATRICES["general"]
    for probes in (N, 2):

        def value(s: Any, p: Any, probes: int = probes) -> Any:
            return exact(function(s * matrix), lambda x: x**p, probes, 4).value

        for first in (0, 1):
            with pytest.raises(NotImplementedError, match="twice in its operator"):
                jax.grad(jax.grad(value, first), 0)(1.0, 1.5)
        mixed = jax.grad(jax.grad(value, 0), 1)(1.0, 1.5)
        if probes == N:
            nodes = jnp.linalg.eigvals(matrix)
            truth = jnp.sum(nodes**1.5 * (1 + 1.5 * jnp.log(nodes))).real
            close(mixed, truth, 1e-12)


@pytest.mark.parametrize("negative", [1, 2])
def test_exact_across_a_branch_cut(negative: int) -> None:
    """NaN where a real operator has negative eigenvalues, one or two; not where rounding
    makes a zero negative, and complex operators have the principal value."""
    eigenvalues = np.where(np.arange(N) < negative, -1.0 - np.arange(N), 2.0)
    vectors = np.eye(N) + general(N) / 30
    matrix = vectors @ np.diag(eigenvalues) @ np.linalg.inv(vectors)
    assert jnp.isnan(exact(function(matrix), jnp.log).value)
    found = exact(function(matrix.astype(complex)), jnp.log).value
    close(found, np.sum(np.log(eigenvalues.astype(complex))), 1e-12)
    singular = vectors @ np.diag(np.maximum(eigenvalues, 0)) @ np.linalg.inv(vectors)
    root = exact(function(singular), jnp.sqrt).value
    close(root, np.sum(np.sqrt(np.maximum(eigenvalues, 0))), 1e-6)


def test_signs_do_not_see_what_is_skew() -> None:
    """Rotations by eight angles: from 16 steps on there is no error but rounding."""
    angles = np.repeat(np.linspace(0.1, 1.5, 8), 4)
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    matrix = np.kron(np.diag(np.cos(angles)), np.eye(2)) + np.kron(
        np.diag(np.sin(angles)), turn
    )
    counts: dict[str, Any] = {"num_probes": 2, "num_steps": 16}
    estimate = tx.arnoldi_trace(function(matrix), jnp.exp, KEY, **counts)
    truth = np.sum(2 * np.exp(np.cos(angles)) * np.cos(np.sin(angles)))
    close(estimate.value, truth, 1e-11)
    on_sphere = tx.arnoldi_trace(
        function(matrix), jnp.exp, KEY, sampler=tx.sphere, **counts
    )
    assert abs(on_sphere.value - truth) > 1e-3 * truth


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_exact_in_single_precision(dtype: Any) -> None:
    matrix = jnp.asarray(MATRICES["complex"] if dtype == np.complex64 else jordan(2))
    estimate = jax.jit(lambda m: exact(function(m), jnp.log))(matrix.astype(dtype))
    assert estimate.value.dtype == dtype
    close(estimate.value.real, np.linalg.slogdet(matrix)[1], 1e-5)
    slope = jax.grad(
        lambda s: exact(function(s * matrix.astype(dtype)), jnp.log).value.real
    )
    close(slope(np.float32(1.0)), N, 1e-3)
