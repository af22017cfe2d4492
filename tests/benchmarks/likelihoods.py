"""Likelihoods of Gaussian processes, and their gradients, against GPyTorch's and fastgp's.

`python -m tests.benchmarks.likelihoods [--points 2000] [--repeats 5] [--whitened]
[--gpytorch PYTHON] [--fastgp PYTHON] [NAME ...]`, from the root of the repository. The
names are of sides, as in the second column; if there are none, all but the whitened ones.
PYTHON is an interpreter, without which a library's sides are left out. `--whitened` chooses
the whitened sides and those that they are compared with, and adds a grid of 20,000 points
in a square, whose kernel exp(-|dx| - |dy|) is never stored.

Negative log-likelihoods of n points in a cube, float64, with gradients in log length, log
amplitude and log noise, as one step of a fit needs them: the kernel matrix is built from
the parameters every time, and no library may keep anything between calls. Columns:

- *nll*, *gradient*: the root mean square, over the repeats, of the relative errors, of the
  gradient in the Euclidean norm. Truth is a Cholesky factorisation.
- *seconds*: the median of the repeats, each with other random numbers, value and gradient
  together, after one to warm up and to compile.
- *matvecs*: applications of the kernel matrix to a vector, where the library says.
- *GB*: the peak memory of the process.

The sides, each in a process of its own, with the threads they take by default, but for
LAPACK in traceax's, which has one:

- *traceax-240*, *-120*, *-360*, *-480*: `tx.inv_quad_logdet` with so many matvecs, of a
  `lx.FunctionLinearOperator`: with an `lx.MatrixLinearOperator` it would factorise up to
  n = 2048. *traceax-warm* starts at the last solution, which here is the answer.
  *whitened*: by `tx.vecchia` with 20 neighbours of each point. The neighbours are found
  once; the factor is part of every step.
- *by-hand*: the usual estimator of the gradient: 3 signs, and conjugate gradients of 60
  steps for them and for y, 240 applications. It has no value.
- *gpytorch*: its defaults for training: 10 probes, 20 Lanczos steps, conjugate gradients to
  a tolerance of 1; a preconditioner of rank 15 from n = 2000 on. It factorises up to
  n = 800, and so is exact there.
- *gpytorch-100*: 50 probes, tolerance 1e-2, rank 100 (and no lower where the trace left
  over is 1e-3, which by default is enough). Its Lanczos steps are those of the solve.
- *fastgp*: its defaults: 35 probes, 20 steps, rank 25, no jitter besides the noise.
- *fastgp-100*: rank 100, 100 steps for the solve, and the rational approximation of order
  6 for 3. More steps for the log-determinant change next to nothing.
- *cholesky*: of SciPy in place, with the inverse for the gradient. Kept, seconds included,
  in the folder for temporary files, from where the errors of all others are taken.

GPyTorch 1.15.2 and TensorFlow Probability 0.25.0 live in environments of their own:
`pip install gpytorch==1.15.2` brings torch, of hundreds of megabytes, and
`pip install tensorflow-probability==0.25.0 "jax<0.4.31" "numpy<2" tensorflow-cpu tf-keras`
needs that older JAX, for it uses what newer ones have removed. So neither is in the extra
`benchmarks`; and so this file imports but NumPy and SciPy until it knows its side.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
from scipy.spatial.distance import cdist

Array = Any  # of NumPy, JAX or PyTorch
Result = tuple[float, list[float], int | None]  # nll, gradient, matvecs
Run = Callable[[np.ndarray, int], Result]  # of parameters and a seed
ROWS = 500  # in the blocks of the truth
STORED = 8000  # up to so many points the kernel matrix is stored
ORDERS = {"matern12": 1, "matern32": 3, "matern52": 5}  # twice nu


class Problem(NamedTuple):
    kernel: str
    length: float
    noise: float
    num_points: int
    path: str = ""  # of a file with other points and values

    @property
    def label(self) -> str:
        return f"{self.kernel}-{self.noise:.0e}"

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        if self.path:
            return tuple(np.load(self.path).values())
        rng = np.random.default_rng(0)
        x = rng.random((self.num_points, 3))
        if self.kernel == "grid":
            x = np.stack(np.meshgrid(*self.axes, indexing="ij"), axis=-1).reshape(-1, 2)
        noise = self.noise**0.5 * rng.standard_normal(self.num_points)
        return x, np.sin(2 * np.pi * x).sum(axis=1) + noise

    @property
    def axes(self) -> tuple[np.ndarray, np.ndarray]:
        """Of a grid in the unit square."""
        return np.linspace(0, 1, 100), np.linspace(0, 1, self.num_points // 100)

    def parameters(self) -> np.ndarray:
        """Logarithms of length, of amplitude, of the noise's variance."""
        return np.log([self.length, 1.0, self.noise])


