"""Traces to a tolerance."""

import functools
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, refused, slow
from tests.matrices import general, hermitian, spectrum
from tests.wrappers import PSD, function, matrix_free
from traceax._linalg.basis import extend, orthonormalise

KEY = jax.random.key(4)
N = 70  # not exact at once


def estimate(
    matrix: Any, key: Any = KEY, tags: Any = (), *, limit: Any = 100, **options: Any
) -> Any:
    return tx.adaptive_trace(function(matrix, tags), key, max_matvecs=limit, **options)


@functools.cache
def runs(kind: str, name: str, tolerance: float) -> Any:
    """200 keys: the compiled function takes the tolerance as an array."""
    matrix = hermitian(np.abs(spectrum(name, N)) + 1e-9)
    return compiled(kind)(matrix, jax.random.split(KEY, 200), tolerance), jnp.trace(matrix)


@functools.cache
def compiled(kind: str) -> Any:
    tags = PSD if kind == "semidefinite" else ()
    run = lambda m, key, rtol: estimate(m, key, tags, limit=64, rtol=rtol)  # noqa: E731
    # One after the other: `vmap` would run every size.
    return jax.jit(lambda m, keys, rtol: jax.lax.map(lambda k: run(m, k, rtol), keys))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["general", "semidefinite"])
def test_it_rarely_fails(kind: str) -> None:
    """Over spectra and tolerances, at most 5 % of the answers that claim to be within a
    tolerance are not; and they spend what the tolerance asks for."""
    for name in ("flat", "poly", "exp", "step"):
        spent = []
        for tolerance in (1e-1, 1e-2, 1e-3):
            results, truth = runs(kind, name, tolerance)
            claimed = np.asarray(results.converged)
            missed = np.abs(results.value / truth - 1) > tolerance
            # Of 200: 5 % is 10, and four standard deviations are 12.
            assert np.sum(claimed & missed) <= 10 + 12, (name, tolerance)
            spent.append(float(np.mean(results.num_matvecs)))
            assert np.all(results.num_matvecs <= 64)
        assert spent == sorted(spent)
    # Not by never claiming anything:
    assert np.mean(runs(kind, "exp", 1e-2)[0].converged) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("tags", [(), PSD])
def test_compiled_and_not_compiled_agree(tags: Any) -> None:
    """Values, gradients and what is spent, at every size, up to exactness."""
    matrix = hermitian(0.95 ** np.arange(N))
    loss = lambda m, rtol: estimate(m, KEY, tags, rtol=rtol).value  # noqa: E731
    both = jax.jit(jax.value_and_grad(loss))
    whole = jax.jit(lambda m, rtol: estimate(m, KEY, tags, rtol=rtol))
    reached = set()
    for rtol in (1.0, 0.15, 0.0):
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


def test_probes_and_products_are_used_again() -> None:
    """Every column goes through the operator once: it is applied num_matvecs times."""
    seen = []

    def counted(v: Any) -> Any:
        def note(block: Any) -> Any:
            seen.append(block.size // N)
            return block

        shape = jax.ShapeDtypeStruct((N,), v.dtype)
        v = jax.pure_callback(note, shape, v, vmap_method="broadcast_all")
        return matrix @ v

    matrix = general(N)
    result = tx.adaptive_trace(matrix_free(counted, N), KEY, rtol=1e-9, max_matvecs=64)
    assert not result.converged
    assert result.num_matvecs == 64
    assert sum(seen) == 64


@pytest.mark.parametrize("dtype", [slow(np.float32), np.float64])
@pytest.mark.parametrize("rank", [9, 12, 20])
def test_a_basis_that_grew_is_orthonormal(rank: int, dtype: Any) -> None:
    """Also where only a part of a block of new columns is new."""
    eps = float(jnp.finfo(dtype).eps)
    for matrix in (
        np.diag((np.arange(N) < rank) * 1.0),
        hermitian((np.arange(N) < rank) * 1.0),
        hermitian(0.3 ** np.arange(N)),
    ):
        probes = jax.random.normal(KEY, (N, 32), dtype)
        sketch = jnp.asarray(matrix, dtype) @ probes
        basis = orthonormalise(sketch[:, :8])
        for low, high in ((8, 16), (16, 32)):
            basis = extend(basis, sketch[:, low:high], probes[:, low:high])
        q = basis.columns
        close(q.T @ q, jnp.eye(32), 50 * eps)
        close(basis.scale * q @ basis.factor, sketch, 100 * eps)


@pytest.mark.slow
def test_a_sketch_that_grew_is_as_good_as_one_in_one_go() -> None:
    """Rank below the probes: exact to rounding, though most of the basis is noise."""
    matrix = jnp.diag(jnp.asarray(spectrum("rank5", N)))
    for tags in ((), PSD):
        grown = jax.jit(lambda m, tags=tags: estimate(m, tags=tags, rtol=0.0, limit=32))
        twelve = grown(jnp.diag(jnp.asarray(np.arange(N) < 12, float)))
        close(twelve.value, 12.0, 1e-11)
        result = grown(matrix)
        assert result.num_matvecs == 32
        close(result.value, 5.0, 1e-11)
        assert result.standard_error < 1e-10
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
    """`max_matvecs` is never exceeded; the smallest cannot tell their error. Tolerances and
    operators of zero end."""
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


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_any_scale(scale: float) -> None:
    matrix = hermitian(spectrum("poly", N), np.float32)
    run = jax.jit(lambda m: estimate(m, rtol=0.01, limit=32))
    scaled, plain = run(jnp.float32(scale) * matrix), run(matrix)
    close(scaled.value / scale, plain.value, 1e-4)
    assert scaled.num_matvecs == plain.num_matvecs


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
