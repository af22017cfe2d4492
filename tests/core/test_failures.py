"""Transposition, leaks and hashing: every class of operators, every estimator."""

import functools
from typing import Any

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from tests.helpers import close, leaks_checked, nightly, slow
from tests.tables import ALL, REST_ALL, Entry
from tests.wrappers import BANDED, EVERY, part_of

N, BUDGET = 12, 8
KEY = jax.random.key(3)

# Most faults show in tracing. With these classes XTrace and XDiag are run, too.
EXECUTED = ("PyTree", "Jacobian", "nested")
SLOW = ("hutchpp_trace", "xnystrace", "row_norms_squared")

# Classes differ in the application and its adjoint. XTrace meets all classes for the one,
# XDiag for the other. The other estimators meet the class that holds most of the others.
XTRACE = [entry for entry in ALL if entry.name == "xtrace"]
XDIAG = [entry for entry in REST_ALL if entry.name == "xdiag"]
OTHERS = [entry for entry in ALL + REST_ALL if entry not in XTRACE + XDIAG]
Pair = tuple[Entry, str, Any]


def pairs(entries: list[Entry], kinds: Any, dtype: Any) -> list[Pair]:
    return [(entry, kind, dtype) for entry in entries for kind in kinds]


def each_pair(table: list[Pair], *quick: tuple[str, str]) -> pytest.MarkDecorator:
    def marked(entry: Entry, kind: str, dtype: Any) -> Any:
        if (entry.name, kind) in quick:
            return entry, kind, dtype
        is_slow = entry.name in SLOW or kind in ("Jacobian", "Tangent", "Tridiagonal")
        return (slow if is_slow else nightly)(entry, kind, dtype)

    ids = [f"{entry.name}-{kind}-{dtype.__name__}" for entry, kind, dtype in table]
    values = [marked(*pair) for pair in table]
    return pytest.mark.parametrize(("entry", "kind", "dtype"), values, ids=ids)


EVERY_PAIR = pairs(XTRACE, EVERY, complex) + pairs(XTRACE, ("Matrix", *BANDED), float)
EVERY_PAIR += pairs(XDIAG, (*EXECUTED, "Tangent"), complex) + pairs(XDIAG, BANDED, float)
EVERY_PAIR += pairs(OTHERS, ("nested",), complex)
MOST_PAIRS = pairs(XTRACE, (*EXECUTED, "Tangent"), float)
MOST_PAIRS += pairs(XDIAG + OTHERS, ("nested",), float)


def loss_of(entry: Entry, kind: str, matrix: Any) -> Any:
    return entry.contracted(entry.of(EVERY[kind](matrix), KEY, BUDGET).value)


def matrix_for(entry: Entry, kind: str, dtype: Any) -> Any:
    matrix = entry.matrix(N, dtype)
    if kind == "Tridiagonal":  # stays semidefinite when its far corners are cut off
        matrix = matrix + 9 * jnp.eye(N, dtype=matrix.dtype)
    return matrix


@functools.cache
def dense(entry: Entry, symmetric: bool) -> Any:
    """Value and gradient of the estimate for a stored matrix."""

    def value(matrix: Any) -> Any:
        operator = lx.MatrixLinearOperator(matrix, lx.symmetric_tag if symmetric else ())
        return entry.contracted(entry.of(operator, KEY, BUDGET).value).real

    return jax.jit(jax.value_and_grad(value))


