"""The site: its programs run, it shows every public name, and nothing comes from elsewhere.

The tests of the built site need the extra `site`, which CI installs."""

import importlib.util
import json
import os
import re
from html import unescape
from pathlib import Path

import pytest

import traceax as tx
from tests.helpers import default_settings, programs, python
from traceax import testing

ROOT = Path(__file__).parent.parent
SITE = ROOT / "notebooks" / "site"
PAGES = {path.stem: path.read_text() for path in sorted((SITE / "docs").rglob("*.md"))}
NOTEBOOKS = sorted(SITE.parent.glob("*.ipynb"))
WITH_PROGRAMS = [name for name, text in PAGES.items() if programs(text)]


# Packages of single programs. Without them, the other programs of a page still run.
OPTIONAL = ("matplotlib", "numpyro")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_PROGRAMS)
def test_programs_run(name: str) -> None:
    missing = [p for p in OPTIONAL if importlib.util.find_spec(p) is None]
    skipped = []
    with default_settings():
        for block in programs(PAGES[name]):
            needed = [p for p in missing if f"import {p}" in block]
            skipped += needed
            if not needed:
                exec(compile(block, f"{name}.md", "exec"), {})
    if skipped:
        pytest.skip(f"all programs ran except those that need {' and '.join(skipped)}")


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = [path.read_text() for path in (SITE / "docs" / "reference").glob("*")]
    shown = sorted(re.findall(r"^::: ([\w.]+)$", "\n".join(pages), re.MULTILINE))
    names = [n for n, v in vars(tx).items() if getattr(v, "__module__", "") == "traceax"]
    names.remove("__getattr__")
    public = [f"traceax.{name}" for name in names]
    public += [f"traceax.testing.{name}" for name in testing.__all__]
    assert shown == sorted(public)


# What people type into the search, and the page that answers.
ANSWERS = {
    "confidence interval": "error_bars",
    "GPU": "precision",
    "heteroscedastic": "likelihoods",
    "Kronecker": "structured",
    "limits": "limits",
    "mini-batch": "curvature",
    "NumPyro": "recipes",
    "PINN": "losses",
    "reproducible": "conventions",
    "save": "recipes",
    "sign of the determinant": "functions",
    "TF32": "precision",
    "tolerance": "recipes",
}


def test_pages_have_the_words_that_people_type() -> None:
    for words, page in ANSWERS.items():
        assert words.lower() in " ".join(PAGES[page].lower().split()), words


# Coming from another library: how far the two may differ.
LIBRARIES = {"matfree": 0.2, "traceax1": 0.3, "gpytorch": 0.25, "curvlinops": 0.3}
OLD = os.environ.get("TRACEAX_1")


def printed(name: str, **environment: str) -> list[float]:
    words = python(str(SITE / "examples" / f"{name}.py"), folder=SITE, **environment)
    return [float(word) for word in words.split()]


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_programs_for_two_libraries_agree(name: str) -> None:
    ours = printed(f"{name}_ours", PYTHONPATH=str(ROOT))
    assert all(abs(number) > 0.1 for number in ours)
    if name == "traceax1" and OLD is None:
        pytest.skip("TRACEAX_1 names no folder with traceax 1.0.2")
    if name != "traceax1" and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    theirs = printed(f"{name}_theirs", PYTHONPATH=OLD or "")
    assert ours == pytest.approx(theirs, rel=LIBRARIES[name])


def test_the_guide_shows_every_example() -> None:
    shown = re.findall(r"^beside: (\w+), ", PAGES["coming_from"], re.MULTILINE)
    assert sorted(shown) == sorted(LIBRARIES)
    files = {path.stem for path in (SITE / "examples").glob("*.py")}
    assert files == {f"{name}_{side}" for name in LIBRARIES for side in ("ours", "theirs")}


