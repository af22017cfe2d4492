"""log det B and y* B^{-1} y from one run, and the preconditioner they share."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import cases, close, contains, nightly, refused, slow
from tests.matrices import hermitian
from tests.matrices import numbers as normal_numbers
from tests.wrappers import EVERY, PSD, function, matrix_free, part_of
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


def solve(matrix: Any, y: Any) -> Any:
    return np.linalg.solve(np.asarray(matrix) + SHIFT * np.eye(len(matrix)), y)


def refined_form(matrix: np.ndarray, y: np.ndarray, shift: float) -> float:
    """The sum of y* B^-1 y, by residuals in extended precision: in double precision the
    rounding of matrix + shift is more than the error of the estimate."""
    whole = matrix.astype(np.longdouble) + shift * np.eye(len(matrix), dtype=np.longdouble)
    columns = np.atleast_2d(y).T.astype(np.longdouble)
    u = np.zeros_like(columns)
    for _ in range(8):
        u += np.linalg.solve(whole.astype(float), (columns - whole @ u).astype(float))
    return float(np.sum(columns * u))


@pytest.mark.parametrize("derivative", [jax.jacrev, slow(jax.jacfwd)])
def test_values_and_gradients(derivative: Any) -> None:
    """In operator, vector and shift. The form and its gradient have no sampling in them."""
    matrix = hermitian(1 / (1.0 + np.arange(N)), complex)
    moved = hermitian(np.sin(np.arange(N)), complex, seed=5) / 9
    y = numbers(N, dtype=complex, seed=3)

    def parts(v: Any) -> Any:
        z = y * (1 + v[1] * jnp.sin(y.real)).astype(complex)
        return matrix + v[0].astype(complex) * moved, z, SHIFT + v[2]

    def values(v: Any) -> Any:
        a, z, shift = parts(v)
        result = both(a, z, shift=shift)
        return (result.inv_quad.value, result.logdet.value), result

    zero = jnp.zeros(3)
    gradients, result = jax.jit(derivative(values, has_aux=True))(zero)
    form, logdet = dense(matrix, y)
    close(result.inv_quad.value, form, 1e-11)
    assert result.inv_quad.value.dtype == result.inv_quad.standard_error.dtype
    assert 0 <= form - result.inv_quad.value + 1e-13 < result.inv_quad.standard_error
    assert contains(result.logdet, logdet, 0.999)
    close(result.solution, solve(matrix, y), 1e-4)
    form, logdet = jax.jit(jax.jacrev(lambda v: dense(*parts(v))))(zero)
    close(gradients[0], form, 1e-5)
    assert gradients[1][1] == 0
    close(gradients[1], logdet, 0.1)


@pytest.mark.slow
def test_second_derivatives() -> None:
    y, zero, matrix = numbers(N, seed=3), jnp.zeros(3), kernel(0.0)

    def of(v: Any) -> Any:
        return jnp.exp(v[0]) * matrix, y * (1 + v[1] * y)

    form = lambda v: both(*of(v), shift=SHIFT + v[2], rtol=1e-8).inv_quad.value  # noqa: E731
    want = lambda v: dense(*of(v), shift=SHIFT + v[2])[0]  # noqa: E731
    close(jax.jit(jax.hessian(form))(zero), jax.jit(jax.hessian(want))(zero), 1e-6)


@pytest.mark.slow
def test_derivatives_of_the_solution() -> None:
    """To any order, in all that it depends on."""
    matrix = hermitian(1 / (1.0 + np.arange(N)), complex)
    y, weight = numbers(N, dtype=complex, seed=3), numbers(N, dtype=complex, seed=6)

    def read(solution: Any) -> Any:
        return jnp.vdot(weight, solution).real ** 2

    def got(v: Any) -> Any:
        return read(both(v * matrix, v**2 * y, shift=SHIFT * v**3, rtol=1e-9).solution)

    def want(v: Any) -> Any:
        whole = v * matrix + SHIFT * v**3 * jnp.eye(N, dtype=complex)
        return read(jnp.linalg.solve(whole, v**2 * y))

    for derivative in (jax.grad, jax.jacfwd):
        close(jax.jit(derivative(got))(1.1), jax.grad(want)(1.1), 1e-6)
    close(jax.jit(jax.grad(jax.grad(got)))(1.1), jax.grad(jax.grad(want))(1.1), 1e-5)


@pytest.mark.slow
def test_operators_without_a_transpose() -> None:
    """A matrix that puts its vector on a grid has forward derivatives only."""
    places, y = 2 * jnp.arange(N), numbers(N)
    large = hermitian(1 / (1.0 + np.arange(2 * N)))

    def form(s: Any) -> Any:
        def product(v: Any) -> Any:
            return s * (large @ jnp.zeros(2 * N).at[places].set(v))[places]

        operator = matrix_free(product, N, PSD)
        return tx.inv_quad_logdet(operator, y, KEY, BUDGET, shift=SHIFT).inv_quad.value

    want = jax.grad(lambda s: dense(s * large[::2, ::2], y)[0])(1.0)
    close(jax.jit(jax.grad(form))(1.0), want, 1e-5)


@pytest.mark.parametrize("count", [slow(2), nightly(5)])
def test_several_right_hand_sides(count: int) -> None:
    """Their sum; in the run where they are few, and where they are not."""
    matrix, ys = kernel(-1.0), numbers(count, N)
    result = both(matrix, ys)
    close(result.inv_quad.value, sum(dense(matrix, y)[0] for y in ys), 1e-10)
    close(result.solution, solve(matrix, ys.T).T, 1e-4)
    steps, rest = divmod(result.inv_quad.num_matvecs - result.logdet.num_matvecs, count)
    assert rest == 0
    assert 0 < steps < 30


@pytest.mark.slow
def test_diagonal_shifts() -> None:
    """The noise of each observation."""
    matrix, y, noise = kernel(0.0), numbers(N, seed=3), jnp.linspace(0.05, 2.0, N)

    def form(noise: Any) -> Any:
        result = both(matrix, y, shift=lx.DiagonalLinearOperator(noise))
        return result.inv_quad.value, result

    gradient, result = jax.jit(jax.grad(form, has_aux=True))(noise)
    whole = matrix + jnp.diag(noise)
    want, logdet = dense(whole, y, 0.0)
    close(result.inv_quad.value, want, 1e-10)
    close(result.logdet.value, logdet, 0.02)
    solution = np.linalg.solve(whole, y)
    close(result.solution, solution, 1e-5)
    close(gradient, -(solution**2), 1e-5)


@pytest.mark.parametrize(
    "kind", cases(["small", "Matrix", "whole budget", "Diagonal"], "small")
)
def test_exact_where_exact_is_cheap(kind: str) -> None:
    n, make = 20 if kind == "small" else N, EVERY.get(kind, function)
    matrix, y = part_of(kind, kernel(0.0)[:n, :n]), numbers(n)
    budget = N if kind == "whole budget" else 10

    def found(v: Any) -> Any:
        operator, shifts = make(v[0] * matrix), jnp.stack([v[2], 2 * v[2]])
        result = tx.inv_quad_logdet(operator, v[1] * y, KEY, budget, shift=v[2])
        alone = tx.logdet(operator, KEY, budget, shift=shifts)
        parts = result.inv_quad, result.logdet, alone
        return [part.value for part in parts], (parts, result.solution)

    def want(v: Any) -> Any:
        form, logdet = dense(v[0] * matrix, v[1] * y, v[2])
        return [form, logdet, jnp.stack([logdet, dense(v[0] * matrix, y, 2 * v[2])[1]])]

    v = jnp.array([1.2, 0.8, SHIFT])
    gradients, (estimates, solution) = jax.jit(jax.jacrev(found, has_aux=True))(v)
    close([estimate.value for estimate in estimates], want(v), 1e-10)
    close(gradients, jax.jit(jax.jacrev(want))(v), 1e-8)
    for estimate in estimates:
        assert jnp.all(estimate.standard_error == 0)
        assert estimate.num_matvecs == (0 if kind in EVERY else n)
    close(solution, solve(1.2 * matrix, 0.8 * y), 1e-8)


def test_a_solve_that_falls_short_shows() -> None:
    """In the bar, which contains the truth whatever rtol was; and less is spent."""
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


@pytest.mark.parametrize("dtype", [slow(np.float32), nightly(np.float64)])
def test_right_hand_sides_that_are_eigenvectors(dtype: Any) -> None:
    """What they leave after a step is rounding, which must not become a direction."""
    less = jnp.eye(N) - 1 / N
    centred = (less @ kernel(-1.0) @ less).astype(dtype)
    ones, y = jnp.ones(N, dtype), numbers(N).astype(dtype)
    vectors, run = jnp.linalg.eigh(centred)[1].T, jax.jit(both)
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


@pytest.mark.parametrize("condition", [nightly(1e8), slow(1e12)])
def test_bars_of_solves_that_stop_short(condition: float) -> None:
    """No shift tells what the least eigenvalue is. All of 100 intervals contain the truth.
    With half of the least Ritz value in place of it 182 and 79 of 300 did."""
    matrix, ys = hermitian(np.logspace(0, -np.log10(condition), 160)), numbers(100, 160)
    want = jnp.sum(ys * jnp.linalg.solve(matrix, ys.T).T, axis=1)

    @jax.jit
    def contained(case: Any) -> Any:
        key, y, want = case
        return contains(both(matrix, y, key, shift=0.0).inv_quad, want)

    keys = jax.random.split(KEY, 100)
    assert jnp.mean(jax.lax.map(contained, (keys, ys, want))) >= 0.9


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
def test_single_precision_at_any_scale() -> None:
    """The condition is 1000."""
    for factor in (np.float32(1e-25), np.float32(1e25)):
        matrix = hermitian(1 / (1.0 + np.arange(N)) ** 2).astype(np.float32) * factor
        y = numbers(N, seed=3).astype(np.float32)
        result = both(matrix, y, shift=factor / 1000)
        want = float(dense(matrix.astype(float), y.astype(float), float(factor) / 1000)[0])
        assert result.inv_quad.value.dtype == result.solution.dtype == np.float32
        close(result.inv_quad.value, want, 1e-4)
        assert abs(result.inv_quad.value - want) < result.inv_quad.standard_error
        assert result.inv_quad.standard_error < 1e-2 * want


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


@pytest.mark.slow
@pytest.mark.parametrize("diagonal", [False, True])
def test_a_preconditioner_for_lineax(diagonal: bool) -> None:
    """A fifth of the steps, and less; a constant."""
    y, noise = numbers(N, seed=3), 1e-4 * (1 + jnp.arange(N) / N * float(diagonal))

    def steps(length: Any, with_it: bool = True) -> Any:
        whole = lx.MatrixLinearOperator(kernel(length) + jnp.diag(noise), PSD)
        shift = lx.DiagonalLinearOperator(noise) if diagonal else 1e-4
        close_to = tx.preconditioner(function(kernel(length)), KEY, BUDGET, shift=shift)
        assert lx.is_positive_semidefinite(close_to)
        options = {"preconditioner": close_to} if with_it else {}
        solver = lx.CG(rtol=1e-6, atol=1e-6, max_steps=2000)
        found = lx.linear_solve(whole, y, solver, options=options, throw=False)
        return jnp.sum(y * found.value), found.stats["num_steps"]

    def exact(length: Any) -> Any:
        return dense(kernel(length) + jnp.diag(noise), y, 0.0)[0]

    (value, few), gradient = jax.jit(jax.value_and_grad(steps, has_aux=True))(-0.7)
    assert 5 * few <= steps(-0.7, False)[1]
    close(value, exact(-0.7), 1e-6)
    close(gradient, jax.grad(exact)(-0.7), 1e-3)


MISTAKES: list[Any] = [
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
]


def test_mistakes_are_named() -> None:
    for how, error, complaint in MISTAKES:
        options = {"vector": jnp.ones(N), "key": KEY, "num_matvecs": BUDGET, **how}
        message = r"traceax\.inv_quad_logdet\(" + complaint
        refused(error, message, tx.inv_quad_logdet, function(jnp.eye(N)), **options)


@pytest.mark.parametrize("several", [nightly(False), nightly(True)])
def test_a_guess_saves_steps_and_changes_no_answer(several: bool) -> None:
    """The guess is of a shorter length scale. For derivatives it is a constant."""
    matrix, y = kernel(-1.0), numbers(*((3,) if several else ()), N)
    guess = both(kernel(-1.001), y, shift=1e-6, rtol=1e-8).solution

    def run(shift: Any, guess: Any) -> Any:
        result = both(matrix, y, shift=shift, rtol=1e-8, guess=guess)
        return result.inv_quad.value, result

    gradient = jax.jit(jax.grad(run, has_aux=True))
    of_cold, cold = gradient(1e-6, None)
    of_warm, warm = gradient(1e-6, guess)
    close([of_warm, gradient(1e-6, jnp.zeros_like(y))[0]], 2 * [of_cold], 1e-5)
    assert warm.inv_quad.num_matvecs < cold.inv_quad.num_matvecs
    assert warm.logdet.num_matvecs == cold.logdet.num_matvecs
    truth = refined_form(np.asarray(matrix), np.asarray(y), 1e-6)
    for one in (cold, warm):
        off = abs(float(one.inv_quad.value) - truth)
        assert off <= 2 * one.inv_quad.standard_error < 1e-8 * truth
