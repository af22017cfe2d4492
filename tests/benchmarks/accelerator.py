"""Every public function in float32 on an accelerator, and its speed against matfree there.

`python -m tests.benchmarks.accelerator [--small]`, from the root of the repository, on the
device that JAX finds; six minutes at most (three on a CPU, with `--small` two). What there
was no time for is named, and so is an error. Programs are compiled afresh, and never read
from a folder. JAX_PLATFORMS, where it is set, must name the CPU too: `cuda,cpu`.

The first table has two rows for each call of `tests/calls.py`, which stands for a public
function: of a matrix of *mild* spectrum, from 1 to 2, and of a *steep* one, 1/i^2 + 1e-3.
*value* and *bar* (the standard error) are those in float32 on the device; *value 64* and
*bar 64* those in float64 on the CPU, with the same key. *apart* is how far the two values
are from one another, in their bars' root sum of squares; *bars* the ratio of the bars. Of
answers with several entries, the one that is worst in this is shown. What is below 1e-5 of
the largest entry counts as rounding in both. `!` stands where a number is NaN, where the
values are more than 4 bars apart, or one bar is more than 5 times the other. *compile* is
the seconds that tracing and compiling take on the device.

The second table has milliseconds, medians of runs in turn; MiB that the compiler sets aside
beside arguments and results; and seconds to trace and compile. Ratios above 1 say that
traceax is faster. The matrix has 1/i^2 for its spectrum; the grid is the five-point
Laplacian of a square; either has 50 probes, 100 matvecs. The kernel is Gaussian, of random
points in the plane, with noise 1e-2, made once from its two parameters, in which the
gradient is; 200 matvecs, matfree's as 10 probes of 20 steps. traceax makes its own products
in full precision. The matrix's are in JAX's default, and so are matfree's own: on GPUs and
TPUs it rounds. Without matfree, traceax stands alone.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

import traceax as tx
from tests.calls import CALLS
from tests.matrices import hermitian

Function = Callable[..., Any]
Matrix = Float[Array, "n n"]
Points = Float[Array, "n 2"]
Theta = Float[Array, "2"]  # the logarithms of length scale and noise

ROUNDING = 1e-5
APART, BARS = 4.0, 5.0
NUM_PROBES, CHAINS, STEPS = 50, 10, 20
# Seconds after which no further row begins, of either table.
LIMITS = (220, 320)
# Of programs whose time does not matter.
QUICK: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
PSD = lx.positive_semidefinite_tag


class Sizes(NamedTuple):
    """The sizes of both tables' matrices, of the grid's side, and how often to time."""

    calls: int
    matrix: int
    side: int
    repeats: int


FULL, SMALL = Sizes(500, 4000, 447, 7), Sizes(70, 300, 60, 3)


def compiled(function: Function, *arguments: Any) -> tuple[Any, float]:
    """Compile a function afresh, and say how many seconds that took."""
    jax.clear_caches()
    start = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    return program, time.perf_counter() - start


def unless(late: Callable[[], bool], make: Callable[[], Iterator[str]]) -> list[str]:
    """Make rows if there is time. An error becomes a row, so that others follow it."""
    if late():
        return ["no time left"]
    try:
        return list(make())
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        return [f"! {type(error).__name__}: {first[:90]}"]


# Values and error bars.


class Answer(NamedTuple):
    """The entries of an estimate, one after the other, and their standard errors."""

    value: np.ndarray
    bar: np.ndarray


def spectra(n: int) -> dict[str, np.ndarray]:
    index = np.arange(n)
    return {"mild": 1.0 + index % 5 / 4, "steep": (index + 1.0) ** -2 + 1e-3}


def both(name: str, matrix: Any, key: Any) -> Any:
    estimate = CALLS[name](matrix, key)
    return estimate.value, estimate.standard_error


def answers(program: Function, matrices: list[np.ndarray], dtype: Any) -> list[Answer]:
    """Run a program on each matrix, on the device that is the default."""

    def flat(tree: Any) -> np.ndarray:
        return np.concatenate([np.ravel(np.asarray(x)) for x in jax.tree.leaves(tree)])

    found = [program(jnp.asarray(m, dtype), jax.random.key(1)) for m in matrices]
    return [Answer(*(flat(tree).astype(float) for tree in one)) for one in found]


def in_double(name: str, matrices: list[np.ndarray]) -> list[Answer]:
    """Make the same call in float64, on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        program = jax.jit(partial(both, name), compiler_options=QUICK)
        return answers(program, matrices, jnp.float64)


def on_device(name: str, matrices: list[np.ndarray]) -> tuple[list[Answer], float]:
    """Make the call in float32, on the default device; with the seconds of compilation."""
    arguments = jnp.asarray(matrices[0], jnp.float32), jax.random.key(1)
    program, seconds = compiled(partial(both, name), *arguments)
    return answers(program, matrices, jnp.float32), seconds


