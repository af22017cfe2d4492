"""Traces of functions of operators that are not Hermitian."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import cases, close, contains, is_unbiased, over_keys, slow
from tests.matrices import general, hermitian, numbers, remainder
from tests.wrappers import function
from traceax._core.operator import LinearMap
from traceax._quadrature.block_arnoldi import block_arnoldi
from traceax._quadrature.block_quadrature import krylov_run
from traceax._quadrature.nodes import Nodes
from traceax._quadrature.scalar import MatrixFunction

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
    for slope in (jax.grad, jax.jacfwd):
        close(jax.jit(slope(lambda t: value(t)[0]))(0.0), want, digits, scale)


@pytest.mark.slow
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


@pytest.mark.slow
def test_second_derivatives_in_the_operator_are_refused() -> None:
    """But what `fn` depends on may come first or second: that reads the same vectors."""
    matrix = MATRICES["general"]
    for probes in (N, 2):

        def value(s: Any, p: Any, probes: int = probes) -> Any:
            return exact(function(s * matrix), lambda x: x**p, probes, 4).value

        with pytest.raises(NotImplementedError, match="twice in its operator"):
            jax.grad(jax.grad(value, 0), 0)(1.0, 1.5)
        mixed = jax.grad(jax.grad(value, 0), 1)(1.0, 1.5)
        close(jax.grad(jax.grad(value, 1), 0)(1.0, 1.5), mixed, 1e-12)
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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_exact_in_single_precision(dtype: Any) -> None:
    matrix = jnp.asarray(MATRICES["complex"] if dtype == np.complex64 else jordan(2))
    single = matrix.astype(dtype)
    estimate = jax.jit(lambda m: exact(function(m), jnp.log))(single)
    assert estimate.value.dtype == dtype
    close(estimate.value.real, np.linalg.slogdet(matrix)[1], 1e-5)
    logdet = lambda s: exact(function(s.astype(dtype) * single), jnp.log)  # noqa: E731
    close(jax.grad(lambda s: logdet(s).value.real)(np.float32(1.0)), N, 1e-3)


@pytest.mark.parametrize("dtype", [np.float32, slow(np.complex64)])
@pytest.mark.parametrize("probes", [5, slow(2)])
def test_single_precision_at_any_scale(dtype: Any, probes: int) -> None:
    """The relative value, error bar and derivative do not depend on units."""
    matrix = jnp.asarray(MATRICES["complex" if dtype == np.complex64 else "general"], dtype)

    @jax.jit
    def run(unit: Any) -> Any:
        def value(s: Any) -> Any:
            operator = function((s * unit).astype(dtype) * matrix)
            estimate = exact(operator, lambda x: (x / unit.astype(x.dtype)) ** 2, probes)
            return estimate.value.real, estimate.standard_error

        slope, error = jax.grad(value, has_aux=True)(np.float32(1.0))
        return value(np.float32(1.0))[0], error, slope

    plain = run(np.float32(1.0))
    close(plain[2], 2 * plain[0], 1e-5)
    for power in (-60, -40, 40, 60):
        close(run(np.float32(2.0**power)), plain, 1e-5)


WIDTH, DEPTH, INNER = 3, 5, 3


def by_projectors(probes: np.ndarray, matrix: np.ndarray, resphered: bool) -> Any:
    """The mean of the M_i of which samples are traces with f(A), one by one."""
    average, how = np.zeros_like(matrix), {"resphere": resphered}
    for i in range(probes.shape[1]):
        p, r = remainder(matrix, probes, INNER, i, i, **how)
        average += (p + np.outer(r, r.conj())) / probes.shape[1]
    return average


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "resphered"), [(float, True), (complex, False)])
def test_readings_against_explicit_projectors(dtype: Any, resphered: bool) -> None:
    """Of a cubic polynomial and of its derivative, for which quadrature is exact."""
    n = 30
    matrix = np.array(general(n, dtype, seed=7)) / 5 + 2 * np.eye(n)
    direction = np.array(general(n, dtype, seed=8))
    structure = jax.ShapeDtypeStruct((n,), matrix.dtype)
    probes = tx.rademacher(KEY, structure, WIDTH).T
    plain = np.array(probes @ probes.conj().T / WIDTH)
    left_out = by_projectors(np.array(probes), matrix, resphered)

    sampler = tx.rademacher if resphered else (lambda *drawn: tx.rademacher(*drawn))

    def cubic(x: Any) -> Any:
        return x**3 - 2 * x**2

    def read() -> Any:
        subject = MatrixFunction(LinearMap(function(matrix)), lambda x: cubic(x)[None])
        kind = {"resphered": resphered, "real": dtype is float}
        run = krylov_run(subject, probes, depth=DEPTH, hermitian=False)
        readout = block_arnoldi(subject, run, **kind).readout
        assert isinstance(readout, Nodes)
        pairs: Any = readout.pairs
        return pairs.basis, readout.nodes, readout.weights[0], pairs.matrices[0]

    def value(t: Any) -> Any:
        counts: dict[str, Any] = {"num_probes": WIDTH, "num_steps": DEPTH}
        operator = function(matrix + t * direction)
        return tx.arnoldi_trace(operator, cubic, KEY, sampler=sampler, **counts).value

    basis, nodes, weights, matrix_of_both = jax.jit(read)()
    found, slope = jax.jit(lambda: jax.jvp(value, (0.0,), (1.0,)))()
    basis = basis[:, : WIDTH * INNER]
    quadrature_matrix = basis @ matrix_of_both @ basis.conj().T
    apart = left_out - plain
    share = np.vdot(apart, quadrature_matrix - plain).real / np.vdot(apart, apart).real
    close(quadrature_matrix, (1 - share) * plain + share * left_out, 1e-12)
    dense = matrix @ matrix @ (matrix - 2 * np.eye(n))
    means = [np.trace(dense @ m) for m in (plain, left_out)]
    assert 0 < share < 1
    mean = (1 - share) * means[0] + share * means[1]
    close(jnp.sum(weights * cubic(nodes)), mean, 1e-12)
    close(found, mean, 1e-12)
    average = (1 - share) * plain + share * left_out
    rate = np.trace(direction @ (3 * matrix @ matrix - 4 * matrix) @ average)
    close(slope, rate, 1e-12)


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
COUNTS: dict[str, Any] = {"num_probes": 6, "num_steps": 10}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_intervals_and_mean_slopes(name: str) -> None:
    """Of three functions at once, over 60 keys; no worse than signs by themselves."""
    matrix = jnp.asarray(SAMPLED[name])
    exp = jax.scipy.linalg.expm(matrix)
    inverse = jnp.linalg.inv(matrix + 5 * jnp.eye(LARGE))
    powers = (exp, inverse, matrix @ matrix)
    truth = jnp.stack([jnp.trace(power) for power in powers])

    def one(key: Any) -> Any:
        def value(s: Any) -> Any:
            fn = lambda x: jnp.stack([jnp.exp(x), 1 / (x + 5), x**2])  # noqa: E731
            return tx.arnoldi_trace(function(s * matrix), fn, key, **COUNTS)

        found, moved = jax.jvp(value, (1.0,), (1.0,))
        return found.value, moved.value, contains(found, truth)

    values, slopes, held = over_keys(one, KEY, 60)
    rates = (exp @ matrix, -inverse @ inverse @ matrix, 2 * matrix @ matrix)
    assert np.all(np.mean(held, axis=0) >= 0.9)
    for i, (power, rate) in enumerate(zip(powers, rates, strict=True)):
        off = power + power.T - 2 * jnp.diag(jnp.diag(power))
        alone = float(jnp.linalg.norm(off)) / (2 * COUNTS["num_probes"]) ** 0.5
        error = float(np.sqrt(np.mean((values[:, i] - truth[i]) ** 2)))
        assert error < 1.2 * alone
        if name == "decaying":
            assert error < 0.4 * alone
        assert is_unbiased(slopes[:, i], jnp.trace(rate), 4)
