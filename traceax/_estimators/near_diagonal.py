"""Nearly diagonal operators, for which a sketch is no help and a diagonal is.

Random signs give the trace of a diagonal operator exactly, and a sketch, whose probes are
points on the sphere, does not. So every automatic choice looks at how diagonal an operator
is, which its first batch Y = A Omega shows at no further matvec.

**How diagonal.** The entries of w_j o A w_l - w_l o A w_j do not depend on the diagonal.
The mean of their squared moduli, for a row a, is 2 sum_{b != a} |A_ab|^2. Summed over all
pairs of k probes they are (Lagrange's identity)

    M Q - |S|^2,    M = sum |w_ja|^2,  Q = sum |(A w_j)_a|^2,  S = sum conj(w_ja) (A w_j)_a.

So the sum of M Q - |S|^2 over all rows, over k (k - 1), is an unbiased estimate of
|A - diag A|_F^2. To leave a probe out is to subtract its part of the three sums.

**Forms without the diagonal.** Let D_i be the diagonal that all probes but i estimate, with
the entries S/M. For any theta_i that does not depend on probe i,

    f_i = w_i* A w_i - theta_i (w_i* D_i w_i - tr D_i)

is an unbiased estimate of tr A. If A is diagonal and theta_i = 1, it is exact. Let v be the
share of the variance of w_i* A w_i that entries off the diagonal have. Errors of D_i add
about v/(k - 3) times theta_i^2. The best theta_i is used, for v from the other probes:

    theta_i = (1 - v) / (1 - v + v/(k - 3)).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from traceax._estimators.readouts import Samples
from traceax._linalg.columns import (
    Block,
    Number,
    OfProbes,
    column_dots,
    column_norms_squared,
    over,
    times,
)
from traceax._linalg.columns import squared_modulus as squares_of
from traceax._linalg.jackknife import sums_of_others

# The least number of probes. Two others say how diagonal an operator is.
FEWEST = 3


class NearDiagonal(eqx.Module):
    """The forms f_i of a batch of probes, and how diagonal the operator is.

    `off` is, for each probe, the estimate of |A - diag A|_F^2 from all others, and `share`
    is v, this number over the squared length of the part of A w_j across w_j. `excess` is
    the variance of f_i, over the variance that entries off the diagonal cause.
    """

    probes: Block
    products: Block
    off: OfProbes
    share: OfProbes
    theta: OfProbes
    excess: OfProbes

    def samples(self, eps: Number | float) -> Samples:
        """Return the f_i as samples of the trace."""
        forms = self.probes.conj() * self.products
        lengths = squares_of(self.probes)
        estimated = over(_others(forms), _positive(_others(lengths)))
        control = jnp.sum(times(estimated, lengths - 1), axis=0)
        values = jnp.sum(forms, axis=0) - times(self.theta, control)
        rounding = 4 * eps * jnp.sum(jnp.abs(forms)) / forms.shape[1]
        # The f_i share the probes from which the D_i are estimated.
        sharing = 1 + 1 / max(forms.shape[1] - 3, 1)
        return Samples(values, rounding, jnp.ones_like(rounding), sharing)

    def left(self, weights: OfProbes) -> Block:
        """Return L with sum of conj(L) o (A Omega) = sum_i weights_i f_i, for every A."""
        lengths = squares_of(self.probes)
        factors = (weights * self.theta)[None, :] * (lengths - 1)
        factors = factors / _positive(_others(lengths))
        return times(self.probes, weights[None, :] - _others(factors))


def off_diagonal(probes: Block, products: Block) -> Number:
    """Return an estimate of |A - diag A|_F^2, from `products` = A Omega."""
    return _off(probes, products, partial(jnp.sum, axis=1), probes.shape[1])


def _off(probes: Block, products: Block, sums: Callable[[Array], Array], k: int) -> Array:
    """Return the same from the sums M, Q and S of k probes. It is at least rounding."""
    forms, eps = probes.conj() * products, float(jnp.finfo(probes.dtype).eps)
    whole = sums(squares_of(probes)) * sums(squares_of(products))
    off = jnp.sum(whole - squares_of(sums(forms)), axis=0)
    return jnp.maximum(off, 2 * eps * jnp.sum(whole, axis=0)) / (k * (k - 1))


def near_diagonal(probes: Block, products: Block) -> NearDiagonal:
    """Say how diagonal an operator is, from `products` = A Omega over some scale."""
    k = probes.shape[1]
    off = _off(probes, products, _others, k - 1)
    along = squares_of(column_dots(probes, products)) / column_norms_squared(probes)
    across = jnp.maximum(column_norms_squared(products) - along, 0)
    across = sums_of_others(across) / (k - 1)
    share, others = jnp.minimum(off / jnp.where(across > 0, across, 1), 1), max(k - 3, 1)
    theta = (1 - share) / (1 - share + share / others)
    return NearDiagonal(probes, products, off, share, theta, 1 + theta / others)


def _others(x: Block) -> Block:
    """Return the sum over all probes but each in turn."""
    return jnp.sum(x, axis=1)[:, None] - x


def _positive(x: Float[Array, "n k"]) -> Float[Array, "n k"]:
    return jnp.where(x > 0, x, 1)
