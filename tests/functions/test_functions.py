"""Traces, diagonals and norms of functions of operators."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.stats

import traceax as tx
from tests.helpers import EVERY, close, function, general, hermitian, leaks_checked, slow

KEY = jax.random.key(11)
N = 70  # no front door is exact for it
BUDGET = 36


def slq(operator: Any, fn: Any, key: Any = KEY, steps: int = 6, probes: int = 6) -> Any:
    return tx.slq_trace(operator, fn, key, num_probes=probes, num_steps=steps)


def left_out(operator: Any, fn: Any, key: Any = KEY) -> Any:
    return tx.function_trace(operator, fn, key, BUDGET)


def arnoldi(operator: Any, fn: Any, key: Any = KEY) -> Any:
    return tx.arnoldi_trace(operator, fn, key, num_probes=6, num_steps=6)


TRACES: dict[str, Callable[..., tx.Estimate]] = {
    "slq_trace": slq,
    "function_trace": left_out,
    "arnoldi_trace": arnoldi,
}
every_trace = pytest.mark.parametrize("name", TRACES)


def spectral(matrix: Any, fn: Any) -> Any:
    return jnp.sum(fn(jnp.linalg.eigvalsh(matrix)))


def smooth(n: int = N, dtype: Any = float) -> Any:
    """Positive definite, with a spectrum that six steps resolve well."""
    return hermitian(1 + (np.arange(n) / n) ** 3, dtype)


def signs(columns: Any) -> Callable[..., Any]:
    """A sampler of given probes."""
    return lambda key, structure, num_probes: jnp.asarray(columns.T, structure.dtype)


def estimate_of(name: str, fn: Any) -> Callable[[Any], tx.Estimate]:
    """Of a matrix, compiled."""
    return jax.jit(lambda matrix: TRACES[name](function(matrix), fn))


def enumerated(size: int, n: int, fn: Callable[[Any], Any]) -> Any:
    """The mean of fn(sampler) over all signs, in runs of `size` probes: too few for an
    exact answer."""
    blocks = np.array(list(itertools.product([1.0, -1.0], repeat=n))).reshape(-1, size, n)
    run = jax.jit(lambda block: fn(signs(block.T)))
    each = [run(block) for block in blocks]
    return jax.tree.map(lambda *results: np.mean(results, axis=0), *each)


@pytest.mark.parametrize("dtype", [float, slow(complex)])
def test_unbiased_by_enumeration(dtype: Any) -> None:
    """Over all signs the mean is the trace, and so are the derivatives: with n steps there
    is no other error. A second derivative needs the vectors' own."""
    n = 4
    matrix, direction = hermitian(1.0 + np.arange(n), dtype), general(n, dtype)
    direction = (direction + direction.conj().T) / 9
    twice = jax.hessian if dtype is float else lambda f: jax.grad(jax.grad(f))

    def all_of(sampler: Any) -> Any:
        def value(t: Any) -> Any:
            operator = lx.MatrixLinearOperator(matrix + t * direction)
            return tx.slq_trace(
                operator,
                lambda x: jnp.log(x + t),
                KEY,
                num_probes=2,
                num_steps=n,
                sampler=sampler,
            ).value

        return value(0.1), jax.grad(value)(0.1), twice(value)(0.1)

    def truth(t: Any) -> Any:
        m = matrix + t * direction + t * jnp.eye(n)
        return jnp.linalg.slogdet(m)[1]

    got, slope, curvature = enumerated(2, n, all_of)
    close(got, truth(0.1), 1e-12)
    close(slope, jax.grad(truth)(0.1), 1e-11)
    close(curvature, jax.hessian(truth)(0.1), 1e-7)


def test_arnoldi_is_unbiased_by_enumeration() -> None:
    """Three eigenvalues, one of them twice, are exhausted by three steps of n = 4."""
    n = 4
    vectors = np.eye(n) + general(n) / 9
    matrix = vectors @ np.diag([1.0, 2.0, 3.0, 3.0]) @ np.linalg.inv(vectors)
    direction = general(n)

    def all_of(sampler: Any) -> Any:
        def value(t: Any) -> Any:
            operator = lx.MatrixLinearOperator(matrix + t * direction)
            return tx.arnoldi_trace(
                operator,
                lambda x: jnp.log(x + t),
                KEY,
                num_probes=1,
                num_steps=3,
                sampler=sampler,
            ).value

        return jax.value_and_grad(value)(0.0)

    got, slope = enumerated(1, n, all_of)
    close(got, np.linalg.slogdet(matrix)[1], 1e-12)
    close(slope, np.trace(np.linalg.solve(matrix, direction + np.eye(n))), 1e-11)


