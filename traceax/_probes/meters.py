"""How far along a long run is: diffrax's progress meters."""

from __future__ import annotations

from typing import Any, Protocol


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
    _check(name, meter)
    return meter


def _check(name: str, progress_meter: object) -> None:
    parts = ("init", "step", "close")
    is_class = isinstance(progress_meter, type)
    if is_class or not all(callable(getattr(progress_meter, p, None)) for p in parts):
        raise TypeError(
            f"traceax.{name}(progress_meter=...) must be a progress meter of diffrax, or "
            "an object with its methods init, step and close, but got "
            f"{'a class' if is_class else type(progress_meter).__name__}. Pass "
            "diffrax.TextProgressMeter(), say."
        )
