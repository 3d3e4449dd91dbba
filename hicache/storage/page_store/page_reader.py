"""Verified reads."""

from __future__ import annotations

import contextlib
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
        # That is a few milliseconds at most, so the deadline is looked at before it only.
        if span.whole_checksum != NO_CHECKSUM:
            if expired():
                return ReadPages(0, PageOutcome.TIMEOUT)
            with contextlib.suppress(OSError):
                if _read_as_one(transfer, span, memory):
                    return ReadPages(num_pages, PageOutcome.OK)
        views = memory.views(span.start, num_pages)
        for done in range(_read_plainly(transfer, span, views, expired), num_pages, step):
            if expired():
                return ReadPages(done, PageOutcome.TIMEOUT)
            part = views.part(done, step)
            num_whole = transfer.read(layout, done, part)
            found = part.part(0, num_whole).checksums()
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

    Raises:
        OSError: from the kernel.
    """
    whole = memory.whole(span.start, span.num_pages, span.layout.page_bytes)
    place = None if whole is None else transfer.plain_place(span.layout, [whole])
    if whole is None or place is None:
        return False
    return _read_and_hash(*place, whole, transfer.chunk_bytes) == span.whole_checksum


def _read_plainly(
    transfer: PageTransfer, span: Span, views: PageViews, expired: Callable[[], bool]
) -> int:
    """Read leading pages in the plain case, of one piece each in one extent, which most are.

    Returns:
        How many are verified; somebody else has to look at the next, if there is one.
    """
    num_pages, stride_bytes = span.num_pages, span.layout.stride_bytes
    if len(views.pieces) != num_pages:
        return 0
    step = max(1, transfer.chunk_bytes // stride_bytes)
    # What checks the pages of each step; the disk need not wait for the checksums.
    found: list[Callable[[], bytes]] = []
    with contextlib.suppress(OSError):
        place = transfer.plain_place(span.layout, views.pieces)
        for start in range(0, num_pages if place else 0, step):
            assert place is not None
            if expired():
                break
            part = views.part(start, step)
            check = _read_step(transfer, place[0], place[1] + start * stride_bytes, part)
            if check is None:
                break
            found.append(check)
    return _num_equal(b"".join(check() for check in found), span.checksums)


def _read_step(
    transfer: PageTransfer, fd: int, offset: int, pages: PageViews
) -> Callable[[], bytes] | None:
    """Read pages that lie in one piece; return what gives their checksums, or `None`."""
    pieces, chunk_bytes = pages.all_pieces(), transfer.chunk_bytes
    num_bytes = sum(map(len, pieces))
    if len(pieces) == 1 and num_bytes > 2 * chunk_bytes:
        checksum = _read_and_hash(fd, offset, pieces[0], chunk_bytes)
        return None if checksum is None else lambda: checksum
    if read_at(fd, pieces, offset, num_bytes) < num_bytes:
        return None
    return transfer.begin_checksums(pages)


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
    """Return how many leading checksums are equal; the right has at least as many as the left."""
    if right.startswith(left):
        return len(left) // CHECKSUM_BYTES
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
