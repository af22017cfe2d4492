"""One run, many answers: a finished run gives what a call of its own gives."""

from collections.abc import Callable
from functools import partial
from itertools import product
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
from tests.helpers import close, contains, is_unbiased, nightly, over_keys, refused, slow
from tests.matrices import hermitian, numbers
from tests.wrappers import PSD, function, matrix_free

KEY = jax.random.key(0)
N = 120
SPECTRUM = 2.0 ** -np.arange(N, dtype=float) * 8 + np.linspace(0.05, 1, N)
BUDGET = 60
MATRIX = hermitian(SPECTRUM)
GRID = jnp.linspace(0.0, 4.0, 5)
SYMMETRIC = lx.symmetric_tag


def thermal(s: Any, x: Any) -> Any:
    return x * jnp.exp(-s * x), jnp.exp(-s * x)


SHAPE: dict[str, Any] = {"num_probes": 7, "num_steps": 8}
Answer = Callable[..., tx.Estimate]
ANSWERS: dict[str, Answer] = {
    "shifts": lambda s, *of: tx.logdet(*of, shift=jnp.stack([s, 2 * s, 3 * s])),
    "energy": lambda s, a, *of: tx.function_trace(
        a, partial(thermal, s), *of, combine=lambda t: t[0] / t[1]
    ),
    "inverse": lambda s, a, *of, **how: tx.function_diagonal(
        a, lambda x: s / x, *of, **how
    ),
    "density": lambda s, a, *of, **how: tx.spectral_density(
        a, s * GRID.astype(s.dtype), *of, width=0.5, **how
    ),
    "own grid": lambda s, a, *of, **how: tx.spectral_density(a, None, *of, width=s, **how),
}
# The choices that a run makes, or that must be made for it.
CHOICES: dict[str, dict[str, Any]] = {"density": SHAPE, "own grid": SHAPE}
CHOICES |= {"inverse": {"sampler": tx.sphere}}


def operator(matrix: Any, tags: Any = PSD) -> lx.AbstractLinearOperator:
    return function(matrix, tags)


def of_operator(name: str, s: Any, a: Any, key: Any) -> tx.Estimate:
    return ANSWERS[name](s, a, key, BUDGET, **CHOICES.get(name, {}))


def of_run(name: str, s: Any, a: Any, key: Any) -> tx.Estimate:
    return ANSWERS[name](s, tx.krylov(a, key, BUDGET, **CHOICES.get(name, {})))


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


PLAIN, BARE = ("float64", PSD), ("float64", SYMMETRIC)
SINGLE, COMPLEX = ("float32", PSD), ("complex128", PSD)
QUICK: list[Any] = [("energy", PLAIN), ("own grid", PLAIN)]
SLOW: list[Any] = [("shifts", PLAIN), ("energy", BARE), ("own grid", SINGLE)]
SLOW += [("inverse", COMPLEX)]
CASES = [*QUICK, *(slow(*case) for case in SLOW)]
for case in product(ANSWERS, (PLAIN, BARE, SINGLE, COMPLEX)):
    CASES += [] if case in [*QUICK, *SLOW] else [nightly(*case)]


@pytest.mark.parametrize(("name", "kind"), CASES, ids=str)
def test_answers_are_those_of_the_operator(name: str, kind: Any) -> None:
    """Values and error bars to 1e-9, gradients in the operator and in f to 1e-6."""
    dtype, tags = kind
    matrix = hermitian(SPECTRUM, complex if "complex" in dtype else float).astype(dtype)
    x = jnp.array([1.0, 0.7], matrix.real.dtype)
    both = (summed(partial(of, name), tags)(x, matrix, KEY) for of in (of_run, of_operator))
    ((value, found), gradients), ((want, expected), wanted) = both
    scale = 1e4 if dtype == "float32" else 1
    close(value, want, scale * 1e-9)
    close(gradients, wanted, scale * 1e-6)
    close(found.standard_error, expected.standard_error, scale * 1e-6)
    for fact in ("num_matvecs", "degrees_of_freedom", "method"):
        assert getattr(found, fact) == getattr(expected, fact)


def counted(n: int) -> tuple[lx.AbstractLinearOperator, list[int]]:
    """An operator that counts its matvecs."""
    matrix, count = np.asarray(hermitian(np.linspace(1, 2, n))), [0]

    def product(v: Any) -> Any:
        count[0] += 1
        return matrix @ np.asarray(v)

    def apply(v: Any) -> Any:
        return jax.pure_callback(product, v, v, vmap_method="sequential")

    return matrix_free(apply, n, PSD), count


