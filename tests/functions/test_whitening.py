"""Whitening: the factor, its neighbours, and what it makes of likelihoods."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.sparse

import traceax as tx
from tests.helpers import close, contains, is_unbiased, over_keys, refused, slow
from tests.matrices import hermitian, numbers
from tests.wrappers import PSD, function
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


def factor(matrix: Any, neighbours: tx.Neighbours) -> Any:
    """By its formula, row by row."""
    whole, order = np.zeros(matrix.shape, matrix.dtype), neighbours.order
    for place, (i, earlier) in enumerate(zip(order, neighbours.earlier, strict=True)):
        s = order[earlier[earlier < place]]
        c = np.linalg.solve(matrix[np.ix_(s, s)], matrix[s, i])
        v = (matrix[i, i] - matrix[i, s] @ c).real
        whole[i, i], whole[i, s] = v**-0.5, -(v**-0.5) * c.conj()
    return whole


def dense(whitening: tx.Whitening) -> Any:
    return jax.vmap(whitening.operator.mv, out_axes=1)(
        jnp.eye(N, dtype=whitening.operator.in_structure().dtype)
    )


@pytest.mark.parametrize("entries", [kernel, hermitian_kernel])
@pytest.mark.parametrize("pivots", [0, 3])
def test_the_factor_is_that_of_its_formula(entries: Any, pivots: int) -> None:
    near = tx.nearest_neighbours(POINTS, 8, num_pivots=pivots)
    matrix = np.asarray(entries(THETA, *EVERYWHERE))
    white, want = tx.vecchia(partial(entries, THETA), near), factor(matrix, near)
    close(dense(white), want, 1e-9)
    transposed = white.operator.transpose()
    close(dense(tx.Whitening(transposed, white.log_determinant)), want.T, 1e-9)
    close(white.log_determinant, np.linalg.slogdet(want)[1], 1e-10)
    similar = want @ matrix @ want.conj().T
    close(np.diagonal(similar), np.ones(N), 1e-9)
    close(white.trace, float(N), 1e-9)
    assert -2 * white.log_determinant >= np.linalg.slogdet(matrix)[1]


def test_all_earlier_indices_leave_the_identity() -> None:
    everyone = np.minimum(np.arange(N)[:, None], np.arange(N - 1))
    white = tx.vecchia(partial(kernel, THETA), tx.Neighbours(NEAR.order, everyone))
    matrix = kernel(THETA, *EVERYWHERE)
    close(white.log_determinant, -jnp.linalg.slogdet(matrix)[1] / 2, 1e-9)
    close(dense(white) @ matrix @ dense(white).T, jnp.eye(N), 1e-8)
    found = tx.logdet(of(matrix), KEY, 30, whitening=white)
    close(found.value, jnp.linalg.slogdet(matrix)[1], 1e-9)


def of(matrix: Any) -> lx.AbstractLinearOperator:
    return function(matrix, PSD)


def bound(theta: Any) -> Any:
    white = tx.vecchia(partial(kernel, theta), NEAR)
    return white.log_determinant + jnp.sum(jnp.sin(white.operator.mv(jnp.ones(N))))


def by_formula(theta: Any) -> float:
    white = factor(np.asarray(kernel(jnp.asarray(theta), *EVERYWHERE)), NEAR)
    return np.linalg.slogdet(white)[1] + np.sum(np.sin(np.sum(white, axis=1)))


def differences(fn: Any, at: Any, step: float) -> Any:
    sides = [[fn(at + sign * step * unit) for sign in (1, -1)] for unit in np.eye(len(at))]
    return np.stack([(np.asarray(up) - down) / (2 * step) for up, down in sides])


@pytest.mark.slow
def test_derivatives_of_the_factor() -> None:
    """Beside differences of the formula, and of the first derivatives."""
    slope = jax.jit(jax.grad(bound))
    close(slope(THETA), differences(by_formula, np.asarray(THETA), 1e-5), 1e-6)
    close(
        jax.jit(jax.hessian(bound))(THETA),
        differences(slope, np.asarray(THETA), 1e-5),
        1e-6,
    )


# Estimates.


def likelihood(theta: Any, key: Any, near: Any, num_matvecs: int = 60, **how: Any) -> Any:
    """Of the kernel, whose noise is the shift."""
    matrix = kernel(theta, *EVERYWHERE) - jnp.exp(theta[1]) * jnp.eye(N, dtype=theta.dtype)
    white = None if near is None else tx.vecchia(partial(kernel, theta), near)
    how = {"shift": jnp.exp(theta[1]), "whitening": white} | how
    y = jnp.asarray(np.cos(np.arange(N)), theta.dtype)
    return tx.inv_quad_logdet(of(matrix), y, key, num_matvecs, **how)


def exact(theta: Any) -> Any:
    matrix, y = kernel(theta, *EVERYWHERE), np.cos(np.arange(N))
    return y @ jnp.linalg.solve(matrix, y), jnp.linalg.slogdet(matrix)[1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_likelihoods(dtype: str) -> None:
    """Values, error bars and gradients; in float32 to the condition of the kernel, 1e5."""
    theta = THETA.astype(dtype)
    both = jax.jit(partial(likelihood, near=NEAR))(theta, KEY)
    plain = jax.jit(partial(likelihood, near=None))(theta, KEY)
    form, logdet = map(float, exact(THETA))
    close(both.inv_quad.value, form, 1e-9 if dtype == "float64" else 3e-3)
    assert abs(both.logdet.value - logdet) <= 4 * both.logdet.standard_error
    assert both.logdet.standard_error < 0.2 * plain.logdet.standard_error
    assert both.inv_quad.num_matvecs < plain.inv_quad.num_matvecs
    assert both.logdet.value.dtype == jnp.dtype(dtype)

    def total(theta: Any, near: Any) -> Any:
        found = likelihood(theta, KEY, near)
        return found.inv_quad.value + found.logdet.value

    slope = jax.jit(jax.grad(partial(total, near=NEAR)))(theta)
    close(slope, jax.grad(lambda t: sum(exact(t)))(THETA), 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 8])
def test_intervals_and_gradients_over_keys(count: int) -> None:
    """200 keys: intervals hold, and gradients are unbiased, also with few neighbours."""
    near = tx.nearest_neighbours(POINTS, count)

    def one(key: Any) -> Any:
        def value(theta: Any) -> Any:
            found = likelihood(theta, key, near).logdet
            return found.value, found

        slope, found = jax.grad(value, has_aux=True)(THETA)
        return slope, found

    slopes, found = over_keys(one, KEY, 200)
    truth = exact(THETA)[1]
    assert jnp.mean(contains(found, truth)) >= 0.9
    assert is_unbiased(found.value, truth, 4.0)
    assert is_unbiased(slopes, jax.grad(lambda t: exact(t)[1])(THETA), 4.0)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_derivatives_with_a_constant_whitening(stopped: bool) -> None:
    """It adds no bias, though the derivative of its trace is not known then."""
    outside = tx.vecchia(partial(kernel, THETA), NEAR)

    def value(theta: Any, key: Any) -> Any:
        white = tx.vecchia(partial(kernel, theta), NEAR)
        white = jax.lax.stop_gradient(white) if stopped else outside
        return tx.logdet(of(kernel(theta, *EVERYWHERE)), key, 60, whitening=white).value

    slopes = over_keys(lambda key: jax.grad(value)(THETA, key), KEY, 200)
    assert is_unbiased(slopes, jax.grad(lambda t: exact(t)[1])(THETA), 4.0)


def test_right_hand_sides_guesses_and_solutions() -> None:
    """Those of A + shift I, whatever whitens it."""
    matrix = kernel(THETA, *EVERYWHERE)
    sides = numbers((2, N))
    white = tx.vecchia(partial(kernel, THETA), NEAR)
    shift = float(jnp.exp(THETA[1]))
    how: Any = {"shift": shift, "whitening": white, "rtol": 1e-8}
    call = partial(tx.inv_quad_logdet, of(matrix - shift * jnp.eye(N)), key=KEY)
    first = call(sides, num_matvecs=60, **how)
    want = jnp.linalg.solve(matrix, sides.T).T
    close(first.solution, want, 1e-6)
    again = call(sides, num_matvecs=60, **how, guess=first.solution)
    close(again.solution, want, 1e-6)
    close(again.inv_quad.value, jnp.sum(sides * want), 1e-12)
    spent = first.inv_quad.num_matvecs, again.inv_quad.num_matvecs
    assert spent[1] < spent[0]
    bad = call(sides, num_matvecs=60, **how, guess=1e3 * sides)
    close(bad.solution, want, 1e-6)

    def solution(theta: Any) -> Any:
        return likelihood(theta, KEY, NEAR, rtol=1e-9).solution

    y = np.cos(np.arange(N))
    slope = jax.jacfwd(lambda t: jnp.linalg.solve(kernel(t, *EVERYWHERE), y))(THETA)
    close(jax.jit(jax.jacfwd(solution))(THETA), slope, 1e-5)


def test_complex_kernels() -> None:
    matrix = hermitian_kernel(THETA, *EVERYWHERE)
    white = tx.vecchia(partial(hermitian_kernel, THETA), NEAR)
    y = numbers(N, complex)
    both = tx.inv_quad_logdet(of(matrix), y, KEY, 60, whitening=white)
    close(both.solution, jnp.linalg.solve(matrix, y), 1e-4)
    truth = jnp.linalg.slogdet(matrix)[1]
    assert abs(both.logdet.value - truth) <= 4 * both.logdet.standard_error <= 2
    alone = tx.logdet(of(matrix), KEY, 60, whitening=white)
    assert abs(alone.value - truth) <= 4 * alone.standard_error


def test_shifts() -> None:
    """A number, several, and a diagonal; the whitening is that of one of them."""
    matrix = kernel(THETA, *EVERYWHERE)
    noise = jnp.asarray(1e-3 * (1 + np.arange(N) % 3))
    apart = matrix - jnp.exp(THETA[1]) * jnp.eye(N)
    more = noise - jnp.exp(THETA[1])
    of_noise = lambda i, j: kernel(THETA, i, j) + jnp.where(i == j, more[i], 0)  # noqa: E731
    white = tx.vecchia(of_noise, NEAR)
    shift = lx.DiagonalLinearOperator(noise)
    found = tx.logdet(of(apart), KEY, 60, shift=shift, whitening=white)
    truth = jnp.linalg.slogdet(apart + jnp.diag(noise))[1]
    assert abs(found.value - truth) <= 4 * found.standard_error <= 2
    y = jnp.ones(N)
    both = tx.inv_quad_logdet(of(apart), y, KEY, 60, shift=shift, whitening=white)
    close(both.solution, jnp.linalg.solve(apart + jnp.diag(noise), y), 1e-4)
    shifts = jnp.array([[1e-3, 2e-3, 4e-3]])
    several = tx.logdet(of(apart), KEY, 60, shift=shifts, whitening=white)
    eye = jnp.eye(N)
    truth = jnp.linalg.slogdet(
        apart[None, None] + shifts[..., None, None] * eye[None, None]
    )[1]
    assert several.value.shape == (1, 3)
    assert jnp.all(abs(several.value - truth) <= 4 * several.standard_error)
    assert several.num_matvecs == 3 * 56
    exactly = tx.logdet(of(apart), KEY, N, shift=shift, whitening=white)
    assert exactly.method == "exact"


def test_a_trace_that_is_not_that_of_the_operator_is_seen() -> None:
    """Entries without the noise, or with too much: the bar is as wide as the error."""
    matrix, eye = kernel(THETA, *EVERYWHERE), jnp.eye(N)
    truth = jnp.linalg.slogdet(matrix + 0.1 * eye)[1]
    for factor in (0.0, 0.5, 2.0):
        part = jnp.where(jnp.eye(N, dtype=bool), 0.1 * factor, 0.0)
        white = tx.vecchia(lambda i, j, p=part: kernel(THETA, i, j) + p[i, j], NEAR)
        found = tx.logdet(of(matrix), KEY, 60, shift=0.1, whitening=white)
        assert abs(found.value - truth) <= 4 * found.standard_error
        bare = tx.Whitening(white.operator, white.log_determinant)
        found = tx.logdet(of(matrix), KEY, 60, shift=0.1, whitening=bare)
        assert abs(found.value - truth) <= 4 * found.standard_error


def test_a_matrix_that_is_not_definite_gives_nan() -> None:
    less = lambda i, j: kernel(THETA, i, j) - jnp.where(i == j, 0.5, 0.0)  # noqa: E731
    white = tx.vecchia(less, NEAR)
    assert jnp.isnan(white.log_determinant)
    matrix = kernel(THETA, *EVERYWHERE)
    assert jnp.isnan(tx.logdet(of(matrix), KEY, 60, whitening=white).value)


def test_single_precision_without_noise() -> None:
    """A floor keeps small factors definite. The determinant of W is that of W."""
    theta = jnp.array([0.0, -30.0], "float32")
    white = tx.vecchia(partial(kernel, theta), NEAR)
    assert white.log_determinant.dtype == jnp.float32
    assert jnp.isfinite(white.log_determinant)
    close(white.log_determinant, jnp.linalg.slogdet(dense(white))[1], 1e-4)
    matrix = np.asarray(kernel(theta.astype(float), *EVERYWHERE))
    trace = np.trace(np.asarray(dense(white), float) @ matrix @ np.asarray(dense(white)).T)
    assert white.trace is not None
    assert abs(float(white.trace) - trace) <= 0.05 * N


@pytest.mark.parametrize("long", [10**6, 100])
def test_spaces_of_several_leaves(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """W acts on all entries, one leaf after the other, however columns are sorted."""
    monkeypatch.setattr(vectors, "LONG", long)
    matrix = kernel(THETA, *EVERYWHERE)

    def apply(v: Any) -> Any:
        image = matrix @ jnp.concatenate([v["a"].ravel(), v["b"]])
        return {"a": image[:100].reshape(2, 50), "b": image[100:]}

    structure = jax.eval_shape(lambda: {"a": jnp.zeros((2, 50)), "b": jnp.zeros(50)})
    operator = lx.FunctionLinearOperator(apply, structure, PSD)
    white = tx.vecchia(partial(kernel, THETA), NEAR)
    y = {"a": jnp.ones((2, 50)), "b": jnp.zeros(50)}
    both = tx.inv_quad_logdet(operator, y, KEY, 60, whitening=white)
    form = jnp.concatenate([jnp.ones(100), jnp.zeros(50)])
    want = jnp.linalg.solve(matrix, form)
    close(both.inv_quad.value, form @ want, 1e-8)
    close(both.solution["b"], want[100:], 1e-3)
    error = both.logdet.standard_error
    assert abs(both.logdet.value - jnp.linalg.slogdet(matrix)[1]) <= 4 * error <= 4


def test_batches_of_hyperparameters() -> None:
    thetas = THETA[None, :] + jnp.array([[0.0, 0.0], [0.2, 0.1]])
    value = lambda t: likelihood(t, KEY, NEAR).logdet.value  # noqa: E731
    together = jax.jit(jax.vmap(jax.value_and_grad(value)))(thetas)
    alone = [jax.jit(jax.value_and_grad(value))(t) for t in thetas]
    close(together[0], jnp.stack([v for v, _ in alone]), 1e-8)
    close(together[1], jnp.stack([g for _, g in alone]), 1e-6)


@pytest.mark.parametrize("unit", [1e-30, 1e30])
def test_units(unit: float) -> None:
    """In float32, whose squares these are beyond."""
    theta = jnp.array([-0.7, -2.3], "float32")
    size = jnp.asarray(unit, "float32")
    scaled = lambda i, j: size * kernel(theta, i, j)  # noqa: E731
    matrix = scaled(*EVERYWHERE)
    found = [tx.logdet(of(matrix), KEY, 60, whitening=tx.vecchia(scaled, NEAR))]
    plain = tx.vecchia(partial(kernel, theta), NEAR)
    found += [tx.logdet(of(matrix / size), KEY, 60, whitening=plain)]
    close(float(found[0].value) - N * np.log(unit), found[1].value, 3e-2)
    close(found[0].standard_error, found[1].standard_error, 0.2)


def test_points_that_are_there_twice() -> None:
    """Noise alone tells them apart."""
    points = np.repeat(POINTS[:75], 2, axis=0)
    near = tx.nearest_neighbours(points, 8)

    def entries(i: Any, j: Any) -> Any:
        noise = jnp.where((i // 2 == j // 2) & (i != j), jnp.exp(THETA[1]), 0)
        return kernel(THETA, i // 2, j // 2) - noise

    matrix = entries(*EVERYWHERE)
    found = tx.logdet(of(matrix), KEY, 60, whitening=tx.vecchia(entries, near))
    truth = jnp.linalg.slogdet(matrix)[1]
    assert abs(found.value - truth) <= 4 * found.standard_error <= 8


def test_products_in_bfloat16() -> None:
    """The entries are those of the rounded matrix, too: those of another one would move the
    trace by more than the bar."""
    theta = jnp.array([-0.7, -2.3], "float32")
    low = kernel(theta, *EVERYWHERE).astype("bfloat16")
    coarse = lambda v: (low @ v.astype("bfloat16")).astype(v.dtype)  # noqa: E731
    space = jax.ShapeDtypeStruct((N,), theta.dtype)
    operator = lx.FunctionLinearOperator(coarse, space, PSD)
    white = tx.vecchia(lambda i, j: low[i, j].astype(theta.dtype), NEAR)
    found = over_keys(lambda key: tx.logdet(operator, key, 60, whitening=white), KEY, 20)
    truth = jnp.linalg.slogdet(low.astype(float))[1].astype(theta.dtype)
    assert jnp.all(abs(found.value - truth) <= 4 * found.standard_error)


def test_training_in_a_loop() -> None:
    """Newton's step in a `while_loop`, by a second derivative through W."""

    def value(x: Any) -> Any:
        theta = THETA.at[0].add(x)
        white = tx.vecchia(partial(kernel, theta), NEAR)
        whole = tx.logdet(of(kernel(theta, *EVERYWHERE)), KEY, 60, whitening=white)
        return whole.value + N * jnp.cosh(x)

    def true(x: Any) -> Any:
        theta = THETA.at[0].add(x)
        return exact(theta)[1] + N * jnp.cosh(x)

    def least(value: Any) -> Any:
        slope = jax.grad(value)

        def step(state: Any) -> Any:
            return state[0] - slope(state[0]) / jax.grad(slope)(state[0]), state[1] + 1

        more = lambda state: state[1] < 4  # noqa: E731
        return jax.jit(lambda: jax.lax.while_loop(more, step, (jnp.zeros(()), 0))[0])()

    close(least(value), least(true), 2e-2)


