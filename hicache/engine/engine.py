"""The smallest real consumer of the cache: batching, chunked prefill, greedy decoding."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from hicache.clock import MonotonicClock
from hicache.engine.admission import Admission, BatchLimits
from hicache.engine.arrival_order import ArrivalOrder
from hicache.engine.cache_aware import CacheAwareOrder
from hicache.engine.passes import Passes
from hicache.engine.request import FinishReason
from hicache.engine.request_pages import RequestPages
from hicache.errors import CapacityError, ConfigError, TransferError

if TYPE_CHECKING:
    from collections import Counter, deque
    from collections.abc import Callable, Sequence

    from hicache.clock import Clock
    from hicache.engine.model import KVPool, Model
    from hicache.engine.passes import Draft
    from hicache.engine.request import Request, TokenChoice
    from hicache.hiradix_cache import HiRadixCache
    from hicache.pools import Allocator
    from hicache.transfer import LayerDoneCounter
    from hicache.types import IntArray, RequestId

__all__ = ["CacheHandle", "Engine"]

_DOZE_SECONDS = 0.0005


@dataclasses.dataclass(frozen=True)
class CacheHandle:
    """A cache and the counter through which batches name the loads they wait for."""

    cache: HiRadixCache
    counter: LayerDoneCounter


class Engine:
    """Serves requests from one thread; `step` runs one batch.

    Where a model is spread over ranks, each rank has an engine that is given the same calls in the
    same order. What an engine does next depends on these, on the tokens and on what its cache has
    agreed on with the others: never on the time or on what one rank alone can see. `step` raises
    `RanksLostError` when another rank has ended: the engine is to be started anew on all.

    Args:
        model: computes; reads and writes `pool`.
        pool: the device's KV.
        allocator: its free pages, shared with the cache; with a cache of several ranks, only those
            are used that every rank has.
        cache: None computes every token of every request.
        max_batch_requests: requests computed in one step.
        chunk_tokens: prompt tokens computed in one step, over all requests; longer prompts are
            computed in chunks, and each chunk is inserted into the tree.
        draft: guesses tokens, which are verified several at a time; the answers stay the same.
        cache_aware: whether requests whose KV is there go first, and those wait whose prompt
            others are fetching or computing; else they go in the order in which they came. The
            answers stay the same.
        clock: for times to first token.
        idle: called when every request waits, to let workers go on.

    Attributes:
        running: requests of the batch, in the order in which they were admitted.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        allocator: Allocator,
        *,
        cache: CacheHandle | None,
        max_batch_requests: int = 8,
        chunk_tokens: int = 512,
        draft: Draft | None = None,
        cache_aware: bool = True,
        clock: Clock | None = None,
        idle: Callable[[], None] | None = None,
    ) -> None:
        if chunk_tokens < 1 or max_batch_requests < 1:
            raise ConfigError("chunk_tokens and max_batch_requests must be at least 1")
        self._passes = Passes(model, pool, draft)
        self._handle = cache
        self._allocator = allocator if cache is None else cache.cache.controller.device_allocator
        self._chunk_tokens = chunk_tokens
        self._clock = clock or MonotonicClock()
        self._idle = idle or _doze
        self._pool = pool
        self._pages = RequestPages(self._allocator, self.cache, self._page_size)
        self._admission = Admission(
            self.cache,
            self._pages,
            page_size=self._page_size,
            order=(
                ArrivalOrder(self.cache)
                if self.cache is None or not cache_aware
                else CacheAwareOrder(self.cache, page_size=self._page_size)
            ),
            limits=BatchLimits(max_batch_requests, chunk_tokens),
        )
        self.running: list[Request] = []
        self._requests: dict[RequestId, Request] = {}

    @property
    def cache(self) -> HiRadixCache | None:
        """The cache, if there is one."""
        return None if self._handle is None else self._handle.cache

    @property
    def waiting(self) -> deque[Request]:
        """Requests that do not run yet, first those that have to start anew."""
        return self._admission.waiting

    @property
    def counters(self) -> Counter[str]:
        """Counts of admission by name, for people and tests; no number ever decreases.

        | name | counts |
        |---|---|
        | `delayed_hit_tokens` | see `Request` |
        | `passed_requests` | requests that stood before one that was admitted |
        | `steps_held_back` | steps in which a request could run and waited for what others bring |
        """
        return self._admission.counters

    @property
    def _page_size(self) -> int:
        return self._pool.geometry.page_size

    def submit(self, request: Request) -> None:
        """Queue a request; begins its prefetch from storage.

        Raises:
            ConfigError: it could never run (no token to compute or to generate, larger than the
                pool), or its id is in use.
        """
        most_tokens = request.num_prompt_tokens + request.max_new_tokens
        if request.num_prompt_tokens < 1 or request.max_new_tokens < 1:
            raise ConfigError("a request needs at least one prompt token and one new token")
        if self._pages.count_for(most_tokens) > self._allocator.num_pages:
            raise ConfigError(
                f"request {request.request_id!r} may need {most_tokens} tokens, the device pool "
                f"has {self._allocator.num_pages * self._page_size}; make the pool larger"
            )
        if request.request_id in self._requests:
            raise ConfigError(f"request id {request.request_id!r} is in use")
        request.submitted_at = self._clock.now()
        self._requests[request.request_id] = request
        self._admission.submit(request)

    def abort(self, request_id: RequestId) -> None:
        """End a request wherever it is; nothing of it is inserted. No effect when it has ended."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        request.finish_reason = FinishReason.ABORTED
        if request in self.running:
            self.running.remove(request)
        else:
            self._admission.remove(request)
        self._pages.release(request)
        if self.cache is not None:
            self.cache.release_aborted_request(request_id)

    def run(self, *requests: Request, max_idle_steps: int = 1_000_000) -> None:
        """Submit `requests` and step until nothing is left to do.

        Raises:
            CapacityError: no request could go on for `max_idle_steps` steps.
        """
        for request in requests:
            self.submit(request)
        idle_steps = 0
        while self.waiting or self.running:
            idle_steps = 0 if self.step() else idle_steps + 1
            if idle_steps > max_idle_steps:
                raise CapacityError("no request can go on; is the device pool too small?")

    def settle(self, timeout_seconds: float = 30.0) -> bool:
        """Step the cache alone until nothing is in flight; False after `timeout_seconds`.

        The time is counted in steps, so that all ranks take as many.
        """
        cache = self.cache
        for _ in range(int(timeout_seconds / _DOZE_SECONDS)):
            if cache is None or not cache.num_in_flight:
                break
            cache.check_hicache_events()
            self._idle()
        return cache is None or not cache.num_in_flight

    def step(self) -> list[Request]:
        """Take what the cache has finished, admit requests, compute one batch.

        Returns:
            The requests that were part of the batch; empty when every request waits.
        """
        if self.cache is not None:
            self.cache.check_hicache_events()
        self._admission.admit(self.running)
        batch = self._next_batch()
        if not batch:
            self._idle()
            return []
        self._reserve_writes(batch)
        began = self._clock.now()
        try:
            choices = self._passes.compute(batch)
        except TransferError:
            self._retract_failed_loads([request for request, _ in batch])
            return []
        finally:
            if self._handle is not None:
                self._handle.counter.set_consumer(())
        self._note_prefill(batch, self._clock.now() - began)
        self._take_results(batch, choices)
        return [request for request, _ in batch]

    # -- a batch -----------------------------------------------------------------------------

    def _next_batch(self) -> list[tuple[Request, int]]:
        """Choose requests and how many tokens of each to compute; name the loads they wait for."""
        budget = self._chunk_tokens
        batch: list[tuple[Request, int]] = []
        for request in list(self.running):
            if request not in self.running or not self._grow_or_retract(request):
                continue
            count = request.num_to_compute
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count:
                batch.append((request, count))
        # A request that was retracted for another one's pages is not in the batch any more.
        batch = [(request, count) for request, count in batch if request in self.running]
        if self._handle is not None:
            producers = {request.producer for request, _ in batch} - {-1}
            self._handle.counter.set_consumer(sorted(producers))
        return batch

    def _grow_or_retract(self, request: Request) -> bool:
        """Give `request` pages for its next tokens, from the youngest request if need be."""
        while not self._pages.grow(request, self._passes.num_guesses(request)):
            youngest = self.running[-1]
            if self.cache is not None and self.cache.tree.num_pending_evict_pages:
                return False
            self._retract(youngest)
            if youngest is request:
                return False
        return True

    def _note_prefill(self, batch: list[tuple[Request, int]], seconds: float) -> None:
        """Tell the cache what computing costs, where nothing but prompts was computed."""
        only_prompts = all(count > 1 and request.producer == -1 for request, count in batch)
        if self.cache is not None and only_prompts:
            num_tokens = sum(count for _, count in batch)
            before = sum(count * (one.num_computed + count / 2) for one, count in batch)
            self.cache.note_prefill(num_tokens, seconds, context_tokens=before / num_tokens)

    def _reserve_writes(self, batch: list[tuple[Request, int]]) -> None:
        """Let the pages of prompts be written while they are computed; they are inserted next."""
        for request, count in batch:
            if request.num_computed < request.num_prompt_tokens:
                self._pages.reserve_write(request, count)

    def _take_results(
        self, batch: list[tuple[Request, int]], choices: Sequence[Sequence[TokenChoice]]
    ) -> None:
        now = self._clock.now()
        for (request, count), follow in zip(batch, choices, strict=True):
            request.producer = -1
            in_prefill = request.num_computed < request.num_prompt_tokens
            request.num_computed += count
            if not request.num_to_compute:
                if not request.output_ids:
                    request.first_token_at = now
                # All but the last of them have been computed, too.
                request.num_computed += request.take(follow) - 1
            if request.finished:
                self._finish(request)
            elif in_prefill:
                self._pages.insert(request, chunked=True)

    # -- leaving the batch -----------------------------------------------------------------

    def _finish(self, request: Request) -> None:
        self._pages.insert(request, chunked=False)
        self.running.remove(request)
        del self._requests[request.request_id]
        self._pages.release(request)

    def _retract(self, request: Request) -> None:
        """Send a running request back to the queue's head; what it has computed is inserted."""
        if request.num_computed:
            self._pages.insert(request, chunked=True)
        self.running.remove(request)
        self._pages.release(request)
        self._admission.put_back(request)

    def _retract_failed_loads(self, batch: list[Request]) -> None:
        """Compute again what a failed load was to bring; its pages still belong to the load."""
        for request in batch:
            if self.cache is not None:
                self.cache.abandon_write(request.request_id)
            if request.producer != -1:
                request.num_failed_loads += 1
                self.running.remove(request)
                self._pages.release(request)
                self._admission.put_back(request)

    def owned_pages(self) -> list[IntArray]:
        """Return the device pages that requests own, for checks."""
        return [request.pages[request.num_tree_pages :] for request in self.running]


def _doze() -> None:
    time.sleep(_DOZE_SECONDS)
