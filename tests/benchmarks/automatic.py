"""Every automatic choice against the best estimator by name, at equal matvecs.

`python -m tests.benchmarks.automatic [--keys 100]`, from the root of the repository.

For each automatic choice and each of its problems, estimators called by name run with as
many matvecs, and the choice is compared with the best of them *on that problem*. The error
is the root mean square over keys, relative to the truth; of pytrees and diagonals that of
the vector. Ratios below 1 are in the choice's favour; over 100 keys one is uncertain by 5
to 10 %. Errors below rounding count as equal.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.flatten_util import ravel_pytree

import traceax as tx
from tests.benchmarks.accuracy import ROUNDING, spectra, with_spectrum
from tests.benchmarks.scores import SEMIDEFINITE, verdict

KEY = jax.random.key(5)
N, BUDGET = 600, 60
ALLOWED = 1.10
Estimate = Callable[[Any], tx.Estimate]


class Contest(NamedTuple):
    choice: str
    problem: str
    truth: Any
    ours: Estimate
    others: dict[str, Estimate]


def as_function(matrix: Any, tags: Any) -> lx.AbstractLinearOperator:
    structure = jax.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype)
    return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tags)


def at_budget(names: str, operator: Any, budget: int = BUDGET) -> dict[str, Estimate]:
    def call(name: str) -> Estimate:
        return lambda key: getattr(tx, name)(operator, key, budget)

    return {name: call(name) for name in names.split()}


def matrices() -> Iterator[tuple[str, Any]]:
    for name, values in spectra(N).items():
        yield name, with_spectrum(values, jax.random.key(0))
    yield "indefinite", with_spectrum((-1.0) ** jnp.arange(N) / (1 + jnp.arange(N)), KEY)


def traces_and_diagonals() -> Iterator[Contest]:
    for name, matrix in matrices():
        kinds: dict[str, Any] = {"symmetric": lx.symmetric_tag}
        if name != "indefinite":
            kinds["semidefinite"] = SEMIDEFINITE
        for kind, tags in kinds.items():
            operator, semidefinite = as_function(matrix, tags), kind == "semidefinite"
            named = "hutchinson_trace hutchpp_trace na_hutchpp_trace xtrace"
            named += " xnystrace" if semidefinite else ""
            problem, truth = f"{name}, {kind}", jnp.trace(matrix)
            (choice,) = at_budget("trace", operator).values()
            yield Contest("trace", problem, truth, choice, at_budget(named, operator))
            named = "hutchinson_diagonal diagpp xdiag" + " xnysdiag" * semidefinite
            (choice,) = at_budget("diagonal", operator).values()
            truth, others = jnp.diagonal(matrix), at_budget(named, operator)
            yield Contest("diagonal", problem, truth, choice, others)


def _summed(estimate: tx.Estimate) -> tx.Estimate:
    return eqx.tree_at(lambda e: e.value, estimate, jax.tree.map(jnp.sum, estimate.value))


def leaves() -> Iterator[Contest]:
    """Three leaves of 300, 200 and 100 entries, beside the sums of diagonals by name."""
    few = jnp.concatenate([jnp.array([480.0, 400]), jnp.linspace(1, 0.6, N - 2)])
    named = {"few 2": with_spectrum(few, jax.random.key(0))} | dict(matrices())
    shape = tuple(jax.ShapeDtypeStruct((size,), few.dtype) for size in (300, 200, 100))
    for name, matrix in named.items():

        def matvec(v: Any, matrix: Any = matrix) -> Any:
            return tuple(jnp.split(matrix @ jnp.concatenate(v), (300, 500)))

        for tags in (lx.symmetric_tag,), SEMIDEFINITE:
            if tags is SEMIDEFINITE and name == "indefinite":
                continue
            operator = lx.FunctionLinearOperator(matvec, shape, tags)
            semidefinite = tags is SEMIDEFINITE
            by_name = "hutchinson_diagonal xdiag" + " xnysdiag" * semidefinite
            others = {
                name: lambda key, call=call: _summed(call(key))
                for name, call in at_budget(by_name, operator).items()
            }
            (choice,) = at_budget("leaf_traces", operator).values()
            parts = jnp.split(jnp.diagonal(matrix), (300, 500))
            truth = jnp.stack([jnp.sum(part) for part in parts])
            problem = f"{name}, {'semidefinite' if semidefinite else 'symmetric'}"
            yield Contest("leaf_traces", problem, truth, choice, others)


def quadratics() -> Iterator[Contest]:
    """Hessians of 100 dimensions, a few large eigenvalues over a flat rest, as above."""
    for count, directions in ((2, 16), (3, 32), (10, 32)):
        large = jnp.linspace(300.0, 100.0, count)
        sizes = jnp.concatenate([large, jnp.linspace(1, 0.5, 100 - count)])
        hessian = with_spectrum(sizes, jax.random.key(0))
        fn = lambda x, args, h=hessian: x @ h @ x / 2  # noqa: E731

        def choice(key: Any, fn: Any = fn, k: int = directions, **how: Any) -> Any:
            return tx.laplacian(fn, jnp.ones(100), key, k, **how)

        names = "hutchpp_trace xtrace"
        others = at_budget(names, as_function(hessian, lx.symmetric_tag), directions // 2)
        others["rademacher"] = partial(choice, sampler=tx.rademacher)
        problem = f"{count} large, {directions} directions"
        yield Contest("laplacian", problem, jnp.trace(hessian), choice, others)


def sparse() -> Iterator[Contest]:
    """Inverses on a grid of 24 x 24, of which the pattern is known."""
    side = 24
    path = np.eye(side, k=1) + np.eye(side, k=-1)
    grid = np.kron(path, np.eye(side)) + np.kron(np.eye(side), path)
    for mass in (0.1, 1.0):
        matrix = jnp.linalg.inv(jnp.asarray((4 + mass) * np.eye(side**2) - grid))
        operator = as_function(matrix, SEMIDEFINITE)
        problem = f"grid, mass {mass}"

        def diagonal(key: Any, a: Any = operator) -> tx.Estimate:
            return tx.diagonal(a, key, BUDGET, pattern=grid)

        def trace(key: Any, a: Any = operator) -> tx.Estimate:
            return tx.trace(a, key, BUDGET, pattern=grid)

        others = at_budget("hutchinson_diagonal xdiag xnysdiag", operator)
        yield Contest("diagonal, pattern", problem, jnp.diagonal(matrix), diagonal, others)
        others = at_budget("hutchinson_trace xtrace xnystrace", operator)
        yield Contest("trace, pattern", problem, jnp.trace(matrix), trace, others)


def likelihoods() -> Iterator[Contest]:
    """240 products, as is the choice's default, against quadrature at its best of four."""
    points = jax.random.uniform(KEY, (N, 3))
    squares = jnp.sum((points[:, None] - points) ** 2, -1)
    kernels = {
        "RBF + 1e-2": jnp.exp(-4 * squares) + 1e-2 * jnp.eye(N),
        "exponential + 1e-1": jnp.exp(-2 * jnp.sqrt(squares + 1e-12)) + 0.1 * jnp.eye(N),
        "uniform spectrum": with_spectrum(jnp.linspace(1.0, 3.0, N), KEY),
    }
    for problem, matrix in kernels.items():
        operator = as_function(matrix, SEMIDEFINITE)
        truth = jnp.linalg.slogdet(matrix)[1]
        others = {
            f"slq_trace, {240 // steps} x {steps}": (
                lambda key, operator=operator, steps=steps: tx.slq_trace(
                    operator, jnp.log, key, num_probes=240 // steps, num_steps=steps
                )
            )
            for steps in (4, 8, 20, 40)
        }
        choices = {
            "logdet": lambda key, a=operator: tx.logdet(a, key, 240),
            "function_trace": lambda key, a=operator: tx.function_trace(
                a, jnp.log, key, 240
            ),
        }
        for choice, call in choices.items():
            yield Contest(choice, problem, truth, call, others)


