"""Divergence, Laplacian and Hessian diagonal, beside dense automatic differentiation."""

import itertools
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
    refused,
    slow,
)
from tests.matrices import all_signs, numbers
from traceax._core.keys import ESTIMATES, keys_of
from traceax._linalg.columns import promoted

KEY = jax.random.key(5)
CALCULUS = {
    "divergence": tx.divergence,
    "laplacian": tx.laplacian,
    "hessian_diagonal": tx.hessian_diagonal,
}
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


# --- agreement with dense derivatives ---------------------------------------------------


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


SHORT = ("many values", "custom rules", "scan", "complex values", "padding, the value")


@pytest.mark.parametrize("what", cases(FUNCTIONS, *SHORT))
def test_every_operation_has_its_second_derivative(what: str) -> None:
    """Value, value along few probes, and gradient; the true gradient is taken forwards."""
    fn = FUNCTIONS[what]
    tolerance = 1e-5 if what == "bits" else 1e-11

    @jax.jit
    def results(x: Any) -> Any:
        def loss(laplacian: Any) -> Any:
            return jnp.sum(jnp.abs(laplacian) ** 2)

        def ours(x: Any) -> Any:
            return tx.laplacian(lambda x, args: fn(x), x, KEY, 6).value

        probes = 2 * jnp.asarray(all_signs(6)[[3, 7, 50]])
        few = tx.laplacian(lambda x, args: fn(x), x, KEY, 3, sampler=given(probes)).value
        hessian = jax.jacfwd(jax.jacfwd(fn))(x)
        want = jnp.einsum("...ij,ki,kj->...", *promoted(hessian, probes, probes)) / 3
        pairs = [(ours(x), dense("laplacian", fn, x)), (few, want)]
        gradients = (
            jax.grad(lambda x: loss(ours(x)))(x),
            jax.jacfwd(lambda x: loss(dense("laplacian", fn, x)))(x),
        )
        return [*pairs, gradients]

    for got, want in results(X):
        assert got.shape == want.shape
        close(got, want, tolerance, 1e-3 + float(jnp.max(jnp.abs(want))))


def test_large_slopes_do_not_overflow() -> None:
    """g'' = 0 where g' squared is out of range."""
    x = jnp.array([0.3, -0.7, 1.2], jnp.float32)
    steep = lambda x, args: (jnp.maximum(1e20 * x, 0) + jnp.tanh(1e20 * x)).sum()  # noqa: E731
    assert tx.laplacian(steep, x, KEY, 3).value == 0


@pytest.mark.slow
def test_second_order_of_a_laplacian() -> None:
    fn = network("laplacian", 3)
    x = jnp.array([0.3, -0.2, 0.5])
    ours = jax.hessian(lambda x: tx.laplacian(lambda x, a: fn(x), x, KEY, 3).value)(x)
    close(ours, jax.hessian(lambda x: dense("laplacian", fn, x))(x), 1e-11)


# --- where parameters may be ------------------------------------------------------------


@every_name
def test_parameters_reach_the_gradient_wherever_they_are(name: str) -> None:
    n = 3
    params, static = eqx.partition(network(name, n), eqx.is_inexact_array)
    x = jnp.array([0.3, -0.2, 0.5])
    weights = jnp.arange(1.0, n + 1) if name == "hessian_diagonal" else 1.0

    class Field(eqx.Module):
        inner: Any

        def __call__(self, x: Any, args: Any) -> Any:
            return self.inner(x)

    def contracted(estimate: tx.Estimate) -> Any:
        return jnp.sum(weights * estimate.value) ** 2

    def ours(params: Any, where: str) -> Any:
        net = eqx.combine(params, static)
        call = CALCULUS[name]
        if where == "args":
            of = lambda x, params: eqx.combine(params, static)(x)  # noqa: E731
            return contracted(call(of, x, KEY, n, args=params))
        fn = Field(net) if where == "module" else lambda x, args: net(x)
        return contracted(call(fn, x, KEY, n))

    def want(params: Any) -> Any:
        net = eqx.combine(params, static)
        return jnp.sum(weights * dense(name, net, x)) ** 2

    truth = jax.jit(jax.grad(want))(params)
    for where in ("args", "module", "closure"):
        with leaks_checked():
            got = eqx.filter_jit(jax.grad(ours))(params, where)
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

    def flat(v: Any) -> Any:
        """The same in double precision."""
        point = {"a": v[:2], "b": (v[2:3, None], v[3])}
        leaves = jax.tree.leaves(mixed(point, single=float))
        return jnp.concatenate([leaf.ravel() for leaf in promoted(*leaves)])

    estimate = CALCULUS[name](mixed, x, KEY, 4)
    assert estimate.num_matvecs == 4
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(estimate.standard_error))
    got, v = estimate.value, jnp.array([0.3, -0.2, 0.5, 2.0])
    scalar = flat if name == "divergence" else lambda v: flat(v)[0]
    if name == "hessian_diagonal":
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, x)
        got = jnp.concatenate([x.ravel() for x in promoted(*jax.tree.leaves(got))])
    close(got, dense(name, scalar, v), 1e-5)


