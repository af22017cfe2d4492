"""Traces to a tolerance."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, nightly, refused, slow
from tests.matrices import general, hermitian, spectrum
from tests.wrappers import PSD, function

KEY = jax.random.key(4)
N = 66  # not exact at once
both_tags = pytest.mark.parametrize("tags", [slow(()), nightly(PSD)])


def estimate(a: Any, key: Any = KEY, tags: Any = (), limit: Any = 100, **how: Any) -> Any:
    return tx.adaptive_trace(function(a, tags), key, max_matvecs=limit, **how)


@both_tags
def test_it_rarely_fails(tags: Any) -> None:
    """At most 5 % of the answers that claim to be within a tolerance are not, and they
    spend what it asks for. 200 runs, one after the other: `vmap` would run every size."""

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


@both_tags
def test_compiled_and_not_compiled_agree(tags: Any) -> None:
    """Values, gradients and what is spent, at every size, up to exactness."""
    matrix = hermitian(0.8 ** np.arange(N))

    def loss(m: Any, rtol: Any) -> Any:
        result = estimate(m, KEY, tags, rtol=rtol)
        return result.value, result

    both = jax.value_and_grad(loss, has_aux=True)
    (_, first), _ = both(matrix, 1.0)
    a_little_less, reached = float(1.98 * first.standard_error / first.value), set()
    for rtol in (1.0, a_little_less, 0.0):
        (value, eager), want = both(matrix, rtol)
        (_, traced), gradient = jax.jit(both)(matrix, rtol)
        close(traced.value, value, 1e-12)
        close(traced.standard_error, eager.standard_error, 1e-6, float(jnp.trace(matrix)))
        close(gradient, want, 1e-9)
        assert traced.num_matvecs == eager.num_matvecs
        assert traced.converged
        assert eager.converged
        reached.add(int(eager.num_matvecs))
    close(value, jnp.trace(matrix), 1e-13)
    close(gradient, jnp.eye(N), 1e-13)
    assert len(reached) == 3


@both_tags
def test_a_sketch_that_grew_is_as_good_as_one_in_one_go(tags: Any) -> None:
    """Rank below the probes: exact to rounding, though most of the basis is noise, or a
    part of a block of new columns."""
    i, grown = np.arange(N), jax.jit(lambda m: estimate(m, tags=tags, rtol=0.0, limit=32))
    matrices = [jnp.diag(1.0 * (i < rank)) for rank in (5, 12)]
    matrices += [hermitian((i < 9) * 0.3**i), hermitian(1.0 * (i < 9), np.float32)]
    for matrix in matrices:
        result, eps = grown(matrix), float(jnp.finfo(matrix.dtype).eps)
        assert result.num_matvecs == 32
        close(result.value, jnp.trace(matrix), 1e5 * eps)
        assert result.standard_error < 1e6 * eps


@pytest.mark.parametrize("tags", [(), slow(PSD)])
def test_nan_ends_at_once_and_never_converges(tags: Any) -> None:
    for rtol in (1.0, 0.0, jnp.inf):
        result = estimate(jnp.full((N, N), jnp.nan), tags=tags, rtol=rtol)
        assert not result.converged
        assert result.num_matvecs <= 16
    assert not estimate(jnp.full((8, 8), jnp.nan), tags=tags).converged  # exact at once


def test_budgets_and_tolerances() -> None:
    """The smallest cannot tell their error. Two errors must fit. Operators of zero end.
    The gradient is read from the frozen sketch, so it gives the value (Euler)."""
    matrix = hermitian(spectrum("flat", N))
    for limit, want in ((2, 2), (33, 32), (N, N - 2), (N + 8, N + 8)):
        result = estimate(matrix, rtol=0.0, limit=limit)
        assert result.num_matvecs == want
        assert result.converged == (limit > N)
        assert (result.standard_error > 0) == (limit <= N)
    close(result.value, jnp.trace(matrix), 1e-13)
    assert not estimate(matrix, rtol=0.1, limit=2).converged
    first = estimate(matrix, rtol=1.0)
    want = tx.xtrace(function(matrix), jax.random.fold_in(KEY, 0), 16)
    close((first.value, first.standard_error), (want.value, want.standard_error), 1e-12)
    assert (first.num_matvecs, first.degrees_of_freedom) == (16, 7)
    for share, want in ((2.001, 16), (1.999, 32)):
        error = share * float(first.standard_error)
        for how in ({"rtol": error / float(first.value)}, {"rtol": 0.0, "atol": error}):
            assert estimate(matrix, limit=33, **how).num_matvecs == want
    value = lambda m: estimate(m, rtol=0.0, limit=33).value  # noqa: E731
    close(jnp.sum(jax.grad(value)(matrix) * matrix), value(matrix), 1e-12)
    zero = estimate(0 * matrix, rtol=0.0)
    assert zero.converged
    assert zero.value == 0
    small = estimate(general(9), rtol=0.0, limit=9)
    assert small.num_matvecs == 9
    assert small.standard_error == 0


@pytest.mark.parametrize(("tags", "scale"), [(PSD, 1e-30), slow((), 1e-30), slow((), 1e30)])
def test_any_scale(tags: Any, scale: float) -> None:
    matrix, limit = hermitian(spectrum("poly", N), np.float32), 8 if tags else 32
    run = jax.jit(lambda m: estimate(m, tags=tags, rtol=0.01, limit=limit))
    scaled, plain = run(jnp.float32(scale) * matrix), run(matrix)
    close(scaled.value / scale, plain.value, 1e-4)
    assert scaled.num_matvecs == plain.num_matvecs


@pytest.mark.slow
def test_progress(capfd: pytest.CaptureFixture[str]) -> None:
    matrix, how = hermitian(spectrum("poly", N)), {"rtol": 1e-9, "limit": 64}
    run = lambda: estimate(matrix, progress_meter=diffrax.TextProgressMeter(), **how)  # noqa: E731
    for variant in (run, jax.jit(run)):
        jax.block_until_ready(variant().value)
        jax.effects_barrier()
        first, *_, last = capfd.readouterr().out.split()
        assert (first, last) == ("0.00%", "100.00%")


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
