"""What one call writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.storage.page_memory import BatchMemory

__all__ = ["Batch"]


class Batch(NamedTuple):
    """Pages to write, and how.

    Attributes:
        namespace_id: in the store's index.
        namespace_digest: 32 bytes that name the namespace.
        prefix: what the names of its pages begin with.
        page_bytes: length of each page.
        keys: of the pages.
        parent_keys: what each was chained from.
        memory: where the bytes are.
        expired: tells when no page may be begun any more.
        fsync: whether pages are on the disk before they are `OK`.
    """

    namespace_id: int
    namespace_digest: bytes
    prefix: bytes
    page_bytes: int
    keys: Sequence[bytes]
    parent_keys: Sequence[bytes]
    memory: BatchMemory
    expired: Callable[[], bool]
    fsync: bool
