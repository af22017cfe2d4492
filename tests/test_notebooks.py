"""The stored notebooks, and the comparison of a fresh run with them."""

import base64
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks import LARGEST_PICTURE, code_cells, faults, kinds, printed, text_of

PATHS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
STORED = {path.stem: json.loads(path.read_text()) for path in PATHS}


@pytest.mark.parametrize("name", STORED)
def test_notebooks_are_stored_executed_with_assertions_and_pictures(name: str) -> None:
    """Each picture has an alt text, one or two sentences, in the metadata of its cell."""
    cells = code_cells(STORED[name])
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("assert " in "".join(cell["source"]) for cell in cells) >= 4
    assert sum(kinds(cell).count("picture") for cell in cells) >= 1
    for output in (output for cell in cells for output in cell["outputs"]):
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr"
        assert not re.search(r"/(tmp|home|work)/|[Ww]arning", text_of(output))
        picture = output.get("data", {}).get("image/png", "")
        assert len(base64.b64decode(picture)) <= LARGEST_PICTURE
    for cell in cells:
        texts = cell["metadata"].get("alt", [])
        assert len(texts) == kinds(cell).count("picture")
        assert all(60 < len(text) < 350 and text.endswith(".") for text in texts)
    assert faults(STORED[name], copy.deepcopy(STORED[name]), whole=True) == []


def scaled(factor: float) -> Any:
    number = lambda n: f"{float(n[0]) * factor:.6f}"  # noqa: E731
    return lambda text: re.sub(r"\d+\.\d+", number, text, count=1)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (scaled(1.1), None),
        (scaled(2.5), "is printed"),
        (scaled(-1.0), "is printed"),
        (lambda text: text + " another word", "words"),
    ],
)
def test_differences_of_a_fresh_run_are_found(change: Any, fault: str | None) -> None:
    stored = STORED["quickstart"]
    fresh = copy.deepcopy(stored)
    cells = [c for c in code_cells(fresh) if re.search(r"\d\.\d+", printed(c))]
    cell = next(c for c in cells if "assert " in "".join(c["source"]))
    (output,) = (o for o in cell["outputs"] if o.get("text"))
    output["text"] = change(text_of(output))
    found = faults(stored, fresh, whole=True)
    assert len(found) == (fault is not None)
    assert all(fault in words for words in found if fault)
    assert faults(stored, fresh, whole=False) == []
