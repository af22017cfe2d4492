"""`check_operator` names what is wrong with an operator, and generated ones are right."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from tests.helpers import address, nightly, outputs, refused, slow
from tests.matrices import general, hermitian
from tests.wrappers import EVERY, PSD, Plain, function, part_of
from traceax.testing import check_operator, operators

KEY = jax.random.key(0)
N = 6
SYMMETRIC = hermitian(1.0 + np.arange(N))
NSD = lx.negative_semidefinite_tag


SLOW = ["Tangent", "nested"]
REST = [kind for kind in EVERY if kind not in ("Matrix", *SLOW)]


@pytest.mark.parametrize("kind", ["Matrix", *map(slow, SLOW), *map(nightly, REST)])
def test_every_class_is_right(kind: str) -> None:
    check_operator(EVERY[kind](general(N, complex)), KEY)


@pytest.mark.nightly
@hypothesis.settings(max_examples=4, deadline=None, derandomize=True, database=None)
@hypothesis.given(pair=operators(sizes=(1, 3)))
def test_generated_operators_are_right_and_their_oracle(pair: Any) -> None:
    """`check_operator` compares `as_matrix` with what the operator applies."""
    operator, dense = pair
    check_operator(operator, KEY)
    assert jnp.array_equal(operator.as_matrix(), dense)


@pytest.mark.slow
def test_right_tags_and_shapes() -> None:
    banded, stored = part_of("Tridiagonal", SYMMETRIC), lx.MatrixLinearOperator
    for operator in (
        stored(SYMMETRIC, PSD),
        stored(-SYMMETRIC, NSD),
        stored(jnp.triu(SYMMETRIC), lx.upper_triangular_tag),
        stored(banded, lx.tridiagonal_tag),
        stored(jnp.ones((N, N)), lx.unit_diagonal_tag),
        stored(hermitian(1.0 + np.arange(200), np.float32), PSD),
        stored(jnp.zeros((N, N)), [PSD, NSD]),
        stored(general(N)[:4]),
        Own(general(N, complex)),
        stored(SYMMETRIC.astype(jnp.bfloat16), PSD),
    ):
        check_operator(operator, KEY)


PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "offset": lambda matrix, v: matrix @ v + 1,
    "conjugate": lambda matrix, v: matrix @ v.conj(),
    "structure": lambda matrix, v: (matrix @ v)[:-1],
    "frozen": lambda matrix, v: jax.lax.stop_gradient(matrix) @ v,
    # Its transpose is 1.1 times the identity.
    "reverse": lambda matrix, v: jax.lax.custom_linear_solve(
        lambda x: x, matrix @ v, lambda _, b: b, lambda _, b: 1.1 * b
    ),
}


class Own(Plain):
    """An operator of a user's class with one fault."""

    wrong: str = eqx.field(static=True, default="")

    def mv(self, vector: Any) -> Any:
        return PRODUCTS.get(self.wrong, jnp.matmul)(self.matrix, vector)

    def as_matrix(self) -> Any:
        return 2 * self.matrix if self.wrong == "as_matrix" else self.matrix

    def transpose(self) -> "Own":
        return self if self.wrong == "transpose" else Own(self.matrix.T)


lx.conj.register(Own, lambda o: o if o.wrong == "conj" else Own(o.matrix.conj()))