def test_second_derivative_of_a_scaled_logarithm() -> None:
    """-n/s^2; 0 if the vectors of the rule were frozen. At breakdown, and not."""
    for matrix in (jnp.eye(N), smooth()):

        def value(s: Any, matrix: Any = matrix) -> Any:
            return slq(lx.MatrixLinearOperator(s * matrix), jnp.log).value

        close(jax.jit(jax.grad(jax.grad(value)))(2.0), -N / 4, 1e-7)


def test_second_derivatives_out_of_an_exhausted_space() -> None:
    """A multiple of I keeps every probe in one dimension; its derivative does not."""
    direction = hermitian(np.linspace(-1, 1, N))
    probes = np.sqrt(N) * np.linalg.qr(np.random.default_rng(0).normal(size=(N, N)))[0]

    def value(t: Any) -> Any:
        operator = lx.MatrixLinearOperator(2 * jnp.eye(N) + t * direction)
        return tx.slq_trace(
            operator, jnp.log, KEY, num_probes=N, num_steps=6, sampler=signs(probes)
        ).value

    truth = -jnp.sum(direction**2) / 4
    close(jax.jit(jax.hessian(value))(0.0), truth, 1e-6)


@every_trace
def test_gradients_of_operator_and_parameters(name: str) -> None:
    """Forward and reverse agree with each other and, up to the few probes, with the dense
    derivative; mixed second derivatives are symmetric and right."""
    matrix, direction = smooth(), hermitian(np.linspace(-0.5, 0.4, N), seed=3)

    def value(v: Any) -> Any:
        t, p = v
        operator = function(matrix + t * direction)
        return TRACES[name](operator, lambda x: x**p).value

    def truth(v: Any) -> Any:
        return spectral(matrix + v[0] * direction, lambda x: x ** v[1])

    point = jnp.array([0.3, 1.7])
    forward, reverse = jax.jit(jax.jacfwd(value))(point), jax.jit(jax.jacrev(value))(point)
    close(forward, reverse, 1e-11)
    want = jax.grad(truth)(point)
    np.testing.assert_allclose(forward, want, atol=0.3 * float(jnp.max(jnp.abs(want))))
    if name == "slq_trace":
        got = jax.jit(jax.hessian(value))(point)
        want = jax.hessian(truth)(point)
        np.testing.assert_allclose(got, want, atol=0.25 * float(jnp.max(jnp.abs(want))))


@every_trace
def test_several_traces_from_one_run(name: str) -> None:
    def fn(x: Any) -> Any:
        return {"log": jnp.log(x), "powers": jnp.stack([x, x**2, x**3]), "count": x > 1.5}

    together = estimate_of(name, fn)(smooth())
    assert jax.tree.structure(together.value) == jax.tree.structure(together.standard_error)
    alone = estimate_of(name, lambda x: x**3)(smooth()).value
    close(together.value["powers"][2], alone, 1e-12)
    low, high = together.interval()
    truth = jnp.trace(smooth())
    assert low["powers"][0] < truth < high["powers"][0]


@pytest.mark.parametrize("name", ["slq_trace", "function_trace"])
def test_inside_transformations(name: str) -> None:
    """Leaks, closures over tracers, loops, vmap over keys and parameters."""
    matrix = smooth()

    def loss(s: Any) -> Any:
        return TRACES[name](function(s * matrix), lambda x: jnp.exp(-s * x)).value

    def body(carry: Any) -> Any:
        return carry[0] + 1, carry[1] + loss(carry[1]) / 100

    def looped(x: Any) -> Any:
        step = {"cond_fun": lambda c: c[0] < 2, "body_fun": body, "init_val": (0, x)}
        return eqxi.while_loop(*step.values(), kind="checkpointed", max_steps=2)[1]

    def scanned(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c + loss(c) / 100, None), x, None, length=2)[0]

    everything = jax.jit(jax.vmap(lambda x: (looped(x), jax.grad(scanned)(x))))
    with leaks_checked():
        jax.eval_shape(everything, jnp.array([1.0, 0.5]))
    values, slopes = everything(jnp.array([1.0, 0.5]))
    alone, slope = jax.jit(jax.value_and_grad(scanned))(0.5)
    close(values[1], alone, 1e-11)
    close(slopes[1], slope, 1e-11)


