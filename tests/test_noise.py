"""Error bars hold if matvecs are noisy, and small eigenvalues survive single precision."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import cases, slow

N, KEYS = 300, 12
PSD = lx.positive_semidefinite_tag
TF32, BFLOAT16 = 10, 7


def basis() -> Any:
    return np.linalg.qr(np.random.default_rng(1).normal(size=(N, N)))[0]


def kernel(length: float, axes: int = 2, n: int = N) -> Any:
    points = np.random.default_rng(0).uniform(size=(n, axes))
    squares = np.sum((points[:, None] - points) ** 2, axis=-1)
    return np.exp(-squares / (2 * length**2))


MATRICES: dict[str, Any] = {
    "kernel": kernel(0.3),
    "powers": (basis() * np.arange(1.0, N + 1) ** -2) @ basis().T,
    "rank 5": basis()[:, :5] @ basis()[:, :5].T,
}


def noisy(matrix: Any, bits: int | None, tags: Any, dtype: Any = jnp.float32) -> Any:
    """A product with vectors that are rounded to so many bits, in full precision."""
    matrix = jnp.asarray(matrix, dtype)

    def apply(v: Any) -> Any:
        v = v if bits is None else jax.lax.reduce_precision(v, 8, bits)
        return jnp.matmul(matrix, v, precision="highest")

    return tx.as_operator(apply, jax.ShapeDtypeStruct((len(matrix),), dtype), tags=tags)


def runs(estimate: Callable[[Any], tx.Estimate]) -> tuple[Any, Any, Any]:
    """Values, error bars and intervals of several keys."""

    def one(key: Any) -> Any:
        found = estimate(key)
        return found.value, found.standard_error, jnp.stack(found.interval())

    keys = jax.random.split(jax.random.key(7), KEYS)
    found = jax.jit(lambda keys: jax.lax.map(one, keys))(keys)
    return tuple(np.asarray(part, float) for part in found)  # pyright: ignore


def check(estimate: Any, truth: float, widest: float, fewest: int = 11) -> None:
    """The intervals hold, and bars are at most so many times the error, or at the level of
    rounding."""
    values, bars, intervals = runs(estimate)
    held = (intervals[:, 0] <= truth) & (truth <= intervals[:, 1])
    assert np.sum(held) >= fewest
    error = np.sqrt(np.mean((values - truth) ** 2))
    assert np.median(bars) <= widest * error + 2e-6 * abs(truth)


def truths(name: str, function: Any) -> float:
    stored = np.asarray(MATRICES[name], np.float32).astype(float)
    return float(np.sum(function(np.linalg.eigvalsh(stored))))


TRACES: dict[str, tuple[Callable[..., tx.Estimate], Any]] = {
    "trace": (lambda a, key: tx.trace(a, key, 60), PSD),
    "xnystrace": (lambda a, key: tx.xnystrace(a, key, 60), PSD),
    "xtrace": (lambda a, key: tx.xtrace(a, key, 60), ()),
    "hutchpp_trace": (lambda a, key: tx.hutchpp_trace(a, key, 60), ()),
    "na_hutchpp_trace": (lambda a, key: tx.na_hutchpp_trace(a, key, 60), ()),
    "automatic": (lambda a, key: tx.trace(a, key, 60), ()),
}


@pytest.mark.parametrize("name", cases(TRACES, "automatic"))
@pytest.mark.parametrize("bits", [slow(TF32), BFLOAT16])
@pytest.mark.parametrize("matrix", ["rank 5", slow("kernel"), slow("powers")])
def test_traces(name: str, bits: int, matrix: str) -> None:
    """The bars were 35 to 200 times too wide, or held in no run."""
    estimate, tags = TRACES[name]
    operator = noisy(MATRICES[matrix], bits, tags)
    check(lambda key: estimate(operator, key), truths(matrix, lambda x: x), 60)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, TF32, BFLOAT16])
@pytest.mark.parametrize("matrix", ["rank 5", "kernel", "powers"])
def test_log_determinants(bits: int | None, matrix: str) -> None:
    operator = noisy(MATRICES[matrix], bits, PSD)
    truth = truths(matrix, lambda x: np.log(x + 0.1))
    # The probability that less than 10 of 12 intervals for 95 % hold is 2 %.
    check(lambda key: tx.logdet(operator, key, 180, shift=0.1), truth, 10, fewest=10)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [TF32, BFLOAT16])
@pytest.mark.parametrize(("dtype", "budget"), [("f4", 80), ("f8", 100)])
def test_rounded_arguments(bits: int, dtype: str, budget: int) -> None:
    """Errors along small eigenvalues are small, and T must keep them small. With its
    Hermitian part, errors were up to six bars, all upwards, and few intervals held."""
    operator = noisy(MATRICES["kernel"], bits, PSD, dtype)
    truth = truths("kernel", lambda x: np.log(x + 0.1))
    check(lambda key: tx.logdet(operator, key, budget, shift=0.1), truth, 6)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, TF32, BFLOAT16])
def test_quadratic_forms(bits: int | None) -> None:
    operator, y = noisy(MATRICES["kernel"], bits, PSD), jnp.sin(jnp.arange(N, dtype="f4"))
    stored = np.asarray(MATRICES["kernel"], np.float32) + 0.1 * np.eye(N)
    truth = float(np.asarray(y) @ np.linalg.solve(stored, np.asarray(y, float)))

    def estimate(key: Any) -> tx.Estimate:
        return tx.inv_quad_logdet(operator, y, key, 180, shift=0.1).inv_quad

    # In full precision bars are 9 times the error with one processor, 26 with another.
    check(estimate, truth, 40)


@pytest.mark.slow
def test_single_precision_of_a_kernel_that_is_not_resolved() -> None:
    """Most of its eigenvalues are below the shift, which is twice the rounding error of the
    largest. Radau's rule needs the smallest eigenvalues of T. It lacked them: errors were
    94, and bars 25. In double precision errors are 19. Errors of slq_trace were 600, and
    bars 100."""
    matrix = kernel(0.15, n=600)
    spectrum = np.linalg.eigvalsh(np.asarray(matrix, np.float32).astype(float))
    truth = float(np.sum(np.log(spectrum + 1e-5)))
    operator = noisy(matrix, None, PSD)
    check(lambda key: tx.logdet(operator, key, 120, shift=1e-5), truth, 3)
    matrix = kernel(0.2, n=600)
    spectrum = np.linalg.eigvalsh(np.asarray(matrix, np.float32).astype(float))
    truth = float(np.sum(np.log(spectrum + 1e-4)))
    operator = noisy(matrix, None, PSD)
    counts: dict[str, Any] = {"num_probes": 12, "num_steps": 20}
    log = lambda x: jnp.log(x + np.float32(1e-4))  # noqa: E731
    check(lambda key: tx.slq_trace(operator, log, key, **counts), truth, 5)


@pytest.mark.slow
@pytest.mark.parametrize("condition", [1e3, 1e5, 1e6])
@pytest.mark.parametrize("axes", [1, 2])
def test_single_precision_of_kernels(condition: float, axes: int) -> None:
    """Errors are near those of double precision, and the bars at most eight times as large
    as errors, on all processors. (They were up to a hundred times as large.)"""
    matrix = kernel(0.5, axes)
    stored = np.asarray(matrix, np.float32).astype(float)
    spectrum = np.linalg.eigvalsh(stored)
    shift = spectrum[-1] / condition
    truth = float(np.sum(np.log(spectrum + shift)))
    operator = noisy(matrix, None, PSD)
    check(lambda key: tx.logdet(operator, key, 180, shift=shift), truth, 8)
    errors = runs(lambda key: tx.logdet(operator, key, 180, shift=shift))[0] - truth
    assert np.sqrt(np.mean(errors**2)) < 1e-7 * N * condition


@pytest.mark.slow
def test_a_solver_at_a_loose_tolerance_is_no_nan() -> None:
    matrix = jnp.asarray(MATRICES["kernel"] + 0.1 * np.eye(N), jnp.float32)
    solver = lx.CG(rtol=1e-2, atol=1e-2)
    inverse = lx.invert(lx.MatrixLinearOperator(matrix, PSD), solver)
    for estimate in (
        lambda key: tx.function_trace(inverse, jnp.sqrt, key, 120),
        lambda key: tx.slq_trace(inverse, jnp.sqrt, key, num_probes=8, num_steps=12),
    ):
        values, bars, _ = runs(estimate)
        assert np.all(np.isfinite(values + bars))


@pytest.mark.parametrize("depth", [slow(1e-5), 1e-3])
def test_what_is_semidefinite_up_to_rounding_is_not_biased(depth: float) -> None:
    """A symmetric perturbation makes eigenvalues negative. The mean over keys is within
    six standard errors, and was a dozen off."""
    noise = np.random.default_rng(3).normal(size=(N, N)) * depth / (2 * N) ** 0.5
    matrix = jnp.asarray(MATRICES["rank 5"] + (noise + noise.T) / 2)
    assert -2 * depth < np.linalg.eigvalsh(np.asarray(matrix))[0] < -depth / 2
    operator = tx.as_operator(lambda v: matrix @ v, N, tags=PSD)
    values = runs(lambda key: tx.xnystrace(operator, key, 40))[0]
    errors = values - float(jnp.trace(matrix))
    assert abs(np.mean(errors)) <= 6 * np.std(errors, ddof=1) / KEYS**0.5


def test_measured_noise_is_that_of_a_form() -> None:
    """Of an operator that rounds to bfloat16 between a half and twice what forms show; of
    one that does not, rounding."""
    from traceax._core.operator import LinearMap  # noqa: PLC0415

    probes = np.asarray(tx.sphere(jax.random.key(1), noisy_space(), 50), np.float32)
    block = jnp.asarray(probes.T)
    for bits, matrix in ((BFLOAT16, "kernel"), (TF32, "powers")):
        linear_map = LinearMap(noisy(MATRICES[matrix], bits, ()), checked=True)
        stored = np.asarray(MATRICES[matrix], np.float32).astype(float)
        images = np.asarray(linear_map(jnp.asarray(probes.T)), float)
        errors = np.sum(probes.T * (images - stored @ probes.T), axis=0)
        sizes = np.linalg.norm(images, axis=0) * N**0.5
        shown = np.sqrt(np.mean((errors / sizes) ** 2))
        found = float(linear_map.eps_of(block, linear_map(block)))
        assert 0.5 * shown < found < 10 * shown
        linear_map = LinearMap(noisy(MATRICES[matrix], bits, PSD))
        found = float(linear_map.eps_of(block, linear_map(block)))
        assert 0.5 * shown < found < 10 * shown
    exact = LinearMap(noisy(MATRICES["powers"], None, ()), checked=True)
    assert float(exact.eps_of(block, exact(block))) < 1e-6


def left_of_a_softmax_head(classes: int) -> Any:
    """The products of its Fisher matrix without the eight largest directions. They have the
    rounding errors of the whole matrix, in the direction of the largest logit."""
    width = 256
    weights = jax.random.normal(jax.random.key(0), (classes, width), "f4")
    weights = weights * 4.0 / width**0.5
    features = jax.random.normal(jax.random.key(1), (width,), "f4") * 3
    fisher = tx.gauss_newton(
        lambda h, args: weights @ h, lambda z, args: jax.nn.logsumexp(z), features
    )
    wide = np.asarray(weights, float)
    p = np.asarray(jax.nn.softmax(jnp.asarray(wide @ np.asarray(features, float))))
    dense = wide.T @ (np.diag(p) - np.outer(p, p)) @ wide
    top = jnp.asarray(np.linalg.eigh(dense)[1][:, -8:], jnp.float32)
    without = lambda v: v - top @ (top.T @ v)  # noqa: E731
    return (lambda v: without(fisher.mv(without(v)))), features


@pytest.mark.parametrize("classes", [40, slow(9)])
@pytest.mark.parametrize(
    ("tag", "count"), [(PSD, 16), (PSD, 40), (lx.symmetric_tag, 16), (lx.symmetric_tag, 40)]
)
def test_what_is_mostly_rounding(classes: int, tag: Any, count: int) -> None:
    """Rounding makes it indefinite, which was NaN in a third of the runs, and up to all
    bars of symmetric operators were too small."""
    products, features = left_of_a_softmax_head(classes)
    truth = float(
        jnp.trace(jax.jit(jax.vmap(products))(jnp.eye(features.size, dtype="f4")))
    )
    operator = tx.as_operator(products, features, tags=tag)
    values, bars, _ = runs(lambda key: tx.trace(operator, key, count))
    assert np.sum(np.abs(values - truth) <= 3 * bars) >= 11
    assert np.all(bars < 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 16])
def test_noise_that_is_nearly_a_multiple_of_one_direction(count: int) -> None:
    """It hides from the asymmetry, which made half of the values NaN."""
    products, features = left_of_a_softmax_head(25)
    operator = tx.as_operator(products, features, tags=PSD)
    values, bars, _ = runs(lambda key: tx.trace(operator, key, count))
    assert np.all(np.isfinite(values))
    assert np.all(bars < 2e-6)


def noisy_space() -> Any:
    return jax.ShapeDtypeStruct((N,), jnp.float32)
