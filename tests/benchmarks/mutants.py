"""Small faults in the numerics, one at a time, and which of them the tests find.

`python -m tests.benchmarks.mutants [--count 200] [--seed 0] [--only PART] [--quick]
[--jobs 2] [--list]`, from the root of the repository; hours for all.

A fault is one change of one expression: a sign, a conjugate or a `stop_gradient` that is
dropped, a constant that is doubled or one too large, the branches of a `where` swapped, a
maximum for a minimum, `<` for `>=`, a term of a `hypot` dropped. Faults are drawn at random
from all that there are, the same for equal seeds, so many from each module as it has
expressions. Each is made in a copy of the package, on which the tests of `TESTS` run that
belong to the module: the quick ones, and, unless `--quick`, the slow ones if those find
nothing. A fault is *found* if a test fails, and by `quick` or `slow` ones. It *survives* if
none does. The last lines have the shares, and the survivors with the changed line.

A survivor is a test that is missing, or a change that is no fault: it is in `HARMLESS`, by
its line, with the reason.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
LIMIT = {"quick": 400, "slow": 900}  # seconds

# The tests of each module: the folder of its package, or these files.
TESTS: dict[str, tuple[str, ...]] = {
    "_linalg": ("tests/linalg", "tests/quadrature"),
    "_linalg/basis": ("tests/linalg/test_bases.py", "tests/test_exactness.py"),
    "_linalg/columns": ("tests/linalg/test_columns.py", "tests/test_exactness.py"),
    "_linalg/conjugate_gradients": ("tests/functions/test_likelihood.py",),
    "_linalg/jackknife": (
        "tests/test_statistics.py",
        "tests/estimators",
        "tests/quadrature",
    ),
    "_linalg/lapack": ("tests/linalg/test_lapack.py", "tests/test_exactness.py"),
    "_linalg/nystrom": ("tests/test_exactness.py", "tests/test_statistics.py"),
    "_core/rule": ("tests/test_autodiff.py", "tests/estimators"),
    "_core/estimate": ("tests/test_contract.py", "tests/core"),
    "_core/operator": ("tests/core", "tests/test_noise.py"),
    "_core/pooling": ("tests/core/test_pool.py",),
    "_core/sparse": ("tests/core", "tests/functions/test_pattern.py"),
    "_quadrature": ("tests/quadrature", "tests/functions/test_functions.py"),
    "_quadrature/block_arnoldi": (
        "tests/functions/test_arnoldi.py",
        "tests/functions/test_coloured_arnoldi.py",
    ),
    "_probes": ("tests/probes", "tests/test_statistics.py"),
    "_estimators": (
        "tests/estimators",
        "tests/test_exactness.py",
        "tests/test_statistics.py",
    ),
    "_functions": ("tests/functions",),
    "_functions/function_diagonal": ("tests/functions/test_block_diagonal.py",),
    "_functions/inv_quad_logdet": ("tests/functions/test_likelihood.py",),
    "_functions/krylov": ("tests/functions/test_krylov.py",),
    "_functions/neighbours": ("tests/functions/test_whitening.py",),
    "_functions/structures": ("tests/functions/test_structures.py",),
    "_functions/whitening": ("tests/functions/test_whitening.py",),
    "_functions/equations": (
        "tests/functions/test_whitening.py",
        "tests/functions/test_likelihood.py",
    ),
    "_calculus": ("tests/calculus",),
}

# "module: the changed line" -> why it changes no answer.
HARMLESS: dict[str, str] = {}


class Fault(NamedTuple):
    """A part of a module's text, from `start` to `end`, and what replaces it."""

    module: str  # `_linalg/krylov`
    kind: str
    line: int
    start: int
    end: int
    text: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


class Source:
    """The text of a module, in which nodes of its syntax tree have places."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.text = (ROOT / "traceax" / f"{module}.py").read_text()
        self.starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def place(self, line: int, column: int) -> int:
        """Columns of the tree are of bytes."""
        start = self.starts[line - 1]
        whole = self.text[start : self.starts[line]].encode()[:column]
        return start + len(whole.decode())

    def of(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        end = self.place(node.end_lineno, node.end_col_offset)
        return self.place(node.lineno, node.col_offset), end

    def faults(self) -> Iterator[Fault]:
        for node in numerical(ast.parse(self.text)):
            for kind, text in changes(node, self):
                yield Fault(self.module, kind, node.lineno, *self.span(node), text)


def numerical(tree: ast.AST) -> Iterator[ast.expr]:
    """All expressions but annotations, decorators, defaults and what errors say."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Raise | ast.Assert | ast.arguments | ast.Import):
            continue
        if isinstance(child, ast.Call) and called(child) in (
            "require",
            "invalid",
            "refuse",
        ):
            continue
        if isinstance(tree, ast.AnnAssign) and child is tree.annotation:
            continue
        if isinstance(tree, ast.FunctionDef | ast.ClassDef) and (
            child in tree.decorator_list or child is getattr(tree, "returns", None)
        ):
            continue
        if isinstance(child, ast.expr):
            yield child
        yield from numerical(child)


def called(node: ast.Call) -> str:
    function = node.func
    return getattr(function, "attr", getattr(function, "id", ""))


OPPOSITE: dict[type, str] = {
    ast.Lt: ">=",
    ast.GtE: "<",
    ast.Gt: "<=",
    ast.LtE: ">",
}
OTHER = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max"}
WORDS = ast.List | ast.Tuple | ast.JoinedStr | ast.ListComp | ast.Starred


