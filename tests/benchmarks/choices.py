"""What `trace` and `diagonal` choose, beside every estimator by name: budget by spectrum.

`python -m tests.benchmarks.choices [--keys 100] [--diagonals] [--budgets 12 24 ...]`, from
the root of the repository.

n = 600, float64; root mean square over keys of the error, relative to the truth; in
brackets the share of keys whose 95 % interval holds the truth. "psd" and "any" are the
choices with and without the tag; the last columns are their ratios to the best by name.
The `few` spectra are those with a few large eigenvalues over a flat rest.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx
from tests.benchmarks.accuracy import ROUNDING, with_spectrum
from tests.benchmarks.scores import SEMIDEFINITE, ours, over_keys, score

N, BUDGETS = 600, (12, 24, 60, 100, 240)


def few(count: int, size: float, rest: float) -> np.ndarray:
    """`count` eigenvalues of `size` to a third of it, over a rest between `rest` and 1."""
    large = np.linspace(size, size / 3, count)
    return np.concatenate([large, np.linspace(rest, 1, N - count)])


def spectra() -> dict[str, np.ndarray]:
    i = np.arange(N) + 1.0
    return {
        "flat": np.linspace(3, 1, N),
        "step": np.where(i <= 50, 1.0, 1e-3),
        "few 2": few(2, 480, 0.6),
        "few 10": few(10, 900, 0.5),
        "few 25": few(25, 30, 0.2),
        "i^-1/2": i**-0.5,
        "i^-1": 1 / i,
        "i^-2": i**-2,
        "0.98^i": 0.98**i,
        "0.7^i": 0.7**i,
        "indefinite": (-1) ** i / i,
    }


def matrices() -> dict[str, jax.Array]:
    of = {k: with_spectrum(jnp.asarray(v), jax.random.key(0)) for k, v in spectra().items()}
    line = 2 * np.eye(30) - np.eye(30, k=1) - np.eye(30, k=-1)
    grid = np.kron(line[:20, :20], np.eye(30)) + np.kron(np.eye(20), line)
    points = np.random.default_rng(0).uniform(size=(N, 2))
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    genes = np.random.default_rng(1).normal(size=(N, 3 * N))
    genes += np.repeat(np.random.default_rng(2).normal(size=(6, 3 * N)), N // 6, 0) / 3
    relations = genes @ genes.T / (3 * N)
    more = {
        "grid": grid,
        "grid^-1": np.linalg.inv(grid),
        "kernel": np.exp(-5 * distances) + 0.01 * np.eye(N),
        "genes^2": relations @ relations,
    }
    return of | {name: jnp.asarray(matrix) for name, matrix in more.items()}


def opaque(matrix, tags):
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    return lx.FunctionLinearOperator(lambda vector: matrix @ vector, structure, tags)


TRACES = {
    "hutchinson": tx.hutchinson_trace,
    "hutchpp": tx.hutchpp_trace,
    "xtrace": tx.xtrace,
    "xnystrace": tx.xnystrace,
    "any": tx.trace,
    "psd": tx.trace,
}
DIAGONALS = {
    "hutchinson": tx.hutchinson_diagonal,
    "diagpp": tx.diagpp,
    "xdiag": tx.xdiag,
    "xnysdiag": tx.xnysdiag,
    "any": tx.diagonal,
    "psd": tx.diagonal,
}


def main(num_keys: int, budgets: list[int], diagonals: bool) -> None:
    jax.config.update("jax_enable_x64", True)
    estimators = DIAGONALS if diagonals else TRACES
    print(f"{'matvecs':<8}{'spectrum':<11}" + "".join(f"{x:>16}" for x in estimators))
    worst: dict[str, list] = {"any": [], "psd": []}
    keys = jax.random.split(jax.random.key(1), num_keys)
    for budget in budgets:
        runs = {}
        for name, function in estimators.items():
            is_psd = name in ("psd", "xnystrace", "xnysdiag")
            tags = SEMIDEFINITE if is_psd else (lx.symmetric_tag,)
            runs[name] = over_keys(ours(function, partial(opaque, tags=tags), budget))
        for spectrum, matrix in matrices().items():
            truth = jnp.diagonal(matrix) if diagonals else jnp.trace(matrix)
            scores = {}
            for name, run in runs.items():
                if spectrum == "indefinite" and name in ("psd", "xnystrace", "xnysdiag"):
                    continue
                scores[name] = score(run(matrix, keys), truth)
            floor = {k: max(s.error, ROUNDING) for k, s in scores.items()}
            general = min(v for k, v in floor.items() if k not in worst and "nys" not in k)
            best = min(v for k, v in floor.items() if k not in worst)
            line = f"{budget:<8}{spectrum:<11}"
            for name in estimators:
                s = scores.get(name)
                cell = "-" if s is None else f"{s.error:.2e} ({s.held:.2f})"
                line += f"{cell:>16}"
            for name, least in (("any", general), ("psd", best)):
                if name in floor:
                    ratio = floor[name] / least
                    where = f"{name} {spectrum}, {budget} matvecs"
                    worst[name].append((ratio, scores[name].held, where))
                    line += f"{ratio:>8.2f}"
            print(line, flush=True)
    for entries in worst.values():
        for ratio, _, where in sorted(entries, reverse=True)[:8]:
            print(f"  {ratio:.2f}  {where}")
        for _, held, where in sorted(entries, key=lambda e: e[1])[:5]:
            print(f"  holds {held:.2f}  {where}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=100)
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--diagonals", action="store_true")
    given = parser.parse_args()
    main(given.keys, given.budgets, given.diagonals)
