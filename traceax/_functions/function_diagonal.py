"""Diagonals of functions of operators."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, PRNGKeyArray

from traceax._core.checks import check_request, check_samples, check_scalar
from traceax._core.estimate import Estimate
from traceax._core.operator import LinearMap, Operator, as_result, frozen, size
from traceax._core.rule import estimate
from traceax._estimators.hutchinson import hutchinson_diagonal
from traceax._functions.block_diagonal import block_diagonal
from traceax._functions.exact_functions import entries, exact_estimate
from traceax._functions.slq import Function, checked_run, real_dtype
from traceax._linalg.columns import mean, squared_modulus
from traceax._probes.draw import check_independent, draw, probes_per_sample
from traceax._probes.samplers import Sampler, rademacher
from traceax._quadrature.block_quadrature import Shape, shape_for
from traceax._quadrature.dense import FunctionOfOperator, columns, decompose
from traceax._quadrature.scalar import MatrixFunction, ScalarFunction, scalar_function

# How many probes see the quadrature error of colours.
_TESTS = 4


def function_diagonal(
    operator: Operator,
    fn: Function,
    key: PRNGKeyArray,
    num_matvecs: int = 240,
    *,
    num_probes: int | None = None,
    num_steps: int | None = None,
    sampler: Sampler = rademacher,
) -> Estimate:
    """Estimate the diagonal of f(A), A Hermitian.

    For subgraph centralities (exp), leverages, Fermi-Dirac densities, variances (1/x). One
    block Krylov run of `num_probes` probes w_i, `num_steps` blocks deep. The space S_i of
    all probes but w_i contains the directions that contribute most to smooth functions, and
    is independent of w_i. So with its projector P_i, and B_i = (I - P_i) f(A) (I - P_i),

        diag f(A) = E[diag(f(A) - B_i) + conj(w_i) o B_i w_i]

    for each i; the value is the mean over i, unbiased but for quadrature. More steps help
    for functions that are not smooth, more probes if many eigenvalues contribute alike.
    With `probing` (for f(A) that decays along a graph) it is `hutchinson_diagonal` of f(A),
    which is applied by Lanczos.

    Exact, by an eigendecomposition, if `num_matvecs` reaches n, for n <= 64, and
    for operators that store their matrix up to n = 1024; for diagonal ones from one
    application or none.

    **Arguments** (the others are in the guide's conventions)

    - `operator`, `num_matvecs`, `num_probes`, `num_steps`: as in `function_trace` (of
      `probing` a multiple of its colours).
    - `fn`: a real function of a real scalar.
    - `sampler`: independent probes, or `probing`. Default `rademacher`.

    **Derivatives**: in the operator and in whatever `fn` depends on, unbiased but for
    quadrature: those of `xdiag` of f(A) in its two-sided form, by half of the probes and a
    sketch from the same run. f(A) is applied by Lanczos to num_probes vectors, which takes
    num_steps applications and as many matvec-VJPs for each. **Cost**: at most `num_matvecs`
    applications, m say, in blocks of num_probes; 8 n m^2 flops for an orthonormal basis of
    m vectors, which must fit in memory, and about (8 + num_probes / num_steps) n m^2 to
    read it. With `probing`, (num_probes + 6) * num_steps applications and num_probes blocks
    of n x num_steps.

    **Example**

        >>> import jax, jax.numpy as jnp, lineax as lx, traceax as tx
        >>> ring = jnp.roll(jnp.eye(200), 1, axis=0)
        >>> graph = lx.MatrixLinearOperator(ring + ring.T, lx.symmetric_tag)
        >>> centrality = tx.function_diagonal(graph, jnp.exp, jax.random.key(0))
        >>> print(centrality.value[:3].round(2))
        [2.28 2.28 2.28]

    **Reference**: Estrada and Rodríguez-Velázquez (2005), Physical Review E 71, 056103, for
    its uses. Derived in `traceax/_functions/block_diagonal.py`. Compare Epperly, Tropp and
    Webber (2024), XTrace, doi:10.1137/23M1548323.
    """
    name = "function_diagonal"
    operator = check_request(name, operator, key, num_matvecs, 6)
    converted, structure = scalar_function(name, fn, real_dtype(operator))
    check_scalar(name, "fn", structure)
    colours = probes_per_sample(sampler)
    if colours > 1:
        choose, tests = partial(_coloured, name=name, colours=colours), 3 * _TESTS // 2
        asked = (num_matvecs, num_probes, num_steps, choose, tests)
        shape, budget = checked_run(name, *asked)
        check_samples(name, shape.width, colours, "num_probes")
    else:
        check_independent(name, sampler)
        shape, budget = checked_run(name, num_matvecs, num_probes, num_steps)
    if (known := entries(operator, budget)) is not None:
        value = as_result(_exact(known.array, converted), operator.in_structure())
        return exact_estimate(value, known.spent)
    if colours > 1:
        return _probed(operator, converted, key, *shape, sampler)
    probes = draw(name, sampler, key, operator, shape.width)
    subject = MatrixFunction(LinearMap(operator), converted)
    algorithm = partial(block_diagonal, depth=shape.depth)
    degrees, leaves = max(shape.width - 1, 1), operator.in_structure()
    return estimate(algorithm, subject, probes, shape.num_matvecs, degrees, leaves)


def _coloured(num_matvecs: int, *, name: str, colours: int) -> Shape:
    """A probe for each colour, or several, and the steps that the budget has for them."""
    check_samples(name, num_matvecs, colours)
    width = max(colours, shape_for(num_matvecs).width // colours * colours)
    return Shape(width, max(1, num_matvecs // (width + 3 * _TESTS // 2)))


def _probed(
    operator: Operator,
    fn: ScalarFunction,
    key: PRNGKeyArray,
    num_probes: int,
    num_steps: int,
    sampler: Sampler,
) -> Estimate:
    """With probes made of colours, each by itself."""
    subject = FunctionOfOperator(operator, fn, min(num_steps, size(operator)))
    key, test_key = jax.random.split(key)
    estimate = hutchinson_diagonal(subject, key, num_probes, sampler=sampler)
    quadrature = _quadrature_error("function_diagonal", subject, test_key)
    quadrature = as_result(quadrature, operator.in_structure())
    steps = subject.num_steps
    on_tests = 0 if steps == 1 else _TESTS * (steps + steps // 2)
    return Estimate(
        jax.tree.map(jnp.real, estimate.value),
        jax.tree.map(jnp.hypot, estimate.standard_error, quadrature),
        estimate.num_matvecs * steps + on_tests,
        estimate.degrees_of_freedom,
    )


def _quadrature_error(
    name: str, subject: FunctionOfOperator, key: PRNGKeyArray
) -> Float[Array, " n"]:
    """The row norms of the difference that half of the steps make, by a few probes."""
    subject = frozen(subject)
    tests = draw(name, rademacher, key, subject.operator, _TESTS)
    if subject.num_steps == 1:
        return jnp.full(tests.shape[0], jnp.inf, tests.real.dtype)
    half = FunctionOfOperator(subject.operator, subject.fn, subject.num_steps // 2)
    difference = LinearMap(subject)(tests) - LinearMap(half)(tests)
    return jnp.sqrt(mean(squared_modulus(difference)))


def _exact(array: Inexact[Array, " *entries"], fn: ScalarFunction) -> Float[Array, " n"]:
    """Of the function of a diagonal, or a matrix."""
    if array.ndim == 1:
        return jax.vmap(fn)(array)[:, 0]
    eigen = jax.lax.stop_gradient(decompose(array))
    return jnp.diagonal(columns(fn, array, eigen, count=len(array))[0]).real
