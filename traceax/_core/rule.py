"""The derivative rule of all estimators.

Notation: A the operator; t(A) the quantity that is estimated (its trace, diagonal, row
norms); dA a tangent; * the conjugate transpose.

Every algorithm here makes blocks X out of the operator and its probes. The blocks define a
readout r(B; X) of operators B that is unbiased for whatever operator B is read:

    E r(B; X) = t(B)    for every B, in particular if X was made from another operator.

For traces and diagonals the readout is linear in B: it consists of sums over the rows of
conj(L) o (B R) with E[R L*] = I (`_estimators.readouts`). The estimate is r(A; X). Its
derivative has two parts,

    d r(A; X) = D_B r(A; X)[dA] + D_X r(A; X)[dX].

The second part has mean zero, because E r(A; X) = t(A) for *every* X that the algorithm
could have made. It is only noise. It would cost the derivative of a QR or an
eigendecomposition, which does not exist if the sketch is rank-deficient. The rule drops it
by freezing X:

    d value  :=  D_B r(A; X)[dA],    for traces and diagonals  r(dA; X).

The rule is linear in dA, so JAX derives its transpose, and every operator class works. It
is unbiased, also when it is differentiated twice. If value = r(A; X) and r is linear, the
rule applied to dA = A returns the value. (XNysTrace, NA-Hutch++, XNysDiag and the one-sided
forms of Diag++ and XDiag spend fewer matvecs on their value than a readout would take. For
them r(A; X) is another estimate of the same number, equal if the sketch is exact.) In
reverse mode the rule costs one vector-Jacobian product of the matvec for each matvec of r.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, PyTree

from traceax._core.canonical import compiled
from traceax._core.estimate import error_tangent
from traceax._core.operator import LinearMap

Values = Inexact[Array, "*values"]
Readout = Callable[[Any], Values]
Subject = eqx.Module  # that a readout reads: an operator, or a function of one
Stage = Callable[[Any, PyTree], Any]
Algorithm = Stage | tuple[Stage, ...]
"""A function `(subject, probes) -> Outcome`, or stages that are programs of their own
outside of `jax.jit`. Each stage takes what the one before has made. The first one, the
third one and so on apply the operator. The others take the subject `at_rest`, which depends
on the space of the operator alone. So the next operator on the same space shares them."""


class Outcome(eqx.Module):
    """The result of an algorithm: an estimate, and the frozen blocks of its derivative."""

    value: Values
    standard_error: Float[Array, "*values"]
    readout: Readout
    report: PyTree = None  # anything else, without a derivative
    quadrature_error: Float[Array, "*values"] | None = None  # a part of the standard error


@eqx.filter_custom_jvp
def run(algorithm: Algorithm, subject: Any, probes: PyTree) -> Outcome:
    """Run an algorithm under the rule. The subject must be canonical already, as the
    operator of a `Call` is."""
    stages, made = algorithm if isinstance(algorithm, tuple) else (algorithm,), probes
    for place, stage in enumerate(stages):
        stage = partial(_outcome, stage) if stage is stages[-1] else stage
        made = compiled(stage, subject.at_rest if place % 2 else subject, made)
    return made


def _outcome(last: Stage, subject: Subject, made: PyTree) -> Outcome:
    """Run the last stage. The value is real if the operator is Hermitian. If a value is
    NaN, so is its error."""
    outcome = last(subject, made)
    is_real = isinstance(subject, LinearMap) and subject.reads_real and subject.is_hermitian
    value = outcome.value.real if is_real else outcome.value
    error = jnp.where(jnp.isnan(value), jnp.nan, outcome.standard_error)
    return replace(outcome, value=value, standard_error=error)


@run.def_jvp
def _run_jvp(primals: Any, tangents: Any) -> tuple[Outcome, Outcome]:
    subject, tangent = primals[1], tangents[1]
    # A call of `run`, so that the rule holds for second derivatives, too.
    outcome = run(*primals)
    unperturbed = jax.tree.map(lambda _: None, outcome)
    if not jax.tree.leaves(tangent):
        return outcome, unperturbed
    # D_B r(A; X)[dA]. In `tangent`, leaves that are not perturbed are `None`. The result is
    # `None` if the matvec does not depend on the others (the point of a constant Jacobian).
    _, read = eqx.filter_jvp(outcome.readout, (subject,), (tangent,))
    if read is None:
        return outcome, unperturbed
    read = read if jnp.iscomplexobj(outcome.value) else read.real
    read = read.astype(outcome.value.dtype)
    errors = outcome.standard_error, outcome.quadrature_error
    error, gap = jax.tree.map(lambda e: error_tangent(e, read.real), errors)
    return outcome, Outcome(read, error, unperturbed.readout, unperturbed.report, gap)


@eqx.filter_custom_jvp
def with_own_jvp(
    value: PyTree, function: Callable, subject: PyTree, held: Callable | None = None
) -> PyTree:
    """Return `value`, but differentiate it as `function(subject)`, which equals it. Use it
    to take a block that was computed before, neither computing it twice nor freezing it.

    With `held`, differentiate `function(subject, block)` in its first argument, at block =
    `held(subject)`. Then only the second derivative includes the change of the block."""
    return value


@with_own_jvp.def_jvp
def _with_own_jvp_jvp(primals: Any, tangents: Any) -> tuple[PyTree, PyTree]:
    value, function, subject, *held = primals
    if not jax.tree.leaves(tangents[2]):
        return value, jax.tree.map(lambda _: None, value)
    blocks = [make(subject) for make in held]
    _, moved = eqx.filter_jvp(lambda s: function(s, *blocks), (subject,), (tangents[2],))
    return with_own_jvp(*primals), moved
