"""Programs that JAX keeps on disk serve later processes, too."""

from pathlib import Path

import pytest

from tests.helpers import python

PROGRAM = """
import jax, jax.numpy as jnp, lineax as lx, traceax as tx

matrix = jnp.diag(jnp.linspace(1.0, 2.0, 100))
operator = tx.as_operator(lambda v: matrix @ v, 100, tags=lx.positive_semidefinite_tag)
jax.block_until_ready(matrix)


def estimates(key):
    log = tx.slq_trace(operator, lambda x: jnp.log(x), key, num_probes=2, num_steps=4)
    trace = tx.trace(operator, key, 20)
    return log.value, trace.value, trace.standard_error


print(*estimates(jax.random.key(0)), *jax.jit(estimates)(jax.random.key(0)))
"""


@pytest.mark.slow
def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Hash values, addresses and counters in a program would give it another name."""
    environment = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def run(seed: str) -> tuple[str, set[str]]:
        printed = python("-c", PROGRAM, PYTHONHASHSEED=seed, **environment)
        return printed, {path.name for path in tmp_path.glob("*-cache")}

    first, programs = run("1")
    assert programs
    assert run("2") == (first, programs)