READERS: list[Any] = [tx.logdet, lambda run: tx.spectral_density(run, None)]
READERS += [lambda run: tx.function_diagonal(run, jnp.sqrt)]
READERS += [lambda run: tx.function_trace(run, jnp.exp)]
READERS += [lambda run: tx.spectral_density(run, GRID)]


@pytest.mark.parametrize(
    ("n", "some"), [(40, 3), slow(120, 3), slow(90, 5), nightly(120, 5)]
)
def test_all_answers_take_the_matvecs_of_one(n: int, some: int) -> None:
    """The budget of 90 is below n, or reaches it, or is not needed."""
    a, count = counted(n)
    run = tx.krylov(a, KEY, 90)
    jax.block_until_ready(run)
    first = count[0]
    answers = jax.block_until_ready([reader(run) for reader in READERS[:some]])
    assert count[0] == first == run.num_matvecs == min(n, 90)
    assert {int(answer.num_matvecs) for answer in answers} == {first}
    assert {answer.method == "exact" for answer in answers} == {n <= 90}


def test_stored_and_diagonal_operators_are_exact() -> None:
    for stored in (
        lx.MatrixLinearOperator(MATRIX, PSD),
        lx.DiagonalLinearOperator(jnp.asarray(SPECTRUM)),
    ):
        run = tx.krylov(stored, KEY)
        assert run.num_matvecs == 0
        assert "exact" in repr(run)
        close(tx.logdet(run).value, np.sum(np.log(SPECTRUM)), 1e-12)
        assert tx.spectral_density(run, None).method == "exact"
    whole = lambda d: tx.krylov(function(d * MATRIX, PSD), KEY, N)  # noqa: E731
    close(jax.grad(lambda d: tx.logdet(whole(d)).value)(1.0), float(N), 1e-12)


def test_pytrees_are_exact_in_their_own_order() -> None:
    """A small operator on a pytree keeps its matrix."""
    matrix = hermitian(np.linspace(1, 2, 12))

    def apply(v: Any) -> Any:
        image = matrix @ jnp.concatenate([v["b"], v["a"].ravel()])
        return {"a": image[2:].reshape(2, 5), "b": image[:2]}

    space = jax.eval_shape(lambda: {"a": jnp.zeros((2, 5)), "b": jnp.zeros(2)})
    run = tx.krylov(lx.FunctionLinearOperator(apply, space, PSD), KEY, 30)
    found = tx.function_diagonal(run, lambda x: 1 / x).value
    want = np.diagonal(np.linalg.inv(matrix))
    close(found["b"], want[:2], 1e-12)
    close(found["a"].ravel(), want[2:], 1e-12)


def run_of(matrix: Any) -> tx.Krylov:
    return tx.krylov(operator(matrix), KEY, BUDGET)


def logdet(run: tx.Krylov, shift: Any) -> Any:
    return tx.logdet(run, shift=shift).value


def test_a_run_goes_to_disk_and_back(tmp_path: Path) -> None:
    run, shifts = run_of(MATRIX), jnp.array([0.1, 0.2, 0.4])
    eqx.tree_serialise_leaves(tmp_path / "run", run)
    like = eqx.filter_eval_shape(run_of, MATRIX)
    loaded = eqx.tree_deserialise_leaves(tmp_path / "run", like)
    close(jax.jit(logdet)(loaded, shifts), logdet(run, shifts), 1e-12)


@pytest.mark.slow
def test_a_run_goes_through_loops_and_maps() -> None:
    run, shifts = run_of(MATRIX), jnp.array([0.1, 0.2, 0.4])
    want = logdet(run, shifts)
    step = lambda run, shift: (run, logdet(run, shift))  # noqa: E731
    for found in (jax.vmap(logdet, (None, 0)), lambda *x: jax.lax.scan(step, *x)[1]):
        close(jax.jit(found)(run, shifts), want, 1e-9)
    several = jax.jit(jax.vmap(lambda s: run_of(s * MATRIX)))(jnp.array([1.0, 2.0]))
    found = jax.jit(jax.vmap(lambda run: logdet(run, 0.0)))(several)
    close(found[1] - found[0], N * np.log(2), 1e-9)


@pytest.mark.parametrize(
    ("derivative", "constant"), [(jax.grad, True), nightly(jax.hessian, False)]
)
def test_derivatives_of_a_run(derivative: Any, constant: bool) -> None:
    """A constant run leaves the derivative along its operator, which by `tree_at` may be
    another one than at first."""
    held = run_of(MATRIX)

    def of_run(x: Any) -> Any:
        run = run_of(x[0] * MATRIX)
        if constant:
            run = eqx.tree_at(lambda r: r.operator.fn.arrays[0], held, x[0] * MATRIX)
        return logdet(run, x[1])

    def direct(x: Any) -> Any:
        return tx.logdet(operator(x[0] * MATRIX), KEY, BUDGET, shift=x[1]).value

    x = jnp.array([1.0, 0.1])
    tolerance = 1e-9 if constant else 1e-6
    close(jax.jit(derivative(of_run))(x), jax.jit(derivative(direct))(x), tolerance)


