"""Divergences of fields by a sketch, and by plain probes: errors, error bars and times.

`python -m tests.benchmarks.divergences`, from the root of the repository.

n = 300, float32, 40 products with the Jacobian, 100 keys. *decaying*: singular values
i^-1.5; *network*: a tanh network of width 128 whose weights decay, as after training;
*flat*: a random Jacobian; *advection*: differences between neighbours, nearly skew. *plain*
is `sampler=tx.rademacher`, the mean of 40 forms. *rms* is the error; *held*: how often
`interval(0.95)` holds the truth; *ms*: one value; *slope ms*: value and gradient in the
parameters of the field.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import traceax as tx

N, PRODUCTS, KEYS = 300, 40, 100


def fields() -> dict[str, tuple[Callable[[Any, Any], Any], Any]]:
    keys = jax.random.split(jax.random.key(0), 6)
    left, right = (jnp.linalg.qr(jax.random.normal(k, (N, N)))[0] for k in keys[:2])
    decay = jnp.arange(1.0, N + 1) ** -1.5
    first = jax.random.normal(keys[2], (128, N)) * decay[:128, None]
    second = jax.random.normal(keys[3], (N, 128)) / 11
    random = jax.random.normal(keys[4], (N, N)) / N**0.5
    return {
        "decaying": (lambda x, p: left @ (p * (right.T @ x)), decay),
        "network": (lambda x, p: second @ jnp.tanh(p @ x), first),
        "flat": (lambda x, p: p @ jnp.sin(x), random),
        "advection": (
            lambda x, p: p * (jnp.roll(x, 1) - jnp.roll(x, -1)) * x,
            decay * 0 + 1,
        ),
    }


def milliseconds(fn: Callable[[Any], Any], keys: Any) -> float:
    jax.block_until_ready(fn(keys[0]))
    times = []
    for key in keys[:30]:
        start = time.perf_counter()
        jax.block_until_ready(fn(key))
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def main() -> None:
    x, keys = jnp.linspace(0.5, 1.5, N), jax.random.split(jax.random.key(1), KEYS)
    columns = ("rms", "bar", "held", "ms", "slope ms")
    print(f"{'':<22}" + "".join(f"{column:>10}" for column in columns))
    for name, (field, parameters) in fields().items():
        exact = float(jnp.trace(jax.jacfwd(field)(x, parameters)))
        for kind, sampler in (("sketch", None), ("plain", tx.rademacher)):

            def run(p: Any, key: Any, field: Any = field, sampler: Any = sampler) -> Any:
                return tx.divergence(field, x, key, PRODUCTS, args=p, sampler=sampler)

            one = jax.jit(lambda key, p=parameters, run=run: run(p, key))
            slope = jax.jit(
                lambda key, p=parameters, run=run: jax.value_and_grad(
                    lambda p: run(p, key).value
                )(p)
            )
            found = [one(key) for key in keys]
            errors = np.array([float(e.value) - exact for e in found])
            bars = np.array([float(e.standard_error) for e in found])
            ends = [e.interval(0.95) for e in found]
            held = np.mean([float(low) <= exact <= float(high) for low, high in ends])
            rms, bar = (np.sqrt(np.mean(values**2)) for values in (errors, bars))
            print(
                f"{name + ', ' + kind:<22}{rms:>10.2g}{bar:>10.2g}{held:>10.0%}"
                f"{milliseconds(one, keys):>10.2f}{milliseconds(slope, keys):>10.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
