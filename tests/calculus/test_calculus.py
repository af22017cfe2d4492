"""Divergence, Laplacian and Hessian diagonal, beside dense automatic differentiation."""

import itertools
from typing import Any

import diffrax
import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import traceax as tx
from tests.helpers import close, leaks_checked, slow

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


def network(name: str, n: int, activation: Any = jnp.tanh, depth: int = 1) -> Any:
    out = n if name == "divergence" else "scalar"
    return eqx.nn.MLP(n, out, 7, depth, activation, key=jax.random.key(3), dtype=float)


def signs(n: int) -> Any:
    """All 2^n vectors of signs, as a sampler."""
    table = jnp.array(list(itertools.product([-1.0, 1.0], repeat=n)))
    return lambda key, structure, num_probes: table[:num_probes]


# --- agreement with dense derivatives ---------------------------------------------------

ACTIVATIONS = {
    "tanh": jnp.tanh,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "sin": jnp.sin,
    "gelu": jax.nn.gelu,
}


@hypothesis.given(
    name=st.sampled_from(sorted(CALCULUS)),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    depth=st.integers(0, 2),
    n=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**30),
)
@hypothesis.settings(max_examples=12, deadline=None, derandomize=True, database=None)
def test_networks(name: str, activation: str, depth: int, n: int, seed: int) -> None:
    fn = network(name, n, ACTIVATIONS[activation], depth)
    x = jax.random.normal(jax.random.key(seed), (n,))
    estimate = CALCULUS[name](lambda x, args: fn(x), x, KEY, n)
    assert estimate.num_matvecs == n
    close(estimate.value, dense(name, fn, x), 1e-12, 1 + float(jnp.sum(jnp.abs(x))))
    assert not jnp.any(estimate.standard_error)


A = jax.random.normal(jax.random.key(1), (6, 6))
X = jax.random.normal(jax.random.key(0), (6,)) + 0.1
FUNCTIONS = {
    "quadratic": lambda x: x @ A @ x,
    "product": lambda x: jnp.tanh(A @ x).sum() * jnp.prod(x),
    "custom rules": lambda x: jax.nn.softplus(A @ x).sum() + jax.nn.logsumexp(A.T @ x),
    "norm": lambda x: jnp.linalg.norm(x) ** 3,
    "many values": lambda x: jnp.sin(A @ x),
    "complex values": lambda x: jnp.exp(1j * (A @ x).sum()) * jnp.sum(x**2),
    "complex parts": lambda x: (
        jnp.abs(jnp.exp((1 + 2j) * (A @ x))).sum() ** 2 + jnp.angle(jnp.sum((1j + x) ** 2))
    ),
    "scan": lambda x: jax.lax.scan(lambda c, a: (jnp.sin(a @ x) * c, None), 1.0, A)[0],
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, c: jnp.sin(c * x.sum()), 1.0),
    "branch": lambda x: jax.lax.cond(
        x[0] > 0, lambda y: (y**3).sum(), lambda y: jnp.cos(y).prod(), x
    ),
    "checkpoint": lambda x: jax.checkpoint(lambda y: jnp.sin(y).sum() ** 2)(x),
    "determinant": lambda x: jnp.linalg.slogdet(A @ A.T + jnp.diag(x**2))[1],
    "solve": lambda x: jnp.linalg.solve(A + jnp.diag(x), x)[0],
    "order": lambda x: jnp.sort(x)[2] ** 3 + jnp.max(x) ** 2 + jnp.where(x > 0, x, x**2)[1],
    "integers": lambda x: x[jnp.argmax(x)] ** 3 + jnp.round(x[0]),
    "transform": lambda x: jnp.fft.fft(x)[1:3].real.sum() ** 2 + jnp.cumsum(x)[3] ** 3,
    "quotient": lambda x: (x / (1 + x @ x)).sum() + jnp.sum(1 / x) + (2.0**x).sum(),
    "powers": lambda x: x[::-1] @ jnp.power(jnp.abs(x), 2.5) + jnp.maximum(x, 0.1).prod(),
    "solver": lambda x: lx.linear_solve(
        lx.MatrixLinearOperator(A + jnp.diag(x)), x**2
    ).value.sum(),
    "stopped": lambda x: x**2 @ jnp.sqrt(jax.lax.stop_gradient(jax.nn.relu(x))),
    "modulus": lambda x: jnp.abs(jnp.fft.fft(x))[1] ** 3,
    "linear": lambda x: x.sum(),
    "constant": lambda x: jnp.ones(()),
    "bits": lambda x: jnp.float32(x.sum()) ** 2,
}