# Sparse precision matrices.


def field(side: int, kappa2: Any) -> tuple[Any, Any]:
    """(kappa^2 + L)^2 on a lattice, and the pattern of its entries."""
    offsets: Any = [-1, 0, 1]
    line = scipy.sparse.diags_array([-1.0, 2, -1], offsets=offsets, shape=(side, side))
    eye = scipy.sparse.eye_array(side)
    laplacian = (scipy.sparse.kron(line, eye) + scipy.sparse.kron(eye, line)).tocsr()
    half = jnp.asarray(laplacian.toarray()) + kappa2 * jnp.eye(side**2)
    return half @ half, abs(laplacian) @ abs(laplacian)


@pytest.mark.slow
@pytest.mark.parametrize("coloured", [False, True])
def test_the_slope_of_a_field(coloured: bool) -> None:
    side, pattern = 40, field(40, 0.05)[1]
    near = tx.graph_neighbours(pattern, power=2)

    def value(log_kappa2: Any, key: Any) -> Any:
        matrix = field(side, jnp.exp(log_kappa2))[0]
        white = tx.vecchia(lambda i, j: matrix[i, j], near)
        given = pattern if coloured else None
        found = tx.logdet(of(matrix), key, pattern=given, whitening=white)
        return found.value, found

    one = jax.value_and_grad(value, has_aux=True)
    (_, found), slopes = over_keys(partial(one, jnp.log(0.05)), KEY, 20)
    exact = lambda x: jnp.linalg.slogdet(field(side, jnp.exp(x))[0])[1]  # noqa: E731
    truth, slope = jax.value_and_grad(exact)(jnp.log(0.05))
    assert jnp.all(abs(slopes / slope - 1) < 0.01)
    assert jnp.mean((found.value - truth) ** 2) ** 0.5 <= 3
    assert jnp.mean(contains(found, truth)) >= 0.85


