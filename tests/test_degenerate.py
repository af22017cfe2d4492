"""Every function at the zero operator, at a multiple of I and at rank 1, also if products
are rounded to bfloat16 inside of the operator.

Values, error bars and derivatives are finite, and an interval contains the truth. A shift
of a multiple of I has the derivative sum of f', which estimates of traces find exactly.
(Left out is what has no such answer: the logarithm of zero, and the derivative of a root.)
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests import calls
from tests.helpers import cases, close, nightly, slow
from tests.matrices import numbers
from tests.tables import row_norms, square
from tests.wrappers import PSD

N = calls.N
KEYS = jax.random.split(jax.random.key(1), 2)
BAND = abs(np.subtract.outer(np.arange(N), np.arange(N))) < 2
LEVEL = 2.5  # of the multiple of I; bfloat16 has it


class Case(NamedTuple):
    """`exact`: the derivative in a shift of a multiple of I is exact, up to the rounding of
    products. `rounded`: bars see what rounding to bfloat16 does."""

    name: str
    call: Callable[[Any, Any], tx.Estimate]
    truth: Callable[[Any], Any]
    exact: bool = False
    tags: Any = PSD
    dtype: Any = np.float32
    rounded: bool = True


def known(name: str, *case: Any, **more: Any) -> Case:
    return Case(name, calls.CALLS[name.split(",", maxsplit=1)[0]], *case, **more)


def of(fn: Any, *before: Any, **how: Any) -> Any:
    return lambda matrix, key: fn(calls.operator(matrix), *before, key, **how)


def summed(fn: Any) -> Any:
    """The sum of f over the eigenvalues."""
    return lambda matrix: jnp.sum(fn(jnp.linalg.eigvalsh(matrix)))


def diagonal_of(fn: Any) -> Any:
    def truth(matrix: Any) -> Any:
        values, vectors = jnp.linalg.eigh(matrix)
        return abs(vectors) ** 2 @ fn(values)

    return truth


def logarithm(x: Any) -> Any:
    return jnp.log(x + 0.5)


def curvature(fn: Any) -> Any:
    def energy(x: Any, matrix: Any) -> Any:
        return jnp.sum(x * calls.times(matrix, x)) / 2

    return lambda matrix, key: fn(energy, matrix[0], key, 6, args=matrix)


trace, diagonal, exponential = jnp.trace, jnp.diagonal, summed(jnp.exp)
BUDGET: Any = {"num_matvecs": 40}
SHORT: Any = {"num_probes": 4, "num_steps": 5}
COLOURED: Any = {"num_probes": 3, "num_steps": 5, "sampler": tx.probing(BAND)}
COLOURS: Any = {"num_matvecs": 24, "pattern": BAND}
COMPLEX: Any = {"dtype": np.complex64, "rounded": False}
UNTAGGED: Any = {"tags": ()}
# All entries of the probes of a colour are rounded in the same way.
SIGNS: Any = {"rounded": False}
FDIAG, EXP = tx.function_diagonal, diagonal_of(jnp.exp)
CASES = [
    known("trace", trace, True),
    known("trace, untagged", trace, True, **UNTAGGED),
    known("trace, complex", trace, True, **COMPLEX),
    Case("trace, colours", of(tx.trace, **COLOURS), trace, True, **SIGNS),
    known("hutchinson_trace", trace, True),
    Case("hutchpp_trace", of(tx.hutchpp_trace, num_matvecs=30), trace, True, **UNTAGGED),
    Case("xtrace", of(tx.xtrace, num_matvecs=30), trace, True, **UNTAGGED),
    known("xnystrace", trace, True),
    known("deltashift", trace, True),
    known("diagonal", diagonal),
    Case("diagonal, colours", of(tx.diagonal, **COLOURS), diagonal, **SIGNS),
    known("diagpp", diagonal),
    known("xdiag", diagonal),
    known("row_norms_squared", row_norms),
    known("frobenius_norm_squared", square),
    known("selected_entries", lambda m: m[np.nonzero(BAND)]),
    Case("laplacian", curvature(tx.laplacian), trace, True),
    Case("function_trace", of(tx.function_trace, jnp.exp, **BUDGET), exponential, True),
    Case("slq_trace", of(tx.slq_trace, jnp.exp, **SHORT), exponential, True),
    Case(
        "arnoldi_trace",
        of(tx.arnoldi_trace, jnp.exp, **SHORT),
        exponential,
        True,
        rounded=False,
        **UNTAGGED,
    ),
    Case("function_diagonal", of(FDIAG, jnp.exp, **SHORT), EXP),
    Case("function_diagonal, colours", of(FDIAG, jnp.exp, **COLOURED), EXP),
    Case("logdet", of(tx.logdet, shift=0.5, **BUDGET), summed(logarithm), True),
    Case("schatten_norm", of(tx.schatten_norm, 1, **BUDGET), summed(abs)),
]
# What shares its sketch or its quadrature with a case above.
ALIKE = ("trace, colours", "hutchinson_trace", "xtrace", "xnystrace", "diagonal")
ALIKE += ("diagonal, colours", "laplacian", "function_diagonal, colours", "deltashift")
ALIKE += ("trace, untagged", "function_diagonal", "frobenius_norm_squared", "arnoldi_trace")


def rest(case: Case) -> Any:
    return (nightly if case.name in ALIKE else slow)(case)


@pytest.mark.parametrize(
    "case", cases(CASES, "trace", "xdiag", rest=rest), ids=lambda case: case.name
)
def test_degenerate_operators(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    times = calls.times

    def operator(matrix: Any) -> lx.AbstractLinearOperator:
        structure = jax.eval_shape(lambda: matrix[0])
        apply = lambda v: calls.times(matrix, v)  # noqa: E731
        return lx.FunctionLinearOperator(apply, structure, case.tags)

    def value(matrix: Any, is_rounded: Any, key: Any) -> tuple[Any, tx.Estimate]:
        def product(matrix: Any, v: Any) -> Any:
            if not case.rounded:
                return times(matrix, v)
            to_bfloat16 = lambda x: jax.lax.reduce_precision(x, 8, 7)  # noqa: E731
            low = to_bfloat16(times(matrix, to_bfloat16(v)))
            return jnp.where(is_rounded, low, times(matrix, v))

        monkeypatch.setattr(calls, "times", product)
        estimate = case.call(matrix, key)
        return sum(jnp.sum(leaf).real for leaf in jax.tree.leaves(estimate.value)), estimate

    monkeypatch.setattr(calls, "operator", operator)
    both = jax.value_and_grad(value, has_aux=True)
    compiled = jax.jit(jax.vmap(both, in_axes=(None, None, 0)))
    rate = jax.grad(lambda level: case.truth(level * jnp.eye(N)).real)
    u = numbers(N, case.dtype)
    u = u / np.linalg.norm(u)
    eye = np.eye(N, dtype=case.dtype)
    matrices = {"0": 0 * eye, "I": LEVEL * eye, "uu": np.outer(u, u.conj())}
    for name, is_rounded in itertools.product(matrices, [False, True][: 1 + case.rounded]):
        at = f"{case.name} {name} {is_rounded}"
        matrix = jnp.asarray(matrices[name])
        (_, estimate), gradient = compiled(matrix, is_rounded, KEYS)
        exact = np.asarray(case.truth(matrix).real)
        rounding = 3e-6 * np.max(abs(exact))
        low, high = map(np.asarray, estimate.interval(0.9999))
        assert np.all(np.isfinite(estimate.standard_error)), at
        covered = (low - rounding <= exact) & (exact <= high + rounding)
        assert np.all(covered), (at, np.max(abs(np.asarray(estimate.value) - exact)))
        assert np.all(np.isfinite(gradient)), at
        if case.exact and name != "uu":
            derivative = jnp.trace(gradient, axis1=1, axis2=2).real
            expected = jnp.full(2, rate(LEVEL if name == "I" else 0.0))
            close(derivative, expected, 0.02 if is_rounded else 1e-4)
