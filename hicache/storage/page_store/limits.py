"""How large a store may be."""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from hicache.storage.page_store.blocks import BLOCK_BYTES

__all__ = ["Limits", "changes_per_commit", "default_min_free_bytes", "index_growth_bytes"]

_RECORD = struct.Struct("<QQ")
_UNBOUNDED = (1 << 64) - 1


class Limits(NamedTuple):
    """What a process wants kept.

    Attributes:
        max_bytes: segments and index together at most.
        min_free_bytes: what the store leaves free on its file system.
    """

    max_bytes: int = _UNBOUNDED
    min_free_bytes: int = 0

    def strictest(self, other: Limits) -> Limits:
        """Return limits that keep both."""
        return Limits(
            min(self.max_bytes, other.max_bytes), max(self.min_free_bytes, other.min_free_bytes)
        )

    def room_bytes(self, directory: str, *, num_backed: int, index_bytes: int) -> int:
        """Return by how much the store may grow; less than 0 is by how much it must shrink.

        Raises:
            OSError: the file system of `directory` cannot be asked.
        """
        room = self.max_bytes - num_backed * BLOCK_BYTES - index_bytes
        if self.min_free_bytes:
            system = os.statvfs(directory)
            room = min(room, system.f_bavail * system.f_frsize - self.min_free_bytes)
        return room

    def encode(self) -> bytes:
        """Return the record that other processes read."""
        return _RECORD.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> Limits:
        """Read a record."""
        return cls._make(_RECORD.unpack(data))


def default_min_free_bytes(directory: str) -> int:
    """Return the free space to keep when nobody says: 1 GiB, or 5 % of a small file system.

    Raises:
        OSError: the file system cannot be asked.
    """
    system = os.statvfs(directory)
    return min(1 << 30, system.f_blocks * system.f_frsize // 20)


def index_growth_bytes(num_changes: int) -> int:
    """Return by how much a commit may let the index grow.

    LMDB writes every page of a tree that it changes to a new place. Twice what was measured.

    Args:
        num_changes: pages that are stored or removed, and groups whose last use is written.
    """
    return (16 + 2 * num_changes) * BLOCK_BYTES


def changes_per_commit(limits: Limits) -> int:
    """Return how many changes one commit may make.

    It bounds how long others wait for it, and what it adds to the index of a small store.
    """
    return max(4, min(512, limits.max_bytes // BLOCK_BYTES // 256 - 8))
