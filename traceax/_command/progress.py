"""A line on the terminal for what takes more than a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 1.0
_CLEAR = "\r\x1b[K"


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Say what is being done, and for how long, on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    watch = threading.Thread(target=_tell, args=(what, done), daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        watch.join()


def _tell(what: str, done: threading.Event) -> None:
    start = time.perf_counter()
    shown = False
    while not done.wait(_PATIENCE):
        seconds = time.perf_counter() - start
        print(f"{_CLEAR}{what}: {seconds:.0f} s", end="", file=sys.stderr, flush=True)
        shown = True
    if shown:
        print(_CLEAR, end="", file=sys.stderr, flush=True)