of_built_site = pytest.mark.xdist_group("built")  # one worker builds it


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the extra `site`")
    folder = tmp_path_factory.mktemp("site")
    run = ("-m", "mkdocs", "build", "--strict", "--quiet")
    python(*run, "-f", str(SITE / "mkdocs.yml"), "-d", str(folder), folder=ROOT)
    return folder


@pytest.mark.slow
@of_built_site
def test_the_built_site_fetches_nothing_and_draws_mathematics(built: Path) -> None:
    """Links may lead away; scripts, styles, fonts and pictures come with the site. An
    undrawn formula would have a single backslash; in strings of programs it is doubled."""
    pages = list(built.rglob("*.html"))
    assert len(pages) > 25
    tag = r"""<(?!a\b|link rel="canonical")[^<>]*"""
    taken = re.compile(tag + r"""\b(?:src|href)=["']?(?:https?:)?//""")
    imported = re.compile(r"""(?:@import|url\(|from)\s*["'(]+(?:https?:)?//""")
    undrawn = re.compile(r"\$[^$<>\n\\]*\\[a-z]+[^$<>\n\\]*\$")
    for path in [*pages, *built.rglob("*.css")]:
        text = path.read_text()
        for pattern in (taken, imported, *([undrawn] if path.suffix == ".html" else [])):
            assert not pattern.search(text), (path, pattern)
        assert "<autoref" not in text, path


CONVENTIONS = 'href="../../guide/conventions/#conventions"'
VERSION = f"traceax {tx.__version__}"
FOUND = ("trace", "logdet", "pool", "divergence", "rademacher")
SHOWN = {
    "": ['href="reference/traces/#traceax.xtrace"><code>xtrace</code>', VERSION],
    "guide/choosing": ['href="../../reference/traces/#traceax.xtrace"><code>xtrace'],
    "notebooks/quickstart": ['href="../../reference/traces/#traceax.trace"', "<math"],
    "background/how_it_works": ["<math"],
    "background/derivations": ["E r(B; X) = t(B)"],
    "reference/traces": ["traceax.xtrace", "<strong>Arguments</strong>", CONVENTIONS],
    "search/search_index.json": [f"traceax.{name}" for name in FOUND],
}


@pytest.mark.slow
@of_built_site
@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page or "index")
def test_pages_of_the_built_site_show(built: Path, page: str) -> None:
    path = built / page
    text = (path / "index.html" if path.is_dir() else path).read_text()
    assert [words for words in SHOWN[page] if words not in text] == []
    assert "derivation:" not in text


@pytest.mark.slow
@of_built_site
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_of_the_built_site(built: Path, path: Path) -> None:
    """Pictures have their alt texts, the notebook is offered, its first cell is hidden."""
    folder = built / "notebooks" / path.stem
    page = (folder / "index.html").read_text()
    cells = json.loads(path.read_text())["cells"]
    texts = [text for cell in cells for text in cell["metadata"].get("alt", [])]
    shown = re.findall(r'<img alt="([^"]*)"[^>]* src="data:', page)
    assert [unescape(text) for text in shown] == texts
    assert f'href="{path.name}" download' in page
    assert (folder / path.name).read_bytes() == path.read_bytes()
    links = re.findall(r'href="\.\./(\w+)/"', page)
    assert set(links) <= {path.stem for path in NOTEBOOKS}
    assert re.findall(r'href="(?!\.\./)([^"/]*\.ipynb)"', page) == [path.name]
    assert "jax.config.update" not in page
    assert "rcParams" not in page


@pytest.mark.slow
@of_built_site
def test_two_libraries_stand_side_by_side(built: Path) -> None:
    page = (built / "guide" / "coming_from" / "index.html").read_text()
    assert "beside:" not in page
    grids = re.findall(r'<div class="grid">(.*?)\n</div>', page, re.DOTALL)
    titles = [re.findall(r'class="filename">(.*?)<', grid) for grid in grids]
    assert [ours for _, ours in titles] == ["traceax"] * len(LIBRARIES)
