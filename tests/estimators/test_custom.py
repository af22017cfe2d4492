"""An algorithm of one's own: an estimator of the library rebuilt, and wrong answers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.calls import hutchinson
from tests.helpers import close, compilations, given, leaks_checked, refused, slow
from tests.matrices import all_signs, general, hermitian
from tests.wrappers import EVERY, function

KEY = jax.random.key(4)
N = 12


def plain(operator: Any, **how: Any) -> tx.Estimate:
    return tx.custom_trace(hutchinson, operator, KEY, 5, sampler=tx.rademacher, **how)


@pytest.mark.parametrize("kind", [slow("PyTree"), slow("Tangent")])
def test_the_librarys_own_rebuilt_agrees_to_rounding(kind: str) -> None:
    """Value, error and gradient."""

    def both(m: Any) -> Any:
        theirs = tx.hutchinson_trace(EVERY[kind](m), KEY, 5)
        estimates = plain(EVERY[kind](m)), theirs
        return jnp.stack([estimate.value.real for estimate in estimates]), estimates

    (mine, their), (ours, theirs) = jax.jacrev(both, has_aux=True)(general(N, complex))
    close(mine, their, 1e-13)
    close(ours.value, theirs.value, 1e-14)  # sums are fused as it suits
    close(ours.standard_error, theirs.standard_error, 1e-13)
    assert ours.num_matvecs == theirs.num_matvecs == 5


def test_hermitian_operators_have_real_traces() -> None:
    operator = function(hermitian(1.0 + np.arange(N), complex))
    known = plain(lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag))
    assert plain(operator).value.dtype == jnp.complex128
    assert known.value.dtype == known.standard_error.dtype == jnp.float64
    assert known.value == plain(operator).value.real


def test_unbiased_with_derivatives_by_enumeration() -> None:
    """All sign vectors of four dimensions: trace, gradient and Hessian."""
    signs = jnp.asarray(all_signs(4))
    matrix, direction = general(4), general(4, seed=1)

    def alone(apply: Any, probes: Any) -> Any:
        value, _, blocks = hutchinson(apply, probes)
        return value, jnp.inf, blocks

    def mean(t: Any) -> Any:
        def one(sign: Any) -> Any:
            operator = function(jnp.sin(t) * matrix + t**3 * direction)
            return tx.custom_trace(alone, operator, KEY, 1, sampler=given(sign[None])).value

        return jnp.mean(jax.vmap(one)(signs))

    def truth(t: Any) -> Any:
        return jnp.sin(t) * jnp.trace(matrix) + t**3 * jnp.trace(direction)

    orders = jax.jit(jax.jvp, static_argnums=0)
    got, want = (orders(jax.value_and_grad(f), (0.7,), (1.0,)) for f in (mean, truth))
    close(got, want, 1e-12)


def test_closures_over_what_is_traced() -> None:
    """A learned weight, batched or not: nothing leaks, and derivatives in it are zero."""
    matrix, guess, weights = general(N), jnp.arange(1.0, N + 1), jnp.asarray([0.0, 0.5])

    def loss(weight: Any, m: Any) -> Any:
        def controlled(apply: Any, probes: Any) -> Any:
            value, error, blocks = hutchinson(apply, probes)
            known = weight * (jnp.sum(guess) - jnp.mean(guess @ probes**2))
            return value + known, error, blocks

        estimate = tx.custom_trace(controlled, function(m), KEY, 5)
        return estimate.value + 0 * jax.lax.stop_gradient(estimate.standard_error)

    both = jax.value_and_grad(loss, (0, 1))
    with leaks_checked():
        values, (zero, gradients) = jax.jit(jax.vmap(both, (0, None)))(weights, matrix)
    assert not jnp.any(zero)
    assert values[0] != values[1]
    for i in range(2):
        close((values[i], (zero[i], gradients[i])), both(weights[i], matrix), 1e-13)


def counted(algorithm: Any, operator: Any = None, num_probes: int = 5) -> Any:
    """The number of applications, without the answer."""
    operator, found = function(general(N)) if operator is None else operator, []

    def run(key: Any) -> Any:
        found.append(tx.custom_trace(algorithm, operator, key, num_probes))
        return found[0].value

    jax.eval_shape(run, KEY)
    assert found[0].degrees_of_freedom == max(num_probes - 1, 1)
    return found[0].num_matvecs


def applying(block: Any) -> Callable[..., Any]:
    """Hutchinson's, which has applied the operator to another block, too."""

    def algorithm(apply: Any, probes: Any) -> Any:
        apply(block(probes) if callable(block) else block)
        return hutchinson(apply, probes)

    return algorithm


def power(steps: int, loop: Callable[..., Any]) -> Callable[..., Any]:
    def algorithm(apply: Any, probes: Any) -> Any:
        loop(steps, lambda block: apply(block) / 10, probes)
        return hutchinson(apply, probes)

    return algorithm


