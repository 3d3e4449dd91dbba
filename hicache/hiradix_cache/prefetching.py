"""What comes from storage to the host, for which request, and how long it waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache.controller import AttachmentState
from hicache.hashing import TOKEN_BYTES, hash_pages
from hicache.hiradix_cache.doubts import DoubtedPages
from hicache.hiradix_cache.read_costs import ReadCosts
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from hicache.config import PrefetchConfig
    from hicache.controller import HiCacheController
    from hicache.controller.agreement import Finished
    from hicache.controller.operations import PrefetchOperation
    from hicache.hiradix_cache.writing import HostWriter
    from hicache.radix import RadixKey, RadixNode, RadixTree
    from hicache.types import IntArray, PageHash, RequestId

__all__ = ["Prefetcher"]

_NONE: IntArray = np.empty(0, dtype=np.int64)


class Prefetcher:
    """The prefetches of one cache, at most one per request.

    A prefetch asks storage for the pages below the deepest match that is, or is getting, on the
    host; allocates host memory for exactly the hit; reads; and is closed when it has ended or was
    terminated: what has arrived goes into the tree, and the rest of its memory is released when
    storage has let go of it.

    Before its request is asked about, no read begins that could only have room by giving up what
    was brought for others that still wait; and none at all for a page that storage promised and
    did not deliver, until it is stored anew.
    """

    def __init__(
        self,
        tree: RadixTree,
        controller: HiCacheController,
        *,
        writer: HostWriter,
        counters: Counter[str],
    ) -> None:
        self._tree = tree
        self._controller = controller
        self._queue = controller.store_queue
        self._writer = writer
        self._counters = counters
        self._page_size = controller.config.page_size
        self._by_request: dict[RequestId, PrefetchOperation] = {}
        self._refused: dict[RequestId, RadixKey] = {}
        self._loaded_tokens: dict[RequestId, int] = {}
        self._deadlines: dict[RequestId, float] = {}
        self._doubted = DoubtedPages()
        self._costs = ReadCosts(controller)

    def begin(self, request_id: RequestId, key: RadixKey) -> bool:
        """See `HiRadixCache.prefetch_from_storage`."""
        was_refused = self._refused.pop(request_id, None) is not None
        if self._controller.storage is None or request_id in self._by_request:
            if self._controller.storage_state is AttachmentState.DETACHING:
                self._counters["prefetch_store_detaching"] += 1
            return request_id in self._by_request
        anchor = self._tree.split_at(self._tree.match(key)).last_host_node
        num_pages = len(key) // self._page_size - anchor.end
        if num_pages < self._threshold_pages:
            return False
        if self._controller.prefetch_rate_limited(num_pages):
            self._counters["prefetch_rate_limited"] += not was_refused
            self._refused[request_id] = key
            return False
        if not anchor.backed_or_in_flight:
            # Pages below an anchor that only the device has would be out of reach.
            self._writer.write_backup(anchor)
            self._controller.start_writing()
        ticket = self._tree.begin_prefetch(anchor, num_pages)
        if ticket is None:
            self._counters["no_host_anchor"] += 1
            return False
        tokens = key.data[anchor.end * self._page_size * TOKEN_BYTES :]
        prior = self._prior_hash(anchor, key)
        hashes = hash_pages(tokens, self._page_size, prior)
        self._tree.known_hashes.note(prior, tokens, hashes)
        self._by_request[request_id] = self._queue.prefetch(
            request_id,
            key=key,
            anchor=anchor,
            ticket=ticket,
            hashes=hashes,
            parent_hash=prior,
        )
        return True

    def check(self, request_id: RequestId) -> bool:
        """See `HiRadixCache.check_prefetch_progress`."""
        refused = self._refused.get(request_id)
        if refused is not None and not self.begin(request_id, refused):
            waits = self._ends_by_time or self._policy is PrefetchPolicy.WAIT_COMPLETE
            if not waits:
                self._refused.pop(request_id, None)
            # Still no room: those that hold it end by their deadlines.
            return request_id not in self._refused
        operation = self._by_request.get(request_id)
        if operation is None:
            return True
        self._costs.note_wanted(operation)
        if self._policy is PrefetchPolicy.BEST_EFFORT:
            self._terminate(operation)
        elif self._policy is PrefetchPolicy.ADAPTIVE and not self._ends_by_time:
            self._end_unless_worth_it(operation)
        return False

    def reach(self, request_id: RequestId) -> int:
        """See `HiRadixCache.prefetch_reach`."""
        refused = self._refused.get(request_id)
        if refused is not None:
            return len(refused) // self._page_size * self._page_size
        operation = self._by_request.get(request_id)
        if operation is None:
            return 0
        pages = operation.hashes if operation.host_pages is None else operation.host_pages
        return (operation.ticket.first_page + len(pages)) * self._page_size

    def abort(self, request_id: RequestId) -> None:
        """End the prefetch of a request that is gone; what has arrived is kept."""
        self._loaded_tokens.pop(request_id, None)
        operation = self._forget_request(request_id)
        if operation is not None:
            self._terminate(operation)

    def pop_loaded_tokens(self, request_id: RequestId) -> int:
        """See `HiRadixCache.pop_prefetch_loaded_tokens`."""
        return self._loaded_tokens.pop(request_id, 0)

    def stored(self, hashes: Sequence[PageHash]) -> None:
        """Take note of pages that have just been persisted."""
        self._doubted.remove(hashes)

    def forget_doubts(self) -> None:
        """Believe in every page again: the store has been emptied or changed."""
        self._doubted.clear()

    def reset(self) -> None:
        """Forget every request; prefetches in flight end by themselves with void tickets."""
        self._by_request.clear()
        self._refused.clear()
        self._deadlines.clear()
        self._loaded_tokens.clear()

    def advance(self, finished: Finished, *, now: float, most: int) -> int:
        """Close reads that have ended, then begin reads whose queries are answered.

        The oldest `most` of both; not counted are those that have to wait, which cost next to
        nothing.

        Args:
            finished: what has ended on every rank.
            now: in agreed seconds.
            most: operations to close or begin, at least 1.

        Returns:
            How many that were.
        """
        for operation, num_arrived in finished.arriving:
            operation.num_arrived, operation.progressed_at = num_arrived, now
        num_left = most
        for operation, num_good in finished.prefetches:
            if num_left and self._tree.can_commit_prefetch(operation.ticket):
                self._close(operation, num_good)
                num_left -= 1
        for operation, num_hits in finished.queries:
            if num_left and self._start(operation, num_hits):
                num_left -= 1
        return most - num_left

    def release(self, operations: Sequence[PrefetchOperation]) -> None:
        """Free what closed prefetches still own, which no call uses any more."""
        for operation in operations:
            assert operation.host_pages is not None
            self._controller.host_allocator.free(operation.host_pages)

    def end_late(self, now: float) -> None:
        """End the prefetches whose time is over, where that counts; `now` is in agreed seconds."""
        if self._ends_by_time:
            self._end_late(now)

    @property
    def _policy(self) -> PrefetchPolicy:
        return self._controller.config.prefetch_policy

    @property
    def _ends_by_time(self) -> bool:
        """Whether the time that has gone by ends prefetches, not what the rest would take.

        Under `adaptive`, as long as nobody knows what computing takes: after a restart the first
        request would else compute all that storage has.
        """
        policy = self._policy
        return policy is PrefetchPolicy.TIMEOUT or (
            policy is PrefetchPolicy.ADAPTIVE and not self._costs.knows_computing
        )

    @property
    def _config(self) -> PrefetchConfig:
        return self._controller.config.prefetch

    @property
    def _threshold_pages(self) -> int:
        return max(1, -(-self._config.threshold_tokens // self._page_size))

    def _prior_hash(self, anchor: RadixNode, key: RadixKey) -> bytes:
        if anchor.parent is None:
            return key.namespace
        return self._tree.page_hashes(anchor)[-1]

    def _end_late(self, now: float) -> None:
        """End what has waited for longer than its tokens are worth, from its first step on."""
        for request_id, operation in self._by_request.items():
            if now >= self._deadline(request_id, operation.key, now):
                self._terminate(operation)
        for request_id, key in list(self._refused.items()):
            if now >= self._deadline(request_id, key, now):
                self._forget_request(request_id)

    def _deadline(self, request_id: RequestId, key: RadixKey, now: float) -> float:
        allowed = self._config.timeout_base_seconds
        allowed += self._config.timeout_per_ki_token_seconds * len(key) / 1024
        return self._deadlines.setdefault(request_id, now + allowed)

    def _forget_request(self, request_id: RequestId) -> PrefetchOperation | None:
        """Forget that the request waits; return its prefetch if it has one."""
        self._refused.pop(request_id, None)
        self._deadlines.pop(request_id, None)
        return self._by_request.pop(request_id, None)

    def _terminate(self, operation: PrefetchOperation) -> None:
        if not operation.terminated:
            self._queue.terminate_prefetch(operation)

    def _start(self, operation: PrefetchOperation, num_hits: int) -> bool:
        """Read the hit, or end when it is not worth it or has no room.

        Returns:
            False when it has to wait for the budget, and nothing has happened.
        """
        void = operation.ticket.generation != self._tree.generation
        void |= self._controller.storage is None
        num_hits = self._doubted.num_credible(operation.hashes[:num_hits])
        least_pages = self._threshold_pages
        too_few = num_hits < least_pages
        if not (void or operation.terminated or too_few):
            num_hits = self._costs.num_worth_reading(operation, num_hits, least_pages=least_pages)
            too_few = num_hits < least_pages
        if void or operation.terminated or too_few:
            self._counters["prefetch_revoked"] += 1
            self._forget(operation)
            return True
        crowded = operation.request_wait is None and self._is_crowded(num_hits)
        if crowded or self._controller.prefetch_rate_limited(num_hits):
            # Its answer comes again next step; those that hold the budget end by their deadlines.
            return False
        host_pages = self._writer.alloc_host(num_hits)
        if host_pages is None:
            self._counters["prefetch_no_host_memory"] += 1
            num_pages = min(num_hits, self._controller.host_allocator.num_available)
            if num_pages < least_pages:
                self._forget(operation)
                return True
            # The head of the hit is worth having without its tail.
            host_pages = self._controller.host_allocator.alloc(num_pages)
            assert host_pages is not None
        operation.progressed_at = self._controller.now
        self._queue.start_prefetch(operation, host_pages)
        return True

    def _end_unless_worth_it(self, operation: PrefetchOperation) -> None:
        """End what would come later than it could be computed."""
        if not operation.terminated and not self._costs.is_worth_waiting(operation):
            self._counters["prefetch_ended_by_cost"] += 1
            self._terminate(operation)

    def _is_crowded(self, num_pages: int) -> bool:
        """Whether room for `num_pages` would cost pages of requests that still wait."""
        num_brought = sum(self._loaded_tokens.values()) // self._page_size
        num_taken = num_brought + self._queue.num_prefetch_pages
        num_host_pages = self._controller.host_allocator.num_pages
        return num_brought > 0 and num_taken + num_pages > num_host_pages

    def _forget(self, operation: PrefetchOperation) -> None:
        """End a prefetch that owns no memory."""
        self._tree.commit_prefetch(operation.ticket, operation.key, _NONE, 0)
        self._queue.forget_prefetch(operation)
        self._done(operation, 0)

    def _close(self, operation: PrefetchOperation, num_good: int) -> None:
        assert operation.host_pages is not None
        if num_good < len(operation.host_pages):
            self._doubt(operation, num_good)
        anchor_page = operation.ticket.first_page
        result = self._tree.commit_prefetch(
            operation.ticket,
            operation.key,
            operation.host_pages,
            num_good,
            now=self._controller.now,
        )
        self._queue.close_prefetch(operation, result.untaken)
        arrived = max(0, result.node.end - anchor_page) if num_good else 0
        self._done(operation, arrived * self._page_size)

    def _doubt(self, operation: PrefetchOperation, num_good: int) -> None:
        """Let nobody else wait for the page that did not come, unless nobody waited for it."""
        asked = _hashes_read(operation)
        waited = self._by_request.get(operation.request_id) is operation
        # One that another's doubt has ended says nothing about the page that it was at.
        waited &= self._doubted.num_credible(asked) == len(asked)
        # Nor does one that was too slow for its request, which is no broken promise.
        waited &= not (operation.terminated and self._policy is PrefetchPolicy.ADAPTIVE)
        if not waited or self._policy is PrefetchPolicy.BEST_EFFORT:
            return
        missing = asked[num_good]
        self._doubted.add(missing)
        for other in self._by_request.values():
            if other is not operation and missing in _hashes_read(other):
                self._terminate(other)

    def _done(self, operation: PrefetchOperation, num_tokens: int) -> None:
        if self._by_request.get(operation.request_id) is operation:
            self._forget_request(operation.request_id)
            self._loaded_tokens[operation.request_id] = num_tokens


def _hashes_read(operation: PrefetchOperation) -> Sequence[PageHash]:
    """Return the hashes of the pages that a prefetch reads; none before it is started."""
    return operation.hashes[: 0 if operation.host_pages is None else len(operation.host_pages)]
