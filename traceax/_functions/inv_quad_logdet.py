"""The front door to likelihoods."""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, Inexact, PRNGKeyArray, PyTree

from traceax._core.checks import check_request, check_rtol, check_shift
from traceax._core.estimate import Estimate, exportable
from traceax._core.operator import (
    LinearMap,
    known_diagonal,
    size,
    stores_matrix,
)
from traceax._core.rule import run
from traceax._estimators.driver import SMALL
from traceax._functions.exact_functions import hermitian_or_nan, real_or_nan
from traceax._functions.likelihood import Likelihood, likelihood
from traceax._functions.logdet import STORED
from traceax._functions.right_hand_sides import right_hand_sides
from traceax._functions.slq import real_dtype
from traceax._functions.whitening import whitened
from traceax._linalg.columns import column_dots
from traceax._probes.draw import draw
from traceax._probes.samplers import sphere
from traceax._quadrature.block_quadrature import shape_for
from traceax._quadrature.scalar import MatrixFunction, scalar_function


class InvQuadLogdet(eqx.Module):
    """What `inv_quad_logdet` returns. A pytree.

    **Attributes**

    - `inv_quad`: an `Estimate` of y* (A + shift I)^-1 y, summed over right-hand sides.
    - `logdet`: an `Estimate` of log det(A + shift I).
    - `solution`: (A + shift I)^-1 y, like the vector that was given.

    **Example**

    ```python
    >>> import jax, lineax as lx, traceax as tx
    >>> operator = lx.DiagonalLinearOperator(jax.numpy.array([2.0, 8.0]))
    >>> y = jax.numpy.array([1.0, 4.0])
    >>> both = tx.inv_quad_logdet(operator, y, jax.random.key(0))
    >>> print(both.inv_quad.value, both.logdet.value.round(3), both.solution)
    2.5 2.773 [0.5 0.5]

    ```
    """

    inv_quad: Estimate
    logdet: Estimate
    solution: PyTree[Inexact[Array, ...]]

    def __str__(self) -> str:
        return f"inv_quad: {self.inv_quad}\nlogdet: {self.logdet}"


exportable(InvQuadLogdet(Estimate(0.0, 0.0, 0), Estimate(0.0, 0.0, 0), 0.0))


def inv_quad_logdet(
    operator: lx.AbstractLinearOperator,
    vector: PyTree[Array],
    key: PRNGKeyArray,
    num_matvecs: int = 240,
    *,
    shift: float | Float[Array, ""] | lx.DiagonalLinearOperator = 0.0,
    rtol: float = 1e-6,
) -> InvQuadLogdet:
    """y* (A + shift I)^-1 y and log det(A + shift I), A + shift I Hermitian positive
    definite: what likelihoods of Gaussian processes and mixed models are made of.

    One block Krylov run, with k probes in its first block, and with y where it takes at
    most a quarter of that, gives the log-determinant as `logdet` does, Galerkin's solution
    of (A + shift I) u = y, and a preconditioner with which conjugate gradients go on from
    there.

    Exact, by a Cholesky factorisation: without an application for operators that store
    their matrix, up to n = 2048; from n applications where `num_matvecs` reaches n, and
    for n <= 64. Exact for diagonal operators: free, or, if they are only tagged, from one
    application.

    **Arguments**

    - `operator`: a Hermitian (real: symmetric) lineax operator, of arrays or pytrees. Tags
      are not needed.
    - `vector`: y, with the operator's input structure. With one more, leading, axis on
      every leaf it is several right-hand sides.
    - `key`: a JAX random key.
    - `num_matvecs`: how many applications the run may spend (beyond n = 64), a Python int
      of at least 6, or n; the solve comes on top. Default 240.
    - `shift`: real. An `lx.DiagonalLinearOperator` D of positive entries, the noise of each
      observation say, stands for A + D.
    - `rtol`: the error, in the energy norm and relative, at which the solve stops, a Python
      float. Default 1e-6, which is what gradients see; the value's is its square.

    **Returns** an `InvQuadLogdet`: two `Estimate`s of shape `()`, real, and the solution.
    `inv_quad.standard_error` is what the solution's residual leaves open, and rounding: a
    bound, which the value is below the truth by at most, where A is positive semidefinite
    and shift positive (as far as the run can see); else a multiple of it by half the least
    Ritz value. A solve that does not get to `rtol` within 10 num_matvecs steps shows in
    it. `inv_quad.num_matvecs` counts run and solve, and is an array where there is a run;
    `logdet.num_matvecs` counts the run. Where A + shift I shows itself not to be positive
    definite, NaN.

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `num_matvecs` not a Python int, `shift` neither real nor a diagonal operator, `rtol` not
    a number, `vector` complex where the operator is real; `ValueError` if `operator` is not
    square, mixes real and complex leaves, has no dimension or is tagged negative
    semidefinite; if `vector` or `shift` are of another space, `shift` an array of several;
    if `key` is an array of keys; if `num_matvecs` is below 6 and n, or `rtol` not between 0
    and 1.

    **Derivatives**: forward and reverse, in the operator, `vector` and `shift`, of both
    estimates, without another solve: about 0.8 num_matvecs matvec-VJPs for the
    log-determinant, and one for each right-hand side. Those of the solution, and second
    ones, take a solve each, to the same `rtol`.

    **Cost**: at most `num_matvecs` applications in blocks (or n, for n <= 64), and as many
    as conjugate gradients take, 10 num_matvecs for each right-hand side at most; an
    orthonormal basis of `num_matvecs` vectors.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
    >>> spectrum = 1 / jnp.arange(1.0, 401.0) ** 2
    >>> structure = jax.ShapeDtypeStruct((400,), spectrum.dtype)
    >>> tag = lx.positive_semidefinite_tag
    >>> operator = lx.FunctionLinearOperator(lambda v: spectrum * v, structure, tag)
    >>> y = jnp.sin(jnp.arange(400.0))
    >>> both = tx.inv_quad_logdet(operator, y, jax.random.key(0), 120, shift=0.01)
    >>> nll = (both.inv_quad.value + both.logdet.value + 400 * jnp.log(2 * jnp.pi)) / 2
    >>> bool(jnp.allclose(both.solution, y / (spectrum + 0.01), rtol=1e-3, atol=1e-3))
    True

    ```

    **Reference**: derived in `traceax/_functions/likelihood.py` and
    `traceax/_quadrature/block_quadrature.py`. Compare Gardner, Pleiss, Bindel, Weinberger
    and Wilson (2018), GPyTorch, arXiv:1809.11165, for both from one run; Wenger, Pleiss,
    Hennig, Cunningham and Gardner (2022), arXiv:2107.00243, for preconditioners in them.
    """
    name = "inv_quad_logdet"
    operator = check_request(name, operator, key, num_matvecs, 6)
    check_shift(name, operator, shift, several=False)
    check_rtol(name, rtol)
    sides = right_hand_sides(name, operator, vector)
    solve = partial(_of_columns, key=key, num_matvecs=num_matvecs, rtol=float(rtol))
    if not isinstance(shift, lx.DiagonalLinearOperator):
        both = solve(operator, sides.columns, jnp.asarray(shift, real_dtype(operator)))
        return eqx.tree_at(lambda b: b.solution, both, sides.like(both.solution))
    white = whitened(operator, shift)
    scale = white.scale[:, None]
    one = jnp.ones((), real_dtype(operator))
    both = solve(white.operator, scale * sides.columns, one)
    return eqx.tree_at(
        lambda b: (b.logdet.value, b.solution),
        both,
        (both.logdet.value + white.log_determinant, sides.like(scale * both.solution)),
    )


