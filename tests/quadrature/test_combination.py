"""Combinations of traces: energies, free energies, whatever is a function of several."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import cases, close, given, is_unbiased, nightly, refused, slow
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
some = pytest.mark.parametrize("name", [slow("function_trace"), nightly("slq_trace")])


def smooth(dtype: Any = float) -> Any:
    return hermitian(1 + (np.arange(N) / N) ** 3, dtype)


def spin_ring(sites: int) -> tuple[Any, Any]:
    """Heisenberg's exchange, and a twist with complex entries."""
    half = np.array([[[0, 1], [1, 0]], [[0, -1j], [1j, 0]], [[1, 0], [0, -1]]]) / 2
    eyes = [(np.eye(2**i), np.eye(2 ** (sites - 1 - i))) for i in range(sites)]
    spins = [[np.kron(np.kron(before, s), after) for s in half] for before, after in eyes]
    bonds = list(zip(spins, spins[1:] + spins[:1], strict=True))
    twist = sum(a[0] @ b[1] - a[1] @ b[0] for a, b in bonds)
    return jnp.asarray(sum(a[i] @ b[i] for a, b in bonds for i in range(3))), jnp.asarray(
        twist
    )


EXCHANGE, TWIST = spin_ring(8)


def hamiltonian(theta: Any) -> Any:
    return jnp.cos(theta) * EXCHANGE + jnp.sin(theta) * TWIST


def weights(b: Any, x: Any) -> Any:
    return {"Z": jnp.exp(-b * x), "H": x * jnp.exp(-b * x)}


def thermal(b: Any, t: Any) -> Any:
    return {"energy": t["H"] / t["Z"], "free": -jnp.log(t["Z"]) / b}


@jax.jit
def thermal_truth(at: Any) -> Any:
    b, theta = at
    energies = jnp.linalg.eigvalsh(hamiltonian(theta))
    traces = jax.tree.map(lambda w: w.sum(0), jax.vmap(partial(weights, b))(energies))
    return thermal(b, traces)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["function_trace", "slq_trace"])
def test_thermal_means(name: str) -> None:
    """Intervals contain the truth and are no wider than they have to be. Values and
    gradients are unbiased. What Z and H have in common is most of their errors."""

    def estimate(at: Any, key: Any, combine: Any = thermal) -> tx.Estimate:
        b, theta = at
        fn, combine = partial(weights, b), combine and partial(combine, b)
        large = {"budget": 120} if name == "function_trace" else {"counts": (12, 14)}
        return TRACES[name](function(hamiltonian(theta)), fn, combine, key=key, **large)

    def gradient(key: Any) -> Any:
        return jax.jacrev(lambda at: estimate(at, key).value)(AT)

    count, keys = 16, jax.random.split(jax.random.key(1), 120)
    found = jax.jit(lambda keys: jax.lax.map(partial(estimate, AT), keys))(keys)
    gradients = jax.jit(lambda keys: jax.lax.map(gradient, keys))(keys[:count])
    want, (low, high) = thermal_truth(AT), found.interval()
    for of, truth in want.items():
        off, bars = found.value[of] - truth[None], found.standard_error[of]
        z = jnp.sqrt(jnp.mean(off**2, axis=0) / jnp.mean(bars**2, axis=0))
        assert jnp.all((z > 0.5) & (z < 1.1)), (of, z)
        inside = jnp.mean((low[of] < truth[None]) & (truth[None] < high[of]), axis=0)
        assert jnp.all(inside >= 0.9), (of, inside)
    got = jax.tree.map(lambda value: value[:count], found.value), gradients
    true = want, jax.jacrev(thermal_truth)(AT)
    for some, truth in zip(*map(jax.tree.leaves, (got, true)), strict=True):
        assert is_unbiased(some, truth)
        spread = jnp.std(some, axis=0) / (count - 1) ** 0.5
        assert jnp.max(spread) < 0.1 * jnp.max(jnp.abs(truth))
    alone = estimate(AT, keys[0], None)
    value, error = alone.value, alone.standard_error
    # What the error bar would be, were those of Z and H independent.
    relative = jnp.hypot(error["H"] / value["H"], error["Z"] / value["Z"])
    independent = jnp.abs(value["H"] / value["Z"]) * relative
    assert jnp.all(found.standard_error["energy"][0][1:] < 0.6 * independent[1:])


def pair(x: Any) -> Any:
    return {"a": jnp.exp(-x), "b": (jnp.exp(2j * x.astype(complex)), x**2)}