def compared(single: Answer, double: Answer) -> str:
    """Write the columns that compare two answers, for the entry where they differ most."""
    floor = ROUNDING * np.max(np.abs(double.value)) + np.finfo(float).tiny
    combined = np.hypot(single.bar, double.bar) + floor
    apart = np.abs(single.value - double.value) / combined
    same = single.bar == double.bar  # maybe infinite
    bars = np.where(same, 1.0, (single.bar + floor) / (double.bar + floor))
    strain = np.maximum(apart / APART, np.maximum(bars, 1 / bars) / BARS)
    worst = np.argmax(strain)  # the first NaN, if there is one
    numbers = "".join(
        f"{answer.value[worst]:>12.5g}{answer.bar[worst]:>9.1e}"
        for answer in (single, double)
    )
    flag = " " if strain[worst] <= 1 else "!"
    return f"{numbers}{apart[worst]:>9.0e}{bars[worst]:>8.4f} {flag}"


def rows(name: str, matrices: dict[str, np.ndarray]) -> Iterator[str]:
    """The row of each matrix, without the name."""
    # In double first, so that what Python does once is not counted as compilation.
    double = in_double(name, list(matrices.values()))
    single, seconds = on_device(name, list(matrices.values()))
    for spectrum, *pair in zip(matrices, single, double, strict=True):
        yield f"{spectrum:<6}{compared(*pair)}{seconds:>9.2f}"


def print_values(n: int, late: Callable[[], bool]) -> None:
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        matrices = {name: np.asarray(hermitian(x)) for name, x in spectra(n).items()}
    print(f"n = {n}, one key.\n")
    columns = f"{'value':>12}{'bar':>9}{'value 64':>12}{'bar 64':>9}"
    columns += f"{'apart':>9}{'bars':>8}{'compile':>11}"
    print(f"{'':<24}{'':<6}{columns}")
    for name in CALLS:
        for row in unless(late, partial(rows, name, matrices)):
            print(f"{name:<24}{row}", flush=True)


# Times and memory.


class Work(NamedTuple):
    """The same of either library, and its arguments."""

    label: str
    ours: Function
    theirs: Function | None
    arguments: tuple[Array, ...]


def of_matfree(module: str) -> Any:
    return import_module(f"matfree.{module}")


def leave_one_out(n: int) -> Function | None:
    """Make matfree's XTrace, a function of a matvec, a key and the matvec's parameters."""
    if find_spec("matfree") is None:
        return None
    stochtrace = of_matfree("stochtrace")
    sampler = stochtrace.sampler_sphere(jnp.zeros(n, jnp.float32), num=NUM_PROBES)
    integrand = stochtrace.leave_one_out_xtrace()
    return stochtrace.estimator_leave_one_out(integrand, sampler)


def quadrature(n: int) -> Function | None:
    """Make matfree's log-determinant, with the same arguments."""
    if find_spec("matfree") is None:
        return None
    stochtrace = of_matfree("stochtrace")
    sampler = stochtrace.sampler_sphere(jnp.zeros(n, jnp.float32), num=CHAINS)
    steps = of_matfree("decomp").tridiag_sym(STEPS, reortho="full", custom_vjp=True)
    integrand = of_matfree("funm").monte_carlo_funm_sym_logdet(steps)
    return stochtrace.estimator_monte_carlo(integrand, sampler)


def bound(rival: Function | None, matvec: Function) -> Function | None:
    """Make a function of parameters and a key."""
    if rival is None:
        return None
    return lambda parameters, key: rival(matvec, key, parameters)


def with_gradient(label: str, ours: Function, theirs: Any, *of: Array) -> Iterator[Work]:
    """The value, and the value with its gradient in the first argument."""
    yield Work(label, ours, theirs, of)
    slopes = theirs and jax.value_and_grad(theirs)
    yield Work(f"{label} + gradient", jax.value_and_grad(ours), slopes, of)


def product(v: Float[Array, " n"], matrix: Matrix) -> Float[Array, " n"]:
    return matrix @ v


def dense(n: int, key: PRNGKeyArray) -> Iterator[Work]:
    def ours(matrix: Matrix, key: PRNGKeyArray) -> Array:
        return tx.xtrace(lx.MatrixLinearOperator(matrix), key, 2 * NUM_PROBES).value

    basis, _ = jnp.linalg.qr(jax.random.normal(key, (n, n)))
    matrix = (basis * jnp.arange(1.0, n + 1) ** -2) @ basis.T
    theirs = bound(leave_one_out(n), product)
    return with_gradient(f"xtrace, matrix, n = {n}", ours, theirs, matrix, key)


def laplacian(v: Float[Array, " n"], weight: Float[Array, ""]) -> Float[Array, " n"]:
    side = round(v.size**0.5)
    grid = v.reshape(side, side)
    wide = jnp.pad(grid, 1)
    up_down = wide[:-2, 1:-1] + wide[2:, 1:-1]
    left_right = wide[1:-1, :-2] + wide[1:-1, 2:]
    return (weight * grid - up_down - left_right).ravel()