def problems(num_points: int) -> list[Problem]:
    lengths = {"rbf": 0.3, "matern12": 0.5, "matern32": 0.5, "matern52": 0.5}
    return [
        Problem(kernel, length, noise, num_points)
        for kernel, length in lengths.items()
        for noise in (1e-2, 1e-4)
    ]


def correlation(kernel: str, distance: Array, exp: Callable[[Array], Array]) -> Array:
    """Of distances over length, of NumPy or JAX."""
    if kernel == "rbf":
        return exp(-(distance**2) / 2)
    if kernel == "grid":
        return exp(-distance)
    scaled = ORDERS[kernel] ** 0.5 * distance
    factors = {1: 1, 3: 1 + scaled, 5: 1 + scaled + scaled**2 / 3}
    return factors[ORDERS[kernel]] * exp(-scaled)


def by_log_length(kernel: str, distance: np.ndarray) -> np.ndarray:
    """Its derivative."""
    if kernel == "rbf":
        return distance**2 * np.exp(-(distance**2) / 2)
    scaled = ORDERS[kernel] ** 0.5 * distance
    factors = {1: scaled, 3: scaled**2, 5: scaled**2 * (1 + scaled) / 3}
    return factors[ORDERS[kernel]] * np.exp(-scaled)


def of_cholesky(problem: Problem) -> Run:
    """At amplitude 1. The factor and the inverse take the matrix's place."""
    if problem.kernel == "grid":
        return by_kronecker(problem)
    x, y = problem.data()
    n = problem.num_points

    blocks = [slice(i, min(i + ROWS, n)) for i in range(0, n, ROWS)]

    def lower(rows: slice) -> np.ndarray:
        """Distances of these points to themselves and to those before."""
        return cdist(x[rows], x[: rows.stop]) / problem.length

    def run(theta: np.ndarray, seed: int) -> Result:
        assert theta[1] == 0
        matrix = np.empty((n, n), order="F")
        for rows in blocks:
            matrix[rows, : rows.stop] = correlation(problem.kernel, lower(rows), np.exp)
        matrix.flat[:: n + 1] += problem.noise
        factor, _ = scipy.linalg.cho_factor(
            matrix, lower=True, overwrite_a=True, check_finite=False
        )
        u = scipy.linalg.cho_solve((factor, True), y, check_finite=False)
        logdet = 2 * np.sum(np.log(np.diagonal(factor)))
        potri: Any = scipy.linalg.get_lapack_funcs("potri", (factor,))
        inverse, failed = potri(factor, lower=1, overwrite_c=1)
        assert failed == 0
        trace = np.trace(inverse)
        along = 0.0
        for rows in blocks:
            derivative = by_log_length(problem.kernel, lower(rows))
            weights = inverse[rows, : rows.stop] - u[rows, None] * u[: rows.stop]
            # Twice what is below the diagonal, on which the derivative is zero.
            along += 2 * np.sum(np.tril(weights, rows.start) * derivative)
        noise = problem.noise * (trace - u @ u)
        # The derivative by log amplitude is 2 (B - noise I).
        gradient = [along / 2, n - y @ u - noise, noise / 2]
        nll = (y @ u + logdet + n * np.log(2 * np.pi)) / 2
        return float(nll), [float(g) for g in gradient], None

    return run


