"""A free list that gives the same answers on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.pools.allocator import PageAllocator

if TYPE_CHECKING:
    from hicache.pools.base import Allocator
    from hicache.types import IntArray

__all__ = ["AgreedAllocator"]


class AgreedAllocator:
    """Gives at most what every rank can give, so that an allocation has one outcome on all.

    Pools differ by a page or more, or somebody holds a page on one rank. So whatever is free in
    `inner` is taken from it and kept here, and what is promised can always be given: pages are
    allocated and freed here, on all ranks alike, and nobody else finds any in `inner`. What one
    rank has more than the others stays here, unused.

    Calls cost as those of `PageAllocator`. For a single owner thread.

    Args:
        inner: free list of this rank's pool; its pages count from 0.

    Attributes:
        inner: what was given.
    """

    def __init__(self, inner: Allocator) -> None:
        self.inner = inner
        self._stock = PageAllocator(inner.num_pages)
        # Nothing is in stock: every page is somebody else's.
        self._stock.alloc(inner.num_pages)
        self._num_pages = inner.num_pages
        self._num_agreed = 0
        self._given_back = False

    @property
    def num_pages(self) -> int:
        """Pages of the smallest pool of all ranks, free or not; ids may be larger."""
        return self._num_pages

    @property
    def num_available(self) -> int:
        """Pages that `alloc` can give now; the same on every rank."""
        return self._num_agreed

    def alloc(self, count: int) -> IntArray | None:
        """See `Allocator.alloc`."""
        if count > self._num_agreed:
            return None
        pages = self._stock.alloc(count)
        self._num_agreed -= count
        return pages

    def free(self, pages: IntArray) -> None:
        """See `Allocator.free`."""
        self._stock.free(pages)
        self._num_agreed += len(pages)
        if self._given_back:
            self.give_back()

    def offer(self) -> int:
        """Take what is free in `inner`, and return how many pages this rank can promise."""
        num_free = self.inner.num_available
        pages = self.inner.alloc(num_free) if num_free else None
        if pages is not None:
            self._stock.free(pages)
        return self._stock.num_available

    def accept(self, num_free: int, *, num_pages: int | None = None) -> None:
        """Give `num_free` pages from now on, the least that any rank has offered.

        Args:
            num_free: at most what `offer` has returned.
            num_pages: of the smallest pool.
        """
        assert 0 <= num_free <= self._stock.num_available
        self._num_agreed = num_free
        self._num_pages = num_pages or self._num_pages

    def give_back(self) -> None:
        """Return what is free to `inner`, and from now on what is freed; nothing is given here."""
        pages = self._stock.alloc(self._stock.num_available)
        assert pages is not None
        self.inner.free(pages)
        self._num_agreed = 0
        self._given_back = True

    def free_pages(self) -> IntArray:
        """Return all free pages but those of `inner`, as a copy; for checks of invariants."""
        return self._stock.free_pages()
