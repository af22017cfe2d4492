"""Combinations of traces: energies, free energies, whatever is a function of several."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import cases, close, given, is_unbiased, refused, slow
from tests.matrices import hermitian
from tests.wrappers import EVERY, function, matrix_free, part_of
from traceax._quadrature.scalar import softening

KEY = jax.random.key(3)
N = 70  # too large for exact answers
BETAS = jnp.array([0.5, 1.0, 2.0])
AT = (BETAS, jnp.asarray(0.4))


def block(operator: Any, fn: Any, combine: Any, key: Any = KEY, budget: int = 36) -> Any:
    return tx.function_trace(operator, fn, key, budget, combine=combine)


def slq(operator: Any, fn: Any, combine: Any, key: Any = KEY, **how: Any) -> Any:
    probes, steps = how.pop("counts", (6, 6))
    how |= {"num_probes": probes, "num_steps": steps}
    return tx.slq_trace(operator, fn, key, combine=combine, **how)


TRACES: dict[str, Callable[..., tx.Estimate]] = {"function_trace": block, "slq_trace": slq}
every_trace = pytest.mark.parametrize("name", TRACES)

LARGER: dict[str, Callable[..., tx.Estimate]] = {
    "function_trace": partial(block, budget=120),
    "slq_trace": partial(slq, counts=(12, 14)),
}
"""Of the spin ring."""


def smooth(dtype: Any = float) -> Any:
    return hermitian(1 + (np.arange(N) / N) ** 3, dtype)


def spin_ring(sites: int) -> tuple[Any, Any]:
    """Heisenberg's exchange, and a twist with complex entries."""
    x, y, z = np.array([[[0, 1], [1, 0]], [[0, -1j], [1j, 0]], [[1, 0], [0, -1]]])

    def term(a: Any, b: Any, i: int) -> Any:
        factors = [np.eye(2)] * sites
        factors[i], factors[(i + 1) % sites] = a, b
        return reduce(np.kron, factors)

    bonds = range(sites)
    exchange = sum(term(a, a, i) for a in (x, y, z) for i in bonds)
    twist = sum(term(x, y, i) - term(y, x, i) for i in bonds)
    return jnp.asarray(exchange / 4), jnp.asarray(twist / 4)


EXCHANGE, TWIST = spin_ring(8)


def hamiltonian(theta: Any) -> Any:
    return jnp.cos(theta) * EXCHANGE + jnp.sin(theta) * TWIST


def weights(b: Any, x: Any) -> Any:
    return {"Z": jnp.exp(-b * x), "H": x * jnp.exp(-b * x)}


def thermal(b: Any, t: Any) -> Any:
    return {"energy": t["H"] / t["Z"], "free": -jnp.log(t["Z"]) / b}


def thermal_estimate(name: str, at: Any, key: Any) -> tx.Estimate:
    b, theta = at
    operator = function(hamiltonian(theta))
    return LARGER[name](operator, partial(weights, b), partial(thermal, b), key=key)


@jax.jit
def thermal_truth(at: Any) -> Any:
    b, theta = at
    energies = jnp.linalg.eigvalsh(hamiltonian(theta))
    traces = jax.tree.map(lambda w: w.sum(0), jax.vmap(partial(weights, b))(energies))
    return thermal(b, traces)


