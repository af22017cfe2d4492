"""Traces of functions of operators that need not be Hermitian, by Arnoldi's process.

With A Q = Q H + rest, Q orthonormal, q_1 = v/|v|, H = V diag(x) V^{-1}:

    v* f(A) v ~ |v|^2 e_1* f(H) e_1 = |v|^2 sum_a V_1a (V^{-1} e_1)_a f(x_a)
    d tr f(A) = tr(f'(A) dA) = E v* dA f'(A) v,    f'(A) v ~ |v| Q f'(H) e_1,

the latter from the same Q. (The better balanced factors of the split rule would need a
space of the adjoint, too.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, Inexact, PRNGKeyArray, PyTree

from traceax._core.checks import check_function_request
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, prepare, resolution, size, working_dtype
from traceax._core.rule import Outcome, estimate_of, settled
from traceax._functions.exact_general import exact_general_trace
from traceax._linalg.columns import mean
from traceax._linalg.jackknife import (
    both_errors,
    independent_degrees_of_freedom,
    quadrature_error,
    standard_error,
)
from traceax._linalg.krylov import norm
from traceax._probes.draw import draw
from traceax._probes.samplers import Sampler, check_independent, rademacher
from traceax._quadrature.modes import Modes, modes_by_levels, refuse_second
from traceax._quadrature.scalar import MatrixFunction, Slope, scalar_function
from traceax._quadrature.split import at_nodes


def arnoldi_trace(
    operator: lx.AbstractLinearOperator,
    fn: Callable[[Inexact[Array, ""]], PyTree[Array]],
    key: PRNGKeyArray,
    *,
    num_probes: int,
    num_steps: int,
    sampler: Sampler = rademacher,
) -> Estimate:
    """Estimate tr f(A) of any square operator by Arnoldi's process, symmetry not needed.

    As `slq_trace`, which is cheaper, more accurate and better differentiated for Hermitian
    operators. Exact for polynomials of degree num_steps - 1 (Lanczos: 2 num_steps - 1) but
    for sampling. Ill-conditioned eigenvectors cost digits, which `standard_error` knows.
    Exact, by all eigenvalues, where num_probes * num_steps reaches n.

    **Arguments**

    - `operator`: any square lineax operator, real or complex, of arrays or pytrees.
    - `fn`: a function of a *complex* scalar, analytic, made of JAX operations, that returns
      an array or a pytree of arrays: each entry is another trace from the same run. It may
      close over parameters, or be an `eqx.Module`.
    - `key`: a JAX random key.
    - `num_probes`: how many probes, a Python int of at least 1.
    - `num_steps`: how many Arnoldi steps for each, a Python int of at least 1.
    - `sampler`: draws the probes, independent of each other, with E[z z*] = I. Default
      `rademacher`, with which the diagonal of A costs nothing.

    **Returns** an `Estimate` with the structure of what `fn` returns; real where the
    operator is, and `fn` of a real number is; then NaN where an eigenvalue lies on a branch
    cut of `fn` (a negative one under log). `standard_error` covers sampling, quadrature
    (by comparison with fewer steps) and the conditioning of eigenvectors; `inf` for one
    probe or one step; 0 where the value is exact.

    **Raises** `TypeError` if `operator` is not a lineax operator, `key` not a random key,
    `fn` not a function of a scalar that returns arrays, a count not a Python int;
    `ValueError` if `operator` is not square, mixes real and complex leaves, or has no
    dimension; if a count is below 1; if the sampler draws dependent probes.
    `NotImplementedError` if differentiated twice in the operator.

    **Derivatives**: first ones, forward and reverse, in the operator and in whatever `fn`
    depends on: one matvec-VJP for each probe and entry of the value, by v* dA f'(A) v.
    Where the value is exact so are they, tr f'(A) dA by n matvec-VJPs; a matrix without a
    basis of eigenvectors costs half of their digits.

    **Cost**: num_probes * num_steps applications, none of the adjoint, in num_steps
    batches; num_probes blocks of n x num_steps. Where the value is exact, n applications,
    none of operators that store their matrix. Eigenvalues of non-symmetric matrices, on
    which it stands, exist on the CPU; on other devices as far as JAX has them there.

    **Example**

    ```python
    >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
    >>> rotation = jnp.kron(jnp.eye(200), jnp.array([[0.0, -1.0], [1.0, 0.0]]))
    >>> operator = lx.MatrixLinearOperator(rotation)
    >>> key = jax.random.key(0)
    >>> trace = tx.arnoldi_trace(operator, jnp.exp, key, num_probes=20, num_steps=4)
    >>> bool(abs(trace.value - 400 * jnp.cos(1.0)) < 0.5)
    True

    ```

    **Reference**: Arnoldi (1951), Quarterly of Applied Mathematics 9(1); Saad (1992),
    Analysis of some Krylov subspace approximations to the matrix exponential operator,
    SIAM Journal on Numerical Analysis 29(1), doi:10.1137/0729014.
    """
    name = "arnoldi_trace"
    counts = {"num_probes": num_probes, "num_steps": num_steps}
    check_function_request(name, operator, key, counts)
    check_independent(name, sampler)
    dtype = working_dtype(operator)
    convert = partial(scalar_function, name, fn)
    fn, structure = convert(np.result_type(dtype, np.complex64))
    _, on_reals = convert(dtype)
    structure = jax.tree.map(_narrower, structure, on_reals)
    is_real = not any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(structure))
    spent = num_probes * num_steps
    if spent >= size(operator):
        return exact_general_trace(operator, fn, structure, real=is_real)
    is_real = not any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(structure))
    spent = num_probes * num_steps
    if spent >= size(operator):
        return exact_general_trace(operator, fn, structure, real=is_real)
    subject = MatrixFunction(LinearMap(prepare(operator)), fn)
    probes = draw(name, sampler, key, operator, num_probes)
    algorithm = partial(_arnoldi_trace, num_steps=num_steps, real=is_real)
    degrees = independent_degrees_of_freedom(num_probes)
    return estimate_of(subject, algorithm, probes, spent, degrees, structure)


def _narrower(
    wide: jax.ShapeDtypeStruct, on_reals: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(wide.shape, on_reals.dtype)


def _arnoldi_trace(
    subject: MatrixFunction, probes: Inexact[Array, "n k"], *, num_steps: int, real: bool
) -> Outcome:
    starts = probes.T
    run = jax.vmap(partial(_arnoldi, subject.linear_map, num_steps=num_steps))
    levels = modes_by_levels(starts, *run(starts))
    values = [at_nodes(subject.fn, modes.nodes) for modes in levels]
    eps = resolution(subject.linear_map.operator)
    value, error = _judge(levels, values, eps, real)
    return Outcome(value, error, _Readout(starts, levels[0]))


@partial(jax.jit, static_argnums=(2, 3))
def _judge(
    levels: list[Modes],
    values: list[Inexact[Array, "N m p"]],
    eps: float,
    real: bool,
) -> tuple[Inexact[Array, " p"], Float[Array, " p"]]:
    """Value and standard error from the function at the nodes of all steps and of fewer."""
    pairs = zip(levels, values, strict=True)
    terms = jnp.stack([modes.weighed(at) for modes, at in pairs])
    modes = levels[0]._replace(weights=jnp.abs(levels[0].weights))
    sizes = modes.weighed(jnp.abs(values[0])).real
    if real:
        # Conjugate eigenvalues have conjugate values, but not across a branch cut.
        crossed = jnp.abs(terms[0].imag) > 1e-3 * sizes
        terms = jnp.where(crossed, jnp.nan, terms.real)
    means = mean(terms)
    quadrature = quadrature_error(jnp.abs(means[:-1] - means[1:]), unresolved=True)
    rounding = 4 * eps * mean(sizes)
    return means[0], both_errors(standard_error(terms[0], rounding), quadrature)


@eqx.filter_jit
def _arnoldi(
    linear_map: LinearMap, start: Inexact[Array, " n"], *, num_steps: int
) -> tuple[Inexact[Array, "m n"], Inexact[Array, "m m"]]:
    """Orthonormal rows q_j and H, with breakdown as in `krylov`."""
    n = start.shape[0]
    eps = float(jnp.finfo(start.dtype).eps)
    length = norm(start)

    def step(carry: tuple[Array, ...], j: Array) -> tuple[tuple[Array, ...], tuple]:
        basis, q = carry
        basis = basis.at[j].set(q)
        product = linear_map(q[:, None])[:, 0]
        first = basis.conj() @ product
        residual = product - first @ basis
        again = basis.conj() @ residual
        residual = residual - again @ basis
        size = norm(residual)
        alive = size > 10 * eps * n**0.5 * norm(product)
        new = jnp.where(alive, residual / jnp.where(alive, size, 1), 0)
        below = jnp.where(alive, size, 0).astype(start.dtype)
        column = jnp.where(jnp.arange(num_steps) == j + 1, below, first + again)
        return (basis, new), (column, jnp.any(q != 0))

    basis = jnp.zeros((num_steps, n), start.dtype)
    q = start / jnp.where(length > 0, length, 1)
    (basis, _), (rows, live) = jax.lax.scan(step, (basis, q), jnp.arange(num_steps))
    projection = jnp.where(jnp.diag(~live), rows[0, 0], rows.T)
    return basis, projection


class _Readout(eqx.Module):
    starts: Inexact[Array, "N n"]
    modes: Modes

    def __call__(self, subject: MatrixFunction) -> Inexact[Array, " p"]:
        return _read(subject, self)


@eqx.filter_custom_jvp
def _read(subject: MatrixFunction, readout: _Readout) -> Inexact[Array, " p"]:
    return mean(readout.modes.samples(subject.fn))


@_read.def_jvp
def _read_jvp(
    primals: tuple[MatrixFunction, _Readout], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    subject, readout = primals
    tangent, _ = tangents
    value = _read(subject, readout)
    modes = settled(readout.modes, refuse_second, subject.linear_map)
    moved = jnp.zeros_like(value)
    if jax.tree.leaves(tangent.fn):
        _, moved = eqx.filter_jvp(
            lambda fn: mean(modes.samples(fn)), (subject.fn,), (tangent.fn,)
        )
    if jax.tree.leaves(tangent.linear_map):
        right = modes.actions(Slope(subject.fn))
        p, number, n = right.shape
        block = right.reshape(p * number, n).T
        _, image = eqx.filter_jvp(
            lambda a: a(block), (subject.linear_map,), (tangent.linear_map,)
        )
        if image is not None:
            image = image.T.reshape(p, number, n)
            left = (readout.starts.conj() / number).astype(image.dtype)
            moved = moved + jnp.einsum("Nn,pNn->p", left, image).astype(moved.dtype)
    return value, moved.astype(value.dtype)
