"""Traces to a tolerance."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, refused, slow
from tests.matrices import general, hermitian, spectrum
from tests.wrappers import PSD, function

KEY = jax.random.key(4)
N = 70  # not exact at once


def estimate(a: Any, key: Any = KEY, tags: Any = (), limit: Any = 100, **how: Any) -> Any:
    return tx.adaptive_trace(function(a, tags), key, max_matvecs=limit, **how)


@pytest.mark.slow
@pytest.mark.parametrize("tags", [(), PSD])
def test_it_rarely_fails(tags: Any) -> None:
    """Over spectra and tolerances, at most 5 % of the answers that claim to be within a
    tolerance are not; and they spend what the tolerance asks for. In 200 runs, one after
    the other: `vmap` would run every size."""

    @jax.jit
    def run(matrix: Any, rtol: Any) -> Any:
        one = lambda key: estimate(matrix, key, tags, limit=64, rtol=rtol)  # noqa: E731
        return jax.lax.map(one, jax.random.split(KEY, 200))

    shares = {}
    for name in ("flat", "poly", "exp", "step"):
        spent, matrix = [], hermitian(np.abs(spectrum(name, N)) + 1e-9)
        for tolerance in (1e-1, 1e-2, 1e-3):
            results = run(matrix, tolerance)
            claimed = np.asarray(results.converged)
            missed = np.abs(results.value / jnp.trace(matrix) - 1) > tolerance
            # Of 200: 5 % is 10, and four standard deviations are 12.
            assert np.sum(claimed & missed) <= 10 + 12, (name, tolerance)
            spent.append(float(np.mean(results.num_matvecs)))
            assert np.all(results.num_matvecs <= 64)
            shares[name, tolerance] = np.mean(claimed)
        assert spent == sorted(spent)
    assert shares["exp", 1e-2] > 0.95  # not by never claiming anything


@pytest.mark.slow
@pytest.mark.parametrize("tags", [(), PSD])
def test_compiled_and_not_compiled_agree(tags: Any) -> None:
    """Values, gradients and what is spent, at every size, up to exactness."""
    matrix = hermitian(0.8 ** np.arange(N))
    loss = lambda m, rtol: estimate(m, KEY, tags, rtol=rtol).value  # noqa: E731
    both = jax.jit(jax.value_and_grad(loss))
    whole = jax.jit(lambda m, rtol: estimate(m, KEY, tags, rtol=rtol))
    first, reached = estimate(matrix, KEY, tags, rtol=1.0), set()
    a_little_less = float(1.98 * first.standard_error / first.value)
    for rtol in (1.0, a_little_less, 0.0):
        eager, traced = estimate(matrix, KEY, tags, rtol=rtol), whole(matrix, rtol)
        close(traced.value, eager.value, 1e-12)
        close(traced.standard_error, eager.standard_error, 1e-6, float(jnp.trace(matrix)))
        assert traced.num_matvecs == eager.num_matvecs
        assert traced.converged == eager.converged
        assert eager.converged
        value, gradient = both(matrix, rtol)
        close(gradient, jax.grad(loss)(matrix, rtol), 1e-9)
        close(value, eager.value, 1e-12)
        reached.add(int(eager.num_matvecs))
    close(estimate(matrix, KEY, tags, rtol=0.0).value, jnp.trace(matrix), 1e-13)
    close(gradient, jnp.eye(N), 1e-13)
    assert len(reached) == 3


@pytest.mark.slow
def test_a_sketch_that_grew_is_as_good_as_one_in_one_go() -> None:
    """Rank below the probes: exact to rounding, though most of the basis is noise, or a
    part of a block of new columns."""
    i = np.arange(N)
    matrices = [jnp.diag(jnp.asarray(i < rank, float)) for rank in (5, 12)]
    matrices += [hermitian(1.0 * (i < 9)), hermitian((i < 9) * 0.3**i)]
    matrices += [hermitian(1.0 * (i < 9), np.float32)]
    for tags in ((), PSD):
        grown = jax.jit(lambda m, tags=tags: estimate(m, tags=tags, rtol=0.0, limit=32))
        for matrix in matrices:
            result, eps = grown(matrix), float(jnp.finfo(matrix.dtype).eps)
            assert result.num_matvecs == 32
            close(result.value, jnp.trace(matrix), 1e5 * eps)
            assert result.standard_error < 1e6 * eps
    other = general(N, complex)
    result = jax.jit(lambda m: estimate(m, rtol=0.0, limit=32))(other)
    assert abs(result.value - jnp.trace(other)) < 4 * result.standard_error


@pytest.mark.parametrize("tags", [(), PSD])
def test_nan_ends_at_once_and_never_converges(tags: Any) -> None:
    for rtol in (1.0, 0.0, jnp.inf):
        result = estimate(jnp.full((N, N), jnp.nan), tags=tags, rtol=rtol)
        assert not result.converged
        assert result.num_matvecs <= 16
    assert not estimate(jnp.full((8, 8), jnp.nan), tags=tags).converged  # exact at once


def test_budgets() -> None:
    """The smallest cannot tell their error. Tolerances and operators of zero end."""
    matrix = hermitian(spectrum("flat", N))
    for limit, want in ((2, 2), (7, 6), (33, 32), (N, N - 2), (N + 8, N + 8)):
        result = estimate(matrix, rtol=0.0, limit=limit)
        assert result.num_matvecs == want
        assert result.converged == (limit > N)
        assert (result.standard_error > 0) == (limit <= N)
    assert not estimate(matrix, rtol=0.1, limit=2).converged
    zero = estimate(0 * matrix, rtol=0.0)
    assert zero.converged
    assert zero.value == 0
    small = estimate(general(9), rtol=0.0, limit=9)
    assert small.num_matvecs == 9
    assert small.standard_error == 0


@pytest.mark.parametrize("scale", [1e-30, slow(1e30)])
def test_any_scale(scale: float) -> None:
    matrix = hermitian(spectrum("poly", N), np.float32)
    run = jax.jit(lambda m: estimate(m, rtol=0.01, limit=32))
    scaled, plain = run(jnp.float32(scale) * matrix), run(matrix)
    close(scaled.value / scale, plain.value, 1e-4)
    assert scaled.num_matvecs == plain.num_matvecs


@pytest.mark.slow
def test_progress(capfd: pytest.CaptureFixture[str]) -> None:
    matrix = hermitian(spectrum("poly", N))
    meter = diffrax.TextProgressMeter()
    run = lambda: estimate(matrix, rtol=1e-9, limit=64, progress_meter=meter)  # noqa: E731
    for variant in (run, jax.jit(run)):
        jax.block_until_ready(variant().value)
        jax.effects_barrier()
        printed = capfd.readouterr().out.split()
        assert printed[0] == "0.00%"
        assert printed[-1] == "100.00%"
        assert len(printed) >= 3


def test_wrong_use_says_the_cure() -> None:
    wrong: Any = [
        (ValueError, r"adaptive_trace\(rtol=.*at least 0", {"rtol": -1.0}),
        (ValueError, r"rtol=.*got shape \(1,\)", {"rtol": jnp.ones(1)}),
        (TypeError, r"atol=.* must be a real number", {"atol": "no"}),
        (TypeError, r"max_matvecs=.* must be a Python int", {"limit": jnp.asarray(3)}),
        (ValueError, r"max_matvecs=.* must be at least 2", {"limit": 1}),
        (TypeError, r"progress_meter=.* must be a progress", {"progress_meter": print}),
        (ValueError, "independent", {"sampler": tx.orthogonal}),
    ]
    for error, message, how in wrong:
        refused(error, message, estimate, general(N), **how)
