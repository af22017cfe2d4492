"""What many tests use: marks, settings, assertions."""

import gc
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring

import traceax as tx

# Normal numbers are drawn in single precision. The compiler's older emitters, which the
# suite asks for, round their last digit by the shape of the batch.
DRAWN = 1e-6 if "use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", "") else 0.0


def slow(*values: Any) -> Any:
    """A parameter of the tests that `python -m pytest -m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values: Any) -> Any:
    """A parameter of the tests that `python -m pytest -m nightly` runs, and CI does not."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def cases(
    values: Iterable[Any], *quick: Any, some: Iterable[Any] = (), rest: Any = slow
) -> list[Any]:
    """Parameters of a test, of which only the named ones are in the quick run: by their
    `name`, their `__name__` or themselves. `some` are slow, the rest as it is said."""

    def name(value: Any) -> Any:
        return getattr(value, "name", getattr(value, "__name__", value))

    values = list(values)
    marks = {**dict.fromkeys(some, slow), **dict.fromkeys(quick, lambda value: value)}
    assert marks.keys() <= {name(value) for value in values}
    return [marks.get(name(value), rest)(value) for value in values]


def given(probes: Any) -> Callable[..., Any]:
    """A sampler that draws the first of these rows."""
    return lambda key, structure, k: jnp.asarray(probes[:k], structure.dtype)


def refused(
    error: type[Exception], message: str, call: Callable[..., Any], *args: Any, **how: Any
) -> None:
    """The call is an error, and its message says what this pattern says."""
    with pytest.raises(error, match=message):
        call(*args, **how)


def over_keys(fn: Callable[[Any], Any], key: Any, count: int) -> Any:
    """What it gives for so many keys, one after the other in a compiled program."""
    return jax.jit(lambda keys: jax.lax.map(fn, keys))(jax.random.split(key, count))


def is_unbiased(samples: Any, truth: Any, sigmas: float = 6.0) -> bool:
    """Whether the mean is within its own standard errors of the truth, entry by entry."""
    spread = jnp.std(samples, axis=0, ddof=1) / len(samples) ** 0.5
    return bool(jnp.all(abs(jnp.mean(samples, axis=0) - truth) <= sigmas * spread))


def contains(estimate: tx.Estimate, truth: Any, level: float = 0.95) -> Any:
    """Whether the interval does, entry by entry."""
    low, high = estimate.interval(level)
    return (low <= truth) & (truth <= high)


@contextmanager
def leaks_checked(on_new_versions: bool = False) -> Iterator[None]:
    """jax 0.12's checker reports the functions that Equinox 0.13 keeps in its caches after
    converting closures, though nothing has leaked.

    For each program that is traced the checker collects all garbage: what there was before
    is set apart, so that it looks through what is new."""
    if not (on_new_versions or jax.__version__.startswith("0.10")):
        yield
        return
    gc.collect()
    gc.freeze()
    with jax.checking_leaks():
        yield


@contextmanager
def default_settings(x64: bool = False) -> Iterator[None]:
    """The settings of JAX that users have, for programs in documents."""
    types, ranks = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with jax.enable_x64(x64), types, ranks:
        yield


_COMPILED: list[float] = []


def _heard(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COMPILED.append(duration_secs)


monitoring.register_event_duration_secs_listener(_heard)


@contextmanager
def compilations() -> Iterator[list[float]]:
    """The seconds of each program that is compiled in here, to be read afterwards."""
    before, inside = len(_COMPILED), []
    yield inside
    inside.extend(_COMPILED[before:])


def close(got: Any, want: Any, tolerance: float, scale: float | None = None) -> None:
    """Leaf by leaf; relative to `scale`, if not to the leaf; never a bare `atol`."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        size = float(np.max(np.abs(other))) if scale is None else scale
        error = np.max(np.abs(np.asarray(one) - np.asarray(other)))
        assert error <= tolerance * size, f"{error} > {tolerance * size}: {one} != {other}"


# Documents, and programs in processes of their own.

# On two cores, jax 0.10 sometimes hangs where eight devices meet: try once more.
ATTEMPTS, SECONDS = 2, 100


def programs(text: str, language: str = "python") -> list[str]:
    """The blocks of a language in a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def python(*arguments: str, folder: str | Path | None = None, **environment: str) -> str:
    """What a program prints."""
    run, where = [sys.executable, *arguments], os.environ | environment
    how: Any = {"capture_output": True, "text": True, "timeout": 110}
    done = subprocess.run(run, cwd=folder, env=where, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def address() -> str:
    """One that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def outputs(folder: Path, *programs: list[str], seconds: int = SECONDS) -> list[str]:
    """What programs print that run at once. If one fails, the others would wait for it."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    logs = [folder / f"{number}.log" for number in range(len(programs))]
    for _ in range(ATTEMPTS):
        running = []
        for program, log in zip(programs, logs, strict=True):
            with log.open("w") as file:
                how: Any = {"stdout": file, "stderr": file, "env": environment}
                running.append(subprocess.Popen([sys.executable, *program], **how))
        deadline = time.monotonic() + seconds
        try:
            while any(process.poll() is None for process in running):
                failed = any(process.poll() for process in running)
                if failed or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        finally:
            for process in running:
                process.kill()
            codes = [process.wait() for process in running]
        texts = [log.read_text() for log in logs]
        if not any(codes):
            return texts
        if any(code > 0 for code in codes):
            pytest.fail("\n\n".join(texts))
    pytest.fail(f"no answer in {seconds} seconds, {ATTEMPTS} times")
