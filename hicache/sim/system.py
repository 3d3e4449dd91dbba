"""One rank put together from production parts, on simulated time, streams and workers."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from hicache.clock import ManualClock
from hicache.config import HiCacheConfig, HostPoolConfig, PrefetchConfig, StorageConfig
from hicache.controller import HiCacheController, LocalMover, PoolPair, StorageTier
from hicache.hiradix_cache import HiRadixCache
from hicache.layout import HostLayout, KVGeometry
from hicache.pools import DeviceKVPool, create_host_pool
from hicache.ranks import SingleRank
from hicache.sim.executor import CallPlan, SimulatedExecutor
from hicache.sim.faults import BreakableEngine, TightAllocator, WatchedStore
from hicache.sim.movement import WatchedMover
from hicache.sim.stamps import PoolBytes, Stamps
from hicache.sim.streams import NamedStreams
from hicache.storage import StorageBackendFactory
from hicache.storage.memory import MemoryStorage
from hicache.testing.faulty_storage import FaultyStorage, Gate, Verb
from hicache.transfer import LayerDoneCounter
from hicache.types import PrefetchPolicy, WritePolicy

if TYPE_CHECKING:
    import random

    from hicache.sim.coverage import Coverage
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig

__all__ = ["CALL_TIMEOUT_SECONDS", "GEOMETRY", "System", "SystemOptions"]

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32", page_size=2)
CALL_TIMEOUT_SECONDS = 1.0

_MAX_CALLS = 100
"""So many calls are more than a sound rank of this size ever needs at once."""

_GIVEN_UP_SECONDS = 1.5 * CALL_TIMEOUT_SECONDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemOptions:
    """Sizes and policies of one rank; so small that everything collides.

    Attributes:
        max_store_pages: bound of the store; None for no bound.
        max_abandoned: see `SimulatedExecutor`.
    """

    write_policy: WritePolicy
    write_by_layer: bool
    write_watermark: float
    prefetch_policy: PrefetchPolicy
    layout: HostLayout
    num_device_pages: int
    num_host_pages: int
    num_load_slots: int
    load_back_threshold_pages: int
    prefetch_threshold_pages: int
    max_inflight_prefetch_pages: int | None
    max_inflight_persist_operations: int
    batch_pages: int
    num_workers: int
    max_abandoned: int
    max_store_pages: int | None

    @classmethod
    def draw(cls, rng: random.Random) -> SystemOptions:
        """Return random options."""
        return cls(
            write_policy=rng.choice([*WritePolicy, *[WritePolicy.WRITE_THROUGH] * 2]),
            write_by_layer=rng.random() < 0.9,
            write_watermark=rng.choice([0.0, 0.1, 0.3]),
            prefetch_policy=rng.choice(list(PrefetchPolicy)),
            layout=rng.choice(list(HostLayout)),
            num_device_pages=rng.randint(6, 16),
            num_host_pages=rng.choice([5, 8, 12, 18, 24]),
            num_load_slots=rng.choice([1, 2, 5]),
            load_back_threshold_pages=rng.choice([0, 1, 1, 2]),
            prefetch_threshold_pages=rng.choice([0, 1, 1, 2]),
            max_inflight_prefetch_pages=rng.choice([None, 2, 4]),
            max_inflight_persist_operations=rng.choice([1, 2, 64]),
            batch_pages=rng.choice([1, 2, 3]),
            num_workers=rng.choice([1, 1, 1, 2, 3]),
            max_abandoned=rng.choice([0, 0, 0, 1, 8]),
            max_store_pages=rng.choice([None, 6]),
        )

    def config(self) -> HiCacheConfig:
        """Return them as the configuration of the cache."""
        page_size = GEOMETRY.page_size
        limits = (
            {}
            if self.max_store_pages is None
            else {"max_bytes": self.max_store_pages * GEOMETRY.page_bytes}
        )
        return HiCacheConfig(
            page_size=page_size,
            write_policy=self.write_policy,
            write_by_layer=self.write_by_layer,
            write_watermark=self.write_watermark,
            prefetch_policy=self.prefetch_policy,
            load_back_threshold_tokens=self.load_back_threshold_pages * page_size,
            num_load_slots=self.num_load_slots,
            host=HostPoolConfig(
                layout=self.layout,
                size_bytes=self.num_host_pages * GEOMETRY.page_bytes,
                huge_pages=False,
            ),
            storage=StorageConfig.from_mapping(
                {
                    "backend": "simulated",
                    "extra_config": limits,
                    "model_name": "simulated",
                    "weights_revision": "1",
                    "num_workers": self.num_workers,
                    "batch_pages": self.batch_pages,
                    "call_timeout_seconds": CALL_TIMEOUT_SECONDS,
                    "max_inflight_persist_operations": self.max_inflight_persist_operations,
                }
            ),
            prefetch=PrefetchConfig(
                threshold_tokens=self.prefetch_threshold_pages * page_size,
                max_inflight_pages=self.max_inflight_prefetch_pages,
            ),
        )


class System:
    """A `HiRadixCache` whose every movement waits to be told to go on.

    Args:
        options: sizes and policies.
        coverage: is told what happens.

    Attributes:
        stamps: what the bytes of each page have to be.
        device_bytes, host_bytes: what they are.
        is_closed: whether the memory of the host pool is gone.
    """

    def __init__(self, options: SystemOptions, coverage: Coverage) -> None:
        config = options.config()
        self.is_closed = False
        self.clock = ManualClock()
        self.device = NamedStreams()
        self.stamps = Stamps(GEOMETRY, options.layout)
        self.pool = DeviceKVPool(
            GEOMETRY,
            num_pages=options.num_device_pages,
            torch_device=self.device.torch_device,
        )
        self.host_pool = create_host_pool(
            GEOMETRY,
            num_pages=options.num_host_pages,
            layout=options.layout,
            pinned=False,
            huge_pages=False,
        )
        self.device_bytes = PoolBytes(self.pool, self.stamps)
        self.host_bytes = PoolBytes(self.host_pool, self.stamps)
        self.device_allocator = TightAllocator(
            options.num_device_pages, poison=self.device_bytes.poison
        )
        self.host_allocator = TightAllocator(options.num_host_pages, poison=self.host_bytes.poison)
        self.engine = BreakableEngine(
            self.pool,
            self.host_pool,
            device_bytes=self.device_bytes,
            host_bytes=self.host_bytes,
            coverage=coverage,
        )
        self.counter = LayerDoneCounter(
            self.device, num_layers=GEOMETRY.num_layers, num_slots=options.num_load_slots
        )
        self.pool.register_layer_transfer_counter(self.counter)
        self.executor = SimulatedExecutor(
            num_workers=options.num_workers,
            max_abandoned=options.max_abandoned,
            clock=self.clock,
            call_timeout_seconds=_GIVEN_UP_SECONDS,
            coverage=coverage,
        )
        self.store = WatchedStore(self.stamps, self.executor.reach_point)
        self.mover = WatchedMover(
            LocalMover(
                device=self.device,
                pairs=[PoolPair("kv", self.engine, self.host_pool)],
                counter=self.counter,
                storage=StorageTier(
                    host_pools=[self.host_pool],
                    factory=_OneBackend(self.store, self.executor),
                    clock=self.clock,
                    create_executor=lambda _config, _clock: self.executor,
                ),
                clock=self.clock,
            ),
            device=self.device,
            executor=self.executor,
            num_layers=GEOMETRY.num_layers,
            coverage=coverage,
        )
        self.pool.register_layer_end_notifier(self.mover.on_layer_end)
        self.cache = self._new_cache(config)

    @property
    def writes_by_layer(self) -> bool:
        """Whether writes are reserved while the host has room."""
        config = self.cache.config
        return config.write_by_layer and config.write_policy is WritePolicy.WRITE_THROUGH

    def let_go(self) -> None:
        """End every fault that lasts, and let every call that is under way return."""
        self.device.stalled.clear()
        self.device_allocator.num_withheld = self.host_allocator.num_withheld = 0
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
        self.host_pool.close()

    def _new_cache(self, config: HiCacheConfig) -> HiRadixCache:
        return HiRadixCache(
            HiCacheController(
                config,
                device_allocator=self.device_allocator,
                host_allocator=self.host_allocator,
                mover=self.mover,
                ranks=SingleRank(),
            ),
            clock=self.clock,
        )


class _OneBackend(StorageBackendFactory):
    """Answers every name with a backend that fails as the executor's plans say."""

    def __init__(self, store: WatchedStore, executor: SimulatedExecutor) -> None:
        super().__init__()
        self._store = store
        self._executor = executor

    def create_backend(self, name: str, config: HiCacheStorageConfig) -> HiCacheStorage:
        """See `StorageBackendFactory.create_backend`."""
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
