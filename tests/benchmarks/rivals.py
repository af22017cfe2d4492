"""Methods published since 2025 that compete with this library's, at equal matvecs.

`python -m tests.benchmarks.rivals [--keys 24]`, from the root of the repository; float64.
Each method is written here as simply as it can be. Entries are relative errors, root mean
square over the keys, of vectors in the Euclidean norm. *ratio* is the best rival's over
that of the first column, which is this library's choice; `!` and a name mark a rival that
is better by a tenth or more, and a ratio is uncertain by 10 to 20 %. A dash: the method
does not apply. Of *forward* and *Chebyshev* the best of three or five shapes counts, chosen
by the errors: more than a user has. After a value stands its derivative in a *shift* of A,
in a *scale* (of log det(A + c I) it is n less c times the former, so the ratio is the same)
and in a scale of half of A's *rows* and columns.

- *whole Krylov*: Hallman (2025), arXiv:2512.02316. From its abstract: XTrace that deflates
  by the whole Krylov space of its probes. Order of products and leave-one-out are worked
  out here. Its test matrices were not at hand.
- *FlexTrace*: Madhavan, Alexanderian and Saibaba (2026), arXiv:2603.05721. From its
  abstract: exchangeable, one pass, tr f(A) from products with A alone, A semidefinite, f
  operator monotone, f(0) = 0. The formula is a reading of that: XNysTrace, but f(A) w is f
  of the whole Nystroem approximation, times w; f(x) = x gives XNysTrace. Of other f,
  n f(0) is set apart; derivatives are its own of f' and x f'. Its test matrices were not
  at hand; slow beyond 120 matvecs as written here.
- *one probe*, *detective*: Cortinovis and Toni (2026), arXiv:2601.05778. From its abstract
  and its authors' code, github.com/dantoni2000/log-det: a Nystroem preconditioner and one
  probe of 10 Lanczos steps; Algorithm 4.1, beta = 3/4. Its test matrices (*alg* to *Matern
  3/2*) at n = 600, not 4000. They are told the shift, `function_trace` only f. Derivatives
  of *one probe* are central differences with the same probes.
- *forward*: Singh, Barros and Li (2026), arXiv:2605.12801. From its abstract: the gradient
  reuses the Lanczos pass of the value. The formula, divided differences of f in the Ritz
  basis, is a reading of that; the value is stochastic Lanczos quadrature.
- *Chebyshev*: Matti, He, Kressner and Lam (2025), arXiv:2502.18626, Chebyshev-Nystroem++
  from its source, github.com/FMatti/parameter-trace, with as many samples as columns of the
  sketch, without the square root (its section 5 finds no need of it), and B^2 from products
  of blocks, which saves half of its matvecs. It is told the ends of the spectrum.
  *hamiltonian* is the matrix of its section 5.1.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, PRNGKeyArray

import traceax as tx
from tests.benchmarks import accuracy
from tests.benchmarks.spectra import Case, decays, gaussian, graphs, kernel, tortures

N = 600
LANCZOS, ZERO = 10, np.zeros(3)
Key = PRNGKeyArray
Apply = Callable[[Any, Any], Array]  # A_c v, of c and v
Method = Callable[[Any, Key], Array]
Methods = dict[str, list[Method]]
Matrix = Float[Array, "n k"]
Vector = Float[Array, " n"]


def whole_krylov(budget: int, spectrum: Vector, key: Key) -> Array:
    """Two blocks of Lanczos spend 2k matvecs, as XTrace does, and tell A on span[W, AW].
    With P_i on that of the probes but w_i, dimension 2k - 2,

        tr A = E[tr(P_i A P_i) + c_i r_i* A r_i],    r_i = (I - P_i) w_i.
    """
    k, n = budget // 2, len(spectrum)
    probes = tx.sphere(key, spectrum, k).T
    first, start = jnp.linalg.qr(probes)
    second = spectrum[:, None] * first
    for _ in range(2):
        second = jnp.linalg.qr(second - first @ (first.T @ second))[0]
    basis = jnp.hstack([first, second])
    small = basis.T @ (spectrum[:, None] * basis)
    start = jnp.pad(start, ((0, k), (0, 0)))
    following = small @ start
    following /= jnp.linalg.norm(following, axis=0)

    def without(i: Array) -> Array:
        others = (i + 1 + jnp.arange(k - 1)) % k
        space = jnp.linalg.qr(jnp.hstack([start[:, others], following[:, others]]))[0]
        rest = start[:, i] - space @ (space.T @ start[:, i])
        sample = (n - 2 * k + 2) * (rest @ small @ rest) / (rest @ rest)
        return jnp.sum(space * (small @ space)) + sample

    return jnp.mean(jax.vmap(without)(jnp.arange(k)))


def nystroem(apply: Apply, probes: Matrix) -> tuple[Matrix, Matrix]:
    """F and C^-1, where W* A W = C C* and A's approximation is F F*, F = A W C^-*. Without
    w_i it is F (I - g_i g_i*) F* with g_i along C^-1 e_i. A tiny shift is added to A."""
    sketch = jax.vmap(partial(apply, ZERO), 1, 1)(probes)
    sketch += jnp.finfo(sketch.dtype).eps * jnp.linalg.norm(sketch) * probes
    gram = probes.T @ sketch
    factor = jnp.linalg.cholesky((gram + gram.T) / 2)
    inverse = solve_triangular(factor, jnp.eye(len(gram)), lower=True)
    return solve_triangular(factor, sketch.T, lower=True).T, inverse


def flextrace(budget: int, apply: Apply, fn: Callable, shift: Any, key: Key) -> Array:
    """The mean over i of tr f(B_i) + w_i* (f(B) - f(B_i)) w_i, B_i the approximation
    without w_i and B with all: of f, of f' and of x f', each less its value at 0."""
    slope, probes = jax.grad(fn), jax.random.normal(key, (N, budget))
    constants = jnp.stack([fn(0.0), slope(0.0), 0.0])

    def levels(x: Array) -> Array:
        kept = jnp.maximum(x, 0)
        slopes = jax.vmap(slope)(kept)
        return jnp.stack([fn(kept), slopes, kept * slopes], axis=1) - constants

    half, inverse = nystroem(apply, probes)
    left, singular, right = jnp.linalg.svd(half, full_matrices=False)
    removed = singular[:, None] * (right @ (inverse / jnp.linalg.norm(inverse, axis=0)))
    inside = left.T @ probes

    def without(pair: Array) -> Array:
        (gone, probe), kept = pair, jnp.diag(singular**2)
        values, vectors = jnp.linalg.eigh(kept - jnp.outer(gone, gone))
        return (1 - (vectors.T @ probe) ** 2) @ levels(values)

    parts = jax.lax.map(without, jnp.stack([removed.T, inside.T], axis=1))
    whole = jnp.mean(inside**2, axis=1) @ levels(singular**2)
    return whole + jnp.mean(parts, axis=0) + N * constants


def lanczos(apply: Apply, start: Vector, num_steps: int) -> tuple[Matrix, Vector, Matrix]:
    """Basis, in rows, and Ritz values and vectors; they repeat when the basis ends."""
    basis = jnp.zeros((num_steps + 1, len(start))).at[0].set(start / jnp.linalg.norm(start))

    def step(j: Array, carry: tuple[Matrix, Matrix]) -> tuple[Matrix, Matrix]:
        basis, projection = carry
        image = apply(ZERO, basis[j])
        rest = image - (basis @ image) @ basis
        rest -= (basis @ rest) @ basis
        length = jnp.linalg.norm(rest)
        rest = jnp.where(length > 1e-12 * jnp.linalg.norm(image), rest / length, 0)
        return basis.at[j + 1].set(rest), projection.at[j].set(basis @ image)

    init = basis, jnp.zeros((num_steps, num_steps + 1))
    basis, projection = jax.lax.fori_loop(0, num_steps, step, init)
    lower = jnp.tril(projection[:, :-1])
    values, vectors = jnp.linalg.eigh(lower + jnp.tril(lower, -1).T)
    weights = vectors[0] ** 2
    values = jnp.where(weights > 1e-30, values, values[jnp.argmax(weights)])
    return basis[:-1], values, vectors


def one_probe(
    apply: Apply, half: Matrix, inverse: Matrix, starts: Matrix, shift: Array
) -> Array:
    """log det P + tr log(P^-1/2 (A + shift I) P^-1/2), P = F F* + shift I."""
    left, singular, _ = jnp.linalg.svd(half, full_matrices=False)
    shrink = jnp.sqrt(shift / (singular**2 + shift)) - 1

    def whiten(v: Vector) -> Vector:
        return (v + left @ (shrink * (left.T @ v))) / jnp.sqrt(shift)

    def preconditioned(c: Array, v: Vector) -> Vector:
        return whiten(apply(c, whiten(v)) + shift * whiten(v))

    def rest(start: Vector) -> Array:
        _, values, vectors = lanczos(preconditioned, start, LANCZOS)
        return start @ start * (vectors[0] ** 2 @ jnp.log(values))

    exact = N * jnp.log(shift) + jnp.sum(jnp.log1p(singular**2 / shift))
    return exact + jnp.mean(jax.vmap(rest)(starts))


def one_probe_slope(budget: int, apply: Apply, fn: Callable, shift: Any, key: Key) -> Array:
    """All matvecs but those of one probe on the Nystroem approximation."""
    first, second = jax.random.split(key)
    half, inverse = nystroem(apply, jax.random.normal(first, (N, budget - LANCZOS)))
    value = partial(one_probe, apply, half, inverse, jax.random.normal(second, (1, N)))
    slope = (value(shift * (1 + 1e-4)) - value(shift * (1 - 1e-4))) / (2e-4 * shift)
    return jnp.stack([value(shift), slope, N - shift * slope])


def detective(budget: int, apply: Apply, fn: Callable, shift: Any, key: Key) -> Array:
    """A share of the matvecs on the approximation first: if its error, estimated by leaving
    one out, falls so slowly that samples are worth more, they get the rest."""
    first, second = jax.random.split(key)
    rank, beta = budget - LANCZOS, 0.75
    probes = jax.random.normal(first, (N, rank))
    part = int(beta * rank)
    starts = jax.random.normal(second, (1 + (rank - part) // LANCZOS, N))

    def error(half: Matrix, inverse: Matrix) -> Array:
        lengths = jnp.sum((half @ inverse) ** 2, 0) / jnp.sum(inverse**2, 0) ** 2
        return jnp.sqrt(jnp.mean(lengths))

    some, mixed = (nystroem(apply, probes[:, :m]) for m in (int(beta * part), part))
    falls = (LANCZOS / ((1 - beta) * part + LANCZOS)) ** 0.5 * error(*some) >= error(*mixed)
    return jax.lax.cond(
        falls,
        lambda: one_probe(apply, *nystroem(apply, probes), starts[:1], shift),
        lambda: one_probe(apply, *mixed, starts, shift),
    )


def forward(
    shape: tuple[int, int], apply: Apply, fn: Callable, shift: Any, key: Key
) -> Array:
    """tr f(A_c) and its gradient in c at 0: of each probe, with Ritz pairs (t_i, u_i) and
    the probe's weights s_i, the sum of f[t_i, t_j] s_i s_j u_i* (dA) u_j."""
    probes = tx.sphere(key, jnp.zeros(N), shape[0])

    def one(probe: Vector) -> Array:
        basis, values, vectors = lanczos(apply, probe, shape[1])
        a, b = values[:, None], values[None, :]
        near = jnp.abs(a - b) <= 1e-6 * (jnp.abs(a) + jnp.abs(b))
        levels, slopes = fn(a), jax.vmap(jax.vmap(jax.grad(fn)))((a + b) / 2)
        quotients = jnp.where(near, slopes, (levels - levels.T) / jnp.where(near, 1, a - b))
        pairs = basis.T @ vectors
        left = pairs @ (quotients * jnp.outer(vectors[0], vectors[0]))

        def paired(c: Array) -> Array:
            return jnp.sum(left * jax.vmap(partial(apply, c), 1, 1)(pairs))

        value = vectors[0] ** 2 @ levels
        return N * jnp.concatenate([value, jax.grad(paired)(ZERO)])

    return jnp.mean(jax.vmap(one)(probes), axis=0)


