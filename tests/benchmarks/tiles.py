"""A likelihood whose kernel is never stored: time, memory, error.

`python -m tests.benchmarks.tiles [--points 20000]`, from the root of the repository.

The recipe of the guide, float64, 240 matvecs: the kernel is made 200 rows at a time, in the
value and again in the gradient by log length and log noise. Seconds of products with
one vector and with 16 in `jax.vmap`, and of value and gradient: a first call, which
compiles, and a second. Peak memory of the process. Up to 5000 points also errors beside a
Cholesky factorisation, of the gradient relative and in the Euclidean norm.
"""

import argparse
import resource
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray

import traceax as tx
from tests.benchmarks.speed import seconds

ROWS, DENSE = 200, 5000  # in a tile; points up to which the truth is computed
Vector = Float[Array, " n"]


def kernel(points: Float[Array, "n d"], length: Array) -> lx.FunctionLinearOperator:
    @jax.checkpoint
    def row_times(x: Float[Array, " d"], v: Vector) -> Array:
        squares = sum((a - b) ** 2 for a, b in zip(x, points.T, strict=True))
        return jnp.exp(-squares / (2 * length**2)) @ v

    def times(v: Vector) -> Vector:
        return jax.lax.map(lambda x: row_times(x, v), points, batch_size=ROWS)

    structure = jax.ShapeDtypeStruct(points.shape[:1], points.dtype)
    return lx.FunctionLinearOperator(times, structure, lx.positive_semidefinite_tag)


def nll(theta: Array, points: Array, y: Vector, key: PRNGKeyArray) -> Array:
    length, noise = jnp.exp(theta)
    fit = tx.inv_quad_logdet(kernel(points, length), y, key, 240, shift=noise)
    return (fit.inv_quad.value + fit.logdet.value + y.size * jnp.log(2 * jnp.pi)) / 2


def dense(theta: Array, points: Array, y: Vector) -> Array:
    matrix = jax.vmap(kernel(points, jnp.exp(theta[0])).mv)(jnp.eye(y.size))
    covariance, zero = matrix + jnp.exp(theta[1]) * jnp.eye(y.size), jnp.zeros_like(y)
    return -jnp.asarray(jax.scipy.stats.multivariate_normal.logpdf(y, zero, covariance))


def main(num_points: int) -> None:
    jax.config.update("jax_enable_x64", True)
    keys = jax.random.split(jax.random.key(0), 3)
    points = jax.random.uniform(keys[0], (num_points, 2))
    block = jax.random.normal(keys[1], (16, num_points))
    y = jnp.sin(6 * points[:, 0]) * jnp.cos(4 * points[:, 1]) + 0.1 * block[0]
    theta = jnp.log(jnp.array([0.1, 0.01]))  # length, noise
    product = jax.jit(jax.vmap(kernel(points, jnp.exp(theta[0])).mv))
    step = partial(jax.jit(jax.value_and_grad(nll)), theta, points, y)
    print(f"n = {num_points}, {ROWS} rows at a time.\n\n{'seconds':<20}first  second")
    calls = {f"vectors: {len(v)}": partial(product, v) for v in (block[:1], block)}
    calls["value and gradient"] = partial(step, keys[2])
    for name, call in calls.items():
        print(f"{name:<18}{seconds(call):>7.2f}{seconds(call):>8.2f}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{'peak/GB':<18}{peak:>7.2f}")
    if num_points <= DENSE:
        value, slopes = step(keys[2])
        exact, truth = jax.jit(jax.value_and_grad(dense))(theta, points, y)
        off = jnp.linalg.norm(slopes - truth) / jnp.linalg.norm(truth)
        print(f"errors: value {abs(value - exact):.1e} of {exact:.1f}, gradient {off:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=20_000)
    main(parser.parse_args().points)