@pytest.mark.slow
@every_trace
def test_thermal_means(name: str) -> None:
    """Intervals hold the truth and are no wider than they have to be. Values and gradients
    are unbiased. What Z and H have in common is most of their errors."""

    @jax.jit
    def run(key: Any) -> Any:
        estimate = thermal_estimate(name, AT, key)
        return estimate, estimate.interval(0.95)

    @jax.jit
    def slope(key: Any) -> Any:
        return jax.jacrev(lambda at: thermal_estimate(name, at, key).value)(AT)

    count, keys = 16, jax.random.split(jax.random.key(1), 240)
    estimates, (low, high) = jax.lax.map(run, keys)
    want, slopes = thermal_truth(AT), jax.lax.map(slope, keys[:count])
    for of in ("energy", "free"):
        truth = want[of][None]
        off = estimates.value[of] - truth
        bars = jnp.sqrt(jnp.mean(estimates.standard_error[of] ** 2, axis=0))
        z = jnp.sqrt(jnp.mean(off**2, axis=0)) / bars
        assert jnp.all((z > 0.5) & (z < 1.1)), (of, z)
        held = jnp.mean((low[of] < truth) & (truth < high[of]), axis=0)
        assert jnp.all(held >= 0.9), (of, held)
    got = jax.tree.map(lambda value: value[:count], estimates.value), slopes
    true = want, jax.jacrev(thermal_truth)(AT)
    for some, truth in zip(*map(jax.tree.leaves, (got, true)), strict=True):
        assert is_unbiased(some, truth)
        spread = jnp.std(some, axis=0) / (count - 1) ** 0.5
        assert jnp.max(spread) < 0.1 * jnp.max(jnp.abs(truth))
    b, theta = AT
    operator = function(hamiltonian(theta))
    alone = LARGER[name](operator, partial(weights, b), None, key=keys[0])
    value, error = alone.value, alone.standard_error
    # What the error bar would be, were those of Z and H independent.
    relative = jnp.hypot(error["H"] / value["H"], error["Z"] / value["Z"])
    independent = jnp.abs(value["H"] / value["Z"]) * relative
    assert jnp.all(estimates.standard_error["energy"][0][1:] < 0.6 * independent[1:])


def pair(x: Any) -> Any:
    return {"a": jnp.exp(-x), "b": (jnp.exp(2j * x.astype(complex)), x**2)}


