"""The tables of estimators."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import cases, slow
from tests.matrices import general, hermitian
from tests.wrappers import PSD
from traceax._linalg.columns import promoted


def row_norms(matrix: Any) -> Any:
    return jnp.sum(abs(matrix) ** 2, axis=1)


def square(matrix: Any) -> Any:
    return jnp.sum(row_norms(matrix))


class Entry(NamedTuple):
    """`euler`: the value is read through the frozen blocks of its derivative; `truth`: of a
    dense matrix, homogeneous of degree `degree` in it."""

    name: str
    estimate: Callable[..., tx.Estimate]
    minimum: int
    semidefinite: bool = False
    euler: bool = True
    truth: Callable[[Any], Any] = jnp.trace
    degree: float = 1

    def tagged(self, operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
        """Where the estimator insists on it."""
        return lx.TaggedLinearOperator(operator, PSD) if self.semidefinite else operator

    def of(self, operator: lx.AbstractLinearOperator, *args: Any) -> tx.Estimate:
        return self.estimate(self.tagged(operator), *args)

    def matrix(self, n: int, dtype: Any = float, seed: int = 0) -> Any:
        """One that the estimator may be given."""
        if self.semidefinite:
            return hermitian(1.0 + np.arange(n) % 5, dtype, seed)
        return general(n, dtype, seed)

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
ALL = [*ESTIMATORS, Entry("trace", tx.trace, 1)]
"""The traces."""

DIAGONALS = [
    Entry("hutchinson_diagonal", tx.hutchinson_diagonal, 1, truth=jnp.diagonal),
    Entry("diagpp", tx.diagpp, 3, truth=jnp.diagonal, euler=False),
    Entry("xdiag", tx.xdiag, 2, truth=jnp.diagonal, euler=False),
    Entry("xnysdiag", tx.xnysdiag, 1, semidefinite=True, truth=jnp.diagonal, euler=False),
]
frobenius = tx.frobenius_norm_squared
NORMS = [
    Entry("row_norms_squared", tx.row_norms_squared, 3, truth=row_norms, degree=2),
    Entry("frobenius_norm_squared", frobenius, 2, euler=False, truth=square, degree=2),
]
REST = [*DIAGONALS, *NORMS]
REST_ALL = [*REST, Entry("diagonal", tx.diagonal, 1, truth=jnp.diagonal)]
"""Diagonals and norms."""


SAMPLERS: list[Any] = [tx.rademacher, tx.normal, tx.sphere, tx.orthogonal, tx.hadamard]


def names(entries: list[Entry]) -> list[str]:
    return [entry.name for entry in entries]


def each(
    entries: list[Entry], *quick: str, some: Any = (), rest: Any = slow
) -> pytest.MarkDecorator:
    """A test for the entries of a table; only the named ones are in the quick run, `some`
    are slow, and so is the rest, or nightly. All are quick if none is named."""
    chosen = entries
    if quick or some:
        chosen = cases(entries, *quick, some=some, rest=rest)
    return pytest.mark.parametrize("entry", chosen, ids=lambda entry: entry.name)