def by_kronecker(problem: Problem) -> Run:
    """The truth on a grid: the kernel exp(-|dx| - |dy|) is a Kronecker product, whose
    eigenvalues are products. Gradients are differences."""
    _, y = problem.data()
    n, step = y.size, 1e-4

    def nll(theta: np.ndarray) -> float:
        length, amplitude, noise = np.exp(theta)
        parts = [np.exp(-abs(a[:, None] - a) / length) for a in problem.axes]
        (one, left), (other, right) = map(np.linalg.eigh, parts)
        values = amplitude**2 * np.outer(one, other) + noise
        turned = left.T @ y.reshape(values.shape) @ right
        logs = np.sum(np.log(values)) + n * np.log(2 * np.pi)
        return float(np.sum(turned**2 / values) + logs) / 2

    def run(theta: np.ndarray, seed: int) -> Result:
        del seed
        sides = [(nll(theta + step * e), nll(theta - step * e)) for e in np.eye(3)]
        return nll(theta), [(up - down) / (2 * step) for up, down in sides], None

    return run


def of_jax(problem: Problem, loss: Callable[..., Array], *, warm: bool = False) -> Run:
    """`loss(matvec, y, noise, key, guess, entries)` returns the value, the solution for y,
    and the matvecs; warm, each run starts from the solution of the last one. `entries` are
    those of the kernel and the noise."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    jax.config.update("jax_enable_x64", True)

    def covariance(theta: Array, *differences: Array) -> Array:
        """Given the differences of each coordinate."""
        if problem.kernel == "grid":
            distance = sum(map(abs, differences))
        else:
            squares = sum(part**2 for part in differences)
            distance = jnp.sqrt(jnp.where(squares > 0, squares, 1)) * (squares > 0)
        scaled = distance * jnp.exp(-theta[0])
        return jnp.exp(2 * theta[1]) * correlation(problem.kernel, scaled, jnp.exp)

    @jax.checkpoint
    def kernel(theta: Array, x: Array) -> Array:
        return covariance(theta, *(a[:, None] - a[None, :] for a in x.T))

    @jax.checkpoint
    def row_times(theta: Array, x: Array, place: Array, v: Array) -> Array:
        return covariance(theta, *(a - b for a, b in zip(place, x.T, strict=True))) @ v

    def nll(theta: Array, x: Array, y: Array, key: Array, guess: Any) -> tuple[Array, Any]:
        matrix, noise = kernel(theta, x) if y.size <= STORED else None, jnp.exp(theta[2])

        def times(v: Array) -> Array:
            if matrix is not None:
                return matrix @ v
            each = lambda place: row_times(theta, x, place, v)  # noqa: E731
            return jax.lax.map(each, x, batch_size=200)

        def entries(i: Array, j: Array) -> Array:
            return covariance(theta, *(a[i] - a[j] for a in x.T)) + noise * (i == j)

        value, *rest = loss(times, y, noise, key, guess, entries)
        return value + y.size * jnp.log(2 * jnp.pi) / 2, rest

    step = jax.jit(jax.value_and_grad(nll, has_aux=True))
    x, y = map(jnp.asarray, problem.data())
    last = [jnp.zeros_like(y) if warm else None]

    def run(theta: np.ndarray, seed: int) -> Result:
        key = jax.random.key(seed)
        (value, (solution, spent)), gradient = step(jnp.asarray(theta), x, y, key, last[0])
        last[0] = solution if warm else None
        return float(value), gradient.tolist(), int(spent)

    return run


def of_traceax(
    problem: Problem, num_matvecs: int, *, warm: bool = False, neighbours: int = 0
) -> Run:
    import jax  # noqa: PLC0415
    import lineax as lx  # noqa: PLC0415

    import traceax as tx  # noqa: PLC0415

    near = tx.nearest_neighbours(problem.data()[0], neighbours) if neighbours else None

    def loss(*args: Any) -> Any:
        matvec, y, noise, key, guess, entries = args
        structure = jax.ShapeDtypeStruct(y.shape, y.dtype)
        tag = lx.positive_semidefinite_tag
        operator = lx.FunctionLinearOperator(matvec, structure, tag)
        white = None if near is None else tx.vecchia(entries, near)
        how = {"shift": noise, "guess": guess, "whitening": white}
        both = tx.inv_quad_logdet(operator, y, key, num_matvecs, **how)
        value = (both.inv_quad.value + both.logdet.value) / 2
        return value, both.solution, jax.numpy.asarray(both.inv_quad.num_matvecs)

    return of_jax(problem, loss, warm=warm)


def by_hand(problem: Problem, num_probes: int, num_steps: int) -> Run:
    """The slope alone: it is that of (mean of z* B w - u* B u) / 2 in B, with solutions u
    and w of y and of signs z."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    from jax.scipy.sparse.linalg import cg  # noqa: PLC0415

    def loss(matvec: Any, y: Array, noise: Array, key: Array, *_: Any) -> Any:
        signs = jax.random.rademacher(key, (y.size, num_probes), y.dtype)
        sides = jnp.concatenate([y[:, None], signs], axis=1)
        apply = lambda v: matvec(v) + noise * v  # noqa: E731
        held = jax.lax.stop_gradient
        solve = lambda b: cg(apply, b, tol=0, maxiter=num_steps)[0]  # noqa: E731
        solved = held(jax.vmap(solve, 1, 1)(sides))
        weights = jnp.append(-1, jnp.full(num_probes, 1 / num_probes)) / 2
        left = held(sides).at[:, 0].set(solved[:, 0])
        forms = jnp.sum(left * apply(solved), axis=0)
        spent = jnp.asarray(sides.shape[1] * num_steps)
        return weights @ forms, solved[:, 0], spent

    return of_jax(problem, loss)


