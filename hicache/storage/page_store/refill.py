"""How a process comes by more blocks, and how a store that is too large shrinks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from hicache.storage.page_store.blocks import BLOCK_BYTES, BlockKind, count_blocks
from hicache.storage.page_store.evictor import evict
from hicache.storage.page_store.limits import Limits, changes_per_commit, index_growth_bytes
from hicache.storage.page_store.owner import is_alive
from hicache.storage.page_store.space import Space

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from hicache.storage.page_store.blocks import Extent
    from hicache.storage.page_store.catalogue import Freed
    from hicache.storage.page_store.departed import Departed
    from hicache.storage.page_store.directory import StoreDirectory
    from hicache.storage.page_store.eviction_policies import StoragePolicy
    from hicache.storage.page_store.index import Index, WriteTransaction
    from hicache.storage.page_store.segments import Segments

__all__ = ["Leased", "Refill", "Shrunk", "StoreParts", "recover_dead_owners", "release"]

_MIN_CHUNK_BLOCKS = 256
_MAX_CHUNK_BLOCKS = 16_384
_MAX_NEW_BLOCKS = 262_144
"""A GiB: before the kernel gives a file more space, it lets all direct I/O of the file end and none
begin, so a writer asks for much at a time."""

_CHUNKS_PER_STORE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreParts:
    """What the work on one open store needs.

    Attributes:
        directory: where it is.
        index, segments: opened.
        owner_id: of this process.
        segment_blocks: blocks of a segment at most.
        departed: pages that this process has given up.
    """

    directory: StoreDirectory
    index: Index
    segments: Segments
    owner_id: bytes
    segment_blocks: int
    departed: Departed

    def space(self, write: WriteTransaction) -> Space:
        """Return the blocks as they are within a transaction."""
        return Space(
            write, self.segments, owner_id=self.owner_id, segment_blocks=self.segment_blocks
        )


class Leased(NamedTuple):
    """Blocks that were leased.

    Attributes:
        free: those that have their space on the disk.
        new: those that are to get it after the commit.
        num_evicted: pages evicted for them, after which another commit may get more.
    """

    free: list[Extent]
    new: list[Extent]
    num_evicted: int


class Shrunk(NamedTuple):
    """What a transaction has done to shrink a store.

    Attributes:
        num_blocks: blocks whose space the file system has back.
        more: whether another transaction has to go on.
    """

    num_blocks: int
    more: bool


class Refill:
    """Leases blocks within one write transaction: free ones, then new ones, then evicted ones.

    New ones are preferred to evicted ones as long as the limits allow; the strictest limits of all
    living processes count. What a dead process had leased is taken back when blocks are short.

    Attributes:
        limits: the strictest.
    """

    def __init__(
        self,
        write: WriteTransaction,
        parts: StoreParts,
        limits: Limits,
        policy: StoragePolicy,
    ) -> None:
        """Begin; `limits` and the `policy` that it evicts by are those of this process."""
        self._write = write
        self._parts = parts
        self._space = parts.space(write)
        self._policy = policy
        self._own_limits = limits
        self.limits = self._strictest()

    def register(self) -> None:
        """Tell other processes that this one may have leases, and its limits, if they differ."""
        txn, owner_id, owners = self._write.txn, self._parts.owner_id, self._write.dbs.owners
        record = self._own_limits.encode()
        if txn.get(owner_id, db=owners) != record:
            txn.put(owner_id, record, db=owners)

    def has_room(self, num_changes: int) -> bool:
        """Whether the index has room for changes, and then for a commit that makes more room."""
        return self._room_blocks(num_changes) >= 0

    def lease(
        self,
        kind: BlockKind,
        num_blocks: int,
        protected: Callable[[], Collection[int]],
        *,
        may_grow: bool,
        num_ahead: int,
    ) -> Leased:
        """Lease `num_blocks`, or more while that is cheap, or fewer if there are no more.

        Args:
            kind: of the blocks.
            num_blocks: that are missing.
            protected: tells ids of groups that must not be evicted from.
            may_grow: whether to lease blocks that have no space on the disk yet.
            num_ahead: how many to lease if none must be evicted for that, within bounds.
        """
        if num_blocks <= 0:
            return Leased([], [], 0)
        wanted = max(num_blocks, self._chunk_blocks(kind))
        ahead = max(wanted, min(num_ahead, self._most_blocks(kind, _MAX_CHUNK_BLOCKS)))
        free = self._space.lease_free(kind, ahead)
        new: list[Extent] = []
        num_evicted = 0
        missing = num_blocks - count_blocks(free)
        if missing > 0 and may_grow:
            ahead = min(num_ahead, self._most_blocks(kind, _MAX_NEW_BLOCKS))
            new += self._grow(kind, wanted - count_blocks(free), ahead - count_blocks(free))
            missing -= count_blocks(new)
        if missing > 0 and recover_dead_owners(self._write, self._parts):
            self.limits = self._strictest()
            free += self._space.lease_free(kind, missing)
            missing = num_blocks - count_blocks([*free, *new])
            if missing > 0 and may_grow:
                # The limits of the dead may have been the strictest.
                new += self._grow(kind, missing, missing)
                missing = num_blocks - count_blocks([*free, *new])
        if missing > 0:
            wanted -= count_blocks([*free, *new])
            num_evicted = self._evict(wanted, protected())
            free += self._space.lease_free(kind, wanted)
        return Leased(free, new, num_evicted)

    def shrink(self, num_changes: int, num_blocks: int, protected: Collection[int]) -> Shrunk:
        """Give `num_blocks` back, and until the index has room for changes.

        What is leased stays, and so do the groups that are `protected`.
        """
        if recover_dead_owners(self._write, self._parts):
            self.limits = self._strictest()
        excess = max(num_blocks, -self._room_blocks(num_changes), 0)
        num_punched = self._punch(excess)
        excess -= num_punched
        more = False
        if excess > 0 and self._parts.segments.can_punch:
            # Their space goes in the next commit: until this one, they are stored.
            more = self._evict(excess, protected) > 0
        return Shrunk(num_punched, more)

    def _grow(self, kind: BlockKind, num_blocks: int, num_ahead: int) -> list[Extent]:
        # What is left is for this commit, and for what comes before the next look.
        spare = max(0, self.limits.spare_bytes(self._parts.directory.data)) // BLOCK_BYTES
        num_blocks = max(num_blocks, min(num_ahead, spare // _CHUNKS_PER_STORE))
        room = min(self._room_blocks(2 * changes_per_commit(self.limits)), spare)
        if room < num_blocks:
            # Free blocks of the other kind have space that this kind can have.
            room += self._punch_other(kind, num_blocks - max(room, 0))
        return self._space.lease_new(kind, max(0, min(num_blocks, room)))

    def _punch_other(self, kind: BlockKind, num_blocks: int) -> int:
        other = BlockKind.HEADER if kind is BlockKind.PAYLOAD else BlockKind.PAYLOAD
        return self._space.punch(other, num_blocks)

    def _punch(self, num_blocks: int) -> int:
        num_punched = self._space.punch(BlockKind.PAYLOAD, num_blocks)
        return num_punched + self._space.punch(BlockKind.HEADER, num_blocks - num_punched)

    def _evict(self, num_blocks: int, protected: Collection[int]) -> int:
        """Evict pages with `num_blocks` blocks, or as many as a commit may; return how many."""
        freed = evict(
            self._write,
            self._policy,
            self._parts.departed,
            num_blocks=num_blocks,
            max_pages=changes_per_commit(self.limits),
            protected=protected,
        )
        release(self._space, freed)
        return freed.num_pages

    def _room_blocks(self, num_changes: int) -> int:
        num_changes += changes_per_commit(self.limits)
        index_bytes = self._parts.index.num_bytes + index_growth_bytes(num_changes)
        room = self.limits.room_bytes(num_backed=self._space.num_backed, index_bytes=index_bytes)
        return room // BLOCK_BYTES

    def _strictest(self) -> Limits:
        with self._write.txn.cursor(self._write.dbs.owners) as cursor:
            return self._own_limits.strictest(Limits.decode(data) for _, data in cursor)

    def _chunk_blocks(self, kind: BlockKind) -> int:
        """Return how many blocks to take at a time, so that neighbours are written together."""
        chunk = max(_MIN_CHUNK_BLOCKS, self._space.num_backed // _CHUNKS_PER_STORE)
        if kind is BlockKind.HEADER:
            chunk //= _CHUNKS_PER_STORE
        return min(chunk, self._most_blocks(kind, _MAX_CHUNK_BLOCKS))

    def _most_blocks(self, kind: BlockKind, most: int) -> int:
        """Return how many blocks to take at a time, where a large store takes `most` payload."""
        share = self.limits.max_bytes // BLOCK_BYTES // _CHUNKS_PER_STORE
        most = min(most, share)
        return most if kind is BlockKind.PAYLOAD else most // _CHUNKS_PER_STORE


def release(space: Space, freed: Freed) -> None:
    """Make free what pages that are no longer stored have used."""
    space.free(BlockKind.PAYLOAD, freed.payload)
    space.free(BlockKind.HEADER, freed.headers)


def recover_dead_owners(write: WriteTransaction, parts: StoreParts) -> int:
    """Make free what processes had leased that are dead; return how many those were."""
    with write.txn.cursor(write.dbs.owners) as cursor:
        owners = [bytes(key) for key, _ in cursor]
    space = parts.space(write)
    num_dead = 0
    for owner_id in owners:
        if owner_id != parts.owner_id and not is_alive(parts.directory.owners, owner_id):
            for kind in BlockKind:
                space.end_lease(kind, owner_id)
            write.txn.delete(owner_id, db=write.dbs.owners)
            num_dead += 1
    return num_dead
