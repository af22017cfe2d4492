"""The table of estimators, and what many tests use."""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax import monitoring

import traceax as tx
from tests.matrices import all_signs, general, hermitian, numbers, spectrum
from tests.wrappers import BANDED, EVERY, FULL, function, part_of, pytree
from traceax._linalg.columns import promoted

__all__ = ["BANDED", "EVERY", "FULL"]
__all__ += ["all_signs", "function", "general", "hermitian", "numbers", "part_of"]
__all__ += ["pytree", "spectrum"]

# Normal numbers are drawn in single precision. The compiler's older emitters, which the
# suite asks for, round their last digit by the shape of the batch.
DRAWN = 1e-6 if "use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", "") else 0.0

PSD = lx.positive_semidefinite_tag


def slow(*values: Any) -> Any:
    """A parameter of the tests that `python -m pytest -m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def cases(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of a test, of which only the named ones are in the quick run. An entry of
    a table is named by its name, a dtype or function by its `__name__`, others by
    themselves."""

    def name(value: Any) -> Any:
        return getattr(value, "name", getattr(value, "__name__", value))

    values = list(values)
    assert set(quick) <= {name(value) for value in values}
    return [value if name(value) in quick else slow(value) for value in values]


def each(entries: list["Entry"], *quick: str) -> pytest.MarkDecorator:
    """Parametrises a test by the entries of a table. If names are given, only those entries
    are in the quick run."""
    chosen = cases(entries, *quick) if quick else entries
    return pytest.mark.parametrize("entry", chosen, ids=lambda entry: entry.name)


def given(probes: Any) -> Callable[..., Any]:
    """A sampler that draws the first of these rows."""
    return lambda key, structure, k: jnp.asarray(probes[:k], structure.dtype)


def refused(
    error: type[Exception], message: str, call: Callable[..., Any], *args: Any, **how: Any
) -> None:
    """The call is an error, and its message says what this pattern says."""
    with pytest.raises(error, match=message):
        call(*args, **how)


def close_trees(got: Any, want: Any, tolerance: float, scale: float | None = None) -> None:
    """Leaf by leaf."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close(one, other, tolerance, scale)


def is_unbiased(samples: Any, truth: Any, sigmas: float = 6.0) -> bool:
    """Whether the mean over the first axis is within its own standard errors of the truth,
    entry by entry."""
    spread = jnp.std(samples, axis=0, ddof=1) / len(samples) ** 0.5
    return bool(jnp.all(abs(jnp.mean(samples, axis=0) - truth) <= sigmas * spread))


def row_norms(matrix: Any) -> Any:
    return jnp.sum(abs(matrix) ** 2, axis=1)


class Entry(NamedTuple):
    """`euler`: the value is read through the frozen blocks of its derivative; `truth`: of a
    dense matrix, homogeneous of degree `degree` in it."""

    name: str
    estimate: Callable[..., tx.Estimate]
    minimum: int
    semidefinite: bool = False
    euler: bool = True
    truth: Callable[[Any], Any] = jnp.trace
    degree: int = 1

    def contracted(self, value: Any) -> Any:
        """A scalar loss of the value, whatever its structure."""
        flat = flatten(value)
        weights = 1.5 + jnp.cos(jnp.arange(flat.size)).astype(flat.dtype)
        return flat if flat.ndim == 0 else jnp.sum(flat * weights)


def flatten(tree: Any) -> Any:
    leaves = jax.tree.leaves(tree)
    if len(leaves) == 1 and leaves[0].ndim == 0:
        return leaves[0]
    return jnp.concatenate([leaf.ravel() for leaf in promoted(*leaves)])


ESTIMATORS = [
    Entry("hutchinson_trace", tx.hutchinson_trace, 1),
    Entry("hutchpp_trace", tx.hutchpp_trace, 3),
    Entry("na_hutchpp_trace", tx.na_hutchpp_trace, 4, euler=False),
    Entry("xtrace", tx.xtrace, 2),
    Entry("xnystrace", tx.xnystrace, 1, semidefinite=True, euler=False),
]
AUTOMATIC_TRACE = Entry("trace", tx.trace, 1)
ALL = [*ESTIMATORS, AUTOMATIC_TRACE]
"""The traces."""

DIAGONALS = [
    Entry("hutchinson_diagonal", tx.hutchinson_diagonal, 1, truth=jnp.diagonal),
    Entry("diagpp", tx.diagpp, 3, truth=jnp.diagonal, euler=False),
    Entry("xdiag", tx.xdiag, 2, truth=jnp.diagonal, euler=False),
    Entry("xnysdiag", tx.xnysdiag, 1, semidefinite=True, truth=jnp.diagonal, euler=False),
]
NORMS = [
    Entry("row_norms_squared", tx.row_norms_squared, 3, truth=row_norms, degree=2),
    Entry(
        "frobenius_norm_squared",
        tx.frobenius_norm_squared,
        2,
        truth=lambda m: jnp.sum(row_norms(m)),
        degree=2,
        euler=False,
    ),
]
AUTOMATIC_DIAGONAL = Entry("diagonal", tx.diagonal, 1, truth=jnp.diagonal)
REST = [*DIAGONALS, *NORMS]
REST_ALL = [*REST, AUTOMATIC_DIAGONAL]
"""Diagonals and norms."""


def names(entries: list[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def as_semidefinite(entry: Entry, operator: lx.AbstractLinearOperator) -> Any:
    """The operator, tagged where the estimator insists on it."""
    return lx.TaggedLinearOperator(operator, PSD) if entry.semidefinite else operator


def suitable(entry: Entry, n: int, dtype: Any = float, seed: int = 0) -> Any:
    """A matrix that the estimator may be given."""
    if entry.semidefinite:
        return hermitian(1.0 + np.arange(n) % 5, dtype, seed)
    return general(n, dtype, seed)


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
    with (
        jax.enable_x64(x64),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
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
    """Relative to `scale`, the size of what was computed with; never a bare `atol`."""
    scale = float(np.max(np.abs(want))) if scale is None else scale
    error = np.max(np.abs(np.asarray(got) - np.asarray(want)))
    assert error <= tolerance * scale, f"{error} > {tolerance} * {scale}: {got} != {want}"