def test_a_sparse_precision_by_its_own_pattern() -> None:
    matrix, pattern = field(12, 0.05)  # the pattern is not used
    sparse = tx.as_operator(scipy.sparse.csr_array(np.asarray(matrix)), tags=PSD)
    white = tx.vecchia(lambda i, j: matrix[i, j], tx.graph_neighbours(pattern, power=2))
    found = tx.logdet(sparse, KEY, 100, whitening=white)
    truth = jnp.linalg.slogdet(matrix)[1]
    assert abs(found.value - truth) <= 4 * found.standard_error <= 4


# Neighbours.


@pytest.mark.parametrize("n", [1, 5, slow(400)])
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
    near = tx.nearest_neighbours(np.linspace(0.0, 1.0, 100), 3, num_pivots=2)
    first = np.sort(near.order[:20])
    assert np.diff(first).max() <= 20
    assert np.array_equal(near.earlier[50, :2], [0, 1])
    assert near == tx.nearest_neighbours(
        np.linspace(0.0, 1.0, 100)[:, None], 3, num_pivots=2
    )


def test_graph_neighbours_are_those_of_the_power() -> None:
    pattern = scipy.sparse.random_array(
        (30, 30), density=0.05, rng=np.random.default_rng(0)
    )
    near = tx.graph_neighbours(pattern, power=2)
    step = (pattern + pattern.T).toarray() != 0
    np.fill_diagonal(step, True)
    reached = step.astype(int) @ step.astype(int) > 0
    for i in range(30):
        found = near.earlier[i][near.earlier[i] < i]
        assert np.array_equal(found, np.flatnonzero(reached[i, :i]))


