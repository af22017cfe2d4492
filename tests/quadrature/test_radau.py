"""Gauss's rule, Radau's, and their mixture."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, contains, given, nightly, over_keys, slow
from tests.matrices import hermitian
from tests.wrappers import PSD, function, matrix_free
from traceax._linalg.jackknife import bracket_error, quadrature_error
from traceax._linalg.krylov import block_krylov
from traceax._quadrature.dense import decompose, radau
from traceax._quadrature.nodes import mixture

KEY = jax.random.key(3)
N = 120


def roughness(n: int) -> Any:
    second = np.diff(np.eye(n), n=2, axis=0)
    return jnp.asarray(second.T @ second)


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("dtype", [slow(float), slow(complex), np.float32])
def test_the_longer_projection_is_as_defined(dtype: Any, side: int) -> None:
    """Its corner makes the node an eigenvalue as often as a block has columns."""
    node, k, eps = -0.5 * side, 3, float(jnp.finfo(dtype).eps)
    matrix = hermitian(side * np.linspace(0, 2, N), dtype)
    block = jnp.asarray(np.random.default_rng(0).normal(size=(N, k)), dtype)

    @jax.jit
    def projected(matrix: Any, block: Any) -> Any:
        tall = block_krylov(lambda z: matrix @ z, block, 4, extend=True).tall
        t, below = (tall[:-k] + tall[:-k].conj().T) / 2, tall[-k:]
        noise = jnp.full(len(t), eps, t.real.dtype)
        at = jnp.asarray(node, noise.dtype)
        return t, below, radau(decompose(t), below, noise, at, side=side)

    t, below, rule = jax.tree.map(np.asarray, projected(matrix, block))
    solved = np.linalg.solve(t - node * np.eye(len(t)), below.conj().T)
    corner = node * np.eye(k) + below @ solved
    longer = np.block([[t, below.conj().T], [below, corner]])
    got = np.sort(np.append(rule.values, [node] * k))
    close(got, np.linalg.eigvalsh(longer), 100 * eps)
    image = (rule.vectors * np.exp(rule.values)) @ rule.vectors.conj().T
    values, vectors = np.linalg.eigh(longer)
    outside = np.abs(values - node) > 1e-3
    want = (vectors * np.where(outside, np.exp(values), 0)) @ vectors.conj().T
    close(image, want, 1e3 * eps, 10)
    close(rule.solved, solved, 1e3 * eps)


def test_derivatives_of_complex_operators() -> None:
    """Lanczos' projection is real, but its basis is complex. The quadrature has converged,
    so the derivative of the mean of v* exp(s A) v is that of v* A exp(A) v."""
    matrix = hermitian(np.linspace(0, 1, 20), complex)
    probes = tx.sphere(KEY, jax.ShapeDtypeStruct((20,), complex), 2)

    def value(s: Any) -> Any:
        operator = function(s.astype(complex) * matrix, PSD)
        how: Any = {"num_probes": 2, "num_steps": 12, "sampler": given(probes)}
        return tx.slq_trace(operator, jnp.exp, KEY, **how).value

    image = matrix @ jax.scipy.linalg.expm(matrix)
    forms = [np.vdot(v, image @ v).real for v in probes]
    close(jax.jit(jax.grad(value))(jnp.ones(())), np.mean(forms), 1e-8)


def test_errors_of_constant_ratio_cancel() -> None:
    """Whatever the ratio, and however fast both fall."""
    truth, gauss, rest = np.array([3.0, -2.0]), np.array([0.4, -1e-3]), np.array([2.0, 7.0])
    for fall in (0.9, 1e-2):
        errors = [-gauss, gauss * rest, -gauss / fall, gauss * rest / fall]
        rules = jnp.asarray(truth + np.stack(errors)).reshape(2, 2, 2, 1)
        mixed, share = mixture(rules)
        close(mixed[:, 0], truth, 1e-12)
        close(share, rest / (1 + rest), 1e-12)


def test_gauss_alone() -> None:
    """If both rules move the same way, if one is infinite, and if there is one only."""
    both = jnp.array([[1.0, 1.0], [2.0, jnp.inf], [0.5, 0.5], [1.0, jnp.inf]])[..., None]
    both = both.reshape(2, 2, 2, 1)
    for rules in (both, both[:, :1]):
        mixed, share = mixture(rules)
        close(mixed[:, 0], np.ones(2), 0)
        close(share, np.ones(2), 0)


def rule(basis: Any, matrix: Any, change: Any, k: int) -> Any:
    """Gauss's and Radau's T after k steps, with a node at 0, and their derivatives."""
    z, end = basis[:, :k], basis[:, k : k + 1]
    t, b, dt, db = (y.T @ m @ z for m in (matrix, change) for y in (z, end))
    x = np.linalg.solve(t, b.T)
    longer = np.block([[t, b.T], [b, b @ x]])
    return (t, dt), (
        longer,
        np.block([[dt, db.T], [db, db @ x + x.T @ db.T - x.T @ dt @ x]]),
    )


def test_the_derivative_of_the_mixture_is_as_defined() -> None:
    """Against explicit projections, with |f'|^(1/2) for both factors of f'."""
    matrix = np.asarray(hermitian(np.linspace(0, 1, N) ** 3))
    change, v = np.asarray(hermitian(np.linspace(-1, 2, N), seed=4)), np.ones(N)

    @jax.jit
    def run() -> Any:
        def value(t: Any) -> Any:
            how: Any = {"num_probes": 1, "num_steps": 6, "sampler": given(v[None])}
            operator = function(matrix + t * change, PSD)
            return tx.slq_trace(operator, lambda x: jnp.log(x + 1e-2), KEY, **how).value

        return jax.value_and_grad(value)(0.0)

    basis = v[:, None] / N**0.5
    for _ in range(6):
        new = matrix @ basis[:, -1:]
        for _ in range(2):
            new = new - basis @ (basis.T @ new)
        basis = np.hstack([basis, new / np.linalg.norm(new)])
    totals, rates = [], []
    for m, dm in rule(basis, matrix, change, 6) + rule(basis, matrix, change, 4):
        theta, vectors = np.linalg.eigh(m)
        totals.append(N * vectors[0] ** 2 @ np.log(theta + 1e-2))
        half = vectors @ (vectors[0] * (theta + 1e-2) ** -0.5)
        rates.append(N * half @ dm @ half)
    fall, rise = abs(totals[2] - totals[0]), abs(totals[3] - totals[1])
    share = rise / (rise + fall)
    assert 0.02 < share < 0.98
    value, derivative = run()
    close(value, share * totals[0] + (1 - share) * totals[1], 1e-10)
    close(derivative, share * rates[0] + (1 - share) * rates[1], 1e-9)


def convex(x: Any) -> Any:
    return jnp.stack([jnp.log(x + 1e-2), 1 / (x + 1e-2), jnp.sqrt(x)])


def test_the_truth_lies_between_both_rules() -> None:
    """Of forms v* f(A) v, from which the mixture is not as far as the nearer rule."""
    spectrum, depth = jnp.linspace(0, 1, N) ** 3, 8
    start, node = jnp.ones((N, 1)) / N**0.5, jnp.zeros(())
    values_of = jax.vmap(convex)

    @jax.jit
    def run() -> Any:
        tall = block_krylov(lambda z: spectrum[:, None] * z, start, depth, extend=True).tall
        totals = []
        for steps in (depth, depth - 2):
            eigen, below = decompose(tall[:steps, :steps]), tall[steps : steps + 1, :steps]
            rule = radau(eigen, below, jnp.full(steps, 1e-15), node, side=1)
            gauss = eigen.vectors[0] ** 2 @ values_of(eigen.values)
            rise = rule.vectors[0] ** 2 @ (values_of(rule.values) - convex(node)[None])
            totals.append(jnp.stack([gauss, convex(node) + rise]))
        rules = jnp.stack(totals)
        mixed, share = mixture(rules[..., None])
        return rules, mixed[:, 0], bracket_error(rules, share, rounding=0.0)

    rules, mixed, bars = run()
    low, high = jnp.sort(rules[0], axis=0)
    truth = jnp.mean(values_of(spectrum), axis=0)
    assert jnp.all((low < truth) & (truth < high))
    errors = abs(mixed - truth)
    assert jnp.all(errors < 0.5 * jnp.minimum(truth - low, high - truth))
    assert jnp.all((errors < 3 * bars) & (bars < high - low))


@pytest.mark.slow
@pytest.mark.parametrize("run", ["function_trace", "slq_trace", "function_diagonal"])
def test_negative_operators_are_as_good_as_positive_ones(run: str) -> None:
    matrix, counts = 100 * roughness(N), {"num_probes": 4, "num_steps": 6}
    one, other = (
        getattr(tx, run)(
            function(s * matrix, tag), lambda x, s=s: 1 / (1 + s * x), KEY, **counts
        )
        for s, tag in ((1, PSD), (-1, lx.negative_semidefinite_tag))
    )
    close(one.value, other.value, 1e-9, 1.0)
    close(one.standard_error, other.standard_error, 1e-6, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["slq_trace", "function_trace"])
def test_the_derivative_along_the_operator_itself_is_a_trace(run: str) -> None:
    """d tr f(c A)/dc = tr A f'(A) has no error of its own: x f' is a multiple of f."""
    matrix = 100 * roughness(N)

    def value(c: Any) -> Any:
        operator, how = function(matrix, PSD) * c, {"num_probes": 4, "num_steps": 6}
        return getattr(tx, run)(operator, lambda x: jnp.sqrt(x), KEY, **how).value

    found, derivative = jax.jit(jax.value_and_grad(value))(1.0)
    close(derivative, found / 2, 1e-9)


@pytest.mark.slow
def test_a_node_that_is_no_bound_is_dropped() -> None:
    """An untagged operator with an eigenvalue below zero: it is Gauss's rule alone."""
    operator = function(hermitian(np.append(np.linspace(0, 2, N - 1), -0.5)))
    counts: Any = {"num_probes": 5, "num_steps": 6}
    value = tx.logdet(operator, KEY, shift=1.0, **counts).value
    plain = tx.function_trace(operator, lambda x: jnp.log(x + 1.0), KEY, **counts)
    close(value, plain.value, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["function_trace", "slq_trace"])
