"""The benchmark on accelerators runs, here on the CPU."""

import re
from pathlib import Path

import pytest

from tests.calls import CALLS
from tests.helpers import outputs


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_single_and_double_precision_agree_for_every_function(tmp_path: Path) -> None:
    """Each has a row for either spectrum, with no NaN, and no `!` for what differs. The
    table of times ends with logdet's gradient, be matfree there or not."""
    run = ["-m", "tests.benchmarks.accelerator", "--small"]
    (printed,) = outputs(tmp_path, run, seconds=145)
    for name in CALLS:
        rows = re.findall(rf"^{name} +(?:mild|steep) .*$", printed, re.MULTILINE)
        assert len(rows) == 2, printed
        assert not [row for row in rows if "nan" in row or "!" in row]
    assert "no time left" not in printed
    assert re.search(r"^logdet, kernel, n = 300 \+ gradient +\d", printed, re.MULTILINE)
