"""The site: its pages' programs run, it shows every public name, it builds without warning
and asks nobody else for anything.

What needs mkdocs is left out where the extra `site` is not installed; CI installs it."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import pytest

import traceax as tx
from traceax import testing

ROOT = Path(__file__).parent.parent
SITE = ROOT / "notebooks" / "site"
PAGES = sorted((SITE / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WITH_PROGRAMS = [path for path in PAGES if BLOCK.search(path.read_text())]
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs the extra `site`"
)


@pytest.mark.parametrize("path", WITH_PROGRAMS, ids=lambda path: path.stem)
def test_programs_run(path: Path) -> None:
    with jax.enable_x64(False):
        for block in BLOCK.findall(path.read_text()):
            exec(compile(block, path.name, "exec"), {})


def test_every_public_name_is_in_the_reference_once() -> None:
    reference = "\n".join(
        path.read_text() for path in (SITE / "docs" / "reference").glob("*")
    )
    shown = sorted(re.findall(r"^::: ([\w.]+)$", reference, re.MULTILINE))
    names = [n for n, v in vars(tx).items() if getattr(v, "__module__", "") == "traceax"]
    public = [f"traceax.{name}" for name in names]
    public += [f"traceax.testing.{name}" for name in testing.__all__]
    assert shown == sorted(public)


def test_samplers_are_told_what_is_asked_of_their_probes() -> None:
    page = (SITE / "docs" / "reference" / "samplers.md").read_text()
    assert "E[z z*] = I" in page.split("| |")[0]


# Coming from another library: what each side needs, and how far the two may differ.
LIBRARIES = {
    "matfree": ("matfree", 0.2),
    "traceax1": (None, 0.3),
    "gpytorch": ("gpytorch", 0.25),
    "curvlinops": ("curvlinops", 0.3),
}
OLD = os.environ.get("TRACEAX_1")


def printed(name: str, **environment: str) -> list[float]:
    run = [sys.executable, str(SITE / "examples" / f"{name}.py")]
    where = os.environ | environment
    done = subprocess.run(
        run, env=where, cwd=SITE, capture_output=True, text=True, timeout=110, check=True
    )
    return [float(word) for word in done.stdout.split()]


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_what_one_writes_coming_from_elsewhere_agrees(name: str) -> None:
    package, tolerance = LIBRARIES[name]
    ours = printed(f"{name}_ours", PYTHONPATH=str(ROOT))
    assert all(abs(number) > 0.1 for number in ours)
    if name == "traceax1" and OLD is None:
        pytest.skip("TRACEAX_1 names no folder with traceax 1.0.2")
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    theirs = printed(f"{name}_theirs", PYTHONPATH=OLD or "")
    assert ours == pytest.approx(theirs, rel=tolerance)


def test_examples_are_all_shown() -> None:
    page = (SITE / "docs" / "guide" / "coming_from.md").read_text()
    shown = sorted(re.findall(r"^beside: (\w+), ", page, re.MULTILINE))
    assert shown == sorted(LIBRARIES)
    files = sorted(path.stem for path in (SITE / "examples").glob("*.py"))
    assert files == sorted(
        f"{name}_{side}" for name in LIBRARIES for side in ("ours", "theirs")
    )


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    run = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    run += ["-f", str(SITE / "mkdocs.yml"), "-d", str(folder)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return folder


@needs_mkdocs
@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(built: Path) -> None:
    """Links may lead away; scripts, styles, fonts and pictures come with the site."""
    pages = list(built.rglob("*.html"))
    assert len(pages) > 25
    taken = re.compile(
        r"""<(?!a\b|link rel="canonical")[^<>]*\b(?:src|href)=["']?(?:https?:)?//"""
    )
    imported = re.compile(r"""(?:@import|url\(|from)\s*["'(]+(?:https?:)?//""")
    for path in [*pages, *built.rglob("*.css")]:
        text = path.read_text()
        assert not taken.search(text), (path, taken.search(text))
        assert not imported.search(text), (path, imported.search(text))


@needs_mkdocs
@pytest.mark.slow
def test_mathematics_is_drawn(built: Path) -> None:
    """What is left of a formula as it was written would have a single backslash; in the
    strings of programs it is doubled."""
    left = re.compile(r"\$[^$<>\n\\]*\\[a-z]+[^$<>\n\\]*\$")
    for path in built.rglob("*.html"):
        assert not left.search(path.read_text()), path
    assert "<math" in (built / "background" / "how_it_works" / "index.html").read_text()
    assert "<math" in (built / "notebooks" / "quickstart" / "index.html").read_text()