# --- sampling ---------------------------------------------------------------------------


@every_name
def test_the_mean_over_all_signs_is_the_truth(name: str) -> None:
    """Estimate and derivative are unbiased. Of one probe the error is unknown."""
    n = 3
    net = network(name, n)

    def estimate(x: Any, probe: Any) -> Any:
        one = given(probe[None])
        call = CALCULUS[name](lambda x, args: net(x), x, KEY, 1, sampler=one)
        assert call.num_matvecs == 1
        return jnp.sum(jnp.arange(1.0, 4.0) * call.value), call.standard_error

    def truth(x: Any) -> Any:
        return jnp.sum(jnp.arange(1.0, 4.0) * dense(name, net, x))

    x = jnp.array([0.3, -0.2, 0.5])
    both = jax.vmap(jax.value_and_grad(estimate, has_aux=True), (None, 0))
    (value, error), gradient = jax.jit(both)(x, jnp.asarray(all_signs(n)))
    assert jnp.all(jnp.isinf(error))
    want, slope = jax.value_and_grad(truth)(x)
    close(jnp.mean(value), want, 1e-12)
    close(jnp.mean(gradient, axis=0), slope, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, slow(3)])
def test_squares_of_a_hessian_diagonal(count: int) -> None:
    """Enumerated over all signs: the variance makes the square too large, and the square
    of the error bar is the variance on average."""
    n = 4
    hessian = (A + A.T)[:n, :n]
    signs = jnp.asarray(all_signs(n))
    choices = jnp.asarray(list(itertools.product(range(len(signs)), repeat=count)))

    def squares(choice: Any) -> Any:
        sampler = tx.Sampler(lambda *_: signs[choice])
        fn = lambda x, args: x @ hessian @ x / 2  # noqa: E731
        entries = tx.hessian_diagonal(fn, X[:n], KEY, count, sampler=sampler)
        return entries.value**2, entries.value**2 - entries.standard_error**2

    square, unbiased = jax.jit(lambda: jax.lax.map(squares, choices, batch_size=256))()
    truth = jnp.diagonal(hessian) ** 2
    close(unbiased.mean(axis=0), truth, 1e-10)
    variance = ((hessian**2).sum(axis=1) - truth) / count
    close(square.mean(axis=0), truth + variance, 1e-10)


@pytest.mark.parametrize("count", [2, slow(9)])
def test_a_hessian_diagonal_of_few_probes_is_plain(count: int) -> None:
    """So the error bar of the default is the spread of independent signs, too."""
    net = network("hessian_diagonal", 12)
    call = partial(tx.hessian_diagonal, lambda x, args: net(x), jnp.ones(12), KEY, count)
    got, plain = call(), call(sampler=tx.rademacher)
    close(got.value, plain.value, 1e-12)
    close(got.standard_error, plain.standard_error, 1e-12)


def test_a_hessian_diagonal_is_sketched_where_that_is_better() -> None:
    """As `diagonal` would; not in batches, nor with a sampler that somebody asks for."""
    net = network("hessian_diagonal", 12)
    parameters, static = eqx.partition(net, eqx.is_inexact_array)
    points = jax.random.normal(KEY, (40, 12))

    def fn(p: Any, args: Any) -> Any:
        net = eqx.combine(p, static)
        return jnp.mean((jax.vmap(net)(points) - jnp.sin(points.sum(1))) ** 2)

    flat, restore = ravel_pytree(parameters)
    truth = jnp.diagonal(jax.hessian(lambda v: fn(restore(v), None))(flat))

    def off(num_matvecs: int, **how: Any) -> Any:
        call = jax.jit(lambda k: tx.hessian_diagonal(fn, parameters, k, num_matvecs, **how))
        values = [call(k).value for k in jax.random.split(KEY, 6)]
        errors = [ravel_pytree(v)[0] - truth for v in values]
        return jnp.sqrt(jnp.mean(jnp.square(jnp.stack(errors))))

    plain, sketched = off(50, sampler=tx.rademacher), off(50)
    assert 3 * sketched < plain
    assert off(50, batch_size=50) > 2 * sketched
    assert off(8) == off(8, sampler=tx.rademacher)


SQUARE_OR_SAMPLER = ["rademacher", "normal", "orthogonal", "square"]