def test_intervals_of_a_spectrum_that_is_not_resolved(run: str) -> None:
    """Values are far off, all in one direction, and bars say so."""
    matrix, smoother = roughness(1200), lambda x: 1 / (1 + 1600 * x)
    want = float(jnp.sum(smoother(jnp.linalg.eigvalsh(matrix))))
    counts = {"num_probes": 15, "num_steps": 16}
    tag = PSD if run == "function_trace" else lx.symmetric_tag
    estimate = partial(getattr(tx, run), function(matrix, tag), smoother, **counts)
    found = over_keys(estimate, KEY, 20)
    assert jnp.mean(contains(found, want)) >= 0.95
    assert jnp.max(found.value) < 0.7 * want


@pytest.mark.nightly
def test_derivatives_of_a_grid_have_a_third_of_the_bias() -> None:
    """In the shift, and in a multiple of I that is a part of the operator."""
    side = 2 - 2 * np.cos(np.pi * np.arange(1, 41) / 41)
    spectrum = jnp.asarray(np.add.outer(side, side).ravel())

    def value(x: Any, key: Any, tag: Any) -> Any:
        operator = matrix_free(lambda v: spectrum * v + x[0] * v, spectrum.size, tag)
        return tx.function_trace(operator, lambda y: jnp.log(y + x[1]), key).value

    at, want = jnp.array([0.0, 1e-2]), jnp.sum(1 / (spectrum + 1e-2))
    biases = []
    for tag in (PSD, lx.symmetric_tag):
        rates = over_keys(lambda key, tag=tag: jax.grad(value)(at, key, tag), KEY, 60)
        biases.append(np.abs(np.mean(rates, axis=0) - want))
    assert np.all(biases[0] < biases[1] / 3)


