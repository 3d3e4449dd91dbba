"""How large a store may be."""

from __future__ import annotations

import os
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from hicache.storage.page_store.blocks import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "SHRINK_INTERVAL_SECONDS",
    "FreeSpaceFloor",
    "Limits",
    "changes_per_commit",
    "default_min_free_bytes",
    "index_growth_bytes",
]

_RECORD = struct.Struct("<QQ")
_UNBOUNDED = (1 << 64) - 1

SHRINK_INTERVAL_SECONDS = 60.0
"""What a store waits until it shrinks once more for the free space of its file system."""


class Limits(NamedTuple):
    """What a process wants kept.

    Attributes:
        max_bytes: segments and index together at most.
        min_free_bytes: what the store leaves free on its file system.
    """

    max_bytes: int = _UNBOUNDED
    min_free_bytes: int = 0

    def strictest(self, others: Iterable[Limits]) -> Limits:
        """Return limits that keep these and all `others`."""
        max_bytes, min_free_bytes = self
        for other in others:
            max_bytes = min(max_bytes, other.max_bytes)
            min_free_bytes = max(min_free_bytes, other.min_free_bytes)
        return Limits(max_bytes, min_free_bytes)

    def room_bytes(self, *, num_backed: int, index_bytes: int) -> int:
        """Return what `max_bytes` leaves to grow by; less than 0 is by how much to shrink."""
        return self.max_bytes - num_backed * BLOCK_BYTES - index_bytes

    def spare_bytes(self, directory: str) -> int:
        """Return what the file system has above `min_free_bytes`; less than 0 is what it lacks.

        Raises:
            OSError: the file system of `directory` cannot be asked.
        """
        if not self.min_free_bytes:
            return _UNBOUNDED
        system = os.statvfs(directory)
        return system.f_bavail * system.f_frsize - self.min_free_bytes

    def encode(self) -> bytes:
        """Return the record that other processes read."""
        return _RECORD.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> Limits:
        """Read a record."""
        return cls._make(_RECORD.unpack(data))


class FreeSpaceFloor:
    """Says how much a store must shrink to leave `min_free_bytes`. Thread-safe.

    Not every file system shows at once, or at all, what a store has given back: snapshots may hold
    it. So what it lacks is given back once, and looked at again only after a minute; or the store
    would go on until nothing is left of it.
    """

    def __init__(self, directory: str, now: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._now = now
        self._next_look = 0.0

    def num_lacking(self, limits: Limits) -> int:
        """Return how many blocks to give back, or 0 if that was asked for a short time ago.

        Raises:
            OSError: the file system cannot be asked.
        """
        if self._now() < self._next_look:
            return 0
        lacking = -limits.spare_bytes(self._directory)
        return -(-lacking // BLOCK_BYTES) if lacking > 0 else 0

    def wait(self) -> None:
        """Ask for nothing for some time: what was lacking is about to be given back."""
        self._next_look = self._now() + SHRINK_INTERVAL_SECONDS


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