class Sine(eqx.Module):
    """A network that oscillates, 3 layers of 64."""

    net: eqx.nn.MLP

    def __init__(self, d: int, out: Any, activation: Any) -> None:
        self.net = eqx.nn.MLP(d, out, 64, 3, activation, key=KEY, dtype=float)

    def __call__(self, x: Any, args: Any = None) -> Any:
        return self.net(x)


def trained(net: Any, d: int, steps: int = 400) -> Any:
    """On a function of neighbours, by plain gradient steps with momentum."""
    parameters, static = eqx.partition(net, eqx.is_inexact_array)

    def target(x: Any) -> Any:
        return 3 * jnp.sum(jnp.sin(2 * x[:-1] + jnp.cos(x[1:]))) / d**0.5

    def loss(parameters: Any, points: Any) -> Any:
        fit = jax.vmap(eqx.combine(parameters, static))(points)
        return jnp.mean((fit - jax.vmap(target)(points)) ** 2)

    def step(carry: Any, key: Any) -> Any:
        parameters, speed = carry
        points = jax.random.normal(key, (64, d)) * 2 / d**0.5
        slope = jax.grad(loss)(parameters, points)
        speed = jax.tree.map(lambda s, g: 0.9 * s - 2e-3 * g, speed, slope)
        return (jax.tree.map(jnp.add, parameters, speed), speed), None

    start = parameters, jax.tree.map(jnp.zeros_like, parameters)
    keys = jax.random.split(KEY, steps)
    (parameters, _), _ = jax.jit(lambda c, k: jax.lax.scan(step, c, k))(start, keys)
    return eqx.combine(parameters, static)


