"""Speed of values, gradients and compilation, side by side with matfree.

`python -m tests.benchmarks.speed`, from the root of the repository.

One dense matrix, n = 2000, with 1/i^2 for its spectrum, and 100 matvecs for either library:
50 probes for XTrace, 100 for XNysTrace. Both work in float32, get the matrix as an
argument, and are jitted and warmed; they run in turn, A B A B, so that whatever else the
machine does hits both. A ratio above 1 says that traceax is faster.

A fast gradient is worth what it is accurate: below stands the error of the derivative in
two directions dA, the matrix itself and one of a flat spectrum, whose exact value is tr dA.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray
from matfree import stochtrace

import traceax as tx
from tests.benchmarks.accuracy import with_spectrum

N, NUM_MATVECS = 2000, 100
REPEATS, COMPILATIONS = 9, 3
GRADIENT_KEYS = 50

Matrix = Float[Array, "n n"]
Function = Callable[[Matrix, PRNGKeyArray], Any]
Thunk = Callable[[], object]
Times = tuple[float, float]


def our_xtrace(matrix: Matrix, key: PRNGKeyArray) -> Array:
    return tx.xtrace(lx.MatrixLinearOperator(matrix), key, NUM_MATVECS).value


def our_xnystrace(matrix: Matrix, key: PRNGKeyArray) -> Array:
    operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
    return tx.xnystrace(operator, key, NUM_MATVECS).value


def of_matfree(integrand: Callable[..., Array], num_probes: int) -> Function:
    """The mean alone; of ours, `jit` drops the standard error that nobody asks for."""
    sampler = stochtrace.sampler_sphere(jnp.zeros(N, jnp.float32), num=num_probes)
    estimate = stochtrace.estimator_leave_one_out(integrand, sampler)

    def value(matrix: Matrix, key: PRNGKeyArray) -> Array:
        return estimate(lambda vector, matrix: matrix @ vector, key, matrix)

    return value


def pairs(wrap: Callable[[Function], Function]) -> dict[str, tuple[Function, Function]]:
    """Of either library, the same thing."""
    xtrace = of_matfree(stochtrace.leave_one_out_xtrace(), NUM_MATVECS // 2)
    xnystrace = of_matfree(stochtrace.leave_one_out_xnystrace(), NUM_MATVECS)
    return {
        "xtrace": (wrap(our_xtrace), wrap(xtrace)),
        "xnystrace": (wrap(our_xnystrace), wrap(xnystrace)),
    }


def seconds(thunk: Thunk) -> float:
    start = time.perf_counter()
    jax.block_until_ready(thunk())
    return time.perf_counter() - start


def in_turn(ours: Thunk, theirs: Thunk, repeats: int) -> Times:
    """The median time of each, in milliseconds."""
    times = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
    mine, others = zip(*times, strict=True)
    return 1e3 * median(mine), 1e3 * median(others)


def compilation(function: Function, *arguments: Array) -> Thunk:
    def compile_afresh() -> object:
        jax.clear_caches()
        return jax.jit(function).lower(*arguments).compile()

    return compile_afresh


def time_compilation(ours: Function, theirs: Function, *arguments: Array) -> Times:
    mine, other = compilation(ours, *arguments), compilation(theirs, *arguments)
    return in_turn(mine, other, COMPILATIONS)


def time_execution(ours: Function, theirs: Function, *arguments: Array) -> Times:
    mine, other = jax.jit(ours), jax.jit(theirs)
    in_turn(lambda: mine(*arguments), lambda: other(*arguments), 1)
    return in_turn(lambda: mine(*arguments), lambda: other(*arguments), REPEATS)


def derivative_error(gradient: Function, matrix: Matrix, direction: Matrix) -> float:
    """Relative, rms over the keys; from one key, both libraries draw the same probes."""
    gradient = jax.jit(gradient)
    keys = jax.random.split(jax.random.key(2), GRADIENT_KEYS)
    errors = [
        jnp.sum(gradient(matrix, key) * direction) / jnp.trace(direction) - 1
        for key in keys
    ]
    return float(jnp.sqrt(jnp.mean(jnp.stack(errors) ** 2)))


def print_times(matrix: Matrix) -> None:
    print(f"{'milliseconds':<30}{'traceax':>10}{'matfree':>10}{'ratio':>8}")
    key = jax.random.key(1)
    for time_, suffix in ((time_execution, ""), (time_compilation, ", compile")):
        for what, wrap in (("value", lambda f: f), ("value+grad", jax.value_and_grad)):
            for name, functions in pairs(wrap).items():
                mine, other = time_(*functions, matrix, key)
                label = f"{name} {what}{suffix}"
                print(f"{label:<30}{mine:>10.1f}{other:>10.1f}{other / mine:>8.2f}")


def print_derivative_errors(matrix: Matrix) -> None:
    print(f"\n{'derivative, rms error':<30}{'traceax':>10}{'matfree':>10}{'ratio':>8}")
    flat = with_spectrum(jnp.linspace(3.0, 1.0, N), jax.random.key(3))
    for name, functions in pairs(jax.grad).items():
        for label, direction in (("dA = A", matrix), ("dA flat", flat)):
            mine, other = (derivative_error(f, matrix, direction) for f in functions)
            label = f"{name}, {label}"
            print(f"{label:<30}{mine:>10.1e}{other:>10.1e}{other / mine:>8.2f}")


def main() -> None:
    # Of full rank: matfree takes a short cut where the sketch is rank-deficient.
    matrix = with_spectrum(jnp.arange(1.0, N + 1) ** -2, jax.random.key(0))
    print(f"n = {N}, {NUM_MATVECS} matvecs, {matrix.dtype}. Medians of {REPEATS} runs and")
    print(f"of {COMPILATIONS} compilations; ratios are matfree / traceax.\n")
    print_times(matrix)
    print_derivative_errors(matrix)


if __name__ == "__main__":
    main()