def _of_columns(
    operator: lx.AbstractLinearOperator,
    y: Inexact[Array, "n t"],
    shift: Float[Array, ""],
    *,
    key: PRNGKeyArray,
    num_matvecs: int,
    rtol: float,
) -> InvQuadLogdet:
    n = size(operator)
    known = known_diagonal(operator) if lx.is_diagonal(operator) else None
    if known is not None:
        diagonal, spent = known
        return _of_diagonal(real_or_nan(diagonal) + shift, y, spent)
    if n <= max(num_matvecs, SMALL) or (stores_matrix(operator) and n <= STORED):
        spent = 0 if stores_matrix(operator) else n
        matrix = hermitian_or_nan(LinearMap(operator).dense())
        return _of_matrix(matrix + shift * jnp.eye(n, dtype=matrix.dtype), y, spent)
    fn, _ = scalar_function("inv_quad_logdet", lambda x: jnp.log(x + shift), shift.dtype)
    subject = Likelihood(MatrixFunction(LinearMap(operator), fn), y, shift)
    shape, t = shape_for(num_matvecs), y.shape[1]
    # More than a quarter of the run belongs to the probes, whose spaces serve all.
    kept = t if 4 * t <= shape.width else 0
    probes = draw("inv_quad_logdet", sphere, key, operator, shape.width - kept)
    algorithm = partial(
        likelihood, shape=shape, kept=kept, rtol=rtol, max_steps=10 * num_matvecs
    )
    outcome = run(algorithm, subject, probes)
    degrees = max(2 * (probes.shape[1] - 1) / 3, 1)
    spent = shape.num_matvecs
    (logdet, form), (logdet_error, bound) = outcome.value, outcome.standard_error
    solved = spent + t * (outcome.report.num_steps + 1)
    return InvQuadLogdet(
        Estimate(form, bound, solved),
        Estimate(logdet, logdet_error, spent, degrees),
        outcome.report.solution(subject),
    )


def _of_diagonal(
    diagonal: Float[Array, " n"], y: Inexact[Array, "n t"], spent: int
) -> InvQuadLogdet:
    # A factorisation would have come upon it.
    diagonal = jnp.where(jnp.all(diagonal > 0), diagonal, jnp.nan)
    logs = jnp.sum(jnp.log(diagonal))
    return _exact(y, y / diagonal[:, None], logs, spent)


def _of_matrix(
    matrix: Inexact[Array, "n n"], y: Inexact[Array, "n t"], spent: int
) -> InvQuadLogdet:
    factor = jnp.linalg.cholesky(matrix)
    logs = 2 * jnp.sum(jnp.log(jnp.diagonal(factor).real))
    return _exact(y, jax.scipy.linalg.cho_solve((factor, True), y), logs, spent)


def _exact(
    y: Inexact[Array, "n t"],
    solution: Inexact[Array, "n t"],
    logs: Float[Array, ""],
    spent: int,
) -> InvQuadLogdet:
    form = jnp.sum(column_dots(y, solution).real)
    zero = jnp.zeros_like(logs)
    return InvQuadLogdet(Estimate(form, zero, spent), Estimate(logs, zero, spent), solution)
