"""What `trace` makes of operators that it knows nothing of, against the rooms behind it.

`python -m tests.benchmarks.second_batch [--keys 200]`, from the root of the repository.

The four spectra of `accuracy` and three between flat and decaying, n = 1000, float64, no
tags. Root mean square of the relative error over the keys, ratios of it, the share of keys
whose 95 % interval holds the truth, and the mean error of `trace` in standard deviations,
which is uncertain by 1/sqrt(keys): `trace` is unbiased.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float

import traceax as tx
from tests.benchmarks.accuracy import N, spectra, with_spectrum
from tests.benchmarks.scores import Matrix, ours, over_keys

BUDGETS = (12, 20, 40, 100)
ROOMS: tuple[Callable[..., tx.Estimate], ...] = (tx.xtrace, tx.hutchinson_trace, tx.trace)


def untagged(matrix: Matrix) -> lx.AbstractLinearOperator:
    structure = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
    return lx.FunctionLinearOperator(lambda vector: matrix @ vector, structure)


def between(n: int) -> dict[str, Float[Array, " n"]]:
    return {f"i^-{power}": (jnp.arange(n) + 1.0) ** -power for power in (0.5, 0.75, 1.0)}


def line(matrix: Matrix, num_matvecs: int, num_keys: int) -> str:
    truth, errors, held, bias = jnp.trace(matrix), [], [], 0.0
    for seed, room in enumerate(ROOMS):
        keys = jax.random.split(jax.random.key(seed), num_keys)
        run = over_keys(ours(room, untagged, num_matvecs))(matrix, keys)
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=200, help="keys for every number")
    main(parser.parse_args().keys)
