"""Blocks for the writers of this process: leased in large pieces, handed out in memory."""

from __future__ import annotations

import functools
import itertools
import threading
from typing import TYPE_CHECKING, NamedTuple

from hicache.storage.page_store.blocks import BlockKind, blocks_for, count_blocks, cut
from hicache.storage.page_store.catalogue import Catalogue
from hicache.storage.page_store.counters import NEXT_GROUP_ID
from hicache.storage.page_store.eviction_policies import LruPolicy
from hicache.storage.page_store.free_list import FreeList
from hicache.storage.page_store.group import MAX_PAGES, fits_a_block
from hicache.storage.page_store.limits import FreeSpaceFloor, Limits, changes_per_commit
from hicache.storage.page_store.records import PageEntry
from hicache.storage.page_store.refill import Refill
from hicache.storage.page_store.segments import FULL_ERRNOS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hicache.storage.page_store.blocks import Extent
    from hicache.storage.page_store.eviction_policies import StoragePolicy
    from hicache.storage.page_store.index import WriteTransaction
    from hicache.storage.page_store.refill import StoreParts
    from hicache.storage.page_store.touches import Touches

__all__ = ["Allocator", "Claim"]

_IDS_PER_LEASE = 4096
_COMMITS_AHEAD = 2
_NEEDS_AHEAD = 8
"""A store with room takes space for so many batches at a time: each time costs a commit."""


class Claim(NamedTuple):
    """Blocks for one group that is about to be written.

    Attributes:
        group_id: for the group.
        header: one block.
        extents: blocks for its pages.
        num_pages: how many pages those are.
    """

    group_id: int
    header: Extent
    extents: list[Extent]
    num_pages: int


class _Need(NamedTuple):
    """Numbers of blocks."""

    headers: int
    payload: int


