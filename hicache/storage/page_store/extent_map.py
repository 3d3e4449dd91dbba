"""Sets of blocks in the index."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from hicache.storage.page_store.blocks import Extent

if TYPE_CHECKING:
    from collections.abc import Iterator

    import lmdb
    from lmdb import _Database

__all__ = ["ExtentMap"]

_PLACE = struct.Struct(">II")
_LENGTH = struct.Struct("<I")


class ExtentMap:
    """A set of blocks as extents, neighbours joined, under a prefix of a database's keys.

    Every operation takes the transaction that it is part of, and costs a few look-ups an extent.
    """

    def __init__(self, database: _Database, prefix: bytes) -> None:
        self._database = database
        self._prefix = prefix

    def add(self, txn: lmdb.Transaction[Any], extent: Extent) -> None:
        """Put blocks in, none of which may be there."""
        segment, start, length = extent
        end = start + length
        with txn.cursor(self._database) as cursor:
            behind = self._seek(cursor, segment, start)
            if behind is not None and behind.segment == segment:
                assert end <= behind.block, f"{extent} overlaps {behind}"
                if end == behind.block:
                    end = behind.end
                    cursor.delete()
            before = self._seek_before(cursor, segment, start)
            if before is not None and before.segment == segment:
                assert before.end <= start, f"{extent} overlaps {before}"
                if before.end == start:
                    start = before.block
        self._put(txn, Extent(segment, start, end - start))

    def remove(self, txn: lmdb.Transaction[Any], extent: Extent) -> None:
        """Take blocks out, all of which must be there, in one extent."""
        segment, start, length = extent
        with txn.cursor(self._database) as cursor:
            whole = self._seek(cursor, segment, start)
            if whole is None or (whole.segment, whole.block) != (segment, start):
                whole = self._seek_before(cursor, segment, start)
            assert whole is not None, f"{extent} is not there"
            assert whole.segment == segment, f"{extent} is not there"
            assert whole.block <= start, f"{extent} is not there"
            assert extent.end <= whole.end, f"{extent} is not there"
            cursor.delete()
        if whole.block < start:
            self._put(txn, Extent(segment, whole.block, start - whole.block))
        if extent.end < whole.end:
            self._put(txn, Extent(segment, start + length, whole.end - extent.end))

    def contains(self, txn: lmdb.Transaction[Any], extent: Extent) -> bool:
        """Whether all of some neighbouring blocks are there."""
        segment, start, _ = extent
        with txn.cursor(self._database) as cursor:
            found = self._seek(cursor, segment, start)
            if found is None or (found.segment, found.block) != (segment, start):
                found = self._seek_before(cursor, segment, start)
        return found is not None and found.segment == segment and extent.end <= found.end

    def take(
        self, txn: lmdb.Transaction[Any], num_blocks: int, *, max_extents: int
    ) -> list[Extent]:
        """Take out up to `num_blocks` blocks, from the first on, in up to `max_extents` extents."""
        taken: list[Extent] = []
        with txn.cursor(self._database) as cursor:
            while num_blocks > 0 and len(taken) < max_extents:
                extent = self._seek(cursor, 0, 0)
                if extent is None:
                    break
                cursor.delete()
                if extent.num_blocks > num_blocks:
                    segment, start, length = extent
                    rest = Extent(segment, start + num_blocks, length - num_blocks)
                    self._put(txn, rest)
                    extent = Extent(segment, start, num_blocks)
                taken.append(extent)
                num_blocks -= extent.num_blocks
        return taken

    def extents(self, txn: lmdb.Transaction[Any]) -> Iterator[Extent]:
        """Yield every extent in order of its place."""
        with txn.cursor(self._database) as cursor:
            found = self._seek(cursor, 0, 0)
            while found is not None:
                yield found
                found = self._here(cursor) if cursor.next() else None

    def num_blocks(self, txn: lmdb.Transaction[Any]) -> int:
        """Return how many blocks there are, by counting."""
        return sum(extent.num_blocks for extent in self.extents(txn))

    def _put(self, txn: lmdb.Transaction[Any], extent: Extent) -> None:
        segment, start, length = extent
        key = self._prefix + _PLACE.pack(segment, start)
        txn.put(key, _LENGTH.pack(length), db=self._database)

    def _seek(self, cursor: lmdb.Cursor[Any], segment: int, block: int) -> Extent | None:
        """Return the first extent that starts at this place or behind it."""
        found = cursor.set_range(self._prefix + _PLACE.pack(segment, block))
        return self._here(cursor) if found else None

    def _seek_before(self, cursor: lmdb.Cursor[Any], segment: int, block: int) -> Extent | None:
        """Return the last extent that starts before this place."""
        behind = cursor.set_range(self._prefix + _PLACE.pack(segment, block))
        found = cursor.prev() if behind else cursor.last()
        return self._here(cursor) if found else None

    def _here(self, cursor: lmdb.Cursor[Any]) -> Extent | None:
        key: bytes = cursor.key()
        if not key.startswith(self._prefix):
            return None
        segment, block = _PLACE.unpack_from(key, len(self._prefix))
        (length,) = _LENGTH.unpack(cursor.value())
        return Extent(segment, block, length)
