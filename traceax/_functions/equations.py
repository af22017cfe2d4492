"""Equations with A + shift I or A + D, where D is diagonal and positive.

`whitened` scales by D^{-1/2}, which turns A + D into a matrix plus I. `right_hand_sides`
makes columns of the vectors that the user gives. `preconditioner` is a public function, for
the solvers of lineax.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, PyTree

from traceax._core.canonical import compiled
from traceax._core.checks import Shift, check_shift, check_vector
from traceax._core.operator import LinearMap, Operator, frozen, stores_matrix, working_dtype
from traceax._core.vectors import as_columns, flatten, unflatten
from traceax._estimators.call import begin
from traceax._functions.arguments import Shifts, real_dtype
from traceax._linalg.columns import Block, Number
from traceax._linalg.conjugate_gradients import (
    Preconditioner,
    Sides,
    preconditioner_of,
    projected,
)
from traceax._linalg.krylov import block_krylov
from traceax._probes.samplers import sphere
from traceax._quadrature.block_quadrature import shape_for
from traceax._quadrature.dense import decompose

White = tuple[Operator, Shifts, Float[Array, "*n"], Number]


def whitened(operator: Operator, shift: Shift) -> White:
    """Factor A + D = D^{1/2} (B + shift I) D^{1/2}, or A + shift I.

    The factors are B = D^{-1/2} A D^{-1/2}; the shift, which is 1; the diagonal of
    D^{-1/2}; and log det D. For A + shift I nothing is scaled: B is A, the diagonal is 1,
    and the logarithm is 0.
    """
    dtype, space = real_dtype(operator), operator.in_structure()
    one = jnp.ones((), dtype)
    if not isinstance(shift, lx.DiagonalLinearOperator):
        return operator, jnp.asarray(shift, dtype), one, 0 * one
    entries = jax.tree.map(lambda d: jnp.asarray(d, dtype), shift.diagonal)
    logs = sum(jnp.sum(jnp.log(leaf)) for leaf in jax.tree.leaves(entries))
    root = jax.tree.map(lambda d, like: (d**-0.5).astype(like.dtype), entries, space)
    root = lx.DiagonalLinearOperator(root)
    white = root @ operator @ root
    scale = flatten(root.diagonal, working_dtype(operator))
    if stores_matrix(operator) and not lx.is_diagonal(operator):
        matrix = scale[:, None] * LinearMap(operator).dense() * scale[None, :]
        white = lx.MatrixLinearOperator(matrix)
    return white, one, scale, jnp.asarray(logs, dtype)


def right_hand_sides(
    name: str, operator: Operator, vector: PyTree[ArrayLike], argument: str = "vector"
) -> tuple[Sides, bool]:
    """Check a vector, or several along a leading axis. Return it as columns, and whether
    there are several."""
    several = check_vector(name, operator, vector, argument)
    dtype, vector = working_dtype(operator), jax.tree.map(jnp.asarray, vector)
    columns = as_columns(vector, dtype) if several else flatten(vector, dtype)[:, None]
    return columns, several


def preconditioner(
    operator: Operator, key: PRNGKeyArray, num_matvecs: int = 100, *, shift: Shift = 0.0
) -> Operator:
    """Approximate (A + shift I)^-1, for the `options` of lineax's solvers.

    The result is the inverse of P = nu I + N, with N the Nyström approximation of A +
    (shift - nu) I from a block Krylov space. On that space P equals A + shift I. The number
    of steps of conjugate gradients then depends on the size of the rest of the spectrum
    relative to nu, which is small for kernels with noise. Pass the result as
    `options={"preconditioner": ...}`.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a Hermitian lineax operator A, given without its shift. A + shift I must
      be positive definite.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least 1. Default 100.
    - `shift`: a real number. If the shift is positive and A is positive semidefinite, nu is
      the shift. Otherwise nu is half of the least Ritz value of A + shift I. `shift` may
      also be an `lx.DiagonalLinearOperator` D with positive entries, for A + D. Default 0.

    **Returns** a lineax operator, tagged positive semidefinite. Its entries are NaN in the
    same cases as `logdet`.

    **Derivatives**: none. The result is a constant, because solutions do not depend on it.

    **Cost**: at most `num_matvecs` matvecs, and an orthonormal basis of a few more vectors.
    Applying the preconditioner takes two multiplications by this basis.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> x = jnp.linspace(0.0, 1.0, 300)
        >>> kernel = jnp.exp(-50 * (x[:, None] - x) ** 2)
        >>> tag = lx.positive_semidefinite_tag
        >>> noisy = tx.as_operator(kernel + 1e-3 * jnp.eye(300), tags=tag)
        >>> operator = tx.as_operator(kernel, tags=tag)
        >>> close = tx.preconditioner(operator, jax.random.key(0), 60, shift=1e-3)
        >>> options = {"preconditioner": close}
        >>> solve = lx.linear_solve(noisy, jnp.cos(x), lx.CG(1e-4, 1e-4), options=options)
        >>> bool(solve.stats["num_steps"] <= 5)
        True

    **Reference**: derived in `traceax/_linalg/conjugate_gradients.py`. Compare Frangella,
    Tropp and Udell (2023), Randomized Nyström preconditioning,
    [doi:10.1137/21M1466244](https://doi.org/10.1137/21M1466244).

    **See also**: `inv_quad_logdet`, `logdet`.
    """
    name = "preconditioner"
    call = begin(name, operator, key, num_matvecs)
    check_shift(name, call.operator, shift, several=False)
    structure = call.operator.in_structure()
    operator, shift, scale, _ = whitened(call.operator, shift)
    shape = shape_for(min(num_matvecs, operator.in_size()))
    (probes,) = call.on(operator).using(sphere).draw(shape.width)
    shift, scale = jax.lax.stop_gradient((shift, scale))
    inverse = compiled(_preconditioner, frozen(operator), probes, shift, shape.depth)
    scale = scale.astype(inverse.basis.dtype)

    def scaled(vector: PyTree[Array]) -> PyTree[Array]:
        """Apply D^{-1/2} P^{-1} D^{-1/2}."""
        column = scale * flatten(vector, scale.dtype)
        return unflatten(scale * inverse(column[:, None])[:, 0], structure)

    return lx.FunctionLinearOperator(scaled, structure, lx.positive_semidefinite_tag)


def _preconditioner(
    operator: Operator, probes: Block, shift: Number, depth: int
) -> Preconditioner:
    """Make P from a block Krylov run of `depth` blocks that begins with the probes."""
    space = block_krylov(LinearMap(operator), probes, depth, extend=True)
    return preconditioner_of(projected(space, shift, *decompose(space.completed())))
