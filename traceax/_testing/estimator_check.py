"""Whether an estimate of a trace, or of anything linear, is honest and differentiable."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

from traceax._core.estimate import Estimate
from traceax._testing.clothes import function
from traceax._testing.matrices import hermitian, spectrum
from traceax._testing.report import Report

N = 20
_SPECTRA = ("flat", "decaying", "rank-deficient")


def check_estimator(
    estimator: Callable[..., Estimate],
    *,
    num_matvecs: int = 12,
    truth: Callable[[Any], Any] = jnp.trace,
    semidefinite: bool = False,
    euler: bool = True,
    num_keys: int = 400,
) -> None:
    """Check an estimator of the trace, or of anything else that is linear in the operator.

    On operators of 20 dimensions, positive semidefinite with three spectra (flat, decaying,
    rank-deficient) and complex, by keys that are always the same ones: that it returns an
    `Estimate` of the truth's shape, within its budget; that its mean is the truth, and the
    mean of its derivative the truth's, to six standard errors of the runs; that
    `interval(0.95)` holds the truth in at least 90 % of them (less six standard errors of
    that share); that it is exact where it says that its error is 0; that the reverse
    derivative is the forward one, and that along the operator itself the value; that
    `jax.jit` gives what Python gives, and a key the same twice; that multiplying the
    operator by 1e-20 or 1e20 multiplies the value, and leaves the relative error bar.

    **Arguments**

    - `estimator`: a function `(operator, key)` or `(operator, key, num_matvecs)` that
      returns an `Estimate`.
    - `num_matvecs`: the budget, for an estimator that takes one. Default 12.
    - `truth`: what is estimated, a function of the dense matrix. Default its trace.
    - `semidefinite`: whether operators are to be tagged positive semidefinite. Default
      `False`.
    - `euler`: whether the derivative along the operator itself must be the value. Default
      `True`, as of estimates that are read through the blocks of their derivative.
    - `num_keys`: how many runs, a Python int. Default 400; more see smaller biases.

    **Returns** `None`, if nothing is wrong.

    **Raises** `AssertionError` that lists everything that is wrong, and by how much;
    `TypeError` if `estimator` is no function.

    **Derivatives**: none.

    **Cost**: some 2,000 estimates; ten seconds, most of it compilation.

    **Example**

    ```python
    >>> import functools, jax, traceax as tx
    >>> from traceax.testing import check_estimator
    >>> check_estimator(tx.hutchinson_trace, num_keys=100)
    >>> def inflated(operator, key):
    ...     return tx.hutchinson_trace(1.2 * operator, key, 12)
    >>> try:
    ...     check_estimator(inflated, num_keys=100)
    ... except AssertionError as error:
    ...     print("unbiased" in str(error))
    True

    ```

    **Reference**: none; the identities are those of the rule in `traceax/_core/rule.py`.
    """
    if not callable(estimator):
        raise TypeError(
            "traceax.testing.check_estimator(estimator=...) must be a function (operator, "
            f"key) -> Estimate, but got {type(estimator).__name__}. Pass traceax.xtrace, "
            "say."
        )
    report = Report("check_estimator", estimator)
    s = _Subject(estimator, _budget(estimator, num_matvecs), truth, semidefinite)
    with report.step("call"):
        if _shaped(report, s):
            steps = [_same_again, _scaled, _differentiated]
            for step in steps if euler else steps[:-1]:
                with report.step(step.__name__.strip("_")):
                    step(report, s)
            with report.step("reverse derivative"):
                _reversed(report, s)
            with report.step("statistics"):
                _statistics(report, s, num_keys)
    report.conclude()


class _Subject(NamedTuple):
    estimator: Callable[..., Estimate]
    budget: int | None
    truth: Callable[[Any], Any]
    semidefinite: bool

    def __call__(self, matrix: Any, key: Any) -> Estimate:
        operator = function(matrix)
        if self.semidefinite:
            tag = lx.positive_semidefinite_tag
            operator = lx.TaggedLinearOperator(operator, tag)
        budget = () if self.budget is None else (self.budget,)
        return self.estimator(operator, key, *budget)

    def value(self, matrix: Any, key: Any) -> Any:
        return self(matrix, key).value

    def tolerance(self) -> float:
        """For rounding, of what is as large as the entries' sum."""
        return 1e3 * float(jnp.finfo(_matrix("flat").dtype).eps)


def _budget(estimator: Callable[..., Any], num_matvecs: int) -> int | None:
    """None for an estimator of two arguments."""
    parameters = inspect.signature(estimator).parameters.values()
    free = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in free]
    return num_matvecs if len(needed) >= 3 else None


def _matrix(name: str, dtype: Any = float) -> Any:
    return hermitian(spectrum(name, N), dtype, seed=3)


def _direction() -> Any:
    """Semidefinite, as what it is a change of."""
    return hermitian(spectrum("flat", N), float, seed=4)


_KEY = jax.random.key(11)


def _size(matrix: Any) -> Any:
    return jnp.sum(jnp.abs(matrix))


def _shaped(report: Report, s: _Subject) -> bool:
    matrix = _matrix("flat")
    estimate = s(matrix, _KEY)
    if not isinstance(estimate, Estimate):
        report.add(f"call: must return an Estimate, but got {type(estimate).__name__}.")
        return False
    want = jnp.shape(s.truth(matrix))
    shapes = jnp.shape(estimate.value), jnp.shape(estimate.standard_error)
    if shapes != (want, want):
        report.add(f"shape: value and standard_error must be {want}, but are {shapes}.")
        return False
    if not jnp.all(estimate.standard_error >= 0):
        report.add("standard_error: must be at least 0, and no NaN.")
    exact = jnp.all(estimate.standard_error == 0)  # which small operators may be
    if s.budget is not None and not exact and estimate.num_matvecs > s.budget:
        report.add(f"num_matvecs: {estimate.num_matvecs} spent, {s.budget} allowed.")
    return True