def sparse(side: int, key: PRNGKeyArray) -> Iterator[Work]:
    n = side**2

    def ours(weight: Float[Array, ""], key: PRNGKeyArray) -> Array:
        space = jax.ShapeDtypeStruct((n,), weight.dtype)
        operator = lx.FunctionLinearOperator(lambda v: laplacian(v, weight), space)
        return tx.xtrace(operator, key, 2 * NUM_PROBES).value

    theirs = bound(leave_one_out(n), laplacian)
    weight = jnp.asarray(4, jnp.float32)
    return with_gradient(f"xtrace, grid, n = {n}", ours, theirs, weight, key)


def gaussian(theta: Theta, points: Points) -> Matrix:
    squares = jnp.sum((points[:, None] - points) ** 2, axis=-1)
    return jnp.exp(-squares / (2 * jnp.exp(2 * theta[0])))


def kernels(n: int, key: PRNGKeyArray) -> Iterator[Work]:
    points = jax.random.uniform(key, (n, 2))
    rival = bound(quadrature(n), product)

    def ours(theta: Theta, points: Points, key: PRNGKeyArray) -> Array:
        matrix = gaussian(theta, points)
        space = jax.ShapeDtypeStruct((n,), matrix.dtype)
        operator = lx.FunctionLinearOperator(lambda v: matrix @ v, space, PSD)
        return tx.logdet(operator, key, CHAINS * STEPS, shift=jnp.exp(theta[1])).value

    def theirs(theta: Theta, points: Points, key: PRNGKeyArray) -> Array:
        assert rival is not None
        matrix = gaussian(theta, points) + jnp.exp(theta[1]) * jnp.eye(n)
        return rival(matrix, key)

    theta = jnp.log(jnp.array([0.3, 1e-2]))
    other = theirs if rival else None
    return with_gradient(f"logdet, kernel, n = {n}", ours, other, theta, points, key)


def set_aside(program: Any) -> float:
    """The MiB that a program sets aside, or NaN where the device does not say."""
    memory = program.memory_analysis()
    return memory.temp_size_in_bytes / 2**20 if memory else float("nan")


def in_turn(programs: list[Any], arguments: tuple[Array, ...], repeats: int) -> list[float]:
    """The median milliseconds of each program, once warmed."""

    def milliseconds(program: Any) -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        return 1e3 * (time.perf_counter() - start)

    rounds = [[milliseconds(program) for program in programs] for _ in range(repeats + 1)]
    return [median(times) for times in zip(*rounds[1:], strict=True)]


def columns_of(work: Work, repeats: int) -> Iterator[str]:
    functions = [work.ours] if work.theirs is None else [work.ours, work.theirs]
    made = [compiled(function, *work.arguments) for function in functions]
    programs = [program for program, _ in made]
    times = in_turn(programs, work.arguments, repeats)
    ratio = f"{times[1] / times[0]:.2f}" if len(times) > 1 else "-"
    pairs = (
        [f"{x:.2f}" for x in times],
        [f"{set_aside(program):.1f}" for program in programs],
        [f"{seconds:.2f}" for _, seconds in made],
    )
    words = [one + ["-"] * (2 - len(one)) for one in pairs]
    first, *rest = ["".join(f"{word:>10}" for word in pair) for pair in words]
    yield f"{first}{ratio:>8}{''.join(rest)}"


def print_times(sizes: Sizes, late: Callable[[], bool]) -> None:
    print(f"\nfloat32, medians of {sizes.repeats}.")
    if find_spec("matfree") is None:
        print("matfree is not installed: traceax alone.")
    titles = [f"{unit:>20}" for unit in ("milliseconds", "MiB", "compile/s")]
    print(f"\n{'':<36}{titles[0]}{'':>8}{''.join(titles[1:])}")
    libraries = f"{'traceax':>10}{'matfree':>10}"
    print(f"{'':<36}{libraries}{'ratio':>8}{libraries * 2}")
    key = jax.random.key(2)
    for work in (
        *dense(sizes.matrix, key),
        *sparse(sizes.side, key),
        *kernels(sizes.matrix, key),
    ):
        (columns,) = unless(late, partial(columns_of, work, sizes.repeats))
        print(f"{work.label:<36}{columns}", flush=True)


def main(sizes: Sizes) -> None:
    start, device = time.perf_counter(), jax.devices()[0]

    def late(limit: int) -> bool:
        return time.perf_counter() - start > limit

    jax.config.update("jax_enable_compilation_cache", False)
    with jax.enable_x64(False):
        print(f"On {device.device_kind} ({device.platform}).", end=" ")
        print_values(sizes.calls, partial(late, LIMITS[0]))
        print_times(sizes, partial(late, LIMITS[1]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="smaller matrices")
    main(SMALL if parser.parse_args().small else FULL)
