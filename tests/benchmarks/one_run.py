"""Answers from a run that is kept, and the weights of separated eigenvalues in densities.

`python -m tests.benchmarks.one_run [--keys 40]`, from the root of the repository; three
minutes.

- *answers*: a kernel matrix in a plain function, n = 2000, float32, 240 matvecs, compiled.
  Seconds of the run alone, and then of each answer: the first call, which compiles, a later
  one, and one without a run; matvecs of both answers together, as a callback counts them,
  over those of one; and the size of the run beside that of the matrix.
- *weights*: spectra with a bulk and six separated eigenvalues, n = 400, 240 matvecs, in a
  random basis, float64, Gaussians of the width .1. The root mean square over keys of the
  relative errors of the six weights, the smallest and the largest; that of the errors in
  the bulk; the share of points and keys whose `interval(.95)` contains the truth in the
  bulk, the least share of a point, and the share for the six; and seconds a key.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx

KEY = jax.random.key(0)
PSD = lx.positive_semidefinite_tag
OUTLIERS = np.array([2.0, 3.0, 4.0, 5.5, 7.0, 10.0])


def inverse(x: Any) -> Any:
    return 1 / (x + 0.01)


ANSWERS: dict[str, Callable[..., tx.Estimate]] = {
    "logdet": lambda *of: tx.logdet(*of, shift=0.01),
    "function_trace": lambda a, *of: tx.function_trace(a, jnp.sqrt, *of),
    "function_diagonal": lambda a, *of: tx.function_diagonal(a, inverse, *of),
    "spectral_density": lambda a, *of: tx.spectral_density(a, None, *of),
}


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def answers(n: int = 2000) -> None:
    points = jax.random.uniform(KEY, (n, 3))
    kernel = jnp.exp(-8 * jnp.sum((points[:, None] - points) ** 2, axis=-1))

    def of(matrix: Any) -> lx.FunctionLinearOperator:
        space = jax.eval_shape(lambda: matrix[0])
        return lx.FunctionLinearOperator(lambda v: matrix @ v, space, PSD)

    keep = jax.jit(lambda matrix: tx.krylov(of(matrix), KEY))
    first = seconds(lambda: keep(kernel))
    run = keep(kernel)
    again = min(seconds(lambda: keep(kernel)) for _ in range(3))
    space = size_of(run.run)
    print(
        f"answers, n = {n}, float32, 240 matvecs\n\n{'':<20}{'first/s':>9}{'later/s':>9}",
        end="",
    )
    print(f"{'without a run, first':>22}{'later':>7}")
    print(f"{'krylov':<20}{first:>9.2f}{again:>9.3f}")
    for name, answer in ANSWERS.items():
        kept = jax.jit(answer)
        alone = jax.jit(lambda matrix, answer=answer: answer(of(matrix), KEY))
        times = [seconds(partial(kept, run)) for _ in range(4)]
        others = [seconds(partial(alone, kernel)) for _ in range(4)]
        row = f"{name:<20}{times[0]:>9.2f}{min(times[1:]):>9.3f}"
        print(f"{row}{others[0]:>22.2f}{min(others[1:]):>7.3f}", flush=True)
    print(f"\nthe run has {space / 2**20:.1f} MiB, the matrix {kernel.nbytes / 2**20:.1f}")
    print(f"matvecs of two answers over those of one: {counted(300):.2f}")


def size_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def counted(n: int) -> float:
    matrix, count = np.diag(np.linspace(1, 2, n)).astype(np.float32), [0]

    def product(v: Any) -> Any:
        count[0] += 1
        return matrix @ np.asarray(v)

    def apply(v: Any) -> Any:
        return jax.pure_callback(product, v, v, vmap_method="sequential")

    space = jax.ShapeDtypeStruct((n,), jnp.float32)
    operator = lx.FunctionLinearOperator(apply, space, PSD)
    jax.block_until_ready(tx.logdet(operator, KEY))
    one, count[0] = count[0], 0
    run = tx.krylov(operator, KEY)
    jax.block_until_ready((tx.logdet(run), tx.function_diagonal(run, jnp.log)))
    return count[0] / one


def weights(keys: int, n: int = 400, width: float = 0.1) -> None:
    jax.config.update("jax_enable_x64", True)
    print(f"weights, n = {n}, 240 matvecs, {keys} keys\n\n{'bulk':<18}{'run':<8}", end="")
    print(f"{'weights':<20}{'bulk':>7}{'held':>7}{'least':>7}{'six':>7}{'s':>7}")
    bulk = np.linspace(0, 1, n - 6)
    half = np.append(np.zeros(n // 2), np.linspace(0, 1, n // 2 - 6))
    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(n, n)))[0]
    for name, inner in {"even on [0, 1]": bulk, "half of it at 0": half}.items():
        spectrum = np.append(inner, OUTLIERS)
        matrix = jnp.asarray((basis * spectrum) @ basis.T)
        space = jax.eval_shape(lambda matrix=matrix: matrix[0])
        apply = lambda v, matrix=matrix: matrix @ v  # noqa: E731
        operator = lx.FunctionLinearOperator(apply, space, lx.symmetric_tag)
        grid = jnp.append(jnp.linspace(-0.3, 1.3, 60), OUTLIERS)
        bumps = jnp.exp(-(((grid[:, None] - spectrum) / width) ** 2) / 2)
        truth = jnp.mean(bumps, axis=1) / (width * (2 * jnp.pi) ** 0.5)
        for kind, is_block in (("block", True), ("plain", False)):
            how = {"width": width, "reorthogonalise": is_block}
            one = partial(tx.spectral_density, operator, grid, **how)
            one_by_one = lambda key, one=one: one(key=key)  # noqa: E731
            each = jax.jit(partial(jax.lax.map, one_by_one))
            several = jax.random.split(KEY, keys)
            jax.block_until_ready(each(several))
            spent = seconds(partial(each, several)) / keys
            found = each(several)
            rms = jnp.sqrt(jnp.mean((found.value - truth) ** 2, axis=0))
            of_six, of_bulk = rms[-6:] / truth[-6:], jnp.mean(rms[:-6] ** 2) ** 0.5
            low, high = found.interval(0.95)
            held = jnp.mean((low <= truth) & (truth <= high), axis=0)
            sizes = f"{jnp.min(of_six):.1e} to {jnp.max(of_six):.1e}"
            row = (
                f"{name:<18}{kind:<8}{sizes:<20}{of_bulk:>7.3f}{jnp.mean(held[:-6]):>7.2f}"
            )
            six = jnp.mean(held[-6:])
            print(f"{row}{jnp.min(held[:-6]):>7.2f}{six:>6.2f}{spent:>7.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=40)
    given = parser.parse_args()
    answers()
    print()
    weights(given.keys)
