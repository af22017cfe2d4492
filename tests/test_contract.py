"""What holds for every estimator: budgets, shapes, error messages, the automatic choice."""

import functools
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.stats

import traceax as tx
from tests.helpers import close, nightly, refused, slow
from tests.matrices import general, hermitian, spectrum
from tests.tables import ALL, ESTIMATORS, NORMS, REST, REST_ALL, Entry, each
from tests.wrappers import PSD, Plain, function, matrix_free
from traceax._estimators.call import begin
from traceax._estimators.krylov_nystrom import estimate_by_nystrom
from traceax._estimators.second_batch import xtrace_or_hutchinson

KEY = jax.random.key(2)


class Counted(Plain):
    """A user's operator. It counts the columns that it and its transpose are applied to."""

    known: bool
    tally: Any = eqx.field(static=True, default_factory=itertools.count)

    def mv(self, vector: Any) -> Any:
        jax.debug.callback(lambda _: next(self.tally), vector[0])
        return self.matrix @ vector

    def as_matrix(self) -> Any:
        raise AssertionError("no estimator forms the matrix")

    def transpose(self) -> Any:
        return Counted(self.matrix.T, self.known, self.tally)

    def counted(self) -> int:
        jax.effects_barrier()
        return next(self.tally)


lx.conj.register(Counted, lambda o: Counted(o.matrix.conj(), o.known, o.tally))
for question in (lx.is_symmetric, lx.is_positive_semidefinite):
    question.register(Counted, lambda operator: operator.known)


# The matvecs of a probe: for an operator known to be Hermitian, and for another one.
PER_PROBE = {"trace": (1, 2), "xtrace": (2, 2), "xdiag": (2, 2), "diagonal": (1, 2)}
PER_PROBE |= {"row_norms_squared": (2, 3), "frobenius_norm_squared": (2, 2)}
TAGGED = [(entry, entry.semidefinite) for entry in ALL + REST_ALL]
TAGGED += [(e, True) for e in ALL + REST_ALL if e.name in ("xdiag", "row_norms_squared")]


