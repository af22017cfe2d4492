"""Operators that are wrong in one thing each are told so; right ones are not."""

import re
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from tests.helpers import EVERY, general, hermitian, part_of, slow
from traceax.testing import check_operator, operators

KEY = jax.random.key(0)
N = 6
SYMMETRIC = hermitian(1.0 + np.arange(N))
PSD, NSD = lx.positive_semidefinite_tag, lx.negative_semidefinite_tag


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("dtype", [float, slow(complex)])
def test_every_class_is_right(kind: str, dtype: Any) -> None:
    check_operator(EVERY[kind](general(N, dtype)), KEY)


@hypothesis.settings(max_examples=8, deadline=None, derandomize=True, database=None)
@hypothesis.given(pair=operators(sizes=(1, 3)))
def test_generated_operators_are_right_and_their_oracle(pair: Any) -> None:
    operator, dense = pair
    check_operator(operator, KEY)
    matrix = operator.as_matrix()
    eps = float(jnp.finfo(matrix.dtype).eps)
    assert jnp.all(jnp.abs(matrix - dense) <= 100 * eps * jnp.max(jnp.abs(dense)))


@pytest.mark.slow
def test_right_tags_and_shapes() -> None:
    banded = part_of("Tridiagonal", SYMMETRIC)
    right: list[lx.AbstractLinearOperator] = [
        lx.MatrixLinearOperator(SYMMETRIC, PSD),
        lx.MatrixLinearOperator(-SYMMETRIC, NSD),
        lx.MatrixLinearOperator(jnp.diag(SYMMETRIC[0]), lx.diagonal_tag),
        lx.MatrixLinearOperator(jnp.tril(SYMMETRIC), lx.lower_triangular_tag),
        lx.MatrixLinearOperator(jnp.triu(SYMMETRIC), lx.upper_triangular_tag),
        lx.MatrixLinearOperator(banded, lx.tridiagonal_tag),
        lx.MatrixLinearOperator(jnp.ones((N, N)), lx.unit_diagonal_tag),
        lx.MatrixLinearOperator(hermitian(1.0 + np.arange(N), complex), PSD),
        lx.MatrixLinearOperator(jnp.zeros((N, N)), [PSD, NSD]),
        lx.MatrixLinearOperator(general(N)[:4]),
    ]
    for operator in right:
        check_operator(operator, KEY)
    low = lx.MatrixLinearOperator(SYMMETRIC.astype(jnp.bfloat16), PSD)
    check_operator(low, KEY)


class Own(lx.AbstractLinearOperator):
    """Of a class of one's own, right but for what is `wrong`."""

    matrix: Any
    wrong: str = eqx.field(static=True, default="")

    def mv(self, vector: Any) -> Any:
        product = self.matrix @ vector
        match self.wrong:
            case "offset":
                return product + 1
            case "conjugate":
                return self.matrix @ vector.conj()
            case "structure":
                return product[:-1]
            case "frozen":
                return jax.lax.stop_gradient(self.matrix) @ vector
            case "rule":
                return _wrong_rule(self.matrix, vector)
            case "batch":
                return self.matrix @ np.asarray(vector)
            case _:
                return product

    def as_matrix(self) -> Any:
        return 2 * self.matrix if self.wrong == "as_matrix" else self.matrix

    def transpose(self) -> "Own":
        return self if self.wrong == "transpose" else Own(self.matrix.T)

    def in_structure(self) -> Any:
        return jax.ShapeDtypeStruct(self.matrix.shape[1:], self.matrix.dtype)

    def out_structure(self) -> Any:
        return jax.ShapeDtypeStruct(self.matrix.shape[:1], self.matrix.dtype)


@jax.custom_jvp
def _wrong_rule(matrix: Any, vector: Any) -> Any:
    return matrix @ vector


@_wrong_rule.defjvp
def _wrong_rule_jvp(primals: Any, tangents: Any) -> Any:
    (matrix, vector), (dm, dv) = primals, tangents
    return matrix @ vector, matrix @ dv + 1.5 * (dm @ vector)


QUESTIONS = [lx.is_symmetric, lx.is_positive_semidefinite, lx.is_negative_semidefinite]
QUESTIONS += [lx.is_diagonal, lx.is_lower_triangular, lx.is_upper_triangular]
QUESTIONS += [lx.is_tridiagonal, lx.has_unit_diagonal]
for question in QUESTIONS:
    question.register(Own, lambda _: False)
