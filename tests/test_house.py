"""The house: wings on floors, arrows that run downwards, rooms of a size, open doors."""

import ast
import inspect
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import traceax
from tests.seldom import SELDOM

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "traceax"
WINGS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
ROOMS = sorted(path for wing in WINGS for path in (PACKAGE / wing).glob("[!_]*.py"))


class Arrow(NamedTuple):
    """`start` imports `name` from `end`; rooms are "_wing.room"."""

    start: str
    end: str
    name: str


def room(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def wing(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def target(module: str, name: str) -> str:
    """The room that is imported, or imported from."""
    module = module.removeprefix("traceax.")
    return f"{module}.{name}" if module in WINGS else module


def arrows(path: Path, start: str = "") -> list[Arrow]:
    """A room that imports `traceax`, as users do, stands upon all that it exports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    start = start or room(path)
    drawn = [
        Arrow(start, target((node.module or ""), alias.name), alias.name)
        for node in imports
        if (node.module or "").startswith("traceax.")
        for alias in node.names
    ]
    whole = [alias for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    if any(alias.name == "traceax" for alias in whole):
        drawn += arrows(PACKAGE / "__init__.py", start)
    return drawn


ARROWS = [arrow for path in ROOMS for arrow in arrows(path)]
BETWEEN = {(wing(a.start), wing(a.end)) for a in ARROWS if wing(a.start) != wing(a.end)}


def floors(between: set[tuple[str, str]]) -> dict[str, int]:
    """As low as their arrows let them be; a circle is an error."""
    below = {w: {end for start, end in between if start == w} for w in WINGS}
    floor: dict[str, int] = {}
    for w in TopologicalSorter(below).static_order():
        floor[w] = 1 + max((floor[other] for other in below[w]), default=0)
    return floor


def the_tour() -> dict[str, int]:
    """The picture in the first lines of `traceax/_core/__init__.py`."""
    text = ast.get_docstring(ast.parse((PACKAGE / "_core" / "__init__.py").read_text()))
    drawn: dict[str, int] = {}
    floor = 0
    for words in map(str.split, (text or "").splitlines()):
        if words[:1] == ["layer"]:
            floor, words = int(words[1]), words[2:]
        if words and words[0] in WINGS:
            drawn[words[0]] = floor
    return drawn


def test_the_tour_is_of_this_house() -> None:
    """No arrow runs upwards, or a wing would stand higher than it is drawn."""
    assert floors(BETWEEN) == the_tour()
    assert max(the_tour().values()) == 4
    assert len(WINGS) == 7
    assert len(BETWEEN) <= 24


def test_the_tour_points_at_what_is_there() -> None:
    """Where a new thing goes: rooms, files beside the package, folders."""
    text = (PACKAGE / "_core" / "__init__.py").read_text()
    table = text.split("to look at:")[1].split("Whatever")[0]
    places = [str(path.with_suffix("").relative_to(PACKAGE)) for path in ROOMS]
    known = {place.replace("/", ".") for place in places}
    known |= {place.rpartition(".")[2] for place in known}
    known |= {path.stem for path in (ROOT / "tests" / "benchmarks").glob("*.py")}
    known |= {path.name for path in PACKAGE.glob("*.py")}
    named = re.findall(r"`([^`]+)`", table)
    assert len(named) > 20
    assert [n for n in named if n not in known and not (ROOT / n).is_dir()] == []


@pytest.mark.parametrize("upwards", [("_core", "_estimators"), ("_linalg", "_core")])
def test_an_arrow_upwards_is_seen(upwards: tuple[str, str]) -> None:
    with pytest.raises((ValueError, AssertionError)):
        assert floors(BETWEEN | {upwards}) == the_tour()


def test_no_room_is_part_of_a_circle() -> None:
    below = {room(path): {a.end for a in arrows(path)} for path in ROOMS}
    assert len(list(TopologicalSorter(below).static_order())) == len(ROOMS)


def test_nothing_private_is_taken_from_another_room() -> None:
    assert not [arrow for arrow in ARROWS if arrow.name.startswith("_")]


@pytest.mark.parametrize("path", ROOMS, ids=room)
def test_rooms_are_of_a_size(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= 500
    assert ast.get_docstring(ast.parse(source))
    assert "jax._src" not in source


@pytest.mark.parametrize("name", WINGS)
def test_a_wing_tells_a_stranger_what_it_is_for(name: str) -> None:
    """It says so in its first lines, exports nothing, and is tested under its name."""
    tree = ast.parse((PACKAGE / name / "__init__.py").read_text())
    words = ast.get_docstring(tree) or ""
    assert len(tree.body) == 1
    assert "A new " in words
    assert (name == "_core") == words.startswith("What lives where")
    assert len([path for path in ROOMS if path.parent.name == name]) <= 17
    assert list((ROOT / "tests" / name.strip("_")).glob("test_*.py"))


def test_public_things_are_called_as_users_call_them() -> None:
    for name, thing in vars(traceax).items():
        if not name.startswith("_") and not inspect.ismodule(thing):
            assert (thing.__module__, thing.__qualname__) == ("traceax", name)


def test_importing_takes_no_detour() -> None:
    """What is sparse, or only the tests' or the command line's, is imported by who asks for
    it."""
    program = """
import sys, jax, equinox, lineax
before = set(sys.modules)
import traceax
new = set(sys.modules) - before
print(*{n for n in new if not n.startswith("traceax.") or "testing" in n})
"""
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    new = done.stdout.split()
    assert "traceax" in new
    heavy = (
        "hypothesis",
        "scipy.sparse",
        "jax.experimental.sparse",
        "matplotlib",
        "argparse",
    )
    assert not [name for name in new if name.startswith(heavy) or "testing" in name]


def test_tests_of_ones_own_need_hypothesis_and_say_so() -> None:
    program = """
import sys
sys.modules["hypothesis"] = None
import traceax.testing
"""
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("ImportError: traceax.testing must have hypothesis")
    assert 'pip install "traceax[test]"' in last


def test_what_is_left_to_the_slow_tests_exists() -> None:
    for file, tests in SELDOM.items():
        text = (ROOT / "tests" / file).read_text()
        assert [name for name in tests if f"def {name}(" not in text] == []
