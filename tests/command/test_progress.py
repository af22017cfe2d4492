"""The line on a terminal, for what takes long."""

import io
import sys
import time

import pytest

from traceax._command import progress as room
from traceax._command.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("patience", "shown"), [(0.01, True), (60.0, False)])
def test_what_takes_long_says_so(
    patience: float, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(room, "_PATIENCE", patience)
    with progress("xtrace"):
        until = time.monotonic() + 30
        while shown and "xtrace: 0 s" not in terminal.getvalue():
            assert time.monotonic() < until
            time.sleep(0.01)
    # What was written is taken away.
    assert terminal.getvalue().endswith("\r\x1b[K" if shown else "")
    assert bool(terminal.getvalue()) is shown


def test_nothing_is_said_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(room, "_PATIENCE", 0.01)
    with progress("xtrace"):
        time.sleep(0.1)
    assert file.getvalue() == ""
