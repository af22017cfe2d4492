"""`python -m traceax [FILE]`: what one has a matrix for, or a tour on a road network."""

from __future__ import annotations

import io
import sys

import jax

import traceax as tx
from traceax._command.matrix import MatrixError
from traceax._command.options import Options, parse
from traceax._command.stdin import standard_input
from traceax._tasks.own import own_matrix
from traceax._tasks.tour import tour


def main(argv: list[str]) -> int:
    """Print what was asked for; the exit status is 2 after wrong use, told in one line."""
    jax.config.update("jax_enable_x64", True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # A terminal may lack the ± sign.
    try:
        _run(parse(argv, tx.__version__))
    except MatrixError as error:
        message = " ".join(str(error).split())
        print(f"traceax: error: {message}", file=sys.stderr)
        return 2
    return 0


def _run(options: Options) -> None:
    if options.file is None:
        tour(options)
    elif str(options.file) == "-":
        with standard_input() as path:
            own_matrix(path, "standard input", options)
    else:
        own_matrix(options.file, str(options.file), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