@pytest.mark.parametrize("what", FUNCTIONS)
def test_every_operation_has_its_second_derivative(what: str) -> None:
    """Value, value along few probes, and gradient, of the collapsed Taylor expansion."""
    fn = FUNCTIONS[what]
    tolerance = 1e-5 if what == "bits" else 1e-11

    @jax.jit
    def results(x: Any) -> Any:
        def loss(laplacian: Any) -> Any:
            return jnp.sum(jnp.abs(laplacian) ** 2)

        def ours(x: Any) -> Any:
            return tx.laplacian(lambda x, args: fn(x), x, KEY, 6).value

        probes = 2 * signs(6)(None, None, 64)[jnp.array([3, 7, 50])]
        few = tx.laplacian(
            lambda x, args: fn(x), x, KEY, 3, sampler=lambda *_: probes
        ).value
        hessian = jax.jacfwd(jax.jacfwd(fn))(x)
        want = jnp.einsum("...ij,ki,kj->...", hessian, probes, probes) / 3
        pairs = [(ours(x), dense("laplacian", fn, x)), (few, want)]
        gradients = (
            jax.grad(lambda x: loss(ours(x)))(x),
            jax.grad(lambda x: loss(dense("laplacian", fn, x)))(x),
        )
        return [*pairs, gradients]

    for got, want in results(X):
        assert got.shape == want.shape
        close(got, want, tolerance, 1e-3 + float(jnp.max(jnp.abs(want))))


@pytest.mark.parametrize("moving", ["both", "the value", "the array"])
def test_padding_by_a_value_that_moves(moving: str) -> None:
    """Of `jax.lax.pad` JAX itself has no gradient where the value alone moves, as it does
    in the second coefficients; the truth is taken forwards."""

    def fn(x: Any) -> Any:
        array = jnp.ones(6) if moving == "the value" else x
        value = jnp.ones(()) if moving == "the array" else jnp.sum(x**3)
        padded = jax.lax.pad(array, value, ((1, -1, 1),))
        return padded[1] * jnp.sin(padded).sum()

    def ours(x: Any) -> Any:
        return tx.laplacian(lambda x, args: fn(x), x, KEY, 6).value

    def truth(x: Any) -> Any:
        forwards = lambda x: dense("laplacian", fn, x)  # noqa: E731
        return forwards(x), jax.jacfwd(forwards)(x)

    results = jax.jit(lambda x: (jax.value_and_grad(ours)(x), truth(x)))(X)
    for got, want in zip(*results, strict=True):
        close(got, want, 1e-11)


def test_large_slopes_do_not_overflow() -> None:
    """g'' = 0 where g' squared is out of range."""
    x = jnp.array([0.3, -0.7, 1.2], jnp.float32)
    steep = lambda x, args: (jnp.maximum(1e20 * x, 0) + jnp.tanh(1e20 * x)).sum()  # noqa: E731
    assert tx.laplacian(steep, x, KEY, 3).value == 0


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
    weights = 1.0 + jnp.arange(n) if name == "hessian_diagonal" else 1.0

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

    truth = jax.tree.leaves(jax.jit(jax.grad(want))(params))
    for where in ("args", "module", "closure"):
        with leaks_checked():
            got = eqx.filter_jit(jax.grad(ours))(params, where)
        for one, other in zip(jax.tree.leaves(got), truth, strict=True):
            close(one, other, 1e-10, 1 + float(jnp.max(jnp.abs(other))))


