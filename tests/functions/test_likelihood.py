"""log det B and y* B^{-1} y from one run, and the preconditioner they share."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, contains, refused, slow
from tests.matrices import hermitian
from tests.matrices import numbers as normal_numbers
from tests.wrappers import EVERY, PSD, function, matrix_free, part_of, two_leaves
from traceax._core.operator import LinearMap
from traceax._linalg.krylov import block_krylov

KEY = jax.random.key(4)
N, BUDGET = 90, 60  # too large for exact answers
SHIFT = 0.1


def numbers(*shape: int, dtype: Any = float, seed: int = 0) -> Any:
    return jnp.asarray(normal_numbers(shape, dtype, seed))


def kernel(log_length: Any) -> Any:
    x = numbers(N, 2, seed=1)
    squares = jnp.sum((x[:, None] - x[None]) ** 2, axis=-1)
    return jnp.exp(-squares / 2 * jnp.exp(-2 * log_length))


def both(matrix: Any, y: Any, key: Any = KEY, **how: Any) -> tx.InvQuadLogdet:
    return tx.inv_quad_logdet(function(matrix), y, key, BUDGET, **{"shift": SHIFT, **how})


def dense(matrix: Any, y: Any, shift: Any = SHIFT) -> Any:
    whole = matrix + (shift * np.eye(len(matrix))).astype(matrix.dtype)
    return jnp.vdot(y, jnp.linalg.solve(whole, y)).real, jnp.linalg.slogdet(whole)[1]


def refined_form(matrix: np.ndarray, y: np.ndarray, shift: float) -> float:
    """The sum of y* B^-1 y, by residuals in extended precision: in double precision the sum
    of matrix and shift alone is rounded by more than the error of the estimate."""
    whole = matrix.astype(np.longdouble) + shift * np.eye(len(matrix), dtype=np.longdouble)
    columns = np.atleast_2d(y).T.astype(np.longdouble)
    u = np.zeros_like(columns)
    for _ in range(8):
        u += np.linalg.solve(whole.astype(float), (columns - whole @ u).astype(float))
    return float(np.sum(columns * u))


def test_values_and_gradients() -> None:
    """In operator, vector and shift. The form and its gradient have no sampling in them."""
    dtype = complex
    matrix = hermitian(1 / (1.0 + np.arange(N)), dtype)
    moved = hermitian(np.sin(np.arange(N)), dtype, seed=5) / 9
    y = numbers(N, dtype=dtype, seed=3)

    def parts(v: Any) -> Any:
        z = y * (1 + v[1] * jnp.sin(y.real)).astype(dtype)
        return matrix + v[0].astype(dtype) * moved, z, SHIFT + v[2]

    def estimate(v: Any) -> Any:
        a, z, shift = parts(v)
        return both(a, z, shift=shift)

    def slopes_and_result(v: Any) -> Any:
        def values(v: Any) -> Any:
            result = estimate(v)
            return (result.inv_quad.value, result.logdet.value), result

        return jax.jacrev(values, has_aux=True)(v)

    zero = jnp.zeros(3)
    slopes, result = jax.jit(slopes_and_result)(zero)
    form, logdet = dense(matrix, y)
    close(result.inv_quad.value, form, 1e-11)
    assert result.inv_quad.value.dtype == result.inv_quad.standard_error.dtype
    assert 0 <= form - result.inv_quad.value + 1e-13 < result.inv_quad.standard_error
    assert contains(result.logdet, logdet, 0.999)
    solution = jnp.linalg.solve(matrix + SHIFT * jnp.eye(N, dtype=dtype), y)
    close(result.solution, solution, 1e-4)
    form, logdet = slopes
    want_form, want_logdet = jax.jit(jax.jacrev(lambda v: dense(*parts(v))))(zero)
    close(form, want_form, 1e-5)
    assert logdet[1] == 0
    close(logdet, want_logdet, 0.1)
    along = jax.jit(lambda v, t: jax.jvp(estimate, (v,), (t,))[1])
    forwards = along(zero, jnp.ones(3))
    close(forwards.inv_quad.value, jnp.sum(form), 1e-10)
    close(forwards.logdet.value, jnp.sum(logdet), 1e-10)


@pytest.mark.slow
def test_second_derivatives() -> None:
    y = numbers(N, seed=3)

    def form(v: Any) -> Any:
        a = jnp.exp(v[0]) * kernel(jnp.asarray(0.0))
        return both(a, y * (1 + v[1] * y), shift=SHIFT + v[2], rtol=1e-8).inv_quad.value

    def want(v: Any) -> Any:
        a = jnp.exp(v[0]) * kernel(jnp.asarray(0.0))
        return dense(a, y * (1 + v[1] * y), SHIFT + v[2])[0]

    zero = jnp.zeros(3)
    close(jax.jit(jax.hessian(form))(zero), jax.hessian(want)(zero), 1e-6)


@pytest.mark.slow
def test_derivatives_of_the_solution() -> None:
    """To any order, in all that it depends on."""
    dtype = complex
    matrix = hermitian(1 / (1.0 + np.arange(N)), dtype)
    y, weight = numbers(N, dtype=dtype, seed=3), numbers(N, dtype=dtype, seed=6)

    def read(solution: Any) -> Any:
        return jnp.vdot(weight, solution).real ** 2

    def got(v: Any) -> Any:
        return read(both(v * matrix, v**2 * y, shift=SHIFT * v**3, rtol=1e-9).solution)

    def want(v: Any) -> Any:
        whole = v * matrix + SHIFT * v**3 * jnp.eye(N, dtype=dtype)
        return read(jnp.linalg.solve(whole, v**2 * y))

    for derivative in (jax.grad, jax.jacfwd):
        close(jax.jit(derivative(got))(1.1), jax.grad(want)(1.1), 1e-6)
    close(jax.jit(jax.grad(jax.grad(got)))(1.1), jax.grad(jax.grad(want))(1.1), 1e-5)


@pytest.mark.slow
def test_operators_without_a_transpose() -> None:
    """A matrix that puts its vector on a grid has forward derivatives only."""
    places = 2 * jnp.arange(N)
    large = hermitian(1 / (1.0 + np.arange(2 * N)))

    def value(s: Any) -> Any:
        def product(v: Any) -> Any:
            return s * (large @ jnp.zeros(2 * N).at[places].set(v))[places]

        operator = matrix_free(product, N, PSD)
        return tx.inv_quad_logdet(operator, numbers(N), KEY, BUDGET, shift=SHIFT)

    small = large[::2, ::2]
    want = jax.grad(lambda s: dense(s * small, numbers(N))[0])(1.0)
    close(jax.grad(lambda s: value(s).inv_quad.value)(1.0), want, 1e-5)


@pytest.mark.parametrize("count", [2, slow(5)])
def test_several_right_hand_sides(count: int) -> None:
    """Their sum; in the run where they are few, and where they are not."""
    matrix, ys = kernel(jnp.asarray(-1.0)), numbers(count, N)
    result = both(matrix, ys)
    close(result.inv_quad.value, sum(dense(matrix, y)[0] for y in ys), 1e-10)
    want = jnp.linalg.solve(matrix + SHIFT * jnp.eye(N), ys.T).T
    close(result.solution, want, 1e-4)
    steps, rest = divmod(result.inv_quad.num_matvecs - result.logdet.num_matvecs, count)
    assert rest == 0
    assert 0 < steps < 30


@pytest.mark.slow
def test_diagonal_shifts() -> None:
    """The noise of each observation."""
    matrix, y = kernel(jnp.asarray(0.0)), numbers(N, seed=3)

    @jax.jit
    def run(noise: Any) -> Any:
        def form(noise: Any) -> Any:
            result = both(matrix, y, shift=lx.DiagonalLinearOperator(noise))
            return result.inv_quad.value, result

        return jax.grad(form, has_aux=True)(noise)

    noise = jnp.linspace(0.05, 2.0, N)
    slope, result = run(noise)
    form, logdet = dense(matrix + jnp.diag(noise), y, 0.0)
    close(result.inv_quad.value, form, 1e-10)
    close(result.logdet.value, logdet, 0.02)
    solution = jnp.linalg.solve(matrix + jnp.diag(noise), y)
    close(result.solution, solution, 1e-5)
    close(slope, -(solution**2), 1e-5)


EXACT = ["Matrix", "small", "whole budget", "Diagonal"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXACT)
def test_exact_where_exact_is_cheap(kind: str) -> None:
    n, make = 20 if kind == "small" else N, EVERY.get(kind, function)
    matrix = part_of(kind, kernel(jnp.asarray(0.0))[:n, :n])
    budget = N if kind == "whole budget" else 10

    def of(v: Any) -> Any:
        y = v[1] * numbers(n)
        return tx.inv_quad_logdet(make(v[0] * matrix), y, KEY, budget, shift=v[2])

    v = jnp.array([1.2, 0.8, SHIFT])

    def alone(v: Any) -> Any:
        shifts = jnp.stack([v[2], 2 * v[2]])
        return tx.logdet(make(v[0] * matrix), KEY, budget, shift=shifts)

    def want(v: Any) -> Any:
        form, logdet = dense(v[0] * matrix, v[1] * numbers(n), v[2])
        _, other = dense(v[0] * matrix, v[1] * numbers(n), 2 * v[2])
        return form, logdet, jnp.stack([logdet, other])

    def estimates(v: Any) -> Any:
        result = of(v)
        return result.inv_quad, result.logdet, alone(v)

    result = of(v)
    for estimate in estimates(v):
        assert jnp.all(estimate.standard_error == 0)
        assert estimate.num_matvecs == (0 if kind in EVERY else n)
    values = lambda v: tuple(e.value for e in estimates(v))  # noqa: E731
    close(values(v), want(v), 1e-10)
    close(jax.jacrev(values)(v), jax.jacrev(want)(v), 1e-8)
    want = jnp.linalg.solve(1.2 * matrix + SHIFT * jnp.eye(n), 0.8 * numbers(n))
    close(result.solution, want, 1e-8)


@pytest.mark.slow
def test_a_solve_that_falls_short_shows() -> None:
    """In the bar, which holds the truth whatever rtol was; and less is spent."""
    matrix, y = hermitian(1 / (1.0 + np.arange(N))), numbers(N, seed=3)
    want, spent = dense(matrix, y, 1e-3)[0], []
    for rtol in (0.5, 1e-2, 1e-4):
        result = both(matrix, y, shift=1e-3, rtol=rtol).inv_quad
        spent.append(int(result.num_matvecs))
        off = float(want - result.value)
        assert -1e-10 * want < off < result.standard_error
        assert result.standard_error < 4 * rtol**2 * want + 1e-9 * want
    assert spent == sorted(spent)
    assert spent[0] < spent[-1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_right_hand_sides_that_are_eigenvectors(dtype: Any) -> None:
    """What they leave after a step is rounding, which must not become a direction."""
    centred = kernel(jnp.asarray(-1.0))
    less = jnp.eye(N) - 1 / N
    centred = (less @ centred @ less).astype(dtype)
    ones, y = jnp.ones(N, dtype), numbers(N).astype(dtype)
    vectors = jnp.linalg.eigh(centred)[1].T
    run = jax.jit(both)
    tolerance = 40 * float(jnp.finfo(dtype).eps)
    for ys in ([ones, y], [vectors[-1], vectors[N // 2]], [y, ones]):
        sides = jnp.stack(ys)
        result = run(centred, sides)
        want = sum(dense(centred, y)[0] for y in ys)
        close(result.inv_quad.value, want, 1e3 * tolerance)
        assert abs(result.inv_quad.value - want) < result.inv_quad.standard_error
        assert contains(result.logdet, dense(centred, ones)[1], 0.999)
        block = jnp.concatenate([sides.T, numbers(N, 5, seed=7).astype(dtype)], axis=1)
        square = block_krylov(LinearMap(function(centred)), block, 8).projection
        close(square, square.T, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("condition", [1e8, 1e12])
def test_bars_of_solves_that_stop_short(condition: float) -> None:
    """No shift tells what the least eigenvalue is. All of 100 intervals contain the truth.
    With half of the least Ritz value in place of it 182 and 79 of 300 did."""
    matrix, ys = hermitian(np.logspace(0, -np.log10(condition), 160)), numbers(100, 160)
    want = jnp.sum(ys * jnp.linalg.solve(matrix, ys.T).T, axis=1)

    def held(case: Any) -> Any:
        key, y, want = case
        return contains(both(matrix, y, key, shift=0.0).inv_quad, want)

    keys = jax.random.split(KEY, 100)
    assert jnp.mean(jax.lax.map(held, (keys, ys, want))) >= 0.9


@pytest.mark.slow
def test_singular_matrices() -> None:
    """Infinite errors where rounding hides it, or a wide one of the log-determinant."""
    y, matrix = numbers(N), hermitian(np.append(np.linspace(0.5, 1, N - 1), 0.0))
    stored = lx.MatrixLinearOperator(matrix, PSD)
    for operator, least in ((function(matrix), 10), (stored, jnp.inf)):
        result = tx.inv_quad_logdet(operator, y, KEY, BUDGET)
        assert not result.inv_quad.standard_error < jnp.inf
        assert not result.logdet.standard_error < least
    exact = tx.inv_quad_logdet(lx.DiagonalLinearOperator(jnp.array([0.0, 2])), y[:2], KEY)
    assert exact.inv_quad.value == -exact.logdet.value == jnp.inf


@pytest.mark.slow
def test_singular_and_empty() -> None:
    """Zero, a multiple of I, rank 5; nothing on the right-hand side."""
    y = numbers(N)
    for eigenvalues in (np.zeros(N), np.ones(N), 5.0 * (np.arange(N) < 5)):
        matrix = hermitian(eigenvalues)
        result = both(matrix, y)
        close(result.inv_quad.value, dense(matrix, y)[0], 1e-12)
        close(result.logdet.value, dense(matrix, y)[1], 1e-12)
        assert result.inv_quad.standard_error < 1e-10 * N
    nothing = both(matrix, 0 * y)
    assert nothing.inv_quad.value == 0
    assert nothing.inv_quad.standard_error == 0
    assert jnp.all(nothing.solution == 0)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_single_precision_at_any_scale(scale: float) -> None:
    """The condition is 1000."""
    factor = np.float32(scale)
    matrix = hermitian(1 / (1.0 + np.arange(N)) ** 2).astype(np.float32) * factor
    y = numbers(N, seed=3).astype(np.float32)
    result = both(matrix, y, shift=factor / 1000)
    want = float(dense(matrix.astype(float), y.astype(float), float(factor) / 1000)[0])
    assert result.inv_quad.value.dtype == result.solution.dtype == np.float32
    close(result.inv_quad.value, want, 1e-4)
    assert abs(result.inv_quad.value - want) < result.inv_quad.standard_error
    assert result.inv_quad.standard_error < 1e-2 * want


@pytest.mark.slow
def test_pytrees() -> None:
    matrix, y = kernel(jnp.asarray(0.0)), numbers(N)
    vector = {"a": y[: N // 3], "b": y[N // 3 :]}
    result = tx.inv_quad_logdet(two_leaves(matrix), vector, KEY, BUDGET, shift=SHIFT)
    assert jax.tree.structure(result.solution) == jax.tree.structure(vector)
    close(result.inv_quad.value, dense(matrix, y)[0], 1e-10)


@pytest.mark.parametrize(("diagonal", "dtype"), [slow(False, complex), (True, float)])
def test_a_preconditioner_is_exact_from_n_on(diagonal: bool, dtype: Any) -> None:
    """Of A + D, D the shift: the operator is given without it. From n applications on it
    is the inverse; before, it is Hermitian, no larger than B, and B on the space."""
    matrix, eye = hermitian(1 / (1.0 + np.arange(N)), dtype), jnp.eye(N, dtype=dtype)
    noise = (SHIFT * (1 + jnp.arange(N) / N * float(diagonal))).astype(dtype)
    shift = lx.DiagonalLinearOperator(noise) if diagonal else SHIFT
    for budget in (BUDGET, 10 * N):
        inverse = tx.preconditioner(function(matrix), KEY, budget, shift=shift)
        got = jax.vmap(inverse.mv)(eye).T
        close(got, got.conj().T, 1e-12)
        missing = jnp.linalg.eigvalsh(matrix + jnp.diag(noise) - jnp.linalg.inv(got))
        assert missing[0] > -1e-9
        assert jnp.sum(missing > 1e-9) <= max(N - budget + 6, 0)
    close(got @ (matrix + jnp.diag(noise)), eye, 1e-8)


@pytest.mark.parametrize("diagonal", [slow(False), slow(True)])
def test_a_preconditioner_for_lineax(diagonal: bool) -> None:
    """A fifth of the steps, and less; a constant."""
    matrix, y = kernel(jnp.asarray(-0.7)), numbers(N, seed=3)
    noise = 1e-4 * (1 + jnp.arange(N) / N * float(diagonal))

    def steps(length: Any, with_it: bool) -> Any:
        a = kernel(length)
        whole = lx.MatrixLinearOperator(a + jnp.diag(noise), PSD)
        shift = lx.DiagonalLinearOperator(noise) if diagonal else 1e-4
        close_to = tx.preconditioner(function(a), KEY, BUDGET, shift=shift)
        assert lx.is_positive_semidefinite(close_to)
        options = {"preconditioner": close_to} if with_it else {}
        solver = lx.CG(rtol=1e-6, atol=1e-6, max_steps=2000)
        found = lx.linear_solve(whole, y, solver, options=options, throw=False)
        return jnp.sum(y * found.value), found.stats["num_steps"]

    (value, few), (_, many) = (steps(jnp.asarray(-0.7), w) for w in (True, False))
    assert 5 * few <= many
    close(value, dense(matrix + jnp.diag(noise), y, 0.0)[0], 1e-6)
    slope = jax.grad(lambda x: steps(x, True)[0])(-0.7)
    want = jax.grad(lambda x: dense(kernel(x) + jnp.diag(noise), y, 0.0)[0])(-0.7)
    close(slope, want, 1e-3)


@pytest.mark.parametrize(
    ("how", "error", "complaint"),
    [
        ({"vector": jnp.ones(N - 1)}, ValueError, r"vector=.*space.*\(89,\).*a row"),
        ({"vector": jnp.ones((N, 2))}, ValueError, r"vector=.*space.*\(90, 2\)"),
        ({"vector": jnp.ones((0, N))}, ValueError, r"vector=.*space.*\(0, 90\)"),
        ({"vector": jnp.full(N, 1j)}, TypeError, r"vector=.*real.*two right-hand"),
        ({"rtol": 0.0}, ValueError, r"rtol=.*between 0 and 1.*0\.0"),
        ({"rtol": jnp.ones(())}, TypeError, r"rtol=.*Python float"),
        ({"shift": jnp.ones(3)}, ValueError, r"shift=.*one number.*\(3,\).*vmap"),
        ({"shift": 1j}, TypeError, r"shift=.*real"),
        ({"num_matvecs": 5}, ValueError, r"num_matvecs=.*6"),
        ({"guess": jnp.ones((1, N))}, ValueError, "guess="),
        ({"guess": jnp.ones(N - 1)}, ValueError, "guess="),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_mistakes_are_named(how: Any, error: Any, complaint: str) -> None:
    options = {"vector": jnp.ones(N), "key": KEY, "num_matvecs": BUDGET, **how}
    message = r"traceax\.inv_quad_logdet\(" + complaint
    refused(error, message, tx.inv_quad_logdet, function(jnp.eye(N)), **options)


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_a_guess_saves_steps_and_changes_no_answer(several: bool) -> None:
    """That of a shorter length scale; for derivatives it is a constant."""
    matrix, y = kernel(-1.0), numbers(*((3,) if several else ()), N)
    how = {"shift": 1e-6, "rtol": 1e-8}
    guess = both(kernel(-1.001), y, **how).solution

    def run(shift: Any, guess: Any) -> tx.InvQuadLogdet:
        return both(matrix, y, shift=shift, rtol=1e-8, guess=guess)

    cold, warm = run(1e-6, None), run(1e-6, guess)
    assert warm.inv_quad.num_matvecs < cold.inv_quad.num_matvecs
    assert warm.logdet.num_matvecs == cold.logdet.num_matvecs
    truth = refined_form(np.asarray(matrix), np.asarray(y), 1e-6)
    for one in (cold, warm):
        off = abs(float(one.inv_quad.value) - truth)
        assert off <= 2 * one.inv_quad.standard_error < 1e-8 * truth

    def slope(guess: Any) -> Any:
        return jax.grad(lambda s: run(s, guess).inv_quad.value)(1e-6)

    close(slope(guess), slope(None), 1e-5)
    close(slope(jnp.zeros_like(y)), slope(None), 1e-5)
