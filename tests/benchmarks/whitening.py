"""Where whitening by entries helps: kernels, noises, dimensions, neighbours, fields, sizes.

`python -m tests.benchmarks.whitening [--points 2000] [--keys 3] [--picture FILE]
[PART ...]`, from the root of the repository; a quarter of an hour. The parts are *sizes*,
*kernels*, *neighbours* and *fields*; all if none.

Points in a cube of so many dimensions, lengths .5 times the root of a third of the
dimension, values of a smooth function with noise. `tx.inv_quad_logdet` with 240 matvecs,
and `tx.vecchia` with 20 neighbours, float64 unless said. Columns:

- *kernels*: the largest relative error, over keys, of the gradient of the likelihood in log
  length, log amplitude and log noise, without whitening, with it, and with 20 pivots more;
  then the largest error of the log-determinant and the median of its error bar, in the same
  order; and the condition numbers without and with it. *rbf* has the length times .6.
- *neighbours*: the same for Matern kernels in three dimensions, noise 1e-4, by the number
  of neighbours, and the seconds for value and gradient of the factor, and of a step.
- *fields*: the slope of log det (kappa^2 + L)^2 in log kappa^2 on a lattice of 40 x 40, and
  the root mean square of the error of log det, by the power of the pattern whose neighbours
  the factor has, without and with colours, over 20 keys, but 200 for the power 2 without
  colours.
- *sizes*: seconds for neighbours, and for value and gradient of the factor (a Matern 3/2
  kernel, no entry stored), compiled, and the peak memory of the process, which is another
  for each size.

The picture shows the errors of gradients by matvecs, with and without whitening.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import scipy.sparse
from jaxtyping import Array

import traceax as tx

PSD = lx.positive_semidefinite_tag
ORDERS = {"matern12": 1, "matern32": 3, "matern52": 5}
Entries = Callable[[Array, Array], Array]


class Problem(NamedTuple):
    kernel: str
    noise: float
    dimension: int
    num_points: int
    dtype: str = "float64"

    @property
    def label(self) -> str:
        single = ", single" if self.dtype == "float32" else ""
        return f"{self.kernel}, {self.noise:.0e}, {self.dimension}-d{single}"

    @property
    def points(self) -> np.ndarray:
        return np.random.default_rng(0).random((self.num_points, self.dimension))

    @property
    def values(self) -> np.ndarray:
        noise = np.random.default_rng(1).standard_normal(self.num_points)
        return np.sin(2 * np.pi * self.points).sum(axis=1) + self.noise**0.5 * noise

    @property
    def parameters(self) -> Array:
        length = 0.5 * (self.dimension / 3) ** 0.5 * (0.6 if self.kernel == "rbf" else 1)
        return jnp.log(jnp.array([length, 1.0, self.noise], self.dtype))

    def covariance(self, theta: Array, squares: Array) -> Array:
        length, amplitude, _ = jnp.exp(theta)
        if self.kernel == "rbf":
            return amplitude**2 * jnp.exp(-squares / (2 * length**2))
        order = ORDERS[self.kernel]
        r = jnp.sqrt(jnp.where(squares > 0, order * squares, 1)) * (squares > 0) / length
        factor = {1: 1, 3: 1 + r, 5: 1 + r + r**2 / 3}[order]
        return amplitude**2 * factor * jnp.exp(-r)

    def matrix(self, theta: Array) -> Array:
        """The kernel without noise."""
        x = jnp.asarray(self.points, theta.dtype)
        squares = sum((a[:, None] - a) ** 2 for a in x.T)
        return self.covariance(theta, jnp.asarray(squares))

    def entries(self, theta: Array) -> Entries:
        x = jnp.asarray(self.points, theta.dtype)

        def entries(i: Array, j: Array) -> Array:
            squares = jnp.sum((x[i] - x[j]) ** 2, axis=-1)
            return self.covariance(theta, squares) + jnp.exp(theta[2]) * (i == j)

        return entries

    def whitening(self, theta: Array, near: tx.Neighbours | None) -> tx.Whitening | None:
        return None if near is None else tx.vecchia(self.entries(theta), near)


def of(matrix: Array) -> lx.FunctionLinearOperator:
    return lx.FunctionLinearOperator(
        lambda v: matrix @ v, jax.eval_shape(lambda: matrix[0]), PSD
    )


def likelihood(
    theta: Array, key: Array, problem: Problem, near: Any, num_matvecs: int
) -> tuple[Array, tx.Estimate]:
    y = jnp.asarray(problem.values, theta.dtype)
    how = {"shift": jnp.exp(theta[2]), "whitening": problem.whitening(theta, near)}
    operator = of(problem.matrix(theta))
    both = tx.inv_quad_logdet(operator, y, key, num_matvecs, **how)
    return (both.inv_quad.value + both.logdet.value) / 2, both.logdet


class Truth(NamedTuple):
    gradient: Array
    logdet: Array
    condition: float


def truth(problem: Problem) -> Truth:
    theta = problem.parameters.astype(float)
    eye = jnp.eye(problem.num_points)

    def value(theta: Array) -> tuple[Array, Array]:
        matrix = problem.matrix(theta) + jnp.exp(theta[2]) * eye
        y, logdet = jnp.asarray(problem.values), jnp.linalg.slogdet(matrix)[1]
        return (y @ jnp.linalg.solve(matrix, y) + logdet) / 2, logdet

    gradient, logdet = jax.jit(jax.grad(value, has_aux=True))(theta)
    largest = float(jnp.linalg.eigvalsh(problem.matrix(theta))[-1])
    return Truth(gradient, logdet, largest / problem.noise + 1)


class Errors(NamedTuple):
    gradient: float
    logdet: float
    bar: float
    seconds: float


def errors(problem: Problem, near: Any, exact: Truth, keys: int, matvecs: int) -> Errors:
    """The largest errors over keys, the median bar, and the median seconds of a step."""
    how = {"problem": problem, "near": near, "num_matvecs": matvecs}
    step = jax.jit(jax.value_and_grad(partial(likelihood, **how), has_aux=True))
    found = []
    for seed in range(keys + 1):
        start = time.perf_counter()
        (_, logdet), gradient = step(problem.parameters, jax.random.key(seed))
        off = np.asarray(gradient, float) - exact.gradient
        seconds = time.perf_counter() - start
        error = float(jnp.linalg.norm(off) / jnp.linalg.norm(exact.gradient))
        distance = abs(float(logdet.value) - float(exact.logdet))
        found.append((error, distance, float(logdet.standard_error), seconds))
    table = np.array(found[1:])
    return Errors(*table[:, :2].max(axis=0), *np.median(table[:, 2:], axis=0))


def condition(problem: Problem, near: tx.Neighbours) -> float:
    theta = problem.parameters.astype(float)
    white = problem.whitening(theta, near)
    assert white is not None
    factor = jax.vmap(white.operator.mv, 1, 1)(jnp.eye(problem.num_points))
    matrix = problem.matrix(theta) + problem.noise * jnp.eye(problem.num_points)
    values = jnp.linalg.eigvalsh(factor @ matrix @ factor.T)
    return float(values[-1] / values[0])


def kernels(num_points: int, keys: int) -> None:
    print(f"kernels, n = {num_points}, {keys} keys: none, 20 neighbours, and 20 pivots\n")
    print(f"{'kernel, noise, dimension':<32}{'gradient':<28}{'log det':<23}", end="")
    print(f"{'bar':<22}condition")
    chosen = [Problem(k, s, 3, num_points) for k in ORDERS for s in (1e-2, 1e-4)]
    chosen += [Problem("rbf", s, 3, num_points) for s in (1e-2, 1e-4)]
    chosen += [Problem("matern32", 1e-4, d, num_points) for d in (1, 2, 5, 10)]
    chosen += [Problem("rbf", 1e-2, 10, num_points), Problem("rbf", 1e-4, 10, num_points)]
    chosen += [Problem("matern32", 1e-3, 3, num_points, "float32")]
    for problem in chosen:
        exact, points = truth(problem), problem.points
        near = tx.nearest_neighbours(points, 20)
        ways = [None, near, tx.nearest_neighbours(points, 20, num_pivots=20)]
        found = [errors(problem, way, exact, keys, 240) for way in ways]
        gradients = "".join(f"{e.gradient:9.1e}" for e in found)
        logs = "".join(f"{e.logdet:7.2f}" for e in found)
        bars = "".join(f"{e.bar:7.2f}" for e in found)
        conditions = f"{exact.condition:8.0e} -> {condition(problem, near):.0e}"
        print(f"{problem.label:<32}{gradients} {logs}  {bars} {conditions}", flush=True)


def neighbours(num_points: int, keys: int) -> None:
    print(f"neighbours, n = {num_points}, {keys} keys\n")
    head = f"{'kernel':<10}{'neighbours':>11}{'gradient':>10}{'log det':>9}{'bar':>7}"
    print(f"{head}{'condition':>11}{'factor/s':>10}{'step/s':>8}")
    for kernel in ("matern32", "matern52"):
        problem = Problem(kernel, 1e-4, 3, num_points)
        exact = truth(problem)
        for count in (3, 5, 10, 20, 40):
            near = tx.nearest_neighbours(problem.points, count)
            e = errors(problem, near, exact, keys, 240)
            seconds = seconds_of_factor(problem, near)
            row = f"{kernel:<10}{count:>11}{e.gradient:>10.1e}{e.logdet:>9.2f}{e.bar:>7.2f}"
            size = condition(problem, near)
            print(f"{row}{size:>11.0f}{seconds:>10.2f}{e.seconds:>8.2f}", flush=True)


def seconds_of_factor(problem: Problem, near: tx.Neighbours) -> float:
    """Of the value and the gradient of log|det W|, compiled."""

    def value(theta: Array) -> Array:
        return tx.vecchia(problem.entries(theta), near).log_determinant

    step, seconds = jax.jit(jax.value_and_grad(value)), []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(step(problem.parameters))
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def fields(keys: int, side: int = 40) -> None:
    print(f"fields, {side} x {side}, kappa^2 = .05, {keys} keys\n")
    line = scipy.sparse.diags_array([-1.0, 2, -1], offsets=[-1, 0, 1], shape=(side, side))  # pyright: ignore
    eye = scipy.sparse.eye_array(side)
    laplacian = (scipy.sparse.kron(line, eye) + scipy.sparse.kron(eye, line)).tocsr()
    dense, pattern = jnp.asarray(laplacian.toarray()), abs(laplacian) @ abs(laplacian)

    def precision(x: Array) -> Array:
        half = dense + jnp.exp(x) * jnp.eye(side**2)
        return half @ half

    at = jnp.log(0.05)
    exact = lambda x: jnp.linalg.slogdet(precision(x))[1]  # noqa: E731
    true, slope = jax.value_and_grad(exact)(at)
    print(
        f"{'power':<7}{'colours':<9}{'slope':>18}{'true':>8}{'rms':>8}{'bar':>7}{'held':>6}"
    )
    for power in (0, 1, 2, 3):
        near = tx.graph_neighbours(pattern, power=power) if power else None
        for coloured in (False, True):

            def value(x: Array, key: Array, near: Any, given: Any) -> Any:
                matrix = precision(x)
                whole = None
                if near is not None:
                    whole = tx.vecchia(lambda i, j: matrix[i, j], near)
                found = tx.logdet(of(matrix), key, pattern=given, whitening=whole)
                return found.value, found

            given = pattern if coloured else None
            one = partial(value, near=near, given=given)
            count = 10 * keys if power == 2 and not coloured else keys
            both = jax.value_and_grad(one, has_aux=True)
            each = jax.jit(lambda keys, both=both: jax.lax.map(lambda k: both(at, k), keys))
            (_, found), slopes = each(jax.random.split(jax.random.key(0), count))
            spread = f"{jnp.mean(slopes):.2f} ± {jnp.std(slopes):.2f}"
            rms = float(jnp.mean((found.value - true) ** 2) ** 0.5)
            low, high = found.interval(0.95)
            held = float(jnp.mean((low <= true) & (true <= high)))
            bar = float(jnp.median(found.standard_error))
            row = f"{power or 'none':<7}{'yes' if coloured else 'no':<9}{spread:>18}"
            print(f"{row}{slope:>8.2f}{rms:>8.2f}{bar:>7.2f}{held:>6.2f}", flush=True)


def size(num_points: int) -> None:
    """What a child process prints."""
    problem = Problem("matern32", 1e-4, 3, num_points)
    start = time.perf_counter()
    near = tx.nearest_neighbours(problem.points, 20)
    searched = time.perf_counter() - start
    seconds = seconds_of_factor(problem, near)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{num_points:>8}{searched:>14.1f}{seconds:>10.2f}{peak:>7.1f}")


def sizes() -> None:
    print(f"sizes, 20 neighbours\n\n{'n':>8}{'neighbours/s':>14}{'factor/s':>10}{'GB':>7}")
    for num_points in (2000, 20_000, 100_000):
        command = [sys.executable, "-m", "tests.benchmarks.whitening", "--size"]
        subprocess.run([*command, str(num_points)], check=True)


def picture(path: str, num_points: int, keys: int) -> None:
    import matplotlib as mpl  # noqa: PLC0415
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.rcParams["svg.hashsalt"] = "traceax"
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3), sharey=True, layout="constrained")
    budgets = (30, 60, 120, 240, 480)
    for axis, kernel in zip(axes, ("matern32", "matern52"), strict=True):
        problem = Problem(kernel, 1e-4, 3, num_points)
        exact, near = truth(problem), tx.nearest_neighbours(problem.points, 20)
        for way, label in ((None, "matvecs alone"), (near, "whitened, 20 neighbours")):
            found = [errors(problem, way, exact, keys, b).gradient for b in budgets]
            axis.loglog(budgets, found, marker="o", label=label)
        axis.set(title=kernel.replace("matern", "Matérn ").replace("2", "/2"))
        axis.set(xlabel="matvecs", xticks=budgets, xticklabels=budgets)
        axis.minorticks_off()
    axes[0].set(ylabel="error of the gradient")
    axes[0].legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ["sizes", "kernels", "neighbours", "fields"]  # peaks are inherited
    parser.add_argument("parts", nargs="*", choices=[[], *parts], metavar="PART")
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--keys", type=int, default=3)
    parser.add_argument("--picture", help="the file to draw")
    parser.add_argument("--size", type=int, help="for the child processes")
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if given.size:
        return size(given.size)
    run: dict[str, Callable[[], None]] = {
        "kernels": lambda: kernels(given.points, given.keys),
        "neighbours": lambda: neighbours(given.points, given.keys),
        "fields": lambda: fields(20),
        "sizes": sizes,
    }
    chosen: Sequence[str] = given.parts or parts
    for place, part in enumerate(chosen):
        print("\n" * bool(place), end="")
        run[part]()
    if given.picture:
        picture(given.picture, given.points, given.keys)
    return None


if __name__ == "__main__":
    main()
