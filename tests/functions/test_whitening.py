"""Whitening: the factor, its neighbours, and what it makes of likelihoods."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse

import traceax as tx
from tests.helpers import close, contains, is_unbiased, nightly, over_keys, refused, slow
from tests.matrices import numbers
from tests.wrappers import PSD, function, matrix_free
from traceax._core import vectors

KEY = jax.random.key(0)
N = 150
POINTS = np.random.default_rng(1).random((N, 2))
NEAR = tx.nearest_neighbours(POINTS, 8)
THETA = jnp.log(jnp.array([0.5, 1e-3]))


def kernel(theta: Any, i: Any, j: Any) -> Any:
    """Matérn 3/2 and noise."""
    x = jnp.asarray(POINTS, theta.dtype)
    squares = jnp.sum((x[i] - x[j]) ** 2, axis=-1)
    r = jnp.where(i == j, 0, jnp.sqrt(3 * jnp.where(i == j, 1, squares)))
    r = r * jnp.exp(-theta[0])
    return (1 + r) * jnp.exp(-r) + jnp.where(i == j, jnp.exp(theta[1]), 0)


def hermitian_kernel(theta: Any, i: Any, j: Any) -> Any:
    """The same with phases."""
    phases = jnp.asarray(np.sin(7 * np.arange(N)), theta.dtype)
    turn = phases[i] - phases[j]
    real = kernel(theta, i, j)
    return jax.lax.complex(real * jnp.cos(turn), real * jnp.sin(turn))


EVERYWHERE = np.indices((N, N))
MATRIX = kernel(THETA, *EVERYWHERE)


def vecchia(theta: Any, near: tx.Neighbours = NEAR) -> tx.Whitening:
    return tx.vecchia(partial(kernel, theta), near)


def of(matrix: Any) -> lx.AbstractLinearOperator:
    return function(matrix, PSD)


def agrees(found: tx.Estimate, matrix: Any, most: float = np.inf) -> None:
    """The log-determinant is within four error bars, which are at most so long together."""
    off = abs(float(found.value) - float(np.linalg.slogdet(np.asarray(matrix))[1]))
    assert off <= 4 * float(found.standard_error) <= most


def factor(matrix: Any, neighbours: tx.Neighbours) -> Any:
    """By its formula, row by row."""
    whole, order = np.zeros(matrix.shape, matrix.dtype), neighbours.order
    for place, (i, earlier) in enumerate(zip(order, neighbours.earlier, strict=True)):
        s = order[earlier[earlier < place]]
        c = np.linalg.solve(matrix[np.ix_(s, s)], matrix[s, i])
        v = (matrix[i, i] - matrix[i, s] @ c).real
        whole[i, i], whole[i, s] = v**-0.5, -(v**-0.5) * c.conj()
    return whole


def dense(operator: lx.AbstractLinearOperator) -> Any:
    space = operator.in_structure()
    return jax.vmap(operator.mv, out_axes=1)(jnp.eye(space.size, dtype=space.dtype))


@pytest.mark.parametrize(("entries", "pivots"), [(kernel, 0), (hermitian_kernel, 3)])
def test_the_factor_is_that_of_its_formula(entries: Any, pivots: int) -> None:
    near = tx.nearest_neighbours(POINTS, 8, num_pivots=pivots)
    matrix = np.asarray(entries(THETA, *EVERYWHERE))
    white, want = tx.vecchia(partial(entries, THETA), near), factor(matrix, near)
    close(dense(white.operator), want, 1e-9)
    close(dense(white.operator.transpose()), want.T, 1e-9)
    close(white.log_determinant, np.linalg.slogdet(want)[1], 1e-10)
    similar = want @ matrix @ want.conj().T
    close(np.diagonal(similar), np.ones(N), 1e-9)
    close(white.trace, float(N), 1e-9)
    assert -2 * white.log_determinant >= np.linalg.slogdet(matrix)[1]


def test_all_earlier_indices_leave_the_identity() -> None:
    n = 70
    everyone = np.minimum(np.arange(n)[:, None], np.arange(n - 1))
    white = vecchia(THETA, tx.Neighbours(np.arange(n)[::-1], everyone))
    matrix, whole = MATRIX[:n, :n], np.asarray(dense(white.operator))
    truth = np.linalg.slogdet(matrix)[1]
    close(white.log_determinant, -truth / 2, 1e-9)
    close(whole @ matrix @ whole.T, np.eye(n), 1e-8)
    close(tx.logdet(of(matrix), KEY, 30, whitening=white).value, truth, 1e-9)


def bound(white: tx.Whitening) -> Any:
    ones = jnp.ones(N, white.log_determinant.dtype)
    return white.log_determinant + jnp.sum(jnp.sin(white.operator.mv(ones)))


def by_formula(theta: Any) -> float:
    white = factor(np.asarray(kernel(jnp.asarray(theta), *EVERYWHERE)), NEAR)
    return np.linalg.slogdet(white)[1] + np.sum(np.sin(np.sum(white, axis=1)))


def differences(fn: Any, at: Any, step: float) -> Any:
    sides = [[fn(at + sign * step * unit) for sign in (1, -1)] for unit in np.eye(len(at))]
    return np.stack([(np.asarray(up) - down) / (2 * step) for up, down in sides])


@pytest.mark.slow
def test_second_derivatives_of_the_factor() -> None:
    gradient = jax.jit(jax.grad(lambda t: bound(vecchia(t))))
    want = differences(gradient, np.asarray(THETA), 1e-5)
    close(jax.jit(jax.jacfwd(gradient))(THETA), want, 1e-6)


# Estimates.


def likelihood(theta: Any, key: Any, white: Any, **how: Any) -> Any:
    """Of the kernel, whose noise is the shift."""
    matrix = kernel(theta, *EVERYWHERE) - jnp.exp(theta[1]) * jnp.eye(N, dtype=theta.dtype)
    how = {"shift": jnp.exp(theta[1]), "whitening": white} | how
    y = jnp.asarray(np.cos(np.arange(N)), theta.dtype)
    return tx.inv_quad_logdet(of(matrix), y, key, 60, **how)


WEIGHTS = np.sin(np.arange(N))


def exact(theta: Any) -> Any:
    """The form, the log-determinant, and a sum of the solution."""
    matrix, y = kernel(theta, *EVERYWHERE), np.cos(np.arange(N))
    solution = jnp.linalg.solve(matrix, y)
    return jnp.stack([y @ solution, jnp.linalg.slogdet(matrix)[1], WEIGHTS @ solution])


ROWS = {"float64": (1e-9, [1e-5, 2e-2, 1e-5, 1e-6]), "float32": (3e-3, [2e-2] * 4)}


@pytest.mark.parametrize("dtype", ["float64", slow("float32")])
def test_likelihoods(dtype: str) -> None:
    """Values, error bars and gradients: of the form, the log-determinant, the solution and
    the factor. In float32 they are right to the condition of the kernel, 1e5."""
    tolerance, tolerances = ROWS[dtype]

    def values(theta: Any) -> Any:
        white = vecchia(theta)
        found = likelihood(theta, KEY, white, rtol=min(1e-4, tolerance))
        weighted = jnp.asarray(WEIGHTS, dtype) @ found.solution
        rows = found.inv_quad.value, found.logdet.value, weighted, bound(white)
        return jnp.stack(rows), found

    gradients, found = jax.jit(jax.jacrev(values, has_aux=True))(THETA.astype(dtype))
    close(found.inv_quad.value, exact(THETA)[0], tolerance)
    agrees(found.logdet, MATRIX, 4)
    assert found.logdet.value.dtype == jnp.dtype(dtype)
    want = [*jax.jacrev(exact)(THETA), differences(by_formula, np.asarray(THETA), 1e-5)]
    for row in zip(gradients, want, tolerances, strict=True):
        close(*row)


@pytest.mark.nightly
def test_whitening_divides_errors_by_five_and_saves_steps() -> None:
    white, plain = (likelihood(THETA, KEY, white) for white in (vecchia(THETA), None))
    assert white.logdet.standard_error < 0.2 * plain.logdet.standard_error
    assert white.inv_quad.num_matvecs < plain.inv_quad.num_matvecs


WAYS: dict[str, Any] = {
    "few": lambda theta, _: vecchia(theta, tx.nearest_neighbours(POINTS, 3)),
    "constant": lambda _, outside: outside,
    "stopped": lambda theta, _: jax.lax.stop_gradient(vecchia(theta)),
    "whole": lambda theta, _: vecchia(theta),
}


@pytest.mark.parametrize(
    "way", [slow("few"), *map(nightly, list(WAYS)[1:3]), nightly("whole")]
)
def test_intervals_and_gradients_over_keys(way: str) -> None:
    """Of 200 keys. A constant whitening adds no bias, though the derivative of its trace is
    not known then."""
    outside = vecchia(THETA)

    def value(theta: Any, key: Any) -> Any:
        found = likelihood(theta, key, WAYS[way](theta, outside)).logdet
        return found.value, found

    gradients, found = over_keys(partial(jax.grad(value, has_aux=True), THETA), KEY, 200)
    truth, want = jax.value_and_grad(lambda t: exact(t)[1])(THETA)
    assert jnp.mean(contains(found, truth)) >= 0.9
    assert is_unbiased(found.value, truth, 4.0)
    assert is_unbiased(gradients, want, 4.0)


def logdet(theta: Any, key: Any, white: tx.Whitening) -> Any:
    return tx.logdet(of(kernel(theta, *EVERYWHERE)), key, 60, whitening=white).value


def test_complex_equations() -> None:
    """Noise on the diagonal, several right-hand sides, and guesses: none, good and bad."""
    noise = jnp.asarray(1e-3 * (1 + np.arange(N) % 3))

    def entries(i: Any, j: Any) -> Any:
        more = jnp.where(i == j, noise[i] - jnp.exp(THETA[1]), 0)
        return hermitian_kernel(THETA, i, j) + more.astype(complex)

    matrix, white = entries(*EVERYWHERE), tx.vecchia(entries, NEAR)
    apart, sides = matrix - jnp.diag(noise).astype(complex), numbers((2, N), complex)
    how: Any = {"shift": lx.DiagonalLinearOperator(noise), "whitening": white}
    solved = partial(tx.inv_quad_logdet, of(apart), sides, KEY, 60, rtol=1e-8, **how)
    cold = solved(guess=0 * sides)
    warm, bad = solved(guess=cold.solution), solved(guess=1e3 * sides)
    want = np.linalg.solve(matrix, sides.T).T
    for both in (cold, warm, bad):
        close(both.solution, want, 1e-6)
    close(warm.inv_quad.value, np.sum(sides.conj() * want).real, 1e-12)
    assert warm.inv_quad.num_matvecs < cold.inv_quad.num_matvecs
    agrees(cold.logdet, matrix, 2)
    exactly = tx.logdet(of(apart), KEY, N, **how)
    assert exactly.method == "exact"
    close(exactly.value, np.linalg.slogdet(matrix)[1], 1e-10)


def test_several_shifts() -> None:
    """From a run for each; the whitening is that of one of them."""
    apart, shifts = MATRIX - jnp.exp(THETA[1]) * jnp.eye(N), jnp.array([[1e-3, 2e-3, 4e-3]])
    found = tx.logdet(of(apart), KEY, 60, shift=shifts, whitening=vecchia(THETA))
    values = np.linalg.eigvalsh(apart)[:, None, None] + np.asarray(shifts)
    off = abs(found.value - np.sum(np.log(values), axis=0))
    assert off.shape == found.value.shape == (1, 3)
    assert jnp.all(off <= 4 * found.standard_error)
    assert found.num_matvecs == 3 * 56


def with_noise(more: float) -> tx.Whitening:
    own = more * jnp.eye(N)
    return tx.vecchia(lambda i, j: kernel(THETA, i, j) + own[i, j], NEAR)


def test_a_trace_that_is_not_that_of_the_operator_is_seen() -> None:
    """Entries without the noise, or with too much: the bar is as wide as the error."""
    for share in (0.0, 0.5, 2.0):
        white = with_noise(0.1 * share)
        for one in (white, tx.Whitening(white.operator, white.log_determinant)):
            found = tx.logdet(of(MATRIX), KEY, 60, shift=0.1, whitening=one)
            agrees(found, MATRIX + 0.1 * jnp.eye(N))


def test_entries_that_are_not_definite_give_nan() -> None:
    white = with_noise(-0.5)
    assert jnp.isnan(white.log_determinant)
    assert jnp.isnan(logdet(THETA, KEY, white))


def test_points_that_are_there_twice() -> None:
    """Noise alone tells them apart."""
    near = tx.nearest_neighbours(np.repeat(POINTS[:75], 2, axis=0), 8)

    def entries(i: Any, j: Any) -> Any:
        noise = jnp.where((i // 2 == j // 2) & (i != j), jnp.exp(THETA[1]), 0)
        return kernel(THETA, i // 2, j // 2) - noise

    matrix = entries(*EVERYWHERE)
    found = tx.logdet(of(matrix), KEY, 60, whitening=tx.vecchia(entries, near))
    agrees(found, matrix, 8)


def single(theta: Any, unit: float = 1.0) -> tx.Whitening:
    """In float32, of the kernel in other units."""
    theta, size = jnp.array(theta, "float32"), jnp.asarray(unit, "float32")
    return tx.vecchia(lambda i, j: size * kernel(theta, i, j), NEAR)


def test_single_precision_without_noise() -> None:
    """A floor keeps small factors definite. The determinant of W is that of W."""
    white = single([0.0, -30.0])
    whole = np.asarray(dense(white.operator), float)
    assert white.log_determinant.dtype == jnp.float32
    close(white.log_determinant, np.linalg.slogdet(whole)[1], 1e-4)
    matrix = np.asarray(kernel(jnp.array([0.0, -30.0]), *EVERYWHERE))
    assert white.trace is not None
    assert abs(float(white.trace) - np.trace(whole @ matrix @ whole.T)) <= 0.05 * N


@pytest.mark.slow
def test_units() -> None:
    """In float32, whose squares these are beyond."""
    theta = [-0.7, -2.3]
    matrix = kernel(jnp.array(theta, "float32"), *EVERYWHERE)

    def scaled(unit: float) -> tx.Estimate:
        operator = of(jnp.asarray(unit, "float32") * matrix)
        return tx.logdet(operator, KEY, 60, whitening=single(theta, unit))

    plain = scaled(1.0)
    for unit in (1e-30, 1e30):
        found = scaled(unit)
        close(float(found.value) - N * np.log(unit), plain.value, 3e-2)
        close(found.standard_error, plain.standard_error, 0.2)


@pytest.mark.parametrize("long", [slow(10**6), 100])
def test_spaces_of_several_leaves(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """W acts on all entries, one leaf after the other, however columns are sorted."""
    monkeypatch.setattr(vectors, "LONG", long)

    def apply(v: Any) -> Any:
        image = MATRIX @ jnp.concatenate([v["a"].ravel(), v["b"]])
        return {"a": image[:100].reshape(2, 50), "b": image[100:]}

    y = {"a": jnp.ones((2, 50)), "b": jnp.zeros(50)}
    operator = lx.FunctionLinearOperator(apply, jax.eval_shape(lambda: y), PSD)
    both = tx.inv_quad_logdet(operator, y, KEY, 60, whitening=vecchia(THETA))
    want = np.linalg.solve(MATRIX, np.repeat([1.0, 0.0], [100, 50]))
    close(both.inv_quad.value, np.sum(want[:100]), 1e-8)
    close(both.solution["b"], want[100:], 1e-3)
    agrees(both.logdet, MATRIX, 4)


@pytest.mark.slow
def test_batches_of_hyperparameters() -> None:
    thetas = THETA[None, :] + jnp.array([[0.0, 0.0], [0.2, 0.1]])
    one = jax.value_and_grad(lambda t: likelihood(t, KEY, vecchia(t)).logdet.value)
    together = jax.jit(jax.vmap(one))(thetas)
    alone = jax.jit(lambda t: jax.lax.map(one, t))(thetas)
    close(together[0], alone[0], 1e-8)
    close(together[1], alone[1], 1e-6)


@pytest.mark.slow
def test_products_in_bfloat16() -> None:
    """The entries are those of the rounded matrix, too: those of another one would move the
    trace by more than the bar."""
    low = kernel(jnp.array([-0.7, -2.3], "float32"), *EVERYWHERE).astype("bfloat16")
    coarse = lambda v: (low @ v.astype("bfloat16")).astype(v.dtype)  # noqa: E731
    operator = matrix_free(coarse, N, PSD, jnp.float32)
    white = tx.vecchia(lambda i, j: low[i, j].astype("float32"), NEAR)
    found = over_keys(lambda key: tx.logdet(operator, key, 60, whitening=white), KEY, 20)
    truth = jnp.linalg.slogdet(low.astype(float))[1].astype("float32")
    assert jnp.all(abs(found.value - truth) <= 4 * found.standard_error)


@pytest.mark.slow
def test_training_in_a_loop() -> None:
    """Newton's steps in a `while_loop`, by a second derivative through W."""

    def least(estimate: Any) -> Any:
        gradient = jax.grad(lambda x: estimate(THETA.at[0].add(x)) + N * jnp.cosh(x))

        def step(state: Any) -> Any:
            x, count = state
            return x - gradient(x) / jax.grad(gradient)(x), count + 1

        start = jnp.zeros(()), 0
        return jax.jit(lambda: jax.lax.while_loop(lambda s: s[1] < 4, step, start)[0])()

    found = least(lambda theta: logdet(theta, KEY, vecchia(theta)))
    close(found, least(lambda theta: exact(theta)[1]), 2e-2)