@pytest.mark.parametrize("kind", ["PyTree", "Jacobian", "nested", "Tangent"])
def test_operator_classes(kind: str) -> None:
    """Gradients reach the matrix through every class."""
    matrix = smooth(12)

    @functools.partial(jax.jit, static_argnums=1)
    @jax.value_and_grad
    def both(matrix: Any, kind: str) -> Any:
        return slq(EVERY[kind](matrix), jnp.log, probes=3, steps=5).value

    (value, slope), (want, gradient) = both(matrix, kind), both(matrix, "Matrix")
    close(value, want, 1e-12)
    close(slope, gradient, 1e-10)


SPECTRA = {
    "flat": (np.linspace(1, 3, N), jnp.log),
    "decay": (1e-3 + 1 / (1.0 + np.arange(N)) ** 2, jnp.sqrt),
    "indefinite": (np.linspace(-2, 2, N), jnp.exp),
    "outlier": (np.where(np.arange(N) < 1, 12.0, np.linspace(-1, 1, N)), jnp.exp),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spectrum"),
    [(name, spectrum) for name in ("slq_trace", "function_trace") for spectrum in SPECTRA]
    + [("arnoldi_trace", "flat")],
)
def test_intervals_hold(name: str, spectrum: str) -> None:
    """In at least 90 % of runs, as computed: 5.6 standard errors of that count below."""
    eigenvalues, fn = SPECTRA[spectrum]
    operator = function(hermitian(eigenvalues))
    truth = float(fn(eigenvalues).sum())

    @jax.jit
    def run(key: Any) -> Any:
        estimate = TRACES[name](operator, fn, key)
        low, high = estimate.interval(0.95)
        return (low <= truth) & (truth <= high)

    hits = jax.lax.map(run, jax.random.split(KEY, 100))
    assert float(jnp.mean(hits)) >= 0.9 - 2.33 * (0.9 * 0.1 / 100) ** 0.5


@every_trace
def test_rank_deficient_and_zero(name: str) -> None:
    """Values and gradients finite and right, with more steps than there is rank."""

    @jax.jit
    @jax.value_and_grad
    def both(s: Any, matrix: Any) -> Any:
        return TRACES[name](function(s * matrix), lambda x: jnp.log1p(x) + x**2).value

    for rank in (0, 5):
        eigenvalues = (np.arange(N) < rank) * (2.0 + np.arange(N) / 5)
        value, slope = both(1.0, hermitian(eigenvalues))
        if name == "function_trace":  # the space has all of it
            truth = np.sum(np.log1p(eigenvalues) + eigenvalues**2)
            want = np.sum(eigenvalues / (1 + eigenvalues) + 2 * eigenvalues**2)
            close(value, truth, 1e-10, truth + 1)
            close(slope, want, 1e-10, truth + 1)
        else:
            assert jnp.isfinite(value)
            assert jnp.isfinite(slope)


def test_wrong_operators_are_visible() -> None:
    """NaN, never a finite wrong number: an indefinite operator under log, one that is not
    Hermitian; infinite where the operator is singular."""
    indefinite = hermitian(np.linspace(-1, 1, N))
    singular = hermitian((np.arange(N) < 3) * 2.0)
    for name in ("slq_trace", "function_trace"):
        log = estimate_of(name, jnp.log)
        assert jnp.isnan(log(indefinite).value)
        assert jnp.isnan(log(general(N) + 9 * jnp.eye(N)).value)
        assert not jnp.isfinite(log(singular).value)
    with jax.enable_x64(False):
        dense = lx.MatrixLinearOperator(general(20, np.float32))
        assert jnp.isnan(tx.function_trace(dense, jnp.exp, KEY).value)