def chebyshev(columns: int, data: Any, key: Key) -> Array:
    """B(t) = p_t(A), p_t interpolates the Gaussian about t: the trace of its Nystroem
    approximation and that of the rest by samples, with the same probes for all t."""
    (spectrum, grid, width), degree = data, 240 // (2 * columns)
    middle, radius = (spectrum.max() + spectrum.min()) / 2, jnp.ptp(spectrum) / 2
    turns = np.arange(degree + 1)
    halves = np.where((turns == 0) | (turns == degree), 0.5, 1.0)
    cosines = np.cos(np.pi / degree * np.outer(turns, turns))
    weights = 2 / degree * np.outer(halves, halves) * cosines
    nodes = middle + radius * jnp.cos(np.pi / degree * turns)
    coefficients = bumps(grid, nodes, width) @ weights / len(spectrum)
    start = jax.random.normal(key, (len(spectrum), 2 * columns))
    moved = (spectrum[:, None] - middle) / radius

    def following(carry: tuple[Matrix, Matrix], _: None) -> tuple[Any, Matrix]:
        return (carry[1], 2 * moved * carry[1] - carry[0]), carry[1]

    terms = jax.lax.scan(following, (moved * start, start), None, degree + 1)[1]
    probes = start[:, columns:]

    def at(row: Array) -> Array:
        images = jnp.tensordot(row, terms, 1)
        sketch, core = images[:, :columns], start[:, :columns].T @ images[:, :columns]
        values, vectors = jnp.linalg.eigh((core + core.T) / 2)
        kept = jnp.where(values > 1e-5 * values[-1], values, jnp.inf)
        half = sketch @ (vectors / jnp.sqrt(kept))
        samples = jnp.sum(probes * images[:, columns:]) - jnp.sum((half.T @ probes) ** 2)
        seen = jnp.trace(core) > 1e-5 * columns
        return jnp.where(seen, jnp.sum(half**2) + samples / columns, 0)

    return jax.lax.map(at, coefficients)