def of_gpytorch(problem: Problem, **settings: float) -> Run:
    """What `gpytorch.mlls.ExactMarginalLogLikelihood` computes, times n."""
    import gpytorch  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    import torch  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    torch.set_default_dtype(torch.float64)
    x, y = map(torch.from_numpy, problem.data())
    # By default noise is at least 1e-4.
    positive = gpytorch.constraints.Positive()
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=positive)
    if problem.kernel == "rbf":
        base = gpytorch.kernels.RBFKernel()
    else:
        base = gpytorch.kernels.MaternKernel(nu=ORDERS[problem.kernel] / 2)
    kernel = gpytorch.kernels.ScaleKernel(base)
    raw = (base.raw_lengthscale, kernel.raw_outputscale, likelihood.raw_noise)
    # A parameter is the softplus of a raw one: its derivative is 1 - exp(-value). The scale
    # is the square of the amplitude.

    def run(theta: np.ndarray, seed: int) -> Result:
        torch.manual_seed(seed)
        values = np.exp(np.array([1, 2, 1]) * theta)
        base.lengthscale, kernel.outputscale, likelihood.noise = values
        by_raw = np.array([1, 2, 1]) * values / -np.expm1(-values)
        with contexts(gpytorch.settings, settings):
            prior = gpytorch.distributions.MultivariateNormal(
                torch.zeros_like(y), kernel(x)
            )
            nll = -likelihood(prior).log_prob(y)
            gradient = torch.autograd.grad(nll, raw)
        gradient = np.array([g.item() for g in gradient]) * by_raw
        return nll.item(), gradient.tolist(), None

    return run


def contexts(library: Any, settings: dict[str, float]) -> ExitStack:
    stack = ExitStack()
    for name, value in settings.items():
        stack.enter_context(getattr(library, name)(value))
    return stack