def test_exact_where_exact_is_cheap() -> None:
    matrix = smooth(30)
    truth = spectral(matrix, jnp.log)
    stored, free = lx.MatrixLinearOperator(matrix), function(matrix)
    diagonal = lx.DiagonalLinearOperator(jnp.arange(1.0, 5000.0))
    for operator, spent, want in (
        (stored, 0, truth),
        (free, 30, truth),
        (diagonal, 0, jnp.sum(jnp.log(jnp.arange(1.0, 5000.0)))),
    ):
        estimate = tx.function_trace(operator, jnp.log, KEY)
        close(estimate.value, want, 1e-13)
        assert estimate.standard_error == 0
        assert estimate.num_matvecs == spent

    def value(m: Any) -> Any:
        return tx.function_trace(function(m), jnp.log, KEY).value

    direction = hermitian(np.linspace(-1, 1, 30), seed=2)

    def along(f: Any) -> Any:
        return lambda t: f(matrix + t * direction)

    dense = along(lambda m: jnp.linalg.slogdet(m)[1])
    slope, *second = jax.jit(
        lambda t: (
            jax.grad(along(value))(t),
            jax.hessian(along(value))(t),
            jax.grad(jax.grad(along(value)))(t),
        )
    )(0.0)
    close(slope, jax.grad(dense)(0.0), 1e-11)
    for each in second:
        close(each, jax.hessian(dense)(0.0), 1e-10)


def test_plain_quadrature_is_exact_from_n_steps_of_n_probes() -> None:
    """Values, derivatives and price; one step less is an estimate."""
    n = 6
    matrix = smooth(n)
    for operator, spent in ((function(matrix), n), (lx.MatrixLinearOperator(matrix), 0)):
        for probes, steps in ((n, n), (1, n * n), (n * n, 1)):
            estimate = slq(operator, jnp.log, steps=steps, probes=probes)
            close(estimate.value, spectral(matrix, jnp.log), 1e-13)
            assert estimate.standard_error == 0
            assert estimate.num_matvecs == spent
    sampled = slq(function(matrix), jnp.log, steps=n, probes=n - 1)
    assert sampled.standard_error > 0
    assert sampled.num_matvecs == n * (n - 1)

    def value(s: Any, power: Any) -> Any:
        return slq(function(s * matrix), lambda x: x**power).value

    def truth(s: Any, power: Any) -> Any:
        return jnp.sum((s * jnp.linalg.eigvalsh(matrix)) ** power)

    point = (1.0, 1.5)
    got, want = (jax.jit(jax.grad(f, (0, 1)))(*point) for f in (value, truth))
    close(got, want, 1e-12)
    got, want = (jax.jit(jax.hessian(f, (0, 1)))(*point) for f in (value, truth))
    close(got, want, 1e-11)
    grid = jnp.linspace(0.5, 2.5, 9)
    density = tx.spectral_density(
        function(matrix), grid, KEY, num_probes=n, num_steps=n, width=0.1
    )
    bumps = jnp.exp(-((grid[:, None] - jnp.linalg.eigvalsh(matrix)) ** 2) / 0.02)
    close(density.value, jnp.mean(bumps, axis=1) / (0.1 * (2 * jnp.pi) ** 0.5), 1e-12)
    assert jnp.all(density.standard_error == 0)


def test_a_module_as_fn() -> None:
    """A spectral filter with parameters of its own gets its gradient."""

    class Filter(eqx.Module):
        weights: Any

        def __call__(self, x: Any) -> Any:
            return jnp.polyval(self.weights, x)

    matrix = smooth()
    filter_ = Filter(jnp.array([0.5, -1.0, 2.0]))
    loss = eqx.filter_jit(
        eqx.filter_grad(lambda f: slq(function(matrix), f, probes=30).value)
    )
    gradient = loss(filter_)
    powers = jnp.linalg.eigvalsh(matrix)[:, None] ** jnp.array([2, 1, 0])
    np.testing.assert_allclose(gradient.weights, powers.sum(0), rtol=0.05)


