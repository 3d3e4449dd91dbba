"""Processes that share a page store, and die in the middle of something."""

from __future__ import annotations

import contextlib
import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from page_store_tools import (
    BLOCK_BYTES,
    MISS,
    OK,
    chain,
    disk_bytes,
    num_stored,
    open_store,
    read,
    verify_index,
    write,
)
from page_store_writers import OVERLAPPED_PAGES, PUBLISHED, Nursery

from hicache.storage import native_io
from hicache.storage.page_store import collect_garbage, list_pages, summarize
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_KILLS = 160
NUM_KILLS_PAST_THE_PAGE_CACHE = 40
SEED = 20_261_129
KEY_BYTES = 32


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("pipes"))
    yield nursery
    nursery.close()


def keys_in(report: bytes) -> list[PageHash]:
    whole = len(report) // KEY_BYTES * KEY_BYTES
    return [PageHash(report[n : n + KEY_BYTES]) for n in range(0, whole, KEY_BYTES)]


def kill_a_writer(
    nursery: Nursery, path: Path, rng: random.Random, options: dict[str, Any]
) -> list[PageHash]:
    """Let a process write and kill it at a random moment; return what it had acknowledged."""
    with nursery.start("write_until_killed", path, rng.getrandbits(31), **options) as writer:
        if rng.random() < 0.1:
            time.sleep(rng.uniform(0.0, 0.005))
            return keys_in(writer.kill().removeprefix(b"started\n"))
        writer.wait_until_started()
        time.sleep(rng.uniform(0.0, 0.03))
        return keys_in(writer.kill())


def test_what_a_killed_writer_had_acknowledged_is_there_and_nothing_else_is_wrong(
    nursery: Nursery, fast_path: Path
) -> None:
    """C111: two hundred times with the next; every acknowledged page is compared byte by byte."""
    rng = random.Random(SEED)
    num_acknowledged = 0
    for serial in range(NUM_KILLS):
        bounded = serial % 2 == 1
        options: dict[str, Any] = {"max_bytes": 1_500_000} if bounded else {}
        keys = kill_a_writer(nursery, fast_path, rng, options)
        num_acknowledged += len(keys)
        storage = open_store(fast_path, **options)
        where = f"{SEED=} {serial=}"
        outcomes = [read(storage, [key])[0] for key in keys]
        # What is bounded has given pages up; `read` has checked the bytes of those that are there.
        assert set(outcomes) <= ({OK, MISS} if bounded else {OK}), where
        extra = {page.key for page in list_pages(str(fast_path))} - set(keys)
        assert all(read(storage, [key]) == [OK] for key in extra), where
        verify_index(fast_path)
        assert not bounded or disk_bytes(fast_path) <= 1_500_000, where
        storage.clear()
        storage.close()
    assert num_acknowledged > 10 * NUM_KILLS
    summary = summarize(str(fast_path))
    assert summary.free_bytes == summary.segment_bytes
    assert list((fast_path / "owners").iterdir()) == []


def kill_a_writer_past_the_page_cache(
    nursery: Nursery, path: Path, rng: random.Random, *, num_published: int
) -> list[PageHash]:
    """As `kill_a_writer`: as soon as so many parts are published, or for 0 at a random moment."""
    with nursery.start("write_overlapped_until_killed", path, rng.getrandbits(31)) as writer:
        writer.wait_until_started()
        report = b""
        while keys_in(report).count(PageHash(PUBLISHED)) < num_published:
            report += writer.pipe.read(KEY_BYTES)
        if not num_published:
            time.sleep(rng.uniform(0.0, 0.03))
        report += writer.kill()
    return [key for key in keys_in(report) if key != PUBLISHED]


