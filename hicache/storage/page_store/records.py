"""The small records of the index as bytes."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GroupState", "NamespaceRecord", "PageEntry", "page_name"]

_NAMESPACE_ID = struct.Struct(">I")
_ENTRY = struct.Struct(">QBB")
_STATE = struct.Struct("<QQIII")
_MOST_USES = (1 << 32) - 1
_NAMESPACE = struct.Struct("<IQ")


def page_name(namespace_id: int, key: bytes = b"") -> bytes:
    """Return what a page is filed under; without a key what all pages of a namespace begin with."""
    return _NAMESPACE_ID.pack(namespace_id) + key


class PageEntry(NamedTuple):
    """Where a page is found; the first eight bytes are the key of its group.

    Attributes:
        group_id: the group that holds it.
        position: which page of the group it is.
        num_pages: pages that the group was written with.
    """

    group_id: int
    position: int
    num_pages: int

    def encode(self) -> bytes:
        """Return the record."""
        return _ENTRY.pack(*self)

    @classmethod
    def encode_all(cls, group_id: int, num_pages: int) -> list[bytes]:
        """Return the records of all pages of a group."""
        return [_ENTRY.pack(group_id, position, num_pages) for position in range(num_pages)]

    @classmethod
    def decode(cls, data: bytes) -> PageEntry:
        """Read a record."""
        return cls._make(_ENTRY.unpack(data))


class GroupState(NamedTuple):
    """What changes about a group.

    Attributes:
        stored: bit n is set while page n is stored.
        last_use: tick of the last use of any of its pages.
        num_uses: how often they were used, to be stored and since then, as far as that is known.
        num_counted: how many of those are counted as uses of what the group hangs below, too.
        namespace_id: whose pages they are.
    """

    stored: int
    last_use: int
    num_uses: int
    num_counted: int
    namespace_id: int

    def used(self, num_uses: int, tick: int) -> GroupState:
        """Return the state after so many more uses, the last one then."""
        return self._replace(
            last_use=max(self.last_use, tick), num_uses=min(self.num_uses + num_uses, _MOST_USES)
        )

    @property
    def last_position(self) -> int:
        """The last page that is stored; -1 if none is."""
        return self.stored.bit_length() - 1

    @property
    def num_stored(self) -> int:
        """Pages that are stored."""
        return bin(self.stored).count("1")

    def is_stored(self, position: int) -> bool:
        """Whether one page is stored; a position of -1 is none."""
        return position >= 0 and bool(self.stored >> position & 1)

    def num_stored_from(self, position: int) -> int:
        """Return how many pages from `position` on are stored without a gap."""
        missing = ~(self.stored >> position)
        return (missing & -missing).bit_length() - 1

    def encode(self) -> bytes:
        """Return the record."""
        return _STATE.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> GroupState:
        """Read a record."""
        return cls._make(_STATE.unpack(data))


class NamespaceRecord(NamedTuple):
    """What the store knows of a namespace.

    Attributes:
        namespace_id: short for the digest, within this index.
        page_bytes: payload of each of its pages.
        description: the namespace's fields, for people; empty after the index was rebuilt.
    """

    namespace_id: int
    page_bytes: int
    description: Mapping[str, Any]

    def encode(self) -> bytes:
        """Return the record."""
        head = _NAMESPACE.pack(self.namespace_id, self.page_bytes)
        return head + json.dumps(dict(self.description), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> NamespaceRecord:
        """Read a record."""
        namespace_id, page_bytes = _NAMESPACE.unpack_from(data)
        return cls(namespace_id, page_bytes, json.loads(data[_NAMESPACE.size :]))