@pytest.mark.parametrize("name", ["slq_trace", "function_trace"])
def test_complex_hermitian(name: str) -> None:
    """tr exp(-beta H) of a spin ring with a complex coupling, and d ln Z / d theta."""
    x = np.array([[0, 1], [1, 0]])
    y = np.array([[0, -1j], [1j, 0]])
    z = np.diag([1, -1])
    sites = 7

    def term(a: Any, b: Any, i: int) -> Any:
        factors = [np.eye(2)] * sites
        factors[i], factors[(i + 1) % sites] = a, b
        total = np.eye(1)
        for factor in factors:
            total = np.kron(total, factor)
        return total

    bonds = range(sites)
    exchange = sum(term(a, a, i) for a in (x, y, z) for i in bonds)
    twist = sum(term(x, y, i) - term(y, x, i) for i in bonds)
    exchange, twist = jnp.asarray(exchange / 4), jnp.asarray(twist / 4)
    assert jnp.max(jnp.abs(twist.imag)) > 0

    def log_z(theta: Any, how: Callable[[Any], Any]) -> Any:
        return jnp.log(how(jnp.cos(theta) * exchange + jnp.sin(theta) * twist))

    def estimated(h: Any) -> Any:
        if name == "slq_trace":
            return slq(function(h), lambda e: jnp.exp(-e), probes=20, steps=12).value
        return tx.function_trace(function(h), lambda e: jnp.exp(-e), KEY, 120).value

    def dense(h: Any) -> Any:
        return spectral(h, lambda e: jnp.exp(-e))

    got = jax.jit(jax.value_and_grad(lambda t: log_z(t, estimated)))(0.4)
    want = jax.value_and_grad(lambda t: log_z(t, dense))(0.4)
    np.testing.assert_allclose(got[0], want[0], rtol=0.02)
    np.testing.assert_allclose(got[1], want[1], rtol=0.1, atol=0.02)


def test_complex_values() -> None:
    """A spectral form factor: tr exp(i t H) of a real operator, with its derivative."""
    matrix = smooth()

    def value(t: Any) -> Any:
        return slq(function(matrix), lambda x: jnp.exp(1j * t * x), probes=40).value

    def truth(t: Any) -> Any:
        return spectral(matrix, lambda x: jnp.exp(1j * t * x))

    got, slope = jax.jit(lambda t: (value(t), jax.jacfwd(value)(t)))(2.0)
    np.testing.assert_allclose(got, truth(2.0), atol=2)
    want = jax.jacfwd(truth)(2.0)
    np.testing.assert_allclose(slope, want, atol=3)

    def scaled(s: Any) -> Any:
        fn = lambda x: jnp.exp(2j * x)  # noqa: E731
        return slq(function(s * matrix), fn, probes=40).value.real

    np.testing.assert_allclose(jax.jit(jax.grad(scaled))(1.0), (2 * want).real, atol=6)


def test_float32_while_x64_is_on() -> None:
    matrix = smooth(N, np.float32)
    for name, trace in TRACES.items():
        value, gradient = jax.jit(
            jax.value_and_grad(lambda m, trace=trace: trace(function(m), jnp.log).value)
        )(matrix)
        assert value.dtype == gradient.dtype == np.float32, name
        truth = spectral(matrix.astype(float), jnp.log)
        assert abs(value - truth) < 0.2 * truth


def test_arnoldi_of_what_is_not_hermitian() -> None:
    matrix = general(N) / 10

    def fn(x: Any) -> Any:
        return jnp.exp(x)

    truth = jnp.trace(jax.scipy.linalg.expm(matrix))

    def run(s: Any) -> Any:
        operator = function(s * matrix)
        estimate = tx.arnoldi_trace(operator, fn, KEY, num_probes=8, num_steps=8)
        return estimate.value, estimate

    slope, estimate = jax.jit(jax.grad(run, has_aux=True))(1.0)
    low, high = estimate.interval(0.999)
    assert low < truth < high
    assert estimate.value.dtype == np.float64
    want = jnp.trace(matrix @ jax.scipy.linalg.expm(matrix))
    np.testing.assert_allclose(slope, want, atol=6 * float(estimate.standard_error))


