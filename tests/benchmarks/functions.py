"""Functions of matrices: speed against matfree, and what deflation gains over quadrature.

`python -m tests.benchmarks.functions [part ...]`, from the root of the repository; all in
float64. The parts, of a few minutes each, all of them by default:

- *speed*: log det of a Gaussian kernel with noise, n = 2000 (points in the unit square,
  length scale 0.3, noise 1e-2), by quadrature from 10 probes with either library: the value
  with the matrix for an argument; value and gradient in the logarithms of length scale and
  noise, with a matrix built once ("matrix"), and with one built anew in every matvec
  ("matrix-free"). Jitted, warmed, in turn. A ratio above 1 says that traceax is faster.
- *compile*: how long the same take to be traced and compiled, 20 steps.
- *gradients*: the errors of those gradients, both libraries having the same probes.
- *logdet*: `logdet` against `slq_trace` at equal matvecs, n = 600, the latter with that
  division of the budget into probes and steps, of seven, that is best for the number in
  question. *held* is the share of the keys whose `interval(0.95)` holds the value.
- *conditioned*: the same for condition numbers of 4e4, n = 2000, 300 matvecs.
- *graphs*: tr exp of the adjacency matrix of a graph with a power law of degrees, n = 5000,
  `function_trace` against `slq_trace`.

All errors are relative, root mean squares over the keys.
"""

import argparse
from collections.abc import Callable, Iterator
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
from tests.benchmarks.scores import SEMIDEFINITE, Matrix
from tests.benchmarks.speed import compilation, in_turn

N, NUM_PROBES, STEPS = 2000, 10, (20, 40)
REPEATS, SLOW_REPEATS, FEW_REPEATS = 9, 7, 3
GRADIENT_KEYS = 12
KEYS = 40
SPLITS = (8, 12, 15, 20, 30, 40, 60)
GRAPH_SPLITS = (8, 12, 16, 20, 25, 32, 40)

Points = Float[Array, "n d"]
Theta = Float[Array, "2"]  # the logarithms of length scale and noise
THETA = (0.3, 1e-2)


def squared_distances(points: Points) -> Matrix:
    return jnp.sum((points[:, None] - points[None, :]) ** 2, axis=-1)


def gaussian(distances: Matrix, theta: Theta) -> Matrix:
    return jnp.exp(-distances / (2 * jnp.exp(2 * theta[0])))


def with_noise(kernel: Matrix, theta: Theta) -> Matrix:
    return kernel + jnp.exp(theta[1]) * jnp.eye(kernel.shape[0])


def kernel(theta: Theta, points: Points) -> Matrix:
    return with_noise(gaussian(squared_distances(points), theta), theta)


def dense_logdet(theta: Theta, distances: Matrix) -> Float[Array, ""]:
    return jnp.linalg.slogdet(with_noise(gaussian(distances, theta), theta))[1]


def our_slq(operator: lx.AbstractLinearOperator, key: PRNGKeyArray, steps: int) -> Array:
    return tx.slq_trace(
        operator, jnp.log, key, num_probes=NUM_PROBES, num_steps=steps
    ).value


def of_matfree(steps: int, *, paired: bool = False) -> Callable[..., Array]:
    sampler = stochtrace.sampler_sphere(jnp.zeros(N), num=NUM_PROBES)
    if paired:  # what traceax draws from the same key
        structure = jax.ShapeDtypeStruct((N,), jnp.float64)
        sampler = partial(tx.sphere, structure=structure, num_probes=NUM_PROBES)
    tridiagonal = decomp.tridiag_sym(steps, reortho="full", custom_vjp=True)
    integrand = funm.monte_carlo_funm_sym_logdet(tridiagonal)
    return stochtrace.estimator_monte_carlo(integrand, sampler)


# From matrix, or theta and points, and a key: the same function of either library.
Pair = tuple[Callable[..., Array], Callable[..., Array]]