@pytest.mark.parametrize(
    ("entry", "tagged"),
    [run if run[0].name in ("xtrace", "xdiag", "trace") else slow(*run) for run in TAGGED],
    ids=lambda value: getattr(value, "name", None),
)
def test_matvecs_are_counted_right(entry: Entry, tagged: bool) -> None:
    """`num_matvecs` is what was spent, on the adjoint too, and never more than allowed."""
    counter, budget = Counted(hermitian(spectrum("poly", 70)), tagged), 50
    estimate = entry.estimate(counter, KEY, budget)
    jax.block_until_ready(estimate)
    assert estimate.num_matvecs == counter.counted() <= budget
    assert isinstance(estimate.num_matvecs, int)
    cost = PER_PROBE.get(entry.name, (1, 1))[0 if tagged else 1]
    assert estimate.num_matvecs == cost * (budget // cost)


@pytest.mark.parametrize(
    ("num_steps", "tagged"), [(1, True), slow(0, False), slow(5, False), nightly(5, True)]
)
def test_matvecs_of_others_are_counted_right(num_steps: int, tagged: bool) -> None:
    """The matvecs that measure the quadrature error are counted, too. An adaptive trace
    (0 steps) applies the operator once to each of its columns."""
    counter = Counted(hermitian(spectrum("poly", 70)), tagged)
    if num_steps:
        how: Any = {"num_probes": 6, "sampler": tx.probing(np.arange(70) % 6)}
        estimate = tx.function_diagonal(counter, jnp.exp, KEY, num_steps=num_steps, **how)
    else:
        estimate = tx.adaptive_trace(counter, KEY, rtol=0.0, max_matvecs=64)
        assert estimate.num_matvecs == 64
    jax.block_until_ready(estimate)
    assert estimate.num_matvecs == counter.counted()


@each(ESTIMATORS + REST, "xdiag")
def test_small_dimensions(entry: Entry) -> None:
    """n = 1 and 3 with budgets below, at and above n: from n on no minimum counts."""
    for n in (1, 3):
        for budget in range(min(entry.minimum, n), 5):
            estimate = entry.of(function(entry.matrix(n)), KEY, budget)
            assert jnp.all(jnp.isfinite(estimate.value))
            assert not jnp.any(jnp.isnan(estimate.standard_error))
            if budget >= n:
                truth = entry.truth(entry.matrix(n))
                close(estimate.value, truth, 1e-14, n + float(jnp.max(truth)))


@each(ESTIMATORS + REST, "hutchinson_trace", "hutchpp_trace", "xdiag")
def test_the_standard_error_of_one_sample_is_infinite(entry: Entry) -> None:
    estimate = entry.of(function(entry.matrix(70)), KEY, entry.minimum)
    assert estimate.num_matvecs == entry.minimum
    assert jnp.all(estimate.standard_error == jnp.inf)
    low, high = estimate.interval()
    assert jnp.all((low == -jnp.inf) & (high == jnp.inf))


@pytest.mark.slow
def test_negative_semidefinite() -> None:
    matrix = hermitian(spectrum("poly", 70))
    negative = lx.negative_semidefinite_tag

    def value(matrix: Any, tag: object) -> tuple[Any, Any]:
        estimate = tx.xnystrace(lx.MatrixLinearOperator(matrix, tag), KEY, 20)
        return estimate.value, estimate.standard_error

    both = jax.value_and_grad(value, has_aux=True)
    (one, error), gradient = both(matrix, PSD)
    (other, same), opposite = both(-matrix, negative)
    assert one == -other
    assert error == same
    close(gradient, opposite, 1e-12)


# The automatic choice.


def krylov_nystrom(operator: Any, key: Any, budget: int) -> tx.Estimate:
    call = begin("trace", operator, key, budget)
    return estimate_by_nystrom(call, "xnystrace with second matvecs")


def first_batch_decides(operator: Any, key: Any, budget: int) -> tx.Estimate:
    return xtrace_or_hutchinson(begin("trace", operator, key, budget))


@pytest.mark.parametrize(
    ("budget", "tags", "chosen"),
    [
        (20, [PSD], krylov_nystrom),
        slow(8, [PSD], krylov_nystrom),
        slow(7, [PSD], tx.xnystrace),
        slow(4, [PSD], tx.xnystrace),
        slow(3, [PSD], tx.hutchinson_trace),
        slow(20, [lx.negative_semidefinite_tag], krylov_nystrom),
        (6, [], first_batch_decides),
        (5, [], tx.hutchinson_trace),
    ],
)
def test_the_automatic_choice(budget: int, tags: Any, chosen: Any) -> None:
    matrix = hermitian(spectrum("poly", 70))
    sign = -1 if lx.negative_semidefinite_tag in tags else 1
    operator = function(sign * matrix, tags)
    assert tx.trace(operator, KEY, budget).value == chosen(operator, KEY, budget).value


@pytest.mark.parametrize(
    ("budget", "tags", "method"),
    [
        (3, PSD, "xnysdiag mixed with hutchinson_diagonal"),
        (2, PSD, "hutchinson_diagonal"),
        (6, (), "the better of xdiag and hutchinson_diagonal"),
        (5, (), "hutchinson_diagonal"),
    ],
)
def test_the_automatic_choice_of_a_diagonal(budget: int, tags: Any, method: str) -> None:
    operator = function(hermitian(spectrum("poly", 70)), tags)
    found = jax.eval_shape(lambda: tx.diagonal(operator, KEY, budget))
    assert found.method == method


def test_the_automatic_choice_is_exact_where_that_is_cheaper() -> None:
    """For small operators, and for stored diagonals: 0 or 1 applications."""
    big = general(70)
    stored, scalar = lx.MatrixLinearOperator(big), jnp.asarray(2.0)
    identity = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((70,), jnp.float32))
    cases: list[tuple[lx.AbstractLinearOperator, Any, int]] = [
        (stored, jnp.trace(big), 0),
        (-(scalar * stored + stored) / scalar, -1.5 * jnp.trace(big), 0),
        (identity, 70.0, 0),
        (function(jnp.diag(big[0]), lx.diagonal_tag), big[0].sum(), 1),
        (function(big[:64, :64]), jnp.trace(big[:64, :64]), 64),
    ]
    for operator, truth, price in cases:
        estimate = tx.trace(operator, KEY, 10)
        close(estimate.value, truth, 1e-12, 100)
        assert estimate.standard_error == 0
        assert estimate.num_matvecs == price
    assert tx.trace(identity, KEY).value.dtype == jnp.float32


def test_a_tangent_has_no_tags() -> None:
    """lineax returns the tags of the primal, of which derivatives know nothing."""
    matrix = hermitian(spectrum("poly", 70))
    direction = hermitian(np.arange(70.0) - 40, seed=1)
    make = functools.partial(function, tags=PSD)
    primal, tangent = eqx.filter_jvp(make, (matrix,), (direction,))
    derivative, plain = lx.TangentLinearOperator(primal, tangent), function(direction)
    assert lx.is_positive_semidefinite(derivative)
    words = r"xnystrace\(operator=.*tagged.*positive_semidef"
    added = derivative + function(0 * direction)
    for operator in (derivative, added, plain):
        refused(ValueError, words, tx.xnystrace, operator, KEY, 20)
    for estimator, operator in ((tx.trace, added), (tx.na_hutchpp_trace, derivative)):
        found, truth = (estimator(a, KEY, 20).value for a in (operator, plain))
        close(found, truth, 1e-12, 70)


# Errors: the argument as the user typed it, what was got, and the cure.

