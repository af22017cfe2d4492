"""Double precision everywhere; float32 is asked for by name where it is meant.

Most of the suite's time is compilation, so the compiler is told not to optimise; the tests
whose subject is the compiled program start a process of their own. LAPACK is given one
thread: its threads and those of JAX get in each other's way, by orders of magnitude.
"""

import gc
import os

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
)

import jax
import pytest

jax.config.update("jax_enable_x64", True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of one estimator in one worker: they share what is compiled. Those that
    check for leaks come first, because the checker looks through all objects there are."""
    items.sort(key=lambda item: "leaks" not in item.name)
    for item in items:
        callspec = getattr(item, "callspec", None)
        entry = callspec.params.get("entry") if callspec else None
        if entry is not None:
            item.add_marker(pytest.mark.xdist_group(entry.name))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What was compiled for one estimator is of no use to the next, and takes gigabytes."""
    mine, others = (i and i.get_closest_marker("xdist_group") for i in (item, nextitem))
    if mine != others:
        jax.clear_caches()
        gc.collect()