def test_spectral_density_of_a_known_spectrum() -> None:
    """A semicircle and two outliers: the distance of Wasserstein is below 2 % of the
    range; Gaussians alone make 0.3 %."""
    n = 300
    centres = scipy.stats.semicircular(scale=1.0).ppf((np.arange(n - 2) + 0.5) / (n - 2))
    eigenvalues = np.append(centres, [2.0, -1.8])
    basis = np.linalg.qr(np.random.default_rng(3).normal(size=(n, n)))[0]
    operator = function(jnp.asarray((basis * eigenvalues) @ basis.T))
    grid = jnp.linspace(-3, 3, 301)
    density = jax.jit(
        lambda: tx.spectral_density(
            operator, grid, KEY, num_probes=10, num_steps=30, width=0.02
        )
    )()
    close(jnp.sum(density.value) * 0.02, 1.0, 1e-6)
    distance = scipy.stats.wasserstein_distance(
        eigenvalues, np.asarray(grid), None, np.maximum(density.value, 0)
    )
    assert distance < 0.02 * 3.8
    default = jax.jit(
        lambda: tx.spectral_density(operator, grid, KEY, num_probes=4, num_steps=10)
    )()
    close(jnp.sum(default.value) * 0.02, 1.0, 3e-2)
    exact = np.exp(-(((np.asarray(grid)[:, None] - eigenvalues) / 0.02) ** 2) / 2)
    exact = exact.mean(1) / (0.02 * np.sqrt(2 * np.pi))
    held = np.abs(density.value - exact) <= 2.5 * density.standard_error + 1e-9
    assert held.mean() > 0.8


@pytest.mark.parametrize("dtype", [slow(float), complex])
def test_diagonals_of_functions(dtype: Any) -> None:
    """Intervals hold entry by entry; the gradient is that of the dense function."""
    matrix = hermitian(np.append(np.linspace(-1, 1, N - 3), [3.0, 4.0, 5.0]), dtype)
    theta, u = jnp.linalg.eigh(matrix)
    truth = jnp.sum(jnp.abs(u) ** 2 * jnp.exp(theta), axis=1)

    def diagonal(m: Any, key: Any = KEY) -> Any:
        return tx.function_diagonal(function(m), jnp.exp, key, num_probes=8, num_steps=5)

    def run(s: Any) -> Any:
        estimate = diagonal(s * matrix)
        return jnp.sum(estimate.value), estimate

    slope, estimate = jax.jit(jax.grad(run, has_aux=True))(1.0)
    assert estimate.value.dtype == np.float64
    low, high = estimate.interval(0.95)
    assert float(jnp.mean((low < truth) & (truth < high))) >= 0.85
    assert estimate.num_matvecs == 8 * 5

    want = jnp.sum(theta * jnp.exp(theta))
    np.testing.assert_allclose(slope, want, rtol=0.1)


def test_diagonals_of_functions_with_colours() -> None:
    """Fermi and Dirac's function of a ring decays with distance: colours make it exact to
    the tail of that."""
    n = 120
    ring = np.roll(np.eye(n), 1, axis=0)
    hamiltonian = jnp.asarray(ring + ring.T)
    operator = function(hamiltonian)

    def fermi(x: Any) -> Any:
        return 1 / (1 + jnp.exp(x / 2))

    theta, u = np.linalg.eigh(hamiltonian)
    truth = (u**2 * fermi(theta)).sum(1)
    sampler = tx.probing(hamiltonian, power=5)
    density = tx.function_diagonal(
        operator, fermi, KEY, num_probes=6, num_steps=9, sampler=sampler
    )
    close(density.value, truth, 1e-3)
    stored = tx.function_diagonal(
        lx.MatrixLinearOperator(hamiltonian), fermi, KEY, num_probes=6, num_steps=9
    )
    close(stored.value, truth, 1e-13)
    assert stored.num_matvecs == 0


@pytest.mark.parametrize("stored", [True, False])
def test_a_diagonal_is_not_made_dense(stored: bool) -> None:
    """A dense matrix of this order would be 80 GB."""
    entries = jnp.linspace(0.1, 1.0, 100_000)

    def density(scale: Any) -> Any:
        operator = lx.DiagonalLinearOperator(scale * entries)
        if not stored:
            structure = jax.ShapeDtypeStruct(entries.shape, entries.dtype)
            operator = lx.FunctionLinearOperator(
                lambda v: scale * entries * v, structure, lx.diagonal_tag
            )
        return tx.function_diagonal(operator, jnp.sqrt, KEY, num_probes=1, num_steps=1)

    estimate = density(2.0)
    close(estimate.value, np.sqrt(2.0 * entries), 1e-15)
    assert estimate.num_matvecs == (0 if stored else 1)
    slope = jax.grad(lambda s: jnp.sum(density(s).value))(2.0)
    close(slope, jnp.sum(jnp.sqrt(entries)) / 8**0.5, 1e-12)


