"""What leave-one-out samples of a Krylov space would be with one probe more left out.

Notation of `left_out`; e_j is the sample of probe j, F the matrix that is read (f(T)):

    e_j = tr(J F) - tr(N_j* F N_j) + c r* F r,    r = N_j N_j* w_j.

Leave out probe i, too. S_ij, the space of the others, lies in S_i and in S_j, and has as
many dimensions less as both together: so what it misses is span(N_i, N_j), and no new space
has to be made. With O = N_i* N_j and U = N_j - N_i O, which is orthogonal to N_i,

    U* U = I - O* O,    D = U* F U,    X = (I - O* O)^{-1},
    tr(P_ij F) = tr(J F) - tr(N_i* F N_i) - tr(X D)
    r = U b,  b = X N_j* w_j,  |r|^2 = (N_j* w_j)* b,  r* F r = b* D b,

because N_i* w_j = 0: w_j lies in S_i. So e_ij is made of the q x q blocks of N* F N and
N* N, N all N_i side by side. (For q = 1 these are XTrace's formulas in `jackknife`.)
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
    k = samples.shape[1]
    before = jnp.einsum("ira,rm->iam", missing.conj(), right)
    after = jnp.einsum("mr,jrb->jbm", left, missing)
    blocks = jnp.einsum("iam,mp,jbm->pijab", before, values, after)
    overlaps = jnp.einsum("ira,jrb->ijab", missing.conj(), missing)
    own = jnp.einsum("piiaa->pi", blocks)
    tests = jnp.einsum("jra,jr->ja", missing.conj(), remainders)
    itself = jnp.einsum("a,pab,b->p", tests[0].conj(), blocks[:, 0, 0], tests[0])
    whole = samples[:, 0] + own[:, 0] - itself

    squares = _squares(overlaps)
    inverse = _inverse(squares)
    new = _projected(blocks, overlaps)
    b = jnp.einsum("ijab,jb->ija", inverse, tests)
    lengths = jnp.einsum("ja,ija->ij", tests.conj(), b).real
    forms = jnp.einsum("ija,pijab,ijb->pij", b.conj(), new, b)
    rank = jnp.sum(jnp.sum(squared_modulus(missing), axis=1) > 0.5, axis=1)[None, :]
    shared = missing.shape[2] - jnp.einsum("ijab,ijba->ij", inverse, squares).real
    factors = dimensions[:, None] + rank.astype(dimensions.dtype) - shared
    factors = factors / jnp.where(lengths > 0, lengths, 1)
    removed = jnp.einsum("ijab,pijba->pij", inverse, new)
    forms = factors.astype(forms.dtype)[None] * forms
    pairs = whole[:, None, None] - own[:, :, None] - removed + forms
    others = jnp.where(jnp.eye(k, dtype=bool), 0, pairs)
    return jnp.sum(others, axis=2) / (k - 1)


def _squares(overlaps: Inexact[Array, "k k q q"]) -> Inexact[Array, "k k q q"]:
    """I - O* O; on the diagonal, where nothing is evaluated, I."""
    k, q = overlaps.shape[1:3]
    products = jnp.einsum("ijab,ijac->ijbc", overlaps.conj(), overlaps)
    same = jnp.eye(k, dtype=bool)[:, :, None, None]
    return jnp.eye(q, dtype=overlaps.dtype)[None, None] - jnp.where(same, 0, products)


def _projected(
    blocks: Inexact[Array, "p k k q q"], overlaps: Inexact[Array, "k k q q"]
) -> Inexact[Array, "p k k q q"]:
    """U* F U for all pairs."""
    diagonal = jnp.einsum("piiab->piab", blocks)
    cross = jnp.einsum("ijab,pijac->pijbc", overlaps.conj(), blocks)
    cross += jnp.einsum("pjiab,ijbc->pijac", blocks, overlaps)
    turned = jnp.einsum("ijab,piac,ijcd->pijbd", overlaps.conj(), diagonal, overlaps)
    return diagonal[:, None] - cross + turned


def _inverse(matrices: Inexact[Array, "*batch q q"]) -> Inexact[Array, "*batch q q"]:
    """Of positive definite ones, by Gauss and Jordan: for as many as here and as small.
    What N_i and N_j have in common, to rounding, is left out of it: it was new to no space,
    and is missing once."""
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
