"""One call of every public function that estimates, from a matrix and a key."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx
from tests.matrices import hermitian
from tests.wrappers import PSD

N = 70
MATRIX = hermitian(1.0 + np.arange(N) % 5 / 4)


def times(matrix: Any, v: Any) -> Any:
    """Multiply without an operation of JAX that a precision could be chosen for, so that
    every such operation in the program of a call is traceax's own."""
    return jnp.sum(matrix * v[None, :], axis=1)


def operator(matrix: Any) -> lx.AbstractLinearOperator:
    structure = jax.eval_shape(lambda: matrix[0])
    return lx.FunctionLinearOperator(lambda v: times(matrix, v), structure, PSD)


def logarithm(x: Any) -> Any:
    return jnp.log(x)


def field(x: Any, matrix: Any) -> Any:
    return times(matrix, jnp.sin(x))


def energy(x: Any, matrix: Any) -> Any:
    return jnp.sum(jnp.sin(times(matrix, x)))


def budgeted(fn: Callable[..., Any], budget: int, **how: Any) -> Callable[..., Any]:
    return lambda matrix, key: fn(operator(matrix), key, budget, **how)


def of_function(fn: Callable[..., Any], *args: Any, **how: Any) -> Callable[..., Any]:
    how = {"num_probes": 4, "num_steps": 5, **how}
    return lambda matrix, key: fn(operator(matrix), *args, key, **how)