def of_value(steps: int) -> Pair:
    other = of_matfree(steps)

    def ours(matrix: Matrix, key: PRNGKeyArray) -> Array:
        return our_slq(lx.MatrixLinearOperator(matrix, SEMIDEFINITE), key, steps)

    def theirs(matrix: Matrix, key: PRNGKeyArray) -> Array:
        return other(lambda vector, matrix: matrix @ vector, key, matrix)

    return ours, theirs


def of_matrix(steps: int, *, paired: bool = False) -> Pair:
    other = of_matfree(steps, paired=paired)

    def ours(theta: Theta, points: Points, key: PRNGKeyArray) -> Array:
        matrix = kernel(theta, points)
        return our_slq(lx.MatrixLinearOperator(matrix, SEMIDEFINITE), key, steps)

    def theirs(theta: Theta, points: Points, key: PRNGKeyArray) -> Array:
        return other(lambda v, matrix: matrix @ v, key, kernel(theta, points))

    return ours, theirs


def of_function(steps: int) -> Pair:
    other = of_matfree(steps)
    structure = jax.ShapeDtypeStruct((N,), jnp.float64)

    def ours(theta: Theta, points: Points, key: PRNGKeyArray) -> Array:
        operator = lx.FunctionLinearOperator(
            lambda v: kernel(theta, points) @ v, structure, SEMIDEFINITE
        )
        return our_slq(operator, key, steps)

    def theirs(theta: Theta, points: Points, key: PRNGKeyArray) -> Array:
        return other(lambda v, theta: kernel(theta, points) @ v, key, theta)

    return ours, theirs


class Race(NamedTuple):
    """What is timed, on what, and how many times faster traceax is meant to be."""

    label: str
    pair: Pair
    arguments: tuple[Array, ...]
    repeats: int
    aim: float


def races(steps: tuple[int, ...]) -> Iterator[Race]:
    theta, points = jnp.log(jnp.array(THETA)), uniform(N, 2)
    key, matrix = jax.random.key(1), kernel(theta, points)

    def with_gradient(pair: Pair) -> Pair:
        return jax.value_and_grad(pair[0]), jax.value_and_grad(pair[1])

    for m in steps:
        yield Race(f"value, {m} steps", of_value(m), (matrix, key), REPEATS, 1.0)
    both = (theta, points, key)
    for m in steps:
        pair = with_gradient(of_matrix(m))
        yield Race(f"value+grad, matrix, {m} steps", pair, both, SLOW_REPEATS, 5.0)
    label, pair = "value+grad, matrix-free, 20 steps", with_gradient(of_function(20))
    yield Race(label, pair, both, FEW_REPEATS, 20.0)


def uniform(n: int, dimension: int) -> Points:
    return jax.random.uniform(jax.random.key(0), (n, dimension))


def print_races(time: Callable[[Race], tuple[float, float, float]], which: Any) -> None:
    print(f"{'milliseconds':<36}{'traceax':>10}{'matfree':>10}{'ratio':>8}{'aim':>6}")
    for race in which:
        mine, other, aim = time(race)
        verdict_ = "" if other / mine >= aim else "  missed"
        print(
            f"{race.label:<36}{mine:>10.1f}{other:>10.1f}{other / mine:>8.2f}{aim:>6.0f}"
            + verdict_
        )


def speed() -> None:
    def time(race: Race) -> tuple[float, float, float]:
        mine, other = (partial(jax.jit(f), *race.arguments) for f in race.pair)
        in_turn(mine, other, 1)
        return *in_turn(mine, other, race.repeats), race.aim

    print(f"n = {N}, {NUM_PROBES} probes. Medians of {REPEATS} values, {SLOW_REPEATS} and")
    print(f"(matrix-free) {FEW_REPEATS} gradients.\n")
    print_races(time, races(STEPS))