def of_pair(t: Any) -> Any:
    """Linear over the reals, not over the complex numbers."""
    phase = jnp.exp(0.3j)
    return [2 * t["a"] - t["b"][1], jnp.real(phase * t["b"][0]) + t["a"], 1j * t["b"][0]]


@pytest.mark.parametrize("name", ["function_trace", slow("slq_trace")])
def test_linear_combinations_are_those_of_functions(name: str) -> None:
    """The value and all that is in the error bar; the Jacobian of a linear combination
    is no approximation, and there is no bias."""

    @jax.jit
    def both(matrix: Any) -> Any:
        operator, run = function(matrix), TRACES[name]
        combined = run(operator, pair, of_pair)
        return combined, run(operator, lambda x: of_pair(pair(x)), None)

    of_traces, of_functions = both(smooth(complex if name == "function_trace" else float))
    for got, want in zip(of_traces.value, of_functions.value, strict=True):
        assert got.dtype == want.dtype
        close(got, want, 1e-12)
    close(of_traces.standard_error, of_functions.standard_error, 1e-6)
    assert of_traces.num_matvecs == of_functions.num_matvecs
    assert of_traces.degrees_of_freedom == of_functions.degrees_of_freedom


@pytest.mark.parametrize("batch_size", [None, slow(2)])
def test_the_square_of_a_trace_is_unbiased(batch_size: int | None) -> None:
    """The jackknife makes it the mean of products of two different probes, and the error
    bar includes what it corrects. The derivative is that without a correction."""
    matrix, k = smooth(), 5
    probes = np.random.default_rng(1).choice([-1.0, 1.0], (N, k))

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def run(c: Any) -> Any:
        how: Any = {"counts": (k, 8), "sampler": given(probes.T), "batch_size": batch_size}
        estimate = slq(function(c * matrix), jnp.exp, jnp.square, **how)
        return estimate.value, estimate.standard_error

    (value, error), gradient = run(1.0)
    exp = jax.scipy.linalg.expm(matrix)
    terms, rates = (
        jnp.einsum("nk,nm,mk->k", probes, m, probes) for m in (exp, matrix @ exp)
    )
    products = (jnp.sum(terms) ** 2 - jnp.sum(terms**2)) / (k * (k - 1))
    bias, centre = jnp.mean(terms) ** 2 - products, 2 * jnp.mean(terms)
    close(value, products, 1e-9)
    assert bias > 1e-6 * products
    close(error, jnp.hypot(centre * jnp.std(terms, ddof=1) / k**0.5, bias), 1e-9)
    close(gradient, centre * jnp.mean(rates), 1e-9)


def test_what_is_not_defined_without_each_probe_stays_as_it_is() -> None:
    """The log of a mean that is negative without the first sample."""

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def log_trace(c: Any, numbers: Any) -> Any:
        operator = matrix_free(lambda v: c * numbers * v, 3)
        how: Any = {"counts": (3, 3), "sampler": given(3**0.5 * np.eye(3))}
        estimate = slq(operator, lambda x: x, jnp.log, **how)
        return estimate.value, estimate.standard_error

    (value, error), gradient = log_trace(1.0, jnp.array([3.0, -1.0, -1.0]))
    close(value, 0.0, 1e-12, scale=1.0)
    assert jnp.isfinite(error)
    close(gradient, 1.0, 1e-12)
    # Samples that agree tell of no bias.
    (value, error), _ = log_trace(1.0, jnp.array([2.0, 2.0, 2.0]))
    close(value, jnp.log(6.0), 1e-15)
    assert error < 1e-13


@pytest.mark.nightly
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
        return t**self.exponent


@some
def test_combinations_that_contain_parameters(name: str) -> None:
    """Traced or not, in closures and modules; the derivative in what nothing else
    depends on is that of the value, which rests on the same probes."""
    operator = function(smooth())

    def module(p: Any) -> Any:
        return TRACES[name](operator, jnp.exp, Power(p)).value

    def closure(p: Any) -> Any:
        return TRACES[name](operator, jnp.exp, lambda t: t**p).value

    step = 1e-4
    below, want, above = map(jax.jit(closure), jnp.array([0.5 - step, 0.5, 0.5 + step]))
    of_module, forward = jax.jit(lambda p: jax.jvp(module, (p,), (1.0,)))(0.5)
    value, gradient = jax.jit(jax.vmap(jax.value_and_grad(closure)))(jnp.array([0.5, 0.7]))
    close((of_module, value[0]), (want, want), 1e-12)
    close((forward, gradient[0]), 2 * ((above - below) / (2 * step),), 1e-6)