@each_pair(EVERY_PAIR, ("xtrace", "PyTree"), ("xdiag", "nested"))
def test_transposition(entry: Entry, kind: str, dtype: Any) -> None:
    """The gradient is the transpose of the jvp, and the gradient of the dense operator."""
    matrix = matrix_for(entry, kind, dtype)
    direction = matrix[::-1] * 0.3
    symmetric = lx.is_symmetric(EVERY[kind](matrix))

    @jax.jit
    def forward_and_reverse(matrix: Any) -> Any:
        value = lambda matrix: loss_of(entry, kind, matrix).real  # noqa: E731
        return jax.jvp(value, (matrix,), (direction,)), jax.grad(value)(matrix)

    (got, tangent), gradient = forward_and_reverse(matrix)
    scale = float(jnp.sum(jnp.abs(matrix))) if entry.truth is not jnp.trace else N
    close(tangent, jnp.sum(gradient * direction).real, 1e-12, scale)
    if entry.name not in ("trace", "diagonal"):  # which are exact, some classes at once
        part, pull_back = jax.vjp(lambda matrix: part_of(kind, matrix), matrix)
        want, cotangent = dense(entry, symmetric)(part)
        close(got, want, 1e-12, scale)
        close(gradient, pull_back(cotangent)[0], 1e-12, scale)
    else:
        truth = entry.contracted(entry.truth(part_of(kind, matrix))).real
        close(got, truth, 1e-12, scale)


@each_pair(MOST_PAIRS, ("xtrace", "PyTree"))
def test_symbolic_zeros_and_leaks(entry: Entry, kind: str, dtype: Any) -> None:
    """Closures, unperturbed operators and modules, in a scan in vmap in jit."""
    matrix = matrix_for(entry, kind, dtype)

    class Model(eqx.Module):
        matrix: Any
        activation: Any = jnp.sin
        name: str = "closure"

    @jax.jit
    def gradients(shift: Any, scale: Any) -> Any:
        def loss(scale: Any, shift: Any) -> Any:
            def step(total: Any, _: None) -> tuple[Any, None]:
                known = loss_of(entry, kind, matrix)  # an unperturbed operator
                fresh = loss_of(entry, kind, Model(scale * matrix).matrix)
                return total + shift * known + fresh, None

            return jax.lax.scan(step, 0.0, None, length=2)[0].real

        return jax.vmap(jax.grad(loss, (0, 1)), (0, None))(scale, shift)

    arguments = 0.5, jnp.array([1.0, 2.0])
    # On jax 0.12 a jaxpr keeps the tracers that it was made of, and so does the function in
    # an operator. The checker reports them, though nothing has leaked.
    stores_arrays = kind in ("Matrix", "PyTree", "Diagonal", "Tridiagonal", "Identity")
    with leaks_checked(on_new_versions=stores_arrays):
        jax.eval_shape(gradients, *arguments)  # leaks are a matter of tracing
    if kind not in EXECUTED or entry in OTHERS:
        return
    by_scale, by_shift = gradients(*arguments)
    value = loss_of(entry, kind, matrix)
    tolerance = 1e-10 * float(jnp.sum(jnp.abs(matrix) ** entry.degree))
    np.testing.assert_allclose(by_shift, [2 * value] * 2, atol=tolerance)
    if entry.euler:
        want = 2 * entry.degree * value * np.array(arguments[1]) ** (entry.degree - 1)
        np.testing.assert_allclose(by_scale, want, atol=tolerance)


@each_pair(MOST_PAIRS, ("xdiag", "nested"))
def test_hashing(entry: Entry, kind: str, dtype: Any) -> None:
    """In while loops, plain and checkpointed, and in a diffrax solver."""
    matrix = matrix_for(entry, kind, dtype)

    def body(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        i, x = carry
        return i + 1, x + loss_of(entry, kind, x * matrix).real / 1000

    def looped(x: Any, kind: Any) -> Any:
        return eqxi.while_loop(lambda c: c[0] < 2, body, (0, x), kind=kind, max_steps=2)[1]

    def solved(x: Any) -> Any:
        field = diffrax.ODETerm(lambda t, y, args: body((0, y))[1] - y)
        return diffrax.diffeqsolve(field, diffrax.Euler(), 0.0, 2.0, 1.0, x).ys

    def all_of_them(x: Any) -> Any:
        return looped(x, "lax"), jax.value_and_grad(looped)(x, "checkpointed"), solved(x)

    jax.eval_shape(all_of_them, jnp.array(1.0))  # what is not hashable fails in tracing
