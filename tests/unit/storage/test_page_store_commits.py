"""A page store whose index cannot be written, or is damaged, says so and goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import lmdb
import pytest
from page_store_tools import (
    CORRUPT,
    FAILED,
    MISS,
    NO_SPACE,
    OK,
    PAGE_BYTES,
    PRESENT,
    SKIPPED,
    chain,
    num_stored,
    open_store,
    read,
    verify_index,
    write,
)

from hicache.storage.page_store import index as index_module
from hicache.storage.page_store.allocator import Allocator
from hicache.storage.page_store.catalogue import LEAF_KEY
from hicache.storage.page_store.index import Index
from hicache.storage.page_store.records import PageEntry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicache.storage.page_store import PageStore
    from hicache.types import PageOutcome

KEYS = chain(1, 4)
DEADLOCK_SECONDS = 30


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[PageStore]:
    storage = open_store(tmp_path)
    yield storage
    storage.close()


@contextlib.contextmanager
def failing_commits(error: Exception, num_good: int = 0) -> Iterator[None]:
    """Let write transactions fail where they would be committed."""
    transaction = Index.transaction
    left = [num_good]

    @contextlib.contextmanager
    def fails(self: Index) -> Iterator[Any]:
        with transaction(self) as one:
            yield one
            left[0] -= 1
            if left[0] < 0:
                raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Index, "transaction", fails)
        yield


@pytest.mark.parametrize("num_good", range(4))
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (lmdb.MapFullError("index full"), NO_SPACE),
        (lmdb.DiskError("disk full"), NO_SPACE),
        (lmdb.Error("something else"), FAILED),
        (OSError(errno.EIO, "input/output error"), FAILED),
    ],
)
def test_a_commit_that_fails_stores_nothing_and_loses_nothing(
    storage: PageStore, tmp_path: Path, error: Exception, outcome: PageOutcome, num_good: int
) -> None:
    write(storage, chain(5, 3))
    with failing_commits(error, num_good):
        outcomes = write(storage, KEYS)
    if outcomes[0] is not OK:
        assert outcomes == [outcome, SKIPPED, SKIPPED, SKIPPED]
        assert type(error).__name__ in str(storage.stats().last_error)
        assert num_stored(storage, KEYS) == 0
    verify_index(tmp_path)
    assert write(storage, KEYS)[0] in (OK, PRESENT)
    assert read(storage, KEYS) == [OK] * 4
    verify_index(tmp_path)


def test_a_commit_that_fails_does_so_for_every_thread_that_waited_for_it(
    storage: PageStore, tmp_path: Path
) -> None:
    write(storage, chain(5, 1))
    chains = [chain(name, 3) for name in range(100, 104)]
    outcomes: list[list[PageOutcome]] = []
    with failing_commits(lmdb.Error("no")):
        threads = [
            threading.Thread(target=lambda keys=keys: outcomes.append(write(storage, keys)))
            for keys in chains
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert outcomes == [[FAILED, SKIPPED, SKIPPED]] * 4
    for keys in chains:
        assert write(storage, keys) == [OK] * 3
    verify_index(tmp_path)


def test_an_index_that_lmdb_has_given_up_is_opened_again(
    storage: PageStore, tmp_path: Path
) -> None:
    beside = open_store(tmp_path, model="other")
    write(storage, KEYS)
    with failing_commits(lmdb.PanicError("update of meta page failed")):
        assert write(storage, chain(2, 1)) == [FAILED]
    # Not before the other instance has let it go, too.
    assert write(storage, chain(2, 1))[0] in (OK, FAILED)
    assert beside.batch_exists(KEYS) == 0
    assert write(storage, chain(2, 1))[0].good
    assert read(storage, KEYS) == [OK] * 4
    assert write(beside, KEYS) == [OK] * 4
    verify_index(tmp_path)
    beside.close()


@pytest.mark.parametrize("fsync", [False, True])
def test_with_fsync_pages_are_on_the_disk_before_they_are_in_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    storage = open_store(tmp_path, fsync=fsync)
    write(storage, KEYS[:1])
    calls: list[str] = []
    transaction, fdatasync = Index.transaction, os.fdatasync

    def note_file(fd: int) -> None:
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).split(".")[1])
        fdatasync(fd)

    def note_transaction(self: Index) -> Any:
        calls.append("commit")
        return transaction(self)

    monkeypatch.setattr(os, "fdatasync", note_file)
    monkeypatch.setattr(Index, "transaction", note_transaction)
    assert write(storage, KEYS[1:], parent=KEYS[0]) == [OK] * 3
    if fsync:
        assert sorted(calls[:2]) == ["headers", "pages"]
        assert calls[2:] == ["commit"]
    else:
        assert calls == ["commit"]
    storage.close()


def test_a_record_of_the_index_that_has_changed_is_damage_like_any_other(
    storage: PageStore, tmp_path: Path
) -> None:
    write(storage, KEYS)
    others = chain(2, 4)
    write(storage, others)
    with storage._access.use() as one, one.store.index.write() as write_txn:
        database = write_txn.dbs.groups
        with write_txn.txn.cursor(database) as cursor:
            assert cursor.first()
            key, header = bytes(cursor.key()), bytearray(cursor.value())
        header[-20] ^= 1
        write_txn.txn.put(key, bytes(header), db=database)
    assert read(storage, KEYS) == [CORRUPT, SKIPPED, SKIPPED, SKIPPED]
    assert read(storage, others) == [OK] * 4
    assert write(storage, KEYS) == [OK] * 4
    assert read(storage, KEYS) == [OK] * 4


@pytest.mark.parametrize("lone", [False, True])
def test_an_entry_of_the_index_that_leads_to_another_page_is_damage_like_any_other(
    storage: PageStore, tmp_path: Path, lone: bool
) -> None:
    """Nobody gets the bytes of that page, sound as they are; and that page stays."""
    others = chain(2, 4)
    for keys in (KEYS, others):
        for index in range(4):
            if lone:
                write(storage, [keys[index]], parent=keys[index - 1] if index else b"")
        write(storage, keys)
    with storage._access.use() as one, one.store.index.write() as write_txn:
        database = write_txn.dbs.pages
        entry = write_txn.txn.get(one.prefix + others[2], b"", db=database)
        write_txn.txn.put(one.prefix + KEYS[1], entry, db=database)
    assert read(storage, KEYS) == ([OK] if lone else [OK] * 4) + [CORRUPT, SKIPPED, SKIPPED] * lone
    assert read(storage, KEYS[1:2])[0] in ((MISS,) if lone else (CORRUPT,))
    assert read(storage, others) == [OK] * 4
    assert write(storage, KEYS)[1] is (OK if lone else PRESENT)
    assert read(storage, KEYS) == [OK] * 4


def test_a_commit_waits_for_a_reader_from_before_the_last_one_and_no_longer(
    storage: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_PATIENCE_SECONDS", DEADLOCK_SECONDS)
    order: list[str] = []

    def commit() -> None:
        with store_index.write():
            order.append("commit")

    with storage._access.use() as access:
        store_index = access.store.index
        with store_index.read():
            commit()
            waiting = threading.Thread(target=commit)
            waiting.start()
            waiting.join(0.05)
            order.append("the reader leaves")
        waiting.join(DEADLOCK_SECONDS / 2)
        assert not waiting.is_alive()
    assert order == ["commit", "the reader leaves", "commit"]


def test_blocks_that_another_thread_has_just_leased_are_no_reason_to_evict(
    fast_path: Path,
) -> None:
    """Whoever comes second to lease finds that nothing is missing."""
    storage = open_store(fast_path)
    keys = chain(1, 4)
    assert write(storage, keys) == [OK] * 4
    with storage._access.use() as access:
        assert access.store.allocator.refill(4, PAGE_BYTES, protected=tuple)
    assert num_stored(storage, keys) == 4
    storage.close()


@pytest.mark.parametrize("max_bytes", range(540_000, 720_000, 10_000))
def test_what_a_batch_was_acknowledged_for_does_not_make_room_for_its_rest(
    fast_path: Path, max_bytes: int
) -> None:
    """C081: the index of a store so small needs room in the middle of a batch."""
    storage = open_store(fast_path, max_bytes=max_bytes)
    for name in range(3):
        keys = chain(name, 40)
        outcomes = write(storage, keys)
        num_good = sum(outcome.good for outcome in outcomes)
        assert num_good > 0
        assert storage.batch_exists(keys) == num_good
    verify_index(fast_path)
    storage.close()


def test_what_a_batch_is_chained_from_does_not_make_room_for_it_in_the_index(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C089: a page that is stored never lacks the one before it, whoever goes first."""
    storage = open_store(fast_path, max_bytes=560_000, eviction_policy="lru")
    make_room = Allocator.make_room
    spared: list[set[bytes]] = []

    def watch(self: Allocator, *args: Any, **options: Any) -> None:
        spared.append(set(options.get("protected", tuple)()))
        make_room(self, *args, **options)

    monkeypatch.setattr(Allocator, "make_room", watch)
    head = chain(1, 2)
    for name in range(1000, 1040):
        write(storage, head)
        spared.clear()
        tail = chain(name, 30, head[-1])
        assert OK in write(storage, tail, parent=head[-1])
        assert num_stored(storage, head) == 2
        if spared:
            break
    with storage._access.use() as access:
        assert spared
        assert all(access.prefix + head[-1] in names for names in spared)
    verify_index(fast_path)
    storage.close()


def test_leaves_that_lead_to_nothing_that_may_go_are_passed_over(fast_path: Path) -> None:
    """They are what a damaged index can say; eviction ends all the same."""
    storage = open_store(fast_path, max_bytes=2_000_000, eviction_policy="lru")
    keys = chain(1, 4)
    write(storage, keys[:2])
    write(storage, keys)
    with storage._access.use() as access, access.store.index.write() as write_txn:
        txn, dbs = write_txn.txn, write_txn.dbs
        head = PageEntry.decode(txn.get(access.prefix + keys[0], b"", db=dbs.pages)).group_id
        for group_id in (head, head + 1000):
            txn.put(LEAF_KEY.pack(0, 0, group_id), b"", db=dbs.leaves)
    for name in range(2, 200):
        assert write(storage, chain(name, 3)) == [OK] * 3
    verify_index(fast_path)
    storage.close()
