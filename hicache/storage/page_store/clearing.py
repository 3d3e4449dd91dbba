"""Removal of pages: one that proved damaged, or all of a namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.storage.page_store.blocks import BlockKind, Extent, merge
from hicache.storage.page_store.catalogue import ALL_POSITIONS, Catalogue, Freed
from hicache.storage.page_store.limits import changes_per_commit
from hicache.storage.page_store.records import PageEntry, page_name
from hicache.storage.page_store.refill import release
from hicache.storage.page_store.space import free_map

if TYPE_CHECKING:
    from hicache.storage.page_store.index import WriteTransaction
    from hicache.storage.page_store.open_store import OpenStore

__all__ = ["clear_namespace", "remove_if_same"]


def remove_if_same(store: OpenStore, name: bytes, entry: PageEntry) -> bool:
    """Forget a page if its entry is still this very one; return whether it was.

    Raises:
        OSError, lmdb.Error: nothing has changed.
    """
    with store.index.read() as txn:
        if txn.get(name, db=store.index.dbs.pages) != entry.encode():
            return False
    store.allocator.make_room(1)
    with store.index.write() as write:
        if write.txn.get(name, db=write.dbs.pages) != entry.encode():
            return False
        freed = Catalogue(write).remove_page(name, entry)
        release(store.parts.space(write), freed)
    return True


def clear_namespace(store: OpenStore, namespace_id: int) -> int:
    """Forget all pages of a namespace, some at a time; return how many those were.

    Pages that are stored meanwhile may stay. No index rebuilt later has those that were removed.

    Raises:
        OSError, lmdb.Error: what was removed before stays so.
    """
    prefix = page_name(namespace_id)
    num_removed = 0
    start: bytes | None = prefix
    headers: list[Extent] = []
    while start is not None or headers:
        num_changes = changes_per_commit(store.allocator.strictest)
        store.allocator.make_room(num_changes)
        with store.index.write() as write:
            _wipe(store, write, headers)
            start, freed = _clear_some(store, write, prefix, start, num_changes)
            num_removed += freed.num_pages
            headers = freed.headers
    return num_removed


def _clear_some(
    store: OpenStore, write: WriteTransaction, prefix: bytes, start: bytes | None, max_pages: int
) -> tuple[bytes | None, Freed]:
    """Remove groups from the page `start` on; return where to go on, if there is more."""
    catalogue = Catalogue(write)
    num_removed, payload, headers = 0, list[Extent](), list[Extent]()
    while start is not None and num_removed < max_pages:
        with write.txn.cursor(write.dbs.pages) as cursor:
            if not cursor.set_range(start) or not cursor.key().startswith(prefix):
                start = None
                break
            start, entry = cursor.key(), PageEntry.decode(cursor.value())
        if catalogue.is_sound(start, entry):
            freed = catalogue.remove(entry.group_id, ALL_POSITIONS)
        else:
            freed = catalogue.remove_page(start, entry)
        num_removed += freed.num_pages
        payload += freed.payload
        headers += freed.headers
    release(store.parts.space(write), Freed(num_removed, merge(payload), merge(headers)))
    return start, Freed(num_removed, [], headers)


def _wipe(store: OpenStore, write: WriteTransaction, headers: list[Extent]) -> None:
    """Make headers unreadable that an earlier commit has made free and nobody has taken since."""
    free = free_map(write.dbs, BlockKind.HEADER)
    for extent in headers:
        if free.contains(write.txn, extent):
            store.segments.wipe_header(extent)
