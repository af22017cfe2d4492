"""Signs without replacement: rows of a Hadamard matrix, at random.

A Hadamard matrix H of order m has entries of modulus 1 and orthogonal columns. Take k of
its rows r without replacement, its first n columns, and turn each column by a random sign:

    z_r = d o H[r, :n],      sum over all m rows of z_r* A z_r = m tr A   for any signs d.

So given d the samples z_r* A z_r are drawn from a finite population of mean tr A, and their
mean has the variance of a survey, (m - k)/(m - 1) of what independent signs have, term by
term: E (1/k sum_r H_ra H_rb)^2 = (m - k)/(k (m - 1)) for every pair a != b, and signs of
different pairs are uncorrelated. Like signs they are blind to the diagonal.

Orders: Paley's, q + 1 for primes q = 3 mod 4, by Legendre symbols; and by Kronecker
products with [[1, 1], [1, -1]] their products with powers of 2: 13 dimensions take 16, 49
take 60, 100 take 104, 1000 take 1024.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, Int, PRNGKeyArray, PyTree

from traceax._core.operator import Structure, cut
from traceax._probes.space import space

_PRIMES = (3, 11, 19, 43, 59, 67, 71, 83, 103, 107)


def hadamard(key: PRNGKeyArray, structure: Structure, num_probes: int) -> PyTree[Array]:
    """Probes of random signs that exclude each other: randomly signed rows of a Hadamard
    matrix, drawn without replacement; for complex leaves, with random phases.

    Of order m, the least from n on that is easily had (64 for 64, 104 for 100, 1024 for
    1000): they multiply the variance of a Hutchinson mean of signs by
    (m - num_probes)/(m - 1), whatever the operator, and like signs they are exact for
    diagonal ones. Worth having where there are probes for a good part of the dimensions:
    half the variance with half as many. They are dependent, so the leave-one-out estimators
    refuse them.

    **Arguments**

    - `key`: a JAX random key.
    - `structure`: a pytree of `jax.ShapeDtypeStruct`, inexact dtypes.
    - `num_probes`: how many probes to draw, a Python int of at most m.

    **Returns** a pytree like `structure`, each leaf with a leading axis `num_probes`, in
    the leaf's dtype.

    **Raises** `ValueError` if `num_probes` exceeds m, because there are no more rows, or is
    below 1; `TypeError` if `key` is not a random key, `num_probes` not a Python int, or a
    dtype of `structure` neither real nor complex.

    **Derivatives**: none; the probes depend on the key alone.

    **Cost**: one random bit a dimension, a random order of m rows, and a sign an entry that
    is worked out.

    **Example**

    ```python
    >>> import jax, traceax as tx
    >>> structure = jax.ShapeDtypeStruct((12,), jax.numpy.float32)
    >>> probes = tx.hadamard(jax.random.key(0), structure, 3)
    >>> print(probes @ probes.T)
    [[12.  0.  0.]
     [ 0. 12.  0.]
     [ 0.  0. 12.]]

    ```

    **Reference**: Paley (1933), On orthogonal matrices, Journal of Mathematics and Physics
    12; for probes without random choice, Bekas, Kokiopoulou and Saad (2007), An estimator
    for the diagonal of a matrix, doi:10.1016/j.apnum.2007.01.003.
    """
    n, dtype = space("hadamard", key, structure, num_probes)
    if num_probes > order(n):
        raise ValueError(
            f"traceax.hadamard(num_probes=...) must be at most {order(n)}, the order of "
            f"the Hadamard matrix for {n} dimensions, but got {num_probes}. Draw fewer, or "
            "use traceax.rademacher."
        )
    return cut(_rows(key, n, num_probes, dtype), structure)


def order(n: int) -> int:
    """Of the Hadamard matrix for n dimensions."""
    return _factors(n)[0] << _factors(n)[1]


@lru_cache(maxsize=256)
def _factors(n: int) -> tuple[int, int]:
    """Paley's order and the power of 2 whose product is least, but at least n."""
    bases = (1, *(q + 1 for q in _PRIMES))
    powers = [max(0, math.ceil(math.log2(n / base))) for base in bases]
    return min(zip(bases, powers, strict=True), key=lambda pair: pair[0] << pair[1])


@lru_cache(maxsize=16)
def _paley(base: int) -> Int[np.ndarray, "b b"]:
    """I + [[0, 1'], [-1, Q]] with Q_ij the Legendre symbol of i - j."""
    if base == 1:
        return np.ones((1, 1), int)
    q = base - 1
    symbols = np.full(q, -1)
    symbols[np.arange(1, q) ** 2 % q] = 1
    symbols[0] = 0
    matrix = np.eye(base, dtype=int)
    matrix[0, 1:], matrix[1:, 0] = 1, -1
    places = np.arange(q)
    matrix[1:, 1:] += symbols[(places[:, None] - places) % q]
    return matrix


@partial(jax.jit, static_argnames=("n", "k", "dtype"))
def _rows(key: PRNGKeyArray, n: int, k: int, dtype: jnp.dtype) -> Inexact[Array, "k n"]:
    base, power = _factors(n)
    which, turn = jax.random.split(key)
    rows = jax.random.permutation(which, base << power)[:k]
    columns, low = jnp.arange(n), (1 << power) - 1
    signs = jnp.asarray(_paley(base))[(rows >> power)[:, None], columns >> power]
    both = (rows & low)[:, None] & (columns & low)
    signs = jnp.where(jax.lax.population_count(both) & 1, -signs, signs)
    return signs * _turns(turn, n, dtype)


def _turns(key: PRNGKeyArray, n: int, dtype: jnp.dtype) -> Inexact[Array, " n"]:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        angles = 2 * math.pi * jax.random.uniform(key, (n,), jnp.finfo(dtype).dtype)
        return jax.lax.complex(jnp.cos(angles), jnp.sin(angles))
    return jax.random.rademacher(key, (n,), dtype)