def test_results_may_be_of_any_structure() -> None:
    def combine(t: Any) -> Any:
        kinds = t, jnp.exp(1j * t.astype(jnp.complex64)), jnp.sign(t).astype(int)
        return {"power": t**2, "shape": (jnp.stack([t, 1 / t]),), "kinds": kinds}

    run = lambda matrix: block(function(matrix), jnp.exp, combine)  # noqa: E731
    found = jax.eval_shape(run, smooth().astype(jnp.float32))
    results = found.value, found.standard_error
    for result in results:
        shapes = {"power": (), "shape": ((2,),), "kinds": ((), (), ())}
        assert jax.tree.map(jnp.shape, result) == shapes
    kinds = [leaf.dtype for result in results for leaf in result["kinds"]]
    assert kinds == [jnp.float32, jnp.complex64, *4 * [jnp.float32]]


@pytest.mark.parametrize("kind", cases(["Diagonal", "Matrix", "Function"], "Matrix"))
def test_exact(kind: str) -> None:
    """Wherever traces are; with second derivatives."""
    matrix = part_of(kind, smooth()[:20, :20])

    def free_energy(v: Any) -> Any:
        b, c = v
        found = block(EVERY[kind](c * matrix), partial(weights, b), partial(thermal, b))
        return found.value, found

    def dense(v: Any) -> Any:
        b, c = v
        values = jnp.linalg.eigvalsh(matrix) * c
        return thermal(b, jax.tree.map(jnp.sum, weights(b, values)))

    point = jnp.array([0.7, 1.3])
    gradients, got = jax.jit(jax.jacrev(free_energy, has_aux=True))(point)
    want, true = jax.jit(lambda v: (dense(v), jax.jacrev(dense)(v)))(point)
    assert jax.tree.leaves(got.standard_error) == [0, 0]
    assert got.num_matvecs == (20 if kind == "Function" else 0)
    for of in want:
        close(got.value[of], want[of], 1e-12)
        close(gradients[of], true[of], 1e-10)
    if kind == "Function":
        found = jax.jit(jax.hessian(lambda v: free_energy(v)[0]["free"]))(point)
        close(found, jax.hessian(lambda v: dense(v)["free"])(point), 1e-9)


@pytest.mark.parametrize("name", TRACES)
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


def test_a_derivative_of_rounding_has_no_sign() -> None:
    """The rule depends on whether f' changes its sign, not on an ulp at a maximum."""
    sharp, nodes = (lambda x: jnp.exp(-((x - 1) ** 2))[None]), jnp.array([1.0, 1.7])
    for shift in (-1e-15, 0.0, 1e-15):
        assert softening(sharp, nodes + shift) == 0
    close(softening(sharp, nodes - 0.5), jnp.exp(-0.25) / 10, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [120, 256], ids=["part", "exact"])
def test_low_temperatures(budget: int) -> None:
    """With energies from the lowest level nothing overflows, and only that level is left,
    which the run resolves to rounding: an error of d in a level changes the entropy by
    beta d. Without the shift all is NaN in single precision."""
    matrix, beta = EXCHANGE.real.astype(np.float32), 200.0
    levels = np.linalg.eigvalsh(np.asarray(matrix, float))
    lowest = float(levels[0])

    def combine(t: Any) -> Any:
        energy = t["E"] / t["Z"]
        entropy = jnp.log(t["Z"]) + beta * energy
        return {"entropy": entropy, "capacity": beta**2 * (t["E2"] / t["Z"] - energy**2)}

    @jax.jit
    def run(shift: Any) -> tx.Estimate:
        def fn(x: Any) -> Any:
            weight = jnp.exp(-beta * (x - shift))
            return {"Z": weight, "E": (x - shift) * weight, "E2": (x - shift) ** 2 * weight}

        return block(function(matrix), fn, combine, budget=budget)

    shifted, plain = (run(jnp.float32(shift)) for shift in (lowest, 0.0))
    above = levels - lowest
    shares = np.exp(-beta * above) / np.sum(np.exp(-beta * above))
    energy = shares @ above
    want = {
        "entropy": np.log(np.sum(np.exp(-beta * above))) + beta * energy,
        "capacity": beta**2 * (shares @ above**2 - energy**2),
    }
    for name, number in shifted.value.items():
        tolerance = max(1e-4, 8 * beta * float(jnp.finfo(np.float32).eps) * levels[-1])
        assert abs(float(number) - want[name]) < tolerance
        assert jnp.isfinite(shifted.standard_error[name])
    assert jnp.isnan(plain.value["entropy"])
