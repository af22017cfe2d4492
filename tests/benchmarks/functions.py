"""Functions of matrices: speed against matfree, and what leaving probes out gains over
quadrature.

`python -m tests.benchmarks.functions [part ...]`, from the root of the repository; float64.
Without parts all of them, of two to four minutes each:

- *speed*: log det of a Gaussian kernel with noise, n = 2000, by quadrature from 10 probes
  with either library: the value, the matrix being an argument; value and gradient in the
  logarithms of length scale and noise, the matrix being built from them once ("matrix"), or
  anew in every matvec ("matrix-free"). Jitted, warmed, in turn. A ratio above 1 says that
  traceax is faster.
- *compile*: how long the same take to be traced and compiled.
- *gradients*: the errors of those gradients, both libraries having the same probes.
- *logdet*: `logdet` against `slq_trace` at equal matvecs, n = 600, the latter with whatever
  number of steps is best for the number in question. *held* is the share of the keys whose
  `interval(0.95)` holds the value.
- *conditioned*: the same for condition numbers of 4e4, n = 2000.
- *graphs*: tr exp of the adjacency matrix of a graph with a power law of degrees, n = 5000,
  `function_trace` against `slq_trace`.

Errors are relative, root mean squares over the keys.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import networkx
import numpy as np
from jax.experimental import sparse
from jaxtyping import Array, Float, PRNGKeyArray
from matfree import decomp, funm, stochtrace

import traceax as tx
from tests.benchmarks.accuracy import Run
from tests.benchmarks.probing import as_function
from tests.benchmarks.scores import SEMIDEFINITE, Matrix, one_by_one
from tests.benchmarks.speed import Thunk, compilation, in_turn

N, NUM_PROBES = 2000, 10
RACED = (0.3, 1e-2)
REPEATS = 7
SPLITS = (8, 12, 15, 20, 30, 40, 60)

Points = Float[Array, "n d"]
Theta = Float[Array, "2"]  # the logarithms of length scale and noise
Numbers = Float[Array, "3"]  # a log-determinant and its gradient


def uniform(n: int, dimension: int) -> Points:
    return jax.random.uniform(jax.random.key(0), (n, dimension))


def squared_distances(points: Points) -> Matrix:
    return jnp.sum((points[:, None] - points) ** 2, axis=-1)


def gaussian(theta: Theta, distances: Matrix) -> Matrix:
    return jnp.exp(-distances / (2 * jnp.exp(2 * theta[0])))


def with_noise(theta: Theta, distances: Matrix) -> Matrix:
    noise = jnp.exp(theta[1]) * jnp.eye(distances.shape[0])
    return gaussian(theta, distances) + noise


def kernel(theta: Theta, points: Points) -> Matrix:
    return with_noise(theta, squared_distances(points))


def exact(theta: Theta, distances: Matrix) -> Numbers:
    def logdet(theta: Theta) -> Float[Array, ""]:
        return jnp.linalg.slogdet(with_noise(theta, distances))[1]

    value, gradient = jax.value_and_grad(logdet)(theta)
    return jnp.array([value, *gradient])


def rms(runs: Array, truth: Numbers) -> Numbers:
    return jnp.sqrt(jnp.mean((runs / truth - 1) ** 2, axis=0))


def quadrature(num_matvecs: int, steps: int) -> Callable[..., tx.Estimate]:
    return partial(tx.slq_trace, num_probes=num_matvecs // steps, num_steps=steps)


# Of either library the same function.
Pair = tuple[Callable[..., Any], Callable[..., Any]]


def of_matfree(steps: int, *, paired: bool = False) -> Callable[..., Array]:
    sampler = stochtrace.sampler_sphere(jnp.zeros(N), num=NUM_PROBES)
    if paired:  # what traceax draws from the same key
        structure = jax.ShapeDtypeStruct((N,), jnp.float64)
        sampler = one_by_one(tx.sphere, structure, NUM_PROBES)
    tridiagonal = decomp.tridiag_sym(steps, reortho="full", custom_vjp=True)
    integrand = funm.monte_carlo_funm_sym_logdet(tridiagonal)
    return stochtrace.estimator_monte_carlo(integrand, sampler)


def of_matrix(steps: int, *, paired: bool = False) -> Pair:
    mine = quadrature(NUM_PROBES * steps, steps)
    other = of_matfree(steps, paired=paired)

    def ours(matrix: Matrix, key: PRNGKeyArray) -> Array:
        return mine(lx.MatrixLinearOperator(matrix, SEMIDEFINITE), jnp.log, key).value

    def theirs(matrix: Matrix, key: PRNGKeyArray) -> Array:
        return other(lambda vector, matrix: matrix @ vector, key, matrix)

    return ours, theirs


def of_theta(steps: int, *, paired: bool = False) -> Pair:
    """Value and gradient, by one matrix."""

    def built(function: Callable[..., Array]) -> Callable[..., Any]:
        def value(theta: Theta, points: Points, key: PRNGKeyArray) -> Array:
            return function(kernel(theta, points), key)

        return jax.value_and_grad(value)

    ours, theirs = of_matrix(steps, paired=paired)
    return built(ours), built(theirs)


def of_matvec(steps: int) -> Pair:
    """Value and gradient, by a matrix anew in every matvec."""
    mine, other = quadrature(NUM_PROBES * steps, steps), of_matfree(steps)
    structure = jax.ShapeDtypeStruct((N,), jnp.float64)

    def ours(theta: Theta, points: Points, key: PRNGKeyArray) -> Array:
        operator = lx.FunctionLinearOperator(
            lambda v: kernel(theta, points) @ v, structure, SEMIDEFINITE
        )
        return mine(operator, jnp.log, key).value

    def theirs(theta: Theta, points: Points, key: PRNGKeyArray) -> Array:
        return other(lambda v, theta: kernel(theta, points) @ v, key, theta)

    return jax.value_and_grad(ours), jax.value_and_grad(theirs)


class Race(NamedTuple):
    """What is timed, on what, and how many times faster traceax is meant to be."""

    label: str
    pair: Pair
    arguments: tuple[Array, ...]
    repeats: int
    aim: float


def races(*steps: int) -> Iterator[Race]:
    theta, points = jnp.log(jnp.array(RACED)), uniform(N, 2)
    key, matrix = jax.random.key(1), kernel(theta, points)
    for m in steps:
        yield Race(f"value, {m} steps", of_matrix(m), (matrix, key), REPEATS, 1)
    rest = (theta, points, key)
    for m in steps:
        yield Race(f"gradient, matrix, {m} steps", of_theta(m), rest, REPEATS, 5)
    yield Race("gradient, matrix-free, 20 steps", of_matvec(20), rest, REPEATS, 20)


def print_races(timed: Callable[..., Thunk], entries: Iterable[Race]) -> None:
    print(f"{'milliseconds':<34}{'traceax':>10}{'matfree':>10}{'ratio':>8}{'aim':>7}")
    for label, pair, arguments, repeats, aim in entries:
        mine, other = (timed(function, *arguments) for function in pair)
        mine, other = in_turn(mine, other, repeats)
        ratio = (
            f"{other / mine:>8.2f}{f'>= {aim:.3g}':>7}{'' if other >= aim * mine else ' !'}"
        )
        print(f"{label:<34}{mine:>10.1f}{other:>10.1f}{ratio}")


def warmed(function: Callable[..., Array], *arguments: Array) -> Thunk:
    thunk = partial(jax.jit(function), *arguments)
    jax.block_until_ready(thunk())
    return thunk


def speed() -> None:
    print_races(warmed, races(20, 40))


def compile_() -> None:
    print_races(compilation, (race._replace(aim=1) for race in races(20)))


def gradients() -> None:
    theta, points = jnp.log(jnp.array(RACED)), uniform(N, 2)
    keys = jax.random.split(jax.random.key(2), 10)
    truth = exact(theta, squared_distances(points))
    print(f"The truth {truth}, {keys.size} keys. In brackets the error of the mean.\n")
    print(f"{'':<18}" + "".join(f"{x:>23}" for x in ("value", "log length", "log noise")))
    for steps in (20, 40):
        pair = of_theta(steps, paired=True)
        for name, function in zip(("traceax", "matfree"), pair, strict=True):
            run = jax.jit(function)
            outcomes = [run(theta, points, key) for key in keys]
            runs = jnp.stack([jnp.array([value, *slopes]) for value, slopes in outcomes])
            bias = jnp.mean(runs, axis=0) / truth - 1
            pairs = zip(rms(runs, truth), bias, strict=True)
            row = "".join(f"{error:>11.1e} ({mean:>+9.1e})" for error, mean in pairs)
            print(f"{f'{name}, {steps} steps':<18}{row}")


@cache
def logdets(num_matvecs: int, steps: int | None) -> Callable[..., tuple[Run, Theta]]:
    """Over keys by `logdet`, or by `slq_trace` with so many steps; and the gradient."""

    def value(theta: Theta, distances: Matrix, key: PRNGKeyArray) -> tuple[Array, Run]:
        if steps is None:
            operator = as_function(gaussian(theta, distances))
            shift = jnp.exp(theta[1])
            result = tx.logdet(operator, key, num_matvecs, shift=shift)
        else:
            operator = as_function(with_noise(theta, distances))
            result = quadrature(num_matvecs, steps)(operator, jnp.log, key)
        fixed = jax.lax.stop_gradient(result)
        return result.value, Run(fixed.value, *fixed.interval(0.95))

    def one(theta: Theta, distances: Matrix, key: PRNGKeyArray) -> tuple[Run, Theta]:
        gradient, run = jax.grad(value, has_aux=True)(theta, distances, key)
        return run, gradient

    return jax.jit(lambda *of: jax.lax.map(partial(one, *of[:2]), of[2]))


class Problem(NamedTuple):
    n: int
    dimension: int
    length: float
    noise: float


SMALL = ((2, 0.3, 1e-2), (4, 0.7, 1e-2), (2, 0.2, 1e-4), (6, 0.5, 1e-2))
PROBLEMS = tuple(Problem(600, *rest) for rest in SMALL)
CONDITIONED = (Problem(N, 2, 0.3, 1.74e-2), Problem(N, 2, 0.2, 9.7e-3))


def compare(problems: tuple[Problem, ...], num_matvecs: int, num_keys: int) -> None:
    keys = jax.random.split(jax.random.key(3), num_keys)
    print(f"{num_matvecs} matvecs, {num_keys} keys. In brackets the steps of each probe.\n")
    headings = ("value", "gradient, log length", "gradient, log noise")
    print(f"{'':<46}" + "".join(f"{heading:>25}" for heading in headings))
    print(
        f"{'n':>4}{'d':>3}{'length':>7}{'noise':>9}{'condition':>10}{'held':>6}{'factor':>7}"
        + f"{'logdet':>10}{'slq_trace':>15}" * 3
    )
    for problem in problems:
        theta = jnp.log(jnp.array([problem.length, problem.noise]))
        distances = squared_distances(uniform(problem.n, problem.dimension))
        spectrum = jnp.linalg.eigvalsh(with_noise(theta, distances))
        truth = exact(theta, distances)

        functions = [logdets(num_matvecs, steps) for steps in (None, *SPLITS)]
        runs = [function(theta, distances, keys) for function in functions]
        numbers = [jnp.column_stack([run.value, slopes]) for run, slopes in runs]
        mine, *others = (np.array(rms(run, truth)) for run in numbers)
        others, held = np.array(others), runs[0][0].coverage(truth[0])
        factor = np.min(np.min(others, axis=0) / mine)
        row = (
            f"{problem.n:>4}{problem.dimension:>3}{problem.length:>7}{problem.noise:>9.1e}"
            f"{spectrum[-1] / spectrum[0]:>10.1e}{held:>6.0%}{factor:>7.0e}"
        )
        for error, column in zip(mine, others.T, strict=True):
            best = np.argmin(column)
            row += f"{error:>10.1e}{column[best]:>10.1e} ({SPLITS[best]:>2})"
        print(row)


def graphs(num_matvecs: int = 800, num_keys: int = 10) -> None:
    graph = networkx.powerlaw_cluster_graph(5000, 5, 0.5, seed=1)
    entries = networkx.to_scipy_sparse_array(graph, dtype=np.float64, format="csr")
    spectrum = np.linalg.eigvalsh(entries.toarray())
    truth = jnp.asarray(np.sum(np.exp(spectrum)))
    product = sparse.BCOO.from_scipy_sparse(entries)
    structure = jax.ShapeDtypeStruct(entries.shape[1:], product.dtype)
    operator = lx.FunctionLinearOperator(lambda v: product @ v, structure, lx.symmetric_tag)

    estimators = {f"slq_trace, {m} steps": quadrature(num_matvecs, m) for m in SPLITS}
    estimators["function_trace"] = partial(tx.function_trace, num_matvecs=num_matvecs)
    top = ", ".join(f"{value:.1f}" for value in spectrum[:-4:-1])
    print(f"n = 5000, {entries.nnz} entries, eigenvalues {top}, ...; trace {truth:.8e}.")
    print(f"{num_matvecs} matvecs, {num_keys} keys.\n\n{'':<22}{'error':>9}{'held':>6}")
    for name, estimator in estimators.items():

        def one(
            key: PRNGKeyArray, estimator: Callable[..., tx.Estimate] = estimator
        ) -> Run:
            result = estimator(operator, jnp.exp, key)
            return Run(result.value, *result.interval(0.95))

        keys = jax.random.split(jax.random.key(4), num_keys)
        run = jax.jit(partial(jax.lax.map, one))(keys)
        print(f"{name:<22}{run.rms(truth):>9.1e}{run.coverage(truth):>6.0%}")


PARTS = {
    "speed": speed,
    "compile": compile_,
    "gradients": gradients,
    "logdet": partial(compare, PROBLEMS, 240, 40),
    "conditioned": partial(compare, CONDITIONED, 300, 10),
    "graphs": graphs,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}")
    jax.config.update("jax_enable_x64", True)
    for part in parser.parse_args().parts or PARTS:
        print(f"{part}: ", end="")
        PARTS[part]()
        print()
