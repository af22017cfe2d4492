"""Traces of functions of operators that need not be Hermitian, by Arnoldi's process.

The engine is `traceax/_quadrature/block_arnoldi.py`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from traceax._core.checks import check_function_request
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator, size, working_dtype
from traceax._core.rule import estimate
from traceax._functions.exact_functions import exact_general_trace
from traceax._functions.slq import Function
from traceax._linalg.jackknife import shared_degrees_of_freedom
from traceax._probes.draw import check_independent, draw, is_known
from traceax._probes.samplers import Sampler, rademacher
from traceax._quadrature.block_arnoldi import block_arnoldi
from traceax._quadrature.scalar import MatrixFunction, scalar_function


def arnoldi_trace(
    operator: Operator,
    fn: Function,
    key: PRNGKeyArray,
    *,
    num_probes: int,
    num_steps: int,
    sampler: Sampler = rademacher,
) -> Estimate:
    """Estimate tr f(A) of any square operator by Arnoldi's process, symmetry not needed.

    One block Krylov run of k probes w_i gives two estimates for each probe, that of
    `function_trace`, which is better if few directions have most of the sum, and a plain
    quadratic form, which is better for diagonal or skew operators:

        tr(P_i f(A) P_i) + c_i r_i* f(A) r_i,   r_i = (I - P_i) w_i;       w_i* f(A) w_i.

    The value is the mean of both, weighted by inverse variances that are estimated from
    their spreads, which leaves a bias, a fraction of the standard error. For Hermitian
    operators `function_trace` is more accurate and has better derivatives. Exact, by all
    eigenvalues, if num_probes * num_steps reaches n.

    **Arguments** (the others are in the guide's conventions)

    - `fn`: an analytic function of a *complex* scalar, else as in `function_trace`.
    - `num_probes`, `num_steps`: how many probes, and how many applications for each.
    - `sampler`: independent probes. Default `rademacher`, which is exact for diagonal
      operators. c_i is (n - dim S_i)/|r_i|^2, and 1 for samplers of your own.

    **Returns** an `Estimate` with the structure of what `fn` returns; real if the operator
    is, and `fn` of a real number is. Then it is NaN if eigenvalues on a branch cut of `fn`
    give the sum an imaginary part of a thousandth of it or more. `standard_error` also
    covers the conditioning of eigenvectors.

    **Derivatives**: first ones, in the operator and in whatever `fn` depends on: about 0.8
    num_probes * num_steps matvec-VJPs for each entry of the value. If the value is exact
    they are exact too, with half of the digits for a matrix without a basis of
    eigenvectors. Second ones in the operator raise `NotImplementedError`. **Cost**: m =
    num_probes * num_steps applications, no adjoints; 4 n m^2 flops for an orthonormal basis
    of m vectors, which must fit in memory; three decompositions of m x m matrices, on the
    CPU (other devices: as far as JAX has them).

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> rotation = jnp.kron(jnp.eye(200), jnp.array([[0.0, -1.0], [1.0, 0.0]]))
        >>> operator = lx.MatrixLinearOperator(rotation)
        >>> key = jax.random.key(0)
        >>> trace = tx.arnoldi_trace(operator, jnp.exp, key, num_probes=20, num_steps=4)
        >>> bool(abs(trace.value - 400 * jnp.cos(1.0)) < 0.5)
        True

    **Reference**: derived in `traceax/_quadrature/block_arnoldi.py`. Compare Epperly, Tropp
    and Webber (2024), XTrace, doi:10.1137/23M1548323, for leaving probes out; Arnoldi
    (1951), Quarterly of Applied Mathematics 9(1); Saad (1992), SIAM Journal on Numerical
    Analysis 29(1), doi:10.1137/0729014.
    """
    name = "arnoldi_trace"
    counts = {"num_probes": num_probes, "num_steps": num_steps}
    operator = check_function_request(name, operator, key, counts)
    check_independent(name, sampler)
    dtype = working_dtype(operator)
    _, structure = scalar_function(name, fn, dtype)
    fn, _ = scalar_function(name, fn, np.result_type(dtype, np.complex64))
    is_real = not any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(structure))
    spent = num_probes * num_steps
    if spent >= size(operator):
        return exact_general_trace(operator, fn, structure, real=is_real)
    subject = MatrixFunction(LinearMap(operator), fn)
    probes = draw(name, sampler, key, operator, num_probes)
    resphered = is_known(sampler)
    algorithm = partial(block_arnoldi, depth=num_steps, resphered=resphered, real=is_real)
    # Less skewed than samples of plain quadrature, of which a third count.
    degrees = shared_degrees_of_freedom(num_probes)
    return estimate(algorithm, subject, probes, spent, degrees, structure)
