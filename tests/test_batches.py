"""`batch_size=`: the same numbers with less memory; and `progress_meter=`."""

from collections.abc import Callable
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import DRAWN, cases, close, leaks_checked, refused, slow
from tests.matrices import hermitian, spectrum
from tests.wrappers import PSD, matrix_free

N, K, KEY = 40, 23, jax.random.key(3)


def operator(matrix: Any) -> lx.AbstractLinearOperator:
    return lx.MatrixLinearOperator(matrix, PSD)


def waves(x: Any, matrix: Any) -> Any:
    return jnp.sin(matrix @ x)


def energy(x: Any, matrix: Any) -> Any:
    return jnp.sum(jnp.cos(matrix @ x))


def own(key: Any, structure: Any, num_probes: int) -> Any:
    return jax.random.normal(key, (num_probes, *structure.shape), structure.dtype)


def calculus(name: str, fn: Any, num_matvecs: int = K, **how: Any) -> Callable[..., Any]:
    def estimate(matrix: Any, **batches: Any) -> Any:
        x, args = matrix[0].real, matrix.real
        return getattr(tx, name)(fn, x, KEY, num_matvecs, args=args, **batches, **how)

    return estimate


def of(name: str, num_matvecs: int = K, **how: Any) -> Callable[..., Any]:
    def estimate(matrix: Any, **batches: Any) -> Any:
        return getattr(tx, name)(operator(matrix), KEY, num_matvecs, **batches, **how)

    return estimate


def quadrature(fn: Callable[..., Any]) -> Callable[..., Any]:
    def estimate(matrix: Any, **batches: Any) -> Any:
        return fn(operator(matrix), KEY, num_probes=11, num_steps=5, **batches)

    return estimate


FIVE = tx.probing(np.arange(N) % 5)
CASES: dict[str, Callable[..., Any]] = {
    "trace": of("hutchinson_trace"),
    "trace, sphere": of("hutchinson_trace", sampler=tx.sphere),
    "trace, orthogonal": of("hutchinson_trace", sampler=tx.orthogonal),
    "trace, own sampler": of("hutchinson_trace", sampler=own),
    "trace, exact": of("hutchinson_trace", 100),
    "diagonal": of("hutchinson_diagonal"),
    "diagonal, normal": of("hutchinson_diagonal", sampler=tx.normal),
    "diagonal, probing": of("hutchinson_diagonal", 30, sampler=FIVE),
    "diagonal, exact": of("hutchinson_diagonal", 100),
    "slq_trace": quadrature(lambda a, *x, **y: tx.slq_trace(a, jnp.log, *x, **y)),
    "laplacian": calculus("laplacian", energy, sampler=tx.rademacher),
    "biharmonic": calculus("biharmonic", energy),
    "divergence": calculus("divergence", waves, sampler=tx.rademacher),
    "hessian_diagonal": calculus("hessian_diagonal", energy, sampler=tx.rademacher),
    "laplacian, exact": calculus("laplacian", energy, num_matvecs=N),
}


def matrix_of(dtype: Any) -> Any:
    root = jax.random.normal(jax.random.key(0), (N, N), dtype)
    return root @ root.conj().T / N + jnp.eye(N, dtype=dtype)


def answer(name: str, **batches: Any) -> Callable[[Any], Any]:
    def loss(matrix: Any) -> tuple[Any, tx.Estimate]:
        estimate = CASES[name](matrix, **batches)
        weights = jnp.cos(jnp.arange(estimate.value.size)).reshape(estimate.value.shape)
        return jnp.sum(weights * estimate.value), estimate

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


SOME = ("trace, orthogonal", "trace, exact", "diagonal", "diagonal, probing", "slq_trace")
RUNS = [(name, float, 5) for name in ("trace", "diagonal, probing", "trace, exact")]
RUNS += [slow(name, float, 5) for name in CASES if (name, float, 5) not in RUNS]
RUNS += [slow(name, complex, 10) for name in SOME]
METER = diffrax.TextProgressMeter(minimum_increase=0.0)
PROBES = {"diagonal, probing": 30, "slq_trace": 11}


@pytest.mark.parametrize(("name", "dtype", "batch_size"), RUNS)
def test_batches_change_no_number_and_are_shown_once(
    name: str, dtype: Any, batch_size: int, capfd: Any
) -> None:
    """Whether they divide the number of probes or not. Backward passes show nothing."""
    if "probing" in name:  # at least one sample
        batch_size = 10
    matrix = matrix_of(dtype)
    (_, whole), gradient = answer(name)(matrix)
    with leaks_checked():
        found = answer(name, batch_size=batch_size, progress_meter=METER)(matrix)
        (_, parts), other = jax.block_until_ready(found)
    jax.effects_barrier()
    largest = float(jnp.max(jnp.abs(whole.value)))
    close(parts.value, whole.value, max(1e-13, DRAWN), largest)
    close(parts.standard_error, whole.standard_error, max(1e-11, 10 * DRAWN))
    largest = float(jnp.max(jnp.abs(gradient)))
    close(other, gradient, max(1e-12, 10 * DRAWN), largest)
    assert parts.num_matvecs == whole.num_matvecs
    lines = [line for line in capfd.readouterr().out.splitlines() if line.endswith("%")]
    count = PROBES.get(name, N if "exact" in name else K)
    shares = [min(done / count, 1) for done in range(0, count + batch_size, batch_size)]
    assert lines == [f"{100 * share:.2f}%" for share in shares]


