"""Programs for `test_devices`. They run in processes of their own, because the number of
devices is fixed when JAX starts. Not to be imported.

`python -m tests.on_devices mesh NAME ...`: eight devices. `... process I PORT`: one of two
processes with four devices each.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable
from typing import Any

PROCESSES, DEVICES = 2, 8
MODE = sys.argv[1] if len(sys.argv) > 1 else "mesh"
mine = DEVICES // PROCESSES if MODE == "process" else DEVICES
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={mine}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import lineax as lx  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import traceax as tx  # noqa: E402

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
        operator = lx.FunctionLinearOperator(
            lambda v: diagonal * v + factor @ (factor.T @ v),
            jax.ShapeDtypeStruct(diagonal.shape, diagonal.dtype),
            PSD,
        )
        estimate = estimator(operator, key)
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
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(
        float(np.max(np.abs(np.asarray(x) - np.asarray(y))) / np.max(np.abs(y)))
        for x, y in pairs
    )


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


def in_a_process(index: int, port: int) -> dict[str, Any]:
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, index)
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), ROWS)

    def spread(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(array.shape, rows, lambda part: array[part])

    key = jax.random.key(0)
    run = loss(CASES["xtrace"])
    (value, _), gradient = jax.block_until_ready(run(jax.tree.map(spread, arrays()), key))
    mine = jax.tree.map(jnp.asarray, arrays())
    (expected, _), whole = jax.block_until_ready(run(mine, key))
    shards = [s for leaf in gradient for s in leaf.addressable_shards]
    parts = [s.data for s in shards]
    other = [leaf[s.index] for leaf in whole for s in shards if s.data.ndim == leaf.ndim]
    report = {
        "devices": jax.device_count(),
        "value": float(value) / float(expected) - 1,
        "gradient": max(map(difference, parts, other)),
    }
    jax.distributed.shutdown()
    return report


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    rest = sys.argv[2:]
    result = in_a_process(*map(int, rest)) if MODE == "process" else on_a_mesh(rest)
    print(json.dumps(result))