def of_fastgp(problem: Problem, **config: Any) -> Run:
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    from tensorflow_probability.python.experimental.fastgp import fast_gp  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    from tensorflow_probability.substrates.jax.math import psd_kernels  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    jax.config.update("jax_enable_x64", True)
    kinds = {
        "rbf": psd_kernels.ExponentiatedQuadratic,
        "matern12": psd_kernels.MaternOneHalf,
        "matern32": psd_kernels.MaternThreeHalves,
        "matern52": psd_kernels.MaternFiveHalves,
    }
    kind = kinds[problem.kernel]
    chosen = fast_gp.GaussianProcessConfig(**config)

    def nll(theta: Array, x: Array, y: Array, key: Array) -> Array:
        length, amplitude, noise = jnp.exp(theta)
        process = fast_gp.GaussianProcess(
            kind(amplitude, length),
            x,
            observation_noise_variance=noise,
            jitter=0.0,
            config=chosen,
        )
        return -process.log_prob(y, key)

    step = jax.jit(jax.value_and_grad(nll))
    x, y = map(jnp.asarray, problem.data())

    def run(theta: np.ndarray, seed: int) -> Result:
        value, gradient = step(jnp.asarray(theta), x, y, jax.random.PRNGKey(seed))
        return float(value), gradient.tolist(), None

    return run


class Side(NamedTuple):
    library: str
    build: Callable[..., Run]
    how: dict[str, Any]


SIDES = {
    "traceax-240": Side("traceax", of_traceax, {"num_matvecs": 240}),
    "traceax-120": Side("traceax", of_traceax, {"num_matvecs": 120}),
    "traceax-360": Side("traceax", of_traceax, {"num_matvecs": 360}),
    "traceax-480": Side("traceax", of_traceax, {"num_matvecs": 480}),
    "traceax-warm": Side("traceax", of_traceax, {"num_matvecs": 240, "warm": True}),
    "traceax-240, whitened": Side(
        "traceax", of_traceax, {"num_matvecs": 240, "neighbours": 20}
    ),
    "traceax-60, whitened": Side(
        "traceax", of_traceax, {"num_matvecs": 60, "neighbours": 20}
    ),
    "by-hand": Side("traceax", by_hand, {"num_probes": 3, "num_steps": 60}),
    "gpytorch": Side("gpytorch", of_gpytorch, {}),
    "gpytorch-100": Side(
        "gpytorch",
        of_gpytorch,
        {
            "num_trace_samples": 50,
            "cg_tolerance": 1e-2,
            "max_preconditioner_size": 100,
            "min_preconditioning_size": 0,
            "preconditioner_tolerance": 1e-10,
        },
    ),
    "fastgp": Side("fastgp", of_fastgp, {}),
    "fastgp-100": Side(
        "fastgp",
        of_fastgp,
        {
            "preconditioner": "truncated_randomized_svd_plus_scaling",
            "preconditioner_rank": 100,
            "cg_iters": 100,
            "log_det_algorithm": "r6",
        },
    ),
    "cholesky": Side("traceax", of_cholesky, {}),
}


class Measured(NamedTuple):
    values: list[float]
    gradients: list[list[float]]
    seconds: list[float]
    matvecs: list[int | None]
    gigabytes: float


