"""diag f(A) from one block Krylov run, each probe measuring what the others leave.

Notation of `block_quadrature`: Z the orthonormal columns of K_d(A, W), T = Z* A Z, and
F = f(T); S_i = K_q(A, W without w_i), P_i its projector, r_i = (I - P_i) w_i. As in
`xdiag`, for probes with E[w w*] = I and for every i

    diag f(A) = E[ diag(f(A) - B_i) + conj(w_i) o B_i w_i ],
    B_i = (I - P_i) f(A) (I - P_i),

and f(A) - B_i = P_i f(A) + f(A) P_i - P_i f(A) P_i, and f(A) r_i, are computed from the run
by f(A) ~ Z F Z*: exact for polynomials of degree d - q. In coordinates of Z, with G_i for
I - P_i, which is E, the identity on the last d - q blocks, and N_i N_i* (`krylov`),

    d_i = diag(Z (F - G_i F G_i) Z*) + conj(w_i) o Z G_i F r_i
        = diag(Z (F - E F E) Z*) - 2 Re diag((Z N_i) (Z E F N_i)*)
          - diag((Z N_i) (N_i* F N_i) (Z N_i)*) + conj(w_i) o Z (E + N_i N_i*) F r_i.

What a Krylov space leaves of f(A) is nearly a multiple of I. The diagonal of that is known,
but in d_i it would be estimated with the off-diagonal entries of I - P_i as noise. So

    f(A) = c I + (f(A) - c I),    c = sum_i r_i* F r_i / sum_i |r_i|^2,

and d_i is that of the second term; multiples of I are exact. (For traces the factor c_i
does this.) c is computed from the same probes and is not independent of the d_i; by the
Cauchy-Schwarz inequality this bias is at most of the order of (n k)^(-1/2) standard errors.

The samples share probes as those of `xdiag` do. The derivative is that of `xdiag` of
f(A) - c I. The run gives a sketch of it without applications, Y = Z (F - c I) Z* W, for
half of the probes, since each is applied twice. If f(A) is a multiple of I, Y is rounding,
and its columns would be dependent on each other: so a small multiple of W, above rounding,
is added.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox.internal import Static
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Inexact

from traceax._core.operator import LinearMap, size, unit_roundoff
from traceax._core.rule import Outcome
from traceax._estimators.leave_one_out import leave_one_out
from traceax._estimators.readouts import DIAGONAL, TwoSided, two_sided
from traceax._linalg.columns import largest_modulus, mean, row_dots, squared_modulus
from traceax._linalg.jackknife import quadrature_error, shared_error
from traceax._linalg.krylov import BlockKrylov, Complements, block_krylov
from traceax._quadrature.block_quadrature import into_domain, levels_and_complements
from traceax._quadrature.dense import Eigen, FunctionOfOperator, decompose
from traceax._quadrature.nodes import at_nodes
from traceax._quadrature.scalar import MatrixFunction


def block_diagonal(
    subject: MatrixFunction, probes: Inexact[Array, "n k"], *, depth: int
) -> Outcome:
    operator = subject.linear_map.operator
    space = block_krylov(subject.linear_map, probes, depth)
    levels, spaces = levels_and_complements(space, size(operator), hermitian=True)
    eigen, slopes = into_domain(decompose(levels), subject.fn, space.is_exhausted)
    values = at_nodes(subject.fn, eigen.values)[..., 0]
    sizes = jnp.abs(values[0]) + slopes[:, 0]
    eps, unresolved = unit_roundoff(operator), depth == 1 and size(operator) > 1
    run = SpacesLeftOut(space.basis[:, : values.shape[1]], probes, spaces)
    value, error, sketch = _value_error_sketch(
        run, space, eigen, values, sizes, eps, unresolved
    )
    tested = probes[:, : sketch.shape[1]]
    weight = two_sided(DIAGONAL, leave_one_out(sketch, tested, resphere=False))
    return Outcome(value, error, Partial(_read, weight, Static(depth)))


def _read(
    weight: TwoSided, num_steps: Static, subject: MatrixFunction
) -> Float[Array, " n"]:
    """The diagonal of f(A), applied by Lanczos."""
    operator = subject.linear_map.operator
    applied = FunctionOfOperator(operator, subject.fn, num_steps.value)
    return weight(LinearMap(applied)).real


class SpacesLeftOut(eqx.Module):
    """Z, W, and the complement of every S_i in the first blocks of Z."""

    basis: Inexact[Array, "n m"]
    probes: Inexact[Array, "n k"]
    spaces: Complements

    def level(self, f: Inexact[Array, "m m"]) -> Float[Array, ""]:
        """c, the multiple of I that is nearest to what the S_i leave of F."""
        r = self.spaces.remainders
        forms = jnp.sum(r.conj() * (r @ f[: r.shape[1], : r.shape[1]].T)).real
        lengths = jnp.sum(squared_modulus(r))
        return forms / jnp.where(lengths > 0, lengths, 1)

    def samples(self, f: Inexact[Array, "m m"]) -> Float[Array, "n k"]:
        """The d_i of F."""
        r = self.spaces.remainders.shape[1]
        inner, outer = self.basis[:, :r], self.basis[:, r:]
        whole = row_dots(self.basis @ f, self.basis).real
        whole -= row_dots(outer @ f[r:, r:], outer).real

        def removed(complement: Inexact[Array, "r p"]) -> Float[Array, " n"]:
            v, image = inner @ complement, f[:, :r] @ complement
            twice = 2 * outer @ image[r:] + v @ (complement.conj().T @ image[:r])
            return row_dots(twice, v).real

        # One probe at a time: together they are larger than the basis.
        known = whole[:, None] - jax.lax.map(removed, self.spaces.vectors).T
        return known + (self.probes.conj() * self._tested(f)).real

    def mean(self, f: Inexact[Array, "m m"]) -> Float[Array, " n"]:
        """The mean of the samples, in one product of the size of Z."""
        complement = self.spaces.vectors
        k, r, _ = complement.shape
        inner, outer = self.basis[:, :r], self.basis[:, r:]
        lacks = jnp.einsum("kra,ksa->rs", complement, complement.conj()) / k
        core = jnp.einsum("kra,rs,ksb->kab", complement.conj(), f[:r, :r], complement)
        lost = jnp.einsum("kra,kab,ksb->rs", complement, core / k, complement.conj())
        within = f[:r, :r] - lost
        beside = 2 * (f[r:, :r] - f[r:, :r] @ lacks)
        known = row_dots(inner @ within + outer @ beside, inner).real
        return known + mean((self.probes.conj() * self._tested(f)).real)

    def largest(self, f: Inexact[Array, "m m"]) -> Float[Array, " n"]:
        """A bound on the size of the terms of a sample, for positive F."""
        r = self.spaces.remainders
        forms = jnp.sum(r.conj() * (r @ f[: r.shape[1], : r.shape[1]].T), axis=1).real
        known = jnp.maximum(row_dots(self.basis @ f, self.basis).real, 0)
        return known + jnp.sqrt(known) * mean(jnp.sqrt(jnp.maximum(forms, 0)))

    def _tested(self, f: Inexact[Array, "m m"]) -> Inexact[Array, "n k"]:
        """Z G_i F r_i."""
        complement, remainder, _ = self.spaces
        r = remainder.shape[1]
        image = f[:, :r] @ remainder.T
        inside = jnp.einsum("kra,ksa,sk->rk", complement, complement.conj(), image[:r])
        return self.basis @ jnp.concatenate([inside, image[r:]])


def _value_error_sketch(
    run: SpacesLeftOut,
    space: BlockKrylov,
    eigen: Eigen,
    values: Float[Array, "levels m"],
    sizes: Float[Array, " m"],
    eps: float,
    unresolved: bool,
) -> tuple[Float[Array, " n"], Float[Array, " n"], Inexact[Array, "n l"]]:
    """Value, standard error, and the sketch of f(A) - c I."""
    k, m = run.probes.shape[1], values.shape[1]
    ends = m - k * jnp.arange(values.shape[0])
    kept = (jnp.arange(m)[None, :] < ends[:, None]) & space.filled[None, :m]
    functions = jax.vmap(_function)(kept, eigen, values)
    level = jax.vmap(run.level)(functions)
    identity = jnp.diag(space.filled[:m].astype(functions.dtype))
    rest = functions - level[:, None, None] * identity[None]
    samples = level[0] + run.samples(rest[0])
    changes = jax.vmap(run.mean)(rest[:-1] - rest[1:])
    changes = jnp.abs(changes + (level[:-1] - level[1:])[:, None])
    moved = _function(kept[0], jax.tree.map(lambda x: x[0], eigen), sizes)
    rounding = run.largest(moved) + jnp.abs(level[0]) + mean(jnp.abs(samples))
    error = shared_error(samples, 4 * eps * rounding)
    error = jnp.hypot(error, quadrature_error(changes, unresolved))
    sketch = _sketch(run, space, rest[0], largest_modulus(functions[0]))
    return mean(samples), error, sketch


def _function(
    kept: Bool[Array, " m"], eigen: Eigen, values: Float[Array, " m"]
) -> Inexact[Array, "m m"]:
    """V diag(values) V* on the coordinates that are kept. A node of no weight does not
    count, even where its value is infinite."""
    vectors = jnp.where(kept[:, None], eigen.vectors, 0)
    values = jnp.where(jnp.any(vectors != 0, axis=0), values, 0)
    # LAPACK may return finite numbers for NaN input.
    values = jnp.where(jnp.isnan(eigen.values), jnp.nan, values)
    return (vectors * values[None, :]) @ vectors.conj().T


def _sketch(
    run: SpacesLeftOut,
    space: BlockKrylov,
    rest: Inexact[Array, "m m"],
    largest: Float[Array, ""],
) -> Inexact[Array, "n l"]:
    """Y of the first half of the probes."""
    k = run.probes.shape[1]
    count = (k + 1) // 2
    grain = jnp.finfo(largest.dtype).eps ** 0.5 * largest
    image = run.basis @ (rest[:, :k] @ space.starts[:, :count])
    return image + grain * run.probes[:, :count]
