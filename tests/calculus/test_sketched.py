"""Laplacians by a sketch of the Hessian."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tx
from tests.helpers import close, contains, is_unbiased, over_keys

KEY = jax.random.key(7)
N, M = 24, 16
A = jax.random.normal(jax.random.key(1), (N, N)) / N**0.5
X = jax.random.normal(jax.random.key(2), (N,))


def low_rank(x: Any, args: Any) -> Any:
    """Its Hessian is of rank 3, the width of the sketch."""
    return jnp.sin(x @ A[0]) + (x @ A[1]) ** 4 + jnp.cos(x @ A[2])


def general(x: Any, args: Any) -> Any:
    return jnp.sum(jnp.tanh(A @ x)) * args + 3 * jnp.sin(2 * X @ x)


def exact(fn: Any, x: Any, args: Any = None) -> Any:
    return jnp.trace(jax.hessian(fn)(x, args))


@pytest.mark.slow
def test_what_the_sketch_spans_is_exact_value_slope_and_bar() -> None:
    """No random sign matters where the Hessian's rank is the sketch's width."""
    run = jax.jit(lambda x: tx.laplacian(low_rank, x, KEY, M))
    estimate = run(X)
    close(estimate.value, exact(low_rank, X), 1e-12)
    assert estimate.standard_error < 1e-11 * abs(exact(low_rank, X))
    assert estimate.num_matvecs == M
    plain = tx.laplacian(low_rank, X, KEY, M, sampler=tx.rademacher)
    assert plain.standard_error > 1e-2 * abs(exact(low_rank, X))


@pytest.mark.slow
def test_it_is_used_from_ten_directions_on_and_where_it_can_be() -> None:
    def both(fn: Any, m: int, **how: Any) -> bool:
        """Whether it is what signs without a sketch give."""
        got = tx.laplacian(fn, X, KEY, m, args=1.0, **how).value
        signs = tx.hadamard if m >= N / 8 else tx.rademacher
        return bool(
            jnp.all(got == tx.laplacian(fn, X, KEY, m, args=1.0, sampler=signs).value)
        )

    assert both(general, 9)
    assert not both(general, 10)
    assert both(general, 10, sampler=tx.hadamard)
    assert both(general, 10, batch_size=10)
    assert both(lambda x, args: (general(x, args), x[0] ** 2), 10)
    assert both(lambda x, args: general(x, args).astype(complex), 10)

    def forwards_only(x: Any, args: Any) -> Any:
        halved = jax.lax.while_loop(lambda y: jnp.sum(y**2) > 1, lambda y: y / 2, x)
        return general(halved, args)

    assert both(forwards_only, 10)


@pytest.mark.slow
def test_values_and_slopes_are_unbiased_and_bars_honest() -> None:
    """Mean over keys against the truth, within six of its own standard errors."""
    scale = jnp.asarray(0.7)
    truth, slope = jax.value_and_grad(lambda s: exact(general, X, s))(scale)

    def run(key: Any, scale: Any) -> Any:
        estimate = tx.laplacian(general, X, key, M, args=scale)
        return estimate.value, (estimate.standard_error, contains(estimate, truth))

    each = jax.vmap(jax.value_and_grad(run, argnums=1, has_aux=True), (0, None))
    keys = jax.random.split(KEY, 1500)
    (values, (errors, held)), slopes = jax.jit(each)(keys, scale)
    assert is_unbiased(values, truth)
    assert is_unbiased(slopes, slope)
    assert jnp.mean(held) > 0.92
    # Few keys miss the leading direction, and err far more than the others.
    assert 0.5 < jnp.median(errors) / jnp.median(jnp.abs(values - truth)) / 1.48 < 2


def test_derivatives_are_those_of_frozen_directions() -> None:
    """Euler: linear in args, so the slope is the value over it; forwards as backwards; and
    again, of what is not linear."""

    def value(x: Any, scale: Any) -> Any:
        return tx.laplacian(lambda x, s: s * general(x, 1.0), x, KEY, M, args=scale).value

    scale = jnp.asarray(1.7)
    slope = jax.jit(jax.grad(value, argnums=1))(X, scale)
    close(slope * scale, value(X, scale), 1e-12)
    tangent = jnp.cos(jnp.arange(N))
    forwards = jax.jit(lambda x: jax.jvp(lambda x: value(x, scale), (x,), (tangent,)))(X)[1]
    gradient = jax.jit(jax.grad(value))(X, scale)
    close(gradient @ tangent, forwards, 1e-11, float(jnp.linalg.norm(gradient)))
    again = jax.jit(jax.jvp, static_argnums=0)(
        lambda x: jax.grad(value)(x, scale), (X,), (tangent,)
    )[1]
    twice = jax.jit(jax.grad(lambda x: jax.grad(value)(x, scale) @ tangent))(X)
    close(again, twice, 1e-9, 1 + float(jnp.linalg.norm(twice)))


@pytest.mark.parametrize("flat", [lambda x: jnp.sum(x), lambda x: jnp.sum(x**2)])
def test_where_there_is_nothing_to_sketch(flat: Any) -> None:
    """Zero, and a multiple of I."""
    estimate = tx.laplacian(lambda x, args: flat(x), X, KEY, M)
    close(estimate.value, exact(lambda x, args: flat(x), X), 1e-12, 1.0)
    assert estimate.standard_error < 1e-10


@pytest.mark.slow
def test_signs_are_used_if_no_directions_dominate() -> None:
    """Half of the eigenvalues are 1, the others -1. The mean square is known for signs. For
    the sketch it would be about 1.3 times as large: 16 forms, not 24, but with the
    finite-population correction. The tolerance is four standard errors of a mean of squares
    of normal numbers."""
    n, m, repeats = 200, 32, 2000
    basis = jnp.linalg.qr(jax.random.normal(KEY, (n, n), jnp.float32))[0]
    signs = (-1.0) ** jnp.arange(n, dtype=jnp.float32)
    matrix = (basis * signs[None, :]) @ basis.T
    truth = jnp.trace(matrix)

    def one(key: Any) -> Any:
        fn = lambda x, args: x @ matrix @ x / 2  # noqa: E731
        estimate = tx.laplacian(fn, jnp.ones(n, jnp.float32), key, m)
        return estimate.value - truth, contains(estimate, truth)

    errors, held = over_keys(one, KEY, repeats)
    variance = 2 * (n - jnp.sum(jnp.diag(matrix) ** 2)) / (m - m // 4)
    assert abs(jnp.mean(errors**2) / variance - 1) < 4 * (2 / repeats) ** 0.5
    assert jnp.mean(held) > 0.92


SPREAD = jax.random.normal(jax.random.key(3), (N, N)) / N**0.5


@pytest.mark.parametrize("directions", [N, pytest.param(M, marks=pytest.mark.slow)])
def test_with_a_diffusion_it_is_the_trace_between(directions: int) -> None:
    """tr(S* H S), its slope in the point and in S; of a function and of an operator, also
    one from another space. With a sketch, of low rank, it is exact, too."""

    def wide(spread: Any) -> Any:
        space = jax.ShapeDtypeStruct((2 * N,), spread.dtype)
        tall = jnp.hstack([spread, 0 * spread])
        return lx.FunctionLinearOperator(lambda v: tall @ v, space)

    def run(x: Any, spread: Any) -> Any:
        diffusion = lambda v: spread @ v  # noqa: E731
        return tx.laplacian(low_rank, x, KEY, directions, diffusion=diffusion).value

    def want(x: Any, spread: Any) -> Any:
        return jnp.trace(spread.T @ jax.hessian(low_rank)(x, None) @ spread)

    truth = want(X, SPREAD)
    if directions == N:
        got, slopes = jax.jit(jax.value_and_grad(run, (0, 1)))(X, SPREAD)
        for one, other in zip(slopes, jax.grad(want, (0, 1))(X, SPREAD), strict=True):
            close(one, other, 1e-10)
        close(
            tx.laplacian(low_rank, X, KEY, 2 * N, diffusion=wide(SPREAD)).value,
            truth,
            1e-10,
        )
    else:
        got = run(X, SPREAD)
    close(got, truth, 1e-10)


def test_a_diffusion_returns_what_the_point_is_like() -> None:
    with pytest.raises(ValueError, match=r"laplacian\(diffusion=.*float64\[24\]"):
        tx.laplacian(low_rank, X, KEY, 5, diffusion=lambda v: v[:3])
    with pytest.raises(TypeError, match=r"diffusion=.*as_operator\(S\)"):
        tx.laplacian(low_rank, X, KEY, 5, diffusion=jnp.eye(24))  # pyright: ignore


FIELD = jax.random.normal(jax.random.key(5), (2, 80, 80)) / 9
POINT = jax.random.normal(jax.random.key(6), (80,))


def decaying(x: Any, args: Any) -> Any:
    """A field whose Jacobian has singular values that decay."""
    return FIELD[0] @ (args * jnp.arange(1.0, 81) ** -1.5 * jnp.sin(FIELD[1] @ x))


def exact_divergence(x: Any, args: Any) -> Any:
    return jnp.trace(jax.jacobian(decaying)(x, args))


@pytest.mark.slow
def test_a_divergence_is_sketched_from_twelve_products_on() -> None:
    def both(m: int, **how: Any) -> bool:
        got = tx.divergence(decaying, POINT, KEY, m, args=1.0, **how).value
        signs = tx.hadamard if m >= 10 else tx.rademacher
        plain = tx.divergence(decaying, POINT, KEY, m, args=1.0, sampler=signs)
        return bool(got == plain.value)

    assert both(11)
    assert not both(12)
    assert both(12, batch_size=12)
    exact = exact_divergence(POINT, 1.0)
    sketched = tx.divergence(decaying, POINT, KEY, 40, args=1.0)
    plain = tx.divergence(decaying, POINT, KEY, 40, args=1.0, sampler=tx.rademacher)
    assert sketched.standard_error < plain.standard_error / 2
    assert abs(sketched.value - exact) < 4 * sketched.standard_error
    assert sketched.num_matvecs == 40


@pytest.mark.slow
def test_sketched_divergences_and_their_slopes_are_unbiased() -> None:
    def both(key: Any) -> Any:
        def value(args: Any) -> Any:
            estimate = tx.divergence(decaying, POINT, key, 16, args=args)
            return estimate.value, estimate

        return jax.value_and_grad(value, has_aux=True)(1.0)

    keys = jax.random.split(KEY, 400)
    (values, estimates), slopes = jax.vmap(both)(keys)
    assert is_unbiased(values, exact_divergence(POINT, 1.0))
    assert is_unbiased(slopes, jax.grad(exact_divergence, 1)(POINT, 1.0))
    held = jax.vmap(lambda e: contains(e, exact_divergence(POINT, 1.0)))(estimates)
    assert jnp.mean(held) > 0.92
