"""The derivative rule of all estimators.

Notation: A the operator; t(A) what is estimated of it (its trace, diagonal, row norms); dA
a tangent; * the conjugate transpose.

Every algorithm here makes blocks X out of the operator and its probes, and with them a
readout r(B; X) of operators B that is unbiased whatever operator B is read:

    E r(B; X) = t(B)    for every B, in particular where X was made from another operator.

For traces and diagonals the readout is linear, sums over the rows of conj(L) o (B R) with
E[R L*] = I (`_estimators.readouts`). The estimate is r(A; X). Its derivative has two parts,

    d r(A; X) = D_B r(A; X)[dA] + D_X r(A; X)[dX].

The second has mean zero: E r(A; X) = t(A) for *every* X that the algorithm could have made.
It is noise only. It costs the derivative of a QR or an eigendecomposition, which does not
exist where the sketch is rank-deficient. The rule drops it, by freezing X:

    d value  :=  D_B r(A; X)[dA],    for traces and diagonals  r(dA; X).

The rule is linear in dA, so JAX derives its transpose, and every operator class works. It
is unbiased, also when differentiated twice. Applied to dA = A it returns the value, where
value = r(A; X) and r is linear. (XNysTrace, NA-Hutch++, XNysDiag and the one-sided forms of
Diag++ and XDiag spend fewer applications on their value than reading it would take: there
r(A; X) is another estimate of the same thing, equal where the sketch is exact.) In reverse
mode it costs one vector-Jacobian product of the matvec for each application of r.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, PyTree

from traceax._core.canonical import compiled
from traceax._core.estimate import Estimate, error_tangent
from traceax._core.operator import LinearMap, canonicalise
from traceax._core.vectors import Structure, as_result

Values = Inexact[Array, "*values"]
Readout = Callable[[Any], Values]
Subject = eqx.Module  # what a readout reads: an operator, or a function of one
Algorithm = Callable[[Any, PyTree], "Outcome"]


class Outcome(eqx.Module):
    """What an algorithm returns: an estimate, and the frozen blocks of its derivative."""

    value: Values
    standard_error: Float[Array, "*values"]
    readout: Readout
    report: PyTree = None  # anything else, without a derivative


@eqx.filter_custom_jvp
def _evaluate(subject: Subject, algorithm: Algorithm, probes: PyTree) -> Outcome:
    return compiled(algorithm, subject, probes)


@_evaluate.def_jvp
def _evaluate_jvp(
    primals: tuple[Subject, Algorithm, PyTree], tangents: tuple[Any, Any, Any]
) -> tuple[Outcome, Outcome]:
    subject, tangent = primals[0], tangents[0]
    # A call of `_evaluate`, so that the rule holds for second derivatives, too.
    outcome = _evaluate(*primals)
    unperturbed = jax.tree.map(lambda _: None, outcome)
    if not jax.tree.leaves(tangent):
        return outcome, unperturbed
    # D_B r(A; X)[dA]. `filter_jvp` takes the `None` of what is not perturbed. It returns
    # `None` if the matvec does not depend on what is (the point of a constant Jacobian).
    _, read = eqx.filter_jvp(outcome.readout, (subject,), (tangent,))
    if read is None:
        return outcome, unperturbed
    if not jnp.iscomplexobj(outcome.value):
        read = read.real
    read = read.astype(outcome.value.dtype)
    error = error_tangent(outcome.standard_error, read.real)
    return outcome, Outcome(read, error, unperturbed.readout, unperturbed.report)


@eqx.filter_custom_jvp
def with_own_jvp(
    value: PyTree,
    function: Callable[..., PyTree],
    subject: PyTree,
    held: Callable[[Any], PyTree] | None = None,
) -> PyTree:
    """`value`, which equals `function(subject)`, with the derivative of the latter. Blocks
    that depend on the operator are so used again: neither computed twice nor frozen.

    With `held` the derivative is that of `function(subject, block)` in its first argument,
    block = `held(subject)`; only the second derivative includes that of the block."""
    return value


@with_own_jvp.def_jvp
def _with_own_jvp_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[PyTree, PyTree]:
    value, function, subject, *held = primals
    if not jax.tree.leaves(tangents[2]):
        return value, jax.tree.map(lambda _: None, value)
    blocks = [make(subject) for make in held]
    _, moved = eqx.filter_jvp(lambda s: function(s, *blocks), (subject,), (tangents[2],))
    return with_own_jvp(*primals), moved


def estimate(
    algorithm: Algorithm,
    subject: Subject,
    probes: PyTree,
    method: str,
    num_matvecs: int,
    degrees_of_freedom: float,
    structure: Structure | None = None,
) -> Estimate:
    """Run an algorithm under the rule. A `structure` splits its results into leaves."""
    outcome = run(algorithm, subject, probes)
    value, error = outcome.value, outcome.standard_error
    if structure is not None:
        value, error = as_result(value, structure), as_result(error, structure)
    return Estimate(value, error, num_matvecs, float(degrees_of_freedom), method=method)


def run(algorithm: Algorithm, subject: Subject, probes: PyTree) -> Outcome:
    """Run an algorithm under the rule. The value is real if the operator is Hermitian."""
    subject = canonicalise(subject)
    outcome = _evaluate(subject, algorithm, probes)
    if isinstance(subject, LinearMap) and subject.is_read_real:
        return eqx.tree_at(lambda o: o.value, outcome, replace_fn=jnp.real)
    return outcome
