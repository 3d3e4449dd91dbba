"""A scheduler that uses the cache as an engine does, one small step at a time."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from hicache.errors import InvariantViolation, TransferError
from hicache.hiradix_cache import LoadStatus
from hicache.sim.coverage import Fault, Operation, State
from hicache.sim.stamps import POISON_ROW
from hicache.sim.system import GEOMETRY

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from hicache.radix import RadixKey, RadixNode
    from hicache.sim.coverage import Coverage
    from hicache.sim.system import System
    from hicache.types import IntArray, OperationId

__all__ = ["Request", "Scheduler"]

_NO_PRODUCER = -1


def _no_pages() -> IntArray:
    return np.empty(0, dtype=np.int64)


@dataclasses.dataclass(eq=False)
class Request:
    """A request and the pages that it uses.

    Attributes:
        node: locked for it; None while it waits.
        pages: its page table: pages of the tree, then its own.
        num_tree_pages: of `pages`, how many are the tree's, or a load's.
        num_computed_pages: of `pages`, how many hold, or are getting, their bytes.
        load_first_page: where its load begins; None when it waits for none.
        producer: of its load; -1 while that is queued.
        load_id: job of its load.
        query_id: of its prefetch.
        computes: whether it does without loads, because one has failed.
    """

    request_id: str
    key: RadixKey
    node: RadixNode | None = None
    pages: IntArray = dataclasses.field(default_factory=_no_pages)
    num_tree_pages: int = 0
    num_computed_pages: int = 0
    load_first_page: int | None = None
    producer: int = _NO_PRODUCER
    load_id: OperationId | None = None
    query_id: OperationId | None = None
    computes: bool = False

    @property
    def num_pages(self) -> int:
        """Full pages of the whole key."""
        return len(self.key) // GEOMETRY.page_size

    @property
    def can_compute(self) -> bool:
        """Whether it runs and no load of it is still to be started."""
        is_started = self.load_first_page is None or self.producer != _NO_PRODUCER
        return self.node is not None and is_started


class Scheduler:
    """Requests over one cache. Each method is one step and says in words what it did.

    Args:
        system: whose cache is used.
        coverage: is told of aborts and resets.

    Attributes:
        requests: that have not ended.
    """

    def __init__(self, system: System, coverage: Coverage) -> None:
        self._system = system
        self._cache = system.cache
        self._coverage = coverage
        self.requests: list[Request] = []

    @property
    def waiting(self) -> list[Request]:
        """Requests without pages."""
        return [request for request in self.requests if request.node is None]

    @property
    def ready(self) -> list[Request]:
        """Waiting requests of which nothing is in flight."""
        moving = self.moving
        return [request for request in self.waiting if request not in moving]

    @property
    def running(self) -> list[Request]:
        """Requests with a lock."""
        return [request for request in self.requests if request.node is not None]

    @property
    def computable(self) -> list[Request]:
        """Requests that can compute."""
        return [request for request in self.requests if request.can_compute]

    @property
    def moving(self) -> list[Request]:
        """Requests of which a prefetch or a load is in flight."""
        return [request for request in self.requests if self._movements_of(request)]

    def submit(self, request_id: str, key: RadixKey, *, prefetch: bool) -> str:
        """Take a new request, and begin its prefetch."""
        self._system.stamps.rows(key)
        request = Request(request_id, key)
        self.requests.append(request)
        if prefetch:
            mover = self._system.mover
            mover.newest_query = None
            self._cache.prefetch_from_storage(request_id, key)
            request.query_id = mover.newest_query
        return f"{request_id} has {request.num_pages} pages"

    def admit(self, request: Request, *, mem_quota: int | None) -> str:
        """Give a waiting request its prefix and pages for the rest, or let it wait on."""
        cache, mover = self._cache, self._system.mover
        mover.newest_query = request.query_id
        may_run = cache.check_prefetch_progress(request.request_id)
        request.query_id = mover.newest_query
        if not may_run:
            return f"{request.request_id} waits for its prefetch"
        loaded = cache.pop_prefetch_loaded_tokens(request.request_id)
        if not 0 <= loaded <= len(request.key):
            raise InvariantViolation([f"{loaded} tokens were prefetched for {request.key!r}"])
        found = cache.match_prefix(request.key)
        cache.inc_lock_ref(found.last_device_node)
        request.node, request.pages = found.last_device_node, found.device_pages
        request.num_tree_pages = request.num_computed_pages = len(request.pages)
        own = self._alloc(request.num_pages - found.last_host_node.end)
        if own is not None and self._load(request, mem_quota):
            more = self._alloc(request.num_pages - len(request.pages) - len(own))
            if more is not None:
                request.pages = np.concatenate([request.pages, own, more])
                return f"{request.request_id} runs with {request.num_tree_pages} pages"
        if own is not None:
            self._system.device_allocator.free(own)
        self._release(request)
        return f"{request.request_id} finds no room"

    def start_loads(self) -> str:
        """Start the queued loads, and tell the device pool who waits for them."""
        mover = self._system.mover
        producer = self._cache.ready_to_load_host_cache()
        for request in self.running:
            if request.load_first_page is not None and request.producer == _NO_PRODUCER:
                request.producer = producer
                request.load_id = mover.newest_load if producer != _NO_PRODUCER else None
        self._name_consumers()
        return f"loads of slot {producer} start"

    def compute(self, request: Request, num_pages: int) -> str:
        """Compute the next pages of a request; the last ones end it."""
        if not self._await_load(request):
            return f"{request.request_id} computes what a load did not bring"
        first = request.num_computed_pages
        last = min(first + num_pages, request.num_pages)
        rows = self._system.stamps.rows(request.key)
        self._system.device_bytes.put(request.pages[first:last], rows[first:last])
        request.num_computed_pages = last
        ends = last == request.num_pages
        self._insert(request, chunked=not ends)
        if ends:
            self.requests.remove(request)
            self._release(request)
        return f"{request.request_id} has computed {last} pages"

    def retract(self, request: Request) -> str:
        """Send a running request back to wait; what it has computed is inserted."""
        if request.load_first_page is None:
            self._insert(request, chunked=True)
        self._release(request)
        return f"{request.request_id} waits again"

    def abort(self, request: Request) -> str:
        """End a request wherever it is."""
        for operation, state in self.movements_met_by_abort(request):
            self._coverage.note(operation, state, Fault.ABORT)
        self.requests.remove(request)
        self._release(request)
        self._cache.release_aborted_request(request.request_id)
        return f"{request.request_id} ends"

    def reset(self, rng: random.Random) -> str:
        """Empty the cache; some requests end and the others begin anew."""
        for operation, state in self.movements():
            self._coverage.note(operation, state, Fault.RESET)
        for request in list(self.requests):
            self._release(request)
            if rng.random() < 0.5:
                self.requests.remove(request)
                self._cache.release_aborted_request(request.request_id)
        self._cache.reset()
        return f"{len(self.requests)} requests begin anew"

    def back_up(self, key: RadixKey) -> str:
        """Queue a write that the write policy has not asked for, or not yet."""
        node = self._cache.match_prefix(key).last_device_node
        num_pages = self._cache.write_backup(node) if node.parent is not None else 0
        return f"{num_pages} pages to be written"

    def evict(self, num_pages: int) -> str:
        """Make room on the device."""
        return str(self._cache.evict(num_pages))

    def evict_host(self, num_pages: int) -> str:
        """Make room on the host."""
        return f"{self._cache.evict_host(num_pages)} host pages became free"

    def movements(self) -> Iterator[tuple[Operation, State]]:
        """Return how far everything in flight is."""
        yield from self._system.mover.states()
        controller = self._cache.controller
        yield from [(Operation.WRITE, State.QUEUED)] * len(controller.writes.queued)
        yield from [(Operation.LOAD, State.QUEUED)] * len(controller.loads.queued)

    def movements_met_by_abort(self, request: Request) -> list[tuple[Operation, State]]:
        """Return how far is what an abort of `request` meets: also every write and persist."""
        others = (Operation.WRITE, Operation.PERSIST)
        return self._movements_of(request) + [one for one in self.movements() if one[0] in others]

    def own_pages(self) -> list[IntArray]:
        """Return the device pages that requests own."""
        return [request.pages[request.num_tree_pages :] for request in self.running]

    def known_pages(self) -> tuple[list[int], list[int]]:
        """Return the device pages that requests use and the row of what each has to hold."""
        pages: list[int] = []
        rows: list[int] = []
        for request in self.running:
            stamps = self._system.stamps.rows(request.key)
            first, computed = request.load_first_page, request.num_computed_pages
            readable = computed if first is None else first
            pages += request.pages[:readable].tolist()
            rows += stamps[:readable]
            untouched = request.pages[max(computed, request.num_tree_pages) :].tolist()
            pages += untouched
            rows += [POISON_ROW] * len(untouched)
        return pages, rows

    def _movements_of(self, request: Request) -> list[tuple[Operation, State]]:
        """Return how far a request's prefetch and load are, if they are in flight."""
        mover = self._system.mover
        found = [mover.state(request.query_id), mover.state(request.load_id)]
        if request.load_first_page is not None and request.producer == _NO_PRODUCER:
            found.append((Operation.LOAD, State.QUEUED))
        return [one for one in found if one is not None]

    def _load(self, request: Request, mem_quota: int | None) -> bool:
        """Queue the load of what only the host has; False when that has to wait."""
        cache = self._cache
        # What made room may have taken host pages of the match.
        found = cache.match_prefix(request.key)
        if found.match.num_device_pages < request.num_tree_pages:
            raise InvariantViolation([f"a locked prefix of {request.request_id} became shorter"])
        if request.computes:
            return True
        load = cache.init_load_back(found, mem_quota=mem_quota)
        if load.status is LoadStatus.QUEUED:
            cache.inc_lock_ref(load.node)
            assert request.node is not None
            cache.dec_lock_ref(request.node)
            request.node = load.node
            request.load_first_page = len(request.pages)
            request.pages = np.concatenate([request.pages, load.device_pages])
            request.num_tree_pages = request.num_computed_pages = len(request.pages)
        return load.status is not LoadStatus.BUSY

    def _await_load(self, request: Request) -> bool:
        """Wait for a request's load layer by layer, as a model does; False when it has failed."""
        first = request.load_first_page
        if first is None:
            return True
        system = self._system
        pages = request.pages[first : request.num_tree_pages]
        rows = system.stamps.rows(request.key)[first : request.num_tree_pages]
        system.counter.set_consumer(request.producer)
        wrong: list[str] = []
        try:
            for layer in range(GEOMETRY.num_layers):
                system.pool.get_kv_buffer(layer)
                if system.device_bytes.wrong(pages, rows, layer=layer):
                    wrong.append(f"layer {layer} of a load had not arrived when it was waited for")
        except TransferError:
            # Whatever layers did arrive, nobody goes on with them.
            request.computes = True
            self._release(request)
            return False
        if wrong:
            raise InvariantViolation(wrong)
        request.load_first_page, request.producer = None, _NO_PRODUCER
        self._name_consumers()
        return True

    def _insert(self, request: Request, *, chunked: bool) -> None:
        """Give the tree what is computed, and let the page table point at the tree's pages."""
        cache, pages = self._cache, request.pages
        key = request.key.prefix(request.num_computed_pages * GEOMETRY.page_size)
        result = cache.insert(key, pages, request_id=request.request_id, chunked=chunked)
        first, present = request.num_tree_pages, result.already_present_pages
        if present > first:
            self._system.device_allocator.free(pages[first:present])
            pages[first:present] = result.present_pages[first:]
        if result.end_page > first:
            cache.inc_lock_ref(result.node)
            assert request.node is not None
            cache.dec_lock_ref(request.node)
            request.node, request.num_tree_pages = result.node, result.end_page

    def _alloc(self, num_pages: int) -> IntArray | None:
        """Allocate device pages of a request's own, after an eviction if need be."""
        allocator = self._system.device_allocator
        if allocator.num_available < num_pages:
            self._cache.evict(num_pages - allocator.num_available)
        return allocator.alloc(num_pages)

    def _release(self, request: Request) -> None:
        """Take a request's own pages and its lock from it, if it has any."""
        if request.node is None:
            return
        self._system.device_allocator.free(request.pages[request.num_tree_pages :])
        self._cache.dec_lock_ref(request.node)
        request.node, request.pages = None, _no_pages()
        request.num_tree_pages = request.num_computed_pages = 0
        request.load_first_page, request.producer = None, _NO_PRODUCER
        self._name_consumers()

    def _name_consumers(self) -> None:
        """Keep the slots of loads that somebody still waits for."""
        producers = {request.producer for request in self.running} - {_NO_PRODUCER}
        self._system.counter.set_consumer(sorted(producers))
