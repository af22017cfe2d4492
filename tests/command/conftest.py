import gzip
from pathlib import Path

import pytest

from tests.command.helpers import Write


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Content to a file of that name; compressed, if the name says so."""

    def write(name: str, content: str | bytes) -> Path:
        content = content.encode() if isinstance(content, str) else content
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path

    return write
