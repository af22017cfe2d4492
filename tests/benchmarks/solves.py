"""Conjugate gradients with and without `tx.preconditioner`, and diagonals of inverses.

`python -m tests.benchmarks.solves [--points 2000] [--repeats 5] [PART ...]`, from the root
of the repository; the parts are `steps` and `diagonals`. Float64.

Kernel matrices of points in cubes, K, plus the shift at which the condition number is 4e4;
solved by `lx.CG(rtol=1e-6, atol=1e-6)`, with the preconditioner of 100 matvecs or without.

- *steps*: how many conjugate gradients take for a random right-hand side; the seconds are
  of all, with the 100 matvecs before.
- *diagonals*: `tx.diagonal(lx.invert(K + shift I, solver, options=...), key, 40)`: 40
  matvecs with the inverse, a solve each. Seconds, and the root mean square over the keys of
  the error of the diagonal, relative and in the Euclidean norm.

Seconds are medians of the repeats, after one to compile.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

import traceax as tx
from tests.benchmarks.likelihoods import correlation

CONDITION, MATVECS, BUDGET = 4e4, 100, 40
KERNELS = (("rbf", 2, 0.3), ("matern32", 3, 0.5), ("rbf", 4, 0.7), ("matern32", 2, 0.2))
SOLVER = lx.CG(rtol=1e-6, atol=1e-6)
PSD = lx.positive_semidefinite_tag

Matrix = Float[Array, "n n"]


class Case(NamedTuple):
    label: str
    matrix: Matrix
    shift: Float[Array, ""]


def case(kernel: str, dimension: int, length: float, num_points: int) -> Case:
    x = jnp.asarray(np.random.default_rng(0).random((num_points, dimension)))
    distance = jnp.sqrt(sum((a[:, None] - a[None, :]) ** 2 for a in x.T))
    matrix = correlation(kernel, distance / length, jnp.exp)
    shift = jnp.linalg.eigvalsh(matrix)[-1] / CONDITION
    return Case(f"{kernel}, {dimension}-d, {length}", matrix, shift)


def system(
    matrix: Matrix, shift: Float[Array, ""], key: PRNGKeyArray, with_preconditioner: bool
) -> tuple[lx.AbstractLinearOperator, dict[str, Any]]:
    """K + shift I, as who has but products with K would have it, and options."""
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    kernel = lx.FunctionLinearOperator(lambda v: matrix @ v, structure, PSD)
    shifted = lx.FunctionLinearOperator(lambda v: matrix @ v + shift * v, structure, PSD)
    if not with_preconditioner:
        return shifted, {}
    close = tx.preconditioner(kernel, key, MATVECS, shift=shift)
    return shifted, {"preconditioner": close}


def num_steps(
    matrix: Matrix, shift: Float[Array, ""], key: PRNGKeyArray, with_preconditioner: bool
) -> Array:
    operator, options = system(matrix, shift, key, with_preconditioner)
    y = jax.random.normal(jax.random.fold_in(key, 1), matrix.shape[:1])
    solution = lx.linear_solve(operator, y, SOLVER, options=options)
    return solution.stats["num_steps"]


def diagonal(
    matrix: Matrix, shift: Float[Array, ""], key: PRNGKeyArray, with_preconditioner: bool
) -> Array:
    operator, options = system(matrix, shift, key, with_preconditioner)
    inverse = lx.invert(operator, SOLVER, options=options)
    return tx.diagonal(inverse, jax.random.fold_in(key, 1), BUDGET).value


class Measured(NamedTuple):
    values: list[np.ndarray]
    seconds: float


def measure(function: Callable[..., Array], case: Case, repeats: int) -> list[Measured]:
    """Without and with the preconditioner."""
    both = []
    for with_preconditioner in (False, True):
        jitted = jax.jit(function, static_argnums=3)
        values, seconds = [], []
        for seed in range(repeats + 1):
            key = jax.random.key(seed)
            start = time.perf_counter()
            found = jitted(case.matrix, case.shift, key, with_preconditioner)
            values.append(np.asarray(found))
            seconds.append(time.perf_counter() - start)
        both.append(Measured(values[1:], float(np.median(seconds[1:]))))
    return both


def print_steps(cases: Sequence[Case], repeats: int) -> None:
    print(f"{'':<22}{'steps':>15}{'seconds':>18}")
    print(f"{'kernel, length':<22}{'without':>8}{'with':>7}{'without':>11}{'with':>7}")
    for case in cases:
        both = measure(num_steps, case, repeats)
        steps = [np.median(m.values) for m in both]
        counts = f"{steps[0]:>8.0f}{steps[1]:>7.0f}"
        times = f"{both[0].seconds:>11.2f}{both[1].seconds:>7.2f}"
        print(f"{case.label:<22}{counts}{times}", flush=True)


def print_diagonals(cases: Sequence[Case], repeats: int) -> None:
    print(f"{'':<22}{'error':>18}{'seconds':>18}")
    print(f"{'kernel, length':<22}{'without':>10}{'with':>8}{'without':>11}{'with':>7}")
    for case in cases:
        shifted = np.asarray(case.matrix) + float(case.shift) * np.eye(len(case.matrix))
        truth = np.diagonal(np.linalg.inv(shifted))
        both = measure(diagonal, case, repeats)
        off = [np.asarray(m.values) - truth for m in both]
        errors = [np.sqrt(np.mean(np.sum(o**2, 1)) / np.sum(truth**2)) for o in off]
        times = f"{both[0].seconds:>11.2f}{both[1].seconds:>7.2f}"
        print(f"{case.label:<22}{errors[0]:>10.1e}{errors[1]:>8.1e}{times}", flush=True)


PARTS = {"steps": print_steps, "diagonals": print_diagonals}


def main(num_points: int, repeats: int, parts: Sequence[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    cases = [case(*kernel, num_points) for kernel in KERNELS]
    print(f"n = {num_points}, {repeats} repeats.")
    for part in parts or PARTS:
        print(f"\n{part}\n")
        PARTS[part](cases, repeats)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    main(given.points, given.repeats, given.parts)
