"""`MemoryStorage` keeps the storage contract."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from hicache.storage.memory import MemoryPages, MemoryStorage, StoredPage
from hicache.testing.bounded_contract import BoundedContract
from hicache.testing.storage_contract import DamageContract

if TYPE_CHECKING:
    from hicache.storage.base import HiCacheStorage, HiCacheStorageConfig
    from hicache.types import PageHash


class TestMemoryStorage(DamageContract):
    """C030 (empty batches), C099."""

    @pytest.fixture(autouse=True)
    def _make_store(self, config: HiCacheStorageConfig) -> None:
        self.store = MemoryPages()
        self.namespace_digest = config.namespace.digest

    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        return MemoryStorage(config, store=self.store)

    def corrupt(self, key: PageHash) -> None:
        payload, checksum = self._find(key)
        changed = bytes([payload[0] ^ 1]) + payload[1:]
        self._put(key, StoredPage(changed, checksum))

    def truncate(self, key: PageHash) -> None:
        payload, checksum = self._find(key)
        self._put(key, StoredPage(payload[:-1], checksum))

    def _find(self, key: PageHash) -> StoredPage:
        stored = self.store.find(self.namespace_digest, key)
        assert stored is not None
        return stored

    def _put(self, key: PageHash, page: StoredPage) -> None:
        self.store.put(self.namespace_digest, key, page, max_bytes=None)


class TestMemoryStorageWithLittleRoom(BoundedContract):
    """It refuses what does not fit."""

    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        options = {"max_bytes": 100 * self.page_bytes}
        return MemoryStorage(dataclasses.replace(config, extra_config=options))