def is_number(node: ast.expr) -> bool:
    known = isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return known and node.value != 0  # pyright: ignore


def changes(node: ast.expr, source: Source) -> Iterator[tuple[str, str]]:
    """The faults that one expression may have: their kinds, and what replaces it."""
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            one, other = source.of(left), source.of(right)
            if any(isinstance(x, WORDS) or is_text(x) for x in (left, right)):
                return
            if isinstance(op, ast.Add | ast.Sub):
                sign = "-" if isinstance(op, ast.Add) else "+"
                yield "sign", f"({one} {sign} ({other}))"
            if isinstance(op, ast.Mult | ast.Div) and is_number(right):
                yield "constant", f"({one} * 2 * {other})"
            if isinstance(op, ast.Mult) and is_number(left):
                yield "constant", f"(2 * {one} * {other})"
            if isinstance(op, ast.Sub) and is_number(right):
                yield "one off", f"({one})"
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not is_number(operand):
            yield "sign", f"({source.of(operand)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            if type(op) in OPPOSITE and not is_text(right):
                yield (
                    "branch",
                    f"({source.of(left)} {OPPOSITE[type(op)]} {source.of(right)})",
                )
        case ast.Call(func=ast.Attribute(value=value, attr="conj"), args=[]):
            yield "conjugate", source.of(value)
        case ast.Call(args=[first, *rest]):
            name, texts = called(node), [source.of(x) for x in rest]
            function = source.of(node.func)
            if name in ("stop_gradient", "frozen") and not rest:
                yield "frozen", f"({source.of(first)})"
            if name == "where" and len(rest) == 2:
                yield "branch", f"{function}({source.of(first)}, {texts[1]}, {texts[0]})"
            if name == "hypot":
                yield "dropped", f"({source.of(first)})"
            if name in OTHER and rest:
                swapped = function[: len(function) - len(name)] + OTHER[name]
                yield "extreme", f"{swapped}({', '.join([source.of(first), *texts])})"


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def tests_of(module: str) -> tuple[str, ...]:
    return TESTS.get(module, TESTS.get(module.partition("/")[0], ()))


def drawn(count: int, seed: int, only: str) -> list[Fault]:
    """Faults of all modules that have tests, without what is the same twice."""
    every = []
    for path in sorted((ROOT / "traceax").rglob("*.py")):
        module = str(path.relative_to(ROOT / "traceax").with_suffix(""))
        if tests_of(module) and only in module:
            every += list(Source(module).faults())
    return sorted(random.Random(seed).sample(every, min(count, len(every))))


def found_by(fault: Fault, *, quick: bool) -> str:
    """Say which tests find a fault: *quick*, *slow* or *none* of them."""
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        path = Path(folder, "traceax", f"{fault.module}.py")
        path.write_text(fault.applied(path.read_text()))
        tests = tests_of(fault.module)
        return failing(Path(folder), tests, quick=quick)


def copied(folder: Path) -> None:
    for name in ("traceax", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)


def failing(folder: Path, tests: Sequence[str], *, quick: bool) -> str:
    """Run the tests on the package in a folder, and say which fail first."""
    for kind in ("quick",) if quick else ("quick", "slow"):
        marks = "not slow" if kind == "quick" else "slow"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", marks]
        command += [*tests, "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1"}
        how: dict[str, Any] = {"cwd": folder, "env": environment, "timeout": LIMIT[kind]}
        try:
            done = subprocess.run(command, capture_output=True, check=False, **how)
        except subprocess.TimeoutExpired:
            return kind  # a loop that does not end
        if done.returncode not in (0, 5):  # 5: there are no such tests
            return kind
    return "none"


def check_without_faults(every: set[tuple[str, ...]], *, quick: bool) -> None:
    """All tests must pass on a copy without a fault."""
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        for tests in sorted(every):
            if (kind := failing(Path(folder), tests, quick=quick)) != "none":
                sys.exit(f"{kind} tests fail without a fault: {' '.join(tests)}")


def main(given: argparse.Namespace) -> None:
    faults = drawn(given.count, given.seed, given.only)
    if given.list:
        for fault in faults:
            print(described(fault))
        return
    check_without_faults({tests_of(f.module) for f in faults}, quick=given.quick)
    found: dict[str, list[Fault]] = {"quick": [], "slow": [], "none": []}
    with ThreadPoolExecutor(given.jobs) as pool:
        for fault, by in zip(
            faults, pool.map(lambda f: found_by(f, quick=given.quick), faults), strict=True
        ):
            found[by].append(fault)
            print(f"{by:<6}{described(fault)}", flush=True)
    harmless = [f for f in found["none"] if line_of(f) in HARMLESS]
    counted = len(faults) - len(harmless)
    quick, slow = len(found["quick"]), len(found["slow"])
    print(f"\n{counted} faults, {len(harmless)} more change nothing")
    both = (quick + slow) / counted
    print(f"found by quick tests: {quick / counted:.1%}; by all: {both:.1%}")
    for fault in found["none"]:
        if fault not in harmless:
            print(f"survives: {described(fault)}")


def line_of(fault: Fault) -> str:
    line = (
        (ROOT / "traceax" / f"{fault.module}.py").read_text().splitlines()[fault.line - 1]
    )
    return f"{fault.module}: {line.strip()}"


def described(fault: Fault) -> str:
    return f"{fault.module}:{fault.line} {fault.kind}: {' '.join(fault.text.split())}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names of modules")
    parser.add_argument("--quick", action="store_true", help="quick tests alone")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="do not run them")
    main(parser.parse_args())
