"""Blocks that this process has leased and not used yet, in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.storage.page_store.blocks import Extent, count_blocks, merge

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["FreeList"]


class FreeList:
    """Extents in order of their place; one taken after the other lies behind it.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._extents: list[Extent] = []
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the list."""
        return self._num_blocks

    def add(self, extents: Iterable[Extent]) -> None:
        """Take extents in, beside those that are there."""
        self._extents = merge([*self._extents, *extents])
        self._num_blocks = count_blocks(self._extents)

    def take_units(self, num_units: int, unit_blocks: int) -> list[Extent]:
        """Take blocks for as many of `num_units` as there is room for.

        Units stay in one piece as long as there are extents that hold one; the rest is put together
        from pieces.

        Returns:
            Extents in order; their blocks are a multiple of `unit_blocks`.
        """
        num_units = min(num_units, self._num_blocks // unit_blocks)
        taken: list[Extent] = []
        left: list[Extent] = []
        for extent in self._extents:
            whole = min(extent.num_blocks // unit_blocks, num_units) * unit_blocks
            num_units -= whole // unit_blocks
            _split(extent, whole, taken, left)
        missing = num_units * unit_blocks
        rest: list[Extent] = []
        # The largest first, so that a unit has few pieces.
        for extent in sorted(left, key=lambda extent: -extent.num_blocks) if missing else left:
            part = min(extent.num_blocks, missing)
            missing -= part
            _split(extent, part, taken, rest)
        self._extents = sorted(rest)
        self._num_blocks -= count_blocks(taken)
        return taken

    def take_all(self) -> list[Extent]:
        """Empty the list and return what was in it."""
        extents, self._extents, self._num_blocks = self._extents, [], 0
        return extents


def _split(extent: Extent, num_blocks: int, head: list[Extent], tail: list[Extent]) -> None:
    """Append the first `num_blocks` of `extent` to `head` and the others to `tail`."""
    segment, block, length = extent
    if num_blocks:
        head.append(Extent(segment, block, num_blocks))
    if num_blocks < length:
        tail.append(Extent(segment, block + num_blocks, length - num_blocks))
