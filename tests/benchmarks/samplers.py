"""From which size on signs are as good as points of the sphere, and what either costs.

`python -m tests.benchmarks.samplers`, from the root of the repository; some minutes.

XTrace and XNysTrace of V diag(spectrum) V*, V random signs between two cosine transforms,
so that eigenvectors are spread over all entries; float32. Root mean square errors over the
keys, of the same operator by either sampler: above 1 the sphere is better. Beside them the
time of a draw of 50 probes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jax.scipy.fft import dct, idct

import traceax as tx
from tests.benchmarks.speed import in_turn

SIZES, NUM_KEYS, NUM_MATVECS = (300, 1000, 3000, 10_000, 30_000), 200, 40
SPECTRA = {
    "identity + 1 %": lambda i, n: 1 + 0.01 * i / n,
    "flat, 3 to 1": lambda i, n: 3 - 2 * i / n,
    "1/i^2": lambda i, n: i**-2.0,
    "0.7^i": lambda i, n: 0.7**i,
    "step, 1 to 1e-3": lambda i, n: jnp.where(i <= 50, 1.0, 1e-3),
}
SAMPLERS = (tx.sphere, tx.rademacher)


def mixed(spectrum: jax.Array) -> lx.AbstractLinearOperator:
    signs = jax.random.rademacher(jax.random.key(7), spectrum.shape, jnp.float32)

    def apply(v: jax.Array) -> jax.Array:
        inside = dct(signs * dct(v, norm="ortho"), norm="ortho")
        return idct(signs * idct(spectrum * inside, norm="ortho"), norm="ortho")

    space = jax.ShapeDtypeStruct(spectrum.shape, jnp.float32)
    return lx.FunctionLinearOperator(apply, space, lx.positive_semidefinite_tag)


def errors(n: int, name: str) -> str:
    spectrum = SPECTRA[name](jnp.arange(1.0, n + 1), n).astype(jnp.float32)
    operator, truth = mixed(spectrum), jnp.sum(spectrum.astype(jnp.float64))
    keys = jax.random.split(jax.random.key(1), NUM_KEYS)
    row = f"{n:>8} {name:<18}"
    for estimator in (tx.xtrace, tx.xnystrace):
        rms = []
        for sampler in SAMPLERS:

            def value(key: jax.Array, sampler: Any = sampler) -> jax.Array:
                return estimator(operator, key, NUM_MATVECS, sampler=sampler).value  # noqa: B023

            values = jax.jit(lambda keys: jax.lax.map(value, keys))(keys)
            rms.append(float(jnp.sqrt(jnp.mean((values - truth) ** 2)) / truth))
        row += f"{rms[0]:>10.1e}{rms[1]:>10.1e}{rms[1] / rms[0]:>7.2f}"
    return row


def draws(n: int) -> str:
    space = jax.ShapeDtypeStruct((n,), jnp.float32)
    thunks = []
    for sampler in SAMPLERS:
        draw = jax.jit(lambda key, sampler=sampler: sampler(key, space, 50))
        thunks.append(lambda draw=draw: draw(jax.random.key(2)))
    in_turn(thunks[0], thunks[1], 2)
    sphere, signs = in_turn(thunks[0], thunks[1], 15)
    return f"{n:>8} sphere {sphere:8.2f} ms, signs {signs:8.2f} ms"


def main() -> None:
    print(
        f"{NUM_MATVECS} matvecs, {NUM_KEYS} keys: sphere, signs, ratio; XTrace, XNysTrace"
    )
    for n in SIZES:
        for name in SPECTRA:
            print(errors(n, name), flush=True)
    for n in (*SIZES, 200_000):
        print(draws(n), flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
