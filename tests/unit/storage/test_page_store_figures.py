"""What a page store says of itself is what is on the disk and what has happened to it."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from page_store_tools import (
    OK,
    PAGE_BYTES,
    chain,
    disk_bytes,
    num_stored,
    open_store,
    read,
    write,
)

from hicache.storage import StorageFigures
from hicache.storage.page_store import summarize
from hicache.storage.page_store.limits import Limits

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MAX_BYTES = 2_000_000
NOTHING = StorageFigures()


def test_pages_are_those_of_the_namespace_and_go_with_a_clear(fast_path: Path) -> None:
    first, second = open_store(fast_path), open_store(fast_path, model="other")
    assert first.figures().num_pages == 0
    write(first, chain(1, 7))
    write(first, chain(1, 7))
    write(second, chain(1, 5))
    assert (first.figures().num_pages, second.figures().num_pages) == (7, 5)
    assert first.clear() == 7
    assert (first.figures().num_pages, second.figures().num_pages) == (0, 5)
    assert first.figures().num_evicted_pages == 0
    first.close()
    second.close()


def test_used_bytes_are_what_the_summary_says_and_hold_what_is_on_the_disk(
    fast_path: Path,
) -> None:
    storage = open_store(fast_path)
    before = storage.figures().used_bytes
    write(storage, chain(1, 100))
    summary = summarize(str(fast_path))
    used = storage.figures().used_bytes
    assert used == summary.segment_bytes + summary.index_bytes
    assert before is not None
    assert used >= before + 100 * PAGE_BYTES
    assert disk_bytes(fast_path / "data") <= summary.segment_bytes
    storage.close()


def test_every_page_that_was_stored_is_there_or_counted_as_evicted(fast_path: Path) -> None:
    storage = open_store(fast_path, max_bytes=MAX_BYTES)
    chains = [chain(name, 30) for name in range(20)]
    num_written = sum(write(storage, keys).count(OK) for keys in chains)
    figures = storage.figures()
    left = sum(num_stored(storage, keys) for keys in chains)
    assert figures.num_pages == left < num_written
    assert figures.num_evicted_pages == num_written - left
    assert figures.used_bytes is not None
    assert MAX_BYTES // 2 < figures.used_bytes <= MAX_BYTES
    assert read(storage, chains[-1]) == [OK] * 30
    storage.close()


def test_evictions_are_still_known_after_a_restart(fast_path: Path) -> None:
    num_written = 0
    for run in range(3):
        storage = open_store(fast_path, max_bytes=MAX_BYTES)
        num_written += sum(write(storage, chain(10 * run + n, 30)).count(OK) for n in range(10))
        figures = storage.figures()
        assert figures.num_pages is not None
        assert figures.num_evicted_pages == num_written - figures.num_pages
        storage.close()
    assert figures.num_evicted_pages


def test_the_limit_is_the_strictest_and_there_is_none_where_nobody_set_one(
    fast_path: Path,
) -> None:
    unbounded = open_store(fast_path)
    assert unbounded.figures().limit_bytes is None
    bounded = open_store(fast_path, model="other", max_bytes=MAX_BYTES)
    assert unbounded.figures().limit_bytes == bounded.figures().limit_bytes == MAX_BYTES
    bounded.close()
    assert unbounded.figures().limit_bytes is None
    unbounded.close()


def test_the_limits_of_other_processes_count_as_those_of_this_one(fast_path: Path) -> None:
    storage = open_store(fast_path, max_bytes=2 * MAX_BYTES)
    for theirs, strictest in ((MAX_BYTES, MAX_BYTES), (3 * MAX_BYTES, 2 * MAX_BYTES)):
        with storage._access.use() as access, access.store.index.write() as write_index:
            record = Limits(max_bytes=theirs).encode()
            write_index.txn.put(bytes(8), record, db=write_index.dbs.owners)
        assert storage.figures().limit_bytes == strictest
    storage.close()


def test_spare_bytes_are_what_is_free_above_the_floor(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    floor = 1 << 20
    storage = open_store(fast_path, min_free_bytes=floor)
    real = os.statvfs(fast_path)

    def with_free_blocks(num_blocks: int) -> None:
        fields = list(real[:10])
        fields[4] = num_blocks  # f_bavail
        monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))

    for num_blocks in (0, 1000):
        with_free_blocks(num_blocks)
        assert storage.figures().spare_bytes == num_blocks * real.f_frsize - floor
    monkeypatch.undo()
    storage.close()


def test_an_index_that_was_rebuilt_is_counted_once_for_each_time(fast_path: Path) -> None:
    path = fast_path / "store"
    for num_rebuilds in range(3):
        storage = open_store(path)
        assert storage.figures().num_index_rebuilds == num_rebuilds
        write(storage, chain(num_rebuilds, 3))
        assert storage.figures().num_pages == 3 * (num_rebuilds + 1)
        storage.close()
        shutil.rmtree(path / "index")


def test_where_direct_io_is_refused_that_is_counted(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_store(fast_path)
    assert storage.figures().num_direct_refusals == 0
    with storage._access.use() as access:
        monkeypatch.setattr(access.transfer, "num_direct_refusals", 1)
    assert storage.figures().num_direct_refusals == 1
    storage.close()


def test_of_a_store_that_is_not_there_nothing_is_known_and_none_is_made(fast_path: Path) -> None:
    path, elsewhere = fast_path / "store", fast_path / "elsewhere"
    storage = open_store(path)
    write(storage, chain(1, 3))
    path.rename(elsewhere)
    assert storage.figures() == NOTHING
    assert not path.exists()
    elsewhere.rename(path)
    assert storage.figures().num_pages == 3
    storage.close()
    assert storage.figures() == NOTHING
