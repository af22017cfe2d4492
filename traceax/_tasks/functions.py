"""Log-determinants, Estrada indices, Schatten norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import traceax as tx
from traceax._command.matrix import Matrix, matrix_operator
from traceax._command.options import Options
from traceax._command.spectrum import DENSE, dense, eigenvalues, ends
from traceax._tasks.definite import check_hermitian, definite, moved
from traceax._tasks.task import Run, Task, split

# exp of more overflows double precision, also where there are 2^31 such terms.
_LARGEST = 680.0

_OVERFLOWS = """\
log tr exp(A), because the Estrada index itself overflows; by the largest eigenvalue it is
between about {low:.6g} and {high:.6g}, whatever the error bars of an estimate below say
"""


def logdet_task(path: Path, matrix: Matrix, options: Options) -> Task:
    spectrum = definite(path, matrix, options).spectrum
    exact = None if spectrum is None else float(np.sum(np.log(spectrum)))
    shift, budget = options.shift, options.num_matvecs
    runs: dict[str, Run] = {
        "logdet": partial(tx.logdet, num_matvecs=budget, shift=shift),
        "slq_trace": _quadrature(lambda x: jnp.log(x + shift), budget),
    }
    heading = f"log det({moved(shift)}), from products with A alone"
    return Task(heading, matrix_operator(matrix), runs, exact)


def estrada_task(path: Path, matrix: Matrix, options: Options) -> Task:
    """tr exp(A), or the logarithm of what is too large for double precision."""
    check_hermitian(path, matrix, "--estrada")
    spectrum, budget = eigenvalues(matrix), options.num_matvecs
    top = ends(matrix).high if spectrum is None else float(spectrum[-1])
    if top <= _LARGEST:
        exact = None if spectrum is None else float(np.sum(np.exp(spectrum)))
        runs = _exponentials(jnp.exp, budget, None)
        return Task("tr exp(A), the Estrada index", matrix_operator(matrix), runs, exact)

    def log(total: Array) -> Array:
        return top + jnp.log(total)

    exact = None
    if spectrum is not None:
        exact = top + float(np.log(np.sum(np.exp(spectrum - top))))
    heading = _OVERFLOWS.format(low=top, high=top + np.log(matrix.size))
    runs = _exponentials(lambda x: jnp.exp(x - top), budget, log)
    return Task(heading.rstrip(), matrix_operator(matrix), runs, exact)


def _exponentials(fn: Callable, budget: int, combine: Callable | None) -> dict[str, Run]:
    def door(operator, key):
        return tx.function_trace(operator, fn, key, budget, combine=combine)

    return {"function_trace": door, "slq_trace": _quadrature(fn, budget, combine)}


def _quadrature(fn: Callable, budget: int, combine: Callable | None = None) -> Run:
    counts = split(budget, probes_a_step=0.4)

    def run(operator, key):
        return tx.slq_trace(operator, fn, key, combine=combine, **counts)

    return run


def norm_task(path: Path, matrix: Matrix, options: Options) -> Task:
    """Every application of A is one of its adjoint, too, but of semidefinite matrices."""
    applied = (options.num_matvecs - 1) // (1 if matrix.positive else 2)
    counts = split(applied, probes_a_step=1.0)
    power = options.power

    def run(operator, key):
        return tx.schatten_norm(operator, power, key, **counts)

    heading = f"(sum sigma^{power:g})^(1/{power:g}), sigma the singular values of A"
    operator = matrix_operator(matrix)
    return Task(heading, operator, {"schatten_norm": run}, _exact_norm(matrix, power))


def _exact_norm(matrix: Matrix, power: float) -> float | None:
    if matrix.size > DENSE:
        return None
    spectrum = eigenvalues(matrix) if matrix.hermitian else None
    if spectrum is None:
        entries = dense(matrix.entries)
        size = np.abs(entries).max() or 1.0
        spectrum = np.linalg.svd(entries / size, compute_uv=False) * size
    values = np.abs(spectrum)
    largest = values.max() or 1.0
    return float(largest * np.sum((values / largest) ** power) ** (1 / power))
