"""Equations with A + S, where S is shift I or diagonal and positive, and their whitening.

`equation_of` scales A + D by D^{-1/2}, which turns it into a matrix plus I. `whitened` does
the same with a `Whitening` of the user, and chooses what is sampled in place of log x then.
`right_hand_sides` makes columns of the vectors that the user gives. `preconditioner` is a
public function, for the solvers of lineax.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, PyTree

from traceax._core.canonical import canonical, compiled, hidden
from traceax._core.checks import (
    Shift,
    check_operator,
    check_shift,
    check_vector,
    require,
    require_type,
)
from traceax._core.estimate import Estimate
from traceax._core.keys import BLOCKS, keys_of
from traceax._core.operator import (
    LinearMap,
    Operator,
    by_application,
    frozen,
    working_dtype,
)
from traceax._core.vectors import as_columns, flatten, in_rows, unflatten
from traceax._estimators.call import Call, begin
from traceax._functions.arguments import Shifts, logarithm_of, real_dtype
from traceax._functions.whitening import Whitening
from traceax._linalg.columns import (
    Block,
    Number,
    column_dots,
    column_norms_squared,
    positive,
)
from traceax._linalg.conjugate_gradients import (
    Preconditioner,
    Sides,
    preconditioner_of,
    projected,
)
from traceax._linalg.krylov import block_krylov
from traceax._probes.draw import draw
from traceax._probes.samplers import rademacher, sphere
from traceax._quadrature.block_quadrature import shape_for
from traceax._quadrature.dense import decompose
from traceax._quadrature.scalar import MatrixFunction

# A shift, several, or the diagonal of D as a column.
Added = Float[Array, "..."]


class Congruence(LinearMap):
    """W (A + S) W* as a linear map, where A is the `operator`, and S is `added`."""

    added: Added = eqx.field(kw_only=True)
    white: LinearMap = eqx.field(kw_only=True)

    def __call__(self, block: Block) -> Block:
        inner = self.white.adjoint(block)
        image = super().__call__(inner) + self.added.astype(inner.dtype) * inner
        return self.white(image).astype(block.dtype)


class Equation(eqx.Module):
    """(A + S) u = y, and what it becomes if W whitens it: (B + shift I) W^{-*} u = W y.

    `linear_map` is B, and `white` is W, or None for the identity. `rest` is to be added to
    the trace that is sampled, for log det(A + S). That is the trace of log x, or, with a
    `control` c, of log x - c (x - 1). `error` is how far the trace of B is from what it
    should be, if that is significant.
    """

    operator: Operator
    added: Added
    linear_map: LinearMap
    shift: Shifts
    rest: Number
    white: LinearMap | None = None
    control: Number | None = None
    error: Number | None = None
    is_shifted: bool = eqx.field(static=True, default=True)

    def __call__(self, block: Block) -> Block:
        """Return (A + S) block."""
        image = LinearMap(self.operator)(block)
        return image + self.added.astype(block.dtype) * block

    def whiten(self, block: Block) -> Block:
        """Return W block."""
        return block if self.white is None else self.white(block).astype(block.dtype)

    def back(self, block: Block) -> Block:
        """Return W* block."""
        return (
            block if self.white is None else self.white.adjoint(block).astype(block.dtype)
        )

    def logarithm(self, name: str) -> tuple[MatrixFunction, PyTree]:
        """Return the function whose trace is sampled, and the structure of its traces."""
        how = {"is_zero": not self.is_shifted, "control": self.control}
        return logarithm_of(name, self.linear_map, self.shift, **how)

    def completed(self, sampled: Estimate) -> Estimate:
        """Return log det(A + S), given an estimate of the trace that is sampled."""
        error = sampled.standard_error
        error = error if self.error is None else jnp.hypot(error, self.error)
        return replace(sampled, value=sampled.value + self.rest, standard_error=error)

    def scaled(self, array: Array) -> Array:
        """Return B as a matrix, or its diagonal, given that of A, if W is diagonal."""
        if self.white is None:
            return array
        scale = self.white(jnp.ones((len(array), 1), self.white.dtype))
        both = (scale**2)[:, 0] if array.ndim == 1 else scale * scale.T
        return array * both.astype(array.dtype)


def equation_of(operator: Operator, shift: Shift) -> Equation:
    """Return the equation with A + shift I, or with A + D, which D^{-1/2} whitens: then
    B = D^{-1/2} A D^{-1/2}, and its shift is 1."""
    dtype, space = real_dtype(operator), operator.in_structure()
    one = jnp.ones((), dtype)
    if not isinstance(shift, lx.DiagonalLinearOperator):
        added = jnp.asarray(shift, dtype)
        parts = operator, added, LinearMap(operator), added, 0 * one
        is_shifted = not (isinstance(shift, int | float) and not shift)
        return Equation(*parts, is_shifted=is_shifted)
    entries = jax.tree.map(lambda d: jnp.asarray(d, dtype), shift.diagonal)
    root = jax.tree.map(lambda d, like: (d**-0.5).astype(like.dtype), entries, space)
    white, added = LinearMap(lx.DiagonalLinearOperator(root)), flatten(entries, dtype)
    similar = Congruence(operator, added=0 * one, white=white)
    return Equation(operator, added[:, None], similar, one, jnp.sum(jnp.log(added)), white)


NUM_TESTS = 2  # matvecs that show whether the trace of a whitening is right


def num_tests(name: str, whitening: Any) -> int:
    """Check what the user passed, and return how many matvecs `whitened` takes."""
    must, cure = "be a traceax.Whitening", "Pass the result of traceax.vecchia."
    fits, got = isinstance(whitening, Whitening | None), type(whitening).__name__
    require_type(fits, name, "whitening", must, got, cure)
    return 0 if whitening is None or whitening.trace is None else NUM_TESTS


def whitened(call: Call, plain: Equation, whitening: Whitening) -> Equation:
    """Return the equation that a whitening of the user makes of one that has none, or has
    its own. The shift of B is 0."""
    whitening = hidden(whitening, call.key, call.operator)
    dtype, white = real_dtype(call.operator), _white_map(call, whitening.operator)
    similar = Congruence(call.operator, added=plain.added, white=white)
    rest, zero = -2 * jnp.asarray(whitening.log_determinant, dtype), jnp.zeros((), dtype)
    parts = call.operator, plain.added, similar, zero
    if whitening.trace is None:
        return Equation(*parts, rest, white, is_shifted=False)
    key, trace = keys_of(call.key, 1, BLOCKS)[0], jnp.asarray(whitening.trace, dtype)
    probes = draw(call.name, rademacher, key, call.operator, NUM_TESTS)
    control, error = compiled(_control, *frozen((similar, probes, trace)))
    rest = rest + control * (trace - call.operator.in_size())
    return Equation(*parts, rest, white, control, error, is_shifted=False)


def _white_map(call: Call, operator: Operator) -> LinearMap:
    """Check W, and return it as a map of columns."""
    name, argument, space = call.name, "whitening.operator", call.operator.in_structure()
    white = check_operator(name, operator, argument=argument)
    n, dtype = call.operator.in_size(), working_dtype(call.operator)
    must = f"act on the space of the operator, of dimension {n}, in its field"
    got = f"dimension {white.in_size()} of {working_dtype(white)}"
    fits = white.in_size() == n and np.can_cast(working_dtype(white), dtype, "same_kind")
    cure = "Make it from the indices of all entries of the operator's leaves."
    require(fits, name, argument, must, got, cure)
    place = in_rows(np.arange(n), space)
    if white.in_structure() != space and np.any(place != np.arange(n)):
        # Columns have another order than the entries of the leaves, one after the other.
        back, moved = np.argsort(place), white.mv
        code = canonical(lambda v: moved(v[back])[place], white.in_structure())
        white = by_application(white, code)
    return LinearMap(white)


def _control(linear_map: LinearMap, probes: Block, trace: Number) -> tuple[Number, Number]:
    """Choose the control variate c (x - 1) for log x, and return c; and the error that it
    has, if its trace is clearly not the one given.

    The best c is the regression of log x on x over the spectrum. If that is lognormal with
    the mean 1 and the variance d, it is log(1 + d)/d, which is 1 near I, and small for
    spectra that W leaves wide. d is estimated from |B z - z|^2 for signs z that are
    independent of all other probes, so that the value has no bias. Forms z* B z then have
    at most the variance 2 n d, because the diagonal of B is 1.
    """
    images, n = linear_map(probes), probes.shape[0]
    variance = jnp.mean(column_norms_squared(images - probes)) / n
    control = jnp.where(variance > 0, jnp.log1p(variance) / positive(variance), 1)
    off = jnp.abs(jnp.mean(column_dots(probes, images).real) - trace)
    noise = jnp.sqrt(2 * n * variance / NUM_TESTS)
    return control, jnp.where(off > 5 * noise, control * off, 0)


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
    structure, equation = call.operator.in_structure(), equation_of(call.operator, shift)
    shape = shape_for(min(num_matvecs, call.operator.in_size()))
    (probes,) = call.using(sphere).draw(shape.width)
    equation = frozen(equation)
    how = equation.linear_map, probes, equation.shift, shape.depth
    inverse = compiled(_preconditioner, *how)

    def scaled(vector: PyTree[Array]) -> PyTree[Array]:
        """Apply D^{-1/2} P^{-1} D^{-1/2}."""
        column = flatten(vector, inverse.basis.dtype)[:, None]
        return unflatten(equation.back(inverse(equation.whiten(column)))[:, 0], structure)

    return lx.FunctionLinearOperator(scaled, structure, lx.positive_semidefinite_tag)


def _preconditioner(
    linear_map: LinearMap, probes: Block, shift: Number, depth: int
) -> Preconditioner:
    """Make P from a block Krylov run of `depth` blocks that begins with the probes."""
    space = block_krylov(linear_map, probes, depth, extend=True)
    return preconditioner_of(projected(space, shift, *decompose(space.completed())))
