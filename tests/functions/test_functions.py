"""Traces, diagonals and norms of functions of operators."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.stats

import traceax as tx
from tests.helpers import cases, close, given, refused, slow
from tests.matrices import all_signs, general, hermitian
from tests.wrappers import function, matrix_free, pytree

KEY = jax.random.key(11)
N = 70  # too large for exact answers
BUDGET = 36


def slq(operator: Any, fn: Any, key: Any = KEY, steps: int = 6, probes: int = 6) -> Any:
    return tx.slq_trace(operator, fn, key, num_probes=probes, num_steps=steps)


def left_out(operator: Any, fn: Any, key: Any = KEY) -> Any:
    return tx.function_trace(operator, fn, key, BUDGET)


TRACES: dict[str, Callable[..., tx.Estimate]] = {
    "function_trace": left_out,
    "arnoldi_trace": lambda a, fn: tx.arnoldi_trace(a, fn, KEY, num_probes=6, num_steps=6),
}


def spectral(matrix: Any, fn: Any) -> Any:
    return jnp.sum(fn(jnp.linalg.eigvalsh(matrix)))


def smooth(n: int = N, dtype: Any = float) -> Any:
    """Positive definite, with a spectrum that six steps resolve well."""
    return hermitian(1 + (np.arange(n) / n) ** 3, dtype)


def enumerated(size: int, n: int, fn: Callable[[Any], Any]) -> Any:
    """The mean of fn(sampler) over all signs, in runs of `size` probes."""
    run = jax.jit(lambda block: fn(given(block)))
    each = [run(block) for block in all_signs(n).reshape(-1, size, n)]
    return jax.tree.map(lambda *results: np.mean(results, axis=0), *each)


@pytest.mark.parametrize("dtype", [float, slow(complex)])
def test_unbiased_by_enumeration(dtype: Any) -> None:
    """With n steps there is no other error, neither of complex functions nor of
    derivatives. A second derivative needs the vectors' own."""
    n, phase = 3, jnp.exp(0.7j)
    matrix, direction = hermitian(1.0 + np.arange(n), dtype), general(n, dtype)
    direction = (direction + direction.conj().T) / 9

    def all_of(sampler: Any) -> Any:
        def value(t: Any) -> Any:
            operator = lx.MatrixLinearOperator(matrix + t * direction)
            fn = lambda x: phase * jnp.log(x + t).astype(complex)  # noqa: E731
            counts: Any = {"num_probes": 2, "num_steps": n, "sampler": sampler}
            return (tx.slq_trace(operator, fn, KEY, **counts).value / phase).real

        if dtype is complex:
            return (value(0.1), jax.grad(value)(0.1)), (0.0, jax.grad(jax.grad(value))(0.1))
        return jax.jvp(jax.value_and_grad(value), (0.1,), (1.0,))

    def truth(t: Any) -> Any:
        m = matrix + t * direction + t * jnp.eye(n, dtype=dtype)
        return jnp.linalg.slogdet(m)[1]

    (got, gradient), (forward, curvature) = enumerated(2, n, all_of)
    close(got, truth(0.1), 1e-12)
    close(gradient, jax.grad(truth)(0.1), 1e-11)
    assert dtype is complex or abs(forward - gradient) < 1e-12
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
            counts: Any = {"num_probes": 1, "num_steps": 3, "sampler": sampler}
            return tx.arnoldi_trace(operator, lambda x: jnp.log(x + t), KEY, **counts).value

        return jax.value_and_grad(value)(0.0)

    got, gradient = enumerated(1, n, all_of)
    close(got, np.linalg.slogdet(matrix)[1], 1e-12)
    close(gradient, np.trace(np.linalg.solve(matrix, direction + np.eye(n))), 1e-11)


@pytest.mark.slow
def test_second_derivatives_out_of_an_exhausted_space() -> None:
    """A multiple of I keeps every probe in one dimension; its derivative does not."""
    direction = hermitian(np.linspace(-1, 1, N))
    probes = np.sqrt(N) * np.linalg.qr(np.random.default_rng(0).normal(size=(N, N)))[0]

    def value(t: Any) -> Any:
        operator = lx.MatrixLinearOperator(2 * jnp.eye(N) + t * direction)
        counts: Any = {"num_probes": N, "num_steps": 6, "sampler": given(probes)}
        return tx.slq_trace(operator, jnp.log, KEY, **counts).value

    close(jax.jit(jax.hessian(value))(0.0), -jnp.sum(direction**2) / 4, 1e-6)


