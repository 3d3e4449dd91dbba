"""What comes from the host to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache.hiradix_cache.results import LoadBack, LoadStatus, PrefixMatch

if TYPE_CHECKING:
    from collections import Counter

    from hicache.controller import CacheOperation, HiCacheController
    from hicache.hiradix_cache.returning import PageReturns
    from hicache.hiradix_cache.writing import HostWriter
    from hicache.radix import RadixTree, Ticket
    from hicache.types import IntArray

__all__ = ["HostLoader"]

_NONE: IntArray = np.empty(0, dtype=np.int64)


class HostLoader:
    """Queues loads, makes room for them on the device, and publishes what has arrived."""

    def __init__(
        self,
        tree: RadixTree,
        controller: HiCacheController,
        *,
        writer: HostWriter,
        returns: PageReturns,
        counters: Counter[str],
    ) -> None:
        self._tree = tree
        self._controller = controller
        self._writer = writer
        self._returns = returns
        self._counters = counters

    def begin(
        self,
        found: PrefixMatch,
        mem_quota: int | None,
        num_tokens: int | None,
        chunk_tokens: int | None,
    ) -> LoadBack:
        """See `HiRadixCache.init_load_back`."""
        anchor = found.last_device_node
        num_pages = self._num_worth_loading(found, num_tokens, chunk_tokens)
        loaded_tokens = num_pages * self._controller.config.page_size
        too_few = num_pages < self._least_pages
        # An older match may name a node that an eviction has taken since.
        too_few |= not found.last_host_node.evicted or self._controller.is_off
        if too_few or (mem_quota is not None and loaded_tokens > mem_quota):
            return LoadBack(LoadStatus.NOTHING, _NONE, anchor)
        if found.loading or not self._controller.can_start_loading:
            return LoadBack(LoadStatus.BUSY, _NONE, anchor)
        last_page = found.match.num_device_pages + num_pages
        node = self._tree.node_ending_at(found.last_host_node, last_page)
        ticket = self._tree.begin_load(node)
        if ticket is None:
            return LoadBack(LoadStatus.BUSY, _NONE, anchor)
        operation = self._queue(ticket)
        if operation is None:
            self._tree.commit_load(ticket, _NONE, 0)
            self._counters["load_back_no_memory"] += 1
            return LoadBack(LoadStatus.NO_MEMORY, _NONE, anchor)
        self._counters["load_back_partial"] += num_pages < found.match.num_host_pages
        # A copy: what the caller does with its page table must not change the load.
        return LoadBack(LoadStatus.QUEUED, operation.device_pages.copy(), node)

    def finish(self, load: CacheOperation, *, good: bool) -> None:
        """Give the outcome of a load to the tree."""
        assert load.ticket is not None
        num_good = load.ticket.num_pages if good else 0
        self._returns.device(self._tree.commit_load(load.ticket, load.device_pages, num_good))
        self._returns.copy_ended(load.ticket)

    @property
    def _least_pages(self) -> int:
        """Pages of the shortest load."""
        config = self._controller.config
        return max(1, -(-config.load_back_threshold_tokens // config.page_size))

    def _num_worth_loading(
        self, found: PrefixMatch, num_tokens: int | None, chunk_tokens: int | None
    ) -> int:
        """Return how many leading host pages to load rather than to compute."""
        num_pages, controller = found.match.num_host_pages, self._controller
        if num_tokens is None or not controller.config.load_cost_estimate:
            return num_pages
        num_worth = controller.costs.leading_pages_to_load(
            num_pages,
            first_token=found.device_hit_tokens,
            num_tokens=num_tokens,
            chunk_tokens=chunk_tokens,
            num_pages_ahead=controller.num_load_pages,
            least_pages=self._least_pages,
        )
        self._counters["load_back_not_worth"] += num_worth < self._least_pages <= num_pages
        return num_worth

    def _queue(self, ticket: Ticket) -> CacheOperation | None:
        pages = self._tree.ticket_host_pages(ticket)
        operation = self._controller.load(pages, ticket=ticket)
        if operation is None:
            missing = len(pages) - self._controller.device_allocator.num_available
            # Enough may be free, but not of the ranks that own these pages.
            self._writer.evict(missing if missing > 0 else len(pages))
            operation = self._controller.load(pages, ticket=ticket)
        return operation
