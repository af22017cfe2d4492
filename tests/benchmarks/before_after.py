"""Whether a change of structure changed a number: every estimator kept before and after.

    python tests/benchmarks/before_after.py keep FILE.npz [--times]
    python tests/benchmarks/before_after.py compare BEFORE.npz AFTER.npz

`keep` writes what fixed keys give: value, standard error, matvecs and degrees of freedom of
each case, its derivative along a direction, and the slopes of its value in the matrix. With
`--times` it keeps seconds instead: the first eager call, the second with an operator made
anew, the compilation of the jitted call, and the median of its runs. `compare` prints what
differs, relative to the largest entry, and ratios of seconds.

Imports nothing from the tests, so that it runs against any checkout: PYTHONPATH=CHECKOUT.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np

import traceax as tx

N, LARGE = 90, 1000
PSD, SYMMETRIC = lx.positive_semidefinite_tag, lx.symmetric_tag
Run = Callable[[Any, Any], Any]


class Kind(NamedTuple):
    """A matrix, and the operator made of it."""

    matrix: Callable[[int], np.ndarray]
    operator: Callable[[Any], lx.AbstractLinearOperator]


def basis(n: int, dtype: Any) -> np.ndarray:
    rng = np.random.default_rng(1)
    drawn = rng.standard_normal((n, n)) + 0j
    if np.issubdtype(dtype, np.complexfloating):
        drawn = drawn + 1j * rng.standard_normal((n, n))
    frame = np.linalg.qr(drawn)[0]
    whole = np.issubdtype(dtype, np.complexfloating)
    return (frame if whole else np.real(frame)).astype(dtype)


def of_spectrum(eigenvalues: Callable[[Any], Any], dtype: Any = float) -> Callable:
    def make(n: int) -> np.ndarray:
        frame = basis(n, dtype)
        values = eigenvalues(np.arange(1.0, n + 1))
        matrix = frame @ (values[:, None] * frame.conj().T)
        return ((matrix + matrix.conj().T) / 2).astype(dtype)

    return make


def general(dtype: Any) -> Callable[[int], np.ndarray]:
    def make(n: int) -> np.ndarray:
        left, right = basis(n, dtype), basis(n, dtype)[::-1]
        matrix = left @ (np.arange(1.0, n + 1)[:, None] ** -1 * right)
        return (matrix + np.eye(n)).astype(dtype)

    return make


def function(*tags: Any) -> Callable[[Any], lx.AbstractLinearOperator]:
    def wrap(matrix: Any) -> lx.AbstractLinearOperator:
        structure = jax.ShapeDtypeStruct(matrix.shape[1:], matrix.dtype)
        return lx.FunctionLinearOperator(lambda v: matrix @ v, structure, tags)

    return wrap


def two_leaves(matrix: Any) -> lx.AbstractLinearOperator:
    cut = matrix.shape[0] // 3
    structure = jax.eval_shape(lambda: {"a": matrix[0, :cut], "b": matrix[0, cut:]})

    def apply(v: Any) -> Any:
        product = matrix @ jnp.concatenate([v["a"], v["b"]])
        return {"a": product[:cut], "b": product[cut:]}

    return lx.FunctionLinearOperator(apply, structure, PSD)


def decaying(i: Any) -> Any:
    return 1 / i + 0.01


KINDS = {
    "semidefinite": Kind(of_spectrum(decaying), function(PSD)),
    "symmetric": Kind(of_spectrum(lambda i: np.cos(i) + 0.2), function(SYMMETRIC)),
    "general": Kind(general(float), function()),
    "complex": Kind(of_spectrum(decaying, complex), function(PSD)),
    "complex general": Kind(general(complex), function()),
    "single": Kind(of_spectrum(decaying, np.float32), function(PSD)),
    "leaves": Kind(of_spectrum(decaying), two_leaves),
    "rank 5": Kind(of_spectrum(lambda i: 1.0 * (i <= 5)), function(PSD)),
    "small": Kind(of_spectrum(lambda i: 1e-150 * decaying(i)), function(PSD)),
    "matrix": Kind(
        of_spectrum(decaying), lambda m: lx.MatrixLinearOperator(m, frozenset({PSD}))
    ),
}

ANY = ("semidefinite", "symmetric", "general", "complex general", "single", "leaves")
DEFINITE = ("semidefinite", "complex", "single", "leaves")
EDGES = ("rank 5", "small", "complex")


class Case(NamedTuple):
    name: str
    run: Run
    kinds: tuple[str, ...]


def budget(name: str, num_matvecs: int, **options: Any) -> Run:
    return lambda operator, key: getattr(tx, name)(operator, key, num_matvecs, **options)


def log(x: Any) -> Any:
    return jnp.log(x)


def of_function(name: str, *args: Any, **options: Any) -> Run:
    options = {"num_probes": 5, "num_steps": 7, **options}
    return lambda operator, key: getattr(tx, name)(operator, *args, key, **options)


def at_point(name: str, fn: Callable, num_matvecs: int) -> Run:
    def run(operator: Any, key: Any) -> Any:
        matrix = operator.as_matrix()
        return getattr(tx, name)(fn, matrix[0], key, num_matvecs, args=matrix)

    return run


def field(x: Any, matrix: Any) -> Any:
    return matrix @ jnp.sin(3 * x)


def energy(x: Any, matrix: Any) -> Any:
    return jnp.sum(jnp.sin(3 * (matrix @ x)))


def density(operator: Any, key: Any) -> Any:
    dtype = jnp.finfo(jax.tree.leaves(operator.in_structure())[0].dtype).dtype
    grid = jnp.linspace(0.0, 1.2, 7, dtype=dtype)
    return of_function("spectral_density", grid)(operator, key)


def tracked(operator: Any, key: Any) -> Any:
    tracker = tx.deltashift(8)
    first, second = jax.random.split(key)
    state = tracker.init(operator, first)
    return tracker.update(operator, state, second)[0]


def hutchinson(apply: Any, probes: Any) -> Any:
    k = probes.shape[1]
    samples = jnp.sum(probes.conj() * apply(probes), axis=0)
    return jnp.mean(samples), jnp.std(samples, ddof=1) / k**0.5, (probes / k, probes)


def moments(operator: Any, key: Any) -> Any:
    return tx.slq_trace(
        operator,
        lambda x: (jnp.exp(-x), x * jnp.exp(-x)),
        key,
        num_probes=5,
        num_steps=7,
        combine=lambda t: t[1] / t[0],
    )


def likelihood(operator: Any, key: Any) -> Any:
    structure = operator.in_structure()
    y = jax.tree.map(lambda s: jnp.cos(jnp.arange(s.shape[0])).astype(s.dtype), structure)
    return tx.inv_quad_logdet(operator, y, key, 60, shift=0.5)


def squared(operator: Any, key: Any) -> Any:
    return tx.unbiased_square(lambda k: tx.hutchinson_trace(operator, k, 4), key)


def pooled(operator: Any, key: Any) -> Any:
    runs = [tx.hutchinson_trace(operator, k, 7) for k in jax.random.split(key, 3)]
    return tx.pool(runs)


def ring(n: int) -> np.ndarray:
    return np.roll(np.eye(n), 1, axis=0) + np.roll(np.eye(n), -1, axis=0)


def coloured(name: str, num_matvecs: int) -> Run:
    def run(operator: Any, key: Any) -> Any:
        try:
            sampler = tx.probing(ring(N), power=4)
        except TypeError:  # Version 2.0.0 of before took only colours.
            sampler = tx.probing(tx.colouring(ring(N), power=4))
        return getattr(tx, name)(operator, key, num_matvecs, sampler=sampler)

    return run


def cases() -> Iterator[Case]:
    for name, spent in {"trace": 20, "hutchinson_trace": 6, "hutchpp_trace": 12}.items():
        yield Case(name, budget(name, spent), ANY + EDGES)
    yield Case("na_hutchpp_trace", budget("na_hutchpp_trace", 12), ANY + EDGES)
    yield Case("xtrace", budget("xtrace", 12), ANY + EDGES)
    yield Case("xnystrace", budget("xnystrace", 10), DEFINITE + EDGES)
    for name, spent in {"diagonal": 20, "hutchinson_diagonal": 6, "diagpp": 12}.items():
        yield Case(name, budget(name, spent), ANY + EDGES)
    yield Case("xdiag", budget("xdiag", 12), ANY + EDGES)
    yield Case("xnysdiag", budget("xnysdiag", 10), DEFINITE + EDGES)
    yield Case("row_norms_squared", budget("row_norms_squared", 12), (*ANY, "rank 5"))
    norm = budget("frobenius_norm_squared", 12)
    yield Case("frobenius_norm_squared", norm, (*ANY, "rank 5"))
    yield Case("leaf_traces", budget("leaf_traces", 12), ("leaves", "general"))
    for name in ("trace", "diagonal", "xtrace", "xnysdiag", "frobenius_norm_squared"):
        yield Case(f"{name}, 4", budget(name, 4), ("semidefinite",))
        yield Case(f"{name}, exact", budget(name, 2 * N), ("semidefinite",))
    for name in ("hutchinson_trace", "hutchinson_diagonal"):
        yield Case(f"{name}, batches", budget(name, 9, batch_size=4), ("symmetric",))
    for sampler in (tx.normal, tx.orthogonal, tx.rademacher, tx.sphere):
        run = budget("hutchinson_trace", 6, sampler=sampler)
        yield Case(f"hutchinson_trace, {sampler.__name__}", run, ("general", "single"))
    yield Case("xtrace, signs", budget("xtrace", 12, sampler=tx.rademacher), ("general",))
    yield Case("xdiag, sphere", budget("xdiag", 12, sampler=tx.sphere), ("general",))
    for name in ("hutchinson_trace", "hutchinson_diagonal"):
        for spent in (5, 15):
            run = coloured(name, spent)
            yield Case(f"{name}, {spent} coloured", run, ("semidefinite", "general"))
    for name in ("trace", "diagonal"):
        run = budget(name, 12, pattern=ring(N))
        yield Case(f"{name}, pattern", run, ("semidefinite",))
    adaptive = partial(tx.adaptive_trace, rtol=0.05, max_matvecs=64)
    yield Case("adaptive_trace", adaptive, ("semidefinite", "general", "single"))
    yield Case("deltashift", tracked, ("semidefinite", "general", "single"))
    custom = partial(tx.custom_trace, hutchinson, num_probes=6)
    yield Case("custom_trace", lambda a, k: custom(a, k), ("semidefinite", "general"))
    yield Case("pool", pooled, ("semidefinite", "general", "single"))
    yield Case("unbiased_square", squared, ("semidefinite",))

    trace = lambda a, k: tx.function_trace(a, log, k, 60)  # noqa: E731
    yield Case("function_trace", trace, DEFINITE)
    exp = lambda a, k: tx.function_trace(a, jnp.exp, k, 60)  # noqa: E731
    yield Case("function_trace, exp", exp, ("symmetric", "rank 5"))
    yield Case("logdet", budget("logdet", 60, shift=0.1), (*DEFINITE, "rank 5", "matrix"))
    yield Case("logdet, 240", budget("logdet", 80), ("semidefinite",))
    yield Case("inv_quad_logdet", likelihood, ("semidefinite", "single", "leaves"))
    yield Case("slq_trace", of_function("slq_trace", log), DEFINITE)
    yield Case("slq_trace, thermal", moments, ("symmetric",))
    batches = of_function("slq_trace", log, batch_size=2)
    yield Case("slq_trace, batches", batches, ("semidefinite",))
    yield Case("arnoldi_trace", of_function("arnoldi_trace", log), ("general", "complex"))
    yield Case("function_diagonal", of_function("function_diagonal", log), DEFINITE)
    yield Case(
        "schatten_norm", of_function("schatten_norm", 1), ("semidefinite", "general")
    )
    yield Case("spectral_density", density, ("semidefinite", "single"))
    for name, fn in {"divergence": field, "laplacian": energy}.items():
        for spent in (4, 12, 30):
            run = at_point(name, fn, spent)
            yield Case(f"{name}, {spent}", run, ("semidefinite", "single"))
    yield Case("biharmonic", at_point("biharmonic", energy, 6), ("semidefinite",))
    for spent in (4, 30):
        run = at_point("hessian_diagonal", energy, spent)
        yield Case(f"hessian_diagonal, {spent}", run, ("semidefinite",))


def loss(estimate: Any) -> Any:
    """A real number that every value of an estimate matters to."""
    single = isinstance(estimate, tx.Estimate)
    estimates: Any = estimate if single else estimate.inv_quad
    rest = 0.0 if single else loss(getattr(estimate, "logdet", None))
    leaves = jax.tree.leaves(estimates.value)
    flat = jnp.concatenate([jnp.atleast_1d(leaf).ravel() for leaf in leaves])
    weights = 1.5 + jnp.cos(jnp.arange(flat.size))
    return rest + jnp.sum((jnp.real(flat) + 0.3 * jnp.imag(flat)) * weights)


def told(estimate: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(estimate, tx.Estimate):
        yield from ((f"inv_quad {name}", x) for name, x in told(estimate.inv_quad))
        yield from ((f"logdet {name}", x) for name, x in told(estimate.logdet))
        yield from (("solution", x) for x in jax.tree.leaves(estimate.solution))
        return
    for i, leaf in enumerate(jax.tree.leaves(estimate.value)):
        yield f"value {i}", leaf
    for i, leaf in enumerate(jax.tree.leaves(estimate.standard_error)):
        yield f"error {i}", leaf
    yield "matvecs", estimate.num_matvecs
    yield "degrees", estimate.degrees_of_freedom


def numbers(case: Case, kind: Kind) -> Iterator[tuple[str, Any]]:
    matrix = jnp.asarray(kind.matrix(N))
    direction = jnp.asarray(basis(N, matrix.dtype) / N) * jnp.max(jnp.abs(matrix))
    direction = (direction + direction.conj().T).astype(matrix.dtype)
    key = jax.random.key(7)

    def run(matrix: Any) -> Any:
        return case.run(kind.operator(matrix), key)

    @eqx.filter_jit
    def every(matrix: Any, direction: Any) -> Any:
        estimate = run(matrix)
        _, along = jax.jvp(lambda m: loss(run(m)), (matrix,), (direction,))
        return estimate, along, jax.grad(lambda m: loss(run(m)))(matrix)

    estimate, along, slopes = every(matrix, direction)
    yield from told(estimate)
    yield "jvp", along
    yield "vjp", slopes
    if case.kinds[0] == "semidefinite" and kind is KINDS["semidefinite"]:
        yield from ((f"eager {name}", x) for name, x in told(run(matrix)))


def seconds(case: Case, kind: Kind) -> Iterator[tuple[str, float]]:
    matrix, key = jnp.asarray(kind.matrix(LARGE)), jax.random.key(7)

    def timed(fn: Callable[[], Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(eqx.filter(fn(), eqx.is_array))
        return time.perf_counter() - start

    yield "first", timed(lambda: case.run(kind.operator(matrix), key))
    yield "second", timed(lambda: case.run(kind.operator(matrix), key))
    jax.clear_caches()
    jitted: Any = eqx.filter_jit(lambda matrix, key: case.run(kind.operator(matrix), key))
    start = time.perf_counter()
    compiled = jitted.lower(matrix, key).compile()
    yield "compile", time.perf_counter() - start
    runs = [timed(lambda: compiled(matrix, key)) for _ in range(10)]
    yield "run", statistics.median(runs)
    jax.clear_caches()


def timed_cases() -> Iterator[Case]:
    semidefinite, symmetric = ("semidefinite",), ("symmetric",)
    for name in (
        "trace",
        "hutchinson_trace",
        "hutchpp_trace",
        "na_hutchpp_trace",
        "xtrace",
    ):
        yield Case(name, budget(name, 100), symmetric)
    for name in ("diagonal", "hutchinson_diagonal", "diagpp", "xdiag", "row_norms_squared"):
        yield Case(name, budget(name, 100), symmetric)
    for name in ("xnystrace", "xnysdiag", "frobenius_norm_squared", "logdet"):
        yield Case(name, budget(name, 100), semidefinite)
    yield Case("leaf_traces", budget("leaf_traces", 100), ("leaves",))
    trace = lambda a, k: tx.function_trace(a, log, k, 240)  # noqa: E731
    yield Case("function_trace", trace, semidefinite)
    counts = {"num_probes": 10, "num_steps": 24}
    yield Case("slq_trace", of_function("slq_trace", log, **counts), semidefinite)
    yield Case("inv_quad_logdet", likelihood, semidefinite)
    diagonal = of_function("function_diagonal", log, **counts)
    yield Case("function_diagonal", diagonal, semidefinite)
    yield Case("adaptive_trace", partial(tx.adaptive_trace, rtol=0.01), semidefinite)


def keep(file: str, only_times: bool) -> None:
    jax.config.update("jax_enable_x64", True)
    kept: dict[str, Any] = {}
    for case in timed_cases() if only_times else cases():
        for kind in case.kinds:
            start = time.perf_counter()
            found = (seconds if only_times else numbers)(case, KINDS[kind])
            for name, number in found:
                kept[f"{case.name} | {kind} | {name}"] = np.asarray(number)
            print(f"{case.name} | {kind}: {time.perf_counter() - start:.1f} s", flush=True)
        jax.clear_caches()
    np.savez_compressed(file, **kept)


def difference(before: np.ndarray, after: np.ndarray) -> float:
    """The largest, relative to the largest number; infinite if only one is finite."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return np.inf
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    if np.all(same):
        return 0.0
    if not np.all(np.isfinite(before[~same]) & np.isfinite(after[~same])):
        return np.inf
    size = max(np.max(np.abs(before[~same])), np.max(np.abs(after[~same])))
    return float(np.max(np.abs(before[~same] - after[~same])) / size)


def compare(one: str, other: str) -> None:
    before, after = np.load(one), np.load(other)
    timed = any(name.endswith("| compile") for name in before)
    for name in before:
        if name not in after:
            print(f"only before: {name}")
        elif timed:
            print(f"{name}: {before[name]:.3f} -> {after[name]:.3f} s, "
                  f"{after[name] / before[name]:.2f} times")  # fmt: skip
        elif found := difference(before[name], after[name]):
            shown = f"{before[name]} -> {after[name]}" if before[name].ndim == 0 else ""
            print(f"{name}: {found:.1e} {shown}")
    equal = sum(n in after and difference(before[n], after[n]) == 0 for n in before)
    print(f"{equal} of {len(before)} equal to the last digit, {len(after)} after")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("keep")
    first.add_argument("file")
    first.add_argument("--times", action="store_true")
    second = commands.add_parser("compare")
    second.add_argument("before")
    second.add_argument("after")
    given = parser.parse_args()
    if given.command == "keep":
        keep(given.file, given.times)
    else:
        compare(given.before, given.after)
