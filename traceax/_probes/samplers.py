"""Probes: random vectors z with E[z z*] = I.

A sampler is a function `(key, structure, num_probes) -> probes`: `structure` is the
operator's input structure, and each leaf of `probes` has a leading axis of `num_probes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree

from traceax._core.checks import check_count, check_key
from traceax._core.operator import Structure, common_dtype, cut, dimension
from traceax._linalg import lapack
from traceax._linalg.basis import orthonormalise


def space(
    name: str, key: object, structure: Structure, num_probes: object
) -> tuple[int, jnp.dtype]:
    """Dimension and dtype of the columns that probes are cut from: one draw for all leaves,
    so that a probe does not depend on how the space is cut into leaves."""
    check_key(name, key)
    if check_count(name, "num_probes", num_probes) < 1:
        raise ValueError(
            f"traceax.{name}(num_probes=...) must be at least 1, but got {num_probes}. "
            "Pass as many as are to be drawn."
        )
    leaves = jax.tree.leaves(structure)
    kinds = [getattr(leaf, "dtype", None) for leaf in leaves]
    if not leaves or not all(k and jnp.issubdtype(k, jnp.inexact) for k in kinds):
        raise TypeError(
            f"traceax.{name}(structure=...) must be a pytree of jax.ShapeDtypeStruct of "
            "real or complex dtypes, because probes are drawn like it, but got "
            f"{structure!r}. Pass operator.in_structure(), or "
            "jax.ShapeDtypeStruct((n,), float)."
        )
    return dimension(structure), common_dtype(structure)


Sampler = Callable[[PRNGKeyArray, Structure, int], PyTree[Inexact[Array, "..."]]]


def rademacher(key: PRNGKeyArray, structure: Structure, num_probes: int) -> PyTree[Array]:
    """Probes of independent random signs; for complex leaves, random phases (Steinhaus).

    Every entry has modulus 1, so a diagonal operator's trace is exact from one probe.
    Variance of one quadratic form z* A z: 2 ||off(A)||_F^2 for a real symmetric A,
    ||off(A)||_F^2 for complex probes, where off(A) is A without its diagonal.

    **Arguments** `key`, `structure`, `num_probes` and the errors are those of all samplers:
    see the guide's conventions.

    **Cost**: one random bit an entry; for complex leaves, a number.

    **Example**

        >>> import jax, traceax as tx
        >>> structure = jax.ShapeDtypeStruct((5,), jax.numpy.float32)
        >>> tx.rademacher(jax.random.key(0), structure, 3).shape
        (3, 5)

    **Reference**: Hutchinson (1989), Communications in Statistics 18(3); Girard (1989),
    Numerische Mathematik 56.
    """

    n, dtype = space("rademacher", key, structure, num_probes)
    return cut(_signs(key, n, num_probes, dtype), structure)


def normal(key: PRNGKeyArray, structure: Structure, num_probes: int) -> PyTree[Array]:
    """Probes of independent standard normal entries; for complex leaves, E|z|^2 = 1.

    Variance of one quadratic form z* A z: 2 ||A||_F^2 for a real symmetric A, ||A||_F^2 for
    complex probes. Because their length is random they are never better than `sphere`.

    **Arguments** `key`, `structure`, `num_probes` and the errors are those of all samplers:
    see the guide's conventions.

    **Cost**: one random number an entry, in single precision.

    **Example**

        >>> import jax, traceax as tx
        >>> structure = jax.ShapeDtypeStruct((5,), jax.numpy.float32)
        >>> tx.normal(jax.random.key(0), structure, 3).shape
        (3, 5)

    **Reference**: Girard (1989), Numerische Mathematik 56.
    """

    n, dtype = space("normal", key, structure, num_probes)
    return cut(_gaussian(key, n, num_probes, dtype), structure)


def sphere(key: PRNGKeyArray, structure: Structure, num_probes: int) -> PyTree[Array]:
    """Probes uniform on the sphere of radius sqrt(n), n the size of the whole pytree.

    Their distribution is invariant under rotations, so that estimators may rescale
    projected probes to their expected length ("resphering"). Variance of one quadratic form
    z* A z: 2n/(n+2) (||A||_F^2 - |tr A|^2/n) for a real symmetric A, 0 for multiples of I.

    **Arguments** `key`, `structure`, `num_probes` and the errors are those of all samplers:
    see the guide's conventions.

    **Cost**: one random number an entry, in single precision.

    **Example**

        >>> import jax, traceax as tx
        >>> structure = jax.ShapeDtypeStruct((5,), jax.numpy.float32)
        >>> probes = tx.sphere(jax.random.key(0), structure, 3)
        >>> bool(jax.numpy.allclose((probes**2).sum(1), 5.0))
        True

    **Reference**: Epperly, Tropp and Webber (2024), XTrace, section 2.3,
    doi:10.1137/23M1548323.
    """
    n, dtype = space("sphere", key, structure, num_probes)
    return cut(_on_sphere(key, n, num_probes, dtype), structure)


def orthogonal(key: PRNGKeyArray, structure: Structure, num_probes: int) -> PyTree[Array]:
    """Probes that are sqrt(n) times orthonormal columns, uniformly distributed (Haar).

    Each is uniform on the sphere; because they are orthogonal, the variance of a Hutchinson
    mean is multiplied by (n - num_probes)/(n - 1). They are dependent, so the leave-one-out
    estimators raise an error.

    **Arguments** `key`, `structure` and `num_probes` (at most n) and the errors are those
    of all samplers: see the guide's conventions.

    **Cost**: one random number an entry, in single precision, and an orthonormal basis, 4
    to 9 n num_probes^2 flops.

    **Example**

        >>> import jax, traceax as tx
        >>> structure = jax.ShapeDtypeStruct((5,), jax.numpy.float32)
        >>> probes = tx.orthogonal(jax.random.key(0), structure, 3)
        >>> bool(jax.numpy.allclose(probes @ probes.T, 5.0 * jax.numpy.eye(3), atol=1e-5))
        True

    **Reference**: Mezzadri (2007), How to generate random matrices from the classical
    compact groups, Notices of the AMS 54(5).
    """
    n, dtype = space("orthogonal", key, structure, num_probes)
    if num_probes > n:
        raise ValueError(
            f"traceax.orthogonal(num_probes=...) must be at most {n}, the dimension of the "
            f"space, but got {num_probes}. Draw fewer, or use traceax.sphere."
        )
    return cut(_frame(key, n, num_probes, dtype), structure)


def _signs(key: PRNGKeyArray, n: int, k: int, dtype: jnp.dtype) -> Inexact[Array, "k n"]:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        turns = jax.random.uniform(key, (k * n,), jnp.finfo(dtype).dtype)
        angles = 2 * math.pi * turns.reshape(k, n)
        return jax.lax.complex(jnp.cos(angles), jnp.sin(angles))
    # A sign for every bit: of the time, drawing is all but a tenth.
    words = jax.random.bits(key, (k * -(-n // 32),), jnp.uint32)
    bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None, :]) & 1
    return 1 - 2 * bits.reshape(k, -1)[:, :n].astype(dtype)


def _gaussian(key: PRNGKeyArray, n: int, k: int, dtype: jnp.dtype) -> Inexact[Array, "k n"]:
    """In single precision, whose grain no estimate can show: half the time of double.

    Drawn as one long vector: the same numbers, but compiled four times as fast, because the
    compiler unrolls loops over a short last axis. And as if there were a choice, of all
    keys at once: elsewhere it would turn uniform numbers into normal ones anew wherever
    these are used.
    """
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    single = jnp.complex64 if is_complex else jnp.float32

    def drawn(key: PRNGKeyArray) -> Array:
        return jax.random.normal(key, (k * n,), single).reshape(k, n)

    def chosen(draw: Callable[[Array], Array], keys: Array) -> Array:
        always = jnp.max(jax.random.key_data(keys)) | 1 != 0
        nothing = jnp.zeros(jax.eval_shape(draw, keys).shape, single)
        return jax.lax.cond(always, draw, lambda _: nothing, keys)

    one = custom_vmap(partial(chosen, drawn))
    one.def_vmap(lambda _, __, keys: (chosen(jax.vmap(drawn), keys), True))
    return one(key).astype(dtype)


def _on_sphere(
    key: PRNGKeyArray, n: int, k: int, dtype: jnp.dtype
) -> Inexact[Array, "k n"]:
    rows = _gaussian(key, n, k, dtype)
    return rows * (math.sqrt(n) / jnp.linalg.norm(rows, axis=1, keepdims=True))


def _frame(key: PRNGKeyArray, n: int, k: int, dtype: jnp.dtype) -> Inexact[Array, "k n"]:
    basis = orthonormalise(_gaussian(key, n, k, dtype).T)
    turn, triangle = lapack.qr(basis.factor)
    diagonal = jnp.diagonal(triangle)
    turn = turn * (math.sqrt(n) * diagonal / jnp.abs(diagonal))[None, :]
    return (basis.columns @ turn).T
