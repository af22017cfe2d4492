"""From matrices, dense and sparse, and functions to operators."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
from jax.experimental.sparse import BCOO, BCSR

import traceax as tx
from tests.helpers import close, nightly, slow
from tests.matrices import general
from tests.wrappers import PSD, function
from traceax._core.sparse import own_pattern, table

diags: Any = scipy.sparse.diags_array
LinearOperator: Any = scipy.sparse.linalg.LinearOperator
aslinearoperator: Any = scipy.sparse.linalg.aslinearoperator

KEY, N = jax.random.key(6), 70
RNG = np.random.default_rng(0)
GRAPH = RNG.random((N, N)) < 0.05
GRAPH[3] |= RNG.random(N) < 0.8  # a long row, and one without entries
GRAPH[5] = False


def dense(dtype: Any = float) -> Any:
    return jnp.where(GRAPH, general(N, dtype), 0)


def padded(matrix: Any) -> BCOO:
    """A matrix with entries after the last one, and one entry stored in two parts."""
    sparse = BCOO.from_scipy_sparse(scipy.sparse.coo_array(np.asarray(matrix)))
    indices = jnp.concatenate([sparse.indices, sparse.indices[:1], jnp.full((2, 2), N)])
    first, last = sparse.data[:1] / 2, jnp.full(2, 7, sparse.data.dtype)
    data = jnp.concatenate([first, sparse.data[1:], first, last])
    return BCOO((data, indices), shape=(N, N))


OTHERS = ("csc", "coo", "lil", "bsr", "dia", "dok")
FORMATS: dict[str, Any] = {
    "BCOO": lambda m: BCOO.from_scipy_sparse(scipy.sparse.coo_array(m)),
    "BCOO, padded": padded,
    "BCSR": lambda m: BCSR.from_scipy_sparse(scipy.sparse.csr_array(m)),
    "BCSR, padded": lambda m: BCSR.fromdense(m, nse=int(np.count_nonzero(m)) + 4),
    "csr_matrix": scipy.sparse.csr_matrix,
    **{name: getattr(scipy.sparse, f"{name}_array") for name in OTHERS},
    "NumPy": np.asarray,
    "JAX": jnp.asarray,
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.filterwarnings("ignore:Constructing a DIA")
def test_every_format_is_the_same_matrix(kind: str) -> None:
    matrix, v = dense(complex), general(N, complex)[:, 0]
    operator = tx.as_operator(FORMATS[kind](np.asarray(matrix)))
    close(operator.as_matrix(), matrix, 1e-15)
    close(lx.diagonal(operator), jnp.diagonal(matrix), 1e-15)
    if kind in ("BCOO, padded", "BCSR", "csc", "NumPy"):  # each in another order
        close(operator.mv(v), matrix @ v, 1e-13)
        close(operator.transpose().mv(v), matrix.T @ v, 1e-13)
        close(lx.conj(operator).mv(v), matrix.conj() @ v, 1e-13)
        estimate = tx.trace(operator, KEY, 10)
        assert (estimate.method, estimate.num_matvecs) == ("exact", 0)
        close(estimate.value, jnp.trace(matrix), 1e-13)


def test_what_scipy_does_to_a_matrix_changes_nothing() -> None:
    """It sorts indices in place, and an edge that is listed twice is one edge."""
    starts, places = np.array([0, 2, 4]), np.array([1, 0, 1, 0])
    matrix = scipy.sparse.csr_array((np.arange(1.0, 5.0), places, starts), shape=(2, 2))
    operator, expected = tx.as_operator(matrix), [[2.0, 1.0], [4.0, 3.0]]
    matrix.sort_indices()
    np.testing.assert_array_equal(operator.as_matrix(), expected)
    np.testing.assert_array_equal(lx.diagonal(operator), [2.0, 3.0])
    twice = np.array([[0, 0, 1, 2], [1, 1, 2, 0]])
    edges = scipy.sparse.coo_array((np.ones(4, bool), twice), shape=(3, 3))
    np.testing.assert_array_equal(tx.as_operator(edges).as_matrix(), edges.toarray())
    assert edges.nnz == 4  # the matrix is as before


def test_the_transpose_of_a_lower_triangle_is_an_upper_one() -> None:
    lower = scipy.sparse.csr_array(np.tril(np.ones((5, 5))))
    tags = lx.lower_triangular_tag, lx.unit_diagonal_tag
    transposed = tx.as_operator(lower, tags=tags).transpose()
    assert lx.is_upper_triangular(transposed)
    assert not lx.is_lower_triangular(transposed)
    assert lx.has_unit_diagonal(transposed)


@pytest.mark.parametrize("name", ["xtrace", slow("xdiag"), nightly("row_norms_squared")])
def test_estimates_and_derivatives_equal_those_of_the_matrix(name: str) -> None:
    """Derivatives in the data, under jit and vmap. XDiag applies the adjoint, too."""
    sparse = FORMATS["BCOO"](np.asarray(dense(complex)))
    rows, columns = sparse.indices.T

    def total(operator: Any) -> Any:
        estimate = getattr(tx, name)(operator, KEY, 40)
        return jnp.sum(jnp.arange(1.0, estimate.value.size + 1) * estimate.value.real)

    def ours(data: Any) -> Any:
        return total(tx.as_operator(BCOO((data, sparse.indices), shape=(N, N))))

    def plain(data: Any) -> Any:
        return total(function(jnp.zeros((N, N), complex).at[rows, columns].set(data)))

    data = jnp.stack([sparse.data, 2 * sparse.data])
    got, want = (jax.vmap(jax.jit(jax.value_and_grad(f)))(data) for f in (ours, plain))
    close(got[0], want[0], 1e-11)
    close(got[1], want[1], 1e-11)


def test_a_long_row_costs_what_its_entries_cost() -> None:
    rows = np.concatenate([np.zeros(5000, int), np.arange(20_000)])
    columns = np.concatenate([np.arange(5000), np.arange(20_000)[::-1]])
    stored = table(rows, columns, 20_000)
    assert stored.places.size < 2 * rows.size
    kept = np.sort(stored.places[stored.places < rows.size])
    assert np.array_equal(kept, np.arange(25_000))


@pytest.mark.parametrize(
    "compose",
    [
        lambda a, i: a + i,
        lambda a, i: 2 * a + lx.DiagonalLinearOperator(jnp.arange(1.0, 65)),
        slow(lambda a, i: (a + i) @ (a + i)),
        nightly(lambda a, i: lx.TaggedLinearOperator(a + 3 * i, PSD)),
        nightly(lambda a, i: a + function(jnp.eye(64))),
    ],
)
def test_sums_and_products_are_operators(compose: Any) -> None:
    step = diags([-1.0, 2.1, -1.0], offsets=[-1, 0, 1], shape=(8, 8))
    operator = tx.as_operator(scipy.sparse.kronsum(step, step), tags=PSD)
    identity = lx.IdentityLinearOperator(operator.in_structure())
    made = lx.TaggedLinearOperator(compose(operator, identity), PSD)
    matrix = compose(function(operator.as_matrix()), function(jnp.eye(64))).as_matrix()
    close(made.mv(jnp.ones(64)), matrix @ jnp.ones(64), 1e-12)
    got, want = (tx.hutchinson_trace(op, KEY, 9) for op in (made, function(matrix)))
    close(got.value, want.value, 1e-12)


def test_its_pattern_is_known_when_it_is_scaled_tagged_or_plus_a_diagonal() -> None:
    """Functions of it then need none: see `tests/probes/test_pattern_cache.py`."""
    operator: Any = tx.as_operator(FORMATS["csc"](np.asarray(dense())))
    shifted = 2.0 * operator + lx.DiagonalLinearOperator(jnp.ones(N))
    for known in (operator, shifted, lx.TaggedLinearOperator(-shifted, PSD) / 2.0):
        assert own_pattern(known) == operator.pattern
    for unknown in (operator + operator, operator @ operator, function(dense())):
        assert own_pattern(unknown) is None


def test_equal_patterns_share_a_program() -> None:
    compiled, run = [], eqx.filter_jit(lambda op: (compiled.append(1), op.mv(jnp.ones(N))))
    for _ in range(2):
        run(tx.as_operator(scipy.sparse.csr_array(np.asarray(dense()))))
    assert len(compiled) == 1


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.float32])
def test_integers_become_floats(dtype: Any) -> None:
    want = np.float32 if dtype == np.float32 else np.float64
    for form in (scipy.sparse.csr_array, np.asarray):
        matrix = form(GRAPH.astype(dtype))
        assert tx.as_operator(matrix).in_structure().dtype == want


def test_single_precision_at_any_scale() -> None:
    matrix = np.asarray(dense(), np.float32)
    plain = tx.xdiag(tx.as_operator(FORMATS["csc"](matrix)), KEY, 30)
    for scale in map(np.float32, (1e-30, 1e30)):
        scaled = tx.xdiag(tx.as_operator(FORMATS["csc"](matrix * scale)), KEY, 30)
        close(scaled.value / scale, plain.value, 1e-4)


@pytest.mark.slow
def test_a_matrix_without_entries() -> None:
    empty = tx.as_operator(scipy.sparse.csr_array((N, N)), tags=PSD)
    assert tx.trace(empty, KEY).value == 0
    assert not np.any(tx.diagonal(empty, KEY).value)
    close(tx.logdet(empty, KEY, 30, shift=2.0).value, N * np.log(2.0), 1e-12)


@pytest.mark.slow
def test_second_derivatives_in_the_data() -> None:
    """Both sides of the composition A A depend on the data."""
    matrix = BCOO.fromdense(dense())

    def value(data: Any) -> Any:
        operator = tx.as_operator(BCOO((data, matrix.indices), shape=(N, N)))
        return tx.hutchinson_trace(operator @ operator, KEY, N).value

    def truth(data: Any) -> Any:
        dense = BCOO((data, matrix.indices), shape=(N, N)).todense()
        return jnp.trace(dense @ dense)

    ones = jnp.cos(jnp.arange(matrix.nse * 1.0))
    got, want = (jax.jvp(jax.grad(fn), (matrix.data,), (ones,)) for fn in (value, truth))
    close(got, want, 1e-10, 1.0)


def test_functions_with_their_structure() -> None:
    for structure in (5, jnp.ones(5), jax.ShapeDtypeStruct((5,), float)):
        operator = tx.as_operator(lambda v: 2 * v, structure, tags=PSD)
        assert operator.in_structure() == jax.ShapeDtypeStruct((5,), float)
        assert lx.is_positive_semidefinite(operator)
    tree = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    assert tx.trace(tx.as_operator(lambda v: v, tree), KEY).value == 7
    assert tx.as_operator(operator) is operator

    close(tx.trace(tx.as_operator(turned, jnp.zeros(3, complex)), KEY).value, 3j, 1e-14)


def turned(v: Any) -> Any:
    return 1j * v.astype(complex)


class Foreign:
    def matvec(self, v: Any) -> Any:
        return v


SHAPE, TAG = r"square.*\(3, 4\)", r"tags=.*tag of lineax.*'psd'.*lx\.positive"
REFUSED: list[tuple[str, Any, dict[str, Any]]] = [
    (rf"matrix=.*{SHAPE}.*B.T @ B", np.ones((3, 4)), {}),
    (SHAPE, scipy.sparse.eye_array(3, 4), {}),
    (SHAPE, aslinearoperator(np.ones((3, 4))), {}),
    ("array, a sparse.*Foreign.*function", Foreign(), {}),
    ("numbers|array type", np.array([["a"]]), {}),
    ("array, a sparse matrix.*str", "abc", {}),
    ("n_batch.*vmap", BCOO.fromdense(jnp.ones((3, 3)), n_batch=1), {}),
    ("structure=.*vectors.*None.*example", lambda v: v, {}),
    ("structure=.*complex.*Pass a complex example", turned, {"structure": 3}),
    (TAG, np.eye(3), {"tags": "psd"}),
    (TAG, scipy.sparse.eye_array(3), {"tags": ("psd", PSD)}),
]
if np.finfo(np.longdouble).bits > 64:
    for kind in (np.longdouble, np.clongdouble):
        for form in (np.asarray, scipy.sparse.csr_array, aslinearoperator):
            words = r"matrix=.*got .*Pass a\.astype"
            REFUSED.append((words, form(np.eye(3, dtype=kind)), {}))


def test_what_is_no_matrix_is_refused() -> None:
    for words, matrix, how in REFUSED:
        with pytest.raises((TypeError, ValueError), match=words):
            tx.as_operator(matrix, **how)
    traced = jax.jit(lambda m: tx.as_operator(m).mv(jnp.ones(N)))
    with pytest.raises(TypeError, match=r"concrete indices.*data alone"):
        traced(padded(dense()))


@pytest.mark.parametrize("dtype", [slow(np.float32), complex, slow(int)])
def test_linear_operators_of_scipy(dtype: Any) -> None:
    """A block takes one call. JAX knows the transpose, and that they are linear."""
    field = complex if dtype is complex else float
    matrix = np.asarray(general(N, field) * 9).astype(dtype)
    calls = []

    class Counted(LinearOperator):
        def _matmat(self, block: Any) -> Any:
            calls.append(block.shape)
            return matrix @ block

        def _rmatmat(self, block: Any) -> Any:
            return matrix.conj().T @ block

    operator = tx.as_operator(Counted(dtype, matrix.shape))
    assert operator.in_structure().dtype == (float if dtype is int else dtype)
    v = np.asarray(general(N, operator.in_structure().dtype)[:, 0])
    tolerance = 1e-5 if dtype is np.float32 else 1e-13
    close(operator.mv(jnp.asarray(v)), matrix @ v, tolerance)
    close(operator.transpose().mv(jnp.asarray(v)), matrix.T @ v, tolerance)
    calls.clear()
    estimate = tx.xdiag(operator, KEY, 20)
    assert sum(shape[1] for shape in calls) in (10, 11)  # 11 with two that measure noise
    assert len(calls) <= 2
    want = tx.xdiag(function(jnp.asarray(matrix, v.dtype)), KEY, 20)
    close(estimate.value, want.value, 100 * tolerance)

    def scaled(scale: Any) -> Any:
        twice = operator @ (scale.astype(v.dtype) * operator)
        return tx.hutchinson_trace(twice, KEY, 3).value.real

    scale = jnp.asarray(2.0, np.finfo(v.dtype).dtype)
    value, gradient = jax.jit(jax.value_and_grad(scaled))(scale)
    close(value, 2 * gradient, tolerance)


def test_a_linear_operator_without_an_adjoint() -> None:
    one_way = LinearOperator((N, N), matvec=lambda v: 2 * v, dtype=float)
    close(tx.trace(tx.as_operator(one_way), KEY, 9).value, 2 * N, 1e-12)
    with pytest.raises(Exception, match=r"matrix=.*have rmatvec.*Define it"):
        jax.block_until_ready(tx.as_operator(one_way).transpose().mv(jnp.ones(N)))
