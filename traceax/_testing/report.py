"""What is wrong, by name and by how much, all of it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class Report:
    """Of one check of one thing."""

    def __init__(self, check: str, thing: object) -> None:
        name = getattr(thing, "__name__", None) or type(thing).__name__
        self.heading = f"traceax.testing.{check}: {name}"
        self.faults: list[str] = []

    def add(self, fault: str) -> None:
        self.faults.append(fault)

    def close(self, name: str, got: Any, want: Any, room: Any, cure: str) -> None:
        """`got` is `want` but for `room`, entry by entry; NaN never is."""
        error = np.abs(np.asarray(got) - np.asarray(want))
        room = np.broadcast_to(np.asarray(room), error.shape)
        if error.size and not np.all(error <= room):
            excess = np.where(error <= room, -np.inf, error - room)
            worst = np.unravel_index(
                np.argmax(np.nan_to_num(excess, nan=np.inf)), error.shape
            )
            off, allowed = float(error[worst]), float(room[worst])
            self.add(f"{name}: off by {off:.3g}, {allowed:.1g} allowed. {cure}")

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """What raises there is a fault, and the rest goes on."""
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.add(f"{name}: raises {type(error).__name__}: {lines[0]}")

    def conclude(self) -> None:
        if self.faults:
            raise AssertionError("\n- ".join([f"{self.heading} fails:", *self.faults]))


Step = Callable[[Report], None]
