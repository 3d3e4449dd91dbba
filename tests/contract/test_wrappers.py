"""Whatever stands around a backend keeps the storage contract."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from hicache.storage.circuit_breaker import CircuitBreakerStorage
from hicache.storage.instrumented import InstrumentedStorage
from hicache.storage.memory import MemoryPages, MemoryStorage, StoredPage
from hicache.storage.retrying import RetryingStorage
from hicache.storage.split_heads import SplitHeadsStorage
from hicache.storage.tiered import BackendTier, TieredStorage
from hicache.testing.backend_rig import prompt_keys
from hicache.testing.page_buffer import PageBuffer
from hicache.testing.storage_contract import DamageContract
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.storage.base import HiCacheStorage, HiCacheStorageConfig, Page


class NotingStorage(MemoryStorage):
    """Notes each page that it is asked for or given, and what that was chained from."""

    def __init__(
        self, config: HiCacheStorageConfig, *, store: MemoryPages, noted: set[tuple[str, ...]]
    ) -> None:
        super().__init__(config, store=store)
        self._noted = noted

    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        self._note("get", keys, parent_keys)
        return super().batch_get(keys, parent_keys, pages, deadline=deadline)

    def batch_set(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        self._note("set", keys, parent_keys)
        return super().batch_set(keys, parent_keys, pages, deadline=deadline)

    def _note(self, verb: str, keys: Sequence[bytes], parent_keys: Sequence[bytes]) -> None:
        # Batches whose lengths disagree are refused later on.
        for key, parent_key in zip(keys, parent_keys, strict=False):
            self._noted.add((verb, key.hex(), parent_key.hex()))


class OverMemory(DamageContract):
    """Wraps `MemoryStorage`; damage is done in every store."""

    num_stores = 1

    def test_backends_are_told_what_each_page_was_chained_from(
        self, backend: HiCacheStorage
    ) -> None:
        """The first one too, whose parent is in no batch."""
        parents, keys = prompt_keys(6)[1:5], prompt_keys(6)[2:]
        self._set(backend, keys, parent_keys=parents)
        self._get(backend, keys, parent_keys=parents)
        expected = {
            (verb, key.hex(), parent.hex())
            for verb in ("get", "set")
            for key, parent in zip(keys, parents, strict=True)
        }
        assert self.noted == expected

    @abstractmethod
    def wrap(
        self, backends: list[HiCacheStorage], config: HiCacheStorageConfig
    ) -> HiCacheStorage: ...

    @pytest.fixture(autouse=True)
    def _make_stores(self, config: HiCacheStorageConfig) -> None:
        self.stores = [MemoryPages() for _ in range(self.num_stores)]
        self.noted: set[tuple[str, ...]] = set()
        self.namespace_digest = config.namespace.digest

    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        return self.wrap([self.memory(config, store) for store in self.stores], config)

    def memory(self, config: HiCacheStorageConfig, store: MemoryPages) -> HiCacheStorage:
        return NotingStorage(config, store=store, noted=self.noted)

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

    def _find(self, store: MemoryPages, key: PageHash) -> StoredPage:
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


class TestSplitHeadsStorage(OverMemory):
    """Three groups of two pools; damage is done to the part of every group."""

    num_stores = 3
    page_bytes = 4998
    pool_bytes = (4950, 48)

    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        part = dataclasses.replace(config, page_bytes=self.page_bytes // self.num_stores)
        return self.wrap([self.memory(part, store) for store in self.stores], config)

    def wrap(self, backends: list[HiCacheStorage], config: HiCacheStorageConfig) -> HiCacheStorage:
        return SplitHeadsStorage(backends, config=config, pool_bytes=self.pool_bytes)

    def test_threads_that_write_one_key_leave_one_whole_page(self, backend: HiCacheStorage) -> None:
        """Whole is what each group has: groups may be another writer's, but never mixtures."""
        keys = [PageHash(bytes([number]) * 32) for number in range(20)]
        num_threads = 4

        def write_and_read(fill: int) -> None:
            for key in keys:
                source = PageBuffer.holding(bytes([fill]) * self.page_bytes)
                target = PageBuffer(self.page_bytes)
                (written,) = backend.batch_set([key], [b""], [source.page], deadline=1e9)
                (read,) = backend.batch_get([key], [b""], [target.page], deadline=1e9)
                assert written in (PageOutcome.OK, PageOutcome.PRESENT)
                assert read is PageOutcome.OK
                page, start = target.read(), 0
                parts: list[set[int]] = [set() for _ in range(self.num_stores)]
                for num_bytes in self.pool_bytes:
                    for part in parts:
                        part.update(page[start : start + num_bytes // self.num_stores])
                        start += num_bytes // self.num_stores
                assert all(len(part) == 1 for part in parts)

        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(write_and_read, range(num_threads)))


class TestSplitHeadsOfOneStore(OverMemory):
    """Groups in one store, as an engine has them, under names of their own."""

    page_bytes = 4998

    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        parts = [
            dataclasses.replace(
                config,
                page_bytes=self.page_bytes // 2,
                namespace=dataclasses.replace(
                    config.namespace, shard=f"{config.namespace.shard} heads={group}"
                ),
            )
            for group in range(2)
        ]
        self.namespace_digest = parts[1].namespace.digest
        [store] = self.stores
        return self.wrap([self.memory(part, store) for part in parts], config)

    def wrap(self, backends: list[HiCacheStorage], config: HiCacheStorageConfig) -> HiCacheStorage:
        return SplitHeadsStorage(backends, config=config, pool_bytes=[self.page_bytes])

    def test_threads_that_write_one_key_leave_one_whole_page(self, backend: HiCacheStorage) -> None:
        """See `TestSplitHeadsStorage`."""


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