@pytest.mark.parametrize("name", cases(SQUARE_OR_SAMPLER, "square"))
def test_intervals_hold_the_truth(name: str) -> None:
    """Of a Laplacian by each sampler, and of the square of a trace."""
    fn, x, matrix = FUNCTIONS["product"], jnp.linspace(-1, 1, 6), numbers((8, 8))
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix))
    truth = matrix.trace() ** 2 if name == "square" else dense("laplacian", fn, x)

    @jax.jit
    @jax.vmap
    def run(key: Any) -> Any:
        if name == "square":
            once = lambda key: tx.hutchinson_trace(operator, key, 6)  # noqa: E731
            estimate = tx.unbiased_square(once, key)
        else:
            how: Any = {"sampler": getattr(tx, name)}
            estimate = tx.laplacian(lambda x, a: fn(x), x, key, 5, **how)
        return estimate.value, estimate.standard_error, contains(estimate, truth)

    value, error, held = run(jax.random.split(KEY, 2000))
    spread = float(jnp.sqrt(jnp.mean((value - truth) ** 2)))
    assert is_unbiased(value, truth, 4)
    assert 0.7 < jnp.sqrt(jnp.mean(error**2)) / spread < 1.5
    assert jnp.mean(held) > (0.9 if name == "square" else 0.88)


@pytest.mark.parametrize("name", [*cases(CALCULUS, "laplacian"), "square of one", "square"])
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


# --- squares ----------------------------------------------------------------------------


def test_squares_are_unbiased() -> None:
    """Enumeration over the pairs of independent estimates that two keys can give."""
    table = jnp.array([2.0, -1.0, 5.0])

    def scaled(scale: Any, key: Any) -> Any:
        return scale * table[jax.random.randint(key, (), 0, 3)]

    def square(scale: Any, key: Any) -> Any:
        return tx.unbiased_square(lambda k: scaled(scale, k), key)

    keys = jax.random.split(KEY, 300)
    halves = jax.vmap(lambda key: keys_of(key, 2, ESTIMATES))(keys)
    pairs = jax.vmap(jax.vmap(lambda k: jax.random.randint(k, (), 0, 3)))(halves)
    both = jax.jit(jax.vmap(jax.value_and_grad(square), (None, 0)))
    value, slope = both(jnp.asarray(1.5), keys)
    chosen = [int(jnp.argmax(jnp.all(pairs == np.array([p]), 1))) for p in np.ndindex(3, 3)]
    assert len(set(chosen)) == 9  # each pair occurs
    close(jnp.mean(value[jnp.array(chosen)]), (1.5 * jnp.mean(table)) ** 2, 1e-12)
    close(jnp.mean(slope[jnp.array(chosen)]), 2 * 1.5 * jnp.mean(table) ** 2, 1e-12)


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


# --- wrong use --------------------------------------------------------------------------


@every_name
def test_wrong_use_says_the_cure(name: str) -> None:
    call: Any = CALCULUS[name]
    net = network(name, 3)
    fn = lambda x, args: net(x)  # noqa: E731
    x, traced, real = jnp.ones(3), jax.jit(lambda k: call(fn, x, KEY, k)), "of real arrays"
    refused(TypeError, r"fn=.*must be a function fn\(x, args\)", call, x, fn, KEY, 1)
    refused(TypeError, f"x=.*must be a pytree {real}", call, fn, as_complex(x), KEY, 1)
    refused(TypeError, r"x=.*got str", call, fn, "x", KEY, 1)
    refused(ValueError, r"x=.*must have at least one entry", call, fn, (), KEY, 1)
    refused(TypeError, r"key=", call, fn, x, 0, 1)
    refused(ValueError, r"num_matvecs=.*must be at least 1", call, fn, x, KEY, 0)
    refused(TypeError, r"num_matvecs=.*must be a Python int", traced, 3)


def test_functions_in_a_point_are_taken_out_as_the_message_says() -> None:
    net, x = network("laplacian", 3), jnp.ones(3)
    fn, words = (lambda net, args: net(x)), r"\(x=.*got .*eqx\.partition.*combine"
    refused(TypeError, f"laplacian{words}", tx.laplacian, fn, net, KEY, 2)
    arrays, rest = eqx.partition(net, eqx.is_inexact_array)
    run = lambda a, args: eqx.combine(a, rest)(x) ** 2  # noqa: E731
    assert jnp.isfinite(tx.laplacian(run, arrays, KEY, 2).value)


class Counting(eqx.Module):
    """A network that counts its training steps."""

    net: Any
    steps: Any

    def __call__(self, x: Any) -> Any:
        return self.net(x)


def test_integer_leaves_are_no_dimensions() -> None:
    """They were made floats: the Gauss-Newton matrix had a row of zeros for the counter."""
    net, x = Counting(network("laplacian", 3), jnp.asarray(1000, jnp.int32)), jnp.ones(3)
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
    operator = calls["gauss_newton"](floats)
    assert operator.in_size() == ravel_pytree(floats)[0].size


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
