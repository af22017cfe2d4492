"""Divergence, Laplacian and Hessian diagonal, next to dense automatic differentiation."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tx
from tests.helpers import (
    cases,
    close,
    contains,
    given,
    is_unbiased,
    leaks_checked,
    nightly,
    refused,
    slow,
)
from tests.matrices import all_signs, numbers
from traceax._core.keys import ESTIMATES, keys_of
from traceax._linalg.columns import promoted

KEY = jax.random.key(5)
NAMES = ("divergence", "laplacian", "hessian_diagonal")
CALCULUS: dict[str, Any] = {name: getattr(tx, name) for name in NAMES}
every_name = pytest.mark.parametrize("name", CALCULUS)


def dense(name: str, fn: Any, x: Any) -> Any:
    """The same of an array x, by all second derivatives."""
    if name == "divergence":
        return jnp.trace(jax.jacfwd(fn)(x))
    hessian = jax.jacfwd(jax.jacfwd(fn))(x)
    if name == "hessian_diagonal":
        return jnp.diagonal(hessian)
    return jnp.trace(hessian, axis1=-2, axis2=-1)


def network(name: str, n: int, depth: int = 1) -> Any:
    out = n if name == "divergence" else "scalar"
    return eqx.nn.MLP(n, out, 7, depth, jnp.tanh, key=jax.random.key(3), dtype=float)


def padded(array: Any, value: Any) -> Any:
    """`jax.lax.pad` has no gradient in JAX where the value alone moves, as here."""
    longer = jax.lax.pad(array, value, ((1, -1, 1),))
    return longer[1] * jnp.sin(longer).sum()


A = jax.random.normal(jax.random.key(1), (6, 6))
X = jax.random.normal(jax.random.key(0), (6,)) + 0.1


def as_complex(x: Any) -> Any:
    return x.astype(complex)


def cubes(x: Any) -> Any:
    return jnp.sum(x**3)


def shifted(x: Any) -> Any:
    return lx.MatrixLinearOperator(A + jnp.diag(x))


FUNCTIONS = {
    "quadratic": lambda x: x @ A @ x,
    "product": lambda x: jnp.tanh(A @ x).sum() * jnp.prod(x),
    "custom rules": lambda x: jax.nn.softplus(A @ x).sum() + jax.nn.logsumexp(A.T @ x),
    "norm": lambda x: jnp.linalg.norm(x) ** 3,
    "many values": lambda x: jnp.sin(A @ x),
    "complex values": lambda x: jnp.exp(1j * as_complex(A @ x).sum()) * as_complex(x @ x),
    "complex parts": lambda x: (
        jnp.abs(jnp.exp((1 + 2j) * as_complex(A @ x))).sum() ** 2
        + jnp.angle(jnp.sum((1j + as_complex(x)) ** 2))
    ),
    "scan": lambda x: jax.lax.scan(lambda c, a: (jnp.sin(a @ x) * c, None), 1.0, A)[0],
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c * x.sum()), 1.0),
    "branch": lambda x: jax.lax.cond(x[0] > 0, cubes, lambda y: jnp.cos(y).prod(), x),
    "checkpoint": lambda x: jax.checkpoint(lambda y: jnp.sin(y).sum() ** 2)(x),
    "determinant": lambda x: jnp.linalg.slogdet(A @ A.T + jnp.diag(x**2))[1],
    "solve": lambda x: jnp.linalg.solve(A + jnp.diag(x), x)[0],
    "order": lambda x: jnp.sort(x)[2] ** 3 + jnp.max(x) ** 2 + jnp.where(x > 0, x, x**2)[1],
    "integers": lambda x: x[jnp.argmax(x)] ** 3 + jnp.round(x[0]),
    "transform": lambda x: jnp.fft.fft(x)[1:3].real.sum() ** 2 + jnp.cumsum(x)[3] ** 3,
    "quotient": lambda x: (x / (1 + x @ x)).sum() + jnp.sum(1 / x) + (2.0**x).sum(),
    "powers": lambda x: x[::-1] @ jnp.power(jnp.abs(x), 2.5) + jnp.maximum(x, 0.1).prod(),
    "solver": lambda x: lx.linear_solve(shifted(x), x**2).value.sum(),
    "stopped": lambda x: x**2 @ jnp.sqrt(jax.lax.stop_gradient(jax.nn.relu(x))),
    "modulus": lambda x: jnp.abs(jnp.fft.fft(x))[1] ** 3,
    "linear": lambda x: x.sum(),
    "constant": lambda x: jnp.ones(()),
    "padding": lambda x: padded(x, jnp.sum(x**3)),
    "padding, the array": lambda x: padded(x, 1.0),
    "padding, the value": lambda x: padded(jnp.ones(6), jnp.sum(x**3)),
    "bits": lambda x: jnp.float32(x.sum()) ** 2,
}


SHORT = ("many values", "custom rules", "complex values", "padding, the value")
LONG = ("complex parts", "branch", "checkpoint", "solve", "integers", "stopped", "bits")
REST = [what for what in FUNCTIONS if what not in SHORT + LONG]
OPERATIONS = [*SHORT, *map(slow, LONG), *map(nightly, REST)]


@pytest.mark.parametrize("what", OPERATIONS)
def test_every_operation_has_its_second_derivative(what: str) -> None:
    """Value and gradient; value and error bar along few probes. The true gradient is taken
    forwards."""
    fn = FUNCTIONS[what]
    tolerance = 1e-5 if what == "bits" else 1e-11

    @jax.jit
    def results(x: Any) -> Any:
        def loss(laplacian: Any) -> Any:
            return jnp.sum(jnp.abs(laplacian) ** 2), laplacian

        def ours(x: Any) -> Any:
            return tx.laplacian(lambda x, args: fn(x), x, KEY, 6).value

        probes = 2 * jnp.asarray(all_signs(6)[[3, 7, 50]])
        few = tx.laplacian(lambda x, args: fn(x), x, KEY, 3, sampler=given(probes))
        hessian = jax.jacfwd(jax.jacfwd(fn))(x)
        forms = jnp.einsum("...ij,ki,kj->...k", *promoted(hessian, probes, probes))
        gradient, value = jax.grad(lambda x: loss(ours(x)), has_aux=True)(x)
        truth = partial(dense, "laplacian", fn)
        want = jax.jacfwd(lambda x: loss(truth(x))[0])(x)
        error = jnp.std(forms, axis=-1, ddof=1) / 3**0.5
        mean, few_error = jnp.mean(forms, axis=-1), few.standard_error
        pairs = (value, truth(x)), (gradient, want), (few.value, mean), (few_error, error)
        return *pairs, jnp.max(jnp.abs(mean))

    *pairs, size = results(X)
    for got, want in pairs:
        assert got.shape == want.shape
        close(got, want, tolerance, 1e-3 + max(size, float(jnp.max(jnp.abs(want)))))


def test_large_derivatives_do_not_overflow() -> None:
    """g'' = 0 where g' squared is out of range."""
    x = jnp.array([0.3, -0.7, 1.2], jnp.float32)
    steep = lambda x, args: (jnp.maximum(1e20 * x, 0) + jnp.tanh(1e20 * x)).sum()  # noqa: E731
    assert tx.laplacian(steep, x, KEY, 3).value == 0