# Sparse precision matrices.


def field(side: int, kappa2: Any) -> tuple[Any, Any]:
    """(kappa^2 + L)^2 on a lattice, and the pattern of its entries."""
    offsets: Any = [-1, 0, 1]
    line = scipy.sparse.diags_array([-1.0, 2, -1], offsets=offsets, shape=(side, side))
    eye = scipy.sparse.eye_array(side)
    laplacian = (scipy.sparse.kron(line, eye) + scipy.sparse.kron(eye, line)).tocsr()
    half = jnp.asarray(laplacian.toarray()) + kappa2 * jnp.eye(side**2)
    return half @ half, abs(laplacian) @ abs(laplacian)


@pytest.mark.parametrize("side", [nightly(24), nightly(40)])
def test_the_gradient_of_a_field(side: int) -> None:
    """A pattern is not used."""
    pattern = field(side, 0.05)[1]
    near = tx.graph_neighbours(pattern, power=2)

    def value(log_kappa2: Any, key: Any) -> Any:
        matrix = field(side, jnp.exp(log_kappa2))[0]
        white = tx.vecchia(lambda i, j: matrix[i, j], near)
        found = tx.logdet(of(matrix), key, pattern=pattern, whitening=white)
        return found.value, found

    one = partial(jax.grad(value, has_aux=True), jnp.log(0.05))
    gradients, found = over_keys(one, KEY, 20)
    exact = lambda x: jnp.linalg.slogdet(field(side, jnp.exp(x))[0])[1]  # noqa: E731
    truth, want = jax.value_and_grad(exact)(jnp.log(0.05))
    assert jnp.all(abs(gradients / want - 1) < 0.01)
    assert jnp.mean((found.value - truth) ** 2) ** 0.5 <= 3
    assert jnp.mean(contains(found, truth)) >= 0.85


