"""Traces of functions of operators that are not Hermitian."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import cases, close, contains, is_unbiased, nightly, over_keys, slow
from tests.matrices import across, general, hermitian, krylov_basis, numbers, remainder
from tests.wrappers import function

KEY = jax.random.key(5)
N = 24


def exact(operator: Any, fn: Any, probes: int = 5, steps: int = 5) -> tx.Estimate:
    return tx.arnoldi_trace(operator, fn, KEY, num_probes=probes, num_steps=steps)


def jordan(size: int) -> np.ndarray:
    """Blocks of one eigenvalue, which have one eigenvector each."""
    return 2 * np.eye(N) + np.kron(np.eye(N // size), np.eye(size, k=1))


SHIFT = np.roll(np.eye(N), 1, axis=0)

MATRICES: dict[str, Any] = {
    "general": general(N) / 5 + 2 * np.eye(N),
    "complex": general(N, complex) / 5 + 2 * np.eye(N, dtype=complex),
    "normal": SHIFT - SHIFT.T + 2 * np.eye(N),
    "triangular": np.triu(general(N)) / 5 + 2 * np.eye(N),
    "convection": 2 * np.eye(N) + 1.8 * np.eye(N, k=1) + 0.2 * np.eye(N, k=-1),
    "multiple of I": 2 * np.eye(N),
    "Jordan, 2": jordan(2),
    "Jordan, n": jordan(N),
}


@pytest.mark.parametrize("name", cases(MATRICES, "Jordan, n"))
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
    defective = ("triangular", "convection", "Jordan, 2", "Jordan, n")
    digits = 1e-8 if name in defective else 1e-13
    for derivative in (jax.grad, jax.jacfwd):
        close(jax.jit(derivative(lambda t: value(t)[0]))(0.0), want, digits, scale)


@pytest.mark.nightly
def test_what_fn_depends_on() -> None:
    """Second derivatives in the operator are refused. But one in what `fn` depends on may
    come first or second: that reads the same vectors."""
    matrix = MATRICES["general"]
    nodes = jnp.linalg.eigvals(matrix)
    truth = lambda s, p: jnp.sum((s * nodes) ** p).real  # noqa: E731
    for probes in (N, 2):

        def run(s: Any, p: Any, probes: int = probes) -> Any:
            fn = lambda x: {"power": x**p, "count": x == x}  # noqa: E731
            return exact(function(s * matrix), fn, probes, 4).value

        def power(s: Any, p: Any) -> Any:
            return run(s, p)["power"]

        with pytest.raises(NotImplementedError, match="twice in its operator"):
            jax.grad(jax.grad(power, 0), 0)(1.0, 1.5)
        mixed = jax.grad(jax.grad(power, 0), 1)(1.0, 1.5)
        close(jax.grad(jax.grad(power, 1), 0)(1.0, 1.5), mixed, 1e-12)
        if probes == N:
            close(run(1.0, 1.5), {"power": truth(1.0, 1.5), "count": N}, 1e-12)
            close(jax.jacfwd(power, 1)(1.0, 1.5), jax.grad(truth, 1)(1.0, 1.5), 1e-12)
            close(mixed, jax.grad(jax.grad(truth, 0), 1)(1.0, 1.5), 1e-12)
            curvature = jax.hessian(power, 1)(1.0, 1.5)
            close(curvature, jax.hessian(truth, 1)(1.0, 1.5), 1e-11)


def test_exact_across_a_branch_cut() -> None:
    """NaN where a real operator has negative eigenvalues, one or two; not where rounding
    makes a zero negative, and complex operators have the principal value."""
    vectors = np.eye(N) + general(N) / 30
    log = jax.jit(lambda m: exact(function(m), jnp.log).value)
    for negative in (1, 2):
        eigenvalues = np.where(np.arange(N) < negative, -1.0 - np.arange(N), 2.0)
        matrix = vectors @ np.diag(eigenvalues) @ np.linalg.inv(vectors)
        assert jnp.isnan(log(matrix))
        found = log(matrix.astype(complex))
        close(found, np.sum(np.log(eigenvalues.astype(complex))), 1e-12)
    eigenvalues = np.maximum(eigenvalues, 0)
    singular = vectors @ np.diag(eigenvalues) @ np.linalg.inv(vectors)
    close(exact(function(singular), jnp.sqrt).value, np.sum(np.sqrt(eigenvalues)), 1e-6)


SINGLE = [
    ("general", np.float32),
    slow("complex", np.complex64),
    slow("Jordan, 2", np.float32),
]


@pytest.mark.parametrize(("name", "dtype"), SINGLE)
def test_exact_in_single_precision(name: str, dtype: Any) -> None:
    """At any scale."""
    matrix = jnp.asarray(MATRICES[name], dtype)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def run(s: Any, unit: Any) -> Any:
        operator = function((s * unit).astype(dtype) * matrix)
        found = exact(operator, lambda x: jnp.log(x / unit.astype(x.dtype))).value
        return found.real, found

    logdet = np.linalg.slogdet(MATRICES[name])[1]
    for power in (0, -60, 60):
        (value, found), gradient = run(np.float32(1), np.float32(2.0**power))
        assert found.dtype == dtype
        close(value, logdet, 1e-5)
        close(gradient, N, 1e-3)


WIDTH, DEPTH, INNER = 3, 5, 3


@pytest.mark.parametrize(("dtype", "resphered"), [(float, True), slow(complex, False)])
def test_the_mean_of_both_is_as_defined(dtype: Any, resphered: bool) -> None:
    """Against explicit projectors: the value, error bar and derivative of a linear and a
    cubic function, for which quadrature is exact."""
    n, sqrt, norm = 30, np.sqrt, np.linalg.norm
    matrix = np.array(general(n, dtype, seed=7)) / 5 + 2 * np.eye(n)
    direction = np.array(general(n, dtype, seed=8))
    block = np.array(tx.rademacher(KEY, jax.ShapeDtypeStruct((n,), dtype), WIDTH).T)
    sampler = tx.rademacher if resphered else (lambda *drawn: tx.rademacher(*drawn))

    @jax.jit
    def run() -> Any:
        def estimate(t: Any) -> tx.Estimate:
            how: Any = {"num_probes": WIDTH, "num_steps": DEPTH, "sampler": sampler}
            fn = lambda x: jnp.stack([x, x**3 - 2 * x**2])  # noqa: E731
            return tx.arnoldi_trace(function(matrix + t * direction), fn, KEY, **how)

        found, moved = jax.jvp(estimate, (0.0,), (1.0,))
        return found.value, found.standard_error, moved.value

    values, errors, rates = map(np.asarray, run())
    how = {"resphere": resphered}
    pairs = [remainder(matrix, block, INNER, i, i, **how) for i in range(WIDTH)]
    plain = [np.outer(w, w.conj()) for w in block.T]
    left_out = [p + np.outer(r, r.conj()) for p, r in pairs]

    # What theory makes of the linear function on what the spaces lack.
    whole = krylov_basis(matrix, block, INNER)
    centre = np.mean([np.vdot(r, matrix @ r) / np.vdot(r, r) for _, r in pairs])
    inside, along = [], []
    for p, r in pairs:
        lacked = whole @ whole.conj().T - p
        b = lacked @ (matrix - centre * np.eye(n)) @ lacked
        inside.append(norm(b) ** 2)
        along.append((across(b @ r, r) + across(b.conj().T @ r, r)) / 2)
    square = np.mean(inside) + max(np.mean(inside), np.mean(along))
    samples = np.trace(matrix @ np.array([plain, left_out]), 0, 2, 3)
    first, second = np.std(samples, axis=1, ddof=1) / sqrt(WIDTH)
    second = max(sqrt(2) * second, sqrt(2 * square / WIDTH) if resphered else 0)
    share = 1 / (1 + (second / first) ** 2)
    close(errors[0], (1 - share) * first + share * second, 1e-9)
    close(values[0], (1 - share) * np.mean(samples[0]) + share * np.mean(samples[1]), 1e-12)

    means = np.array([np.mean(ms, axis=0) for ms in (plain, left_out)])
    cubic = np.trace(matrix @ matrix @ (matrix - 2 * np.eye(n)) @ means, 0, 1, 2)
    of_cubic = (values[1] - cubic[0]) / (cubic[1] - cubic[0])
    assert 0 < of_cubic.real < 1
    assert abs(of_cubic.imag) < 1e-10
    changes = direction, direction @ (3 * matrix @ matrix - 4 * matrix)
    for rate, s, change in zip(rates, (share, of_cubic.real), changes, strict=True):
        close(rate, np.trace(change @ ((1 - s) * means[0] + s * means[1])), 1e-11)


LARGE = 96


def decaying() -> np.ndarray:
    """Of singular values 1/i, its eigenvectors far from orthogonal."""
    left, right = (np.linalg.qr(numbers((LARGE, LARGE), seed=i))[0] for i in (0, 1))
    return 4 * (left / np.arange(1, LARGE + 1)) @ np.linalg.qr(left + 0.5 * right)[0].T


SAMPLED = {
    "decaying": decaying(),
    "Hermitian": np.asarray(hermitian(4 / (1.0 + np.arange(LARGE)))),
    "flat": 3 * np.eye(LARGE) + np.asarray(general(LARGE)) / 5,
    "triangular": np.triu(np.random.default_rng(2).normal(size=(LARGE, LARGE)), 1) / 10,
}


@pytest.mark.parametrize("name", [slow("decaying"), *map(nightly, list(SAMPLED)[1:])])
def test_intervals_and_mean_gradients(name: str) -> None:
    """Of three functions at once, over 60 keys; no worse than signs by themselves."""
    matrix = jnp.asarray(SAMPLED[name])
    exp = jax.scipy.linalg.expm(matrix)
    inverse = jnp.linalg.inv(matrix + 5 * jnp.eye(LARGE))
    powers = (exp, inverse, matrix @ matrix)
    truth = jnp.stack([jnp.trace(power) for power in powers])

    def one(key: Any) -> Any:
        def run(s: Any) -> Any:
            fn = lambda x: jnp.stack([jnp.exp(x), 1 / (x + 5), x**2])  # noqa: E731
            counts: Any = {"num_probes": 6, "num_steps": 10}
            return tx.arnoldi_trace(function(s * matrix), fn, key, **counts)

        found, moved = jax.jvp(run, (1.0,), (1.0,))
        return found.value, moved.value, contains(found, truth)

    values, gradients, held = over_keys(one, KEY, 60)
    rates = (exp @ matrix, -inverse @ inverse @ matrix, 2 * matrix @ matrix)
    assert np.all(np.mean(held, axis=0) >= 0.9)
    for i, (power, rate) in enumerate(zip(powers, rates, strict=True)):
        off = power + power.T - 2 * jnp.diag(jnp.diag(power))
        alone = float(jnp.linalg.norm(off)) / (2 * 6) ** 0.5
        error = float(np.sqrt(np.mean((values[:, i] - truth[i]) ** 2)))
        assert error < (0.4 if name == "decaying" else 1.2) * alone
        assert is_unbiased(gradients[:, i], jnp.trace(rate), 4)
