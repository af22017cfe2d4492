"""Diagonals and norms at equal matvecs against matfree, and how many entries the error
bars hold.

`python -m tests.benchmarks.diagonals [--keys 20]`, from the root of the repository.

Four spectra in a random orthonormal basis, n = 1000, float64, symmetric and
positive semidefinite; besides them an indefinite matrix of eigenvalues 1, -1/2, 1/3, ...
and a general one of singular values 1/i^2, its singular vectors random on either side.
The error is the root mean square over keys and entries, relative to that of the true
entries: |error| / |diagonal|. A ratio is traceax / matfree, below 1 in traceax's favour:

- *independent*: each library draws its own probes of the same distribution, random signs,
  points of the sphere for the Frobenius norm; with the standard error of the ratio.
- *paired*: both get the same probes, so only the arithmetic differs. None where they
  spend another number of matvecs on a probe (`monte_carlo_frobeniusnorm_squared`).
- *signs*: against matfree with random signs, which its documentation recommends for
  n > 100, where that is another distribution. It has no default.

*Held* is the share of entries, over all keys, that lie in `interval(0.95)`, for matfree in
its mean +- 1.96 standard errors. matfree has no counterpart of Diag++. A Frobenius norm has
a single entry, so it gets ten times as many keys.

At the end, the claims that the table is to bear out. All takes about four minutes.
"""

import argparse
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray
from matfree import stochtrace

import traceax as tx
from tests.benchmarks.accuracy import ROUNDING, Run, as_ratio, spectra, with_spectrum
from tests.benchmarks.scores import (
    SEMIDEFINITE,
    Estimator,
    Matrix,
    Score,
    all_together,
    claim_intervals,
    one_by_one,
    ours,
    over_keys,
    score,
    verdict,
)
from tests.benchmarks.speed import in_turn

N = 1000
BUDGETS = (24, 60, 100)
KEYS_OF_A_SCALAR = 10
REPEATS = 7

SYMMETRIC = (lx.symmetric_tag,)


OURS = {
    "hutchinson_diagonal": tx.hutchinson_diagonal,
    "diagpp": tx.diagpp,
    "xdiag": tx.xdiag,
    "xnysdiag": tx.xnysdiag,
    "row_norms_squared": tx.row_norms_squared,
    "frobenius_norm_squared": tx.frobenius_norm_squared,
}


class Rival(NamedTuple):
    """Of matfree: how many matvecs it spends on a probe, adjoint ones included."""

    integrand: Callable[..., Any]
    matvecs_per_probe: int
    of_samples: Callable[..., Any] = stochtrace.estimator_leave_one_out_mean_and_sem


def rival(name: str, tags: tuple[object, ...]) -> Rival | None:
    """For a symmetric matrix XSymRowNorm, which does without the adjoint."""
    monte_carlo = stochtrace.estimator_monte_carlo_mean_and_sem
    match name:
        case "hutchinson_diagonal":
            return Rival(stochtrace.monte_carlo_diagonal(), 1, monte_carlo)
        case "xdiag":
            return Rival(stochtrace.leave_one_out_xdiag(), 2)
        case "xnysdiag":
            return Rival(stochtrace.leave_one_out_xnysdiag(), 1)
        case "row_norms_squared" if tags:
            return Rival(stochtrace.leave_one_out_xsymrownorms_squared(), 2)
        case "row_norms_squared":
            return Rival(stochtrace.leave_one_out_xrownorms_squared(), 3)
        case "frobenius_norm_squared":
            return Rival(stochtrace.monte_carlo_frobeniusnorm_squared(), 1, monte_carlo)
    return None


def libraries(name: str) -> tuple[str, ...]:
    """The columns of a row, in the words of the docstring."""
    match name:
        case "diagpp":
            return ()
        case "frobenius_norm_squared":
            return ("independent", "signs")
    return ("independent", "paired")


class Problem(NamedTuple):
    """A matrix, what is known of it, and the estimators it is for."""

    label: str
    matrix: Matrix
    tags: tuple[object, ...]
    names: tuple[str, ...]

    def truth(self, name: str) -> Float[Array, "..."]:
        match name:
            case "row_norms_squared":
                return jnp.sum(self.matrix**2, axis=1)
            case "frobenius_norm_squared":
                return jnp.sum(self.matrix**2)
        return jnp.diagonal(self.matrix)