def measure(run: Run, theta: np.ndarray, repeats: int) -> Measured:
    run(theta, 0)
    results, seconds = [], []
    for seed in range(1, repeats + 1):
        start = time.perf_counter()
        results.append(run(theta, seed))
        seconds.append(time.perf_counter() - start)
    values, gradients, matvecs = (list(part) for part in zip(*results, strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Measured(values, gradients, seconds, matvecs, peak)


def print_side(name: str, problem: Problem, repeats: int) -> None:
    """What a child process does. Others write to standard output, too: ours comes last."""
    warnings.simplefilter("ignore")  # GPyTorch's, of solves that stop early
    side = SIDES[name]
    run = side.build(problem, **side.how)
    print(json.dumps(measure(run, problem.parameters(), repeats)._asdict()))


def ask(
    python: Sequence[str], name: str, problem: Problem, repeats: int
) -> Measured | None:
    request = ["--side", name, "--problem", problem.label]
    request += ["--points", f"{problem.num_points}", "--repeats", f"{repeats}"]
    done = subprocess.run(
        [*python, *request], check=False, capture_output=True, text=True, env=environment()
    )
    if done.returncode:
        print(f"{name}: exit status {done.returncode}\n{done.stderr[-2000:]}")
        return None
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def environment() -> dict[str, str]:
    """Less what `tests.benchmarks` sets, for those who do not import it."""
    kept = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    return {**kept, "TF_CPP_MIN_LOG_LEVEL": "3"}


def truth(problem: Problem) -> Measured:
    """Kept, for it takes minutes."""
    folder = Path(tempfile.gettempdir()) / "traceax-likelihoods"
    folder.mkdir(exist_ok=True)
    path = folder / f"{problem.label}-{problem.num_points}.json"
    if not path.exists():
        measured = ask((sys.executable, "-P", __file__), "cholesky", problem, 1)
        assert measured is not None
        path.write_text(json.dumps(measured._asdict()))
    return Measured(**json.loads(path.read_text()))


def row(measured: Measured, exact: Measured) -> str:
    """The columns of the docstring."""
    [value], [gradient] = exact.values, exact.gradients
    values = np.asarray(measured.values) / value - 1
    off = np.asarray(measured.gradients) - gradient
    errors = np.linalg.norm(off, axis=1) / np.linalg.norm(gradient)
    matvecs = [count for count in measured.matvecs if count is not None]
    spent = f"{np.median(matvecs):.0f}" if matvecs else ""
    rms = [np.sqrt(np.mean(e**2)) for e in (values, errors)]
    seconds = float(np.median(measured.seconds))
    return (
        f"{rms[0]:>9.1e}{rms[1]:>10.1e}{seconds:>9.2f}{spent:>9}{measured.gigabytes:>7.1f}"
    )


LARGE = Problem("grid", 0.5, 1e-4, 20_000)
WHITENED = ["traceax-240", "traceax-240, whitened", "traceax-60, whitened"]
WHITENED += ["gpytorch-100", "cholesky"]
OF_LARGE = "traceax-60, whitened", "traceax-240, whitened"


def main(
    num_points: int, repeats: int, names: Sequence[str], others: dict[str, str | None]
) -> None:
    python = {name: (path, "-P", __file__) for name, path in others.items() if path}
    python["traceax"] = (sys.executable, "-m", "tests.benchmarks.likelihoods")
    head = f"{'nll':>9}{'gradient':>10}{'seconds':>9}{'matvecs':>9}{'GB':>7}"
    head = f"{'kernel-noise':<16}{'side':<23}{head}"

    def rows(problem: Problem, sides: Sequence[str], repeats: int) -> None:
        exact = truth(problem)
        for name in sides:
            library = SIDES[name].library
            if name == "cholesky":
                measured = exact
            elif library in python:
                measured = ask(python[library], name, problem, repeats)
            else:
                continue
            if measured is not None:
                print(f"{problem.label:<16}{name:<23}{row(measured, exact)}", flush=True)

    print(f"n = {num_points}, {repeats} repeats.\n\n{head}")
    for problem in problems(num_points):
        plain = [name for name in SIDES if "whitened" not in name]
        rows(problem, names or plain, repeats)
    if names == WHITENED:
        print(f"\nn = {LARGE.num_points}, the kernel is never stored, 1 repeat.\n\n{head}")
        rows(LARGE, OF_LARGE, 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *SIDES], metavar="NAME")
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--whitened", action="store_true")
    parser.add_argument("--gpytorch", help="an interpreter that has it")
    parser.add_argument("--fastgp", help="an interpreter that has it")
    parser.add_argument("--side", help="for the child processes")
    parser.add_argument("--problem", help="for the child processes")
    given = parser.parse_args()
    if given.side:
        every = [LARGE] if given.points == LARGE.num_points else problems(given.points)
        [asked] = [p for p in every if p.label == given.problem]
        print_side(given.side, asked, given.repeats)
    else:
        libraries = {"gpytorch": given.gpytorch, "fastgp": given.fastgp}
        chosen = WHITENED if given.whitened else given.names
        main(given.points, given.repeats, chosen, libraries)