@pytest.mark.parametrize("guessed", [False, slow(True)])
def test_likelihoods_from_a_run(guessed: bool) -> None:
    """For any right-hand sides, with gradients; a guess saves all steps."""
    y = numbers((2, N))
    want = np.linalg.solve(np.asarray(MATRIX) + 0.1 * np.eye(N), y.T).T
    how: Any = {"shift": 0.1, "guess": want if guessed else None}

    def form(t: Any) -> Any:
        both = tx.inv_quad_logdet(run_of(t * MATRIX), y, **how)
        return both.inv_quad.value, both

    (value, both), gradient = jax.jit(jax.value_and_grad(form, has_aux=True))(1.0)
    close(both.solution, want, 1e-5)
    close(value, np.sum(y * want), 1e-9)
    close(gradient, -np.sum(want @ MATRIX * want), 1e-5)
    close(both.logdet.value, logdet(run_of(MATRIX), 0.1), 1e-9)
    assert (both.inv_quad.num_matvecs - both.logdet.num_matvecs <= 4) == guessed


TILTED = MATRIX + jnp.diag(jnp.linspace(0.0, 2.0, N))


def run_from_signs(key: Any) -> tx.Krylov:
    return tx.krylov(operator(TILTED), key, BUDGET, sampler=tx.rademacher)


def test_diagonals_from_signs_are_those_of_the_operator() -> None:
    found = tx.function_diagonal(run_from_signs(KEY), lambda x: 1 / x)
    want = tx.function_diagonal(operator(TILTED), lambda x: 1 / x, KEY, BUDGET)
    close(found.value, want.value, 1e-10)


@pytest.mark.slow
def test_traces_from_signs_are_unbiased() -> None:
    trace = lambda key: tx.function_trace(run_from_signs(key), jnp.sqrt)  # noqa: E731
    estimates = over_keys(trace, KEY, 200)
    truth = np.sum(np.sqrt(np.linalg.eigvalsh(TILTED)))
    assert is_unbiased(estimates.value, truth, 4.0)
    assert jnp.mean(contains(estimates, truth)) >= 0.9


def test_messages() -> None:
    run: Any = run_of(MATRIX)
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
    identity = lx.IdentityLinearOperator(run.operator.in_structure())
    bare = tx.Whitening(identity, jnp.zeros(()))
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


@pytest.mark.parametrize("keys", [2, nightly(40)])
def test_weights_of_separated_eigenvalues(keys: int) -> None:
    """A bulk on [0, 1] and six eigenvalues, n = 400: their weights have no noise."""
    n, width = 400, 0.1
    spectrum = np.append(np.linspace(0, 1, n - 6), OUTLIERS)
    matrix = hermitian(spectrum)
    grid = jnp.append(jnp.linspace(-0.3, 1.3, 40), OUTLIERS)
    bumps = jnp.exp(-(((grid[:, None] - spectrum[None]) / width) ** 2) / 2)
    truth = jnp.mean(bumps, axis=1)[None] / (width * (2 * jnp.pi) ** 0.5)

    def one(key: Any, **how: Any) -> tx.Estimate:
        a = operator(matrix, SYMMETRIC)
        return tx.spectral_density(a, grid, key, width=width, **how)

    block = over_keys(one, KEY, keys)
    assert jnp.all(abs(block.value / truth - 1)[:, -6:] < 1e-3)
    if keys > 2:
        plain = over_keys(partial(one, reorthogonalise=False), KEY, keys)
        assert jnp.all(jnp.mean((plain.value / truth - 1)[:, -6:] ** 2, axis=0) > 0.01)
        of_bulk = [jnp.mean((e.value - truth)[:, :-6] ** 2) for e in (block, plain)]
        assert of_bulk[0] <= of_bulk[1]
        assert jnp.all(jnp.mean(contains(block, truth), axis=0) >= 0.88)


def test_the_budget_beside_probes_or_steps() -> None:
    """It pays for the probes that test the quadrature, too: six, with colours."""
    colours = tx.probing(np.arange(N) % 5)
    run = partial(tx.function_diagonal, operator(MATRIX), jnp.exp, KEY, sampler=colours)
    for how, least in (({"num_steps": 3}, 3 * 7), ({"num_probes": 5}, 5 + 6)):
        words = rf"function_diagonal\(num_matvecs=.*at least {least}.*got {least - 1}"
        refused(ValueError, words, run, num_matvecs=least - 1, **how)
