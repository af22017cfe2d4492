"""What the site shows and does not hold: README, changelog, benchmarks, licence, notebooks.

Each stands once in the repository; here it becomes a page. A line `derivation: _wing.room`
is what that file says of itself in its first lines; `beside: name, Library` two programs of
that name in `examples`, side by side. Mathematics, `$...$` in markdown, becomes MathML,
which browsers draw by themselves: no script, nothing fetched. A public name in prose,
`xtrace`, leads to its place in the reference.
"""

import ast
import json
import re
import tempfile
import tomllib
from html import escape
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

SITE = Path(__file__).parent
EXAMPLES = SITE / "examples"
NOTEBOOKS = SITE.parent
ROOT = NOTEBOOKS.parent
PAGES = {
    "index.md": ROOT / "README.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "benchmarks.md": ROOT / "tests" / "benchmarks" / "README.md",
    "license.md": ROOT / "LICENSE",
}
# How much more a page counts in the search than the others.
BOOSTS = {
    "guide/": 2.0,
    "reference/": 2.0,
    "benchmarks.md": 0.2,
    "changelog.md": 0.2,
    "license.md": 0.2,
}
LINKS = {
    "](notebooks)": "](notebooks/quickstart.ipynb)",
    "](LICENSE)": "](license.md)",
    "](CHANGELOG.md)": "](changelog.md)",
    "](tests/benchmarks/README.md)": "](benchmarks.md)",
    "](notebooks/site/docs/": "](",
}
VERBATIM = r"```.*?^\s*```|`[^`\n]+`"
FORMULA = r"\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?P<inline>[^$`]+?)\$(?![\w$])"
LINKED_OR_SHOWN = r"<pre.*?</pre>|<(?P<tag>a|autoref|h\d)\b.*?</(?P=tag)>"
CONVENTIONS = r"guide's\s+conventions"
NAME = r"<code>(?:tx\.|traceax\.)?(?P<name>\w+)</code>"
# What the package's own names for types stand for, as signatures show them.
TYPES = {
    "Field": "Callable",
    "Function": "Callable",
    "GivenPoint": "PyTree",
    "Names": "Sequence[str] | None",
    "Operator": "lx.AbstractLinearOperator",
    "Pair": "tuple[lx.AbstractLinearOperator, Array]",
    "Real": "float | Array",
    "SamplerLike": "Callable",
    "Shift": "ArrayLike | lx.DiagonalLinearOperator",
    "Structure": "PyTree[jax.ShapeDtypeStruct]",
}
SIGNATURE = r'<div class="doc-signature.*?</div>'
UNDESCRIBED = 'alt="No description has been provided for this image"'
DOWNLOAD = (
    '<p><a href="{}" download>Download this notebook</a>. It also has the imports, '
    "settings and assertions that this page leaves out.</p>"
)
SCRIPTS_FROM_ELSEWHERE = re.compile(
    r'<script[^>]*\bsrc="https?:.*?</script>'
    r'|<script type="text/x-mathjax-config">.*?</script>'
    r'|<script type="module">(?:(?!</script>).)*https?:.*?</script>',
    re.DOTALL,
)


def mathematics(markdown: str) -> str:
    """Formulas as MathML, but for what stands in code."""

    def drawn(found: re.Match[str]) -> str:
        if found["block"]:
            return convert(found["block"].strip(), display="block")
        # In a span, or a line that begins with it is taken for a block of HTML.
        inline = found["inline"]
        return f"<span>{convert(inline)}</span>" if inline else found[0]

    return re.sub(f"{VERBATIM}|{FORMULA}", drawn, markdown, flags=re.DOTALL | re.MULTILINE)


def derivations(markdown: str) -> str:
    """Docstrings as they stand, line by line: their formulas are set in columns."""

    def room(found: re.Match[str]) -> str:
        path = ROOT / "traceax" / (found[1].replace(".", "/") + ".py")
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        first, _, rest = text.partition("\n\n")
        return f"\n### {' '.join(first.split())}\n\n`{found[1]}`\n\n```text\n{rest}\n```\n"

    return re.sub(r"^derivation: ([\w.]+)$", room, markdown, flags=re.MULTILINE)


def programs(markdown: str) -> str:
    """What one writes with a library, and with this one."""

    def columns(found: re.Match[str]) -> str:
        sides = {found[2]: "theirs", "traceax": "ours"}
        shown = ['<div class="grid" markdown>']
        for title, side in sides.items():
            program = (EXAMPLES / f"{found[1]}_{side}.py").read_text()
            shown += ["", f'```python title="{title}"', f"{program}```"]
        return "\n".join([*shown, "", "</div>"])

    return re.sub(r"^beside: (\w+), (.+)$", columns, markdown, flags=re.MULTILINE)


def documented() -> dict[str, str]:
    """Public names, and where the reference has them."""
    pages = (path.read_text() for path in (SITE / "docs" / "reference").glob("*.md"))
    shown = re.findall(r"^::: ([\w.]+)$", "\n".join(pages), re.MULTILINE)
    return {name.rpartition(".")[2]: name for name in shown}


