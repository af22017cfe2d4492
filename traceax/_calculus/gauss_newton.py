"""Curvature matrices that are semidefinite, as operators: Gauss-Newton's and Fisher's.

With J the Jacobian of what a model puts out, and H the Hessian of a loss of that,

    d2 loss(fn(x)) = J* H J + (a sum over outputs of their own Hessians, times slopes),

the first term alone is Gauss and Newton's matrix: semidefinite where the loss is convex in
the outputs, and for losses that are negative log-likelihoods of an exponential family in
its natural parameters (squares, cross-entropy of logits) Fisher's information matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import lineax as lx
from jaxtyping import PyTree

from traceax._calculus.sampled import Field, Point, differentiable_point, hessian
from traceax._core.function_checks import check_loss, check_outputs


def gauss_newton(
    fn: Field, loss: Callable[[Any, Any], Any], x: Point, args: PyTree = None
) -> lx.AbstractLinearOperator:
    """The generalised Gauss-Newton matrix of loss(fn(x, args), args), as an operator.

        v -> J* H J v

    J is the Jacobian of `fn` at x, H the Hessian of `loss` in what `fn` returns. For
    `trace`, `diagonal`, `leaf_traces`, `logdet` (with the prior's precision as `shift`, a
    Laplace approximation's), and lineax's solvers.

    **Arguments**

    - `fn`: a function `fn(x, args)`, a model, that returns an array or pytree of real
      numbers: what it puts out for all examples.
    - `loss`: a function `loss(outputs, args)` of what `fn` returns, one real number; convex
      in the outputs, or the tag of the result is a lie.
    - `x`: one point, a pytree of real arrays: the parameters.
    - `args`: passed on to both: the data. Default `None`.

    **Returns** a lineax operator on the space of x, tagged positive semidefinite.

    **Raises** `TypeError` if `fn` or `loss` are not callable, x has leaves that are not
    real numbers, `fn` returns anything but real numbers, or `loss` anything but one;
    `ValueError` if x is empty.

    **Derivatives**: of whatever is estimated of it, in x, `args`, and whatever `fn` and
    `loss` close over.

    **Cost**: an application is one product with J, forwards, one with its transpose,
    backwards, and one with H: some four times what `fn` costs. A batch of them evaluates
    `fn` once.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, traceax as tx
    >>> inputs, targets = jnp.arange(4.0), jnp.ones(4)
    >>> model = lambda w, data: jnp.tanh(w["slope"] * data[0] + w["offset"])
    >>> loss = lambda outputs, data: jnp.sum((outputs - data[1]) ** 2) / 2
    >>> weights = {"offset": jnp.array(0.5), "slope": jnp.array(-0.2)}
    >>> operator = tx.gauss_newton(model, loss, weights, (inputs, targets))
    >>> print(tx.trace(operator, jax.random.key(0)).value.round(1))
    17.0

    ```

    **Reference**: Schraudolph (2002), Fast curvature matrix-vector products for
    second-order gradient descent, Neural Computation 14(7), doi:10.1162/08997660260028683;
    Martens (2020), New insights and perspectives on the natural gradient method, Journal of
    Machine Learning Research 21(146).
    """
    x = differentiable_point("gauss_newton", fn, x)
    check_outputs("gauss_newton", eqx.filter_eval_shape(fn, x, args))
    outputs = fn(x, args)
    check_loss("gauss_newton", loss, outputs, args)
    jacobian = lx.JacobianLinearOperator(fn, x, args)
    product = jacobian.T @ hessian(loss, outputs, args) @ jacobian
    return lx.TaggedLinearOperator(product, lx.positive_semidefinite_tag)


def empirical_fisher(fn: Field, x: Point, args: PyTree = None) -> lx.AbstractLinearOperator:
    """The empirical Fisher matrix, the sum of g_i g_i* over examples, as an operator.

    g_i is the gradient in x of example i's log-likelihood (or loss). Unlike Fisher's
    information matrix, which averages over what the model predicts, it has the labels of
    the data in it; see `gauss_newton` for that.

    **Arguments**

    - `fn`: a function `fn(x, args)` that returns an array or pytree of real numbers, one an
      example: its log-likelihood or loss. For the mean over N examples, divide by
      N**0.5.
    - `x`: one point, a pytree of real arrays: the parameters.
    - `args`: passed on to `fn`: the data. Default `None`.

    **Returns** a lineax operator on the space of x, tagged positive semidefinite, of rank
    at most the number of examples.

    **Raises** `TypeError` if `fn` is not callable, x has leaves that are not real numbers,
    or `fn` returns anything but real numbers; `ValueError` if x is empty.

    **Derivatives**: of whatever is estimated of it, in x, `args`, and whatever `fn` closes
    over.

    **Cost**: an application is one product with the Jacobian of `fn`, forwards, and one
    with its transpose, backwards: some four times what `fn` costs.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, traceax as tx
    >>> fn = lambda w, data: -((w @ data.T) ** 2) / 2
    >>> data = jnp.array([[1.0, 0.0], [1.0, 2.0], [0.0, 1.0]])
    >>> operator = tx.empirical_fisher(fn, jnp.ones(2), data)
    >>> print(tx.diagonal(operator, jax.random.key(0)).value)
    [10. 37.]

    ```

    **Reference**: Kunstner, Balles and Hennig (2019), Limitations of the empirical Fisher
    approximation for natural gradient descent, arXiv:1905.12558.
    """
    x = differentiable_point("empirical_fisher", fn, x)
    check_outputs("empirical_fisher", eqx.filter_eval_shape(fn, x, args))
    jacobian = lx.JacobianLinearOperator(fn, x, args)
    return lx.TaggedLinearOperator(jacobian.T @ jacobian, lx.positive_semidefinite_tag)
