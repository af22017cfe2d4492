"""Programs that JAX keeps on disk serve later processes, too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import jax, jax.numpy as jnp, lineax as lx, traceax as tx

matrix = jnp.diag(jnp.linspace(1.0, 2.0, 100))
space = jax.ShapeDtypeStruct((100,), matrix.dtype)
operator = lx.FunctionLinearOperator(
    lambda v: matrix @ v, space, lx.positive_semidefinite_tag
)
jax.block_until_ready(matrix)


def estimates(key):
    log = tx.slq_trace(operator, lambda x: jnp.log(x), key, num_probes=2, num_steps=4)
    trace = tx.trace(operator, key, 20)
    return log.value, trace.value, trace.standard_error


wrap = jax.jit if {in_jit} else lambda function: function
print(*wrap(estimates)(jax.random.key(0)))
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("in_jit", [True, False])
def test_second_process_compiles_nothing(tmp_path: Path, in_jit: bool) -> None:
    """Hash values, addresses and counters in a program would give it another name."""
    environment = {
        **os.environ,
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def run(seed: str) -> tuple[str, set[str]]:
        command = [sys.executable, "-c", PROGRAM.format(in_jit=in_jit)]
        given = {**environment, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            command, env=given, capture_output=True, text=True, check=True
        )
        names = {path.name for path in tmp_path.iterdir()}
        return done.stdout, {name for name in names if name.endswith("-cache")}

    first, programs = run("1")
    again, later = run("2")
    assert programs
    assert later == programs
    assert again == first
