"""One rank put together from production parts, on simulated time, streams and workers."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hicache.clock import ManualClock
from hicache.controller import HiCacheController, LocalMover, PoolPair, StorageTier
from hicache.errors import StorageError
from hicache.hiradix_cache import HiRadixCache
from hicache.layout import KVGeometry, RowGeometry
from hicache.pools import (
    CpLayouts,
    CpPageAllocator,
    CpSharedKVLayout,
    DeviceKVPool,
    DeviceRowPool,
    PageAllocator,
    create_host_pool,
)
from hicache.pools.agreed_allocator import AgreedAllocator
from hicache.ranks import SingleRank
from hicache.sim.coverage import Fault, Operation, State
from hicache.sim.executor import CallPlan, SimulatedExecutor
from hicache.sim.faults import BreakableEngine, SharedAllocator, TightAllocator, WatchedStore
from hicache.sim.movement import WatchedMover
from hicache.sim.options import CALL_TIMEOUT_SECONDS, GEOMETRY
from hicache.sim.stamps import PoolBytes, Stamps
from hicache.sim.streams import NamedStreams
from hicache.storage import StorageBackendFactory
from hicache.storage.memory import MemoryStorage
from hicache.testing.faulty_storage import FaultyStorage, Gate, Verb
from hicache.transfer import LayerDoneCounter
from hicache.types import WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.layout import PageGeometry
    from hicache.pools import Allocator
    from hicache.radix import CopyKind
    from hicache.ranks import RankGroup
    from hicache.sim.coverage import Coverage
    from hicache.sim.options import SystemOptions
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig
    from hicache.types import IntArray

__all__ = ["System"]

_MAX_CALLS = 100
"""So many calls are more than a sound rank of this size ever needs at once."""

_GIVEN_UP_SECONDS = 1.5 * CALL_TIMEOUT_SECONDS


class System:
    """A `HiRadixCache` whose every movement waits to be told to go on.

    Belongs to the thread that makes it, as far as its cache does.

    Args:
        options: sizes and policies.
        coverage: is told what happens.
        ranks: with whom outcomes are agreed; by default nobody.
        number: among those. Says which shard of the KV it has, or which of the pages, where ranks
            share them.
        clock: its own.
        store: that it has together with others; by default one of its own.

    Attributes:
        tight_allocators: free lists from which pages can be withheld.
        pools: on the device: the model's KV, and what is kept beside it.
        stamps: what the bytes of each page have to be.
        device_bytes, host_bytes: what they are.
        breaking: directions in which the next copy of a layer raises, each once.
        is_closed: whether the memory of the host pools is gone.
    """

    def __init__(
        self,
        options: SystemOptions,
        coverage: Coverage,
        *,
        ranks: RankGroup | None = None,
        number: int = 0,
        clock: ManualClock | None = None,
        store: WatchedStore | None = None,
    ) -> None:
        ranks = ranks or SingleRank()
        self.options = options
        self.is_closed = self._is_built = False
        self.clock = clock or ManualClock()
        self.device = NamedStreams()
        self.store = store or WatchedStore(Stamps(options.geometries, options.layout, shard=number))
        self.stamps = self.store.stamps
        self._cp = _shared_pages(options, number, ranks.size) if options.shares_pages else None
        self._host_layout = None if self._cp is None else self._cp.host
        self._build_pools(options)
        self._build_allocators(options, coverage)
        self.breaking: set[CopyKind] = set()
        self.counter = LayerDoneCounter(
            self.device,
            num_layers=max(geometry.num_layers for geometry in options.geometries),
            num_slots=options.num_load_slots,
        )
        self.executor = SimulatedExecutor(
            num_workers=options.num_workers,
            max_abandoned=options.max_abandoned,
            clock=self.clock,
            call_timeout_seconds=_GIVEN_UP_SECONDS,
            coverage=coverage,
        )
        self.store.reach_points.append(self.executor.reach_point)
        self.factory = _OneBackend(self.store, self.executor)
        self.mover = self._new_mover(coverage)
        for source, pool in enumerate(self.pools):
            pool.register_layer_transfer_counter(self.counter)
            pool.register_layer_end_notifier(partial(self.mover.on_layer_end, source=source))
        controller = HiCacheController(
            options.config(),
            device_allocator=self.device_allocator,
            host_allocator=self.host_allocator,
            mover=self.mover,
            ranks=ranks,
        )
        _poison_freed(controller.device_allocator, self.device_bytes.poison)
        _poison_freed(controller.host_allocator, self._poison_host)
        self.cache = HiRadixCache(controller, clock=self.clock)
        self._is_built = True

    @property
    def allocator(self) -> Allocator:
        """Where requests get device pages of their own."""
        return self.cache.device_allocator

    @property
    def free_pages(self) -> tuple[IntArray, IntArray]:
        """Device pages and host pages that nobody owns, whether they can be had or not."""
        controller = self.cache.controller
        device = _free_pages(controller.device_allocator)
        return device, _free_pages(controller.host_allocator)

    @property
    def writes_by_layer(self) -> bool:
        """Whether writes are reserved while the host has room."""
        config = self.cache.config
        return config.write_by_layer and config.write_policy is WritePolicy.WRITE_THROUGH

    def await_layer(self, layer: int) -> None:
        """Read a layer of every pool that has it, as a model does, and wait for its loads.

        Raises:
            TransferError: a load of the layer failed.
        """
        for pool in self.pools:
            if layer >= pool.geometry.num_layers:
                continue
            if isinstance(pool, DeviceKVPool):
                pool.get_kv_buffer(layer)
            else:
                pool.get_row_buffer(layer)

    def end_layer(self, layer: int) -> None:
        """Say in every pool that has it that a pass has ended a layer."""
        for pool in self.pools:
            if layer < pool.geometry.num_layers:
                pool.end_layer(layer)

    def let_go(self) -> None:
        """End every fault that lasts, and let every call that is under way return."""
        self.device.stalled.clear()
        for allocator in self.tight_allocators:
            allocator.num_withheld = 0
        for call in list(self.executor.under_way):
            self.executor.resume(call)

    def run_all(self) -> None:
        """Let every copy and every call end that can, without further faults."""
        self.let_go()
        for stream in self.device.streams.values():
            while stream.run_one():
                pass
        for _ in range(_MAX_CALLS):
            if not self.executor.can_begin:
                break
            self.executor.begin(self.executor.queued[0], CallPlan())
        self.cache.check_hicache_events()

    def abandon(self) -> None:
        """Let every call return and give the memory back, whatever state the cache is in."""
        self.let_go()
        for pool in self.host_pools:
            pool.close()

    def _poison_host(self, pages: IntArray) -> None:
        """Poison pages, unless a rank was lost: calls may read on, as nobody gets pages again."""
        if not (self._is_built and self.cache.ranks_lost):
            self.host_bytes.poison(pages)

    def _build_pools(self, options: SystemOptions) -> None:
        self.pools = [
            _device_pool(geometry, options.num_device_pages, self.device)
            for geometry in options.geometries
        ]
        self.host_pools = [
            create_host_pool(
                geometry,
                num_pages=options.num_host_pages,
                layout=options.layout,
                pinned=False,
                huge_pages=False,
            )
            for geometry in options.geometries
        ]
        device_layout = None if self._cp is None else self._cp.device
        self.device_bytes = PoolBytes(self.pools, self.stamps, layout=device_layout)
        self.host_bytes = PoolBytes(self.host_pools, self.stamps, layout=self._host_layout)

    def _build_allocators(self, options: SystemOptions, coverage: Coverage) -> None:
        self.device_allocator: TightAllocator | SharedAllocator
        self.host_allocator: TightAllocator | SharedAllocator
        self.tight_allocators: list[TightAllocator] = []
        if self._cp is not None:
            self.device_allocator, self.host_allocator = (
                SharedAllocator(
                    layout,
                    poison=poison,
                    note_owners=partial(coverage.note, operation, State.START, Fault.OWNERS),
                )
                for layout, poison, operation in (
                    (self._cp.device, self.device_bytes.poison, Operation.LOAD),
                    (self._cp.host, self._poison_host, Operation.WRITE),
                )
            )
            return
        device = TightAllocator(options.num_device_pages, poison=self.device_bytes.poison)
        host = TightAllocator(options.num_host_pages, poison=self._poison_host)
        device.num_withheld, host.num_withheld = options.num_withheld
        self.device_allocator, self.host_allocator = device, host
        self.tight_allocators = [device, host]

    def _new_mover(self, coverage: Coverage) -> WatchedMover:
        pairs = [
            PoolPair(
                pool.geometry.kv_shape,
                BreakableEngine(
                    pool,
                    host_pool,
                    number=number,
                    device_bytes=self.device_bytes,
                    host_bytes=self.host_bytes,
                    breaking=self.breaking,
                    coverage=coverage,
                ),
                host_pool,
            )
            for number, (pool, host_pool) in enumerate(
                zip(self.pools, self.host_pools, strict=True)
            )
        ]
        mover = LocalMover(
            device=self.device,
            pairs=pairs,
            counter=self.counter,
            storage=StorageTier(
                host_pools=self.host_pools,
                factory=self.factory,
                clock=self.clock,
                create_executor=lambda _config, _clock: self.executor.open(),
                cp_host_layout=self._host_layout,
            ),
            clock=self.clock,
            cp=self._cp,
        )
        return WatchedMover(
            mover,
            device=self.device,
            executor=self.executor,
            layers=[
                (number, layer)
                for number, pair in enumerate(pairs)
                for layer in range(pair.engine.num_layers)
            ],
            coverage=coverage,
            host_layout=self._host_layout,
        )


def _shared_pages(options: SystemOptions, rank: int, num_ranks: int) -> CpLayouts:
    """Return which of the pages of both tiers this rank has."""
    device, host = (
        CpSharedKVLayout(
            cp_rank=rank,
            cp_size=num_ranks,
            num_physical_pages=num_pages,
            page_size=GEOMETRY.page_size,
        )
        for num_pages in (options.num_device_pages, options.num_host_pages)
    )
    return CpLayouts(device, host)


def _poison_freed(allocator: Allocator, poison: Callable[[IntArray], None]) -> None:
    """Poison pages that come back to a free list that the cache has put before its own."""
    if not isinstance(allocator, AgreedAllocator):
        return
    free = allocator.free

    def free_and_poison(pages: IntArray) -> None:
        free(pages)
        poison(pages)

    allocator.free = free_and_poison  # type: ignore[method-assign]


def _free_pages(allocator: Allocator) -> IntArray:
    if isinstance(allocator, AgreedAllocator):
        return np.concatenate([allocator.free_pages(), _free_pages(allocator.inner)])
    assert isinstance(allocator, (PageAllocator, CpPageAllocator))
    return allocator.free_pages()


def _device_pool(
    geometry: PageGeometry, num_pages: int, device: NamedStreams
) -> DeviceKVPool | DeviceRowPool:
    if isinstance(geometry, RowGeometry):
        return DeviceRowPool(geometry, num_pages=num_pages, torch_device=device.torch_device)
    assert isinstance(geometry, KVGeometry)
    return DeviceKVPool(geometry, num_pages=num_pages, torch_device=device.torch_device)


class _OneBackend(StorageBackendFactory):
    """Answers every name with a backend that fails as the executor's plans say.

    Attributes:
        refuses: whether it answers with an error instead.
    """

    def __init__(self, store: WatchedStore, executor: SimulatedExecutor) -> None:
        super().__init__()
        self._store = store
        self._executor = executor
        self.refuses = False

    def create_backend(self, name: str, config: HiCacheStorageConfig) -> HiCacheStorage:
        """See `StorageBackendFactory.create_backend`."""
        if self.refuses:
            raise StorageError(f"storage backend {name!r} refuses on purpose")
        self._store.namespace_digest = config.namespace.digest
        executor = self._executor
        faults = (executor.current_fault for _ in itertools.count())
        return FaultyStorage(
            MemoryStorage(config, store=self._store),
            faults=dict.fromkeys(Verb, faults),
            gates=dict.fromkeys(Verb, _Entry(executor)),
        )


class _Entry(Gate):
    """Where a call enters the backend, and perhaps stands still."""

    def __init__(self, executor: SimulatedExecutor) -> None:
        super().__init__()
        self._executor = executor

    def pass_through(self) -> None:
        """See `Gate.pass_through`."""
        self._executor.reach_point()
