"""Derivatives: in which arguments, how exact, at which cost, and what has none."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import pytest

import traceax as tx
from tests.helpers import close, over_keys, slow
from tests.matrices import general, hermitian, spectrum
from tests.tables import ESTIMATORS, REST, Entry, each
from tests.wrappers import PSD, function, matrix_free

KEY = jax.random.key(5)
N, BUDGET = 30, 12


def value(entry: Entry, matrix: Any) -> Any:
    return entry.contracted(entry.of(function(matrix), KEY, BUDGET).value)


@each(ESTIMATORS + REST, "hutchinson_trace", "xtrace", "hutchinson_diagonal", "xdiag")
@pytest.mark.parametrize("tags", [(), PSD], ids=["untagged", "tagged"])
def test_euler(entry: Entry, tags: Any) -> None:
    """The rule applied to dA = A gives the value, times the degree: always if the value is
    read through it, as XDiag's and Diag++'s of Hermitian operators are, too; and for the
    other estimators if the sketch is exact."""
    through = entry.euler or (entry.name in ("xdiag", "diagpp") and tags == PSD)
    matrix = hermitian(spectrum("rank5", N), complex)
    if through:
        matrix = hermitian(spectrum("poly", N), complex) if tags else general(N, complex)

    def estimate(matrix: Any) -> Any:
        return entry.of(function(matrix, tags), KEY, 24).value

    got, slope = jax.jvp(estimate, (matrix,), (matrix,))
    assert slope.dtype == got.dtype
    assert got.dtype == float or not tags
    close(slope, entry.degree * got, 1e-12)


@each([ESTIMATORS[1], *ESTIMATORS[3:]], "xtrace")
@pytest.mark.parametrize("dtype", [float, slow(complex)])
def test_a_shift_has_an_exact_derivative(entry: Entry, dtype: Any) -> None:
    """dA = I: the noise of a Gaussian process, the damping of a curvature."""
    matrix = entry.matrix(N, dtype)
    slope = jax.grad(lambda s: value(entry, matrix + s * jnp.eye(N, dtype=dtype)).real)(0.3)
    close(slope, N, 1e-12)


@each([ESTIMATORS[3], REST[2], REST[4]], "xtrace", "xdiag")
def test_only_something_else_is_perturbed(entry: Entry) -> None:
    """`None` tangents: the operator is a constant of the loss."""
    matrix = entry.matrix(70)
    fixed = value(entry, matrix)

    def loss(theta: Any) -> Any:
        return theta**2 * value(entry, matrix)

    close(jax.grad(loss)(3.0), 6 * fixed, 1e-14)
    close(jax.jvp(loss, (3.0,), (1.0,))[1], 6 * fixed, 1e-14)
    close(jax.jit(jax.hessian(loss))(3.0), 2 * fixed, 1e-14)


def test_a_perturbation_that_the_matvec_does_not_depend_on() -> None:
    """The point at which a linear function has its Jacobian."""
    matrix = general(N)

    def loss(point: Any) -> Any:
        operator = lx.JacobianLinearOperator(lambda x, args: matrix @ x, point)
        return jnp.sum(point**2) + tx.xtrace(operator, KEY, BUDGET).value

    for transform in (lambda f: f, jax.jit):
        close(transform(jax.grad(loss))(jnp.ones(N)), 2 * jnp.ones(N), 1e-14)
        close(transform(jax.jacfwd(loss))(jnp.ones(N)), 2 * jnp.ones(N), 1e-14)


@each(ESTIMATORS[-2:], "xtrace")
def test_second_derivatives_of_a_quadratic(entry: Entry) -> None:
    """With frozen weights the Hessian of A = sum of theta_i theta_j B_ij reads each B_ij
    through the same weight, so it is symmetric and consistent with the gradient."""
    parts = [entry.matrix(N, seed=seed) for seed in range(2)]

    def loss(theta: Any) -> Any:
        return value(entry, theta[0] ** 2 * parts[0] + theta[1] ** 2 * parts[1])

    theta = jnp.array([1.0, 0.5])
    gradient, hessian = jax.grad(loss)(theta), jax.hessian(loss)(theta)
    close(jnp.diag(hessian), gradient / theta, 1e-11)
    close(hessian, jnp.diag(jnp.diag(hessian)), 1e-12)
    close(jax.jacrev(jax.grad(loss))(theta), hessian, 1e-12)


@pytest.mark.parametrize(
    "transform",
    [lambda f: f, slow(eqx.filter_jit), slow(lambda f: eqx.filter_jit(jax.vmap(f)))],
    ids=["eager", "jit", "jit of vmap"],
)
def test_the_standard_error_has_no_derivative(transform: Any, request: Any) -> None:
    """In reverse mode an error names it, in forward mode it is infinite."""
    base = general(N)
    x = jnp.ones(3 if "vmap" in request.node.name else ())

    def both(scale: Any) -> tx.Estimate:
        return tx.xtrace(function(scale * base), KEY, BUDGET)

    refused = jax.grad(lambda s: both(s).value + both(s).standard_error)
    with pytest.raises(Exception, match="standard_error"):
        jax.block_until_ready(transform(refused)(x))
    logged = jax.grad(lambda s: (both(s).value, both(s).standard_error), has_aux=True)
    assert jnp.all(jnp.isfinite(transform(logged)(x)[0]))
    _, tangent = jax.jvp(both, (jnp.array(1.0),), (jnp.array(1.0),))
    assert jnp.isinf(tangent.standard_error)
    assert jnp.isfinite(tangent.value)


@each(ESTIMATORS + REST, "hutchinson_trace", "hutchpp_trace", "hutchinson_diagonal")
def test_matvec_vjps_of_a_gradient(entry: Entry) -> None:
    """The matvec counts them. For XTrace they are no more than the matvecs of the value."""
    matrix = hermitian(spectrum("poly", N))
    backward_calls = []

    @jax.custom_vjp
    def matvec(matrix: Any, v: Any) -> Any:
        return matrix @ v

    def forward(matrix: Any, v: Any) -> Any:
        return matvec(matrix, v), (matrix, v)

    def backward(residual: Any, ct: Any) -> Any:
        matrix, v = residual
        jax.debug.callback(backward_calls.append, ct[0])
        return jnp.outer(ct, v), matrix.T @ ct

    matvec.defvjp(forward, backward)

    def loss(matrix: Any) -> Any:
        tag = PSD if entry.semidefinite else lx.symmetric_tag
        operator = matrix_free(lambda v: matvec(matrix, v), N, tag)
        return entry.contracted(entry.estimate(operator, KEY, BUDGET).value)

    jax.block_until_ready(jax.grad(loss)(matrix))
    jax.effects_barrier()
    others = {"hutchpp_trace": 2 / 3, "diagpp": 2 / 3, "na_hutchpp_trace": 1 / 2}
    others |= dict.fromkeys(("xnystrace", "xnysdiag", "frobenius_norm_squared"), 2)
    assert len(backward_calls) == pytest.approx(others.get(entry.name, 1) * BUDGET)


@each(REST[1:4], "xdiag")
def test_tangents_of_diagonals_are_second_order(entry: Entry) -> None:
    """dA = S A - A S turns the eigenvectors of a decaying spectrum. The error of the
    two-sided weight is of second order in the part that the sketch misses; the error of
    signs alone is as large as the tangent."""
    n = 70
    matrix = hermitian(spectrum("poly", n))
    skew = general(n) - general(n).T
    tangent = skew @ matrix - matrix @ skew

    def error(entry: Entry) -> float:
        def estimate(matrix: Any, key: Any) -> Any:
            return entry.estimate(function(matrix, PSD), key, 32).value

        def slope(key: Any) -> Any:
            return jax.jvp(lambda m: estimate(m, key), (matrix,), (tangent,))[1]

        slopes = over_keys(slope, KEY, 10)
        truth = jnp.diagonal(tangent)
        missed = jnp.linalg.norm(slopes - truth[None]) / 10**0.5
        return float(missed / jnp.linalg.norm(truth))

    assert error(entry) < 0.15
    assert error(REST[0]) > 0.5
