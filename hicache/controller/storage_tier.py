"""The store of one rank as the moving side sees it: backend, workers, work in progress."""

from __future__ import annotations

import dataclasses
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING

from hicache.config import RankPlacement
from hicache.controller.records import (
    PagesResult,
    PersistJob,
    Phase,
    QueryJob,
    QueryResult,
    StorageReport,
)
from hicache.controller.shards import is_replicated, stored_shards, stores_pages
from hicache.controller.storage_work import StorageContext, create_work
from hicache.controller.workers import ThreadExecutor
from hicache.errors import HiCacheError, StorageError
from hicache.storage import HiCacheStorageConfig, Piece
from hicache.storage.circuit_breaker import CircuitBreakerStorage
from hicache.storage.instrumented import InstrumentedStorage
from hicache.storage.retrying import RetryingStorage
from hicache.storage.split_heads import SplitHeadsStorage
from hicache.storage.wrapper import storage_layers
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.clock import Clock
    from hicache.config import StorageConfig
    from hicache.controller.records import StorageJob, StorageResult
    from hicache.controller.storage_work import StorageWork
    from hicache.controller.workers import Executor
    from hicache.pools import CpLayout, HostKVPool
    from hicache.storage import HiCacheStorage, Page, StorageBackendFactory
    from hicache.types import IntArray, OperationId

__all__ = ["StorageTier", "resilient_storage", "thread_executor"]

_GRACE = 1.5
"""A call is overdue this much later than the deadline that its backend was given."""


def thread_executor(config: StorageConfig, clock: Clock) -> Executor:
    """Return the executor that storage work runs on outside of simulations."""
    return ThreadExecutor(
        num_workers=config.num_workers,
        clock=clock,
        call_timeout_seconds=config.call_timeout_seconds * _GRACE,
    )


def resilient_storage(
    backend: HiCacheStorage, config: StorageConfig, clock: Clock
) -> HiCacheStorage:
    """Return a backend with what stands around it outside of simulations.

    Failed pages are tried again, and a backend that fails all the same is left alone for a while:
    the breaker is outside, so that it counts what retries could not mend.
    """
    if config.retry_attempts:
        backend = RetryingStorage(backend, max_attempts=config.retry_attempts, clock=clock)
    if config.breaker_failures:
        backend = CircuitBreakerStorage(
            backend,
            max_failures=config.breaker_failures,
            cooldown_seconds=config.breaker_cooldown_seconds,
            clock=clock,
        )
    return backend


class StorageTier:
    """Opens and closes the store, and runs storage jobs against it.

    One thread calls; results come from the workers through a queue.

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
        wrap_backend: Callable[[HiCacheStorage, StorageConfig, Clock], HiCacheStorage]
        | None = None,
    ) -> None:
        self._host_pools = tuple(host_pools)
        self._geometries = [pool.geometry for pool in host_pools]
        self._page_bytes = sum(geometry.page_bytes for geometry in self._geometries)
        self._placement = placement or RankPlacement()
        self._stores_pages = stores_pages(self._geometries, self._placement)
        self._cp_host_layout = cp_host_layout
        self._eviction_policy = eviction_policy
        self._factory = factory
        self._clock = clock
        self._create_executor = create_executor
        self._wrap_backend = wrap_backend
        # Appended to by workers, taken from by the owner; a deque's ends are thread-safe.
        self._results: deque[StorageResult] = deque()
        self._works: dict[OperationId, StorageWork] = {}
        self._backend: InstrumentedStorage | None = None
        self._executor: Executor | None = None
        self._context: StorageContext | None = None

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

    def attach(self, config: StorageConfig) -> None:
        """Open the store.

        Raises:
            HiCacheError: a store is attached already.
            ConfigError: the backend cannot be had, or pages of this rank have no name or cannot be
                split as they have to; nothing has changed.
        """
        if self._backend is not None:
            raise HiCacheError("a storage backend is attached already; detach it first")
        bare = self._open(config)
        wrapped = self._wrap_backend(bare, config, self._clock) if self._wrap_backend else bare
        backend = InstrumentedStorage(wrapped, clock=self._clock)
        try:
            backend.register_memory(
                [region for pool in self._host_pools for region in pool.regions()]
            )
            self._executor = self._create_executor(config, self._clock)
        except BaseException:
            backend.close()
            raise
        self._backend = backend
        self._context = StorageContext(
            backend=backend,
            clock=self._clock,
            call_timeout_seconds=config.call_timeout_seconds,
            batch_pages=config.batch_pages,
            page_bytes=self._page_bytes,
            pages_of=self._pages_of,
            emit=self._results.append,
        )

    def detach(self, timeout_seconds: float) -> bool:
        """Stop the workers and close the store; True when none is attached.

        False when a call still runs: the store stays open for it, no new work is taken, and a later
        detach tries again.
        """
        if self._executor is not None and not self._executor.close(timeout_seconds):
            return False
        try:
            if self._backend is not None:
                self._backend.close()
        finally:
            self._backend = self._executor = self._context = None
        return True

    def clear(self) -> int:
        """Remove every page of this namespace; a `StorageError` when no store is attached."""
        if self._backend is None:
            raise StorageError("no storage backend is attached; attach one before clearing it")
        return self._backend.clear()

    def report(self) -> StorageReport:
        """Return how the store does, from what was noted of its calls: asks no backend."""
        if self._backend is None:
            return StorageReport()
        circuits = [
            one.states()
            for one in storage_layers(self._backend)
            if isinstance(one, CircuitBreakerStorage)
        ]
        return StorageReport(
            num_abandoned_calls=self.num_abandoned_calls,
            snapshot=self._backend.snapshot(),
            circuits=circuits[0] if circuits else {},
        )

    def submit(self, job: StorageJob) -> None:
        """Queue a job; without a store it ends at once, with nothing."""
        if self._context is None or self._executor is None:
            self._results.append(_nothing(job, "no storage backend is attached"))
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
        pools = self._host_pools
        return [
            tuple([Piece(*piece) for pool in pools for piece in pool.page_pieces(page)])
            for page in host_pages.tolist()
        ]

    def _open(self, config: StorageConfig) -> HiCacheStorage:
        """Return the backend, or one for each group of heads as one."""
        placement = self._placement
        if self._cp_host_layout is not None:
            # A page is whole on its owner, and the next time another rank may own it.
            placement = dataclasses.replace(placement, cp_rank=0, cp_size=1)
        shards = stored_shards(config, self._geometries, self._host_pools[0].layout, placement)
        configs = [
            HiCacheStorageConfig(
                namespace=shard.namespace,
                page_bytes=sum(shard.pool_bytes),
                extra_config=config.extra_config,
                clock=self._clock,
                placement=self._placement,
                is_mla_model=is_replicated(self._geometries),
                tp_lcm_size=config.tp_lcm_size,
                eviction_policy=self._eviction_policy,
            )
            for shard in shards
        ]
        with ExitStack() as undo:
            backends = []
            for one in configs:
                backends.append(self._factory.create_backend(config.backend, one))
                undo.callback(backends[-1].close)
            storage = backends[0]
            if len(backends) > 1:
                storage = SplitHeadsStorage(
                    backends,
                    config=dataclasses.replace(configs[0], page_bytes=self._page_bytes),
                    pool_bytes=[geometry.page_bytes for geometry in self._geometries],
                )
            undo.pop_all()
        return storage


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
