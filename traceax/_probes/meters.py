"""How far along a long run is: diffrax's progress meters."""

from __future__ import annotations

from typing import Any, Protocol

from traceax._core.checks import check_progress_meter


class ProgressMeter(Protocol):
    """What diffrax's progress meters do."""

    def init(self) -> Any: ...
    def step(self, state: Any, progress: Any) -> Any: ...
    def close(self, state: Any) -> Any: ...


class Silent:
    """No progress is shown."""

    def init(self) -> Any:
        return None

    def step(self, state: Any, progress: Any) -> Any:
        del progress
        return state

    def close(self, state: Any) -> Any:
        del state


SILENT = Silent()


def checked_meter(name: str, progress_meter: ProgressMeter | None) -> ProgressMeter:
    meter = SILENT if progress_meter is None else progress_meter
    check_progress_meter(name, meter)
    return meter
