"""Double precision everywhere; float32 is asked for by name where it is meant.

Most of the suite's time is compilation, so the compiler is told not to optimise, and to use
the emitters that take a third of the time of its newer ones (TRACEAX_COMPILER=default
leaves it as users have it); the workers share what they compiled in a folder that goes with
the run; the tests whose subject is the compiled program start a process of their own.
LAPACK is given one thread: its threads and those of JAX get in each other's way.
"""

import gc
import os
import re
import tempfile
from collections import Counter
from importlib.metadata import version
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if os.environ.get("TRACEAX_COMPILER") != "default":
    QUICK = "--xla_backend_optimization_level=0"
    QUICK += " --xla_llvm_disable_expensive_passes=true"
    if version("jaxlib").startswith("0.10."):  # later ones refuse it
        QUICK += " --xla_cpu_use_fusion_emitters=false"
        QUICK += " --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers inherit the folder
    COMPILED = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.helpers import ALL, REST_ALL, names
from tests.seldom import is_seldom, is_spare_twin

jax.config.update("jax_enable_x64", True)
gc.set_threshold(200_000, 20, 100)  # tracing makes many objects, and keeps most

LONGEST = (
    "tests/test_devices.py",
    "tests/functions/test_logdet.py",
    "tests/test_batches.py",
)
ESTIMATORS = frozenset(names(ALL + REST_ALL))


def scope(nodeid: str) -> str:
    """The estimator whose test it is, if there is one among its parameters, or the file."""
    words = re.split(r"[\[\]-]", nodeid)
    return next((w for w in words if w in ESTIMATORS), nodeid.partition("::")[0])


class ByScope(LoadScopeScheduling):
    """What shares compiled programs goes to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByScope:
    return ByScope(config, log)


def leave_twins(items: list[pytest.Item]) -> None:
    """Marks what the README's command has no time for."""
    begun = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if is_seldom(item.nodeid) or (test in begun and is_spare_twin(item.nodeid)):
            item.add_marker(pytest.mark.slow)
        elif item.get_closest_marker("slow") is None:
            begun.add(test)


@pytest.hookimpl(tryfirst=True)  # `-m` must see the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: whoever has them alone at the end keeps the others waiting."""
    leave_twins(items)
    scopes = {id(item): scope(item.nodeid) for item in items}
    sizes = Counter(scopes.values())

    def place(item: pytest.Item) -> tuple[bool, int, str]:
        ours = scopes[id(item)]
        return ours not in LONGEST, -sizes[ours], ours

    items.sort(key=place)
    gc.freeze()  # what was imported stays


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What was compiled for one scope is of no use to the next, and takes gigabytes."""
    if nextitem and scope(item.nodeid) != scope(nextitem.nodeid):
        jax.clear_caches()
        gc.collect()
