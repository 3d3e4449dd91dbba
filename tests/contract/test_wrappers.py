"""Whatever stands around a backend keeps the storage contract."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import pytest

from hicache.storage.circuit_breaker import CircuitBreakerStorage
from hicache.storage.instrumented import InstrumentedStorage
from hicache.storage.memory import MemoryStorage, PageStore, StoredPage
from hicache.storage.retrying import RetryingStorage
from hicache.storage.tiered import BackendTier, TieredStorage
from hicache.testing.storage_contract import DamageContract

if TYPE_CHECKING:
    from hicache.storage.base import HiCacheStorage, HiCacheStorageConfig
    from hicache.types import PageHash


class OverMemory(DamageContract):
    """Wraps `MemoryStorage`; damage is done in every store."""

    num_stores = 1

    @abstractmethod
    def wrap(
        self, backends: list[HiCacheStorage], config: HiCacheStorageConfig
    ) -> HiCacheStorage: ...

    @pytest.fixture(autouse=True)
    def _make_stores(self, config: HiCacheStorageConfig) -> None:
        self.stores = [PageStore() for _ in range(self.num_stores)]
        self.namespace_digest = config.namespace.digest

    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        return self.wrap([MemoryStorage(config, store=store) for store in self.stores], config)

    def corrupt(self, key: PageHash) -> None:
        for store in self.stores:
            payload, checksum = self._find(store, key)
            changed = bytes([payload[0] ^ 1]) + payload[1:]
            store.put(self.namespace_digest, key, StoredPage(changed, checksum), max_bytes=None)

    def truncate(self, key: PageHash) -> None:
        for store in self.stores:
            payload, checksum = self._find(store, key)
            store.put(
                self.namespace_digest, key, StoredPage(payload[:-1], checksum), max_bytes=None
            )

    def _find(self, store: PageStore, key: PageHash) -> StoredPage:
        stored = store.find(self.namespace_digest, key)
        assert stored is not None
        return stored


class TestInstrumentedStorage(OverMemory):
    def wrap(self, backends: list[HiCacheStorage], config: HiCacheStorageConfig) -> HiCacheStorage:
        return InstrumentedStorage(backends[0], clock=config.clock)


class TestRetryingStorage(OverMemory):
    def wrap(self, backends: list[HiCacheStorage], config: HiCacheStorageConfig) -> HiCacheStorage:
        return RetryingStorage(backends[0], max_attempts=2, clock=config.clock)


class TestCircuitBreakerStorage(OverMemory):
    def wrap(self, backends: list[HiCacheStorage], config: HiCacheStorageConfig) -> HiCacheStorage:
        return CircuitBreakerStorage(
            backends[0], max_failures=5, cooldown_seconds=1.0, clock=config.clock
        )


class TestTieredStorage(OverMemory):
    num_stores = 3

    def wrap(self, backends: list[HiCacheStorage], config: HiCacheStorageConfig) -> HiCacheStorage:
        tiers = [
            BackendTier(name=str(number), storage=backend)
            for number, backend in enumerate(backends)
        ]
        return TieredStorage(tiers, config=config)


class TestAllOfThem(OverMemory):
    """As the cache puts them together, around two tiers of which the first is only filled."""

    num_stores = 2

    def wrap(self, backends: list[HiCacheStorage], config: HiCacheStorageConfig) -> HiCacheStorage:
        storage: HiCacheStorage = TieredStorage(
            [
                BackendTier(name="fast", storage=backends[0], required=False),
                BackendTier(name="large", storage=backends[1]),
            ],
            config=config,
        )
        storage = RetryingStorage(storage, max_attempts=2, clock=config.clock)
        storage = CircuitBreakerStorage(
            storage, max_failures=5, cooldown_seconds=1.0, clock=config.clock
        )
        return InstrumentedStorage(storage, clock=config.clock)
