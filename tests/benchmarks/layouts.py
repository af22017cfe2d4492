"""How long a block takes to go through an operator, by the layout and the operator.

`python -m tests.benchmarks.layouts [--dtype float32] [--sizes 1000 ...] [NAME ...]`, from
the root of the repository, on a machine that does nothing else; a quarter of an hour.

Blocks come and go as columns, n x k, so that transpositions count. For each operator, size
and number of columns: the time of the best layout, and that of all as multiples of it, in
turn, medians; `chosen` is what traceax takes, `pure` a `jax.lax.map` over rows that are
rows already.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from tests.benchmarks.speed import seconds
from traceax._core.layout import Layout, through

COLUMNS, ENTRIES, REPEATS = (5, 20, 50, 100), 10_000_000, 11
Apply = Callable[[Any], Any]


def of_vectors(n: int, dtype: Any) -> Iterator[tuple[str, Apply]]:
    side, normal, key = int(n**0.5), jax.random.normal, jax.random.key(0)
    square = side**2
    numbers, symbol = normal(key, (n,), dtype), jnp.linspace(1, 2, n // 2 + 1, dtype=dtype)

    def rolled(v: Any) -> Any:
        return 4 * v - sum(jnp.roll(v, s) for s in (1, -1, side, -side))

    def padded(v: Any) -> Any:
        grid = v.reshape(side, -1)
        wide = jnp.pad(grid, 1)
        beside = wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:]
        return (4 * grid - beside).ravel()

    draw = np.random.default_rng(0)
    rows, columns = np.sort(draw.integers(0, n, 5 * n)), draw.integers(0, n, 5 * n)
    entries = jnp.asarray(draw.normal(size=5 * n), dtype)
    indices = jnp.asarray(np.stack([rows, columns], axis=1))
    matrix = sparse.BCOO((entries, indices), shape=(n, n))
    low, small = normal(key, (n, 20), dtype), normal(key, (side, side), dtype)

    def kronecker(v: Any) -> Any:
        turned = small @ v[:square].reshape(side, side) @ small.T
        return jnp.concatenate([turned.ravel(), v[square:]])

    yield "elementwise", lambda v: numbers * v
    yield "rolled", rolled
    if n % side == 0:
        yield "padded", padded
    yield "fft", lambda v: jnp.fft.irfft(jnp.fft.rfft(v) * symbol, n)
    yield "bcoo", lambda v: matrix @ v
    yield "segments", lambda v: jax.ops.segment_sum(entries * v[columns], rows, n)
    yield "cumulative", jnp.cumsum
    yield "low rank", lambda v: numbers * v + low @ (low.T @ v)
    yield "kronecker", kronecker
    solve = partial(jax.scipy.sparse.linalg.cg, lambda x: 5 * x - rolled(x), maxiter=10)
    yield "solved by CG", lambda v: solve(v)[0]


def of_networks(n: int, dtype: Any) -> Iterator[tuple[str, Apply]]:
    """The Jacobian of a field of n dimensions, and the Hessian of a loss of n weights."""
    normal, key = jax.random.normal, jax.random.key(0)
    inner, outer = normal(key, (64, n), dtype) / n**0.5, normal(key, (n, 64), dtype) / 8
    width = int(n**0.5) // 2
    data, point = normal(key, (32, n // width - 1), dtype), normal(key, (n,), dtype) / 9

    def field(x: Any) -> Any:
        return outer @ jnp.tanh(inner @ x)

    def loss(weights: Any) -> Any:
        first = weights[: data.shape[1] * width].reshape(-1, width)
        return jnp.mean((jnp.tanh(data @ first) @ weights[-width:]) ** 2)

    yield "Jacobian", lambda v: jax.jvp(field, (point,), (v,))[1]
    yield "Hessian", lambda v: jax.jvp(jax.grad(loss), (point,), (v,))[1]


def race(apply: Apply, block: Any) -> str:
    def in_layout(layout: Layout | None) -> Any:
        return jax.jit(lambda b: through(apply, b, layout))

    runs = {layout.value: (in_layout(layout), block) for layout in Layout}
    runs["chosen"] = in_layout(None), block
    for size in (4, 8):
        batched = partial(jax.lax.map, apply, batch_size=size)
        runs[f"loop by {size}"] = jax.jit(lambda b, f=batched: f(b.T).T), block
    runs["pure"] = jax.jit(partial(jax.lax.map, apply)), jnp.array(block.T)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, (run, argument) in runs.items():
            times[name].append(seconds(lambda: run(argument)))  # noqa: B023
    medians = {name: median(taken[1:]) for name, taken in times.items()}
    best = min(medians.values())
    row = "".join(f"{taken / best:>10.2f}" for taken in medians.values())
    return f"{1e3 * best:>10.3f}{row}"


def main(names: list[str], sizes: list[int], dtype: Any) -> None:
    heads = [*(layout.value for layout in Layout), "chosen", "by 4", "by 8", "pure"]
    print(f"{'':<14}{'n':>9}{'k':>5}{'best, ms':>10}" + "".join(f"{h:>10}" for h in heads))
    for n in sizes:
        for name, apply in (*of_vectors(n, dtype), *of_networks(n, dtype)):
            for k in COLUMNS:
                if n * k <= ENTRIES and (not names or name in names):
                    block = jax.random.normal(jax.random.key(1), (n, k), dtype)
                    print(f"{name:<14}{n:>9}{k:>5}{race(apply, block)}", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dtype", default="float32", type=jnp.dtype)
    parser.add_argument(
        "--sizes", nargs="*", type=int, default=[1000, 10_000, 100_000, 200_000]
    )
    given = parser.parse_args()
    main(given.names, given.sizes, given.dtype)
