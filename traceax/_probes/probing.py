"""Probing: probes that know which entries of a sparse operator can disturb each other."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from traceax._core.operator import Structure, common_dtype, dimension, unflatten
from traceax._probes.colouring import Best, coloured
from traceax._probes.graph import Sparse
from traceax._probes.samplers import rademacher
from traceax._probes.witnesses import Witnesses


class Probing:
    """A sampler of one signed probe a colour, times as often as the budget allows."""

    def __init__(self, colours: Int[np.ndarray, " n"], witnesses: Witnesses | None) -> None:
        self.colours = colours
        self.witnesses = witnesses
        self.num_colours = int(colours.max()) + 1

    def __call__(
        self, key: PRNGKeyArray, structure: Structure, num_probes: int
    ) -> PyTree[Array]:
        n, c = dimension(structure), self.num_colours
        if n != self.colours.size:
            raise ValueError(
                f"traceax.probing(pattern_or_colours=...) must have {n} rows or entries, "
                "one for each dimension of the operator, but got "
                f"{self.colours.size}. Pass the pattern of this operator."
            )
        if num_probes % c:
            raise ValueError(
                f"traceax.probing(pattern_or_colours=...) must draw a multiple of {c} "
                f"probes, one for each colour, but got num_probes={num_probes}. Draw {c} "
                f"or {2 * c}, say."
            )
        column = jax.ShapeDtypeStruct((n,), common_dtype(structure))
        signs = rademacher(key, column, num_probes // c)
        mine = self.colours == np.arange(c)[:, None]
        probes = math.sqrt(c) * jnp.where(mine, signs[:, None, :], 0)
        return jax.vmap(lambda probe: unflatten(probe, structure))(probes.reshape(-1, n))


def probing(
    pattern_or_colours: Any, *, power: int = 1, num_colours: int | None = None
) -> Probing:
    """Make a sampler for sparse structure from a colouring of the dimensions.

    One probe for each colour: random signs (phases, for complex operators) on the
    dimensions of that colour, zero on all others. An entry A_ab contributes to the error
    only if a and b have the same colour, so for operators whose entries decay with the
    distance in a graph this beats every unstructured sampler:

        error of entry a = sum of A_ab s_b conj(s_a) over b != a of the colour of a

    Unbiased. Exact if no two dimensions a, b of one colour have A_ab != 0. It is for
    `hutchinson_trace`, `hutchinson_diagonal` and `function_diagonal`, which spend a
    multiple of the number of colours; the others need independent probes. At equal budgets
    more colours are more accurate than more repeats.

    With a pattern one repeat has a standard error: each entry between neighbours in the
    graph is seen twice, and the difference of both is error, for Hermitian operators only
    error. It is 1.0 to 1.7 times the measured error for inverses of Laplacians plus 0.01 to
    1, and larger if entries decay faster or the operator is not Hermitian. With colours
    alone one repeat has none, `inf`, and two may agree by chance, entry by entry: take
    three or more for a diagonal.

    **Arguments**

    - `pattern_or_colours`: where the operator may have entries, as in `colouring`. Or
      colours: integers of at least 0, one for each dimension, as a one-dimensional array or
      a pytree with the operator's structure.
    - `power`, `num_colours`: of a pattern, as in `colouring`.

    **Returns** a sampler. Its attribute `num_colours` is the number of probes in one
    repeat. **Raises** what `colouring` raises; `TypeError` if the colours are not concrete
    integers; `ValueError` if a colour is negative, there are none, or `power` or
    `num_colours` come with colours; when it draws, if they do not fit the operator or the
    budget.

    **Cost**: one random number for every dimension and repeat.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> band = jnp.ones(299)
        >>> precision = lx.TridiagonalLinearOperator(3 * jnp.ones(300), band, band)
        >>> sampler = tx.probing(precision.as_matrix(), power=11)
        >>> variance = lx.invert(precision, solver=lx.Tridiagonal())
        >>> key = jax.random.key(0)
        >>> estimate = tx.hutchinson_diagonal(variance, key, 24, sampler=sampler)
        >>> bool(jnp.all(abs(estimate.value[50:250] - 5**-0.5) < 1e-4))
        True

    **Reference**: Tang and Saad (2012), A probing method for computing the diagonal of a
    matrix inverse, doi:10.1002/nla.779; Stathopoulos, Laeuchli and Orginos (2013),
    Hierarchical probing, doi:10.1137/120881452.
    """
    if hasattr(pattern_or_colours, "shape") and len(pattern_or_colours.shape) != 1:
        return of_graph(*coloured("probing", pattern_or_colours, power, num_colours))
    if power != 1 or num_colours is not None:
        raise ValueError(
            "traceax.probing(power=..., num_colours=...) must come with a pattern, because "
            f"colours are there already, but got power={power}, num_colours={num_colours}. "
            "Leave them out, or pass them to traceax.colouring."
        )
    leaves = [_concrete(leaf) for leaf in jax.tree.leaves(pattern_or_colours)]
    flat = np.concatenate(leaves) if leaves else np.zeros(0, int)
    if not flat.size or flat.min() < 0:
        raise ValueError(
            "traceax.probing(pattern_or_colours=...) must be integers of at least 0, "
            "because they number the probes, but got "
            f"{flat.min() if flat.size else 'none'}. Number the colours from 0; "
            "traceax.colouring does."
        )
    return Probing(np.unique(flat, return_inverse=True)[1], None)


def of_graph(step: Sparse, best: Best) -> Probing:
    """Its witnesses are the neighbours in the graph."""
    return Probing(best.colours, Witnesses.of(best.colours, step, best.power))


def _concrete(leaf: Any) -> Int[np.ndarray, " n"]:
    traced = isinstance(leaf, Tracer)
    if traced or not np.issubdtype(np.asarray(leaf).dtype, np.integer):
        got = "a traced array" if traced else f"{np.asarray(leaf).dtype}"
        raise TypeError(
            "traceax.probing(pattern_or_colours=...) must be concrete integers, because "
            f"their number sets the shapes of arrays, but got {got}. Make the colouring "
            "outside of jax.jit, with traceax.colouring, or with NumPy and .astype(int)."
        )
    return np.asarray(leaf).ravel()
