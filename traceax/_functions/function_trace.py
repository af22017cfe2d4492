"""Traces of functions of an operator.

`function_trace` is for Hermitian operators. `logdet` and `schatten_norm` are computed in
the same way, by `block_trace`. `arnoldi_trace` is for square operators that need not be
Hermitian.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from traceax._core.checks import Shift, check_positive, check_samples, check_shift
from traceax._core.estimate import Estimate
from traceax._core.keys import BLOCKS, keys_of
from traceax._core.operator import (
    LinearMap,
    Operator,
    gram,
    is_semidefinite,
    working_dtype,
)
from traceax._estimators.call import Call, begin
from traceax._functions.arguments import (
    Budgets,
    Function,
    Real,
    Shifts,
    real_dtype,
    subject_of,
)
from traceax._functions.equations import equation_of, num_tests, whitened
from traceax._functions.exact_functions import (
    CHOLESKY,
    AllEntries,
    asymmetry_error,
    entries,
    exact_estimate,
    exact_function_trace,
    exact_general,
    exact_power_sum,
    factorised,
    from_matrix,
    is_small,
    power,
)
from traceax._functions.krylov import (
    Krylov,
    begin_run,
    checked_run,
    diagonal_only,
    first_stage,
)
from traceax._functions.slq import quadratures
from traceax._functions.structures import split
from traceax._functions.whitening import Whitening
from traceax._linalg.columns import Number, largest_modulus
from traceax._linalg.jackknife import shared_degrees_of_freedom
from traceax._probes.draw import check_pattern, draw, for_pattern
from traceax._probes.samplers import SamplerLike, rademacher, sphere
from traceax._probes.stream import ProgressMeter
from traceax._quadrature.block_arnoldi import (
    ColouredProbes,
    block_arnoldi,
    coloured_arnoldi,
)
from traceax._quadrature.block_quadrature import Shape, block_quadrature, krylov_run
from traceax._quadrature.scalar import MatrixFunction, combination, scalar_function


def function_trace(
    operator: Operator | Krylov,
    fn: Function,
    key: PRNGKeyArray | None = None,
    num_matvecs: int = 240,
    *,
    num_probes: int | None = None,
    num_steps: int | None = None,
    combine: Callable | None = None,
    pattern: Any = None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Estimate tr f(A) of a Hermitian A, with an automatic choice of probes and steps.

    There is one block Krylov run from k probes w_i. The space S_i of all probes but w_i
    contains the directions that matter most to smooth functions. Its projector P_i is
    independent of w_i, so

        tr f(A) = E[tr(P_i f(A) P_i) + c_i r_i* f(A) r_i],    r_i = (I - P_i) w_i,

    for each i. The factor c_i restores the expected length of r_i. The value is the mean
    over i, and unbiased except for quadrature. If few eigenvalues make up most of the sum,
    it is better than `slq_trace` by orders of magnitude. On flat spectra its error is up to
    1.6 times larger.

    If A is tagged positive or negative semidefinite, 0 bounds its spectrum. The value is
    then a mixture of two quadratures, which err on different sides of the truth for
    logarithms, inverses and roots. The mixture and its error bar matter if small
    eigenvalues are not resolved.

    The value is exact, from an eigendecomposition, if `num_matvecs` reaches n, for n <= 64,
    and for stored matrices up to n = 1024. Diagonal operators need one matvec or none.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a Hermitian lineax operator A, real or complex, on arrays or pytrees. It
      needs no tag. Or a finished run, as in `krylov`.
    - `fn`: the function f of a real scalar, made of JAX operations, that returns an array
      or a pytree of arrays. Each entry is another trace from the same run.
    - `key`: one JAX random key, for example `jax.random.key(0)`; none with a run.
    - `num_matvecs`: the budget, at least min(6, n). It is ignored if n <= 64. Default 240.
    - `num_probes`: the number k of probes, which is the width of the run. More probes help
      if many eigenvalues contribute similar amounts. Default `None`, which lets traceax
      choose.
    - `num_steps`: the number of steps, which is the depth of the run. More steps help for
      functions that are not smooth, and for gradients of ill-conditioned logarithms, most
      of all with respect to `shift`. Default `None`, which takes as many steps as probes.
    - `combine`: a function of the traces that returns an array or a pytree of arrays, for
      example an energy tr(A e^-bA) / tr(e^-bA). The value, the error bar (with the
      covariances of the traces) and the derivatives then belong to the combination. Default
      `None`, which returns the traces themselves.
    - `pattern`: the places at which A has entries, as in `colouring`. If `num_probes`
      colours are enough for a `colouring` of power 2, this function is `slq_trace` with
      `probing`, which has 2 to 100 times less error on grids. Default `None`.
    - `progress_meter`: an object that shows the progress of the Krylov run, for example
      `diffrax.TqdmProgressMeter()`. Default `None`, which shows nothing.

    **Returns** an `Estimate` with the structure of what `fn` returns, or of what `combine`
    returns if it is given.

    **Derivatives**: the value can be differentiated with respect to the operator and
    everything that `fn` and `combine` depend on. The derivatives are unbiased except for
    quadrature (and the second order of `combine`). They use the same spaces, and take about
    0.8 num_matvecs matvec-VJPs for each trace, or 1.1 num_matvecs for all traces of tagged
    operators. Second derivatives differentiate a Lanczos recurrence for each start, and are
    NaN if it does not resolve the spectrum.

    **Cost**: at most `num_matvecs` matvecs, in blocks of k, and 8 n num_matvecs^2 flops for
    an orthonormal basis of `num_matvecs` vectors, which must fit in memory.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> x = jnp.linspace(0.0, 10.0, 300)
        >>> operator = tx.as_operator(lambda v: x * v, 300)
        >>> estimate = tx.function_trace(operator, jnp.exp, jax.random.key(0), 120)
        >>> bool(abs(estimate.value - jnp.exp(x).sum()) < 3 * estimate.standard_error)
        True

    **Reference**: derived in `traceax/_quadrature/block_quadrature.py`. Compare Epperly,
    Tropp and Webber (2024), XTrace,
    [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323). Chen and Hallman (2023),
    Krylov-aware stochastic trace estimation,
    [doi:10.1137/22M1494257](https://doi.org/10.1137/22M1494257). FlexTrace (2026),
    [arXiv:2603.05721](https://arxiv.org/abs/2603.05721). Singh, Barros and Li (2026),
    [arXiv:2605.12801](https://arxiv.org/abs/2605.12801).

    **See also**: `logdet`, `krylov`, `slq_trace`, `arnoldi_trace`, `function_diagonal`,
    `schatten_norm`.
    """
    name = "function_trace"
    budgets, others = (num_matvecs, num_probes, num_steps), {"pattern": pattern}
    call = begin_run(name, operator, key, budgets, progress_meter, left_out=others)
    fn, structure = scalar_function(name, fn, real_dtype(call.operator))
    combined, structure = combination(name, combine, fn, structure)
    shape, budget = checked_run(call, budgets)
    if lx.is_diagonal(call.operator) or is_small(call.operator, budget):
        return exact_function_trace(call, fn, structure, combined)
    subject = subject_of(call.operator, fn, combined)
    return block_trace(call, subject, structure, shape, pattern)


