"""What is written is true: examples run, docstrings are complete, versions agree."""

import doctest
import inspect
import json
import pydoc
import re
import tomllib
from pathlib import Path

import jax
import pytest

import traceax as tx
from traceax import testing

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

TESTING = {name: getattr(testing, name) for name in testing.__all__}
PUBLIC = {name: value for name, value in vars(tx).items() if not name.startswith("_")}
PUBLIC = {n: v for n, v in PUBLIC.items() if not inspect.ismodule(v)} | TESTING
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
SECTIONS = (
    "**Arguments**",
    "**Returns**",
    "**Raises**",
    "**Derivatives**",
    "**Cost**",
    "**Example**",
    "**Reference**",
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_are_complete_and_in_order(name: str) -> None:
    documentation = inspect.getdoc(FUNCTIONS[name])
    assert documentation is not None
    places = [documentation.find(section) for section in SECTIONS]
    assert -1 not in places, SECTIONS[places.index(-1)]
    assert places == sorted(places)
    arguments = documentation[places[0] : places[1]]
    for parameter in inspect.signature(FUNCTIONS[name]).parameters:
        assert f"- `{parameter}`:" in arguments


def test_estimate_is_documented() -> None:
    for thing in (tx.Estimate, tx.Estimate.interval):
        assert inspect.getdoc(thing)
    attributes = inspect.getdoc(tx.Estimate) or ""
    for field in tx.Estimate.__dataclass_fields__:
        assert f"- `{field}`:" in attributes


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_in_docstrings(name: str) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in doctest.DocTestFinder().find(PUBLIC[name], name, globs={}):
        runner.run(example)
    assert runner.tries > 0
    assert runner.failures == 0


def test_samplers_are_told_what_is_asked_of_their_probes() -> None:
    """Wherever one may be given, and where one's own are introduced."""
    takers = [f for f in FUNCTIONS.values() if "sampler" in inspect.signature(f).parameters]
    assert len(takers) >= 20
    for function in takers:
        (_, told) = (function.__doc__ or "").split("- `sampler`: ")
        told = re.split(r"\n    - |\n\n", told)[0]
        assert "E[z z*] = I" in " ".join(told.split()), function.__name__
    assert "E[z z*] = I" in re.split("samplers, functions", README)[1][:400]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_opens_with_a_signature_that_one_can_read(name: str) -> None:
    """Two or three lines of a terminal, four where there are seven arguments or more, five
    for nine: annotations are shown as they are written."""
    shown = pydoc.plain(pydoc.render_doc(FUNCTIONS[name]))
    # From Python 3.13 on with a line for each argument, if they do not fit on one.
    pattern = r"[^\n]*\(\n(.*?\n)\) -> [^\n]*|[^\n]*"
    heading = re.match(pattern, shown.split("\n\n")[1], re.DOTALL)
    assert heading is not None
    signature = " ".join(re.sub(r" at 0x\w+", "", heading[0]).split())
    signature = signature.replace("( ", "(").replace(" )", ")")
    parameters = list(inspect.signature(FUNCTIONS[name]).parameters)
    assert re.match(rf"{name}\((\*, )?{parameters[0]}: ", signature)
    if "operator" in parameters:  # comes first, or right after what is to be done with it
        assert parameters.index("operator") == (1 if parameters[0] == "algorithm" else 0)
    lines = 3 + (len(parameters) >= 7) + (len(parameters) >= 9)
    assert len(signature) <= lines * 80, signature
    assert "Union" not in signature


def test_examples_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    with jax.enable_x64(False):
        for block in blocks("python"):
            exec(compile(block, "README.md", "exec"), {})
    assert re.search(
        r"[\d.]+, between [\d.]+ and [\d.]+; slope -[\d.]+", capsys.readouterr().out
    )


def test_the_readme_begins_with_two_commands() -> None:
    """One line each, which CI reads and runs."""
    first, second = blocks("sh")[:2]
    assert len(first.strip().splitlines()) == len(second.strip().splitlines()) == 1
    assert "python -m traceax" in first
    assert "test" in second
    assert "pytest" in second


def test_every_public_name_is_in_the_readme_and_the_changelog() -> None:
    for name in PUBLIC:
        assert f"`{name}" in README or f"tx.{name}" in README, name
        assert f"`{name}`" in CHANGELOG, name


def test_versions_agree() -> None:
    project = PYPROJECT["project"]
    assert f"## {project['version']}" in CHANGELOG
    assert project["version"] == tx.__version__
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in README
    for package in ("jax", "equinox", "lineax"):
        (spec,) = (d for d in project["dependencies"] if re.match(rf"{package}>=", d))
        assert f"{package} {spec.split('>=')[1]} or newer" in README
    (pin,) = project["optional-dependencies"]["benchmarks"]
    assert pin.replace("==", " ") in CHANGELOG


def test_notebooks_assert_what_they_claim() -> None:
    """CI executes them; here: kept without outputs, with pictures and assertions."""
    notebooks = list((ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks
    for path in notebooks:
        cells = json.loads(path.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        assert not any(cell.get("outputs") for cell in cells)
        assert sum("assert " in source for source in code) >= 4
        assert sum("plt." in source or "ax" in source for source in code) >= 2


def test_the_package_is_typed() -> None:
    assert (ROOT / "traceax" / "py.typed").exists()