class Allocator:
    """Hands out blocks to write to. Thread-safe.

    What it holds is leased in the index, so that it is not lost with the process.

    Attributes:
        limits: of this process; whoever opens the store sets them.
        strictest: of all processes, as this one has last seen them.
        policy: what this process evicts by; likewise.
    """

    def __init__(self, parts: StoreParts, touches: Touches) -> None:
        self.limits = self.strictest = Limits()
        self.policy: StoragePolicy = LruPolicy()
        self._parts = parts
        self._touches = touches
        self._floor = FreeSpaceFloor(parts.directory.data)
        # Guards the lists and ids below; held while they are changed in memory.
        self._lock = threading.Lock()
        self._lists = {kind: FreeList() for kind in BlockKind}
        self._next_id = self._end_id = 0
        # Set when free blocks were in too many pieces for a header to name.
        self._shattered = False

    def announce(self) -> None:
        """Make the limits count for all processes that have the store open, until this one ends.

        Raises:
            OSError, lmdb.Error: they count for this process alone, until it leases blocks.
        """
        with self._parts.index.write() as write:
            self.begin(write).register()

    def begin(self, write: WriteTransaction) -> Refill:
        """Return what leases and shrinks within a transaction, by the limits of this process."""
        refill = Refill(write, self._parts, self.limits, self.policy)
        self.strictest = refill.limits
        return refill

    def claim(self, num_pages: int, page_bytes: int, *, at_least: int = 1) -> Claim | None:
        """Return blocks for a group of up to `num_pages` pages, or `None` if there are too few.

        The blocks of as many pages as `at_least` must be there; a group can still have fewer when
        they are in many pieces.
        """
        page_blocks = blocks_for(page_bytes)
        payload, headers = self._lists[BlockKind.PAYLOAD], self._lists[BlockKind.HEADER]
        with self._lock:
            if self._next_id == self._end_id or not headers.num_blocks:
                return None
            if payload.num_blocks < at_least * page_blocks:
                return None
            extents = payload.take_units(min(num_pages, MAX_PAGES), page_blocks)
            taken = count_blocks(extents)
            num_pages = taken // page_blocks
            while num_pages:
                fitting = cut(extents, 0, num_pages * page_blocks)
                if fits_a_block(num_pages, len(fitting)):
                    break
                num_pages -= 1
            payload.add(cut(extents, num_pages * page_blocks, taken))
            if not num_pages:
                self._shattered = taken > 0
                return None
            (header,) = headers.take_units(1, 1)
            self._next_id += 1
            return Claim(self._next_id - 1, header, fitting, num_pages)

    def unclaim(self, kind: BlockKind, extents: Iterable[Extent]) -> None:
        """Take blocks back that were not used."""
        with self._lock:
            self._lists[kind].add(extents)

    def refill(
        self, num_pages: int, page_bytes: int, protected: Callable[[], Iterable[bytes]]
    ) -> bool:
        """Lease blocks for that many pages, evicting others if need be.

        Args:
            num_pages: that are still to be written; some may find room here already.
            page_bytes: of each.
            protected: tells the names of pages whose groups must not be evicted from.

        Returns:
            Whether there is more to claim than before, or might be after another call.

        Raises:
            OSError, lmdb.Error: nothing has changed.
        """
        need = self._need(num_pages, page_bytes)
        gain = self._try_refill(need, protected, check_room=True, num_needs=_NEEDS_AHEAD)
        if gain is None:
            num_changes = _COMMITS_AHEAD * changes_per_commit(self.strictest)
            self.make_room(num_changes, protected=protected)
            gain = self._try_refill(need, protected)
        # What is here of one kind may be what the other kind lacks; or the disk be full.
        gain = gain or self._try_refill(need, protected, anew=True)
        gain = gain or self._try_refill(need, protected, anew=True, may_grow=False)
        return bool(gain)

    def refill_ahead(
        self, num_pages: int, page_bytes: int, protected: Callable[[], Iterable[bytes]]
    ) -> None:
        """Lease blocks for that many pages as `refill` would first, if they are not here.

        Raises:
            OSError, lmdb.Error: nothing has changed.
        """
        need = self._need(num_pages, page_bytes)
        # The last pages of a batch can be a group of their own.
        need = need._replace(headers=need.headers + 1)
        if not self._has(need):
            self._try_refill(need, protected, check_room=True, num_needs=_NEEDS_AHEAD)

    def make_room(
        self, num_changes: int, *, protected: Callable[[], Iterable[bytes]] = tuple
    ) -> None:
        """Shrink the store until its index has room for changes, or nothing more can go.

        What the file system lacks of its free space is given back too.

        Args:
            num_changes: room for more than a few commits may make is not asked for.
            protected: see `refill`.

        Raises:
            OSError, lmdb.Error: what was done in earlier commits stays.
        """
        num_lacking: int | None = None
        more = True
        while more:
            with self._parts.index.write() as write:
                refill = self.begin(write)
                most = _COMMITS_AHEAD * changes_per_commit(refill.limits)
                num_changes = min(num_changes, most)
                if num_lacking is None:
                    num_lacking = self._floor.num_lacking(refill.limits)
                    if num_lacking:
                        self._floor.wait()
                if num_lacking <= 0 and refill.has_room(num_changes):
                    break
                # What is evicted is decided by the latest uses.
                self._touches.write(write)
                self._surrender(write)
                groups = _groups_of(write, protected())
                shrunk = refill.shrink(num_changes, num_lacking, groups)
            num_lacking -= shrunk.num_blocks
            more = shrunk.more

    def close(self) -> None:
        """Give back everything that this process has leased and not used.

        Raises:
            OSError, lmdb.Error: the leases stay, until somebody notices that their owner is gone.
        """
        self.make_room(len(self._touches))
        with self._parts.index.write() as write:
            self._touches.write(write)
            self._parts.departed.forget(write.history)
            space = self._parts.space(write)
            for kind in BlockKind:
                space.end_lease(kind, self._parts.owner_id)
            write.txn.delete(self._parts.owner_id, db=write.dbs.owners)

    def _try_refill(
        self,
        need: _Need,
        protected: Callable[[], Iterable[bytes]],
        *,
        check_room: bool = False,
        num_needs: int = 1,
        may_grow: bool = True,
        anew: bool = False,
    ) -> int | None:
        """Lease what is missing, in one commit.

        Args:
            need: what must be here afterwards, if possible.
            protected: see `refill`.
            check_room: whether the index must have room for this, and the file system its floor.
            num_needs: how many times as much to lease if there is room.
            may_grow: whether to lease blocks that have no space on the disk yet.
            anew: whether to give everything back first that nobody has claimed.

        Returns:
            By how much there is more than before, counting evicted pages; `None`, with nothing
            done, if the store must shrink first.
        """
        self._parts.index.drop_dead_readers()
        with self._parts.index.write() as write:
            refill = self.begin(write)
            num_changes = changes_per_commit(refill.limits) + len(self._touches)
            if check_room and (
                self._floor.num_lacking(refill.limits) or not refill.has_room(num_changes)
            ):
                return None
            if self._has(need) and not anew:
                # Another thread was here first.
                return 1
            self._touches.write(write)
            refill.register()
            before = self._surrender(write) if anew else _Need(0, 0)
            missing = self._missing(need)
            groups = functools.cache(lambda: _groups_of(write, protected()))
            leased = {
                kind: refill.lease(
                    kind,
                    num_missing,
                    groups,
                    may_grow=may_grow,
                    num_ahead=num_needs * num_needed,
                )
                for kind, num_missing, num_needed in (
                    (BlockKind.HEADER, missing.headers, need.headers),
                    (BlockKind.PAYLOAD, missing.payload, need.payload),
                )
            }
            first_id = Catalogue(write).add_to(NEXT_GROUP_ID, _IDS_PER_LEASE)
        headers, payload = (
            [*one.free, *self._reserve(kind, one.new)] for kind, one in leased.items()
        )
        with self._lock:
            self._lists[BlockKind.HEADER].add(headers)
            self._lists[BlockKind.PAYLOAD].add(payload)
            self._next_id, self._end_id = first_id, first_id + _IDS_PER_LEASE
            self._shattered = False
        more_headers = bool(headers) and not before.headers
        more_payload = count_blocks(payload) > before.payload
        num_evicted = sum(one.num_evicted for one in leased.values())
        return num_evicted + more_headers + more_payload

    def _reserve(self, kind: BlockKind, extents: list[Extent]) -> list[Extent]:
        """Give leased blocks their space, and return those that got it; the disk has no more.

        Raises:
            OSError: from the kernel, for another reason; the blocks stay leased for nothing.
        """
        reserved = list(itertools.takewhile(lambda extent: self._has_space(kind, extent), extents))
        if len(reserved) < len(extents):
            with self._parts.index.write() as write:
                self._parts.space(write).unlease_new(kind, extents[len(reserved) :])
        return reserved

    def _has_space(self, kind: BlockKind, extent: Extent) -> bool:
        try:
            self._parts.segments.reserve(kind, extent)
        except OSError as error:
            if error.errno in FULL_ERRNOS:
                return False
            raise
        return True

    def _need(self, num_pages: int, page_bytes: int) -> _Need:
        num_groups = -(-num_pages // min(MAX_PAGES, changes_per_commit(self.strictest)))
        return _Need(num_groups, num_pages * blocks_for(page_bytes))

    def _surrender(self, write: WriteTransaction) -> _Need:
        """Make free what nobody has claimed, and return how much that was.

        If the commit fails, it stays leased until this process has closed the store.
        """
        space = self._parts.space(write)
        with self._lock:
            headers = self._lists[BlockKind.HEADER].take_all()
            payload = self._lists[BlockKind.PAYLOAD].take_all()
        space.give_back(BlockKind.HEADER, headers)
        space.give_back(BlockKind.PAYLOAD, payload)
        return _Need(count_blocks(headers), count_blocks(payload))

    def _has(self, need: _Need) -> bool:
        missing = self._missing(need)
        return self._next_id < self._end_id and missing.headers <= 0 and missing.payload <= 0

    def _missing(self, need: _Need) -> _Need:
        with self._lock:
            payload = 0 if self._shattered else self._lists[BlockKind.PAYLOAD].num_blocks
            headers = self._lists[BlockKind.HEADER].num_blocks
        return _Need(need.headers - headers, need.payload - payload)


def _groups_of(write: WriteTransaction, names: Iterable[bytes]) -> set[int]:
    entries = (write.txn.get(name, db=write.dbs.pages) for name in names)
    return {PageEntry.decode(entry).group_id for entry in entries if entry is not None}