def of_pair(t: Any) -> Any:
    """Linear over the reals, not over the complex numbers."""
    phase = jnp.exp(0.3j)
    return [2 * t["a"] - t["b"][1], jnp.real(phase * t["b"][0]) + t["a"], 1j * t["b"][0]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slq_trace", "function_trace"])
def test_linear_combinations_are_those_of_functions(name: str) -> None:
    """The value and all that is in the error bar; the Jacobian of a linear combination
    is no approximation, and there is no bias."""
    for dtype in (float, complex):
        operator = function(smooth(dtype))
        of_traces = TRACES[name](operator, pair, of_pair)
        of_functions = TRACES[name](operator, lambda x: of_pair(pair(x)), None)
        for got, want in zip(of_traces.value, of_functions.value, strict=True):
            assert got.dtype == want.dtype
            close(got, want, 1e-12)
        errors = of_traces.standard_error, of_functions.standard_error
        for got, want in zip(*errors, strict=True):
            close(got, want, 1e-6)
    assert of_traces.num_matvecs == of_functions.num_matvecs
    assert of_traces.degrees_of_freedom == of_functions.degrees_of_freedom


@pytest.mark.slow
def test_the_square_of_a_trace_is_unbiased() -> None:
    """The jackknife makes it the mean of products of two different probes. Batches change
    nothing, not in its derivative either."""
    matrix, k = smooth(), 5
    probes = np.random.default_rng(1).choice([-1.0, 1.0], (N, k))

    def squared(matrix: Any, **how: Any) -> Any:
        how = {"counts": (k, 8), "sampler": given(probes.T), **how}
        return slq(function(matrix), jnp.exp, jnp.square, **how)

    terms = jnp.einsum("nk,nm,mk->k", probes, jax.scipy.linalg.expm(matrix), probes)
    products = (jnp.sum(terms) ** 2 - jnp.sum(terms**2)) / (k * (k - 1))
    got = squared(matrix)
    close(got.value, products, 1e-9)
    assert abs(got.value - jnp.mean(terms) ** 2) > 1e-6 * products
    few = [squared(matrix, counts=(k, 8), batch_size=size) for size in (2, k)]
    close(few[0].value, few[1].value, 1e-12)
    close(few[0].standard_error, few[1].standard_error, 1e-9)
    slope = jax.grad(lambda c, size: squared(c * matrix, batch_size=size).value)
    close(slope(1.0, 2), slope(1.0, k), 1e-9)


def test_what_is_not_defined_without_each_probe_stays_as_it_is() -> None:
    """The log of a mean that is negative without the first sample."""
    unit = 3**0.5 * np.eye(3)

    def log_trace(c: Any, numbers: Any) -> Any:
        operator = matrix_free(lambda v: c * numbers * v, 3)
        how: Any = {"counts": (3, 3), "sampler": given(unit)}
        return slq(operator, lambda x: x, jnp.log, **how)

    skewed, alike = jnp.array([3.0, -1.0, -1.0]), jnp.array([2.0, 2.0, 2.0])
    estimate = log_trace(1.0, skewed)
    close(estimate.value, 0.0, 1e-12, scale=1.0)
    assert jnp.isfinite(estimate.standard_error)
    close(jax.grad(lambda c: log_trace(c, skewed).value)(1.0), 1.0, 1e-12)
    # Samples that agree tell of no bias.
    close(log_trace(1.0, alike).value, jnp.log(6.0), 1e-15)
    assert log_trace(1.0, alike).standard_error < 1e-13


@pytest.mark.slow
def test_traces_that_do_not_matter_may_be_undefined() -> None:
    operator = function(hermitian(np.linspace(-1, 1, N)))
    for run in TRACES.values():
        both = run(operator, lambda x: (x**2, jnp.log(x)), lambda t: t[0] ** 0.5)
        alone = run(operator, lambda x: x**2, lambda t: t**0.5)
        close(both.value, alone.value, 1e-12)
        close(both.standard_error, alone.standard_error, 1e-6)
        lost = run(operator, jnp.log, lambda t: t**2)
        assert jnp.isnan(lost.value)
        assert not lost.standard_error < jnp.inf


class Power(eqx.Module):
    exponent: Any

    def __call__(self, t: Any) -> Any:
        return {"power": t**self.exponent, "shape": (jnp.stack([t, 1 / t]),)}


@pytest.mark.slow
@every_trace
def test_combinations_that_hold_parameters(name: str) -> None:
    """Traced or not, in closures and modules; the derivative in what nothing else
    depends on is that of the value, which rests on the same probes."""
    operator = function(smooth())

    def module(p: Any) -> Any:
        return TRACES[name](operator, jnp.exp, Power(p)).value["power"]

    def closure(p: Any) -> Any:
        return TRACES[name](operator, jnp.exp, lambda t: t**p).value

    point, step = jnp.asarray(0.5), 1e-4
    want = closure(point)
    for how in (module, jax.jit(closure)):
        close(how(point), want, 1e-12)
    batch = jax.jit(jax.vmap(closure))(jnp.array([0.5, 0.7]))
    close(batch[0], want, 1e-12)
    difference = (closure(point + step) - closure(point - step)) / (2 * step)
    for slope in (jax.grad(closure)(point), jax.jacfwd(module)(point)):
        close(slope, difference, 1e-6)


@pytest.mark.slow
def test_results_may_be_of_any_structure() -> None:
    estimate = block(function(smooth()), jnp.exp, Power(2))
    assert jax.tree.map(jnp.shape, estimate.value) == {"power": (), "shape": ((2,),)}
    structures = map(jax.tree.structure, (estimate.value, estimate.standard_error))
    assert len(set(structures)) == 1
    matrix = smooth().astype(jnp.float32)

    def mixed(m: Any) -> Any:
        def combine(t: Any) -> Any:
            return t, jnp.exp(1j * t.astype(jnp.complex64)), jnp.sign(t).astype(int)

        return block(function(m), jnp.exp, combine)

    shapes = jax.eval_shape(mixed, matrix)
    kinds = [leaf.dtype for leaf in jax.tree.leaves((shapes.value, shapes.standard_error))]
    assert kinds == [jnp.float32, jnp.complex64, *4 * [jnp.float32]]


@pytest.mark.parametrize("kind", cases(["Diagonal", "Matrix", "Function"], "Matrix"))
def test_exact(kind: str) -> None:
    """Wherever traces are; with second derivatives."""
    n = 20 if kind == "Function" else N
    matrix = part_of(kind, smooth()[:n, :n])

    def free_energy(v: Any) -> Any:
        b, c = v
        return block(EVERY[kind](c * matrix), partial(weights, b), partial(thermal, b))

    def dense(v: Any) -> Any:
        b, c = v
        values = jnp.linalg.eigvalsh(matrix) * c
        return thermal(b, jax.tree.map(jnp.sum, weights(b, values)))

    point = jnp.array([0.7, 1.3])
    got, want = free_energy(point), dense(point)
    assert jax.tree.leaves(got.standard_error) == [0, 0]
    assert got.num_matvecs == (20 if kind == "Function" else 0)
    slopes = [jax.jacrev(f)(point) for f in (lambda v: free_energy(v).value, dense)]
    for of in want:
        close(got.value[of], want[of], 1e-12)
        close(slopes[0][of], slopes[1][of], 1e-10)
    if kind == "Function":
        got = jax.hessian(lambda v: free_energy(v).value["free"])(point)
        close(got, jax.hessian(lambda v: dense(v)["free"])(point), 1e-9)


@every_trace
def test_mistakes_are_named(name: str) -> None:
    mistakes: list[tuple[Any, str]] = [
        (3.0, "function of the traces.*float"),
        (lambda t: "energy", "array.*'energy'"),
        (lambda t: None, "array.*None"),
        (lambda t: {"a": t, "b": jax.random.key(0)}, "of numbers.*key"),
    ]
    run, operator = TRACES[name], function(smooth())
    for combine, words in mistakes:
        words = rf"{name}\(combine=.*{words}"
        refused(TypeError, words, run, operator, jnp.exp, combine)


def test_a_slope_of_rounding_has_no_sign() -> None:
    """The rule depends on whether slopes change their sign, not on an ulp at a maximum."""
    sharp, nodes = (lambda x: jnp.exp(-((x - 1) ** 2))[None]), jnp.array([1.0, 1.7])
    for shift in (-1e-15, 0.0, 1e-15):
        assert softening(sharp, nodes + shift) == 0
    close(softening(sharp, nodes - 0.5), jnp.exp(-0.25) / 10, 1e-12)


@pytest.mark.parametrize("dtype", [np.float32, slow(float)])
@pytest.mark.parametrize("budget", [120, 256], ids=["part", "exact"])
def test_low_temperatures(budget: int, dtype: Any) -> None:
    """With energies from the lowest level nothing overflows, and only that level is left,
    which the run resolves to rounding: an error of d in a level changes the entropy by
    beta d. Without the shift all is NaN in single precision."""
    matrix, beta = EXCHANGE.real.astype(dtype), 200.0
    levels = np.linalg.eigvalsh(np.asarray(matrix, float))
    lowest = float(levels[0])

    def fn(shift: Any, x: Any) -> Any:
        weight = jnp.exp(-beta * (x - shift))
        return {"Z": weight, "E": (x - shift) * weight, "E2": (x - shift) ** 2 * weight}

    def combine(t: Any) -> Any:
        energy = t["E"] / t["Z"]
        entropy = jnp.log(t["Z"]) + beta * energy
        return {"entropy": entropy, "capacity": beta**2 * (t["E2"] / t["Z"] - energy**2)}

    shifted, plain = (
        block(function(matrix), partial(fn, shift), combine, budget=budget)
        for shift in (lowest, 0.0)
    )
    above = levels - lowest
    shares = np.exp(-beta * above) / np.sum(np.exp(-beta * above))
    energy = shares @ above
    want = {
        "entropy": np.log(np.sum(np.exp(-beta * above))) + beta * energy,
        "capacity": beta**2 * (shares @ above**2 - energy**2),
    }
    for name, number in shifted.value.items():
        tolerance = max(1e-4, 8 * beta * float(jnp.finfo(dtype).eps) * levels[-1])
        assert abs(float(number) - want[name]) < tolerance
        assert jnp.isfinite(shifted.standard_error[name])
    assert dtype is float or jnp.isnan(plain.value["entropy"])