@pytest.mark.slow
def test_a_sparse_precision_whose_pattern_is_not_used() -> None:
    """If it is stored, the value is exact without W."""
    matrix, pattern = field(12, 0.05)
    white = tx.vecchia(lambda i, j: matrix[i, j], tx.graph_neighbours(pattern, power=2))
    logdet = partial(tx.logdet, key=KEY, num_matvecs=100, whitening=white)
    found = logdet(of(matrix), pattern=pattern)
    agrees(found, matrix, 4)
    close(logdet(of(matrix)).value, found.value, 1e-12)
    stored = tx.as_operator(scipy.sparse.csr_array(np.asarray(matrix)), tags=PSD)
    exactly = logdet(stored)
    assert exactly.method == "exact"
    close(exactly.value, np.linalg.slogdet(np.asarray(matrix))[1], 1e-12)


# Neighbours.


@pytest.mark.parametrize("n", [1, 5, 400])
def test_nearest_neighbours_are_those_of_a_search(n: int) -> None:
    points = np.random.default_rng(0).random((n, 2))
    near = tx.nearest_neighbours(points, 4)
    ordered = points[near.order]
    distances = np.linalg.norm(ordered[:, None] - ordered, axis=-1)
    for i in range(n):
        earlier = near.earlier[i][near.earlier[i] < i]
        assert earlier.size == min(4, i)
        nearest = np.sort(distances[i, :i])[: earlier.size]
        assert np.array_equal(np.sort(distances[i, earlier]), nearest)
        # Each is the farthest from all before it.
        if i:
            gaps = distances[i:, :i].min(axis=1)
            assert gaps[0] == gaps.max()


