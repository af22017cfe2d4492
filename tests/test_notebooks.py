"""The notebooks as they are stored, and what compares them with a fresh run."""

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
every_notebook = pytest.mark.parametrize("name", STORED)


@every_notebook
def test_they_are_stored_executed(name: str) -> None:
    cells = code_cells(STORED[name])
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert STORED[name]["metadata"].keys() == {"kernelspec", "language_info"}
    for cell in cells:
        draws = "plt.show()" in "".join(cell["source"])
        assert draws == ("picture" in kinds(cell))


@every_notebook
def test_they_are_light_and_quiet(name: str) -> None:
    (path,) = (path for path in PATHS if path.stem == name)
    assert path.stat().st_size <= 1_000_000
    for cell in code_cells(STORED[name]):
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr"
            assert not re.search(r"/(tmp|home|work)/|[Ww]arning", text_of(output))
            picture = output.get("data", {}).get("image/png", "")
            assert len(base64.b64decode(picture)) <= LARGEST_PICTURE


@every_notebook
def test_they_assert_what_they_claim(name: str) -> None:
    cells = code_cells(STORED[name])
    assert sum("assert " in "".join(cell["source"]) for cell in cells) >= 4
    assert sum(kinds(cell).count("picture") for cell in cells) >= 1


def a_cell(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of a notebook, and in it a cell that prints a number and asserts."""
    fresh = copy.deepcopy(STORED[name])
    found = [c for c in code_cells(fresh) if re.search(r"\d\.\d+", printed(c))]
    return fresh, next(c for c in found if "assert " in "".join(c["source"]))


def test_a_fresh_run_like_the_stored_one_has_no_faults() -> None:
    for stored in STORED.values():
        assert faults(stored, copy.deepcopy(stored), whole=True) == []


def scaled(text: str, factor: float) -> str:
    return re.sub(r"\d+\.\d+", lambda n: f"{float(n[0]) * factor:.6f}", text, count=1)


@pytest.mark.parametrize(("factor", "wrong"), [(1.1, 0), (0.7, 0), (2.5, 1), (-1.0, 1)])
def test_numbers_are_compared_but_for_their_digits(factor: float, wrong: int) -> None:
    fresh, cell = a_cell("quickstart")
    (output,) = (o for o in cell["outputs"] if o.get("text"))
    output["text"] = scaled(text_of(output), factor)
    assert len(faults(STORED["quickstart"], fresh, whole=True)) == wrong
    assert faults(STORED["quickstart"], fresh, whole=False) == []


@pytest.mark.parametrize(("unit", "wrong"), [("s", 0), ("times as long", 0), ("steps", 1)])
def test_times_are_each_machine_s_own(unit: str, wrong: int) -> None:
    (stored, old), (fresh, new) = a_cell("quickstart"), a_cell("quickstart")
    old["outputs"][0]["text"] = [f"7 steps, 1.2e+01 {unit}\n"]
    new["outputs"][0]["text"] = [f"7 steps, 1.2e+02 {unit}\n"]
    assert len(faults(stored, fresh, whole=True)) == wrong


def test_what_else_differs_is_found() -> None:
    stored = STORED["quickstart"]
    fresh, cell = a_cell("quickstart")
    cell["outputs"][0]["text"] = ["another word\n"]
    assert "words" in faults(stored, fresh, whole=True)[0]
    fresh = copy.deepcopy(stored)
    drawn = next(c for c in code_cells(fresh) if "picture" in kinds(c))
    drawn["outputs"] = [o for o in drawn["outputs"] if o["output_type"] == "stream"]
    assert "stored" in faults(stored, fresh, whole=True)[0]
    assert "draws" in faults(stored, fresh, whole=False)[0]
    fresh = copy.deepcopy(stored)
    noise = {"output_type": "stream", "name": "stderr", "text": "UserWarning: no"}
    code_cells(fresh)[2]["outputs"].append(noise)
    assert any("complains" in fault for fault in faults(stored, fresh, whole=False))