@pytest.mark.slow
def test_second_order_of_a_laplacian() -> None:
    fn = network("laplacian", 3)
    x = jnp.array([0.3, -0.2, 0.5])
    ours = jax.hessian(lambda x: tx.laplacian(lambda x, a: fn(x), x, KEY, 3).value)
    truth = jax.hessian(lambda x: dense("laplacian", fn, x))
    close(jax.jit(ours)(x), jax.jit(truth)(x), 1e-11)


@every_name
def test_parameters_reach_the_gradient_wherever_they_are(name: str) -> None:
    params, static = eqx.partition(network(name, 3), eqx.is_inexact_array)
    call, x = CALCULUS[name], jnp.array([0.3, -0.2, 0.5])
    weights = jnp.arange(1.0, 4.0) if name == "hessian_diagonal" else 1.0

    class Field(eqx.Module):
        inner: Any

        def __call__(self, x: Any, args: Any) -> Any:
            return self.inner(x)

    def at(x: Any, params: Any) -> Any:
        return eqx.combine(params, static)(x)

    def gradient(value: Any) -> Any:
        return jax.jit(jax.grad(lambda p: jnp.sum(weights * value(p)) ** 2))(params)

    truth = gradient(lambda p: dense(name, lambda x: at(x, p), x))
    for value in (
        lambda p: call(at, x, KEY, 3, args=p).value,
        lambda p: call(Field(eqx.combine(p, static)), x, KEY, 3).value,
        lambda p: call(lambda x, args: at(x, p), x, KEY, 3).value,
    ):
        with leaks_checked():
            got = gradient(value)
        close(got, truth, 1e-10, 1.0)


