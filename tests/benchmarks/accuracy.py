"""Accuracy at equal matvecs against matfree, and how often the error bars hold the truth.

`python -m tests.benchmarks.accuracy [--keys 200]`, from the root of the repository.

Four spectra of the XTrace paper in a random orthonormal basis, n = 1000, float64. The root
mean square of the relative error is over the keys; a ratio below 1 is in traceax's favour:

- *independent*: each library draws its own probes. Over 200 keys such a ratio is uncertain
  by about 7 %.
- *paired*: both get the same probes, so only the arithmetic differs.
"""

import argparse
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray
from matfree import stochtrace

import traceax as tx

N = 1000
BUDGETS = (20, 60, 100)
ROUNDING = 1e-13


class Run(NamedTuple):
    """A value and the ends of its 95 % interval; after `repeat`, one entry a key."""

    value: Float[Array, "*keys"]
    low: Float[Array, "*keys"]
    high: Float[Array, "*keys"]

    def rms(self, truth: Float[Array, ""]) -> float:
        return float(jnp.sqrt(jnp.mean((self.value / truth - 1) ** 2)))

    def coverage(self, truth: Float[Array, ""]) -> float:
        return float(jnp.mean((self.low <= truth) & (truth <= self.high)))


Estimator = Callable[[Float[Array, "n n"], PRNGKeyArray], Run]

OURS = {
    "hutchinson": tx.hutchinson_trace,
    "hutchpp": tx.hutchpp_trace,
    "na_hutchpp": tx.na_hutchpp_trace,
    "xtrace": tx.xtrace,
    "xnystrace": tx.xnystrace,
}
# Of matfree: the integrand, and how many matvecs it spends on a probe.
THEIRS = {
    "xtrace": (stochtrace.leave_one_out_xtrace(), 2),
    "xnystrace": (stochtrace.leave_one_out_xnystrace(), 1),
}


def spectra(n: int) -> dict[str, Float[Array, " n"]]:
    index = jnp.arange(n)
    return {
        "flat": jnp.linspace(3.0, 1.0, n),
        "poly": (index + 1.0) ** -2,
        "exp": 0.7**index,
        "step": jnp.where(index < 50, 1.0, 1e-3),
    }


def with_spectrum(
    eigenvalues: Float[Array, " n"], key: PRNGKeyArray
) -> Float[Array, "n n"]:
    n = eigenvalues.shape[0]
    basis, _ = jnp.linalg.qr(jax.random.normal(key, (n, n)))
    matrix = (basis * eigenvalues) @ basis.T
    return (matrix + matrix.T) / 2


def ours(name: str, num_matvecs: int) -> Estimator:
    def estimate(matrix: Float[Array, "n n"], key: PRNGKeyArray) -> Run:
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        result = OURS[name](operator, key, num_matvecs)
        return Run(result.value, *result.interval(0.95))

    return estimate


def theirs(name: str, num_matvecs: int, *, paired: bool) -> Estimator:
    """Resphered, which is matfree's default; its error bar is 1.96 standard errors."""
    integrand, matvecs_per_probe = THEIRS[name]
    num_probes = num_matvecs // matvecs_per_probe
    sampler = stochtrace.sampler_sphere(jnp.zeros(N), num=num_probes)
    if paired:  # what traceax draws from the same key
        structure = jax.ShapeDtypeStruct((N,), jnp.float64)
        sampler = partial(tx.sphere, structure=structure, num_probes=num_probes)
    estimator = stochtrace.estimator_leave_one_out_mean_and_sem(integrand, sampler)

    def estimate(matrix: Float[Array, "n n"], key: PRNGKeyArray) -> Run:
        mean, sem = estimator(lambda vector: matrix @ vector, key)
        return Run(mean, mean - 1.96 * sem, mean + 1.96 * sem)

    return estimate


@cache
def repeat(library: str, name: str, num_matvecs: int) -> Callable[..., Run]:
    """One key after another: matfree's `cond` under `vmap` would run both its branches,
    and its QR over many keys at once can hang on jax 0.10."""
    match library:
        case "traceax":
            estimate = ours(name, num_matvecs)
        case _:
            estimate = theirs(name, num_matvecs, paired=library == "matfree, paired")
    return jax.jit(lambda matrix, keys: jax.lax.map(partial(estimate, matrix), keys))


def as_ratio(ours: float, theirs: float) -> str:
    return "rounding" if min(ours, theirs) < ROUNDING else f"{ours / theirs:.3f}"


class Case(NamedTuple):
    """One spectrum and one budget; every run, over all keys."""

    spectrum: str
    num_matvecs: int
    truth: Float[Array, ""]
    traceax: dict[str, Run]
    matfree: dict[str, Run]
    paired: dict[str, Run]


def measure(
    spectrum: str, matrix: Float[Array, "n n"], num_matvecs: int, num_keys: int
) -> Case:
    keys = jax.random.split(jax.random.key(1), num_keys)
    # Both libraries turn a key into the same normal numbers: for probes that are
    # independent of ours, matfree needs keys of its own.
    other = jax.random.split(jax.random.key(2), num_keys)

    def run(library: str, name: str, keys: PRNGKeyArray) -> Run:
        return repeat(library, name, num_matvecs)(matrix, keys)

    return Case(
        spectrum,
        num_matvecs,
        jnp.trace(matrix),
        {name: run("traceax", name, keys) for name in OURS},
        {name: run("matfree", name, other) for name in THEIRS},
        {name: run("matfree, paired", name, keys) for name in THEIRS},
    )


def print_errors(cases: list[Case]) -> None:
    print(
        f"{'estimator':<10}{'spectrum':<9}{'matvecs':>7}  {'rms traceax':>11}"
        f"  {'rms matfree':>11}  {'independent':>11}  {'paired':>8}"
    )
    for name in THEIRS:
        for case in cases:
            runs = case.traceax[name], case.matfree[name], case.paired[name]
            mine, other, paired = (run.rms(case.truth) for run in runs)
            print(
                f"{name:<10}{case.spectrum:<9}{case.num_matvecs:>7}  {mine:>11.2e}"
                f"  {other:>11.2e}  {as_ratio(mine, other):>11}"
                f"  {as_ratio(mine, paired):>8}"
            )


def print_coverage(cases: list[Case]) -> None:
    theirs = "".join(f"  {'matfree ' + name:>17}" for name in THEIRS)
    print(f"{'spectrum':<9}{'matvecs':>7}" + "".join(f"{n:>12}" for n in OURS) + theirs)
    for case in cases:
        shares = [run.coverage(case.truth) for run in case.traceax.values()]
        others = [run.coverage(case.truth) for run in case.matfree.values()]
        print(
            f"{case.spectrum:<9}{case.num_matvecs:>7}"
            + "".join(f"{share:>12.1%}" for share in shares)
            + "".join(f"{share:>19.1%}" for share in others)
        )


def main(num_keys: int = 200) -> None:
    jax.config.update("jax_enable_x64", True)
    cases = []
    for spectrum, eigenvalues in spectra(N).items():
        matrix = with_spectrum(eigenvalues, jax.random.key(0))
        cases += [measure(spectrum, matrix, budget, num_keys) for budget in BUDGETS]
    print(f"n = {N}, {num_keys} keys. Relative error; ratios are traceax / matfree.\n")
    print_errors(cases)
    noise = (0.9 * 0.1 / num_keys) ** 0.5
    print("\nShare of the keys whose 95 % interval holds the truth (a share of 90 % is")
    print(f"uncertain by {noise:.1%}).\n")
    print_coverage(cases)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=200, help="keys for every number")
    main(parser.parse_args().keys)
