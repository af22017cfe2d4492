"""Graphs, and the error of probing with their colourings."""

from pathlib import Path
from typing import Any

import numpy as np
import scipy.io
import scipy.sparse

import traceax

ROADS = Path(traceax.__file__).parent / "data" / "minnesota.mtx"


def path(side: int, closed: bool = False) -> Any:
    line = np.eye(side, k=1) + np.eye(side, k=-1)
    if closed:
        line[0, -1] = line[-1, 0] = 1
    return line


def grid(*sides: int, closed: bool = False) -> Any:
    """The neighbours in a grid: dense, the last axis fastest."""
    whole = np.zeros((1, 1))
    for side in sides:
        step = np.kron(np.eye(len(whole)), path(side, closed))
        whole = np.kron(whole, np.eye(side)) + step
    return whole


def roads() -> Any:
    """The road network of Minnesota, dense."""
    matrix: Any = scipy.io.mmread(ROADS, spmatrix=False)
    pattern = matrix.toarray() != 0
    return (pattern | pattern.T) & ~np.eye(pattern.shape[0], dtype=bool)


def laplacian(adjacency: Any) -> Any:
    return np.diag(adjacency.sum(1)) - adjacency


def near(pattern: Any, power: int) -> Any:
    """Which vertices are within so many steps, by dense powers."""
    step = (pattern != 0) | (pattern != 0).T | np.eye(len(pattern), dtype=bool)
    reached = np.linalg.matrix_power(step.astype(float), power)
    return reached > 0


def alike(colours: Any) -> Any:
    """Which different vertices share a colour."""
    same = colours[:, None] == colours
    return same & ~np.eye(len(colours), dtype=bool)


def left(matrix: Any, colours: Any) -> float:
    """The relative error of the diagonal from one repeat, over all signs."""
    disturbed = np.sum(np.abs(matrix * alike(np.asarray(colours))) ** 2)
    return float(np.sqrt(disturbed) / np.linalg.norm(np.diag(matrix)))
