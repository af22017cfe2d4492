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
from tests.helpers import close, slow
from tests.matrices import general
from tests.wrappers import PSD, function
from traceax._core.sparse import table

diags: Any = scipy.sparse.diags_array
LinearOperator: Any = scipy.sparse.linalg.LinearOperator

KEY, N = jax.random.key(6), 70
RNG = np.random.default_rng(0)
GRAPH = RNG.random((N, N)) < 0.05
GRAPH[3] |= RNG.random(N) < 0.8  # a long row, and one without entries
GRAPH[5] = False


def dense(dtype: Any = float) -> Any:
    return jnp.where(GRAPH, general(N, dtype), 0)


def padded(matrix: Any) -> BCOO:
    """With entries behind the last one, and one that is stored in two parts."""
    sparse = BCOO.from_scipy_sparse(scipy.sparse.coo_array(np.asarray(matrix)))
    indices = jnp.concatenate([sparse.indices, sparse.indices[:1], jnp.full((2, 2), N)])
    first = sparse.data[:1] / 2
    data = jnp.concatenate(
        [first, sparse.data[1:], first, 7 * jnp.ones_like(sparse.data[:2])]
    )
    return BCOO((data, indices), shape=(N, N))


FORMATS: dict[str, Any] = {
    "BCOO": lambda m: BCOO.from_scipy_sparse(scipy.sparse.coo_array(m)),
    "BCOO, padded": padded,
    "BCSR": lambda m: BCSR.from_scipy_sparse(scipy.sparse.csr_array(m)),
    "BCSR, padded": lambda m: BCSR.fromdense(m, nse=int(np.count_nonzero(m)) + 4),
    "csr_matrix": scipy.sparse.csr_matrix,
    **{name: getattr(scipy.sparse, f"{name}_array") for name in ("csc", "coo", "lil")},
    **{name: getattr(scipy.sparse, f"{name}_array") for name in ("bsr", "dia", "dok")},
    "NumPy": np.asarray,
    "JAX": jnp.asarray,
}


@pytest.mark.parametrize("dtype", [complex, slow(float)])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.filterwarnings("ignore:Constructing a DIA")
def test_every_format_is_the_same_matrix(kind: str, dtype: Any) -> None:
    matrix = dense(dtype)
    operator = tx.as_operator(FORMATS[kind](np.asarray(matrix)))
    v = general(N, dtype)[:, 0]
    close(operator.mv(v), matrix @ v, 1e-13)
    close(operator.transpose().mv(v), matrix.T @ v, 1e-13)
    close(lx.conj(operator).mv(v), matrix.conj() @ v, 1e-13)
    close(operator.as_matrix(), matrix, 1e-15)
    close(lx.diagonal(operator), jnp.diagonal(matrix), 1e-15)
    estimate = tx.trace(operator, KEY, 10)
    assert (estimate.method, estimate.num_matvecs) == ("exact", 0)
    close(estimate.value, jnp.trace(matrix), 1e-13)


def test_sorting_the_matrix_afterwards_changes_nothing() -> None:
    """SciPy sorts the indices of a matrix in place whenever it needs them in order."""
    starts, places = np.array([0, 2, 4]), np.array([1, 0, 1, 0])
    matrix = scipy.sparse.csr_array((np.arange(1.0, 5.0), places, starts), shape=(2, 2))
    operator, expected = tx.as_operator(matrix), [[2.0, 1.0], [4.0, 3.0]]
    matrix.sort_indices()
    np.testing.assert_array_equal(operator.as_matrix(), expected)
    np.testing.assert_array_equal(lx.diagonal(operator), [2.0, 3.0])


def test_the_transpose_of_a_lower_triangle_is_an_upper_one() -> None:
    lower = scipy.sparse.csr_array(np.tril(np.ones((5, 5))))
    operator = tx.as_operator(lower, tags=(lx.lower_triangular_tag, lx.unit_diagonal_tag))
    transposed = operator.transpose()
    assert lx.is_upper_triangular(transposed)
    assert not lx.is_lower_triangular(transposed)
    assert lx.has_unit_diagonal(transposed)


