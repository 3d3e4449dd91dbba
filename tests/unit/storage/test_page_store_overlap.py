"""Most of a large batch is published while the disk has the rest of it."""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import TYPE_CHECKING, Any

import pytest
from page_store_tools import (
    FAILED,
    LATER,
    NO_SPACE,
    OK,
    PRESENT,
    SKIPPED,
    chain,
    num_stored,
    open_store,
    payload_of,
    read,
    verify_index,
    write,
)

from hicache.storage import native_io
from hicache.storage.base import DEFAULT_CALL_BYTES, Page, Piece
from hicache.storage.page_store import group_writer, native_transfer, refill
from hicache.storage.page_store import transfer as transfer_module
from hicache.storage.page_store.blocks import BlockKind
from hicache.storage.page_store.publisher import Publication, Publisher
from hicache.storage.page_store.segments import Segments
from hicache.storage.vectored_io import write_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from hicache.storage.page_store import PageStore
    from hicache.storage.page_store.blocks import Extent
    from hicache.storage.page_store.publisher import Draft
    from hicache.types import PageOutcome

pytestmark = pytest.mark.skipif(
    not native_io.HAS_NATIVE_IO, reason="the native module was not built"
)

PAGE_BYTES = 16 << 10
NUM_PAGES = 100
NUM_LAST = NUM_PAGES // 4
NUM_FIRST = NUM_PAGES - NUM_LAST
KEYS = chain(1, NUM_PAGES)


class Source:
    """Pages in memory that direct I/O takes as it is."""

    def __init__(self) -> None:
        content = b"".join(payload_of(key, PAGE_BYTES) for key in KEYS)
        self._memory = mmap.mmap(-1, len(content))
        self._memory[:] = content
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.pages: list[Page] = [
            (Piece(address + n * PAGE_BYTES, PAGE_BYTES),) for n in range(NUM_PAGES)
        ]

    def write(self, storage: PageStore) -> list[PageOutcome]:
        return storage.batch_set(KEYS, [b"", *KEYS[:-1]], self.pages, deadline=LATER)


@pytest.fixture(scope="module")
def source() -> Source:
    return Source()


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch of small pages be as many requests as one of large pages."""
    monkeypatch.setattr(group_writer, "_MIN_OVERLAPPED_BYTES", NUM_PAGES * PAGE_BYTES)
    monkeypatch.setattr(native_transfer, "_DIRECT_WRITE_BYTES", 4 * PAGE_BYTES)


@pytest.fixture
def storage(fast_path: Path) -> Iterator[PageStore]:
    storage = open_store(fast_path, page_bytes=PAGE_BYTES, direct_io=True)
    with storage._access.use() as access:
        if not access.transfer.passes_marks:
            pytest.skip("the file system knows no direct I/O")
    yield storage
    storage.close()


@pytest.fixture
def published(storage: PageStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Say how many pages of the prefix can be found after each publication."""
    found: list[int] = []
    publish = Publisher.publish

    def looks(self: Publisher, drafts: Sequence[Draft]) -> Publication:
        publication = publish(self, drafts)
        found.append(storage.batch_exists(KEYS))
        return publication

    monkeypatch.setattr(Publisher, "publish", looks)
    return found


def check_that_all_goes_well(storage: PageStore, source: Source, path: Path) -> None:
    """Write what is missing: nothing is left of what went wrong before."""
    num_before = storage.batch_exists(KEYS)
    expected = [PRESENT] * num_before + [OK] * (NUM_PAGES - num_before)
    assert source.write(storage) == expected
    assert read(storage, KEYS, page_bytes=PAGE_BYTES) == [OK] * NUM_PAGES
    verify_index(path)


def test_all_but_the_last_group_is_published_before_that_one_is(
    storage: PageStore, source: Source, published: list[int], fast_path: Path
) -> None:
    assert source.write(storage) == [OK] * NUM_PAGES
    assert published == [NUM_FIRST, NUM_PAGES]
    check_that_all_goes_well(storage, source, fast_path)


@pytest.mark.parametrize("call_pages", [7, 25, 30, 64])
def test_a_batch_can_be_several_calls(
    fast_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch, call_pages: int
) -> None:
    """Wherever the last group begins in one."""
    monkeypatch.setattr(native_transfer, "DIRECT_CALL_BYTES", call_pages * PAGE_BYTES)
    storage = open_store(fast_path, page_bytes=PAGE_BYTES, direct_io=True)
    assert source.write(storage) == [OK] * NUM_PAGES
    check_that_all_goes_well(storage, source, fast_path)
    storage.close()


