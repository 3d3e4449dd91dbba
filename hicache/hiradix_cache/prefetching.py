"""What comes from storage to the host, for which request, and how long it waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache.hashing import TOKEN_BYTES, hash_pages
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from collections import Counter

    from hicache.controller.agreement import Finished
    from hicache.controller.operations import PrefetchOperation
    from hicache.hiradix_cache.cache import HiRadixCache
    from hicache.radix import RadixKey, RadixNode
    from hicache.types import IntArray, RequestId

__all__ = ["Prefetcher"]

_NONE: IntArray = np.empty(0, dtype=np.int64)


class Prefetcher:
    """The prefetches of one cache, at most one per request.

    A prefetch asks storage for the pages below the deepest match that is, or is getting, on the
    host; allocates host memory for exactly the hit; reads; and is closed when it has ended or was
    terminated: what has arrived goes into the tree, and the rest of its memory is released when
    storage has let go of it.
    """

    def __init__(self, cache: HiRadixCache, counters: Counter[str]) -> None:
        self._cache = cache
        self._tree = cache.tree
        self._controller = cache.controller
        self._counters = counters
        self._by_request: dict[RequestId, PrefetchOperation] = {}
        self._refused: dict[RequestId, RadixKey] = {}
        self._loaded_tokens: dict[RequestId, int] = {}

    def begin(self, request_id: RequestId, key: RadixKey) -> bool:
        """See `HiRadixCache.prefetch_from_storage`."""
        was_refused = self._refused.pop(request_id, None) is not None
        if self._controller.storage is None or request_id in self._by_request:
            return request_id in self._by_request
        page_size = self._cache.config.page_size
        anchor = self._cache.match_prefix(key).last_host_node
        num_pages = len(key) // page_size - anchor.end
        if num_pages < self._threshold_pages:
            return False
        if self._controller.prefetch_rate_limited(num_pages):
            self._counters["prefetch_rate_limited"] += not was_refused
            self._refused[request_id] = key
            return False
        if not anchor.backed_or_in_flight:
            # Pages below an anchor that only the device has would be out of reach.
            self._cache.write_backup(anchor)
            self._controller.start_writing()
        ticket = self._tree.begin_prefetch(anchor, num_pages)
        if ticket is None:
            self._counters["no_host_anchor"] += 1
            return False
        first = anchor.end * page_size * TOKEN_BYTES
        prior = self._prior_hash(anchor, key)
        self._by_request[request_id] = self._controller.prefetch(
            request_id,
            key=key,
            anchor=anchor,
            ticket=ticket,
            hashes=hash_pages(key.data[first:], page_size, prior),
        )
        return True

    def check(self, request_id: RequestId) -> bool:
        """See `HiRadixCache.check_prefetch_progress`."""
        best_effort = self._cache.config.prefetch_policy is PrefetchPolicy.BEST_EFFORT
        refused = self._refused.get(request_id)
        if refused is not None and not self.begin(request_id, refused):
            if best_effort:
                self._refused.pop(request_id, None)
            # Still no room: those that hold it end by their deadlines.
            return request_id not in self._refused
        operation = self._by_request.get(request_id)
        if operation is None:
            return True
        if best_effort:
            self._terminate(operation)
        return False

    def abort(self, request_id: RequestId) -> None:
        """End the prefetch of a request that is gone; what has arrived is kept."""
        self._loaded_tokens.pop(request_id, None)
        self._refused.pop(request_id, None)
        operation = self._by_request.pop(request_id, None)
        if operation is not None:
            self._terminate(operation)

    def pop_loaded_tokens(self, request_id: RequestId) -> int:
        """See `HiRadixCache.pop_prefetch_loaded_tokens`."""
        return self._loaded_tokens.pop(request_id, 0)

    def reset(self) -> None:
        """Forget every request; prefetches in flight end by themselves with void tickets."""
        self._by_request.clear()
        self._refused.clear()
        self._loaded_tokens.clear()

    def advance(self, finished: Finished) -> None:
        """Take what ended: answers of queries, reads to be closed, memory to be released."""
        for operation, num_hits in finished.queries:
            self._start(operation, num_hits)
        for operation, num_good in finished.prefetches:
            if self._tree.can_commit_prefetch(operation.ticket):
                self._close(operation, num_good)
        for operation in finished.released:
            assert operation.host_pages is not None
            self._controller.host_allocator.free(operation.host_pages)

    @property
    def _threshold_pages(self) -> int:
        tokens, page_size = (
            self._cache.config.prefetch.threshold_tokens,
            self._cache.config.page_size,
        )
        return max(1, -(-tokens // page_size))

    def _prior_hash(self, anchor: RadixNode, key: RadixKey) -> bytes:
        if anchor.parent is None:
            return key.namespace
        return self._tree.page_hashes(anchor)[-1]

    def _terminate(self, operation: PrefetchOperation) -> None:
        if not operation.terminated:
            self._controller.terminate_prefetch(operation)

    def _start(self, operation: PrefetchOperation, num_hits: int) -> None:
        """Read the hit, wait for the budget, or end when it is not worth it or has no room."""
        void = operation.ticket.generation != self._tree.generation
        void |= self._controller.storage is None
        if void or operation.terminated or num_hits < self._threshold_pages:
            self._counters["prefetch_revoked"] += 1
            self._forget(operation)
            return
        if self._controller.prefetch_rate_limited(num_hits):
            # Its answer comes again next step; those that hold the budget end by their deadlines.
            return
        host_pages = self._cache.alloc_host(num_hits)
        if host_pages is None:
            self._counters["prefetch_no_host_memory"] += 1
            num_pages = min(num_hits, self._controller.host_allocator.num_available)
            if num_pages < self._threshold_pages:
                self._forget(operation)
                return
            # The head of the hit is worth having without its tail.
            host_pages = self._controller.host_allocator.alloc(num_pages)
            assert host_pages is not None
        self._controller.start_prefetch(operation, host_pages)

    def _forget(self, operation: PrefetchOperation) -> None:
        """End a prefetch that owns no memory."""
        self._tree.commit_prefetch(operation.ticket, operation.key, _NONE, 0)
        self._controller.forget_prefetch(operation)
        self._done(operation, 0)

    def _close(self, operation: PrefetchOperation, num_good: int) -> None:
        assert operation.host_pages is not None
        anchor_page = operation.ticket.first_page
        result = self._tree.commit_prefetch(
            operation.ticket, operation.key, operation.host_pages, num_good
        )
        operation.closed, operation.host_pages = True, result.untaken
        arrived = max(0, result.node.end - anchor_page) if num_good else 0
        self._done(operation, arrived * self._cache.config.page_size)

    def _done(self, operation: PrefetchOperation, num_tokens: int) -> None:
        if self._by_request.get(operation.request_id) is operation:
            del self._by_request[operation.request_id]
            self._loaded_tokens[operation.request_id] = num_tokens
