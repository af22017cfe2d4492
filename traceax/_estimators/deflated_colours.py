"""Probing of a trace, with the dominant directions deflated if that is better.

The error of probing comes from the entries A_ab between dimensions of the same colour. If
these entries do not decay, because a few directions dominate, then the entries of
(I - P) A (I - P) are smaller. If they do decay, P adds entries everywhere. So the first
batch decides about the second one. The first batch applies A to the probes of `SKETCH` of
the c colours. Let Q be an orthonormal basis of the images, and P = Q Q*. The second batch
is one of two:

- Plain probing applies A to the probes of the other colours.
- Deflation applies A to Q, and to mu = (I - P) z for fresh coarse probes z, which have
  c - 2 SKETCH colours.

Both take c matvecs in total.

Each colour i of the sketch decides for itself by a number a_i, 0 or 1, which is computed
from the other colours only. All colours that are not in the sketch are deflated if any a_i
is 1. The dimensions of a colour with a_i = 0 are read from their own probe z_i of the first
batch. Let v be the part of z on these dimensions. Then, if any a_i is 1,

    value = tr(Q* A Q) + mu* A mu - v* A z + sum of z_i* A z_i over i with a_i = 0,

in which the terms with z are summed over coarse probes. This value is unbiased. So is its
derivative, because A z = A mu + A Q Q* z.

a_i is 1 if the sketch leaves less than `MOST_LEFT` of the variance (`second_batch`), and if
deflation reduces the disturbances of the diagonal to less than `MOST_DISTURBED`. For a
dimension a of colour j and its sign s_a, the sketch shows the disturbed diagonal entry
g_a = conj(s_a) (A z_j)_a, and also the deflated one, with r_ij = (I - P_ij) A z_j in the
place of A z_j. The diagonal itself varies little between neighbours a and b, so the sums of
|g_a - g_b|^2 measure the disturbances. The ratio of the two sums is below .6 if deflation
halves the error, and above 1 if deflation raises it (`tests.benchmarks.probing`). By
`second_batch`, r_ij is d_j/(1 - |L_ij|^2) times Q s_j - Q s_i L_ij.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Inexact

from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap
from traceax._core.rule import Outcome
from traceax._estimators.call import Call
from traceax._estimators.readouts import Pairs, leave_one_out, outside
from traceax._estimators.second_batch import missed_shares
from traceax._linalg.columns import Block, column_dots, dot, over, squared_modulus, times
from traceax._linalg.jackknife import length
from traceax._probes.colouring import memo
from traceax._probes.draw import for_pattern
from traceax._probes.probing import (
    DEGREES,
    Neighbourhood,
    Probing,
    neighbour_residuals,
)

# The number of colours in the first batch, and the shares of the variance and of the
# disturbances below which a colour decides for deflation.
SKETCH = 8
MOST_LEFT, MOST_DISTURBED = 0.7, 0.7


# The probes of a colouring, one for each colour, and its neighbourhood.
Coloured = tuple[Inexact[Array, "n _"], Neighbourhood]


def deflated_colours(call: Call, fine: Probing, pattern: Any) -> Estimate | None:
    """Estimate the trace, or return None if deflation cannot help.

    After Q and the sketch are paid for, at least half of the colours must be left for
    coarse probes. The budget must be too small to repeat the fine colours, and must pay
    for one more probe, which tests the pattern. `pattern` is the sparsity pattern from
    which the coarse colouring is made.
    """
    count, most = fine.num_colours, fine.num_colours - 2 * SKETCH
    fits = most >= 2 * SKETCH and count < call.num_matvecs < 2 * count
    coarse = for_pattern(pattern, most, tests=0) if fits else None
    if coarse is None or fine.neighbourhood is None:
        return None
    call = call.using(_adjacent_first(fine))
    key, budget = jax.random.fold_in(call.key, 1), coarse.num_colours + 1
    others = replace(call, sampler=coarse, key=key, num_matvecs=budget)
    streams = call.stream(), others.stream()
    probes = tuple((stream.probes.source, stream.neighbourhood) for stream in streams)
    method = "the better of hutchpp_trace and hutchinson_trace"
    return call.finish(_deflated, probes, method=method, spent=count + 1, degrees=DEGREES)


@memo
def _adjacent_first(fine: Probing) -> Probing:
    """Return the sampler with its colours in an order that begins with those of the sketch.

    These are chosen so that many of their dimensions are neighbours of each other, because
    the decision compares neighbours.
    """
    colours, near = fine.colours, fine.neighbourhood
    assert near is not None
    edges = np.zeros((fine.num_colours,) * 2)
    np.add.at(edges, (colours[:, None], colours[near.neighbours]), 1)
    np.fill_diagonal(edges, 0)
    first, reached = [], edges.sum(axis=0)
    for _ in range(SKETCH):
        reached[first] = -1
        first.append(int(np.argmax(reached)))
        reached = edges[first].sum(axis=0)
    order = np.array(first + [c for c in range(len(edges)) if c not in first])
    colours = np.argsort(order)[colours]
    return Probing(colours, replace(near, colours=colours, beyond=near.beyond[:, order]))


def _deflated(linear_map: LinearMap, probes: tuple[Coloured, Coloured]) -> Outcome:
    """Estimate the trace by the formula of the module docstring, or by plain probing.

    `some` tells whether any colour is deflated, and `plain` marks the dimensions that are
    read from their own probe, so that v is not zero. The last column of `images` is A times
    the test probe of the colouring that is used, without its part along Q if any is.
    """
    (fine, near), (z, near_coarse) = probes
    tests, others = fine[:, :SKETCH], fine[:, SKETCH:]
    sketch = linear_map(tests)
    q, each = decide(sketch, tests, near)
    some, d = jnp.any(each), z.shape[1]
    plain = jnp.any((tests != 0) & ~each[None, :], axis=1)
    coarse, zeros = near_coarse.with_test(z), jnp.zeros_like(others[:, SKETCH + d :])
    x, v = dot(q.conj().T, coarse), jnp.where(plain[:, None], z, 0)
    mu, test = jnp.split(coarse - dot(q, x), [d], axis=1)
    right = jnp.where(some, jnp.hstack([q, mu, zeros]), others)
    test = jnp.where(some, test, near.with_test(fine)[:, -1:])
    images = jnp.hstack([sketch, linear_map(jnp.hstack([right, test]))])
    read = jnp.hstack([q - dot(v, x[:, :d].conj().T) / d, (mu - v) / d, zeros])
    read = jnp.where(some, read, others / fine.shape[1])
    left = jnp.hstack([jnp.where(each[None, :], 0, tests) / fine.shape[1], read])
    products, eps = images[:, :-1], linear_map.eps
    forms, sizes = column_dots(left, products), column_dots(abs(left), abs(products))
    rounding, real = 4 * eps * jnp.sum(sizes), not jnp.iscomplexobj(images)

    def errors(z: Block, images: Array, near: Neighbourhood, hermitian: bool) -> Array:
        """Return the contribution of each dimension to the error of the trace."""
        residuals = neighbour_residuals(z, images, near)
        return residuals.error_in_sum(near, eps, real=real, hermitian=hermitian)

    # Q may leave the colour of the test probe as it is, so residuals must be zero as well.
    # The dimensions in `plain` have errors from -v* A z and z_i* A z_i, too.
    of_q, of_mu = images[:, SKETCH : 2 * SKETCH], images[:, 2 * SKETCH : 2 * SKETCH + d]
    of_coarse = jnp.hstack([of_mu, images[:, -1:]])
    left_over = errors(z, outside(q, None, of_coarse), near_coarse, True)
    whole = errors(z, of_coarse + dot(of_q, x), near_coarse, True)
    deflated = jnp.hypot(left_over, jnp.where(plain, 2**0.5 * whole, 0))
    probed = errors(fine, images, near, linear_map.is_hermitian)
    error = length(jnp.where(some, deflated, probed), rounding)
    return Outcome(jnp.sum(forms), error, Pairs(left, jnp.hstack([tests, right])))


def decide(sketch: Block, z: Block, near: Neighbourhood) -> tuple[Block, Bool[Array, " k"]]:
    """Return the basis Q of the sketch, and the decisions a_i as Booleans."""
    loo = leave_one_out(sketch, z, resphere=False)
    (s, overlap, inverse, *_), q = loo.pairs, loo.basis.columns
    own, qs = (z != 0).astype(z.dtype), dot(q, s)
    removed = jnp.sum(qs * own, axis=1)[:, None] - qs * dot(own, overlap.T)
    removed = times(dot(own.real, times(loo.distances[:, None], inverse)), removed)
    shown = jnp.sum(own * over(sketch, loo.basis.scale), axis=1)
    forms = jnp.sum(z, axis=1).conj()[:, None] * jnp.hstack([shown[:, None], removed])
    differ = squared_modulus(forms[near.neighbours] - forms[:, None, :])
    others = jnp.sum(own.real, axis=1)[:, None] - own.real  # in a tested colour but not i
    counted = others[:, None, :] * others[near.neighbours]
    whole = jnp.sum(counted * differ[:, :, :1], axis=(0, 1))
    left = jnp.sum(counted * differ[:, :, 1:], axis=(0, 1))
    missed = missed_shares(loo)
    return q, (left < MOST_DISTURBED * whole) & (missed < MOST_LEFT)
