"""How large a store is and may be, for those who watch it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hicache.storage.base import StorageFigures
from hicache.storage.page_store.blocks import BLOCK_BYTES
from hicache.storage.page_store.counters import BACKED, EVICTED, pages_counter
from hicache.storage.page_store.limits import Limits
from hicache.storage.page_store.registry import STORES

if TYPE_CHECKING:
    from hicache.storage.page_store.access import Access

__all__ = ["figures_of"]


def figures_of(access: Access) -> StorageFigures:
    """Return how a store is for one of its instances; some numbers are read, whatever its size.

    Raises:
        OSError, lmdb.Error: the index or the file system cannot be asked.
    """
    store = access.store
    with store.index.read() as txn:
        with txn.cursor(store.index.dbs.owners) as cursor:
            limits = store.allocator.limits.strictest(Limits.decode(data) for _, data in cursor)
        num_backed, num_evicted, num_pages = (
            int.from_bytes(txn.get(counter, b"", db=store.index.dbs.meta), "little")
            for counter in (BACKED, EVICTED, pages_counter(access.namespace_id))
        )
    system = os.statvfs(store.directory.data)
    return StorageFigures(
        used_bytes=num_backed * BLOCK_BYTES + store.index.num_bytes,
        limit_bytes=limits.max_bytes if limits.max_bytes < Limits().max_bytes else None,
        spare_bytes=system.f_bavail * system.f_frsize - limits.min_free_bytes,
        num_pages=num_pages,
        num_evicted_pages=num_evicted,
        num_index_rebuilds=STORES.num_rebuilds[store.directory.path],
        num_direct_refusals=access.transfer.num_direct_refusals,
    )
