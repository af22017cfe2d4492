"""Whether probes are what the estimates take them for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact

from traceax._core.checks import check_count
from traceax._core.operator import as_columns, dimension
from traceax._probes.samplers import Sampler
from traceax._testing.report import Report

N, DRAWS = 6, 2000
_TYPES = {"real": jnp.float32, "complex": jnp.complex64}


def check_sampler(
    sampler: Sampler,
    *,
    independent: bool = True,
    same_for_any_cut: bool = True,
    num_probes: int = 3,
) -> None:
    """Check that a sampler draws probes z with E[z z*] = I.

    In six dimensions, real and complex, by 2,000 keys that are always the same ones: that
    shapes and dtypes are right, for vectors as for pytrees; that the same key gives the
    same probes, another one others; that it can be traced; that the mean of z z* is I; that
    probes are independent of each other, as far as E[z_i z_j*] = 0, E|z_i* z_j|^2 = n and
    the covariance of z* B z for a fixed B tell; and that a probe does not depend on how
    the space is cut into leaves. Means are held to six standard errors, computed from the
    draws themselves: a right sampler fails once in millions.

    **Arguments**

    - `sampler`: a function `(key, structure, num_probes) -> probes`, to draw them with
      E[z z*] = I; each leaf has a leading axis of `num_probes`.
    - `independent`: whether probes are to be independent of each other. Default `True`,
      which all estimators but the hutchinson functions and `custom_trace` need; `False` for
      those without replacement, as `orthogonal` and `hadamard`, or in groups, as `probing`.
    - `same_for_any_cut`: whether a probe must be the same, cut into leaves or not. Default
      `True`, as for all samplers of this library: then an estimate does not depend on it,
      either. `False` for those that draw leaf by leaf.
    - `num_probes`: how many to draw at a time, a Python int of at least 2. Default 3; for
      `probing`, its number of colours.

    **Returns** `None`, if nothing is wrong.

    **Raises** `AssertionError` that lists everything that is wrong, and by how much;
    `TypeError` if `sampler` is no function, or `num_probes` no Python int; `ValueError` if
    `num_probes` is below 2.

    **Derivatives**: none.

    **Cost**: 12,000 probes, of each kind; a second or two.

    **Example**

    ```python
    >>> import jax, traceax as tx
    >>> from traceax.testing import check_sampler
    >>> check_sampler(tx.rademacher)
    >>> def repeated(key, structure, num_probes):
    ...     one = tx.rademacher(key, structure, 1)
    ...     return jax.tree.map(lambda leaf: leaf.repeat(num_probes, 0), one)
    >>> try:
    ...     check_sampler(repeated)
    ... except AssertionError as error:
    ...     print("independent" in str(error))
    True

    ```

    **Reference**: none; the moments are those that unbiasedness takes (`hutchinson_trace`)
    and variances are made of.
    """
    if not callable(sampler):
        raise TypeError(
            "traceax.testing.check_sampler(sampler=...) must be a function (key, structure,"
            f" num_probes) -> probes, but got {type(sampler).__name__}. Pass "
            "traceax.rademacher, say."
        )
    if check_count("testing.check_sampler", "num_probes", num_probes) < 2:
        raise ValueError(
            "traceax.testing.check_sampler(num_probes=...) must be at least 2, because one "
            f"says nothing of independence, but got {num_probes}. Pass 3, say."
        )
    report = Report("check_sampler", sampler)
    for name, dtype in _TYPES.items():
        with report.step(name):
            room = independent or 2 * num_probes <= N  # for twice as many to differ
            counts = (num_probes, 2 * num_probes) if room else (num_probes,)
            if _shaped(report, name, sampler, dtype, counts):
                _repeatable(report, name, sampler, dtype, num_probes)
                drawn = _draws(sampler, dtype, num_probes)
                _isotropic(report, name, drawn)
                if independent:
                    _independent(report, name, drawn)
                if same_for_any_cut:
                    _same_for_any_cut(report, name, sampler, dtype, num_probes)
    report.conclude()


def _structures(dtype: Any) -> list[Any]:
    """One space of six dimensions, cut in three ways."""
    leaf = jax.ShapeDtypeStruct
    halves = {"a": leaf((3,), dtype), "b": leaf((3,), dtype)}
    return [halves, leaf((N,), dtype), (leaf((), dtype), leaf((5, 1), dtype))]


def _shaped(
    report: Report, name: str, sampler: Sampler, dtype: Any, counts: tuple[int, ...]
) -> bool:
    key, right = jax.random.key(0), True
    for structure in _structures(dtype):
        for count in counts:
            got = jax.eval_shape(lambda key, s=structure, c=count: sampler(key, s, c), key)
            want = jax.tree.map(
                lambda leaf, c=count: jax.ShapeDtypeStruct((c, *leaf.shape), leaf.dtype),
                structure,
            )
            if jax.tree.structure(got) != jax.tree.structure(want) or any(
                (one.shape, one.dtype) != (other.shape, other.dtype)
                for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True)
            ):
                report.add(
                    f"{name} probes: shape and dtype of {count} must be {want}, but are "
                    f"{got}. Draw every leaf as (num_probes, *leaf.shape), leaf.dtype."
                )
                right = False
    return right


def _columns(sampler: Sampler, key: Any, structure: Any, k: int) -> Inexact[Array, "n k"]:
    dtype = jax.tree.leaves(structure)[0].dtype
    return as_columns(sampler(key, structure, k), dtype)


def _repeatable(report: Report, name: str, sampler: Sampler, dtype: Any, k: int) -> None:
    structure = _structures(dtype)[0]
    keys = [jax.random.key(1), jax.random.key(1), *map(jax.random.key, range(2, 22))]
    first, again, *others = (_columns(sampler, key, structure, k) for key in keys)
    if not np.array_equal(first, again):
        report.add(f"{name} probes: the same key gives others. Draw by the key alone.")
    if all(np.array_equal(first, other) for other in others):
        report.add(f"{name} probes: every key gives the same. Draw by the key.")


def _draws(sampler: Sampler, dtype: Any, k: int) -> Inexact[np.ndarray, "draws n k"]:
    keys = jax.random.split(jax.random.key(7), DRAWS)
    structure = _structures(dtype)[0]
    draw = jax.jit(jax.vmap(lambda key: _columns(sampler, key, structure, k)))
    exact = np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64
    return np.asarray(draw(keys)).astype(exact)


def _mean_is(report: Report, name: str, samples: Any, want: Any, cure: str) -> None:
    """The mean over draws, to six standard errors and the rounding of single precision."""
    spread = np.std(samples, axis=0) / len(samples) ** 0.5
    room = 6 * spread + 1e-5 * np.max(np.abs(samples), initial=1.0)
    report.close(name, np.mean(samples, axis=0), want, room, cure)


def _isotropic(report: Report, name: str, drawn: Any) -> None:
    outer = np.einsum("rik,rjk->rij", drawn, drawn.conj()) / drawn.shape[2]
    cure = (
        "Scale them, draw entries independently, and each leaf with a key of its own; of "
        "complex entries E|z|^2 = 1, and phases are turned evenly."
    )
    _mean_is(report, f"{name} probes: E[z z*] = I", outer, np.eye(drawn.shape[1]), cure)


def _independent(report: Report, name: str, drawn: Any) -> None:
    n, k = drawn.shape[1:]
    if k < 2:
        return
    one, two = drawn[:, :, :-1], drawn[:, :, 1:]
    cure = (
        "Draw each probe anew. If they are to exclude each other, pass independent=False."
    )
    name = f"{name} probes: independent"
    cross = np.einsum("rik,rjk->rijk", one, two.conj())
    _mean_is(report, f"{name}, E[z_i z_j*] = 0", cross, 0.0, cure)
    squares = np.abs(np.einsum("rik,rik->rk", one.conj(), two)) ** 2
    _mean_is(report, f"{name}, E|z_i* z_j|^2 = n", squares, float(n), cure)
    weights = np.diag(np.arange(1.0, n + 1)) + 0.3
    forms = np.einsum("rik,ij,rjk->rk", drawn.conj(), weights, drawn).real
    forms = forms - np.mean(forms, axis=0)
    _mean_is(report, f"{name}, cov(z* B z) = 0", forms[:, :-1] * forms[:, 1:], 0.0, cure)


def _same_for_any_cut(
    report: Report, name: str, sampler: Sampler, dtype: Any, k: int
) -> None:
    key = jax.random.key(3)
    one, *others = (_columns(sampler, key, s, k) for s in _structures(dtype))
    cure = (
        "Draw one vector for the whole space and cut it, or pass same_for_any_cut=False if "
        "leaves have keys of their own."
    )
    size = dimension(_structures(dtype)[0])
    for other in others:
        name_of = f"{name} probes: the same for any cut of {size} dimensions into leaves"
        report.close(name_of, other, one, 1e-5, cure)