def compile_() -> None:
    def time(race: Race) -> tuple[float, float, float]:
        mine, other = (compilation(f, *race.arguments) for f in race.pair)
        return *in_turn(mine, other, min(race.repeats, SLOW_REPEATS)), 1.0

    print(f"Compilation, medians of {SLOW_REPEATS} or (matrix-free) {FEW_REPEATS}.\n")
    print_races(time, races((20,)))


def rms(values: Float[Array, "keys *p"], truth: Float[Array, "*p"]) -> Float[Array, "*p"]:
    return jnp.sqrt(jnp.mean((values / truth - 1) ** 2, axis=0))


def gradients() -> None:
    theta, points = jnp.log(jnp.array(THETA)), uniform(N, 2)
    keys = jax.random.split(jax.random.key(2), GRADIENT_KEYS)
    value, gradient = jax.value_and_grad(dense_logdet)(theta, squared_distances(points))
    truth = jnp.array([value, *gradient])
    print(f"Errors over {GRADIENT_KEYS} keys, the same probes; truth {truth}.\n")
    names = ("value", "log length", "log noise")
    print(f"{'':<18}" + "".join(f"{name:>12}" for name in names))
    for steps in STEPS:
        errors = []
        for function in of_matrix(steps, paired=True):
            run = jax.jit(jax.value_and_grad(function))
            outcomes = [run(theta, points, key) for key in keys]
            errors.append(rms(jnp.stack([jnp.array([v, *g]) for v, g in outcomes]), truth))
        for name, row in zip(("traceax", "matfree"), errors, strict=True):
            label = f"{name}, {steps} steps"
            print(f"{label:<18}" + "".join(f"{error:>12.2e}" for error in row))


Outcome = tuple[Run, Theta]  # a value and its interval; the gradient


@cache
def logdet_over_keys(num_matvecs: int, steps: int | None) -> Callable[..., Outcome]:
    """By `logdet`, or by `slq_trace` with so many steps."""

    def value(theta: Theta, distances: Matrix, key: PRNGKeyArray) -> tuple[Array, Run]:
        matrix = gaussian(distances, theta)
        if steps is None:
            shift = jnp.exp(theta[1])
            result = tx.logdet(as_function(matrix), key, num_matvecs, shift=shift)
        else:
            operator, probes = as_function(with_noise(matrix, theta)), num_matvecs // steps
            result = tx.slq_trace(
                operator, jnp.log, key, num_probes=probes, num_steps=steps
            )
        low, high = jax.lax.stop_gradient(result).interval(0.95)
        return result.value, Run(jax.lax.stop_gradient(result.value), low, high)

    def one(theta: Theta, distances: Matrix, key: PRNGKeyArray) -> Outcome:
        gradient, run = jax.grad(value, has_aux=True)(theta, distances, key)
        return run, gradient

    return jax.jit(
        lambda theta, distances, keys: jax.lax.map(partial(one, theta, distances), keys)
    )


class Gaussian(NamedTuple):
    n: int
    dimension: int
    length: float
    noise: float


LOGDETS = (
    Gaussian(600, 2, 0.3, 1e-2),
    Gaussian(600, 4, 0.7, 1e-2),
    Gaussian(600, 2, 0.2, 1e-4),
    Gaussian(600, 6, 0.5, 1e-2),
)
CONDITIONED = (Gaussian(N, 2, 0.3, 1.74e-2), Gaussian(N, 2, 0.2, 1.02e-2))


