"""`PageStore` keeps the storage contract."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import pytest

from hicache.storage.page_store import PageStore, list_pages
from hicache.storage.page_store.eviction_policies import POLICY_NAMES
from hicache.testing.bounded_contract import BoundedContract
from hicache.testing.storage_contract import DamageContract, StorageContract

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.storage.base import HiCacheStorage, HiCacheStorageConfig
    from hicache.storage.page_store import StoredPage
    from hicache.types import PageHash

BLOCK_BYTES = 4096


class TestPageStore(StorageContract):
    """C030 (empty batches), C099."""

    @pytest.fixture(autouse=True)
    def _make_root(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        return PageStore(dataclasses.replace(config, extra_config={"path": str(self.root)}))


class TestPageStoreWithDirectIo(TestPageStore):
    """Likewise past the page cache, with memory that is not aligned for it."""

    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        options = {"path": str(self.root), "direct_io": True, "fsync": True}
        return PageStore(dataclasses.replace(config, extra_config=options))


class TestPageStoreWithLittleRoom(BoundedContract):
    """Whatever goes first."""

    @pytest.fixture(autouse=True, params=POLICY_NAMES)
    def _choose(self, fast_path: Path, request: pytest.FixtureRequest) -> None:
        self.root, self.policy = fast_path, request.param

    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        options = {
            "path": str(self.root),
            "min_free_bytes": 0,
            "max_bytes": 1_500_000,
            "eviction_policy": self.policy,
        }
        return PageStore(dataclasses.replace(config, extra_config=options))


class TestPageStoreInSmallSegments(DamageContract):
    """Each page ends a file of its own, so that it can be cut short; a group has many extents."""

    @pytest.fixture(autouse=True)
    def _make_root(self, tmp_path: Path) -> None:
        self.root = tmp_path

    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        return PageStore(
            dataclasses.replace(config, extra_config={"path": str(self.root)}),
            segment_bytes=-(-self.page_bytes // BLOCK_BYTES) * BLOCK_BYTES,
        )

    def corrupt(self, key: PageHash) -> None:
        page = self._find(key)
        with open(page.file, "r+b") as file:
            file.seek(page.offset + 1000)
            byte = file.read(1)[0]
            file.seek(page.offset + 1000)
            file.write(bytes([byte ^ 1]))

    def truncate(self, key: PageHash) -> None:
        page = self._find(key)
        os.truncate(page.file, page.offset + page.num_bytes - 1)

    def _find(self, key: PageHash) -> StoredPage:
        (page,) = (page for page in list_pages(str(self.root)) if page.key == key)
        return page
