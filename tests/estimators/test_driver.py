"""The driver: one method read in several ways, and a method of one's own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.calls import CALLS
from tests.calls import N as SIZE
from tests.helpers import close, refused, slow
from tests.matrices import general, hermitian
from tests.tables import SAMPLERS, flatten
from tests.wrappers import PSD, function, two_leaves
from traceax._core.operator import LinearMap
from traceax._core.rule import Outcome
from traceax._estimators.driver import Method, Probes, estimate, one_block
from traceax._estimators.readouts import LEAVES, TRACE, Pairs, Target
from traceax._estimators.xdiag import XDIAG, XNYSDIAG
from traceax._linalg.jackknife import standard_error

KEY = jax.random.key(3)
N, FIRST = 80, 26


def slope(method: Method, matrix: Any, tags: Any, weights: Any) -> Any:
    def loss(matrix: Any) -> Any:
        value = estimate(method, two_leaves(matrix, tags), KEY, 20).value
        return jnp.sum(weights * flatten(value)).real

    return jax.grad(loss)(matrix)


@pytest.mark.parametrize("method", [slow(XDIAG), XNYSDIAG], ids=lambda m: m.name)
def test_a_diagonal_is_read_leaf_by_leaf_and_as_a_trace(method: Method) -> None:
    """The same probes: values and slopes are sums of those of the diagonal."""
    tags = PSD if method is XNYSDIAG else ()
    matrix = hermitian(1 / np.arange(1.0, N + 1), float)
    if method is XDIAG:
        matrix = matrix + 0.1 * general(N, float)
    operator = two_leaves(matrix, tags)
    diagonal = flatten(estimate(method, operator, KEY, 20).value)
    sums = jnp.stack([jnp.sum(diagonal[:FIRST]), jnp.sum(diagonal[FIRST:])])
    weights = jnp.array([0.3, -1.7])
    every = jnp.repeat(weights, jnp.array([FIRST, N - FIRST]), total_repeat_length=N)
    for target, want in ((LEAVES, sums), (TRACE, jnp.sum(sums))):
        value = estimate(method._replace(target=target), operator, KEY, 20).value
        close(flatten(value), want, 1e-12)
    got = slope(method._replace(target=LEAVES), matrix, tags, weights)
    close(got, slope(method, matrix, tags, every), 1e-11)


def _one_probe_each(linear_map: LinearMap, probes: Probes, target: Target) -> Outcome:
    (z,) = probes.blocks
    samples = target.of(z.conj() * linear_map(z), linear_map)
    error = standard_error(samples, jnp.zeros(()))
    return Outcome(jnp.mean(samples), error, Pairs(z / z.shape[1], z))


OWN = Method("own", TRACE, _one_probe_each, one_block(1), sampler=tx.rademacher)


def test_a_method_of_ones_own_has_all_that_others_have() -> None:
    """Checks in its name, exact answers, one compiled program, derivatives."""
    matrix = general(N, float)
    operator = function(matrix)
    refused(ValueError, r"own\(num_matvecs=...\)", estimate, OWN, operator, KEY, 0)
    dependent = {"sampler": tx.orthogonal}
    refused(ValueError, "independent", estimate, OWN, operator, KEY, 5, **dependent)
    exact = estimate(OWN, operator, KEY, 10**6)
    close(exact.value, jnp.trace(matrix), 1e-12)
    assert (exact.standard_error, exact.num_matvecs) == (0, N)
    got = estimate(OWN, operator, KEY, 7)
    assert got.num_matvecs == 7
    assert abs(got.value - jnp.trace(matrix)) < 5 * got.standard_error
    slope = jax.grad(lambda s: estimate(OWN, function(s * matrix), KEY, 7).value)(1.0)
    close(slope, got.value, 1e-12)  # Euler's relation


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dtype", [float, complex])
def test_what_is_drawn_is_isotropic(sampler: Any, dtype: Any) -> None:
    """E[z z*] = I, within six standard errors of 3,000 draws of one probe; its entries have
    a variance of at most 2."""
    space = jax.ShapeDtypeStruct((5,), dtype)
    keys = jax.random.split(KEY, 3000)
    z = jax.jit(jax.vmap(lambda key: sampler(key, space, 1)[0]))(keys)
    second = jnp.mean(z[:, :, None] * z[:, None, :].conj(), axis=0)
    assert jnp.max(abs(second - jnp.eye(5, dtype=dtype))) < 6 * (2 / 3000) ** 0.5
    assert jnp.max(abs(jnp.mean(z, axis=0))) < 6 / 3000**0.5


DEGREES = {
    "hutchinson_trace": 5 / 3,
    "hutchpp_trace": 3 / 3,
    "xtrace": 5,
    "xnystrace": 9,
    "hutchinson_diagonal": 5,
    "xdiag": 5,
    "custom_trace": 5,
    "function_trace": 10 / 3,
    "slq_trace": 3 / 3,
    "function_diagonal": 3,
    "laplacian": 5 / 3,
}


def test_degrees_of_freedom() -> None:
    """One less than there are probes; of independent quadratic forms, which are skewed, a
    third of that, and of those of a Krylov space two thirds."""
    matrix, found = jnp.eye(SIZE), {}
    for name in DEGREES:
        call: Any = CALLS[name]

        def record(key: Any, name: str = name, call: Any = call) -> Any:
            estimate = call(matrix, key)
            found[name] = estimate.degrees_of_freedom
            return estimate.value

        jax.eval_shape(record, KEY)
    assert found == pytest.approx(DEGREES)
