"""Executes the notebooks and compares their outputs with the stored ones.

`python -m tests.notebooks [--store] [NAME ...]`, from the root of the repository, with the
extra `notebooks`; all of them if no NAME is given. `--store` writes the outputs. A run must

- reach its end, so that all assertions hold, and write nothing to stderr;
- have the same outputs in every cell, pictures and texts, and in these the same words;
- print the stored numbers within a factor of two in cells that assert something, because
  training magnifies the rounding of other machines. Times (`3.1 ms`) are not compared.

If TRACEAX_SHARE, the part of the training steps that is run, is below 1, a run must reach
its end and draw in the same cells.
"""

import argparse
import base64
import io
import json
import os
import re
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
TIME = re.compile(r"\s*(m?s\b|times (as (long|fast)|the time))")
LARGEST_PICTURE = 100_000

Cell = dict[str, Any]


def code_cells(notebook: dict[str, Any]) -> list[Cell]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(output: Cell) -> str:
    words = output.get("text") or output.get("data", {}).get("text/plain", "")
    return "".join(words)


def kind_of(output: Cell) -> str:
    return "picture" if "image/png" in output.get("data", {}) else "text"


def is_progress(output: Cell) -> bool:
    """A progress bar on stderr: `  40%|####      | 4/10`."""
    words = text_of(output).strip()
    return output.get("name") == "stderr" and bool(re.match(r"$|[^|\n]*\d+%\|", words))


def kinds(cell: Cell) -> list[str]:
    """The kinds of the outputs; consecutive texts are one."""
    found = [kind_of(output) for output in cell["outputs"]]
    both = zip(found, [None, *found], strict=False)
    return [kind for kind, before in both if (kind, before) != ("text", "text")]


def printed(cell: Cell) -> str:
    texts = [text_of(output) for output in cell["outputs"] if kind_of(output) == "text"]
    return "\n".join(texts)


def same_number(stored: float, fresh: float) -> bool:
    both_are_zero = max(abs(stored), abs(fresh)) < 1e-9
    return both_are_zero or (stored != 0 and 0.5 <= fresh / stored <= 2)


def comparable(text: str) -> list[str]:
    """The numbers of a text without times."""
    return [n[0] for n in NUMBER.finditer(text) if not TIME.match(text, n.end())]


def differences(stored: Cell, fresh: Cell) -> list[str]:
    if kinds(stored) != kinds(fresh):
        return [f"outputs {kinds(fresh)}, stored {kinds(stored)}"]
    old, new = printed(stored), printed(fresh)
    if NUMBER.sub("#", old).split() != NUMBER.sub("#", new).split():
        return [f"words {new!r}, stored {old!r}"]
    if "assert " not in "".join(stored["source"]):
        return []
    pairs = zip(comparable(old), comparable(new), strict=True)
    wrong = [(a, b) for a, b in pairs if not same_number(float(a), float(b))]
    return [f"{new} is printed, {old} is stored" for old, new in wrong]


def faults(stored: dict[str, Any], fresh: dict[str, Any], *, whole: bool) -> list[str]:
    found = []
    pairs = zip(code_cells(stored), code_cells(fresh), strict=True)
    for i, (old, new) in enumerate(pairs, start=1):
        noise = [text_of(o) for o in new["outputs"] if o.get("name") == "stderr"]
        found += [f"cell {i} complains: {words}" for words in noise]
        if whole:
            found += [f"cell {i}: {words}" for words in differences(old, new)]
        elif ("picture" in kinds(old)) != ("picture" in kinds(new)):
            found.append(f"cell {i} draws in only one of them")
    return found


class Run(NamedTuple):
    path: Path
    fresh: dict[str, Any]
    drawings: dict[str, str]
    seconds: float


def executed(path: Path) -> Run:
    """The notebook after a run in a new kernel, and the drawings that the run saved."""
    import nbclient  # noqa: PLC0415  (an extra; the comparison does without)
    import nbformat  # noqa: PLC0415

    start = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = nbclient.NotebookClient(
            notebook, timeout=1200, kernel_name="python3", resources=resources
        )
        client.execute()
        drawings = {file.name: file.read_text() for file in Path(folder).glob("*.svg")}
    fresh = json.loads(nbformat.writes(notebook))
    for cell in code_cells(fresh):
        cell["outputs"] = [o for o in cell["outputs"] if not is_progress(o)]
    return Run(path, fresh, drawings, time.perf_counter() - start)


def lighter(picture: str) -> str:
    """The picture in a size that may be stored, if need be with 256 colours."""
    from PIL import Image  # noqa: PLC0415

    if len(base64.b64decode(picture)) <= LARGEST_PICTURE:
        return picture
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        colours = image.convert("RGB").quantize(256, kmeans=3)
    colours.save(buffer, "png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def store(path: Path, fresh: dict[str, Any]) -> None:
    for cell in fresh["cells"]:
        cell["metadata"].pop("execution", None)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                data.pop("text/plain", None)
                data["image/png"] = lighter(data["image/png"])
    kernel = fresh["metadata"]["kernelspec"]
    fresh["metadata"] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    path.write_text(json.dumps(fresh, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--store", action="store_true", help="the outputs, in place")
    chosen = parser.parse_args()
    whole = float(os.environ.get("TRACEAX_SHARE", "1")) == 1
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    paths = [path for path in paths if not chosen.names or path.stem in chosen.names]
    # The compiler would complain that beside another notebook it is slow.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    failed = False
    with ProcessPoolExecutor(2) as pool:  # compilation, most of the time, takes one core
        for path, fresh, drawings, seconds in pool.map(executed, paths):
            stored = fresh if chosen.store else json.loads(path.read_text())
            if chosen.store:
                store(path, fresh)
                for name, drawing in drawings.items():
                    (NOTEBOOKS / name).write_text(drawing)
            found = faults(stored, fresh, whole=whole)
            print(f"{path.stem}: {seconds:.0f} s", *found, sep="\n  ", flush=True)
            failed = failed or bool(found)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