def test_series_that_have_not_begun_to_converge() -> None:
    """Changes of equal size make the error large, unless they alternate or are rounding."""
    steady, turning = jnp.array([3.0, 2.0, 1.0]), jnp.array([2.0, 1.0, 2.0])
    assert quadrature_error(steady, unresolved=True) > 50
    assert quadrature_error(turning, unresolved=True) < 10
    assert quadrature_error(steady, unresolved=True, rounding=1.0) < 10
    converging = jnp.array([1.11, 1.1, 1.0])
    close(quadrature_error(converging, unresolved=True), 0.01, 1e-12)


GRAM = np.linspace(79**0.5, 4716**0.5, 200) ** 2
BELOW_A_GAP = np.append(np.linspace(1e-3, 1e-2, 20), np.linspace(1, 2, 480))


@pytest.mark.parametrize(
    ("spectrum", "size", "budget", "dtype"),
    [
        (GRAM, 1e-3, 100, np.float32),
        nightly(0.99 ** np.arange(500.0), 1e-6, 240, float),
        slow(BELOW_A_GAP, 1e-6, 40, np.float32),
    ],
)
def test_a_node_that_is_far_from_the_spectrum(
    spectrum: Any, size: float, budget: int, dtype: Any
) -> None:
    """Bars are at most 30 times the error, though Radau's rule is off by a part of the jump
    between its node and the spectrum, which made them 1,000 times as wide as the errors."""
    diagonal = jnp.asarray(spectrum, dtype)
    operator = matrix_free(lambda v: diagonal * v, len(spectrum), PSD, dtype)

    def run(key: Any) -> tx.Estimate:
        return tx.function_trace(operator, lambda x: x / (x + size), key, budget)

    estimate = over_keys(run, KEY, 40)
    want = float(np.sum(spectrum / (spectrum + size)))
    error = np.mean((np.asarray(estimate.value, float) - want) ** 2) ** 0.5
    rounding = 10 * float(jnp.finfo(dtype).eps) * want
    assert np.median(estimate.standard_error) < max(30 * error, rounding)
    # If 95 % of all intervals contain the truth, fewer than 34 of 40 do in 1 case of 200.
    assert np.sum(contains(estimate, want)) >= 34
