"""Double precision everywhere; float32 is asked for by name where it is meant.

Most of the suite's time is compilation, so the compiler is told not to optimise, and to use
the emitters that take a third of the time of its newer ones (flags in XLA_FLAGS go before
ours); the workers share what they compiled in a folder that goes with the run; the tests
whose subject is the compiled program start a process of their own. LAPACK is given one thread: its
threads and those of JAX get in each other's way, by orders of magnitude.
"""

import gc
import os
import re
import tempfile
from importlib.metadata import version
from typing import Any

QUICK = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):  # later ones refuse it
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*QUICK, os.environ.get("XLA_FLAGS", "")])
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers inherit the folder
    COMPILED = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.helpers import ALL, REST_ALL, names

jax.config.update("jax_enable_x64", True)
gc.set_threshold(200_000, 20, 100)  # tracing makes many objects, and keeps most

ESTIMATORS = frozenset(names(ALL + REST_ALL))


def estimator(nodeid: str) -> str | None:
    """Whose test it is, if an estimator is among its parameters."""
    return next((w for w in re.split(r"[\[\]-]", nodeid) if w in ESTIMATORS), None)


class ByEstimator(LoadScopeScheduling):
    """All tests of one estimator in one worker: they share what is compiled."""

    def _split_scope(self, nodeid: str) -> str:
        return estimator(nodeid) or nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByEstimator:
    return ByEstimator(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What checks for leaks comes first: the checker looks through all that there is."""
    items.sort(key=lambda item: "leaks" not in item.name)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What was compiled for one estimator is of no use to the next, and takes gigabytes."""
    mine = estimator(item.nodeid)
    if mine and mine != (nextitem and estimator(nextitem.nodeid)):
        jax.clear_caches()
        gc.collect()
