"""Traces of functions of operators that need not be Hermitian, by Arnoldi's process.

The engine is `traceax/_quadrature/block_arnoldi.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, PRNGKeyArray, PyTree

from traceax._core.checks import check_function_request
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, size, working_dtype
from traceax._core.rule import estimate
from traceax._functions.exact_functions import exact_general_trace
from traceax._probes.draw import check_independent, draw, is_known
from traceax._probes.samplers import Sampler, rademacher
from traceax._quadrature.block_arnoldi import block_arnoldi
from traceax._quadrature.scalar import MatrixFunction, scalar_function


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

    One block Krylov run of k probes w_i, read in two ways. As in `function_trace`, each
    probe measures what the space S_i of the others leaves, P_i being its projector, which
    is best where few directions have most of the sum; and each measures all of it, which
    is best where signs see nothing (a diagonal, what is skew):

        tr(P_i f(A) P_i) + c_i r_i* f(A) r_i,   r_i = (I - P_i) w_i;       w_i* f(A) w_i.

    The value is the mean of both by inverse variances, as their spreads show them. For
    Hermitian operators `function_trace` and `slq_trace` are more accurate and better
    differentiated. Exact, by all eigenvalues, where num_probes * num_steps reaches n.

    **Arguments**

    - `operator`: any square lineax operator, real or complex, of arrays or pytrees.
    - `fn`: a function of a *complex* scalar, analytic, made of JAX operations, that returns
      an array or a pytree of arrays: each entry is another trace from the same run. It may
      close over parameters, or be an `eqx.Module`.
    - `key`: a JAX random key.
    - `num_probes`: how many probes, a Python int of at least 1.
    - `num_steps`: how many applications for each, a Python int of at least 1.
    - `sampler`: draws the probes, independent of each other, with E[z z*] = I. Default
      `rademacher`, with which a diagonal costs nothing. With one of your own c_i is 1,
      else (n - dim S_i)/|r_i|^2.

    **Returns** an `Estimate` with the structure of what `fn` returns; real where the
    operator is, and `fn` of a real number is; then NaN where eigenvalues on a branch cut of
    `fn` (negative ones under log) make the sum complex by a thousandth of it or more.
    `standard_error` covers sampling, quadrature (by comparison with fewer steps) and the
    conditioning of eigenvectors, which cost digits where it is bad; `inf` for one probe or
    one step; 0 where the value is exact. Choosing between the two readings by their spread
    leaves a bias, a fraction of it.

    **Raises** what `slq_trace` raises of the arguments that it shares;
    `NotImplementedError` if differentiated twice in the operator.

    **Derivatives**: first ones, forward and reverse, in the operator and in whatever `fn`
    depends on, by the same readings of tr(f'(A) dA), their shares frozen: about
    0.8 num_probes * num_steps matvec-VJPs for each entry of the value. Where the value is
    exact so are they, tr f'(A) dA by n matvec-VJPs; a matrix without a basis of
    eigenvectors costs half of their digits.

    **Cost**: m = num_probes * num_steps applications, none of the adjoint, in num_steps
    blocks; 4 n m^2 flops for an orthonormal basis of as many vectors, which is what has to
    fit; three decompositions of m x m matrices (in all 0.1 s at m = 240). Where the value
    is exact, n applications, none of operators that store their matrix. Eigenvalues of
    non-symmetric matrices, on which it stands, exist on the CPU; on other devices as far as
    JAX has them there.

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

    **Reference**: derived in `traceax/_quadrature/block_arnoldi.py`. Compare Epperly,
    Tropp and Webber (2024), XTrace, doi:10.1137/23M1548323, for leaving probes out; Arnoldi
    (1951), Quarterly of Applied Mathematics 9(1); Saad (1992), Analysis of some Krylov
    subspace approximations to the matrix exponential operator, SIAM Journal on Numerical
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
    degrees = max(2 * (num_probes - 1) / 3, 1)
    return estimate(algorithm, subject, probes, spent, degrees, structure)