class Power(eqx.Module):
    exponent: Any

    def __call__(self, x: Any) -> Any:
        return x ** jnp.asarray(self.exponent, x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_gradients_of_operator_and_parameters(name: str) -> None:
    """Forward and reverse agree with each other and, up to the few probes, with the dense
    derivative, also in the parameters of a module."""
    matrix, direction = smooth(), hermitian(np.linspace(-0.5, 0.4, N), seed=3)

    def value(v: Any) -> Any:
        t, p = v
        operator = function(matrix + t * direction)
        return TRACES[name](operator, Power(p)).value

    def truth(v: Any) -> Any:
        return spectral(matrix + v[0] * direction, lambda x: x ** v[1])

    point, step = jnp.array([0.3, 1.7]), jnp.array([1.0, -0.5])
    both = jax.jit(lambda v: (jax.grad(value)(v), jax.jvp(value, (v,), (step,))[1]))
    gradient, forward = both(point)
    close(forward, gradient @ step, 1e-11, float(jnp.max(jnp.abs(gradient))))
    want = jax.jit(jax.grad(truth))(point)
    np.testing.assert_allclose(gradient, want, atol=0.3 * float(jnp.max(jnp.abs(want))))


COUNTS: dict[str, Any] = {"num_probes": 8, "num_steps": 7}


def test_pytrees() -> None:
    """Values and gradients are those of the same matrix on arrays: as operators are
    symmetric, the symmetric part of a gradient."""

    def both(make: Any) -> Any:
        def losses(matrix: Any) -> Any:
            operator = make(matrix)
            diagonal = tx.function_diagonal(operator, jnp.log, KEY, **COUNTS)
            entries = [jnp.sum(leaf) for leaf in jax.tree.leaves(diagonal.value)]
            logdet = tx.logdet(operator, KEY, BUDGET, shift=0.1)
            quadrature = tx.slq_trace(operator, jnp.log, KEY, **COUNTS)
            values = logdet.value, sum(entries), quadrature.value
            return values, values

        gradients, values = jax.jit(jax.jacrev(losses, has_aux=True))(smooth(9))
        return values, jax.tree.map(lambda g: g + g.T, gradients)

    close(both(pytree), both(lx.MatrixLinearOperator), 1e-9, 9)


LOGARITHMS: dict[str, Callable[[Any], Any]] = {
    "slq_trace": lambda a: slq(a, jnp.log),
    "function_trace": lambda a: left_out(a, jnp.log),
    "function_diagonal": lambda a: tx.function_diagonal(a, jnp.log, KEY, **COUNTS),
    "logdet": lambda a: tx.logdet(a, KEY, BUDGET),
    "logdet, shifts": lambda a: tx.logdet(a, KEY, BUDGET, shift=jnp.zeros(2)),
    "inv_quad": lambda a: tx.inv_quad_logdet(a, jnp.ones(N), KEY, BUDGET).inv_quad,
    "likelihood": lambda a: tx.inv_quad_logdet(a, jnp.ones(N), KEY, BUDGET).logdet,
}


@pytest.mark.parametrize("stored", [False, slow(True)])
@pytest.mark.parametrize("name", cases(LOGARITHMS, "logdet"))
def test_what_is_not_defined_is_visible(name: str, stored: bool) -> None:
    """NaN, never a finite wrong number: an indefinite operator under the logarithm, and one
    that is not Hermitian; infinite or NaN where the operator is singular."""
    make = lx.MatrixLinearOperator if stored else function
    run = jax.jit(lambda m: LOGARITHMS[name](make(m)))
    for matrix in (
        hermitian(np.linspace(-1, 1, N)),
        hermitian(np.append(-0.6, np.linspace(0.5, 1, N - 1))),
        jnp.triu(jnp.ones((N, N))) + jnp.eye(N),
    ):
        estimate = run(matrix)
        assert jnp.all(jnp.isnan(estimate.value))
        assert stored or not jnp.any(estimate.standard_error < jnp.inf)
    if name not in ("inv_quad", "function_diagonal"):
        assert not jnp.any(jnp.isfinite(run(hermitian((np.arange(N) < 3) * 2.0)).value))


def test_so_it_is_of_diagonal_operators() -> None:
    """They are not factorised; the imaginary part is no rounding."""
    for diagonal in (jnp.array([-1.0, 2.0]), jnp.array([1 + 1j, 2.0])):
        operator = lx.DiagonalLinearOperator(diagonal)
        result = tx.inv_quad_logdet(operator, jnp.ones(2), KEY)
        for value in (result.inv_quad.value, result.logdet.value, result.solution):
            assert jnp.all(jnp.isnan(value))
    assert jnp.isnan(tx.logdet(operator, KEY).value)


@pytest.mark.slow
def test_plain_quadrature_is_exact_from_n_steps_of_n_probes() -> None:
    """Values, derivatives and price; one probe less is an estimate."""
    n = 6
    matrix = smooth(n)
    for probes, steps in ((n, n), (1, n * n), (n * n, 1)):
        estimate = slq(function(matrix), jnp.log, steps=steps, probes=probes)
        close(estimate.value, spectral(matrix, jnp.log), 1e-13)
        assert (estimate.standard_error, estimate.num_matvecs) == (0, n)
    assert slq(lx.MatrixLinearOperator(matrix), jnp.log).num_matvecs == 0
    sampled = slq(function(matrix), jnp.log, steps=n, probes=n - 1)
    assert sampled.standard_error > 0
    assert sampled.num_matvecs == n * (n - 1)

    def value(s: Any, power: Any) -> Any:
        return slq(function(s * matrix), lambda x: x**power).value

    def truth(s: Any, power: Any) -> Any:
        return jnp.sum((s * jnp.linalg.eigvalsh(matrix)) ** power)

    for derivative, digits in ((jax.grad, 1e-12), (jax.hessian, 1e-11)):
        got, want = (jax.jit(derivative(f, (0, 1)))(1.0, 1.5) for f in (value, truth))
        close(got, want, digits)


def test_the_density_s_own_grid_does_not_move_with_its_width() -> None:
    def grid(width: Any) -> Any:
        operator = function(jnp.diag(jnp.linspace(1.0, 2.0, 300)))
        return tx.spectral_density(operator, None, KEY, 60, width=width).grid

    assert not jnp.any(jax.jit(jax.jacfwd(grid))(0.2))


@pytest.mark.parametrize("n", [10, slow(300)])
def test_the_density_s_own_grid(n: int) -> None:
    """It spans the eigenvalues that the run sees, costs no more than a given one, and is
    a constant in derivatives."""
    spectrum = jnp.linspace(-1.0, 3.0, n)
    basis = jnp.linalg.qr(jax.random.normal(KEY, (n, n)))[0]

    def density(grid: Any) -> Any:
        def run(scale: Any) -> Any:
            operator = function(scale * (basis * spectrum[None]) @ basis.T)
            width = None if grid is None else (grid[-1] - grid[0]) / (17 + 6)
            estimate = tx.spectral_density(operator, grid, KEY, width=width)
            return estimate.value[90], estimate

        return jax.jit(jax.grad(run, has_aux=True))(1.0)

    gradient, own = density(None)
    width = 2 * 4 / 34
    ends = jnp.asarray([-1 - 3 * width, 3 + 3 * width])
    close(own.grid[jnp.asarray([0, -1])], ends, 1e-2)
    close(jnp.trapezoid(own.value, own.grid), 1.0, 1e-2)
    if n == 10:  # an exact answer
        bumps = jnp.exp(-(((own.grid[:, None] - spectrum[None]) / width) ** 2) / 2)
        close(own.value, jnp.mean(bumps, axis=1) / (width * (2 * jnp.pi) ** 0.5), 1e-10)
        assert jnp.all(own.standard_error == 0)
    assert own.num_matvecs == {10: 10, 300: 7 * 34}[n]
    same_gradient, same = density(own.grid)
    close((same.value, same_gradient), (own.value, gradient), 1e-8)
    close(same.grid, own.grid, 0)


@pytest.mark.slow
def test_spectral_density_of_a_known_spectrum() -> None:
    """Errors are those of the error bars, and small: Wasserstein's distance is below 2 % of
    the range; Gaussians alone make 0.3 %."""
    n, grid = 400, np.linspace(-3, 3, 301)
    centres = scipy.stats.semicircular(scale=1.0).ppf((np.arange(n - 2) + 0.5) / (n - 2))
    eigenvalues = np.append(centres, [2.0, -1.8])
    operator = function(hermitian(eigenvalues, seed=3))
    how: Any = {"num_probes": 10, "num_steps": 30, "width": 0.02}
    density = tx.spectral_density(operator, jnp.asarray(grid), KEY, **how)
    close(jnp.sum(density.value) * 0.02, 1.0, 1e-6)
    positive = np.maximum(density.value, 0)
    distance = scipy.stats.wasserstein_distance(eigenvalues, grid, None, positive)
    assert distance < 0.02 * 3.8
    exact = np.exp(-(((grid[:, None] - eigenvalues) / 0.02) ** 2) / 2).mean(1)
    error = np.abs(density.value - exact / (0.02 * np.sqrt(2 * np.pi)))
    assert np.mean(error <= 2.5 * density.standard_error + 1e-9) > 0.8


@pytest.mark.slow
def test_diagonals_of_functions_with_colours() -> None:
    """Fermi and Dirac's function of a ring decays with distance."""
    n = 120
    ring = np.roll(np.eye(n), 1, axis=0)
    hamiltonian = jnp.asarray(ring + ring.T)
    fermi = lambda x: 1 / (1 + jnp.exp(x / 2))  # noqa: E731
    theta, u = np.linalg.eigh(hamiltonian)
    truth = (u**2 * np.asarray(fermi(theta))).sum(1)
    how: Any = {"num_probes": 6, "num_steps": 9}
    how["sampler"] = tx.probing(hamiltonian, power=5)
    density = tx.function_diagonal(function(hamiltonian), fermi, KEY, **how)
    close(density.value, truth, 1e-3)


@pytest.mark.parametrize("stored", [True, False])
def test_a_diagonal_is_not_made_dense(stored: bool) -> None:
    """A dense matrix of this order would be 80 GB."""
    entries = jnp.linspace(0.1, 1.0, 100_000)

    def total(scale: Any) -> Any:
        operator = lx.DiagonalLinearOperator(scale * entries)
        if not stored:
            operator = matrix_free(operator.mv, entries.size, lx.diagonal_tag)
        how: Any = {"num_probes": 1, "num_steps": 1}
        estimate = tx.function_diagonal(operator, jnp.sqrt, KEY, **how)
        return jnp.sum(estimate.value), estimate

    gradient, estimate = jax.grad(total, has_aux=True)(2.0)
    close(estimate.value, np.sqrt(2.0 * entries), 1e-15)
    assert estimate.num_matvecs == (0 if stored else 1)
    close(gradient, jnp.sum(jnp.sqrt(entries)) / 8**0.5, 1e-12)


def test_mistakes_are_named_with_their_cure() -> None:
    a, few = function(smooth()), {"num_probes": 3, "num_steps": 3}
    density, norm, entries = tx.spectral_density, tx.schatten_norm, tx.function_diagonal
    logdet, dependent = tx.logdet, {**few, "sampler": tx.orthogonal}
    negative = lx.TaggedLinearOperator(a, lx.negative_semidefinite_tag)
    traced, grid = jax.jit(lambda k: slq(a, jnp.log, probes=k)), jnp.ones((2, 2))
    pair, word = (lambda x: (x, x)), (lambda x: "x")
    imaginary: Any = 1j
    kind, value = TypeError, ValueError
    refused(kind, r"slq_trace\(fn=.*function of a scalar.*float", slq, a, 3.0)
    refused(kind, r"function_trace\(fn=.*return an array", left_out, a, word)
    refused(kind, r"slq_trace\(num_probes=.*Python int", traced, 3)
    refused(kind, r"norm\(p=.*real number", norm, a, imaginary, KEY, **few)
    refused(kind, r"diagonal\(fn=.*one real number", entries, a, pair, KEY, **few)
    refused(kind, r"logdet\(shift=.*real", logdet, a, KEY, shift=imaginary)
    refused(value, r"slq_trace\(num_steps=.*at least 1.*0", slq, a, jnp.log, steps=0)
    for call in (tx.slq_trace, entries):
        refused(value, r"\(sampler=.*indep", call, a, jnp.log, KEY, **dependent)
    refused(value, r"function_trace\(num_matvecs=.*6", tx.function_trace, a, word, KEY, 5)
    refused(value, r"norm\(p=.*positive and finite", norm, a, 0, KEY, **few)
    refused(value, r"density\(grid=.*vector", density, a, grid, KEY, **few)
    refused(value, r"logdet\(operator=.*negative semidefinite", logdet, negative, KEY)