def block_trace(
    call: Call, subject: MatrixFunction, structure: PyTree, shape: Shape, pattern: Any
) -> Estimate:
    """Estimate a trace of f(A) from a block Krylov run of this shape.

    If there is a pattern (a given one, or the operator's own), and the run has enough
    probes for colours that keep two steps apart, the estimate uses `probing` and the
    quadrature of each probe instead.
    """
    if call.finished is None:
        known = check_pattern(call.name, call.operator, pattern)
        coloured = for_pattern(known, shape.width, 2)
        if coloured is not None:
            return quadratures(call.using(coloured), subject, structure, shape)
    return leave_one_out(call, subject, structure, shape)


def leave_one_out(
    call: Call, subject: MatrixFunction, structure: PyTree, shape: Shape
) -> Estimate:
    """Estimate a trace of f(A) from a block Krylov run of this shape."""
    call, degrees = call.using(sphere), shared_degrees_of_freedom(shape.width)
    first, start = first_stage(call, shape)
    second = partial(block_quadrature, resphered=call.resphere)
    how = {"spent": shape.num_matvecs, "degrees": degrees, "structure": structure}
    return call.finish((first, second), start, subject=subject, **how)


def logdet(
    operator: Operator | Krylov,
    key: PRNGKeyArray | None = None,
    num_matvecs: int = 240,
    *,
    shift: Shift = 0.0,
    num_probes: int | None = None,
    num_steps: int | None = None,
    pattern: Any = None,
    whitening: Whitening | None = None,
    progress_meter: ProgressMeter | None = None,
) -> Estimate:
    """Estimate log det(A + shift I) of a Hermitian positive definite A + shift I.

    It is `function_trace` of log(x + shift), and unbiased except for quadrature. On kernel
    matrices the error is 3 to 10^6 times smaller than with `slq_trace` at its best. On flat
    spectra it is up to 1.6 times larger. You need no preconditioner and no estimate of the
    noise.

    The value is exact, from a Cholesky factorisation, for stored matrices up to n = 2048,
    if `num_matvecs` reaches n, and for n <= 64. Diagonal operators need one matvec or none.
    The log-determinant of c A splits off n log |c| if A is tagged semidefinite. So do those
    of blocks and Kronecker factors that the operator's class names (see the guide's
    structured operators).

    **Arguments** (details are in the guide's conventions)

    - `operator`: a Hermitian lineax operator A, real or complex, on arrays or pytrees. It
      needs no tag. Or a finished run, as in `krylov`.
    - `key`: one JAX random key, for example `jax.random.key(0)`; none with a run.
    - `num_matvecs`: the budget, at least min(6, n). It is ignored if n <= 64. Default 240.
    - `shift`: a real number. An array of shifts gives the log-determinants for all of them
      from one run. An `lx.DiagonalLinearOperator` D with positive entries, for example the
      noise of each observation, gives log det(A + D), which is computed as log det(I +
      D^{-1/2} A D^{-1/2}) + log det D. Default 0.
    - `num_probes`: the number of probes, as in `function_trace`. Default `None`.
    - `num_steps`: the number of steps, as in `function_trace`. Default `None`.
    - `pattern`: the places at which A has entries, as in `function_trace`. It helps most
      for the log-determinant of a sparse precision matrix. Default `None`.
    - `whitening`: a `Whitening` W of A + shift I, for example by `vecchia`. The run is on
      W (A + shift I) W*, whose spectrum a few steps resolve. It may be differentiated with
      respect to W, too: what W adds to derivatives cancels on average, and lowers
      their variance. If it knows its trace, two matvecs of the budget test that. With
      an array of shifts, each has a run of its own. A pattern is not used then, and an
      exact value needs no W. Default `None`.
    - `progress_meter`: an object that shows the progress of the Krylov run, for example
      `diffrax.TqdmProgressMeter()`. Default `None`, which shows nothing.

    **Returns** an `Estimate` with a real value of the shape of `shift`. `standard_error`
    covers sampling, quadrature and rounding. With a positive shift, the quadrature error is
    computed as for tagged operators, unless the run finds a negative eigenvalue of A. The
    value is NaN if A + shift I is found to have a negative eigenvalue. If an eigenvalue is
    0 to rounding, its true value may be much smaller, and the error bar is wide enough for
    that. The error bar is infinite if nothing shows how small the eigenvalue is. The value
    is then -inf if rounding has made the eigenvalue 0 or negative. So the answer for a
    singular operator, for example `gauss_newton` with fewer outputs than parameters, is
    -inf ± inf or has a very wide error bar. Pass a positive `shift` for such operators.

    **Derivatives**: the value can be differentiated with respect to the operator and
    `shift`, as in `function_trace`.

    **Cost**: at most `num_matvecs` matvecs, as for `function_trace`.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> spectrum = 1 / jnp.arange(1.0, 401.0) ** 2
        >>> operator = tx.as_operator(lambda v: spectrum * v, 400)
        >>> estimate = tx.logdet(operator, jax.random.key(0), 120, shift=0.01)
        >>> bool(abs(estimate.value - jnp.log(spectrum + 0.01).sum()) < 0.1)
        True

    **Reference**: derived in `traceax/_quadrature/block_quadrature.py`. Compare Epperly,
    Tropp and Webber (2024), [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323).
    Chen and Hallman (2023), [doi:10.1137/22M1494257](https://doi.org/10.1137/22M1494257).
    Cortinovis and Toni (2026), [arXiv:2601.05778](https://arxiv.org/abs/2601.05778).

    **See also**: `inv_quad_logdet`, `function_trace`, `krylov`, `arnoldi_trace`.
    """
    name, tests = "logdet", num_tests("logdet", whitening)
    budgets, others = (num_matvecs, num_probes, num_steps), {"pattern": pattern}
    others |= {"whitening": whitening, "shift": diagonal_only(shift)}
    how: dict[str, Any] = {"least": 6 + tests, "left_out": others}
    call = begin_run(name, operator, key, budgets, progress_meter, **how)
    check_shift(name, call.operator, shift)
    is_plain = call.finished is None and pattern is None and whitening is None
    if is_plain and (parts := split(name, call.operator, shift)) is not None:
        again = {"num_probes": num_probes, "num_steps": num_steps, "shift": shift}
        again |= {"num_matvecs": num_matvecs, "progress_meter": progress_meter}
        return parts.joined(call, partial(logdet, **again))
    left = max(call.num_matvecs - tests, 1)
    shape, budget = checked_run(call, (left, num_probes, num_steps))
    equation = equation_of(call.operator, shift)
    if (known := entries(call.operator, budget + tests, CHOLESKY)) is not None:
        array, shift = equation.scaled(known.array), equation.shift
        logs, error = _log_determinants(shift, array)
        error = error + asymmetry_error(array, logs, _log_determinants, shift)
        return exact_estimate(logs + equation.rest, known.spent, error)
    if whitening is not None and np.ndim(equation.shift):
        how = {"num_probes": num_probes, "num_steps": num_steps}
        bare = Whitening(whitening.operator, whitening.log_determinant)
        one = partial(logdet, operator, key, num_matvecs, whitening=bare, **how)
        return _of_each(lambda shift: one(shift=shift), equation.shift)
    if whitening is not None:
        equation = whitened(call, equation, whitening)
        call = dataclasses.replace(call, num_checks=tests)
        # Colours would have 4 to 13 times the error where W leaves condition numbers of
        # 150 and 50, and two thirds of it at 700 (`tests.benchmarks.whitening`).
        traced = leave_one_out(call, *equation.logarithm(name), shape)
    else:
        traced = block_trace(call, *equation.logarithm(name), shape, pattern)
    return equation.completed(traced)


