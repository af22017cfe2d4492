"""The leave-one-out estimators against loops that really leave one out, and means over all
sign vectors, which prove unbiasedness."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import (
    ESTIMATORS,
    PSD,
    Entry,
    as_semidefinite,
    close,
    function,
    hermitian,
    spectrum,
    suitable,
)

KEY = jax.random.key(11)

# The leave-one-out estimators against loops that really leave one out.


def projector(block: np.ndarray) -> np.ndarray:
    basis, _ = np.linalg.qr(block)
    return basis @ basis.conj().T


def xtrace_by_loop(matrix: np.ndarray, probes: np.ndarray, resphere: bool) -> np.ndarray:
    n, k = probes.shape
    samples = []
    for i in range(k):
        others = np.delete(probes, i, axis=1)
        p = projector(matrix @ others) if k > 1 else np.zeros((n, n))
        mu = probes[:, i] - p @ probes[:, i]
        scale = (n - k + 1) / np.vdot(mu, mu).real if resphere else 1.0
        samples.append(np.trace(p @ matrix @ p) + scale * np.vdot(mu, matrix @ mu))
    return np.array(samples)


def xnystrace_by_loop(matrix: np.ndarray, probes: np.ndarray, resphere: bool) -> np.ndarray:
    n, k = probes.shape
    samples = []
    for i in range(k):
        others = np.delete(probes, i, axis=1)
        sketch = matrix @ others
        core = np.linalg.pinv(others.conj().T @ sketch, hermitian=True)
        low = sketch @ core @ sketch.conj().T
        w = probes[:, i]
        mu = w - projector(others) @ w if k > 1 else w
        scale = (n - k + 1) / np.vdot(mu, mu).real if resphere else 1.0
        samples.append((np.trace(low) + scale * np.vdot(w, (matrix - low) @ w)).real)
    return np.array(samples)


Loop = Callable[[np.ndarray, np.ndarray, bool], np.ndarray]
LOOPS: dict[str, tuple[Callable[..., tx.Estimate], Loop, int]] = {
    "xtrace": (tx.xtrace, xtrace_by_loop, 2),
    "xnystrace": (tx.xnystrace, xnystrace_by_loop, 1),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("sampler", [tx.sphere, tx.normal, tx.rademacher])
@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_leave_one_out(name: str, dtype: Any, sampler: Any, k: int) -> None:
    """Estimates equal those of the loop; the error is the jackknife's, recomputed from
    scratch without each probe in turn."""
    estimate, loop, cost = LOOPS[name]
    n = 30
    matrix = hermitian(spectrum("poly", n), dtype)
    if name == "xtrace":
        matrix = matrix + 0.3 * jnp.triu(matrix)
    operator = lx.MatrixLinearOperator(matrix, PSD if name == "xnystrace" else ())
    got = estimate(operator, KEY, cost * k, sampler=sampler)
    dense = np.asarray(matrix)
    probes = np.asarray(sampler(KEY, jax.ShapeDtypeStruct((n,), matrix.dtype), k)).T
    resphere = sampler is not tx.rademacher
    samples = loop(dense, probes, resphere)
    close(got.value, samples.mean(), 1e-11)
    if k == 1:
        assert got.standard_error == jnp.inf
        return
    if k == 2:
        spread = np.abs(samples - samples.mean())
        close(got.standard_error, np.sqrt((spread**2).sum() / 2), 1e-11)
        return
    replicates = [
        loop(dense, np.delete(probes, i, axis=1), resphere).mean() for i in range(k)
    ]
    spread = np.abs(np.array(replicates) - np.mean(replicates))
    close(got.standard_error, np.sqrt((k - 1) / k * (spread**2).sum()), 1e-9)


@pytest.mark.parametrize("name", LOOPS)
def test_probes_are_exchangeable(name: str) -> None:
    """A permutation of the probes changes nothing."""
    estimate, _, cost = LOOPS[name]
    operator = lx.MatrixLinearOperator(hermitian(spectrum("poly", 30)), PSD)
    probes = tx.rademacher(KEY, operator.in_structure(), 7)
    one = estimate(operator, KEY, 7 * cost, sampler=lambda *_: probes)
    other = estimate(operator, KEY, 7 * cost, sampler=lambda *_: probes[::-1])
    close(one.value, other.value, 1e-13)
    close(one.standard_error, other.standard_error, 1e-9)


# Exact expectations: the mean over all sign vectors.


def all_signs(count: int) -> Any:
    return jnp.asarray(list(itertools.product([-1.0, 1.0], repeat=count)))


def enumerated(entry: Entry, n: int, budget: int, loose: int) -> tuple[Any, Any, Any]:
    """Mean value, gradient and Hessian by theta of A(theta) = A0 + theta A1 + theta^2 A2,
    over all signs of the last `loose` probes drawn; the others are fixed."""
    matrices = [suitable(entry, n, seed=seed) for seed in range(3)]
    fixed = jax.random.rademacher(KEY, (64, n), float)

    def outcome(signs: Any) -> Any:
        drawn = iter(jnp.split(signs.reshape(loose, n), loose))

        def sampler(key: Any, structure: Any, num_probes: int) -> Any:
            nonlocal left
            rows = []
            for _ in range(num_probes):
                rows.append(next(drawn)[0] if left <= loose else fixed[left])
                left -= 1
            return jnp.stack(rows)

        def value(theta: Any) -> Any:
            nonlocal left, drawn
            left = total
            drawn = iter(jnp.split(signs.reshape(loose, n), loose))
            matrix = matrices[0] + theta * matrices[1] + theta**2 * matrices[2]
            operator = as_semidefinite(entry, function(matrix))
            return entry.estimate(operator, KEY, budget, sampler=sampler).value

        return value(0.7), jax.grad(value)(0.7), jax.grad(jax.grad(value))(0.7)

    left = 0
    total = {"xtrace": budget // 2}.get(entry.name, budget)
    if entry.name == "hutchpp_trace":
        total = budget - budget // 3
    means = [
        jnp.mean(x)
        for x in jax.jit(lambda s: jax.lax.map(outcome, s))(all_signs(loose * n))
    ]
    traces = [jnp.trace(matrix) for matrix in matrices]
    truth = [
        traces[0] + 0.7 * traces[1] + 0.49 * traces[2],
        traces[1] + 1.4 * traces[2],
        2 * traces[2],
    ]
    return means, truth, traces


@pytest.mark.parametrize(
    ("name", "n", "budget", "loose"),
    [
        ("hutchinson_trace", 5, 2, 2),
        ("xtrace", 4, 2, 1),
        ("xtrace", 5, 4, 2),
        ("hutchpp_trace", 5, 3, 2),
        ("na_hutchpp_trace", 5, 4, 1),
        ("xnystrace", 4, 1, 1),
    ],
)
def test_unbiased_by_enumeration(name: str, n: int, budget: int, loose: int) -> None:
    """Value, first and second derivative."""
    (entry,) = (entry for entry in ESTIMATORS if entry.name == name)
    means, truth, _ = enumerated(entry, n, budget, loose)
    close(jnp.stack(means), jnp.stack(truth), 1e-12)
