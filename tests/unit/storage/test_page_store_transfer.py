"""Bytes of pages come and go right wherever they lie in memory and on the disk."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
from typing import TYPE_CHECKING, Any

import pytest
from page_store_tools import (
    CORRUPT,
    LATER,
    OK,
    SKIPPED,
    chain,
    flip,
    open_store,
    payload_of,
    read,
    verify_index,
    write,
)

from hicache.storage.base import Page, Piece
from hicache.storage.page_store import list_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from hicache.storage.page_store import PageStore
    from hicache.types import PageHash

BLOCK_BYTES = 4096
NUM_PAGES = 9
KEYS = chain(1, NUM_PAGES)
CHAIN = [b"", *KEYS[:-1]]


class Region:
    """Memory of a host pool: on a boundary of blocks, larger than its pages need."""

    def __init__(self, num_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.num_bytes = num_bytes

    def fill(self, pages: Sequence[Page], keys: Sequence[PageHash], page_bytes: int) -> None:
        for page, key in zip(pages, keys, strict=True):
            content, start = payload_of(key, page_bytes), 0
            for address, num_bytes in page:
                ctypes.memmove(address, content[start : start + num_bytes], num_bytes)
                start += num_bytes

    def holds(self, pages: Sequence[Page], keys: Sequence[PageHash], page_bytes: int) -> bool:
        contents = [b"".join(ctypes.string_at(*piece) for piece in page) for page in pages]
        return contents == [payload_of(key, page_bytes) for key in keys]

    def clear(self) -> None:
        ctypes.memset(self.address, 0xAA, self.num_bytes)


def in_a_row(base: int, page_bytes: int) -> list[Page]:
    return [(Piece(base + n * page_bytes, page_bytes),) for n in range(NUM_PAGES)]


def backwards(base: int, page_bytes: int) -> list[Page]:
    return in_a_row(base, page_bytes)[::-1]


def off_a_boundary(base: int, page_bytes: int) -> list[Page]:
    return in_a_row(base + 8, page_bytes)


def mixed(base: int, page_bytes: int) -> list[Page]:
    stride = -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES
    pages: list[Page] = [(Piece(base + n * stride, page_bytes),) for n in range(NUM_PAGES)]
    random.Random(5).shuffle(pages)
    return pages


def in_pieces(base: int, page_bytes: int) -> list[Page]:
    """Half of each page in one place, a byte in another, the rest in a third: layer by layer."""
    half = page_bytes // 2
    rest = page_bytes - half - 1
    return [
        (
            Piece(base + n * half, half),
            Piece(base + NUM_PAGES * half + n, 1),
            Piece(base + NUM_PAGES * (half + 1) + n * rest, rest),
        )
        for n in range(NUM_PAGES)
    ]


PLACINGS = [in_a_row, backwards, off_a_boundary, mixed, in_pieces]


@pytest.mark.usefixtures("either_io")
@pytest.mark.parametrize("direct_io", [False, True])
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("segment_bytes", [16 << 30, 5 * BLOCK_BYTES])
@pytest.mark.parametrize("page_bytes", [5000, 16_384, 70_000, 131_072])
def test_whatever_is_written_from_wherever_is_read_to_wherever(
    fast_path: Path, page_bytes: int, segment_bytes: int, registered: bool, direct_io: bool
) -> None:
    """Pages go on from one segment to the next where these are small."""
    region = Region(NUM_PAGES * (page_bytes + 2 * BLOCK_BYTES))
    for number, placing in enumerate(PLACINGS):
        storage = open_store(
            fast_path / str(number),
            page_bytes=page_bytes,
            segment_bytes=segment_bytes,
            direct_io=direct_io,
        )
        if registered:
            storage.register_memory([(region.address, region.num_bytes)])
        source = placing(region.address, page_bytes)
        region.fill(source, KEYS, page_bytes)
        written = storage.batch_set(KEYS, CHAIN, source, deadline=LATER)
        assert written == [OK] * NUM_PAGES
        for other in PLACINGS:
            for first in (0, 4):
                region.clear()
                target = other(region.address, page_bytes)[first:]
                keys = KEYS[first:]
                assert storage.batch_get(keys, CHAIN[first:], target, deadline=LATER) == (
                    [OK] * len(keys)
                )
                assert region.holds(target, keys, page_bytes)
        storage.close()


@pytest.mark.usefixtures("either_io")
@pytest.mark.parametrize("placing", PLACINGS)
@pytest.mark.parametrize("page_bytes", [16_384, 131_072, 1_200_000])
def test_pages_before_one_that_is_damaged_are_read(
    fast_path: Path, page_bytes: int, placing: Callable[[int, int], list[Page]]
) -> None:
    """Whichever it is, and however many are verified at once."""
    region = Region(NUM_PAGES * (page_bytes + 2 * BLOCK_BYTES))
    target = placing(region.address, page_bytes)
    for bad in (0, 3, NUM_PAGES - 1):
        storage = open_store(fast_path / str(bad), page_bytes=page_bytes)
        write(storage, KEYS, page_bytes=page_bytes)
        flip(list(list_pages(str(fast_path / str(bad))))[bad], page_bytes - 1)
        region.clear()
        outcomes = storage.batch_get(KEYS, CHAIN, target, deadline=LATER)
        assert outcomes == [OK] * bad + [CORRUPT] + [SKIPPED] * (NUM_PAGES - bad - 1)
        assert region.holds(target[:bad], KEYS[:bad], page_bytes)
        storage.close()


@pytest.mark.usefixtures("plain_io")
@pytest.mark.parametrize("placing", PLACINGS)
@pytest.mark.parametrize("page_bytes", [16_384, 131_072])
def test_an_error_of_the_disk_costs_the_pages_from_there_on(
    fast_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    page_bytes: int,
    placing: Callable[[int, int], list[Page]],
) -> None:
    storage = open_store(fast_path, page_bytes=page_bytes)
    write(storage, KEYS, page_bytes=page_bytes)
    bad = list(list_pages(str(fast_path)))[4]
    preadv = os.preadv

    def fails_there(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset <= bad.offset < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "input/output error")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails_there)
    region = Region(NUM_PAGES * (page_bytes + 2 * BLOCK_BYTES))
    target = placing(region.address, page_bytes)
    outcomes = storage.batch_get(KEYS, CHAIN, target, deadline=LATER)
    num_good = outcomes.count(OK)
    assert num_good <= 4
    assert [outcome.value for outcome in outcomes[num_good:]][:2] == ["failed", "skipped"]
    assert region.holds(target[:num_good], KEYS[:num_good], page_bytes)
    # Pages of 128 KiB are read four at a time.
    assert page_bytes < 100_000 or num_good == 4
    monkeypatch.undo()
    assert read(storage, KEYS, page_bytes=page_bytes) == [OK] * NUM_PAGES
    storage.close()


def refusing_to_open(call: Callable[..., int]) -> Callable[..., int]:
    def refuses(path: str, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid argument")
        return call(path, flags, *rest)

    return refuses


def refusing_to_move(call: Callable[..., int]) -> Callable[..., int]:
    def refuses(fd: int, *arguments: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid argument")
        return call(fd, *arguments)

    return refuses


@pytest.mark.usefixtures("plain_io")
@pytest.mark.parametrize("call", ["open", "pwritev", "preadv"])
def test_where_direct_io_is_refused_it_is_buffered_and_that_is_noted(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    storage = open_store(fast_path, page_bytes=16_384, direct_io=True)
    refusing = refusing_to_open if call == "open" else refusing_to_move
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refusing(getattr(os, call)))
        for name in range(3):
            keys = chain(name, 5)
            assert write(storage, keys, page_bytes=16_384) == [OK] * 5
            assert read(storage, keys, page_bytes=16_384) == [OK] * 5
    assert caplog.text.count("refuses direct I/O") == 1
    with storage._access.use() as access:
        assert access.transfer.num_direct_refusals == 1
    assert storage.stats().last_error is None
    storage.close()


@pytest.fixture
def storage(fast_path: Path) -> Iterator[PageStore]:
    storage = open_store(fast_path)
    yield storage
    storage.close()


@pytest.mark.usefixtures("either_io")
def test_a_directory_of_segments_that_was_deleted_is_made_again(
    storage: PageStore, fast_path: Path
) -> None:
    write(storage, KEYS)
    for path in (fast_path / "data").iterdir():
        path.unlink()
    (fast_path / "data").rmdir()
    assert storage.batch_exists(KEYS) == 0
    assert write(storage, KEYS) == [OK] * NUM_PAGES
    assert read(storage, KEYS) == [OK] * NUM_PAGES
    verify_index(fast_path)
