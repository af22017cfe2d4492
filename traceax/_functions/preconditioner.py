"""Preconditioners for the solvers of lineax."""

from __future__ import annotations

import equinox as eqx
import jax
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray, PyTree

from traceax._core.canonical import compiled
from traceax._core.checks import check_request, check_shift
from traceax._core.operator import LinearMap, Structure, flatten, frozen, size, unflatten
from traceax._functions.equations import Shift, whitened
from traceax._linalg.krylov import block_krylov
from traceax._linalg.nystrom import Preconditioner, preconditioner_of, projected
from traceax._probes.draw import draw
from traceax._probes.samplers import sphere
from traceax._quadrature.block_quadrature import shape_for


def preconditioner(
    operator: lx.AbstractLinearOperator,
    key: PRNGKeyArray,
    num_matvecs: int = 100,
    *,
    shift: Shift = 0.0,
) -> lx.AbstractLinearOperator:
    """About (A + shift I)^-1, for lineax's solvers as `options={"preconditioner": ...}`.

    It is the inverse of P = nu I + the Nyström approximation of A + (shift - nu) I from a
    block Krylov space; P is A + shift I on that space. Conjugate gradients then depend on
    the rest of the spectrum relative to nu, which is small for kernels with noise.

    **Arguments** (the others are in the guide's conventions)

    - `operator`: Hermitian (real: symmetric), positive definite together with `shift`; tags
      are not needed.
    - `num_matvecs`: at least 1. Default 100.
    - `shift`: real: nu is the shift if it is positive and A positive semidefinite, else
      half the least Ritz value. Or an `lx.DiagonalLinearOperator` D of positive entries,
      for A + D. The operator itself is given without it.

    **Returns** a lineax operator on the same space, tagged positive semidefinite. NaN if
    A + shift I is found not to be positive definite.

    **Derivatives**: none: it is a constant, because solutions do not depend on it.
    **Cost**: at most `num_matvecs` applications; an orthonormal basis of little more
    vectors. To apply it takes two products with the basis.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> x = jnp.linspace(0.0, 1.0, 300)
        >>> kernel = jnp.exp(-50 * (x[:, None] - x[None, :]) ** 2)
        >>> tag = lx.positive_semidefinite_tag
        >>> noise = 1e-3 * lx.IdentityLinearOperator(jax.ShapeDtypeStruct((300,), x.dtype))
        >>> operator = lx.MatrixLinearOperator(kernel, tag)
        >>> noisy = lx.TaggedLinearOperator(operator + noise, tag)
        >>> close = tx.preconditioner(operator, jax.random.key(0), 60, shift=1e-3)
        >>> solver = lx.CG(rtol=1e-4, atol=1e-4)
        >>> options = {"preconditioner": close}
        >>> solution = lx.linear_solve(noisy, jnp.cos(x), solver, options=options)
        >>> bool(solution.stats["num_steps"] <= 5)
        True

    **Reference**: derived in `traceax/_linalg/nystrom.py`. Compare Frangella, Tropp
    and Udell (2023), Randomized Nyström preconditioning, doi:10.1137/21M1466244.
    """
    name = "preconditioner"
    operator = check_request(name, operator, key, num_matvecs, 1)
    check_shift(name, operator, shift, several=False)
    structure = operator.in_structure()
    operator, shift, scale, _ = whitened(operator, shift)
    shape = shape_for(min(num_matvecs, size(operator)))
    probes = draw(name, sphere, key, operator, shape.width)
    shift, scale = jax.lax.stop_gradient((shift, scale))
    inverse = compiled(_preconditioner, frozen(operator), probes, shift, shape.depth)
    scaled = _Scaled(inverse, scale.astype(inverse.basis.dtype), structure)
    return lx.FunctionLinearOperator(scaled, structure, lx.positive_semidefinite_tag)


def _preconditioner(
    operator: lx.AbstractLinearOperator,
    probes: Inexact[Array, "n k"],
    shift: Float[Array, ""],
    depth: int,
) -> Preconditioner:
    space = block_krylov(LinearMap(operator), probes, depth)
    return preconditioner_of(projected(space, shift))


class _Scaled(eqx.Module):
    """D^{-1/2} P^{-1} D^{-1/2}, on pytrees; `scale` is the diagonal of D^{-1/2}."""

    inverse: Preconditioner
    scale: Array
    structure: Structure = eqx.field(static=True)

    def __call__(self, vector: PyTree[Array]) -> PyTree[Array]:
        column = self.scale * flatten(vector, self.inverse.basis.dtype)
        image = self.scale * self.inverse(column[:, None])[:, 0]
        return unflatten(image, self.structure)
