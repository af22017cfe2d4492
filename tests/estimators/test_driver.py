"""The driver: one method read in several ways, a method of one's own, and the few classes
that derivatives are read from."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.helpers import close, general, hermitian
from traceax._core.operator import LinearMap
from traceax._core.rule import Outcome
from traceax._estimators.driver import Method, Probes, estimate, one_block
from traceax._estimators.hutchinson import HUTCHINSON_DIAGONAL, HUTCHINSON_TRACE
from traceax._estimators.norms import FROBENIUS, ROW_NORMS_OF_ANY
from traceax._estimators.readouts import DIAGONAL, LEAVES, TRACE, Pairs, Target
from traceax._estimators.xdiag import XDIAG
from traceax._estimators.xnysdiag import XNYSDIAG
from traceax._linalg.jackknife import standard_error

KEY = jax.random.key(3)
N, CUT = 80, 30
PSD = lx.positive_semidefinite_tag


def in_leaves(matrix: Any, *tags: Any) -> lx.AbstractLinearOperator:
    structure = jax.eval_shape(lambda: (matrix[0, :CUT], matrix[0, CUT:]))

    def apply(v: Any) -> Any:
        product = matrix @ jnp.concatenate(v)
        return product[:CUT], product[CUT:]

    return lx.FunctionLinearOperator(apply, structure, tags)


def of_leaves(vector: Any) -> Any:
    return jnp.stack([jnp.sum(vector[:CUT]), jnp.sum(vector[CUT:])])


def slope(method: Method, matrix: Any, tags: tuple, weights: Any) -> Any:
    def loss(matrix: Any) -> Any:
        value = estimate(method, in_leaves(matrix, *tags), KEY, 20).value
        flat = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(value)])
        return jnp.sum(weights * flat).real

    return jax.grad(loss)(matrix)


@pytest.mark.parametrize("method", [XDIAG, XNYSDIAG], ids=lambda method: method.name)
def test_a_diagonal_is_read_leaf_by_leaf_and_as_a_trace(method: Method) -> None:
    """The same probes: values and slopes are sums of those of the diagonal."""
    tags = (PSD,) if method is XNYSDIAG else ()
    matrix = hermitian(1 / np.arange(1.0, N + 1), float)
    if method is XDIAG:
        matrix = matrix + 0.1 * general(N, float)
    operator = in_leaves(matrix, *tags)
    diagonal = jnp.concatenate(estimate(method, operator, KEY, 20).value)
    weights = jnp.array([0.3, -1.7])
    every = jnp.repeat(weights, jnp.array([CUT, N - CUT]), total_repeat_length=N)
    for target, sums in ((LEAVES, of_leaves), (TRACE, jnp.sum)):
        whole = method._replace(target=target)
        value = estimate(whole, operator, KEY, 20).value
        close(jnp.stack(jax.tree.leaves(value)), jnp.atleast_1d(sums(diagonal)), 1e-12)
    got = slope(method._replace(target=LEAVES), matrix, tags, weights)
    close(got, slope(method, matrix, tags, every), 1e-11)


def _one_probe_each(linear_map: LinearMap, probes: Probes, target: Target) -> Outcome:
    (z,) = probes.blocks
    samples = target.of(z.conj() * linear_map(z), linear_map)
    error = standard_error(samples, jnp.zeros(()))
    return Outcome(jnp.mean(samples), error, Pairs(z / z.shape[1], z))


OWN = Method("own", TRACE, _one_probe_each, one_block(1), sampler=tx.rademacher)


def test_a_method_of_ones_own_has_all_that_others_have() -> None:
    """Checks in its name, exact answers, one compiled program, derivatives."""
    matrix = general(N, float)
    make = lambda m: lx.FunctionLinearOperator(  # noqa: E731
        lambda v: m @ v, jax.ShapeDtypeStruct((N,), m.dtype)
    )
    with pytest.raises(ValueError, match=r"traceax.own\(num_matvecs=...\)"):
        estimate(OWN, make(matrix), KEY, 0)
    with pytest.raises(ValueError, match="independent"):
        estimate(OWN, make(matrix), KEY, 5, sampler=tx.orthogonal)
    exact = estimate(OWN, make(matrix), KEY, 10**6)
    close(exact.value, jnp.trace(matrix), 1e-12)
    assert (exact.standard_error, exact.num_matvecs) == (0, N)
    got = estimate(OWN, make(matrix), KEY, 7)
    want = tx.hutchinson_trace(make(matrix), KEY, 7)
    assert got.num_matvecs == 7
    assert abs(got.value - jnp.trace(matrix)) < 5 * got.standard_error
    assert abs(want.value - jnp.trace(matrix)) < 5 * want.standard_error
    slope = jax.grad(lambda s: estimate(OWN, make(s * matrix), KEY, 7).value)(1.0)
    close(slope, got.value, 1e-12)  # Euler's relation


CALLS = {
    "xtrace": lambda a, k: tx.xtrace(a, k, 12),
    "xnystrace": lambda a, k: tx.xnystrace(a, k, 12),
    "hutchpp_trace": lambda a, k: tx.hutchpp_trace(a, k, 12),
    "na_hutchpp_trace": lambda a, k: tx.na_hutchpp_trace(a, k, 12),
    "hutchinson_trace": lambda a, k: tx.hutchinson_trace(a, k, 12),
    "hutchinson_diagonal": lambda a, k: tx.hutchinson_diagonal(a, k, 12),
    "trace": lambda a, k: tx.trace(a, k, 12),
    "diagonal": lambda a, k: tx.diagonal(a, k, 12),
    "diagpp": lambda a, k: tx.diagpp(a, k, 12),
    "xdiag": lambda a, k: tx.xdiag(a, k, 12),
    "xnysdiag": lambda a, k: tx.xnysdiag(a, k, 12),
    "leaf_traces": lambda a, k: tx.leaf_traces(a, k, 12),
    "leaf_traces, few": lambda a, k: tx.leaf_traces(a, k, 2),
    "row_norms_squared": lambda a, k: tx.row_norms_squared(a, k, 12),
    "frobenius_norm_squared": lambda a, k: tx.frobenius_norm_squared(a, k, 12),
    "exact": lambda a, k: tx.trace(a, k, 10**6),
    "adaptive_trace": lambda a, k: tx.adaptive_trace(a, k, rtol=0.5),
    "function_trace": lambda a, k: tx.function_trace(a, jnp.exp, k, 30),
    "slq_trace": lambda a, k: tx.slq_trace(a, jnp.exp, k, num_probes=2, num_steps=4),
    "slq_trace, batches": lambda a, k: tx.slq_trace(
        a, jnp.exp, k, num_probes=3, num_steps=4, batch_size=1
    ),
    "slq_trace, combined": lambda a, k: tx.slq_trace(
        a, jnp.exp, k, num_probes=3, num_steps=4, combine=jnp.log
    ),
    "arnoldi_trace": lambda a, k: tx.arnoldi_trace(
        a, jnp.exp, k, num_probes=3, num_steps=4
    ),
    "arnoldi_trace, exact": lambda a, k: tx.arnoldi_trace(
        a, jnp.exp, k, num_probes=20, num_steps=4
    ),
    "function_diagonal": lambda a, k: tx.function_diagonal(
        a, jnp.exp, k, num_probes=3, num_steps=4
    ),
    "inv_quad_logdet": lambda a, k: tx.inv_quad_logdet(a, jnp.ones(N), k, 30, shift=1.0),
}


def test_derivatives_are_read_off_blocks_by_five_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever composes them is a function with its blocks bound."""
    from traceax._core import rule  # noqa: PLC0415

    seen: set[str] = set()
    evaluate = rule._evaluate

    def told(subject: Any, algorithm: Any, probes: Any) -> Outcome:
        outcome = evaluate(subject, algorithm, probes)
        parts = [outcome.readout]
        while parts:
            part = parts.pop()
            if isinstance(part, functools.partial):
                parts += [x for x in part.args[:1] if callable(x)]  # what it composes
            else:
                seen.add(type(part).__name__)
        return outcome

    monkeypatch.setattr(rule, "_evaluate", told)
    matrix = hermitian(1 / np.arange(1.0, N + 1), float)
    structure = jax.ShapeDtypeStruct((N,), matrix.dtype)
    tagged = lx.FunctionLinearOperator(lambda v: matrix @ v, structure, PSD)
    plain = lx.FunctionLinearOperator(lambda v: matrix @ v, structure)
    for name, call in CALLS.items():
        call(tagged, KEY)
        if "nys" not in name:
            call(plain, KEY)
    tx.laplacian(lambda x, args: jnp.sum(x**4), jnp.ones(30), KEY, 12)
    assert seen == {"Pairs", "Batches", "TwoSided", "Squares", "Nodes"}


@pytest.mark.parametrize(
    ("method", "target"),
    [
        (HUTCHINSON_TRACE, TRACE),
        (HUTCHINSON_DIAGONAL, DIAGONAL),
        (FROBENIUS, FROBENIUS.target),
        (ROW_NORMS_OF_ANY, ROW_NORMS_OF_ANY.target),
    ],
)
def test_exact_answers_of_every_target(method: Method, target: Target) -> None:
    """One path for all: n applications, no error, whatever the batches."""
    assert method.target is target
    matrix = general(N, float)
    operator = in_leaves(matrix)
    whole = estimate(method, operator, KEY, N)
    in_batches = estimate(method, operator, KEY, N, batch_size=7)
    for got, want in zip(
        jax.tree.leaves(in_batches.value), jax.tree.leaves(whole.value), strict=True
    ):
        close(got, want, 1e-12)
    assert whole.num_matvecs == N
    assert all(jnp.all(leaf == 0) for leaf in jax.tree.leaves(whole.standard_error))