def _of_each(estimate: Callable[[Number], Estimate], shifts: Shifts) -> Estimate:
    """Return the estimates for several shifts as one, from a run for each."""
    runs = jax.lax.map(estimate, shifts.ravel())
    value, error = (x.reshape(shifts.shape) for x in (runs.value, runs.standard_error))
    gap = runs.quadrature_error.reshape(shifts.shape)
    spent, degrees = jnp.sum(runs.num_matvecs), jnp.min(runs.degrees_of_freedom)
    return Estimate(value, error, spent, degrees, method="logdet", quadrature_error=gap)


def _log_determinants(shift: Shifts, array: AllEntries) -> tuple[Shifts, Shifts]:
    """Return log det of a diagonal or a matrix plus shift I, for all shifts, and errors."""
    return jnp.vectorize(lambda shift: factorised(array, shift)[1:])(shift)


def schatten_norm(
    operator: Operator,
    p: Real,
    key: PRNGKeyArray,
    num_matvecs: int = 240,
    *,
    num_probes: int | None = None,
    num_steps: int | None = None,
) -> Estimate:
    """Estimate the Schatten norm ||B||_p = (sum of sigma_i^p)^(1/p), also of rectangular B.

    It is computed from tr |B|^p as in `function_trace`. The function is x -> |x|^p of B
    itself if B is tagged semidefinite, else x -> x^(p/2) of B* B or B B*, whichever
    is smaller. p = 1 is the nuclear norm, and p = 2 is the Frobenius norm, for which
    `frobenius_norm_squared` is better. The value is biased, because the root is not linear.
    It is low by about standard_error^2 (p - 1) / (2 value).

    The value is exact if num_probes * num_steps reaches the smaller dimension, if that
    dimension is at most 64, or if it is at most 1024 and the operator stores its matrix.

    **Arguments** (details are in the guide's conventions)

    - `operator`: any lineax operator B, square or not. An estimate loses singular values
      below sqrt(eps) times the largest one, unless the operator is tagged semidefinite.
    - `p`: a positive, finite number, or an array of shape `()`.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least 13 or the smaller dimension, whichever is less.
      Default 240.
    - `num_probes`: the number of probes of the run on B, B* B or B B*, as in
      `function_trace`. Default `None`.
    - `num_steps`: the number of steps of this run, as in `function_trace`. Default `None`.

    **Returns** an `Estimate` with a real value of shape `()`.

    **Derivatives**: the value can be differentiated with respect to the operator and `p`,
    as in `function_trace`. For p < 2, singular values of 0 do not contribute. The
    derivative is NaN at the zero operator.

    **Cost**: at most `num_matvecs` matvecs, half of them with the adjoint unless the
    operator is tagged semidefinite. The first one finds the scale of the operator. The
    basis has num_probes * num_steps vectors.

    **Example**

        >>> import jax, lineax as lx, traceax as tx
        >>> operator = lx.MatrixLinearOperator(jax.numpy.eye(300, 200))
        >>> print(tx.schatten_norm(operator, 1, jax.random.key(0), 30).value.round())
        200.0

    **Reference**: Ubaru, Chen and Saad (2017), section 6.2,
    [doi:10.1137/16M1104974](https://doi.org/10.1137/16M1104974).

    **See also**: `frobenius_norm_squared`, `row_norms_squared`, `function_trace`.
    """
    name = "schatten_norm"
    call = begin(name, operator, key, num_matvecs, least=13, square=False)
    cure = "Pass 1 for the nuclear norm; for the largest singular value, p = inf, use an "
    cure += "eigensolver: scipy.sparse.linalg.svds, for example."
    check_positive(name, "p", p, cure)
    operator = call.operator
    unit, dtype = _unit(name, operator, key)
    # XLA would turn (x / unit) / unit into x / (unit * unit), whose divisor may be 0.
    scaled = operator * (1 / unit).astype(dtype)
    if is_semidefinite(operator):
        target, exponent, cost = scaled, p, 1
    else:
        target, exponent, cost = gram(scaled), p / 2, 2
    fn, structure = scalar_function(name, lambda x: power(x, exponent), real_dtype(target))
    products = max((num_matvecs - 1) // cost, 1)
    shape, budget = checked_run(call, (products, num_probes, num_steps))
    small = is_small(scaled, budget)
    if lx.is_diagonal(target) or (cost == 1 and small):
        traced = exact_function_trace(call.on(target), fn, structure)
    elif small:
        exponent = jnp.asarray(p, real_dtype(target))
        traced, cost = exact_power_sum(call.on(scaled), exponent), 1
    else:
        subject = subject_of(target, fn)
        traced = block_trace(call.on(target), subject, structure, shape, None)
    unit = unit.astype(traced.value.dtype)
    total = jax.lax.stop_gradient(traced.value)
    rate = jnp.where(total > 0, total, 1) ** (1 / p - 1) / p
    rate = jax.lax.stop_gradient(jnp.where(total > 0, rate, 1))
    value, error = unit * traced.value ** (1 / p), unit * (traced.standard_error * rate)
    spent = traced.num_matvecs * cost + 1
    return dataclasses.replace(traced, value=value, standard_error=error, num_matvecs=spent)


def _unit(name: str, operator: Operator, key: PRNGKeyArray) -> tuple[Array, jnp.dtype]:
    """Return the size of one image B z, and a dtype that promotes no leaf of B.

    The operator is divided by this size, because its squares and powers may overflow or
    underflow.
    """
    probe = draw(name, sphere, key, operator, 1)
    size = jax.lax.stop_gradient(largest_modulus(LinearMap(operator)(probe)))
    leaves = jax.tree.leaves((operator.in_structure(), operator.out_structure()))
    least = min(leaves, key=lambda x: (jnp.finfo(x.dtype).bits, x.dtype.itemsize)).dtype
    return size.astype(jnp.finfo(least).dtype), least


def arnoldi_trace(
    operator: Operator,
    fn: Function,
    key: PRNGKeyArray,
    num_matvecs: int = 240,
    *,
    num_probes: int | None = None,
    num_steps: int | None = None,
    pattern: Any = None,
    sampler: SamplerLike | None = None,
) -> Estimate:
    """Estimate tr f(A) of a square operator, Hermitian or not, by Arnoldi's process.

    One block Krylov run from k probes w_i gives two estimates for each probe. The first one
    is as in `function_trace`, and is better if few directions make up most of the sum. The
    second one is a plain quadratic form, and is better for diagonal or skew operators:

        tr(P_i f(A) P_i) + c_i r_i* f(A) r_i,   r_i = (I - P_i) w_i;       w_i* f(A) w_i.

    The value is the mean of both, weighted by inverse variances that are estimated from
    their spreads. This leaves a bias of a fraction of the standard error. For Hermitian
    operators `function_trace` is better. The value is exact, from all eigenvalues, if the
    budget reaches n.

    With `fn=lambda x: jnp.log(x + 0j)` the value estimates the logarithm of the
    determinant. The real part is log |det A|, and the imaginary part is the phase of det A,
    up to multiples of 2 pi. If A is real, the phase divided by pi is the number of negative
    eigenvalues. So the sign of det A is known only if the error of the phase is much
    smaller than pi. Random probes reach this if few eigenvalues are negative.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a square lineax operator, real or complex. It may act on arrays or on
      pytrees.
    - `fn`: the function f, an analytic function of a *complex* scalar. Otherwise it is as
      in `function_trace`.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least min(6, n). Default 240.
    - `num_probes`: the number of probes. Default `None`, which lets traceax choose.
    - `num_steps`: the number of matvecs for each probe. Default `None`, which takes about
      as many steps as probes.
    - `pattern`: the places at which A has entries, as in `colouring`. They need not be
      symmetric. The pattern is used if 2 sqrt(`num_matvecs`) colours, at most a seventh of
      the budget (or `num_probes` colours, if given), are enough for a `colouring` of
      power 2. Each probe then has a colour and its own Arnoldi process. Four more probes
      are used for the error bar. For spatial models like log det(I - rho W) the error is
      smaller by orders of magnitude. If `sampler` is given, the pattern is not used.
      Default `None`.
    - `sampler`: a sampler of independent probes, or `probing`. Default `None`, which
      is `rademacher`. `rademacher` is exact for diagonal operators. The factor c_i is (n -
      dim S_i)/|r_i|^2 for `rademacher` and for samplers that are invariant under rotations.
      It is 1 for others.

    **Returns** an `Estimate` with the structure of what `fn` returns. It is real if the
    operator is real and `fn` of a real number is real. Then it is NaN if eigenvalues on a
    branch cut of `fn` give the sum an imaginary part of at least a thousandth of its size.
    `standard_error` also covers the conditioning of eigenvectors.

    **Derivatives**: first derivatives exist with respect to the operator and everything
    that `fn` depends on. They cost about 0.8 num_probes * num_steps matvec-VJPs for each
    entry of the value, or one for each probe of a colouring. If the value is exact, they
    are exact too. They have only half of the digits if the matrix has no basis
    of eigenvectors. Second derivatives with respect to the operator raise
    `NotImplementedError`.

    **Cost**: m = num_probes * num_steps matvecs, none with the adjoint, and 4 n m^2 flops
    for an orthonormal basis of m vectors, which must fit in memory. Three decompositions of
    m x m matrices (of num_steps x num_steps for each probe of a colouring) work on the CPU,
    and on other devices only if JAX supports them there.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> operator = tx.as_operator(jnp.kron(jnp.eye(200), jnp.array([[0, -1], [1, 0]])))
        >>> key = jax.random.key(0)
        >>> trace = tx.arnoldi_trace(operator, jnp.exp, key, 80, num_steps=4)
        >>> bool(abs(trace.value - 400 * jnp.cos(1.0)) < 0.5)
        True

    **Reference**: derived in `traceax/_quadrature/block_arnoldi.py`. Compare Epperly, Tropp
    and Webber (2024), [doi:10.1137/23M1548323](https://doi.org/10.1137/23M1548323), for
    leaving probes out. Arnoldi (1951), Quarterly of Applied Mathematics 9(1). Saad (1992),
    [doi:10.1137/0729014](https://doi.org/10.1137/0729014).

    **See also**: `function_trace`, `logdet`, `slq_trace`.
    """
    name = "arnoldi_trace"
    call = begin(
        name, operator, key, num_matvecs, least=6, sampler=sampler, takes="coloured"
    )
    budgets = num_matvecs, num_probes, num_steps
    shape, budget = checked_run(call, budgets)
    call = dataclasses.replace(call, num_matvecs=budget)
    dtype = working_dtype(call.operator)
    _, structure = scalar_function(name, fn, dtype)
    fn, _ = scalar_function(name, fn, np.result_type(dtype, np.complex64))
    is_real = not any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(structure))
    subject = MatrixFunction(LinearMap(call.operator), fn)
    if call.is_exact:
        return from_matrix(call, partial(exact_general, real=is_real), subject, structure)
    if sampler is None:
        known = check_pattern(name, call.operator, pattern)
        coloured = for_pattern(known, num_probes or _most_colours(budget), 2, tests=0)
        call = call if coloured is None else call.using(coloured)
    if call.group > 1:
        return _coloured_trace(call, subject, structure, budgets, real=is_real)
    call = call.using(rademacher)
    resphered = call.resphere or call.sampler is rademacher
    first = partial(krylov_run, depth=shape.depth, hermitian=False)
    second = partial(block_arnoldi, resphered=resphered, real=is_real)
    (probes,) = call.draw(shape.width)
    # These samples are less skewed than samples of plain quadrature, of which only a third
    # count.
    degrees = shared_degrees_of_freedom(shape.width)
    how = {"spent": shape.num_matvecs, "degrees": degrees, "structure": structure}
    return call.finish((first, second), probes, subject=subject, **how)


