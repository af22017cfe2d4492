"""The derivative rule, the heart of the library, in its only place.

Notation: A the operator; t(A) what is estimated of it (its trace, diagonal, row norms); dA
a tangent; * the conjugate transpose.

Every algorithm here makes blocks X out of the operator and its probes, and with them a
readout r(B; X) of operators B that is unbiased whatever operator B is read:

    E r(B; X) = t(B)    for every B, in particular where X was made from another operator.

For traces and diagonals the readout is linear, sums over the rows of conj(L) o (B R) with
E[R L*] = I (`_estimators.readouts`). The estimate is r(A; X). Its derivative has two parts,

    d r(A; X) = D_B r(A; X)[dA] + D_X r(A; X)[dX].

The second has mean zero: E r(A; X) = t(A) for *every* X that the algorithm could have made.
It is pure noise, and costs the derivative of a QR or an eigendecomposition, which does not
exist where the sketch is rank-deficient. The rule drops it, by freezing X:

    d value  :=  D_B r(A; X)[dA],    for traces and diagonals  r(dA; X).

So the rule is linear in dA, and JAX derives its transpose: nothing is transposed by hand,
no cotangent has to look like an operator, and every operator class works. It is unbiased,
and unbiased again when differentiated twice. Applied to dA = A it returns the value, where
value = r(A; X) and r is linear. (XNysTrace, NA-Hutch++, XNysDiag and the one-sided forms of
Diag++ and XDiag spend fewer applications on their value than reading it would take: there
r(A; X) is another estimate of the same thing, equal where the sketch is exact.) In reverse
mode it costs one vector-Jacobian product of the matvec for each application of r.

A new estimator is one function `(LinearMap, probes, target) -> Outcome`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, PyTree

from traceax._core.canonical import compiled
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Structure, as_result, prepare

Values = Inexact[Array, "*values"]
Errors = Float[Array, "*values"]


Readout = Callable[[Any], Values]


class Outcome(eqx.Module):
    """What an algorithm returns: an estimate, and the frozen blocks of its derivative."""

    value: Values
    standard_error: Errors
    readout: Readout
    report: PyTree = None  # what else there is to tell: it has no derivative


# What is estimated of: an operator, or a function of one. A pytree that a readout reads.
Subject = eqx.Module

Algorithm = Callable[[Any, PyTree], Outcome]


@eqx.filter_custom_jvp
def _evaluate(subject: Subject, algorithm: Algorithm, probes: PyTree) -> Outcome:
    return compiled(algorithm, subject, probes)


@_evaluate.def_jvp
def _evaluate_jvp(
    primals: tuple[Subject, Algorithm, PyTree], tangents: tuple[Any, Any, Any]
) -> tuple[Outcome, Outcome]:
    subject, _, _ = primals
    tangent, _, _ = tangents
    # Through `_evaluate` again, so that a second derivative meets the rule again.
    outcome = _evaluate(*primals)
    unperturbed = jax.tree.map(lambda _: None, outcome)
    if not jax.tree.leaves(tangent):
        return outcome, unperturbed
    # D_B r(A; X)[dA]. `filter_jvp` takes the `None` of whatever is not perturbed, and gives
    # `None` where the matvec does not depend on what is (a constant Jacobian's point).
    _, read = eqx.filter_jvp(outcome.readout, (subject,), (tangent,))
    if read is None:
        return outcome, unperturbed
    if not jnp.iscomplexobj(outcome.value):
        read = read.real
    read = read.astype(outcome.value.dtype)
    refused = _refuse(outcome.standard_error, read.real)
    return outcome, Outcome(read, refused, unperturbed.readout, unperturbed.report)


@eqx.filter_custom_jvp
def settled(
    value: PyTree,
    function: Callable[..., PyTree],
    subject: Subject,
    held: Callable[[Any], PyTree] | None = None,
) -> PyTree:
    """`value`, which `function(subject)` would make over again: taken as it is, and
    differentiated, where anybody asks, as `function`. So blocks that depend on the operator
    may be used again without computing them twice or freezing them.

    With `held` it is differentiated as `function(subject, block)`, block = `held(subject)`,
    which is constant for a first derivative, but not for a second one."""
    return value


@settled.def_jvp
def _settled_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[PyTree, PyTree]:
    value, function, subject, *held = primals
    if not jax.tree.leaves(tangents[2]):
        return value, jax.tree.map(lambda _: None, value)
    blocks = [make(subject) for make in held]
    _, moved = eqx.filter_jvp(lambda s: function(s, *blocks), (subject,), (tangents[2],))
    return settled(*primals), moved


@eqx.filter_custom_jvp
def refusing(error: Errors, source: Values | None = None) -> Errors:
    """A standard error that was made of differentiable numbers; or, with a `source` of its
    shape, of what was frozen of them."""
    return error


@refusing.def_jvp
def _refusing_jvp(
    primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Errors, Errors | None]:
    error = primals[0]
    moved = [tangent for tangent in tangents if tangent is not None]
    return error, _refuse(error, moved[-1].real) if moved else None


def _refuse(error: Errors, tangent: Errors) -> Errors:
    """The tangent of the standard error: infinite forwards, an error by name backwards.

    (Not NaN: `jax_debug_nans` would stop at it, though nobody reads it.)

    The choice is always taken, but hangs on a value that the compiler does not know, or it
    would fold the choice, and with it the error.
    """
    unknown = jnp.where(error > -1, jnp.inf, tangent)
    return eqxi.nondifferentiable_backward(
        unknown,
        msg="traceax: `standard_error` of an Estimate must not be differentiated, because "
        "the derivative rule freezes what it is made of, but got a cotangent for it. Wrap "
        "it in jax.lax.stop_gradient.",
        symbolic=False,
    )


def estimate(
    algorithm: Algorithm,
    subject: Subject,
    probes: PyTree,
    num_matvecs: int,
    degrees_of_freedom: float,
    structure: Structure | None = None,
) -> Estimate:
    """Run an algorithm under the rule. A `structure` cuts what it returns into leaves."""
    outcome = run(algorithm, subject, probes)
    value, error = outcome.value, outcome.standard_error
    if structure is not None:
        value, error = as_result(value, structure), as_result(error, structure)
    return Estimate(value, error, num_matvecs, float(degrees_of_freedom))


def run(algorithm: Algorithm, subject: Subject, probes: PyTree) -> Outcome:
    """Run an algorithm under the rule. What is read of a Hermitian operator is real."""
    subject = prepare(subject)
    outcome = _evaluate(subject, algorithm, probes)
    if isinstance(subject, LinearMap) and subject.is_hermitian:
        return eqx.tree_at(lambda o: o.value, outcome, replace_fn=jnp.real)
    return outcome
