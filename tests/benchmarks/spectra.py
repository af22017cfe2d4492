"""Functions of matrices over spectra of all kinds: errors, and error bars.

`python -m tests.benchmarks.spectra [--matvecs 240] [--keys 20] [--shape WIDTH DEPTH]
[--diagonal | --single] [NAME ...]`, from the root of the repository; float64, some ten
minutes. For each function of a spectrum:

- *error*: of `function_trace`, relative, root mean square over the keys;
- *slope*: the same of its derivative in c at c = 0, of A + c I;
- *slq*: the error of `slq_trace` with the same matvecs, the best of three numbers of steps;
- *z*: the error over the root mean square of the standard errors, honest from 0.5 to 1.1;
- *held*: the share of keys whose `interval(0.95)` holds the truth.

Probes are rotation-invariant, so operators are diagonal: what they do depends on the
spectrum alone. Operators without negative eigenvalues are tagged so. `--shape` overrules
how `function_trace` spends its matvecs: so its shapes were chosen.

`--diagonal`: the same of `function_diagonal`, over all entries, the eigenvectors random;
beside it, in the place of *slq*, `xdiag` of f(A) by Lanczos of as many steps.

`--single`: `function_trace`, and `slq_trace` with 20 steps, of float32 matrices with random
eigenvectors. *double* is the error of the same runs in float64. The truth is computed from
the rounded matrix.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import networkx
import numpy as np
from jaxtyping import Array, Float

import traceax as tx
from traceax._estimators.call import begin
from traceax._functions.arguments import subject_of
from traceax._functions.function_trace import block_trace
from traceax._quadrature.block_quadrature import Shape, shape_for
from traceax._quadrature.dense import FunctionMap
from traceax._quadrature.scalar import scalar_function

N = 600
STEPS = (8, 15, 30)
Spectrum = Float[np.ndarray, " n"]


class Case(NamedTuple):
    spectrum: Spectrum
    fn: Callable[[Array], Array]


def power(exponent: float) -> Callable[[Array], Array]:
    def fn(x: Array) -> Array:
        return jnp.where(x > 0, jnp.where(x > 0, x, 1) ** exponent, 0)

    return fn


def log(shift: float) -> Callable[[Array], Array]:
    return lambda x: jnp.log(x + shift)


def kernel(fn: Callable[[Any], Any], n: int, dimension: int) -> Spectrum:
    points = np.random.default_rng(0).random((n, dimension))
    distances = np.sqrt(((points[:, None] - points) ** 2).sum(-1))
    return np.maximum(np.linalg.eigvalsh(np.asarray(fn(distances))), 0)


def gaussian(length: float) -> Callable[[Any], Any]:
    return lambda distances: np.exp(-(distances**2) / (2 * length**2))


def decays() -> dict[str, Case]:
    i = np.arange(1, N + 1.0)
    return {
        "sqrt, i^-2": Case(i**-2, power(0.5)),
        "1/(x + .05), 1/i": Case(1 / i, lambda x: 1 / (x + 0.05)),
        "x/(x + .01), i^-1.5": Case(i**-1.5, lambda x: x / (x + 0.01)),
        "log(1 + x), .9^i": Case(0.9**i, jnp.log1p),
        "|x|, +- 1/i": Case((-1) ** i / i, jnp.abs),
        "-x log x, .97^i": Case(0.97**i, lambda x: -x * jnp.log(jnp.maximum(x, 1e-300))),
        "log(x + 1e-5), 1/i": Case(1 / i, log(1e-5)),
        "log(x + 1e-6), i^-2": Case(i**-2, log(1e-6)),
        "x^2, 1/i": Case(1 / i, power(2)),
        "x^2, exp(-i/40)": Case(np.exp(-i / 40), power(2)),
        "x, .9^i": Case(0.9**i, lambda x: x),
    }


def kernels() -> dict[str, Case]:
    matern = kernel(lambda distances: np.exp(-distances / 0.5), 800, 3)
    return {
        "log, Matern 3-d + 1e-2": Case(matern, log(1e-2)),
        "log, Gauss 6-d + 1e-2": Case(kernel(gaussian(0.5), 800, 6), log(1e-2)),
        "log, Gauss 2-d + 1e-4": Case(kernel(gaussian(0.2), N, 2), log(1e-4)),
    }


def graphs() -> dict[str, Case]:
    graph = networkx.barabasi_albert_graph(N, 3, seed=1)
    adjacency = np.linalg.eigvalsh(networkx.to_numpy_array(graph))
    laplacian = np.linalg.eigvalsh(networkx.laplacian_matrix(graph).toarray())
    i = np.arange(1, N + 1.0)
    star = np.append(np.zeros(N - 2), [-((N - 1) ** 0.5), (N - 1) ** 0.5])
    return {
        "exp, power-law graph": Case(adjacency, jnp.exp),
        "x^3, power-law graph": Case(adjacency, lambda x: x**3),
        "log(L + .01), its Laplacian": Case(np.maximum(laplacian, 0), log(1e-2)),
        "exp, path": Case(2 * np.cos(np.pi * i / (N + 1)), jnp.exp),
        "sqrt, path's Laplacian": Case(2 - 2 * np.cos(np.pi * (i - 1) / N), power(0.5)),
        "exp, star": Case(star, jnp.exp),
    }


def tortures() -> dict[str, Case]:
    i = np.arange(1, N + 1.0)
    rng = np.random.default_rng(0)
    steps = {
        f"{name}, {count} ones": Case(np.where(i <= count, 1, 1e-3), fn)
        for name, count, fn in (
            ("exp", 16, jnp.exp),
            ("exp", 24, jnp.exp),
            ("log", 192, jnp.log),
            ("log", 240, jnp.log),
        )
    }
    clusters = np.where(i <= N // 2, 1 + 0.01 * rng.random(N), 1e-3 + 1e-4 * rng.random(N))
    rank = np.append([1000.0, 200, 30, 4, 2], np.ones(N - 5))
    return steps | {
        "exp(-x), semicircle": Case(
            2 * np.cos(np.pi * (i - 0.5) / N), lambda x: jnp.exp(-x)
        ),
        "exp, uniform": Case(i / N, jnp.exp),
        "tanh(3 x) + 1/2, symmetric": Case(
            np.linspace(-3, 3, N), lambda x: jnp.tanh(3 * x) + 0.5
        ),
        "log, two clusters": Case(clusters, jnp.log),
        "log, heavy tail": Case(1 / rng.random(N) ** 1.5 + 0.1, jnp.log),
        "log, geometric 1e-8": Case(np.geomspace(1, 1e-8, N), jnp.log),
        "log, rank 5 + 1": Case(rank, jnp.log),
    }


def forced(shape: Shape, operator: Any, fn: Any, key: Any) -> tx.Estimate:
    converted, structure = scalar_function("function_trace", fn, jnp.dtype(float))
    call = begin("function_trace", operator, key, shape.num_matvecs)
    subject = subject_of(call.operator, converted)
    return block_trace(call, subject, structure, shape, None)


def errors(case: Case, estimator: Callable[..., tx.Estimate], keys: Array) -> Array:
    """Value, standard error, ends of the interval, and slope for each key."""
    diagonal = jnp.asarray(case.spectrum, float)
    structure = jax.ShapeDtypeStruct(diagonal.shape, diagonal.dtype)
    tags = lx.positive_semidefinite_tag if np.min(case.spectrum) >= 0 else ()

    def shifted(c: Array, key: Array) -> tuple[Array, tx.Estimate]:
        operator = lx.FunctionLinearOperator(lambda v: (diagonal + c) * v, structure, tags)
        result = estimator(operator, case.fn, key)
        return result.value, result

    def one(key: Array) -> Array:
        slope, result = jax.grad(shifted, has_aux=True)(jnp.zeros(()), key)
        ends = result.interval(0.95)
        return jnp.stack([result.value, result.standard_error, *ends, slope])

    return jax.jit(partial(jax.lax.map, one))(keys).T


def row(case: Case, mine: Callable[..., tx.Estimate], budget: int, keys: Array) -> str:
    nodes = jnp.asarray(case.spectrum, float)
    truth, steep = (jnp.sum(jax.vmap(f)(nodes)) for f in (case.fn, jax.grad(case.fn)))
    value, claimed, low, high, slope = errors(case, mine, keys)
    rms, off = (
        jnp.sqrt(jnp.mean((x - t) ** 2)) for x, t in ((value, truth), (slope, steep))
    )
    others = []
    for steps in STEPS:
        counts = {"num_probes": max(budget // steps, 1), "num_steps": steps}
        other = errors(case, partial(tx.slq_trace, **counts), keys[:20])[0]
        others.append(jnp.sqrt(jnp.mean((other - truth) ** 2)))
    held = jnp.mean((low <= truth) & (truth <= high))
    plain = jnp.min(jnp.stack(others))
    z = rms / jnp.sqrt(jnp.mean(claimed**2))
    sizes = f"{rms / abs(truth):>10.1e}{off / abs(steep):>10.1e}{plain / abs(truth):>10.1e}"
    return f"{sizes}{z:>7.2f}{held:>7.1%}"


def with_vectors(spectrum: Spectrum) -> tuple[Array, Array]:
    n = spectrum.shape[0]
    vectors = np.linalg.qr(np.random.default_rng(1).normal(size=(n, n)))[0]
    return jnp.asarray((vectors * spectrum) @ vectors.T), jnp.asarray(vectors)


def single_row(case: Case, budget: int, keys: Array) -> str:
    stored = with_vectors(case.spectrum)[0].astype(jnp.float32)
    truth = jnp.sum(jax.vmap(case.fn)(jnp.linalg.eigvalsh(stored.astype(float))))
    tags = lx.positive_semidefinite_tag if np.min(case.spectrum) >= 0 else ()

    def run(estimator: Callable[..., tx.Estimate], dtype: Any) -> tuple[Array, ...]:
        matrix = stored.astype(dtype)
        structure = jax.ShapeDtypeStruct(matrix.shape[1:], dtype)

        def one(key: Array) -> tuple[Array, ...]:
            operator = lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tags)
            result = estimator(operator, case.fn, key)
            return result.value, result.standard_error, *result.interval(0.95)

        return tuple(x.astype(float) for x in jax.jit(partial(jax.lax.map, one))(keys))

    line = ""
    for estimator in (
        partial(tx.function_trace, num_matvecs=budget),
        partial(tx.slq_trace, num_probes=budget // 20, num_steps=20),
    ):
        double, *_ = run(estimator, float)
        value, claimed, low, high = run(estimator, jnp.float32)
        rms, other = (jnp.sqrt(jnp.mean((x - truth) ** 2)) for x in (value, double))
        z = rms / jnp.sqrt(jnp.mean(claimed**2))
        held = jnp.mean((low <= truth) & (truth <= high))
        line += f"{rms / abs(truth):>10.1e}{other / abs(truth):>10.1e}{z:>7.2f}{held:>7.1%}"
    return line


def diagonal_row(case: Case, shape: Shape, keys: Array) -> str:
    matrix, vectors = with_vectors(case.spectrum)
    truth = vectors**2 @ jax.vmap(case.fn)(jnp.asarray(case.spectrum, float))
    structure = jax.ShapeDtypeStruct(truth.shape, truth.dtype)
    tags = lx.positive_semidefinite_tag if np.min(case.spectrum) >= 0 else ()
    operator = lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tags)
    converted, _ = scalar_function("function_diagonal", case.fn, jnp.dtype(float))
    mapped = FunctionMap(operator, fn=converted, num_steps=shape.depth)
    applied = lx.FunctionLinearOperator(
        lambda v: mapped(v[:, None])[:, 0], structure, lx.symmetric_tag
    )

    def one(key: Array) -> tuple[Array, ...]:
        result = tx.function_diagonal(
            operator, case.fn, key, num_probes=shape.width, num_steps=shape.depth
        )
        plain = tx.xdiag(applied, key, shape.width).value
        return result.value, result.standard_error, *result.interval(0.95), plain

    run = jax.jit(partial(jax.lax.map, one))(keys)
    value, claimed, low, high, plain = run
    rms, other = (jnp.sqrt(jnp.mean((x - truth) ** 2)) for x in (value, plain))
    size = jnp.sqrt(jnp.mean(truth**2))
    z = rms / jnp.sqrt(jnp.mean(claimed**2))
    held = jnp.mean((low <= truth) & (truth <= high))
    return f"{rms / size:>10.1e}{other / size:>10.1e}{z:>7.2f}{held:>7.1%}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--matvecs", type=int, default=240)
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--shape", type=int, nargs=2)
    parser.add_argument("--diagonal", action="store_true")
    parser.add_argument("--single", action="store_true")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    chosen = Shape(*options.shape) if options.shape else shape_for(options.matvecs)
    print(f"{chosen.width} x {chosen.depth}, {chosen.inner}; {options.keys} keys.\n")
    beside = ["xdiag"] if options.diagonal else ["slope", "slq"]
    beside = ["double"] if options.single else beside
    columns = "".join(f"{word:>10}" for word in ["error", *beside])
    columns += f"{'z':>7}{'held':>7}"
    if options.single:
        print(f"{'':<30}{'function_trace':>34}{'slq_trace':>34}")
        columns *= 2
    print(f"{'':<30}{columns}")
    for name, case in (kernels() | graphs() | decays() | tortures()).items():
        if not options.names or any(part in name for part in options.names):
            seeds = jax.random.split(jax.random.key(7), options.keys)
            if options.diagonal:
                line = diagonal_row(case, chosen, seeds)
            elif options.single:
                line = single_row(case, options.matvecs, seeds)
            else:
                line = row(case, partial(forced, chosen), options.matvecs, seeds)
            print(f"{name:<30}{line}", flush=True)
