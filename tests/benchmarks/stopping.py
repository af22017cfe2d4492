"""How often `adaptive_trace` fails its tolerance, and how well `deltashift` follows.

`python -m tests.benchmarks.stopping [--keys 400]`, from the root of the repository.

*Stopping*: n = 300, float64, six spectra in a random orthonormal basis, five tolerances,
operators tagged semidefinite and not. A failure is an answer that says it has converged and
is further from the truth than the tolerance. Beside it the mean number of matvecs.

*Following*: a symmetric matrix of n = 100 on a random walk, each step a given part of its
Frobenius norm, 60 steps of 20 matvecs: the error of a fresh Hutchinson estimate with as
many matvecs over that of DeltaShift, its standard error over its error, and how often
`interval(0.95)` holds the truth.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray

import traceax as tx
from tests.benchmarks.accuracy import with_spectrum

N, LIMIT = 300, 290
TOLERANCES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3)
DRIFT_N, NUM_STEPS, NUM_MATVECS = 100, 60, 20
RATES = (0.01, 0.03, 0.1, 0.3)

Matrix = Float[Array, "n n"]


def spectra(n: int) -> dict[str, Float[Array, " n"]]:
    i = jnp.arange(1.0, n + 1)
    return {
        "flat": jnp.linspace(3.0, 1.0, n),
        "slow": i**-0.5,
        "poly": i**-2.0,
        "exp": 0.9**i,
        "step": jnp.where(i <= n // 20, 1.0, 1e-3),
        "identity": jnp.ones(n),
    }


def stopping(tags: object) -> Callable[[Matrix, Array, float], Any]:
    def one(matrix: Matrix, rtol: Array, key: PRNGKeyArray) -> Any:
        structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
        operator = lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tags)
        return tx.adaptive_trace(operator, key, rtol=rtol, max_matvecs=LIMIT)

    return jax.jit(lambda m, keys, rtol: jax.lax.map(partial(one, m, rtol), keys))


def print_failures(num_keys: int) -> None:
    keys = jax.random.split(jax.random.key(1), num_keys)
    print(f"failures of {num_keys} (mean matvecs; share that claims to have converged)")
    print(f"{'':<24}" + "".join(f"{tolerance:>20.0e}" for tolerance in TOLERANCES))
    for kind, tags in (("xtrace", ()), ("xnystrace", lx.positive_semidefinite_tag)):
        run = stopping(tags)
        for name, eigenvalues in spectra(N).items():
            matrix = with_spectrum(eigenvalues, jax.random.key(0))
            cells = []
            for tolerance in TOLERANCES:
                result = run(matrix, keys, tolerance)
                wrong = jnp.abs(result.value / jnp.sum(eigenvalues) - 1) > tolerance
                failed = float(jnp.mean(wrong & result.converged))
                spent, claimed = jnp.mean(result.num_matvecs), jnp.mean(result.converged)
                cells.append(f"{failed:>8.1%} ({spent:>3.0f}; {claimed:>4.0%})")
            print(f"{kind + ', ' + name:<24}" + "".join(f"{cell:>20}" for cell in cells))


def walk(eigenvalues: Float[Array, " n"], rate: float) -> Float[Array, "t n n"]:
    start = with_spectrum(eigenvalues, jax.random.key(2))
    steps = jax.random.normal(jax.random.key(3), (NUM_STEPS, DRIFT_N, DRIFT_N))
    steps = steps + steps.transpose(0, 2, 1)
    steps = steps / jnp.linalg.norm(steps, axis=(1, 2), keepdims=True)
    return start + jnp.cumsum(rate * jnp.linalg.norm(start) * steps, axis=0)


@jax.jit
def follow(matrices: Float[Array, "t n n"], keys: PRNGKeyArray) -> tuple[Array, ...]:
    tracker = tx.deltashift(NUM_MATVECS)

    def operator(matrix: Matrix) -> lx.AbstractLinearOperator:
        return lx.MatrixLinearOperator(matrix, lx.symmetric_tag)

    def one(key: PRNGKeyArray) -> tuple[Array, ...]:
        def step(
            state: Any, given: tuple[Matrix, PRNGKeyArray]
        ) -> tuple[Any, tuple[Array, ...]]:
            matrix, key = given
            estimate, state = tracker.update(operator(matrix), state, key)
            fresh = tx.hutchinson_trace(
                operator(matrix), key, NUM_MATVECS, sampler=tx.sphere
            )
            low, high = estimate.interval()
            return state, (estimate.value, estimate.standard_error, low, high, fresh.value)

        first, rest = jax.random.split(key)
        state = tracker.init(operator(matrices[0]), first)
        keys = jax.random.split(rest, len(matrices) - 1)
        return jax.lax.scan(step, state, (matrices[1:], keys))[1]

    return jax.vmap(one)(keys)


def print_following(num_keys: int) -> None:
    keys = jax.random.split(jax.random.key(4), num_keys)
    print("\nfresh error / DeltaShift's; standard error / error; held (after 20 steps)")
    print(f"{'':<12}" + "".join(f"{f'a step {rate:.0%}':>24}" for rate in RATES))
    for name, eigenvalues in spectra(DRIFT_N).items():
        cells = []
        for rate in RATES:
            matrices = walk(eigenvalues, rate)
            late = [x[:, 20:] for x in follow(matrices, keys)]
            value, error, low, high, fresh = late
            truth = jnp.trace(matrices, axis1=1, axis2=2)[21:]
            rms = jnp.sqrt(jnp.mean((value - truth) ** 2))
            ratio = jnp.sqrt(jnp.mean((fresh - truth) ** 2)) / rms
            calibration = jnp.sqrt(jnp.mean(error**2)) / rms
            held = jnp.mean((low <= truth) & (truth <= high))
            cells.append(f"{ratio:>8.2f}{calibration:>7.2f}{held:>7.1%}")
        print(f"{name:<12}" + "".join(f"{cell:>24}" for cell in cells))


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=400)
    num_keys = parser.parse_args().keys
    print_failures(num_keys)
    print_following(num_keys // 2)


if __name__ == "__main__":
    main()