def test_densities_in_batches() -> None:
    """They are those of plain quadrature."""
    scale = jnp.linspace(1.0, 2.0, 100)
    a, grid = matrix_free(lambda v: scale * v, 100), jnp.linspace(0.5, 2.5, 5)
    how: Any = {"num_probes": 7, "num_steps": 4}
    parts = tx.spectral_density(a, grid, KEY, batch_size=3, **how)
    whole = tx.spectral_density(a, grid, KEY, reorthogonalise=False, **how)
    close((parts.value, parts.standard_error), (whole.value, whole.standard_error), 1e-9)


def test_batches_at_any_scale() -> None:
    """The sums of squares over batches neither overflow nor underflow."""
    for scale in (2.0**-660, 2.0**660):
        scaled = operator(scale * matrix_of(float))
        parts = tx.hutchinson_diagonal(scaled, KEY, K, batch_size=5)
        whole = tx.hutchinson_diagonal(operator(matrix_of(float)), KEY, K)
        close(parts.value / scale, whole.value, 1e-12)
        close(parts.standard_error / scale, whole.standard_error, 1e-10)


@pytest.mark.slow
def test_a_gradient_holds_one_batch() -> None:
    """The compiler sets aside a few blocks of a batch, forwards and backwards; without
    batches it sets aside hundreds of vectors."""
    n, k, b = 20_000, 240, 6

    def loss(diagonal: Any, factor: Any, name: str, batch_size: Any) -> Any:
        if name == "laplacian":
            how: dict[str, Any] = {"args": diagonal, "batch_size": batch_size}
            energy = lambda x, d: jnp.sum(d * jnp.cos(x))  # noqa: E731
            return tx.laplacian(energy, diagonal, KEY, k, **how).value
        apply = lambda v: diagonal * v + factor @ (factor.T @ v)  # noqa: E731
        a = matrix_free(apply, n, PSD, jnp.float32)
        if name == "slq_trace":
            return tx.slq_trace(
                a, jnp.log, KEY, num_probes=k // 4, num_steps=4, batch_size=batch_size
            ).value
        estimate = getattr(tx, name)(a, KEY, k, batch_size=batch_size)
        error = jax.lax.stop_gradient(estimate.standard_error)
        return jnp.sum(estimate.value) + 0 * jnp.sum(error)

    vectors = jnp.ones(n, jnp.float32), jnp.ones((n, 2), jnp.float32)
    for name in ("hutchinson_trace", "hutchinson_diagonal", "slq_trace", "laplacian"):

        def vectors_set_aside(batch_size: Any, name: str = name) -> float:
            gradient = jax.jit(jax.grad(lambda d, f: loss(d, f, name, batch_size), (0, 1)))
            memory: Any = gradient.lower(*vectors).compile().memory_analysis()
            return memory.temp_size_in_bytes / (4 * n)

        assert vectors_set_aside(b) < 16 * b, name
        assert vectors_set_aside(None) > k, name


def test_wrong_batch_sizes() -> None:
    matrix, few, slq = matrix_of(float), "batch_size=.*at least 1", CASES["slq_trace"]
    for size in (0, -1):
        refused(ValueError, few, CASES["trace"], matrix, batch_size=size)
    refused(TypeError, "batch_size=.*Python int", slq, matrix, batch_size=2.0)
    density = quadrature(lambda a, *x, **y: tx.spectral_density(a, matrix[0], *x, **y))
    words = r"spectral_density\(batch_size="
    refused(ValueError, words, density, matrix, batch_size=0)
    words, how = "batch_size=.*at least 5.*sample", {"sampler": FIVE}
    refused(ValueError, words, of("hutchinson_diagonal", 10, **how), matrix, batch_size=4)


METERED: dict[str, tuple[Any, int]] = {
    "probes": (lambda a, **how: tx.hutchinson_trace(a, KEY, 7, **how), 7),
    "logdet": (lambda a, **how: tx.logdet(a, KEY, 30, shift=9.0, **how), 6),
    "diagonal": (lambda a, **how: tx.function_diagonal(a, jnp.exp, KEY, 30, **how), 6),
}


@pytest.mark.parametrize("name", cases(METERED, "probes"))
def test_a_meter_without_batches(name: str, capfd: Any) -> None:
    """Probes in batches of their own; the blocks of a Krylov run."""
    matrix = hermitian(spectrum("poly", 100))
    made, (run, steps) = matrix_free(lambda v: matrix @ v, 100), METERED[name]
    plain, shown = run(made), run(made, progress_meter=METER)
    jax.effects_barrier()
    close(shown.value, plain.value, 1e-12)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.endswith("%")]
    assert lines == [f"{100 * step / steps:.2f}%" for step in range(steps + 1)]


@pytest.mark.parametrize("name", CASES)
def test_wrong_meters(name: str) -> None:
    words, how = r"progress_meter=\.\.\.\) must be a progress", {"progress_meter": print}
    refused(TypeError, words, CASES[name], matrix_of(float), batch_size=10, **how)
