"""Peak memory of a process that takes many long probes a batch at a time.

`python -m tests.benchmarks.memory`, from the root of the repository.

A diagonal matrix plus one of rank 5, n = 10^6, 1000 probes, 16 at a time, float32: value,
error bar and gradient of each estimator that streams, each in a process of its own, whose
peak is asked of the operating system (it includes Python, JAX and the compiler). All probes
at once would be 4 GB, twice, and again for the gradient.
"""

import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray

import traceax as tx

N, NUM_PROBES, BATCH, RANK, NUM_STEPS = 10**6, 1000, 16, 5, 4
NAMES = ("hutchinson_trace", "hutchinson_diagonal", "slq_trace", "laplacian")

Parameters = tuple[Float[Array, " n"], Float[Array, "n r"]]


def operator(parameters: Parameters) -> lx.AbstractLinearOperator:
    diagonal, factor = parameters
    return lx.FunctionLinearOperator(
        lambda v: diagonal * v + factor @ (factor.T @ v),
        jax.ShapeDtypeStruct((N,), jnp.float32),
        lx.positive_semidefinite_tag,
    )


def energy(x: Float[Array, " n"], parameters: Parameters) -> Float[Array, ""]:
    """A function whose Hessian is the operator at x = 0."""
    diagonal, factor = parameters
    along = factor.T @ x
    return jnp.sum(diagonal * (1 - jnp.cos(x))) + along @ along / 2


def estimate(name: str, parameters: Parameters, key: PRNGKeyArray) -> tx.Estimate:
    match name:
        case "slq_trace":
            return tx.slq_trace(
                operator(parameters),
                jnp.log,
                key,
                num_probes=NUM_PROBES,
                num_steps=NUM_STEPS,
                batch_size=BATCH,
            )
        case "laplacian":
            return tx.laplacian(
                energy, jnp.zeros(N), key, NUM_PROBES, args=parameters, batch_size=BATCH
            )
    estimator = getattr(tx, name)
    return estimator(operator(parameters), key, NUM_PROBES, batch_size=BATCH)


def run(name: str) -> None:
    def loss(
        parameters: Parameters, key: PRNGKeyArray
    ) -> tuple[Float[Array, ""], tx.Estimate]:
        result = estimate(name, parameters, key)
        return jnp.sum(result.value), result

    factor = jax.random.normal(jax.random.key(0), (N, RANK)) / N**0.5
    parameters = jnp.linspace(1.0, 2.0, N), factor
    start = time.perf_counter()
    (value, result), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        parameters, jax.random.key(1)
    )
    jax.block_until_ready((value, result, gradient))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    error = jnp.max(result.standard_error)
    print(f"{name:<22}{value:>12.6g}{error:>10.2g}{peak:>8.2f}{seconds:>9.0f}")


def main() -> None:
    print(f"n = {N}, {NUM_PROBES} probes, batches of {BATCH}.\n")
    print(f"{'':<22}{'value':>12}{'error':>10}{'peak/GB':>8}{'seconds':>9}", flush=True)
    for name in NAMES:
        command = [sys.executable, "-m", "tests.benchmarks.memory", name]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    run(sys.argv[1]) if len(sys.argv) > 1 else main()
