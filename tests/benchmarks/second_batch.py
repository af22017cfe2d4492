"""What `trace` makes of operators that it knows nothing of, and `diagonal` of any, against
the estimators by name.

`python -m tests.benchmarks.second_batch [--keys 200]`, from the root of the repository, and
`--diagonals [--keys 40]`.

The four spectra of `accuracy` and three between flat and decaying, n = 1000, float64, no
tags. Root mean square of the relative error over the keys, ratios of it, the share of keys
whose 95 % interval holds the truth, and the mean error of `trace` in standard deviations,
which is uncertain by 1/sqrt(keys): `trace` is unbiased.

Of diagonals the same spectra, n = 500, of general operators (singular vectors independent
on either side), symmetric and semidefinite ones; the error is |error| / |diagonal|, over
keys and entries, with its relative standard error, and what is held are entries.
"""

import argparse
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float

import traceax as tx
from tests.benchmarks.accuracy import N, spectra, with_spectrum
from tests.benchmarks.diagonals import general
from tests.benchmarks.scores import SEMIDEFINITE, Matrix, ours, over_keys, score

BUDGETS = (12, 20, 40, 100)
NAMED: tuple[Callable[..., tx.Estimate], ...] = (tx.xtrace, tx.hutchinson_trace, tx.trace)


N_OF_DIAGONAL = 500
KINDS = {"general": (), "symmetric": (lx.symmetric_tag,), "semidef.": SEMIDEFINITE}


def untagged(matrix: Matrix, tags: tuple[object, ...] = ()) -> lx.AbstractLinearOperator:
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    return lx.FunctionLinearOperator(lambda vector: matrix @ vector, structure, tags)


def between(n: int) -> dict[str, Float[Array, " n"]]:
    return {f"i^-{power}": (jnp.arange(n) + 1.0) ** -power for power in (0.5, 0.75, 1.0)}


def line(matrix: Matrix, num_matvecs: int, num_keys: int) -> str:
    truth, errors, held, bias = jnp.trace(matrix), [], [], 0.0
    for seed, estimator in enumerate(NAMED):
        keys = jax.random.split(jax.random.key(seed), num_keys)
        run = over_keys(ours(estimator, untagged, num_matvecs))(matrix, keys)
        errors.append(run.rms(truth))
        held.append(run.coverage(truth))
        bias = float((jnp.mean(run.value) - truth) / jnp.std(run.value))
    ratios = errors[2] / errors[0], errors[2] / errors[1]
    return (
        "".join(f"  {error:>10.2e}" for error in errors)
        + "".join(f"  {ratio:>10.3f}" for ratio in ratios)
        + "".join(f"  {share:>10.1%}" for share in held)
        + f"  {bias:>+6.2f}"
    )


def main(num_keys: int = 200) -> None:
    jax.config.update("jax_enable_x64", True)
    names = ["xtrace", "hutchinson", "trace", "/ xtrace", "/ hutch."]
    names += ["xtrace", "hutchinson", "trace"]
    head = "".join(f"  {name:>10}" for name in names)
    print(f"n = {N}, {num_keys} keys: errors, ratios of errors, shares held, bias.\n")
    print(f"{'spectrum':<9}{'matvecs':>7}{head}  {'bias':>6}")
    for spectrum, eigenvalues in (spectra(N) | between(N)).items():
        matrix = with_spectrum(eigenvalues, jax.random.key(0))
        for budget in BUDGETS:
            print(f"{spectrum:<9}{budget:>7}{line(matrix, budget, num_keys)}", flush=True)


def diagonal_line(kind: str, matrix: Matrix, num_matvecs: int, num_keys: int) -> str:
    named = tx.xnysdiag if kind == "semidef." else tx.xdiag
    scores = []
    for seed, estimator in enumerate((named, tx.hutchinson_diagonal, tx.diagonal)):
        keys = jax.random.split(jax.random.key(seed), num_keys)
        run = over_keys(ours(estimator, partial(untagged, tags=KINDS[kind]), num_matvecs))
        scores.append(score(run(matrix, keys), jnp.diagonal(matrix)))
    ratios = scores[2].error / scores[0].error, scores[2].error / scores[1].error
    return (
        "".join(f"  {score.error:>10.2e}" for score in scores)
        + "".join(f"  {ratio:>10.3f}" for ratio in ratios)
        + "".join(f"  {score.held:>10.1%}" for score in scores)
        + f"  {scores[2].error_noise:>6.1%}"
    )


def main_of_diagonals(num_keys: int = 40) -> None:
    jax.config.update("jax_enable_x64", True)
    names = ["xdiag", "hutchinson", "diagonal", "/ xdiag", "/ hutch."]
    names += ["xdiag", "hutchinson", "diagonal"]
    head = "".join(f"  {name:>10}" for name in names)
    print(f"n = {N_OF_DIAGONAL}, {num_keys} keys: errors, ratios of errors, shares held.")
    print("xnysdiag in the place of xdiag where the operator is semidefinite.\n")
    print(f"{'spectrum':<9}{'kind':<9}{'matvecs':>7}{head}  {'noise':>6}")
    for spectrum, values in (spectra(N_OF_DIAGONAL) | between(N_OF_DIAGONAL)).items():
        for kind in KINDS:
            make = general if kind == "general" else with_spectrum
            matrix = make(values, jax.random.key(0))
            for budget in BUDGETS:
                figures = diagonal_line(kind, matrix, budget, num_keys)
                print(f"{spectrum:<9}{kind:<9}{budget:>7}{figures}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, help="keys for every number")
    parser.add_argument("--diagonals", action="store_true", help="of diagonals")
    arguments = parser.parse_args()
    if arguments.diagonals:
        main_of_diagonals(arguments.keys or 40)
    else:
        main(arguments.keys or 200)
