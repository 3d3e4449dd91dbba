"""The embedded page store, default backend `file`: packed pages, an LMDB index, bounded space.

`store` is the backend and `inspection` what operators use. Below them: `registry` and `open_store`
(what a process has open); `lookup`, `page_reader`, `page_writer`, `publisher` (the ways of a page);
`allocator`, `refill`, `space` (blocks); `catalogue` (what is stored and what may go), `evictor`,
`eviction_policies`, `reuse_history`, `departed` (what goes first); `index`, `segments`, `directory`
(the files); `rebuild` (a new index).
"""

from hicache.storage.page_store.inspection import (
    GarbageReport,
    NamespaceSummary,
    StoredPage,
    StoreSummary,
    check_store,
    collect_garbage,
    list_pages,
    rebuild_store,
    summarize,
    verify_pages,
)
from hicache.storage.page_store.limits import Limits
from hicache.storage.page_store.store import PageStore

__all__ = [
    "GarbageReport",
    "Limits",
    "NamespaceSummary",
    "PageStore",
    "StoreSummary",
    "StoredPage",
    "check_store",
    "collect_garbage",
    "list_pages",
    "rebuild_store",
    "summarize",
    "verify_pages",
]
