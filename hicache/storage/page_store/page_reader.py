"""Verified reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import xxhash

from hicache.storage.page_store.blocks import BLOCK_BYTES
from hicache.storage.page_store.group import CHECKSUM_BYTES, NO_CHECKSUM
from hicache.storage.vectored_io import read_at
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.storage.page_memory import BatchMemory, PageViews
    from hicache.storage.page_store.layout import PageLayout
    from hicache.storage.page_store.spans import Span
    from hicache.storage.page_store.transfer import PageTransfer

__all__ = ["ReadPages", "num_intact", "read_pages"]


class ReadPages(NamedTuple):
    """What a read brought.

    Attributes:
        num_good: leading pages that are verified.
        failure: what is the matter with the next; `OK` if there is none.
        error: behind a failure of the disk.
    """

    num_good: int
    failure: PageOutcome
    error: OSError | None = None


def read_pages(
    transfer: PageTransfer, span: Span, memory: BatchMemory, *, expired: Callable[[], bool]
) -> ReadPages:
    """Read the pages of a span into their places of a batch, until one is not what was written.

    Does not raise for what happens to the disk.
    """
    layout, num_pages = span.layout, span.num_pages
    step = max(1, transfer.chunk_bytes // layout.stride_bytes)
    done = 0
    try:
        if not expired() and _read_as_one(transfer, span, memory):
            return ReadPages(num_pages, PageOutcome.OK)
        views = memory.views(span.start, num_pages)
        place = transfer.plain_place(layout, views.pieces)
        for done in range(0, num_pages, step):
            if expired():
                return ReadPages(done, PageOutcome.TIMEOUT)
            part = views.part(done, step)
            num_whole, found = _read_part(transfer, layout, place, done, part)
            expected = span.checksums[done * CHECKSUM_BYTES : (done + step) * CHECKSUM_BYTES]
            if found != expected:
                num_sound = _num_equal(found, expected)
                cut_short = num_sound == num_whole
                failure = PageOutcome.TRUNCATED if cut_short else PageOutcome.CORRUPT
                return ReadPages(done + num_sound, failure)
    except OSError as error:
        return ReadPages(done, PageOutcome.FAILED, error)
    return ReadPages(num_pages, PageOutcome.OK)


def _read_as_one(transfer: PageTransfer, span: Span, memory: BatchMemory) -> bool:
    """Read small pages whose memory is one piece, and verify them at once.

    Returns:
        Whether they are what was written. If not, somebody has to find out which is not.
    """
    if span.whole_checksum == NO_CHECKSUM:
        return False
    whole = memory.whole(span.start, span.num_pages, span.layout.page_bytes)
    place = None if whole is None else transfer.plain_place(span.layout, [whole])
    if whole is None or place is None:
        return False
    return _read_and_hash(*place, whole, transfer.chunk_bytes) == span.whole_checksum


def _read_part(
    transfer: PageTransfer,
    layout: PageLayout,
    place: tuple[int, int] | None,
    first: int,
    target: PageViews,
) -> tuple[int, bytes]:
    """Read some pages; return how many there were as a whole, and their checksums."""
    if place is None:
        num_whole = transfer.read(layout, first, target)
    else:
        fd, offset = place
        offset += first * layout.stride_bytes
        pieces = target.all_pieces()
        if len(pieces) == 1:
            checksum = _read_and_hash(fd, offset, pieces[0], transfer.chunk_bytes)
            return (0, b"") if checksum is None else (1, checksum)
        num_bytes = target.num_pages * layout.stride_bytes
        num_whole = read_at(fd, pieces, offset, num_bytes) // layout.stride_bytes
    return num_whole, b"".join(target.part(0, num_whole).checksums())


def _read_and_hash(fd: int, offset: int, memory: memoryview, chunk_bytes: int) -> bytes | None:
    """Read into one piece of memory; return its checksum, or `None` if the file ends before."""
    state = xxhash.xxh3_128()
    for start in range(0, len(memory), chunk_bytes):
        part = memory[start : start + chunk_bytes]
        if read_at(fd, [part], offset + start, len(part)) < len(part):
            return None
        # What was read last is still in the processor's cache.
        state.update(part)
    return state.digest()


def _num_equal(left: bytes, right: bytes) -> int:
    """Return how many leading checksums are equal."""
    for number in range(len(left) // CHECKSUM_BYTES):
        end = (number + 1) * CHECKSUM_BYTES
        if left[:end] != right[:end]:
            return number
    return len(left) // CHECKSUM_BYTES


def num_intact(
    layout: PageLayout, first: int, num_pages: int, size_of: Callable[[int], int]
) -> int:
    """Return how many of some pages lie within their segments, up to the first that does not.

    Args:
        layout: where they lie.
        first: position of the first page.
        num_pages: how many.
        size_of: returns the length of a segment in bytes.
    """
    extents = layout.extents_of(first, num_pages)
    if all(extent.end * BLOCK_BYTES <= size_of(extent.segment) for extent in extents):
        return num_pages
    for index in range(num_pages):
        left = layout.page_bytes
        for segment, block, num_blocks in layout.extents_of(first + index, 1):
            part = min(left, num_blocks * BLOCK_BYTES)
            left -= part
            if block * BLOCK_BYTES + part > size_of(segment):
                return index
    return num_pages