@pytest.mark.parametrize("name", ["xtrace", slow("xdiag"), slow("row_norms_squared")])
def test_estimates_and_slopes_are_those_of_the_matrix(name: str) -> None:
    """In the data, under jit and vmap; through the adjoint, too."""
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
    assert np.array_equal(
        np.sort(stored.places[stored.places < rows.size]), np.arange(25_000)
    )


@pytest.mark.parametrize(
    "compose",
    [
        lambda a, i: a + i,
        lambda a, i: 2 * a + lx.DiagonalLinearOperator(jnp.arange(1.0, 401)),
        slow(lambda a, i: lx.TaggedLinearOperator(a + 3 * i, PSD)),
        slow(lambda a, i: (a + i) @ (a + i)),
        slow(lambda a, i: a + function(jnp.eye(400))),
    ],
)
def test_sums_and_products_are_operators(compose: Any) -> None:
    step = diags([-1.0, 2.1, -1.0], offsets=[-1, 0, 1], shape=(20, 20))
    operator = tx.as_operator(scipy.sparse.kronsum(step, step), tags=PSD)
    made = lx.TaggedLinearOperator(
        compose(operator, lx.IdentityLinearOperator(operator.in_structure())), PSD
    )
    matrix = compose(function(operator.as_matrix()), function(jnp.eye(400))).as_matrix()
    close(made.mv(jnp.ones(400)), matrix @ jnp.ones(400), 1e-12)
    close(
        tx.hutchinson_trace(made, KEY, 9).value,
        tx.hutchinson_trace(function(matrix), KEY, 9).value,
        1e-12,
    )


@pytest.mark.slow
def test_functions_of_it_know_its_pattern() -> None:
    """Of 2,500 dimensions, above what is factorised; also scaled and plus a diagonal."""
    step = diags([-1.0, 2.2, -1.0], offsets=[-1, 0, 1], shape=(50, 50))
    matrix = scipy.sparse.csc_array(scipy.sparse.kronsum(step, step))
    operator = tx.as_operator(matrix, tags=PSD)
    truth = np.sum(np.log(scipy.sparse.linalg.splu(matrix).U.diagonal()))
    identity = lx.IdentityLinearOperator(operator.in_structure())
    for known in (operator, lx.TaggedLinearOperator(operator + 0.0 * identity, PSD)):
        estimate = tx.logdet(known, KEY, 240)
        assert "colours" in estimate.method
        low, high = estimate.interval(0.999)
        assert low < truth < high
        assert estimate.standard_error < 1e-3 * truth


def test_equal_patterns_share_a_program() -> None:
    compiled = []

    @eqx.filter_jit
    def run(operator: Any) -> Any:
        compiled.append(1)
        return operator.mv(jnp.ones(N))

    for _ in range(2):
        run(tx.as_operator(scipy.sparse.csr_array(np.asarray(dense()))))
    assert len(compiled) == 1


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.float32])
def test_integers_become_floats(dtype: Any) -> None:
    sparse = scipy.sparse.csr_array(GRAPH.astype(dtype))
    want = np.float32 if dtype == np.float32 else np.float64
    for matrix in (sparse, sparse.toarray()):
        assert tx.as_operator(matrix).in_structure().dtype == want


def test_single_precision_at_any_scale() -> None:
    matrix = np.asarray(dense(), np.float32)
    plain = tx.xdiag(tx.as_operator(FORMATS["csc"](matrix)), KEY, 30)
    for scale in (1e-30, 1e30):
        scaled = tx.xdiag(
            tx.as_operator(FORMATS["csc"](matrix * np.float32(scale))), KEY, 30
        )
        close(scaled.value / np.float32(scale), plain.value, 1e-4)


@pytest.mark.slow
def test_a_matrix_without_entries() -> None:
    empty = tx.as_operator(scipy.sparse.csr_array((N, N)), tags=PSD)
    assert tx.trace(empty, KEY).value == 0
    assert not np.any(tx.diagonal(empty, KEY).value)
    close(tx.logdet(empty, KEY, 30, shift=2.0).value, N * np.log(2.0), 1e-12)