def problems() -> list[Problem]:
    key = jax.random.key(0)
    made = [
        Problem(label, with_spectrum(eigenvalues, key), SEMIDEFINITE, tuple(OURS))
        for label, eigenvalues in spectra(N).items()
    ]
    index = jnp.arange(1.0, N + 1)
    alternating = with_spectrum((-1) ** (index + 1) / index, key)
    return [
        *made,
        Problem("indefinite", alternating, SYMMETRIC, ("xdiag",)),
        Problem("general", general(index**-2, key), (), ("xdiag", "row_norms_squared")),
    ]


def general(singular_values: Float[Array, " n"], key: PRNGKeyArray) -> Matrix:
    n = singular_values.shape[0]
    left, right = jnp.linalg.qr(jax.random.normal(key, (2, n, n)))[0]
    return (left * singular_values) @ right.T


def theirs(name: str, library: str, rival: Rival, num_matvecs: int) -> Estimator:
    """Its error bar is 1.96 standard errors."""
    num = num_matvecs // rival.matvecs_per_probe
    zeros = jnp.zeros(N)
    on_sphere = name == "frobenius_norm_squared" and library != "signs"
    if library == "paired":  # what traceax draws from the same key
        sampler = tx.sphere if on_sphere else tx.rademacher
        structure = jax.ShapeDtypeStruct(zeros.shape, zeros.dtype)
        how = one_by_one if name == "hutchinson_diagonal" else all_together
        sampler = how(sampler, structure, num)
    elif on_sphere:
        sampler = stochtrace.sampler_sphere(zeros, num=num)
    else:
        sampler = stochtrace.sampler_signs(zeros, num=num)
    estimator = rival.of_samples(rival.integrand, sampler)

    def estimate(matrix: Matrix, key: PRNGKeyArray) -> Run:
        mean, sem = estimator(lambda vector: matrix @ vector, key)
        return Run(mean, mean - 1.96 * sem, mean + 1.96 * sem)

    return estimate


@cache
def repeat(
    library: str, name: str, num_matvecs: int, tags: tuple[object, ...]
) -> Callable[[Matrix, PRNGKeyArray], Run]:
    counterpart = rival(name, tags)
    if library == "traceax" or counterpart is None:
        as_operator = partial(lx.MatrixLinearOperator, tags=tags)
        return over_keys(ours(OURS[name], as_operator, num_matvecs))
    return over_keys(theirs(name, library, counterpart, num_matvecs))


class Cell(NamedTuple):
    """One estimator on one matrix with one budget."""

    name: str
    label: str
    num_matvecs: int
    traceax: Score
    matfree: dict[str, Score]

    def ratio(self, library: str) -> float:
        return self.traceax.error / self.matfree[library].error

    def ratio_to(self, library: str) -> str:
        if library not in self.matfree:
            return ""
        return as_ratio(self.traceax.error, self.matfree[library].error)

    def noise(self) -> str:
        """The standard error of the independent ratio."""
        if self.is_rounding:
            return ""
        noises = self.traceax.error_noise, self.matfree["independent"].error_noise
        return f" +- {self.ratio('independent') * math.hypot(*noises):.2f}"

    @property
    def is_rounding(self) -> bool:
        return min(s.error for s in (self.traceax, *self.matfree.values())) < ROUNDING


def measure(name: str, problem: Problem, num_matvecs: int, num_keys: int) -> Cell:
    if name == "frobenius_norm_squared":
        num_keys *= KEYS_OF_A_SCALAR
    keys = jax.random.split(jax.random.key(1), num_keys)
    # For probes that are independent of ours, matfree needs keys of its own.
    other = jax.random.split(jax.random.key(2), num_keys)

    def run(library: str) -> Score:
        repeated = repeat(library, name, num_matvecs, problem.tags)
        mine = library in ("traceax", "paired")
        outcome = repeated(problem.matrix, keys if mine else other)
        return score(outcome, problem.truth(name))

    others = {library: run(library) for library in libraries(name)}
    return Cell(name, problem.label, num_matvecs, run("traceax"), others)