def test_many_points_begin_with_a_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceax._functions.neighbours.MANY", 20)
    points = np.linspace(0.0, 1.0, 100)
    near = tx.nearest_neighbours(points, 3, num_pivots=2)
    assert np.diff(np.sort(near.order[:20])).max() <= 20
    assert np.array_equal(near.earlier[50, :2], [0, 1])
    assert near == tx.nearest_neighbours(points[:, None], 3, num_pivots=2)


def test_graph_neighbours_are_those_of_the_power() -> None:
    rng = np.random.default_rng(0)
    pattern = scipy.sparse.random_array((30, 30), density=0.05, rng=rng)
    near = tx.graph_neighbours(pattern, power=2)
    step = ((pattern + pattern.T).toarray() != 0) | np.eye(30, dtype=bool)
    reached = step.astype(int) @ step.astype(int) > 0
    for i in range(30):
        found = near.earlier[i][near.earlier[i] < i]
        assert np.array_equal(found, np.flatnonzero(reached[i, :i]))


def test_messages() -> None:
    nearest, star = tx.nearest_neighbours, np.eye(600)
    star[-1] = 1
    identity = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((3,), float))
    whitened = partial(tx.logdet, of(MATRIX), KEY, 60)
    result = "must be the result of nearest_neighbours"
    refused(TypeError, result, tx.vecchia, lambda i, j: i, 3)
    refused(TypeError, "take 2 arguments", tx.vecchia, lambda i: i, NEAR)
    refused(TypeError, "shape of the indices", tx.vecchia, lambda i, j: 1.0, NEAR)
    refused(ValueError, "finite", nearest, [0.0, np.nan])
    refused(TypeError, "concrete", jax.jit(nearest), jnp.ones(3))
    refused(ValueError, "real numbers", nearest, [1j, 2])
    refused(ValueError, "at least 1", nearest, [0.0, 1.0], 0)
    refused(ValueError, "each of 0", tx.Neighbours, [0, 0], [[0], [0]])
    refused(ValueError, "later ones", tx.Neighbours, [0, 1], [[1], [0]])
    refused(ValueError, "a row for each", tx.Neighbours, [0, 1], [[0]])
    refused(ValueError, "500 earlier", tx.graph_neighbours, star)
    refused(TypeError, "be a traceax.Whitening", whitened, whitening=NEAR)
    small = tx.Whitening(identity, jnp.zeros(()))
    refused(ValueError, "dimension 150", whitened, whitening=small)
    assert "Neighbours of 150 indices" in repr(NEAR)


def test_the_budget_is_kept() -> None:
    """The probes that test the trace of the entries are part of it."""

    def spent(key: Any) -> Any:
        white, y = vecchia(THETA), jnp.ones(N)
        both = tx.inv_quad_logdet(of(MATRIX), y, key, 62, whitening=white)
        return both.logdet, tx.logdet(of(MATRIX), key, 62, whitening=white)

    for found in eqx.filter_eval_shape(spent, KEY):
        assert 48 < found.num_matvecs <= 62