def compare_logdets(
    problems: tuple[Gaussian, ...], num_matvecs: int, num_keys: int
) -> None:
    keys = jax.random.split(jax.random.key(3), num_keys)
    print(f"{num_matvecs} matvecs, {num_keys} keys. In brackets the steps of each probe.\n")
    print(
        f"{'':<44}{'value':>25}{'grad log length':>25}{'grad log noise':>25}\n"
        f"{'d':>2}{'length':>7}{'noise':>9}{'condition':>10}{'log det':>9}{'held':>7}"
        + f"{'logdet':>10}{'slq_trace':>15}"
        * 3
    )
    for problem in problems:
        theta = jnp.log(jnp.array([problem.length, problem.noise]))
        distances = squared_distances(uniform(problem.n, problem.dimension))
        spectrum = jnp.linalg.eigvalsh(with_noise(gaussian(distances, theta), theta))
        value, gradient = jax.value_and_grad(dense_logdet)(theta, distances)
        truth = jnp.array([value, *gradient])

        def run(steps: int | None, of: Any = (theta, distances, truth)) -> tuple[Any, Run]:
            outcome, slopes = logdet_over_keys(num_matvecs, steps)(*of[:2], keys)
            return rms(jnp.column_stack([outcome.value, slopes]), of[2]), outcome

        errors, ours = run(None)
        others = np.array([run(steps)[0] for steps in SPLITS])
        row = (
            f"{problem.dimension:>2}{problem.length:>7}{problem.noise:>9.2e}"
            f"{spectrum[-1] / spectrum[0]:>10.1e}{value:>9.0f}{ours.coverage(value):>7.0%}"
        )
        for mine, column in zip(errors, others.T, strict=True):
            best = np.argmin(column)
            row += f"{mine:>10.1e}{column[best]:>10.1e} ({SPLITS[best]:>2})"
        print(row)


def graphs() -> None:
    num_matvecs, num_keys = 800, 10
    graph = networkx.powerlaw_cluster_graph(5000, 5, 0.5, seed=1)
    entries = networkx.to_scipy_sparse_array(graph, dtype=np.float64, format="csr")
    spectrum = np.linalg.eigvalsh(entries.toarray())
    truth = jnp.asarray(np.sum(np.exp(spectrum)))
    product = sparse.BCOO.from_scipy_sparse(entries)
    structure = jax.ShapeDtypeStruct(entries.shape[1:], product.dtype)
    operator = lx.FunctionLinearOperator(lambda v: product @ v, structure, lx.symmetric_tag)

    def function_trace(key: PRNGKeyArray) -> tx.Estimate:
        return tx.function_trace(operator, jnp.exp, key, num_matvecs)

    def slq_trace(key: PRNGKeyArray, steps: int) -> tx.Estimate:
        counts = {"num_probes": num_matvecs // steps, "num_steps": steps}
        return tx.slq_trace(operator, jnp.exp, key, **counts)

    def over_keys(estimate: Callable[[PRNGKeyArray], tx.Estimate], count: int) -> Run:
        def run(key: PRNGKeyArray) -> Run:
            result = estimate(key)
            return Run(result.value, *result.interval(0.95))

        keys = jax.random.split(jax.random.key(4), count)
        return jax.jit(lambda keys: jax.lax.map(run, keys))(keys)

    top = "  ".join(f"{value:.2f}" for value in spectrum[-4:])
    print(
        f"n = 5000, {entries.nnz} entries, the largest eigenvalues {top}; {truth = :.8e}."
    )
    print(f"{num_matvecs} matvecs, {num_keys} keys.\n\n{'':<30}{'error':>10}{'held':>8}")
    runs = {"function_trace": over_keys(function_trace, num_keys)}
    for steps in GRAPH_SPLITS:
        estimate = partial(slq_trace, steps=steps)
        runs[f"slq_trace, {steps} steps"] = over_keys(estimate, num_keys)
    for name, run in runs.items():
        print(f"{name:<30}{run.rms(truth):>10.1e}{run.coverage(truth):>8.0%}")


PARTS = {
    "speed": speed,
    "compile": compile_,
    "gradients": gradients,
    "logdet": lambda: compare_logdets(LOGDETS, 240, KEYS),
    "conditioned": lambda: compare_logdets(CONDITIONED, 300, 10),
    "graphs": graphs,
}


def main(parts: list[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    for part in parts or PARTS:
        PARTS[part]()
        print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="which to run")
    main(parser.parse_args().parts)
