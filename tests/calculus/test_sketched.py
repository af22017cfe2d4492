"""Laplacians by a sketch of the Hessian."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, contains, is_unbiased, refused, slow
from tests.matrices import across, hermitian, projector
from traceax._core.keys import BLOCKS, keys_of

KEY = jax.random.key(7)
N, M = 24, 16
A = jax.random.normal(jax.random.key(1), (N, N)) / N**0.5
X = jax.random.normal(jax.random.key(2), (N,))


def low_rank(x: Any, args: Any) -> Any:
    """Its Hessian is of rank 3, less than the width of the sketch."""
    return jnp.sin(x @ A[0]) + (x @ A[1]) ** 4 + jnp.cos(x @ A[2])


def general(x: Any, args: Any) -> Any:
    return jnp.sum(jnp.tanh(A @ x)) * args + 3 * jnp.sin(2 * X @ x)


def exact(fn: Any, x: Any, args: Any = None) -> Any:
    return jnp.trace(jax.hessian(fn)(x, args))


def quadratic(x: Any, matrix: Any) -> Any:
    return x @ matrix @ x / 2


@pytest.mark.parametrize("diagonal", [0.0, 5.0])
def test_it_is_hutchpp_or_signs_as_dense_algebra_says(diagonal: float) -> None:
    """What a sketch leaves of each probe, by the loop that leaves it out, decides. If the
    Hessian is nearly diagonal, signs are 4,000 times as accurate."""
    matrix, (width, rest) = hermitian(0.7 ** np.arange(N)), (M // 4, M // 2)
    matrix = matrix + diagonal * jnp.diag(jnp.cos(jnp.arange(N)))
    got, h = tx.laplacian(quadratic, X, KEY, M, args=matrix), np.asarray(matrix)
    counts = zip(keys_of(KEY, 2, BLOCKS), (width, width + rest), strict=True)
    space = jax.ShapeDtypeStruct((N,), float)
    omega, others = (np.asarray(tx.normal(key, space, k)).T for key, k in counts)
    correction, left = 1 - rest / (N - width), []
    for i in range(width):
        p, w = projector(h @ np.delete(omega, i, axis=1)), omega[:, i]
        left.append(across(h @ w - p @ h @ w, w - p @ w))
    w, y = omega[:, :, None], (h @ omega)[:, :, None]
    off = np.sum((w * y.swapaxes(1, 2) - y * w.swapaxes(1, 2)) ** 2) / 2
    sampled = off / (width * (width - 1)) / (width + rest)
    takes_signs = sampled < (1 - 1 / width) * np.mean(left) * correction / rest
    assert takes_signs == (diagonal > 0)
    p = projector(h @ omega)
    frame = np.linalg.qr(others[:, :rest] - p @ others[:, :rest])[0] * (N - width) ** 0.5
    known, factor, probes = np.trace(p @ h), correction, frame
    if takes_signs:
        known, factor, probes = 0.0, rest / (rest + width), np.sign(others)
    forms = np.sum(probes * (h @ probes), axis=0)
    close(got.value, known + forms.mean(), 1e-12, N)
    error = (factor / rest) ** 0.5 * np.std(forms[:rest], ddof=1)
    close(got.standard_error, error, 1e-10)
    assert (got.num_matvecs, got.degrees_of_freedom) == (M, (rest - 1) / 3)


@pytest.mark.nightly
def test_it_is_used_from_ten_directions_on_and_where_it_can_be() -> None:
    def both(fn: Any, m: int, **how: Any) -> bool:
        """Whether it is what signs without a sketch give."""
        run = partial(tx.laplacian, fn, X, KEY, m, args=1.0)
        signs = run(sampler=tx.hadamard if m >= N / 8 else tx.rademacher)
        return bool(jnp.all(run(**how).value == signs.value))

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
def test_values_and_derivatives_are_unbiased_and_bars_honest() -> None:
    """Mean over keys against the truth, within six of its own standard errors."""
    scale = jnp.asarray(0.7)
    truth, want = jax.value_and_grad(lambda s: exact(general, X, s))(scale)

    def run(scale: Any, key: Any) -> Any:
        estimate = tx.laplacian(general, X, key, M, args=scale)
        return estimate.value, (estimate.standard_error, contains(estimate, truth))

    each = jax.vmap(jax.value_and_grad(run, has_aux=True), (None, 0))
    (values, (errors, contained)), got = jax.jit(each)(scale, jax.random.split(KEY, 1500))
    assert is_unbiased(values, truth)
    assert is_unbiased(got, want)
    assert jnp.mean(contained) > 0.92
    # Few keys miss the leading direction, and err far more than the others.
    assert 0.5 < jnp.median(errors) / jnp.median(jnp.abs(values - truth)) / 1.48 < 2


def test_derivatives_are_those_of_frozen_directions() -> None:
    """Euler: linear in args, so the derivative is the value over it; forwards as backwards;
    and again, of what is not linear."""
    tangent, scale = jnp.cos(jnp.arange(N)), 1.7

    def value(x: Any, scale: Any) -> Any:
        return tx.laplacian(lambda x, s: s * general(x, 1.0), x, KEY, M, args=scale).value

    @jax.jit
    def results(x: Any) -> Any:
        both = lambda x: jax.value_and_grad(value, (0, 1))(x, scale)  # noqa: E731
        twice = jax.grad(lambda x: jax.grad(value)(x, scale) @ tangent)(x)
        return *jax.jvp(both, (x,), (tangent,)), twice

    (total, (gradient, by_scale)), (forwards, (again, _)), twice = results(X)
    close(by_scale * scale, total, 1e-12)
    close(gradient @ tangent, forwards, 1e-11, float(jnp.linalg.norm(gradient)))
    close(again, twice, 1e-9, 1 + float(jnp.linalg.norm(twice)))


def test_where_there_is_nothing_to_sketch() -> None:
    """Zero, and a multiple of I."""
    for scale in (0.0, 1.0):
        fn = lambda x, s: s * jnp.sum(x**2) + jnp.sum(x)  # noqa: E731
        estimate = tx.laplacian(fn, X, KEY, M, args=scale)
        close(estimate.value, 2.0 * N * scale, 1e-12, 1.0)
        assert estimate.standard_error < 1e-10


SPREAD = jax.random.normal(jax.random.key(3), (N, N)) / N**0.5


def test_with_a_diffusion_it_is_the_trace_between() -> None:
    """tr(S* H S), its derivative in the point and in S; of a function and of an operator,
    also one from another space. With a sketch, of low rank, it is exact, too."""

    def run(x: Any, spread: Any, directions: int = N) -> Any:
        diffusion = lambda v: spread @ v  # noqa: E731
        return tx.laplacian(low_rank, x, KEY, directions, diffusion=diffusion).value

    def want(x: Any, spread: Any) -> Any:
        return jnp.trace(spread.T @ jax.hessian(low_rank)(x, None) @ spread)

    got, truth = (jax.jit(jax.value_and_grad(f, (0, 1)))(X, SPREAD) for f in (run, want))
    close(got, truth, 1e-10)
    space = jax.ShapeDtypeStruct((2 * N,), float)
    wide = lx.FunctionLinearOperator(lambda v: SPREAD @ v[:N], space)
    close(tx.laplacian(low_rank, X, KEY, 2 * N, diffusion=wide).value, truth[0], 1e-10)
    close(run(X, SPREAD, M), truth[0], 1e-10)


def test_a_diffusion_returns_what_the_point_is_like() -> None:
    short, call = (lambda v: v[:3]), partial(tx.laplacian, low_rank, X, KEY, 5)
    refused(ValueError, r"laplacian\(diffusion=.*float64\[24\]", call, diffusion=short)
    refused(TypeError, r"diffusion=.*as_operator\(S\)", call, diffusion=jnp.eye(24))


FIELD = jax.random.normal(jax.random.key(5), (2, 80, 80)) / 9
POINT = jax.random.normal(jax.random.key(6), (80,))


def decaying(x: Any, args: Any) -> Any:
    """A field whose Jacobian has singular values that decay."""
    return FIELD[0] @ (args * jnp.arange(1.0, 81) ** -1.5 * jnp.sin(FIELD[1] @ x))


@pytest.mark.parametrize(("m", "how"), [(12, {}), (11, {}), slow(12, {"batch_size": 12})])
def test_a_divergence_is_the_trace_of_the_jacobian_or_plain(m: int, how: Any) -> None:
    """From twelve products on, or with fewer or in batches."""
    operator = lx.JacobianLinearOperator(decaying, POINT, 1.0)
    got = tx.divergence(decaying, POINT, KEY, m, args=1.0, **how)
    signs = partial(tx.hutchinson_trace, sampler=tx.hadamard)
    want = (tx.trace if m == 12 and not how else signs)(operator, KEY, m)
    close((got.value, got.standard_error), (want.value, want.standard_error), 1e-12)
    assert got.degrees_of_freedom == want.degrees_of_freedom
    assert got.num_matvecs == want.num_matvecs
