"""Programs for `test_devices`. They run in processes of their own, because the number of
devices is fixed when JAX starts. Not to be imported.

`python -m tests.on_devices mesh NAME ...`: eight devices. `... memory D NAME ...`: what
programs for D devices need. `... process I PORT NAME ...`: one of two processes with one
device each, where no NAME is what is tested eagerly.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

MODE = sys.argv[1] if len(sys.argv) > 1 else "mesh"
mine = {"mesh": "8", "process": "1", "memory": sys.argv[2]}[MODE]
llvm = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
quick = os.environ.get("XLA_FLAGS", llvm)
os.environ["XLA_FLAGS"] = f"{quick} --xla_force_host_platform_device_count={mine}"

import jax  # noqa: E402

jax.config.update("jax_enable_x64", MODE != "memory")
if MODE == "process":  # before anything is computed
    INDEX, address = int(sys.argv[2]), f"127.0.0.1:{sys.argv[3]}"
    jax.distributed.initialize(address, 2, INDEX, initialization_timeout=30)

import jax.numpy as jnp  # noqa: E402
import lineax as lx  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental.multihost_utils import process_allgather  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import traceax as tx  # noqa: E402
from tests.calls import CALLS, MATRIX, operator  # noqa: E402

N, RANK, K = 1600, 5, 20
PSD = lx.positive_semidefinite_tag
ROWS = PartitionSpec("rows")

Estimator = Callable[..., tx.Estimate]


def traced(operator: Any, key: Any, **how: Any) -> tx.Estimate:
    return tx.slq_trace(operator, jnp.log, key, num_probes=K, num_steps=8, **how)


CASES: dict[str, Estimator] = {
    "hutchinson_trace": lambda a, key: tx.hutchinson_trace(a, key, K, batch_size=5),
    "hutchinson_diagonal": lambda a, key: tx.hutchinson_diagonal(a, key, K),
    "xtrace": lambda a, key: tx.xtrace(a, key, 2 * K),
    "xnystrace": lambda a, key: tx.xnystrace(a, key, K),
    "xdiag": lambda a, key: tx.xdiag(a, key, 2 * K, sampler=tx.rademacher),
    "slq_trace": traced,
    "logdet": lambda a, key: tx.logdet(a, key, 100, shift=0.1),
}


def arrays() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0).normal(size=(N, RANK))
    return np.linspace(1, 2, N), draw / N**0.5


def loss(estimator: Estimator) -> Any:
    """Value and gradient in the arrays of a diagonal matrix plus one of low rank."""

    def value(parameters: Any, key: Any) -> tuple[Any, tx.Estimate]:
        diagonal, factor = parameters
        apply = lambda v: diagonal * v + factor @ (factor.T @ v)  # noqa: E731
        space = jax.ShapeDtypeStruct(diagonal.shape, diagonal.dtype)
        estimate = estimator(lx.FunctionLinearOperator(apply, space, PSD), key)
        # This part of the standard error is a difference of nearly equal numbers.
        estimate = replace(estimate, quadrature_error=0.0)
        return jnp.sum(estimate.value * jnp.cos(jnp.arange(estimate.value.size))), estimate

    return jax.jit(jax.value_and_grad(value, has_aux=True))


def moved(program: Any) -> dict[str, int]:
    """The largest number of entries that each kind of communication makes."""
    kinds = "all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter"
    found: dict[str, int] = {}
    for line in program.splitlines():
        match = re.search(rf" = (.*?) ({kinds})(?:-start)?\(", line)
        if match:
            shapes = re.findall(r"\[([\d,]*)\]", match[1])
            size = max(math.prod(map(int, filter(None, s.split(",")))) for s in shapes)
            found[match[2]] = max(size, found.get(match[2], 0))
    return found


def difference(a: Any, b: Any) -> float:
    pairs = zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (a, b)), strict=True)
    return max(float(np.max(np.abs(x - y)) / np.max(np.abs(y))) for x, y in pairs)


def on_a_mesh(names: list[str]) -> dict[str, Any]:
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), ROWS)
    here = jax.tree.map(jnp.asarray, arrays())
    spread = jax.device_put(here, rows)
    key = jax.random.key(0)
    report: dict[str, Any] = {}
    for name in names:
        run = loss(CASES[name])
        alone, together = (run.lower(x, key).compile() for x in (here, spread))
        memory = [c.memory_analysis().temp_size_in_bytes for c in (alone, together)]
        one = jax.block_until_ready(alone(here, key))
        many = jax.block_until_ready(together(spread, key))
        kept = [leaf.sharding.is_equivalent_to(rows, leaf.ndim) for leaf in many[1]]
        report[name] = {
            "moved": moved(together.as_text()),
            "memory": memory[1] / memory[0],
            "difference": difference(many, one),
            "sharded": all(kept),
        }
    qr = jax.jit(jnp.linalg.qr).lower(jax.device_put(jnp.ones((N, K)), rows))
    report["qr"] = {"moved": moved(qr.compile().as_text()), "block": N * K, "n": N}
    return report


LONG, BLOCK = 1_024_000, 96


def energy(x: Any, arrays: Any) -> Any:
    return jnp.sum(arrays[0] * jnp.sin(x)) + jnp.sum((arrays[1].T @ jnp.cos(x)) ** 2)


def network_loss(p: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ p["first"].T + p["bias"][None])
    return jnp.mean((p["scale"] * hidden @ p["second"] - x) ** 2)


def long_estimate(name: str, arrays: Any, key: Any) -> Any:
    """From 96 matvecs of a million dimensions."""
    diagonal, factor = arrays
    apply = lambda v: diagonal * v + factor @ (factor.T @ v)  # noqa: E731
    a = lx.FunctionLinearOperator(apply, jax.eval_shape(lambda: diagonal), PSD)
    fn = getattr(tx, name.partition(", ")[0])
    match name:
        case "xtrace, sphere":
            return fn(a, key, BLOCK, sampler=tx.sphere)
        case "function_diagonal":
            return fn(a, jnp.log, key, num_probes=12, num_steps=8)
        case "laplacian":
            return fn(energy, diagonal, key, BLOCK, args=arrays)
        case "inv_quad_logdet":
            return fn(a, diagonal, key, BLOCK)
        case "deltashift":
            state = fn(BLOCK // 2).init(a, key)
            return fn(BLOCK // 2).update(a, state, key)[0]
        case _:
            return fn(a, key, BLOCK)


def needs(names: list[str]) -> dict[str, Any]:
    """Shares of an n x k block that each device needs, and the most entries moved at once.
    `network, xtrace` and so on are of a network whose parameters are cut by rows."""
    mesh = Mesh(np.array(jax.devices()), ("rows",))

    def cut(*shape: int) -> Any:
        rows = NamedSharding(mesh, ROWS if shape else PartitionSpec())
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)

    def of_network(p: Any, key: Any, name: str) -> Any:
        x = jnp.ones((2, 124), jnp.float32)
        hessian = lx.JacobianLinearOperator(jax.grad(network_loss), p, x, lx.symmetric_tag)
        return getattr(tx, name)(hessian, key, BLOCK)

    report: dict[str, Any] = {}
    for name in names:
        arrays: Any = (cut(LONG), cut(LONG, 3))
        run = partial(long_estimate, name)
        if name.startswith("network, "):
            run = partial(of_network, name=name.partition(", ")[2])
            shapes = {"first": (4096, 124), "bias": (4096,), "second": (4096, 124)}
            arrays = {leaf: cut(*shape) for leaf, shape in shapes.items()}
            arrays["scale"] = cut()
        compiled = jax.jit(run).lower(arrays, jax.random.key(0)).compile()
        vector = arrays if isinstance(arrays, dict) else arrays[:1]
        block = 4 * BLOCK * sum(leaf.size for leaf in jax.tree.leaves(vector))
        memory: Any = compiled.memory_analysis()
        moves = max(moved(compiled.as_text()).values(), default=0)
        shares = memory.temp_size_in_bytes * mesh.size / block
        report[name] = {"shares": shares, "moved": moves}
        jax.clear_caches()
    return report


def in_a_process(names: list[str]) -> dict[str, Any]:
    """How much values and gradients of a cut matrix differ from those of a whole one, for
    Hermitian changes: of others functions of Hermitian operators know nothing, and there
    the basis of a sketch shows."""
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), ROWS)
    cut = jax.make_array_from_callback(MATRIX.shape, rows, lambda part: MATRIX[part])
    whole, key = jnp.asarray(MATRIX), jax.random.key(0)
    if not names:
        return eagerly(cut, whole, key)
    report: dict[str, Any] = {}
    for number, name in enumerate(names):

        def run(matrix: Any, call: Any = CALLS[name]) -> Any:
            value = jax.tree.leaves(call(matrix, key).value)
            return sum(jnp.sum(jnp.real(x)) for x in value)

        def hermitian(result: Any) -> Any:
            return np.asarray(result[0]), result[1] + result[1].T

        both = jax.jit(jax.value_and_grad(run))
        value, gradient = both(cut)
        found = value, process_allgather(gradient, tiled=True)
        if number % 2 == INDEX:  # the other process has the next one
            report[name] = difference(hermitian(found), hermitian(both(whole)))
        jax.clear_caches()
    return report


def eagerly(cut: Any, whole: Any, key: Any) -> dict[str, Any]:
    """What is not inside of `jax.jit`: choices made at run time, printing, checks."""
    estimate = CALLS["adaptive_trace"](cut, key)
    diagonal = tx.hutchinson_diagonal(operator(cut), key, 6)
    other = jax.random.key(INDEX)

    def message(call: Callable[[], Any]) -> str:
        try:
            return str(call())
        except (ValueError, RuntimeError) as error:
            return str(error)

    return {
        "shown": str(estimate),
        "expected": str(CALLS["adaptive_trace"](whole, key)),
        "formatted": f"{estimate:.3f}",
        "diagonal": str(diagonal),
        "refused": message(lambda: tx.xtrace(operator(cut), other, 12)),
        "alone": float(tx.hutchinson_trace(operator(whole), other, 6).value),  # its own
        "written": message(lambda: np.asarray(diagonal.value)),
    }


if __name__ == "__main__":
    rest = sys.argv[2:]
    match MODE:
        case "process":
            result = in_a_process(rest[2:])
        case "memory":
            result = needs(rest[1:])
        case _:
            result = on_a_mesh(rest)
    print(json.dumps(result))