def of_point(estimate: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda matrix, key: estimate(fn, matrix[0], key, 6, args=matrix)


def density(matrix: Any, key: Any) -> Any:
    grid = jnp.linspace(0.0, 3.0, 4, dtype=matrix.real.dtype)
    return of_function(tx.spectral_density, grid)(matrix, key)


def tracked(matrix: Any, key: Any) -> Any:
    tracker = tx.deltashift(8)
    first, second = jax.random.split(key)
    state = tracker.init(operator(matrix), first)
    return tracker.update(operator(matrix), state, second)[0]


def squared(matrix: Any, key: Any) -> Any:
    return tx.unbiased_square(lambda k: tx.hutchinson_trace(operator(matrix), k, 4), key)


def likelihood(matrix: Any, key: Any) -> Any:
    """The sum of both."""
    both = tx.inv_quad_logdet(operator(matrix), matrix[0], key, 40, shift=0.5)
    value = both.inv_quad.value + both.logdet.value
    return tx.Estimate(value, both.logdet.standard_error, both.logdet.num_matvecs)


def whitened(matrix: Any, key: Any) -> Any:
    near = tx.nearest_neighbours(np.arange(N), 5)
    white = tx.vecchia(lambda i, j: matrix[i, j], near)
    return tx.logdet(operator(matrix), key, 40, whitening=white)


def kept(matrix: Any, key: Any) -> Any:
    return tx.logdet(tx.krylov(operator(matrix), key, 40), shift=0.5)


def by_leaves(matrix: Any, key: Any, budget: int = 10, groups: Any = None) -> Any:
    """The sum over a space of two leaves."""
    structure = jax.eval_shape(lambda: (matrix[0, :30], matrix[0, 30:]))

    def apply(v: Any) -> Any:
        product = times(matrix, jnp.concatenate(v))
        return product[:30], product[30:]

    operator = lx.FunctionLinearOperator(apply, structure, PSD)
    estimate = tx.leaf_traces(operator, key, budget, groups=groups)
    value, error = map(jax.tree.leaves, (estimate.value, estimate.standard_error))
    value, error = sum(value), sum(error)
    return tx.Estimate(value, error, estimate.num_matvecs)


def entries(matrix: Any, key: Any, budget: int = 10) -> Any:
    band = np.abs(np.subtract.outer(*2 * [np.arange(len(matrix))])) < 2
    return tx.selected_entries(operator(matrix), band, key, budget)


def pooled(matrix: Any, key: Any) -> Any:
    def run(key: Any) -> Any:
        return tx.hutchinson_trace(operator(matrix), key, 4)

    return tx.pool(jax.vmap(run)(jax.random.split(key, 3)))


def controlled(matrix: Any, key: Any, budget: int = 8, **how: Any) -> Any:
    control, how["control_trace"] = operator(matrix * matrix), jnp.trace(matrix * matrix)
    return tx.control_variate_trace(operator(matrix), control, key, budget, **how)


def hutchinson(apply: Any, probes: Any) -> Any:
    k = probes.shape[1]
    samples = jnp.sum(probes.conj() * apply(probes), axis=0)
    return jnp.mean(samples), jnp.std(samples, ddof=1) / k**0.5, (probes / k, probes)


TOLERANCE: dict[str, Any] = {"rtol": 0.3, "max_matvecs": 32}
CALLS: dict[str, Callable[[Any, Any], tx.Estimate]] = {
    "trace": budgeted(tx.trace, 20),
    "hutchinson_trace": budgeted(tx.hutchinson_trace, 6),
    "hutchpp_trace": budgeted(tx.hutchpp_trace, 12),
    "na_hutchpp_trace": budgeted(tx.na_hutchpp_trace, 12),
    "xtrace": budgeted(tx.xtrace, 12),
    "xnystrace": budgeted(tx.xnystrace, 10),
    "adaptive_trace": lambda m, key: tx.adaptive_trace(operator(m), key, **TOLERANCE),
    "deltashift": tracked,
    "control_variate_trace": controlled,
    "custom_trace": lambda m, key: tx.custom_trace(hutchinson, operator(m), key, 6),
    "diagonal": budgeted(tx.diagonal, 20),
    "hutchinson_diagonal": budgeted(tx.hutchinson_diagonal, 6),
    "diagpp": budgeted(tx.diagpp, 12),
    "xdiag": budgeted(tx.xdiag, 12),
    "xnysdiag": budgeted(tx.xnysdiag, 10),
    "row_norms_squared": budgeted(tx.row_norms_squared, 12),
    "frobenius_norm_squared": budgeted(tx.frobenius_norm_squared, 12),
    "function_trace": lambda m, key: tx.function_trace(operator(m), logarithm, key, 40),
    "logdet": budgeted(tx.logdet, 40),
    "inv_quad_logdet": likelihood,
    "slq_trace": of_function(tx.slq_trace, logarithm),
    "arnoldi_trace": of_function(tx.arnoldi_trace, logarithm),
    "function_diagonal": of_function(tx.function_diagonal, logarithm),
    "schatten_norm": of_function(tx.schatten_norm, 1),
    "spectral_density": density,
    "divergence": of_point(tx.divergence, field),
    "laplacian": of_point(tx.laplacian, energy),
    "biharmonic": of_point(tx.biharmonic, energy),
    "hessian_diagonal": of_point(tx.hessian_diagonal, energy),
    "leaf_traces": by_leaves,
    "selected_entries": entries,
    "pool": pooled,
    "unbiased_square": squared,
    "vecchia": whitened,
    "krylov": kept,
}

# Further paths: exact answers, and probes in batches.
WAYS: dict[str, Callable[[Any, Any], tx.Estimate]] = {
    "trace, exact": budgeted(tx.trace, N),
    "hutchinson_trace, exact": budgeted(tx.hutchinson_trace, N),
    "hutchinson_diagonal, exact": budgeted(tx.hutchinson_diagonal, N),
    "hutchinson_trace, batched": budgeted(tx.hutchinson_trace, 12, batch_size=5),
    "hutchinson_diagonal, batched": budgeted(
        tx.hutchinson_diagonal, 12, sampler=partial(tx.sphere), batch_size=5
    ),
    "control_variate_trace, exact": partial(controlled, budget=N),
    "control_variate_trace, batched": partial(controlled, batch_size=3),
    "slq_trace, batched": of_function(tx.slq_trace, logarithm, batch_size=3),
    "slq_trace, combined": of_function(tx.slq_trace, logarithm, combine=lambda t: t**2),
    "selected_entries, exact": partial(entries, budget=N),
    "leaf_traces, groups": partial(by_leaves, groups=lambda path: "both"),
    "leaf_traces, groups, exact": partial(by_leaves, budget=N, groups=lambda path: "both"),
}

# Public names that are no estimators.
OTHERS = {"Estimate", "InvQuadLogdet", "Layout", "colouring", "preconditioner", "probing"}
OTHERS |= {"Sampler", "adaptive", "as_operator", "empirical_fisher", "gauss_newton"}
OTHERS |= {"hadamard", "normal", "orthogonal", "rademacher", "sphere"}
OTHERS |= {"Neighbours", "Whitening", "graph_neighbours", "nearest_neighbours"}
OTHERS |= {"Krylov"}