@every_name
def test_points_of_any_structure(name: str) -> None:
    """Leaves of several dtypes and shapes, numbers among them, against the flat point."""
    x = {"a": jnp.array([0.3, -0.2], jnp.float32), "b": (jnp.array([[0.5]]), 2)}

    def mixed(x: Any, args: Any) -> Any:
        a, b = jnp.sin(x["a"]), x["b"][0]
        total = (a.sum() * b.sum()) ** 2 + x["b"][1] ** 3
        if name != "divergence":
            return total
        a, b = a * b[0, 0].astype(jnp.float32), b * total
        return {"a": a.astype(jnp.float32), "b": (b, total * x["b"][1])}

    def flat(v: Any) -> Any:
        point = {"a": v[:2], "b": (v[2:3, None], v[3])}
        return jnp.concatenate([y.ravel() for y in jax.tree.leaves(mixed_exact(point))])

    def mixed_exact(x: Any) -> Any:
        a, b = jnp.sin(x["a"]), x["b"][0]
        total = (a.sum() * b.sum()) ** 2 + x["b"][1] ** 3
        if name != "divergence":
            return total
        return {"a": a * b[0, 0], "b": (b * total, total * x["b"][1])}

    got = CALCULUS[name](mixed, x, KEY, 4).value
    v = jnp.array([0.3, -0.2, 0.5, 2.0])
    scalar = flat if name == "divergence" else lambda v: flat(v)[0]
    if name == "hessian_diagonal":
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, x)
        got = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(got)])
    close(got, dense(name, scalar, v), 1e-5)


# --- sampling ---------------------------------------------------------------------------


@every_name
def test_the_mean_over_all_signs_is_the_truth(name: str) -> None:
    """Enumeration: the estimate, and its derivative, are unbiased."""
    n = 3
    net = network(name, n)

    def estimate(x: Any, probe: Any) -> Any:
        one = lambda key, structure, num_probes: probe[None]  # noqa: E731
        call = CALCULUS[name](lambda x, args: net(x), x, KEY, 1, sampler=one)
        return jnp.sum(jnp.arange(1.0, 4.0) * call.value)

    def truth(x: Any) -> Any:
        return jnp.sum(jnp.arange(1.0, 4.0) * dense(name, net, x))

    x = jnp.array([0.3, -0.2, 0.5])
    both = jax.jit(jax.vmap(jax.value_and_grad(estimate), (None, 0)))
    value, gradient = both(x, signs(n)(None, None, 8))
    want, slope = jax.value_and_grad(truth)(x)
    close(jnp.mean(value), want, 1e-12)
    close(jnp.mean(gradient, axis=0), slope, 1e-12)


def test_a_hessian_diagonal_is_sketched_where_that_is_better() -> None:
    """As `diagonal` would, in the structure of the point; not in batches, nor with a
    sampler that somebody asks for."""
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


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [tx.rademacher, tx.normal, tx.orthogonal])
def test_intervals_of_a_laplacian_hold_the_truth(sampler: Any) -> None:
    fn = FUNCTIONS["product"]
    x = jnp.linspace(-1, 1, 6)

    @jax.jit
    @jax.vmap
    def run(key: Any) -> Any:
        estimate = tx.laplacian(lambda x, a: fn(x), x, key, 5, sampler=sampler)
        return estimate.value, estimate.standard_error, *estimate.interval()

    value, error, low, high = run(jax.random.split(KEY, 1000))
    truth = dense("laplacian", fn, x)
    spread = float(jnp.sqrt(jnp.mean((value - truth) ** 2)))
    assert abs(jnp.mean(value) - truth) < 4 * spread / 1000**0.5
    assert 0.7 < jnp.sqrt(jnp.mean(error**2)) / spread < 1.5
    assert jnp.mean((low <= truth) & (truth <= high)) > 0.88


@every_name
def test_of_one_probe_the_error_is_unknown(name: str) -> None:
    net = network(name, 3)
    estimate = CALCULUS[name](lambda x, args: net(x), jnp.ones(3), KEY, 1)
    assert jnp.all(jnp.isinf(estimate.standard_error))
    assert estimate.num_matvecs == 1


@every_name
def test_batches_and_keys(name: str) -> None:
    """A batch is the loop over its points; typed and old keys are the same keys."""
    net = network(name, 3)

    def at(x: Any, key: Any) -> Any:
        return CALCULUS[name](lambda x, args: net(x), x, key, 2).value

    points, keys = jax.random.normal(KEY, (4, 3)), jax.random.split(KEY, 4)
    batch = jax.jit(jax.vmap(at))(points, keys)
    close(batch[2], at(points[2], keys[2]), 1e-12)
    old = jax.random.key_data(keys)
    close(jax.jit(jax.vmap(at))(points, old), batch, 0.0)