def bumps(grid: Vector, x: Vector, width: Any) -> Array:
    return jax.scipy.stats.norm.pdf(grid[:, None], x, width)


def problems() -> dict[str, tuple[Any, Any, Any]]:
    """Spectrum, shift, and function; if that is `None`, log(x + shift)."""
    i, rng = np.arange(1, N + 1.0), np.random.default_rng(0)
    x = rng.normal(size=N)
    apart, sparse = np.abs(x[:, None] - x), (rng.random((N, N)) < 0.01) * rng.random((N, N))
    heights, eigenvalues = np.repeat([100.0, 1.0, 0.01], N // 3) / i**2, np.linalg.eigvalsh
    logs = {
        "Matern 3-d + 1e-2": (kernel(lambda d: np.exp(-d / 0.5), N, 3), 1e-2),
        "Gauss 6-d + 1e-2": (kernel(gaussian(0.5), N, 6), 1e-2),
        "Gauss 2-d + 1e-4": (kernel(gaussian(0.2), N, 2), 1e-4),
        "uniform + 1": (i / N, 1.0),
        "alg": (1e2 / i**2, 1.0),  # From here on those of Cortinovis and Toni.
        "geom": (1e6 * np.exp(-0.1 * i), 1.0),
        "gaps": (1e6 * eigenvalues((sparse * heights) @ sparse.T), 1.0),
        "RBF": (1e2 * eigenvalues(np.exp(-((apart / 0.01) ** 2))), 1.0),
        "Matern 1/2": (1e2 * np.pi * eigenvalues(np.exp(-apart)), 1.0),
        "Matern 3/2": (5e3 * np.pi * eigenvalues((1 + apart) * np.exp(-apart)), 1.0),
    }
    names = "1/(x + .05), 1/i", "x/(x + .01), i^-1.5", "log(1 + x), .9^i"
    cases = {name: decays()[name] for name in names} | {
        "log(1 + x), 100/i": Case(100 / i, jnp.log1p),
        "exp, uniform": tortures()["exp, uniform"],
        "exp, power-law graph": graphs()["exp, power-law graph"],
    }
    logs = {f"log, {name}": (np.maximum(v, 0), s, None) for name, (v, s) in logs.items()}
    return logs | {name: (case.spectrum, 0.0, case.fn) for name, case in cases.items()}


def hamiltonian() -> np.ndarray:
    """-Laplacian and wells in periodic cubes of 6, 10 points a side."""
    points, eye, hops = 0.6 * np.arange(10), np.eye(10), np.roll(np.eye(10), 1, 0)
    line = (2 * eye - hops - hops.T) / 0.6**2
    well = sum(np.exp(-((points - 3 + 6 * cell) ** 2) / 8) for cell in range(-3, 4))
    sides = ((line, eye, eye), (eye, line, eye), (eye, eye, line))
    kinetic = sum(np.kron(np.kron(a, b), c) for a, b, c in sides)
    return np.linalg.eigvalsh(kinetic - 4 * np.diag(np.kron(np.kron(well, well), well)))


@cache
def over_keys(method: Method) -> Callable[[Any, Array], Array]:
    return jax.jit(lambda data, keys: jax.lax.map(partial(method, data), keys))


def errors(methods: Methods, data: Any, truth: Any, keys: Array) -> list[dict[str, float]]:
    """For each entry of the last axis of `truth`, of each method at its best shape."""
    columns = truth.shape[-1]

    def one(method: Method) -> np.ndarray:
        found = np.asarray(over_keys(method)(data, keys)).reshape(len(keys), -1, columns)
        squares = np.sum((found - truth) ** 2, 1) / np.sum(np.atleast_2d(truth) ** 2, 0)
        return np.sqrt(np.mean(squares, 0))

    none = np.full(columns, np.inf)
    best = {name: np.min([none, *map(one, them)], 0) for name, them in methods.items()}
    return [{name: error[j] for name, error in best.items()} for j in range(columns)]


def header(title: str, names: Any) -> str:
    return f"\n{title:<34}{''.join(f'{name:>15}' for name in names)}{'ratio':>10}"


def line(problem: str, found: dict[str, float], ours: int = 1) -> str:
    first, best = next(iter(found)), min(list(found)[ours:], key=lambda name: found[name])
    ratio = (found[best] + 1e-12) / (found[first] + 1e-12)
    cells = "".join(f"{x:>15.1e}".replace("inf", "  -") for x in found.values())
    return f"{problem:<34}{cells}{ratio:>10.2g}" + f" ! {best}" * bool(ratio <= 0.9)


def as_operator(apply: Any, n: int) -> lx.AbstractLinearOperator:
    structure = jax.ShapeDtypeStruct((n,), jnp.dtype(float))
    return lx.FunctionLinearOperator(apply, structure, lx.symmetric_tag)


def diagonal(x: Vector) -> lx.AbstractLinearOperator:
    return as_operator(lambda v: x * v, len(x))


def traces(keys: Array) -> Iterator[str]:
    i = np.arange(1, N + 1.0)
    few = np.append(np.linspace(900, 300, 10), np.linspace(0.5, 1, N - 10))
    spectra = accuracy.spectra(N) | {
        "1/i, both signs": (-1) ** i / i,
        "ten of 900 to 300, U(.5, 1)": few,
        "exp(-i/40)": np.exp(-i / 40),
        "hamiltonian": hamiltonian(),
    }

    def named(function: Any, budget: int, x: Vector, key: Key) -> Array:
        return function(diagonal(x), key=key, num_matvecs=budget).value

    ours = {"trace": tx.trace, "xtrace": tx.xtrace}
    ours["f(x) = x"] = partial(tx.function_trace, fn=lambda x: x)
    yield header("tr A, A symmetric; matvecs", [*ours, "whole Krylov"])
    for budget in (24, 60, 120):
        methods = {name: [partial(named, fn, budget)] for name, fn in ours.items()}
        methods["whole Krylov"] = [partial(whole_krylov, budget)]
        for name, spectrum in spectra.items():
            truth = np.array([np.sum(spectrum)])
            found = errors(methods, jnp.asarray(spectrum), truth, keys)[0]
            yield line(f"{name}; {budget}", found, len(ours))


def mine(budget: int, apply: Apply, fn: Callable, shift: Any, key: Key) -> Array:
    def value(c: Array) -> Array:
        return tx.function_trace(as_operator(partial(apply, c), N), fn, key, budget).value

    return jnp.append(*jax.value_and_grad(value)(jnp.asarray(ZERO)))


def of_functions(fn: Callable | None, positive: bool, budget: int) -> Methods:
    """The value, and the gradient in c at 0 of D ((1 + c_1) A) D + c_0 I, D = exp(c_2) on
    half of the rows and 1 on the others; of what a method gives."""

    def method(entries: Callable[..., Array], setting: Any) -> Method:
        def estimate(data: Any, key: Key) -> Array:
            def apply(c: Array, v: Vector) -> Array:
                rows = jnp.where(jnp.arange(N) < N // 2, jnp.exp(c[2]), 1)
                return rows * ((1 + c[1]) * (data[0] @ (rows * v))) + c[0] * v

            function = fn or (lambda x: jnp.log(x + data[1]))
            found = jnp.atleast_1d(entries(setting, apply, function, data[1], key))
            return jnp.append(found, jnp.full(4 - len(found), jnp.inf))

        return estimate

    return {
        "function_trace": [method(mine, budget)],
        "forward": [method(forward, (budget // steps, steps)) for steps in (8, 15, 30)],
        "FlexTrace": [method(flextrace, budget)] * (positive and budget <= 120),
        "one probe": [method(one_probe_slope, budget)] * (fn is None),
        "detective": [method(detective, budget)] * (fn is None),
    }


def functions(keys: Array) -> Iterator[str]:
    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(N, N)))[0]
    shares = np.sum(basis[: N // 2] ** 2, 0)
    for budget in (120, 240):
        logs = of_functions(None, True, budget)
        yield header(f"tr f(A), derivatives; {budget} matvecs", logs)
        for name, (spectrum, shift, fn) in problems().items():
            function, x = fn or (lambda x, s=shift: jnp.log(x + s)), jnp.asarray(spectrum)
            values, slopes = function(x), jax.vmap(jax.grad(function))(x)
            mixed = x * slopes
            truth = np.sum([values, slopes, mixed, 2 * shares * mixed], 1)
            methods = of_functions(fn, bool(spectrum.min() >= 0), budget) if fn else logs
            data = jnp.asarray((basis * spectrum) @ basis.T), shift
            found = errors(methods, data, truth, keys)
            for j, entry in enumerate(("", ": shift", ": scale", ": rows")):
                if fn or entry != ": scale":
                    yield line(name + entry, found[j])


def densities(keys: Array) -> Iterator[str]:
    spectra = {
        "hamiltonian": hamiltonian(),
        "semicircle": tortures()["exp(-x), semicircle"].spectrum,
        "power-law graph": graphs()["exp, power-law graph"].spectrum,
        "Matern 3-d": kernel(lambda d: np.exp(-d / 0.5), N, 3),
        "1/i, both signs": decays()["|x|, +- 1/i"].spectrum,
    }

    def ours(data: Any, key: Key) -> Array:
        x, grid, width = data
        return tx.spectral_density(diagonal(x), grid, key, 240, width=width).value

    rival = [partial(chebyshev, columns) for columns in (1, 2, 3, 4, 6)]
    methods = {"density": [ours], "Chebyshev": rival}
    yield header("density, width / span; 240 matvecs", methods)
    for name, spectrum in spectra.items():
        for part in (17, 34, 68):
            width = np.ptp(spectrum) / part
            grid = jnp.linspace(spectrum.min() - 3 * width, spectrum.max() + 3 * width, 100)
            truth = np.mean(bumps(grid, jnp.asarray(spectrum), width), 1)[:, None]
            data = jnp.asarray(spectrum), grid, width
            yield line(f"{name}, 1/{part}", errors(methods, data, truth, keys)[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=24)
    count = parser.parse_args().keys
    jax.config.update("jax_enable_x64", True)
    print(f"n = {N} (the hamiltonian's is 1000), {count} keys.")
    for table in (traces, functions, densities):
        for text in table(jax.random.split(jax.random.key(11), count)):
            print(text, flush=True)