def print_cells(cells: list[Cell]) -> None:
    print(
        f"{'':<41}{'error':>20}{'ratio traceax / matfree':>35}{'held':>20}\n"
        f"{'estimator':<24}{'matrix':<10}{'matvecs':>7}{'traceax':>10}{'matfree':>10}"
        f"{'independent':>17}{'paired':>9}{'signs':>9}{'traceax':>10}{'matfree':>10}"
    )
    for cell in cells:
        mine, other = cell.traceax, cell.matfree.get("independent")
        row = f"{cell.name:<24}{cell.label:<10}{cell.num_matvecs:>7}{mine.error:>10.2e}"
        if other is None:
            print(row + f"{'':>45}{mine.held:>10.1%}")
        else:
            ratios = "".join(f"{cell.ratio_to(x):>9}" for x in ("paired", "signs"))
            print(
                f"{row}{other.error:>10.2e}{cell.ratio_to('independent'):>9}"
                f"{cell.noise():>8}{ratios}{mine.held:>10.1%}{other.held:>10.1%}"
            )


def print_times(matrix: Matrix, num_matvecs: int) -> None:
    """Values alone: of ours, `jit` drops the standard error that nobody asks for."""
    print(f"{'milliseconds':<23}{'traceax':>10}{'matfree':>10}{'ratio':>8}")
    key = jax.random.key(3)
    for name in ("xdiag", "xnysdiag"):
        counterpart = rival(name, SEMIDEFINITE)
        assert counterpart is not None
        num = num_matvecs // counterpart.matvecs_per_probe
        sampler = stochtrace.sampler_signs(jnp.zeros(N), num=num)
        other = stochtrace.estimator_leave_one_out(counterpart.integrand, sampler)

        def value(matrix: Matrix, key: PRNGKeyArray, name: str = name) -> Any:
            operator = lx.MatrixLinearOperator(matrix, SEMIDEFINITE)
            return OURS[name](operator, key, num_matvecs).value

        def other_value(matrix: Matrix, key: PRNGKeyArray, other: Any = other) -> Any:
            return other(lambda vector, matrix: matrix @ vector, key, matrix)

        thunk = partial(jax.jit(value), matrix, key)
        other_thunk = partial(jax.jit(other_value), matrix, key)
        in_turn(thunk, other_thunk, 1)
        mine, others = in_turn(thunk, other_thunk, REPEATS)
        print(f"{name:<23}{mine:>10.2f}{others:>10.2f}{mine / others:>8.2f}")


# What the table is to show.


def claim_xdiag(cells: list[Cell]) -> None:
    [cell] = [c for c in cells if (c.name, *c[1:3]) == ("xdiag", "poly", 100)]
    ratios = cell.ratio("independent"), cell.ratio("paired")
    verdict(
        max(ratios) <= 0.7,
        "xdiag <= 0.7 of matfree's error, poly, 100 matvecs",
        f"{ratios[0]:.3f} independent, {ratios[1]:.3f} paired",
    )


def claim_xnysdiag(cells: list[Cell]) -> None:
    nystrom = [c for c in cells if c.name == "xnysdiag" and not c.is_rounding]
    worst = max(nystrom, key=lambda cell: cell.ratio("paired"))
    [poly] = [c for c in nystrom if (c.label, c.num_matvecs) == ("poly", 100)]
    for cell in (poly, worst):
        ratio = cell.ratio("paired")
        which = "largest of all above rounding, " if cell is worst else ""
        verdict(
            ratio <= 1.02,
            "xnysdiag <= 1.02 of matfree's error, paired",
            f"{ratio:.4f} ({which}{cell.label}, {cell.num_matvecs} matvecs)",
        )


def main(num_keys: int = 20) -> None:
    jax.config.update("jax_enable_x64", True)
    every = problems()
    cells = [
        measure(name, problem, budget, num_keys)
        for name in OURS
        for problem in every
        if name in problem.names
        for budget in BUDGETS
    ]
    print(f"n = {N}, {num_keys} keys.\n")
    print_cells(cells)
    [poly] = [problem.matrix for problem in every if problem.label == "poly"]
    print(f"\nMedians of {REPEATS}, poly, 100 matvecs, {poly.dtype}.\n")
    print_times(poly, 100)
    print()
    claim_xdiag(cells)
    claim_xnysdiag(cells)
    claim_intervals([(c.traceax, f"{c.name}, {c.label}, {c.num_matvecs}") for c in cells])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=20, help="keys for every number")
    main(parser.parse_args().keys)