def test_messages() -> None:
    refused(
        TypeError, "must be the result of nearest_neighbours", tx.vecchia, lambda i, j: i, 3
    )
    refused(TypeError, "take 2 arguments", tx.vecchia, lambda i: i, NEAR)
    refused(TypeError, "shape of the indices", tx.vecchia, lambda i, j: 1.0, NEAR)
    refused(ValueError, "finite", tx.nearest_neighbours, [0.0, np.nan])
    refused(TypeError, "concrete", jax.jit(tx.nearest_neighbours), jnp.ones(3))
    refused(ValueError, "real numbers", tx.nearest_neighbours, [1j, 2])
    refused(ValueError, "at least 1", tx.nearest_neighbours, [0.0, 1.0], 0)
    refused(ValueError, "each of 0", tx.Neighbours, [0, 0], [[0], [0]])
    refused(ValueError, "later ones", tx.Neighbours, [0, 1], [[1], [0]])
    refused(ValueError, "a row for each", tx.Neighbours, [0, 1], [[0]])
    star = np.eye(600)
    star[-1] = 1
    refused(ValueError, "500 earlier", tx.graph_neighbours, star)
    operator = of(hermitian(np.linspace(1, 2, N)))
    refused(TypeError, "be a traceax.Whitening", tx.logdet, operator, KEY, whitening=NEAR)
    small = tx.Whitening(lx.IdentityLinearOperator(jax.ShapeDtypeStruct((3,), float)), 0.0)  # pyright: ignore
    refused(ValueError, "dimension 150", tx.logdet, operator, KEY, 60, whitening=small)
    assert "Neighbours of 150 indices" in repr(NEAR)