COMPLEX: Any = 1j


def pair(x: Any) -> Any:
    return x, x


MISTAKES: dict[str, tuple[Callable[[], Any], type, str]] = {
    "no function": (
        lambda: slq(function(smooth()), 3.0),
        TypeError,
        r"slq_trace\(fn=.*function of a scalar.*float",
    ),
    "no array": (
        lambda: left_out(function(smooth()), lambda x: "x"),
        TypeError,
        r"function_trace\(fn=.*return an array",
    ),
    "no steps": (
        lambda: slq(function(smooth()), jnp.log, steps=0),
        ValueError,
        r"slq_trace\(num_steps=.*at least 1.*0",
    ),
    "traced probes": (
        lambda: jax.jit(lambda k: slq(function(smooth()), jnp.log, probes=k))(3),
        TypeError,
        r"slq_trace\(num_probes=.*Python int",
    ),
    "a small budget": (
        lambda: tx.function_trace(function(smooth()), jnp.log, KEY, 5),
        ValueError,
        r"function_trace\(num_matvecs=.*at least 6",
    ),
    "dependent probes": (
        lambda: tx.slq_trace(
            function(smooth()),
            jnp.log,
            KEY,
            num_probes=3,
            num_steps=3,
            sampler=tx.orthogonal,
        ),
        ValueError,
        r"slq_trace\(sampler=.*independent",
    ),
    "p": (
        lambda: tx.schatten_norm(function(smooth()), 0, KEY, num_probes=3, num_steps=3),
        ValueError,
        r"schatten_norm\(p=.*positive and finite",
    ),
    "complex p": (
        lambda: tx.schatten_norm(
            function(smooth()), COMPLEX, KEY, num_probes=3, num_steps=3
        ),
        TypeError,
        r"schatten_norm\(p=.*real number",
    ),
    "grid": (
        lambda: tx.spectral_density(
            function(smooth()), jnp.ones((2, 2)), KEY, num_probes=3, num_steps=3
        ),
        ValueError,
        r"spectral_density\(grid=.*vector",
    ),
    "two diagonals": (
        lambda: tx.function_diagonal(
            function(smooth()), pair, KEY, num_probes=3, num_steps=3
        ),
        TypeError,
        r"function_diagonal\(fn=.*one real number",
    ),
    "negative": (
        lambda: tx.logdet(
            lx.TaggedLinearOperator(function(smooth()), lx.negative_semidefinite_tag), KEY
        ),
        ValueError,
        r"logdet\(operator=.*negative semidefinite",
    ),
    "complex shift": (
        lambda: tx.logdet(function(smooth()), KEY, shift=COMPLEX),
        TypeError,
        r"logdet\(shift=.*real",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_with_their_cure(mistake: str) -> None:
    wrong, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        wrong()


@pytest.mark.parametrize(
    ("kind", "like"), [("PyTree", "Matrix"), slow("nested", "Function")]
)
def test_front_doors_of_operator_classes(kind: str, like: str) -> None:
    """Values and gradients are those of the same matrix, stored (exact) or not."""

    @functools.partial(jax.jit, static_argnums=1)
    def both(s: Any, kind: str) -> Any:
        def losses(s: Any) -> Any:
            operator = EVERY[kind](s * smooth())
            diagonal = tx.function_diagonal(
                operator, jnp.log, KEY, num_probes=5, num_steps=5
            )
            entries = [jnp.sum(leaf) for leaf in jax.tree.leaves(diagonal.value)]
            return tx.logdet(operator, KEY, BUDGET, shift=0.1).value, sum(entries)

        return losses(s), jax.jacrev(losses)(s)

    got, want = jax.tree.leaves(both(1.0, kind)), jax.tree.leaves(both(1.0, like))
    for one, other in zip(got, want, strict=True):
        close(one, other, 1e-9, N)
