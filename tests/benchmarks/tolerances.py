"""How often `adaptive` meets its tolerance, and what that costs against a fixed budget.

`python -m tests.benchmarks.tolerances [--keys 100]`, from the root of the repository.

n = 500, float64, three spectra in a random orthonormal basis (`flat`, 1 to 2; `poly`,
i^-1.5 + 1e-3; `step`, 25 ones and 1e-2), `rtol=1e-2`, first budget 32, at most 10,000
matvecs. *met*: runs that are within the tolerance of the truth, among all; *claimed*: runs
that say so. *matvecs*: the mean over the runs. *fixed*: the matvecs of the least budget
among 32, 64, 128, .. with which a single run is within the tolerance for 95 % of the keys.
Only someone who knows the truth knows this budget. *ratio*: matvecs over fixed.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float

import traceax as tx
from tests.benchmarks.accuracy import with_spectrum

N = 500
RTOL = 1e-2
BUDGETS = [32 * 2**j for j in range(9)]
Matrix = Float[Array, "n n"]


class Function(NamedTuple):
    """An estimator of something of a matrix, and the exact answer."""

    run: Callable[[Any, Any, int], tx.Estimate]
    exact: Callable[[Any], Any]
    tags: Any = lx.positive_semidefinite_tag


def eigenvalues(fn: Callable[[Array], Array]) -> Callable[[Matrix], Array]:
    return lambda matrix: jnp.sum(fn(jnp.linalg.eigvalsh(matrix)))


FUNCTIONS = {
    "trace": Function(tx.trace, jnp.trace),
    "hutchinson_trace": Function(tx.hutchinson_trace, jnp.trace),
    "frobenius_norm_squared": Function(
        tx.frobenius_norm_squared, lambda a: jnp.sum(a**2), ()
    ),
    "diagonal": Function(tx.diagonal, jnp.diag),
    "logdet": Function(
        lambda a, k, m: tx.logdet(a, k, m, shift=0.01),
        eigenvalues(lambda x: jnp.log(x + 0.01)),
    ),
    "function_trace": Function(
        lambda a, k, m: tx.function_trace(a, jnp.sqrt, k, m), eigenvalues(jnp.sqrt)
    ),
    "slq_trace, 20 steps": Function(
        lambda a, k, m: tx.slq_trace(a, jnp.sqrt, k, num_probes=m // 20, num_steps=20),
        eigenvalues(jnp.sqrt),
    ),
    "arnoldi_trace": Function(
        lambda a, k, m: tx.arnoldi_trace(a, jnp.exp, k, m), eigenvalues(jnp.exp), ()
    ),
}


def spectra() -> dict[str, Float[Array, " n"]]:
    i = jnp.arange(1.0, N + 1)
    return {
        "flat": jnp.linspace(2.0, 1.0, N),
        "poly": i**-1.5 + 1e-3,
        "step": jnp.where(i <= N // 20, 1.0, 1e-2),
    }


def operator(matrix: Matrix, tags: Any) -> lx.AbstractLinearOperator:
    structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tags)


def distance(value: Any, truth: Any) -> float:
    return float(jnp.linalg.norm(value - truth) / jnp.linalg.norm(truth))


def fixed(run: Callable[[Any, int], tx.Estimate], keys: Any, truth: Any) -> int:
    """The least budget with which 95 % of single runs are within the tolerance."""
    for budget in BUDGETS:
        missed = 0
        for key in keys:
            missed += distance(run(key, budget).value, truth) > RTOL
            if missed > 0.05 * len(keys):
                break
        else:
            return int(run(keys[0], budget).num_matvecs)
    return 2 * BUDGETS[-1]


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=100)
    keys = jax.random.split(jax.random.key(1), parser.parse_args().keys)
    columns = ("met", "claimed", "matvecs", "fixed", "ratio")
    print(f"{'':<32}" + "".join(f"{column:>9}" for column in columns))
    for name, function in FUNCTIONS.items():
        for spectrum, values in spectra().items():
            jax.clear_caches()  # hundreds of programs use up a process's memory maps
            matrix = with_spectrum(values, jax.random.key(0))
            truth, a = function.exact(matrix), operator(matrix, function.tags)
            run = lambda key, m, a=a, f=function: f.run(a, key, m)  # noqa: E731
            found = [tx.adaptive(run, key, rtol=RTOL) for key in keys]
            met = np.mean([distance(e.value, truth) <= RTOL for e in found])
            claimed = np.mean([bool(e.converged) for e in found])
            spent = np.mean([int(e.num_matvecs) for e in found])
            best = fixed(run, keys, truth)
            print(
                f"{name + ', ' + spectrum:<32}{met:>9.0%}{claimed:>9.0%}{spent:>9.0f}"
                f"{best:>9d}{spent / best:>9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