MIXED = (jax.ShapeDtypeStruct((2,), float), jax.ShapeDtypeStruct((2,), complex))
MIXED_SPACE = lx.IdentityLinearOperator(MIXED)
EMPTY, RECTANGLE = (lx.MatrixLinearOperator(jnp.ones(shape)) for shape in ((0, 0), (3, 2)))
RESHAPE = matrix_free(lambda v: v.reshape(2, 3), 6)  # equal sizes, other structures
KEYS, OLD_KEYS = jax.random.split(KEY, 3), jax.random.split(jax.random.PRNGKey(0), 3)
WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("num_matvecs", 0, ValueError, "at least"),
    ("num_matvecs", -3, ValueError, "got -3"),
    ("num_matvecs", 10.0, TypeError, "Python int"),
    ("num_matvecs", True, TypeError, "Python int"),
    ("num_matvecs", jnp.asarray(10), TypeError, r"int\(\)"),
    ("operator", np.eye(3), TypeError, r"got ndarray.*as_operator\(a\)"),
    ("operator", lambda v: v, TypeError, r"got function.*as_operator\(function, n\)"),
    ("operator", MIXED_SPACE, ValueError, "all real or all complex.*real leaves complex"),
    ("operator", EMPTY, ValueError, "at least one dimension"),
    ("key", 0, TypeError, "got int.*jax.random.key"),
    ("key", jnp.ones(2), TypeError, "random key"),
    ("key", KEYS, ValueError, r"one key.*\(3,\).*vmap"),
    ("key", OLD_KEYS, ValueError, r"one key.*\(3, 2\).*vmap"),
    ("key", OLD_KEYS.ravel()[:3], ValueError, r"got shape \(3,\)"),
]
NOT_SQUARE: list[tuple[str, Any, type[Exception], str]] = [
    ("operator", RECTANGLE, ValueError, r"square.*float64\[2\] to float64\[3\]"),
    ("operator", RESHAPE, ValueError, r"square.*float64\[6\] to float64\[2,3\]"),
]
WRONG_PROBES: list[tuple[str, Any, type[Exception], str]] = [
    ("sampler", lambda key, structure, k, f=f: f(k), ValueError, "leading axis")
    for f in (
        lambda k: jnp.ones((k + 1, 12)),
        lambda k: jnp.ones((12, k)),
        lambda k: jnp.ones((k, 12), jnp.float32),
        lambda k: (jnp.ones((k, 12)),),
    )
]


@each(ALL + REST_ALL)
def test_wrong_arguments_are_named(entry: Entry) -> None:
    wrong = WRONG + ([] if entry in NORMS else NOT_SQUARE)
    if entry in ESTIMATORS + REST:
        least = entry.minimum
        few = f"at least {least}.*got {least - 1}"
        wrong = [*wrong, *WRONG_PROBES, ("num_matvecs", least - 1, ValueError, few)]
    operator = entry.tagged(function(entry.matrix(12)))
    right = {"operator": operator, "key": KEY, "num_matvecs": 10}
    for argument, value, error, words in wrong:
        words = rf"traceax\.{entry.name}\({argument}=\.\.\.\).*{words}"
        refused(error, words, entry.estimate, **(right | {argument: value}))


def test_dependent_probes() -> None:
    operator = function(hermitian(spectrum("poly", 12)), PSD)
    words = r"\(sampler=\.\.\.\).*independent"
    for estimator in (tx.xtrace, tx.xnystrace):
        for sampler in (tx.orthogonal, functools.partial(tx.orthogonal)):
            refused(ValueError, words, estimator, operator, KEY, 10, sampler=sampler)
    samplers = tx.sphere, functools.partial(tx.sphere)
    one, other = (tx.xtrace(operator, KEY, 10, sampler=s) for s in samplers)
    assert one.value == other.value
    refused(TypeError, "sampler=.*got int", tx.xtrace, operator, KEY, 10, sampler=3)
    words = r"orthogonal\(num_probes=.*at most 12.*got 13"
    refused(ValueError, words, tx.orthogonal, KEY, operator.in_structure(), 13)


# Estimate.


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float64", 1e-9)])
def test_interval_is_students(dtype: Any, tolerance: float) -> None:
    """Against scipy's quantiles, and after a trip through jit."""
    value, error = jnp.asarray(3.0, dtype), jnp.asarray(0.5, dtype)
    jitted = jax.jit(lambda e, level: e.interval(level))
    every, levels = (1 / 3, 1.0, 3.0, 9.0, 1000.0), (0.5, 0.95, 0.999)
    for degrees, level in itertools.product(every, levels):
        estimate = tx.Estimate(value, error, 10, degrees)
        half = float(0.5 * scipy.stats.t.ppf((1 + level) / 2, degrees))
        close(jitted(estimate, level), (3 - half, 3 + half), tolerance, half)
        if level == 0.95 and degrees == 9:
            close(estimate.interval(level), (3 - half, 3 + half), tolerance, half)
    plain = tx.Estimate(value, error, 10)
    close(plain.interval()[1], 3 + 0.5 * scipy.stats.norm.ppf(0.975), 1e-3)


def test_interval_errors() -> None:
    estimate, words = tx.Estimate(jnp.ones(()), jnp.ones(()), 10, 9), "between 0 and 1"
    for level in (0, 1, 95, -0.5):
        refused(ValueError, rf"interval\(level=.*{words}", estimate.interval, level)
    refused(TypeError, "complex", tx.Estimate(jnp.asarray(1j), jnp.ones(()), 10).interval)
