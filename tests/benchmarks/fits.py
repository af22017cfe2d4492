"""Fits of Gaussian processes: the likelihood that is reached, by the time that it took.

`python -m tests.benchmarks.fits [--steps 30] [--points 8000] [--gpytorch PYTHON]
[--fastgp PYTHON] [--picture FILE] [NAME ...]`, from the root of the repository. The names
are of sides.

Two data sets, standardised: *diabetes* of scikit-learn, 442 patients in ten dimensions, and
*cube*, `--points` values of a smooth function in three, with noise. Both are fitted with a
Matérn-3/2 kernel from a length of 1, an amplitude of 1 and a noise variance of .1, in
logarithms of these three. The optimiser is the same for all: Adam at .1, in NumPy. Only
value and gradient come from a library, in a process of its own, as in
`tests.benchmarks.likelihoods`:

- *traceax*: `tx.inv_quad_logdet` with 240 matvecs, which starts at the last solution. A
  function, not a stored matrix, of which it would take the Cholesky factor up to n = 2048.
- *gpytorch*, *gpytorch-100*, *fastgp*: as there. GPyTorch factorises up to n = 800.

Columns are the seconds of the first step, with compilation, and of a later one, the median,
and the excess of the exact negative log-likelihood, per point, over the least that any side
has reached, after half of the steps and at the end. The picture shows it by seconds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import scipy.linalg
from scipy.spatial.distance import cdist

if __package__:
    from tests.benchmarks import likelihoods
else:  # of an interpreter without the library; last, so that nothing is shadowed
    sys.path.append(str(Path(__file__).parent))
    import likelihoods  # pyright: ignore[reportMissingImports]

SIDES = {"traceax": "traceax-warm", "gpytorch": "gpytorch", "gpytorch-100": "gpytorch-100"}
SIDES["fastgp"] = "fastgp"
START = np.log([1.0, 1.0, 0.1])


class Fit(NamedTuple):
    parameters: list[list[float]]  # of every step
    seconds: list[float]  # since the beginning


def adam(run: likelihoods.Run, num_steps: int, rate: float = 0.1) -> Fit:
    theta, first, second = START.copy(), np.zeros(3), np.zeros(3)
    parameters, seconds, begun = [theta.tolist()], [0.0], time.perf_counter()
    for step in range(1, num_steps + 1):
        slope = np.asarray(run(theta, step)[1])
        first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
        moved = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        theta = theta - rate * moved
        parameters.append(theta.tolist())
        seconds.append(time.perf_counter() - begun)
    return Fit(parameters, seconds)


def exact(problem: likelihoods.Problem, theta: Sequence[float]) -> float:
    """The negative log-likelihood per point."""
    x, y = problem.data()
    length, amplitude, noise = np.exp(theta)
    matrix = amplitude**2 * likelihoods.correlation(
        "matern32", cdist(x, x) / length, np.exp
    )
    matrix.flat[:: len(y) + 1] += noise
    factor = scipy.linalg.cho_factor(matrix, lower=True, overwrite_a=True)
    logdet = 2 * np.sum(np.log(np.diagonal(factor[0])))
    form = y @ scipy.linalg.cho_solve(factor, y)
    return float((form + logdet) / len(y) + np.log(2 * np.pi)) / 2


def stored(name: str, num_points: int) -> likelihoods.Problem:
    """The data, in a file that other interpreters can read."""
    if name == "diabetes":
        from sklearn.datasets import load_diabetes  # noqa: PLC0415

        data = load_diabetes(return_X_y=True)
    else:
        data = likelihoods.Problem("matern32", 1.0, 0.01, num_points).data()
    x, y = ((x - np.mean(x, axis=0)) / np.std(x, axis=0) for x in map(np.asarray, data))
    path = Path(tempfile.gettempdir()) / f"traceax-{name}.npz"
    np.savez(path, x=x, y=y)
    return likelihoods.Problem("matern32", 1.0, 0.1, len(y), str(path))


def fit(python: Sequence[str], side: str, path: str, num_steps: int) -> Fit | None:
    request = ["--side", side, "--path", path, "--steps", f"{num_steps}"]
    environment = likelihoods.environment()
    done = subprocess.run(
        [*python, *request], check=False, capture_output=True, text=True, env=environment
    )
    if done.returncode:
        print(f"{side}: exit status {done.returncode}\n{done.stderr[-2000:]}")
        return None
    return Fit(**json.loads(done.stdout.splitlines()[-1]))


def in_child(side: str, path: str, num_steps: int) -> None:
    num_points = np.load(path)["y"].size
    problem = likelihoods.Problem("matern32", 1.0, 0.1, num_points, path)
    how = likelihoods.SIDES[SIDES[side]]
    print(json.dumps(adam(how.build(problem, **how.how), num_steps)._asdict()))


def drawn(curves: dict[str, dict[str, tuple[list, list]]], path: str) -> None:
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, len(curves), figsize=(9, 3.2), layout="constrained")
    for axis, (name, sides) in zip(np.ravel(axes), curves.items(), strict=True):
        for side, (seconds, excess) in sides.items():
            axis.plot(seconds[1:], np.maximum(excess[1:], 1e-6), ".-", label=side)
        axis.set(title=name, xlabel="seconds", xscale="log", yscale="log")
    np.ravel(axes)[0].set_ylabel("nats per point above the best")
    np.ravel(axes)[0].legend()
    figure.savefig(path)


def main(given: argparse.Namespace) -> None:
    python = {"traceax": (sys.executable, "-m", "tests.benchmarks.fits")}
    for library in ("gpytorch", "fastgp"):
        if interpreter := getattr(given, library):
            python[library] = (interpreter, "-P", __file__)
    print(
        f"{given.steps} steps\n\n{'data':<12}{'side':<14}{'first':>8}{'a step':>8}", end=""
    )
    print(f"{'half way':>11}{'at the end':>12}")
    curves = {}
    for name in ("diabetes", "cube"):
        problem = stored(name, given.points)
        fits = {}
        for side in given.names or SIDES:
            library = side.split("-")[0]
            if library not in python:
                continue
            found = fit(python[library], side, problem.path, given.steps)
            fits |= {} if found is None else {side: found}
        shown = [*range(0, given.steps + 1, max(given.steps // 10, 1))]
        values = {
            side: [exact(problem, found.parameters[i]) for i in shown]
            for side, found in fits.items()
        }
        best = min(min(v) for v in values.values())
        curves[name] = {}
        for side, found in fits.items():
            excess = [value - best for value in values[side]]
            curves[name][side] = ([found.seconds[i] for i in shown], excess)
            step = median(np.diff(found.seconds[1:]))
            print(
                f"{name:<12}{side:<14}{found.seconds[1]:>8.1f}{step:>8.2f}"
                f"{excess[len(excess) // 2]:>11.1e}{excess[-1]:>12.1e}",
                flush=True,
            )
    if given.picture:
        drawn(curves, given.picture)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *SIDES], metavar="NAME")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--points", type=int, default=8000)
    parser.add_argument("--gpytorch", help="an interpreter that has it")
    parser.add_argument("--fastgp", help="an interpreter that has it")
    parser.add_argument("--picture", help="a file, of which the suffix is the format")
    parser.add_argument("--side", help="for the child processes")
    parser.add_argument("--path", help="for the child processes")
    parsed = parser.parse_args()
    if parsed.side:
        in_child(parsed.side, parsed.path, parsed.steps)
    else:
        main(parsed)
