"""Where page stores are in tests, and how they move their pages."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hicache.storage import native_io
from hicache.storage.page_store.transfer import PageTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

MEMORY = "/dev/shm"
CASE = re.compile(r"\bC\d{3}\b")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `pytest -k C080` find the tests of a case, whose number is in their docstrings."""
    for item in items:
        about = getattr(getattr(item, "function", None), "__doc__", None)
        item.extra_keyword_matches.update(CASE.findall(about or ""))


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory if there is one: for tests whose many commits need no real disk."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="hicache-test-", dir=MEMORY) as path:
        yield Path(path)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo finds nothing of the user's, and leaves nothing with the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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


@pytest.fixture
def full_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Within it, stores opened with this fixture write payloads to a device that is always full.

    So it is the kernel that says so, to C and to Python alike.
    """
    device = os.open("/dev/full", os.O_RDWR)
    descriptor_of = PageTransfer._fd
    is_full = False

    def descriptor(transfer: PageTransfer, segment: int, create: bool = False) -> int:
        return device if is_full and create else descriptor_of(transfer, segment, create)

    @contextlib.contextmanager
    def full() -> Iterator[None]:
        nonlocal is_full
        is_full = True
        yield
        is_full = False

    monkeypatch.setattr(PageTransfer, "_fd", descriptor)
    yield full
    os.close(device)
