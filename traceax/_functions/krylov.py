"""A Krylov run that is kept: one run, and many answers.

`begin_run` begins the call of a function that makes a block Krylov run or takes a finished
one, and `checked_run` says of which shape it is. `first_stage` is the first stage of its
algorithm: what makes the run, or takes it. What comes after that is the same.

A run is made with its next block, which functions with a node need. It is a constant of the
derivative rule, as the run of every estimate is, so what is read from it has the
derivatives of an estimate that has made its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import lineax as lx
from jaxtyping import Array, PRNGKeyArray, PyTree

from traceax._core import checks
from traceax._core.canonical import canonical, compiled, hidden
from traceax._core.operator import LinearMap, Operator, by_application, frozen
from traceax._core.rule import Stage
from traceax._core.vectors import flatten, unflatten
from traceax._estimators.call import Call, begin
from traceax._functions.arguments import Budgets
from traceax._functions.exact_functions import is_small, price
from traceax._linalg.columns import dot
from traceax._linalg.krylov import block_krylov
from traceax._probes.samplers import Sampler, SamplerLike, sphere
from traceax._probes.stream import ProgressMeter
from traceax._quadrature.block_quadrature import Run, Shape, krylov_run, shape_for
from traceax._quadrature.scalar import MatrixFunction


class Krylov(eqx.Module):
    """A finished Krylov run, made by `krylov`. It is a pytree of arrays.

    **Attributes**

    - `operator`: the operator. Derivatives of answers go through it.
    - `run`: the Krylov space and its probes, or None if answers are exact.
    - `num_matvecs`: the number of matvecs that were spent, once for all answers.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> spectrum = 1 / jnp.arange(1.0, 401.0) ** 2
        >>> operator = tx.as_operator(lambda v: spectrum * v, 400)
        >>> run = tx.krylov(operator, jax.random.key(0), 120)
        >>> run
        <Krylov: 120 matvecs, 10 probes, dimension 400>

    **See also**: `krylov`.
    """

    operator: Operator
    run: Run | None
    num_matvecs: int = eqx.field(static=True)
    budget: int = eqx.field(static=True)
    shape: Shape = eqx.field(static=True)
    sampler: Sampler = eqx.field(static=True)

    def __repr__(self) -> str:
        probes = f"{self.shape.width} probes" if self.run is not None else "exact"
        size = self.operator.in_size()
        return f"<Krylov: {self.num_matvecs} matvecs, {probes}, dimension {size}>"


def krylov(
    operator: Operator,
    key: PRNGKeyArray,
    num_matvecs: int = 240,
    *,
    num_probes: int | None = None,
    num_steps: int | None = None,
    sampler: SamplerLike = sphere,
    progress_meter: ProgressMeter | None = None,
) -> Krylov:
    """Make a block Krylov run of a Hermitian operator, from which many answers are read.

    `function_trace`, `logdet`, `function_diagonal`, `spectral_density` and
    `inv_quad_logdet` take the result in place of the operator, without a key and a budget.
    Each then gives the estimate that it gives with the operator, this key, this budget and
    this sampler, but takes no further matvec. `inv_quad_logdet` takes the matvecs of its
    solve, for any right-hand sides. They are not in the run, so that its numbers may differ
    from those without a run, within their error bars.

    **Arguments** (details are in the guide's conventions)

    - `operator`: a Hermitian lineax operator A, as in `function_trace`.
    - `key`: one JAX random key, for example `jax.random.key(0)`.
    - `num_matvecs`: the budget, at least min(6, n). Default 240.
    - `num_probes`: the number of probes, as in `function_trace`. Default `None`.
    - `num_steps`: the number of steps, as in `function_trace`. Default `None`. For
      densities, use four times as many steps as probes.
    - `sampler`: a sampler of independent probes. Default `sphere`, which is best for
      traces. For diagonals of matrices that are nearly diagonal, `rademacher` has up to 2.3
      times less error.
    - `progress_meter`: an object that shows the progress of the run, for example
      `diffrax.TqdmProgressMeter()`. Default `None`, which shows nothing.

    **Returns** a `Krylov`, a pytree that can be an argument of compiled functions, be
    carried through loops, and be saved, for example by `equinox.tree_serialise_leaves`.

    **Derivatives**: an answer has the derivatives that it has without a run, with respect
    to the arrays of the operator and to everything that its function depends on. The run
    itself is a constant. So if you differentiate with respect to the operator, make the run
    inside of the function that is differentiated, or replace `operator` in the run by one
    that depends on your parameters (by `equinox.tree_at`, for example).

    **Cost**: at most `num_matvecs` matvecs, once. The run keeps an orthonormal basis of
    `num_matvecs + num_probes` vectors. If n <= 64, or if the budget reaches n, it keeps
    the matrix instead, and answers are exact. Reading an answer costs as much as
    `function_trace` takes after its matvecs.

    **Errors of several answers** of one run are not independent. Patterns of operators are
    not used, and a shift that is an `lx.DiagonalLinearOperator` and a `whitening` need a
    run of their own: pass the operator.

    **Example**

        >>> import jax, jax.numpy as jnp, traceax as tx
        >>> spectrum = 1 / jnp.arange(1.0, 401.0) ** 2 + 0.01
        >>> operator = tx.as_operator(lambda v: spectrum * v, 400)
        >>> run = tx.krylov(operator, jax.random.key(0), 120)
        >>> evidence = tx.logdet(run)
        >>> variances = tx.function_diagonal(run, lambda x: 1 / x)
        >>> bool(abs(evidence.value - jnp.log(spectrum).sum()) < 1)
        True

    **Reference**: the run is that of `function_trace`.

    **See also**: `function_trace`, `logdet`, `function_diagonal`, `spectral_density`.
    """
    name, budgets = "krylov", (num_matvecs, num_probes, num_steps)
    call = begin(name, operator, key, num_matvecs, least=6, sampler=sampler)
    call = call.in_batches(None, progress_meter)
    return kept_run(call, *checked_run(call, budgets))


def kept_run(call: Call, shape: Shape, budget: int) -> Krylov:
    """Make a run, unless answers are exact."""
    how = {"budget": budget, "shape": shape, "sampler": call.source}
    if lx.is_diagonal(call.operator) or is_small(call.operator, budget):
        return Krylov(_stored(call.operator), None, price(call.operator), **how)
    (probes,) = call.draw(shape.width)
    make = partial(block_krylov, depth=shape.depth, meter=call.meter, extend=True)
    space = compiled(make, frozen(LinearMap(call.operator)), probes)
    return Krylov(call.operator, Run(space, probes), shape.num_matvecs, **how)


def _stored(operator: Operator) -> Operator:
    """Return the operator with all of its columns computed, so that it is applied no more
    in the second answer."""
    if price(operator) == 0 or lx.is_diagonal(operator):
        return operator
    matrix, space = compiled(LinearMap.dense, LinearMap(operator)), operator.in_structure()

    def product(vector: PyTree[Array]) -> PyTree[Array]:
        return unflatten(dot(matrix, flatten(vector, matrix.dtype)), space)

    return by_application(operator, canonical(product, space))


def begin_run(
    name: str,
    operator: Operator | Krylov,
    key: Any,
    budgets: Budgets,
    progress_meter: Any = None,
    *,
    least: int = 6,
    left_out: dict[str, Any] | None = None,
    **how: Any,
) -> Call:
    """Begin the call of a function that makes a Krylov run, or takes a finished one.

    A run has a key and a budget already, and what is `left_out` needs a run of its own."""
    if not isinstance(operator, Krylov):
        call = begin(name, operator, key, budgets[0], least=least, **how)
        return call.in_batches(None, progress_meter)
    of_run = dict(zip(("num_probes", "num_steps"), budgets[1:], strict=True))
    of_run |= {"key": key, "progress_meter": progress_meter}
    of_run["num_matvecs"] = None if budgets[0] in (240, operator.budget) else budgets[0]
    must = "be left out, because the run that is passed"
    for argument, given in of_run.items():
        rest = f"{must} has its own", "a value", "Pass it to traceax.krylov."
        checks.require(given is None, name, argument, *rest)
    for argument, given in (left_out or {}).items():
        rest = f"{must} was made without it", "a value", "Pass the operator, not a run."
        checks.require(given is None, name, argument, *rest)
    held = hidden(operator.operator, operator)
    call = Call(name, held, key, operator.budget, operator.sampler)
    return replace(call, finished=operator)


def diagonal_only(shift: Any) -> Any:
    """Return a shift that needs a run of its own, or None."""
    return shift if isinstance(shift, lx.DiagonalLinearOperator) else None


def checked_run(
    call: Call, budgets: Budgets, choose: Callable[[int], Shape] = shape_for, tests: int = 0
) -> tuple[Shape, int]:
    """Return the shape of the block Krylov run that the user asks for, and its budget.

    If the budget reaches n, the whole matrix costs no more than the run. `choose` makes a
    shape from a budget if the user gives neither `num_probes` nor `num_steps`. If the user
    gives one of them, the budget also pays for the matvecs of `tests` more probes.
    """
    if call.finished is not None:
        return call.finished.shape, call.finished.budget
    name, (num_matvecs, num_probes, num_steps) = call.name, budgets
    why = "the fewest that can be used"
    if num_probes is not None:
        num_probes = checks.check_count(name, "num_probes", num_probes, 1, why)
    if num_steps is not None:
        num_steps = checks.check_count(name, "num_steps", num_steps, 1, why)
    if num_probes is None and num_steps is None:
        return choose(int(num_matvecs)), int(num_matvecs)
    if num_probes is not None and num_steps is not None:
        return Shape(num_probes, num_steps), num_probes * num_steps
    count = num_steps if num_probes is None else num_probes
    argument = "num_steps" if num_probes is None else "num_probes"
    assert count is not None
    least = count + tests if num_steps is None else count * (1 + tests)
    checks.check_count(name, "num_matvecs", num_matvecs, least, f"for {argument}={count}")
    if num_steps is None:
        return Shape(count, num_matvecs // (count + tests)), num_matvecs
    return Shape(num_matvecs // count - tests, count), num_matvecs


def first_stage(call: Call, shape: Shape) -> tuple[Stage, Any]:
    """Return the stage that makes the run, or takes a finished one, and its argument."""
    if call.finished is not None:
        return _taken, call.finished.run
    (probes,) = call.draw(shape.width)
    return partial(krylov_run, depth=shape.depth, meter=call.meter), probes


def _taken(subject: MatrixFunction, run: Run) -> Run:
    """Return the run as `krylov_run` makes it: without a node it has no next block."""
    space = run.space
    if subject.node is None:
        space = space._replace(extended=space.basis, tall=space.projection)
    return Run(space, run.probes)
