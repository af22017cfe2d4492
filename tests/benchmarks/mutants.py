"""Small faults in the numerics, one at a time, and which of them the tests find.

`python -m tests.benchmarks.mutants [--count 200] [--seed 0] [--only PART] [--of FILE]
[--quick] [--jobs 2] [--list]`, from the root of the repository; hours for all.

A fault is one change of one expression: a sign, a conjugate or a `stop_gradient` that is
dropped, a constant that is doubled or one too large, the branches of a `where` swapped, a
maximum for a minimum, `<` for `>=`, a term of a `hypot` dropped. Faults are drawn at random
from all that there are, the same for equal seeds, so many from each module as it has
expressions. Each is made in a copy of the package, on which the tests run that `tests.map`
names for the module: the quick ones, and, unless `--quick`, the slow ones if those find
nothing. A fault is *found* if a test fails, whose name is printed, or if the tests do not
end. It *survives* if none fails. The last lines have the shares, and the survivors.

A survivor is a test that is missing, or a change that is no fault: `HARMLESS` has a part of
its line, and the reason.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.map import TESTS, files_of

ROOT = Path(__file__).parents[2]
COMPILED = Path(tempfile.gettempdir(), "traceax-mutants")
LIMIT = {"quick": 900, "slow": 1800}  # seconds

FROZEN = "whoever calls it freezes the result, or has a derivative of its own"
# "module: a part of the changed line" -> why no change of it is a fault.
HARMLESS: dict[str, str] = {
    "_estimators/deltashift: c * (others + grain)": "of a multiple of I b is 0 "
    "without it, which is as good",
    "_functions/function_diagonal: times(grain, tested)": "either sign makes the columns "
    "independent",
    "_functions/inv_quad_logdet: 4 * t <= shape.width": "which run is made; both are right",
    "_functions/neighbours: start = min(n, 2 * count)": "the same neighbours, by more work",
    "_functions/neighbours: min(4 * count + 1, end)": "the same neighbours, by more work",
    "_functions/whitening: held = jax.lax.stop_gradient(matrix)": "JAX does not "
    "differentiate the solver of `custom_linear_solve`",
    "_linalg/krylov: jax.lax.stop_gradient(overlaps)": FROZEN,
    "_linalg/krylov: held, known = jax.lax.stop_gradient(": FROZEN,
    "_linalg/krylov: is_twin = ": "twins differ by rounding, whichever of both has it",
    "_linalg/lapack: jax.lax.stop_gradient(largest_modulus(matrix))": FROZEN,
    "_linalg/lapack: lift = 10 * eps": "a few rounding errors more, which are taken off",
    "_quadrature/nodes: if 3 * count < size:": "two ways to compute the same number",
}


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


def drawn(count: int, seed: int, only: str, report: str = "") -> list[Fault]:
    """Faults of the numerics, or of those the ones that survive in a report."""
    every = []
    for path in sorted((ROOT / "traceax").rglob("*.py")):
        module = str(path.relative_to(ROOT / "traceax").with_suffix(""))
        if "/" in module and module in TESTS and only in module:
            every += list(Source(module).faults())
    if report:
        lines = Path(report).read_text().splitlines()
        left = {line[6:].partition(" | ")[0] for line in lines if line.startswith("none")}
        return [fault for fault in every if described(fault) in left]
    return sorted(random.Random(seed).sample(every, min(count, len(every))))


def found_by(fault: Fault, *, quick: bool) -> tuple[str, str]:
    """Which tests find it, *quick*, *slow* or *none* of them, and the first that does."""
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        path = Path(folder, "traceax", f"{fault.module}.py")
        path.write_text(fault.applied(path.read_text()))
        for kind in ("quick",) if quick else ("quick", "slow"):
            name = first_failure(Path(folder), files_of(fault.module), kind)
            if name is not None:
                return kind, name
    return "none", ""


def copied(folder: Path) -> None:
    for name in ("traceax", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)


def first_failure(
    folder: Path, tests: Sequence[str], kind: str, jobs: int = 0
) -> str | None:
    """Run the quick or the slow ones on the package in a folder, until one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", str(jobs), *tests]
    marks = "slow" if kind == "slow" else "not slow and not nightly"
    command += ["-m", marks, "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1"}
    environment |= {"TRACEAX_COMPILED": str(COMPILED)}  # most programs are equal
    how: dict[str, Any] = {"cwd": folder, "env": environment, "timeout": LIMIT[kind]}
    how |= {"capture_output": True, "text": True, "check": False}
    try:
        done = subprocess.run(command, **how)
    except subprocess.TimeoutExpired:
        return f"nothing in {LIMIT[kind]} seconds"
    if done.returncode in (0, 5):  # 5: there are no such tests
        return None
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return first[1] if first else done.stdout[-300:]


def check_without_faults(faults: Sequence[Fault]) -> None:
    """The quick tests must pass on a copy without a fault (CI runs the slow ones)."""
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        tests = {name for fault in faults for name in files_of(fault.module)}
        if (
            name := first_failure(Path(folder), sorted(tests), "quick", jobs=2)
        ) is not None:
            sys.exit(f"{name} fails without a fault")


def main(given: argparse.Namespace) -> None:
    faults = drawn(given.count, given.seed, given.only, given.of)
    if given.list:
        for fault in faults:
            print(described(fault))
        return
    check_without_faults(faults)
    found: dict[str, list[Fault]] = {"quick": [], "slow": [], "none": []}
    with ThreadPoolExecutor(given.jobs) as pool:
        for fault, (by, name) in zip(
            faults, pool.map(lambda f: found_by(f, quick=given.quick), faults), strict=True
        ):
            found[by].append(fault)
            print(f"{by:<6}{described(fault)} | {name}", flush=True)
    harmless = [f for f in found["none"] if is_harmless(f)]
    counted = len(faults) - len(harmless)
    quick, slow = len(found["quick"]), len(found["slow"])
    print(f"\n{counted} faults, {len(harmless)} more change nothing")
    both = (quick + slow) / counted
    print(f"found by quick tests: {quick / counted:.1%}; by all: {both:.1%}")
    for fault in found["none"]:
        if fault not in harmless:
            print(f"survives: {described(fault)}")


def is_harmless(fault: Fault) -> bool:
    path = ROOT / "traceax" / f"{fault.module}.py"
    line = path.read_text().splitlines()[fault.line - 1]
    parts = (key.partition(": ") for key in HARMLESS)
    return any(fault.module == name and part in line for name, _, part in parts)


def described(fault: Fault) -> str:
    return f"{fault.module}:{fault.line} {fault.kind}: {' '.join(fault.text.split())}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the names of modules")
    parser.add_argument("--of", default="", help="survivors in what an earlier run printed")
    parser.add_argument("--quick", action="store_true", help="quick tests alone")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="do not run them")
    main(parser.parse_args())