def _same_again(report: Report, s: _Subject) -> None:
    matrix = _matrix("decaying")
    one, two = s.value(matrix, _KEY), s.value(matrix, _KEY)
    report.close("same key, same value", two, one, 0.0, "Draw by the key alone.")
    jitted = jax.jit(s.value)(matrix, _KEY)
    room = s.tolerance() * _size(matrix)
    report.close("under jax.jit", jitted, one, room, "Let nothing hang on Python's values.")


def _scaled(report: Report, s: _Subject) -> None:
    matrix = _matrix("decaying")
    run = jax.jit(s.__call__)
    plain = run(matrix, _KEY)
    for factor in (1e-20, 1e20):
        scaled = run(factor * matrix, _KEY)
        room = s.tolerance() * _size(matrix)
        cure = "Compare with what is as large as the operator, and do not square it."
        got = scaled.value / factor
        report.close(f"value of {factor} A = {factor} value", got, plain.value, room, cure)
        got, want = scaled.standard_error / factor, plain.standard_error
        room = room + 1e-3 * want
        report.close(f"error of {factor} A = {factor} error", got, want, room, cure)


def _reversed(report: Report, s: _Subject) -> None:
    matrix, direction = _matrix("decaying"), _direction()

    def loss(matrix: Any) -> Any:
        return jnp.sum(jnp.real(s.value(matrix, _KEY)))

    _, slope = jax.jvp(loss, (matrix,), (direction,))
    backwards = jnp.sum(jax.grad(loss)(matrix) * direction)
    room = s.tolerance() * _size(direction)
    cure = "Differentiate by the library's rule: traceax.custom_trace."
    report.close("reverse derivative = forward derivative", backwards, slope, room, cure)


def _differentiated(report: Report, s: _Subject) -> None:
    matrix = _matrix("decaying")
    value, along = jax.jvp(lambda m: s.value(m, _KEY), (matrix,), (matrix,))
    room = s.tolerance() * _size(matrix)
    cure = (
        "The blocks must be those that the value is read through; pass euler=False if they "
        "are better ones."
    )
    report.close("derivative along the operator = value", along, value, room, cure)


def _statistics(report: Report, s: _Subject, num_keys: int) -> None:
    keys, direction = jax.random.split(jax.random.key(12), num_keys), _direction()

    def run(matrix: Any, key: Any) -> tuple[Estimate, Any]:
        estimate = s(matrix, key)
        _, slope = jax.jvp(lambda m: s.value(m, key), (matrix,), (direction,))
        return estimate, slope

    runs = jax.jit(jax.vmap(run, (None, 0)))
    for name in _SPECTRA:
        matrix = _matrix(name)
        estimates, slopes = runs(matrix, keys)
        truth = s.truth(matrix)
        _unbiased(report, f"{name}: unbiased", estimates.value, truth, _size(matrix), s)
        want = jax.jvp(s.truth, (matrix,), (direction,))[1]
        what = f"{name}: derivative unbiased"
        _unbiased(report, what, slopes, want, _size(direction), s)
        _honest(report, name, estimates, truth, _size(matrix), s)
    matrix = _matrix("flat", complex)
    values = jax.jit(jax.vmap(s.value, (None, 0)))(matrix, keys)
    _unbiased(report, "complex: unbiased", values, s.truth(matrix), _size(matrix), s)


def _unbiased(
    report: Report, name: str, values: Any, truth: Any, size: Any, s: _Subject
) -> None:
    spread = np.std(values, axis=0) / len(values) ** 0.5
    room = 6 * spread + s.tolerance() * size
    cure = "E[L R*] must be I, whatever operator L and R were made of."
    report.close(name, np.mean(values, axis=0), truth, room, cure)


def _honest(
    report: Report, name: str, estimates: Estimate, truth: Any, size: Any, s: _Subject
) -> None:
    errors = np.abs(np.asarray(estimates.value) - np.asarray(truth))
    rounding = float(s.tolerance() * size)
    exact = np.asarray(estimates.standard_error) == 0
    cure = "Say 0 only where nothing is left to chance."
    report.close(f"{name}: exact where the error is 0", errors * exact, 0.0, rounding, cure)
    low, high = jax.vmap(lambda e: e.interval(0.95))(_real(estimates))
    held = (low - rounding <= truth) & (truth <= high + rounding)
    share, least = float(np.mean(held)), 0.9 - 6 * (0.09 / len(errors)) ** 0.5
    if share < least:
        report.add(
            f"{name}: interval(0.95) holds the truth in {share:.0%} of {len(errors)} runs, "
            f"{least:.0%} allowed. Widen standard_error, or lower degrees_of_freedom."
        )


def _real(estimates: Estimate) -> Estimate:
    """Each with its own degrees of freedom; of real operators nothing is imaginary."""
    count = jnp.shape(estimates.value)[0]
    degrees = jnp.broadcast_to(jnp.asarray(estimates.degrees_of_freedom), (count,))
    return Estimate(
        jnp.real(estimates.value),
        estimates.standard_error,
        jnp.broadcast_to(jnp.asarray(estimates.num_matvecs), (count,)),
        degrees,
    )
