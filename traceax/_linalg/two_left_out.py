"""What leave-one-out samples of a Krylov space would be with one probe more left out.

Notation of `left_out`; e_j is the sample of probe j, F the matrix that is read (f(T)):

    e_j = tr(J F) - tr(N_j* F N_j) + c r* F r,    r = N_j N_j* w_j.

Leave out probe i, too. S_ij, the space of the others, lies in S_i and in S_j, and has as
many dimensions less as both together: so what it misses is span(N_i, N_j), and no new
space has to be made. With B = [N_i, N_j], G = B* B and t = B* w_j, which is zero but for
N_j* w_j, as w_j lies in S_i,

    tr(P_ij F) = tr(J F) - tr(G^{-1} B* F B),
    r = B b,  b = G^{-1} t,  |r|^2 = t* b,  r* F r = b* (B* F B) b.

So e_ij is made of the q x q blocks of N* F N and N* N, all N_i side by side. (For q = 1
these are XTrace's formulas in `jackknife`.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact

from traceax._linalg.columns import squared_modulus


def replicates(
    missing: Inexact[Array, "k r q"],
    remainders: Inexact[Array, "k r"],
    dimensions: Float[Array, " k"],
    right: Inexact[Array, "r m"],
    left: Inexact[Array, "m r"],
    values: Inexact[Array, "m p"],
    samples: Inexact[Array, "p k"],
) -> Inexact[Array, "p k"]:
    """For every i the mean over j of e_ij: the estimate without probe i.

    F is `right` diag(values) `left`, Hermitian or not; `remainders` are sqrt(c_i) r_i,
    `dimensions` those of what the S_i leave of all dimensions; `samples` the e_i."""
    k, r, q = missing.shape
    columns = jnp.moveaxis(missing, 0, 1).reshape(r, k * q)
    before, after = columns.conj().T @ right, left @ columns
    blocks = jax.vmap(lambda v: _of_pairs((before * v[None, :]) @ after, k), 1)(values)
    gram = _of_pairs(columns.conj().T @ columns, k)
    inverse = _inverse(gram)
    tests = jnp.einsum("jra,jr->ja", missing.conj(), remainders)

    # Sums of products, not products of matrices: a fraction of the time to compile.
    b = jnp.sum(inverse[..., q:] * tests[None, :, None, :], axis=-1)
    lengths = jnp.sum(tests.conj()[None] * b[..., q:], axis=-1).real
    outer = b.conj()[..., :, None] * b[..., None, :]
    forms = jnp.sum(outer[None] * blocks, axis=(-2, -1))
    removed = jnp.sum(jnp.swapaxes(inverse, -1, -2)[None] * blocks, axis=(-2, -1))
    rank = jnp.sum(jnp.swapaxes(inverse, -1, -2) * gram, axis=(-2, -1)).real
    alone = jnp.sum(squared_modulus(missing), axis=(1, 2))
    factors = (dimensions - alone)[:, None] + rank
    factors = factors / jnp.where(lengths > 0, lengths, 1)

    own = blocks[:, 0, 0, :q, :q]
    itself = jnp.einsum("a,pab,b->p", tests[0].conj(), own, tests[0])
    whole = samples[:, 0] + jnp.einsum("paa->p", own) - itself
    pairs = whole[:, None, None] - removed + factors.astype(forms.dtype)[None] * forms
    others = jnp.where(jnp.eye(k, dtype=bool)[None], 0, pairs)
    return jnp.sum(others, axis=2) / (k - 1)


def _of_pairs(square: Inexact[Array, "k*q k*q"], k: int) -> Inexact[Array, "k k 2q 2q"]:
    """The blocks of every pair of N_i and N_j."""
    q = square.shape[0] // k
    blocks = jnp.transpose(square.reshape(k, q, k, q), (0, 2, 1, 3))
    own = jnp.einsum("iiab->iab", blocks)
    first, second = (jnp.broadcast_to(x, blocks.shape) for x in (own[:, None], own[None]))
    above = jnp.concatenate([first, blocks], axis=-1)
    below = jnp.concatenate([jnp.swapaxes(blocks, 0, 1), second], axis=-1)
    return jnp.concatenate([above, below], axis=-2)


def _inverse(matrices: Inexact[Array, "*batch q q"]) -> Inexact[Array, "*batch q q"]:
    """Of positive semidefinite ones, by Gauss and Jordan: for as many as here and as small.
    What N_i and N_j have in common, to rounding, is left out of it, for it is missing once;
    and so are columns that are none."""
    q = matrices.shape[-1]
    least = 1e3 * float(jnp.finfo(matrices.dtype).eps)

    def sweep(step: Array, m: Array) -> Array:
        here = jnp.arange(q) == step
        row = jax.lax.dynamic_index_in_dim(m, step, axis=-2)
        column = jax.lax.dynamic_index_in_dim(m, step, axis=-1)
        pivot = jax.lax.dynamic_index_in_dim(row, step, axis=-1)
        scaled = jnp.where(here, 1, row) / jnp.where(pivot.real > least, pivot, 1)
        scaled = jnp.where(pivot.real > least, scaled, 0)
        rest = jnp.where(here[None, :], 0, m) - column * scaled
        return jnp.where(here[:, None], scaled, rest)

    return jax.lax.fori_loop(0, q, sweep, matrices)
