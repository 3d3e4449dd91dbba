"""A page's host memory as buffers that Python's own I/O takes, and the checksum over it."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from hicache.storage.base import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache.storage.base import Page

__all__ = [
    "CHECKSUM_BYTES",
    "BatchMemory",
    "HostRegions",
    "PageViews",
    "page_checksum",
    "page_over",
    "page_views",
]

CHECKSUM_BYTES = 16


def page_views(page: Page) -> list[memoryview]:
    """Return each piece of `page` as writable bytes, without copying.

    The views do not keep the memory alive: whoever gave the page does.
    """
    return [_view(address, num_bytes) for address, num_bytes in page]


def page_over(buffer: bytearray) -> Page:
    """Return a page that lies in `buffer`, which must live and keep its length."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return (Piece(address, len(buffer)),)


def page_checksum(views: Sequence[memoryview | bytes]) -> bytes:
    """Return xxh3-128 over the buffers in order; how they are cut does not matter.

    It detects accidents (flipped bits, cut files), not an attacker who can write to the store.
    """
    if len(views) == 1:
        return xxhash.xxh3_128_digest(views[0])
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    return state.digest()


class PageViews(NamedTuple):
    """Memory of the pages of a batch, or of neighbours among them.

    Attributes:
        pieces: the pieces of all pages of the batch as writable bytes, in order.
        bounds: where each page begins in `pieces`, and where the last one ends.
    """

    pieces: list[memoryview]
    bounds: Sequence[int]

    @property
    def num_pages(self) -> int:
        """How many pages."""
        return len(self.bounds) - 1

    def part(self, first: int, num_pages: int) -> PageViews:
        """Return some of the pages, fewer at the end."""
        return PageViews(self.pieces, self.bounds[first : first + num_pages + 1])

    def all_pieces(self) -> list[memoryview]:
        """Return the pieces of these pages in order."""
        return self.pieces[self.bounds[0] : self.bounds[-1]]

    def each(self) -> Iterator[list[memoryview]]:
        """Yield the pieces of one page after the other."""
        for start, end in itertools.pairwise(self.bounds):
            yield self.pieces[start:end]

    def checksums(self) -> bytes:
        """Return the `page_checksum` of each page, one after the other."""
        pieces = self.all_pieces()
        if len(pieces) == self.num_pages:
            return b"".join(map(xxhash.xxh3_128_digest, pieces))
        return b"".join(map(page_checksum, self.each()))


class HostRegions:
    """Registered memory: to cut a view out of one over a whole region costs a fifth of a new one.

    Pages outside of every region work all the same. Thread-safe.
    """

    def __init__(self) -> None:
        self._regions: tuple[tuple[int, int, memoryview], ...] = ()

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        """Add regions, given by address and length in bytes."""
        added = ((start, start + length, _view(start, length)) for start, length in regions)
        self._regions = (*self._regions, *added)

    def views(self, pages: Sequence[Page]) -> PageViews:
        """Return the memory of pages; see `page_views`."""
        pieces: list[memoryview] = []
        low = high = 0
        region = memoryview(b"")
        for page in pages:
            for address, num_bytes in page:
                if not (low <= address and address + num_bytes <= high):
                    low, high, region = self._region_of(address, num_bytes)
                start = address - low
                pieces.append(region[start : start + num_bytes])
        if len(pieces) == len(pages):
            return PageViews(pieces, range(len(pages) + 1))
        return PageViews(pieces, [0, *itertools.accumulate(map(len, pages))])

    def _region_of(self, address: int, num_bytes: int) -> tuple[int, int, memoryview]:
        """Return the region that holds a piece, or the piece as one."""
        for region in self._regions:
            if region[0] <= address and address + num_bytes <= region[1]:
                return region
        return address, address + num_bytes, _view(address, num_bytes)


class BatchMemory:
    """Memory of the pages of a batch, looked at when it is needed. For one thread.

    Attributes:
        pages: where each page is.
    """

    def __init__(self, regions: HostRegions, pages: Sequence[Page]) -> None:
        self._regions = regions
        self.pages = pages

    def views(self, start: int, num_pages: int) -> PageViews:
        """Return the memory of some of the pages, fewer at the end of the batch."""
        return self._regions.views(self.pages[start : start + num_pages])


def _view(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")
