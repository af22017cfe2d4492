"""How often intervals hold the truth: spectra x budgets x estimators, and what bars cost.

`python -m tests.benchmarks.coverage [RUNS]` prints, for each, the share of runs whose
interval(0.95) holds the trace, the root-mean-square error over that of the bars, and the
median bar over the median error.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx

N = 96
PSD = lx.positive_semidefinite_tag
I = np.arange(N)  # noqa: E741
SPECTRA: dict[str, np.ndarray] = {
    "flat, 3 to 1": np.linspace(3, 1, N),
    "1/i^2": (I + 1.0) ** -2,
    "0.7^i": 0.7**I,
    "5 ones, 1e-3": np.where(I < 5, 1, 1e-3),
    **{f"I + {c:g} uu*": 1 + c * (I == 0) for c in (1e-6, 0.1, 1.0, 3.0, 100.0)},
    "I + 1 (two)": 1 + 1.0 * (I < 2),
}
Estimate = Callable[[Any, Any, int], tx.Estimate]
ESTIMATORS: dict[str, tuple[Estimate, tuple[int, ...]]] = {
    "hutchinson_trace": (tx.hutchinson_trace, (6, 12, 20)),
    "xtrace": (tx.xtrace, (6, 12, 20)),
    "xnystrace": (tx.xnystrace, (4, 6, 10, 20)),
    "adaptive_trace": (
        lambda a, k, m: tx.adaptive_trace(a, k, rtol=0, max_matvecs=m),
        (32,),
    ),
    "frobenius_norm_squared": (tx.frobenius_norm_squared, (6, 12, 20)),
}


def basis() -> Any:
    return np.linalg.qr(np.random.default_rng(0).normal(size=(N, N)))[0]


def measure(
    estimate: Estimate, spectrum: np.ndarray, m: int, runs: int
) -> tuple[float, ...]:
    turn = basis()
    matrix = jnp.asarray((turn * spectrum) @ turn.T)
    is_norm = estimate is tx.frobenius_norm_squared
    truth = float(np.sum(spectrum**2 if is_norm else spectrum))
    structure = jax.ShapeDtypeStruct((N,), matrix.dtype)

    def one(key: Any) -> tuple[Any, ...]:
        operator = lx.FunctionLinearOperator(lambda v: matrix @ v, structure, PSD)
        found = estimate(operator, key, m)
        low, high = found.interval()
        return (low <= truth) & (truth <= high), found.value - truth, found.standard_error

    keys = jax.random.split(jax.random.key(7), runs)
    holds, error, bar = map(np.asarray, jax.jit(lambda keys: jax.lax.map(one, keys))(keys))
    z = np.sqrt(np.mean(error**2) / np.mean(bar**2))
    return float(holds.mean()), float(z), float(np.median(bar) / np.median(abs(error)))


def main(runs: int) -> None:
    jax.config.update("jax_enable_x64", True)
    print(f"n = {N}, {runs} keys: intervals that hold, rms error / rms bar, bar / error")
    for name, (estimate, budgets) in ESTIMATORS.items():
        for m in budgets:
            print(f"{name}, {m} matvecs")
            for label, spectrum in SPECTRA.items():
                holds, z, wide = measure(estimate, spectrum, m, runs)
                print(f"    {label:16} {holds:6.3f} {z:8.2f} {wide:8.2f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