def test_a_writer_killed_while_the_disk_has_the_rest_of_a_batch_loses_and_spoils_nothing(
    nursery: Nursery, tmp_path: Path
) -> None:
    """C111: past the page cache; what was published of a batch stays, though not acknowledged."""
    opened = open_store(tmp_path, page_bytes=BLOCK_BYTES, direct_io=True)
    assert write(opened, chain(1, 1), page_bytes=BLOCK_BYTES) == [OK]
    with opened._access.use() as access:
        overlaps = access.transfer.passes_marks
    opened.clear()
    opened.close()
    if not overlaps:
        pytest.skip("the file system knows no direct I/O, or the native module was not built")
    rng = random.Random(SEED + 2)
    num_first = OVERLAPPED_PAGES - OVERLAPPED_PAGES // 4
    nums_unacknowledged = []
    for serial in range(NUM_KILLS_PAST_THE_PAGE_CACHE):
        num_published = rng.choice([1, 3, 5]) if serial % 2 else 0
        keys = kill_a_writer_past_the_page_cache(
            nursery, tmp_path, rng, num_published=num_published
        )
        where = f"{SEED=} {serial=}"
        storage = open_store(tmp_path, page_bytes=BLOCK_BYTES)
        stored = {page.key for page in list_pages(str(tmp_path))}
        assert stored >= set(keys), where
        # The last part is of a batch that has not ended, the others are of whole ones.
        num_before = num_published // 2 * OVERLAPPED_PAGES + num_first if num_published else 0
        assert len(stored) >= num_before, where
        nums_unacknowledged.append(len(stored) - len(keys))
        for key in stored:
            assert read(storage, [key], page_bytes=BLOCK_BYTES) == [OK], where
        verify_index(tmp_path)
        storage.clear()
        storage.close()
    assert set(nums_unacknowledged) <= {0, num_first, OVERLAPPED_PAGES}
    assert num_first in nums_unacknowledged


def test_writers_that_die_beside_one_that_lives_cost_it_nothing(
    nursery: Nursery, fast_path: Path
) -> None:
    storage = open_store(fast_path)
    rng = random.Random(SEED + 1)
    for serial in range(10):
        keys = chain(1000 + serial, 40)
        with nursery.start("write_until_killed", fast_path, serial) as writer:
            writer.wait_until_started()
            assert write(storage, keys) == [OK] * 40
            time.sleep(rng.uniform(0.0, 0.02))
            acknowledged = keys_in(writer.kill())
        assert read(storage, keys) == [OK] * 40
        assert num_stored(storage, acknowledged) == len(acknowledged)
        verify_index(fast_path)
    storage.close()


@pytest.mark.usefixtures("either_io")
@pytest.mark.parametrize("how", ["an opener", "the garbage collector", "a writer short of space"])
def test_what_a_dead_process_had_leased_is_taken_back(
    nursery: Nursery, fast_path: Path, how: str
) -> None:
    """C018: and not before it is dead; its pages are half written."""
    options: dict[str, Any] = {}
    if how == "a writer short of space":
        options = {"max_bytes": 1_000_000}
    storage = open_store(fast_path, **options)
    write(storage, chain(5, 1))
    native = native_io.HAS_NATIVE_IO
    with nursery.start("hang_in_a_write", fast_path, 7, native=native) as writer:
        writer.wait_until_started()
        assert collect_garbage(str(fast_path)).num_dead_owners == 0
        verify_index(fast_path)
        writer.kill()
    assert num_stored(storage, chain(7, 3)) == 0
    if how == "an opener":
        storage.close()
        storage = open_store(fast_path)
    elif how == "the garbage collector":
        assert collect_garbage(str(fast_path)).num_dead_owners == 1
    else:
        assert write(storage, chain(8, 400)).count(OK) > 40
    assert collect_garbage(str(fast_path)).num_dead_owners == 0
    verify_index(fast_path)
    assert write(storage, chain(7, 3)) == [OK] * 3
    storage.close()


@pytest.mark.parametrize("max_bytes", [None, 2_000_000])
def test_processes_that_write_the_same_pages_share_them(
    nursery: Nursery, fast_path: Path, max_bytes: int | None
) -> None:
    """Whoever wins, both outcomes are good, and the space of the other is free again."""
    num_chains, num_processes = 30, 3
    options: dict[str, Any] = {} if max_bytes is None else {"max_bytes": max_bytes}
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(nursery.start("write_chains", fast_path, num_chains, **options))
            for _ in range(num_processes)
        ]
        for writer in writers:
            writer.wait_until_started()
        reports = [writer.wait().decode().splitlines() for writer in writers]
    results = [tuple(map(PageOutcome, line.split())) for report in reports for line in report]
    assert len(results) == 5 * num_chains * num_processes
    assert all(wrote.good for wrote, _ in results)
    assert max_bytes or all(got is OK for _, got in results)
    assert max_bytes or len(list(list_pages(str(fast_path)))) == 5 * num_chains
    verify_index(fast_path)
    assert not max_bytes or disk_bytes(fast_path) <= max_bytes
    assert summarize(str(fast_path)).num_owners == 1