def test_what_must_outlive_a_power_loss_is_published_as_a_whole(
    fast_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As each publication waits for the disk."""
    storage = open_store(fast_path, page_bytes=PAGE_BYTES, direct_io=True, fsync=True)
    num_calls: list[int] = []
    publish = Publisher.publish

    def counts(self: Publisher, drafts: Sequence[Draft]) -> Publication:
        num_calls.append(len(drafts))
        return publish(self, drafts)

    monkeypatch.setattr(Publisher, "publish", counts)
    assert source.write(storage) == [OK] * NUM_PAGES
    assert len(num_calls) == 1
    storage.close()


def test_nothing_is_published_behind_pages_that_cannot_be(
    storage: PageStore, source: Source, monkeypatch: pytest.MonkeyPatch, fast_path: Path
) -> None:
    publish = Publisher.publish
    num_calls = 0

    def fails(self: Publisher, drafts: Sequence[Draft]) -> Publication:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            return publish(self, drafts)
        publication = Publication(drafts)
        publication.error = OSError(errno.ENOSPC, "no space left")
        return publication

    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "publish", fails)
        assert source.write(storage) == [NO_SPACE] + [SKIPPED] * (NUM_PAGES - 1)
    assert num_stored(storage, KEYS) == 0
    assert "no space left" in str(storage.stats().last_error)
    check_that_all_goes_well(storage, source, fast_path)


@pytest.mark.parametrize("num_headers", range(3))
def test_a_header_that_cannot_be_written_costs_its_group_and_those_behind(
    storage: PageStore,
    source: Source,
    monkeypatch: pytest.MonkeyPatch,
    fast_path: Path,
    num_headers: int,
) -> None:
    write_header = Segments.write_header
    left = [num_headers]

    def fails(self: Segments, extent: Extent, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, "input/output error")
        write_header(self, extent, data)

    with monkeypatch.context() as patch:
        patch.setattr(Segments, "write_header", fails)
        outcomes = source.write(storage)
    num_good = [0, 64, NUM_FIRST][num_headers]
    assert outcomes == [OK] * num_good + [FAILED] + [SKIPPED] * (NUM_PAGES - num_good - 1)
    assert num_stored(storage, KEYS) == num_good
    check_that_all_goes_well(storage, source, fast_path)


def failing_behind_the_mark() -> Callable[..., bytes]:
    """Return a native write that fails when all is written, so that nobody knows of the end."""
    write_pages = native_io.page_io.write_pages

    def fails(*arguments: Any) -> bytes:
        write_pages(*arguments)
        raise OSError(errno.EIO, "input/output error")

    return fails


def test_pages_that_are_published_stay_so_when_the_disk_fails_behind_them(
    storage: PageStore, source: Source, monkeypatch: pytest.MonkeyPatch, fast_path: Path
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(native_io.page_io, "write_pages", failing_behind_the_mark())
        patch.setattr(transfer_module, "write_at", fails)
        outcomes = source.write(storage)
    assert outcomes == [OK] * NUM_FIRST + [FAILED] + [SKIPPED] * (NUM_LAST - 1)
    assert num_stored(storage, KEYS) == NUM_FIRST
    check_that_all_goes_well(storage, source, fast_path)


def test_what_is_published_is_not_written_again_when_the_disk_fails_behind_it(
    storage: PageStore, source: Source, monkeypatch: pytest.MonkeyPatch, fast_path: Path
) -> None:
    """Who makes room for others may have given it up meanwhile, and its place to somebody else."""
    num_written: list[int] = []

    def counts(fd: int, buffers: Sequence[memoryview], offset: int, num_bytes: int) -> None:
        num_written.append(num_bytes)
        write_at(fd, buffers, offset, num_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(native_io.page_io, "write_pages", failing_behind_the_mark())
        patch.setattr(transfer_module, "write_at", counts)
        assert source.write(storage) == [OK] * NUM_PAGES
    assert sum(num_written) == NUM_LAST * PAGE_BYTES
    check_that_all_goes_well(storage, source, fast_path)


def test_without_the_native_module_the_batch_is_written_and_then_published(
    storage: PageStore,
    source: Source,
    published: list[int],
    monkeypatch: pytest.MonkeyPatch,
    fast_path: Path,
) -> None:
    """As when it has failed, and Python finds out what is the matter: nothing is."""

    def fails(*_: Any) -> bytes:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(native_io.page_io, "write_pages", fails)
        assert source.write(storage) == [OK] * NUM_PAGES
    assert published == [NUM_PAGES]
    check_that_all_goes_well(storage, source, fast_path)


def test_space_for_the_next_batch_is_taken_while_the_disk_is_busy(
    storage: PageStore, source: Source, monkeypatch: pytest.MonkeyPatch, fast_path: Path
) -> None:
    with storage._access.use() as access:
        allocator = access.store.allocator
        assert source.write(storage) == [OK] * NUM_PAGES
        storage.clear()
        while allocator._has(allocator._need(NUM_PAGES, PAGE_BYTES)):
            claim = allocator.claim(64, PAGE_BYTES)
            assert claim is not None
        assert source.write(storage) == [OK] * NUM_PAGES
        assert allocator._has(allocator._need(NUM_PAGES, PAGE_BYTES))


@pytest.mark.parametrize("num_before", [3, NUM_FIRST])
def test_pages_are_not_stored_below_ones_that_went_while_they_were_written(
    storage: PageStore, monkeypatch: pytest.MonkeyPatch, fast_path: Path, num_before: int
) -> None:
    """Another process makes room, or clears: nobody would ever find them. One more try is made."""
    assert write(storage, KEYS[:num_before], page_bytes=PAGE_BYTES) == [OK] * num_before
    other = open_store(fast_path, page_bytes=PAGE_BYTES)
    publish = Publisher.publish
    num_clears = 1000

    def clears_first(self: Publisher, drafts: Sequence[Draft]) -> Publication:
        nonlocal num_clears
        num_clears -= 1
        if num_clears >= 0:
            other.clear()
        return publish(self, drafts)

    monkeypatch.setattr(Publisher, "publish", clears_first)
    outcomes = write(storage, KEYS, page_bytes=PAGE_BYTES)
    assert outcomes[-1] is SKIPPED
    assert num_stored(storage, KEYS) == storage.batch_exists(KEYS) < NUM_PAGES
    verify_index(fast_path)
    num_clears = 0
    other.clear()
    assert write(storage, KEYS[:num_before], page_bytes=PAGE_BYTES) == [OK] * num_before
    num_clears = 1
    assert write(storage, KEYS, page_bytes=PAGE_BYTES) == [OK] * NUM_PAGES
    assert read(storage, KEYS, page_bytes=PAGE_BYTES) == [OK] * NUM_PAGES
    verify_index(fast_path)
    other.close()


def test_a_file_is_seldom_given_more_space(
    storage: PageStore, monkeypatch: pytest.MonkeyPatch, fast_path: Path
) -> None:
    """The kernel lets no direct I/O go on meanwhile: once in eight batches is often enough."""
    monkeypatch.setattr(refill, "_MAX_CHUNK_BLOCKS", NUM_PAGES)
    reserve = Segments.reserve
    reserved: list[int] = []

    def notes(self: Segments, kind: BlockKind, extent: Extent) -> None:
        if kind is BlockKind.PAYLOAD:
            reserved.append(extent.num_blocks)
        reserve(self, kind, extent)

    monkeypatch.setattr(Segments, "reserve", notes)
    for name in range(16):
        keys = chain(100 + name, NUM_PAGES)
        assert write(storage, keys, page_bytes=PAGE_BYTES) == [OK] * NUM_PAGES
    # One of them for what comes next.
    assert len(reserved) == 3
    storage.close()
    verify_index(fast_path)


@pytest.mark.parametrize("direct", [False, True])
def test_past_the_page_cache_calls_are_as_large_as_what_is_moved_at_a_time(
    fast_path: Path, direct: bool
) -> None:
    """So that the disk has no pause that can be helped."""
    storage = open_store(fast_path, page_bytes=PAGE_BYTES, direct_io=direct)
    wanted = native_transfer.DIRECT_CALL_BYTES if direct else DEFAULT_CALL_BYTES
    assert storage.capabilities.call_bytes == wanted
    storage.close()
