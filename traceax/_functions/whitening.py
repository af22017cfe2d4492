"""Whitening by entries: a sparse triangular W with W A W* ~ I.

Each index has a few earlier ones s as `Neighbours`. Let c = A_ss^{-1} a, with a = A_si, and
v = A_ii - a* c. Row i of W has the entries v^{-1/2} at i and -v^{-1/2} c* at s, so that

    log|det W| = -1/2 sum_i log v_i,    (W A W*)_ii = (A_ii - 2 Re c* a + c* A_ss c)/v = 1.

It is the best factor of its pattern: it minimises the Kullback-Leibler divergence of the
Gaussian with the covariance (W* W)^{-1} from that with A (Vecchia 1988; Schäfer, Katzfuss
and Owhadi 2021, arXiv:2004.14455). For sparse A it is the factorised sparse approximate
inverse of Kolotilina and Yeremin (1993). The mean of the eigenvalues of W A W* is 1, so
that -2 log|det W| >= log det A.

**Precision.** A small factor is computed in units of the roots of its diagonal, with 4 m
eps added to it, and v is at least 4 m eps, m the number of neighbours. In single precision
kernels with little noise have no small factor without that. W is then not quite the best
factor, but any W is right if its determinant is, and the trace of W A W* is summed from
the same entries.

**Derivatives.** dc = A_ss^{-1} (da - dA_ss c) is one more solution with the same factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Inexact, Int

from traceax._core import checks
from traceax._core.canonical import canonical, compiled
from traceax._core.operator import Operator
from traceax._core.sparse import Pattern, SparseOperator, table
from traceax._core.vectors import common_dtype
from traceax._functions.neighbours import Neighbours
from traceax._linalg.columns import column_dots, dot, over

Index = Int[Array, " m"]
Entries = Callable[[Array, Array], Array]
_TOGETHER = 2**20  # entries of small factors that are in memory at a time


def _number(x: Any) -> Any:
    return None if x is None else jnp.asarray(x)


class Whitening(eqx.Module):
    """A linear map W that whitens a Hermitian A, and log|det W|, for `logdet` and
    `inv_quad_logdet`.

    With W A W* ~ I, Krylov spaces of W A W* are resolved after a few steps, and

        log det A = log det(W A W*) - 2 log|det W|.

    The nearer W A W* is to I, the smaller are the errors of values and gradients. They are
    right for every W that is invertible. `vecchia` makes one from entries of A.

    **Attributes**

    - `operator`: W, a square lineax operator on the space of A, or on vectors of the
      entries of all its leaves, one leaf after the other. It need not be triangular.
    - `log_determinant`: log|det W|, real, of shape `()`.
    - `trace`: tr(W A W*), real, of shape `()`, where A includes the shift. If it is known,
      log x - c (x - 1) is sampled in place of log x, which has a smaller variance. It must
      belong to the operator and the shift with which W is used. If W was made for others,
      leave it out: `Whitening(w.operator, w.log_determinant)`. Differentiate either both W
      and A, or A alone. Default `None`.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> d = jnp.linspace(1.0, 1e4, 200)
        >>> operator = tx.as_operator(lambda v: d * v + jnp.mean(v), 200)
        >>> root = lx.DiagonalLinearOperator(d**-0.5)
        >>> scaling = tx.Whitening(root, -jnp.sum(jnp.log(d)) / 2)
        >>> estimate = tx.logdet(operator, jax.random.key(0), 30, whitening=scaling)
        >>> truth = jnp.linalg.slogdet(jnp.diag(d) + 1 / 200)[1]
        >>> bool(abs(estimate.value - truth) < 0.1)
        True

    **See also**: `vecchia`, `logdet`, `inv_quad_logdet`.
    """

    operator: Operator
    log_determinant: Float[Array, ""] = eqx.field(converter=jnp.asarray)
    trace: Float[Array, ""] | None = eqx.field(default=None, converter=_number)


def vecchia(entries: Entries, neighbours: Neighbours) -> Whitening:
    """Whiten a Hermitian positive definite matrix by a sparse factor made of its entries.

    Row i of the triangular factor W predicts dimension i from its few neighbours: it has
    the coefficients of the best linear prediction, divided by the standard deviation of
    what remains. Pass the result as `whitening` to `logdet` or `inv_quad_logdet`. It makes
    the likelihoods of kernels with little noise accurate, where matvecs alone cannot
    resolve the spectrum.

    **Arguments**

    - `entries`: a JAX function of two equal arrays of indices, that returns the entries of
      the matrix there, *including the shift or noise on the diagonal*. It may close over
      hyperparameters. No entry is stored.
    - `neighbours`: the result of `nearest_neighbours` for kernels, of `graph_neighbours`
      for sparse matrices, or your own `Neighbours`.

    **Returns** a `Whitening`. -2 `log_determinant` is an upper bound of log det A, up to
    rounding. Everything is NaN if a small block of the matrix, of an index and its
    neighbours, is not positive definite beyond rounding: `entries` is then not Hermitian
    positive definite, and may lack the noise.

    **Derivatives**: the result can be differentiated to any order in what `entries` closes
    over, under `jax.jit`, `jax.grad` and `jax.vmap`.

    **Cost**: no matvecs. With m neighbours of n indices: n (m + 1)^2 entries and n m^3/3
    flops, in batches of about a million entries; W has n (m + 1) entries. In reverse mode
    all this is computed twice, and again in batches.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> x = jnp.linspace(0.0, 1.0, 300)
        >>> kernel = lambda i, j: jnp.exp(-abs(x[i] - x[j])) + 1e-4 * (i == j)
        >>> whitening = tx.vecchia(kernel, tx.nearest_neighbours(x, 5))
        >>> truth = jnp.linalg.slogdet(kernel(*jnp.indices((300, 300))))[1]
        >>> bool(0 < -2 * whitening.log_determinant - truth < 1)
        True

    **Reference**: derived in `traceax/_functions/whitening.py`. Vecchia (1988),
    [doi:10.1111/j.2517-6161.1988.tb01729.x](https://doi.org/10.1111/j.2517-6161.1988.tb01729.x).
    Schäfer, Katzfuss and Owhadi (2021),
    [arXiv:2004.14455](https://arxiv.org/abs/2004.14455).

    **See also**: `Whitening`, `nearest_neighbours`, `graph_neighbours`.
    """
    name = "vecchia"
    must, cure = "be the result of nearest_neighbours or graph_neighbours", "Call one."
    is_known = isinstance(neighbours, Neighbours)
    got = type(neighbours).__name__
    checks.require_type(is_known, name, "neighbours", must, got, cure)
    cure = "Pass lambda i, j: kernel(x[i], x[j]) + noise * (i == j), for example."
    checks.check_callable(name, "entries", entries, "of two arrays of indices", cure, 2)
    order, is_neighbour = neighbours.order, neighbours.is_neighbour
    s, m = order[neighbours.earlier], neighbours.earlier.shape[1]
    square = jax.ShapeDtypeStruct((m + 1, m + 1), jnp.int32)
    made = jax.eval_shape(entries, square, square)
    is_inexact = checks.are_arrays(made, "real or complex numbers")
    fits = is_inexact and getattr(made, "shape", ()) == square.shape
    must = "return an array of real or complex numbers, of the shape of the indices"
    checks.require_type(fits, name, "entries", must, checks.written(made), cure)
    batch = min(order.size, max(1, _TOGETHER // (m + 1) ** 2))
    places = np.flatnonzero(is_neighbour)
    *parts, places = map(jnp.asarray, (order, s, is_neighbour, places.astype(np.int32)))
    code = canonical(entries, square, square)
    data, logs, trace = compiled(_rows, code, tuple(parts), places, batch)
    rows = np.concatenate([order, order[np.nonzero(is_neighbour)[0]]])
    columns, n = np.concatenate([order, s[is_neighbour]]), order.size
    tables = table(rows, columns, n), table(columns, rows, n)
    operator = SparseOperator(data, *tables, Pattern([rows, columns], n), frozenset())
    return Whitening(operator, logs, trace)


def _rows(
    entries: Entries, parts: tuple[Array, ...], places: Array, batch: int
) -> tuple[Array, Array, Array]:
    """Return the entries of W, first those on its diagonal; log|det W|; and tr(W A W*)."""
    row = jax.checkpoint(lambda part: _row(entries, *part))
    own, others, logs, traces = jax.lax.map(row, parts, batch_size=batch)
    data = jnp.append(own.astype(others.dtype), others.ravel()[places])
    return data, jnp.sum(logs), jnp.sum(traces)


def _row(
    entries: Entries, i: Array, s: Index, is_neighbour: Array
) -> tuple[Array, Inexact[Array, " m"], Array, Array]:
    """Return a row of W, its entry at i first; its part of log|det W|; and its entry on the
    diagonal of W A W*."""
    m, places = s.size, jnp.append(s, i)
    square = jnp.broadcast_to(places, (m + 1, m + 1))
    block = entries(square.T, square)
    block = block.astype(common_dtype(block))
    used = jnp.append(is_neighbour, True)
    used = used[:, None] & used[None, :]
    block = jnp.where(used, block, jnp.eye(m + 1, dtype=block.dtype))
    roots = jnp.sqrt(jnp.diagonal(block).real)
    block = over(block, jnp.outer(roots, roots))
    inside, side = block[:m, :m], block[:m, m:]
    floor = 4 * m * float(jnp.finfo(block.dtype).eps)
    lifted = inside + floor * jnp.eye(m, dtype=block.dtype)
    c = _solved(lifted, side)
    along, inner = (column_dots(c, x).real[0] for x in (side, dot(inside, c)))
    v = jnp.maximum(1 - along, floor)
    own = 1 / (roots[m] * jnp.sqrt(v))
    others = -over(c[:, 0].conj(), jnp.sqrt(v) * roots[:m])
    return own, others, jnp.log(own), (1 - 2 * along + inner) / v


def _solved(matrix: Inexact[Array, "m m"], side: Inexact[Array, "m 1"]) -> Array:
    """Return A_ss^{-1} a, differentiable to any order."""
    held = jax.lax.stop_gradient(matrix)
    inverse = _inverse(held)

    def solve(_: object, y: Array) -> Array:
        x = dot(inverse, y)
        return x + dot(inverse, y - dot(held, x))

    def transposed(_: object, y: Array) -> Array:
        return solve(_, y.conj()).conj()

    return jax.lax.custom_linear_solve(lambda v: dot(matrix, v), side, solve, transposed)


def _inverse(matrix: Inexact[Array, "m m"]) -> Inexact[Array, "m m"]:
    """Invert a Hermitian positive definite matrix by sweeping out one index after another.

    It is NaN if the matrix is not definite. These are operations on all matrices of a
    batch. (LAPACK takes no less time for one small matrix after the other, and on CPUs its
    batches sometimes wait for threads for ever.)
    """

    def sweep(k: Any, swept: Array) -> Array:
        is_k = np.arange(len(matrix)) == k
        column, pivot = swept[:, k], swept[k, k].real
        pivot = jnp.where(pivot > 0, pivot, jnp.nan)
        ratio = over(column, pivot)
        rest = swept - column[:, None] * ratio.conj()[None, :]
        rest = jnp.where(is_k[:, None], ratio.conj()[None, :], rest)
        rest = jnp.where(is_k[None, :], ratio[:, None], rest)
        own = over(-jnp.ones_like(ratio), pivot)
        return jnp.where(is_k[:, None] & is_k[None, :], own[:, None], rest)

    return -jax.lax.fori_loop(0, len(matrix), sweep, matrix)