@every_name
def test_points_of_any_structure(name: str) -> None:
    """Leaves of several dtypes and shapes, numbers among them, against the flat point."""
    x = {"a": jnp.array([0.3, -0.2], jnp.float32), "b": (jnp.array([[0.5]]), 2)}

    def mixed(x: Any, args: Any = None, single: Any = jnp.float32) -> Any:
        a, b = jnp.sin(x["a"]), x["b"][0]
        total = (a.sum().astype(b.dtype) * b.sum()) ** 2 + x["b"][1] ** 3
        if name != "divergence":
            return total
        pair = b * total, total * x["b"][1]
        return {"a": (a * b[0, 0].astype(single)).astype(single), "b": pair}

    def joined(tree: Any) -> Any:
        return jnp.concatenate([leaf.ravel() for leaf in promoted(*jax.tree.leaves(tree))])

    def flat(v: Any) -> Any:
        """The same in double precision."""
        values = joined(mixed({"a": v[:2], "b": (v[2:3, None], v[3])}, single=float))
        return values if name == "divergence" else values[0]

    estimate = CALCULUS[name](mixed, x, KEY, 4)
    assert estimate.num_matvecs == 4
    assert not jnp.any(joined(estimate.standard_error))
    if name == "hessian_diagonal":
        assert jax.tree.map(jnp.shape, estimate.value) == jax.tree.map(jnp.shape, x)
    got = joined(estimate.value).reshape(-1 if name == "hessian_diagonal" else ())
    close(got, dense(name, flat, jnp.array([0.3, -0.2, 0.5, 2.0])), 1e-5)


@every_name
def test_the_mean_over_all_signs_is_the_truth(name: str) -> None:
    """Estimate and derivative are unbiased. Of one probe the error is unknown."""
    net = network(name, 3)

    def estimate(x: Any, probe: Any) -> Any:
        one = given(probe[None])
        call = CALCULUS[name](lambda x, args: net(x), x, KEY, 1, sampler=one)
        assert call.num_matvecs == 1
        return jnp.sum(jnp.arange(1.0, 4.0) * call.value), call.standard_error

    def truth(x: Any) -> Any:
        return jnp.sum(jnp.arange(1.0, 4.0) * dense(name, net, x))

    x = jnp.array([0.3, -0.2, 0.5])
    both = jax.vmap(jax.value_and_grad(estimate, has_aux=True), (None, 0))
    (value, error), gradient = jax.jit(both)(x, jnp.asarray(all_signs(3)))
    assert jnp.all(jnp.isinf(error))
    means = jnp.mean(value), jnp.mean(gradient, axis=0)
    close(means, jax.jit(jax.value_and_grad(truth))(x), 1e-12)


@pytest.mark.parametrize(("m", "how"), [(10, {}), (9, {}), slow(11, {"batch_size": 11})])
def test_a_hessian_diagonal_is_that_of_the_hessian_or_plain(m: int, how: Any) -> None:
    """As `diagonal` from ten products on; plain with fewer or in batches, so its error bar
    is the spread of independent signs, and its square can be subtracted from that of a
    value."""
    net, x = network("hessian_diagonal", 70), jnp.ones(70)
    hessian = lx.JacobianLinearOperator(lambda x, args: jax.grad(net)(x), x)
    hessian = lx.TaggedLinearOperator(hessian, lx.symmetric_tag)
    signs = partial(tx.hutchinson_diagonal, sampler=tx.rademacher)
    got = tx.hessian_diagonal(lambda x, args: net(x), x, KEY, m, **how)
    want = (tx.diagonal if m == 10 else signs)(hessian, KEY, m)
    close((got.value, got.standard_error), (want.value, want.standard_error), 1e-12)
    assert got.degrees_of_freedom == want.degrees_of_freedom


