"""Two traces of a road network, for who has no matrix at hand."""

from __future__ import annotations

from functools import partial
from importlib import resources
from typing import Any

import jax
import lineax as lx
import numpy as np
import scipy.linalg
import scipy.sparse

import traceax as tx
from traceax._command.files import read_matrix
from traceax._command.matrix import Matrix, examine, matrix_operator
from traceax._command.options import Options
from traceax._command.report import LEGEND, print_table
from traceax._command.spectrum import dense, largest_eigenvalues
from traceax._command.table import Row
from traceax._tasks.task import Compiled, Run, Task, as_row, compiled
from traceax._tasks.traces import inverse_operator

_ATTRIBUTION = """\
The road network of Minnesota: Gleich/minnesota of the SuiteSparse Matrix Collection,
CC-BY 4.0. Its rows are intersections, its entries roads.
"""

_TRIANGLES = """\
1. How many triangles of roads are there? tr(A^3)/6, with A the adjacency matrix.
   One application of A^3/6 is three products with A.
"""

_FLAT = """\
   XTrace loses, because the spectrum is flat: the {rank} largest of {n} eigenvalues have
   {share:.0%} of the sum of squares. Its sketch finds little to take out and costs half of
   the probes. `trace` lets the first half choose between XTrace and Hutchinson.
"""

_COLOURS = """\
   `colouring` wins, {matvecs} matvecs and exact: tx.probing(tx.colouring(A, power=3)) adds
   up only intersections more than three roads apart, between which A^3 is zero.
"""

_INVERSE = """\
2. tr((I + L)^-1), with L the Laplacian of the graph. One application of the inverse
   is a solve by conjugate gradients: lx.invert(operator, lx.CG(rtol=1e-8, atol=1e-8)).
"""

_DECAY = """\
   `trace` takes XNysTrace for what is tagged semidefinite. Told along which graph an
   inverse decays, tx.trace(operator, key, {budget}, pattern=A), it may colour instead.
"""

_EXPLAINED = 50


def tour(options: Options) -> None:
    """Each part begins with what `tx.trace` chooses, said as soon as it is known."""
    shipped = resources.files("traceax") / "data" / "minnesota.mtx"
    with resources.as_file(shipped) as path:
        matrix = read_matrix(path)
    print(f"{shipped.name}: {matrix.describe()}\n{_ATTRIBUTION}", flush=True)
    print(_TRIANGLES, flush=True)
    _triangles(matrix, options)
    print(_INVERSE, flush=True)
    _inverse(matrix, options)
    print(LEGEND)


def _triangles(matrix: Matrix, options: Options) -> None:
    """Every closed walk of three steps starts at one of 3 corners, in one of 2 senses."""
    a = matrix.entries
    task = Task("", _cube(matrix), _of_cubes(a, options), _num_triangles(a))
    rows = _shown(task, options)
    xtrace = rows.get("xtrace")
    if xtrace is not None and 0 < rows["trace"].error < xtrace.error < np.inf:
        print(_FLAT.format(rank=_EXPLAINED, n=matrix.size, share=share(a)))
    if "colouring" in rows:
        print(_COLOURS.format(matvecs=rows["colouring"].num_matvecs))


def _cube(matrix: Matrix) -> lx.AbstractLinearOperator:
    product = matrix_operator(matrix).mv
    return lx.FunctionLinearOperator(
        lambda v: product(product(product(v))) / 6,
        jax.ShapeDtypeStruct((matrix.size,), matrix.entries.dtype),
        lx.symmetric_tag,
    )


def _num_triangles(a: Any) -> float:
    return float((a @ a).multiply(a).sum()) / 6


def _of_cubes(a: scipy.sparse.csr_array, options: Options) -> dict[str, Run]:
    budget = options.num_matvecs
    runs: dict[str, Run] = {"trace": partial(tx.trace, num_matvecs=budget)}
    if budget >= 2:
        runs["xtrace"] = partial(tx.xtrace, num_matvecs=budget)
    colours = tx.colouring(a, power=3)
    num_colours = int(colours.max()) + 1
    if budget >= num_colours:
        sampler = tx.probing(colours)
        coloured = partial(tx.hutchinson_trace, num_matvecs=num_colours, sampler=sampler)
        runs["colouring"] = coloured
    return runs


def share(a: Any) -> float:
    """Of the largest eigenvalues of A^3, in the squares of all."""
    largest = largest_eigenvalues(a, _EXPLAINED)
    return float(np.sum(largest**6)) / float((a @ a @ a).power(2).sum())


def _inverse(matrix: Matrix, options: Options) -> None:
    a = matrix.entries
    degrees = np.asarray(a.sum(axis=1)).ravel()
    shifted = scipy.sparse.csr_array(scipy.sparse.diags_array(1 + degrees) - a)
    positive = examine(shifted, matrix.field)  # By Gershgorin's discs.
    budget = options.num_matvecs
    runs: dict[str, Run] = {
        "trace": partial(tx.trace, num_matvecs=budget),
        "trace(pattern=A)": partial(tx.trace, num_matvecs=budget, pattern=a),
    }
    task = Task("", inverse_operator(positive), runs, _inverse_trace(positive))
    _shown(task, options)
    print(_DECAY.format(budget=budget))


def _inverse_trace(positive: Matrix) -> float:
    """||C^-1||^2 for Cholesky's factor C, in the norm of Frobenius."""
    factor = scipy.linalg.cholesky(dense(positive.entries), lower=True)
    (invert,) = scipy.linalg.get_lapack_funcs(("trtri",), (factor,))
    inverse, _ = invert(factor, lower=1)
    return float(np.sum(inverse**2))


def _shown(task: Task, options: Options) -> dict[str, Row]:
    """What the front door says, as soon as it is known; then the table."""
    found: list[Compiled] = []
    for one in compiled(task, options.seed):
        if not found:
            call = f"tx.trace(operator, key, {options.num_matvecs})"
            print(f"   {call}: {one.estimate}\n", flush=True)
        found.append(one)
    rows = [as_row(one, real=True) for one in found]
    print_table(rows, task.exact)
    return {row.name: row for row in rows}