def laplacians() -> Iterator[Contest]:
    """16 directions; products with the Hessian take twice as long, so there are 8."""
    for d in (20, 100):
        for activation in (jnp.tanh, jnp.sin):
            fresh = Sine(d, "scalar", activation)
            for state, net in (("fresh", fresh), ("trained", trained(fresh, d))):
                x = jax.random.normal(KEY, (d,)) * 2 / d**0.5
                gradient = lambda x, args, net=net: jax.grad(net)(x)  # noqa: E731
                hessian = lx.JacobianLinearOperator(gradient, x, tags=lx.symmetric_tag)

                def plain(key: Any, sampler: Any, net: Any = net, x: Any = x) -> Any:
                    return tx.laplacian(net, x, key, 16, sampler=sampler)

                others = {
                    name: (lambda key, s=sampler, plain=plain: plain(key, s))
                    for name, sampler in (
                        ("rademacher", tx.rademacher),
                        ("orthogonal", tx.orthogonal),
                    )
                }
                others |= at_budget("hutchpp_trace xtrace", hessian, 8)
                truth = jnp.trace(hessian.as_matrix())
                choice = lambda key, net=net, x=x: tx.laplacian(net, x, key, 16)  # noqa: E731
                problem = f"{activation.__name__}, {state}, d = {d}"
                yield Contest("laplacian", problem, truth, choice, others)


def divergences() -> Iterator[Contest]:
    for d, k in ((30, 10), (64, 8), (64, 48)):
        field = Sine(d, d, jnp.tanh)
        x = jax.random.normal(KEY, (d,))
        jacobian = lx.JacobianLinearOperator(field, x)

        def plain(key: Any, f: Any = field, x: Any = x, k: int = k, **how: Any) -> Any:
            return tx.divergence(f, x, key, k, **how)

        others = {
            sampler.__name__: (lambda key, s=sampler, plain=plain: plain(key, sampler=s))
            for sampler in (tx.rademacher, tx.sphere, tx.orthogonal)
        }
        others |= at_budget("xtrace", jacobian, k)
        truth = jnp.trace(jacobian.as_matrix())
        yield Contest("divergence", f"{k} of {d} dimensions", truth, plain, others)


def hessian_diagonals() -> Iterator[Contest]:
    net = eqx.nn.MLP(10, "scalar", 16, 2, jnp.tanh, key=KEY, dtype=float)
    parameters, static = eqx.partition(net, eqx.is_inexact_array)
    points = jax.random.normal(KEY, (100, 10))

    def fn(parameters: Any, args: Any) -> Any:
        fit = jax.vmap(eqx.combine(parameters, static))(points)
        return jnp.mean((fit - jnp.sin(points.sum(1))) ** 2)

    gradient = lambda p, args: jax.grad(fn)(p, None)  # noqa: E731
    hessian = lx.JacobianLinearOperator(gradient, parameters, tags=lx.symmetric_tag)
    truth = jnp.diagonal(hessian.as_matrix())
    for k in (6, 20, 100):
        others = at_budget("hutchinson_diagonal diagpp xdiag diagonal", hessian, k)
        choice = lambda key, k=k: tx.hessian_diagonal(fn, parameters, key, k)  # noqa: E731
        yield Contest("hessian_diagonal", f"tanh, {k} products", truth, choice, others)


def error(estimate: Estimate, truth: Any, keys: Any) -> float:
    def off(key: Any) -> Any:
        value = ravel_pytree(estimate(key).value)[0]
        return jnp.sum((value - truth) ** 2)

    squares = jax.jit(lambda keys: jax.lax.map(off, keys))(keys)
    return float(jnp.sqrt(jnp.mean(squares) / jnp.sum(truth**2)))


def main(num_keys: int = 100) -> None:
    jax.config.update("jax_enable_x64", True)
    keys = jax.random.split(jax.random.key(1), num_keys)
    print(f"{'choice':<17}{'problem':<26}{'error':>9}  {'best estimator by name':<22}ratio")
    worst = []
    rounds = (
        traces_and_diagonals,
        leaves,
        sparse,
        likelihoods,
        laplacians,
        quadratics,
        divergences,
        hessian_diagonals,
    )
    for contest in (contest for round_ in rounds for contest in round_()):
        mine = error(contest.ours, contest.truth, keys)
        theirs = {
            name: error(other, contest.truth, keys)
            for name, other in contest.others.items()
        }
        best = min(theirs, key=lambda name: theirs[name])
        ratio = max(mine, ROUNDING) / max(theirs[best], ROUNDING)
        worst.append((ratio, f"{contest.choice}, {contest.problem}, against {best}"))
        print(
            f"{contest.choice:<17}{contest.problem:<26}{mine:>9.1e}  "
            f"{best + f' {theirs[best]:.1e}':<30}{ratio:.2f}",
            flush=True,
        )
    for ratio, which in sorted(worst, reverse=True)[:8]:
        print(f"  {ratio:.2f}  {which}")
    ratio, which = max(worst)
    verdict(
        ratio <= ALLOWED,
        "no automatic choice loses by more than 10 %, the most",
        f"{ratio:.2f} ({which})",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Automatic choices against estimators by name."
    )
    parser.add_argument("--keys", type=int, default=100)
    main(parser.parse_args().keys)
