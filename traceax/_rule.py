"""The derivative rule, the heart of the library, in its only place.

Notation: A the operator, n x n; dA a tangent of it; * the conjugate transpose.

Every estimator here is a weighted sum of entries of the operator,

    value = <A, W> := sum over entries of conj(L) o (A R),      W = L R*,

whose weight is a resolution of the identity in expectation, E[W] = I. The weight depends
on the probes and, for all estimators but Hutchinson's, on A itself. Its derivative is

    d value = <dA, W> + <A, dW>.

The second term has mean zero: E<A, W> = tr A for *every* A, so E<dA, W> = tr dA is all
there is of E[d value]. It is pure noise, and costs the derivative of a QR or an
eigendecomposition, which does not exist where the sketch is rank-deficient. The rule drops
it, by freezing L and R:

    d value  :=  <dA, W>.

So the rule is linear in dA, and JAX derives its transpose: nothing is transposed by hand,
no cotangent has to look like an operator, and every operator class works. It is unbiased;
unbiased again when differentiated twice, <d2A, W>; exact for dA = I as far as <I, W> = n;
and applied to dA = A it returns the value, where value = <A, W>. (XNysTrace and NA-Hutch++
spend fewer applications on their value than reading it through W would: there <A, W> is
another estimate of the same trace, equal where the sketch is exact.) In reverse mode it is
one vector-Jacobian product of the matvec a column of R, with cotangent L.

A new estimator is one function `(LinearMap, probes) -> Outcome`.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PyTree

from traceax._estimate import Estimate
from traceax._operator import LinearMap, is_hermitian, prepare, size, working_dtype


class Weight(eqx.Module):
    """W = L R*: read an operator A through it as <A, W>."""

    left: Inexact[Array, "n r"]
    right: Inexact[Array, "n r"]

    def __call__(self, linear_map: LinearMap) -> Inexact[Array, ""]:
        return jnp.sum(self.left.conj() * linear_map(self.right))


class Outcome(eqx.Module):
    """What an algorithm returns: an estimate, and the frozen blocks of its derivative."""

    value: Inexact[Array, ""]
    standard_error: Float[Array, ""]
    weight: Weight


Algorithm = Callable[[LinearMap, PyTree[Array]], Outcome]


@eqx.filter_custom_jvp
def _evaluate(
    operator: lx.AbstractLinearOperator, algorithm: Algorithm, probes: PyTree[Array]
) -> Outcome:
    outcome = algorithm(LinearMap(operator), probes)
    if is_hermitian(operator):
        outcome = eqx.tree_at(lambda o: o.value, outcome, replace_fn=jnp.real)
    return outcome


@_evaluate.def_jvp
def _evaluate_jvp(
    primals: tuple[lx.AbstractLinearOperator, Algorithm, PyTree[Array]],
    tangents: tuple[Any, Any, Any],
) -> tuple[Outcome, Outcome]:
    operator, _, _ = primals
    tangent, _, _ = tangents
    # Through `_evaluate` again, so that a second derivative meets the rule again.
    outcome = _evaluate(*primals)
    unperturbed = jax.tree.map(lambda _: None, outcome)
    if not jax.tree.leaves(tangent):
        return outcome, unperturbed
    # <dA, W>. `filter_jvp` takes the `None` of whatever is not perturbed, and gives `None`
    # where the matvec does not depend on what is (the point of a constant Jacobian).
    _, read = eqx.filter_jvp(
        lambda operator: outcome.weight(LinearMap(operator)), (operator,), (tangent,)
    )
    if read is None:
        return outcome, unperturbed
    if not jnp.iscomplexobj(outcome.value):
        read = read.real
    read = read.astype(outcome.value.dtype)
    refused = _refuse(outcome.standard_error, read.real)
    return outcome, Outcome(read, refused, unperturbed.weight)


def _refuse(error: Float[Array, ""], tangent: Float[Array, ""]) -> Float[Array, ""]:
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
    operator: lx.AbstractLinearOperator,
    probes: PyTree[Array],
    num_matvecs: int,
    degrees_of_freedom: float,
) -> Estimate:
    """Run an algorithm under the rule."""
    outcome = _evaluate(prepare(operator), algorithm, probes)
    return Estimate(
        outcome.value, outcome.standard_error, num_matvecs, float(degrees_of_freedom)
    )


def exact_trace(operator: lx.AbstractLinearOperator) -> Estimate:
    """The trace from n applications: W = I, nothing random."""
    n = size(operator)
    basis = jnp.eye(n, dtype=working_dtype(operator))
    return estimate(_exact_trace, operator, basis, num_matvecs=n, degrees_of_freedom=n)


def _exact_trace(linear_map: LinearMap, basis: Inexact[Array, "n n"]) -> Outcome:
    value = jnp.trace(linear_map(basis))
    zero = jnp.zeros((), value.real.dtype)
    return Outcome(value, zero, Weight(basis, basis))
