"""Where the blocks of the segments are: free, leased, in use by pages, or without disk space.

A block is in exactly one of four states. `free` ones have their space on the disk. `leased` ones
belong to a process that has not used them yet; when it dies, whoever notices makes them free.
Used ones are those of the groups. `hole`s are places in a segment that have no space on the disk:
not reserved yet, or given back. What is not a hole is `backed` and counts against the limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.storage.page_store.blocks import BlockKind, Extent, count_blocks
from hicache.storage.page_store.catalogue import Catalogue
from hicache.storage.page_store.counters import BACKED, SEGMENTS
from hicache.storage.page_store.extent_map import ExtentMap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache.storage.page_store.index import Databases, WriteTransaction
    from hicache.storage.page_store.segments import Segments

__all__ = ["Space", "free_map", "hole_map", "lease_map"]

_LETTERS = {BlockKind.PAYLOAD: b"p", BlockKind.HEADER: b"h"}
_MAX_EXTENTS = 1024
"""Extents taken by one transaction at most, so that a shattered store does not hold others up."""


def free_map(dbs: Databases, kind: BlockKind) -> ExtentMap:
    """Return the free blocks of a kind."""
    return ExtentMap(dbs.space, _LETTERS[kind] + b"f")


def lease_map(dbs: Databases, kind: BlockKind, owner_id: bytes) -> ExtentMap:
    """Return the blocks of a kind that a process has leased and not used."""
    return ExtentMap(dbs.space, _LETTERS[kind] + b"l" + owner_id)


def hole_map(dbs: Databases, kind: BlockKind) -> ExtentMap:
    """Return the places of a kind that have no space on the disk."""
    return ExtentMap(dbs.space, _LETTERS[kind] + b"h")


class Space:
    """The changes of state of blocks, within one write transaction."""

    def __init__(
        self, write: WriteTransaction, segments: Segments, *, owner_id: bytes, segment_blocks: int
    ) -> None:
        self._txn = write.txn
        self._dbs = write.dbs
        self._catalogue = Catalogue(write)
        self._segments = segments
        self._owner_id = owner_id
        self._segment_blocks = segment_blocks

    @property
    def num_backed(self) -> int:
        """Blocks that have space on the disk."""
        return self._catalogue.add_to(BACKED, 0)

    def free(self, kind: BlockKind, extents: Iterable[Extent]) -> None:
        """Make blocks free that groups have used."""
        free = free_map(self._dbs, kind)
        for extent in extents:
            free.add(self._txn, extent)

    def lease_free(self, kind: BlockKind, num_blocks: int) -> list[Extent]:
        """Lease up to `num_blocks` free blocks."""
        return self._lease(
            kind, free_map(self._dbs, kind).take(self._txn, num_blocks, max_extents=_MAX_EXTENTS)
        )

    def lease_new(self, kind: BlockKind, num_blocks: int) -> list[Extent]:
        """Lease blocks out of holes; they count as backed from now on.

        Whoever leases them gives them their space after the commit: so what a crash leaves in
        between counts too much, never too little.
        """
        holes = hole_map(self._dbs, kind)
        leased: list[Extent] = []
        while num_blocks > 0:
            taken = holes.take(self._txn, num_blocks, max_extents=_MAX_EXTENTS)
            if not taken:
                segment = self._catalogue.add_to(SEGMENTS, 1)
                holes.add(self._txn, Extent(segment, 0, self._segment_blocks))
            leased += taken
            num_blocks -= count_blocks(taken)
        self._catalogue.add_to(BACKED, count_blocks(leased))
        return self._lease(kind, leased)

    def unlease_new(self, kind: BlockKind, extents: Iterable[Extent]) -> None:
        """Make holes again of leased blocks that could not be given their space."""
        extents = list(extents)
        self.use(kind, extents)
        for extent in extents:
            # A part may have its space.
            self._segments.punch(kind, extent)
            hole_map(self._dbs, kind).add(self._txn, extent)
        self._catalogue.add_to(BACKED, -count_blocks(extents))

    def use(self, kind: BlockKind, extents: Iterable[Extent]) -> None:
        """Make leased blocks those of a group."""
        lease = lease_map(self._dbs, kind, self._owner_id)
        for extent in extents:
            lease.remove(self._txn, extent)

    def end_lease(self, kind: BlockKind, owner_id: bytes) -> int:
        """Make all blocks free that a process has leased and not used; return how many."""
        lease = lease_map(self._dbs, kind, owner_id)
        num_blocks = 0
        while extents := lease.take(self._txn, self._segment_blocks, max_extents=_MAX_EXTENTS):
            self.free(kind, extents)
            num_blocks += count_blocks(extents)
        return num_blocks

    def give_back(self, kind: BlockKind, extents: Iterable[Extent]) -> None:
        """Make blocks free that this process has leased and not used."""
        extents = list(extents)
        self.use(kind, extents)
        self.free(kind, extents)

    def punch(self, kind: BlockKind, num_blocks: int) -> int:
        """Give the space of up to `num_blocks` free blocks back to the file system.

        None of them may have become free within this transaction: what pages are in does not come
        back if it is never committed.

        Returns:
            How many that were: 0 where the file system cannot.
        """
        free, holes = free_map(self._dbs, kind), hole_map(self._dbs, kind)
        num_punched = 0
        for extent in free.take(self._txn, num_blocks, max_extents=_MAX_EXTENTS):
            if self._segments.punch(kind, extent):
                holes.add(self._txn, extent)
                num_punched += extent.num_blocks
            else:
                free.add(self._txn, extent)
        self._catalogue.add_to(BACKED, -num_punched)
        return num_punched

    def _lease(self, kind: BlockKind, extents: list[Extent]) -> list[Extent]:
        lease = lease_map(self._dbs, kind, self._owner_id)
        for extent in extents:
            lease.add(self._txn, extent)
        return extents
