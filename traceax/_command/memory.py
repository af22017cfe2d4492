"""How much memory is free, and whether the blocks of an estimate fit into it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from traceax._command.matrix import MatrixError

# Of what is free; the rest is left to the programs beside.
_SHARE = 0.9

_SMALLER = "Take a smaller block, or a machine with more memory."

# Measured, of n x k numbers each: 3 (hutchinson_trace) to 4.5 (xnystrace) for 100 products,
# 6.5 (na_hutchpp_trace) for 6.
_BLOCKS = 6

_MEMINFO = Path("/proc/meminfo")
_CONTAINER = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def free_memory() -> float:
    """The bytes that may be used; infinite where the system does not tell."""
    return _SHARE * min([math.inf, *_physical(), *_available(), *_container()])


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"


def check_memory(path: Path, num_bytes: int, what: str) -> None:
    """Whether a matrix can be read that needs so much."""
    free = free_memory()
    if num_bytes > free:
        raise MatrixError(
            f"{path} needs about {_gigabytes(num_bytes)} to be read, for {what}, but "
            f"{_gigabytes(free)} are free. {_SMALLER}"
        )


def too_large_to_read(path: Path) -> MatrixError:
    """What is to be said where memory ran out against all expectation."""
    return MatrixError(f"{path} needs more memory to be read than is free. {_SMALLER}")


def _physical() -> Iterator[int]:
    try:
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # Windows has no sysconf.
        return


def _available() -> Iterator[int]:
    """On Linux, free pages and those that the system would clear."""
    if _MEMINFO.exists():
        found = re.search(r"^MemAvailable: *(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
        if found:
            yield 1024 * int(found[1])


def _container() -> Iterator[int]:
    """What a container may use, however much the machine has."""
    for path in _CONTAINER:
        if path.exists() and (limit := path.read_text().strip()).isdigit():
            yield int(limit)


class Blocks(NamedTuple):
    """What estimates hold in memory: n x k blocks of numbers, for k products."""

    size: int
    itemsize: int
    num_matvecs: int
    fewest: int

    @property
    def memory(self) -> int:
        return self.num_matvecs * self._column

    @property
    def _column(self) -> int:
        return _BLOCKS * self.size * self.itemsize

    def check(self, path: Path) -> None:
        if self.memory > free_memory():
            raise self.too_large(path)

    def too_large(self, path: Path) -> MatrixError:
        """Also what is to be said where memory ran out against all expectation."""
        most = min(int(free_memory() // self._column), self.num_matvecs - 1)
        if most < self.fewest:
            cure = (
                f"Not even {self.fewest} would fit: n is too large for this machine. "
                f"{_SMALLER}"
            )
        else:
            cure = f"At most {most} fit. Lower --num-matvecs."
        return MatrixError(
            f"{path} needs more memory than is free: about {_gigabytes(self.memory)}, for "
            f"blocks of n x {self.num_matvecs} numbers, n = {self.size}, one column a "
            f"product. {cure}"
        )