@every_name
def test_the_error_bar_refuses_to_be_differentiated(name: str) -> None:
    net = network(name, 3)

    def error(x: Any) -> Any:
        estimate = CALCULUS[name](lambda x, args: net(x), x, KEY, 2)
        return jnp.sum(estimate.standard_error)

    with pytest.raises(Exception, match="standard_error"):
        jax.block_until_ready(jax.grad(error)(jnp.ones(3)))


def test_the_error_bar_of_a_square_refuses_to_be_differentiated() -> None:
    """One probe each, where it is made of the difference, and several."""
    matrix = jax.random.normal(KEY, (8, 8))

    def error(scale: Any, num_probes: int) -> Any:
        operator = tx_operator(scale * matrix)
        once = lambda key: tx.hutchinson_trace(operator, key, num_probes)  # noqa: E731
        return tx.unbiased_square(once, KEY).standard_error

    for num_probes in (1, 4):
        with pytest.raises(Exception, match="traceax: `standard_error` of an Estimate"):
            jax.block_until_ready(jax.grad(error)(1.3, num_probes))


def test_an_error_bar_that_is_not_read_is_not_computed() -> None:
    net = network("laplacian", 9, depth=3)
    x = jnp.ones(9)

    def cost(read: Any) -> float:
        run = jax.jit(lambda x: read(tx.laplacian(lambda x, a: net(x), x, KEY, 8)))
        costs: Any = run.lower(x).compile().cost_analysis()
        return costs["flops"]

    assert cost(lambda e: e.value) < 0.7 * cost(lambda e: (e.value, e.standard_error))


def test_inside_a_loop_inside_a_batch() -> None:
    """Without leaks, at a budget beyond all bounds, too."""
    fn = lambda x, args: (jnp.sin(x) ** 2).sum() * x[0]  # noqa: E731

    def step(carry: Any) -> Any:
        i, x = carry
        once = lambda key: tx.laplacian(fn, x, key, 1).value  # noqa: E731
        change = tx.unbiased_square(once, KEY) + tx.laplacian(fn, x, KEY, 10**6).value
        change += tx.hessian_diagonal(fn, x, KEY, 2).value.sum()
        change += tx.divergence(lambda x, args: x * fn(x, args), x, KEY, 2).value
        return i + 1, x + 1e-3 * change

    loop = lambda x: jax.lax.while_loop(lambda c: c[0] < 2, step, (0, x))[1]  # noqa: E731
    points = jnp.linspace(-1, 1, 6).reshape(2, 3)
    with leaks_checked():
        batch = jax.jit(jax.vmap(loop))(points)
    want = step(step((0, points[1])))[1]
    close(batch[1], want, 1e-12)


# --- squares ----------------------------------------------------------------------------


def test_squares_are_unbiased() -> None:
    """Enumeration over the pairs of independent estimates that two keys can give."""
    table = jnp.array([2.0, -1.0, 5.0])

    def scaled(scale: Any, key: Any) -> Any:
        return scale * table[jax.random.randint(key, (), 0, 3)]

    def square(scale: Any, key: Any) -> Any:
        return tx.unbiased_square(lambda k: scaled(scale, k), key)

    keys = jax.random.split(KEY, 300)
    halves = jax.vmap(jax.random.split)(keys)
    pairs = jax.vmap(jax.vmap(lambda k: jax.random.randint(k, (), 0, 3)))(halves)
    both = jax.jit(jax.vmap(jax.value_and_grad(square), (None, 0)))
    value, slope = both(jnp.asarray(1.5), keys)
    chosen = [int(jnp.argmax(jnp.all(pairs == jnp.array(p), 1))) for p in np.ndindex(3, 3)]
    assert len(set(chosen)) == 9  # each pair occurs
    close(jnp.mean(value[jnp.array(chosen)]), (1.5 * jnp.mean(table)) ** 2, 1e-12)
    close(jnp.mean(slope[jnp.array(chosen)]), 2 * 1.5 * jnp.mean(table) ** 2, 1e-12)


