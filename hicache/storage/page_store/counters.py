"""The names in `meta`, of numbers but for one."""

from __future__ import annotations

from hicache.storage.page_store.records import page_name

__all__ = [
    "BACKED",
    "EVICTED",
    "NAMESPACES",
    "NEXT_GROUP_ID",
    "REUSE_HISTORY",
    "SEGMENTS",
    "pages_counter",
]

BACKED = b"backed blocks"
"""Blocks that have space on the disk."""

EVICTED = b"evicted pages"
"""Pages that were given up to make room, of all namespaces, since the index was made."""

NAMESPACES = b"namespaces"
"""Ids of namespaces that have been given out."""

NEXT_GROUP_ID = b"next group id"
"""The first group id that nobody has."""

REUSE_HISTORY = b"reuse history"
"""No number but the record of `reuse_history`."""

SEGMENTS = b"segments"
"""Numbers of segments that have been given out."""


def pages_counter(namespace_id: int) -> bytes:
    """Return the name of the number of pages of a namespace."""
    return b"pages " + page_name(namespace_id)
