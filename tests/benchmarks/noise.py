"""Operators whose products are noisy: whether error bars cover what arithmetic does.

`python -m tests.benchmarks.noise [--keys 12] [--only SUBSTRING]`, from the root of the
repository; float32, some ten minutes. A row is an estimator of an operator in an
arithmetic: *f32*; *tf32* and *bf16*, which round matrix and vector to 10 and 7 bits before
a product; *bfloat16* and *float16*, the dtype of the operator; *CG*, solves to a tolerance.
The truth is in float64, of the matrix as it was rounded, so that only what happens to
vectors is noise. Columns, over the keys:

- *held*: whose `interval(0.95)` holds the truth; *nan*: whose value or bar is NaN;
- *truth*: the truth; "indefinite" where rounding left none;
- *|err|*, *rms*: the median modulus and the root mean square of the error;
- *bar*: the median standard error; *b/r*: this over the root mean square of the error;
- *bias*: the mean error with its sign; *z*: the mean of the error over its own bar.

`--only` chooses rows by a part of "SECTION: ESTIMATOR, OPERATOR, ARITHMETIC"; sections are
float32, likelihoods, functions, traces, half and solves.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float

import traceax as tx

N, THIRD, NOISE = 600, 200, 0.1
PSD = lx.positive_semidefinite_tag
Matrix = Float[np.ndarray, "n n"]


class Arithmetic(NamedTuple):
    """The bits of fractions that products keep, and the dtype of the operator."""

    bits: int = 23
    dtype: Any = jnp.float32

    def rounded(self, x: Any) -> Array:
        return jax.lax.reduce_precision(jnp.asarray(x, self.dtype), 8, self.bits)

    def make(self, matrix: Array, tags: Any) -> Any:
        """Make an operator whose adjoint, where it is not known to be the operator itself,
        rounds what comes out."""
        low = matrix.astype(self.dtype)
        structure = jax.ShapeDtypeStruct(low.shape[:1], self.dtype)
        apply = lambda v: (low @ self.rounded(v)).astype(self.dtype)  # noqa: E731
        return tx.as_operator(apply, structure, tags=tags)


ARITHMETICS = {
    "f32": Arithmetic(),
    "tf32": Arithmetic(10),
    "bf16": Arithmetic(7),
    "bfloat16": Arithmetic(7, jnp.bfloat16),
    "float16": Arithmetic(10, jnp.float16),
}
ROUNDED = ("f32", "tf32", "bf16")


class Operator(NamedTuple):
    """`make` takes matrix and tags; `meant` is what the operator stands for."""

    name: str
    arithmetic: str
    matrix: Matrix
    make: Callable[[Array, Any], Any]
    meant: Callable[[Matrix], Matrix] = lambda matrix: matrix


class Estimator(NamedTuple):
    """`call` takes an operator and a key, `truth` the matrix in float64."""

    name: str
    truth: Callable[[Matrix], Any]
    call: Callable[[Any, Any], tx.Estimate]
    tags: Any = ()


Rows = Iterable[tuple[Estimator, Operator]]


def distances(n: int) -> Any:
    """Those of random points in the unit square."""
    points = np.random.default_rng(0).random((n, 2))
    return np.sqrt(((points[:, None] - points) ** 2).sum(-1))


@cache
def matrices() -> dict[str, Matrix]:
    i = np.arange(1, N + 1.0)
    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(N, N)))[0]
    spectra = {"rank 5": 1.0 * (i <= 5), ".9^i": 0.9**i, "i^-2": i**-2}
    made = {name: (basis * spectrum) @ basis.T for name, spectrum in spectra.items()}
    made["RBF"] = np.exp(-((distances(N) / 0.3) ** 2) / 2)
    made["RBF, n=1500"] = np.exp(-((distances(1500) / 0.1) ** 2) / 2)
    far = 3**0.5 * distances(400) / 0.3
    return made | {"Matern, n=400": 300 * (1 + far) * np.exp(-far)}


@cache
def solve(tolerance: float) -> Callable[[Array, Any], Any]:
    def make(matrix: Array, tags: Any) -> Any:
        del tags  # an inverse takes those of what it inverts
        shifted = tx.as_operator(lambda v: matrix @ v + NOISE * v, N, tags=PSD)
        return lx.invert(shifted, lx.CG(tolerance, tolerance), throw=False)

    return make


def among(names: Iterable[str], labels: Iterable[str] = ROUNDED) -> list[Operator]:
    operators = []
    for name, label in product(names, labels):
        how = ARITHMETICS[label]
        low = np.asarray(how.rounded(matrices()[name]).astype(jnp.float32))
        operators.append(Operator(name, label, low, how.make))
    return operators


def summed(fn: Callable[[Any], Any]) -> Callable[[Matrix], Any]:
    """The sum of a function over the eigenvalues."""
    return lambda matrix: np.sum(fn(np.linalg.eigvalsh(matrix)))


def logs(shift: float) -> Callable[[Matrix], Any]:
    return summed(lambda x: np.log(x + float(np.float32(shift))))


def logdet(shift: float, name: str = "logdet") -> Estimator:
    call = partial(tx.logdet, num_matvecs=240, shift=shift)
    return Estimator(f"{name}, {shift:.2g}", logs(shift), call)


def of_likelihood(name: str, shift: float) -> Estimator:
    y = np.random.default_rng(2).normal(size=N).astype(np.float32)

    def form(matrix: Matrix) -> Any:
        return y @ np.linalg.solve(matrix + shift * np.eye(N), y.astype(float))

    def call(operator: Any, key: Any) -> tx.Estimate:
        both = tx.inv_quad_logdet(operator, jnp.asarray(y), key, 240, shift=shift)
        return getattr(both, name)

    truth = {"inv_quad": form, "logdet": logs(shift)}[name]
    return Estimator(f"both: {name}, {shift}", truth, call)


def first_leaf(operator: Any, key: Any) -> tx.Estimate:
    """Estimate the trace of the first third, a leaf of its own."""

    def apply(v: tuple[Array, Array]) -> tuple[Array, Array]:
        image = operator.mv(jnp.concatenate(v))
        return image[:THIRD], image[THIRD:]

    structure = jax.eval_shape(lambda: (jnp.zeros(THIRD), jnp.zeros(N - THIRD)))
    found = tx.leaf_traces(tx.as_operator(apply, structure, tags=PSD), key, 60)
    return replace(found, value=found.value[0], standard_error=found.standard_error[0])


def float32() -> Rows:
    kernel, matern = among(("RBF, n=1500", "Matern, n=400"), ("f32",))
    largest = np.linalg.eigvalsh(matern.matrix.astype(float))[-1]
    yield from ((logdet(shift), kernel) for shift in (0.1, 0.01, 0.001, 1e-5))
    for power in range(2, 8):
        yield logdet(largest / 10**power, f"logdet 1e{power}"), matern


def likelihoods() -> Rows:
    kinds = partial(of_likelihood, "inv_quad"), partial(of_likelihood, "logdet"), logdet
    estimators = [kind(shift) for shift in (0.1, 0.01) for kind in kinds]
    return product(estimators, among(("RBF", "i^-2")))


def of_function(fn: Callable, exact: Callable) -> tuple[Estimator, ...]:
    truth, slq = summed(exact), partial(tx.slq_trace, num_probes=15, num_steps=15)
    return (
        Estimator("function_trace", truth, lambda a, k: tx.function_trace(a, fn, k)),
        Estimator("slq_trace", truth, lambda a, k: slq(a, fn, k)),
    )


def functions() -> Rows:
    both = of_function(lambda x: jnp.log(x + 0.1), lambda x: np.log(x + 0.1))
    arnoldi = partial(tx.arnoldi_trace, num_probes=15, num_steps=8)
    log = lambda a, k: arnoldi(a, lambda x: jnp.log(x + 0.1), k)  # noqa: E731
    estimators = (*both, Estimator("arnoldi_trace", logs(0.1), log), logdet(0.1))
    return product(estimators, among(("rank 5",), ("tf32", "bf16")))


def traces() -> Rows:
    m: Any = {"num_matvecs": 60}
    norm = "frobenius_norm_squared"
    part, nuclear = lambda a: np.trace(a[:THIRD, :THIRD]), summed(np.abs)
    estimators = (
        Estimator("xtrace", np.trace, partial(tx.xtrace, **m)),
        Estimator("hutchpp_trace", np.trace, partial(tx.hutchpp_trace, **m)),
        Estimator("na_hutchpp_trace", np.trace, partial(tx.na_hutchpp_trace, **m)),
        Estimator("xnystrace", np.trace, partial(tx.xnystrace, **m), PSD),
        Estimator("trace", np.trace, partial(tx.trace, **m), PSD),
        Estimator("leaf_traces", part, first_leaf, PSD),
        Estimator(norm, lambda a: np.sum(a**2), partial(getattr(tx, norm), **m), PSD),
        Estimator("schatten, 1", nuclear, lambda a, k: tx.schatten_norm(a, 1, k, 60), PSD),
    )
    return product(estimators, among(("rank 5", ".9^i", "i^-2", "RBF")))


def half() -> Rows:
    trace = partial(tx.trace, num_matvecs=60)
    tagged = Estimator("trace", np.trace, trace, PSD)
    estimators = (tagged, Estimator("trace, no tag", np.trace, trace), logdet(0.1))
    return product(estimators, among(("RBF",), ("bfloat16", "float16")))


def solves() -> Rows:
    matrix = matrices()["RBF"].astype(np.float32)
    inverse = lambda a: np.linalg.inv(a + NOISE * np.eye(N))  # noqa: E731
    how = {f"RBF^-1, {x:.0e}": solve(x) for x in (1e-2, 1e-3, 1e-4)}
    operators = [Operator(x, "CG", matrix, make, inverse) for x, make in how.items()]
    trace = Estimator("trace", np.trace, partial(tx.trace, num_matvecs=60))
    roots = of_function(jnp.sqrt, np.sqrt)
    return product((trace, logdet(0.0), *roots), operators)


@cache
def program(call: Callable, make: Callable, tags: Any) -> Callable[[Array, Array], Array]:
    """Compile once for all matrices of a size: value, bar and interval for each key."""

    def numbers(matrix: Array, key: Any) -> Array:
        found = call(make(matrix, tags), key)
        return jnp.stack([found.value, found.standard_error, *found.interval(0.95)])

    return jax.jit(lambda matrix, keys: jax.lax.map(partial(numbers, matrix), keys))


def columns(estimator: Estimator, operator: Operator, keys: Array) -> str:
    run = program(estimator.call, operator.make, estimator.tags)
    value, bar, low, high = np.asarray(run(jnp.asarray(operator.matrix), keys), float).T
    with np.errstate(invalid="ignore"):
        truth = estimator.truth(operator.meant(operator.matrix.astype(float)))
    lost = np.isnan(value) | np.isnan(bar)
    held = f"{np.sum((low <= truth) & (truth <= high))}/{len(value)}"
    known = "indefinite" if np.isnan(truth) else f"{truth:.5g}"
    start = f"{held:>6}{np.sum(lost):>4d}{known:>12}"
    if np.isnan(truth) or lost.all():
        return start
    error, bar = (value - truth)[~lost], bar[~lost]
    rms, middle = np.sqrt(np.mean(error**2)), np.median(bar)
    sizes = f"{np.median(abs(error)):>9.1e}{rms:>9.1e}{middle:>9.1e}{middle / rms:>9.2g}"
    return f"{start}{sizes}{np.mean(error):>10.1e}{np.mean(error / bar):>7.2f}"


def main(num_keys: int, only: str) -> None:
    keys = jax.random.split(jax.random.key(7), num_keys)
    titles = f"{'held':>6}{'nan':>4}{'truth':>12}{'|err|':>9}{'rms':>9}{'bar':>9}{'b/r':>9}"
    for rows in (float32, likelihoods, functions, traces, half, solves):
        section = rows.__name__
        heading = f"\n{section:<46}{titles}{'bias':>10}{'z':>7}\n"
        for estimator, operator in rows():
            row = estimator.name, operator.name, operator.arithmetic
            if only in f"{section}: {', '.join(row)}":
                start = f"{heading}{row[0]:<23}{row[1]:<14}{row[2]:<9}"
                print(f"{start}{columns(estimator, operator, keys)}", flush=True)
                heading = ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=12)
    parser.add_argument("--only", default="", metavar="SUBSTRING")
    options = parser.parse_args()
    main(options.keys, options.only)
