"""Several threads at one page store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from page_store_tools import (
    NO_SPACE,
    OK,
    PRESENT,
    SKIPPED,
    chain,
    disk_bytes,
    open_store,
    read,
    verify_index,
    write,
)

from hicache.storage.page_store.index import Index

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from hicache.types import PageOutcome

NUM_THREADS = 4


def test_threads_that_write_and_read_at_once_never_lack_space_that_there_is(
    fast_path: Path,
) -> None:
    storage = open_store(fast_path, page_bytes=20_000)

    def work(thread: int) -> list[PageOutcome]:
        outcomes: list[PageOutcome] = []
        for name in range(40):
            keys = chain(1000 * thread + name, 20)
            outcomes += write(storage, keys, page_bytes=20_000)
            outcomes += read(storage, keys, page_bytes=20_000)
        return outcomes

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        results = list(pool.map(work, range(NUM_THREADS)))
    assert {outcome for outcomes in results for outcome in outcomes} == {OK}
    assert storage.stats().last_error is None
    verify_index(fast_path)
    storage.close()


def test_threads_share_a_store_that_is_too_small(fast_path: Path) -> None:
    storage = open_store(fast_path, max_bytes=1_500_000)

    def work(thread: int) -> None:
        for name in range(40):
            keys = chain(100 * (thread % 2) + name, 12)
            assert set(write(storage, keys)) <= {OK, PRESENT, NO_SPACE, SKIPPED}
            read(storage, keys)
            assert disk_bytes(fast_path) <= 1_500_000

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(work, range(NUM_THREADS)))
    verify_index(fast_path)
    storage.close()


def test_threads_that_wait_for_a_commit_are_published_by_one(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_store(fast_path)
    write(storage, chain(0, 1))
    num_commits = 0
    transaction = Index.transaction

    def counted(self: Index) -> object:
        nonlocal num_commits
        num_commits += 1
        return transaction(self)

    with storage._access.use() as access, ThreadPoolExecutor(NUM_THREADS) as pool:
        index = access.store.index
        monkeypatch.setattr(Index, "transaction", counted)
        with index.lock:
            writes = [pool.submit(write, storage, chain(name, 3)) for name in (1, 2, 3)]
            while len(access.store.publisher._queue) < 3:
                time.sleep(0.001)
        assert [one.result() for one in writes] == [[OK] * 3] * 3
    assert num_commits == 1
    verify_index(fast_path)
    storage.close()


def test_a_store_that_is_closed_while_it_is_used_ends_its_calls_in_order(fast_path: Path) -> None:
    storage, other = open_store(fast_path), open_store(fast_path, model="other")
    keys = chain(1, 20)
    write(storage, keys)
    with storage._access.use() as access:
        storage.close()
        other.close()
        assert access.store.index.present
        with access.store.index.read() as txn:
            assert txn.get(access.prefix + keys[0], db=access.store.index.dbs.pages)
    again = open_store(fast_path)
    assert read(again, keys) == [OK] * 20
    again.close()