@pytest.mark.slow
def test_second_derivatives_in_the_data() -> None:
    """Of tr (A o A')^T A, by both sides of a composition."""
    matrix = BCOO.fromdense(jnp.where(GRAPH, RNG.normal(size=(N, N)), 0))

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


class Foreign:
    def matvec(self, v: Any) -> Any:
        return v


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tx.as_operator(np.ones((3, 4))), r"matrix=.*square.*\(3, 4\).*B.T @ B"),
        (lambda: tx.as_operator(scipy.sparse.eye_array(3, 4)), r"square.*\(3, 4\)"),
        (lambda: tx.as_operator(Foreign()), "array, a sparse.*Foreign.*function"),
        (
            lambda: tx.as_operator(scipy.sparse.linalg.aslinearoperator(np.ones((3, 4)))),
            r"square.*\(3, 4\)",
        ),
        (lambda: tx.as_operator(lambda v: v), "structure=.*vectors.*None.*example"),
        (lambda: tx.as_operator(np.array([["a"]])), "numbers|array type"),
        (lambda: tx.as_operator("abc"), "array, a sparse matrix.*str"),
        (
            lambda: jax.jit(lambda m: tx.as_operator(m).mv(jnp.ones(N)))(padded(dense())),
            "concrete indices.*data alone",
        ),
        (
            lambda: tx.as_operator(BCOO.fromdense(jnp.ones((3, 3)), n_batch=1)),
            "n_batch.*vmap",
        ),
    ],
)
def test_what_is_no_matrix_is_refused(call: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_an_edge_that_is_listed_twice_is_one_edge() -> None:
    """SciPy says so, whose booleans have no 2."""
    places = np.array([[0, 0, 1, 2], [1, 1, 2, 0]])
    edges = scipy.sparse.coo_array((np.ones(4, bool), places), shape=(3, 3))
    operator = tx.as_operator(edges)
    np.testing.assert_array_equal(operator.as_matrix(), edges.toarray())
    assert edges.nnz == 4  # and the matrix is as before


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
@pytest.mark.parametrize(
    "form", [np.asarray, scipy.sparse.csr_array, scipy.sparse.linalg.aslinearoperator]
)
@pytest.mark.skipif(np.finfo(np.longdouble).bits <= 64, reason="there are none")
def test_long_doubles_are_refused(form: Any, dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"matrix=.*got .*Pass a\.astype"):
        tx.as_operator(form(np.eye(3, dtype=dtype)))


@pytest.mark.parametrize("tags", ["psd", ("psd", PSD)])
@pytest.mark.parametrize("matrix", [np.eye(3), scipy.sparse.eye_array(3)])
def test_a_string_is_no_tag(matrix: Any, tags: Any) -> None:
    with pytest.raises(TypeError, match=r"tags=.*tag of lineax.*'psd'.*lx\.positive"):
        tx.as_operator(matrix, tags=tags)


def test_a_complex_function_needs_a_complex_example() -> None:
    match = r"structure=.*complex numbers.*Pass a complex example"
    with pytest.raises(TypeError, match=match):
        tx.as_operator(lambda v: 1j * v.astype(complex), 3)
    operator = tx.as_operator(lambda v: 1j * v, jnp.zeros(3, complex))
    close(tx.trace(operator, KEY).value, 3j, 1e-14)


@pytest.mark.parametrize("dtype", [np.float32, slow(complex), slow(int)])
def test_linear_operators_of_scipy(dtype: Any) -> None:
    """They are called once for a block, have a transpose, and are linear for JAX."""
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
    value, slope = jax.jit(jax.value_and_grad(scaled))(scale)
    close(value, 2 * slope, tolerance)


def test_a_linear_operator_without_an_adjoint() -> None:
    one_way = LinearOperator((N, N), matvec=lambda v: 2 * v, dtype=float)
    close(tx.trace(tx.as_operator(one_way), KEY, 9).value, 2 * N, 1e-12)
    with pytest.raises(Exception, match=r"matrix=.*have rmatvec.*Define it"):
        jax.block_until_ready(tx.xdiag(tx.as_operator(one_way), KEY, 9).value)
