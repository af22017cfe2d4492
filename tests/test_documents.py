"""What is written is true: examples run, docstrings are complete, versions agree."""

import doctest
import inspect
import pydoc
import re
import tomllib
from pathlib import Path
from typing import Any

import jax
import pytest

import traceax as tx
from tests.benchmarks import report
from traceax import testing

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "tests" / "benchmarks" / "README.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

TESTING = {name: getattr(testing, name) for name in testing.__all__}
PUBLIC = {name: value for name, value in vars(tx).items() if not name.startswith("_")}
PUBLIC = {n: v for n, v in PUBLIC.items() if not inspect.ismodule(v)} | TESTING
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
SECTIONS = {
    "**Arguments**": True,
    "**Returns**": False,
    "**Raises**": False,
    "**Derivatives**": False,
    "**Cost**": True,
    "**Example**": True,
    "**Reference**": True,
}
CONVENTIONS = (ROOT / "notebooks/site/docs/guide/conventions.md").read_text()
TOLD_ONCE = ("operator", "key", "sampler", "batch_size", "progress_meter", "x", "args")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_are_complete_and_in_order(name: str) -> None:
    """What is left out is told on the page of conventions, to which they point."""
    documentation = inspect.getdoc(FUNCTIONS[name])
    assert documentation is not None
    summary, blank = documentation.split("\n")[:2]
    assert summary.endswith(".")
    assert not blank
    places = {section: documentation.find(section) for section in SECTIONS}
    for section, needed in SECTIONS.items():
        assert not needed or places[section] >= 0, section
    found = [place for place in places.values() if place >= 0]
    assert found == sorted(found)
    arguments = documentation[places["**Arguments**"] : found[1]]
    for parameter in inspect.signature(FUNCTIONS[name]).parameters:
        if f"`{parameter}`" not in arguments:
            assert parameter in TOLD_ONCE
            assert "guide's conventions)" in " ".join(arguments.split())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_of_estimators_say_whether_there_is_a_bias(name: str) -> None:
    function = FUNCTIONS[name]
    if "Estimate" in str(inspect.signature(function).return_annotation):
        assert re.search("[Bb]ias", function.__doc__ or "")


def test_docstrings_are_short() -> None:
    """At most 1,700 lines, methods of classes included, and 70 for each."""
    classes = [thing for thing in PUBLIC.values() if inspect.isclass(thing)]
    methods = [
        member
        for thing in classes
        for name, member in vars(thing).items()
        if inspect.isfunction(member) and not name.startswith("_")
    ]
    assert tx.Estimate.interval in methods
    things = [*PUBLIC.values(), *methods]
    lines = [len((inspect.getdoc(thing) or "").splitlines()) for thing in things]
    assert max(lines) <= 70
    assert sum(lines) <= 1700


def test_the_page_of_conventions_tells_what_docstrings_leave_out() -> None:
    headings = re.findall(r"^## (.*)$", CONVENTIONS, re.MULTILINE)
    assert headings[:5] == ["Operators", "Keys", "Budgets", "Dtypes", "Exactness"]
    assert headings[5:] == ["Error bars", "Derivatives", "Batches", "Errors"]
    entries = re.findall(r"^- (`.*?):", CONVENTIONS, re.MULTILINE)
    told = {name for entry in entries for name in re.findall(r"`(\w+)`", entry)}
    shared = {"num_matvecs", "num_probes", "num_steps", "structure", "fn"}
    assert told == {*TOLD_ONCE, *shared}


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
    """On the page of conventions, which also says what the terms of docstrings mean."""
    (_, told) = CONVENTIONS.split("- `sampler`: ")
    assert "E[z z*] = I" in " ".join(told.split("\n- ")[0].split())
    words = " ".join(CONVENTIONS.split())
    for term in ("independent probes", "the sphere, or signs"):
        assert f"**{term}**" in words


def test_derivations_that_the_site_shows_are_there() -> None:
    page = (ROOT / "notebooks/site/docs/background/derivations.md").read_text()
    shown = re.findall(r"^derivation: ([\w.]+)$", page, re.MULTILINE)
    assert len(shown) > 20
    for name in shown:
        assert (ROOT / "traceax" / (name.replace(".", "/") + ".py")).exists(), name


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


NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def test_examples_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, as a reader types them; the first prints what stands below it,
    but for what rounding makes of other machines."""
    scope: dict[str, Any] = {}
    printed = []
    with jax.enable_x64(False):
        for block in blocks("python"):
            exec(compile(block, "README.md", "exec"), scope)
            printed.append(capsys.readouterr().out)
    (output,) = blocks("text")
    assert NUMBER.sub("#", printed[0]) == NUMBER.sub("#", output)
    for new, old in zip(NUMBER.findall(printed[0]), NUMBER.findall(output), strict=True):
        assert float(new) == pytest.approx(float(old), rel=0.02)


def test_the_readme_is_one_screen() -> None:
    assert len(README.encode()) <= 6000
    first, *recipes = blocks("python")
    assert len(recipes) == 6
    assert max(len(recipe.strip().splitlines()) for recipe in recipes) <= 8
    assert max(map(len, first.splitlines())) <= 92
    (picture,) = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert 1000 < (ROOT / picture).stat().st_size <= 80_000


def measured(row: str, column: int) -> list[float]:
    """A column of the rows that begin so, in the benchmarks' page."""
    rows = re.findall(rf"^{row} (.*)$", BENCHMARKS, re.MULTILINE)
    return [float(found.split()[column].removesuffix("%")) for found in rows]


def spans(ratios: list[float], digits: int) -> str:
    return f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}"


def test_the_readmes_numbers_are_measured() -> None:
    """In all cells of a table, not in the best of them."""
    told = " ".join(README.split("Beside others")[1].split("## ")[0].split())
    for row, digits in (("gradient, matrix, 20 steps", 1), ("value, 20 steps", 2)):
        assert f"{measured(row, 2)[0]:.{digits}f} times" in told
    errors, times = (
        [measured(rf"\S+-1e-0\d +{side}", column) for side in ("traceax-240", "gpytorch")]
        for column in (0, 2)
    )
    assert len(errors[0]) == len(errors[1]) == 4
    less = [other / ours for ours, other in zip(*errors, strict=True)]
    assert f"{min(less):.1f} to {max(less):.0f} times less" in told
    longer = [ours / other for ours, other in zip(*times, strict=True)]
    assert f"in {spans(longer, 1)} times the time" in told
    ours, other = (
        measured(r"(?:flat|poly|exp|step) +\d+(?: +[0-9.]+%){3}", c) for c in (0, 2)
    )
    assert len(ours) == len(other) == 12
    assert f"in {spans(ours, 1)} % of runs, matfree's in {spans(other, 1)} %" in told


def test_the_benchmarks_page_has_every_table() -> None:
    """Dated, with versions and the machine, as its command writes it."""
    sections = report.sections_of(BENCHMARKS)
    assert list(sections) == [section.title for section in report.SECTIONS]
    for section in report.SECTIONS:
        text = sections[section.title]
        assert f"`python -m tests.benchmarks.{section.command}`, 20" in text
        assert re.search(r"Python 3\.\d+\.\d+, jax [\d.]+, .* cores of .*, load", text)
        assert len(text.split("```text")[1].splitlines()) > 5
    assert report.page_of(sections) == BENCHMARKS


def test_what_the_readme_links_to_is_there() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]*)\)", README):
        assert (ROOT / link).exists(), link


def test_the_readme_begins_with_two_commands() -> None:
    """One line each, which CI reads and runs."""
    first, second = blocks("sh")[:2]
    assert len(first.strip().splitlines()) == len(second.strip().splitlines()) == 1
    assert "python -m traceax" in first
    assert "test" in second
    assert "pytest" in second


def test_every_public_name_is_in_the_changelog() -> None:
    """The site has them too; its own tests look."""
    for name in PUBLIC:
        assert f"`{name}`" in CHANGELOG, name


def test_names_in_the_readmes_table_exist() -> None:
    """And every question that the library answers has its automatic choice there."""
    table = README.split("## Which function?")[1].split("## ")[0]
    named = {name for name in re.findall(r"`(\w+)`", table) if name != "pattern"}
    assert named <= set(PUBLIC)
    assert {"trace", "diagonal", "logdet", "function_trace", "pool"} <= named


def test_versions_agree() -> None:
    project = PYPROJECT["project"]
    assert f"## {project['version']}" in CHANGELOG
    assert project["version"] == tx.__version__
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in README
    for package in ("jax", "equinox", "lineax"):
        (spec,) = (d for d in project["dependencies"] if re.match(rf"{package}>=", d))
        assert f"{package} {spec.split('>=')[1]} or newer" in " ".join(README.split())
    (pin,) = project["optional-dependencies"]["benchmarks"]
    assert pin.replace("==", " ") in CHANGELOG


def test_the_package_is_typed() -> None:
    assert (ROOT / "traceax" / "py.typed").exists()
