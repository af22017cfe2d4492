"""The Laplacian of the Laplacian."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import traceax as tx
from tests.helpers import cases, close, contains, over_keys, refused
from tests.matrices import all_signs
from traceax._calculus.laplacian import FourthDerivatives

KEY = jax.random.key(3)
X = jnp.array([0.3, -0.7, 0.5])
NET = eqx.nn.MLP(3, "scalar", 7, 2, jnp.tanh, key=KEY, dtype=float)


def network(x: Any, args: Any) -> Any:
    return NET(x) * (1.0 if args is None else args)


def dense(fn: Any, x: Any) -> Any:
    def laplacian(fn: Any) -> Any:
        hessian = jax.jacfwd(jax.jacfwd(fn))
        return lambda x: jnp.trace(hessian(x), axis1=-2, axis2=-1)

    return laplacian(laplacian(lambda x: fn(x, None)))(x)


FUNCTIONS = {
    "network": network,
    "many values": lambda x, args: jnp.sin(jnp.outer(jnp.arange(1.0, 3.0), x)).prod(1),
    "complex": lambda x, args: jnp.exp(1j * (x @ jnp.arange(3.0)).astype(complex)),
    "cubic": lambda x, args: jnp.sum(x) ** 3,
}


@pytest.mark.parametrize("name", cases(FUNCTIONS, "cubic"))
def test_all_pairs_are_exact(name: str) -> None:
    """From n (n + 1) / 2 on, value and gradient, alone and in batches."""
    fn = FUNCTIONS[name]

    def ours(x: Any, batch_size: int | None = None) -> Any:
        estimate = tx.biharmonic(fn, x, KEY, 50, batch_size=batch_size)
        assert estimate.num_matvecs == 6
        assert not jnp.any(estimate.standard_error) if batch_size is None else True
        return estimate.value

    def size(value: Any) -> Any:
        return jnp.sum(jnp.abs(value) ** 2)

    want = dense(fn, X)
    close(ours(X), want, 1e-10, float(jnp.max(jnp.abs(want))) + 1)
    got = jax.jit(jax.grad(lambda x: size(ours(x, 4))))(X)
    close(got, jax.jit(jax.grad(lambda x: size(dense(fn, x))))(X), 1e-9, 1.0)


def test_the_mean_over_all_signs_is_the_truth() -> None:
    """Enumeration: over all pairs of sign vectors, value and slope."""
    signs = jnp.asarray(all_signs(6).T)

    def mean(scale: Any) -> Any:
        subject = FourthDerivatives(network, X, scale)
        return jnp.mean(subject.along_each(signs))

    def truth(scale: Any) -> Any:
        return scale * dense(network, X)

    got, want = (jax.jit(jax.value_and_grad(f))(jnp.asarray(1.3)) for f in (mean, truth))
    close(got[0], want[0], 1e-11)
    close(got[1], want[1], 1e-11)


def test_terms_of_one_variable_are_exact_from_one_pair() -> None:
    fn = lambda x, args: jnp.sum(jnp.sin(3 * x)) + jnp.exp(x[0])  # noqa: E731
    estimate = tx.biharmonic(fn, X, KEY, 1)
    close(estimate.value, dense(fn, X), 1e-10)
    assert jnp.isinf(estimate.standard_error)


@pytest.mark.slow
def test_error_bars_are_honest_where_nested_ones_are_not() -> None:
    """The same number of directions in both; the outer probes of a nested estimate share
    the inner ones, so its bar does not know of their error."""
    n = 8
    weights = jax.random.normal(KEY, (n, n)) / n
    fn = lambda x, args: jnp.sum(jnp.cos(weights @ x * 3)) * jnp.sum(x**2)  # noqa: E731
    x = jnp.linspace(-1, 1, n)
    truth = dense(fn, x)

    def ours(key: Any) -> tx.Estimate:
        return tx.biharmonic(fn, x, key, 6)

    def nested(key: Any) -> tx.Estimate:
        other = jax.random.fold_in(key, 1)
        inner = lambda x, args: tx.laplacian(fn, x, other, 6).value  # noqa: E731
        return tx.laplacian(inner, x, key, 6)

    def score(estimate: Any) -> tuple[float, float]:
        """Root mean square error over standard error, and how often the interval held."""

        def run(key: Any) -> Any:
            got = estimate(key)
            return got.value - truth, got.standard_error, contains(got, truth)

        error, bar, held = over_keys(run, KEY, 300)
        z = jnp.sqrt(jnp.mean(error**2) / jnp.mean(bar**2))
        return float(z), float(jnp.mean(held))

    z, held = score(ours)
    assert z < 1.15
    assert held > 0.9
    assert score(nested)[0] > 1.3


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, 20, 40])
def test_intervals_hold_where_one_direction_dominates(count: int) -> None:
    """In 0.85 of 500 runs at least (measured: .88 to .91 for 95 %; they held in .77 to .85,
    which is the sabotage)."""
    direction = jax.random.normal(KEY, (100,)) / 10
    fn = lambda x, args: (direction @ x) ** 4 / 24  # noqa: E731
    truth = jnp.sum(direction**2) ** 2

    def run(key: Any) -> Any:
        got = tx.biharmonic(fn, jnp.zeros(100), key, count)
        few = dataclasses.replace(got, degrees_of_freedom=(count - 1) / 3)
        return contains(got, truth), contains(few, truth)

    held, before = map(jnp.mean, over_keys(run, KEY, 500))
    assert held > 0.85
    assert before < held


def test_wrong_use_says_the_cure() -> None:
    call: Any = tx.biharmonic
    refused(TypeError, r"fn=.*must be a function", call, X, network, KEY, 1)
    truth = lambda x, args: x > 0  # noqa: E731
    refused(TypeError, r"fn=.*must return arrays of real", call, truth, X, KEY, 1)
    refused(ValueError, r"num_matvecs=.*at least 1", call, network, X, KEY, 0)
    refused(ValueError, r"size=.*at least 1", call, network, X, KEY, 2, batch_size=0)
