"""Divergence, Laplacian and Hessian diagonal beside loops over probes written by hand.

`python -m tests.benchmarks.losses`, from the root of the repository.

Networks of three tanh layers of 128, float32, parameters differentiated; value, and value
and gradient, of either, jitted, warmed, in turn, medians. A ratio is the time of traceax
over that of the loop: below 1 says that traceax is faster. The loops are what one would
write: probes from `jax.random.rademacher`, products with them by `jax.linearize` or by
`jax.jvp` of `jax.grad`, under `jax.vmap`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

import traceax as tx
from tests.benchmarks.speed import in_turn

REPEATS = 15
Network = Any
Loss = Callable[[Network, Array, Array], Array]  # of a network, points and keys


class Case(NamedTuple):
    num_points: int
    dimension: int
    num_probes: int

    def network(self, out: int | str) -> Network:
        sizes = {"in_size": self.dimension, "width_size": 128, "depth": 3}
        key = jax.random.key(0)
        return eqx.nn.MLP(out_size=out, activation=jnp.tanh, key=key, **sizes)  # pyright: ignore

    def data(self) -> tuple[Array, Array]:
        points = jax.random.normal(jax.random.key(1), (self.num_points, self.dimension))
        return points, jax.random.split(jax.random.key(2), self.num_points)

    def signs(self, key: Array, size: int) -> Array:
        shape = (self.num_probes, size)
        return jax.random.rademacher(key, shape, dtype=jnp.float32)


CASES = (Case(2048, 10, 1), Case(512, 100, 1), Case(512, 20, 8), Case(128, 100, 16))


def mean_square(at: Callable[[Network, Array, Array], Array]) -> Loss:
    def loss(network: Network, points: Array, keys: Array) -> Array:
        return jnp.mean(jax.vmap(at, (None, 0, 0))(network, points, keys) ** 2)

    return loss


def divergences(case: Case) -> tuple[Loss, Loss]:
    def ours(network: Network, x: Array, key: Array) -> Array:
        fn = lambda x, args: network(x)  # noqa: E731
        return tx.divergence(fn, x, key, case.num_probes).value

    def loop(network: Network, x: Array, key: Array) -> Array:
        _, push = jax.linearize(network, x)
        return jnp.mean(jax.vmap(lambda v: v @ push(v))(case.signs(key, x.size)))

    return mean_square(ours), mean_square(loop)


def flows(case: Case) -> tuple[Loss, Loss]:
    """The field as well, as in a continuous normalising flow."""

    def ours(network: Network, x: Array, key: Array) -> Array:
        y, push = jax.linearize(network, x)
        operator = lx.FunctionLinearOperator(push, jax.eval_shape(lambda: x))
        trace = tx.hutchinson_trace(operator, key, case.num_probes)
        return jnp.sum(y**2) + trace.value

    def loop(network: Network, x: Array, key: Array) -> Array:
        y, push = jax.linearize(network, x)
        traces = jax.vmap(lambda v: v @ push(v))(case.signs(key, x.size))
        return jnp.sum(y**2) + jnp.mean(traces)

    return mean_square(ours), mean_square(loop)


def laplacians(case: Case) -> tuple[Loss, Loss]:
    def ours(network: Network, x: Array, key: Array) -> Array:
        fn = lambda x, args: network(x)  # noqa: E731
        return tx.laplacian(fn, x, key, case.num_probes).value

    def loop(network: Network, x: Array, key: Array) -> Array:
        gradient = jax.grad(lambda x: network(x))

        def form(v: Array) -> Array:
            return v @ jax.jvp(gradient, (x,), (v,))[1]

        return jnp.mean(jax.vmap(form)(case.signs(key, x.size)))

    return mean_square(ours), mean_square(loop)


def hessian_diagonals(case: Case) -> tuple[Loss, Loss]:
    """Of the loss of a regression in the parameters."""

    def of(network: Network, points: Array) -> tuple[Array, Callable[[Array], Array]]:
        parameters, static = eqx.partition(network, eqx.is_inexact_array)
        vector, restore = ravel_pytree(parameters)

        def loss(vector: Array) -> Array:
            network = eqx.combine(restore(vector), static)
            return jnp.mean((jax.vmap(network)(points) - jnp.sin(points.sum(1))) ** 2)

        return vector, loss

    def ours(network: Network, points: Array, keys: Array) -> Array:
        vector, loss = of(network, points)
        fn = lambda v, args: loss(v)  # noqa: E731
        estimate = tx.hessian_diagonal(
            fn, vector, keys[0], case.num_probes, sampler=tx.rademacher
        )
        return jnp.sum(estimate.value**2)

    def loop(network: Network, points: Array, keys: Array) -> Array:
        vector, loss = of(network, points)
        gradient = jax.grad(loss)

        def product(v: Array) -> Array:
            return v * jax.jvp(gradient, (vector,), (v,))[1]

        products = jax.vmap(product)(case.signs(keys[0], vector.size))
        return jnp.sum(jnp.mean(products, axis=0) ** 2)

    return ours, loop


def compare(
    case: Case, out: int | str, losses: tuple[Loss, Loss]
) -> list[tuple[float, float]]:
    """Times of value, and of value and gradient."""
    network = case.network(out)
    points, keys = case.data()
    times = []
    for wrap in (lambda loss: loss, eqx.filter_value_and_grad):
        ours, loop = (eqx.filter_jit(wrap(loss)) for loss in losses)

        def run(function: Any) -> Any:
            return eqx.filter(function(network, points, keys), eqx.is_array)

        in_turn(lambda: run(ours), lambda: run(loop), 2)  # noqa: B023
        times.append(in_turn(lambda: run(ours), lambda: run(loop), REPEATS))  # noqa: B023
    return times


def main() -> None:
    print(f"Milliseconds, medians of {REPEATS}; ratios are traceax / loop by hand.\n")
    columns = f"{'':>10}{'value':>10}{'loop':>8}{'ratio':>7}{'+ grad':>9}{'loop':>8}"
    print(f"{'points, dimension, probes':<34}{columns}{'ratio':>7}")
    for name, makers, out in (
        ("divergence", divergences, "in"),
        ("flow", flows, "in"),
        ("laplacian", laplacians, "scalar"),
        ("hessian diagonal", hessian_diagonals, "scalar"),
    ):
        for case in CASES:
            size = case.dimension if out == "in" else out
            (mine, other), (mine_too, other_too) = compare(case, size, makers(case))
            label = f"{name:<18}{case.num_points:>5},{case.dimension:>4},"
            label += f"{case.num_probes:>3}"
            row = f"{mine:>10.2f}{other:>8.2f}{mine / other:>7.2f}"
            row += f"{mine_too:>9.2f}{other_too:>8.2f}{mine_too / other_too:>7.2f}"
            print(f"{label:<44}{row}")


if __name__ == "__main__":
    main()
