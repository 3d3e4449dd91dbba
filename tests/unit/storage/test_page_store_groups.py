"""The groups of a batch go to the disk as one stream, and are good or not each by itself."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
from page_store_tools import FAILED, OK, SKIPPED, chain, open_store, read, verify_index, write

from hicache.storage.page_store.index import Index
from hicache.storage.page_store.segments import Segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from hicache.storage.page_store import PageStore

PAGE_BYTES = 4096
GROUP_PAGES = 64
CALL_PAGES = 128
"""What Python writes at a time of such pages."""

KEYS = chain(1, 300)


@pytest.fixture
def storage(fast_path: Path) -> Iterator[PageStore]:
    storage = open_store(fast_path, page_bytes=PAGE_BYTES)
    yield storage
    verify_index(fast_path)
    storage.close()


def failing_at(number: int, call: Callable[..., Any], *, counts: Callable[..., bool]) -> Any:
    """Return a call that fails for the `number`-th time and later, of those that count."""
    num_calls = 0

    def fails(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += counts(*arguments)
        if num_calls > number and counts(*arguments):
            raise OSError(errno.EIO, "input/output error")
        return call(*arguments)

    return fails


def is_payload(fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    return fd >= 0 and len(buffers) > 1 and offset >= 0


@pytest.mark.usefixtures("plain_io")
def test_several_groups_are_written_with_one_call(
    storage: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    pwritev = os.pwritev

    def note(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls.append(len(buffers))
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", note)
    assert write(storage, KEYS, page_bytes=PAGE_BYTES) == [OK] * len(KEYS)
    num_groups = -(-len(KEYS) // GROUP_PAGES)
    assert calls == [CALL_PAGES, CALL_PAGES, len(KEYS) % CALL_PAGES] + [1] * num_groups


@pytest.mark.usefixtures("plain_io")
@pytest.mark.parametrize("number", [0, 1, 2])
def test_groups_before_an_error_of_the_disk_are_stored_and_those_behind_lose_no_space(
    storage: PageStore, fast_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing_at(number, os.pwritev, counts=is_payload))
        outcomes = write(storage, KEYS, page_bytes=PAGE_BYTES)
    num_good = number * CALL_PAGES
    assert outcomes == [OK] * num_good + [FAILED] + [SKIPPED] * (len(KEYS) - num_good - 1)
    assert storage.batch_exists(KEYS) == num_good
    verify_index(fast_path)
    write(storage, KEYS, page_bytes=PAGE_BYTES)
    assert read(storage, KEYS, page_bytes=PAGE_BYTES) == [OK] * len(KEYS)


@pytest.mark.parametrize("number", [0, 1, 4])
def test_groups_before_one_whose_header_cannot_be_written_are_stored(
    storage: PageStore, fast_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fails = failing_at(number, Segments.write_header, counts=lambda *_: True)
    with monkeypatch.context() as patch:
        patch.setattr(Segments, "write_header", lambda *arguments: fails(*arguments))
        outcomes = write(storage, KEYS, page_bytes=PAGE_BYTES)
    num_good = number * GROUP_PAGES
    assert outcomes == [OK] * num_good + [FAILED] + [SKIPPED] * (len(KEYS) - num_good - 1)
    assert storage.batch_exists(KEYS) == num_good
    verify_index(fast_path)
    write(storage, KEYS, page_bytes=PAGE_BYTES)
    assert read(storage, KEYS, page_bytes=PAGE_BYTES) == [OK] * len(KEYS)


def test_a_store_that_grows_takes_space_for_several_batches_with_one_commit(
    storage: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_batches, num_commits = 24, 0
    transaction = Index.transaction

    def counted(index: Index) -> Any:
        nonlocal num_commits
        num_commits += 1
        return transaction(index)

    monkeypatch.setattr(Index, "transaction", counted)
    for name in range(num_batches):
        keys = chain(name, GROUP_PAGES)
        assert write(storage, keys, page_bytes=PAGE_BYTES) == [OK] * GROUP_PAGES
    assert num_commits <= num_batches + num_batches // 8 + 1
