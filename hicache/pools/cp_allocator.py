"""The free list of a pool that context-parallel ranks share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from hicache.errors import ConfigError, OwnershipError
from hicache.pools.allocator import PageAllocator

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicache.pools.base import Allocator
    from hicache.pools.cp_layout import CpLayout
    from hicache.types import IntArray

__all__ = ["CpPageAllocator", "KnowsOwners", "alloc_like"]


@runtime_checkable
class KnowsOwners(Protocol):
    """What an allocator offers besides, where each page is on one of several ranks."""

    def owners_of(self, pages: IntArray) -> IntArray:
        """Return the rank that has each page."""

    def alloc_pages_with_owners(self, owners: IntArray) -> IntArray | None:
        """Give a page of each of `owners`, in that order, or none at all.

        `None` when one of them has too few free pages, even if others have enough.
        """


def alloc_like(allocator: Allocator, pages: IntArray, other: Allocator) -> IntArray | None:
    """Give as many pages as `pages` of the tier that `other` is the free list of, or none.

    Where pages are spread over ranks, each is on the rank that has its fellow: bytes never go from
    one rank to another. A tier whose allocator does not know of owners gives any.
    """
    if isinstance(allocator, KnowsOwners) and isinstance(other, KnowsOwners):
        return allocator.alloc_pages_with_owners(other.owners_of(pages))
    return allocator.alloc(len(pages))


class CpPageAllocator:
    """Logical pages `0 .. num_pages - 1`; an equal one on every rank gives equal pages.

    Not thread-safe: for a single owner thread. Calls cost in proportion to the pages they move.

    Args:
        layout: who owns which page. Each rank must own as many as its pool has.
    """

    def __init__(self, layout: CpLayout) -> None:
        self._layout = layout
        pages = np.arange(layout.num_pages, dtype=np.int64)
        owners = layout.owner_for_logical_pages(pages)
        # The pages of each rank in order, and the free list of the places in that order.
        self._pages_of = [pages[owners == rank] for rank in range(layout.cp_size)]
        self._lists = [PageAllocator(len(own)) for own in self._pages_of]
        self._place = np.empty(layout.num_pages, dtype=np.int64)
        for own in self._pages_of:
            self._place[own] = np.arange(len(own))
        self._next_owner = 0

    @property
    def num_pages(self) -> int:
        """See `Allocator.num_pages`."""
        return len(self._place)

    @property
    def num_available(self) -> int:
        """See `Allocator.num_available`; some of these pages are of no use for a given owner."""
        return sum(one.num_available for one in self._lists)

    def alloc(self, count: int) -> IntArray | None:
        """See `Allocator.alloc`; owners take turns as far as each has pages.

        Raises:
            ConfigError: `count` is negative.
        """
        if count < 0:
            raise ConfigError(f"cannot allocate {count} pages; count must be at least 0")
        if count > self.num_available:
            return None
        owners = self._turns(count)
        self._next_owner = (self._next_owner + count) % len(self._lists)
        return self.alloc_pages_with_owners(owners)

    def alloc_pages_with_owners(self, owners: IntArray) -> IntArray | None:
        """See `KnowsOwners.alloc_pages_with_owners`."""
        counts = np.bincount(owners, minlength=len(self._lists))
        if any(count > one.num_available for count, one in zip(counts, self._lists, strict=True)):
            return None
        pages = np.empty(len(owners), dtype=np.int64)
        for rank, (count, one) in enumerate(zip(counts.tolist(), self._lists, strict=True)):
            if count:
                places = one.alloc(count)
                assert places is not None
                pages[owners == rank] = self._pages_of[rank][places]
        return pages

    def owners_of(self, pages: IntArray) -> IntArray:
        """See `KnowsOwners.owners_of`."""
        return self._layout.owner_for_logical_pages(pages)

    def free(self, pages: IntArray) -> None:
        """Take pages back, all or none of them.

        Raises:
            OwnershipError: some are free already, named twice, or no pages of this pool. Nothing
                has changed then.
        """
        foreign = (pages < 0) | (pages >= self.num_pages)
        if foreign.any() or len(np.unique(pages)) < len(pages) or self.is_free(pages).any():
            raise OwnershipError(
                f"cannot free {pages.tolist()[:8]}...: each must be a page of this pool of "
                f"{self.num_pages} that was given out, and named once. Nothing was freed"
            )
        owners = self.owners_of(pages)
        for rank, one in enumerate(self._lists):
            one.free(self._place[pages[owners == rank]])

    def is_free(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Return for each page whether it is free; all must be of this pool."""
        owners = self.owners_of(pages)
        free = np.zeros(len(pages), dtype=np.bool_)
        for rank, one in enumerate(self._lists):
            mine = owners == rank
            free[mine] = one.is_free(self._place[pages[mine]])
        return free

    def free_pages(self) -> IntArray:
        """Return all free pages in no particular order, as a copy; for checks of invariants."""
        lists = zip(self._pages_of, self._lists, strict=True)
        return np.concatenate([own[one.free_pages()] for own, one in lists])

    def _turns(self, count: int) -> IntArray:
        """Return the owner of each of `count` pages: in turn, but none beyond what it has."""
        num_ranks = len(self._lists)
        left = np.array([one.num_available for one in self._lists])
        turns = (np.arange(count + int(left.max()) * num_ranks) + self._next_owner) % num_ranks
        # Which turn of its own each one is; those past what the rank has are left out.
        nth = np.arange(len(turns)) // num_ranks
        return turns[nth < left[turns]][:count]
