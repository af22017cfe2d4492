"""A picture of how the eigenvalues of a matrix lie."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

import traceax as tx
from traceax._command.matrix import Matrix, MatrixError, matrix_operator
from traceax._command.options import Options
from traceax._command.spectrum import eigenvalues, ends
from traceax._tasks.definite import check_hermitian
from traceax._tasks.task import Compiled, only, split

_POINTS = 400


class Density(NamedTuple):
    """On a grid, per unit of it; `exact` with the same width, of a small matrix."""

    grid: np.ndarray
    width: float
    measured: Compiled
    exact: np.ndarray | None

    @property
    def deviation(self) -> float | None:
        """The largest, relative to the highest peak."""
        if self.exact is None:
            return None
        error = np.abs(np.asarray(self.measured.estimate.value) - self.exact)
        return float(error.max() / self.exact.max())


def check_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise MatrixError(
            "--density must find matplotlib, which draws the picture, but it is not "
            'installed. Install it: python -m pip install "traceax[notebooks]".'
        )


def density(path: Path, matrix: Matrix, options: Options) -> Density:
    check_hermitian(path, matrix, "--density")
    low, high = ends(matrix)
    counts = split(options.num_matvecs, probes_a_step=0.1)
    span = (high - low) or abs(high) or 1.0
    width = 2 * span / counts["num_steps"]
    grid = np.linspace(low - 3 * width, high + 3 * width, _POINTS)

    def run(operator, key):
        return tx.spectral_density(operator, jnp.asarray(grid), key, width=width, **counts)

    measured = only("spectral_density", run, matrix_operator(matrix), options.seed)
    return Density(grid, width, measured, _exact(matrix, grid, width))


def _exact(matrix: Matrix, grid: np.ndarray, width: float) -> np.ndarray | None:
    spectrum = eigenvalues(matrix)
    if spectrum is None:
        return None
    distances = (grid[:, None] - spectrum) / width
    return np.exp(-(distances**2) / 2).mean(axis=1) / (width * np.sqrt(2 * np.pi))


def draw(found: Density, output: Path, title: str) -> None:
    """The estimate, a band of its 95 % intervals, and the exact density if known."""
    from matplotlib.figure import Figure  # noqa: PLC0415, an extra

    low, high = found.measured.estimate.interval()
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(found.grid, low, high, alpha=0.3, label="95 % intervals")
    axes.plot(found.grid, found.measured.estimate.value, label="spectral_density")
    if found.exact is not None:
        axes.plot(found.grid, found.exact, "k--", linewidth=0.8, label="exact")
    axes.set(xlabel="eigenvalue", ylabel="share per unit", title=title)
    axes.set_ylim(bottom=0)
    axes.legend()
    try:
        figure.savefig(output, dpi=150)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise MatrixError(
            f"{output} cannot be written ({reason}). Name a file elsewhere."
        ) from error
