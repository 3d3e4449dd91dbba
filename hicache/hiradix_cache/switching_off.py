"""How a cache goes on with its device pages alone, when there is nobody to agree with any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hicache.hiradix_cache.parts import CacheParts
    from hicache.types import IntArray

__all__ = ["drop_host_copies", "switch_off"]

_NONE: IntArray = np.empty(0, dtype=np.int64)


def switch_off(parts: CacheParts) -> None:
    """End L2 and L3 of one rank, at once and without a word to the others.

    Nothing is waited for, and nothing depends on which copies and calls have ended on which rank.
    So the ranks that are left have equal trees afterwards, each by itself, when they notice in the
    same step. (When one dies in the middle of an agreement, some complete it and notice a step
    later; what that step decided is theirs alone.)

    | in flight | ends as failed, and |
    |---|---|
    | loads | their device pages are kept: they are in page tables, and what has arrived is right |
    | writes, persists, prefetches | their host pages are free, though a call may still run |
    | host copies | are dropped, as nothing can be loaded any more; see `drop_host_copies` |

    No harm comes of a call that still uses host memory: none of it is allocated again, and `close`
    does not unmap what a call still uses. Kept pages are the tree's when a request inserts them,
    and free when the cache is closed. What a rank had withheld at the last agreement because of
    another one, it withholds for good.

    Args:
        parts: of the cache, whose queued copies have been dropped.
    """
    tree, controller, returns = parts.tree, parts.controller, parts.returns
    controller.switch_off()
    for ack in controller.loads.drop_acks():
        for load in ack.operations:
            assert load.ticket is not None
            returns.keep(tree.commit_load(load.ticket, load.device_pages, 0))
            returns.copy_ended(load.ticket)
    for ack in controller.writes.drop_acks():
        for write in ack.operations:
            parts.writer.finish(write, good=False)
    prefetches, persists = controller.store_queue.drop_all()
    for prefetch in prefetches:
        if not prefetch.closed:
            tree.commit_prefetch(prefetch.ticket, prefetch.key, _NONE, 0)
        if prefetch.host_pages is not None:
            returns.host(prefetch.host_pages)
    for persist in persists:
        parts.persister.finish(persist, 0)
        returns.copy_ended(persist.ticket)
    parts.persister.forget()
    parts.prefetcher.reset()
    parts.writer.reset()
    drop_host_copies(parts)


def drop_host_copies(parts: CacheParts) -> None:
    """Free every host page but those of nodes that a request has locked; for every step.

    A locked node that a load was to bring back has nothing else until its request inserts it.
    """
    parts.writer.evict_host(parts.controller.host_allocator.num_pages)