def test_squares_of_estimates_carry_error_bars() -> None:
    matrix = jax.random.normal(KEY, (8, 8))
    operator = tx_operator(matrix)

    @jax.jit
    @jax.vmap
    def run(key: Any) -> Any:
        square = tx.unbiased_square(lambda k: tx.hutchinson_trace(operator, k, 6), key)
        return square.value, square.standard_error, *square.interval()

    value, error, low, high = run(jax.random.split(KEY, 2000))
    truth = jnp.trace(matrix) ** 2
    spread = float(jnp.std(value))
    assert abs(jnp.mean(value) - truth) < 4 * spread / 2000**0.5
    assert 0.7 < jnp.sqrt(jnp.mean(error**2)) / spread < 1.5
    assert jnp.mean((low <= truth) & (truth <= high)) > 0.9
    once = tx.unbiased_square(lambda k: tx.hutchinson_trace(operator, k, 1), KEY)
    assert once.num_matvecs == 2
    assert jnp.isfinite(once.standard_error)


def test_squares_keep_what_they_are_given() -> None:
    table = {"a": jnp.ones(3), "b": 1j * jnp.ones(())}
    got = tx.unbiased_square(lambda key: table, KEY)
    assert jax.tree.map(jnp.shape, got) == {"a": (3,), "b": ()}
    close(got["b"], 1.0, 1e-15)  # |i|^2
    traced = tx.unbiased_square(lambda key: tx.trace(tx_operator(jnp.eye(3)), key), KEY)
    assert isinstance(traced, tx.Estimate)
    assert traced.standard_error == 0


def tx_operator(matrix: Any) -> Any:
    return lx.MatrixLinearOperator(matrix)


# --- as users have them -----------------------------------------------------------------


def test_a_loss_of_squared_residuals_trains_to_the_solution() -> None:
    """By one probe, whose variance is that of the off-diagonal entry of the Hessian."""
    target = jnp.array([[2.0, 0.7], [0.7, -1.0]])

    def residual(theta: Any, key: Any) -> Any:
        u = lambda x, args: x @ (theta + theta.T) @ x / 2  # noqa: E731
        return tx.laplacian(u, jnp.ones(2), key, 1).value - jnp.trace(2 * target)

    def unbiased(theta: Any, key: Any) -> Any:
        return tx.unbiased_square(lambda k: residual(theta, k), key)

    def biased(theta: Any, key: Any) -> Any:
        return residual(theta, key) ** 2

    optimiser = optax.sgd(0.01)

    def train(square: Any) -> Any:
        def loss(theta: Any, key: Any) -> Any:
            return jnp.mean(jax.vmap(square, (None, 0))(theta, jax.random.split(key, 64)))

        def step(carry: Any, key: Any) -> Any:
            theta, state = carry
            updates, state = optimiser.update(jax.grad(loss)(theta, key), state)
            return (optax.apply_updates(theta, updates), state), None

        start = jnp.array([[0.0, 1.5], [1.5, 0.0]])
        keys = jax.random.split(KEY, 150)
        return jax.lax.scan(step, (start, optimiser.init(start)), keys)[0][0]

    theta = train(unbiased)
    close(jnp.trace(theta), jnp.trace(target), 0.1)
    close(theta[0, 1], 1.5, 0.2)  # nothing tells what it should be
    # A loss of squares pays for the variance, and shrinks what makes it.
    assert abs(train(biased)[0, 1]) < 0.2