def test_intervals_contain_the_square_of_a_trace() -> None:
    matrix = numbers((8, 8))
    operator, truth = lx.MatrixLinearOperator(jnp.asarray(matrix)), matrix.trace() ** 2

    def run(key: Any) -> Any:
        once = lambda key: tx.hutchinson_trace(operator, key, 6)  # noqa: E731
        estimate: Any = tx.unbiased_square(once, key)
        return estimate.value, estimate.standard_error, contains(estimate, truth)

    value, error, contained = jax.jit(jax.vmap(run))(jax.random.split(KEY, 2000))
    spread = float(jnp.sqrt(jnp.mean((value - truth) ** 2)))
    assert is_unbiased(value, truth, 4)
    assert 0.7 < jnp.sqrt(jnp.mean(error**2)) / spread < 1.5
    assert jnp.mean(contained) > 0.9


@pytest.mark.parametrize("name", cases([*CALCULUS, "square of one"], "square of one"))
def test_the_error_bar_refuses_to_be_differentiated(name: str) -> None:
    """Also that of a square, which of one probe each is made of the difference."""
    matrix = jax.random.normal(KEY, (8, 8))

    def error(x: Any) -> Any:
        if name in CALCULUS:
            net = network(name, 3)
            estimate = CALCULUS[name](lambda x, args: net(x), x, KEY, 2)
            return jnp.sum(estimate.standard_error)
        operator = lx.MatrixLinearOperator(x[0] * matrix)
        probes = 1 if name == "square of one" else 4
        once = lambda key: tx.hutchinson_trace(operator, key, probes)  # noqa: E731
        return tx.unbiased_square(once, KEY).standard_error

    with pytest.raises(Exception, match="traceax: `standard_error` of an Estimate"):
        jax.block_until_ready(jax.grad(error)(jnp.ones(3)))


def test_an_error_bar_that_is_not_read_is_not_computed() -> None:
    net = network("laplacian", 9, depth=3)
    x = jnp.ones(9)

    def cost(read: Any) -> float:
        run = jax.jit(lambda x: read(tx.laplacian(lambda x, a: net(x), x, KEY, 8)))
        costs: Any = run.lower(x).compile().cost_analysis()
        return costs["flops"]

    assert cost(lambda e: e.value) < 0.7 * cost(lambda e: (e.value, e.standard_error))


def test_squares_are_unbiased() -> None:
    """Enumeration over the pairs of independent estimates that two keys can give."""
    table = jnp.array([2.0, -1.0, 5.0])

    def drawn(key: Any) -> Any:
        return jax.random.randint(key, (), 0, 3)

    @jax.jit
    @jax.vmap
    def run(key: Any) -> Any:
        square = lambda s: tx.unbiased_square(lambda k: s * table[drawn(k)], key)  # noqa: E731
        pair = jax.vmap(drawn)(keys_of(key, 2, ESTIMATES))
        return jnp.stack(jax.value_and_grad(square)(1.5)), 3 * pair[0] + pair[1]

    both, pairs = run(jax.random.split(KEY, 300))
    chosen, first = np.unique(pairs, return_index=True)
    assert len(chosen) == 9  # each pair occurs
    mean = jnp.mean(table)
    want = jnp.array([(1.5 * mean) ** 2, 2 * 1.5 * mean**2])
    close(jnp.mean(both[first], axis=0), want, 1e-12)


def test_squares_keep_what_they_are_given() -> None:
    table = {"a": jnp.ones(3), "b": jnp.asarray(1j)}
    got = tx.unbiased_square(lambda key: table, KEY)
    assert jax.tree.map(jnp.shape, got) == {"a": (3,), "b": ()}
    close(got["b"], 1.0, 1e-15)  # |i|^2
    operator = lx.MatrixLinearOperator(jnp.asarray(numbers((8, 8))))
    assert tx.unbiased_square(lambda key: tx.trace(operator, key), KEY).standard_error == 0
    once = tx.unbiased_square(lambda key: tx.hutchinson_trace(operator, key, 1), KEY)
    assert once.num_matvecs == 2
    assert jnp.isfinite(once.standard_error)


