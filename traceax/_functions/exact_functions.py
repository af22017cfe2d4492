"""Functions of operators that are small enough for all eigenvalues to be computed.

For an operator that need not be Hermitian, with eigenvalues x_a and eigenvectors V,

    tr f(A) = sum_a f(x_a),    d tr f(A) = tr(f'(A) dA) = sum_a f'(x_a) (V^{-1} dA V)_aa.

Both are as well-conditioned as f and f' are at A. But the terms of the second sum may be as
large as the condition number of V, and then they cancel. If it is too large, A + E and
A - E are decomposed instead of A, where E is random and of relative size d. Almost always
this reduces the condition number to about 1/d (Banks, Garza-Vargas, Kulkarni and Srivastava
2022, doi:10.1007/s10208-022-09577-5). The mean over both signs has an error of order d^2,
because tr(f'(A + E) dA) is analytic in E. So derivatives keep half of their digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Inexact

from traceax._core.canonical import compiled
from traceax._core.estimate import Estimate, exact_estimate
from traceax._core.operator import (
    LinearMap,
    Operator,
    frozen,
    known_diagonal,
    stores_matrix,
)
from traceax._core.rule import Algorithm, Outcome, Values, with_own_jvp
from traceax._core.vectors import Structure, as_result
from traceax._estimators.call import SMALL, Call
from traceax._linalg import lapack
from traceax._linalg.columns import (
    Block,
    Matrix,
    Number,
    dot,
    einsum,
    largest_modulus,
    over,
    times,
)
from traceax._quadrature.dense import Eigen, columns, decompose
from traceax._quadrature.nodes import (
    Direction,
    Nodes,
    at_nodes,
    perturbation,
    refuse_second,
)
from traceax._quadrature.scalar import (
    Flat,
    MatrixFunction,
    ScalarFunction,
    Slope,
    read_combination,
)

# Up to these dimensions, on two cores, the eigendecomposition of a stored matrix takes a
# second or so, and its Cholesky factorisation a tenth of a second.
EIGENVALUES, CHOLESKY = 1024, 2048

# A matrix is not Hermitian if its asymmetry exceeds this part of its largest entry.
MATRIX_ASYMMETRY = 1e-2


def is_small(operator: Operator, budget: int, stored: int = EIGENVALUES) -> bool:
    """Return whether the whole matrix of an operator costs no more than an estimate.

    It takes n matvecs, or none if the operator stores it. In the second case the dimension
    must be at most `stored`, because the matrix is decomposed. If the matrix is not square,
    n is its smaller dimension.
    """
    n = min(operator.in_size(), operator.out_size())
    return n <= max(budget, SMALL) or (stores_matrix(operator) and n <= stored)


AllEntries = Inexact[Array, " *entries"]


class Entries(NamedTuple):
    """All entries of an operator, and the number of matvecs that they took.

    `array` is the matrix, or its diagonal if the operator is diagonal. It is NaN if the
    operator is clearly not Hermitian.
    """

    array: AllEntries
    spent: int


def entries(operator: Operator, budget: int, stored: int = EIGENVALUES) -> Entries | None:
    """Return all entries of an operator, or None if they cost more than an estimate."""
    known = _of_diagonal(operator)
    if known is None and is_small(operator, budget, stored):
        return Entries(hermitian_or_nan(LinearMap(operator).dense()), price(operator))
    return known


def price(operator: Operator) -> int:
    """Return the number of matvecs that the whole matrix takes."""
    return 0 if stores_matrix(operator) else operator.in_size()


def _of_diagonal(operator: Operator) -> Entries | None:
    """Return the entries of a diagonal operator, or None if it is not diagonal."""
    known = known_diagonal(operator) if lx.is_diagonal(operator) else None
    return None if known is None else Entries(hermitian_or_nan(known[0]).real, known[1])


def hermitian_or_nan(matrix: Array) -> Array:
    """Return a matrix, or NaN everywhere if it is clearly not Hermitian.

    Decompositions of Hermitian matrices read only one half of a matrix, so they would not
    notice. The diagonal of a matrix can be given instead of the matrix.
    """
    skew = jnp.max(jnp.abs(matrix - matrix.conj().T))
    return jnp.where(skew > MATRIX_ASYMMETRY * largest_modulus(matrix), jnp.nan, matrix)


def asymmetry_error(
    matrix: AllEntries, value: Values, function: Callable[..., Any], *known: Any
) -> Float[Array, "*values"]:
    """Return how much the exact value of a Hermitian matrix depends on its asymmetry.

    The value is of the Hermitian part. The error is its distance from the value of the
    Hermitian matrix that has the same lower triangle. It is 0 if the asymmetry is rounding,
    and then no second matrix is decomposed. A diagonal can be given instead of the matrix.
    `function(*known, matrix)` returns the value of a matrix, and perhaps more after it.
    """
    if matrix.ndim == 1:
        return jnp.zeros_like(value.real)
    of_matrix = frozen(eqx.Partial(function, *known))
    return compiled(_asymmetry_error, *jax.lax.stop_gradient((matrix, value)), of_matrix)


def _asymmetry_error(matrix: Array, value: Array, of_matrix: Callable) -> Array:
    arrays, rest = eqx.partition(of_matrix, eqx.is_array)

    @lapack.one_by_one  # or a batch would decompose all second matrices
    def error(known: tuple[Array, Array, Any]) -> Array:
        matrix, value, arrays = known

        def distance() -> Array:
            lower = jnp.tril(matrix, -1)
            diagonal = jnp.diag(jnp.diagonal(matrix).real).astype(matrix.dtype)
            symmetric = lower + diagonal + lower.conj().T
            change = jax.tree.leaves(eqx.combine(arrays, rest)(symmetric))[0] - value
            return jnp.where(jnp.isfinite(change), jnp.abs(change), jnp.inf)

        none = jnp.zeros_like(value.real)
        skew = largest_modulus(matrix - matrix.conj().T)
        rounding = 16 * jnp.finfo(none.dtype).eps * len(matrix) ** 0.5
        is_asymmetric = skew > rounding * largest_modulus(matrix)
        return jax.lax.cond(is_asymmetric, distance, lambda: none)

    return error((matrix, value, arrays))


def exact_function_trace(
    call: Call, fn: Flat, structure: Structure, combine: ScalarFunction | None = None
) -> Estimate:
    """Return the exact tr f(A) of a Hermitian operator, or the combination of traces."""
    known = _of_diagonal(call.operator)
    if known is None:
        subject = MatrixFunction(LinearMap(call.operator), fn, combine)
        return from_matrix(call, _exact_trace, subject, structure)
    total = jnp.sum(jax.vmap(fn)(known.array), axis=0)
    total = total if combine is None else combine(total)
    return exact_estimate(as_result(total, structure), known.spent)


def from_matrix(
    call: Call, algorithm: Algorithm, subject: MatrixFunction, structure: Structure
) -> Estimate:
    """Run an algorithm that makes the whole matrix, under the derivative rule."""
    how = {"method": "exact", "spent": price(call.operator), "degrees": call.num_exact}
    return call.finish(algorithm, None, structure=structure, subject=subject, **how)


def _exact_trace(subject: MatrixFunction, _: None) -> Outcome:
    """Compute tr f(A) from the eigenvalues of a Hermitian matrix."""
    matrix, combine = hermitian_or_nan(subject.linear_map.dense()), subject.combine
    value, nodes = _total(subject.fn, combine, matrix)
    error = asymmetry_error(matrix, value, _total, subject.fn, combine)
    readout = nodes if combine is None else Partial(read_combination, nodes, None)
    return Outcome(value, error, readout)


def _total(fn: Flat, combine: Callable | None, matrix: Matrix) -> tuple[Values, Nodes]:
    """Return tr f(A), or the combination of traces, and the eigenvalues as nodes."""
    eigen = decompose(matrix)
    nodes, pairs = eigen.values[None, None], Partial(_matrix_pairs, matrix, eigen)
    nodes = Nodes(nodes, jnp.ones_like(nodes)[:, :, None], pairs)
    total = nodes.total(fn)
    return total if combine is None else combine(total), nodes


def _matrix_pairs(
    matrix: Array, eigen: Eigen, subject: MatrixFunction, direction: Direction
) -> Values:
    """Return tr(f'(A) dA) for a Hermitian A, where dA is the direction."""
    matrix = with_own_jvp(matrix, LinearMap.dense, subject.linear_map)
    slopes = columns(Slope(subject.fn), matrix, eigen, count=len(matrix))
    return einsum("pij,ji->p", slopes, direction.matrix().astype(slopes.dtype))


def factorised(
    array: AllEntries, shift: Number
) -> tuple[Callable[[Block], Block], Number, Number]:
    """Return a function y -> B^{-1} y of B = A + shift I, log det B, and its error.

    `array` is the matrix A, or its diagonal if it has no other entries.

    The error of the log-determinant is infinite if B is singular to rounding, else zero. If
    rounding has made B indefinite, the log-determinant is -inf. If B is clearly indefinite,
    it is NaN.

    The derivative is d log det B = tr B^{-1} dB. It computes B^{-1}, which takes less time
    than the derivative of the Cholesky factorisation.
    """
    if array.ndim == 1:
        # If an entry is negative, the result is NaN, as with a Cholesky factorisation.
        shifted = jnp.where(jnp.all(array + shift >= 0), array + shift, jnp.nan)
        solve = lambda y: over(y, shifted[:, None])  # noqa: E731
        return solve, jnp.sum(jnp.log(shifted)), jnp.zeros_like(shift)
    identity = jnp.eye(len(array), dtype=array.dtype)
    shifted = array + shift.astype(array.dtype) * identity
    held = jax.lax.stop_gradient(shifted)
    factor, is_singular = compiled(lapack.cholesky_if_definite, held)
    logs = 2 * jnp.sum(jnp.log(jnp.diagonal(factor).real))
    logs = jnp.where(is_singular, -jnp.inf, logs)
    error = jnp.where(_is_singular(held, factor), jnp.inf, 0).astype(logs.dtype)
    inverse = Partial(solved, factor, y=identity)
    logs = with_own_jvp(logs, _along, shifted, inverse)
    return Partial(solved, factor, shifted), logs, error


def solved(factor: Matrix, matrix: Matrix, y: Block) -> Block:
    """Return B^{-1} y, differentiable in B and y to any order.

    `factor` is the Cholesky factor of B, which is `matrix`.
    """

    def solve(_: Any, y: Array) -> Array:
        return jax.scipy.linalg.cho_solve((factor, True), y)

    def transposed(_: Any, y: Array) -> Array:
        return solve(_, y.conj()).conj()

    return jax.lax.custom_linear_solve(lambda v: dot(matrix, v), y, solve, transposed)


def _along(matrix: Array, slope: Array) -> Array:
    """Return Re tr(slope* matrix). If the slope of a function of a matrix is held, the
    derivative of this is that of the function."""
    return jnp.sum(slope.conj() * matrix).real


def _is_singular(matrix: Matrix, factor: Matrix) -> Bool[Array, ""]:
    """Return whether B is singular to rounding, by two steps of inverse iteration.

    The first step is from a vector without a pattern, which is unlikely to be orthogonal to
    the eigenvector of the least eigenvalue.
    """
    n, rounding = len(matrix), 4 * jnp.finfo(matrix.dtype).eps * len(matrix) ** 0.5
    largest, vector = largest_modulus(jnp.diagonal(matrix)), jnp.cos(jnp.arange(n) ** 2)
    for _ in range(2):
        vector = over(vector, jnp.linalg.norm(vector)).astype(matrix.dtype)
        vector = jax.scipy.linalg.cho_solve((factor, True), times(largest, vector))
    return ~(rounding * jnp.linalg.norm(vector) < 1)


def exact_power_sum(call: Call, p: Any) -> Estimate:
    """Return tr |B|^p, from the singular values of B.

    The squares of singular values, the eigenvalues of B* B, would lose those that are
    below sqrt(eps) times the largest one."""
    linear_map = LinearMap(call.operator)
    wide = linear_map.operator.out_size() < linear_map.operator.in_size()
    matrix = (linear_map.adjoint if wide else linear_map).dense()
    left, values, right = jax.lax.stop_gradient(lapack.svd(matrix))
    # Some values are zero but for rounding. Their powers may be large.
    rounding = jnp.finfo(values.dtype).eps * values[0]
    values = jnp.where(values > rounding, values, 0)
    slopes = p * power(values, p - 1)
    slope = dot(times(left, slopes[None, :]), right)
    # The slope p B (B* B)^(p/2 - 1) is known; its derivative is that of the formula.
    held = Partial(with_own_jvp, slope, _by_square)
    along = lambda subject, slope: _along(subject[0], slope)  # noqa: E731
    moved = with_own_jvp(jnp.zeros_like(values[0]), along, (matrix, p), held)
    spent = 0 if stores_matrix(call.operator) else call.num_exact
    return exact_estimate(jnp.sum(power(values, p)) + moved, spent)


def power(x: Array, p: Any) -> Array:
    """Return |x|^p, and 0 at 0, where there is no derivative that could be meant. NaN
    stays NaN."""
    size = jnp.abs(x)
    return jnp.where(size == 0, 0, jnp.where(size == 0, 1, size) ** p)


def _by_square(subject: tuple[Array, Any]) -> Array:
    matrix, p = subject
    square = dot(matrix.conj().T, matrix)
    eigen = jax.lax.stop_gradient(decompose(square))
    fn = eqx.Partial(lambda p, x: p * power(x, p / 2 - 1)[None], p)
    return dot(matrix, columns(fn, square, eigen, count=len(square))[0])


def exact_general(subject: MatrixFunction, _: None, *, real: bool) -> Outcome:
    """Compute tr f(A) from the eigenvalues of a square matrix.

    If it should be `real` and has an imaginary part beyond rounding, the value is NaN.
    """
    matrix = subject.linear_map.dense()
    nodes = lapack.eigvals(matrix)
    values = at_nodes(subject.fn, nodes)
    value = jnp.sum(values, axis=0)
    if real:
        # Conjugate eigenvalues have conjugate values, but not if f has a branch cut between
        # them. (If rounding has made an eigenvalue of zero negative, its square root is
        # imaginary, but too small to count.)
        noise = 30 * subject.linear_map.eps**0.5
        sizes = jnp.sum(jnp.abs(values), axis=0)
        crossed = jnp.abs(value.imag) > min(noise, 1e-3) * sizes
        value = jnp.where(crossed, jnp.nan, value.real)
    nodes = nodes[None, None]
    pairs = Partial(_general_pairs, matrix)
    readout = Nodes(nodes, jnp.ones_like(nodes)[:, :, None], pairs)
    return Outcome(value, jnp.zeros_like(value.real), readout)


def _general_pairs(matrix: Matrix, subject: MatrixFunction, direction: Direction) -> Values:
    """Return tr(f'(A) dA) for a square A, where dA is the direction."""
    spectrum = with_own_jvp(_spectrum(matrix), refuse_second, subject.linear_map)
    nodes, vectors, inverse = spectrum
    slopes = at_nodes(Slope(subject.fn), nodes).astype(nodes.dtype)
    turned = dot(inverse, direction.matrix().astype(nodes.dtype))
    rates = einsum("kab,kba->ka", turned, vectors)
    return einsum("kap,ka->p", slopes, rates) / 2


class _Spectrum(NamedTuple):
    """The decompositions of A + E and A - E, or twice the decomposition of A.

    `inverse` is V^{-1}.
    """

    nodes: Inexact[Array, "2 n"]
    vectors: Inexact[Array, "2 n n"]
    inverse: Inexact[Array, "2 n n"]


def _spectrum(matrix: Matrix) -> _Spectrum:
    """Decompose A, or A + E and A - E if the eigenvectors of A are too ill-conditioned.

    A itself is perturbed by its rounding error, because it may have no basis of
    eigenvectors. Almost every matrix near it has one.
    """
    eps = float(jnp.finfo(matrix.dtype).eps)
    near = _decomposed((matrix + perturbation(matrix, eps))[None])
    condition = jnp.linalg.norm(near.vectors) * jnp.linalg.norm(near.inverse)
    aside = perturbation(matrix, eps**0.4)
    return jax.lax.cond(
        condition < matrix.shape[0] * eps**-0.5,
        lambda: _Spectrum(*(jnp.concatenate([x, x]) for x in near)),
        lambda: _decomposed(jnp.stack([matrix + aside, matrix - aside])),
    )


def _decomposed(matrices: Inexact[Array, "k n n"]) -> _Spectrum:
    """Return the eigenvalues, V and V^{-1} of each matrix."""
    nodes, vectors = lapack.eig(matrices)
    unit = jnp.broadcast_to(jnp.eye(nodes.shape[1], dtype=nodes.dtype), vectors.shape)
    return _Spectrum(nodes, vectors, lapack.solve((vectors, unit)))
