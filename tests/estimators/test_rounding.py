"""The part of an error bar that is rounding, where it is nearly all of the bar."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close
from tests.matrices import general, hermitian
from tests.wrappers import PSD, function
from traceax._core.operator import LinearMap
from traceax._estimators import krylov_nystrom as nystrom
from traceax._estimators import second_batch
from traceax._estimators.readouts import LeafSums, each, leave_one_out
from traceax._estimators.xdiag import xdiag_samples, xnysdiag_samples
from traceax._estimators.xtrace import xtrace_of

KEY, N, K, EPS = jax.random.key(3), 12, 5, 1e9
NOISE = 7e8


def signs(dtype: Any) -> Any:
    return tx.rademacher(KEY, jax.ShapeDtypeStruct((N,), dtype), K).T


@pytest.mark.parametrize("dtype", [float, complex])
def test_sketches(dtype: Any) -> None:
    """Of XTrace: tr H and the remainders, or a share of the sketch. Of XDiag: the lengths
    of the rows of Q and A* Q, the samples, and a share of all entries."""
    matrix, probes = general(N, dtype), signs(dtype)
    loo = leave_one_out(matrix @ probes, probes, resphere=False)
    q = loo.basis.columns
    _, error = xtrace_of(loo, matrix @ q, EPS)
    h = np.linalg.norm(q.conj().T @ matrix @ q)
    remainders = []
    for i in range(K):
        sketch = np.delete(np.asarray(matrix @ probes), i, axis=1)
        basis = np.linalg.qr(sketch)[0]
        mu = probes[:, i] - basis @ (basis.conj().T @ probes[:, i])
        remainders.append(abs(np.vdot(mu, matrix @ mu)))
    least = np.linalg.norm(matrix @ probes) / K**0.5
    assert h + np.mean(remainders) > least
    close(error, 4 * EPS * (h + np.mean(remainders)), 1e-6)

    image = matrix.conj().T @ q
    found = xdiag_samples(loo, image, EPS, each, False)
    image = np.asarray(image) / float(found.scale)
    rows = (np.linalg.norm(block, axis=1) for block in (q, image))
    whole = np.linalg.norm(image) / N
    samples = np.mean(np.abs(np.asarray(found.values)), axis=1)
    close(found.rounding, 4 * EPS * (np.prod([*rows], axis=0) + samples + whole), 1e-12)


def test_semidefinite_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding, and three times the noise of matvecs that the core shows."""
    matrix, probes = hermitian(1.0 + np.arange(N)), signs(float)
    known = nystrom.products_of_sketch(matrix @ probes, probes)
    both = known.fits(known.test)
    both = both._replace(noise=jnp.array([NOISE, 0.0]))
    fitted = jax.tree.map(lambda leaf: leaf[0], both)
    monkeypatch.setattr(nystrom.Products, "fits", lambda self, *more: both)
    monkeypatch.setattr(nystrom.Products, "eps", EPS)
    value, error, _ = nystrom.value_and_error(known, resphere=False)
    noise = 3 * NOISE * known.scale
    close(error, 4 * EPS * K**0.5 * value + noise, 1e-6)

    rows = np.linalg.norm(fitted.left, axis=1) ** 2
    rounding = xnysdiag_samples(known, fitted).rounding
    close(rounding, 4 * EPS * (rows + rows.mean()) + 3 * NOISE / N, 1e-12)

    share = float(second_batch.shared_weights(known, fitted).mean())
    assert 0.05 < share < 0.95
    run = second_batch.mixed_diagonal(LinearMap(function(matrix, PSD)), (probes,))
    forms = 4 * EPS * np.abs(probes * known.sketch).mean(axis=1)
    close(run.standard_error, known.scale * (share * rounding + (1 - share) * forms), 1e-6)

    leaves = LeafSums((4, 8), (0, 1))
    values, errors = nystrom.leaf_by_leaf(known, jnp.ones(K), leaves)
    shares = np.array([4, 8]) / N
    expected = shares * (4 * EPS * sum(values) + noise) + 4 * EPS * abs(values)
    close(errors, expected, 1e-6)
