"""From the queue into the batch: a request gets what the cache has, and pages for the rest."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from hicache.hiradix_cache import LoadStatus
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from hicache.engine.arrival_order import ArrivalOrder
    from hicache.engine.request import Request
    from hicache.engine.request_pages import RequestPages
    from hicache.hiradix_cache import HiRadixCache, PrefixMatch

__all__ = ["Admission", "BatchLimits"]

_UNSTARTED = -2
"""Producer of a request whose load is queued but not started."""


@dataclasses.dataclass(frozen=True)
class BatchLimits:
    """How much one step computes at most: requests, and tokens of their prompts."""

    num_requests: int
    chunk_tokens: int


class _Prepared(Enum):
    """What came of giving a request what it needs."""

    READY = auto()
    FETCHING = auto()
    """It waits for its prefetch."""
    NO_ROOM = auto()
    """There are too few pages, or a load that it needs cannot begin yet."""


class Admission:
    """The queue of an engine, and what a request needs before it can run.

    Args:
        cache: None computes every token of every request.
        pages: page tables of the requests.
        page_size: tokens in a page.
        order: who goes first, and who is held back.
        limits: of a batch.

    Attributes:
        waiting: requests in the order in which they came; those that have to start anew are first.
        counters: see `Engine`.
    """

    def __init__(
        self,
        cache: HiRadixCache | None,
        pages: RequestPages,
        *,
        page_size: int,
        order: ArrivalOrder,
        limits: BatchLimits,
    ) -> None:
        self._cache = cache
        self._pages = pages
        self._page_size = page_size
        self._limits = limits
        self._order = order
        self.waiting: deque[Request] = deque()
        self.counters = Counter(delayed_hit_tokens=0, passed_requests=0, steps_held_back=0)

    def submit(self, request: Request) -> None:
        """Put a new request at the queue's end; begins its prefetch, unless one brings the same."""
        self._order.submit(request, self.waiting)
        self.waiting.append(request)

    def put_back(self, request: Request) -> None:
        """Put a request that ran, and owns nothing any more, at the queue's head."""
        self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Take a request that is given up out of the queue."""
        self.waiting.remove(request)

    def admit(self, running: list[Request]) -> None:
        """Move requests from the queue to the end of `running`, and start their loads together.

        Only as many as this step's batch has room for: who has a load is in the batch that waits
        for it. Nobody is asked who could not run yet, because under `best_effort` asking ends the
        prefetch.
        """
        budget = self._limits.chunk_tokens - sum(_prefill_tokens(request) for request in running)
        num_slots = self._limits.num_requests - len(running)
        self._order.begin_step()
        has_room = num_slots > 0 and budget > 0
        for request in self._order.candidates(self.waiting) if has_room else ():
            if num_slots < 1 or budget < 1:
                break
            if self._order.is_held_back(request, running):
                self.counters["steps_held_back"] += 1
                continue
            prepared = self._prepare(request)
            if prepared is _Prepared.READY:
                self._begin(request, running)
                budget -= _prefill_tokens(request)
            elif prepared is _Prepared.NO_ROOM and self._order.is_due(request):
                break
            num_slots -= prepared is _Prepared.READY or self._best_effort
        if self._cache is None:
            return
        producer = self._cache.ready_to_load_host_cache()
        for request in running:
            if request.producer == _UNSTARTED:
                request.producer = producer

    def _begin(self, request: Request, running: list[Request]) -> None:
        """Let a prepared request run."""
        self.counters["passed_requests"] += self.waiting.index(request)
        self._order.note_admitted(request, self.waiting)
        self.waiting.remove(request)
        running.append(request)

    @property
    def _best_effort(self) -> bool:
        """Whether a prefetch ends as soon as its request could run; it can change at run time."""
        cache = self._cache
        return cache is not None and cache.config.prefetch_policy is PrefetchPolicy.BEST_EFFORT

    def _prepare(self, request: Request) -> _Prepared:
        """Give `request` its prefix and pages for the rest, or nothing when it has to wait."""
        cache = self._cache
        if cache is None:
            return _Prepared.READY if self._pages.grow(request) else _Prepared.NO_ROOM
        if not cache.check_prefetch_progress(request.request_id):
            return _Prepared.FETCHING
        key = request.matchable_key()
        found = cache.match_prefix(key)
        cache.inc_lock_ref(found.last_device_node)
        request.node, request.pages = found.last_device_node, found.device_pages
        request.num_tree_pages = len(request.pages)
        # Its own pages come first: a load that is queued cannot be taken back. Making room can take
        # host pages of the match, so it is asked for again.
        rest = self._pages.count_for(request.num_tokens) - found.last_host_node.end
        ready = self._pages.make_room(rest)
        if ready:
            found = cache.match_prefix(key)
            ready = self._load_host_part(request, found)
        request.num_computed = request.num_tree_pages * self._page_size
        if ready and self._pages.grow(request):
            self._count_hits(request, found)
            return _Prepared.READY
        self._pages.release(request)
        return _Prepared.NO_ROOM

    def _load_host_part(self, request: Request, found: PrefixMatch) -> bool:
        """Queue the load of the part that only the host has; False when that has to wait."""
        cache = self._cache
        assert cache is not None
        if request.num_failed_loads:
            return True
        request.num_host_pages = found.last_host_node.end
        load = cache.init_load_back(
            found, num_tokens=request.num_tokens, chunk_tokens=self._limits.chunk_tokens
        )
        if load.status is LoadStatus.QUEUED:
            cache.inc_lock_ref(load.node)
            cache.dec_lock_ref(found.last_device_node)
            request.node = load.node
            request.pages = np.concatenate([request.pages, load.device_pages])
            request.num_tree_pages = len(request.pages)
            request.producer = _UNSTARTED
        if load.status is LoadStatus.NO_MEMORY and cache.tree.num_pending_evict_pages:
            return False
        return load.status is not LoadStatus.BUSY

    def _count_hits(self, request: Request, found: PrefixMatch) -> None:
        """Note where the prompt's tokens were found, the first time it is admitted."""
        assert self._cache is not None
        from_storage = self._cache.pop_prefetch_loaded_tokens(request.request_id)
        if request.output_ids:
            return
        loaded = request.num_computed - found.device_hit_tokens
        request.device_hit_tokens = found.device_hit_tokens
        request.storage_hit_tokens = min(from_storage, loaded)
        request.host_hit_tokens = loaded - request.storage_hit_tokens
        delayed = self._count_delayed(request, from_storage)
        self._cache.prompt_tokens.count(
            request.num_prompt_tokens,
            device=request.device_hit_tokens,
            host=request.host_hit_tokens,
            storage=request.storage_hit_tokens,
            delayed=delayed,
        )

    def _count_delayed(self, request: Request, from_storage: int) -> int:
        """Note how many of the found tokens others have brought since it was submitted.

        Args:
            request: just given its prefix.
            from_storage: tokens that its own prefetch has brought.
        """
        standing, found = request.standing, request.num_computed
        newly = min(standing.num_awaited, found - from_storage) - standing.num_known
        delayed = max(0, newly)
        standing.num_known = found
        # After a failed load, some of what was found before has to be computed.
        request.delayed_hit_tokens = min(found, request.delayed_hit_tokens + delayed)
        self.counters["delayed_hit_tokens"] += delayed
        return delayed


def _prefill_tokens(request: Request) -> int:
    """What a request takes of a step's chunk: decoding takes nothing."""
    return request.num_to_compute if request.num_to_compute > 1 else 0
