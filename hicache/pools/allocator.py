"""The free list of a pool: page ids, and who may have them."""

from __future__ import annotations

from operator import lt
from typing import TYPE_CHECKING

import numpy as np

from hicache.errors import ConfigError, OwnershipError

if TYPE_CHECKING:
    import numpy.typing as npt

    from hicache.types import IntArray

__all__ = ["PageAllocator"]

_NUM_NAMED = 8
"""How many pages an error message names."""

_NUM_FEW = 64
"""So many are compared without NumPy. What it takes is more code than a scheduler's step finds in
any cache beside busy storage threads: there its comparison takes ten times as long."""


class PageAllocator:
    """Page ids `0 .. num_pages - 1`, each either free or given out.

    Calls cost in proportion to the pages they move, whatever the size of the pool. Not thread-safe:
    for a single owner thread.

    Pages come in ascending order, from a new pool as one run, and pages freed together come back
    together: neighbours in a request tend to be neighbours in memory, and copy as one block.

    Args:
        num_pages: size of the pool.

    Raises:
        ConfigError: `num_pages` is below 1.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages must be at least 1, not {num_pages}")
        # The free pages are a stack in [:num_available]. Each group on it descends, so that taking
        # from the top gives the lowest page first.
        self._stack: IntArray = np.arange(num_pages - 1, -1, -1, dtype=np.int64)
        self._is_free: npt.NDArray[np.bool_] = np.ones(num_pages, dtype=np.bool_)
        self._num_available = num_pages

    @property
    def num_pages(self) -> int:
        """Pages of the pool, free or not."""
        return len(self._stack)

    @property
    def num_available(self) -> int:
        """Pages that `alloc` can give now."""
        return self._num_available

    def alloc(self, count: int) -> IntArray | None:
        """Give `count` pages to the caller, or none: `None` when fewer are free.

        Returns:
            The pages in ascending order, in an array of the caller's own.

        Raises:
            ConfigError: `count` is negative.
        """
        if count < 0:
            raise ConfigError(f"cannot allocate {count} pages; count must be at least 0")
        bottom = self._num_available - count
        if bottom < 0:
            return None
        # Of one group they ascend in the order in which they are taken.
        pages = _ascending(self._stack[bottom : self._num_available][::-1].copy())
        self._is_free[pages] = False
        self._num_available = bottom
        return pages

    def free(self, pages: IntArray) -> None:
        """Take pages back, all or none of them.

        Raises:
            OwnershipError: some are free already, named twice, or no pages of this pool. Nothing
                has changed then.
        """
        if not len(pages):
            # What most copies leave over.
            return
        ascending = _ascending(pages)
        # What was in order names no page twice.
        distinct = ascending is pages or _ascends(ascending)
        if not (distinct and self._are_given_out(ascending)):
            raise OwnershipError(self._explain(pages))
        top = self._num_available + len(ascending)
        self._stack[self._num_available : top] = ascending[::-1]
        self._is_free[ascending] = True
        self._num_available = top

    def is_free(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        """Return for each page whether it is free.

        Raises:
            OwnershipError: some are no pages of this pool.
        """
        foreign = self._foreign(pages)
        if foreign.any():
            raise OwnershipError(
                f"{_name(pages[foreign])} not in this pool of {self.num_pages}; pages count from 0"
            )
        return self._is_free[pages]

    def free_pages(self) -> IntArray:
        """Return all free pages in no particular order, as a copy; for checks of invariants."""
        return self._stack[: self._num_available].copy()

    def _are_given_out(self, ascending: IntArray) -> bool:
        lowest, highest = int(ascending[0]), int(ascending[-1])
        if lowest < 0 or highest >= len(self._stack):
            return False
        return not any(self._is_free[ascending].tolist())

    def _foreign(self, pages: IntArray) -> npt.NDArray[np.bool_]:
        return (pages < 0) | (pages >= self.num_pages)

    def _explain(self, pages: IntArray) -> str:
        foreign = self._foreign(pages)
        own, counts = np.unique(pages[~foreign], return_counts=True)
        faults = {
            f"not in this pool of {self.num_pages}": pages[foreign],
            "free already": own[self._is_free[own]],
            "named more than once": own[counts > 1],
        }
        found = "; ".join(f"{_name(bad)} {fault}" for fault, bad in faults.items() if len(bad))
        return f"cannot free {found}. Nothing was freed; give back each page once, by its owner"


def _ascending(pages: IntArray) -> IntArray:
    """Return `pages` in ascending order: themselves where they are, else a sorted copy.

    NumPy gives up the interpreter's lock to sort, and it can take milliseconds to have it again
    where other threads are busy: so only what is out of order is sorted.
    """
    if _ascends(pages):
        return pages
    ascending = pages.copy()
    ascending.sort()
    return ascending


def _ascends(pages: IntArray) -> bool:
    """Return whether each page is above the one before it."""
    if len(pages) > _NUM_FEW:
        return not np.count_nonzero(pages[1:] <= pages[:-1])
    ids = pages.tolist()
    return all(map(lt, ids, ids[1:]))


def _name(pages: IntArray) -> str:
    """Return the first few of `pages` in words."""
    named = ", ".join(map(str, pages[:_NUM_NAMED].tolist()))
    more = f" and {len(pages) - _NUM_NAMED} more" if len(pages) > _NUM_NAMED else ""
    return f"{'page' if len(pages) == 1 else 'pages'} {named}{more}"
