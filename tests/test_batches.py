"""`batch_size=`: the same numbers with less memory; and `progress_meter=`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import DRAWN, cases, close, leaks_checked, nightly, refused, slow
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


def of(name: str, *args: Any, **how: Any) -> Callable[..., Any]:
    how = how if "num_probes" in how else {"num_matvecs": K} | how
    return lambda matrix, **b: getattr(tx, name)(operator(matrix), *args, KEY, **how, **b)


COUNTS: Any = {"num_probes": 11, "num_steps": 5}
FIVE = tx.probing(np.arange(N) % 5)
CASES: dict[str, Callable[..., Any]] = {
    "trace": of("hutchinson_trace"),
    "trace, sphere": of("hutchinson_trace", sampler=tx.sphere),
    "trace, orthogonal": of("hutchinson_trace", sampler=tx.orthogonal),
    "trace, own sampler": of("hutchinson_trace", sampler=own),
    "trace, exact": of("hutchinson_trace", num_matvecs=100),
    "diagonal": of("hutchinson_diagonal"),
    "diagonal, normal": of("hutchinson_diagonal", sampler=tx.normal),
    "diagonal, probing": of("hutchinson_diagonal", num_matvecs=30, sampler=FIVE),
    "diagonal, exact": of("hutchinson_diagonal", num_matvecs=100),
    "slq_trace": of("slq_trace", jnp.log, **COUNTS),
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


QUICK = ("trace", "diagonal, probing", "trace, exact")
SLOW = ("trace, own sampler", "diagonal", "laplacian", "biharmonic")
COMPLEX = ("trace, orthogonal", "diagonal, probing", "slq_trace")
RUNS = [(name, float) for name in QUICK] + [slow(name, float) for name in SLOW]
RUNS += [slow(name, complex) for name in COMPLEX]
RUNS += [nightly(name, float) for name in CASES if name not in QUICK + SLOW]
METER = diffrax.TextProgressMeter(minimum_increase=0.0)
PROBES = {"diagonal, probing": 30, "slq_trace": 11}


def shown(capfd: Any) -> list[str]:
    return [line for line in capfd.readouterr().out.splitlines() if line.endswith("%")]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_batches_change_no_number_and_are_shown_once(
    name: str, dtype: Any, capfd: Any
) -> None:
    """Whether they divide the number of probes or not. Backward passes show nothing."""
    batch_size = 10 if "probing" in name or dtype is complex else 5  # at least one sample
    matrix = matrix_of(dtype)
    (_, whole), gradient = answer(name)(matrix)
    with leaks_checked():
        found = answer(name, batch_size=batch_size, progress_meter=METER)(matrix)
        (_, parts), other = jax.block_until_ready(found)
    jax.effects_barrier()
    close(parts.value, whole.value, max(1e-13, DRAWN))
    close(parts.standard_error, whole.standard_error, max(1e-11, 10 * DRAWN))
    close(other, gradient, max(1e-12, 10 * DRAWN))
    assert parts.num_matvecs == whole.num_matvecs
    count = PROBES.get(name, N if "exact" in name else K)
    shares = [min(done / count, 1) for done in range(0, count + batch_size, batch_size)]
    assert shown(capfd) == [f"{100 * share:.2f}%" for share in shares]


def test_densities_in_batches() -> None:
    """They are those of plain quadrature."""
    grid = jnp.linspace(0.5, 2.5, 5)
    how: Any = {"num_probes": 7, "num_steps": 4}

    @jax.jit
    def both(scale: Any) -> Any:
        run = partial(tx.spectral_density, matrix_free(lambda v: scale * v, 100), grid, KEY)
        return run(**how, batch_size=3), run(**how, reorthogonalise=False)

    parts, whole = both(jnp.linspace(1.0, 2.0, 100))
    close((parts.value, parts.standard_error), (whole.value, whole.standard_error), 1e-9)


def test_batches_at_any_scale() -> None:
    """The sums of squares over batches neither overflow nor underflow."""
    whole = jax.jit(CASES["diagonal"])(matrix_of(float))
    run = jax.jit(lambda a: CASES["diagonal"](a, batch_size=5))
    for scale in (2.0**-660, 2.0**660):
        parts = run(scale * matrix_of(float))
        close(parts.value / scale, whole.value, 1e-12)
        close(parts.standard_error / scale, whole.standard_error, 1e-10)


@pytest.mark.slow
def test_a_gradient_holds_one_batch() -> None:
    """The compiler sets aside a few blocks of a batch, forwards and backwards; without
    batches it sets aside hundreds of vectors."""
    n, k, b = 20_000, 240, 6

    def loss(diagonal: Any, factor: Any, name: str, **how: Any) -> Any:
        apply = lambda v: diagonal * v + factor @ (factor.T @ v)  # noqa: E731
        a = matrix_free(apply, n, PSD, jnp.float32)
        if name == "laplacian":
            energy = lambda x, d: jnp.sum(d * jnp.cos(x))  # noqa: E731
            return tx.laplacian(energy, diagonal, KEY, k, args=diagonal, **how).value
        if name == "slq_trace":
            how |= {"num_probes": k // 4, "num_steps": 4}
            return tx.slq_trace(a, jnp.log, KEY, **how).value
        estimate = getattr(tx, name)(a, KEY, k, **how)
        error = jax.lax.stop_gradient(estimate.standard_error)
        return jnp.sum(estimate.value) + 0 * jnp.sum(error)

    def vectors_set_aside(name: str, batch_size: int | None) -> float:
        run = partial(loss, name=name, batch_size=batch_size)
        gradient = jax.jit(jax.grad(run, (0, 1))).lower(*vectors)
        memory: Any = gradient.compile().memory_analysis()
        return memory.temp_size_in_bytes / (4 * n)

    vectors = jnp.ones(n, jnp.float32), jnp.ones((n, 2), jnp.float32)
    for name in ("hutchinson_trace", "hutchinson_diagonal", "slq_trace", "laplacian"):
        assert vectors_set_aside(name, b) < 16 * b, name
        assert vectors_set_aside(name, None) > k, name


def test_wrong_batch_sizes() -> None:
    matrix, few = matrix_of(float), "batch_size=.*at least 1"
    for size in (0, -1):
        refused(ValueError, few, CASES["trace"], matrix, batch_size=size)
    refused(TypeError, "batch_size=.*int", CASES["slq_trace"], matrix, batch_size=2.0)
    density = of("spectral_density", matrix[0], **COUNTS)
    words = r"spectral_density\(batch_size="
    refused(ValueError, words, density, matrix, batch_size=0)
    words = "batch_size=.*at least 5.*sample"
    few_probes = of("hutchinson_diagonal", num_matvecs=10, sampler=FIVE)
    refused(ValueError, words, few_probes, matrix, batch_size=4)


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
    plain, metered = run(made), run(made, progress_meter=METER)
    jax.effects_barrier()
    close(metered.value, plain.value, 1e-12)
    assert shown(capfd) == [f"{100 * step / steps:.2f}%" for step in range(steps + 1)]


def test_wrong_meters() -> None:
    words, how = r"progress_meter=\.\.\.\) must be a progress", {"progress_meter": print}
    for call in CASES.values():
        refused(TypeError, words, call, matrix_of(float), batch_size=10, **how)