def by_scan(steps: int, body: Any, block: Any) -> Any:
    return jax.lax.scan(lambda b, _: (body(b), None), block, length=steps)[0]


def by_while(steps: int, body: Any, block: Any) -> Any:
    return jax.lax.while_loop(lambda b: jnp.sum(b) > 1, body, block)


def by_vmap(steps: int, body: Any, block: Any) -> Any:
    each = jax.vmap(lambda column: body(column[:, None])[:, 0], 1, 1)
    return jax.vmap(each)(jnp.stack([block] * steps))


def by_cond(steps: int, body: Any, block: Any) -> Any:
    return jax.lax.cond(block[0, 0] > 0, lambda b: by_scan(steps, body, b), body, block)


jitted = jax.jit(lambda steps, body, block: by_scan(3, body, block), static_argnums=1)


def test_columns_are_counted() -> None:
    """In loops, of complex blocks of real operators twice, and where an operator has arrays
    in a jitted function of its class."""
    for loop in (by_scan, by_vmap, by_cond, jitted):
        assert counted(power(3, loop)) == 3 * 5 + 5
    turned = applying(lambda probes: probes.astype(complex))
    assert counted(turned) == 2 * 5 + 5
    assert counted(turned, function(general(N, complex))) == 5 + 5
    assert [counted(hutchinson, num_probes=k) for k in (1, 2)] == [1, 2]
    inner = jax.jit(lambda v: jnp.cos(jnp.asarray(np.arange(float(N)))) * v)

    class Mine(lx.DiagonalLinearOperator):
        def mv(self, vector: Any) -> Any:
            return inner(vector)

    mine = lx.TaggedLinearOperator(Mine(jnp.ones(N)), lx.symmetric_tag)
    assert counted(hutchinson, mine) == 5


def test_low_precision() -> None:
    matrix = general(N)
    low = plain(function(matrix.astype(jnp.bfloat16)))
    assert low.value.dtype == low.standard_error.dtype == jnp.float32
    close(low.value, plain(function(matrix)).value, 0.01, 30.0)


def test_what_is_made_anew_at_each_call_compiles_once() -> None:
    matrix = general(N)

    def call(scale: float) -> Any:
        made = lambda apply, probes: hutchinson(apply, probes)  # noqa: E731
        return tx.custom_trace(made, function(scale * matrix), KEY, 5).value

    first = call(1.0)
    with compilations() as again:
        close(call(2.0), 2 * first, 1e-14)
    assert not again


def returning(**parts: Any) -> Callable[..., Any]:
    def algorithm(apply: Any, probes: Any) -> Any:
        value, error, (left, right) = hutchinson(apply, probes)
        answer = {"value": value, "error": error, "left": left, "right": right} | parts
        return answer["value"], answer["error"], (answer["left"], answer["right"])

    return algorithm


@pytest.mark.parametrize(
    ("algorithm", "error", "words"),
    [
        (3, TypeError, "must be a function .*got int"),
        (lambda apply, probes: apply(probes), TypeError, r"got float64\[12,5\]"),
        (lambda apply, probes: (1.0, 0.0), TypeError, r"got \(float, float\)"),
        (lambda apply, probes: (1.0, 0.0, probes), TypeError, "left, right"),
        (returning(value=jnp.ones(5)), ValueError, r"value that is one real.*\[5\]"),
        (returning(value=1j), ValueError, r"value that is one real.*complex128\[\]"),
        (returning(error=jnp.ones(5)), ValueError, r"standard_error that.*\[5\]"),
        (returning(left=jnp.ones((12, 4))), ValueError, r"equal shape \(12, r\).*12,4"),
        (returning(left=jnp.ones(12), right=jnp.ones(12)), ValueError, "equal shape"),
        (applying(jnp.ones(12)), ValueError, r"\(12, k\).*got .*\[12\]"),
        (applying(jnp.ones((5, 12))), ValueError, r"float64\[5,12\]"),
        (applying(None), ValueError, "got None"),
        (applying(jnp.ones((12, 0))), ValueError, r"\[12,0\]"),
        (lambda _, z: (1.0, 0.0, (z, z)), ValueError, "never called apply"),
        (power(3, by_while), ValueError, "while_loop.*jax.lax.scan"),
    ],
)
def test_errors(algorithm: Any, error: Any, words: str) -> None:
    refused(error, rf"custom_trace\(algorithm=\.\.\.\).*{words}", counted, algorithm)


def test_errors_of_the_other_arguments() -> None:
    call: Any = lambda *args, **how: tx.custom_trace(hutchinson, *args, **how)  # noqa: E731
    operator, bad = function(general(N)), given(jnp.ones((N, N + 1)))
    refused(ValueError, r"num_probes=.*at least 1.*got 0", call, operator, KEY, 0)
    refused(ValueError, r"sampler=.*leading axis", call, operator, KEY, 5, sampler=bad)
