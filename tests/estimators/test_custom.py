"""An algorithm of one's own: the library's estimators rebuilt, and every wrong answer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.calls import hutchinson
from tests.helpers import close, compilations, given, leaks_checked, refused
from tests.matrices import all_signs, general, hermitian
from tests.wrappers import EVERY, function, part_of
from traceax._core.keys import BLOCKS, keys_of
from traceax._linalg.basis import orthonormalise

KEY = jax.random.key(4)
N, SKETCH, REST = 12, 3, 4


def hutchpp(apply: Any, probes: Any) -> Any:
    """The library's, of 3 + 4 probes, resphered."""
    sketch, rest = probes[:, :SKETCH], probes[:, SKETCH:]
    q = orthonormalise(apply(sketch)).columns
    mu = rest - q @ (q.conj().T @ rest)
    factors = (N - SKETCH) / jnp.sum(mu * mu.conj(), axis=0)
    samples = factors * jnp.sum(mu.conj() * apply(mu), axis=0)
    value = jnp.sum(jnp.sum(q.conj() * apply(q), axis=0)) + jnp.mean(samples)
    error = jnp.std(samples, ddof=1) / REST**0.5
    left, right = jnp.hstack([q, mu * (factors / REST)[None]]), jnp.hstack([q, mu])
    return value, error, (left, right)


def in_two_batches(key: Any, structure: Any, num_probes: int) -> Any:
    """As Hutch++ draws."""
    keys, counts = keys_of(key, 2, BLOCKS), (SKETCH, num_probes - SKETCH)
    batches = [tx.sphere(k, structure, c) for k, c in zip(keys, counts, strict=True)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *batches)


def rebuilt(operator: lx.AbstractLinearOperator) -> tx.Estimate:
    return tx.custom_trace(hutchpp, operator, KEY, SKETCH + REST, sampler=in_two_batches)


def plain(operator: Any, **how: Any) -> tx.Estimate:
    return tx.custom_trace(hutchinson, operator, KEY, 5, sampler=tx.rademacher, **how)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Function", "PyTree", "Tangent"])
def test_hutchpp_rebuilt_agrees_to_rounding(kind: str) -> None:
    matrix = general(N, complex)
    budget = 2 * SKETCH + REST

    def both(m: Any) -> tuple[tx.Estimate, tx.Estimate]:
        return rebuilt(EVERY[kind](m)), tx.hutchpp_trace(EVERY[kind](m), KEY, budget)

    ours, theirs = both(matrix)
    close(ours.value, theirs.value, 1e-14)  # sums are fused as it suits
    assert ours.num_matvecs == theirs.num_matvecs == budget
    size = float(jnp.sum(jnp.abs(part_of(kind, matrix))))
    close(ours.standard_error, theirs.standard_error, 1e-13, size)
    mine, their = (jax.grad(lambda m, i=i: both(m)[i].value.real)(matrix) for i in (0, 1))
    close(mine, their, 1e-13)


def test_hermitian_operators_have_real_traces() -> None:
    operator = function(hermitian(1.0 + np.arange(N), complex))
    known = lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)
    assert plain(operator).value.dtype == jnp.complex128
    assert plain(known).value.dtype == plain(known).standard_error.dtype == jnp.float64
    assert plain(known).value == plain(operator).value.real


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

    for got, want in [(mean, truth), (jax.grad(mean), jax.grad(truth))]:
        close(got(0.7), want(0.7), 1e-12)
    close(jax.jacfwd(jax.grad(mean))(0.7), jax.grad(jax.grad(truth))(0.7), 1e-12)


def test_closures_over_what_is_traced() -> None:
    """A learned weight, batched or not: nothing leaks, and derivatives in it are zero."""
    matrix, guess = general(N), jnp.arange(1.0, N + 1)

    def loss(weight: Any, m: Any) -> Any:
        def controlled(apply: Any, probes: Any) -> Any:
            value, error, blocks = hutchinson(apply, probes)
            known = weight * (jnp.sum(guess) - jnp.mean(guess @ probes**2))
            return value + known, error, blocks

        estimate = tx.custom_trace(controlled, function(m), KEY, 5)
        return estimate.value + 0 * jax.lax.stop_gradient(estimate.standard_error)

    with leaks_checked():
        slopes = jax.jit(jax.grad(loss, (0, 1)))(0.5, matrix)
        batch = jax.jit(jax.vmap(loss, (0, None)))(jnp.asarray([0.0, 0.5]), matrix)
    assert slopes[0] == 0
    close(slopes[1], jax.grad(loss, 1)(0.5, matrix), 1e-14)
    values = [loss(w, matrix) for w in (0.0, 0.5)]
    assert values[0] != values[1]
    close(batch, jnp.asarray(values), 1e-13)


def counted(algorithm: Any, operator: Any = None) -> Any:
    operator = function(general(N)) if operator is None else operator
    return tx.custom_trace(algorithm, operator, KEY, 5).num_matvecs


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
    blocks = jnp.stack([block] * steps)
    return jax.vmap(jax.vmap(lambda c: body(c[:, None])[:, 0], 1, 1))(blocks)


def by_cond(steps: int, body: Any, block: Any) -> Any:
    dear = lambda b: by_scan(steps, body, b)  # noqa: E731
    return jax.lax.cond(jnp.sum(block) > 0, dear, body, block)


jitted = jax.jit(lambda steps, body, block: by_scan(3, body, block), static_argnums=1)


@pytest.mark.parametrize("loop", [by_scan, by_vmap, by_cond, jitted])
def test_columns_are_counted_in_loops(loop: Any) -> None:
    assert counted(power(3, loop)) == 3 * 5 + 5


def test_complex_blocks_of_real_operators_are_two() -> None:
    def turned(apply: Any, probes: Any) -> Any:
        apply(probes.astype(complex))
        return hutchinson(apply, probes)

    assert counted(turned) == 2 * 5 + 5
    assert counted(turned, function(general(N, complex))) == 5 + 5


def test_applications_are_counted_where_an_operator_holds_arrays() -> None:
    """In jitted functions of a class of one's own."""
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


def test_one_probe_leaves_one_degree_of_freedom() -> None:
    for num_probes, degrees in [(1, 1), (2, 1), (5, 4)]:
        estimate = tx.custom_trace(hutchinson, function(general(N)), KEY, num_probes)
        assert estimate.degrees_of_freedom == degrees


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
        whole = {"value": value, "error": error, "left": left, "right": right} | parts
        return whole["value"], whole["error"], (whole["left"], whole["right"])

    return algorithm


def applying(block: Any) -> Callable[..., Any]:
    def algorithm(apply: Any, probes: Any) -> Any:
        apply(block)
        return hutchinson(apply, probes)

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
