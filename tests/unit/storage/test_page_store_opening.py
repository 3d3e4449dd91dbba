"""A store is opened at once, however much it holds."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from page_store_tools import LATER, OK, open_store

from benchmarks.bytecodes import count_bytecodes
from hicache.storage.page_store import segments, summarize
from hicache.storage.page_store.transfer import PageTransfer
from hicache.testing.page_buffer import PageBuffer
from hicache.types import PageHash

if TYPE_CHECKING:
    import pytest

BATCH_PAGES = 1024
CHECKSUM_BYTES = 16


def fill(path: Path, num_pages: int) -> None:
    """Store that many pages, all with the same bytes."""
    page = PageBuffer(64).page
    storage = open_store(path, page_bytes=64)
    for number in range(num_pages // BATCH_PAGES):
        names = np.random.default_rng(number).bytes(32 * BATCH_PAGES)
        keys = [PageHash(names[at : at + 32]) for at in range(0, len(names), 32)]
        pages = [page] * BATCH_PAGES
        outcomes = storage.batch_set(keys, [b"", *keys[:-1]], pages, deadline=LATER)
        assert outcomes == [OK] * BATCH_PAGES
    storage.close()


def touched_bytes(index: Path) -> int:
    """Return how much of a file is mapped into this process: what it has read, in steps of 64 KiB.

    The kernel maps what lies beside a page that is touched as well, if it is in memory.
    """
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8").split("VmFlags")
    resident = [
        int(found[1])
        for one in maps
        if str(index) in one and (found := re.search(r"^Rss: +(\d+) kB", one, re.MULTILINE))
    ]
    assert resident, "the file is not mapped"
    return sum(resident) << 10


def test_opening_reads_no_more_of_a_large_index_than_of_a_small_one(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in Python, which bytecodes tell, nor in LMDB, which memory tells.

    The bytes of the pages are written nowhere: it is the index that is large.
    """

    def writes_nothing(
        self: PageTransfer,
        layout: object,
        first: int,
        memory: object,
        start: int,
        num_pages: int,
        mark: object,
    ) -> bytes:
        return bytes(CHECKSUM_BYTES * num_pages)

    monkeypatch.setattr(segments, "reserve_range", lambda *_: True)
    monkeypatch.setattr(PageTransfer, "write", writes_nothing)
    counts, touched = [], []
    for num_pages in (2 * BATCH_PAGES, 196 * BATCH_PAGES):
        path = fast_path / str(num_pages)
        fill(path, num_pages)
        storage, count = count_bytecodes(partial(open_store, path, page_bytes=64))
        touched.append(touched_bytes(path / "index" / "data.mdb"))
        counts.append(count)
        assert summarize(str(path)).namespaces[0].num_pages == num_pages
        storage.close()
    assert counts[1] < 1.1 * counts[0], counts
    index_bytes = (path / "index" / "data.mdb").stat().st_size
    assert index_bytes > 20_000_000
    assert touched[1] < index_bytes / 16, touched
