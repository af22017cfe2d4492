"""The Laplacian of the Laplacian."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import traceax as tx
from tests.helpers import close, contains, nightly, over_keys, refused, slow
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


@pytest.mark.parametrize(
    "name", ["cubic", slow("complex"), nightly("many values"), nightly("network")]
)
def test_all_pairs_are_exact(name: str) -> None:
    """From n (n + 1) / 2 on, value and gradient, alone and in batches."""
    fn = FUNCTIONS[name]

    def ours(x: Any, batch_size: int | None = None) -> Any:
        estimate = tx.biharmonic(fn, x, KEY, 50, batch_size=batch_size)
        assert estimate.num_matvecs == 6
        return estimate.value, estimate.standard_error

    def size(value: Any) -> Any:
        return jnp.sum(jnp.abs(value) ** 2), value

    def in_batches(x: Any) -> Any:
        return size(ours(x, 4)[0])

    value, error = ours(X)
    truth = jax.grad(lambda x: size(dense(fn, x)), has_aux=True)
    gradient, want = jax.jit(truth)(X)
    scale = float(jnp.max(jnp.abs(want))) + 1
    close(value, want, 1e-10, scale)
    assert not jnp.any(error)
    got, value = jax.jit(jax.grad(in_batches, has_aux=True))(X)
    close(value, want, 1e-10, scale)
    close(got, gradient, 1e-9, 1.0)


def test_the_mean_over_all_signs_is_the_truth() -> None:
    """Enumeration: over all pairs of sign vectors, value and derivative."""
    signs = jnp.asarray(all_signs(6).T)

    @jax.value_and_grad
    def mean(scale: Any) -> Any:
        return jnp.mean(FourthDerivatives(network, X, scale).along_each(signs))

    truth = jax.value_and_grad(lambda scale: scale * dense(network, X))
    got, want = (jax.jit(f)(jnp.asarray(1.3)) for f in (mean, truth))
    close(got, want, 1e-11)


def test_the_error_bar_of_few_pairs() -> None:
    subject = FourthDerivatives(FUNCTIONS["cubic"], X, None)
    estimate = tx.biharmonic(subject.fn, X, KEY, 4)
    probes = tx.rademacher(KEY, jax.ShapeDtypeStruct((6,), float), 4).T
    samples = jax.jit(lambda probes: subject.along_each(probes))(probes)
    close(estimate.value, jnp.mean(samples), 1e-12)
    close(estimate.standard_error, jnp.std(samples, ddof=1) / 2, 1e-12)
    assert estimate.degrees_of_freedom == 1


def test_terms_of_one_variable_are_exact_from_one_pair() -> None:
    fn = lambda x, args: jnp.sum(jnp.sin(3 * x)) + jnp.exp(x[0])  # noqa: E731
    estimate = tx.biharmonic(fn, X, KEY, 1)
    close(estimate.value, jnp.sum(81 * jnp.sin(3 * X)) + jnp.exp(X[0]), 1e-12)
    assert jnp.isinf(estimate.standard_error)


@pytest.mark.parametrize("count", [slow(10), nightly(20), nightly(40)])
def test_intervals_contain_the_truth_if_one_direction_dominates(count: int) -> None:
    """In 0.85 of 500 runs at least (measured: .88 to .91 for 95 %; it was .77 to .85, which
    is the sabotage)."""
    direction = jax.random.normal(KEY, (100,)) / 10
    fn = lambda x, args: (direction @ x) ** 4 / 24  # noqa: E731
    truth = jnp.sum(direction**2) ** 2

    def run(key: Any) -> Any:
        got = tx.biharmonic(fn, jnp.zeros(100), key, count)
        few = dataclasses.replace(got, degrees_of_freedom=(count - 1) / 3)
        return contains(got, truth), contains(few, truth)

    contained, before = map(jnp.mean, over_keys(run, KEY, 500))
    assert contained > 0.85
    assert before < contained


def test_wrong_use_says_the_cure() -> None:
    call: Any = tx.biharmonic
    refused(TypeError, r"fn=.*must be a function", call, X, network, KEY, 1)
    truth = lambda x, args: x > 0  # noqa: E731
    refused(TypeError, r"fn=.*must return arrays of real", call, truth, X, KEY, 1)
    refused(ValueError, r"num_matvecs=.*at least 1", call, network, X, KEY, 0)
    refused(ValueError, r"size=.*at least 1", call, network, X, KEY, 2, batch_size=0)
