"""Verified reads."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from hicache.storage.page_store.blocks import BLOCK_BYTES
from hicache.storage.page_store.group import CHECKSUM_BYTES
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.storage.page_memory import BatchMemory
    from hicache.storage.page_store.layout import PageLayout
    from hicache.storage.page_store.native_transfer import NativeTransfer
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
    step = transfer.pages_per_chunk(layout)
    done = 0
    try:
        done = num_native = _read_natively(transfer.native, span, memory, expired)
        for done in range(num_native, num_pages, step):
            if expired():
                return ReadPages(done, PageOutcome.TIMEOUT)
            part = memory.views(span.start + done, min(step, num_pages - done))
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


def _read_natively(
    native: NativeTransfer | None, span: Span, memory: BatchMemory, expired: Callable[[], bool]
) -> int:
    """Read leading pages; return how many are verified.

    If that is not all of them, somebody has to find out what is the matter with the next.
    """
    if native is None:
        return 0
    found = b""
    with contextlib.suppress(OSError):
        for first, count in native.cut(span.layout, span.num_pages):
            if expired():
                break
            found += native.read(span.layout, first, memory.pages, span.start + first, count)
            if len(found) < (first + count) * CHECKSUM_BYTES:
                break
    return _num_equal(found, span.checksums)


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
