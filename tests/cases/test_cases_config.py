"""Acceptance cases: every backend that can be named keeps the same contract."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from hicache.storage import HiCacheStorage, StorageBackendFactory, StorageCapabilities
from hicache.storage.memory import MemoryPages, MemoryStorage
from hicache.testing.storage_contract import StorageContract

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.storage import HiCacheStorageConfig, Page, StorageStats
    from hicache.types import PageHash, PageOutcome


class PluginStorage(HiCacheStorage):
    """A plugin with the methods that the contract requires and no others."""

    store = MemoryPages()

    def __init__(self, config: HiCacheStorageConfig) -> None:
        self._inner = MemoryStorage(config, store=PluginStorage.store)

    @property
    def capabilities(self) -> StorageCapabilities:
        return StorageCapabilities(durable=True, shared_between_processes=False)

    def batch_exists(self, keys: Sequence[PageHash]) -> int:
        return self._inner.batch_exists(keys)

    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        return self._inner.batch_get(keys, parent_keys, pages, deadline=deadline)

    def batch_set(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        return self._inner.batch_set(keys, parent_keys, pages, deadline=deadline)

    def register_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        self._inner.register_memory(regions)

    def clear(self) -> int:
        return self._inner.clear()

    def stats(self) -> StorageStats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()


class TestPluginStorage(StorageContract):
    """C099: a dynamic plugin with the required methods only."""

    @pytest.fixture(autouse=True)
    def _start_empty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PluginStorage, "store", MemoryPages())

    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        named = {
            "backend_name": "plugin",
            "module_path": __name__,
            "class_name": "PluginStorage",
        }
        return StorageBackendFactory.default().create_backend(
            "dynamic", dataclasses.replace(config, extra_config=named)
        )


def test_every_backend_that_can_be_named_is_tested_against_the_contract() -> None:
    """C099: `file`, `memory` and `tiered` in tests/contract, plugins here."""
    names = StorageBackendFactory.default().backend_names
    assert names == ["dynamic", "file", "memory", "tiered"]
