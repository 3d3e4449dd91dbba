"""What goes from the device to the host, when, and what makes room for it there."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from hicache.hiradix_cache.results import EvictOutcome
from hicache.radix import Admission, Duplicates, write_rule_for
from hicache.types import WritePolicy

if TYPE_CHECKING:
    from collections import Counter

    from hicache.controller import CacheOperation, HiCacheController
    from hicache.hiradix_cache.persisting import Persister
    from hicache.hiradix_cache.returning import PageReturns
    from hicache.radix import InsertResult, RadixNode, RadixTree, Ticket, WriteRule
    from hicache.types import IntArray, RequestId

__all__ = ["HostWriter"]

_NONE: IntArray = np.empty(0, dtype=np.int64)

_MAX_BEHIND = 4096
"""Nodes that `write_behind` remembers; beyond, the oldest is left to be written on eviction."""


class HostWriter:
    """Carries out the write policy, and device and host eviction.

    | policy | when a run is written |
    |---|---|
    | `write_through` | it is first inserted |
    | `write_through_selective` | a second request inserts it |
    | `write_behind` | the write stream is idle, free device pages get few, or it is evicted |
    | `write_back` | it is evicted, or free device pages get few |
    | `adaptive` | likewise, if worth what the host gives up; at once for a store of everything |

    `write_rule_for` says what that asks of the tree.
    """

    def __init__(
        self,
        tree: RadixTree,
        controller: HiCacheController,
        *,
        persister: Persister,
        returns: PageReturns,
        counters: Counter[str],
    ) -> None:
        self._tree = tree
        self._controller = controller
        self._persister = persister
        self._returns = returns
        self._counters = counters
        num_pages = controller.device_allocator.num_pages
        self._watermark_pages = int(controller.config.write_watermark * num_pages)
        self._behind: deque[RadixNode] = deque(maxlen=_MAX_BEHIND)
        self._keep_history()

    @property
    def _policy(self) -> WritePolicy:
        return self._controller.config.write_policy

    @property
    def _rule(self) -> WriteRule:
        storage = self._controller.storage
        return write_rule_for(self._policy, None if storage is None else storage.admission)

    @property
    def _on_eviction(self) -> bool:
        """Whether what is evicted unwritten is written first."""
        return self._rule.on_eviction and not self._controller.is_off

    def reserve(self, request_id: RequestId, device_pages: IntArray) -> bool:
        """See `HiRadixCache.reserve_write`."""
        wanted = self._rule.min_uses == 0 and self._controller.config.write_by_layer
        if not wanted or not len(device_pages) or self._controller.is_off:
            return False
        self._make_room(len(device_pages), self._rule.duplicates)
        return self._controller.reserve_write(request_id, device_pages)

    def after_insert(self, result: InsertResult, request_id: RequestId) -> None:
        """Queue what the policy writes because of an insertion, and start it."""
        node = result.node
        due = self._rule.due(node)
        if due is not None:
            node = due
            self.write_backup(node, reserved_by=request_id)
        elif self._policy is WritePolicy.WRITE_BEHIND and not node.backed_or_in_flight:
            self._behind.append(node)
        self._controller.reservations.abandon(request_id)
        self._controller.start_writing()
        if node.host_pages is not None:
            self._store(node)

    def write_backup(self, node: RadixNode, *, reserved_by: RequestId | None = None) -> int:
        """See `HiRadixCache.write_backup`; may be what a request has reserved."""
        ticket = None if self._controller.is_off else self._tree.begin_write(node)
        if ticket is None:
            return 0
        is_reserved = reserved_by is not None and self._use_reserved(node, ticket, reserved_by)
        if not is_reserved and not self._queue(ticket):
            self._drop(ticket)
            return 0
        return ticket.num_pages

    def evict(self, num_pages: int) -> EvictOutcome:
        """See `HiRadixCache.evict`."""
        result = self._tree.evict(
            num_pages, write_back=self._on_eviction, admission=self._rule.admission
        )
        self._counters["refused_write_pages"] += result.num_refused
        num_freed = self._returns.device(result.freed)
        for ticket in result.writes:
            if not self._queue(ticket):
                # The memory was asked for and the host has no room: the bytes are dropped.
                num_freed += self._drop(ticket)
        self._controller.start_writing()
        self._counters["evicted_device_pages"] += num_freed
        return EvictOutcome(num_freed, self._tree.num_pending_evict_pages)

    def evict_host(self, num_pages: int, *, duplicates: Duplicates = Duplicates.FIRST) -> int:
        """See `HiRadixCache.evict_host` and `RadixTree.evict_host`."""
        pages = self._tree.evict_host(num_pages, duplicates=duplicates)
        num_freed = self._returns.host(pages)
        self._counters["evicted_host_pages"] += num_freed
        return num_freed

    def alloc_host(self, num_pages: int) -> IntArray | None:
        """Allocate host pages, evicting others once if need be; None when that is not enough."""
        num_missing = self._num_missing(num_pages)
        if num_missing:
            self.evict_host(num_missing)
        return self._controller.host_allocator.alloc(num_pages)

    def step(self) -> None:
        """Start writes that wait for an idle stream, and those that few free pages call for."""
        if self._on_eviction:
            low = self._controller.device_allocator.num_available < self._watermark_pages
            if not self._controller.writes or low:
                self._write_one_behind()
            if low and not self._controller.writes:
                self._write_ahead()
        self._controller.start_writing()

    def write_unstored(self) -> int:
        """Begin to bring to storage what it lacks, as far as the host has room.

        Returns how many pages of the tree storage lacks.
        """
        unstored = [node for node in self._tree.nodes() if not node.persisted]
        num_pages = sum(node.num_pages for node in unstored)
        # First, so that making room on the host cannot take what only the host has.
        for node in unstored:
            if node.host_pages is not None:
                self._persister.persist(node)
        for node in unstored:
            self.write_backup(node)
        self._controller.start_writing()
        return num_pages

    def finish(self, write: CacheOperation, *, good: bool) -> None:
        """Give the outcome of a write to the tree, and persist what has arrived."""
        if write.ticket is None:
            # It was reserved, and what was computed did not become a node of its own.
            self._counters["abandoned_write_pages"] += self._returns.host(write.host_pages)
            return
        self._end(write.ticket, write.host_pages, write.ticket.num_pages if good else 0)

    def reset(self) -> None:
        """Forget what was to be written: the tree was reset, or the policy is another one."""
        self._behind.clear()
        self._keep_history()

    def _keep_history(self) -> None:
        if self._policy is WritePolicy.ADAPTIVE:
            self._tree.keep_history()

    def _write_one_behind(self) -> None:
        """Queue the oldest node that still has to be written."""
        while self._behind:
            # A node that is gone has no device pages: nothing is queued for it.
            if self.write_backup(self._behind.popleft()):
                return

    def _write_ahead(self) -> None:
        """Queue writes of the next victims, until a watermark's worth could go at once.

        Copies of what the device has too do not make room for them: those are other victims', and
        victims would undo each other's writes for ever.
        """
        tickets = self._tree.begin_writes_ahead(
            self._watermark_pages, admission=self._rule.admission
        )
        for ticket in tickets:
            if not self._queue(ticket, Duplicates.STAY):
                self._end(ticket, _NONE, 0)

    def _use_reserved(self, node: RadixNode, ticket: Ticket, request_id: RequestId) -> bool:
        """Let the write that a request has reserved be that of `ticket`, if it can be."""
        top = self._tree.path(node, ticket.first_page)[0]
        assert top.parent is not None
        return self._controller.reservations.use(
            request_id,
            self._tree.ticket_device_pages(ticket),
            ticket=ticket,
            above=top.parent.write_ticket,
        )

    def _queue(self, ticket: Ticket, duplicates: Duplicates | None = None) -> bool:
        """Queue the write of `ticket`; False, and nothing has happened, without host pages.

        Neither is a write queued that has failed already, with one that was begun before it.
        """
        if self._tree.write_has_failed(ticket):
            return False
        pages = self._tree.ticket_device_pages(ticket)
        duplicates = duplicates or self._rule.duplicates
        self._make_room(len(pages), duplicates)
        write = self._controller.write(pages, ticket=ticket)
        if write is None and len(pages) <= self._controller.host_allocator.num_available:
            # Enough are free, but not of the ranks that own these pages.
            self.evict_host(len(pages), duplicates=duplicates)
            write = self._controller.write(pages, ticket=ticket)
        return write is not None

    def _make_room(self, num_pages: int, duplicates: Duplicates) -> None:
        """Evict host pages so that `num_pages` can be written, if that many can be at all."""
        num_missing = self._num_missing(num_pages)
        if num_missing:
            self.evict_host(num_missing, duplicates=duplicates)

    def _num_missing(self, num_pages: int) -> int:
        """Return how many host pages to evict for `num_pages`; 0 if those can never be had."""
        allocator = self._controller.host_allocator
        if num_pages > allocator.num_pages:
            return 0
        return max(0, num_pages - allocator.num_available)

    def _store(self, node: RadixNode) -> None:
        """Persist what the store takes; a policy that left something unwritten has seen to it."""
        if self._rule.admission is Admission.ALL:
            self._persister.offer(node)
        else:
            self._persister.persist(node)

    def _drop(self, ticket: Ticket) -> int:
        """End a write for which the host has no room; return the device pages that became free."""
        self._counters["unwritten_pages"] += ticket.num_pages
        return self._end(ticket, _NONE, 0)

    def _end(self, ticket: Ticket, host_pages: IntArray, num_good: int) -> int:
        commit = self._tree.commit_write(ticket, host_pages, num_good)
        self._returns.host(commit.untaken_host)
        if commit.node is not None:
            self._store(commit.node)
        self._returns.copy_ended(ticket)
        num_freed = self._returns.device(commit.freed_device)
        if not num_good or len(commit.untaken_host):
            num_freed += self._end_failed()
        return num_freed

    def _end_failed(self) -> int:
        """End the queued writes that failed with one above them: their pages may be queued anew."""
        writes, failed = self._controller.writes, self._tree.write_has_failed
        ended = [one for one in writes.queued if one.ticket is not None and failed(one.ticket)]
        writes.queued = [one for one in writes.queued if one not in ended]
        return sum(self._end(one.ticket, one.host_pages, 0) for one in ended if one.ticket)
