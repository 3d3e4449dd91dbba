"""Processes that share a page store, and die in the middle of something."""

from __future__ import annotations

import contextlib
import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from page_store_tools import (
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
from page_store_writers import Nursery

from hicache.storage.page_store import collect_garbage, list_pages, summarize
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_KILLS = 200
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
    """C111: two hundred times; every acknowledged page is compared byte by byte."""
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
    with nursery.start("hang_in_a_write", fast_path, 7) as writer:
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
