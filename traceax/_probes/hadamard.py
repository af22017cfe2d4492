"""Signs without replacement: rows of a Hadamard matrix, at random.

A Hadamard matrix H of order m has entries of modulus 1 and orthogonal columns. Take k of
its rows r without replacement, its first n columns, and turn each column by a random sign:

    z_r = d o H[r, :n],      sum over all m rows of z_r* A z_r = m tr A   for any signs d.

So given d the samples z_r* A z_r are drawn from a finite population of mean tr A, and their
mean has the variance of a survey, (m - k)/(m - 1) of what independent signs have, term by
term: E (1/k sum_r H_ra H_rb)^2 = (m - k)/(k (m - 1)) for every pair a != b, and signs of
different pairs are uncorrelated. Like signs they are blind to the diagonal.

The matrix is Sylvester's: H_rc = (-1)^(number of ones that r and c have in common in
binary), whose order is a power of 2.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree

from traceax._core.operator import Structure, cut
from traceax._probes.samplers import space


def hadamard(key: PRNGKeyArray, structure: Structure, num_probes: int) -> PyTree[Array]:
    """Randomly signed rows of a Hadamard matrix, drawn without replacement.

    For complex leaves the signs are random phases. The order m of the matrix is the least
    power of 2 from n on. The variance of a Hutchinson mean of signs is multiplied by
    (m - num_probes)/(m - 1), and like signs they are exact for diagonal operators. They
    help if there are probes for a good part of the dimensions. They are dependent, so the
    leave-one-out estimators raise an error.

    **Arguments** `key`, `structure` and `num_probes` (at most m) and the errors are those
    of all samplers: see the guide's conventions.

    **Cost**: one random bit a dimension, a random order of m rows, and a sign an entry.

    **Example**

        >>> import jax, traceax as tx
        >>> structure = jax.ShapeDtypeStruct((16,), jax.numpy.float32)
        >>> probes = tx.hadamard(jax.random.key(0), structure, 3)
        >>> print(probes @ probes.T)
        [[16.  0.  0.]
         [ 0. 16.  0.]
         [ 0.  0. 16.]]

    **Reference**: Bekas, Kokiopoulou and Saad (2007), An estimator for the diagonal of a
    matrix, doi:10.1016/j.apnum.2007.01.003, for rows without random choice.
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
    return 1 << (n - 1).bit_length()


def _rows(key: PRNGKeyArray, n: int, k: int, dtype: jnp.dtype) -> Inexact[Array, "k n"]:
    which, turn = jax.random.split(key)
    rows = jax.random.permutation(which, order(n))[:k]
    common = rows[:, None] & jnp.arange(n)
    signs = 1 - 2 * (jax.lax.population_count(common) & 1)
    return signs * _turns(turn, n, dtype)


def _turns(key: PRNGKeyArray, n: int, dtype: jnp.dtype) -> Inexact[Array, " n"]:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        angles = 2 * math.pi * jax.random.uniform(key, (n,), jnp.finfo(dtype).dtype)
        return jax.lax.complex(jnp.cos(angles), jnp.sin(angles))
    return jax.random.rademacher(key, (n,), dtype)
