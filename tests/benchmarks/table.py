"""The whole table: speed, compile time and memory beside matfree, row by row.

`python -m tests.benchmarks.table [PART ...]`, from the root of the repository, on a machine
that does nothing else; eight minutes. The rows of log-determinants are those of
`tests.benchmarks.functions`, in float64; the dense ones of XTrace those of
`tests.benchmarks.speed`. The sparse operator is the five-point Laplacian of a square grid,
n = 199,809, applied by pads and by shifts; XTrace with 50 and with 100 probes; with the
default sampler against points of the sphere, and with signs in either library. Both
libraries in turn in one process, jitted, warmed; medians of seven. A ratio above 1 says
that traceax is faster.

Memory is what the compiler sets aside, in blocks of n x k: of a gradient, above its value.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray
from matfree import stochtrace

import traceax as tx
from tests.benchmarks import functions, speed
from tests.benchmarks.accuracy import with_spectrum
from tests.benchmarks.functions import Race, print_races, warmed
from tests.benchmarks.speed import compilation

SIDE = 447
REPEATS = 7
KEY = jax.random.key(1)


def dense() -> Iterator[Race]:
    spectrum = jnp.arange(1.0, speed.N + 1) ** -2
    matrix = with_spectrum(spectrum, jax.random.key(0)).astype(jnp.float32)
    for what, wrap, aim in (("", lambda f: f, 1.0), (" + grad", jax.value_and_grad, 1.5)):
        pair = speed.pairs(wrap)["xtrace"]
        yield Race(f"xtrace value{what}", pair, (matrix, KEY), 3 * REPEATS, aim)


def laplacian(v: Float[Array, " n"], weight: Float[Array, ""]) -> Float[Array, " n"]:
    grid = v.reshape(SIDE, SIDE)
    wide = jnp.pad(grid, 1)
    up_down = wide[:-2, 1:-1] + wide[2:, 1:-1]
    left_right = wide[1:-1, :-2] + wide[1:-1, 2:]
    return (weight * grid - up_down - left_right).ravel()


def rolled(v: Float[Array, " n"], weight: Float[Array, ""]) -> Float[Array, " n"]:
    beside = [jnp.roll(v, shift) for shift in (1, -1, SIDE, -SIDE)]
    return weight * v - beside[0] - beside[1] - beside[2] - beside[3]


OPERATORS = {"padded": laplacian, "rolled": rolled}


def sparse_pair(
    num_probes: int, ours_of: Any, theirs_of: Any, dtype: Any, stencil: str = "padded"
) -> functions.Pair:
    space = jax.ShapeDtypeStruct((SIDE**2,), dtype)
    apply = OPERATORS[stencil]

    def ours(weight: Float[Array, ""], key: PRNGKeyArray) -> Array:
        operator = lx.FunctionLinearOperator(lambda v: apply(v, weight), space)
        return tx.xtrace(operator, key, 2 * num_probes, sampler=ours_of).value

    drawn = theirs_of(jnp.zeros(SIDE**2, dtype), num=num_probes)
    rival = stochtrace.estimator_leave_one_out(stochtrace.leave_one_out_xtrace(), drawn)

    def theirs(weight: Float[Array, ""], key: PRNGKeyArray) -> Array:
        return rival(apply, key, weight)

    return ours, theirs


def sparse(*counts: int) -> Iterator[Race]:
    samplers = {
        "default": (None, stochtrace.sampler_sphere, 3),
        "signs": (tx.rademacher, stochtrace.sampler_signs, 2.5),
    }
    for dtype in (jnp.float32, jnp.float64):
        for stencil in OPERATORS:
            for count in counts:
                for name, (mine, theirs, aim) in samplers.items():
                    label = f"{stencil}, {count} {name}, {jnp.dtype(dtype).name}"
                    arguments = (jnp.asarray(4, dtype), KEY)
                    pair = sparse_pair(count, mine, theirs, dtype, stencil)
                    yield Race(label, pair, arguments, REPEATS, aim)


def kernel_squared() -> Iterator[Race]:
    """XTrace's gradient in the three parameters that a kernel is made of."""
    points = jax.random.uniform(jax.random.key(5), (speed.N, 3), jnp.float64)
    squares = jnp.sum((points[:, None] - points[None, :]) ** 2, axis=-1)

    def kernel(theta: Float[Array, "3"]) -> Float[Array, "n n"]:
        eye = jnp.eye(speed.N)
        return theta[0] * jnp.exp(-squares / theta[1] ** 2) + theta[2] * eye

    def twice(v: Float[Array, " n"], matrix: Float[Array, "n n"]) -> Float[Array, " n"]:
        return matrix @ (matrix @ v)

    def ours(theta: Float[Array, "3"], key: PRNGKeyArray) -> Array:
        matrix = kernel(theta)
        space = jax.ShapeDtypeStruct((speed.N,), matrix.dtype)
        operator = lx.FunctionLinearOperator(lambda v: twice(v, matrix), space)
        return tx.xtrace(operator, key, speed.NUM_MATVECS).value

    drawn = stochtrace.sampler_sphere(jnp.zeros(speed.N), num=speed.NUM_MATVECS // 2)
    rival = stochtrace.estimator_leave_one_out(stochtrace.leave_one_out_xtrace(), drawn)

    def theirs(theta: Float[Array, "3"], key: PRNGKeyArray) -> Array:
        return rival(twice, key, kernel(theta))

    pair = jax.value_and_grad(ours), jax.value_and_grad(theirs)
    yield Race("xtrace of K^2 + grad", pair, (jnp.array([1.0, 0.5, 0.1]), KEY), 5, 1.5)


def speeds() -> None:
    print_races(
        warmed, [*functions.races(20, 40), *dense(), *kernel_squared(), *sparse(50, 100)]
    )


def with_errors() -> Iterator[Race]:
    """Values and standard errors, beside matfree's values alone."""
    matrix = jnp.eye(functions.N)
    counts: dict[str, Any] = {"num_probes": functions.NUM_PROBES, "num_steps": 20}
    spent = functions.NUM_PROBES * 20
    calls: dict[str, Callable[..., tx.Estimate]] = {
        "slq_trace": lambda a, key: tx.slq_trace(a, jnp.log, key, **counts),
        "function_trace": lambda a, key: tx.function_trace(a, jnp.log, key, spent),
        "logdet": lambda a, key: tx.logdet(a, key, spent),
        "xtrace": lambda a, key: tx.xtrace(a, key, speed.NUM_MATVECS),
    }
    theirs = dict.fromkeys(calls, functions.of_matrix(20)[1])
    theirs["xtrace"] = speed.of_matfree(
        stochtrace.leave_one_out_xtrace(), speed.NUM_MATVECS // 2
    )
    for name, call in calls.items():

        def ours(matrix: Any, key: PRNGKeyArray, call: Any = call) -> tuple[Array, Array]:
            space = jax.ShapeDtypeStruct(matrix.shape[:1], matrix.dtype)
            tag = lx.positive_semidefinite_tag
            found = call(lx.FunctionLinearOperator(lambda v: matrix @ v, space, tag), key)
            return found.value, found.standard_error

        given = matrix.astype(jnp.float32) if name == "xtrace" else matrix
        yield Race(
            f"{name} with error", (ours, theirs[name]), (given, KEY), REPEATS, 1 / 1.2
        )


def likelihood() -> Iterator[Race]:
    """A likelihood and its gradient, beside those of matfree's log-determinant."""
    matrix, y = jnp.eye(functions.N), jnp.ones(functions.N)
    spent = functions.NUM_PROBES * 20

    def ours(matrix: Any, key: PRNGKeyArray) -> Array:
        space = jax.ShapeDtypeStruct(y.shape, matrix.dtype)
        operator = lx.FunctionLinearOperator(lambda v: matrix @ v, space)
        both = tx.inv_quad_logdet(operator, y, key, spent, shift=0.1)
        return both.inv_quad.value + both.logdet.value

    pair = jax.value_and_grad(ours), jax.value_and_grad(functions.of_matrix(20)[1])
    yield Race("inv_quad_logdet + grad", pair, (matrix, KEY), REPEATS, 1 / 2.5)


def compilations() -> None:
    rows = [*functions.races(20), *dense(), *sparse(50)]
    print_races(compilation, (row._replace(aim=1, repeats=REPEATS) for row in rows))
    print_races(compilation, [*with_errors(), *likelihood()])


def set_aside(function: Callable[..., Any], *arguments: Array) -> float:
    memory: Any = jax.jit(function).lower(*arguments).compile().memory_analysis()
    return float(memory.temp_size_in_bytes)


def memory() -> None:
    """Of XTrace's gradient in the weight of the sparse operator, above its value."""
    print(f"{'blocks':<34}{'traceax':>10}{'matfree':>10}")
    weight = jnp.asarray(4, jnp.float32)
    block = 4.0 * SIDE**2 * 50
    pair = sparse_pair(50, tx.sphere, stochtrace.sampler_sphere, jnp.float32)
    values = [set_aside(function, weight, KEY) / block for function in pair]
    both = [set_aside(jax.value_and_grad(f), weight, KEY) / block for f in pair]
    for name, row in {"value": values, "value and gradient": both}.items():
        print(f"{name:<34}{row[0]:>10.1f}{row[1]:>10.1f}")


PARTS = {
    "speed": speeds,
    "compile": compilations,
    "memory": memory,
    "errors": partial(functions.gradients),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}")
    jax.config.update("jax_enable_x64", True)
    for part in parser.parse_args().parts or PARTS:
        print(f"{part}: ", end="")
        PARTS[part]()
        print()