lx.conj.register(Own, lambda o: o if o.wrong == "conj" else Own(o.matrix.conj()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [float, complex])
def test_a_class_of_ones_own(dtype: Any) -> None:
    check_operator(Own(general(N, dtype)), KEY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("offset", "linear, A.*off by"),
        ("conjugate", "linear, A.*complex numbers"),
        ("structure", r"mv: returns complex128\[5\], but out_structure is complex128\[6\]"),
        ("as_matrix", "as_matrix: off by"),
        ("transpose", "transpose, y.*off by"),
        ("conj", "lx.conj, .*off by"),
        ("batch", "mv: raises TracerArrayConversionError"),
        ("frozen", "derivative = difference quotient: off by"),
        ("rule", "derivative = difference quotient: off by"),
    ],
)
def test_what_is_wrong_is_named(wrong: str, words: str) -> None:
    with pytest.raises(AssertionError, match=rf"check_operator: Own fails:(.|\n)*{words}"):
        check_operator(Own(general(N, complex), wrong), KEY)


UNTRUE = {
    "symmetric": (lx.symmetric_tag, general(N)),
    "positive semidefinite": (PSD, SYMMETRIC - 1.01 * jnp.eye(N)),
    "negative semidefinite": (NSD, SYMMETRIC),
    "diagonal": (lx.diagonal_tag, SYMMETRIC),
    "lower triangular": (lx.lower_triangular_tag, jnp.triu(SYMMETRIC)),
    "upper triangular": (lx.upper_triangular_tag, jnp.tril(SYMMETRIC)),
    "tridiagonal": (lx.tridiagonal_tag, SYMMETRIC),
    "unit diagonal": (lx.unit_diagonal_tag, jnp.tril(SYMMETRIC)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNTRUE)
def test_untrue_tags_are_named(name: str) -> None:
    tag, matrix = UNTRUE[name]
    with pytest.raises(AssertionError, match=f"\n- {name}: off by .*is {name}, and is not"):
        check_operator(applied(matrix, tag), KEY)


def applied(matrix: Any, *tags: object) -> lx.AbstractLinearOperator:
    """Of a matrix that is tagged as diagonal lineax applies the diagonal alone."""
    structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tags)


def test_the_message_lists_everything_with_its_size() -> None:
    operator = applied(jnp.triu(jnp.full((N, N), 3.0)), PSD, lx.diagonal_tag)
    with pytest.raises(AssertionError) as caught:
        check_operator(operator, KEY)
    faults = str(caught.value).splitlines()[1:]
    assert len(faults) >= 3
    for fault in faults:
        assert re.search(r"off by \d.*allowed\. \w", fault)


def test_a_tolerance_for_what_is_solved_for() -> None:
    nearly = SYMMETRIC.at[0, 1].add(1e-5)
    operator = lx.MatrixLinearOperator(nearly, lx.symmetric_tag)
    with pytest.raises(AssertionError, match="symmetric: off by"):
        check_operator(operator, KEY)
    check_operator(operator, KEY, rtol=1e-4)


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"check_operator\(operator=.*lineax operator"):
        check_operator(SYMMETRIC, KEY)
    with pytest.raises(TypeError, match=r"check_operator\(key=.*random key"):
        check_operator(lx.MatrixLinearOperator(SYMMETRIC), 0)  # pyright: ignore


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kinds": ("Matrix", "Sparse")}, r"kinds=.*got \['Sparse'\]"),
        ({"kinds": ()}, "kinds=.*got none"),
        ({"kinds": ("Add",)}, "kinds=.*stands for itself"),
        ({"spectra": ("odd",)}, r"spectra=.*got \['odd'\].*flat"),
    ],
)
def test_errors_of_the_strategy(wrong: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"traceax\.testing\.operators\({words}"):
        operators(**wrong)


def test_it_shrinks_to_a_matrix_of_one_dimension() -> None:
    phases = (hypothesis.Phase.generate, hypothesis.Phase.shrink)
    how = hypothesis.settings(database=None, derandomize=True, phases=phases)
    operator, dense = hypothesis.find(operators(), lambda _: True, settings=how)
    assert isinstance(operator, lx.MatrixLinearOperator)
    assert dense.shape == (1, 1)


def test_every_class_is_drawn() -> None:
    drawn: set[str] = set()

    @hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @hypothesis.given(operators(sizes=(3,), dtypes=("float64",), spectra=("flat",)))
    def collect(pair: Any) -> None:
        nodes = jax.tree.leaves(pair[0], is_leaf=lambda x: False)
        assert nodes
        stack = [pair[0]]
        while stack:
            node = stack.pop()
            drawn.add(type(node).__name__.removesuffix("LinearOperator"))
            parts = ("operator", "operator1", "operator2")
            stack += [getattr(node, part) for part in parts if hasattr(node, part)]

    collect()
    assert drawn >= EVERY.keys() - {"Tangent", "nested"}