@pytest.mark.parametrize("adjoint", ["RecursiveCheckpoint", slow("Backsolve")])
def test_a_flow(adjoint: str) -> None:
    """The divergence along a linear flow, dx/dt = M x: d log p/dM is the identity."""
    field = lambda t, x, m: jnp.tanh(m @ x)  # noqa: E731

    def log_density_change(m: Any, method: Any, key: Any) -> Any:
        def rate(t: Any, y: Any, m: Any) -> Any:
            x = y[0]
            divergence = tx.divergence(lambda x, m: field(t, x, m), x, key, 2, args=m)
            return field(t, x, m), divergence.value

        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(rate),  # pyright: ignore[reportArgumentType]
            diffrax.Heun(),
            0.0,
            1.0,
            0.125,
            (jnp.array([0.5, -0.3]), jnp.zeros(())),
            m,
            adjoint=method,
            max_steps=16,
        )
        paths: Any = solution.ys
        return paths[1][0]

    m = jnp.array([[0.4, -0.3], [0.2, 0.1]])
    method = getattr(diffrax, f"{adjoint}Adjoint")()
    by = eqx.filter_jit(eqx.filter_value_and_grad(log_density_change))
    value, gradient = by(m, method, jax.random.key(0))
    assert by(m, method, jax.random.PRNGKey(0))[0] == value
    _, want = by(m, diffrax.DirectAdjoint(), KEY)
    close(gradient, want, 0.02 if adjoint == "Backsolve" else 1e-12)


# --- wrong use --------------------------------------------------------------------------


@every_name
def test_wrong_use_says_the_cure(name: str) -> None:
    call: Any = CALCULUS[name]
    net = network(name, 3)
    fn = lambda x, args: net(x)  # noqa: E731
    x = jnp.ones(3)
    with pytest.raises(TypeError, match=r"fn=\.\.\.\) must be a function fn\(x, args\)"):
        call(x, fn, KEY, 1)
    with pytest.raises(TypeError, match=r"x=\.\.\.\) must be a pytree of real arrays"):
        call(fn, x + 0j, KEY, 1)
    with pytest.raises(TypeError, match=r"x=\.\.\.\).*got str"):
        call(fn, "x", KEY, 1)
    with pytest.raises(ValueError, match=r"x=\.\.\.\) must have at least one entry"):
        call(fn, (), KEY, 1)
    with pytest.raises(TypeError, match=r"key=\.\.\.\)"):
        call(fn, x, 0, 1)
    with pytest.raises(ValueError, match=r"num_matvecs=\.\.\.\) must be at least 1"):
        call(fn, x, KEY, 0)
    with pytest.raises(TypeError, match=r"num_matvecs=\.\.\.\) must be a Python int"):
        jax.jit(lambda k: call(fn, x, KEY, k))(3)


def test_functions_in_a_point_are_taken_out_as_the_message_says() -> None:
    net, x = network("laplacian", 3), jnp.ones(3)
    with pytest.raises(TypeError, match=r"laplacian\(x=.*got .*eqx\.partition.*combine"):
        tx.laplacian(lambda net, args: net(x), net, KEY, 2)
    arrays, rest = eqx.partition(net, eqx.is_inexact_array)
    run = lambda a, args: eqx.combine(a, rest)(x) ** 2  # noqa: E731
    assert jnp.isfinite(tx.laplacian(run, arrays, KEY, 2).value)


def test_wrong_values_say_the_cure() -> None:
    x = jnp.ones(3)
    with pytest.raises(ValueError, match="must return what x is like"):
        tx.divergence(lambda x, args: x[:2], x, KEY, 1)
    with pytest.raises(ValueError, match=r"jax\.vmap"):
        tx.divergence(lambda x, args: x @ jnp.ones((3, 1)), x, KEY, 1)
    with pytest.raises(TypeError, match="must return one real number"):
        tx.hessian_diagonal(lambda x, args: x, x, KEY, 1)
    for values in (jnp.argmax, lambda x: 1.0, lambda x: None, lambda x: x.sum() > 0):
        fn: Any = lambda x, args, values=values: values(x)  # noqa: E731
        with pytest.raises(TypeError, match=r"laplacian\(fn=.*must return arrays of real"):
            tx.laplacian(fn, x, KEY, 1)
        with pytest.raises(TypeError, match="must return one real number"):
            tx.hessian_diagonal(fn, x, KEY, 1)
    with pytest.raises(TypeError, match=r"estimate_fn=\.\.\.\) must return an Estimate"):
        tx.unbiased_square(lambda key: {"a": 2.0}, KEY)
    with pytest.raises(TypeError, match=r"estimate_fn=\.\.\.\) must be a function"):
        tx.unbiased_square(jnp.ones(()), KEY)  # pyright: ignore[reportArgumentType]
