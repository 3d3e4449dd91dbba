"""The store of one rank as the moving side sees it: backend, workers, work in progress."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from hicache.config import RankPlacement
from hicache.controller.call_size import pages_per_call, pages_per_query
from hicache.controller.lone_call import LoneCall
from hicache.controller.records import (
    PagesResult,
    PersistJob,
    Phase,
    QueryJob,
    QueryResult,
    StorageReport,
)
from hicache.controller.shards import stores_pages
from hicache.controller.storage_work import StorageContext, create_work
from hicache.controller.store_opening import StoreOpener
from hicache.controller.store_report import report_on
from hicache.controller.workers import ThreadExecutor
from hicache.errors import HiCacheError, StorageError, StorageTimeout
from hicache.storage import Piece
from hicache.storage.instrumented import InstrumentedStorage
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.clock import Clock
    from hicache.config import StorageConfig
    from hicache.controller.records import StorageJob, StorageResult
    from hicache.controller.storage_work import StorageWork
    from hicache.controller.store_opening import WrapBackend
    from hicache.controller.workers import Executor
    from hicache.pools import CpLayout, HostKVPool
    from hicache.storage import Page, StorageBackendFactory
    from hicache.types import IntArray, OperationId

__all__ = ["StorageTier", "thread_executor"]

_GRACE = 1.5
"""A call is overdue this much later than the deadline that its backend was given."""

_UNDO_SECONDS = 5.0
"""For closing a store that nobody has used yet."""


def thread_executor(config: StorageConfig, clock: Clock) -> Executor:
    """Return the executor that storage work runs on outside of simulations."""
    return ThreadExecutor(
        num_workers=config.num_workers,
        clock=clock,
        call_timeout_seconds=config.call_timeout_seconds * _GRACE,
    )


class StorageTier:
    """Opens and closes the store, and runs storage jobs against it.

    One thread calls; results come from the workers through a queue. A backend that hangs while it
    is opened, cleared or closed keeps that thread for a bounded time.

    Of ranks that hold the same bytes (latent attention on tensor-parallel ranks, or more ranks than
    heads) only the first stores them. The others say at once that all pages of a persist are
    present. That is right because the ranks agree on the minimum of what each has: "all" takes
    nothing away from what the first one has really stored, and nobody goes on before it has ended.

    Args:
        host_pools: the memory that pages are moved from and to; one page of storage is the page
            with the same id in each, one after the other.
        factory: finds backends by name.
        clock: for deadlines.
        create_executor: what the work runs on; replaced in simulations.
        placement: of this rank; by default it is alone.
        cp_host_layout: which host pages of jobs this rank has, of context-parallel ranks that share
            them, and where; by default it has all. Every rank stores and reads those that it has,
            under names without a rank in them: each must be able to read what any has stored.
        eviction_policy: of the cache, for backends that have one too.
        wrap_backend: puts around a backend what time or chance plays a part in, such as
            `resilient_storage`; by default nothing. Instruments are outside of it in any case.
    """

    def __init__(
        self,
        *,
        host_pools: Sequence[HostKVPool],
        factory: StorageBackendFactory,
        clock: Clock,
        placement: RankPlacement | None = None,
        cp_host_layout: CpLayout | None = None,
        eviction_policy: str | None = None,
        create_executor: Callable[[StorageConfig, Clock], Executor] = thread_executor,
        wrap_backend: WrapBackend | None = None,
    ) -> None:
        self._host_pools = tuple(host_pools)
        placement = placement or RankPlacement()
        geometries = [pool.geometry for pool in host_pools]
        self._page_bytes = sum(geometry.page_bytes for geometry in geometries)
        self._stores_pages = stores_pages(geometries, placement)
        self._cp_host_layout = cp_host_layout
        self._clock = clock
        self._create_executor = create_executor
        self._opener = StoreOpener(
            host_pools=self._host_pools,
            factory=factory,
            clock=clock,
            placement=placement,
            cp_host_layout=cp_host_layout,
            eviction_policy=eviction_policy,
            wrap_backend=wrap_backend,
        )
        # Appended to by workers, taken from by the owner; a deque's ends are thread-safe.
        self._results: deque[StorageResult] = deque()
        self._works: dict[OperationId, StorageWork] = {}
        self._backend: InstrumentedStorage | None = None
        self._executor: Executor | None = None
        self._context: StorageContext | None = None
        self._open_timeout_seconds = 0.0
        # Under way, or not asked for its answer yet.
        self._clearing: LoneCall[int] | None = None
        self._closing: LoneCall[None] | None = None
        # Calls that nobody waits for, which may still touch host memory.
        self._left_behind: list[LoneCall[Any]] = []

    @property
    def num_abandoned_calls(self) -> int:
        """Calls past their deadline that have not returned."""
        return 0 if self._executor is None else self._executor.num_abandoned

    @property
    def backend(self) -> InstrumentedStorage | None:
        """The backend with all that stands around it, for its counters and its health.

        `hicache.storage.wrapper.storage_layers` takes it apart.
        """
        return self._backend

    def attach(self, config: StorageConfig) -> int:
        """Open the store; blocks for `config.open_timeout_seconds` at most.

        Returns:
            How many pages one call to it moves at most.

        Raises:
            HiCacheError: a store is attached already.
            ConfigError: the backend cannot be had, or pages of this rank have no name or cannot be
                split as they have to.
            StorageTimeout: it does not open in time; should it do so later, it is closed.

        After an error nothing has changed.
        """
        if self._backend is not None:
            raise HiCacheError("a storage backend is attached already; detach it first")
        opening = LoneCall(partial(self._opener.open, config), "hicache-storage-open")
        if not opening.returned(config.open_timeout_seconds):
            opening.give_up(InstrumentedStorage.close)
            self._left_behind.append(opening)
            raise StorageTimeout(
                f"storage backend {config.backend!r} has not opened within "
                f"{config.open_timeout_seconds:g} s; see what it waits for, or set "
                "storage.open_timeout_seconds higher"
            )
        backend = self._backend = opening.answer()
        try:
            self._executor = self._create_executor(config, self._clock)
        except BaseException:
            self.discard()
            raise
        self._open_timeout_seconds = config.open_timeout_seconds
        self._context = StorageContext(
            backend=backend,
            clock=self._clock,
            call_timeout_seconds=config.call_timeout_seconds,
            query_pages=pages_per_query(config),
            batch_pages=pages_per_call(
                self._page_bytes, config, call_bytes=backend.capabilities.call_bytes
            ),
            page_bytes=self._page_bytes,
            pages_of=self._pages_of,
            emit=self._results.append,
        )
        return self._context.batch_pages

    def detach(self, timeout_seconds: float) -> bool:
        """Stop the workers and close the store; True when none is attached.

        False when a call still runs, that to close it too: the store stays open for it, no new work
        is taken, and a later detach tries again. What closing raises is raised, and the store is
        detached.
        """
        end = self._clock.now() + timeout_seconds
        if self._executor is not None and not self._executor.close(timeout_seconds):
            return False
        if self._backend is None:
            return True
        self._context = None
        if self._clearing is not None:
            if not self._clearing.returned(max(0.0, end - self._clock.now())):
                return False
            self._clearing = None
        if self._closing is None:
            self._closing = LoneCall(self._backend.close, "hicache-storage-close")
        closing = self._closing
        if not closing.returned(max(0.0, end - self._clock.now())):
            return False
        self._backend = self._executor = self._closing = None
        closing.answer()
        return True

    def discard(self) -> None:
        """Close a store that was given no work; should that hang, it is left to itself."""
        if not self.detach(_UNDO_SECONDS):
            if self._closing is not None:
                self._closing.give_up()
                self._left_behind.append(self._closing)
            self._backend = self._executor = self._context = self._closing = None

    def close(self, timeout_seconds: float) -> bool:
        """Detach for good; False also while a call runs that was left to itself."""
        end = self._clock.now() + timeout_seconds
        if not self.detach(timeout_seconds):
            return False
        left = self._left_behind
        self._left_behind = [
            call for call in left if not call.returned(max(0.0, end - self._clock.now()))
        ]
        return not self._left_behind

    def clear(self) -> int:
        """Remove every page of this namespace; blocks as long as opening the store may.

        Raises:
            StorageError: no store is attached, or what the backend raises.
            StorageTimeout: the backend is not done yet. Until it is, work ends at once, with
                nothing; a later call waits for the same end.
        """
        if self._backend is None:
            raise StorageError("no storage backend is attached; attach one before clearing it")
        if self._clearing is None:
            self._clearing = LoneCall(self._backend.clear, "hicache-storage-clear")
        clearing = self._clearing
        if not clearing.returned(self._open_timeout_seconds):
            clearing.give_up()
            raise StorageTimeout(
                f"the storage backend is not cleared within {self._open_timeout_seconds:g} s; it "
                "goes on; clear again to wait for it"
            )
        self._clearing = None
        return clearing.answer()

    def report(self) -> StorageReport:
        """Return how the store does, from what was noted of its calls: asks no backend."""
        if self._backend is None:
            return StorageReport()
        return report_on(self._backend, num_abandoned_calls=self.num_abandoned_calls)

    def submit(self, job: StorageJob) -> None:
        """Queue a job; without a store it ends at once, with nothing."""
        if self._context is None or self._executor is None:
            self._results.append(_nothing(job, "no storage backend is attached"))
            return
        if self._is_being_cleared():
            self._results.append(_nothing(job, "the storage backend is being cleared"))
            return
        if isinstance(job, PersistJob) and not self._stores_pages:
            self._results.append(_stored_by_another_rank(job))
            return
        work = create_work(self._context, job)
        self._works[job.operation_id] = work
        self._executor.submit(work)

    def end(self, operation_id: OperationId) -> None:
        """Let the work of an operation end before its next call."""
        work = self._works.get(operation_id)
        if work is not None:
            work.stop()

    def poll(self) -> list[StorageResult]:
        """Return what the workers have reported since the last call."""
        if self._executor is not None and self._works:
            self._executor.poll()
        results: list[StorageResult] = []
        while self._results:
            result = self._results.popleft()
            if result.phase is Phase.ENDED:
                self._works.pop(result.operation_id, None)
            results.append(result)
        return results

    def _pages_of(self, host_pages: IntArray) -> Sequence[Page | None]:
        """Return where pages lie; None for those of another rank."""
        layout = self._cp_host_layout
        if layout is None:
            return self._places_of(host_pages)
        owned = layout.owned_by_this_rank(host_pages)
        places = iter(self._places_of(layout.physical_pages(host_pages[owned])))
        return [next(places) if one else None for one in owned.tolist()]

    def _places_of(self, host_pages: IntArray) -> list[Page]:
        if not len(host_pages):
            return []
        # A worker holds the interpreter's lock here: no Python runs for each page.
        pieces = [
            map(Piece, addresses.tolist(), repeat(num_bytes))
            for pool in self._host_pools
            for addresses, num_bytes in pool.pieces_by_page(host_pages)
        ]
        return list(zip(*pieces, strict=True))

    def _is_being_cleared(self) -> bool:
        """Whether a clear that was not waited for to its end still runs."""
        if self._clearing is not None and self._clearing.returned():
            self._clearing = None
        return self._clearing is not None


def _stored_by_another_rank(job: PersistJob) -> PagesResult:
    num_pages = len(job.hashes)
    return PagesResult(
        operation_id=job.operation_id,
        generation=job.generation,
        phase=Phase.ENDED,
        num_good=num_pages,
        outcomes=((PageOutcome.PRESENT, num_pages),),
        num_bytes=0,
        seconds=0.0,
    )


def _nothing(job: StorageJob, reason: str) -> StorageResult:
    if isinstance(job, QueryJob):
        return QueryResult(
            operation_id=job.operation_id,
            generation=job.generation,
            phase=Phase.ENDED,
            num_pages=0,
            seconds=0.0,
            error=reason,
        )
    return PagesResult(
        operation_id=job.operation_id,
        generation=job.generation,
        phase=Phase.ENDED,
        num_good=0,
        outcomes=(),
        num_bytes=0,
        seconds=0.0,
        error=reason,
    )
