"""One run, many answers: a finished run gives what a call of its own gives."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import traceax as tx
from tests.core.test_messages import rejected
from tests.helpers import cases, close, contains, is_unbiased, over_keys, slow
from tests.matrices import hermitian, numbers
from tests.wrappers import PSD, function

KEY = jax.random.key(0)
N = 120
SPECTRUM = 2.0 ** -np.arange(N, dtype=float) * 8 + np.linspace(0.05, 1, N)
BUDGET = 60
GRID = jnp.linspace(0.0, 4.0, 5)
SYMMETRIC = lx.symmetric_tag


def thermal(s: Any, x: Any) -> Any:
    return x * jnp.exp(-s * x), jnp.exp(-s * x)


Answer = Callable[..., tx.Estimate]
ANSWERS: dict[str, Answer] = {
    "logdet": lambda s, *of: tx.logdet(*of, shift=s),
    "logdet, shifts": lambda s, *of: tx.logdet(
        *of, shift=s * jnp.arange(1, 4).astype(s.dtype)
    ),
    "root": lambda s, a, *of: tx.function_trace(a, lambda x: jnp.sqrt(s * x), *of),
    "energy": lambda s, a, *of: tx.function_trace(
        a, partial(thermal, s), *of, combine=lambda t: t[0] / t[1]
    ),
    "inverse": lambda s, a, *of: tx.function_diagonal(a, lambda x: s / x, *of),
    "density": lambda s, a, *of: tx.spectral_density(
        a, s * GRID.astype(s.dtype), *of, width=0.5
    ),
    "own grid": lambda s, a, *of: tx.spectral_density(a, None, *of, width=s),
}


def operator(matrix: Any, tags: Any = PSD) -> lx.AbstractLinearOperator:
    return function(matrix, tags)


def of_operator(name: str) -> Answer:
    """A call with the choices that a run makes."""
    shape: Any = {} if "density" not in name else {"num_probes": 7}

    def answer(s: Any, a: Any, key: Any) -> tx.Estimate:
        of: Any = (a, key, BUDGET)
        if name == "inverse":
            return tx.function_diagonal(a, lambda x: s / x, key, BUDGET, sampler=tx.sphere)
        if name in ("density", "own grid"):
            grid, width = (
                (s * GRID.astype(s.dtype), 0.5) if name == "density" else (None, s)
            )
            how: Any = {"num_probes": 7, "num_steps": 8, "width": width}
            return tx.spectral_density(a, grid, key, BUDGET, **how)
        return ANSWERS[name](s, *of, **shape)

    return answer


def of_run(name: str) -> Answer:
    def answer(s: Any, a: Any, key: Any) -> tx.Estimate:
        run = tx.krylov(a, key, BUDGET)
        if "density" in name or "grid" in name:
            run = tx.krylov(a, key, num_probes=7, num_steps=8)
        return ANSWERS[name](s, run)

    return answer


def summed(answer: Answer, tags: Any) -> Any:
    """A sum of the values of an answer, and the answer, as a function of numbers on which
    the operator and its function depend."""

    def total(x: Any, matrix: Any, key: Any) -> Any:
        tilt = jnp.diag(jnp.cos(jnp.arange(N, dtype=matrix.real.dtype)))
        scale = x[0].astype(matrix.dtype)
        moved = scale * matrix + (scale - 1) * tilt.astype(matrix.dtype) / 40
        found = answer(x[1], operator(moved, tags), key)
        weights = jnp.cos(np.arange(found.value.size, dtype=found.value.dtype))
        return jnp.sum(weights.reshape(found.value.shape) * found.value), found

    return jax.jit(jax.value_and_grad(total, has_aux=True))


SETTINGS = [("float64", PSD), ("float64", SYMMETRIC), ("float32", PSD), ("complex128", PSD)]


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("kind", cases(SETTINGS, SETTINGS[0]), ids=str)
def test_answers_are_those_of_the_operator(name: str, kind: Any) -> None:
    """Values and error bars to 1e-9, gradients in the operator and in f to 1e-6."""
    dtype, tags = kind
    matrix = jnp.asarray(hermitian(SPECTRUM, complex if "complex" in dtype else float))
    matrix = matrix.astype(dtype)
    x = jnp.array([1.0, 0.7], matrix.real.dtype)
    (value, found), slopes = summed(of_run(name), tags)(x, matrix, KEY)
    (want, expected), of_want = summed(of_operator(name), tags)(x, matrix, KEY)
    scale = 1 if "64" in dtype or "128" in dtype else 1e4
    close(value, want, scale * 1e-9)
    close(slopes, of_want, scale * 1e-6)
    close(found.standard_error, expected.standard_error, scale * 1e-6)
    assert found.num_matvecs == expected.num_matvecs
    assert found.degrees_of_freedom == expected.degrees_of_freedom
    assert found.method == expected.method


def counted(n: int) -> tuple[lx.AbstractLinearOperator, list[int]]:
    """An operator that counts its matvecs."""
    matrix, count = np.asarray(hermitian(np.linspace(1, 2, n))), [0]

    def product(v: Any) -> Any:
        count[0] += 1
        return matrix @ np.asarray(v)

    def apply(v: Any) -> Any:
        return jax.pure_callback(product, v, v, vmap_method="sequential")

    return lx.FunctionLinearOperator(apply, jax.ShapeDtypeStruct((n,), float), PSD), count


@pytest.mark.parametrize("n", [40, 90, 120])
def test_two_answers_take_the_matvecs_of_one(n: int) -> None:
    """The budget of 90 is below n, or reaches it, or is not needed."""
    a, count = counted(n)
    run = tx.krylov(a, KEY, 90)
    jax.block_until_ready(run)
    first = count[0]
    answers = [tx.logdet(run), tx.function_trace(run, jnp.exp)]
    answers += [tx.spectral_density(run, None), tx.spectral_density(run, GRID)]
    answers += [tx.function_diagonal(run, jnp.sqrt)]
    jax.block_until_ready(answers)
    assert count[0] == first == run.num_matvecs == min(n, 90)
    assert {int(answer.num_matvecs) for answer in answers} == {first}
    assert {answer.method == "exact" for answer in answers} == {n <= 90}


def test_stored_and_diagonal_operators_are_exact() -> None:
    matrix = jnp.asarray(hermitian(SPECTRUM))
    stored = tx.krylov(lx.MatrixLinearOperator(matrix, PSD), KEY)
    diagonal = tx.krylov(lx.DiagonalLinearOperator(jnp.asarray(SPECTRUM)), KEY)
    for run in (stored, diagonal):
        assert run.num_matvecs == 0
        assert "exact" in repr(run)
        close(tx.logdet(run).value, np.sum(np.log(SPECTRUM)), 1e-12)
        assert tx.spectral_density(run, None).method == "exact"
    whole = lambda d: tx.krylov(function(d * matrix, PSD), KEY, N)  # noqa: E731
    close(jax.grad(lambda d: tx.logdet(whole(d)).value)(1.0), float(N), 1e-12)


def test_pytrees_are_exact_in_their_own_order() -> None:
    """A small operator on a pytree keeps its matrix."""
    matrix = jnp.asarray(hermitian(np.linspace(1, 2, 12)))

    def apply(v: Any) -> Any:
        image = matrix @ jnp.concatenate([v["b"], v["a"].ravel()])
        return {"a": image[2:].reshape(2, 5), "b": image[:2]}

    space = jax.eval_shape(lambda: {"a": jnp.zeros((2, 5)), "b": jnp.zeros(2)})
    run = tx.krylov(lx.FunctionLinearOperator(apply, space, PSD), KEY, 30)
    found = tx.function_diagonal(run, lambda x: 1 / x).value
    want = jnp.diagonal(jnp.linalg.inv(matrix))
    close(found["b"], want[:2], 1e-12)
    close(found["a"].ravel(), want[2:], 1e-12)


def run_of(matrix: Any) -> tx.Krylov:
    return tx.krylov(operator(matrix), KEY, BUDGET)


def test_a_run_goes_where_arrays_go(tmp_path: Path) -> None:
    """Into compiled functions, through loops and maps, to disk and back."""
    matrix = jnp.asarray(hermitian(SPECTRUM))
    run, shifts = run_of(matrix), jnp.array([0.1, 0.2, 0.4])
    one = lambda run, shift: tx.logdet(run, shift=shift).value  # noqa: E731
    want = tx.logdet(run, shift=shifts).value
    close(jax.jit(jax.vmap(one, (None, 0)))(run, shifts), want, 1e-9)

    def step(run: tx.Krylov, shift: Any) -> Any:
        return run, one(run, shift)

    close(jax.lax.scan(step, run, shifts)[1], want, 1e-9)
    eqx.tree_serialise_leaves(tmp_path / "run", run)
    like = eqx.filter_eval_shape(run_of, matrix)
    close(
        tx.logdet(eqx.tree_deserialise_leaves(tmp_path / "run", like)).value,
        tx.logdet(run).value,
        1e-12,
    )
    scales = jnp.array([1.0, 2.0])
    several = jax.vmap(lambda s: run_of(s * matrix))(scales)
    found = jax.vmap(lambda run: tx.logdet(run).value)(several)
    close(found[1] - found[0], N * np.log(2), 1e-9)


def test_second_derivatives_and_constant_runs() -> None:
    """A run that is a constant leaves the derivative along its operator. By `tree_at`, the
    operator may be another one than at first."""
    matrix = jnp.asarray(hermitian(SPECTRUM))

    def value(t: Any) -> Any:
        return tx.function_trace(run_of(t * matrix), lambda x: x * jnp.exp(-x)).value

    def direct(t: Any) -> Any:
        fn = lambda x: x * jnp.exp(-x)  # noqa: E731
        return tx.function_trace(operator(t * matrix), fn, KEY, BUDGET).value

    close(jax.jit(jax.hessian(value))(1.0), jax.jit(jax.hessian(direct))(1.0), 1e-6)
    run = run_of(matrix)

    def replaced(t: Any) -> Any:
        moved = eqx.tree_at(lambda r: r.operator.fn.arrays[0], run, t * matrix)
        return tx.logdet(moved).value

    close(jax.grad(replaced)(1.0), float(N), 1e-2)
    slope = jax.grad(lambda s: tx.logdet(run, shift=s).value)(0.1)
    want = jax.grad(lambda s: tx.logdet(operator(matrix), KEY, BUDGET, shift=s).value)(0.1)
    close(slope, want, 1e-9)


def test_likelihoods_from_a_run() -> None:
    """For any right-hand sides, with a guess, with gradients."""
    matrix, y = jnp.asarray(hermitian(SPECTRUM)), numbers((2, N))
    run = run_of(matrix)
    both = tx.inv_quad_logdet(run, y, shift=0.1)
    shifted = matrix + 0.1 * jnp.eye(N)
    want = jnp.linalg.solve(shifted, y.T).T
    close(both.solution, want, 1e-5)
    close(both.inv_quad.value, jnp.sum(y * want), 1e-9)
    close(both.logdet.value, tx.logdet(run, shift=0.1).value, 1e-9)
    again = tx.inv_quad_logdet(run, y, shift=0.1, guess=both.solution)
    assert again.inv_quad.num_matvecs < both.inv_quad.num_matvecs

    def form(t: Any) -> Any:
        return tx.inv_quad_logdet(run_of(t * matrix), y, shift=0.1).inv_quad.value

    def exact(t: Any) -> Any:
        return jnp.sum(y * jnp.linalg.solve(t * matrix + 0.1 * jnp.eye(N), y.T).T)

    close(jax.grad(form)(1.0), jax.grad(exact)(1.0), 1e-5)


@pytest.mark.slow
def test_runs_of_other_probes() -> None:
    """From signs, traces are unbiased, and diagonals are those of `function_diagonal`."""
    matrix = jnp.asarray(hermitian(SPECTRUM)) + jnp.diag(jnp.linspace(0.0, 2.0, N))
    run = tx.krylov(operator(matrix), KEY, BUDGET, sampler=tx.rademacher)
    found = tx.function_diagonal(run, lambda x: 1 / x)
    want = tx.function_diagonal(operator(matrix), lambda x: 1 / x, KEY, BUDGET)
    close(found.value, want.value, 1e-10)

    def one(key: Any) -> tx.Estimate:
        run = tx.krylov(operator(matrix), key, BUDGET, sampler=tx.rademacher)
        return tx.function_trace(run, jnp.sqrt)

    estimates = over_keys(one, KEY, 200)
    truth = jnp.sum(jnp.sqrt(jnp.linalg.eigvalsh(matrix)))
    assert is_unbiased(estimates.value, truth, 4.0)
    assert jnp.mean(contains(estimates, truth)) >= 0.9


def test_messages() -> None:
    run: Any = run_of(jnp.asarray(hermitian(SPECTRUM)))
    value: Any = ValueError
    own, apart = "has its own.*Pass it to", "made without it.*not a run"
    rejected(value, rf"logdet\(key=.*{own}", tx.logdet, run, KEY)
    rejected(value, rf"num_matvecs=.*{own}", tx.logdet, run, num_matvecs=30)
    rejected(value, rf"num_probes=.*{own}", tx.function_trace, run, jnp.exp, num_probes=3)
    rejected(value, rf"pattern=.*{apart}", tx.logdet, run, pattern=np.eye(N))
    diagonal = lx.DiagonalLinearOperator(jnp.ones(N))
    rejected(value, rf"shift=.*{apart}", tx.logdet, run, shift=diagonal)
    likelihood = partial(tx.inv_quad_logdet, run, jnp.ones(N))
    rejected(value, rf"shift=.*{apart}", likelihood, shift=diagonal)
    bare = tx.Whitening(lx.IdentityLinearOperator(run.operator.in_structure()), 0.0)  # pyright: ignore
    rejected(value, rf"whitening=.*{apart}", tx.logdet, run, whitening=bare)
    inverse = partial(tx.function_diagonal, run, jnp.sqrt)
    rejected(value, rf"sampler=.*{apart}", inverse, sampler=tx.sphere)
    density = partial(tx.spectral_density, run, GRID)
    rejected(value, rf"batch_size=.*{apart}", density, batch_size=3)
    words = "Krylov.*its attribute `operator`.*finished run is for"
    for other in (tx.trace, tx.diagonal, tx.hutchinson_trace):
        rejected(TypeError, words, other, run, KEY, 30)
    rejected(TypeError, words, tx.arnoldi_trace, run, jnp.exp, KEY)
    rejected(TypeError, words, tx.schatten_norm, run, 1, KEY)
    rejected(TypeError, words, tx.krylov, run, KEY)
    rejected(TypeError, "random key", tx.logdet, run.operator)


# Densities.

OUTLIERS = np.array([2.0, 3.0, 4.0, 5.5, 7.0, 10.0])


@pytest.mark.parametrize("keys", [2, slow(40)])
def test_weights_of_separated_eigenvalues(keys: int) -> None:
    """A bulk on [0, 1] and six eigenvalues, n = 400: their weights have no noise."""
    n, width = 400, 0.1
    spectrum = np.append(np.linspace(0, 1, n - 6), OUTLIERS)
    matrix = jnp.asarray(hermitian(spectrum))
    grid = jnp.append(jnp.linspace(-0.3, 1.3, 40), OUTLIERS)
    bumps = jnp.exp(-(((grid[:, None] - spectrum[None]) / width) ** 2) / 2)
    truth = jnp.mean(bumps, axis=1) / (width * (2 * jnp.pi) ** 0.5)

    def one(key: Any, **how: Any) -> tx.Estimate:
        a = operator(matrix, SYMMETRIC)
        return tx.spectral_density(a, grid, key, width=width, **how)

    block = over_keys(one, KEY, keys)
    plain = over_keys(partial(one, reorthogonalise=False), KEY, keys)
    weights = block.value[:, -6:] / truth[None, -6:] - 1
    assert jnp.all(abs(weights) < 1e-3)
    assert jnp.all(
        jnp.mean((plain.value[:, -6:] / truth[None, -6:] - 1) ** 2, axis=0) > 0.01
    )
    of_bulk = [jnp.mean((e.value - truth[None])[:, :-6] ** 2) for e in (block, plain)]
    if keys > 2:
        assert of_bulk[0] <= of_bulk[1]
        assert jnp.all(jnp.mean(contains(block, truth[None]), axis=0) >= 0.88)
