"""A scheduler that uses the cache as an engine does, one small step at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hicache.errors import InvariantViolation, TransferError
from hicache.hiradix_cache import LoadStatus
from hicache.sim.coverage import Fault, Operation, State
from hicache.sim.forward_pass import Chunk, ForwardPass
from hicache.sim.options import GEOMETRY
from hicache.sim.progress import Progress
from hicache.sim.request import NO_PRODUCER, Request, no_pages
from hicache.sim.stamps import POISON_ROW

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from hicache.radix import RadixKey
    from hicache.sim.coverage import Coverage
    from hicache.sim.system import System
    from hicache.types import IntArray

__all__ = ["Scheduler"]

_ALL_STAGES = 10**6


class Scheduler:
    """Requests over one cache. Each method is one step and says in words what it did.

    Args:
        system: whose cache is used.
        coverage: is told of aborts and resets.
        everywhere: takes whether something went well on this rank and returns whether it did on
            every rank of the engine, for what an engine tells its ranks by itself.

    Attributes:
        requests: that have not ended.
        progress: how far everything is that moves.
        forward: the pass that is under way; it can stand still while all else goes on.
    """

    def __init__(
        self,
        system: System,
        coverage: Coverage,
        *,
        everywhere: Callable[[bool], bool] = bool,
    ) -> None:
        self._system = system
        self._cache = system.cache
        self._coverage = coverage
        self._everywhere = everywhere
        self.requests: list[Request] = []
        self.progress = Progress(system, self.requests)
        self.forward: ForwardPass | None = None

    def request(self, request_id: str) -> Request:
        """Return the request of that name."""
        return next(one for one in self.requests if one.request_id == request_id)

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
        """Requests that can take part in a pass."""
        return [request for request in self.requests if request.can_compute]

    @property
    def moving(self) -> list[Request]:
        """Requests of which a prefetch or a load is in flight here, or a write reserved."""
        return [request for request in self.requests if self.progress.of(request)]

    @property
    def reserving(self) -> list[Request]:
        """Requests with a reserved write."""
        return [request for request in self.requests if request.reserved_id is not None]

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
            self._system.allocator.free(own)
        self._release(request)
        return f"{request.request_id} finds no room"

    def start_loads(self) -> str:
        """Start the queued loads, and tell the device pool who waits for them."""
        mover = self._system.mover
        producer = self._cache.ready_to_load_host_cache()
        for request in self.running:
            if request.load_first_page is not None and request.producer == NO_PRODUCER:
                request.producer = producer
                request.load_id = mover.newest_load if producer != NO_PRODUCER else None
        self._name_consumers()
        return "loads start" if producer != NO_PRODUCER else "no slot is free"

    def compute(self, request: Request, num_pages: int) -> str:
        """Compute the next pages of a request in a pass of its own; the last ones end it."""
        self.begin_pass([(request, num_pages)])
        return self.go_on(_ALL_STAGES)

    def begin_pass(
        self,
        wanted: Sequence[tuple[Request, int]],
        *,
        reserves: bool = True,
        silent_layers: Collection[int] = (),
    ) -> str:
        """Begin a pass over the next pages of some requests; no other one may be under way.

        Args:
            wanted: requests that can take part, each with how many pages at most.
            reserves: whether the writes of the pages are reserved.
            silent_layers: that end without anybody being told.
        """
        assert self.forward is None
        chunks = []
        for request, num_pages in wanted:
            first = request.num_computed_pages
            last = min(first + num_pages, request.num_pages)
            chunks.append(Chunk(request, first, last))
            if reserves:
                self._reserve(request, last)
        self.forward = ForwardPass(self._system, chunks, silent_layers=silent_layers)
        return f"{len(self.reserving)} of {len(chunks)} reserve a write"

    def go_on(self, num_stages: int) -> str:
        """Go on with the pass: compute a layer, or behind the last insert what one request has."""
        told = []
        for _ in range(num_stages):
            if self.forward is None:
                break
            told.append(self._next_stage(self.forward))
        return "; ".join(told)

    def fail_pass(self) -> str:
        """Break the pass off; who waits for a load does without it from now on."""
        forward, self.forward = self.forward, None
        assert forward is not None
        for chunk in forward.chunks:
            request = chunk.request
            self._abandon_write(request)
            # Whatever was computed, nobody goes on with it.
            self._system.device_bytes.poison(chunk.pages)
            if request.load_first_page is not None:
                request.computes = True
                self._release(request)
        names = ", ".join(chunk.request.request_id for chunk in forward.chunks)
        return f"the pass of {names} fails"

    def retract(self, request: Request) -> str:
        """Send a running request back to wait; what it has computed is inserted."""
        if request.load_first_page is None:
            self._insert(request, chunked=True)
        else:
            self._abandon_write(request)
        self._release(request)
        return f"{request.request_id} waits again"

    def abort(self, request: Request) -> str:
        """End a request wherever it is."""
        for operation, state in self.progress.met_by_abort(request):
            self._coverage.note(operation, state, Fault.ABORT)
        self.requests.remove(request)
        self._release(request)
        self._cache.release_aborted_request(request.request_id)
        request.reserved_id = None
        return f"{request.request_id} ends"

    def reset(self, leaving: Collection[str]) -> str:
        """Empty the cache; the requests with these ids end and the others begin anew."""
        for operation, state in self.progress.of_all():
            self._coverage.note(operation, state, Fault.RESET)
        for request in list(self.requests):
            self._release(request)
            if request.request_id in leaving:
                self.requests.remove(request)
                self._cache.release_aborted_request(request.request_id)
        self._cache.reset()
        self.forget_reservations()
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

    def go_on_alone(self) -> None:
        """Note that a rank was lost: no write is reserved, and nobody can rely on a load.

        One that has gone well here may have failed on the rank that is gone.
        """
        self.forget_reservations()
        for request in self.running:
            if request.load_first_page is not None:
                self._release(request)

    def forget_reservations(self) -> None:
        """Note that the cache has given up all reserved writes."""
        for request in self.requests:
            request.reserved_id = None

    def own_pages(self) -> list[IntArray]:
        """Return the device pages that requests own."""
        return [request.pages[request.num_tree_pages :] for request in self.running]

    def known_pages(self) -> tuple[list[int], list[int]]:
        """Return the device pages that requests use and the row of what each has to hold.

        Without those of the pass, which have both: see `ForwardPass.known_pages`.
        """
        pages: list[int] = []
        rows: list[int] = []
        for request in self.running:
            stamps = self._system.stamps.rows(request.key)
            first, computed = request.load_first_page, request.num_computed_pages
            readable = computed if first is None else first
            pages += request.pages[:readable].tolist()
            rows += stamps[:readable]
            touched = computed if self.forward is None else self.forward.end_of(request)
            untouched = request.pages[max(touched, computed) :].tolist()
            pages += untouched
            rows += [POISON_ROW] * len(untouched)
        return pages, rows

    def _load(self, request: Request, mem_quota: int | None) -> bool:
        """Queue the load of what only the host has; False when that has to wait."""
        cache = self._cache
        # What made room may have taken host pages of the match.
        found = cache.match_prefix(request.key)
        if found.match.num_device_pages < request.num_tree_pages:
            raise InvariantViolation([f"a locked prefix of {request.request_id} became shorter"])
        if request.computes:
            return True
        load = cache.init_load_back(found, mem_quota=mem_quota, num_tokens=len(request.key))
        if load.status is LoadStatus.QUEUED:
            cache.inc_lock_ref(load.node)
            assert request.node is not None
            cache.dec_lock_ref(request.node)
            request.node = load.node
            request.load_first_page = len(request.pages)
            request.pages = np.concatenate([request.pages, load.device_pages])
            request.num_tree_pages = request.num_computed_pages = len(request.pages)
        return load.status is not LoadStatus.BUSY

    def _next_stage(self, forward: ForwardPass) -> str:
        if not forward.computed:
            arrived = self._everywhere(_compute_layer(forward))
            self._name_consumers()
            if not arrived:
                return self.fail_pass()
            forward.end_loads()
            return f"layer {forward.num_layers_done - 1} is computed"
        request, _, last = forward.chunks[0]
        forward.leave(request)
        if not forward.chunks:
            self.forward = None
        request.num_computed_pages = last
        ends = last == request.num_pages
        self._insert(request, chunked=not ends)
        if ends:
            self.requests.remove(request)
            self._release(request)
        return f"{request.request_id} has computed {last} pages"

    def _reserve(self, request: Request, last_page: int) -> None:
        cache, mover = self._cache, self._system.mover
        pages = request.pages[request.num_tree_pages : last_page]
        if cache.reserve_write(request.request_id, pages):
            request.reserved_id = mover.newest_reservation
        elif len(pages) and self._system.writes_by_layer:
            self._coverage.note(Operation.RESERVED, State.START, Fault.NO_MEMORY)

    def _abandon_write(self, request: Request) -> None:
        reserved = self.progress.of_reservation(request)
        if reserved is not None:
            self._coverage.note(*reserved, Fault.GIVE_UP)
        self._cache.abandon_write(request.request_id)
        request.reserved_id = None

    def _insert(self, request: Request, *, chunked: bool) -> None:
        """Give the tree what is computed, and let the page table point at the tree's pages."""
        cache, pages, mover = self._cache, request.pages, self._system.mover
        key = request.key.prefix(request.num_computed_pages * GEOMETRY.page_size)
        reserved, mover.newest_finish = self.progress.of_reservation(request), True
        result = cache.insert(key, pages, request_id=request.request_id, chunked=chunked)
        if reserved is not None and not mover.newest_finish:
            is_written = result.node.write_ticket is not None
            self._coverage.note(*reserved, Fault.OTHER_PAGES if is_written else Fault.GIVE_UP)
        request.reserved_id = None
        first, present = request.num_tree_pages, result.already_present_pages
        if present > first:
            self._system.allocator.free(pages[first:present])
            pages[first:present] = result.present_pages[first:]
        if result.end_page > first:
            cache.inc_lock_ref(result.node)
            assert request.node is not None
            cache.dec_lock_ref(request.node)
            request.node, request.num_tree_pages = result.node, result.end_page

    def _alloc(self, num_pages: int) -> IntArray | None:
        """Allocate device pages of a request's own, after an eviction if need be."""
        allocator = self._system.allocator
        if allocator.num_available < num_pages:
            self._cache.evict(num_pages - allocator.num_available)
        return allocator.alloc(num_pages)

    def _release(self, request: Request) -> None:
        """Take a request's own pages and its lock from it, if it has any."""
        if request.node is None:
            return
        if self.forward is not None:
            self.forward.leave(request)
            if not self.forward.chunks:
                self.forward = None
        self._system.allocator.free(request.pages[request.num_tree_pages :])
        self._cache.dec_lock_ref(request.node)
        request.node, request.pages = None, no_pages()
        request.num_tree_pages = request.num_computed_pages = 0
        request.load_first_page, request.producer = None, NO_PRODUCER
        self._name_consumers()

    def _name_consumers(self) -> None:
        """Keep the slots of loads that somebody still waits for."""
        producers = {request.producer for request in self.running} - {NO_PRODUCER}
        self._system.counter.set_consumer(sorted(producers))


def _compute_layer(forward: ForwardPass) -> bool:
    """Compute the next layer; False when a load that it needs has failed."""
    try:
        forward.compute_layer()
    except TransferError:
        return False
    return True