@needs_mkdocs
@pytest.mark.slow
def test_docstrings_and_derivations_are_shown(built: Path) -> None:
    traces = (built / "reference" / "traces" / "index.html").read_text()
    for words in (
        "traceax.xtrace",
        "<strong>Arguments</strong>",
        "<strong>Derivatives</strong>",
        'href="../../guide/conventions/#conventions"',
    ):
        assert words in traces
    assert (
        "<em>"
        not in traces.split('id="traceax.xtrace"')[1].split('id="traceax.xnystrace"')[0]
    )
    derivations = (built / "background" / "derivations" / "index.html").read_text()
    assert "derivation:" not in derivations
    assert "E r(B; X) = t(B)" in derivations


@needs_mkdocs
@pytest.mark.slow
def test_names_in_prose_lead_to_the_reference(built: Path) -> None:
    link = 'href="{}reference/traces/#traceax.xtrace"><code>xtrace</code>'
    assert link.format("") in (built / "index.html").read_text()
    choosing = (built / "guide" / "choosing" / "index.html").read_text()
    assert link.format("../../") in choosing
    notebook = (built / "notebooks" / "quickstart" / "index.html").read_text()
    assert 'href="../../reference/traces/#traceax.trace"' in notebook
    for path in built.rglob("*.html"):
        assert "<autoref" not in path.read_text(), path


@needs_mkdocs
@pytest.mark.slow
def test_two_libraries_stand_side_by_side(built: Path) -> None:
    page = (built / "guide" / "coming_from" / "index.html").read_text()
    assert "beside:" not in page
    grids = re.findall(r'<div class="grid">(.*?)\n</div>', page, re.DOTALL)
    titles = [re.findall(r'class="filename">(.*?)<', grid) for grid in grids]
    assert [ours for _, ours in titles] == ["traceax"] * len(LIBRARIES)


@needs_mkdocs
@pytest.mark.slow
def test_search_knows_every_public_name(built: Path) -> None:
    index = json.loads((built / "search" / "search_index.json").read_text())
    titles = " ".join(entry["title"] for entry in index["docs"])
    for name in ("trace", "logdet", "pool", "divergence", "rademacher"):
        assert f"traceax.{name}" in titles


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing of what was asked for."""


@pytest.fixture
def served() -> Any:
    """A page of Chromium, the address of a folder, what was asked for, what went wrong."""

    @contextmanager
    def open_browser(folder: Path) -> Iterator[tuple[Any, str, list[str], list[str]]]:
        sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
        handler = partial(Quiet, directory=str(folder))
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked: list[str] = []
        complaints: list[str] = []
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=chromium(), args=["--no-sandbox"]
            )
            page = browser.new_page()
            page.on("request", lambda request: asked.append(request.url))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on(
                "console",
                lambda words: (
                    complaints.append(words.text) if words.type == "error" else None
                ),
            )
            try:
                yield page, f"http://127.0.0.1:{server.server_port}", asked, complaints
            finally:
                browser.close()
                server.shutdown()
                server.server_close()

    return open_browser


@needs_mkdocs
@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")
def test_in_a_browser(built: Path, served: Any) -> None:
    """Search finds xtrace; a notebook's pictures have loaded; nobody else was asked."""
    with served(built) as (page, address, asked, complaints):
        page.goto(address)
        page.locator("input.md-search__input").click()
        page.locator("input.md-search__input").press_sequentially("xtrace", delay=30)
        found = page.locator(".md-search-result__item a", has_text="traceax.xtrace").first
        found.wait_for(timeout=20_000)
        found.click()
        page.locator("[id='traceax.xtrace']").wait_for(timeout=20_000)
        page.goto(f"{address}/notebooks/quickstart/")
        pictures = page.locator(".jp-RenderedImage img")
        assert pictures.count() >= 2
        for index in range(pictures.count()):
            assert pictures.nth(index).evaluate("image => image.naturalWidth") > 100
        assert page.locator("math").first.bounding_box()["height"] > 5
        page.goto(address)
        readme = page.locator("article img").first
        assert readme.evaluate("image => image.naturalWidth") > 100
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith((address, "data:"))] == []
    assert complaints == []
