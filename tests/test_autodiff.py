"""Derivatives: in which arguments, how exact, at which cost, and what has none."""

import functools
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
def test_euler(entry: Entry) -> None:
    """The rule applied to dA = A gives the value, times the degree: always if the value is
    read through it, as XDiag's and Diag++'s of Hermitian operators are, too; and for the
    other estimators if the sketch is exact."""
    for tags in ((), PSD):
        through = entry.euler or (entry.name in ("xdiag", "diagpp") and tags == PSD)
        matrix = hermitian(spectrum("poly" if through else "rank5", N), complex)
        if through and not tags:
            matrix = general(N, complex)
        estimate = jax.jit(lambda m, tags=tags: entry.of(function(m, tags), KEY, 24).value)
        got, derivative = jax.jvp(estimate, (matrix,), (matrix,))
        assert derivative.dtype == got.dtype
        assert got.dtype == float or not tags
        close(derivative, entry.degree * got, 1e-12)


@each([ESTIMATORS[1], *ESTIMATORS[3:]], "xtrace")
@pytest.mark.parametrize("dtype", [float, slow(complex)])
def test_a_shift_has_an_exact_derivative(entry: Entry, dtype: Any) -> None:
    """dA = I: the noise of a Gaussian process, the damping of a curvature."""
    matrix, eye = entry.matrix(N, dtype), jnp.eye(N, dtype=dtype)
    derivative = jax.jit(jax.grad(lambda s: value(entry, matrix + s * eye).real))
    close(derivative(0.3), N, 1e-12)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_shift_of_a_semidefinite_operator(mixed: bool) -> None:
    """With second matvecs, and with forms of a nearly diagonal operator beside them."""
    matrix = hermitian(spectrum("flat", 70))
    if mixed:  # then most weights are between 0 and 1
        matrix = matrix + jnp.diag(5 + jnp.arange(70.0) % 7)
    trace = lambda s: tx.trace(function(matrix + s * jnp.eye(70), PSD), KEY, 24)  # noqa: E731
    gradient, estimate = jax.jit(
        jax.grad(lambda s: (trace(s).value, trace(s)), has_aux=True)
    )(0.3)
    close(gradient, 70, 1e-11)
    assert estimate.method == "xnystrace with second matvecs"


@each([ESTIMATORS[3], REST[2], REST[4]], "xtrace", "xdiag")
def test_only_something_else_is_perturbed(entry: Entry) -> None:
    """`None` tangents: the operator is a constant of the loss."""

    def loss(theta: Any) -> Any:
        return theta**2 * value(entry, entry.matrix(N))

    @jax.jit
    def derivatives(theta: Any) -> Any:
        tangent = jax.jvp(loss, (theta,), (1.0,))[1]
        return loss(theta), (jax.grad(loss)(theta), tangent, jax.hessian(loss)(theta))

    nine, found = derivatives(3.0)
    close(found, (2 * nine / 3, 2 * nine / 3, 2 * nine / 9), 1e-14)


@pytest.mark.slow
def test_a_perturbation_that_the_matvec_does_not_depend_on() -> None:
    """The point at which a linear function has its Jacobian."""
    matrix = general(N)

    def loss(point: Any) -> Any:
        operator = lx.JacobianLinearOperator(lambda x, args: matrix @ x, point)
        return jnp.sum(point**2) + tx.xtrace(operator, KEY, BUDGET).value

    both = jax.jit(lambda x: (jax.grad(loss)(x), jax.jacfwd(loss)(x)))
    for derivative in (jax.grad(loss)(jnp.ones(N)), *both(jnp.ones(N))):
        close(derivative, 2 * jnp.ones(N), 1e-14)


@each(ESTIMATORS[-2:], "xtrace")
def test_second_derivatives_of_a_quadratic(entry: Entry) -> None:
    """With frozen weights the Hessian of A = sum of theta_i theta_j B_ij reads each B_ij
    through the same weight, so it is symmetric and consistent with the gradient."""
    parts = [entry.matrix(N, seed=seed) for seed in range(2)]

    def loss(theta: Any) -> Any:
        return value(entry, theta[0] ** 2 * parts[0] + theta[1] ** 2 * parts[1])

    theta, gradient = jnp.array([1.0, 0.5]), jax.grad(loss)
    every = jax.jit(lambda x: (gradient(x), jax.hessian(loss)(x), jax.jacrev(gradient)(x)))
    found, hessian, backwards = every(theta)
    close(jnp.diag(hessian), found / theta, 1e-11)
    close(hessian, jnp.diag(jnp.diag(hessian)), 1e-12)
    close(backwards, hessian, 1e-12)


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


@each(ESTIMATORS + REST, "hutchpp_trace", "hutchinson_diagonal")
def test_matvec_vjps_of_a_gradient(entry: Entry) -> None:
    """The matvec counts them. For XTrace they are no more than the matvecs of the value."""
    matrix, calls = hermitian(spectrum("poly", N)), []

    @jax.custom_vjp
    def counted(image: Any) -> Any:
        return image

    def backward(_: None, ct: Any) -> Any:
        jax.debug.callback(calls.append, ct[0])
        return (ct,)

    counted.defvjp(lambda image: (image, None), backward)

    def loss(matrix: Any) -> Any:
        tag = PSD if entry.semidefinite else lx.symmetric_tag
        operator = matrix_free(lambda v: counted(matrix @ v), N, tag)
        return entry.contracted(entry.estimate(operator, KEY, BUDGET).value)

    jax.block_until_ready(jax.grad(loss)(matrix))
    jax.effects_barrier()
    others = {"hutchpp_trace": 2 / 3, "diagpp": 2 / 3, "na_hutchpp_trace": 1 / 2}
    others |= dict.fromkeys(("xnystrace", "xnysdiag", "frobenius_norm_squared"), 2)
    assert len(calls) == pytest.approx(others.get(entry.name, 1) * BUDGET)


@functools.cache
def error_of_a_turn(entry: Entry) -> float:
    """Of the tangent dA = S A - A S. It turns the eigenvectors of a decaying spectrum."""
    matrix = hermitian(spectrum("poly", 70))
    skew = general(70) - general(70).T
    tangent = skew @ matrix - matrix @ skew

    def derivative(key: Any) -> Any:
        estimate = lambda m: entry.estimate(function(m, PSD), key, 32).value  # noqa: E731
        return jax.jvp(estimate, (matrix,), (tangent,))[1]

    truth = jnp.diagonal(tangent)
    missed = jnp.linalg.norm(over_keys(derivative, KEY, 10) - truth[None]) / 10**0.5
    return float(missed / jnp.linalg.norm(truth))


@each(REST[1:4], "xdiag")
def test_tangents_of_diagonals_are_second_order(entry: Entry) -> None:
    """The error of the two-sided weight is of second order in the part that the sketch
    misses; the error of signs alone is as large as the tangent."""
    assert error_of_a_turn(entry) < 0.15
    assert error_of_a_turn(REST[0]) > 0.5
