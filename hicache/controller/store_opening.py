"""Opening the store of one rank."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeAlias

from hicache.controller.shards import is_replicated, stored_shards
from hicache.storage import HiCacheStorageConfig
from hicache.storage.circuit_breaker import CircuitBreakerStorage
from hicache.storage.instrumented import InstrumentedStorage
from hicache.storage.retrying import RetryingStorage
from hicache.storage.split_heads import SplitHeadsStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.clock import Clock
    from hicache.config import RankPlacement, StorageConfig
    from hicache.pools import CpLayout, HostKVPool
    from hicache.storage import HiCacheStorage, StorageBackendFactory

__all__ = ["StoreOpener", "WrapBackend", "resilient_storage"]

WrapBackend: TypeAlias = "Callable[[HiCacheStorage, StorageConfig, Clock], HiCacheStorage]"
"""Returns a backend with something around it."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreOpener:
    """Knows all that a rank's store depends on but its configuration; see `StorageTier`."""

    host_pools: Sequence[HostKVPool]
    factory: StorageBackendFactory
    clock: Clock
    placement: RankPlacement
    cp_host_layout: CpLayout | None
    eviction_policy: str | None
    wrap_backend: WrapBackend | None

    def open(self, config: StorageConfig) -> InstrumentedStorage:
        """Return the backend with all that stands around it, ready for work.

        Blocks as the backend does.

        Raises:
            ConfigError: the backend cannot be had, or pages of this rank have no name or cannot be
                split as they have to.
        """
        bare = self._create_backend(config)
        wrapped = self.wrap_backend(bare, config, self.clock) if self.wrap_backend else bare
        backend = InstrumentedStorage(wrapped, clock=self.clock)
        try:
            backend.register_memory(
                [region for pool in self.host_pools for region in pool.regions()]
            )
        except BaseException:
            backend.close()
            raise
        return backend

    def _create_backend(self, config: StorageConfig) -> HiCacheStorage:
        """Return the backend, or one for each group of heads as one."""
        geometries = [pool.geometry for pool in self.host_pools]
        placement = self.placement
        if self.cp_host_layout is not None:
            # A page is whole on its owner, and the next time another rank may own it.
            placement = dataclasses.replace(placement, cp_rank=0, cp_size=1)
        shards = stored_shards(config, geometries, self.host_pools[0].layout, placement)
        configs = [
            HiCacheStorageConfig(
                namespace=shard.namespace,
                page_bytes=sum(shard.pool_bytes),
                extra_config=config.extra_config,
                clock=self.clock,
                placement=self.placement,
                is_mla_model=is_replicated(geometries),
                tp_lcm_size=config.tp_lcm_size,
                eviction_policy=self.eviction_policy,
            )
            for shard in shards
        ]
        with ExitStack() as undo:
            backends = []
            for one in configs:
                backends.append(self.factory.create_backend(config.backend, one))
                undo.callback(backends[-1].close)
            storage = backends[0]
            if len(backends) > 1:
                storage = SplitHeadsStorage(
                    backends,
                    config=dataclasses.replace(
                        configs[0], page_bytes=sum(geometry.page_bytes for geometry in geometries)
                    ),
                    pool_bytes=[geometry.page_bytes for geometry in geometries],
                )
            undo.pop_all()
        return storage