@every_name
def test_wrong_use_says_the_cure(name: str) -> None:
    call, net, x = CALCULUS[name], network(name, 3), jnp.ones(3)
    fn = lambda x, args: net(x)  # noqa: E731
    traced, real = jax.jit(lambda k: call(fn, x, KEY, k)), "of real arrays"
    refused(TypeError, r"fn=.*must be a function fn\(x, args\)", call, x, fn, KEY, 1)
    refused(TypeError, f"x=.*must be a pytree {real}", call, fn, as_complex(x), KEY, 1)
    refused(TypeError, r"x=.*got str", call, fn, "x", KEY, 1)
    refused(ValueError, r"x=.*must have at least one entry", call, fn, (), KEY, 1)
    refused(TypeError, r"key=", call, fn, x, 0, 1)
    refused(ValueError, r"num_matvecs=.*must be at least 1", call, fn, x, KEY, 0)
    refused(TypeError, r"num_matvecs=.*must be a Python int", traced, 3)


class Counting(eqx.Module):
    """A network that counts its training steps."""

    net: Any
    steps: Any

    def __call__(self, x: Any) -> Any:
        return self.net(x)


def test_what_is_no_float_in_a_point_is_taken_out_as_the_message_says() -> None:
    """Functions and integers, which were made floats: the Gauss-Newton matrix had a row of
    zeros for a counter."""
    net, x = Counting(network("laplacian", 3), jnp.asarray(1000, jnp.int32)), jnp.ones(3)
    words = r"laplacian\(x=.*got .*eqx\.partition.*combine"
    refused(TypeError, words, tx.laplacian, lambda net, args: net(x), net, KEY, 2)
    arrays, rest = eqx.partition(net, eqx.is_array)
    fn = lambda a, args: eqx.combine(a, rest)(x)  # noqa: E731
    loss = lambda outputs, args: outputs**2  # noqa: E731
    calls: dict[str, Any] = {
        **{name: lambda x, f=f: f(fn, x, KEY, 2) for name, f in CALCULUS.items()},
        "biharmonic": lambda x: tx.biharmonic(fn, x, KEY, 2),
        "gauss_newton": lambda x: tx.gauss_newton(fn, loss, x),
        "empirical_fisher": lambda x: tx.empirical_fisher(fn, x),
    }
    for name, call in calls.items():
        words = rf"{name}\(x=.*got int32\[\] at x\.steps\. .*eqx\.is_inexact_array"
        refused(TypeError, words, call, arrays)
    refused(TypeError, r"got int64\[3\]\. ", calls["laplacian"], jnp.arange(3))
    floats, rest = eqx.partition(net, eqx.is_inexact_array)
    assert calls["gauss_newton"](floats).in_size() == ravel_pytree(floats)[0].size
    assert jnp.isfinite(calls["laplacian"](floats).value)


def test_wrong_values_say_the_cure() -> None:
    x, one, real = jnp.ones(3), "must return one real number", "must return arrays of real"
    divergence, entries, square = tx.divergence, tx.hessian_diagonal, tx.unbiased_square
    short, wide = (lambda x, args: x[:2]), (lambda x, args: x @ jnp.ones((3, 1)))
    refused(ValueError, "must return what x is like", divergence, short, x, KEY, 1)
    refused(ValueError, r"jax\.vmap", divergence, wide, x, KEY, 1)
    refused(TypeError, one, entries, lambda x, args: x, x, KEY, 1)
    for values in (jnp.argmax, lambda x: 1.0, lambda x: None, lambda x: x.sum() > 0):
        fn: Any = lambda x, args, values=values: values(x)  # noqa: E731
        refused(TypeError, rf"laplacian\(fn=.*{real}", tx.laplacian, fn, x, KEY, 1)
        refused(TypeError, one, entries, fn, x, KEY, 1)
    refused(TypeError, "must return an Estimate", square, lambda key: {"a": 2.0}, KEY)
    refused(TypeError, r"estimate_fn=.*must be a function", square, jnp.ones(()), KEY)
