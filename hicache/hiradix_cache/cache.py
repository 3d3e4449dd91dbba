"""What a scheduler talks to: one tree over three tiers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from hicache.clock import MonotonicClock
from hicache.hiradix_cache.closing import close_cache
from hicache.hiradix_cache.flushing import flush_to_storage
from hicache.hiradix_cache.followed_tree import FollowedTree
from hicache.hiradix_cache.inserting import Inserter
from hicache.hiradix_cache.parts import CacheParts
from hicache.hiradix_cache.pins import Pins
from hicache.hiradix_cache.prompt_tokens import PromptTokens
from hicache.hiradix_cache.publishing import Publisher
from hicache.hiradix_cache.results import PrefixMatch
from hicache.hiradix_cache.store_calls import StoreCalls
from hicache.pools import SlotTable
from hicache.radix import RadixTree, policies

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.clock import Clock
    from hicache.config import HiCacheConfig, StorageConfig
    from hicache.controller import HiCacheController, StoragePolicies, StorageStatus
    from hicache.hiradix_cache.results import EvictOutcome, LoadBack, PinnedPrefix
    from hicache.pools import Allocator
    from hicache.radix import EvictionPolicy, InsertResult, RadixKey, RadixNode
    from hicache.types import IntArray, RequestId

__all__ = ["HiRadixCache"]


class HiRadixCache:
    """The tree decides, the controller executes; this joins them for a scheduler.

    Belongs to the thread that first uses it, which is checked unless Python runs with `-O`. No call
    but `close` and the storage calls blocks. Pages are ids of the device allocator; free pages and
    a request's own pages are the scheduler's, pages of the tree are the tree's.

    With several ranks, each makes the same calls in the same order, and takes device pages from
    `device_allocator` and gives them back there. When a rank is lost, the others go on with their
    device pages: nothing is written, loaded, persisted or prefetched any more, evicted pages are
    dropped, and requests that wait for storage need not wait.

    Args:
        controller: carries the movements out; closed with the cache.
        create_policy: makes an order of eviction; None for that of the configuration.
        clock: for prefetches under `timeout`.
        sleep: called with seconds by `flush` between its steps.

    Attributes:
        counters: events by name, for people and tests; no number ever decreases.
        prompt_tokens: hits by tier, counted by the scheduler.
    """

    def __init__(
        self,
        controller: HiCacheController,
        *,
        create_policy: Callable[[], EvictionPolicy] | None = None,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sleep = sleep
        self.controller = controller
        tree_class = RadixTree if controller.meeting.alone else FollowedTree
        create_queue = create_policy or policies.create_policy(self.config.eviction_policy)
        self.tree = tree_class(self.config.page_size, create_policy=create_queue)
        self.counters: Counter[str] = Counter()
        self.prompt_tokens = PromptTokens()
        self._slot_table = SlotTable(controller.num_device_page_ids, self.config.page_size)
        self._parts = parts = CacheParts.create(self.tree, controller, self.counters)
        self._writer, self._loader, self._prefetcher = parts.writer, parts.loader, parts.prefetcher
        self._publisher = Publisher(parts, clock=clock or MonotonicClock())
        self._store_calls = StoreCalls(parts, self._publisher)
        self._pins = Pins(parts)
        self._inserter = Inserter(parts, pins=self._pins, publisher=self._publisher)
        self._owner = threading.get_ident()

    @property
    def config(self) -> HiCacheConfig:
        """Policies and bounds in force; attaching a store may change policies."""
        return self.controller.config

    @property
    def device_allocator(self) -> Allocator:
        """Where a scheduler takes device pages and gives them back.

        With one rank what the cache was built on. With several it has as many free pages on each of
        them at any moment, so that what a scheduler decides by it is decided alike.
        """
        return self.controller.device_allocator

    @property
    def ranks_lost(self) -> bool:
        """Whether a rank was lost, so that L2 and L3 are off for good."""
        return bool(self.counters["ranks_lost"])

    # -- look-up and insertion ---------------------------------------------------------------

    def match_prefix(self, key: RadixKey) -> PrefixMatch:
        """Return the longest cached prefix of `key`: device pages, then host pages.

        To leave a token to compute, ask for `key.prefix(len(key) - 1)`. Splits a node where the
        match ends inside it.
        """
        self._check_thread()
        found = self.tree.match(key)
        if self._publisher.is_off:
            # What only the host has cannot be loaded any more.
            node = found.last_device_node
            found = found._replace(last_host_node=node, num_host_pages=0, loading=False)
        return PrefixMatch(self.tree.split_at(found), self._slot_table)

    def insert(
        self,
        key: RadixKey,
        device_pages: IntArray,
        *,
        request_id: RequestId,
        chunked: bool,
        priority: int = 0,
    ) -> InsertResult:
        """Give the tree a request's device pages for the full pages of `key`.

        See `InsertResult` for who owns which page afterwards. An unfinished request locks the
        result's node, then unlocks its old one. Queues the writes that the write policy asks for.

        Args:
            key: the request's tokens so far.
            device_pages: its page table, at least one page per full page of `key`.
            request_id: counts at most once per node, however many chunks.
            chunked: whether the request goes on.
            priority: larger stays longer under the policy `priority`; a run has its users' largest.
        """
        self._check_thread()
        return self._inserter.insert(key, device_pages, request_id, priority, chunked=chunked)

    def pin_prefix(self, key: RadixKey, *, seconds: float) -> PinnedPrefix:
        """Let the full pages of `key` stay in memory for a while, now or when they are inserted.

        They are written to the host and go last from device and host, but do go when nothing else
        is left. Storage is not told. Pinning the same again may lengthen the time.

        Raises:
            CapacityError: `pinned_share` of the device pool, or 1024 prefixes, are pinned.
            ConfigError: there is no full page, or the time is not one to wait for.
        """
        self._check_thread()
        return self._pins.pin(key, seconds=seconds)

    def unpin_prefix(self, pin_id: str) -> bool:
        """End a pin, see `PinnedPrefix`; False when there is none."""
        self._check_thread()
        return self._pins.unpin(pin_id)

    def pinned_prefixes(self) -> tuple[PinnedPrefix, ...]:
        """Return what is pinned; no use of it, and changes nothing."""
        self._check_thread()
        return self._pins.listed()

    def inc_lock_ref(self, node: RadixNode) -> None:
        """Protect the device pages of `node` and its ancestors for a request."""
        self._check_thread()
        self.tree.lock(node)

    def dec_lock_ref(self, node: RadixNode) -> None:
        """Give back one lock; an `OwnershipError` when there is none."""
        self._check_thread()
        self.tree.unlock(node)

    # -- L1 -> L2 ----------------------------------------------------------------------------

    def reserve_write(self, request_id: RequestId, device_pages: IntArray) -> bool:
        """Begin to write pages that the next forward pass completes, each layer when it ends.

        For a request that `insert` follows for right after the pass: there the write becomes that
        of the new node, or is given up when the node has other pages. `abandon_write` gives it up
        when no insertion follows. Only with `write_through` and `write_by_layer`, and while the
        host has room; else the pages are written after the insertion. No layer may end between the
        reservation and the pass.

        Args:
            request_id: one reservation at a time.
            device_pages: the request's own pages that the pass completes, in order.

        Returns:
            Whether layers are copied as they end; either answer needs nothing more of the caller.
        """
        self._check_thread()
        return self._writer.reserve(request_id, device_pages)

    def abandon_write(self, request_id: RequestId) -> None:
        """Give up a `reserve_write` that no insertion follows; no effect without one."""
        self._check_thread()
        self.controller.reservations.abandon(request_id)

    def write_backup(self, node: RadixNode) -> int:
        """Queue a write of `node` and of its ancestors that lack a host copy.

        Evicts host pages and retries once when the host pool is full. `start_writing` of the
        controller starts what is queued; `check_hicache_events` does so too.

        Returns the pages queued; 0 when nothing is to be written or the host has no room.
        """
        return self._writer.write_backup(node)

    def evict(self, num_pages: int) -> EvictOutcome:
        """Free device pages, leaves in the order of `eviction_policy`; never waits.

        Pages that are written first are free when that has ended: who has too few asks again.
        """
        self._check_thread()
        return self._writer.evict(num_pages)

    def evict_host(self, num_pages: int) -> int:
        """Free host pages, copies of device pages first; return how many were freed."""
        return self._writer.evict_host(num_pages)

    # -- L2 -> L1 ----------------------------------------------------------------------------

    def init_load_back(
        self,
        found: PrefixMatch,
        *,
        mem_quota: int | None = None,
        num_tokens: int | None = None,
        chunk_tokens: int | None = None,
    ) -> LoadBack:
        """Queue the load of the host pages of a match that was just made: all of them or none.

        With `load_cost_estimate`, of as many leading ones as are not computed sooner. Evicts device
        pages and retries once when the device pool is full. The request locks the returned node,
        and its layers wait for the producer that `ready_to_load_host_cache` gives.

        Args:
            found: the newest result of `match_prefix` for the request.
            mem_quota: device tokens that the load may take at most.
            num_tokens: of the request, which tells what is computed meanwhile; None loads all.
            chunk_tokens: of it that a forward pass computes at most; None for all.
        """
        self._check_thread()
        return self._loader.begin(found, mem_quota, num_tokens, chunk_tokens)

    def ready_to_load_host_cache(self) -> int:
        """Start the queued loads; return the producer index that the batch waits on, or -1."""
        self._check_thread()
        return self.controller.start_loading()

    # -- L3 ----------------------------------------------------------------------------------

    def prefetch_from_storage(self, request_id: RequestId, key: RadixKey) -> bool:
        """Begin to bring the pages of `key` that are in no memory from storage to the host.

        Storage is asked once per call: what another instance is still writing can be found by a
        later call. Until the request is admitted (`pop_prefetch_loaded_tokens`) or given up
        (`release_aborted_request`), what was brought for it counts as needed: prefetches of
        requests that `check_prefetch_progress` has not asked about do not push it out.

        Returns whether a prefetch is under way for the request; when not, `counters` say why.
        """
        self._check_thread()
        return self._prefetcher.begin(request_id, key)

    def check_prefetch_progress(self, request_id: RequestId) -> bool:
        """Whether the request need not wait for its prefetch any longer.

        True when there is none. Under `best_effort` the first question ends the prefetch, under
        `adaptive` the first one that finds it not worth waiting for; which takes effect in the next
        `check_hicache_events`: until then the answer is False.
        """
        return self._prefetcher.check(request_id)

    def prefetch_reach(self, request_id: RequestId) -> int:
        """Return up to which token a request's prefetch that has not ended is to bring its key.

        All that was asked for until storage has said what it has. 0 when there is none.
        """
        return self._prefetcher.reach(request_id)

    def pop_prefetch_loaded_tokens(self, request_id: RequestId) -> int:
        """Return, once, how many tokens a request's prefetch has put on the host."""
        return self._prefetcher.pop_loaded_tokens(request_id)

    def note_prefill(self, num_tokens: int, seconds: float, *, context_tokens: float = 0.0) -> None:
        """See `CostModel.note_prefill`: reads and loads are compared with it."""
        self.controller.costs.note_prefill(num_tokens, seconds, context_tokens=context_tokens)

    def release_aborted_request(self, request_id: RequestId) -> None:
        """Forget a request that will not be inserted any more; its prefetch ends."""
        self._inserter.forget(request_id)
        self.controller.reservations.abandon(request_id)
        self._prefetcher.abort(request_id)

    @property
    def storage_status(self) -> StorageStatus:
        """What there is to know about the store."""
        self._check_thread()
        return self.controller.storage_status

    def attach_storage_backend(
        self, storage: StorageConfig, *, policies: StoragePolicies | None = None
    ) -> None:
        """See `HiCacheController.attach_storage_backend`; a store that is new is filled anew."""
        self._check_thread()
        self._store_calls.attach(storage, policies)

    def detach_storage_backend(self, timeout_seconds: float = 10.0) -> None:
        """See `HiCacheController.detach_storage_backend`."""
        self._check_thread()
        self._store_calls.detach(timeout_seconds)

    def clear_storage_backend(self) -> int:
        """See `HiCacheController.clear_storage_backend`; forgets what storage held."""
        self._check_thread()
        return self._store_calls.clear()

    # -- progress and life cycle -------------------------------------------------------------

    def check_hicache_events(self) -> None:
        """Publish what has ended; to be called exactly once per scheduler step.

        Waits for nothing but, with several ranks, the slowest of them. When one does not come in
        time, `counters["ranks_lost"]` becomes 1 and L2 and L3 are off from then on.

        Raises:
            RanksDivergedError: the ranks are not equal any more; on all of them, and again in every
                later step. Stop the engine.
        """
        self._check_thread()
        self._publisher.publish()
        if self._pins:
            self._pins.step()
        self._writer.step()
        self._parts.persister.step()

    @property
    def num_in_flight(self) -> int:
        """Operations that have not ended."""
        return self.controller.num_in_flight

    @property
    def evictable_size(self) -> int:
        """Device tokens of the tree that no lock protects."""
        return self.tree.evictable_size

    @property
    def protected_size(self) -> int:
        """Device tokens of the tree that are locked."""
        return self.tree.protected_size

    def reset(self) -> None:
        """Forget all of L1 and L2, and take new work at once; L3 keeps what it has, and pins stay.

        Pages that copies in flight still use stay owned by them until they end.

        Raises:
            HiCacheError: requests hold locks; finish or abort them first.
        """
        self._check_thread()
        self._parts.returns.take_reset(self.tree.reset())
        self._parts.persister.forget()
        for part in (self._inserter, self._pins, self._writer, self._prefetcher):
            part.reset()
        self.controller.reset()
        self._publisher.drop_queued()

    def flush(self, timeout_seconds: float = 10.0) -> int:
        """Bring all that storage lacks to it; blocks, and takes its own steps.

        For an orderly end: `flush`, then `close`. Policies that write late leave what was never
        evicted without a copy, and `close` does not wait for copies that have not begun. Prefixes
        go from the root to the leaves, so that what is stored in time can be hit.

        Ends when copies have brought nothing more. The time is counted in steps, so that all ranks
        take as many. Returns the pages that storage still lacks, at most; 0 without a store.
        """
        self._check_thread()
        with self._parts.persister.storing_all():
            return flush_to_storage(self, self._writer.write_unstored, self._sleep, timeout_seconds)

    def close(self, timeout_seconds: float = 10.0) -> bool:
        """Stop everything in time, also when a backend call hangs.

        What was not written yet is lost; see `flush`. Returns False when a call still runs: the
        memory that it uses stays mapped, and a later `close` looks again.
        """
        return close_cache(self._parts, self._publisher, timeout_seconds)

    def held_pages(self) -> tuple[list[IntArray], list[IntArray]]:
        """Return device and host pages that outlive a reset for copies in flight, for checks."""
        return self._parts.returns.held_pages()

    def _check_thread(self) -> None:
        assert threading.get_ident() == self._owner, "HiRadixCache belongs to one thread"
