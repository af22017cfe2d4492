"""What holds for every estimator: budgets, shapes, error messages, the automatic choice."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
import scipy.stats

import traceax as tx
from tests.helpers import close, refused, slow
from tests.matrices import general, hermitian, spectrum
from tests.tables import ALL, ESTIMATORS, NORMS, REST, REST_ALL, Entry, each
from tests.wrappers import PSD, function, matrix_free
from traceax._estimators.call import begin
from traceax._estimators.krylov_nystrom import estimate_by_nystrom
from traceax._estimators.second_batch import xtrace_or_hutchinson

KEY = jax.random.key(2)


class Tally:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _: Any) -> None:
        self.count += 1


class Counted(lx.AbstractLinearOperator):
    """A user's operator. It counts the columns that it and its transpose are applied to."""

    matrix: Any
    tally: Tally = eqx.field(static=True)
    known: bool

    def mv(self, vector: Any) -> Any:
        jax.debug.callback(self.tally, vector[0])
        return self.matrix @ vector

    def as_matrix(self) -> Any:
        raise AssertionError("no estimator forms the matrix")

    def transpose(self) -> "Counted":
        return Counted(self.matrix.T, self.tally, self.known)

    def in_structure(self) -> Any:
        return jax.ShapeDtypeStruct(self.matrix.shape[1:], self.matrix.dtype)

    def out_structure(self) -> Any:
        return jax.ShapeDtypeStruct(self.matrix.shape[:1], self.matrix.dtype)

    def counted(self) -> int:
        jax.effects_barrier()
        return self.tally.count


lx.conj.register(Counted, lambda o: Counted(o.matrix.conj(), o.tally, o.known))
lx.is_symmetric.register(Counted, lambda o: o.known)
lx.is_positive_semidefinite.register(Counted, lambda o: o.known)
lx.is_negative_semidefinite.register(Counted, lambda o: False)
lx.is_diagonal.register(Counted, lambda o: False)


# Of an operator known to be Hermitian, and of one that is not: (applications a probe).
PER_PROBE = {
    "trace": (1, 2),
    "xtrace": (2, 2),
    "xdiag": (2, 2),
    "diagonal": (1, 2),
    "row_norms_squared": (2, 3),
    "frobenius_norm_squared": (2, 2),
}


