"""Puts a cache together in one process."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from hicache.clock import MonotonicClock
from hicache.controller import (
    HiCacheController,
    LocalMover,
    PoolPair,
    StorageTier,
    resilient_storage,
    thread_executor,
)
from hicache.errors import ConfigError
from hicache.hiradix_cache.cache import HiRadixCache
from hicache.hiradix_cache.layer_kinds import require_restorable
from hicache.pools import (
    CpLayouts,
    CpPageAllocator,
    KnowsOwners,
    PageAllocator,
    ReportsLayerEnds,
    create_host_pool,
    host_pool_pages,
)
from hicache.radix import create_policy
from hicache.ranks import SingleRank
from hicache.storage import StorageBackendFactory
from hicache.transfer import LayerDoneCounter, TorchTransferEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache.clock import Clock
    from hicache.config import HiCacheConfig, RankPlacement, StorageConfig
    from hicache.controller import Executor
    from hicache.device import Device
    from hicache.hiradix_cache.layer_kinds import LayerKind
    from hicache.pools import Allocator, CpSharedKVLayout, DevicePool
    from hicache.ranks import RankGroup

__all__ = ["create_hiradix_cache", "create_local_mover"]


def create_local_mover(
    config: HiCacheConfig,
    *,
    device: Device,
    device_pool: DevicePool,
    num_host_pages: int,
    side_pools: Sequence[DevicePool] = (),
    clock: Clock,
    placement: RankPlacement | None = None,
    cp: CpLayouts | None = None,
    factory: StorageBackendFactory | None = None,
    create_executor: Callable[[StorageConfig, Clock], Executor] = thread_executor,
) -> tuple[LocalMover, LayerDoneCounter]:
    """Allocate the host pools and return the moving side over them, with the counter of its loads.

    The counter is registered with the device pools, so that the model's layers wait, and so is the
    mover with those that report the end of layers. Arguments and errors are as for
    `create_hiradix_cache`.
    """
    device_pools = (device_pool, *side_pools)
    _require_same_pages(device_pools)
    with ExitStack() as undo:
        pairs = []
        for pool in device_pools:
            host_pool = create_host_pool(
                pool.geometry,
                num_pages=num_host_pages,
                layout=config.host.layout,
                pinned=pool.torch_device.type == "cuda",
                huge_pages=config.host.huge_pages,
            )
            undo.callback(host_pool.close)
            engine = TorchTransferEngine(pool, host_pool)
            pairs.append(PoolPair(pool.geometry.kv_shape, engine, host_pool))
        counter = LayerDoneCounter(
            device,
            num_layers=max(pair.engine.num_layers for pair in pairs),
            num_slots=config.num_load_slots,
        )
        mover = LocalMover(
            device=device,
            pairs=pairs,
            counter=counter,
            storage=StorageTier(
                host_pools=[pair.host_pool for pair in pairs],
                factory=factory or StorageBackendFactory.default(),
                clock=clock,
                placement=placement,
                cp_host_layout=None if cp is None else cp.host,
                eviction_policy=config.eviction_policy,
                create_executor=create_executor,
                wrap_backend=resilient_storage,
            ),
            clock=clock,
            cp=cp,
        )
        undo.pop_all()
    for source, pool in enumerate(device_pools):
        pool.register_layer_transfer_counter(counter)
        if isinstance(pool, ReportsLayerEnds):
            pool.register_layer_end_notifier(partial(mover.on_layer_end, source=source))
    return mover, counter


def create_hiradix_cache(
    config: HiCacheConfig,
    *,
    device: Device,
    device_pool: DevicePool,
    device_allocator: Allocator,
    side_pools: Sequence[DevicePool] = (),
    clock: Clock | None = None,
    ranks: RankGroup | None = None,
    placement: RankPlacement | None = None,
    cp_layout: CpSharedKVLayout | None = None,
    layer_kinds: Iterable[LayerKind | str] = (),
    factory: StorageBackendFactory | None = None,
    create_executor: Callable[[StorageConfig, Clock], Executor] = thread_executor,
) -> tuple[HiRadixCache, LayerDoneCounter]:
    """Return a cache over the engine's device pool, and the counter its model's batches name.

    Args:
        config: sizes and policies.
        device: where the pool is.
        device_pool: the engine's KV tensors.
        device_allocator: the free list of that pool, shared with the engine.
        side_pools: what the model keeps beside its KV under the same page ids: draft KV, an
            indexer's rows, layers with other heads. It moves and is stored with the KV as one; a
            hit has all of it. Each pool counts its own layers.
        clock: for deadlines and durations.
        ranks: with whom outcomes are agreed; none means alone.
        placement: which of the engine's ranks this is, for what it stores.
        cp_layout: how context-parallel ranks share the pages of the device pool. Then
            `device_allocator` knows owners, like `CpPageAllocator`, and all reach one store.
        layer_kinds: kinds of the model's layers, where not all are full attention.
        factory: finds storage backends by name.
        create_executor: what storage work runs on.

    Raises:
        ConfigError: options, pools and kinds of layers do not fit each other; nothing is left.
        CapacityError: the machine cannot give the host pools.
    """
    require_restorable(layer_kinds)
    create_policy(config.eviction_policy)  # a ConfigError before anything is allocated
    _require_page_size(config, device_pool)
    num_host_pages = _num_host_pages(config, (device_pool, *side_pools))
    cp = None
    if cp_layout is not None:
        cp = _shared_by_ranks(cp_layout, device_pool, device_allocator, num_host_pages)
    mover, counter = create_local_mover(
        config,
        device=device,
        device_pool=device_pool,
        num_host_pages=num_host_pages,
        side_pools=side_pools,
        clock=clock or MonotonicClock(),
        placement=placement,
        cp=cp,
        factory=factory,
        create_executor=create_executor,
    )
    try:
        controller = HiCacheController(
            config,
            device_allocator=device_allocator,
            host_allocator=CpPageAllocator(cp.host) if cp else PageAllocator(num_host_pages),
            mover=mover,
            ranks=ranks or SingleRank(),
        )
    except BaseException:
        mover.close(timeout_seconds=5.0)
        _unregister((device_pool, *side_pools))
        raise
    return HiRadixCache(controller, clock=clock), counter


def _num_host_pages(config: HiCacheConfig, device_pools: Sequence[DevicePool]) -> int:
    return host_pool_pages(
        sum(pool.geometry.page_bytes for pool in device_pools),
        device_pages=device_pools[0].num_pages,
        ratio=config.host.ratio,
        size_bytes=config.host.size_bytes,
    )


def _unregister(device_pools: Sequence[DevicePool]) -> None:
    for pool in device_pools:
        pool.register_layer_transfer_counter(None)
        if isinstance(pool, ReportsLayerEnds):
            pool.register_layer_end_notifier(None)


def _require_page_size(config: HiCacheConfig, device_pool: DevicePool) -> None:
    page_size = device_pool.geometry.page_size
    if page_size != config.page_size:
        raise ConfigError(
            f"page_size is {config.page_size} in the configuration and {page_size} in the device "
            "pool; give both the same"
        )


def _shared_by_ranks(
    layout: CpSharedKVLayout, device_pool: DevicePool, allocator: Allocator, num_host_pages: int
) -> CpLayouts:
    """Return the layouts of both tiers; `ConfigError` unless pool and free list fit `layout`."""
    if (layout.num_physical_pages, layout.page_size) != (
        device_pool.num_pages,
        device_pool.geometry.page_size,
    ):
        raise ConfigError(
            f"cp_layout speaks of {layout.num_physical_pages} pages of {layout.page_size} tokens "
            f"a rank, and the device pool has {device_pool.num_pages} of "
            f"{device_pool.geometry.page_size}; make the layout from the pool"
        )
    if not isinstance(allocator, KnowsOwners) or allocator.num_pages != layout.num_pages:
        raise ConfigError(
            f"with cp_layout the device allocator gives {layout.num_pages} logical pages and knows "
            "their owners; use CpPageAllocator(cp_layout), or offer what KnowsOwners names"
        )
    return CpLayouts(layout, dataclasses.replace(layout, num_physical_pages=num_host_pages))


def _require_same_pages(device_pools: Sequence[DevicePool]) -> None:
    """Raise `ConfigError` unless each page id names as many tokens in every pool."""
    sizes = {(pool.num_pages, pool.geometry.page_size) for pool in device_pools}
    if len(sizes) > 1:
        found = ", ".join(f"{pages} pages of {tokens} tokens" for pages, tokens in sorted(sizes))
        raise ConfigError(
            f"one page id names a page in every device pool, and they have {found}; give a side "
            "pool the size of the KV pool"
        )
