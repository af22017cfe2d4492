"""DeltaShift: traces of operators that change, followed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, contains, is_unbiased, nightly, over_keys, refused, slow
from tests.matrices import all_signs, general, hermitian, spectrum
from tests.wrappers import matrix_free

KEY = jax.random.key(8)
N = 70


def symmetric(matrix: Any) -> lx.AbstractLinearOperator:
    return lx.MatrixLinearOperator(matrix, lx.symmetric_tag)


RATES = [slow("poly", 0.03), nightly("flat", 0.1), nightly("flat", 0.0)]


@pytest.mark.parametrize(("name", "rate"), RATES)
def test_more_accurate_than_fresh_estimates_and_calibrated(name: str, rate: float) -> None:
    """On a random walk, each step `rate` of the size of the matrix."""
    start, steps = hermitian(spectrum(name, N)), jax.random.normal(KEY, (40, N, N))
    steps = steps + steps.transpose(0, 2, 1)
    lengths = jnp.linalg.norm(steps, axis=(1, 2), keepdims=True) / jnp.linalg.norm(start)
    matrices = start[None] + jnp.cumsum(rate * steps / lengths, axis=0)
    truth = jnp.trace(matrices, axis1=1, axis2=2)
    tracker = tx.deltashift(20)

    def follow(key: Any) -> Any:
        first, rest = jax.random.split(key)

        def step(state: Any, given: Any) -> Any:
            matrix, key = given
            estimate, state = tracker.update(symmetric(matrix), state, key)
            fresh = tx.hutchinson_trace(symmetric(matrix), key, 20, sampler=tx.sphere)
            contained = contains(estimate, jnp.trace(matrix))
            return state, (estimate.value, estimate.standard_error, contained, fresh.value)

        start = tracker.init(symmetric(matrices[0]), first)
        keys = jax.random.split(rest, len(matrices) - 1)
        return jax.lax.scan(step, start, (matrices[1:], keys))[1]

    runs = jax.jit(jax.vmap(follow))(jax.random.split(KEY, 100))
    value, error, contained, fresh = jax.tree.map(lambda x: x[:, 15:], runs)
    truth = truth[None, 16:]
    spread = jnp.sqrt(jnp.mean((value - truth) ** 2))
    assert jnp.sqrt(jnp.mean((fresh - truth) ** 2)) / spread > 1.5
    assert 0.8 < jnp.sqrt(jnp.mean(error**2)) / spread < 1.3
    assert jnp.mean(contained) > 0.9
    # Errors of one run hang together: the bias is judged by the means of whole runs.
    by_run = jnp.mean(value - truth, axis=1)
    assert abs(jnp.mean(by_run)) < 4 * jnp.std(by_run) / 10


@pytest.mark.parametrize("dtype", [float, complex])
def test_the_correction_against_a_loop(dtype: Any) -> None:
    """The derivation of the module: its b_i, value, error and size, in dense algebra."""
    n, k, old, error, size = 12, 4, 3.0, 0.7, 2.5
    before, now = (general(n, dtype, seed) for seed in (0, 1))
    tracker, like = tx.deltashift(2 * k), lx.MatrixLinearOperator
    state = tx.deltashift(4).init(like(before), KEY)
    old, real = jnp.asarray(old, state.value.dtype), state.size.dtype
    state = state._replace(value=old, standard_error=jnp.asarray(error, real))
    state = state._replace(size=jnp.asarray(size, real))
    got, after = tracker.update(like(now), state, KEY)
    g = np.asarray(tx.sphere(KEY, jax.ShapeDtypeStruct((n,), now.dtype), k)).T
    z, w = (np.asarray(matrix) @ g for matrix in (before, now))
    forms = [np.sum(g.conj() * y, axis=0) for y in (z, w)]
    z, w = (y - g * form / n for y, form in zip((z, w), forms, strict=True))
    squares, cross = np.sum(abs(z) ** 2, axis=0), np.sum(z.conj() * w, axis=0).real
    c, share = (2 if dtype is float else 1) / k, (error / size) ** 2
    others = [(x.sum() - x) / (k - 1) for x in (squares, cross)]
    b = c * others[1] / ((share + c) * others[0])
    close(got.value, np.mean(b * complex(old).real + forms[1] - b * forms[0]), 1e-12)
    variance = b.mean() ** 2 * (error**2 + share * squares.mean()) / 2
    variance += c * np.mean(np.sum(abs(w - b * z) ** 2, axis=0))
    close(got.standard_error, variance**0.5, 1e-12)
    close(after.size, np.mean(np.sum(abs(w) ** 2, axis=0)) ** 0.5, 1e-12)
    close((after.value, after.standard_error), (got.value, got.standard_error), 1e-15)
    assert (got.num_matvecs, got.degrees_of_freedom) == (2 * k, k)


def test_no_bias_by_enumeration() -> None:
    """Over all pairs of sign probes: E t_j = tr A_j + E[b] (t_(j-1) - tr A_(j-1)), and an
    estimate that was right stays so on average, however few probes choose b. Of six
    dimensions two are empty, or four applications would be exact."""
    before, now = general(4), general(4, seed=1)
    pairs = jnp.asarray(all_signs(8).reshape(-1, 2, 4))

    def value(pair: Any) -> Any:
        probes = jnp.concatenate([pair, jnp.ones((2, 2))], axis=1)
        sampler = lambda k, s, num: jnp.tile(probes, (num // 2, 1))  # noqa: E731
        tracker = tx.deltashift(4, sampler=sampler)
        pad = lambda m: lx.MatrixLinearOperator(jnp.pad(m, (0, 2)))  # noqa: E731
        state = tracker.init(pad(before), KEY)
        state = state._replace(value=jnp.trace(before), standard_error=jnp.asarray(0.7))
        return tracker.update(pad(now), state, KEY)[0].value

    values = jax.jit(jax.vmap(value))(pairs)
    close(jnp.mean(values), jnp.trace(now), 1e-12, float(jnp.max(jnp.abs(values))))


@pytest.mark.parametrize("bad", [jnp.nan, slow(jnp.inf)])
def test_one_bad_step_does_not_spoil_the_rest(bad: float) -> None:
    matrix, tracker = hermitian(spectrum("poly", N)), tx.deltashift(20)
    state = tracker.init(symmetric(matrix), KEY)
    estimate, state = tracker.update(symmetric(matrix * bad), state, KEY)
    assert not jnp.isfinite(estimate.value)
    estimate, state = tracker.update(symmetric(matrix), state, KEY)
    assert abs(estimate.value - jnp.trace(matrix)) < 4 * estimate.standard_error < jnp.inf


@pytest.mark.parametrize("scale", [1e-200, slow(1e200), slow(0.0)])
def test_any_scale(scale: float) -> None:
    matrix, tracker = hermitian(spectrum("poly", N)), tx.deltashift(20)

    def chain(scale: float) -> Any:
        state = tracker.init(symmetric(scale * matrix), KEY)
        return tracker.update(symmetric(1.1 * scale * matrix), state, KEY)[0]

    estimate, plain = chain(scale), chain(1.0)
    close(estimate.value, scale * plain.value, 1e-12)
    close(estimate.standard_error, scale * plain.standard_error, 1e-9)


def test_exact_from_n_on() -> None:
    matrix, tracker = general(6, complex), tx.deltashift(6)
    state = tracker.init(lx.MatrixLinearOperator(matrix), KEY)
    estimate, state = tracker.update(lx.MatrixLinearOperator(2 * matrix), state, KEY)
    close((estimate.value, state.value), 2 * [2 * jnp.trace(matrix)], 1e-13)
    assert estimate.standard_error == 0
    assert estimate.num_matvecs == 6


def test_the_gradient_is_that_of_the_new_operator() -> None:
    """As the probes that are spent on it read it; the state is arrays only."""
    matrix, tracker = hermitian(spectrum("poly", N)), tx.deltashift(8)
    state = tracker.init(symmetric(matrix), KEY)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))

    def followed(scale: Any) -> Any:
        return tracker.update(symmetric(scale * matrix), state, KEY)[0].value

    fresh = tx.hutchinson_trace(symmetric(matrix), KEY, 4, sampler=tx.sphere)
    close(jax.jit(jax.grad(followed))(1.3), fresh.value, 1e-12)


@pytest.mark.slow
def test_what_changes_and_is_no_array_is_not_overlooked() -> None:
    """Numbers in closures, defaults and jitted functions are followed, or an error by name;
    the old operator is never taken for the new one."""
    matrix, tracker = hermitian(spectrum("poly", N)), tx.deltashift(20)
    of = functools.partial(matrix_free, n=N)

    def follow(make: Any) -> tx.Estimate:
        return tracker.update(make(3.0), tracker.init(make(1.0), KEY), KEY)[0]

    def by_closure(t: Any, wrap: Any = lambda fn: fn) -> Any:
        product = t * matrix
        return of(wrap(lambda v: product @ v))

    def in_a_loop(t: Any) -> Any:
        inner = jax.jit(lambda v, product=t * matrix: product @ v)
        return of(lambda v: jax.lax.map(inner, v[None] + 0 * matrix[0, 0])[0])

    for make in (
        by_closure,
        functools.partial(by_closure, wrap=jax.jit),
        lambda t: of(lambda v, product=t * matrix: product @ v),
        lambda t: t * lx.MatrixLinearOperator(matrix),
    ):
        assert contains(follow(make), 3 * jnp.trace(matrix), 0.999)
    by_a_float = lambda t: of(lambda v: t * (matrix @ v))  # noqa: E731
    refused(ValueError, "that differs in something else", follow, by_a_float)
    refused(ValueError, "an argument of that function", follow, in_a_loop)


def test_wrong_use_says_the_cure() -> None:
    operator = lx.MatrixLinearOperator(general(N))
    tracker: Any = tx.deltashift(10)
    state = tracker.init(operator, KEY)
    few = tx.deltashift(3).init
    refused(ValueError, r"deltashift\(num_matvecs=.*at least 4.*got 3", few, operator, KEY)
    refused(ValueError, "independent", tx.deltashift, 10, sampler=tx.orthogonal)
    refused(TypeError, r"state=.* must be a state", tracker.update, operator, KEY, KEY)
    larger = lx.MatrixLinearOperator(general(N + 1))
    refused(ValueError, "the operator of the state", tracker.update, larger, state, KEY)


@pytest.mark.parametrize("num_matvecs", [slow(12), nightly(20)])
def test_a_jump_leaves_no_bias(num_matvecs: int) -> None:
    """I, and from the fifth step on I + 100 uu*: estimates that missed u must not be
    trusted for it. The bias was 14 standard errors, and intervals contained the truth in
    91.5 % of runs, before weights were made of fresh probes alone."""
    u = jax.random.normal(jax.random.key(3), (96,))
    u = u / jnp.linalg.norm(u)
    spikes = jnp.array([0.0] * 4 + [100.0] * 4)
    tracker = tx.deltashift(num_matvecs)

    def operator(spike: Any) -> lx.AbstractLinearOperator:
        return lx.MatrixLinearOperator(jnp.eye(96) + spike * jnp.outer(u, u))

    def run(key: Any) -> tuple[Any, Any]:
        def step(state: Any, now: tuple[Any, Any]) -> tuple[Any, tuple[Any, Any]]:
            spike, key = now
            estimate, state = tracker.update(operator(spike), state, key)
            truth = 96 + spike
            return state, (estimate.value - truth, contains(estimate, truth))

        keys = jax.random.split(key, len(spikes))
        state = tracker.init(operator(spikes[0]), keys[0])
        return jax.lax.scan(step, state, (spikes[1:], keys[1:]))[1]

    errors, contained = over_keys(run, jax.random.key(9), 2000)
    assert is_unbiased(errors[:, -3:], 0.0, 4.0)
    assert jnp.all(jnp.mean(contained, axis=0)[-4:] >= 0.93)