@each(ALL + REST_ALL, "xtrace", "xdiag", "trace")
@pytest.mark.parametrize("tagged", [True, False])
def test_applications_are_counted_right(entry: Entry, tagged: bool) -> None:
    """`num_matvecs` is what was spent, on the adjoint too, and never more than allowed."""
    matrix, budget = hermitian(spectrum("poly", 70)), 50
    counter = Counted(matrix, Tally(), tagged)
    if tagged != entry.semidefinite and entry.name not in ("xdiag", "row_norms_squared"):
        return  # of the others the tag changes nothing
    estimate = entry.estimate(counter, KEY, budget)
    jax.block_until_ready(estimate)
    assert estimate.num_matvecs == counter.counted() <= budget
    assert isinstance(estimate.num_matvecs, int)
    cost = PER_PROBE.get(entry.name, (1, 1))[0 if tagged else 1]
    assert estimate.num_matvecs == cost * (budget // cost)


@pytest.mark.parametrize("num_steps", [slow(0), 1, slow(5)])
@pytest.mark.parametrize("tagged", [slow(False), True])
def test_applications_of_others_are_counted_right(num_steps: int, tagged: bool) -> None:
    """The applications that measure the quadrature error are counted, too. An adaptive
    trace (0 steps) applies the operator once to each of its columns."""
    counter = Counted(hermitian(spectrum("poly", 70)), Tally(), tagged)
    if num_steps:
        how: Any = {"num_probes": 6, "sampler": tx.probing(np.arange(70) % 6)}
        estimate = tx.function_diagonal(counter, jnp.exp, KEY, num_steps=num_steps, **how)
    else:
        estimate = tx.adaptive_trace(counter, KEY, rtol=0.0, max_matvecs=64)
        assert estimate.num_matvecs == 64
    jax.block_until_ready(estimate)
    assert estimate.num_matvecs == counter.counted()


@each(ESTIMATORS + REST, "hutchinson_trace", "xdiag")
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
    positive = lx.MatrixLinearOperator(matrix, PSD)
    negative = lx.MatrixLinearOperator(-matrix, lx.negative_semidefinite_tag)
    one, other = tx.xnystrace(positive, KEY, 20), tx.xnystrace(negative, KEY, 20)
    assert one.value == -other.value
    assert one.standard_error == other.standard_error

    def value(matrix: Any, tag: object) -> Any:
        return tx.xnystrace(lx.MatrixLinearOperator(matrix, tag), KEY, 20).value

    slope = jax.grad(value)(-matrix, lx.negative_semidefinite_tag)
    close(jax.grad(value)(matrix, PSD), slope, 1e-12)


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


def test_the_automatic_choice_is_exact_where_that_is_cheaper() -> None:
    """For small operators, and for stored diagonals: 0 or 1 applications."""
    big = general(70)
    stored = lx.MatrixLinearOperator(big)
    scalar = jnp.asarray(2.0)
    identity = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((70,), jnp.float32))
    diagonal = function(jnp.diag(big[0]), lx.diagonal_tag)
    cases: list[tuple[lx.AbstractLinearOperator, Any, int]] = [
        (stored, jnp.trace(big), 0),
        (-(scalar * stored + stored) / scalar, -1.5 * jnp.trace(big), 0),
        (identity, 70.0, 0),
        (diagonal, big[0].sum(), 1),
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
    derivative = lx.TangentLinearOperator(primal, tangent)
    assert lx.is_positive_semidefinite(derivative)
    plain = function(direction)
    for operator in (derivative, derivative + function(0 * direction)):
        close(tx.trace(operator, KEY, 20).value, tx.trace(plain, KEY, 20).value, 1e-12, 70)
        got, want = (tx.na_hutchpp_trace(o, KEY, 20).value for o in (operator, plain))
        close(got, want, 1e-12, 70)
    for operator in (derivative, derivative + function(0 * direction), plain):
        words = r"xnystrace\(operator=.*tagged.*positive_semidef"
        refused(ValueError, words, tx.xnystrace, operator, KEY, 20)


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
    dependent = r"\(sampler=\.\.\.\).*independent"
    for estimator in (tx.xtrace, tx.xnystrace):
        for sampler in (tx.orthogonal, functools.partial(tx.orthogonal)):
            refused(ValueError, dependent, estimator, operator, KEY, 10, sampler=sampler)
    samplers = tx.sphere, functools.partial(tx.sphere)
    one, other = (tx.xtrace(operator, KEY, 10, sampler=s) for s in samplers)
    assert one.value == other.value
    refused(TypeError, "sampler=.*got int", tx.xtrace, operator, KEY, 10, sampler=3)
    space = operator.in_structure()
    words = r"orthogonal\(num_probes=.*at most 12.*got 13"
    refused(ValueError, words, tx.orthogonal, KEY, space, 13)


# Estimate.


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_interval_is_students(dtype: Any) -> None:
    """Against scipy's quantiles, and after a trip through jit."""
    value, error = jnp.asarray(3.0, dtype), jnp.asarray(0.5, dtype)
    jitted = jax.jit(lambda e, level: e.interval(level))
    for degrees in (1 / 3, 1.0, 3.0, 9.0, 1000.0):
        for level in (0.5, 0.95, 0.999):
            estimate = tx.Estimate(value, error, 10, degrees)
            half = float(0.5 * scipy.stats.t.ppf((1 + level) / 2, degrees))
            tolerance = 1e-9 if dtype == "float64" else 1e-3
            intervals = [jitted(estimate, level)]
            if level == 0.95 and degrees == 9:
                intervals.append(estimate.interval(level))
            for low, high in intervals:
                close(low, 3 - half, tolerance, half)
                close(high, 3 + half, tolerance, half)
    plain = tx.Estimate(value, error, 10)
    close(plain.interval()[1], 3 + 0.5 * scipy.stats.norm.ppf(0.975), 1e-3)


def test_interval_errors() -> None:
    estimate, words = tx.Estimate(jnp.ones(()), jnp.ones(()), 10, 9), "between 0 and 1"
    for level in (0, 1, 95, -0.5):
        refused(ValueError, rf"interval\(level=.*{words}", estimate.interval, level)
    refused(TypeError, "complex", tx.Estimate(jnp.asarray(1j), jnp.ones(()), 10).interval)