def references(html: str) -> str:
    """Public names as links, but for what is a link, a heading or a program; and what
    docstrings call the guide's conventions."""
    names = documented()
    page = r'<autoref identifier="conventions">\g<0></autoref>'
    html = re.sub(CONVENTIONS, page, html)

    def linked(found: re.Match[str]) -> str:
        where = names.get(found["name"] or "")
        return f'<autoref identifier="{where}">{found[0]}</autoref>' if where else found[0]

    return re.sub(f"{LINKED_OR_SHOWN}|{NAME}", linked, html, flags=re.DOTALL)


def signatures(html: str) -> str:
    """Signatures with types that readers know in place of the package's own names."""

    def named(found: re.Match[str]) -> str:
        return f'<span class="n">{TYPES.get(found[1], found[1])}</span>'

    def readable(found: re.Match[str]) -> str:
        return re.sub(r'<span class="n">(\w+)</span>', named, found[0])

    return re.sub(SIGNATURE, readable, html, flags=re.DOTALL)


def page(path: Path) -> str:
    text = path.read_text()
    if not path.suffix:
        return f"# License\n\n<pre>{escape(text)}</pre>\n"
    for link, here in LINKS.items():
        text = text.replace(link, here)
    return text


def is_assertion(node: ast.stmt) -> bool:
    """Whether it is an assertion, or a condition or a loop of assertions alone."""
    if isinstance(node, ast.If | ast.For):
        return all(is_assertion(inner) for inner in [*node.body, *node.orelse])
    return isinstance(node, ast.Assert)


def without_assertions(source: str) -> str:
    """The lines of a cell without its assertions, which are tests. If a branch has nothing
    else, but another one has, they stay."""
    dropped = set[int]()
    for node in ast.walk(ast.parse(source)):
        for block in (getattr(node, "body", []), getattr(node, "orelse", [])):
            found = [x for x in block if is_assertion(x)] if isinstance(block, list) else []
            if found and (found != block or isinstance(node, ast.Module)):
                for x in found:
                    dropped.update(range(x.lineno - 1, x.end_lineno or x.lineno))
    lines = [x for i, x in enumerate(source.splitlines()) if i not in dropped]
    return "\n".join(lines).strip("\n")


def notebook(path: Path, folder: Path) -> None:
    """A copy in the folder, with formulas as MathML and without assertions."""
    content = json.loads(path.read_text())
    for cell in content["cells"]:
        source = "".join(cell["source"])
        shown = mathematics if cell["cell_type"] == "markdown" else without_assertions
        cell["source"] = shown(source)
    copy = folder / "notebooks" / path.name
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(json.dumps(content))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version in the header, after the name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.site_name = f"{project['name']} {project['version']}"
    return config


def described(html: str, path: Path) -> str:
    """Give every picture of a notebook its alt text, and the page a link to the notebook.

    The alt texts are a list in the metadata of the cell, one for each picture. They are
    used in the order of the pictures: nbconvert gives all pictures the same text."""
    cells = json.loads(path.read_text())["cells"]
    texts = iter([text for cell in cells for text in cell["metadata"].get("alt", [])])
    html = re.sub(UNDESCRIBED, lambda _: f'alt="{escape(next(texts))}"', html)
    return html.replace("</h1>", "</h1>" + DOWNLOAD.format(path.name), 1)


@event_priority(100)  # mkdocs-jupyter looks for notebooks after this
def on_files(files: Files, config: MkDocsConfig) -> Files:
    folder = tempfile.TemporaryDirectory(prefix="notebooks-")
    config.extra["notebooks"] = folder  # lives as long as the configuration
    for name, path in PAGES.items():
        files.append(File.generated(config, name, content=page(path)))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook(path, Path(folder.name))
        where = (folder.name, config.site_dir, config.use_directory_urls)
        files.append(File(f"notebooks/{path.name}", *where))
        download = f"notebooks/{path.stem}/{path.name}"  # next to the page
        files.append(File.generated(config, download, content=path.read_bytes()))
    for path in NOTEBOOKS.glob("*.svg"):
        drawing = f"notebooks/{path.name}"
        files.append(File.generated(config, drawing, content=path.read_bytes()))
    for path in PAGES["benchmarks.md"].parent.glob("*.svg"):
        files.append(File.generated(config, path.name, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for place, boost in BOOSTS.items():
        if page.file.src_uri.startswith(place):
            page.meta.setdefault("search", {"boost": boost})
    return mathematics(programs(derivations(markdown)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Drop the scripts that the notebooks' template would fetch, and add what it lacks."""
    html = SCRIPTS_FROM_ELSEWHERE.sub("", html)
    if page.file.src_uri.endswith(".ipynb"):
        html = re.sub(r'href="(\w+)\.ipynb"(?! download)', r'href="../\1/"', html)
        html = described(html, ROOT / page.file.src_uri)
    return references(signatures(html))
