"""The settings of all tests: double precision, and a compiler that is quick.

float32 is asked for by name where it is meant. Most of the suite's time is compilation, so
the compiler is told not to optimise, and to use the emitters that take a third of the time
of its newer ones (TRACEAX_COMPILER=default leaves it as users have it). The workers share
compiled programs in a folder that is deleted at the end, if TRACEAX_COMPILED names no
other. A test of a compiled program starts a process of its own. LAPACK is given one thread,
because its threads and those of JAX compete. jaxtyping and beartype check the annotations
of the package in every test.
"""

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version

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
    folder = os.environ.get("TRACEAX_COMPILED", COMPILED.name)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import beartype
import jax
import jaxtyping
import pytest

jaxtyping.install_import_hook("traceax", "tests.conftest.checked")
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
gc.set_threshold(200_000, 20, 100)  # tracing makes many objects, and keeps most

check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))  # 1 is a float


def checked(fn: Callable[..., object]) -> Callable[..., object]:
    """Checks once a call has returned, because the package has its own messages about what
    users pass. jaxtyping makes two functions of each one: of its arguments, for before the
    call; of arguments and what was returned, `ret0`."""
    return check(fn) if "ret0" in fn.__code__.co_varnames else fn


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """TRACEAX_SAMPLE=3 runs every third test."""
    items[:] = items[:: int(os.environ.get("TRACEAX_SAMPLE", "1"))]


def pytest_collection_finish() -> None:
    gc.freeze()  # the collector need not look through the imported modules again


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_programs() -> Iterator[None]:
    """The programs of all modules together would take several gigabytes for each worker."""
    yield
    jax.clear_caches()
    gc.collect()
