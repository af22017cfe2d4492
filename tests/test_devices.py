"""Operators whose arrays are distributed over devices and processes."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

# On two cores, jax 0.10 sometimes hangs where eight devices meet: try once more.
ATTEMPTS, SECONDS = 2, 90


def programs(*modes: list[str]) -> list[dict[str, Any]]:
    """The last lines that programs print which run at once, in processes of their own."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    for _ in range(ATTEMPTS):
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.on_devices", *mode],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for mode in modes
        ]
        try:
            outputs = [process.communicate(timeout=SECONDS) for process in running]
        except subprocess.TimeoutExpired:
            continue
        finally:
            for process in running:
                process.kill()
        for process, (_, errors) in zip(running, outputs, strict=True):
            assert process.returncode == 0, errors
        return [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    pytest.fail(f"no answer in {SECONDS} seconds, {ATTEMPTS} times")


TRACES = ["xtrace", "logdet", "slq_trace"]
OTHERS = ["hutchinson_trace", "hutchinson_diagonal", "xnystrace", "xdiag"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", [TRACES, OTHERS], ids=["traces", "others"])
def test_blocks_stay_distributed(names: list[str]) -> None:
    """On eight devices only small matrices, k x k, are gathered or summed; the memory of
    each device is a fraction; values and gradients are those of one device."""
    report = programs(["mesh", *names])[0]
    gathered = report.pop("qr")  # a QR factorisation gathers the block
    assert gathered["moved"]["all-gather"] == gathered["block"]
    for name, found in report.items():
        assert max(found["moved"].values()) < gathered["n"], name
        assert found["memory"] < 0.5, name
        assert found["difference"] < 1e-11, name
        assert found["sharded"], name


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_processes_share_an_operator() -> None:
    """With jax.distributed: two processes of four devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    modes = [["process", str(index), str(port)] for index in (0, 1)]
    for report in programs(*modes):
        assert report["devices"] == 8
        assert abs(report["value"]) < 1e-12
        assert report["gradient"] < 1e-11
