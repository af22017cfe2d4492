"""Semidefinite curvature matrices as operators: the Gauss-Newton and Fisher matrices.

Let J be the Jacobian of the outputs of a model, and H the Hessian of a loss in the outputs:

    d2 loss(fn(x)) = J* H J + sum over outputs of (d loss/d output) (Hessian of the output).

The first term is the Gauss-Newton matrix. It is semidefinite if the loss is convex in the
outputs. If the loss is the negative log-likelihood of an exponential family in its natural
parameters (squares, cross-entropy of logits), it is the Fisher information matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import lineax as lx
from jaxtyping import PyTree

from traceax._calculus.sampled import Field, GivenPoint, checked_point, hessian
from traceax._core.checks import check_callable, check_returned, check_scalar
from traceax._core.operator import Operator, jacobian


def gauss_newton(
    fn: Field,
    loss: Callable[[Any, Any], Any],
    x: GivenPoint,
    *,
    args: PyTree = None,
    jac: str | None = None,
) -> Operator:
    """Make the generalised Gauss-Newton matrix of loss(fn(x, args), args) as an operator.

        v -> J* H J v

    J is the Jacobian of `fn` at x, and H is the Hessian of `loss` with respect to the
    outputs of `fn`. For a Laplace approximation, take the `logdet` of this operator with
    the precision of the prior as `shift`.

    **Arguments** (details are in the guide's conventions)

    - `fn`: a model `fn(x, args)` that returns its outputs for all examples, an array or
      pytree of real numbers.
    - `loss`: a function `loss(outputs, args)` that returns one real number. It must be
      convex in the outputs, or the tag of the result is wrong.
    - `x`: the parameters of the model, a pytree of real arrays of floats.
    - `args`: a value that is passed to `fn` and `loss` as their second argument, for
      example the data. Default `None`.
    - `jac`: with `"bwd"`, J v is computed as the transpose of reverse mode. Use it if `fn`
      or `loss` contains a `jax.custom_vjp`. Default `None`, which means forward mode.

    **Returns** a lineax operator on the space of x, tagged positive semidefinite. Estimates
    of it can be differentiated.

    **Cost**: a matvec multiplies once by J (forward mode), once by its transpose (reverse
    mode), and once by H. It costs about four times as much as `fn`.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> data = jnp.arange(4.0), jnp.ones(4)
        >>> model = lambda w, data: jnp.tanh(w[0] + w[1] * data[0])
        >>> loss = lambda outputs, data: jnp.sum((outputs - data[1]) ** 2) / 2
        >>> operator = tx.gauss_newton(model, loss, jnp.array([0.5, -0.2]), args=data)
        >>> print(tx.trace(operator, jax.random.key(0)).value.round(1))
        17.0

    **Reference**: Schraudolph (2002),
    [doi:10.1162/08997660260028683](https://doi.org/10.1162/08997660260028683). Martens
    (2020), JMLR 21(146).

    **See also**: `empirical_fisher`, `logdet`, `leaf_traces`.
    """
    name, x = "gauss_newton", checked_point("gauss_newton", fn, x, args, jac=jac)
    check_returned(name, "fn", eqx.filter_eval_shape(fn, x, args), "real numbers")
    outputs, cure = fn(x, args), "Pass lambda outputs, args: ..., of what fn returns."
    check_callable(name, "loss", loss, "loss(outputs, args)", cure, 2)
    check_scalar(name, "loss", eqx.filter_eval_shape(loss, outputs, args))
    j = jacobian(fn, x, args, jac=jac)
    product = j.T @ hessian(loss, outputs, args, jac) @ j
    return lx.TaggedLinearOperator(product, lx.positive_semidefinite_tag)


def empirical_fisher(
    fn: Field, x: GivenPoint, *, args: PyTree = None, jac: str | None = None
) -> Operator:
    """Make the empirical Fisher matrix, the sum of g_i g_i* over examples, as an operator.

    g_i is the gradient with respect to x of the log-likelihood (or loss) of example i. The
    Fisher information matrix averages over the predictions of the model (`gauss_newton`).
    The empirical one uses the labels of the data instead.

    **Arguments** (details are in the guide's conventions)

    - `fn`: a function `fn(x, args)` that returns the log-likelihood or loss of each
      example, an array or pytree of real numbers. For a mean over N examples, divide this
      by N**0.5.
    - `x`: the parameters of the model, a pytree of real arrays of floats.
    - `args`: a value that is passed to `fn` as its second argument, for example the data.
      Default `None`.
    - `jac`: as in `gauss_newton`. Default `None`, which means forward mode.

    **Returns** a lineax operator on the space of x, tagged positive semidefinite. Its rank
    is at most the number of examples. Estimates of it can be differentiated.

    **Cost**: a matvec multiplies once by the Jacobian of `fn` (forward mode), and once by
    its transpose (reverse mode). It costs about four times as much as `fn`.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> fn = lambda w, data: -((w @ data.T) ** 2) / 2
        >>> data = jnp.array([[1.0, 0.0], [1.0, 2.0], [0.0, 1.0]])
        >>> operator = tx.empirical_fisher(fn, jnp.ones(2), args=data)
        >>> print(tx.diagonal(operator, jax.random.key(0)).value)
        [10. 37.]

    **Reference**: Kunstner, Balles and Hennig (2019),
    [arXiv:1905.12558](https://arxiv.org/abs/1905.12558).

    **See also**: `gauss_newton`, `leaf_traces`.
    """
    name, x = "empirical_fisher", checked_point("empirical_fisher", fn, x, args, jac=jac)
    check_returned(name, "fn", eqx.filter_eval_shape(fn, x, args), "real numbers")
    j = jacobian(fn, x, args, jac=jac)
    return lx.TaggedLinearOperator(j.T @ j, lx.positive_semidefinite_tag)