FAULTS = {
    "offset": "mv is linear, A.*off by",
    "conjugate": "mv is linear, A.*off by",
    "structure": r"mv .*: must be complex128\[6\], but got complex128\[5\]",
    "as_matrix": "as_matrix is that of mv: off by",
    "transpose": "transpose is that of mv, y.*off by",
    "conj": "lx.conj is that of mv, .*off by",
    "frozen": "derivative = difference quotient: off by",
    "reverse": "reverse derivative = forward derivative: off by",
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", FAULTS)
def test_faults_are_named(wrong: str) -> None:
    words = rf"check_operator: Own fails:(.|\n)*{FAULTS[wrong]}"
    refused(AssertionError, words, check_operator, Own(general(N, complex), wrong), KEY)


# One eigenvalue in ten.
FEW_NEGATIVE = hermitian(np.where(np.arange(500) % 10 == 0, -1.0, np.linspace(1, 10, 500)))
FALSE: list[tuple[str, object, Any]] = [
    ("is_symmetric", lx.symmetric_tag, general(N)),
    ("is_positive_semidefinite", PSD, SYMMETRIC - 1.01 * jnp.eye(N)),
    ("is_positive_semidefinite", PSD, FEW_NEGATIVE),
    ("is_negative_semidefinite", NSD, SYMMETRIC),
    ("is_diagonal", lx.diagonal_tag, SYMMETRIC),
    ("is_lower_triangular", lx.lower_triangular_tag, jnp.triu(SYMMETRIC)),
    ("is_upper_triangular", lx.upper_triangular_tag, jnp.tril(SYMMETRIC)),
    ("is_tridiagonal", lx.tridiagonal_tag, SYMMETRIC),
    ("has_unit_diagonal", lx.unit_diagonal_tag, jnp.tril(SYMMETRIC)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("question", "tag", "matrix"), FALSE)
def test_false_tags_are_named(question: str, tag: object, matrix: Any) -> None:
    """Functions have them. lineax applies only the diagonal of a matrix with that tag."""
    words = f"\n- lineax.{question} is true: off by"
    refused(AssertionError, words, check_operator, function(matrix, tag), KEY)


def test_the_tolerance() -> None:
    nearly = SYMMETRIC.at[0, 1].add(1e-5)
    operator = lx.MatrixLinearOperator(nearly, lx.symmetric_tag)
    words = "is_symmetric is true: off by"
    refused(AssertionError, words, check_operator, operator, KEY)
    check_operator(operator, KEY, rtol=1e-4)


def test_errors() -> None:
    right, check, make = lx.MatrixLinearOperator(SYMMETRIC), check_operator, operators
    refused(TypeError, r"check_operator\(operator=.*lineax operator", check, SYMMETRIC, KEY)
    refused(TypeError, r"check_operator\(key=.*random key", check, right, 0)
    sparse, name = ("Matrix", "Sparse"), r"traceax\.testing\.operators"
    refused(ValueError, rf"{name}\(kinds=.*got \['Matrix', 'Sp", make, kinds=sparse)
    refused(ValueError, r"kinds=.*got \[\]", make, kinds=())
    refused(ValueError, "kinds=.*[Nn]ot of wrappers alone", make, kinds=("Add",))
    refused(ValueError, rf"{name}\(spectra=.*'flat'.*'odd'", make, spectra=("odd",))


PROCESS = """
import sys, jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), initialization_timeout=10)
import lineax as lx, numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from traceax.testing import check_operator

key, mesh = jax.random.key(0), Mesh(np.array(jax.devices()), ("x",))
matrix = np.diag(np.arange(1.0, 5.0, dtype=np.float32))
whole, spread = (
    jax.make_array_from_callback((4, 4), NamedSharding(mesh, spec), lambda i: matrix[i])
    for spec in (PartitionSpec(), PartitionSpec("x"))
)
def applied(array):
    space = jax.ShapeDtypeStruct((4,), np.float32)
    return lx.FunctionLinearOperator(lambda v: array @ v, space)
for array in (whole, process_allgather(spread, tiled=True)):
    check_operator(applied(array), key)
try:
    check_operator(applied(spread), key)
except ValueError as error:
    print(error)
"""


@pytest.mark.nightly
def test_arrays_of_several_processes(tmp_path: Path) -> None:
    """Each process must have all arrays. The cure that the error names works."""
    where, words = address(), r"check_operator\(operator=.*arrays of one process.*\(4, 4\)"
    for printed in outputs(tmp_path, *(["-c", PROCESS, where, index] for index in "01")):
        assert re.search(f"{words}.*Gather it by", printed), printed


@pytest.mark.slow
def test_it_shrinks_to_a_matrix_of_one_dimension() -> None:
    phases = (hypothesis.Phase.generate, hypothesis.Phase.shrink)
    how = hypothesis.settings(database=None, derandomize=True, phases=phases)
    operator, dense = hypothesis.find(operators(), lambda _: True, settings=how)
    assert isinstance(operator, lx.MatrixLinearOperator)
    assert dense.shape == (1, 1)


@pytest.mark.nightly
def test_generated_operators_are_of_every_class() -> None:
    drawn: set[str] = set()

    @hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @hypothesis.given(operators(sizes=(3,), dtypes=("float64",), spectra=("flat",)))
    def collect(pair: Any) -> None:
        drawn.update(re.findall(r"(\w+)LinearOperator\(", repr(pair[0])))

    collect()
    assert drawn >= EVERY.keys() - {"Tangent", "nested"}
