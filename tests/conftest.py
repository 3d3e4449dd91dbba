"""Where page stores are in tests, and how they move their pages."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicache.storage import native_io

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY = "/dev/shm"


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory if there is one: for tests whose many commits need no real disk."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="hicache-test-", dir=MEMORY) as path:
        yield Path(path)


@pytest.fixture
def plain_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores opened from now on move pages in Python, as where nothing native was built."""
    monkeypatch.setattr(native_io, "HAS_NATIVE_IO", False)


@pytest.fixture(params=["native", "plain"])
def either_io(request: pytest.FixtureRequest) -> None:
    """A test runs with and without what is native."""
    if request.param == "plain":
        request.getfixturevalue("plain_io")
    elif not native_io.HAS_NATIVE_IO:
        pytest.skip("the native module was not built")
