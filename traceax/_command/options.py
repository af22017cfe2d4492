"""What may be asked for on the command line, and whether it fits together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, cast

import numpy as np

from traceax._command.matrix import MatrixError

Task = Literal["trace", "logdet", "inverse", "estrada", "norm", "density", "diagonal"]

_DESCRIPTION = """\
Estimate the trace of a matrix in a file, its log-determinant, or what else is asked for, by
the front door and by each method that fits; with no file, two traces of a road network.
"""

_EPILOGUE = """\
--logdet and --inverse are of A + S I, Hermitian positive definite; --estrada and --density
ask for a Hermitian matrix; traces and norms are of any. The front door comes first, then
the estimators by name, and up to n = 2000 what dense linear algebra says.
"""


class Options(NamedTuple):
    """A file or none, what is to be estimated, and how.

    `of` is that whose diagonal is asked for; `output` where it goes, or the picture.
    """

    file: Path | None
    task: Task
    of: Literal["inverse", "estrada"]
    shift: float
    power: float
    output: Path | None
    num_matvecs: int
    seed: int
    json: bool

    @property
    def fewest(self) -> int:
        """Products with which an estimate can be made at all."""
        return _budget(self.task, self.of).fewest


class _Budget(NamedTuple):
    fewest: int
    usual: int


def _budget(task: Task, of: str) -> _Budget:
    match task:
        case "trace" | "inverse":
            return _Budget(1, 100)
        case "norm":
            return _Budget(9, 240)
        case "density":
            return _Budget(6, 1000)
        case "diagonal" if of == "inverse":
            return _Budget(1, 100)
        case _:
            return _Budget(6, 240)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MatrixError(f"{message}. `{self.prog} --help` lists what may be given.")


def parse(argv: list[str], version: str) -> Options:
    """What was asked for; a `MatrixError` where it does not fit together."""
    given = _parser(version).parse_args(argv)
    task = _task(given)
    of = "estrada" if given.task == "estrada" else "inverse"
    budget = _budget(task, of)
    options = Options(
        file=given.file,
        task=task,
        of=of,
        shift=given.shift or 0.0,
        power=given.norm or 0.0,
        output=given.density if given.diagonal is None else given.diagonal,
        num_matvecs=budget.usual if given.num_matvecs is None else given.num_matvecs,
        seed=given.seed,
        json=given.json,
    )
    _check_counts(options)
    _check_numbers(given)
    _check_together(options, given)
    return options


def _parser(version: str) -> _Parser:
    parser = _Parser(prog="python -m traceax", description=_DESCRIPTION, epilog=_EPILOGUE)
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a square matrix A: MatrixMarket (.mtx, .mtx.gz), SciPy sparse (.npz) or "
        "NumPy (.npy); `-` is standard input, in any of them",
    )
    _add_tasks(parser)
    _add_settings(parser)
    parser.add_argument("--version", action="version", version=f"traceax {version}")
    return parser


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_mutually_exclusive_group()
    flags = {
        "logdet": "log det(A + S I)",
        "inverse": "the trace of (A + S I)^-1, by conjugate gradients",
        "estrada": "tr exp(A), the Estrada index of a graph; its logarithm where it is too "
        "large",
    }
    for task, words in flags.items():
        tasks.add_argument(
            f"--{task}", action="store_const", dest="task", const=task, help=words
        )
    tasks.add_argument(
        "--norm", type=float, metavar="P", help="the Schatten norm (sum sigma^P)^(1/P)"
    )
    tasks.add_argument(
        "--density",
        type=Path,
        metavar="OUT.png",
        help="a picture of how the eigenvalues lie (needs matplotlib)",
    )
    parser.add_argument(
        "--diagonal",
        type=Path,
        metavar="OUT.npy",
        help="write the diagonal of (A + S I)^-1, or with --estrada of exp(A), and its "
        "standard errors: two rows of n numbers",
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shift", type=float, metavar="S", help="a multiple of I to add (default: 0)"
    )
    parser.add_argument(
        "--num-matvecs",
        type=int,
        metavar="K",
        help="how many products with the matrix, or its inverse, an estimate may cost "
        "(default: 100; 240 for functions of a matrix, 1000 for --density)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the random probes (default: 0)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, and nothing else"
    )


def _task(given: argparse.Namespace) -> Task:
    if given.diagonal is not None:
        return "diagonal"
    if given.norm is not None:
        return "norm"
    return "density" if given.density is not None else cast("Task", given.task or "trace")


def _check_counts(options: Options) -> None:
    if options.num_matvecs < options.fewest:
        raise MatrixError(
            f"--num-matvecs must be at least {options.fewest}, the fewest products that "
            f"any estimator can use here, but got {options.num_matvecs}. Raise it, to 100 "
            "say."
        )
    if not 0 <= options.seed < 2**32:
        raise MatrixError(
            f"--seed must be between 0 and 2^32 - 1, but got {options.seed}. Pass 0, say."
        )


def _check_numbers(given: argparse.Namespace) -> None:
    if given.norm is not None and not 0 < given.norm < np.inf:
        raise MatrixError(
            f"--norm must be a positive number, but got {given.norm}. Pass 1 for the "
            "nuclear norm, 2 for Frobenius'."
        )
    if given.shift is not None and not np.isfinite(given.shift):
        raise MatrixError(f"--shift must be finite, but got {given.shift}. Pass 1, say.")


def _check_together(options: Options, given: argparse.Namespace) -> None:
    if options.file is None and (options.task != "trace" or options.json):
        raise MatrixError(
            "a FILE must be named for what is asked for, because the tour takes only "
            "--num-matvecs and --seed. Name one, or `-` for standard input."
        )
    inverse = options.task == "diagonal" and options.of == "inverse"
    if (
        given.shift is not None
        and options.task not in ("logdet", "inverse")
        and not inverse
    ):
        raise MatrixError(
            "--shift must go with --logdet or --inverse, or with the diagonal of an "
            "inverse, because nothing else takes it. Leave it out, or add the multiple of "
            "I to the matrix."
        )
    if options.task == "diagonal" and (
        given.task == "logdet" or given.norm or given.density
    ):
        raise MatrixError(
            "--diagonal must go with --inverse or --estrada, or stand alone for the "
            "inverse, but got something else beside it. Ask for one thing at a time."
        )
    if options.output is not None:
        _check_output(options.output, options.task)


def _check_output(path: Path, task: Task) -> None:
    suffixes = (".npy",) if task == "diagonal" else (".png", ".pdf", ".svg")
    if path.suffix.lower() not in suffixes:
        raise MatrixError(
            f"--{task} must be given a file that ends in {' or '.join(suffixes)}, but got "
            f"{path}. Name {path.stem or 'out'}{suffixes[0]}, say."
        )
    if not path.absolute().parent.is_dir():
        raise MatrixError(
            f"--{task} must be given a file in a directory that exists, but there is no "
            f"{path.parent}. Make it first."
        )