# So many colours have a second probe, for the error bar of a single repeat.
_TESTS = 4


def _most_colours(num_matvecs: int) -> int:
    """Return how many probes a budget pays for, up to four times as many as steps.

    Colours far apart matter more than digits of the quadrature, but at least six or seven
    steps are needed for these to be fewer than the digits that colours give."""
    return min(2 * math.isqrt(num_matvecs), max(1, num_matvecs // 7))


def _coloured_trace(
    call: Call, subject: MatrixFunction, structure: PyTree, budgets: Budgets, *, real: bool
) -> Estimate:
    """Estimate the trace by an Arnoldi process for each probe of a colouring."""
    colours, tests = call.group, min(call.group, _TESTS)

    def choose(num_matvecs: int) -> Shape:
        repeats = max(1, _most_colours(num_matvecs) // colours)
        width = repeats * colours
        more = tests if repeats == 1 else 0
        return Shape(width, max(1, num_matvecs // (width + more)))

    shape, _ = checked_run(call, budgets, choose, tests)
    check_samples(call.name, shape.width, colours, "num_probes")
    depth, (first_key, *others) = shape.depth, keys_of(call.key, 3, BLOCKS)
    streamed = dataclasses.replace(call, num_matvecs=shape.width, key=first_key).stream()
    first, design = streamed.probes.source, streamed.design
    chosen = jax.random.permutation(others[0], colours)[:tests]
    again = dataclasses.replace(call, key=others[1]).draw(colours)[0][:, chosen]
    if design.num_samples > 1:
        chosen, again = chosen[:0], again[:, :0]
    # The error of a single repeat is computed from a few colours, which may differ much.
    few = max(1, tests - 1) if design.num_samples == 1 else math.inf
    algorithm = partial(coloured_arnoldi, depth=depth, design=design, real=real)
    probes, degrees = ColouredProbes(first, again, chosen), design.degrees(True)
    spent = (first.shape[1] + again.shape[1]) * depth
    how = {"spent": spent, "degrees": min(degrees, few), "structure": structure}
    return call.finish(algorithm, probes, subject=subject, **how)
