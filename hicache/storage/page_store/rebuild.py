"""A new index from the headers on the disk.

The headers say what was written; that a page was given up and its blocks used again shows by the
newer group that has them. A page whose bytes are not those of its header is found out when it is
read, as always.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from typing import TYPE_CHECKING, NamedTuple

from hicache.storage.page_store.blocks import BLOCK_BYTES, BlockKind, Extent
from hicache.storage.page_store.catalogue import Catalogue
from hicache.storage.page_store.counters import BACKED, NAMESPACES, NEXT_GROUP_ID, SEGMENTS
from hicache.storage.page_store.group import Group
from hicache.storage.page_store.index import Index
from hicache.storage.page_store.records import NamespaceRecord
from hicache.storage.page_store.segments import Segments
from hicache.storage.page_store.space import free_map, hole_map

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.storage.page_store.directory import StoreDirectory, StoreFormat
    from hicache.storage.page_store.index import WriteTransaction

__all__ = ["rebuild_index"]

_SEGMENT_NAME = re.compile(r"(\d+)\.(pages|headers)")
_READ_BLOCKS = 256
_GROUPS_PER_COMMIT = 1024


class _Place(NamedTuple):
    group_id: int
    segment: int
    block: int


def rebuild_index(directory: StoreDirectory, store_format: StoreFormat) -> int:
    """Replace the index of a store; its directory must be locked and nobody have it open.

    Takes some ten seconds for a million pages, and a byte of memory for each block.

    Returns:
        How many pages were found.

    Raises:
        OSError, lmdb.Error: the store is as it was, or has no index and can be rebuilt again.
    """
    temporary_path = f"{directory.index}.new"
    shutil.rmtree(temporary_path, ignore_errors=True)
    os.mkdir(temporary_path)
    index = Index(temporary_path, store_format.store_id, create=True)
    with contextlib.closing(index), contextlib.closing(Segments(directory.data)) as segments:
        num_pages = _Rebuild(index, segments, directory, store_format.segment_blocks).run()
        index.sync()
    shutil.rmtree(directory.index)
    os.rename(temporary_path, directory.index)
    return num_pages


class _Rebuild:
    """Fills an empty index."""

    def __init__(
        self, index: Index, segments: Segments, directory: StoreDirectory, segment_blocks: int
    ) -> None:
        self._index = index
        self._segments = segments
        self._segment_blocks = segment_blocks
        self._namespaces: dict[bytes, NamespaceRecord] = {}
        # For each segment file, which of its blocks a group has.
        self._claimed: dict[tuple[BlockKind, int], bytearray] = {}
        for name in os.listdir(directory.data):
            if match := _SEGMENT_NAME.fullmatch(name):
                kind, segment = BlockKind(match[2]), int(match[1])
                size = os.path.getsize(segments.path(kind, segment))
                self._claimed[kind, segment] = bytearray(-(-size // BLOCK_BYTES))

    def run(self) -> int:
        places = sorted(self._places(), reverse=True)
        num_pages = 0
        with self._index.write() as write:
            # The ages of groups are their ranks.
            write.history.now = len(places)
        for start in range(0, len(places), _GROUPS_PER_COMMIT):
            with self._index.write() as write:
                for number, place in enumerate(places[start : start + _GROUPS_PER_COMMIT], start):
                    num_pages += self._publish(write, place, rank=len(places) - number)
        with self._index.write() as write:
            catalogue = Catalogue(write)
            catalogue.add_to(NEXT_GROUP_ID, places[0].group_id + 1 if places else 0)
            catalogue.add_to(NAMESPACES, len(self._namespaces))
            catalogue.add_to(SEGMENTS, max((s for _, s in self._claimed), default=-1) + 1)
            for digest, record in self._namespaces.items():
                write.txn.put(digest, record.encode(), db=write.dbs.namespaces)
            for (kind, segment), claimed in self._claimed.items():
                self._settle_blocks(write, kind, segment, claimed)
        return num_pages

    def _places(self) -> Iterator[_Place]:
        """Yield where every sound header is that lies where it belongs."""
        for (kind, segment), blocks in self._claimed.items():
            if kind is BlockKind.HEADER:
                for block in range(0, len(blocks), _READ_BLOCKS):
                    for offset, data in enumerate(self._read_headers(segment, block)):
                        group = Group.decode(data)
                        if group and (group.segment, group.block) == (segment, block + offset):
                            yield _Place(group.group_id, segment, block + offset)

    def _read_headers(
        self, segment: int, block: int, num_blocks: int = _READ_BLOCKS
    ) -> list[bytes]:
        fd = self._segments.fd(BlockKind.HEADER, segment)
        data = os.pread(fd, num_blocks * BLOCK_BYTES, block * BLOCK_BYTES)
        return [data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES)]

    def _publish(self, write: WriteTransaction, place: _Place, *, rank: int) -> int:
        """Store those pages of a group that no newer group has, nor has written over."""
        data = self._read_headers(place.segment, place.block, 1)
        group = Group.decode(data[0]) if data else None
        if group is None:
            return 0
        namespace = self._namespaces.setdefault(
            group.namespace_digest, NamespaceRecord(len(self._namespaces), group.page_bytes, {})
        )
        if namespace.page_bytes != group.page_bytes:
            return 0
        unclaimed = 0
        for position in range(group.num_pages):
            if all(map(self._is_unclaimed, group.layout.extents_of(position, 1))):
                unclaimed |= 1 << position
        stored = Catalogue(write).publish(
            group, namespace.namespace_id, positions=unclaimed, last_use=rank
        )
        for position in range(group.num_pages):
            if stored >> position & 1:
                for extent in group.layout.extents_of(position, 1):
                    self._claim(BlockKind.PAYLOAD, extent)
        if stored:
            self._claim(BlockKind.HEADER, group.header_extent)
        return bin(stored).count("1")

    def _is_unclaimed(self, extent: Extent) -> bool:
        claimed = self._claimed.get((BlockKind.PAYLOAD, extent.segment), b"")
        return extent.end <= len(claimed) and claimed.find(1, extent.block, extent.end) < 0

    def _claim(self, kind: BlockKind, extent: Extent) -> None:
        claimed = self._claimed[kind, extent.segment]
        claimed[extent.block : extent.end] = b"\x01" * extent.num_blocks

    def _settle_blocks(
        self, write: WriteTransaction, kind: BlockKind, segment: int, claimed: bytearray
    ) -> None:
        """Make holes of the blocks that no group has, or free ones where that cannot be done."""
        holes, free = hole_map(write.dbs, kind), free_map(write.dbs, kind)
        num_backed = claimed.count(1)
        for extent in _unclaimed(segment, claimed):
            if self._segments.punch(kind, extent):
                holes.add(write.txn, extent)
            else:
                free.add(write.txn, extent)
                num_backed += extent.num_blocks
        if len(claimed) < self._segment_blocks:
            rest = Extent(segment, len(claimed), self._segment_blocks - len(claimed))
            holes.add(write.txn, rest)
        Catalogue(write).add_to(BACKED, num_backed)


def _unclaimed(segment: int, claimed: bytearray) -> Iterator[Extent]:
    start = claimed.find(0)
    while start >= 0:
        end = claimed.find(1, start)
        end = len(claimed) if end < 0 else end
        yield Extent(segment, start, end - start)
        start = claimed.find(0, end)
