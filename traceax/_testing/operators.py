"""Generated operators, each with the dense matrix that is its oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import lineax as lx
import numpy as np
from hypothesis import assume
from jaxtyping import Array, Inexact

from traceax._testing.clothes import FULL, SINGLE, Clothes, joined, wrapped
from traceax._testing.matrices import (
    SPECTRA,
    hermitian,
    spectrum,
    with_singular_values,
)

Names = Sequence[str] | None
Pair = tuple[lx.AbstractLinearOperator, Inexact[Array, "n n"]]

_SINGLE = {clothes.name: clothes for clothes in SINGLE}
_USUAL = [name for name in _SINGLE if name != "Tangent"]
_AROUND = ("Tagged", "Neg", "Mul", "Div")
_JOIN = ("Add", "Composed")
KINDS = (*_SINGLE, *_AROUND, *_JOIN)
USUAL = (*_USUAL, *_AROUND, *_JOIN)


def operators(
    *,
    kinds: Names = None,
    sizes: Sequence[int] = (1, 2, 3, 8),
    dtypes: Names = None,
    spectra: Names = None,
    semidefinite: bool = False,
    depth: int = 2,
) -> st.SearchStrategy[Pair]:
    """A hypothesis strategy for square operators of every class of lineax.

    It draws pairs `(operator, dense)`: an operator, and the matrix it stands for, the
    oracle. Operators are single or inside one another, real or complex, Hermitian or not,
    and carry tags that are true of them, or none. Examples shrink to a matrix operator of
    n = 1.

    **Arguments**

    - `kinds`: the classes, a sequence of names. Default `None`: all of lineax's that users
      make, `"Matrix"`, `"PyTree"`, `"Jacobian"`, `"Function"`, `"Diagonal"`,
      `"Tridiagonal"`, `"Identity"`, which stand for themselves, and `"Tagged"`, `"Neg"`,
      `"Mul"`, `"Div"`, `"Add"`, `"Composed"`, which are put around others. There is
      `"Tangent"`, too, of which lineax does not answer all questions.
    - `sizes`: dimensions n. Default `(1, 2, 3, 8)`; each is a compilation.
    - `dtypes`: names of dtypes. Default `None`: single precision, real and complex, and
      double where JAX has it enabled.
    - `spectra`: the names of eigenvalues or singular values. Default `None`: all, `"flat"`,
      `"decaying"`, `"steps"`, `"indefinite"`, `"rank-deficient"`, `"badly scaled"`.
    - `semidefinite`: whether all are to be positive semidefinite and tagged so. Default
      `False`.
    - `depth`: how deep operators sit inside one another, a Python int. Default 2.

    **Returns** a strategy whose examples are pairs `(operator, dense)`.

    **Raises** `ValueError` if there is an unknown name among `kinds` or `spectra`, or no
    kind that stands for itself.

    **Derivatives**: of an example, those of its operator.

    **Cost**: none, until it is drawn from.

    **Example**

    ```python
    >>> import hypothesis, jax.numpy as jnp, traceax as tx
    >>> from traceax.testing import operators
    >>> @hypothesis.settings(max_examples=5, deadline=None, derandomize=True)
    ... @hypothesis.given(operators(sizes=(1, 3), dtypes=("float32",)))
    ... def test_the_trace_of_small_operators_is_exact(pair):
    ...     operator, dense = pair
    ...     error = tx.trace(operator, jax.random.key(0)).value - jnp.trace(dense)
    ...     assert abs(error) <= 1e-5 * jnp.linalg.norm(dense)
    >>> import jax
    >>> test_the_trace_of_small_operators_is_exact()

    ```

    **Reference**: MacIver and Hatfield-Dodds (2019), Hypothesis: A new approach to
    property-based testing, Journal of Open Source Software 4(43),
    doi:10.21105/joss.01891.
    """
    kinds = USUAL if kinds is None else kinds
    spectra = SPECTRA if spectra is None else spectra
    _check_names("kinds", kinds, KINDS)
    _check_names("spectra", spectra, SPECTRA)
    single = [kind for kind in kinds if kind in _SINGLE]
    if not single:
        raise ValueError(
            "traceax.testing.operators(kinds=...) must hold a class that stands for itself,"
            f" because others are put around it, but got {list(kinds)}. Add 'Matrix'."
        )
    if semidefinite:
        spectra = [name for name in spectra if name != "indefinite"]
    return _pairs(tuple(kinds), tuple(sizes), dtypes, tuple(spectra), semidefinite, depth)


def _check_names(argument: str, names: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(
            f"traceax.testing.operators({argument}=...) must be names of what can be drawn,"
            f" but got {unknown or 'none'}. There are {', '.join(known)}."
        )


@st.composite
def _pairs(
    draw: Any,
    kinds: tuple[str, ...],
    sizes: tuple[int, ...],
    dtypes: Sequence[str] | None,
    spectra: tuple[str, ...],
    semidefinite: bool,
    depth: int,
) -> Pair:
    n = draw(st.sampled_from(sizes))
    dtype = draw(st.sampled_from(tuple(dtypes or _precisions())))
    values = spectrum(draw(st.sampled_from(spectra)), n)
    is_hermitian = semidefinite or draw(st.booleans())
    make = hermitian if is_hermitian else with_singular_values
    matrix = make(values, dtype, draw(st.integers(0, 99)))
    clothes = draw(_clothes(kinds, depth, semidefinite))
    operator, dense = clothes.make(matrix), clothes.dense(matrix)
    if semidefinite:
        return lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag), dense
    tag = draw(st.sampled_from([None, *_true_tags(dense)]))
    return (operator if tag is None else lx.TaggedLinearOperator(operator, tag)), dense


def _precisions() -> tuple[str, ...]:
    single = ("float32", "complex64")
    double = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    return (*single, "float64", "complex128") if double else single


_NOT_OF_SEMIDEFINITE = ("Tridiagonal", "Neg", "Composed")


def _clothes(
    kinds: tuple[str, ...], depth: int, semidefinite: bool
) -> st.SearchStrategy[Clothes]:
    if semidefinite:  # parts and products of such matrices are not all such
        kinds = tuple(kind for kind in kinds if kind not in _NOT_OF_SEMIDEFINITE)
    single = st.sampled_from([_SINGLE[kind] for kind in kinds if kind in _SINGLE])
    around = [kind for kind in kinds if kind in _AROUND]
    join = [kind for kind in kinds if kind in _JOIN]
    drawn = single
    for _ in range(depth):
        ways: list[st.SearchStrategy[Clothes]] = [single]
        if around:
            ways.append(st.builds(wrapped, st.sampled_from(around), drawn))
        if join:
            ways.append(_joined(join, drawn, single))
        drawn = st.one_of(ways)
    return drawn


@st.composite
def _joined(
    draw: Any,
    join: list[str],
    ones: st.SearchStrategy[Clothes],
    others: st.SearchStrategy[Clothes],
) -> Clothes:
    """Of two that act on one space. Not of two banded ones, one of them tridiagonal: of
    their sum lineax 0.1.1 takes the diagonals in double precision, where that is on."""
    one, other = draw(ones), draw(others)
    names = one.name + other.name
    assume("Tridiagonal" not in names or any(full in names for full in FULL))
    if ("PyTree" in one.name) != ("PyTree" in other.name):
        other = one
    return joined(draw(st.sampled_from(join)), one, other)


def _true_tags(dense: Inexact[Array, "n n"]) -> list[object]:
    """Those of lineax's that hold, to rounding."""
    matrix = np.asarray(dense)
    eps, size = np.finfo(matrix.dtype).eps, np.max(np.abs(matrix), initial=0.0)
    room = 100 * len(matrix) * eps * size

    def holds(difference: np.ndarray) -> bool:
        return bool(np.max(np.abs(difference), initial=0.0) <= room)

    far = np.abs(np.subtract.outer(*2 * [np.arange(len(matrix))]))
    tags = {
        lx.symmetric_tag: holds(matrix - matrix.T),
        lx.diagonal_tag: not np.any(matrix * (far > 0)),
        lx.tridiagonal_tag: not np.any(matrix * (far > 1)),
        lx.lower_triangular_tag: not np.any(np.triu(matrix, 1)),
        lx.upper_triangular_tag: not np.any(np.tril(matrix, -1)),
    }
    if holds(matrix - matrix.conj().T):
        eigenvalues = np.linalg.eigvalsh(matrix)
        tags[lx.positive_semidefinite_tag] = bool(np.all(eigenvalues >= -room))
        tags[lx.negative_semidefinite_tag] = bool(np.all(eigenvalues <= room))
    return [tag for tag, is_true in tags.items() if is_true]
