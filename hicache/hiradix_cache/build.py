"""Puts a cache together in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.clock import MonotonicClock
from hicache.controller import HiCacheController, LocalMover, PoolPair, StorageTier, thread_executor
from hicache.errors import ConfigError
from hicache.hiradix_cache.cache import HiRadixCache
from hicache.pools import PageAllocator, create_host_pool, host_pool_pages
from hicache.ranks import SingleRank
from hicache.storage import StorageBackendFactory
from hicache.transfer import LayerDoneCounter, TorchTransferEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.clock import Clock
    from hicache.config import HiCacheConfig, StorageConfig
    from hicache.controller import Executor
    from hicache.device import Device
    from hicache.pools import Allocator, DevicePool
    from hicache.ranks import RankGroup

__all__ = ["create_hiradix_cache", "create_local_mover"]


def create_local_mover(
    config: HiCacheConfig,
    *,
    device: Device,
    device_pool: DevicePool,
    num_host_pages: int,
    clock: Clock,
    factory: StorageBackendFactory | None = None,
    create_executor: Callable[[StorageConfig, Clock], Executor] = thread_executor,
) -> tuple[LocalMover, LayerDoneCounter]:
    """Allocate the host pool and return the moving side over it, with the counter of its loads.

    The counter is registered with the device pool, so that the model's layers wait.
    """
    geometry = device_pool.geometry
    host_pool = create_host_pool(
        geometry,
        num_pages=num_host_pages,
        layout=config.host.layout,
        pinned=device_pool.torch_device.type == "cuda",
        huge_pages=config.host.huge_pages,
    )
    counter = LayerDoneCounter(
        device, num_layers=geometry.num_layers, num_slots=config.num_load_slots
    )
    device_pool.register_layer_transfer_counter(counter)
    mover = LocalMover(
        device=device,
        pairs=[PoolPair("kv", TorchTransferEngine(device_pool, host_pool), host_pool)],
        counter=counter,
        storage=StorageTier(
            host_pools=[host_pool],
            factory=factory or StorageBackendFactory.default(),
            clock=clock,
            create_executor=create_executor,
        ),
        clock=clock,
    )
    return mover, counter


def create_hiradix_cache(
    config: HiCacheConfig,
    *,
    device: Device,
    device_pool: DevicePool,
    device_allocator: Allocator,
    clock: Clock | None = None,
    ranks: RankGroup | None = None,
    factory: StorageBackendFactory | None = None,
    create_executor: Callable[[StorageConfig, Clock], Executor] = thread_executor,
) -> tuple[HiRadixCache, LayerDoneCounter]:
    """Return a cache over the engine's device pool, and the counter its model's batches name.

    Args:
        config: sizes and policies.
        device: where the pool is.
        device_pool: the engine's KV tensors.
        device_allocator: the free list of that pool, shared with the engine.
        clock: for deadlines and durations.
        ranks: with whom outcomes are agreed; by default this rank is alone.
        factory: finds storage backends by name.
        create_executor: what storage work runs on.

    Raises:
        ConfigError: the options do not fit the pool or each other; nothing is left behind.
        CapacityError: the machine cannot give the host pool.
    """
    geometry = device_pool.geometry
    if geometry.page_size != config.page_size:
        raise ConfigError(
            f"page_size is {config.page_size} in the configuration and {geometry.page_size} in the "
            "device pool; give both the same"
        )
    num_host_pages = host_pool_pages(
        geometry,
        device_pages=device_pool.num_pages,
        ratio=config.host.ratio,
        size_bytes=config.host.size_bytes,
    )
    mover, counter = create_local_mover(
        config,
        device=device,
        device_pool=device_pool,
        num_host_pages=num_host_pages,
        clock=clock or MonotonicClock(),
        factory=factory,
        create_executor=create_executor,
    )
    try:
        controller = HiCacheController(
            config,
            device_allocator=device_allocator,
            host_allocator=PageAllocator(num_host_pages),
            mover=mover,
            ranks=ranks or SingleRank(),
        )
    except BaseException:
        mover.close(timeout_seconds=5.0)
        raise
    return HiRadixCache(controller), counter
