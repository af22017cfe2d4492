"""Schatten norms."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PRNGKeyArray

from traceax._core.checks import check_positive, check_request
from traceax._core.estimate import Estimate
from traceax._core.operator import (
    LinearMap,
    gram,
    is_negative,
    is_positive,
    size,
    stores_matrix,
)
from traceax._functions.exact_functions import EIGENVALUES, exact_function_trace, is_cheap
from traceax._functions.function_trace import block_trace, checked_run
from traceax._functions.slq import Real, real_dtype
from traceax._linalg.columns import largest_modulus
from traceax._probes.draw import draw
from traceax._probes.samplers import sphere
from traceax._quadrature.scalar import scalar_function

_POWERS = (
    "Pass 1 for the nuclear norm; for the largest singular value, p = inf, use an "
    "eigensolver: scipy.sparse.linalg.svds, say."
)


def schatten_norm(
    operator: lx.AbstractLinearOperator,
    p: Real,
    key: PRNGKeyArray,
    num_matvecs: int = 240,
    *,
    num_probes: int | None = None,
    num_steps: int | None = None,
) -> Estimate:
    """Estimate the Schatten norm ||B||_p = (sum of sigma_i^p)^(1/p), also of rectangular B.

    It is computed from tr |B|^p as in `function_trace`: of x -> |x|^p on B itself if it is
    tagged semidefinite, else of x -> x^(p/2) on B* B or B B*, whichever is smaller. p = 1
    is the nuclear norm, p = 2 the Frobenius norm (for which `frobenius_norm_squared` is
    more accurate); large p approach the spectral norm. Biased, because the root is not
    linear: low by about standard_error^2 (p - 1) / (2 value).

    Exact if num_probes * num_steps reaches the smaller dimension or that is at most 64, and
    for operators that store their matrix up to 1024.

    **Arguments** (the others are in the guide's conventions)

    - `operator`: any lineax operator, square or not. Singular values below sqrt(eps) of the
      largest are lost, unless it is tagged semidefinite.
    - `p`: a positive, finite number, or an array of shape `()`.
    - `num_matvecs`: the budget if both dimensions are above 64, at least 13, or the smaller
      dimension. Default 240.
    - `num_probes`, `num_steps`: as in `function_trace`; they choose the run on the square.

    **Derivatives**: in the operator and in `p`, as those of `function_trace`. For p < 2,
    singular values of 0 do not contribute. NaN at the zero operator. **Cost**: at
    most `num_matvecs` applications (half of them of the adjoint, unless the operator is
    tagged semidefinite), the first one to see its scale; an orthonormal basis of num_probes
    * num_steps vectors.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> operator = lx.MatrixLinearOperator(jax.numpy.eye(300, 200))
        >>> norm = tx.schatten_norm(operator, 1, jax.random.key(0), 30)
        >>> print(norm.value.round())
        200.0

    **Reference**: Ubaru, Chen and Saad (2017), Fast estimation of tr(f(A)) via stochastic
    Lanczos quadrature, section 6.2, doi:10.1137/16M1104974, for the norm as such a trace.
    """
    name = "schatten_norm"
    operator = check_request(name, operator, key, num_matvecs, 13, square=False)
    check_positive(name, "p", p, _POWERS)
    unit = _unit(name, operator, key)
    # XLA would make (x / unit) / unit into x / (unit * unit), whose divisor may be 0.
    scaled = operator * (1 / unit)
    if is_positive(operator) or is_negative(operator):
        target, exponent, cost = scaled, p, 1
    else:
        target, exponent, cost = _square(scaled), p / 2, 2
    fn, structure = scalar_function(name, _power(exponent), real_dtype(target))
    products = max((num_matvecs - 1) // cost, 1)
    shape, budget = checked_run(name, products, num_probes, num_steps)
    if is_cheap(target, budget):
        traced = exact_function_trace(target, fn, structure)
    else:
        traced = block_trace(name, target, fn, structure, key, shape)
    unit = unit.astype(traced.value.dtype)
    total = jax.lax.stop_gradient(traced.value)
    rate = jnp.where(total > 0, total, 1) ** (1 / p - 1) / p
    rate = jax.lax.stop_gradient(jnp.where(total > 0, rate, 1))
    return Estimate(
        unit * traced.value ** (1 / p),
        unit * (traced.standard_error * rate),
        traced.num_matvecs * cost + 1,
        traced.degrees_of_freedom,
    )


def _square(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    square = gram(operator)
    if not stores_matrix(operator) or size(square) > EIGENVALUES:
        return square
    matrix = LinearMap(square).dense()
    return lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)


def _unit(
    name: str, operator: lx.AbstractLinearOperator, key: PRNGKeyArray
) -> Float[Array, ""]:
    """The size of one image, to divide by: squares and powers may be out of range."""
    probe = draw(name, sphere, key, operator, 1)
    size = jax.lax.stop_gradient(largest_modulus(LinearMap(operator)(probe)))
    leaves = jax.tree.leaves((operator.in_structure(), operator.out_structure()))
    coarsest = min((jnp.finfo(leaf.dtype) for leaf in leaves), key=lambda info: info.bits)
    return size.astype(coarsest.dtype)


def _power(p: float | Array) -> Callable[[Array], Array]:
    """|x|^p, flat at 0: there is no derivative there that could be meant."""

    def power(x: Array) -> Array:
        size = jnp.abs(x)
        return jnp.where(size > 0, jnp.where(size > 0, size, 1) ** p, 0)

    return power
