"""What is written is true: examples run, docstrings are complete, versions agree."""

import doctest
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import traceax as tx
from tests.helpers import cases, default_settings, programs
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
# `inspect.isfunction` does not know samplers, which are objects, but users call them.
DOCUMENTED = FUNCTIONS | {n: v for n, v in PUBLIC.items() if isinstance(v, tx.Sampler)}
SECTIONS = ("Arguments", "Returns", "Raises", "Derivatives", "Cost", "Example")
SECTIONS += ("Reference", "See also")
NEEDED = [title for title in SECTIONS if title not in ("Raises", "Derivatives")]


def sections(name: str) -> dict[str, str]:
    """Return the parts of a public docstring by their titles, in order."""
    documentation = inspect.getdoc(PUBLIC[name]) or ""
    titles = "|".join((*SECTIONS, "Attributes"))
    _, *parts = re.split(rf"\*\*({titles})\*\*", documentation)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstrings_are_complete_and_in_order(name: str) -> None:
    """They describe every parameter, and say what is returned. Docstrings of estimators
    say whether there is a bias."""
    documentation = inspect.getdoc(PUBLIC[name]) or ""
    summary, blank = documentation.split("\n")[:2]
    assert summary.endswith(".")
    assert not blank
    found = sections(name)
    assert [section for section in NEEDED if section not in found] == []
    assert list(found) == [section for section in SECTIONS if section in found]
    described = re.findall(r"^- `(\w+)`: ", found["Arguments"], re.MULTILINE)
    assert described == list(inspect.signature(PUBLIC[name]).parameters)
    if "Estimate" in str(inspect.signature(PUBLIC[name]).return_annotation):
        assert re.search("[Bb]ias", documentation)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_lead_on(name: str) -> None:
    """Digital identifiers are links, and the last part names related public names."""
    documentation = inspect.getdoc(PUBLIC[name]) or ""
    for site, kind in (("doi.org", "doi"), ("arxiv.org/abs", "arXiv")):
        links = re.findall(rf"\[{kind}:(\S+)\]\(https://{site}/(\S+)\)", documentation)
        assert all(shown == target for shown, target in links)
        assert len(links) == documentation.count(f"{kind}:")
    *_, last = sections(name)
    assert last == "See also"
    related = re.findall(r"`(\w+)`", sections(name)[last])
    assert related
    assert set(related) <= PUBLIC.keys() - {name}


@pytest.mark.parametrize("name", cases(PUBLIC, "trace"))
def test_examples_in_docstrings(name: str) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in doctest.DocTestFinder().find(PUBLIC[name], name, globs={}):
        with default_settings(x64=True):
            runner.run(example)
    assert runner.tries > 0
    assert runner.failures == 0


NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@pytest.mark.slow
def test_examples_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    """They run one after the other. The first prints what is below it, up to rounding."""
    scope: dict[str, Any] = {}
    printed = []
    with default_settings():
        for block in programs(README):
            exec(compile(block, "README.md", "exec"), scope)
            printed.append(capsys.readouterr().out)
    (output,) = programs(README, "text")
    assert NUMBER.sub("#", printed[0]) == NUMBER.sub("#", output)
    for new, old in zip(NUMBER.findall(printed[0]), NUMBER.findall(output), strict=True):
        assert float(new) == pytest.approx(float(old), rel=0.02)


def measured(row: str, column: int) -> list[float]:
    """A column of the rows that begin so, in the benchmarks' page."""
    text = BENCHMARKS.split("\n## Likelihoods of Gaussian processes, whitened")
    text = "".join([text[0], *text[1].partition("\n## ")[1:]])  # which has the same rows
    rows = re.findall(rf"^{row} (.*)$", text, re.MULTILINE)
    return [float(found.split()[column].removesuffix("%")) for found in rows]


def spans(ratios: list[float], digits: int) -> str:
    return f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}"


def test_the_numbers_of_the_readme_are_in_the_tables_of_the_benchmarks() -> None:
    section = README.split("## Comparison with other libraries")[1]
    text = " ".join(section.split("\n## ")[0].split())
    for row, digits in (("gradient, matrix, 20 steps", 1), ("value, 20 steps", 2)):
        assert f"{measured(row, 2)[0]:.{digits}f} times" in text
    rows = [rf"\S+-1e-0\d +{side}" for side in ("traceax-240", "gpytorch")]
    errors, times = ([measured(row, column) for row in rows] for column in (0, 2))
    assert len(errors[0]) == len(errors[1]) == 8
    less = [other / ours for ours, other in zip(*errors, strict=True)]
    assert f"{min(less):.1f} to {max(less):.0f} times less" in text
    longer = [ours / other for ours, other in zip(*times, strict=True)]
    assert f"in {spans(longer, 1)} times the time" in text
    ours, other = (measured("logdet with error", column)[0] / 1000 for column in (0, 1))
    assert f"takes {ours:.1f} s, matfree {other:.1f} s" in text
    row = r"(?:flat|poly|exp|step) +\d+(?: +[0-9.]+%){3}"
    ours, other = (measured(row, column) for column in (0, 2))
    assert len(ours) == len(other) == 12
    assert f"in {spans(ours, 1)} % of runs, matfree's in {spans(other, 1)} %" in text


def test_what_the_readme_links_to_is_there() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]*)\)", README):
        assert (ROOT / link).exists(), link


def test_every_public_name_is_in_the_changelog() -> None:
    for name in PUBLIC:
        assert f"`{name}`" in CHANGELOG, name


def test_versions_agree() -> None:
    project = PYPROJECT["project"]
    assert f"## {project['version']}" in CHANGELOG
    assert project["version"] == tx.__version__
    assert f"version = {{{project['version']}}}" in README
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in README
    for package in ("jax", "equinox", "lineax"):
        (spec,) = (d for d in project["dependencies"] if re.match(rf"{package}>=", d))
        assert f"{package} {spec.split('>=')[1]} or newer" in " ".join(README.split())
    (pin,) = project["optional-dependencies"]["benchmarks"]
    assert pin.replace("==", " ") in CHANGELOG
