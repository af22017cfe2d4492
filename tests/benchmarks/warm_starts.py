"""What `guess=` saves in a fit: the last step's solution as the start of the next solve.

`python -m tests.benchmarks.warm_starts [--points 2500] [--steps 100]`, from the root of the
repository.

Adam on log length, log amplitude and log noise of a Matérn 3/2 kernel in two dimensions,
from a noise of e^-8, float64, 100 matvecs for the likelihood and the solve to 1e-4: the
applications of a whole fit, cold and with the guess, and the parameters that it ends with.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax

import traceax as tx


def main(num_points: int, num_steps: int) -> None:
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.random((num_points, 2)))
    noise = 0.1 * rng.standard_normal(num_points)
    y = jnp.sin(6 * x[:, 0]) * jnp.cos(4 * x[:, 1]) + jnp.asarray(noise)
    squares = jnp.sum((x[:, None] - x) ** 2, axis=-1)
    distance = jnp.sqrt(3 * jnp.maximum(squares, 1e-12))
    structure = jax.ShapeDtypeStruct((num_points,), x.dtype)
    optimiser = optax.adam(0.02)

    def loss(p: Any, key: Any, guess: Any) -> Any:
        r = distance * jnp.exp(-p[0])
        kernel = jnp.exp(p[1]) * (1 + r) * jnp.exp(-r)
        tag = lx.positive_semidefinite_tag
        operator = lx.FunctionLinearOperator(lambda v: kernel @ v, structure, tag)
        how = {"shift": jnp.exp(p[2]), "rtol": 1e-4, "guess": guess}
        both = tx.inv_quad_logdet(operator, y, key, 100, **how)
        spent = jnp.asarray(both.inv_quad.num_matvecs)
        return (both.inv_quad.value + both.logdet.value) / 2, (both.solution, spent)

    @jax.jit
    def step(p: Any, state: Any, key: Any, guess: Any) -> Any:
        (_, aux), slope = jax.value_and_grad(loss, has_aux=True)(p, key, guess)
        updates, state = optimiser.update(slope, state)
        return optax.apply_updates(p, updates), state, *aux

    print(f"n = {num_points}, {num_steps} steps: applications, seconds, parameters")
    spent = {}
    for name in ("cold", "with guess="):
        p = jnp.array([-1.0, 0.0, -8.0])
        state, solution, counts = optimiser.init(p), jnp.zeros(num_points), []
        start = time.perf_counter()
        for number in range(num_steps):
            guess = None if name == "cold" else solution
            p, state, solution, count = step(p, state, jax.random.key(number), guess)
            counts.append(int(count))
        spent[name] = sum(counts)
        seconds = time.perf_counter() - start
        print(f"{name:<12}{spent[name]:>8}{seconds:>8.0f}  {np.round(p, 3)}", flush=True)
    print(f"share of the applications: {spent['with guess='] / spent['cold']:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=2500)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    main(given.points, given.steps)
